//! Completions as chat completions (OpenAI) and as messages (Anthropic), as a stream and as one object.

use super::{Call, Protocol, USAGE};
use serde_json::{Value, json};

/// Status of an error within a response that began with a success status.
const OVERLOADED: u16 = 529;

/// The end of a completion.
#[derive(Clone, Copy)]
pub(super) enum Finish {
    /// A finish reason in the words of chat completions, the usage, and the end mark.
    Reason(&'static str),
    /// An error object with this message.
    Error(&'static str),
    Nothing,
}

/// Returns the text of an event stream.
pub(super) fn stream_of(call: &Call, text: &str, finish: Finish) -> String {
    let pieces: Vec<char> = text.chars().collect();
    let pieces = pieces.chunks(9).map(|piece| piece.iter().collect::<String>());
    let mut events = Vec::new();
    match call.protocol {
        Protocol::OpenAi => {
            let mut push = |data: Value| events.push(format!("data: {data}\n\n"));
            let delta = |delta: Value, reason: Option<&str>| {
                chunk(call, &json!([{"index": 0, "delta": delta, "finish_reason": reason}]))
            };
            push(delta(json!({"role": "assistant", "content": ""}), None));
            pieces.for_each(|piece| push(delta(json!({"content": piece}), None)));
            match finish {
                Finish::Reason(reason) => {
                    push(delta(json!({}), Some(reason)));
                    if call.body["stream_options"]["include_usage"] == true {
                        let mut last = chunk(call, &json!([]));
                        last["usage"] = openai_usage();
                        push(last);
                    }
                    events.push("data: [DONE]\n\n".to_owned());
                }
                Finish::Error(message) => push(call.protocol.error(OVERLOADED, message)),
                Finish::Nothing => {}
            }
        }
        Protocol::Anthropic => {
            let mut push = |name: &str, mut data: Value| {
                data["type"] = name.into();
                events.push(format!("event: {name}\ndata: {data}\n\n"));
            };
            let mut message = message(call, &[], None);
            message["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": 1});
            push("message_start", json!({"message": message}));
            push("content_block_start", json!({"index": 0, "content_block": {"type": "text", "text": ""}}));
            push("ping", json!({}));
            for piece in pieces {
                let delta = json!({"type": "text_delta", "text": piece});
                push("content_block_delta", json!({"index": 0, "delta": delta}));
            }
            match finish {
                Finish::Reason(reason) => {
                    push("content_block_stop", json!({"index": 0}));
                    let delta = json!({"stop_reason": stop_reason(reason), "stop_sequence": null});
                    push("message_delta", json!({"delta": delta, "usage": {"output_tokens": USAGE.1}}));
                    push("message_stop", json!({}));
                }
                Finish::Error(message) => push("error", call.protocol.error(OVERLOADED, message)),
                Finish::Nothing => {}
            }
        }
    }
    events.concat()
}

/// Returns the response as one JSON object, or `null` for a completion without an end.
pub(super) fn object(call: &Call, text: &str, finish: Finish) -> Value {
    let reason = match finish {
        Finish::Reason(reason) => reason,
        Finish::Error(message) => return call.protocol.error(OVERLOADED, message),
        Finish::Nothing => return Value::Null,
    };
    match call.protocol {
        Protocol::OpenAi => {
            let message = json!({"role": "assistant", "content": text});
            let mut object = chunk(call, &json!([{"index": 0, "message": message, "finish_reason": reason}]));
            object["object"] = "chat.completion".into();
            object["usage"] = openai_usage();
            object
        }
        Protocol::Anthropic => {
            let mut object = message(call, &[json!({"type": "text", "text": text})], Some(reason));
            object["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": USAGE.1});
            object
        }
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
