//! Profiles of the format `openai`: the rules of servers that speak it and reject lists that OpenAI accepts. `docs/formats.md` has the
//! source of each rule.

use crate::domain::message::Role;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// The rules of a server for lists in the format `openai`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
pub enum Profile {
    /// OpenAI, and all servers that accept the same lists.
    #[default]
    #[serde(rename = "openai")]
    OpenAi,
    /// Gemini's chat endpoint: signatures of thoughts, names of results, one system message.
    #[serde(rename = "gemini")]
    Gemini,
    /// Mistral, and chat templates in which roles must alternate.
    #[serde(rename = "strict")]
    Strict,
}

named_variants!(Profile { OpenAi = "openai", Gemini = "gemini", Strict = "strict" });

/// The signature that Google documents for calls of other models.
pub(super) const NO_SIGNATURE: &str = "skip_thought_signature_validator";
/// Text of a message that has no content, because some servers reject empty content.
pub(super) const EMPTY_MESSAGE: &str = "(empty message)";
/// Answer that is inserted between results of tools and the next message of the user.
pub(super) const NO_ANSWER: &str = "(no answer)";
/// Mark of a system message that is sent as text of the user.
pub(super) const SYSTEM_MARK: &str = "(system message)";

impl Profile {
    /// Returns the role in a list of a message with this role. A system message between others can become one of the user.
    pub(super) fn role(self, recorded: Role) -> Role {
        match recorded {
            recorded if !recorded.is_instruction() => recorded,
            _ if self == Self::OpenAi => Role::System,
            _ => Role::User,
        }
    }
}

/// A message of a list.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Sent {
    role: String,
    content: Value,
    /// Name, calls and the id of a call.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Merges consecutive messages of the model; with the profile `strict`, also those of the user. Returns the list, and the position in it
/// for each message.
pub(super) fn apply<'m>(profile: Profile, list: impl Iterator<Item = &'m str>) -> (Vec<Sent>, Vec<usize>) {
    let (mut sent, mut positions): (Vec<Sent>, Vec<usize>) = (Vec::new(), Vec::new());
    for json in list {
        let mut message: Sent = serde_json::from_str(json).unwrap_or_default();
        if profile == Profile::Strict && message.content.is_null() {
            message.content = "".into();
        }
        let is_repeated =
            message.role == "assistant" || (message.role == "user" && profile == Profile::Strict);
        match sent.last_mut().filter(|before| is_repeated && before.role == message.role) {
            Some(before) => before.append(message),
            None => sent.push(message),
        }
        positions.push(sent.len() - 1);
    }
    (sent, positions)
}

impl Sent {
    /// Appends content and calls of the next message; this one has no calls.
    fn append(&mut self, next: Self) {
        self.content = match (self.content.take(), next.content) {
            (first, Value::Null) => first,
            (Value::Null, second) => second,
            (Value::String(first), Value::String(second)) if first.is_empty() || second.is_empty() => {
                (first + &second).into()
            }
            (Value::String(first), Value::String(second)) => format!("{first}\n\n{second}").into(),
            (first, second) => [as_parts(first), as_parts(second)].concat().into(),
        };
        self.others.extend(next.others.into_iter().filter(|(key, _)| key == "tool_calls"));
    }
}

fn as_parts(content: Value) -> Vec<Value> {
    match content {
        Value::Array(parts) => parts,
        text => vec![json!({"type": "text", "text": text})],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    #[test_case(Profile::Gemini => vec!["user a", "user b", "assistant c\n\nd 1", "tool e", "assistant f"])]
    #[test_case(Profile::Strict => vec!["user a\n\nb", "assistant c\n\nd 1", "tool e", "assistant f"])]
    fn consecutive_messages_are_merged(profile: Profile) -> Vec<String> {
        let list = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "user", "content": "b"}),
            json!({"role": "assistant", "content": "c"}),
            json!({"role": "assistant", "content": "d", "tool_calls": [{}]}),
            json!({"role": "tool", "content": "e"}),
            json!({"role": "assistant", "content": ""}),
            json!({"role": "assistant", "content": "f"}),
        ]
        .map(|message| message.to_string());
        let (messages, positions) = apply(profile, list.iter().map(String::as_str));
        assert_eq!((positions.len(), positions.last()), (list.len(), Some(&(messages.len() - 1))));
        let line = |message: &Sent| {
            let calls = message.others.get("tool_calls").and_then(Value::as_array);
            let calls = calls.map_or(String::new(), |calls| format!(" {}", calls.len()));
            format!("{} {}{calls}", message.role, message.content.as_str().unwrap())
        };
        messages.iter().map(line).collect()
    }

    #[test]
    fn texts_are_merged_with_images() {
        let image = json!({"type": "image_url", "image_url": {"url": "u"}});
        let list =
            [json!({"role": "user", "content": "a"}), json!({"role": "user", "content": [image.clone()]})];
        let list = list.map(|message| message.to_string());
        let (messages, _) = apply(Profile::Strict, list.iter().map(String::as_str));
        assert_eq!(messages[0].content, json!([{"type": "text", "text": "a"}, image]));
    }
}
