//! Removes the reasoning that some models write into their response, in a think block before the actual answer.
//!
//! Only blocks at the beginning are removed, because a summary may mention such tags.

const TAGS: [&str; 4] = ["think", "thinking", "thought", "reasoning"];

/// Returns the response without its reasoning. The result is empty if the reasoning does not end, because the model
/// then never started its answer.
pub(super) fn strip_reasoning(text: &str) -> &str {
    let mut rest = text.trim_start();
    while let Some(tag) = TAGS.iter().find(|tag| starts_with_open_tag(rest, tag)) {
        let close_tag = format!("</{tag}>");
        // ASCII lower case keeps all byte positions.
        let Some(end) = rest.to_ascii_lowercase().find(&close_tag) else {
            return "";
        };
        rest = rest.get(end + close_tag.len()..).unwrap_or_default().trim_start();
    }
    // If the chat template opens the block, the response only contains the closing tag, alone on a line.
    let end = TAGS.iter().find_map(|tag| {
        let close_tag = format!("</{tag}>");
        let mut line_end = 0;
        rest.split_inclusive('\n').find_map(|line| {
            line_end += line.len();
            line.trim().eq_ignore_ascii_case(&close_tag).then_some(line_end)
        })
    });
    end.and_then(|end| rest.get(end..)).unwrap_or(rest)
}

fn starts_with_open_tag(text: &str, tag: &str) -> bool {
    let open_tag = format!("<{tag}>");
    text.get(..open_tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(&open_tag))
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
            ("Hm, who is Ada?\n</think>\n\nAda flies.", "\nAda flies."),
            ("<think>Hm. And then", ""),
            ("<think>Hm.</think>", ""),
            (
                "Ada asked what <think> means, and </think> too.",
                "Ada asked what <think> means, and </think> too.",
            ),
            ("<b>Ada</b> flies.", "<b>Ada</b> flies."),
            ("<thin", "<thin"),
            ("", ""),
            ("é<think>", "é<think>"),
        ] {
            assert_eq!(strip_reasoning(text), stripped, "{text:?}");
        }
    }
}
