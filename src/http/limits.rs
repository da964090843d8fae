//! What a request may bring: the limits as the settings have them, and the checks of single values.
//!
//! Every refusal names the setting and its value. How many requests there may be is `admission`'s part.

use crate::domain::limits::{SizeLimits, check_size};
use crate::domain::message::Message;
use crate::domain::validation::FieldError;
use std::time::Duration;

/// The settings `limits.*` and `server.*_timeout`, under their names there.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "`config::Limits` and `config::Server` say what each is")]
pub struct Limits {
    pub sizes: SizeLimits,
    pub max_body_bytes: usize,
    pub max_import_bytes: u64,
    pub max_body_bytes_in_flight: usize,
    pub max_json_depth: usize,
    pub max_messages_per_exchange: usize,
    pub max_system_prompt_bytes: usize,
    pub requests_per_second: u32,
    pub request_burst: u32,
    pub max_requests_in_flight: usize,
    pub max_concurrent_requests: usize,
    pub queue_timeout: Duration,
    pub read_timeout: Duration,
    pub request_timeout: Duration,
}

impl Limits {
    /// For tests: all are as small as they can be.
    #[cfg(test)]
    pub(super) fn tiny() -> Self {
        let second = Duration::from_secs(1);
        Self {
            sizes: SizeLimits { max_message_bytes: 1, max_metadata_bytes: 1 },
            max_body_bytes: 1,
            max_import_bytes: 1,
            max_body_bytes_in_flight: 1,
            max_json_depth: 1,
            max_messages_per_exchange: 1,
            max_system_prompt_bytes: 1,
            requests_per_second: 1,
            request_burst: 1,
            max_requests_in_flight: 1,
            max_concurrent_requests: 1,
            queue_timeout: second,
            read_timeout: second,
            request_timeout: second,
        }
    }

    /// A message at `field` of the request.
    pub(super) fn message(&self, field: &str, message: &Message) -> Result<(), FieldError> {
        self.sizes.message(field, message)
    }

    /// Metadata, as JSON.
    pub(super) fn metadata(&self, json: &str) -> Result<(), FieldError> {
        self.sizes.metadata("metadata", json)
    }

    /// The system prompt of a context request.
    pub(super) fn system_prompt(&self, text: &str) -> Result<(), FieldError> {
        let most = self.max_system_prompt_bytes;
        check_size("system_prompt", text.len(), most, "limits.max_system_prompt_bytes")
    }

    /// What a context request has the system message say of skills.
    pub(super) fn skills(&self, text: &str) -> Result<(), FieldError> {
        let most = self.max_system_prompt_bytes;
        check_size("skills", text.len(), most, "limits.max_system_prompt_bytes")
    }

    /// The number of messages of an exchange.
    pub(super) fn messages(&self, count: usize) -> Result<(), FieldError> {
        let most = self.max_messages_per_exchange;
        if count <= most {
            return Ok(());
        }
        let detail = format!(
            "has {count} messages, at most {most} are allowed (limits.max_messages_per_exchange): send several exchanges"
        );
        Err(FieldError { field: "messages".to_owned(), detail })
    }
}
