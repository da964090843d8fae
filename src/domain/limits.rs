//! Size limits of stored values. They apply to exchanges, changes and imports alike.
//!
//! Each error names the setting and its value.

use super::message::{Message, minify_json};
use super::validation::FieldError;
use serde_json::value::RawValue;

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

    /// Returns the metadata at `path` without white space. It must be a JSON object.
    pub fn metadata(&self, path: &str, metadata: &RawValue) -> Result<String, FieldError> {
        let json = minify_json(metadata.get());
        if !json.starts_with('{') {
            return Err(FieldError::new(path, "must be a JSON object"));
        }
        check_size(path, json.len(), self.max_metadata_bytes, "limits.max_metadata_bytes")?;
        Ok(json)
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
