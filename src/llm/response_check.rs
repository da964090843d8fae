//! What a model's answer must be before it becomes memory: a bad summary is worse than a late one.
//!
//! Only what can be told without reading the text is refused here; whether a summary is a good one is a matter of
//! prompt and model. A refusal is a failed attempt, so the pool goes on to its next model.

use super::provider::Finish;
use super::{Rejection, Task};
use crate::domain::summary::words;

/// Answers that are no summary, as [`plain`] leaves them. Only what is no sentence in any conversation: "There was
/// nothing to decide" is a summary.
const BARE: [&str; 30] = [
    "none",
    "n a",
    "na",
    "nil",
    "null",
    "undefined",
    "empty",
    "blank",
    "nothing",
    "nothing to summarise",
    "nothing to summarize",
    "nothing to report",
    "not applicable",
    "not available",
    "no answer",
    "no content",
    "no conversation",
    "no data",
    "no output",
    "no response",
    "no summary",
    "no summary available",
    "no summary needed",
    "no text",
    "keine",
    "aucun",
    "ninguno",
    "无",
    "なし",
    "нет",
];

/// The answer's text, trimmed, or why it is no summary. The end of an answer is judged before its text: one that was
/// cut off while the model was still thinking is empty, but raising the output limit is what helps.
pub fn check_response(text: &str, finish: Finish, task: &Task<'_>) -> Result<String, Rejection> {
    match finish {
        Finish::Filtered => return Err(Rejection::Filtered),
        Finish::Length => return Err(Rejection::Truncated),
        Finish::Complete => {}
    }
    let text = text.trim();
    let plain = plain(text);
    if plain.is_empty() {
        return Err(Rejection::Empty);
    }
    let body = plain.strip_prefix("summary").map_or(plain.as_str(), str::trim_start);
    if body.is_empty() || BARE.contains(&body) {
        return Err(Rejection::NonAnswer);
    }
    if let Task::MetaConsolidate { summary, .. } = task
        && words(text) >= words(summary)
    {
        return Err(Rejection::NotShorter);
    }
    Ok(text.to_owned())
}

/// The words in lower case, without punctuation and Markdown; of a long text no more than tells it from a bare word.
fn plain(text: &str) -> String {
    let longest = BARE.iter().map(|bare| bare.len()).max().unwrap_or_default() + "summary ".len();
    let mut plain = String::new();
    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
        if plain.len() > longest {
            break;
        }
        if !plain.is_empty() {
            plain.push(' ');
        }
        plain.push_str(&word.to_lowercase());
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLIDATE: Task<'_> = Task::Consolidate { entries: &[], sentences: 5 };

    fn refused(text: &str) -> Option<Rejection> {
        check_response(text, Finish::Complete, &CONSOLIDATE).err()
    }

    #[test]
    fn nothing_in_it_is_empty() {
        for text in ["", " ", "\n\t \u{3000}", "---", "…", "```\n```", "\"\"", "{}", "**"] {
            assert_eq!(refused(text), Some(Rejection::Empty), "{text:?}");
        }
    }

    #[test]
    fn a_bare_none_is_refused() {
        for text in [
            "none",
            "None.",
            " NONE ",
            "N/A",
            "n/a.",
            "NA",
            "\"none\"",
            "- none",
            "**None**",
            "```\nnone\n```",
            "`null`",
            "(empty)",
            "no summary",
            "No summary.",
            "Summary: None",
            "## Summary\n\nn/a",
            "Summary:",
            "{\"summary\": null}",
            "Nothing to summarise.",
            "Not applicable",
            "无。",
            "なし",
        ] {
            assert_eq!(refused(text), Some(Rejection::NonAnswer), "{text:?}");
        }
    }

    #[test]
    fn sentences_pass_trimmed() {
        for text in [
            "None of the three offers was accepted.",
            "Nothing was decided.",
            "No summary of the talk was sent to Ada.",
            "Summary of the plan: Ada flies on 3 May.",
            "N/A was the entry in field 3.",
            "Nonetheless Bo agreed.",
            "Ada.",
            "42",
            "三月三日に会う。",
            "Null is the name of the dog.",
        ] {
            assert_eq!(
                check_response(&format!("\n  {text} \r\n"), Finish::Complete, &CONSOLIDATE).as_deref(),
                Ok(text)
            );
        }
    }

    #[test]
    fn the_end_of_an_answer_is_judged_first() {
        for (text, finish, refusal) in [
            ("Ada flies on", Finish::Length, Rejection::Truncated),
            ("", Finish::Length, Rejection::Truncated),
            ("Ada flies.", Finish::Filtered, Rejection::Filtered),
            ("", Finish::Filtered, Rejection::Filtered),
        ] {
            assert_eq!(check_response(text, finish, &CONSOLIDATE), Err(refusal), "{text:?}");
        }
    }

    #[test]
    fn a_compression_must_be_shorter() {
        let cases = [
            ("one two three", "one two", None),
            ("one two three", "one two three", Some(Rejection::NotShorter)),
            ("one two three", "un deux trois quatre", Some(Rejection::NotShorter)),
            // By words, not by bytes: and punctuation is none.
            ("a b c d", "internationalisation", None),
            ("one two", "one - two!", Some(Rejection::NotShorter)),
            ("我们明天上午十点开会", "明天十点开会", None),
            ("明天十点开会", "我们明天上午十点开会", Some(Rejection::NotShorter)),
        ];
        for (summary, text, refusal) in cases {
            let task = Task::MetaConsolidate { summary, sentences: 8 };
            assert_eq!(check_response(text, Finish::Complete, &task).err(), refusal, "{text:?}");
            assert_eq!(check_response(text, Finish::Complete, &CONSOLIDATE).err(), None);
        }
    }
}
