//! Percent-encoded text in paths, queries and headers.

use crate::domain::api_key::redact_keys;
use std::borrow::Cow;

/// Returns the decoded text, or `None` if a `%` does not begin an escape or the result is not UTF-8. Lenient decoders
/// pass invalid escapes through, so that `%zz` and `%25zz` would be the same id.
pub(super) fn percent_decode(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    let hex = |byte: Option<u8>| u8::try_from(char::from(byte?).to_digit(16)?).ok();
    while let Some(byte) = rest.next() {
        decoded.push(match byte {
            b'%' => match (hex(rest.next()), hex(rest.next())) {
                (Some(high), Some(low)) => high * 16 + low,
                _ => return None,
            },
            _ => byte,
        });
    }
    String::from_utf8(decoded).ok()
}

/// Returns the path for logs and responses. People paste API keys in place of ids, so a path that contains a key is
/// shown decoded and with the key redacted. A path with invalid escapes is not shown at all, because it cannot be
/// searched for keys.
pub(super) fn redact_path(path: &str) -> Cow<'_, str> {
    match percent_decode(path).as_deref().map(redact_keys) {
        None => Cow::Borrowed("(not percent-encoded UTF-8)"),
        Some(Cow::Borrowed(_)) => Cow::Borrowed(path),
        Some(Cow::Owned(redacted)) => Cow::Owned(redacted),
    }
}
