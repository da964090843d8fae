//! Completions as chat completions (OpenAI) and as messages (Anthropic), as a stream and as one object.

use super::{Call, Protocol, USAGE};
use serde_json::{Value, json};
use std::time::Duration;

/// Status of an error within a response that began with a success status.
const OVERLOADED: u16 = 529;

/// A completion, and the parts of its end that are left out.
pub(super) struct Completion {
    pub(super) reasoning: String,
    /// Pieces of the text, as a model's tokens.
    pub(super) pieces: Vec<String>,
    /// Pause before each piece.
    pub(super) pause: Duration,
    /// The finish reason in the words of chat completions.
    pub(super) finish_reason: Option<&'static str>,
    /// `[DONE]` or `message_stop`.
    pub(super) has_end_mark: bool,
    /// An error object after the text.
    pub(super) error: Option<&'static str>,
    pub(super) has_usage: bool,
}

/// An event of a stream.
pub(super) struct Event {
    pub(super) name: Option<&'static str>,
    /// A string is sent without quotes.
    pub(super) data: Value,
    pub(super) pause: Duration,
}

impl Completion {
    pub(super) fn complete(text: &str) -> Self {
        Self { finish_reason: Some("stop"), has_end_mark: true, ..Self::without_end(text) }
    }

    pub(super) fn without_end(text: &str) -> Self {
        Self {
            reasoning: String::new(),
            pieces: split(text),
            pause: Duration::ZERO,
            finish_reason: None,
            has_end_mark: false,
            error: None,
            has_usage: true,
        }
    }

    pub(super) fn events(&self, call: &Call) -> Vec<Event> {
        match call.protocol {
            Protocol::OpenAi => self.chat_completion_chunks(call),
            Protocol::Anthropic => self.message_events(call),
        }
    }

    pub(super) fn object(&self, call: &Call) -> Value {
        if let Some(message) = self.error {
            return call.protocol.error(OVERLOADED, message);
        }
        match call.protocol {
            Protocol::OpenAi => {
                let mut message = json!({"role": "assistant", "content": self.pieces.concat()});
                if !self.reasoning.is_empty() {
                    message["reasoning_content"] = self.reasoning.clone().into();
                }
                let choice = json!({"index": 0, "message": message, "finish_reason": self.finish_reason});
                let mut object = chunk(call, &json!([choice]));
                object["object"] = "chat.completion".into();
                if self.has_usage {
                    object["usage"] = openai_usage();
                }
                object
            }
            Protocol::Anthropic => {
                let mut content = vec![json!({"type": "text", "text": self.pieces.concat()})];
                if !self.reasoning.is_empty() {
                    content.insert(
                        0,
                        json!({"type": "thinking", "thinking": self.reasoning, "signature": "c2ln"}),
                    );
                }
                let mut object = message(call, &content, self.finish_reason);
                if self.has_usage {
                    object["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": USAGE.1});
                }
                object
            }
        }
    }

    fn chat_completion_chunks(&self, call: &Call) -> Vec<Event> {
        let delta = |delta: Value, reason: Option<&str>| {
            unnamed(chunk(call, &json!([{"index": 0, "delta": delta, "finish_reason": reason}])))
        };
        let mut events = vec![delta(json!({"role": "assistant", "content": ""}), None)];
        events.extend(
            split(&self.reasoning).iter().map(|piece| delta(json!({"reasoning_content": piece}), None)),
        );
        events.extend(
            self.pieces
                .iter()
                .map(|piece| Event { pause: self.pause, ..delta(json!({"content": piece}), None) }),
        );
        events.extend(self.error.map(|message| unnamed(call.protocol.error(OVERLOADED, message))));
        if let Some(reason) = self.finish_reason {
            events.push(delta(json!({}), Some(reason)));
            if self.has_usage && call.body["stream_options"]["include_usage"] == true {
                let mut last = chunk(call, &json!([]));
                last["usage"] = openai_usage();
                events.push(unnamed(last));
            }
        }
        if self.has_end_mark {
            events.push(unnamed("[DONE]".into()));
        }
        events
    }

    fn message_events(&self, call: &Call) -> Vec<Event> {
        let start = |index: usize, block: Value| {
            named("content_block_start", json!({"index": index, "content_block": block}))
        };
        let delta = |index: usize, delta: Value| {
            named("content_block_delta", json!({"index": index, "delta": delta}))
        };
        let stop = |index: usize| named("content_block_stop", json!({"index": index}));
        let mut message = message(call, &[], None);
        if self.has_usage {
            message["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": 1});
        }
        let mut events = vec![named("message_start", json!({"message": message}))];
        let text_index = usize::from(!self.reasoning.is_empty());
        if text_index > 0 {
            events.push(start(0, json!({"type": "thinking", "thinking": "", "signature": ""})));
            events.extend(
                split(&self.reasoning)
                    .iter()
                    .map(|piece| delta(0, json!({"type": "thinking_delta", "thinking": piece}))),
            );
            events.push(delta(0, json!({"type": "signature_delta", "signature": "c2ln"})));
            events.push(stop(0));
        }
        events.push(start(text_index, json!({"type": "text", "text": ""})));
        events.push(ping(call));
        events.extend(self.pieces.iter().map(|piece| Event {
            pause: self.pause,
            ..delta(text_index, json!({"type": "text_delta", "text": piece}))
        }));
        events.extend(self.error.map(|message| named("error", call.protocol.error(OVERLOADED, message))));
        if let Some(reason) = self.finish_reason {
            events.push(stop(text_index));
            let mut data = json!({"delta": {"stop_reason": stop_reason(reason), "stop_sequence": null}});
            if self.has_usage {
                data["usage"] = json!({"output_tokens": USAGE.1});
            }
            events.push(named("message_delta", data));
        }
        if self.has_end_mark {
            events.push(named("message_stop", json!({})));
        }
        events
    }
}

/// An event without content.
pub(super) fn ping(call: &Call) -> Event {
    match call.protocol {
        Protocol::OpenAi => {
            let choice = json!({"index": 0, "delta": {"content": ""}, "finish_reason": null});
            unnamed(chunk(call, &json!([choice])))
        }
        Protocol::Anthropic => named("ping", json!({})),
    }
}

impl Protocol {
    pub(super) fn error(self, status: u16, message: &str) -> Value {
        let (openai, anthropic) = match status {
            401 => ("invalid_request_error", "authentication_error"),
            403 => ("invalid_request_error", "permission_error"),
            404 => ("invalid_request_error", "not_found_error"),
            413 => ("invalid_request_error", "request_too_large"),
            429 => ("rate_limit_error", "rate_limit_error"),
            400..500 => ("invalid_request_error", "invalid_request_error"),
            529 => ("server_error", "overloaded_error"),
            _ => ("server_error", "api_error"),
        };
        match self {
            Self::OpenAi => {
                json!({"error": {"message": message, "type": openai, "param": null, "code": null}})
            }
            Self::Anthropic => json!({"type": "error", "error": {"type": anthropic, "message": message}}),
        }
    }
}

fn named(name: &'static str, mut data: Value) -> Event {
    data["type"] = name.into();
    Event { name: Some(name), ..unnamed(data) }
}

fn unnamed(data: Value) -> Event {
    Event { name: None, data, pause: Duration::ZERO }
}

fn chunk(call: &Call, choices: &Value) -> Value {
    json!({
        "id": "chatcmpl-test",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": call.body["model"],
        "choices": choices,
    })
}

fn openai_usage() -> Value {
    json!({"prompt_tokens": USAGE.0, "completion_tokens": USAGE.1, "total_tokens": USAGE.0 + USAGE.1})
}

fn message(call: &Call, content: &[Value], finish_reason: Option<&str>) -> Value {
    json!({
        "id": "msg_test",
        "type": "message",
        "role": "assistant",
        "model": call.body["model"],
        "content": content,
        "stop_reason": finish_reason.map(stop_reason),
        "stop_sequence": null,
    })
}

fn stop_reason(finish_reason: &str) -> &str {
    match finish_reason {
        "stop" => "end_turn",
        "length" => "max_tokens",
        "content_filter" => "refusal",
        other => other,
    }
}

/// Splits a text into pieces of nine characters.
fn split(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(9).map(|piece| piece.iter().collect()).collect()
}
