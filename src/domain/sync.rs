//! Comparing a stored history with the complete list of messages that a client has.
//!
//! The n-th message of the list is compared with the n-th message of the history: by position and never by searching for equal
//! messages, so repeated messages are no problem. Two messages are the same if they *mean* the same: if a reader of the
//! conversation sees no difference. Everything that frameworks drop, add or write anew between two turns is ignored:
//!
//! | part of a message | compared |
//! | --- | --- |
//! | role | yes |
//! | name of the speaker | yes; not in results of tools |
//! | content | a string equals a list with one text part; null, empty strings, empty lists and empty texts are equal |
//! | text parts | by their text; `input_text` and `output_text` are text |
//! | reasoning and thinking, as fields or parts | no |
//! | refusal | yes, as a field or a part |
//! | other parts, such as images | as JSON without nulls and cache marks |
//! | tool calls | by order, id, name and arguments; arguments as JSON, empty ones equal `{}` |
//! | result of a tool | by the id of its call and its content |
//! | all other fields: ids, times, usage, metadata … | no |
//!
//! JSON is compared without the order of keys and the spelling of numbers. Text is compared exactly, with its white space.

use super::exchange::hash_text;
use super::id::UserId;
use super::json::as_integer;
use super::message::{Message, Role};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use std::fmt;
use time::OffsetDateTime;

/// The complete list of the messages that a client has, without a leading system message.
#[derive(Clone, Debug, Default)]
pub struct ClientList {
    pub messages: Vec<Message>,
    /// The times of the messages, as far as the client gave them.
    pub times: Vec<Option<OffsetDateTime>>,
    /// The user of the session.
    pub user_id: Option<UserId>,
    /// A JSON object that replaces the metadata of the session.
    pub metadata: Option<String>,
}

impl ClientList {
    /// Returns a hash of everything that the request contains. It differs from that of every exchange.
    pub fn fingerprint(&self) -> Vec<u8> {
        let mut hash = Sha256::new();
        hash_text(&mut hash, "sync");
        for part in [self.user_id.as_ref().map(UserId::as_str), self.metadata.as_deref()] {
            hash.update([u8::from(part.is_some())]);
            hash_text(&mut hash, part.unwrap_or_default());
        }
        for message in &self.messages {
            hash_text(&mut hash, message.json());
        }
        hash.finalize().to_vec()
    }
}

/// The first part in which two messages differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    Role,
    Name,
    Content,
    ToolCalls,
    ToolCallId,
}

named_variants!(Difference {
    Role = "role",
    Name = "name",
    Content = "content",
    ToolCalls = "tool_calls",
    ToolCallId = "tool_call_id"
});

/// The first message of a list that is not the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The `seq` of the stored message.
    pub seq: i64,
    pub difference: Difference,
    pub stored_role: Role,
    pub given_role: Role,
}

/// Compares the JSON of a stored message with that of one in the list. Equal bytes, the usual case, cost no parsing.
pub fn difference(stored: &str, given: &str) -> Option<Difference> {
    if stored == given {
        return None;
    }
    let (stored, given) = (Meaning::of(stored), Meaning::of(given));
    let parts = [
        (Difference::Role, stored.role == given.role),
        (Difference::Name, stored.name == given.name),
        (Difference::Content, stored.content == given.content),
        (Difference::ToolCalls, stored.tool_calls == given.tool_calls),
        (Difference::ToolCallId, stored.tool_call_id == given.tool_call_id),
    ];
    parts.into_iter().find_map(|(part, is_same)| (!is_same).then_some(part))
}

/// The parts of a message that are compared.
#[derive(Debug)]
struct Meaning {
    role: String,
    name: Option<String>,
    content: Vec<Part>,
    tool_calls: Vec<Call>,
    tool_call_id: Option<String>,
}

#[derive(Debug, PartialEq)]
enum Part {
    Text(String),
    Refusal(String),
    Other(Value),
}

#[derive(Debug, PartialEq)]
struct Call {
    id: String,
    name: String,
    arguments: Value,
}

impl Meaning {
    fn of(message: &str) -> Self {
        // A valid message is an object.
        let mut fields: Map<String, Value> = serde_json::from_str(message).unwrap_or_default();
        let role = take_text(&mut fields, "role").unwrap_or_default();
        let name = take_text(&mut fields, "name").filter(|_| role != Role::Tool.as_str());
        let mut content = match fields.remove("content") {
            Some(Value::String(text)) => vec![Part::Text(text)],
            Some(Value::Array(parts)) => parts.into_iter().filter_map(Part::of).collect(),
            _ => Vec::new(),
        };
        content.extend(take_text(&mut fields, "refusal").map(Part::Refusal));
        // The data of a reply in audio is often dropped; its id refers to it.
        if let Some(Value::Object(mut audio)) = fields.remove("audio") {
            content.extend(audio.remove("id").map(|id| Part::Other(json_object("audio", id))));
        }
        content.retain(|part| *part != Part::Text(String::new()));
        let mut tool_calls: Vec<Call> = match fields.remove("tool_calls") {
            Some(Value::Array(calls)) => calls.into_iter().map(Call::of).collect(),
            _ => Vec::new(),
        };
        if let Some(Value::Object(mut call)) = fields.remove("function_call") {
            tool_calls.push(Call::function(String::new(), &mut call));
        }
        Self { role, name, content, tool_calls, tool_call_id: take_text(&mut fields, "tool_call_id") }
    }
}

impl Part {
    /// Returns `None` for reasoning.
    fn of(part: Value) -> Option<Self> {
        let Value::Object(mut fields) = part else { return Some(Self::Other(part)) };
        match fields.get("type").and_then(Value::as_str) {
            Some("text" | "input_text" | "output_text") => {
                Some(Self::Text(take_text(&mut fields, "text").unwrap_or_default()))
            }
            Some("refusal") => take_text(&mut fields, "refusal").map(Self::Refusal),
            Some("reasoning" | "thinking" | "redacted_thinking") => None,
            _ => Some(Self::Other(without_marks(Value::Object(fields)))),
        }
    }
}

impl Call {
    fn of(call: Value) -> Self {
        let Value::Object(mut call) = call else { return Self::function(String::new(), &mut Map::new()) };
        let id = take_text(&mut call, "id").unwrap_or_default();
        if let Some(Value::Object(mut custom)) = call.remove("custom") {
            let name = take_text(&mut custom, "name").unwrap_or_default();
            return Self { id, name, arguments: custom.remove("input").unwrap_or_default() };
        }
        match call.remove("function") {
            Some(Value::Object(mut function)) => Self::function(id, &mut function),
            _ => Self::function(id, &mut Map::new()),
        }
    }

    fn function(id: String, function: &mut Map<String, Value>) -> Self {
        let name = take_text(function, "name").unwrap_or_default();
        let arguments = take_text(function, "arguments").unwrap_or_default();
        let arguments = if arguments.trim().is_empty() { "{}".to_owned() } else { arguments };
        // Arguments that the model wrote wrongly are compared as text.
        let arguments =
            serde_json::from_str(&arguments).map_or_else(|_| Value::String(arguments), with_plain_numbers);
        Self { id, name, arguments }
    }
}

fn json_object(key: &str, value: Value) -> Value {
    Value::Object(Map::from_iter([(key.to_owned(), value)]))
}

/// Takes a text that is not empty.
fn take_text(fields: &mut Map<String, Value>, key: &str) -> Option<String> {
    match fields.remove(key) {
        Some(Value::String(text)) if !text.is_empty() => Some(text),
        _ => None,
    }
}

/// Removes nulls and cache marks from objects.
fn without_marks(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(key, value)| key != "cache_control" && !value.is_null());
            Value::Object(fields.map(|(key, value)| (key, without_marks(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_marks).collect()),
        other => with_plain_numbers(other),
    }
}

/// Writes whole numbers as integers: JavaScript writes 1 for 1.0.
fn with_plain_numbers(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(key, value)| (key, with_plain_numbers(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(with_plain_numbers).collect()),
        Value::Number(number) => as_integer(&number).map_or(Value::Number(number), Value::from),
        other => other,
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seq, difference, stored_role, given_role } = self;
        write!(
            f,
            "message {seq} of the list, with the role {given_role}, differs in {difference} from the stored message "
        )?;
        write!(f, "{seq}, with the role {stored_role}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    fn compare(stored: &str, given: &str) -> Option<Difference> {
        for json in [stored, given] {
            Message::from_stored(json.to_owned()).unwrap_or_else(|error| panic!("{json}: {error:?}"));
        }
        let result = difference(stored, given);
        assert_eq!(result, difference(given, stored), "the order of the two does not matter");
        result
    }

    const PLAIN: &str = r#"{"role":"assistant","content":"Hi"}"#;
    const CALL: &str = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\": 1.0, \"b\": [null]}"}}]}"#;

    #[test_case(PLAIN, r#"{"content":"Hi","role":"assistant"}"#; "order of keys")]
    #[test_case(PLAIN, r#"{"id":"msg_1","role":"assistant","content":"\u0048i","created_at":"2026-05-01T00:00:00Z","usage":{"x":1}}"#; "ids, times and spelling")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"Hi","refusal":null,"name":null,"tool_calls":[],"audio":null,"function_call":null}"#; "nulls and empty lists")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"Hi","reasoning_content":"hm","reasoning":{"a":1},"thinking_blocks":[]}"#; "reasoning in fields")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":[{"text":"Hi","type":"text","cache_control":{"type":"ephemeral"},"annotations":[]}]}"#; "one text part with a cache mark")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":[{"type":"text","text":""},{"type":"text","text":"Hi"}],"cache_control":{}}"#; "empty text part")]
    #[test_case(CALL, r#"{"role":"assistant","content":"","tool_calls":[{"index":0,"id":"c","function":{"arguments":"{\"b\":[null],\"a\":1}","name":"f"}}]}"#; "arguments written anew")]
    #[test_case(CALL, r#"{"role":"assistant","content":[],"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\":1,\"b\":[null]}","parsed":null}}]}"#; "empty content")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":""}}]}"#, r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]}"#; "no arguments")]
    #[test_case(r#"{"role":"tool","tool_call_id":"c","content":"4","name":"add"}"#, r#"{"role":"tool","tool_call_id":"c","content":[{"type":"text","text":"4"}],"status":"success"}"#; "result without the name of its tool")]
    #[test_case(r#"{"role":"assistant","content":null,"refusal":"No."}"#, r#"{"role":"assistant","content":[{"type":"refusal","refusal":"No."}]}"#; "refusal as a part")]
    #[test_case(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"u","detail":null}}]}"#, r#"{"role":"user","content":[{"image_url":{"url":"u"},"type":"image_url","cache_control":{"type":"ephemeral"}}]}"#; "image with a cache mark")]
    fn messages_with_the_same_meaning_are_the_same(stored: &str, given: &str) {
        assert_eq!(compare(stored, given), None);
    }

    #[test_case(PLAIN, r#"{"role":"user","content":"Hi"}"# => Some(Difference::Role); "role")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"Hi","name":"Ada"}"# => Some(Difference::Name); "name")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"hi"}"# => Some(Difference::Content); "case")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"Hi "}"# => Some(Difference::Content); "white space")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":[{"type":"text","text":"H"},{"type":"text","text":"i"}]}"# => Some(Difference::Content); "two text parts")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"","refusal":"Hi"}"# => Some(Difference::Content); "refusal instead of text")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":"Hi","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]}"# => Some(Difference::ToolCalls); "call")]
    #[test_case(CALL, r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"a\":1,\"b\":[]}"}}]}"# => Some(Difference::ToolCalls); "arguments")]
    #[test_case(CALL, r#"{"role":"assistant","tool_calls":[{"id":"d","function":{"name":"f","arguments":"{\"a\":1,\"b\":[null]}"}}]}"# => Some(Difference::ToolCalls); "id of the call")]
    #[test_case(CALL, r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"g","arguments":"{\"a\":1,\"b\":[null]}"}}]}"# => Some(Difference::ToolCalls); "function")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{a"}}]}"#, r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{b"}}]}"# => Some(Difference::ToolCalls); "arguments that are not JSON")]
    #[test_case(r#"{"role":"tool","tool_call_id":"c","content":"4"}"#, r#"{"role":"tool","tool_call_id":"d","content":"4"}"# => Some(Difference::ToolCallId); "call of a result")]
    #[test_case(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}"#, r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"v"}}]}"# => Some(Difference::Content); "image")]
    #[test_case(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"a"}]}"#, r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}"# => Some(Difference::Content); "order of parts")]
    fn messages_with_different_meanings_differ(stored: &str, given: &str) -> Option<Difference> {
        compare(stored, given)
    }

    #[test]
    fn fingerprint_depends_on_all_parts() {
        let list = |texts: &[&str]| ClientList {
            messages: texts.iter().map(|text| Message::text(Role::User, text)).collect(),
            ..ClientList::default()
        };
        let user_id = UserId::new("u").ok();
        let lists = [
            list(&["a", "b"]),
            list(&["ab"]),
            list(&["a"]),
            list(&[]),
            ClientList { user_id, ..list(&["a"]) },
            ClientList { metadata: Some("{}".to_owned()), ..list(&["a"]) },
        ];
        let hashes: std::collections::HashSet<_> = lists.iter().map(ClientList::fingerprint).collect();
        assert_eq!(hashes.len(), lists.len());
        assert_eq!(list(&["a", "b"]).fingerprint(), lists[0].fingerprint());
    }
}
