//! What of a message is searched: its text, the participant's name, the names and arguments of its tool calls.

use crate::domain::message::{Message, Role};

/// Bytes of a message that are searched; of a longer one, its beginning: little enough for the index, be it a term for
/// each pair of characters.
pub const MAX_INDEXED_BYTES: usize = 128 * 1024;

/// The text that is searched, and that snippets are cut from.
#[must_use]
pub fn searchable_text(message: &Message) -> String {
    let mut text = String::new();
    add(&mut text, message.name().unwrap_or_default(), false);
    // What a tool answers is JSON as a rule; what people write is not, though it begins with a bracket.
    add(&mut text, message.content(), message.role() == Role::Tool);
    for call in message.tool_calls() {
        add(&mut text, &call.name, false);
        add(&mut text, &call.arguments, true);
    }
    text
}

fn add(text: &mut String, part: &str, may_be_json: bool) {
    if !text.is_empty() && !part.is_empty() {
        text.push('\n');
    }
    let room = MAX_INDEXED_BYTES.saturating_sub(text.len());
    let part = part.get(..part.floor_char_boundary(room)).unwrap_or_default();
    if may_be_json && part.trim_ascii_start().starts_with(['{', '[']) {
        unescape(text, part);
    } else {
        text.push_str(part);
    }
}

/// JSON inside of a text, such as the arguments of a call, for a reader: `\n` is no letter n, and `caf\u00e9` a word.
fn unescape(out: &mut String, json: &str) {
    let mut rest = json;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        if let Some((first, behind)) = unit(after) {
            // Beyond the first plane a character is two escapes.
            let second = behind.strip_prefix('\\').and_then(unit);
            let pair = second.map(|(second, behind)| ([first, second], behind));
            let pair = pair.filter(|([first, _], _)| (0xd800..0xdc00).contains(first));
            let (units, behind) =
                pair.map_or_else(|| (vec![first], behind), |(units, behind)| (units.to_vec(), behind));
            out.extend(char::decode_utf16(units).map(|c| c.unwrap_or(' ')));
            rest = behind;
            continue;
        }
        let mut characters = after.chars();
        match characters.next() {
            Some('n' | 'r' | 't' | 'b' | 'f') => out.push(' '),
            Some(c) => out.push(c),
            None => {}
        }
        rest = characters.as_str();
    }
    out.push_str(rest);
}

/// The four digits behind a `u`, and what comes then.
fn unit(text: &str) -> Option<(u16, &str)> {
    let (digits, rest) = text.strip_prefix('u')?.split_at_checked(4)?;
    Some((u16::from_str_radix(digits, 16).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn searched(message: &serde_json::Value) -> String {
        searchable_text(&Message::from_stored(message.to_string()).expect("valid"))
    }

    #[test]
    fn everything_that_was_said_or_done_is_searched() {
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
    fn of_a_long_message_its_beginning() {
        let long = "é".repeat(MAX_INDEXED_BYTES);
        assert_eq!(searched(&json!({"role": "user", "content": long})).len(), MAX_INDEXED_BYTES);
    }
}
