//! What a request may bring: the limits as the settings have them, and the checks of single values.
//!
//! Every refusal names the setting and its value. How many requests there may be is `admission`'s part.

use super::error::FieldError;
use crate::domain::message::Message;
use std::time::Duration;

/// The settings `limits.*` and `server.*_timeout`, under their names there.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "`config::Limits` and `config::Server` say what each is")]
pub struct Limits {
    pub max_body_bytes: usize,
    pub max_json_levels: usize,
    pub max_message_bytes: usize,
    pub max_messages_per_exchange: usize,
    pub max_metadata_bytes: usize,
    pub max_system_prompt_bytes: usize,
    pub requests_per_second: u32,
    pub request_burst: u32,
    pub max_requests_in_flight: usize,
    pub max_requests_at_work: usize,
    pub max_wait: Duration,
    pub read_timeout: Duration,
    pub request_timeout: Duration,
}

impl Limits {
    /// A message at `field` of the request.
    pub(super) fn message(&self, field: &str, message: &Message) -> Result<(), FieldError> {
        within(field, message.json().len(), self.max_message_bytes, "limits.max_message_bytes")
    }

    /// Metadata, as JSON.
    pub(super) fn metadata(&self, json: &str) -> Result<(), FieldError> {
        within("metadata", json.len(), self.max_metadata_bytes, "limits.max_metadata_bytes")
    }

    /// The system prompt of a context request.
    pub(super) fn system_prompt(&self, text: &str) -> Result<(), FieldError> {
        let most = self.max_system_prompt_bytes;
        within("system_prompt", text.len(), most, "limits.max_system_prompt_bytes")
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

fn within(field: &str, bytes: usize, most: usize, setting: &str) -> Result<(), FieldError> {
    if bytes <= most {
        return Ok(());
    }
    let detail = format!("has {bytes} bytes, at most {most} are allowed ({setting}): shorten it");
    Err(FieldError { field: field.to_owned(), detail })
}
