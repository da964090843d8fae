//! Checks of single values of a request against the settings `limits.*`. Each error names the setting and its value.

use crate::config::Limits;
use crate::domain::limits::{SizeLimits, check_size};
use crate::domain::validation::FieldError;

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

    /// Checks a text of the request that becomes part of the system message.
    pub(super) fn system_text(&self, field: &str, text: &str) -> Result<(), FieldError> {
        check_size(field, text.len(), self.max_system_prompt_bytes, "limits.max_system_prompt_bytes")
    }

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
