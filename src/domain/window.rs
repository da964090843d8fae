//! A message on its way into a context: as it is stored, with what was found out about it when it was.

use super::cut::Mark;

/// A message on its way into a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowMessage {
    /// Its place in the session.
    pub seq: i64,
    /// Its tokens, counted when it was stored.
    pub tokens: i64,
    /// What a cut needs to know of it.
    pub mark: Mark,
    /// JSON, as the client gave it.
    pub json: String,
}
