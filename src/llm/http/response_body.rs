//! The body of a response: bounded, and taken for what it is. Labels lie: streams come as `text/plain`, errors as
//! `text/event-stream`; the first character tells.

use super::super::ModelError;
use super::stream_timeouts::StreamTimeouts;
use super::too_long;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::Response;
use sseer::EventStream;
use sseer::errors::EventStreamError;
use sseer::event::Event;
use std::time::Duration;

/// The most that is read of an error's body.
const ERROR_BYTES: usize = 64 * 1024;
/// The most that is read of an answer: a few hundred bytes of JSON come with each token of a stream.
const ANSWER_BYTES: usize = 32 * 1024 * 1024;
/// The most that is read of one object, in an event or for itself. An answer's text is far smaller, and what a parser
/// makes of hostile JSON is many times as large as its text.
pub(super) const OBJECT_BYTES: usize = 4 * 1024 * 1024;
/// The most that may come before an answer begins.
const BLANK_BYTES: usize = 64 * 1024;
/// What some put at the beginning of a text.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

type Chunks = BoxStream<'static, Result<Bytes, ModelError>>;

/// What a body holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Json,
    Events,
    Empty,
    /// Neither: text, or a web page.
    Other,
}

/// A body of which enough was read to know what it is.
pub(super) struct Body {
    pub(super) kind: Kind,
    read: Vec<u8>,
    chunks: Chunks,
}

/// Waits for the beginning.
pub(super) async fn open(response: Response, timeouts: &StreamTimeouts) -> Result<Body, ModelError> {
    let mut chunks = bounded(response, ANSWER_BYTES);
    let mut read = Vec::new();
    loop {
        if let Some(kind) = kind(&read).or((read.len() > BLANK_BYTES).then_some(Kind::Other)) {
            return Ok(Body { kind, read, chunks });
        }
        let Some(chunk) = timeouts.wait(chunks.try_next()).await?? else {
            let kind = if text(&read).is_empty() { Kind::Empty } else { Kind::Other };
            return Ok(Body { kind, read, chunks });
        };
        read.extend_from_slice(&chunk);
    }
}

/// `None` where more must be read to tell.
fn kind(read: &[u8]) -> Option<Kind> {
    let text = text(read);
    match text.first()? {
        b'{' => return Some(Kind::Json),
        b':' => return Some(Kind::Events),
        _ => {}
    }
    for field in [&b"data"[..], b"event", b"id", b"retry"] {
        if text.starts_with(field) {
            return Some(Kind::Events);
        }
        if field.starts_with(text) {
            return None;
        }
    }
    // A mark of which not all has come.
    if BYTE_ORDER_MARK.starts_with(read) { None } else { Some(Kind::Other) }
}

fn text(read: &[u8]) -> &[u8] {
    read.strip_prefix(BYTE_ORDER_MARK).unwrap_or(read).trim_ascii_start()
}

impl Body {
    /// All of it.
    pub(super) async fn whole(mut self, timeouts: &StreamTimeouts) -> Result<Vec<u8>, ModelError> {
        while let Some(chunk) = timeouts.wait(self.chunks.try_next()).await?? {
            self.read.extend_from_slice(&chunk);
            if self.read.len() > OBJECT_BYTES {
                return Err(too_long());
            }
        }
        // A parser takes the mark for a wrong character.
        Ok(text(&self.read).to_vec())
    }

    /// Its events.
    pub(super) fn events(self) -> BoxStream<'static, Result<Event, ModelError>> {
        let read = stream::once(std::future::ready(Ok(Bytes::from(self.read))));
        let events = EventStream::new(Box::pin(read.chain(self.chunks)));
        let events = events.map_err(|error| match error {
            EventStreamError::Transport(cause) => cause,
            EventStreamError::Utf8Error(_) => ModelError::Protocol("not UTF-8".to_owned()),
        });
        events.boxed()
    }
}

/// The chunks, ended with an error where the connection breaks or they go past `limit` bytes.
fn bounded(response: Response, limit: usize) -> Chunks {
    let chunks = response.bytes_stream().map_err(|_| ModelError::StreamTruncated);
    let bounded = stream::try_unfold((Box::pin(chunks), limit), |(mut chunks, left)| async move {
        let Some(chunk) = chunks.try_next().await? else {
            return Ok(None);
        };
        let left = left.checked_sub(chunk.len()).ok_or_else(too_long)?;
        Ok(Some((chunk, (chunks, left))))
    });
    bounded.boxed()
}

/// What comes of an error's body, until it ends, breaks, falls silent, or is long enough.
pub(super) async fn beginning(mut response: Response, idle: Duration) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Ok(Ok(Some(chunk))) = tokio::time::timeout(idle, response.chunk()).await {
        let room = ERROR_BYTES - bytes.len();
        bytes.extend(chunk.iter().take(room));
        if chunk.len() >= room {
            break;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_character_tells() {
        for (read, expected) in [
            (&b"{\"id\""[..], Some(Kind::Json)),
            (b"\xEF\xBB\xBF\r\n {", Some(Kind::Json)),
            (b": ping", Some(Kind::Events)),
            (b"\n\ndata", Some(Kind::Events)),
            (b"\xEF\xBB\xBFevent: x", Some(Kind::Events)),
            (b"id: 1", Some(Kind::Events)),
            (b"", None),
            (b" \r\n", None),
            (b"\xEF\xBB", None),
            (b"\xEF\xBB\xBF", None),
            (b"da", None),
            (b"dance", Some(Kind::Other)),
            (b"<html>", Some(Kind::Other)),
            (b"\x1F\x8B", Some(Kind::Other)),
        ] {
            assert_eq!(kind(read), expected, "{read:?}");
        }
    }
}
