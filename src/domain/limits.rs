//! How large what is kept of a session may be, whichever way it comes in: with an exchange, a change, an import.
//!
//! Every refusal names the setting and its value.

use super::message::Message;
use super::validation::FieldError;

/// The settings `limits.*` that bound single values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeLimits {
    /// Largest message, in bytes of its JSON.
    pub max_message_bytes: usize,
    /// Largest metadata of a session, in bytes of their JSON.
    pub max_metadata_bytes: usize,
}

impl SizeLimits {
    /// A message that stands at `field`.
    ///
    /// # Errors
    /// It is too large.
    pub fn message(&self, field: &str, message: &Message) -> Result<(), FieldError> {
        check_size(field, message.json().len(), self.max_message_bytes, "limits.max_message_bytes")
    }

    /// Metadata that stand at `field`, as JSON.
    ///
    /// # Errors
    /// They are too large.
    pub fn metadata(&self, field: &str, json: &str) -> Result<(), FieldError> {
        check_size(field, json.len(), self.max_metadata_bytes, "limits.max_metadata_bytes")
    }
}

/// A value of so many bytes at `field`, of which the setting allows `most`.
///
/// # Errors
/// It is too large.
pub fn check_size(field: &str, bytes: usize, most: usize, setting: &str) -> Result<(), FieldError> {
    if bytes <= most {
        return Ok(());
    }
    let detail = format!("has {bytes} bytes, at most {most} are allowed ({setting}): shorten it");
    Err(FieldError { field: field.to_owned(), detail })
}
