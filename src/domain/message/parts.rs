//! The fields of a message that the rules read.

use super::members::{object, quote};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

/// Longest id of a call that OpenAI accepts.
const MAX_CALL_ID_BYTES: usize = 40;

/// Number of characters of an unknown type that an error shows.
const MAX_SHOWN_CHARS: usize = 64;

/// Returns the beginning of the type of a part or an item, for an error.
pub(super) fn shorten_type(kind: &str) -> String {
    kind.chars().take(MAX_SHOWN_CHARS).collect()
}

/// The author of a message. A history holds no system messages: the system prompt comes with each context request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
}

named_variants!(Role { User = "user", Assistant = "assistant", Tool = "tool" });

/// A tool call of an assistant message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Identifier that the message with the result repeats.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments: JSON text exactly as the model wrote it, possibly invalid.
    pub arguments: String,
}

/// Returns the arguments that stand for the free text of a custom tool call.
pub(super) fn custom_arguments(input: &str) -> String {
    object(&[("input", &quote(input))])
}

/// Returns the id of a call in the form `function_call`, which has none. Its result names the function, too.
pub fn function_call_id(name: &str) -> String {
    let id = format!("function_{name}");
    if id.len() <= MAX_CALL_ID_BYTES {
        return id;
    }
    let hash = Sha256::digest(name);
    format!("function_{}", hex::encode(hash.get(..12).unwrap_or_default()))
}

/// The parsed fields of a valid message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MessageParts {
    pub(super) role: Role,
    pub(super) name: Option<String>,
    pub(super) content: Content,
    pub(super) refusal: Option<String>,
    pub(super) tool_calls: Vec<ToolCall>,
    pub(super) tool_call_id: Option<String>,
}

/// The text of a message and the types of its other content parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    /// The content is a list of parts instead of a string.
    pub(super) is_list: bool,
    pub(super) text: String,
    /// Types of the parts that are not text: `image_url`, `input_audio`, `file` …
    pub(super) attachment_types: Vec<String>,
}

impl Content {
    /// Appends `text` on a line of its own.
    pub(super) fn append(&mut self, text: &str) {
        if !text.is_empty() {
            if !self.text.is_empty() {
                self.text.push('\n');
            }
            self.text.push_str(text);
        }
    }
}
