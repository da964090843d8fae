//! Identifiers. They are validated by their constructors, so every existing identifier is valid.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;
use uuid::Uuid;

/// The longest identifier, in bytes of UTF-8.
pub const MAX_BYTES: usize = 256;

/// The reason why a text is not a valid identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    #[error("must not be empty")]
    Empty,
    /// More than [`MAX_BYTES`].
    #[error("has {0} bytes, at most {MAX_BYTES} are allowed")]
    TooLong(usize),
    /// A control character: C0, C1 or DEL.
    #[error("must not contain control characters")]
    Control,
    /// `.` or `..`, which URL libraries remove from paths.
    #[error("must not be \".\" or \"..\", which no URL can contain as a segment")]
    DotSegment,
}

fn check(text: &str) -> Result<(), InvalidId> {
    match text.len() {
        0 => Err(InvalidId::Empty),
        bytes if bytes > MAX_BYTES => Err(InvalidId::TooLong(bytes)),
        _ if text.contains(char::is_control) => Err(InvalidId::Control),
        _ if matches!(text, "." | "..") => Err(InvalidId::DotSegment),
        _ => Ok(()),
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, ToSchema)]
        #[serde(try_from = "String")]
        #[schema(
            as = Id,
            description = "1 to 256 bytes of UTF-8 without control characters, except `.` and `..`",
            min_length = 1,
            max_length = 256,
            pattern = r"^([^.\u0000-\u001f\u007f-\u009f][^\u0000-\u001f\u007f-\u009f]*|\.([^.\u0000-\u001f\u007f-\u009f][^\u0000-\u001f\u007f-\u009f]*|\.[^\u0000-\u001f\u007f-\u009f]+))$"
        )]
        pub struct $name(String);

        impl $name {
            /// Checks and takes the text: 1 to [`MAX_BYTES`] bytes, no control characters, not `.` or `..`, opaque, case-sensitive.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                check(&text)?;
                Ok(Self(text))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// The isolation boundary: nothing of one tenant is visible to another.
    TenantId
);
id!(
    /// One conversation; chosen by the client.
    SessionId
);
id!(
    /// The owner of a memory document.
    UserId
);
id!(
    /// The name of an API key; not unique.
    KeyName
);

impl From<Uuid> for SessionId {
    /// Returns the id of a session for which the client chooses none.
    fn from(id: Uuid) -> Self {
        Self(id.to_string())
    }
}

impl Default for TenantId {
    /// The tenant of a server without API keys.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_no_url_can_contain_are_rejected() {
        for text in [".", ".."] {
            assert_eq!(SessionId::new(text), Err(InvalidId::DotSegment));
        }
        for text in ["...", ".a", "..a", "a.", "./.."] {
            assert!(SessionId::new(text).is_ok(), "{text}");
        }
    }
}
