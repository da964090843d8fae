//! A message of a session: the JSON text exactly as the client gave it, and the few things read out of it.
//!
//! The JSON text is what is stored, sent and returned; nothing is ever re-encoded from parsed parts, so a field
//! that precis does not know, a number's spelling and the order of keys all survive.

use super::validation::FieldError;
use serde_json::value::RawValue;
use std::fmt;

mod parse;

/// Who speaks. The system prompt is not part of a history: it comes with each context request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The human, or whoever the agent serves.
    User,
    /// The agent.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The word of the OpenAI chat format.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    /// The role of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" => Some(Self::Tool),
            _ => None,
        }
    }
}

/// A valid message in the OpenAI chat format.
///
/// Two views of one thing: [`Message::json`] is the text as given, less white space between tokens; the other
/// methods read the parts that the rules need.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    json: Box<str>,
    parts: Parts,
}

/// A tool call as an assistant message makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that its result names.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments: JSON text, as the model wrote it.
    pub arguments: String,
}

#[derive(Clone, Debug, PartialEq)]
struct Parts {
    role: Role,
    name: Option<String>,
    content: Content,
    refusal: Option<String>,
    tool_calls: Vec<ToolCall>,
    tool_call_id: Option<String>,
}

impl Parts {
    fn read(json: &str) -> Result<Self, Vec<FieldError>> {
        if !json.trim_ascii_start().starts_with('{') {
            return Err(vec![FieldError::new("", "must be an object with role and content")]);
        }
        super::json::read::<parse::RawMessage<'_>>(json).map_err(|invalid| vec![invalid])?.validate()
    }
}

/// The text of a message and what stands beside text in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
    /// Whether it is a list of parts.
    parts: bool,
    text: String,
    /// The types of the parts that are not text: `image_url`, `input_audio`, `file` …
    other: Vec<String>,
}

impl Message {
    /// A message of plain text, in the shape that every provider accepts.
    #[must_use]
    pub fn text(role: Role, text: &str) -> Self {
        #[derive(serde::Serialize)]
        struct Plain<'a> {
            role: &'a str,
            content: &'a str,
        }
        let json = serde_json::to_string(&Plain { role: role.as_str(), content: text })
            .unwrap_or_else(|_| unreachable!("two strings are always JSON"));
        let content = Content { text: text.to_owned(), ..Content::default() };
        let parts =
            Parts { role, name: None, content, refusal: None, tool_calls: Vec::new(), tool_call_id: None };
        Self { json: json.into(), parts }
    }

    /// Reads a message as a client gave it.
    ///
    /// # Errors
    /// Every field that is wrong, not just the first.
    pub fn parse(json: &RawValue) -> Result<Self, Vec<FieldError>> {
        Ok(Self { parts: Parts::read(json.get())?, json: minify_json(json.get()).into() })
    }

    /// A message of this content: a string or a list of content parts. Errors name the path inside the content.
    ///
    /// # Errors
    /// Every part that is wrong.
    pub fn from_content(role: Role, content: &RawValue) -> Result<Self, Vec<FieldError>> {
        let json = format!(r#"{{"role":"{role}","content":{}}}"#, minify_json(content.get()));
        match Parts::read(&json) {
            Ok(parts) => Ok(Self { json: json.into(), parts }),
            Err(mut wrong) => {
                for invalid in &mut wrong {
                    let inner = invalid.field.strip_prefix("content").unwrap_or(&invalid.field);
                    invalid.field = inner.trim_start_matches('.').to_owned();
                }
                Err(wrong)
            }
        }
    }

    /// Reads a message back from the store.
    ///
    /// # Errors
    /// The stored text is not a message: the store was changed by other hands.
    pub fn from_stored(json: String) -> Result<Self, Vec<FieldError>> {
        Ok(Self { parts: Parts::read(&json)?, json: json.into() })
    }

    /// The message as JSON text.
    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Who speaks.
    #[must_use]
    pub fn role(&self) -> Role {
        self.parts.role
    }

    /// The name of the participant, where the client gave one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.parts.name.as_deref()
    }

    /// The text content: text parts joined by line feeds, and the refusal; empty where there is none.
    #[must_use]
    pub fn content(&self) -> &str {
        &self.parts.content.text
    }

    /// Whether the content is a list of parts.
    #[must_use]
    pub fn has_parts(&self) -> bool {
        self.parts.content.parts
    }

    /// What an assistant said that refused, where that stands beside the content.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.parts.refusal.as_deref()
    }

    /// The types of the content parts that are not text.
    #[must_use]
    pub fn other_parts(&self) -> &[String] {
        &self.parts.content.other
    }

    /// The tool calls that it opens.
    #[must_use]
    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.parts.tool_calls
    }

    /// The tool call that it answers.
    #[must_use]
    pub fn tool_call_id(&self) -> Option<&str> {
        self.parts.tool_call_id.as_deref()
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Drops the white space between the tokens of valid JSON text, so that one message is one line everywhere.
pub(crate) fn minify_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        if in_string {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
        } else if c.is_ascii_whitespace() {
            continue;
        } else if c == '"' {
            in_string = true;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Message, Vec<FieldError>> {
        Message::parse(serde_json::from_str(json).expect("JSON"))
    }

    fn fields(json: &str) -> Vec<String> {
        parse(json).expect_err("invalid").into_iter().map(|invalid| invalid.field).collect()
    }

    #[test]
    fn a_message_is_kept_as_it_was_given() {
        let given = r#"{ "z": 1.0, "role": "assistant",  "content": "a \" b\n {x : 1}", "big": 123456789012345678901 }"#;
        let message = parse(given).expect("valid");
        let kept = r#"{"z":1.0,"role":"assistant","content":"a \" b\n {x : 1}","big":123456789012345678901}"#;
        assert_eq!(message.json(), kept);
        assert_eq!(message.content(), "a \" b\n {x : 1}");
        assert_eq!(Message::from_stored(kept.to_owned()), Ok(message));
    }

    #[test]
    fn text_and_other_parts_are_told_apart() {
        let message = parse(
            r#"{"role":"user","content":[{"type":"text","text":"look"},{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"here"}]}"#,
        )
        .expect("valid");
        assert_eq!(message.content(), "look\nhere");
        assert_eq!(message.other_parts(), ["image_url"]);
    }

    #[test]
    fn a_refusal_is_what_an_assistant_said() {
        let message = parse(r#"{"role":"assistant","content":null,"refusal":"No."}"#).expect("valid");
        assert_eq!((message.content(), message.refusal()), ("No.", Some("No.")));
        let both =
            parse(r#"{"role":"assistant","content":[{"type":"text","text":"Well."}],"refusal":"No."}"#);
        assert_eq!(both.expect("valid").content(), "Well.\nNo.");
        // Of others it is a field like any that is kept and not looked at; and so is one that is no text.
        let user = parse(r#"{"role":"user","content":"Hi.","refusal":"No."}"#).expect("valid");
        assert_eq!((user.content(), user.refusal()), ("Hi.", None));
        assert_eq!(fields(r#"{"role":"assistant","content":null,"refusal":7}"#), ["content"]);
        assert_eq!(fields(r#"{"role":"assistant","content":null,"refusal":null}"#), ["content"]);
    }

    #[test]
    fn content_may_be_null_only_beside_tool_calls() {
        let calls = r#""tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]"#;
        assert!(parse(&format!(r#"{{"role":"assistant","content":null,{calls}}}"#)).is_ok());
        assert!(parse(&format!(r#"{{"role":"assistant",{calls}}}"#)).is_ok());
        assert_eq!(fields(r#"{"role":"assistant","content":null}"#), ["content"]);
        assert_eq!(fields(r#"{"role":"user"}"#), ["content"]);
    }

    #[test]
    fn every_wrong_field_is_named() {
        let wrong = r#"{"role":"assistant","content":[{"type":"text"},{}],"tool_call_id":"x",
            "tool_calls":[{"id":"","type":"f","function":{"name":"n"}}]}"#;
        assert_eq!(
            fields(wrong),
            [
                "content[0].text",
                "content[1].type",
                "tool_calls[0].type",
                "tool_calls[0].id",
                "tool_calls[0].function.arguments",
                "tool_call_id"
            ]
        );
        assert_eq!(fields(r#"{"role":"system","content":"x"}"#), ["role"]);
        assert_eq!(fields(r#"{"role":"tool","content":"x"}"#), ["tool_call_id"]);
        assert_eq!(fields(r#"["role"]"#), [""]);
        assert_eq!(fields(r#"{"role":"user","content":7}"#), ["content"]);
        assert_eq!(fields(r#"{"role":7,"content":"x"}"#), ["role"]);
        let part = r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":7}]}"#;
        assert_eq!(fields(part), ["content[1].text"]);
        // Lists of the values of these objects.
        let part = r#"{"role":"user","content":[["text","a"]]}"#;
        assert_eq!(fields(part), ["content[0]"]);
        for (calls, field) in [
            (r#"["a","function",{"name":"f","arguments":""}]"#, "tool_calls[0]"),
            (r#"{"id":"a","function":["f","{}"]}"#, "tool_calls[0].function"),
        ] {
            assert_eq!(fields(&format!(r#"{{"role":"assistant","tool_calls":[{calls}]}}"#)), [field]);
        }
        let call = r#"{"role":"assistant","tool_calls":[{"id":"a","function":{"name":7,"arguments":"{}"}}]}"#;
        assert_eq!(fields(call), ["tool_calls[0].function.name"]);
    }

    #[test]
    fn a_list_is_no_object() {
        let call = r#"{"role":"assistant","tool_calls":[["a","function",{"name":"f","arguments":"{}"}]]}"#;
        assert_eq!(fields(call), ["tool_calls[0]"]);
        let function = r#"{"role":"assistant","tool_calls":[{"id":"a","function":["f","{}"]}]}"#;
        assert_eq!(fields(function), ["tool_calls[0].function"]);
        assert_eq!(fields(r#"{"role":"user","content":[["text","hello",null]]}"#), ["content[0]"]);
    }

    #[test]
    fn blocks_of_another_format_are_refused() {
        for kind in ["tool_use", "tool_result", "image", "document", "thinking"] {
            let part =
                format!(r#"{{"role":"user","content":[{{"type":"text","text":"a"}},{{"type":"{kind}"}}]}}"#);
            let wrong = parse(&part).expect_err("refused");
            assert_eq!(wrong[0].field, "content[1].type");
            assert!(wrong[0].detail.starts_with(kind) && wrong[0].detail.contains(": "), "{wrong:?}");
        }
    }

    #[test]
    fn an_id_used_twice_is_found_among_very_many() {
        let call = |id: usize| format!(r#"{{"id":"{id}","function":{{"name":"f","arguments":"{{}}"}}}}"#);
        let calls: Vec<String> = (0..100_000).chain([7]).map(call).collect();
        let json = format!(r#"{{"role":"assistant","tool_calls":[{}]}}"#, calls.join(","));
        assert_eq!(fields(&json), ["tool_calls[100000].id"]);
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        assert_eq!(fields(r#"{"role":"user","content":"a","role":"tool"}"#), ["role"]);
    }
}
