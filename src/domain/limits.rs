//! Size limits of stored values. They apply to exchanges, changes and imports alike.
//!
//! Each error names the setting and its value.

use super::message::Message;
use super::validation::FieldError;

/// The settings `limits.*` that bound single values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeLimits {
    /// Largest message, in bytes of its JSON.
    pub max_message_bytes: usize,
    /// Largest metadata of a session, in bytes of its JSON.
    pub max_metadata_bytes: usize,
}

impl SizeLimits {
    /// Checks the size of the message at `path`.
    pub fn check_message(&self, path: &str, message: &Message) -> Result<(), FieldError> {
        check_size(path, message.json().len(), self.max_message_bytes, "limits.max_message_bytes")
    }

    /// Checks the size of the metadata at `path`.
    pub fn check_metadata(&self, path: &str, json: &str) -> Result<(), FieldError> {
        check_size(path, json.len(), self.max_metadata_bytes, "limits.max_metadata_bytes")
    }
}

/// Checks the size of the value at `path` against a setting.
pub fn check_size(path: &str, bytes: usize, max_bytes: usize, setting: &str) -> Result<(), FieldError> {
    if bytes <= max_bytes {
        return Ok(());
    }
    let detail = format!("has {bytes} bytes, at most {max_bytes} are allowed ({setting}): shorten it");
    Err(FieldError::new(path, detail))
}
