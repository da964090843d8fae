//! What a model thought aloud: some write it into the answer itself, between marks, before the answer proper.
//!
//! Only what stands at the beginning is taken out. A summary may well speak of such marks.

const MARKS: [&str; 4] = ["think", "thinking", "thought", "reasoning"];

/// The answer without them. Thoughts that don't end leave nothing: the model never came to its answer.
pub(super) fn strip_reasoning(text: &str) -> &str {
    let mut rest = text.trim_start();
    while let Some(mark) = MARKS.iter().find(|mark| begins_with_tag(rest, mark)) {
        let close = format!("</{mark}>");
        let Some(end) = find_ignoring_case(rest, &close) else {
            return "";
        };
        rest = rest.get(end + close.len()..).unwrap_or_default().trim_start();
    }
    // Where the prompt's template has opened the thoughts, the answer only closes them: alone on a line.
    let closing = MARKS.iter().find_map(|mark| {
        let close = format!("</{mark}>");
        let mut from = 0;
        rest.split_inclusive('\n').find_map(|line| {
            from += line.len();
            line.trim().eq_ignore_ascii_case(&close).then_some(from)
        })
    });
    closing.and_then(|end| rest.get(end..)).unwrap_or(rest)
}

fn begins_with_tag(text: &str, mark: &str) -> bool {
    let tag = format!("<{mark}>");
    text.get(..tag.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(&tag))
}

fn find_ignoring_case(text: &str, part: &str) -> Option<usize> {
    // In ASCII only, so that no character changes its length.
    text.to_ascii_lowercase().find(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_go_and_summaries_stay() {
        for (text, rest) in [
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
            assert_eq!(strip_reasoning(text), rest, "{text:?}");
        }
    }
}
