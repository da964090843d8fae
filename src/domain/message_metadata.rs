//! Facts about a message that are computed once, when it is stored, so that planning and token budgets need not parse it.

use super::message::{Message, Role};

/// Role, size and tool calls of a stored message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageMetadata {
    pub role: Role,
    pub tokens: i64,
    /// Ids of the tool calls that the message makes.
    pub calls: Vec<String>,
    /// Id of the tool call whose result the message is.
    pub result_of: Option<String>,
    /// The content of the message was removed: see [`super::redaction`].
    pub is_redacted: bool,
}

impl MessageMetadata {
    /// Returns the metadata of `message`; `tokens` is the size of the message.
    pub fn new(message: &Message, tokens: i64) -> Self {
        Self {
            role: message.role(),
            tokens,
            calls: message.tool_calls().iter().map(|call| call.id.clone()).collect(),
            result_of: message.tool_call_id().map(str::to_owned),
            is_redacted: false,
        }
    }
}

/// A stored message that can become part of a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextMessage {
    pub seq: i64,
    pub metadata: MessageMetadata,
    /// The message as sent, without white space between JSON tokens.
    pub json: String,
}

/// Parses a conversation: `u` and `a` are plain messages, `Axy` makes the tool calls x and y, and `tx` is the result of x.
#[cfg(test)]
pub(super) fn conversation(script: &str) -> Vec<MessageMetadata> {
    let message = |word: &str| {
        let (kind, ids) = word.split_at(1);
        let mut ids = ids.chars().map(String::from);
        let (role, calls, result_of) = match kind {
            "u" => (Role::User, Vec::new(), None),
            "t" => (Role::Tool, Vec::new(), ids.next()),
            _ => (Role::Assistant, ids.collect(), None),
        };
        MessageMetadata { role, tokens: 0, calls, result_of, is_redacted: false }
    };
    script.split_whitespace().map(message).collect()
}
