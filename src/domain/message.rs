//! A message of a session: the JSON text as sent, and its typed parts.
//!
//! The JSON text is stored and returned; it is never encoded again from the parts. So unknown fields, the spelling of numbers and
//! strings and the order of keys are preserved. [`super::format`] reads a message from JSON, and renders it for a model.

use super::redaction::PLACEHOLDER;
use object::quote;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub mod object;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
    /// A note between other messages. The system prompt comes with each context request.
    System,
    /// A note of the developer; a system message where a provider does not know the role.
    Developer,
}

named_variants!(Role {
    User = "user",
    Assistant = "assistant",
    Tool = "tool",
    System = "system",
    Developer = "developer"
});

impl Role {
    /// Returns `true` for a message that instructs the model. At the beginning of a list, it is the system prompt.
    pub fn is_instruction(self) -> bool {
        matches!(self, Self::System | Self::Developer)
    }
}

/// A tool call of an assistant message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that the message with the result repeats. It can be empty or the same as that of another call.
    pub id: String,
    /// Name of the tool, possibly invalid.
    pub name: String,
    /// Arguments: JSON text exactly as the model wrote it, possibly invalid.
    pub arguments: String,
    /// The signature of the thought before the call, which Gemini needs back.
    pub signature: Option<String>,
}

/// The data of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Url(String),
    /// Data in base64, with padding and without white space.
    Data {
        media_type: String,
        base64: String,
    },
    /// The id of a file at the provider.
    Id(String),
}

/// A part of a message, whatever its format is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Text(String),
    Refusal(String),
    /// A spoken answer; clients often drop the data and the transcript.
    Voice {
        id: String,
        transcript: String,
    },
    Image {
        source: Source,
        detail: Option<String>,
    },
    Audio {
        base64: String,
        format: String,
    },
    File {
        source: Source,
        name: String,
    },
    /// The call at this position of [`Message::tool_calls`].
    Call(usize),
    /// A part that no model can be sent; a text names it. `kind` is its type, `name` that of the file, or empty.
    Other {
        kind: String,
        name: String,
        json: String,
    },
}

/// An element of the content: its parts, and the block of the Anthropic format that it was sent as. Thinking and the tools of a
/// provider have a block and no parts: only this format can express them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    pub block: Option<Block>,
    pub parts: Vec<Part>,
}

/// A block that only the Anthropic format has, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub kind: String,
    pub json: String,
}

/// A message of any format.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    json: Box<str>,
    fields: MessageFields,
    text: String,
}

/// The fields of a message that the rules read.
#[derive(Clone, Debug, PartialEq)]
pub struct MessageFields {
    pub role: Role,
    /// The name of the participant.
    pub name: Option<String>,
    /// The content is a list of parts instead of a text.
    pub is_list: bool,
    pub elements: Vec<Element>,
    pub calls: Vec<ToolCall>,
    /// The id of the call whose result the message is; empty if it names none.
    pub result_of: Option<String>,
}

impl MessageFields {
    pub fn new(role: Role) -> Self {
        let (elements, calls) = (Vec::new(), Vec::new());
        Self { role, name: None, is_list: false, elements, calls, result_of: None }
    }

    /// Appends a part without a block.
    pub fn push(&mut self, part: Part) {
        self.elements.push(Element { block: None, parts: vec![part] });
    }

    /// Appends a call, with the block that it was sent as.
    pub fn push_call(&mut self, call: ToolCall, block: Option<Block>) {
        self.elements.push(Element { block, parts: vec![Part::Call(self.calls.len())] });
        self.calls.push(call);
    }
}

impl Part {
    /// Returns the text of the part, which search finds and summaries contain.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Refusal(text) | Self::Voice { transcript: text, .. } => Some(text),
            _ => None,
        }
    }

    /// Returns the type of an attachment.
    pub fn attachment_type(&self) -> Option<&str> {
        match self {
            Self::Image { .. } => Some("image_url"),
            Self::Audio { .. } => Some("input_audio"),
            Self::File { .. } => Some("file"),
            Self::Other { kind, .. } => Some(kind),
            _ => None,
        }
    }
}

impl Message {
    /// Creates a message; `json` has no white space between tokens.
    pub fn new(json: String, fields: MessageFields) -> Self {
        let mut text = String::new();
        for part in fields.elements.iter().flat_map(|element| &element.parts) {
            let part = part.text().unwrap_or_default();
            if !text.is_empty() && !part.is_empty() {
                text.push('\n');
            }
            text.push_str(part);
        }
        Self { json: json.into(), fields, text }
    }

    /// Creates a message of plain text.
    pub fn text(role: Role, text: &str) -> Self {
        let mut fields = MessageFields::new(role);
        fields.push(Part::Text(text.to_owned()));
        Self::new(format!(r#"{{"role":"{role}","content":{}}}"#, quote(text)), fields)
    }

    /// Creates the result of a tool.
    pub fn tool_result(id: &str, text: &str) -> Self {
        let result_of = Some(id.to_owned());
        let mut fields = MessageFields { result_of, ..MessageFields::new(Role::Tool) };
        fields.push(Part::Text(text.to_owned()));
        Self::new(
            format!(r#"{{"role":"tool","tool_call_id":{},"content":{}}}"#, quote(id), quote(text)),
            fields,
        )
    }

    /// Returns the message without its content: the role, the ids and names of tool calls, and the id of the call that it
    /// answers. The redaction of a redacted message is the same message.
    #[must_use]
    pub fn redacted(&self) -> Self {
        let role = self.role();
        if let Some(id) = self.tool_call_id() {
            return Self::tool_result(id, PLACEHOLDER);
        }
        let mut fields = MessageFields::new(role);
        fields.push(Part::Text(PLACEHOLDER.to_owned()));
        let mut json = format!(r#"{{"role":"{role}","content":{}"#, quote(PLACEHOLDER));
        for ToolCall { id, name, .. } in self.tool_calls() {
            json += if fields.calls.is_empty() { r#","tool_calls":["# } else { "," };
            let function = format!(r#"{{"name":{},"arguments":"{{}}"}}"#, quote(name));
            json += &[r#"{"id":"#, &quote(id), r#","type":"function","function":"#, &function, "}"].concat();
            let (id, name, arguments) = (id.clone(), name.clone(), "{}".to_owned());
            fields.push_call(ToolCall { id, name, arguments, signature: None }, None);
        }
        json += if fields.calls.is_empty() { "}" } else { "]}" };
        Self::new(json, fields)
    }

    pub fn json(&self) -> &str {
        &self.json
    }

    pub fn role(&self) -> Role {
        self.fields.role
    }

    /// Returns the name of the participant, if the client sent one.
    pub fn name(&self) -> Option<&str> {
        self.fields.name.as_deref()
    }

    /// Returns `true` if the content is a list of parts instead of a text.
    pub fn is_list(&self) -> bool {
        self.fields.is_list
    }

    /// Returns all texts and the refusal, joined by line feeds. The text may be empty.
    pub fn content(&self) -> &str {
        &self.text
    }

    /// Returns the content in its order, and then calls and the refusal of fields of their own.
    pub fn elements(&self) -> &[Element] {
        &self.fields.elements
    }

    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        self.fields.elements.iter().flat_map(|element| &element.parts)
    }

    /// Returns the types of the parts that are not text.
    pub fn attachment_types(&self) -> impl Iterator<Item = &str> {
        self.parts().filter_map(Part::attachment_type)
    }

    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.fields.calls
    }

    /// Returns the id of the tool call whose result the message is; empty if the message names none.
    pub fn tool_call_id(&self) -> Option<&str> {
        self.fields.result_of.as_deref()
    }
}

/// Returns the text in JSON, without quotes, if the message consists of a role and a text, like most messages.
pub fn plain_text(json: &str) -> Option<&str> {
    const ROLE_FIRST: [(&str, &str); 2] =
        [(r#"{"role":"user","content":""#, "\"}"), (r#"{"role":"assistant","content":""#, "\"}")];
    const TEXT_FIRST: [(&str, &str); 2] =
        [(r#"{"content":""#, r#"","role":"user"}"#), (r#"{"content":""#, r#"","role":"assistant"}"#)];
    let inside = |(start, end): &(&str, &str)| json.strip_prefix(start)?.strip_suffix(end);
    // The text ends at the first quote without an escape, so this quote must be the last one.
    ROLE_FIRST.iter().chain(&TEXT_FIRST).find_map(inside).filter(|text| {
        text.match_indices('"').all(|(at, _)| {
            let before = text.as_bytes().get(..at).unwrap_or_default();
            before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
        })
    })
}

/// Returns the field `extra` of a stored message: a JSON object with data of an adapter.
pub fn extra(json: &str) -> Option<String> {
    object::Object::parse(json).get("extra").filter(|extra| extra.starts_with('{')).map(str::to_owned)
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
