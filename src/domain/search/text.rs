//! Extracts the searchable text of a message: content, name of the participant, names and arguments of tool calls.

use crate::domain::message::{Message, Role};
use crate::domain::tool::Tool;
use std::borrow::Cow;
use std::collections::HashSet;

/// Only this much of a long message is searchable. Small enough for the index, even with a term for each pair of
/// characters.
pub const MAX_INDEXED_BYTES: usize = 128 * 1024;

/// Returns the text that is indexed, and from which snippets are cut.
#[must_use]
pub fn searchable_text(message: &Message) -> Cow<'_, str> {
    // Tool results are usually JSON. Messages of people are not, even if they begin with a bracket.
    let (name, content, may_be_json) = (message.name(), message.content(), message.role() == Role::Tool);
    // The words of a search would be found by the next one.
    let calls = message.tool_calls().iter().filter(|call| !Tool::is_name(&call.name));
    if name.is_none() && !may_be_json && message.tool_calls().is_empty() {
        return Cow::Borrowed(
            content.get(..content.floor_char_boundary(MAX_INDEXED_BYTES)).unwrap_or_default(),
        );
    }
    let mut text = String::new();
    add(&mut text, name.unwrap_or_default(), false);
    add(&mut text, content, may_be_json);
    for call in calls {
        add(&mut text, &call.name, false);
        add(&mut text, &call.arguments, true);
    }
    Cow::Owned(text)
}

/// A detector of calls and results of precis' own tools among messages of a session. They repeat earlier messages or the memory document,
/// so they are neither indexed nor summarised.
#[derive(Debug, Default)]
pub struct OwnResults {
    calls: HashSet<String>,
}

impl OwnResults {
    /// Reads the next message, and returns `true` if it only calls such tools, or is the result of such a call in a message before.
    pub fn is_next(&mut self, message: &Message) -> bool {
        let calls = message.tool_calls();
        let own = || calls.iter().filter(|call| Tool::is_name(&call.name));
        self.calls.extend(own().map(|call| call.id.clone()));
        let only_calls = !calls.is_empty() && own().count() == calls.len() && message.content().is_empty();
        only_calls || message.tool_call_id().is_some_and(|id| self.calls.remove(id))
    }
}

const MAX_SPEAKER_CHARS: usize = 40;
const MAX_SPEAKER_WORDS: usize = 3;
/// The beginning of a longer `name` is enough: a search analyzes the names of all candidates.
const MAX_NAME_CHARS: usize = 128;

/// The speaker of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speaker {
    pub name: String,
    /// `true` if the text begins with the name, which it also does if the name is something else, such as `Note: `.
    pub is_leading: bool,
}

/// Returns the speaker: the `name` of the message, or `Ada` if the text begins with `Ada: `, as in a transcript.
/// The `name` of a tool message is that of the tool.
#[must_use]
pub fn speaker(message: &Message, text: &str) -> Option<Speaker> {
    if message.role() == Role::Tool {
        return None;
    }
    if let Some(name) = message.name() {
        let end = name.char_indices().nth(MAX_NAME_CHARS).map_or(name.len(), |(end, _)| end);
        let name = name.get(..end).unwrap_or_default();
        return Some(Speaker { name: name.to_owned(), is_leading: false });
    }
    let (name, _) = text.split_once(": ")?;
    let is_name = name.chars().nth(MAX_SPEAKER_CHARS).is_none()
        && name.split(' ').count() <= MAX_SPEAKER_WORDS
        && name.split(' ').all(|word| word.starts_with(|c: char| c.is_alphabetic() && !c.is_lowercase()))
        && name.chars().all(|c| c.is_alphabetic() || matches!(c, ' ' | '.' | '-' | '\'' | '’'));
    is_name.then(|| Speaker { name: name.to_owned(), is_leading: true })
}

fn add(text: &mut String, part: &str, may_be_json: bool) {
    if !text.is_empty() && !part.is_empty() {
        text.push('\n');
    }
    let remaining = MAX_INDEXED_BYTES.saturating_sub(text.len());
    let part = part.get(..part.floor_char_boundary(remaining)).unwrap_or_default();
    if may_be_json && part.trim_ascii_start().starts_with(['{', '[']) {
        text.push_str(&unescape(part));
    } else {
        text.push_str(part);
    }
}

/// Replaces the escape sequences of embedded JSON, such as tool arguments: otherwise `\n` would be indexed as a letter, and
/// `caf\u00e9` would be two words.
fn unescape(json: &str) -> String {
    // A character outside the basic plane is two escapes: a surrogate pair.
    let (mut units, mut rest) = (Vec::with_capacity(json.len()), json);
    while let Some((before, escape)) = rest.split_once('\\') {
        units.extend(before.encode_utf16());
        let digits = escape.strip_prefix('u').and_then(|digits| digits.split_at_checked(4));
        if let Some((Ok(unit), after)) = digits.map(|(hex, after)| (u16::from_str_radix(hex, 16), after)) {
            units.push(unit);
            rest = after;
            continue;
        }
        let mut characters = escape.chars();
        if let Some(c) = characters.next() {
            let c = if "nrtbf".contains(c) { ' ' } else { c };
            units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
        }
        rest = characters.as_str();
    }
    units.extend(rest.encode_utf16());
    String::from_utf16_lossy(&units)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::format;
    use serde_json::json;

    fn searched(message: &serde_json::Value) -> String {
        searchable_text(&format::read(&message.to_string()).expect("valid")).into_owned()
    }

    #[test]
    fn searchable_text_contains_name_content_and_tool_calls() {
        let call = json!({"role": "assistant", "name": "Ada", "content": "one moment", "tool_calls": [
            {"id": "1", "function": {"name": "find_ferry", "arguments": "{\"to\":\"\\u00c5l\\nand\\ud83d\\ude00\"}"}}]});
        assert_eq!(searched(&call), "Ada\none moment\nfind_ferry\n{\"to\":\"Ål and😀\"}");
        let result = json!({"role": "tool", "tool_call_id": "1", "content": "[\"8:15\\u0\"]"});
        assert_eq!(searched(&result), "[\"8:15u0\"]");
        assert_eq!(searched(&json!({"role": "user", "content": ""})), "");
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(searched(&parts), "a\nb");
        let path = json!({"role": "user", "content": "[note] C:\\new"});
        assert_eq!(searched(&path), "[note] C:\\new");
    }

    #[test]
    fn speaker_is_the_name_or_leads_the_text_except_of_a_tool() {
        let name_of = |message: serde_json::Value| {
            let message = format::read(&message.to_string()).expect("valid");
            speaker(&message, message.content()).map(|speaker| (speaker.name, speaker.is_leading))
        };
        let user = |name: &str| json!({"role": "user", "name": name, "content": "Bob: hello"});
        assert_eq!(name_of(user("Ada")), Some(("Ada".to_owned(), false)));
        assert_eq!(name_of(user(&"é".repeat(1000))), Some(("é".repeat(MAX_NAME_CHARS), false)));
        let unnamed = json!({"role": "user", "content": "Bob: hello"});
        assert_eq!(name_of(unnamed), Some(("Bob".to_owned(), true)));
        let tool =
            json!({"role": "tool", "tool_call_id": "1", "name": "get_weather", "content": "Sun: all day"});
        assert_eq!(name_of(tool), None);
    }

    #[test]
    fn searchable_text_of_long_message_is_truncated() {
        let long = "é".repeat(MAX_INDEXED_BYTES);
        assert_eq!(searched(&json!({"role": "user", "content": long})).len(), MAX_INDEXED_BYTES);
    }
}
