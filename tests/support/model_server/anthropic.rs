//! An answer in the words of Anthropic's messages API.

use super::answer::{Answer, Event, OVERLOADED};
use super::{Call, USAGE};
use serde_json::{Value, json};

pub(super) fn error(status: u16, message: &str) -> Value {
    let kind = match status {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        400..500 => "invalid_request_error",
        504 => "timeout_error",
        529 => "overloaded_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_test"})
}

/// An event that says nothing.
pub(super) fn ping() -> Event {
    event("ping", json!({}))
}

pub(super) fn events(answer: &Answer, call: &Call, with_usage: bool) -> Vec<Event> {
    let mut message = message(call, &[], None);
    if with_usage {
        message["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": 1});
    }
    let mut events = vec![event("message_start", json!({"message": message}))];
    let thinks = !answer.thoughts.is_empty();
    let text = usize::from(thinks);
    if thinks {
        events.push(start(0, &json!({"type": "thinking", "thinking": "", "signature": ""})));
        let thought = |piece| delta(0, &json!({"type": "thinking_delta", "thinking": piece}));
        events.extend(answer.thought_pieces().map(thought));
        events.push(delta(0, &json!({"type": "signature_delta", "signature": "c2lnbmVk"})));
        events.push(event("content_block_stop", json!({"index": 0})));
    }
    events.push(start(text, &json!({"type": "text", "text": ""})));
    // The real one sends one here.
    events.push(ping());
    let piece =
        |piece: &String| delta(text, &json!({"type": "text_delta", "text": piece})).after(answer.pause);
    events.extend(answer.pieces.iter().map(piece));
    if let Some(message) = answer.error {
        events.push(event("error", error(OVERLOADED, message)));
    }
    if let Some(reason) = answer.reason {
        events.push(event("content_block_stop", json!({"index": text})));
        let mut data = json!({"delta": {"stop_reason": stop_reason(reason), "stop_sequence": null}});
        if with_usage {
            data["usage"] = json!({"output_tokens": USAGE.1});
        }
        events.push(event("message_delta", data));
    }
    if answer.marked {
        events.push(event("message_stop", json!({})));
    }
    events
}

pub(super) fn whole(answer: &Answer, call: &Call, with_usage: bool) -> Value {
    let mut content = vec![json!({"type": "text", "text": answer.pieces.concat()})];
    if !answer.thoughts.is_empty() {
        let thoughts = json!({"type": "thinking", "thinking": answer.thoughts, "signature": "c2lnbmVk"});
        content.insert(0, thoughts);
    }
    let mut message = message(call, &content, answer.reason);
    if with_usage {
        message["usage"] = json!({"input_tokens": USAGE.0, "output_tokens": USAGE.1});
    }
    message
}

fn message(call: &Call, content: &[Value], reason: Option<&str>) -> Value {
    json!({
        "id": "msg_test",
        "type": "message",
        "role": "assistant",
        "model": call.body["model"],
        "content": content,
        "stop_reason": reason.map(stop_reason),
        "stop_sequence": null,
    })
}

/// The reason in this protocol's words.
fn stop_reason(reason: &str) -> &str {
    match reason {
        "stop" => "end_turn",
        "length" => "max_tokens",
        "content_filter" => "refusal",
        "tool_calls" => "tool_use",
        other => other,
    }
}

fn start(index: usize, block: &Value) -> Event {
    event("content_block_start", json!({"index": index, "content_block": block}))
}

fn delta(index: usize, delta: &Value) -> Event {
    event("content_block_delta", json!({"index": index, "delta": delta}))
}

/// An event's name is in its data too.
fn event(name: &'static str, mut data: Value) -> Event {
    data["type"] = name.into();
    Event { name: Some(name), ..Event::unnamed(data) }
}
