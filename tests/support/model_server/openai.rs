//! An answer in the words of OpenAI's chat completions.

use super::answer::{Answer, Event, OVERLOADED};
use super::{Call, USAGE};
use serde_json::{Value, json};

pub(super) fn error(status: u16, message: &str) -> Value {
    let kind = match status {
        429 => "rate_limit_error",
        400..500 => "invalid_request_error",
        _ => "server_error",
    };
    json!({"error": {"message": message, "type": kind, "param": null, "code": null}})
}

/// An event that says nothing.
pub(super) fn ping(call: &Call) -> Event {
    Event::unnamed(chunk(call, &json!([{"index": 0, "delta": {"content": ""}, "finish_reason": null}])))
}

pub(super) fn events(answer: &Answer, call: &Call, with_usage: bool) -> Vec<Event> {
    let delta = |delta: Value, reason: Option<&str>| {
        Event::unnamed(chunk(call, &json!([{"index": 0, "delta": delta, "finish_reason": reason}])))
    };
    let mut events = vec![delta(json!({"role": "assistant", "content": ""}), None)];
    events.extend(answer.thought_pieces().map(|piece| delta(json!({"reasoning_content": piece}), None)));
    let text = |piece: &String| delta(json!({"content": piece}), None).after(answer.pause);
    events.extend(answer.pieces.iter().map(text));
    if let Some(message) = answer.error {
        events.push(Event::unnamed(error(OVERLOADED, message)));
    }
    if let Some(reason) = answer.reason {
        events.push(delta(json!({}), Some(reason)));
        // The real one sends it to those only who ask.
        if with_usage && call.body["stream_options"]["include_usage"] == true {
            let mut last = chunk(call, &json!([]));
            last["usage"] = usage();
            events.push(Event::unnamed(last));
        }
    }
    if answer.marked {
        events.push(Event::unnamed("[DONE]".into()));
    }
    events
}

pub(super) fn whole(answer: &Answer, call: &Call, with_usage: bool) -> Value {
    let mut message = json!({"role": "assistant", "content": answer.pieces.concat()});
    if !answer.thoughts.is_empty() {
        message["reasoning_content"] = answer.thoughts.clone().into();
    }
    let mut body = chunk(call, &json!([{"index": 0, "message": message, "finish_reason": answer.reason}]));
    body["object"] = "chat.completion".into();
    if with_usage {
        body["usage"] = usage();
    }
    body
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

fn usage() -> Value {
    json!({"prompt_tokens": USAGE.0, "completion_tokens": USAGE.1, "total_tokens": USAGE.0 + USAGE.1})
}
