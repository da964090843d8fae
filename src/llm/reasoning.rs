//! Removes the reasoning that some models write into their response, in a think block before the actual answer.
//!
//! Only blocks at the beginning are removed, because a summary may mention such tags.

use crate::domain::invisible::is_invisible;

const TAGS: [&str; 4] = ["think", "thinking", "thought", "reasoning"];

/// Returns the response without its reasoning. The result is empty if the reasoning does not end, because the model
/// then never started its answer.
pub(super) fn strip_reasoning(text: &str) -> &str {
    // Some models begin with a byte order mark.
    let mut rest = text.trim_start_matches(|c: char| c.is_whitespace() || is_invisible(c));
    while let Some(tag) = tags(rest).next().filter(|tag| tag.begin == 0 && tag.kind != TagKind::Close) {
        let end = if tag.kind == TagKind::Empty { Some(tag.end) } else { end_of_block(rest) };
        let Some(end) = end else { return "" };
        rest = rest.get(end..).unwrap_or_default().trim_start();
    }
    // If the chat template opens the block, the response only contains the closing tag: alone on a line, or before an empty line.
    let ends_reasoning = |tag: &Tag| {
        let is_blank = |line: Option<&str>| line.is_none_or(|line| line.trim().is_empty());
        let before = rest.get(..tag.begin).unwrap_or_default().rsplit('\n').next();
        let mut after = rest.get(tag.end..).unwrap_or_default().split('\n');
        tag.kind == TagKind::Close && is_blank(after.next()) && (is_blank(before) || is_blank(after.next()))
    };
    let end = tags(rest).find(ends_reasoning).map(|tag| tag.end);
    end.and_then(|end| rest.get(end..)).unwrap_or(rest).trim_start()
}

/// Returns the end of the block at the beginning: the closing tag that belongs to the first opening tag. Reasoning may mention
/// an opening tag that is never closed; then the block ends with the last closing tag.
fn end_of_block(text: &str) -> Option<usize> {
    let (mut depth, mut last_close) = (0_usize, None);
    for tag in tags(text) {
        match tag.kind {
            TagKind::Open => depth += 1,
            TagKind::Empty => {}
            TagKind::Close => {
                depth = depth.saturating_sub(1);
                last_close = Some(tag.end);
                if depth == 0 {
                    break;
                }
            }
        }
    }
    last_close
}

/// A tag of reasoning, by its positions in the text.
struct Tag {
    begin: usize,
    end: usize,
    kind: TagKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagKind {
    Open,
    Close,
    /// A tag that opens and closes a block, such as `<think/>`.
    Empty,
}

/// Returns the tags of reasoning in a text: in any case, with attributes and white space, such as `</THINK >`, and `[THINK]`.
fn tags(text: &str) -> impl Iterator<Item = Tag> {
    text.match_indices(['<', '[']).filter_map(|(begin, bracket)| {
        let inner = text.get(begin + 1..)?;
        let (is_close, inner) = inner.strip_prefix('/').map_or((false, inner), |inner| (true, inner));
        let name_len = inner.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (name, attributes) = inner.split_at_checked(name_len)?;
        let end_in_text = |end: usize| text.len() - attributes.len() + end + 1;
        if bracket == "[" {
            let kind = if is_close { TagKind::Close } else { TagKind::Open };
            // Square brackets in lower case are ordinary text.
            let is_tag = name == "THINK" && attributes.starts_with(']');
            return is_tag.then(|| Tag { begin, end: end_in_text(0), kind });
        }
        if !TAGS.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            return None;
        }
        let end = attributes.find(['<', '>'])?;
        let (attributes, rest) = attributes.split_at_checked(end)?;
        let is_empty = attributes.ends_with('/');
        let has_space = attributes.starts_with(|c: char| c.is_whitespace());
        let kind = match (is_close, is_empty) {
            (true, _) => TagKind::Close,
            (false, true) => TagKind::Empty,
            (false, false) => TagKind::Open,
        };
        let is_tag = rest.starts_with('>') && (has_space || attributes.is_empty() || attributes == "/");
        is_tag.then(|| Tag { begin, end: end_in_text(end), kind })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_reasoning_is_removed_and_tags_inside_the_text_are_kept() {
        for (text, stripped) in [
            ("<think>Hm. Who is Ada?</think>Ada flies.", "Ada flies."),
            ("\n<think>\nHm.\n</think>\n\nAda flies.", "Ada flies."),
            ("<THINK>Hm.</Think> Ada flies.", "Ada flies."),
            ("<thinking>a</thinking>\n<reasoning>b</reasoning>Ada.", "Ada."),
            ("<think></think>Ada.", "Ada."),
            ("\u{feff}\u{200b}<think>Hm.</think>Ada.", "Ada."),
            ("Hm, who is Ada?\n</think>\n\nAda flies.", "Ada flies."),
            ("<think>Hm. <think>Who?</think> Oh.</think>Ada flies.", "Ada flies."),
            ("<think>Hm. <THINKING>Who?</Thinking> Oh.</THINK>Ada flies.", "Ada flies."),
            ("<think>The tag <think> is strange.</think>Ada flies.", "Ada flies."),
            ("<Think type=\"deep\">Hm.</think >Ada flies.", "Ada flies."),
            ("Hm.\n</THOUGHT>\nAda flies.", "Ada flies."),
            ("Hm, who is Ada?</think>\n\nAda flies.", "Ada flies."),
            ("<think/>Ada flies.", "Ada flies."),
            ("<think />\n<think>Hm.</think>Ada flies.", "Ada flies."),
            ("[THINK]Hm.[/THINK]Ada flies.", "Ada flies."),
            ("[think] Ada [/think] flies.", "[think] Ada [/think] flies."),
            ("Ada wrote </think>\nand flies.", "Ada wrote </think>\nand flies."),
            ("<think>Hm. And then", ""),
            ("[THINK]Hm.", ""),
            ("<think>Hm.</think>", ""),
            (
                "Ada asked what <think> means, and </think> too.",
                "Ada asked what <think> means, and </think> too.",
            ),
            ("<b>Ada</b> flies.", "<b>Ada</b> flies."),
            ("<thin", "<thin"),
            ("<thinker>Ada</thinker>", "<thinker>Ada</thinker>"),
            ("", ""),
            ("é<think>", "é<think>"),
        ] {
            assert_eq!(strip_reasoning(text), stripped, "{text:?}");
        }
    }
}
