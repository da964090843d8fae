//! The format of an extractive summary: one paragraph of plain text with speaker labels.
//!
//! `Ada: The port is 8080. Assistant: Noted.` A label precedes the first sentence of each message, even if the same
//! speaker wrote the message before, because sentences of different messages do not belong together. Labels are
//! trustworthy for two reasons: a colon followed by a space only occurs after a label, so no text can imitate a speaker;
//! and everything is on one line, so no text can imitate a heading or a list.

use super::sentences::{is_abbreviation, is_closing};
use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;

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
    let name: String = entry
        .name
        .iter()
        .flat_map(|name| name.chars())
        .map(|c| if is_label_char(c) { c } else { ' ' })
        .take(MAX_LABEL_CHARS)
        .collect();
    let name = name.split_whitespace().take(MAX_LABEL_WORDS).collect::<Vec<_>>().join(" ");
    // A name must not imitate a role.
    if name.is_empty() || Role::parse(&name.to_lowercase()).is_some() { role.to_owned() } else { name }
}

/// Returns `true` if a label may contain the character: letters of all scripts and most other characters.
fn is_label_char(c: char) -> bool {
    let punctuation = c.is_ascii_punctuation() && !matches!(c, '-' | '_' | '\'' | '@' | '&' | '/' | '+');
    !(punctuation || c.is_control() || is_format_char(c) || ends_sentence(c) || "“”„«»「」：，、".contains(c))
}

/// Splits a line of a summary at its labels. The first part may have no label.
pub(super) fn split_at_labels(line: &str) -> Vec<(Option<&str>, &str)> {
    let mut parts = Vec::new();
    let (mut label, mut part_start) = (None, 0);
    for (colon, _) in line.match_indices(": ") {
        // The limited length of a label keeps the time linear.
        let earliest =
            part_start.max(line.floor_char_boundary(colon.saturating_sub(4 * MAX_LABEL_CHARS + 4)));
        let Some(head) = line.get(earliest..colon) else {
            continue; // within the previous label
        };
        let after_sentence = head
            .char_indices()
            .rev()
            .find(|(at, c)| c.is_whitespace() && head.get(..*at).is_some_and(has_end))
            .map(|(at, c)| earliest + at + c.len_utf8());
        let Some(start) = after_sentence.or((earliest == part_start).then_some(part_start)) else {
            continue;
        };
        let (Some(name), Some(before)) = (line.get(start..colon), line.get(part_start..start)) else {
            continue;
        };
        if !is_label(name) {
            continue;
        }
        if !before.trim().is_empty() {
            parts.push((label, before.trim()));
        }
        label = Some(name);
        part_start = colon + 2;
    }
    let rest = line.get(part_start..).unwrap_or_default().trim();
    if !rest.is_empty() {
        parts.push((label, rest));
    }
    parts
}

fn is_label(name: &str) -> bool {
    !name.is_empty()
        && name.trim() == name
        && name.chars().all(is_label_char)
        && name.chars().count() <= MAX_LABEL_CHARS
        && name.split_whitespace().count() <= MAX_LABEL_WORDS
}

/// Converts a sentence into plain text: one line without markup and labels that ends like a sentence and has no other
/// sentence end before.
pub(super) fn to_plain_sentence(sentence: &str) -> String {
    let mut out = String::with_capacity(sentence.len() + 1);
    let mut skip_space = true;
    for word in sentence.split(|c: char| c.is_whitespace() || c.is_control()) {
        let marker = out.is_empty() && is_list_marker(word) && word.len() < sentence.trim_end().len();
        if word.is_empty() || marker || is_markup(word) {
            continue;
        }
        if !skip_space {
            out.push(' ');
        }
        // `"key": 1` of JSON is written without the space, because a colon and a space mark a label.
        skip_space = word.ends_with("\":");
        push_word(&mut out, word);
    }
    with_end(without_inner_ends(&out))
}

/// Replaces punctuation within a sentence that could be mistaken for its end: `Dr. Ng` becomes `Dr Ng`, and sentences
/// that start in lower case are separated by semicolons.
fn without_inner_ends(sentence: &str) -> String {
    let Some((words, last)) = sentence.rsplit_once(' ') else {
        return sentence.to_owned();
    };
    let mut out = String::new();
    for word in words.split(' ') {
        let core = word.trim_end_matches(is_closing);
        let stem = core.trim_end_matches(ends_sentence);
        let run = core.get(stem.len()..).unwrap_or_default();
        out.push_str(stem);
        out.push_str(match run {
            "" => "",
            _ if run.contains('…') || run.contains("..") => "…",
            _ if core.len() < word.len() || (run == "." && is_abbreviation(stem)) => "",
            _ => ";",
        });
        out.push_str(word.get(core.len()..).unwrap_or_default());
        out.push(' ');
    }
    out + last
}

/// Removes trailing separators and appends a full stop unless the sentence has an end.
pub(super) fn with_end(mut sentence: String) -> String {
    let kept = sentence.trim_end_matches([':', ',', ';', '–', '—', '-', ' ']).len();
    sentence.truncate(kept);
    if !sentence.is_empty() && !has_end(&sentence) {
        sentence.push(if sentence.ends_with(is_wide) { '。' } else { '.' });
    }
    sentence
}

/// Returns `true` for characters of scripts with full-width punctuation.
pub(super) fn is_wide(c: char) -> bool {
    ('\u{3040}'..='\u{9fff}').contains(&c)
}

fn push_word(out: &mut String, word: &str) {
    // The markers of headings and quotations. Hashtags within the sentence are kept.
    let word = if out.is_empty() { word.trim_start_matches(['#', '>']) } else { word };
    let (word, colon) = match word.strip_suffix([':', '：']) {
        Some(_) if word.ends_with("\":") => (word, false),
        Some(stem) => (stem.trim_end_matches([':', '：']), true),
        None => (word, false),
    };
    for c in word.replace("**", "").chars() {
        match c {
            '`' => {}
            '：' => out.push('–'),
            c if is_format_char(c) => {}
            c => out.push(c),
        }
    }
    if colon {
        out.push_str(" –");
    }
}

fn is_markup(word: &str) -> bool {
    word.chars().all(|c| matches!(c, '#' | '*' | '|' | '`' | '~'))
        || (word.len() > 2 && word.chars().all(|c| matches!(c, '-' | '=' | '_' | ':' | '|')))
}

fn is_list_marker(word: &str) -> bool {
    matches!(word, "-" | "+" | "•" | "–" | ">")
        || word.strip_suffix(['.', ')']).is_some_and(|number| {
            number.len() <= 3 && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
        })
}

/// Returns `true` for formatting characters, which could disguise the text of a line.
fn is_format_char(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
}

pub(super) fn ends_sentence(c: char) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_labels_are_removed() {
        for (sentence, expected) in [
            ("## Session   Summary", "Session Summary."),
            ("- **Bold** and `code`", "Bold and code."),
            ("1. first of all", "first of all."),
            ("Assistant: I agree!", "Assistant – I agree!"),
            ("ok, note:", "ok, note."),
            ("注意：端口是八", "注意–端口是八。"),
            ("{\"port\": 80, \"url\": \"http://a:1\"}", "{\"port\":80, \"url\":\"http://a:1\"}."),
            ("| a | b |", "a b."),
            ("he said \"yes.\"", "he said \"yes.\""),
            ("a\u{202e}b\u{0}c", "ab c."),
            ("***", ""),
        ] {
            assert_eq!(to_plain_sentence(sentence), expected, "{sentence}");
        }
    }

    #[test]
    fn summary_is_split_at_its_labels() {
        assert_eq!(
            split_at_labels("Ada: It is so. And \"so: so\". bob_1: No! 王: 好。 Dr Who: Why"),
            [
                (Some("Ada"), "It is so. And \"so: so\"."),
                (Some("bob_1"), "No!"),
                (Some("王"), "好。"),
                (Some("Dr Who"), "Why")
            ]
        );
        assert_eq!(split_at_labels("No label here."), [(None, "No label here.")]);
    }

    #[test]
    fn name_cannot_imitate_a_role_or_markup() {
        let entry = |name: &str| TranscriptEntry {
            role: Role::User,
            name: Some(name.to_owned()),
            text: String::new(),
            calls: Vec::new(),
        };
        assert_eq!(label(&entry("# Ada:\n Lovelace.")), "Ada Lovelace");
        assert_eq!(label(&entry("assistant")), "User");
        assert_eq!(label(&entry("...")), "User");
    }
}
