//! Reads the body of a successful response: detects its type, limits its size, and collects the completion.

use super::stream_timeouts::StreamTimeouts;
use crate::llm::call_memory::ResponsePart;
use crate::llm::provider::FinishReason;
use crate::llm::{CallMemory, ModelError, Usage};
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::Response;
use serde_json::Value;
use sseer::EventStream;
use sseer::errors::EventStreamError;
use sseer::event::Event;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Maximum size of the body of an error response; the rest is ignored.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Maximum size of a response. A stream contains a few hundred bytes of JSON for each token.
pub(crate) const MAX_RESPONSE_BYTES: usize = 32 * 1024 * 1024;
/// Maximum size of one JSON object, and of what is read without the end of an event. A completion is far smaller, and a
/// parser needs a multiple of the size of hostile JSON. It also bounds the memory of a call, together with [`MAX_TEXT_BYTES`].
pub(super) const MAX_OBJECT_BYTES: usize = 1024 * 1024;
/// Maximum amount of white space before the content.
const MAX_LEADING_BYTES: usize = 64 * 1024;
/// Maximum size of the text of a completion, far above the size of any summary.
const MAX_TEXT_BYTES: usize = 512 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

pub(super) const RESPONSE_TOO_LARGE: ModelError =
    ModelError::Protocol("the response is larger than any summary");

/// The type of a body, detected from its first characters. The content type is ignored, because servers send event
/// streams as `text/plain` and errors as `text/event-stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyKind {
    Json,
    Events,
    Empty,
    /// Plain text or a web page.
    Other,
}

type Chunks = BoxStream<'static, Result<Bytes, ModelError>>;

/// A body of a known type.
pub(super) struct ResponseBody {
    pub(super) kind: BodyKind,
    /// The part that has been read to detect the type.
    prefix: Vec<u8>,
    chunks: Chunks,
}

impl ResponseBody {
    /// Reads until the type of the body is known.
    pub(super) async fn open(response: Response, timeouts: &StreamTimeouts) -> Result<Self, ModelError> {
        let mut chunks = limited_chunks(response, MAX_RESPONSE_BYTES);
        let mut prefix = Vec::new();
        loop {
            let too_long = prefix.len() > MAX_LEADING_BYTES;
            if let Some(kind) = detect_kind(&prefix).or(too_long.then_some(BodyKind::Other)) {
                return Ok(Self { kind, prefix, chunks });
            }
            let Some(chunk) = timeouts.apply(chunks.try_next()).await?? else {
                let kind = if content(&prefix).is_empty() { BodyKind::Empty } else { BodyKind::Other };
                return Ok(Self { kind, prefix, chunks });
            };
            prefix.extend_from_slice(&chunk);
        }
    }

    pub(super) async fn read_to_end(
        mut self,
        timeouts: &StreamTimeouts,
        memory: &CallMemory,
    ) -> Result<Vec<u8>, ModelError> {
        while let Some(chunk) = timeouts.apply(self.chunks.try_next()).await?? {
            memory.hold(ResponsePart::Incomplete, self.prefix.len() + chunk.len())?;
            self.prefix.extend_from_slice(&chunk);
            if self.prefix.len() > MAX_OBJECT_BYTES {
                return Err(RESPONSE_TOO_LARGE);
            }
        }
        // A JSON parser rejects the byte order mark.
        Ok(content(&self.prefix).to_vec())
    }

    pub(super) fn into_events(self, memory: CallMemory) -> BoxStream<'static, Result<Event, ModelError>> {
        let prefix = stream::once(std::future::ready(Ok(Bytes::from(self.prefix))));
        // The parser keeps everything since the last event, which an endless line would grow without limit.
        let since_event = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&since_event);
        let chunks = prefix.chain(self.chunks).map(move |chunk| {
            let chunk = chunk?;
            let unparsed = counter.fetch_add(chunk.len(), Ordering::Relaxed);
            // A single chunk may contain many complete events.
            if unparsed > MAX_OBJECT_BYTES {
                return Err(RESPONSE_TOO_LARGE);
            }
            memory.hold(ResponsePart::Incomplete, unparsed + chunk.len())?;
            Ok(chunk)
        });
        let events = EventStream::new(Box::pin(chunks));
        let events = events.map_err(|error| match error {
            EventStreamError::Transport(error) => error,
            EventStreamError::Utf8Error(_) => ModelError::Protocol("not UTF-8"),
        });
        events.inspect(move |_| since_event.store(0, Ordering::Relaxed)).boxed()
    }
}

/// Returns `None` if the prefix is too short for a decision.
fn detect_kind(prefix: &[u8]) -> Option<BodyKind> {
    match content(prefix).first()? {
        b'{' => Some(BodyKind::Json),
        // A comment, or the field `data`, `event`, `id` or `retry`.
        b':' | b'd' | b'e' | b'i' | b'r' => Some(BodyKind::Events),
        // The prefix may end within the byte order mark.
        _ => (!BYTE_ORDER_MARK.starts_with(prefix)).then_some(BodyKind::Other),
    }
}

/// Removes the byte order mark and leading white space.
fn content(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii_start()
}

/// Returns the chunks of the body, followed by an error if the connection breaks or `limit` bytes are exceeded.
fn limited_chunks(response: Response, limit: usize) -> Chunks {
    let chunks = response.bytes_stream().map_err(|_| ModelError::StreamTruncated);
    let limited = stream::try_unfold((Box::pin(chunks), limit), |(mut chunks, remaining)| async move {
        let Some(chunk) = chunks.try_next().await? else {
            return Ok(None);
        };
        let remaining = remaining.checked_sub(chunk.len()).ok_or(RESPONSE_TOO_LARGE)?;
        Ok(Some((chunk, (chunks, remaining))))
    });
    limited.boxed()
}

/// Reads the body of an error response until it ends, breaks off, is idle for too long, or reaches the size limit.
pub(super) async fn read_prefix(mut response: Response, idle_timeout: Duration) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Ok(Ok(Some(chunk))) = tokio::time::timeout(idle_timeout, response.chunk()).await {
        let remaining = MAX_ERROR_BYTES - bytes.len();
        bytes.extend(chunk.iter().take(remaining));
        if chunk.len() >= remaining {
            break;
        }
    }
    bytes
}

/// The content of a complete response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedResponse {
    pub text: String,
    pub finish_reason: FinishReason,
    pub usage: Usage,
}

/// Collects the events of a response. A wire format adds the content of each event; the builder decides if they make a
/// complete response.
#[derive(Debug, Default)]
pub struct ResponseBuilder {
    text: String,
    has_pieces: bool,
    refused: bool,
    finish_reason: Option<FinishReason>,
    is_end_of_stream: bool,
    token_events: usize,
    usage: Usage,
}

impl ResponseBuilder {
    /// Adds a piece of the text.
    pub fn text_delta(&mut self, text: &str) -> Result<(), ModelError> {
        self.has_pieces |= !text.is_empty();
        self.add_text(text)
    }

    /// Replaces the text by the whole text so far. An empty one is ignored: it belongs to a message that only has a finish
    /// reason. A text that neither follows pieces nor continues the last whole text is an error, because it could be a piece itself.
    pub fn whole_text(&mut self, text: &str) -> Result<(), ModelError> {
        if text.trim().is_empty() || text == self.text {
            return Ok(());
        }
        if !self.has_pieces && !text.starts_with(&self.text) {
            return Err(ModelError::Protocol("the response has several messages with different texts"));
        }
        self.text.clear();
        self.add_text(text)
    }

    fn add_text(&mut self, text: &str) -> Result<(), ModelError> {
        self.text.push_str(text);
        self.token_events += usize::from(!text.is_empty());
        if self.text.len() > MAX_TEXT_BYTES { Err(RESPONSE_TOO_LARGE) } else { Ok(()) }
    }

    /// Returns the size of the text.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        self.text.len()
    }

    /// Notes a piece of the model's reasoning. It is not part of the text, but shows progress.
    pub fn reasoning_delta(&mut self) {
        self.token_events += 1;
    }

    /// Notes that the model refused. A response with a text is complete nevertheless.
    pub fn refusal(&mut self) {
        self.refused = true;
        self.token_events += 1;
    }

    /// Notes a finish reason that is known. It ends the completion, so that an end mark is not needed. Some servers send
    /// several; a truncated or filtered completion stays one.
    pub fn finish_reason(&mut self, finish_reason: FinishReason) {
        if matches!(self.finish_reason, None | Some(FinishReason::Complete)) {
            self.finish_reason = Some(finish_reason);
        }
    }

    /// Sets the usage from the fields of these names if they are numbers. Later values replace earlier ones, except for
    /// 0, which servers send if they do not count, or not yet.
    pub fn usage(&mut self, usage: &Value, input_field: &str, output_field: &str) {
        let tokens = |field: &str| usage.get(field).and_then(Value::as_u64).filter(|tokens| *tokens > 0);
        self.usage.input_tokens = tokens(input_field).or(self.usage.input_tokens);
        self.usage.output_tokens = tokens(output_field).or(self.usage.output_tokens);
    }

    /// Notes the end mark of the stream; later events are ignored.
    pub fn end_of_stream(&mut self) {
        self.is_end_of_stream = true;
    }

    #[must_use]
    pub fn is_end_of_stream(&self) -> bool {
        self.is_end_of_stream
    }

    /// Returns `true` if the end of the completion is known, so that a later error does not matter.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.is_end_of_stream || self.finish_reason.is_some()
    }

    /// Returns the number of events with a piece of text or reasoning.
    #[must_use]
    pub fn token_events(&self) -> usize {
        self.token_events
    }

    /// Returns the response, or an error if its end is missing.
    pub fn finish(self) -> Result<ParsedResponse, ModelError> {
        if !self.has_ended() {
            return Err(ModelError::StreamTruncated);
        }
        let finish_reason = if self.refused && self.text.trim().is_empty() {
            FinishReason::Filtered
        } else {
            self.finish_reason.unwrap_or(FinishReason::Complete)
        };
        Ok(ParsedResponse { text: self.text, finish_reason, usage: self.usage })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_kind_is_detected_from_the_first_characters() {
        for (prefix, expected) in [
            (&b"{\"id\""[..], Some(BodyKind::Json)),
            (b"\xEF\xBB\xBF\r\n {", Some(BodyKind::Json)),
            (b": ping", Some(BodyKind::Events)),
            (b"\n\ndata", Some(BodyKind::Events)),
            (b"\xEF\xBB\xBFevent: x", Some(BodyKind::Events)),
            (b"id: 1", Some(BodyKind::Events)),
            (b"", None),
            (b" \r\n", None),
            (b"\xEF\xBB", None),
            (b"\xEF\xBB\xBF", None),
            (b"<html>", Some(BodyKind::Other)),
            (b"\x1F\x8B", Some(BodyKind::Other)),
        ] {
            assert_eq!(detect_kind(prefix), expected, "{prefix:?}");
        }
    }

    #[test]
    fn whole_text_replaces_the_text_and_counts_as_progress_if_it_differs() {
        let mut builder = ResponseBuilder::default();
        builder.text_delta("Ada ").expect("small");
        for (whole, text, token_events) in [
            ("Ada flies", "Ada flies", 2),
            ("Ada flies", "Ada flies", 2),
            (" ", "Ada flies", 2),
            ("Bo", "Bo", 3),
        ] {
            builder.whole_text(whole).expect("small");
            assert_eq!((builder.text.as_str(), builder.token_events()), (text, token_events), "{whole:?}");
        }
        assert_eq!(builder.whole_text(&"x".repeat(MAX_TEXT_BYTES + 1)), Err(RESPONSE_TOO_LARGE));
        let mut builder = ResponseBuilder::default();
        builder.whole_text("Ada ").expect("the first one");
        assert!(matches!(builder.whole_text("flies."), Err(ModelError::Protocol(_))), "could be a piece");
    }

    #[test]
    fn usage_of_zero_does_not_replace_a_number() {
        let mut builder = ResponseBuilder::default();
        for usage in [r#"{"in":0,"out":0}"#, r#"{"in":7,"out":1}"#, r#"{"in":0,"out":3}"#, "null", "7"] {
            builder.usage(&serde_json::from_str(usage).expect("JSON"), "in", "out");
        }
        assert_eq!(builder.usage, Usage { input_tokens: Some(7), output_tokens: Some(3) });
        let mut builder = ResponseBuilder::default();
        builder.usage(&serde_json::json!({"in": 0, "out": 0}), "in", "out");
        assert_eq!(builder.usage, Usage::default());
    }
}
