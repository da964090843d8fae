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
//! | images | by their URL or data |
//! | other parts | as JSON without nulls and cache marks |
//! | tool calls | by order, id, name and arguments; arguments as JSON, empty ones equal `{}` |
//! | result of a tool | by the id of its call, its text and its other parts |
//! | calls and results of tools that run at the provider | no |
//! | all other fields: ids, times, usage, metadata … | no |
//!
//! A redacted message is compared by role and tool calls only, without arguments: the list of the client still has its content.
//!
//! A content block of the Anthropic format is compared as its equivalent in the chat format, so a list in one format can match
//! messages that are stored in the other one. JSON is compared without the order of keys and the spelling of numbers. Text is
//! compared exactly, with its white space.

use super::exchange::hash_text;
use super::format::{Format, call_id, speaker_name, tool_name, valid_arguments};
use super::id::{SessionId, UserId};
use super::json::as_integer;
use super::json_validation::{MAX_JSON_DEPTH, check_json};
use super::message::{Message, Part, Role, Source, ToolCall};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::fmt;
use time::OffsetDateTime;

/// Arguments of a call with more JSON values are compared as text.
const MAX_ARGUMENT_VALUES: usize = 50_000;

/// The complete list of the messages that a client has.
#[derive(Clone, Debug, Default)]
pub struct ClientList {
    pub messages: Vec<Message>,
    /// The instructions at the beginning of the list. They are the system prompt and no part of the history, unless the history begins
    /// with instructions, too.
    pub instructions: Vec<Message>,
    /// The format of the messages in the request.
    pub format: Format,
    /// The times of the messages, as far as the client gave them.
    pub times: Vec<Option<OffsetDateTime>>,
    /// The user of the session.
    pub user_id: Option<UserId>,
    /// A JSON object that replaces the metadata of the session.
    pub metadata: Option<String>,
    pub on_divergence: OnDivergence,
}

/// The behaviour of a sync if a message of the list is not the stored one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OnDivergence {
    /// An error; nothing is written.
    #[default]
    Error,
    /// The list is stored in a fork of the session.
    Fork {
        /// The id of the fork; `None` derives it from the request.
        new_id: Option<SessionId>,
    },
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
        // The defaults leave the hash as it was before the choices existed. The markers are not the JSON of a message.
        if self.format != Format::default() {
            hash_text(&mut hash, self.format.as_str());
        }
        if let OnDivergence::Fork { new_id } = &self.on_divergence {
            hash_text(&mut hash, "fork");
            hash_text(&mut hash, new_id.as_ref().map_or("", SessionId::as_str));
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

/// Compares a stored message with that of the list. A redacted message is compared by what a redaction keeps, because the list may contain
/// the message as it was before.
pub fn difference(stored: &Message, given: &Message) -> Option<Difference> {
    let name = |message: &Message| match message.role() {
        Role::Tool => String::new(),
        // A context has the name in this form.
        _ => message.name().map(speaker_name).unwrap_or_default(),
    };
    let result_of = |message: &Message| message.tool_call_id().map(call_id);
    let is_same = |(stored, given): (&ToolCall, &ToolCall)| {
        call_id(&stored.id) == call_id(&given.id)
            && tool_name(&stored.name) == tool_name(&given.name)
            && (stored.arguments == given.arguments
                || arguments(&stored.arguments) == arguments(&given.arguments))
    };
    let (calls, given_calls) = (stored.tool_calls(), given.tool_calls());
    let parts = [
        (Difference::Role, stored.role() == given.role()),
        (Difference::Name, name(stored) == name(given)),
        (Difference::Content, meanings(stored) == meanings(given)),
        (
            Difference::ToolCalls,
            calls.len() == given_calls.len() && calls.iter().zip(given_calls).all(is_same),
        ),
        (Difference::ToolCallId, result_of(stored) == result_of(given)),
    ];
    parts.into_iter().find_map(|(part, is_same)| (!is_same).then_some(part))
}

/// A part of the content that is compared.
#[derive(Debug, PartialEq)]
enum Meaning<'m> {
    Text(Cow<'m, str>),
    /// The data of an attachment, or its address; a spoken answer by its id.
    Attachment(&'m str, Cow<'m, str>),
    Other(Value),
}

/// Returns the content in its order. The texts of a result are one text, because some formats have one text, others a list.
fn meanings(message: &Message) -> Vec<Meaning<'_>> {
    let source = |source: &'_ Source| match source {
        Source::Url(text) | Source::Id(text) | Source::Data { base64: text, .. } => text.clone().into(),
    };
    let mut meanings: Vec<Meaning<'_>> = Vec::new();
    for part in message.parts() {
        meanings.push(match part {
            Part::Call(_) => continue,
            Part::Text(text) => Meaning::Text(text.into()),
            Part::Refusal(text) => Meaning::Attachment("refusal", text.into()),
            Part::Voice { id, transcript } if id.is_empty() => Meaning::Text(transcript.into()),
            Part::Voice { id, .. } => Meaning::Attachment("audio", id.into()),
            Part::Image { source: of, .. } => Meaning::Attachment("image", source(of)),
            Part::File { source: of, .. } => Meaning::Attachment("file", source(of)),
            Part::Audio { base64, .. } => Meaning::Attachment("audio", base64.into()),
            Part::Other { json, .. } => {
                Meaning::Other(without_marks(serde_json::from_str(json).unwrap_or_default()))
            }
        });
    }
    if message.role() == Role::Tool {
        let texts: Vec<&str> =
            message.parts().filter_map(Part::text).filter(|text| !text.is_empty()).collect();
        meanings.retain(|part| !matches!(part, Meaning::Text(_)));
        meanings.insert(0, Meaning::Text(texts.join("\n").into()));
    }
    meanings.retain(|part| !matches!(part, Meaning::Text(text) if text.is_empty()));
    meanings
}

/// Parses the arguments of a call. Those that are no object are compared as text, and so are those of more values than fit into
/// memory.
fn arguments(given: &str) -> Value {
    let valid = valid_arguments(given);
    let is_small = check_json(&valid, MAX_JSON_DEPTH, MAX_ARGUMENT_VALUES).is_ok();
    let parsed = is_small.then(|| serde_json::from_str(&valid).ok()).flatten();
    let parsed = parsed.map_or_else(|| Value::String(given.to_owned()), with_plain_numbers);
    match parsed.get("arguments") {
        // A format wraps arguments that are no object.
        Some(Value::String(text)) if parsed.as_object().is_some_and(|members| members.len() == 1) => {
            let inner = serde_json::from_str(text).map(with_plain_numbers);
            inner.unwrap_or_else(|_| Value::String(text.clone()))
        }
        _ => parsed,
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
    use crate::domain::format;
    use test_case::test_case;

    fn compare(stored: &str, given: &str) -> Option<Difference> {
        let read = |json: &str| format::read(json).unwrap_or_else(|error| panic!("{json}: {error:?}"));
        let (stored, given) = (read(stored), read(given));
        let result = difference(&stored, &given);
        assert_eq!(result, difference(&given, &stored), "the order of the two does not matter");
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
    #[test_case(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"u","detail":"high"}}]}"#, r#"{"role":"user","content":[{"type":"input_image","image_url":"u"}]}"#; "image of the Responses API")]
    #[test_case(r#"{"role":"assistant","content":null,"function_call":{"name":"f","arguments":"{}"}}"#, r#"{"role":"assistant","tool_calls":[{"id":"function_f","function":{"name":"f","arguments":"{}"}}]}"#; "older form of a call")]
    #[test_case(r#"{"role":"function","name":"f","content":"4"}"#, r#"{"role":"tool","tool_call_id":"function_f","content":"4"}"#; "older form of a result")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"c","type":"custom","custom":{"name":"f","input":"x"}}]}"#, r#"{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"input":"x"}}]}"#; "custom call")]
    #[test_case(CALL, r#"{"role":"assistant","content":[{"type":"thinking","thinking":"Hm.","signature":"s"},{"type":"tool_use","id":"c","name":"f","input":{"b":[null],"a":1}}]}"#; "call of the Anthropic format")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"[1"}}]}"#, r#"{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"arguments":"[1"}}]}"#; "arguments that are no object")]
    #[test_case(r#"{"role":"tool","tool_call_id":"c","content":"a\nb"}"#, r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#; "result with two texts")]
    #[test_case(r#"{"role":"tool","tool_call_id":"c","content":""}"#, r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"c"}]}"#; "result without content")]
    #[test_case(PLAIN, r#"{"role":"assistant","content":[{"type":"server_tool_use","id":"s","name":"web_search","input":{}},{"type":"web_search_tool_result","tool_use_id":"s","content":[]},{"type":"text","text":"Hi","citations":[{"type":"x"}]}]}"#; "tool of the provider and citations")]
    #[test_case(r#"{"role":"user","content":[{"type":"file","file":{"filename":"a.pdf","file_data":"data:application/pdf;base64,aGk="}}]}"#, r#"{"role":"user","content":[{"type":"document","title":"a.pdf","source":{"type":"base64","media_type":"application/pdf","data":"aGk="}}]}"#; "document")]
    #[test_case(r#"{"role":"user","name":"Ada <Lovelace>","content":"Hi"}"#, r#"{"role":"user","name":"Ada__Lovelace_","content":"Hi"}"#; "name as contexts have it")]
    #[test_case(r#"{"role":"user","name":" ","tool_call_id":"","content":"Hi"}"#, r#"{"role":"user","content":"Hi"}"#; "blank name and empty id")]
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
    #[test_case(CALL, r#"{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"a":1,"b":[]}}]}"# => Some(Difference::ToolCalls); "arguments of the Anthropic format")]
    #[test_case(r#"{"role":"tool","tool_call_id":"c","content":"4"}"#, r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"4","is_error":true}]}"# => Some(Difference::Content); "error")]
    #[test_case(r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"4"}]}"#, r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"d","content":"4"}]}"# => Some(Difference::ToolCallId); "call of a result of the Anthropic format")]
    #[test_case(r#"{"role":"user","content":[{"type":"document","source":{"type":"url","url":"https://a"}}]}"#, r#"{"role":"user","content":[{"type":"document","source":{"type":"url","url":"https://b"}}]}"# => Some(Difference::Content); "document that the chat format cannot express")]
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
            ClientList { format: Format::Anthropic, ..list(&["a"]) },
            ClientList { on_divergence: OnDivergence::Fork { new_id: None }, ..list(&["a"]) },
            ClientList {
                on_divergence: OnDivergence::Fork { new_id: SessionId::new("f").ok() },
                ..list(&["a"])
            },
        ];
        let hashes: std::collections::HashSet<_> = lists.iter().map(ClientList::fingerprint).collect();
        assert_eq!(hashes.len(), lists.len());
        assert_eq!(list(&["a", "b"]).fingerprint(), lists[0].fingerprint());
    }
}
