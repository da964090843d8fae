//! A message of a session: the JSON text as sent, without white space between tokens, and the parsed fields.
//!
//! The JSON text is stored and returned; it is never encoded again from the parsed fields. So unknown fields, the spelling
//! of numbers and strings and the order of keys are preserved. Models receive the standard form: see [`standard`].

use super::recall_block::without_block;
use super::redaction::PLACEHOLDER;
use super::validation::FieldError;
use members::{Members, ObjectWriter, list, object, quote};
use parse::Source;
use parts::{Content, MessageParts};
use serde_json::value::RawValue;
use standard::Attachments;

mod blocks;
mod members;
mod parse;
mod parts;
mod standard;

pub use blocks::{AnthropicBlock, BlockSize, Equivalent, anthropic_blocks, block_equivalents};
pub use parts::{Role, ToolCall, function_call_id};
pub use standard::{CompleteForm, describe_attachment, plain_text, speaker_name};

/// A valid message in the OpenAI chat format.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The text as sent by the client, without white space between tokens.
    json: Box<str>,
    parts: MessageParts,
}

impl Message {
    /// Creates a message of plain text.
    pub fn text(role: Role, text: &str) -> Self {
        let json = format!(r#"{{"role":"{role}","content":{}}}"#, serde_json::Value::from(text));
        let content = Content { text: text.to_owned(), ..Content::default() };
        let (name, refusal, tool_calls, tool_call_id) = (None, None, Vec::new(), None);
        Self {
            json: json.into(),
            parts: MessageParts { role, name, content, refusal, tool_calls, tool_call_id },
        }
    }

    /// Parses a message sent by a client. Returns all invalid fields, not only the first one.
    pub fn parse(json: &RawValue) -> Result<Self, Vec<FieldError>> {
        let json = without_block(json.get());
        Ok(Self { parts: parse::parse(&json, Source::Client)?, json: minify_json(&json).into() })
    }

    /// Parses a message of an export, which may come from an earlier version that accepted more.
    pub fn parse_exported(json: &RawValue) -> Result<Self, Vec<FieldError>> {
        Self::from_stored(minify_json(json.get()))
    }

    /// Parses a message in the Anthropic format; parts of the chat format are accepted, too. Each result of a tool becomes a
    /// message of its own.
    pub fn parse_anthropic(json: &RawValue) -> Result<Vec<Self>, Vec<FieldError>> {
        let json = without_block(json.get());
        let parts = parse::parse(&json, Source::AnthropicClient)?;
        let json = minify_json(&json);
        match blocks::split_results(&json) {
            None => Ok(vec![Self { parts, json: json.into() }]),
            Some(messages) => messages.into_iter().map(Self::from_stored).collect(),
        }
    }

    /// Creates messages from content in the Anthropic format: see [`Self::parse_anthropic`]. Errors have paths relative to
    /// the content.
    pub fn from_anthropic_content(role: Role, content: &RawValue) -> Result<Vec<Self>, Vec<FieldError>> {
        let Self { json, parts } = Self::parse_content(role, content, Source::AnthropicClient)?;
        match blocks::split_results(&json) {
            None => Ok(vec![Self { json, parts }]),
            Some(messages) => messages.into_iter().map(Self::from_stored).collect(),
        }
    }

    /// Creates a message from its content: a string or a list of content parts. Errors have paths relative to the content.
    pub fn from_content(role: Role, content: &RawValue) -> Result<Self, Vec<FieldError>> {
        Self::parse_content(role, content, Source::Client)
    }

    fn parse_content(role: Role, content: &RawValue, source: Source) -> Result<Self, Vec<FieldError>> {
        let content = without_block(content.get());
        let json = format!(r#"{{"role":"{role}","content":{}}}"#, minify_json(&content));
        let parts = parse::parse(&json, source).map_err(|mut errors| {
            for error in &mut errors {
                let path = error.field.strip_prefix("content").unwrap_or(&error.field);
                error.field = path.trim_start_matches('.').to_owned();
            }
            errors
        })?;
        if content == "null" {
            return Err(vec![FieldError::new("", "must be a string or a list of content parts")]);
        }
        Ok(Self { parts, json: json.into() })
    }

    /// Parses a message that was stored or is already free of white space between tokens.
    pub fn from_stored(json: String) -> Result<Self, Vec<FieldError>> {
        Ok(Self { parts: parse::parse(&json, Source::Stored)?, json: json.into() })
    }

    /// Returns the message in its standard form, or `None` if it has that form.
    pub fn standard(&self) -> Option<Self> {
        let converted =
            standard::convert(&self.json, !self.tool_calls().is_empty(), Attachments::OfAllMessages)?;
        Self::from_stored(converted.json).ok()
    }

    /// Returns the message without its content: the role, the ids and names of tool calls, and the id of the call that it
    /// answers. The redaction of a redacted message is the same message.
    pub fn redacted(&self) -> Result<Self, Vec<FieldError>> {
        let mut json = ObjectWriter::with_capacity(64);
        json.add("role", &quote(self.role().as_str()));
        if let Some(id) = self.tool_call_id() {
            json.add("tool_call_id", &quote(id));
        }
        json.add("content", &quote(PLACEHOLDER));
        if !self.tool_calls().is_empty() {
            let call = |call: &ToolCall| {
                let function = object(&[("name", &quote(&call.name)), ("arguments", &quote("{}"))]);
                object(&[("id", &quote(&call.id)), ("type", &quote("function")), ("function", &function)])
            };
            json.add("tool_calls", &list(&self.tool_calls().iter().map(call).collect::<Vec<_>>()));
        }
        Self::from_stored(json.finish())
    }

    pub fn json(&self) -> &str {
        &self.json
    }

    pub fn role(&self) -> Role {
        self.parts.role
    }

    /// Returns the name of the participant, if the client sent one.
    pub fn name(&self) -> Option<&str> {
        self.parts.name.as_deref()
    }

    /// Returns the text parts and the refusal, joined by line feeds. The text may be empty.
    pub fn content(&self) -> &str {
        &self.parts.content.text
    }

    /// Returns `true` if the content is a list of parts instead of a string.
    pub fn has_parts(&self) -> bool {
        self.parts.content.is_list
    }

    /// Returns the field `refusal` of an assistant message.
    pub fn refusal(&self) -> Option<&str> {
        self.parts.refusal.as_deref()
    }

    /// Returns the types of the content parts that are not text.
    pub fn attachment_types(&self) -> &[String] {
        &self.parts.content.attachment_types
    }

    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.parts.tool_calls
    }

    /// Returns the id of the tool call whose result the message is.
    pub fn tool_call_id(&self) -> Option<&str> {
        self.parts.tool_call_id.as_deref()
    }
}

/// A stored message as chat completions accept it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentForm {
    pub json: String,
    /// A text has replaced an image, audio or a file, so the message has another number of tokens than its standard form.
    pub lacks_attachments: bool,
}

impl SentForm {
    /// Returns `None` if the stored message has the form. `makes_calls` tells if the message was stored with calls.
    pub fn of(json: &str, makes_calls: bool) -> Option<Self> {
        let converted = standard::convert(json, makes_calls, Attachments::OfUsers)?;
        Some(Self { json: converted.json, lacks_attachments: converted.lacks_attachments })
    }
}

impl<'a> CompleteForm<'a> {
    /// Returns a stored message with all fields. `makes_calls` tells if the message was stored with calls.
    pub fn of(json: &'a str, makes_calls: bool) -> Self {
        standard::complete(json, makes_calls)
    }
}

/// Returns the field `extra` of a stored message: a JSON object with data of an adapter.
pub fn extra(json: &str) -> Option<&str> {
    // Most messages do not contain this text at all and need not be parsed.
    let extra = json.contains(r#""extra":"#).then(|| Members::parse(json).get("extra"))?;
    extra.filter(|extra| extra.starts_with('{'))
}

/// Removes the white space between the tokens of valid JSON text, so that a message never spans several lines.
pub(crate) fn minify_json(json: &str) -> String {
    let mut minified = String::with_capacity(json.len());
    let mut in_string = false;
    for part in json.split_inclusive('"') {
        if in_string {
            minified.push_str(part);
            let text = part.strip_suffix('"').unwrap_or(part);
            // An escaped quotation mark does not end the string.
            in_string = text.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1;
        } else {
            minified.extend(part.split_ascii_whitespace());
            in_string = true;
        }
    }
    minified
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use test_case::test_case;

    fn parse(json: &str) -> Result<Message, Vec<FieldError>> {
        Message::parse(serde_json::from_str(json).expect("JSON"))
    }

    #[test]
    fn parsed_message_keeps_unknown_fields_and_spelling() {
        let given = r#"{ "z": 1.0, "role": "assistant",  "content": "a \" b\n {x : 1}", "big": 123456789012345678901 }"#;
        let message = parse(given).expect("valid");
        let kept = r#"{"z":1.0,"role":"assistant","content":"a \" b\n {x : 1}","big":123456789012345678901}"#;
        assert_eq!((message.json(), message.content()), (kept, "a \" b\n {x : 1}"));
        assert_eq!(Message::from_stored(kept.to_owned()), Ok(message));
    }

    proptest! {
        #[test]
        fn minified_json_is_compact_and_equal(texts in prop::collection::vec(r#"[a "\\\n{}:é]{0,6}"#, 0..6)) {
            let value = serde_json::json!({"texts": texts, "a \" b": [null, {}]});
            let indented = serde_json::to_string_pretty(&value).expect("JSON");
            prop_assert_eq!(minify_json(&indented.replace('\n', "\r\n\t")), value.to_string());
        }
    }

    #[test_case(r#""user","content":[{"type":"text","text":"a"},{"type":"image_url"},{"type":"text","text":"b"}]"# => ("a\nb".to_owned(), None); "text parts")]
    #[test_case(r#""assistant","content":null,"refusal":"No.""# => ("No.".to_owned(), Some("No.".to_owned())); "refusal")]
    #[test_case(r#""assistant","content":"Well.","refusal":"No.""# => ("Well.\nNo.".to_owned(), Some("No.".to_owned())); "text and refusal")]
    #[test_case(r#""user","content":"Hi.","refusal":"No.""# => ("Hi.".to_owned(), None); "unknown field of a user message")]
    fn text_consists_of_text_parts_and_refusal(fields: &str) -> (String, Option<String>) {
        let message = parse(&format!(r#"{{"role":{fields}}}"#)).expect("valid");
        (message.content().to_owned(), message.refusal().map(str::to_owned))
    }

    /// `tests/api/bodies.rs` has more cases.
    #[test_case(r#"["role"]"# => vec![""]; "list")]
    #[test_case(r#"{"role":7,"content":[{"type":"text","text":7}],"name":"n","tool_call_id":[]}"# => vec!["role", "content[0].text", "tool_call_id"]; "several wrong types")]
    #[test_case(r#"{"role":"user","content":[["text","a"]]}"# => vec!["content[0]"]; "list instead of a part")]
    #[test_case(r#"{"role":"assistant","tool_calls":[["a","function",{"name":"f","arguments":""}]]}"# => vec!["tool_calls[0]"]; "list instead of a call")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"a","function":["f","{}"]}]}"# => vec!["tool_calls[0].function"]; "list instead of a function")]
    #[test_case(r#"{"role":"function","content":"a"}"# => vec!["name"]; "result of an unknown function")]
    #[test_case(r#"{"role":"assistant","tool_calls":[{"id":"a","type":"custom","custom":{"name":"f"}}]}"# => vec!["tool_calls[0].custom.input"]; "custom call without input")]
    #[test_case(r#"{"role":"user","content":[{"type":"output_text"}]}"# => vec!["content[0].text"]; "text part without text")]
    fn invalid_fields_are_reported_with_their_paths(json: &str) -> Vec<String> {
        parse(json).expect_err("invalid").into_iter().map(|error| error.field).collect()
    }

    #[test_case("tool_use", "anthropic")]
    #[test_case("tool-call", "tool_calls")]
    #[test_case("tool_result", "anthropic")]
    #[test_case("function_call_output", "role tool")]
    #[test_case("image", "anthropic")]
    #[test_case("whatever", "input_text")]
    fn unknown_content_part_is_rejected_with_advice(kind: &str, advice: &str) {
        let json = format!(r#"{{"role":"user","content":[{{"type":"{kind}"}}]}}"#);
        let errors = parse(&json).expect_err("rejected");
        assert_eq!(errors[0].field, "content[0].type");
        assert!(errors[0].detail.contains(kind) && errors[0].detail.contains(advice), "{errors:?}");
    }

    #[test_case(r#""user","name":"Ada","content":[{"type":"text","text":"a secret"}],"extra":{"a":1}"# => r#""user","content":"[redacted]""#; "parts, name and extra")]
    #[test_case(r#""assistant","content":null,"refusal":"a secret","reasoning_content":"a secret""# => r#""assistant","content":"[redacted]""#; "refusal and reasoning")]
    #[test_case(r#""assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"a secret"}},{"id":"d","type":"custom","custom":{"name":"g","input":"a secret"}}]"# => r#""assistant","content":"[redacted]","tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}},{"id":"d","type":"function","function":{"name":"g","arguments":"{}"}}]"#; "calls")]
    #[test_case(r#""assistant","function_call":{"name":"f","arguments":"a secret"}"# => r#""assistant","content":"[redacted]","tool_calls":[{"id":"function_f","type":"function","function":{"name":"f","arguments":"{}"}}]"#; "call in the older form")]
    #[test_case(r#""function","name":"f","content":"a secret""# => r#""tool","tool_call_id":"function_f","content":"[redacted]""#; "result in the older form")]
    #[test_case(r#""tool","tool_call_id":"c\"","content":"a secret""# => r#""tool","tool_call_id":"c\"","content":"[redacted]""#; "result")]
    fn redacted_message_keeps_role_and_calls_only(fields: &str) -> String {
        let message = parse(&format!(r#"{{"role":{fields}}}"#)).expect("valid");
        let redacted = message.redacted().expect("valid");
        let calls =
            |message: &Message| message.tool_calls().iter().map(|call| call.id.clone()).collect::<Vec<_>>();
        assert_eq!((calls(&redacted), redacted.tool_call_id()), (calls(&message), message.tool_call_id()));
        assert_eq!(redacted.redacted(), Ok(redacted.clone()));
        redacted
            .json()
            .strip_prefix(r#"{"role":"#)
            .and_then(|json| json.strip_suffix('}'))
            .expect("an object")
            .to_owned()
    }

    #[test]
    fn duplicate_tool_call_id_among_100_000_calls_is_found() {
        let call = |id: usize| format!(r#"{{"id":"{id}","function":{{"name":"f","arguments":"{{}}"}}}}"#);
        let calls: Vec<String> = (0..100_000).chain([7]).map(call).collect();
        let errors = parse(&format!(r#"{{"role":"assistant","tool_calls":[{}]}}"#, calls.join(",")));
        assert_eq!(errors.expect_err("invalid")[0].field, "tool_calls[100000].id");
    }

    /// Comparing each call with all others would take a minute.
    #[test]
    fn duplicate_id_among_100_000_tool_use_blocks_is_found() {
        let block = |id: usize| format!(r#"{{"type":"tool_use","id":"{id}","name":"f","input":{{}}}}"#);
        let blocks: Vec<String> = (0..100_000).chain([7]).map(block).collect();
        let json = format!(r#"{{"role":"assistant","content":[{}]}}"#, blocks.join(","));
        let raw = serde_json::value::RawValue::from_string(json).expect("JSON");
        let errors = Message::parse_anthropic(&raw);
        assert_eq!(errors.expect_err("invalid")[0].field, "content[100000].id");
    }
}
