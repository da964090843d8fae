//! Validates a model's response before it becomes a summary or an order of search results.
//!
//! Defects of form and texts about something else are detected; the quality of a summary depends on the prompt and the model. A rejected response
//! is a failed attempt, so the pool continues with its next model. The built-in summariser copies sentences of the conversation, so
//! each of its texts can be a summary: see [`check_extract`].

use super::order::read_order;
use super::provider::FinishReason;
use super::{Rejection, Task, extractive};
use crate::domain::invisible::is_invisible;
use crate::domain::summary::{has_letters, words};
use crate::domain::transcript::TranscriptEntry;
use unicode_normalization::UnicodeNormalization as _;

/// Responses that are not summaries, in the form that [`normalize`] returns. They must not be possible sentences of a
/// summary: "There was nothing to decide" is a valid one.
const NON_ANSWERS: [&str; 30] = [
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

/// Returns the trimmed text, or the reason for the rejection. The finish reason is checked before the text: a response
/// that was truncated during the reasoning is empty, but the user must raise the output limit.
pub fn check_response(text: &str, finish_reason: FinishReason, task: &Task<'_>) -> Result<String, Rejection> {
    let text = check_form(text, finish_reason, task)?;
    if matches!(task, Task::Rerank { .. }) {
        return Ok(text);
    }
    let normalized = normalize(&text);
    if normalized.is_empty() {
        return Err(Rejection::Empty);
    }
    let mut body = normalized.as_str();
    while let Some(rest) =
        body.strip_prefix("summary").filter(|rest| rest.is_empty() || rest.starts_with(' '))
    {
        body = rest.trim_start();
    }
    if body.is_empty() || NON_ANSWERS.contains(&body) {
        return Err(Rejection::NonAnswer);
    }
    check_against_material(&text, task)?;
    Ok(text)
}

/// Checks that a text is about its material, not longer, and more than a word of it.
fn check_against_material(text: &str, task: &Task<'_>) -> Result<(), Rejection> {
    /// A refusal has some words of a conversation by chance, and a summary in another language at least its names.
    const MIN_SHARE: f64 = 0.15;
    let support = match task {
        Task::Consolidate { lines, .. } => {
            // Lines of the transcript.
            if text.lines().filter(|line| line.starts_with("{\"role\":\"")).count() > 1 {
                return Err(Rejection::Echo);
            }
            let (length, of_material) = (words(text), lines.iter().map(|line| words(&line.json)).sum());
            if !lines.is_empty() && length > of_material {
                return Err(Rejection::TooLong);
            }
            check_least_length(length, of_material)?;
            let parts = |line| {
                let TranscriptEntry { name, text, calls, .. }: &TranscriptEntry = line;
                name.iter().chain([text]).chain(calls).map(String::as_str)
            };
            extractive::support(text, lines.iter().flat_map(|line| parts(&line.entry)))
        }
        Task::MetaConsolidate { summary, .. } => {
            if words(text) * 10 > words(summary) * 9 {
                return Err(Rejection::NotShorter);
            }
            check_least_length(words(text), words(summary))?;
            extractive::support(text, summary.lines())
        }
        Task::Rerank { .. } => None,
    };
    match support {
        Some(share) if share < MIN_SHARE => Err(Rejection::Unsupported),
        _ => Ok(()),
    }
}

/// Fails for a single word, unless the material is short. A weak model has answered with `user`.
fn check_least_length(words: usize, of_material: usize) -> Result<(), Rejection> {
    const SHORT_MATERIAL_WORDS: usize = 400;
    if words < 2 && of_material >= SHORT_MATERIAL_WORDS { Err(Rejection::TooShort) } else { Ok(()) }
}

/// Checks a text of a model without a prompt, which copies sentences. A copied "None" is a part of the conversation, so it is
/// accepted. So is a text without letters, because the next attempt would return the same. But a compression without letters is
/// rejected, because it would take the place of the summary.
pub fn check_extract(text: &str, finish_reason: FinishReason, task: &Task<'_>) -> Result<String, Rejection> {
    let text = check_form(text, finish_reason, task)?;
    if matches!(task, Task::MetaConsolidate { .. }) && !has_letters(&text) {
        return Err(Rejection::Empty);
    }
    Ok(text)
}

/// Returns the trimmed text, unless it is incomplete, no order of search results, or not shorter than the summary that it compresses.
fn check_form(text: &str, finish_reason: FinishReason, task: &Task<'_>) -> Result<String, Rejection> {
    match finish_reason {
        FinishReason::Filtered => return Err(Rejection::Filtered),
        FinishReason::Length => return Err(Rejection::Truncated),
        FinishReason::Unfinished => return Err(Rejection::Unfinished),
        FinishReason::Complete => {}
    }
    let text = text.trim();
    if let Task::Rerank { texts, .. } = task
        && read_order(text, texts.len()).is_none()
    {
        return Err(Rejection::NotAnOrder);
    }
    if let Task::MetaConsolidate { summary, .. } = task
        && words(text) >= words(summary)
    {
        return Err(Rejection::NotShorter);
    }
    Ok(text.to_owned())
}

/// Returns the words in lower case without punctuation, Markdown, tags, entities and invisible characters, in their compatibility
/// form. Stops after the length of the longest non-answer.
fn normalize(text: &str) -> String {
    let max_len = NON_ANSWERS.iter().map(|answer| answer.len()).max().unwrap_or_default() + "summary ".len();
    let mut normalized = String::new();
    let without_tags = strip_tags(text);
    let visible: String = without_tags.nfkc().filter(|c| !is_invisible(*c)).collect();
    let words = visible
        .split_whitespace()
        .filter(|word| !is_entity(word))
        .flat_map(|word| word.split(|c: char| !c.is_alphanumeric()));
    for word in words.filter(|word| !word.is_empty()) {
        if normalized.len() > max_len {
            break;
        }
        if !normalized.is_empty() {
            normalized.push(' ');
        }
        normalized.push_str(&word.to_lowercase());
    }
    normalized
}

/// Replaces tags such as `<summary>` and `</b>` by spaces. Only the beginning of a text is relevant, so that the work is
/// bounded.
fn strip_tags(text: &str) -> String {
    const MAX_CHARS: usize = 4096;
    let (mut stripped, mut tag) = (String::new(), None::<String>);
    for c in text.chars().take(MAX_CHARS) {
        match (&mut tag, c) {
            (Some(_), '>') => {
                tag = None;
                stripped.push(' ');
            }
            (Some(open), _) if open.len() > 1 || c == '/' || c.is_ascii_alphabetic() => open.push(c),
            // A `<` of the text: no name of a tag follows.
            (Some(_), _) => {
                stripped.extend(tag.take());
                stripped.push(c);
            }
            (None, '<') => tag = Some("<".to_owned()),
            (None, _) => stripped.push(c),
        }
    }
    stripped.extend(tag);
    stripped
}

/// Returns `true` for character references of HTML, such as `&nbsp;`.
fn is_entity(word: &str) -> bool {
    let name = word.strip_prefix('&').and_then(|word| word.strip_suffix(';'));
    name.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '#'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::consolidation::SummaryLimit;
    use crate::domain::message::Role;
    use crate::domain::transcript::{TranscriptLine, encode_transcript};

    const CONSOLIDATE: Task<'_> =
        Task::Consolidate { lines: &[], previous: "", sentences: 5, limit: SummaryLimit::Words(600) };

    fn rejection(text: &str) -> Option<Rejection> {
        check_response(text, FinishReason::Complete, &CONSOLIDATE).err()
    }

    #[test]
    fn response_without_words_is_rejected_as_empty() {
        for text in [
            "",
            " ",
            "\n\t \u{3000}",
            "---",
            "…",
            "```\n```",
            "\"\"",
            "{}",
            "**",
            "\u{3164}",
            "\u{115f}.",
            "<p></p>",
            "<br/>",
            "&nbsp;",
            "&#160; \u{feff}",
        ] {
            assert_eq!(rejection(text), Some(Rejection::Empty), "{text:?}");
        }
    }

    #[test]
    fn non_answers_are_rejected() {
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
            "n\u{200b}one",
            "Ｎｏｎｅ",
            "&nbsp; none",
            "## Summary\n\nn/a",
            "Summary:",
            "<summary>Summary: None.</summary>",
            "Summary: <b>n/a</b>",
            "{\"summary\": null}",
            "Nothing to summarise.",
            "Not applicable",
            "无。",
            "なし",
        ] {
            assert_eq!(rejection(text), Some(Rejection::NonAnswer), "{text:?}");
        }
    }

    #[test]
    fn sentences_are_accepted_and_trimmed() {
        for text in [
            "None of the three offers was accepted.",
            "Nothing was decided.",
            "No summary of the talk was sent to Ada.",
            "Summary of the plan: Ada flies on 3 May.",
            "N/A was the entry in field 3.",
            "Nonetheless Bo agreed.",
            "Ada.",
            "Summaryless notes.",
            "a < b and c > d",
            "<summary>Ada flies.</summary>",
            "42",
            "三月三日に会う。",
            "Null is the name of the dog.",
        ] {
            assert_eq!(
                check_response(&format!("\n  {text} \r\n"), FinishReason::Complete, &CONSOLIDATE).as_deref(),
                Ok(text)
            );
        }
    }

    #[test]
    fn text_about_something_else_is_rejected() {
        let entry = |number: usize| {
            let subject = ["harbour", "orchard", "library", "workshop", "bakery"][number % 5];
            let text = format!("Visitor{number} told Mira that the {subject} near street{number} reopened.");
            TranscriptEntry { role: Role::User, name: None, text, calls: Vec::new() }.into()
        };
        let lines: Vec<TranscriptLine> = (0..20).map(entry).collect();
        let task =
            Task::Consolidate { lines: &lines, previous: "", sentences: 5, limit: SummaryLimit::Words(600) };
        let transcript = encode_transcript(&lines);
        let long = "Mira visited the harbour. ".repeat(200);
        for (text, rejection) in [
            ("Mira heard that harbour, orchard and library reopened.", None),
            ("I can't assist with that request.", Some(Rejection::Unsupported)),
            ("Es tut mir leid, dabei kann ich nicht helfen.", Some(Rejection::Unsupported)),
            ("抱歉，我无法协助处理此请求。", Some(Rejection::Unsupported)),
            (transcript.as_str(), Some(Rejection::Echo)),
            (long.as_str(), Some(Rejection::TooLong)),
        ] {
            assert_eq!(check_response(text, FinishReason::Complete, &task).err(), rejection, "{text:.60}");
        }
    }

    #[test]
    fn one_word_is_no_summary_of_a_long_text() {
        let text = "Mira told them that the harbour near the old library reopened on Monday. ".repeat(5);
        let entry = TranscriptEntry { role: Role::User, name: None, text, calls: Vec::new() };
        let check = |messages: usize, text: &str| {
            let lines = vec![entry.clone().into(); messages];
            let limit = SummaryLimit::Words(600);
            let task = Task::Consolidate { lines: &lines, previous: "", sentences: 5, limit };
            check_response(text, FinishReason::Complete, &task).err()
        };
        assert_eq!(check(20, "harbour"), Some(Rejection::TooShort));
        assert_eq!(check(20, "Harbour reopened."), None);
        assert_eq!(check(5, "harbour"), None);
    }

    #[test]
    fn finish_reason_is_checked_before_the_text() {
        for (text, finish_reason, rejection) in [
            ("Ada flies on", FinishReason::Length, Rejection::Truncated),
            ("", FinishReason::Length, Rejection::Truncated),
            ("Ada flies.", FinishReason::Filtered, Rejection::Filtered),
            ("", FinishReason::Filtered, Rejection::Filtered),
        ] {
            assert_eq!(check_response(text, finish_reason, &CONSOLIDATE), Err(rejection), "{text:?}");
        }
    }

    #[test]
    fn extract_is_accepted_if_it_looks_like_no_answer() {
        let check = |text: &str, task: &Task<'_>| check_extract(text, FinishReason::Complete, task);
        for text in ["Summary: None.", "N: A.", "none", "_: 👍", "?!"] {
            assert_eq!(check(&format!(" {text}\n"), &CONSOLIDATE).as_deref(), Ok(text));
        }
        let compress =
            Task::MetaConsolidate { summary: "one two three", sentences: 8, limit: SummaryLimit::Words(99) };
        for (text, result) in [
            ("None.", Ok("None.")),
            ("👍", Err(Rejection::Empty)),
            ("", Err(Rejection::Empty)),
            ("one, two, three", Err(Rejection::NotShorter)),
        ] {
            assert_eq!(check(text, &compress), result.map(str::to_owned), "{text}");
        }
    }

    #[test]
    fn meta_consolidation_must_be_shorter_than_its_input() {
        let cases = [
            ("one two three", "one two", None),
            ("one two three", "one two three", Some(Rejection::NotShorter)),
            ("one two three", "un deux trois quatre", Some(Rejection::NotShorter)),
            // Words are counted, not bytes, and punctuation does not count.
            ("a b c d", "internationalisation", None),
            ("one two", "one - two!", Some(Rejection::NotShorter)),
            ("我们明天上午十点开会", "明天十点开会", None),
            ("明天十点开会", "我们明天上午十点开会", Some(Rejection::NotShorter)),
        ];
        for (summary, text, rejection) in cases {
            let task = Task::MetaConsolidate { summary, sentences: 8, limit: SummaryLimit::Words(99) };
            assert_eq!(check_response(text, FinishReason::Complete, &task).err(), rejection, "{text:?}");
            assert_eq!(check_response(text, FinishReason::Complete, &CONSOLIDATE).err(), None);
        }
    }
}
