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
    while tags(rest).next().is_some_and(|tag| tag.begin == 0 && !tag.is_close) {
        let Some(end) = end_of_block(rest) else { return "" };
        rest = rest.get(end..).unwrap_or_default().trim_start();
    }
    // If the chat template opens the block, the response only contains the closing tag, alone on a line.
    let is_alone = |tag: &Tag| {
        let before = rest.get(..tag.begin).unwrap_or_default().rsplit('\n').next();
        let after = rest.get(tag.end..).unwrap_or_default().split('\n').next();
        [before, after].iter().all(|part| part.is_none_or(|part| part.trim().is_empty()))
    };
    let end = tags(rest).filter(|tag| tag.is_close && is_alone(tag)).map(|tag| tag.end).next();
    end.and_then(|end| rest.get(end..)).unwrap_or(rest).trim_start()
}

/// Returns the end of the block at the beginning: the closing tag that belongs to the first opening tag. Reasoning may mention
/// an opening tag that is never closed; then the block ends with the last closing tag.
fn end_of_block(text: &str) -> Option<usize> {
    let (mut depth, mut last_close) = (0_usize, None);
    for tag in tags(text) {
        if tag.is_close {
            depth = depth.saturating_sub(1);
            last_close = Some(tag.end);
            if depth == 0 {
                break;
            }
        } else {
            depth += 1;
        }
    }
    last_close
}

/// A tag of reasoning, by its positions in the text.
struct Tag {
    begin: usize,
    end: usize,
    is_close: bool,
}

/// Returns the tags of reasoning in a text: in any case, with attributes and white space, such as `</THINK >`.
fn tags(text: &str) -> impl Iterator<Item = Tag> {
    text.match_indices('<').filter_map(|(begin, _)| {
        let inner = text.get(begin + 1..)?;
        let (is_close, inner) = inner.strip_prefix('/').map_or((false, inner), |inner| (true, inner));
        let name_len = inner.bytes().take_while(u8::is_ascii_alphabetic).count();
        let name = inner.get(..name_len)?;
        if !TAGS.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            return None;
        }
        let attributes = inner.get(name_len..)?;
        let end = attributes
            .find(['<', '>'])
            .filter(|end| attributes.get(*end..).is_some_and(|at| at.starts_with('>')))?;
        let has_space = attributes.starts_with(|c: char| c.is_whitespace());
        let end_in_text = text.len() - attributes.len() + end + 1;
        (end == 0 || has_space).then_some(Tag { begin, end: end_in_text, is_close })
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
            ("<think>Hm. And then", ""),
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
