//! A message of a session: the JSON text as sent, without white space between tokens, and the parsed fields.
//!
//! The JSON text is stored, sent and returned; it is never encoded again from the parsed fields. So unknown fields, the
//! spelling of numbers and strings and the order of keys are preserved.

use super::validation::FieldError;
use parts::{Content, MessageParts};
use serde_json::value::RawValue;

mod parse;
mod parts;

pub use parts::{Role, ToolCall};

/// A valid message in the OpenAI chat format.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The text as sent by the client, without white space between tokens.
    json: Box<str>,
    parts: MessageParts,
}

impl Message {
    /// Creates a message of plain text.
    #[must_use]
    pub fn text(role: Role, text: &str) -> Self {
        #[derive(serde::Serialize)]
        struct PlainMessage<'a> {
            role: Role,
            content: &'a str,
        }
        let json = serde_json::to_string(&PlainMessage { role, content: text })
            .unwrap_or_else(|_| unreachable!("two strings are always JSON"));
        let content = Content { text: text.to_owned(), ..Content::default() };
        let (name, refusal, tool_calls, tool_call_id) = (None, None, Vec::new(), None);
        Self {
            json: json.into(),
            parts: MessageParts { role, name, content, refusal, tool_calls, tool_call_id },
        }
    }

    /// Parses a message sent by a client.
    ///
    /// # Errors
    /// All invalid fields, not only the first one.
    pub fn parse(json: &RawValue) -> Result<Self, Vec<FieldError>> {
        Ok(Self { parts: parse::parse(json.get())?, json: minify_json(json.get()).into() })
    }

    /// Creates a message from its content: a string or a list of content parts.
    ///
    /// # Errors
    /// All invalid parts, with paths relative to the content.
    pub fn from_content(role: Role, content: &RawValue) -> Result<Self, Vec<FieldError>> {
        let json = format!(r#"{{"role":"{role}","content":{}}}"#, minify_json(content.get()));
        Self::from_stored(json).map_err(|mut errors| {
            for error in &mut errors {
                let path = error.field.strip_prefix("content").unwrap_or(&error.field);
                error.field = path.trim_start_matches('.').to_owned();
            }
            errors
        })
    }

    /// Parses a message that was stored or is already free of white space between tokens.
    ///
    /// # Errors
    /// The text is not a valid message; for a stored message: the store was modified by another program.
    pub fn from_stored(json: String) -> Result<Self, Vec<FieldError>> {
        Ok(Self { parts: parse::parse(&json)?, json: json.into() })
    }

    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    #[must_use]
    pub fn role(&self) -> Role {
        self.parts.role
    }

    /// Returns the name of the participant, if the client sent one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.parts.name.as_deref()
    }

    /// Returns the text parts and the refusal, joined by line feeds. The text may be empty.
    #[must_use]
    pub fn content(&self) -> &str {
        &self.parts.content.text
    }

    /// Returns `true` if the content is a list of parts instead of a string.
    #[must_use]
    pub fn has_parts(&self) -> bool {
        self.parts.content.is_list
    }

    /// Returns the field `refusal` of an assistant message.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.parts.refusal.as_deref()
    }

    /// Returns the types of the content parts that are not text.
    #[must_use]
    pub fn attachment_types(&self) -> &[String] {
        &self.parts.content.attachment_types
    }

    #[must_use]
    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.parts.tool_calls
    }

    /// Returns the id of the tool call whose result the message is.
    #[must_use]
    pub fn tool_call_id(&self) -> Option<&str> {
        self.parts.tool_call_id.as_deref()
    }
}

/// Removes the white space between the tokens of valid JSON text, so that a message never spans several lines.
pub(crate) fn minify_json(json: &str) -> String {
    let (mut in_string, mut is_escaped) = (false, false);
    let is_kept = |c: &char| {
        match c {
            _ if is_escaped => is_escaped = false,
            // In valid JSON a backslash occurs inside strings only.
            '\\' => is_escaped = true,
            '"' => in_string = !in_string,
            _ => {}
        }
        in_string || !c.is_ascii_whitespace()
    };
    let mut minified = String::with_capacity(json.len());
    minified.extend(json.chars().filter(is_kept));
    minified
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Message, Vec<FieldError>> {
        Message::parse(serde_json::from_str(json).expect("JSON"))
    }

    fn invalid_fields(json: &str) -> Vec<String> {
        parse(json).expect_err("invalid").into_iter().map(|error| error.field).collect()
    }

    #[test]
    fn parsed_message_keeps_unknown_fields_and_spelling() {
        let given = r#"{ "z": 1.0, "role": "assistant",  "content": "a \" b\n {x : 1}", "big": 123456789012345678901 }"#;
        let message = parse(given).expect("valid");
        let kept = r#"{"z":1.0,"role":"assistant","content":"a \" b\n {x : 1}","big":123456789012345678901}"#;
        assert_eq!(message.json(), kept);
        assert_eq!(message.content(), "a \" b\n {x : 1}");
        assert_eq!(Message::from_stored(kept.to_owned()), Ok(message));
    }

    #[test]
    fn content_parts_are_split_into_text_and_attachments() {
        let message = parse(
            r#"{"role":"user","content":[{"type":"text","text":"look"},{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"here"}]}"#,
        )
        .expect("valid");
        assert_eq!(message.content(), "look\nhere");
        assert_eq!(message.attachment_types(), ["image_url"]);
    }

    #[test]
    fn refusal_of_assistant_is_part_of_its_text() {
        let message = parse(r#"{"role":"assistant","content":null,"refusal":"No."}"#).expect("valid");
        assert_eq!((message.content(), message.refusal()), ("No.", Some("No.")));
        let both =
            parse(r#"{"role":"assistant","content":[{"type":"text","text":"Well."}],"refusal":"No."}"#);
        assert_eq!(both.expect("valid").content(), "Well.\nNo.");
        // In a user message, and as any value other than a string, it is an unknown field.
        let user = parse(r#"{"role":"user","content":"Hi.","refusal":"No."}"#).expect("valid");
        assert_eq!((user.content(), user.refusal()), ("Hi.", None));
        assert_eq!(invalid_fields(r#"{"role":"assistant","content":null,"refusal":7}"#), ["content"]);
        assert_eq!(invalid_fields(r#"{"role":"assistant","content":null,"refusal":null}"#), ["content"]);
    }

    #[test]
    fn null_content_without_tool_calls_is_rejected() {
        let calls = r#""tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]"#;
        assert!(parse(&format!(r#"{{"role":"assistant","content":null,{calls}}}"#)).is_ok());
        assert!(parse(&format!(r#"{{"role":"assistant",{calls}}}"#)).is_ok());
        assert_eq!(invalid_fields(r#"{"role":"assistant","content":null}"#), ["content"]);
        assert_eq!(invalid_fields(r#"{"role":"user"}"#), ["content"]);
    }

    #[test]
    fn all_invalid_fields_are_reported_with_their_paths() {
        let invalid = r#"{"role":"assistant","content":[{"type":"text"},{}],"tool_call_id":"x",
            "tool_calls":[{"id":"","type":"f","function":{"name":"n"}}]}"#;
        assert_eq!(
            invalid_fields(invalid),
            [
                "content[0].text",
                "content[1].type",
                "tool_calls[0].type",
                "tool_calls[0].id",
                "tool_calls[0].function.arguments",
                "tool_call_id"
            ]
        );
        assert_eq!(invalid_fields(r#"{"role":"system","content":"x"}"#), ["role"]);
        assert_eq!(invalid_fields(r#"{"role":"tool","content":"x"}"#), ["tool_call_id"]);
        assert_eq!(invalid_fields(r#"["role"]"#), [""]);
        assert_eq!(invalid_fields(r#"{"role":"user","content":7}"#), ["content"]);
        assert_eq!(invalid_fields(r#"{"role":7,"content":"x"}"#), ["role"]);
        let several_types = r#"{"role":7,"content":[{"type":"text","text":7}],"name":"n","tool_call_id":[]}"#;
        assert_eq!(invalid_fields(several_types), ["role", "content[0].text", "tool_call_id"]);
        let part = r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":7}]}"#;
        assert_eq!(invalid_fields(part), ["content[1].text"]);
        // A list of the values of an object is not an object, although serde would accept it.
        let part = r#"{"role":"user","content":[["text","a"]]}"#;
        assert_eq!(invalid_fields(part), ["content[0]"]);
        for (calls, field) in [
            (r#"["a","function",{"name":"f","arguments":""}]"#, "tool_calls[0]"),
            (r#"{"id":"a","function":["f","{}"]}"#, "tool_calls[0].function"),
        ] {
            assert_eq!(invalid_fields(&format!(r#"{{"role":"assistant","tool_calls":[{calls}]}}"#)), [field]);
        }
        let call = r#"{"role":"assistant","tool_calls":[{"id":"a","function":{"name":7,"arguments":"{}"}}]}"#;
        assert_eq!(invalid_fields(call), ["tool_calls[0].function.name"]);
    }

    #[test]
    fn list_instead_of_object_is_rejected() {
        let call = r#"{"role":"assistant","tool_calls":[["a","function",{"name":"f","arguments":"{}"}]]}"#;
        assert_eq!(invalid_fields(call), ["tool_calls[0]"]);
        let function = r#"{"role":"assistant","tool_calls":[{"id":"a","function":["f","{}"]}]}"#;
        assert_eq!(invalid_fields(function), ["tool_calls[0].function"]);
        assert_eq!(invalid_fields(r#"{"role":"user","content":[["text","hello",null]]}"#), ["content[0]"]);
    }

    #[test]
    fn content_block_of_anthropic_format_is_rejected() {
        for kind in ["tool_use", "tool_result", "image", "document", "thinking"] {
            let part =
                format!(r#"{{"role":"user","content":[{{"type":"text","text":"a"}},{{"type":"{kind}"}}]}}"#);
            let errors = parse(&part).expect_err("rejected");
            assert_eq!(errors[0].field, "content[1].type");
            assert!(errors[0].detail.starts_with(kind) && errors[0].detail.contains(": "), "{errors:?}");
        }
    }

    #[test]
    fn duplicate_tool_call_id_among_100_000_calls_is_found() {
        let call = |id: usize| format!(r#"{{"id":"{id}","function":{{"name":"f","arguments":"{{}}"}}}}"#);
        let calls: Vec<String> = (0..100_000).chain([7]).map(call).collect();
        let json = format!(r#"{{"role":"assistant","tool_calls":[{}]}}"#, calls.join(","));
        assert_eq!(invalid_fields(&json), ["tool_calls[100000].id"]);
    }

    #[test]
    fn duplicate_key_is_rejected() {
        assert_eq!(invalid_fields(r#"{"role":"user","content":"a","role":"tool"}"#), ["role"]);
    }
}
