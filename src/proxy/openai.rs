//! Chat completions.

use super::protocol::{AnswerReader, Progress, Protocol};
use crate::domain::format::Format;
use crate::domain::message::object::{Object, as_string, elements, quote};
use crate::service::contexts::Context;
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) const PATH: &str = "chat/completions";

/// The protocol of chat completions.
pub(super) struct OpenAi;

impl Protocol for OpenAi {
    fn format(&self) -> Format {
        Format::OpenAi
    }

    fn unsupported(&self, request: &Object<'_>) -> Option<&'static str> {
        if request.get("n").is_some_and(|n| n != "1") {
            return Some("n");
        }
        // The provider stores the conversation, too: its copy would lack what the context leaves out.
        (request.get("store") == Some("true")).then_some("store")
    }

    fn leading(&self, messages: &[&str]) -> usize {
        let is_instruction = |json: &&&str| {
            matches!(Object::parse(json).string("role").as_deref(), Some("system" | "developer"))
        };
        messages.iter().take_while(is_instruction).count()
    }

    fn names(&self, request: &Object<'_>) -> (Option<String>, Option<String>) {
        let user = ["user", "safety_identifier"].into_iter().find_map(|key| request.string(key));
        (None, user.filter(|user| !user.is_empty()))
    }

    fn answer_limit(&self, request: &Object<'_>) -> Option<i64> {
        ["max_completion_tokens", "max_tokens"].into_iter().find_map(|key| request.get(key)?.parse().ok())
    }

    fn insert(&self, request: &mut Object<'_>, leading: usize, context: &Context) {
        let mut messages: Vec<String> =
            request.list("messages").into_iter().take(leading).map(str::to_owned).collect();
        if !context.system.is_empty() {
            // Many templates accept one system message only.
            match messages.last_mut() {
                Some(last) => *last = with_text(last, &context.system),
                None => messages.push(format!(r#"{{"role":"system","content":{}}}"#, quote(&context.system))),
            }
        }
        messages.extend(elements(&context.list.messages).into_iter().map(str::to_owned));
        request.set("messages", format!("[{}]", messages.join(",")));
    }

    fn answer(&self) -> Box<dyn AnswerReader> {
        Box::<Answer>::default()
    }
}

/// Returns a message with a text at the end of its content, which is a text or a list of parts.
fn with_text(message: &str, text: &str) -> String {
    let mut message = Object::parse(message);
    let content = message.get("content").unwrap_or("\"\"");
    let content = if content.starts_with('[') {
        let part = format!(r#"{{"type":"text","text":{}}}"#, quote(&format!("\n\n{text}")));
        let parts: Vec<&str> = elements(content).into_iter().chain([part.as_str()]).collect();
        format!("[{}]", parts.join(","))
    } else {
        quote(&format!("{}\n\n{text}", as_string(content).unwrap_or_default()))
    };
    message.set("content", content);
    message.to_json()
}

/// A tool call whose parts have arrived.
#[derive(Default)]
struct Call {
    /// The first values of all fields except `index` and the arguments.
    fields: serde_json::Map<String, Value>,
    name: String,
    arguments: String,
}

/// The answer in a stream: the deltas of its only choice.
#[derive(Default)]
struct Answer {
    /// The texts of the message by field: `content`, `refusal`, and those of providers, such as `reasoning_content`.
    texts: BTreeMap<String, String>,
    /// Lists and objects of providers, such as `reasoning_details`.
    others: serde_json::Map<String, Value>,
    calls: BTreeMap<u64, Call>,
    has_finished: bool,
}

impl Answer {
    fn add(&mut self, delta: &serde_json::Map<String, Value>) {
        for (key, value) in delta {
            match (key.as_str(), value) {
                ("role" | "name" | "id", _) | (_, Value::Null) => {}
                ("tool_calls", Value::Array(calls)) => calls.iter().for_each(|call| self.add_call(call)),
                // The older form of a call.
                ("function_call", call) => self.add_call(&serde_json::json!({"function": call})),
                (_, Value::String(text)) => self.texts.entry(key.clone()).or_default().push_str(text),
                (_, value) => match (self.others.get_mut(key), value) {
                    (Some(Value::Array(list)), Value::Array(more)) => list.extend(more.iter().cloned()),
                    _ => drop(self.others.insert(key.clone(), value.clone())),
                },
            }
        }
    }

    fn add_call(&mut self, delta: &Value) {
        let next = self.calls.len() as u64;
        // Some servers send each call whole, without an index.
        let begins = delta.get("id").is_some_and(Value::is_string);
        let index = delta.get("index").and_then(Value::as_u64);
        let index = index.unwrap_or(if begins { next } else { next.saturating_sub(1) });
        let text =
            |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let call = self.calls.entry(index).or_default();
        for (key, value) in delta.as_object().into_iter().flatten() {
            match key.as_str() {
                "index" => {}
                "function" | "custom" => {
                    call.name.push_str(&text(value, "name"));
                    let input = if key == "custom" { "input" } else { "arguments" };
                    call.arguments.push_str(&text(value, input));
                }
                _ if value.is_null() => {}
                _ => {
                    call.fields.entry(key.clone()).or_insert_with(|| value.clone());
                }
            }
        }
    }
}

impl AnswerReader for Answer {
    fn read_event(&mut self, _: &str, data: &str) -> Progress {
        if data.trim() == "[DONE]" {
            self.has_finished = true;
            return Progress::End;
        }
        let Ok(event) = serde_json::from_str::<Value>(data) else { return Progress::Running };
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Progress::Failed;
        }
        let choice = event.pointer("/choices/0").unwrap_or(&Value::Null);
        if let Some(Value::Object(delta)) = choice.get("delta") {
            self.add(delta);
        }
        self.has_finished |= choice.get("finish_reason").is_some_and(Value::is_string);
        Progress::Running
    }

    fn has_finished(&self) -> bool {
        self.has_finished
    }

    fn message(&self) -> Option<String> {
        // A call is complete if another one has begun after it.
        let complete = if self.has_finished { self.calls.len() } else { self.calls.len().saturating_sub(1) };
        let calls: Vec<String> = self.calls.values().take(complete).map(call_json).collect();
        let texts: Vec<_> = self.texts.iter().filter(|(_, text)| !text.is_empty()).collect();
        if calls.is_empty() && texts.is_empty() && self.others.is_empty() && !self.has_finished {
            return None;
        }
        let mut message = Object::default();
        message.set("role", quote("assistant"));
        let content = self.texts.get("content").filter(|text| !text.is_empty());
        let missing =
            || if calls.is_empty() && !self.texts.contains_key("refusal") { "\"\"" } else { "null" };
        message.set("content", content.map_or_else(|| missing().to_owned(), |text| quote(text)));
        for (key, text) in texts.into_iter().filter(|(key, _)| *key != "content") {
            message.set(key, quote(text));
        }
        for (key, value) in &self.others {
            message.set(key, value.to_string());
        }
        if !calls.is_empty() {
            message.set("tool_calls", format!("[{}]", calls.join(",")));
        }
        Some(message.to_json())
    }

    fn message_of(&self, body: &str) -> Option<String> {
        let body = Object::parse(body);
        let choices = body.list("choices");
        let [choice] = choices.as_slice() else { return None };
        let message = Object::parse(choice);
        Some(message.get("message")?.to_owned()).filter(|message| message.starts_with('{'))
    }
}

fn call_json(call: &Call) -> String {
    let mut json = Object::default();
    for (key, value) in &call.fields {
        json.set(key, value.to_string());
    }
    if json.get("type").is_none() {
        json.set("type", quote("function"));
    }
    let is_custom = json.string("type").as_deref() == Some("custom");
    let (key, input) = if is_custom { ("custom", "input") } else { ("function", "arguments") };
    json.set(key, format!(r#"{{"name":{},"{input}":{}}}"#, quote(&call.name), quote(&call.arguments)));
    json.to_json()
}
