//! Redaction: the permanent removal of the content of one message.
//!
//! The message keeps its place, its role and its tool calls, so that lists with it stay valid for every provider. Everything
//! else becomes [`PLACEHOLDER`].

use super::api_key::KeyId;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// The content of a redacted message.
pub const PLACEHOLDER: &str = "[redacted]";

/// The circumstances of a redaction, stored with the message as JSON. A field that is added later must be optional.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedactionMark {
    #[serde(with = "time::serde::rfc3339")]
    pub redacted_at: OffsetDateTime,
    /// The API key that requested it; `None` without keys, and after an import.
    pub key_id: Option<String>,
    /// Number of other sessions in which the same message was redacted with it.
    pub copies: i64,
}

impl RedactionMark {
    pub fn new(redacted_at: OffsetDateTime, key: Option<&KeyId>, copies: i64) -> Self {
        Self { redacted_at, key_id: key.map(|key| key.as_str().to_owned()), copies }
    }

    /// Returns the mark of a message that was redacted before it was exported.
    pub fn imported(redacted_at: OffsetDateTime) -> Self {
        Self::new(redacted_at, None, 0)
    }
}

/// The record of a redaction. It contains nothing of the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redaction {
    /// The message.
    pub seq: i64,
    pub mark: RedactionMark,
    /// The revision that the redaction appended.
    pub revision: i64,
    /// The cursor of that revision.
    pub cursor: i64,
    /// The revisions that lost their texts, because these may contain the message.
    pub redacted_revisions: Vec<i64>,
}
