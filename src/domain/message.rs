//! A message of a session: the JSON text exactly as the client gave it, and the few things read out of it.
//!
//! The JSON text is what is stored, sent and returned; nothing is ever re-encoded from parsed parts, so a field
//! that precis does not know, a number's spelling and the order of keys all survive.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::value::RawValue;
use std::fmt;

/// Who speaks. The system prompt is not part of a history: it comes with each context request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// What is wrong with a message, and where: `field` is the path inside the message (`tool_calls[1].id`), empty for
/// the message itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// Path inside the message.
    pub field: String,
    /// What to do about it, for the client's developer.
    pub detail: String,
}

impl Invalid {
    fn new(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            detail: detail.into(),
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
    tool_calls: Vec<ToolCall>,
    tool_call_id: Option<String>,
}

impl Parts {
    fn read(json: &str) -> Result<Self, Vec<Invalid>> {
        if !json.trim_ascii_start().starts_with('{') {
            return Err(vec![Invalid::new("", "must be an object with role and content")]);
        }
        let wire: Wire<'_> = serde_json::from_str(json).map_err(|error| {
            vec![Invalid::new(
                "",
                format!("not a message of the chat format: {error}"),
            )]
        })?;
        wire.validate()
    }
}

/// The text of a message and what stands beside text in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
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
        let json = serde_json::to_string(&Plain {
            role: role.as_str(),
            content: text,
        })
        .unwrap_or_else(|_| unreachable!("two strings are always JSON"));
        let content = Content {
            text: text.to_owned(),
            other: Vec::new(),
        };
        let parts = Parts {
            role,
            name: None,
            content,
            tool_calls: Vec::new(),
            tool_call_id: None,
        };
        Self {
            json: json.into(),
            parts,
        }
    }

    /// Reads a message as a client gave it.
    ///
    /// # Errors
    /// Every field that is wrong, not just the first.
    pub fn parse(json: &RawValue) -> Result<Self, Vec<Invalid>> {
        Ok(Self {
            parts: Parts::read(json.get())?,
            json: compact(json.get()).into(),
        })
    }

    /// A message of this content: a string or a list of content parts. Errors name the path inside the content.
    ///
    /// # Errors
    /// Every part that is wrong.
    pub fn of_content(role: Role, content: &RawValue) -> Result<Self, Vec<Invalid>> {
        let json = format!(r#"{{"role":"{role}","content":{}}}"#, compact(content.get()));
        match Parts::read(&json) {
            Ok(parts) => Ok(Self {
                json: json.into(),
                parts,
            }),
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
    pub fn from_stored(json: String) -> Result<Self, Vec<Invalid>> {
        Ok(Self {
            parts: Parts::read(&json)?,
            json: json.into(),
        })
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

    /// The text content: text parts joined by line feeds, empty where there is none.
    #[must_use]
    pub fn content(&self) -> &str {
        &self.parts.content.text
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

/// The fields that the rules read; all others are kept in the JSON text and not looked at.
#[derive(Deserialize)]
struct Wire<'a> {
    role: Option<String>,
    name: Option<String>,
    #[serde(borrow, default, deserialize_with = "present")]
    content: Option<&'a RawValue>,
    tool_calls: Option<Vec<WireCall>>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize)]
struct WireCall {
    id: Option<String>,
    r#type: Option<String>,
    function: Option<WireFunction>,
}

#[derive(Deserialize)]
struct WireFunction {
    name: Option<String>,
    arguments: Option<String>,
}

/// `Option<&RawValue>` takes `null` for a raw value; a null content is no content.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    let raw = <&RawValue>::deserialize(deserializer).map_err(D::Error::custom)?;
    Ok((raw.get() != "null").then_some(raw))
}

impl Wire<'_> {
    fn validate(self) -> Result<Parts, Vec<Invalid>> {
        let mut wrong = Vec::new();
        let role = match self.role.as_deref() {
            None => {
                wrong.push(Invalid::new("role", "missing: one of user, assistant, tool"));
                None
            }
            Some(name) => Role::parse(name).or_else(|| {
                let detail = match name {
                    "system" | "developer" => {
                        "the system prompt is not part of a history: send it as system_prompt of the context request"
                    }
                    _ => "one of user, assistant, tool",
                };
                wrong.push(Invalid::new("role", detail));
                None
            }),
        };
        let content = match self.content.map(Content::read) {
            None => None,
            Some(Ok(content)) => Some(content),
            Some(Err(mut errors)) => {
                wrong.append(&mut errors);
                Some(Content::default())
            }
        };
        let tool_calls = read_calls(self.tool_calls.unwrap_or_default(), &mut wrong);
        if role == Some(Role::Assistant) && content.is_none() && tool_calls.is_empty() {
            wrong.push(Invalid::new(
                "content",
                "missing: an assistant message has content, tool_calls or both",
            ));
        }
        if matches!(role, Some(Role::User | Role::Tool)) && content.is_none() {
            wrong.push(Invalid::new(
                "content",
                "missing: a string or a list of content parts",
            ));
        }
        if role == Some(Role::Tool) && self.tool_call_id.as_deref().is_none_or(str::is_empty) {
            wrong.push(Invalid::new(
                "tool_call_id",
                "missing: a tool message names the call that it answers",
            ));
        }
        if role.is_some_and(|role| role != Role::Assistant) && !tool_calls.is_empty() {
            wrong.push(Invalid::new(
                "tool_calls",
                "only an assistant message makes tool calls",
            ));
        }
        if role.is_some_and(|role| role != Role::Tool) && self.tool_call_id.is_some() {
            wrong.push(Invalid::new(
                "tool_call_id",
                "only a tool message answers a tool call",
            ));
        }
        match role {
            Some(role) if wrong.is_empty() => Ok(Parts {
                role,
                name: self.name,
                content: content.unwrap_or_default(),
                tool_calls,
                tool_call_id: self.tool_call_id,
            }),
            _ => Err(wrong),
        }
    }
}

fn read_calls(calls: Vec<WireCall>, wrong: &mut Vec<Invalid>) -> Vec<ToolCall> {
    let mut read = Vec::with_capacity(calls.len());
    for (index, call) in calls.into_iter().enumerate() {
        let at = |field: &str| format!("tool_calls[{index}].{field}");
        if call.r#type.is_some_and(|kind| kind != "function") {
            wrong.push(Invalid::new(at("type"), "must be \"function\""));
        }
        let id = call.id.unwrap_or_default();
        if id.is_empty() {
            wrong.push(Invalid::new(at("id"), "missing: the result of the call names it"));
        }
        let function = call.function.unwrap_or(WireFunction {
            name: None,
            arguments: None,
        });
        let name = function.name.unwrap_or_default();
        if name.is_empty() {
            wrong.push(Invalid::new(at("function.name"), "missing: the name of the tool"));
        }
        let arguments = function.arguments.unwrap_or_else(|| {
            wrong.push(Invalid::new(
                at("function.arguments"),
                "missing: a string of JSON text",
            ));
            String::new()
        });
        if read.iter().any(|other: &ToolCall| other.id == id) {
            wrong.push(Invalid::new(at("id"), "used twice in this message"));
        }
        read.push(ToolCall { id, name, arguments });
    }
    read
}

impl Content {
    fn read(raw: &RawValue) -> Result<Self, Vec<Invalid>> {
        #[derive(Deserialize)]
        struct Part {
            r#type: Option<String>,
            text: Option<String>,
            refusal: Option<String>,
        }
        if raw.get().starts_with('"') {
            let text = serde_json::from_str(raw.get())
                .map_err(|error| vec![Invalid::new("content", format!("not a valid string: {error}"))])?;
            return Ok(Self {
                text,
                other: Vec::new(),
            });
        }
        let parts: Vec<Part> = serde_json::from_str(raw.get()).map_err(|_| {
            vec![Invalid::new(
                "content",
                "must be a string, a list of content parts or null",
            )]
        })?;
        let (mut content, mut wrong) = (Self::default(), Vec::new());
        for (index, part) in parts.into_iter().enumerate() {
            let text = match (part.r#type.as_deref(), part.text, part.refusal) {
                (Some("text"), Some(text), _) | (Some("refusal"), _, Some(text)) => text,
                (Some(kind @ ("text" | "refusal")), ..) => {
                    wrong.push(Invalid::new(
                        format!("content[{index}].{kind}"),
                        "missing: a string",
                    ));
                    continue;
                }
                (Some(kind), ..) if !kind.is_empty() => {
                    content.other.push(kind.to_owned());
                    continue;
                }
                _ => {
                    wrong.push(Invalid::new(
                        format!("content[{index}].type"),
                        "missing: text, image_url or another type of the chat format",
                    ));
                    continue;
                }
            };
            if !content.text.is_empty() {
                content.text.push('\n');
            }
            content.text.push_str(&text);
        }
        if wrong.is_empty() { Ok(content) } else { Err(wrong) }
    }
}

/// Drops the white space between the tokens of valid JSON text, so that one message is one line everywhere.
pub(crate) fn compact(json: &str) -> String {
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

    fn parse(json: &str) -> Result<Message, Vec<Invalid>> {
        Message::parse(serde_json::from_str(json).expect("JSON"))
    }

    fn fields(json: &str) -> Vec<String> {
        parse(json)
            .expect_err("invalid")
            .into_iter()
            .map(|invalid| invalid.field)
            .collect()
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
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        assert_eq!(fields(r#"{"role":"user","content":"a","role":"tool"}"#), [""]);
    }
}
