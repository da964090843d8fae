//! Parses and validates a message in the OpenAI chat format.
//!
//! The text of a message, including its content parts, is parsed in one pass.

use super::super::json::{self, MapOnly};
use super::super::validation::FieldError;
use super::parts::{Content, MessageParts, Role, ToolCall};
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fmt;

/// The fields that the rules read. All other fields are kept in the JSON text only.
#[derive(Deserialize)]
struct RawMessage<'a> {
    role: Option<String>,
    name: Option<String>,
    content: Option<RawContent>,
    /// Only a string is a refusal; any other value is kept and ignored.
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
    tool_calls: Option<Vec<MapOnly<RawToolCall>>>,
    tool_call_id: Option<String>,
}

enum RawContent {
    Text(String),
    Parts(Vec<MapOnly<RawContentPart>>),
}

#[derive(Deserialize)]
struct RawContentPart {
    r#type: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct RawToolCall {
    id: Option<String>,
    r#type: Option<String>,
    function: Option<MapOnly<RawFunction>>,
}

#[derive(Default, Deserialize)]
struct RawFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl<'de> Deserialize<'de> for RawContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawContentVisitor)
    }
}

struct RawContentVisitor;

impl<'de> Visitor<'de> for RawContentVisitor {
    type Value = RawContent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of content parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<RawContent, E> {
        Ok(RawContent::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<RawContent, E> {
        Ok(RawContent::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<RawContent, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(RawContent::Parts)
    }
}

/// Parses a message. Returns all invalid fields, not only the first one.
pub(super) fn parse(json: &str) -> Result<MessageParts, Vec<FieldError>> {
    if !json.trim_ascii_start().starts_with('{') {
        return Err(vec![FieldError::new("", "must be an object with role and content")]);
    }
    match json::read::<RawMessage<'_>>(json) {
        Ok(message) => message.validate(),
        // Serde stops at the first field of a wrong type. The errors of the other fields show without that field, but a
        // missing field may then be a consequence of the removal.
        Err(error) => {
            let other_fields = json::remove_field(json, json::top_level_key(&error.field));
            let mut errors = vec![error];
            if let Some(Err(others)) = other_fields.map(|json| parse(&json)) {
                let is_missing = |error: &FieldError| {
                    !error.field.contains(['.', '[']) && error.detail.starts_with("missing")
                };
                errors.extend(others.into_iter().filter(|error| !is_missing(error)));
            }
            Err(errors)
        }
    }
}

impl RawMessage<'_> {
    fn validate(self) -> Result<MessageParts, Vec<FieldError>> {
        let mut errors = Vec::new();
        let role = parse_role(self.role.as_deref(), &mut errors);
        let content = self.content.map(|content| content.validate(&mut errors));
        let refusal: Option<String> = match role {
            Some(Role::Assistant) => self.refusal.and_then(|raw| serde_json::from_str(raw.get()).ok()),
            _ => None,
        };
        let is_empty = content.is_none() && refusal.is_none();
        let mut content = content.unwrap_or_default();
        content.append(refusal.as_deref().unwrap_or_default());
        let tool_calls = validate_tool_calls(self.tool_calls.unwrap_or_default(), &mut errors);
        if role == Some(Role::Assistant) && is_empty && tool_calls.is_empty() {
            let detail = "missing: an assistant message has content, a refusal or tool_calls";
            errors.push(FieldError::new("content", detail));
        }
        if matches!(role, Some(Role::User | Role::Tool)) && is_empty {
            errors.push(FieldError::new("content", "missing: a string or a list of content parts"));
        }
        if role == Some(Role::Tool) && self.tool_call_id.as_deref().is_none_or(str::is_empty) {
            let detail = "missing: a tool message names the tool call whose result it is";
            errors.push(FieldError::new("tool_call_id", detail));
        }
        if role.is_some_and(|role| role != Role::Assistant) && !tool_calls.is_empty() {
            errors.push(FieldError::new("tool_calls", "only an assistant message makes tool calls"));
        }
        if role.is_some_and(|role| role != Role::Tool) && self.tool_call_id.is_some() {
            errors.push(FieldError::new("tool_call_id", "only a tool message is the result of a tool call"));
        }
        match role {
            Some(role) if errors.is_empty() => {
                let (name, tool_call_id) = (self.name, self.tool_call_id);
                Ok(MessageParts { role, name, content, refusal, tool_calls, tool_call_id })
            }
            _ => Err(errors),
        }
    }
}

fn parse_role(name: Option<&str>, errors: &mut Vec<FieldError>) -> Option<Role> {
    let role = name.and_then(Role::parse);
    if role.is_none() {
        let detail = match name {
            None => "missing: one of user, assistant, tool",
            Some("system" | "developer") => {
                "the system prompt is not part of a history: send it as system_prompt of the context request"
            }
            Some(_) => "one of user, assistant, tool",
        };
        errors.push(FieldError::new("role", detail));
    }
    role
}

fn validate_tool_calls(calls: Vec<MapOnly<RawToolCall>>, errors: &mut Vec<FieldError>) -> Vec<ToolCall> {
    let mut valid = Vec::with_capacity(calls.len());
    let mut ids = HashSet::with_capacity(calls.len());
    for (index, MapOnly(call)) in calls.into_iter().enumerate() {
        let mut push = |field: &str, detail| {
            errors.push(FieldError::new(format!("tool_calls[{index}].{field}"), detail));
        };
        if call.r#type.is_some_and(|kind| kind != "function") {
            push("type", "must be \"function\"");
        }
        let id = call.id.unwrap_or_default();
        if id.is_empty() {
            push("id", "missing: the result of the call repeats it");
        }
        let function = call.function.map(|MapOnly(function)| function).unwrap_or_default();
        let name = function.name.unwrap_or_default();
        if name.is_empty() {
            push("function.name", "missing: the name of the tool");
        }
        if function.arguments.is_none() {
            push("function.arguments", "missing: a string of JSON text");
        }
        if !ids.insert(id.clone()) {
            push("id", "used twice in this message");
        }
        valid.push(ToolCall { id, name, arguments: function.arguments.unwrap_or_default() });
    }
    valid
}

impl RawContent {
    fn validate(self, errors: &mut Vec<FieldError>) -> Content {
        let parts = match self {
            Self::Text(text) => return Content { text, ..Content::default() },
            Self::Parts(parts) => parts,
        };
        let mut content = Content { is_list: true, ..Content::default() };
        for (index, MapOnly(part)) in parts.into_iter().enumerate() {
            let mut push = |field: &str, detail: String| {
                errors.push(FieldError::new(format!("content[{index}].{field}"), detail));
            };
            match (part.r#type.as_deref().unwrap_or_default(), part.text, part.refusal) {
                ("text", Some(text), _) | ("refusal", _, Some(text)) => content.append(&text),
                (kind @ ("text" | "refusal"), ..) => push(kind, "missing: a string".to_owned()),
                ("", ..) => {
                    push("type", "missing: text, image_url or another type of the chat format".to_owned());
                }
                (kind, ..) => match openai_equivalent(kind) {
                    Some(equivalent) => {
                        push(
                            "type",
                            format!("{kind} is a content block of the Anthropic format: {equivalent}"),
                        );
                    }
                    None => content.attachment_types.push(kind.to_owned()),
                },
            }
        }
        content
    }
}

/// Returns how to express a content block of the Anthropic format in the chat format. Such a block is rejected, because
/// the OpenAI API does not accept it, and because a call in it would never be paired with its result.
fn openai_equivalent(block_type: &str) -> Option<&'static str> {
    match block_type {
        "tool_use" => Some("send the call in tool_calls"),
        "tool_result" => Some("send the result as a message with the role tool"),
        "image" => Some("send a part of the type image_url"),
        "document" => Some("send a part of the type file"),
        "thinking" | "redacted_thinking" => Some("leave it out"),
        _ => None,
    }
}
