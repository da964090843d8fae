//! Identifiers. One that exists is valid: they are checked where they are made, and nowhere else.

use std::fmt;

/// The longest identifier, in bytes of UTF-8.
pub const MAX_BYTES: usize = 256;

/// Why a text is no identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// Nothing in it.
    #[error("must not be empty")]
    Empty,
    /// More than [`MAX_BYTES`].
    #[error("has {0} bytes, at most {MAX_BYTES} are allowed")]
    TooLong(usize),
    /// A control character: C0, C1 or DEL.
    #[error("must not contain control characters")]
    Control,
}

fn check(text: &str) -> Result<(), InvalidId> {
    match text.len() {
        0 => Err(InvalidId::Empty),
        bytes if bytes > MAX_BYTES => Err(InvalidId::TooLong(bytes)),
        _ if text.contains(char::is_control) => Err(InvalidId::Control),
        _ => Ok(()),
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Checks and takes the text: 1 to [`MAX_BYTES`] bytes, no control characters, opaque, case-sensitive.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                check(&text)?;
                Ok(Self(text))
            }

            /// The identifier as it was given.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
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
    /// Whose memory document applies.
    UserId
);
id!(
    /// What the owner of an API key calls it; not unique.
    KeyName
);

impl Default for TenantId {
    /// The only tenant where there are no API keys.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

impl Default for UserId {
    /// The user of a session that names none.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_opaque_text() {
        for good in ["a", "matrix:!room:host", "a/b", "ä b", "..", "%41", &"x".repeat(256)] {
            assert_eq!(SessionId::new(good).expect("valid").as_str(), good);
        }
        assert_eq!(SessionId::new(""), Err(InvalidId::Empty));
        assert_eq!(SessionId::new("é".repeat(129)), Err(InvalidId::TooLong(258)));
        for control in ["a\nb", "\0", "\u{7f}", "\u{85}"] {
            assert_eq!(SessionId::new(control), Err(InvalidId::Control));
        }
    }
}
