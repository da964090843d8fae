//! Removes the reasoning that some models write into their response, in a think block before the actual answer.
//!
//! Only blocks at the beginning are removed, because a summary may mention such tags.

use crate::domain::invisible::is_invisible;

const TAGS: [&str; 4] = ["think", "thinking", "thought", "reasoning"];

/// Returns the response without its reasoning and without the marks of a chat template. The result is empty if the reasoning does not end,
/// because the model then never started its answer.
pub(super) fn strip_reasoning(text: &str) -> &str {
    strip_marks(strip_blocks(strip_marks(text)))
}

/// Marks that end a turn, in the templates of open models; those between `<|` and `|>` are found without a list.
const TURN_ENDS: [&str; 5] = ["</s>", "<end_of_turn>", "<eos>", "<｜end▁of▁sentence｜>", "[/INST]"];

/// Marks after which a model that does not stop writes the next turn.
const NEXT_TURNS: [&str; 6] =
    ["<|start|>", "<|im_start|>", "<start_of_turn>", "<|im_end|>", "<|end|>", "<|eot_id|>"];

/// Returns the text of the last channel, without the marks of the chat template around it: servers leak those of open models when their
/// template is wrong. The text is empty if the last channel is one for reasoning.
fn strip_marks(text: &str) -> &str {
    const MESSAGE: &str = "<|message|>";
    let mut rest = text.trim();
    if let Some((head, body)) = rest.rsplit_once(MESSAGE) {
        let channel = head.rsplit_once("<|channel|>").map_or("", |(_, name)| name.trim());
        if channel.starts_with("analysis") || channel.starts_with("commentary") {
            return "";
        }
        rest = body;
    } else if rest.starts_with("<|channel|>analysis") {
        return "";
    }
    loop {
        let before = rest;
        rest = rest.trim();
        if let Some((name, after)) = rest.strip_prefix("<|").and_then(|mark| mark.split_once("|>"))
            && is_mark(name)
        {
            // The names of the role and of the channel.
            let names = ["assistant", "final"].into_iter();
            rest = names.fold(after, |after, name| after.strip_prefix(name).unwrap_or(after));
        }
        if let Some((text, name)) = rest.strip_suffix("|>").and_then(|text| text.rsplit_once("<|"))
            && is_mark(name)
        {
            rest = text;
        }
        rest = TURN_ENDS.into_iter().fold(rest, |rest, end| rest.strip_suffix(end).unwrap_or(rest)).trim();
        if rest == before {
            break;
        }
    }
    // A model that goes on after the end of its turn plays the other side.
    let end = NEXT_TURNS.into_iter().filter_map(|mark| rest.find(mark)).min();
    end.and_then(|end| rest.get(..end)).unwrap_or(rest).trim_end()
}

/// Returns `true` for the name of a mark, such as `im_end`.
fn is_mark(name: &str) -> bool {
    (1..=32).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Returns the response without its blocks of reasoning.
fn strip_blocks(text: &str) -> &str {
    // Some models begin with a byte order mark.
    let mut rest = text.trim_start_matches(|c: char| c.is_whitespace() || is_invisible(c));
    while let Some(tag) = tags(rest).next().filter(|tag| tag.begin == 0 && tag.kind != TagKind::Close) {
        let end = if tag.kind == TagKind::Empty { Some(tag.end) } else { end_of_block(rest) };
        let Some(end) = end else { return "" };
        rest = rest.get(end..).unwrap_or_default().trim_start();
    }
    // If the chat template opens the block, the response only contains the closing tag: alone on a line, or before an empty line.
    // A block that the text opens itself, at the beginning of a line, is an example of such a block.
    let mut examples = 0_usize;
    let ends_reasoning = |tag: &Tag| {
        let before = rest.get(..tag.begin).unwrap_or_default();
        if tag.kind == TagKind::Open && ends_with_blank_line(before) {
            examples += 1;
        }
        if tag.kind != TagKind::Close {
            return false;
        }
        if examples > 0 {
            examples -= 1;
            return false;
        }
        let next_line = after_blank_line(rest.get(tag.end..).unwrap_or_default());
        next_line.is_some_and(|next| ends_with_blank_line(before) || after_blank_line(next).is_some())
    };
    let end = tags(rest).find(ends_reasoning).map(|tag| tag.end);
    end.and_then(|end| rest.get(end..)).unwrap_or(rest).trim_start()
}

/// Returns `true` if the last line of a text is blank or empty.
fn ends_with_blank_line(text: &str) -> bool {
    let text = text.trim_end_matches(is_space_in_line);
    text.is_empty() || text.ends_with('\n')
}

/// Returns the text after its first line if this line is blank.
fn after_blank_line(text: &str) -> Option<&str> {
    let text = text.trim_start_matches(is_space_in_line);
    if text.is_empty() { Some(text) } else { text.strip_prefix('\n') }
}

fn is_space_in_line(c: char) -> bool {
    c != '\n' && c.is_whitespace()
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
    fn marks_of_chat_templates_are_removed() {
        for (text, expected) in [
            (
                "<|channel|>analysis<|message|>The user wants…<|end|><|start|>assistant<|channel|>final<|message|>Ada flies.<|return|>",
                "Ada flies.",
            ),
            ("<|channel|>final<|message|>Ada flies.", "Ada flies."),
            ("<|channel|>analysis<|message|>Ada flies, so I", ""),
            ("<|channel|>analysis", ""),
            ("Ada flies.<end_of_turn>\n", "Ada flies."),
            ("<|im_start|>assistant\nAda flies.<|im_end|>\n<|im_start|>user\nThanks!", "Ada flies."),
            ("<|start_header_id|>assistant<|end_header_id|>\n\nAda flies.<|eot_id|>", "Ada flies."),
            ("Ada flies.</s>", "Ada flies."),
            ("<think>Hm.</think>Ada flies.<|endoftext|>", "Ada flies."),
            ("a <| b |> c", "a <| b |> c"),
        ] {
            assert_eq!(strip_reasoning(text), expected, "{text}");
        }
    }

    #[test]
    fn large_texts_of_tags_are_read_once() {
        for part in ["</think>", "<think>", "<think></think>", "<think/>", "<think ", "</think>\n"] {
            for start in ["", "Ada"] {
                // A quadratic search would take minutes.
                let text = format!("{start}{}", part.repeat(1_000_000 / part.len()));
                assert!(text.trim_end().ends_with(strip_reasoning(&text)), "{part}");
            }
        }
    }

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
            (
                "Ada showed a block:\n<think>\nHm.\n</think>\n\nIt ends so.",
                "Ada showed a block:\n<think>\nHm.\n</think>\n\nIt ends so.",
            ),
            ("Hm.\n<think>\nWho?\n</think>\nOh.\n</think>\nAda flies.", "Ada flies."),
            ("Hm, the <think> tag.\n</think>\n\nAda flies.", "Ada flies."),
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
