//! Rules of the providers for message lists, and token counts of lists by `docs/tokens.md`, with another tokenizer than
//! that of the service.
#![cfg(test)]

pub(crate) mod generated;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashSet};

const PER_LIST: usize = 3;
const PER_ENTRY: usize = 4;
const PER_ATTACHMENT: usize = 765;

fn text(value: &Value) -> usize {
    value.as_str().map_or(0, |text| tiktoken_rs::o200k_base_singleton().count_ordinary(text))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn word<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

/// Returns the tokens of a list in the format of chat completions.
pub(crate) fn tokens_of_openai(messages: &[Value]) -> usize {
    let message = |message: &Value| {
        let content = match &message["content"] {
            Value::Array(parts) => {
                let part = |part: &Value| match word(part, "type") {
                    "text" => text(&part["text"]),
                    _ => PER_ATTACHMENT,
                };
                parts.iter().map(part).sum()
            }
            content => text(content),
        };
        let calls = list(&message["tool_calls"]).iter().map(|call| {
            let function = &call["function"];
            let signature = text(&call["extra_content"]["google"]["thought_signature"]);
            PER_ENTRY + text(&call["id"]) + text(&function["name"]) + text(&function["arguments"]) + signature
        });
        let named = text(&message["name"]) + text(&message["tool_call_id"]);
        PER_ENTRY + content + named + calls.sum::<usize>()
    };
    PER_LIST + messages.iter().map(message).sum::<usize>()
}

/// The members of a content block as JSON text, because their bytes count.
#[derive(Deserialize)]
#[serde(transparent)]
struct Block(BTreeMap<String, Box<RawValue>>);

impl Block {
    fn member<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.0.get(key).and_then(|json| serde_json::from_str(json.get()).ok())
    }

    /// Returns the tokens of an image or a file: all other fields of the block and of its source count as JSON.
    fn tokens_of_attachment(&self, source: &Value) -> usize {
        let further =
            self.0.iter().filter(|(key, _)| !["type", "source", "title", "cache_control"].contains(&&***key));
        let further = further.map(|(key, json)| text(&Value::from(format!("{{\"{key}\":{}}}", json.get()))));
        let known = ["type", "media_type", "data", "url", "file_id"];
        let of_source =
            source.as_object().into_iter().flatten().filter(|(key, _)| !known.contains(&key.as_str()));
        let of_source = of_source.map(|(key, json)| text(&Value::from(format!("{{\"{key}\":{json}}}"))));
        PER_ATTACHMENT + further.sum::<usize>() + of_source.sum::<usize>()
    }

    fn tokens(&self, inside: bool) -> usize {
        let kind: String = self.member("type").expect("a type");
        let source: Value = self.member("source").unwrap_or_default();
        let is_text = ["text", "content"].iter().any(|kind| source["type"] == *kind);
        let known: &[&str] = match kind.as_str() {
            "text" => &["text"],
            "tool_use" => &["id", "name", "input"],
            "tool_result" => &["tool_use_id", "content", "is_error"],
            "image" | "document" if kind == "image" || !is_text => return self.tokens_of_attachment(&source),
            _ => &[],
        };
        let member = |key: &str, json: &RawValue| {
            let json = json.get();
            let content: Option<Vec<Self>> = serde_json::from_str(json).ok();
            match (key, content) {
                ("type" | "is_error" | "cache_control", _) => 0,
                ("content", Some(content)) if kind == "tool_result" => {
                    content.iter().map(|part| part.tokens(true)).sum()
                }
                (key, _) if known.contains(&key) => {
                    text(&Value::from(serde_json::from_str(json).unwrap_or_else(|_| json.to_owned())))
                }
                (key, _) => text(&Value::from(format!("{{\"{key}\":{json}}}"))),
            }
        };
        self.0.iter().map(|(key, json)| member(key, json)).sum::<usize>() + if inside { 0 } else { PER_ENTRY }
    }
}

/// Returns the tokens of a list in the format of the messages API, given as the JSON text of a context.
pub(crate) fn tokens_of_anthropic(answer: &str) -> usize {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum System {
        Text(String),
        Blocks(Vec<Block>),
    }
    #[derive(Deserialize)]
    struct Message {
        content: Vec<Block>,
    }
    #[derive(Deserialize)]
    struct Whole {
        system: Option<System>,
        messages: Vec<Message>,
    }
    let whole: Whole = serde_json::from_str(answer).expect("a context in Anthropic's format");
    let system = match whole.system {
        None => 0,
        Some(System::Text(text)) => PER_ENTRY + self::text(&Value::from(text)),
        Some(System::Blocks(blocks)) => blocks.iter().map(|block| block.tokens(false)).sum(),
    };
    let blocks = whole.messages.iter().flat_map(|message| &message.content);
    PER_LIST + system + blocks.map(|block| block.tokens(false)).sum::<usize>()
}

/// Asserts that all providers of chat completions accept the list: it begins with the user, results follow their calls immediately, each
/// result has a call, ids are unique, names, ids and arguments are valid, and there are no fields and no nulls beyond the standard.
pub(crate) fn assert_openai_accepts(messages: &[Value]) {
    assert_pairs(messages);
    for message in messages {
        assert_standard(message, &[]);
    }
}

/// Asserts that Gemini's chat endpoint accepts the list: one system message, calls with signatures and directly after a message of the user
/// or a result, and results with names.
pub(crate) fn assert_gemini_accepts(messages: &[Value]) {
    assert_pairs(messages);
    assert_one_system_message(messages);
    for (at, message) in messages.iter().enumerate() {
        let place = || format!("message {at} of {messages:#?}");
        assert_standard(message, &["extra_content", "name"]);
        let is_call = !message["tool_calls"].is_null();
        let is_after_model = at > 0 && word(&messages[at - 1], "role") == "assistant";
        assert!(
            !is_after_model || word(message, "role") != "assistant",
            "two messages of the model: {}",
            place()
        );
        assert!(word(message, "role") != "tool" || is_name(word(message, "name")), "{}", place());
        let content = &message["content"];
        assert!(is_call || word(message, "role") == "tool" || *content != "", "empty: {}", place());
        let first = &message["tool_calls"][0]["extra_content"]["google"]["thought_signature"];
        assert!(!is_call || first.as_str().is_some_and(|signature| !signature.is_empty()), "{}", place());
    }
}

/// Asserts that Mistral and the templates of Mistral v3 and Devstral accept the list: after one system message, user and assistant alternate
/// except for calls and results, and nothing but an answer follows results.
pub(crate) fn assert_strict_accepts(messages: &[Value]) {
    assert_pairs(messages);
    assert_one_system_message(messages);
    let mut is_user_next = true;
    for (at, message) in messages.iter().enumerate() {
        let place = || format!("message {at} of {messages:#?}");
        assert_standard(message, &[]);
        let role = word(message, "role");
        let before = at.checked_sub(1).map_or("", |before| word(&messages[before], "role"));
        assert!(
            before != "tool" || matches!(role, "tool" | "assistant"),
            "{role} after a result: {}",
            place()
        );
        assert!(!message["content"].is_null(), "{}", place());
        let texts = list(&message["content"]).iter().filter(|part| part["type"] == "text").count();
        assert!(!message["content"].is_array() || texts < list(&message["content"]).len(), "{}", place());
        if role == "user" || role == "assistant" && message["tool_calls"].is_null() {
            assert_eq!(role == "user", is_user_next, "roles alternate: {}", place());
            is_user_next = !is_user_next;
        }
        for call in list(&message["tool_calls"]) {
            let id = word(call, "id");
            assert!(id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()), "{}", place());
        }
    }
}

fn assert_one_system_message(messages: &[Value]) {
    let position = messages.iter().rposition(|message| message["role"] == "system");
    assert!(position.is_none_or(|position| position == 0), "{messages:#?}");
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.len() <= 64
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

fn assert_pairs(messages: &[Value]) {
    let (mut open, mut ids): (HashSet<&str>, HashSet<&str>) = (HashSet::new(), HashSet::new());
    let first = messages.iter().find(|message| message["role"] != "system");
    assert!(first.is_none_or(|first| first["role"] == "user"), "the user begins: {messages:#?}");
    for (at, message) in messages.iter().enumerate() {
        let place = || format!("message {at} of {messages:#?}");
        let role = word(message, "role");
        if role == "tool" {
            assert!(open.remove(word(message, "tool_call_id")), "a result without a call: {}", place());
            continue;
        }
        assert!(open.is_empty(), "calls without a result: {}", place());
        assert!(matches!(role, "user" | "assistant" | "system"), "{}", place());
        for call in list(&message["tool_calls"]) {
            let (id, function) = (word(call, "id"), &call["function"]);
            let is_valid = (1..=40).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
            assert!(is_valid && ids.insert(id), "an invalid or repeated id: {}", place());
            assert!(is_name(word(function, "name")), "an invalid name: {}", place());
            let arguments = serde_json::from_str::<Value>(word(function, "arguments"));
            assert!(arguments.is_ok_and(|arguments| arguments.is_object()), "no arguments: {}", place());
            open.insert(id);
        }
    }
    assert!(open.is_empty(), "calls without a result at the end: {messages:#?}");
}

/// Asserts that a message has only the standard fields, and `others`.
fn assert_standard(message: &Value, others: &[&str]) {
    let assert_fields = |value: &Value, known: &[&str]| {
        for (key, value) in value.as_object().expect("an object") {
            let may_be_null = key == "content" && !message["tool_calls"].is_null();
            assert!(known.contains(&key.as_str()) || others.contains(&key.as_str()), "{key} in {message:#}");
            assert!(!value.is_null() || may_be_null, "null in {message:#}");
            assert_ne!(*value, Value::Array(Vec::new()), "{message:#}");
        }
    };
    let role = word(message, "role");
    assert_fields(
        message,
        match role {
            "tool" => &["role", "content", "tool_call_id"],
            "assistant" => &["role", "content", "name", "tool_calls"],
            _ => &["role", "content", "name"],
        },
    );
    assert!(role == "assistant" || !message["content"].is_null(), "{message:#}");
    let is_valid = |char: char| !char.is_whitespace() && !"<|\\/>".contains(char);
    assert!(message["name"].is_null() || !word(message, "name").is_empty(), "{message:#}");
    assert!(word(message, "name").chars().all(is_valid), "{message:#}");
    for part in list(&message["content"]) {
        match word(part, "type") {
            "text" => assert_fields(part, &["type", "text"]),
            kind @ ("image_url" | "input_audio" | "file") if role == "user" => {
                assert_fields(part, &["type", kind]);
                let sources = ["url", "data", "file_data", "file_id"];
                let has_data = sources.iter().any(|key| !word(&part[kind], key).is_empty());
                assert!(has_data, "no data: {message:#}");
                let url = word(&part[kind], "url");
                let is_data =
                    url.strip_prefix("data:").is_some_and(|data| data.starts_with(image_type(data)));
                let is_address = url.get(..4).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http"));
                assert!(kind != "image_url" || is_data || is_address, "a wrong type: {message:#}");
            }
            other => panic!("{other} in {message:#}"),
        }
    }
    for call in list(&message["tool_calls"]) {
        assert_fields(call, &["id", "type", "function"]);
        assert_eq!(
            (call["type"].as_str(), call.as_object().map(serde_json::Map::len)),
            (Some("function"), Some(3 + usize::from(!call["extra_content"].is_null())))
        );
        assert_fields(&call["function"], &["name", "arguments"]);
    }
}

/// Returns the media type of an image in base64 by its first bytes, and `no image` for other data.
fn image_type(data: &str) -> &'static str {
    let base64 = data.rsplit_once(',').map_or(data, |(_, base64)| base64);
    let types =
        [("iVBORw0K", "image/png"), ("/9j/", "image/jpeg"), ("R0lGOD", "image/gif"), ("UklGR", "image/webp")];
    types.into_iter().find(|(start, _)| base64.starts_with(start)).map_or("no image", |(_, kind)| kind)
}

/// Asserts that the messages API accepts the list: roles alternate, results come first and follow their calls, ids are
/// valid and unique, and texts are not blank.
pub(crate) fn assert_anthropic_accepts(context: &Value) {
    let is_valid_id = |id: &str| {
        !id.is_empty()
            && id.len() <= 128
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
    };
    let messages = list(&context["messages"]);
    assert_provider_tools(messages);
    let (mut ids, mut open) = (HashSet::new(), Vec::new());
    let mut marks = list(&context["system"]).iter().filter(|block| !block["cache_control"].is_null()).count();
    for (at, message) in messages.iter().enumerate() {
        let place = || format!("message {at} of {messages:#?}");
        let role = if at % 2 == 0 { "user" } else { "assistant" };
        assert_eq!(message["role"], role, "roles alternate, beginning with the user: {}", place());
        let blocks = list(&message["content"]);
        assert!(!blocks.is_empty(), "empty: {}", place());
        let mut has_content = false;
        for block in blocks {
            marks += usize::from(!block["cache_control"].is_null());
            match (role, word(block, "type")) {
                (_, "text") => {
                    assert!(!word(block, "text").trim().is_empty(), "blank text: {}", place());
                    has_content = true;
                }
                ("user", "image" | "document" | "search_result" | "container_upload") => {
                    has_content = true;
                    assert_image(block);
                }
                ("user", "tool_result") => {
                    assert!(!has_content, "results come first: {}", place());
                    let id = word(block, "tool_use_id");
                    let call = open.iter().position(|open| *open == id);
                    open.remove(call.unwrap_or_else(|| panic!("a result without a call: {}", place())));
                    for inside in list(&block["content"]) {
                        let kinds = ["text", "image", "document", "search_result", "tool_reference"];
                        assert!(kinds.contains(&word(inside, "type")), "{}", place());
                        let blank = inside["text"].as_str().is_some_and(|text| text.trim().is_empty());
                        assert!(!blank, "blank text: {}", place());
                        assert_image(inside);
                    }
                }
                ("assistant", "thinking") => assert!(!word(block, "signature").is_empty(), "{}", place()),
                ("assistant", "redacted_thinking" | "server_tool_use" | "mcp_tool_use") => {}
                ("assistant", kind) if kind.ends_with("_tool_result") => {}
                ("assistant", "tool_use") => {
                    let id = word(block, "id");
                    assert!(is_valid_id(id) && ids.insert(id), "an invalid or repeated id: {}", place());
                    assert!(is_valid_id(word(block, "name")) && block["input"].is_object(), "{}", place());
                    open.push(id);
                }
                other => panic!("{other:?}: {}", place()),
            }
        }
        let last = blocks.last().map_or("", |block| word(block, "type"));
        assert!(!last.contains("thinking"), "thinking at the end: {}", place());
        assert!(role == "assistant" || open.is_empty(), "calls without a result: {}", place());
    }
    assert!(open.is_empty(), "calls without a result at the end: {messages:#?}");
    assert!(marks <= 4, "{marks} cache marks");
    if let Some(last) = messages.last().filter(|last| last["role"] == "assistant") {
        let text = list(&last["content"]).last().map_or("", |block| word(block, "text"));
        assert_eq!(text, text.trim_end(), "white space at the end");
    }
}

fn assert_image(block: &Value) {
    let source = &block["source"];
    let is_data = block["type"] == "image" && source["type"] == "base64";
    assert!(!is_data || source["media_type"] == image_type(word(source, "data")), "a wrong type: {block:#}");
}

/// Asserts that each call of a tool of the provider has its result in the same message, except in the last message.
fn assert_provider_tools(messages: &[Value]) {
    for (at, message) in messages.iter().enumerate() {
        let ids = |suffix: &str, key: &str| {
            let blocks =
                list(&message["content"]).iter().filter(|block| word(block, "type").ends_with(suffix));
            blocks.map(|block| word(block, key).to_owned()).collect::<HashSet<_>>()
        };
        let (calls, results) = (ids("_tool_use", "id"), ids("_tool_result", "tool_use_id"));
        let is_last = at + 1 == messages.len();
        assert!(calls == results || is_last && calls.is_superset(&results), "message {at} of {messages:#?}");
    }
}
