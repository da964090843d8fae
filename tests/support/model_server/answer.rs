//! What a model says, before it is said in one protocol or the other: text, thoughts, and how it comes to an end.

use super::call::{Call, Protocol};
use super::form::{self, Form};
use super::wire::{End, Framing, Response};
use super::{anthropic, openai};
use serde_json::Value;
use std::time::Duration;

/// The status of an error that comes when the response has begun with a 200.
pub(super) const OVERLOADED: u16 = 529;

/// What is said, and what of the end is left out.
pub(super) struct Answer {
    pub(super) thoughts: String,
    pub(super) pieces: Vec<String>,
    /// Before each piece of the text.
    pub(super) pause: Duration,
    /// The finish reason, in the words of chat completions.
    pub(super) reason: Option<&'static str>,
    /// Whether the end is marked: `[DONE]`, `message_stop`.
    pub(super) marked: bool,
    /// Said after the text.
    pub(super) error: Option<&'static str>,
    pub(super) then: Then,
}

/// What comes after everything that is said.
#[derive(Clone, Copy)]
pub(super) enum Then {
    /// The response ends in good order.
    End,
    /// The connection ends in the middle of the response.
    Break,
    Silence,
    Comments(Duration),
    Pings(Duration),
}

/// An event of a stream.
pub(super) struct Event {
    pub(super) name: Option<&'static str>,
    /// A string is sent as it is.
    pub(super) data: Value,
    pub(super) pause: Duration,
}

impl Event {
    pub(super) fn unnamed(data: Value) -> Self {
        Self { name: None, data, pause: Duration::ZERO }
    }

    pub(super) fn after(self, pause: Duration) -> Self {
        Self { pause, ..self }
    }
}

impl Answer {
    pub(super) fn proper(text: &str) -> Self {
        Self { reason: Some("stop"), marked: true, ..Self::cut(text) }
    }

    /// The text, and nothing that says that it is at its end.
    pub(super) fn cut(text: &str) -> Self {
        Self {
            thoughts: String::new(),
            pieces: pieces(text).collect(),
            pause: Duration::ZERO,
            reason: None,
            marked: false,
            error: None,
            then: Then::End,
        }
    }

    pub(super) fn thought_pieces(&self) -> impl Iterator<Item = String> {
        pieces(&self.thoughts)
    }

    /// As a stream of events.
    pub(super) fn streamed(&self, call: &Call, forms: &[Form]) -> Response {
        let with_usage = !forms.contains(&Form::NoUsage);
        let (events, ping) = match call.protocol {
            Protocol::OpenAi => (openai::events(self, call, with_usage), openai::ping(call)),
            Protocol::Anthropic => (anthropic::events(self, call, with_usage), anthropic::ping()),
        };
        let end = match self.then {
            Then::End => End::Whole,
            Then::Break => End::Broken,
            Then::Silence => End::Silence,
            Then::Comments(pause) => End::Repeated(pause, form::bytes(": still here\n\n", forms)),
            Then::Pings(pause) => End::Repeated(pause, form::bytes(&form::event(&ping, forms), forms)),
        };
        // Where something is repeated there is nothing else, not even what opens a stream.
        let events = if matches!(end, End::Repeated(..)) { Vec::new() } else { events };
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        let parts = form::stream(&events, forms);
        Response { status: 200, headers, parts, framing: Framing::Chunked, end, piece: usize::MAX }
    }

    /// As one JSON object, or half of it where its end is missing.
    pub(super) fn whole(&self, call: &Call, forms: &[Form]) -> Response {
        let with_usage = !forms.contains(&Form::NoUsage);
        let body = match (self.error, call.protocol) {
            (Some(message), protocol) => protocol.error(OVERLOADED, message),
            (None, Protocol::OpenAi) => openai::whole(self, call, with_usage),
            (None, Protocol::Anthropic) => anthropic::whole(self, call, with_usage),
        };
        let mut text = form::object(&body, forms);
        if self.error.is_none() && self.reason.is_none() && !self.marked {
            text.truncate(text.floor_char_boundary(text.len() / 2));
        }
        let end = match self.then {
            Then::End => End::Whole,
            Then::Break => End::Broken,
            Then::Silence => End::Silence,
            // An object has no room for either; space before it is what servers keep such a connection alive with.
            Then::Comments(pause) | Then::Pings(pause) => End::Repeated(pause, b"\n".to_vec()),
        };
        let framing = match end {
            End::Whole => Framing::Length(text.len()),
            _ => Framing::Chunked,
        };
        if matches!(end, End::Repeated(..)) {
            text.clear();
        }
        let headers = vec![("content-type", "application/json".to_owned())];
        let pauses = self.pieces.iter().map(|_| self.pause).sum();
        let parts = vec![(pauses, text.into_bytes())];
        Response { status: 200, headers, parts, framing, end, piece: usize::MAX }
    }
}

impl Protocol {
    /// An error object.
    pub(super) fn error(self, status: u16, message: &str) -> Value {
        match self {
            Self::OpenAi => openai::error(status, message),
            Self::Anthropic => anthropic::error(status, message),
        }
    }
}

/// Small ones, as a model's tokens are.
fn pieces(text: &str) -> impl Iterator<Item = String> {
    let chars: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = chars.chunks(9).map(|piece| piece.iter().collect()).collect();
    pieces.into_iter()
}
