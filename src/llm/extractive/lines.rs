//! The form of an extractive summary: a line for each message, and a line for each new date.
//!
//! ```text
//! 2026-05-01
//! Ada: The port is 8080.
//! Assistant: I use port 8080 from now on.
//! ```
//!
//! Sentences are written as they were said, except for white space and the marks at the beginning of headings, lists and quotations. Each
//! message is one line that begins with its speaker, so no text can imitate a speaker or a heading.

use super::selection::{Line, Statement};
use super::sentences::is_closing;
use crate::domain::consolidation::SummaryLimit;
use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;
use unicode_segmentation::UnicodeSegmentation as _;

/// Maximum length of a label: the limit of chat APIs for a participant's name.
const MAX_LABEL_CHARS: usize = 64;
/// Maximum number of words of a label. More words before a colon are part of a sentence.
const MAX_LABEL_WORDS: usize = 5;

/// Returns the label of an entry: its name or its role.
pub(super) fn label(entry: &TranscriptEntry) -> String {
    let role = match entry.role {
        Role::User => "User",
        Role::Assistant => "Assistant",
        Role::Tool => "Tool",
        Role::System | Role::Developer => "System",
    };
    let chars = entry.name.iter().flat_map(|name| name.chars());
    let name: String = chars.map(|c| if is_label_char(c) { c } else { ' ' }).take(MAX_LABEL_CHARS).collect();
    let name = name.split_whitespace().take(MAX_LABEL_WORDS).collect::<Vec<_>>().join(" ");
    // A name must not imitate a role.
    if name.is_empty() || Role::parse(&name.to_lowercase()).is_some() { role.to_owned() } else { name }
}

/// Returns `true` if a label may contain the character: letters of all scripts and most other characters.
fn is_label_char(c: char) -> bool {
    let punctuation = c.is_ascii_punctuation() && !matches!(c, '-' | '_' | '\'' | '@' | '&' | '/' | '+');
    !(punctuation || c.is_control() || is_format_char(c) || ends_sentence(c) || "“”„«»「」：，、".contains(c))
}

/// Splits a line of a summary into its speaker, if it has one, and its text.
pub(super) fn split_label(line: &str) -> (Option<&str>, &str) {
    match line.split_once(": ") {
        Some((label, text)) if is_label(label) && !text.trim().is_empty() => (Some(label), text.trim()),
        _ => (None, line),
    }
}

fn is_label(name: &str) -> bool {
    !name.is_empty()
        && name.trim() == name
        && name.chars().all(is_label_char)
        && name.chars().count() <= MAX_LABEL_CHARS
        && name.split_whitespace().count() <= MAX_LABEL_WORDS
}

/// Writes selected sentences, which are in the order of the conversation.
pub(super) fn write(lines: &[Line], statements: &[&Statement]) -> String {
    let (mut out, mut date) = (String::new(), None);
    for of_line in statements.chunk_by(|a, b| a.line == b.line) {
        let Some(line) = of_line.first().and_then(|first| lines.get(first.line)) else { continue };
        if line.date.is_some() && line.date != date {
            date = line.date;
            out.extend(date.map(|date| format!("{date}\n")));
        }
        if let Some(label) = &line.label {
            out.push_str(label);
            out.push_str(": ");
        }
        for (number, Statement { text, .. }) in of_line.iter().enumerate() {
            if number > 0 {
                out.push_str(if has_end(&out) { " " } else { " · " });
            }
            out.push_str(text);
        }
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out
}

/// Returns a text on one line, without invisible formatting, and without the marks of a heading, a list or a quotation before it.
pub(super) fn plain(text: &str) -> String {
    let visible: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).filter(|c| !is_format_char(*c)).collect();
    let mut words = visible.split_whitespace().peekable();
    while words.next_if(|word| is_mark(word)).is_some() {}
    words.collect::<Vec<_>>().join(" ")
}

/// Returns `true` for a word that only marks the beginning of a heading, an item or a quotation, and for lines of tables.
fn is_mark(word: &str) -> bool {
    let is_number =
        |number: &str| (1..=3).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit());
    word.chars().all(|c| "#*|`~>-+•–=_:".contains(c)) || word.strip_suffix(['.', ')']).is_some_and(is_number)
}

/// Shortens a text to a limit, after a word. At least one word stays.
pub(super) fn shorten(text: &str, limit: SummaryLimit) -> String {
    let ends: Vec<usize> = text.unicode_word_indices().map(|(at, word)| at + word.len()).collect();
    let part = |words: usize| ends.get(words).and_then(|end| text.get(..*end)).unwrap_or(text);
    let longest = ends.partition_point(|end| text.get(..*end).is_some_and(|part| limit.permits(part)));
    part(longest.saturating_sub(1)).to_owned()
}

/// Returns `true` for formatting characters, which could disguise the text of a line.
fn is_format_char(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
}

fn ends_sentence(c: char) -> bool {
    ".!?…。！？｡．؟۔।‼⁇⁈⁉".contains(c)
}

/// Returns `true` if the text ends like a sentence.
fn has_end(text: &str) -> bool {
    text.trim_end_matches(is_closing).ends_with(ends_sentence)
}

/// Returns `true` if the sentence ends with a question mark, possibly among exclamation marks.
pub(super) fn is_question(sentence: &str) -> bool {
    let trimmed = sentence.trim_end_matches(is_closing);
    let run = trimmed.get(trimmed.trim_end_matches(ends_sentence).len()..).unwrap_or_default();
    run.contains(['?', '？', '؟', '⁇', '⁈', '⁉'])
}
