//! Checks of single values of a request against the settings `limits.*`. Each error names the setting and its value.

use crate::config::Limits;
use crate::domain::limits::{SizeLimits, check_size};
use crate::domain::message::{Message, minify_json};
use crate::domain::validation::FieldError;
use serde_json::value::RawValue;

/// Running requests per core. More of them share statements better; each holds at most its body and its response.
const CONCURRENT_REQUESTS_PER_CORE: usize = 64;

impl Limits {
    /// Returns `max_concurrent_requests`, or the default for this machine.
    pub(crate) fn concurrent_requests(&self) -> usize {
        if self.max_concurrent_requests > 0 {
            return self.max_concurrent_requests;
        }
        std::thread::available_parallelism().map_or(1, usize::from) * CONCURRENT_REQUESTS_PER_CORE
    }

    pub(crate) fn sizes(&self) -> SizeLimits {
        SizeLimits { max_message_bytes: self.max_message_bytes, max_metadata_bytes: self.max_metadata_bytes }
    }

    pub(super) fn message(&self, field: &str, message: &Message) -> Result<(), FieldError> {
        self.sizes().check_message(field, message)
    }

    /// Returns the metadata of a session without white space. They must be a JSON object.
    pub(super) fn metadata(&self, metadata: &RawValue) -> Result<String, FieldError> {
        let json = minify_json(metadata.get());
        if !json.starts_with('{') {
            return Err(FieldError::new("metadata", "must be a JSON object"));
        }
        self.sizes().check_metadata("metadata", &json)?;
        Ok(json)
    }

    pub(super) fn system_prompt(&self, text: &str) -> Result<(), FieldError> {
        self.system_text("system_prompt", text)
    }

    /// Checks the part of the system message that the skills of a context request make up.
    pub(super) fn skills(&self, text: &str) -> Result<(), FieldError> {
        self.system_text("skills", text)
    }

    fn system_text(&self, field: &str, text: &str) -> Result<(), FieldError> {
        check_size(field, text.len(), self.max_system_prompt_bytes, "limits.max_system_prompt_bytes")
    }

    /// Checks the number of messages of an exchange.
    pub(super) fn messages(&self, count: usize) -> Result<(), FieldError> {
        let max = self.max_messages_per_exchange;
        if count <= max {
            return Ok(());
        }
        let detail = format!(
            "has {count} messages, at most {max} are allowed (limits.max_messages_per_exchange): send several exchanges"
        );
        Err(FieldError::new("messages", detail))
    }
}
