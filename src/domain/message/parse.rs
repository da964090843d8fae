//! The chat format as it comes over the wire, and what makes a message valid.

use super::super::json::MapOnly;
use super::super::validation::FieldError;
use super::{Content, Parts, Role, ToolCall};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::value::RawValue;
use std::collections::HashSet;

/// The fields that the rules read; all others are kept in the JSON text and not looked at.
#[derive(Deserialize)]
pub(super) struct RawMessage<'a> {
    role: Option<String>,
    name: Option<String>,
    #[serde(borrow, default, deserialize_with = "present")]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
    tool_calls: Option<Vec<MapOnly<RawToolCall>>>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize)]
struct RawToolCall {
    id: Option<String>,
    r#type: Option<String>,
    function: Option<MapOnly<RawFunction>>,
}

#[derive(Deserialize)]
struct RawFunction {
    name: Option<String>,
    arguments: Option<String>,
}

/// `Option<&RawValue>` takes `null` for a raw value; a null content is no content.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    let raw = <&RawValue>::deserialize(deserializer).map_err(D::Error::custom)?;
    Ok((raw.get() != "null").then_some(raw))
}

impl RawMessage<'_> {
    pub(super) fn validate(self) -> Result<Parts, Vec<FieldError>> {
        let mut wrong = Vec::new();
        let role = match self.role.as_deref() {
            None => {
                wrong.push(FieldError::new("role", "missing: one of user, assistant, tool"));
                None
            }
            Some(name) => Role::parse(name).or_else(|| {
                let detail = match name {
                    "system" | "developer" => {
                        "the system prompt is not part of a history: send it as system_prompt of the context request"
                    }
                    _ => "one of user, assistant, tool",
                };
                wrong.push(FieldError::new("role", detail));
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
        let refusal: Option<String> = match role {
            Some(Role::Assistant) => self.refusal.and_then(|raw| serde_json::from_str(raw.get()).ok()),
            _ => None,
        };
        let content = match (content, &refusal) {
            (None, None) => None,
            (content, refusal) => Some(content.unwrap_or_default().and(refusal.as_deref())),
        };
        let tool_calls = read_calls(self.tool_calls.unwrap_or_default(), &mut wrong);
        if role == Some(Role::Assistant) && content.is_none() && tool_calls.is_empty() {
            wrong.push(FieldError::new(
                "content",
                "missing: an assistant message has content, a refusal or tool_calls",
            ));
        }
        if matches!(role, Some(Role::User | Role::Tool)) && content.is_none() {
            wrong.push(FieldError::new("content", "missing: a string or a list of content parts"));
        }
        if role == Some(Role::Tool) && self.tool_call_id.as_deref().is_none_or(str::is_empty) {
            wrong.push(FieldError::new(
                "tool_call_id",
                "missing: a tool message names the call that it answers",
            ));
        }
        if role.is_some_and(|role| role != Role::Assistant) && !tool_calls.is_empty() {
            wrong.push(FieldError::new("tool_calls", "only an assistant message makes tool calls"));
        }
        if role.is_some_and(|role| role != Role::Tool) && self.tool_call_id.is_some() {
            wrong.push(FieldError::new("tool_call_id", "only a tool message answers a tool call"));
        }
        match role {
            Some(role) if wrong.is_empty() => Ok(Parts {
                role,
                name: self.name,
                content: content.unwrap_or_default(),
                refusal,
                tool_calls,
                tool_call_id: self.tool_call_id,
            }),
            _ => Err(wrong),
        }
    }
}

/// What the chat format has in place of a content block of Anthropic's. Such a block would be in no list what it is
/// meant to be: chat completions refuse it, and a call in it would have no result.
fn openai_equivalent(kind: &str) -> Option<&'static str> {
    match kind {
        "tool_use" => Some("send the call in tool_calls"),
        "tool_result" => Some("send the result as a message with the role tool"),
        "image" => Some("send a part of the type image_url"),
        "document" => Some("send a part of the type file"),
        "thinking" | "redacted_thinking" => Some("leave it out"),
        _ => None,
    }
}

fn read_calls(calls: Vec<MapOnly<RawToolCall>>, wrong: &mut Vec<FieldError>) -> Vec<ToolCall> {
    let mut read = Vec::with_capacity(calls.len());
    let mut ids = HashSet::with_capacity(calls.len());
    for (index, MapOnly(call)) in calls.into_iter().enumerate() {
        let at = |field: &str| format!("tool_calls[{index}].{field}");
        if call.r#type.is_some_and(|kind| kind != "function") {
            wrong.push(FieldError::new(at("type"), "must be \"function\""));
        }
        let id = call.id.unwrap_or_default();
        if id.is_empty() {
            wrong.push(FieldError::new(at("id"), "missing: the result of the call names it"));
        }
        let MapOnly(function) = call.function.unwrap_or(MapOnly(RawFunction { name: None, arguments: None }));
        let name = function.name.unwrap_or_default();
        if name.is_empty() {
            wrong.push(FieldError::new(at("function.name"), "missing: the name of the tool"));
        }
        let arguments = function.arguments.unwrap_or_else(|| {
            wrong.push(FieldError::new(at("function.arguments"), "missing: a string of JSON text"));
            String::new()
        });
        if !ids.insert(id.clone()) {
            wrong.push(FieldError::new(at("id"), "used twice in this message"));
        }
        read.push(ToolCall { id, name, arguments });
    }
    read
}

impl Content {
    fn read(raw: &RawValue) -> Result<Self, Vec<FieldError>> {
        #[derive(Deserialize)]
        struct Part {
            r#type: Option<String>,
            text: Option<String>,
            refusal: Option<String>,
        }
        if raw.get().starts_with('"') {
            let text = serde_json::from_str(raw.get())
                .map_err(|error| vec![FieldError::new("content", format!("not a valid string: {error}"))])?;
            return Ok(Self { text, ..Self::default() });
        }
        if !raw.get().starts_with('[') {
            return Err(vec![FieldError::new("content", "must be a string or a list of content parts")]);
        }
        let parts: Vec<MapOnly<Part>> =
            super::super::json::read(raw.get()).map_err(|FieldError { field, detail }| {
                vec![FieldError { field: format!("content{field}"), detail }]
            })?;
        let (mut content, mut wrong) = (Self { parts: true, ..Self::default() }, Vec::new());
        for (index, MapOnly(part)) in parts.into_iter().enumerate() {
            let text = match (part.r#type.as_deref(), part.text, part.refusal) {
                (Some("text"), Some(text), _) | (Some("refusal"), _, Some(text)) => text,
                (Some(kind @ ("text" | "refusal")), ..) => {
                    wrong.push(FieldError::new(format!("content[{index}].{kind}"), "missing: a string"));
                    continue;
                }
                (Some(kind), ..) if let Some(instead) = openai_equivalent(kind) => {
                    let detail = format!("{kind} is a block of Anthropic's: {instead}");
                    wrong.push(FieldError::new(format!("content[{index}].type"), detail));
                    continue;
                }
                (Some(kind), ..) if !kind.is_empty() => {
                    content.other.push(kind.to_owned());
                    continue;
                }
                _ => {
                    wrong.push(FieldError::new(
                        format!("content[{index}].type"),
                        "missing: text, image_url or another type of the chat format",
                    ));
                    continue;
                }
            };
            content = content.and(Some(&text));
        }
        if wrong.is_empty() { Ok(content) } else { Err(wrong) }
    }

    /// This, and more text on a line of its own.
    fn and(mut self, more: Option<&str>) -> Self {
        if let Some(more) = more.filter(|more| !more.is_empty()) {
            if !self.text.is_empty() {
                self.text.push('\n');
            }
            self.text.push_str(more);
        }
        self
    }
}
