//! Facts about a message that are computed once, when it is stored, so that planning and token budgets need not parse it.

use super::message::{Message, Role};

/// Role, size and tool calls of a stored message. It is small, because the context cache contains one for each message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageMetadata {
    pub role: Role,
    /// The content of the message was removed: see [`super::redaction`].
    pub is_redacted: bool,
    pub tokens: i64,
    /// `None` for most messages, which have neither calls nor a result.
    tool_ids: Option<Box<ToolIds>>,
}

/// The ids of the tool calls of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolIds {
    /// The tool calls that the message makes.
    pub calls: Vec<String>,
    /// The tool call whose result the message is.
    pub result_of: Option<String>,
}

impl MessageMetadata {
    /// Returns the metadata of `message`; `tokens` is the size of the message.
    pub fn new(message: &Message, tokens: i64) -> Self {
        let calls = message.tool_calls().iter().map(|call| call.id.clone()).collect();
        let tool_ids = ToolIds { calls, result_of: message.tool_call_id().map(str::to_owned) };
        Self::from_parts(message.role(), tokens, tool_ids, false)
    }

    /// Returns the metadata as they were stored.
    pub fn from_parts(role: Role, tokens: i64, tool_ids: ToolIds, is_redacted: bool) -> Self {
        let has_ids = tool_ids != ToolIds::default();
        Self { role, is_redacted, tokens, tool_ids: has_ids.then(|| Box::new(tool_ids)) }
    }

    /// Returns the ids of the tool calls that the message makes.
    pub fn calls(&self) -> &[String] {
        self.tool_ids.as_ref().map_or(&[], |ids| &ids.calls)
    }

    /// Returns the id of the tool call whose result the message is.
    pub fn result_of(&self) -> Option<&str> {
        self.tool_ids.as_ref()?.result_of.as_deref()
    }

    /// Returns the memory that the metadata take on the heap, approximately.
    pub fn heap_bytes(&self) -> usize {
        let Some(ids) = &self.tool_ids else { return 0 };
        let texts: usize = ids.calls.iter().chain(&ids.result_of).map(String::capacity).sum();
        size_of::<ToolIds>() + ids.calls.capacity() * size_of::<String>() + texts
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

/// Parses a conversation: `u`, `a` and `s` are plain messages, `Axy` makes the tool calls x and y, and `tx` is the result of x.
#[cfg(test)]
pub(super) fn conversation(script: &str) -> Vec<MessageMetadata> {
    let message = |word: &str| {
        let (kind, ids) = word.split_at(1);
        let mut ids = ids.chars().map(String::from);
        let (role, calls, result_of) = match kind {
            "u" => (Role::User, Vec::new(), None),
            "s" => (Role::System, Vec::new(), None),
            "t" => (Role::Tool, Vec::new(), ids.next()),
            _ => (Role::Assistant, ids.collect(), None),
        };
        MessageMetadata::from_parts(role, 0, ToolIds { calls, result_of }, false)
    };
    script.split_whitespace().map(message).collect()
}
