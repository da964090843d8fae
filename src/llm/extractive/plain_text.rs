//! The form of a summary: one paragraph of plain prose in which every statement has its speaker.
//!
//! `Ada: The port is 8080. Assistant: Noted.` A label stands before the first sentence of each message, as the
//! sentences of different messages don't belong together even where one speaker made both. Two promises make
//! labels trustworthy: a colon with a space after it ends a label and stands nowhere else, so nothing that was
//! said can pass for a speaker; and everything is on one line, so nothing can pass for a heading or a list.

use super::sentences::{closes, is_abbreviation};
use crate::domain::message::Role;
use crate::domain::transcript::TranscriptEntry;

/// The longest label: what chat APIs allow for a participant's name.
const LABEL_CHARS: usize = 64;
/// No name has more words; a longer beginning that ends in a colon is part of a sentence.
const LABEL_WORDS: usize = 5;

/// A sentence of a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Statement<'a> {
    /// Who said it, where that is known.
    pub(super) label: Option<&'a str>,
    /// The message that it comes from, or the part of a summary under one label: any number that differs between
    /// neighbours.
    pub(super) source: usize,
    /// What was said, as [`plain`] has it.
    pub(super) text: &'a str,
}

/// Joins statements into a paragraph.
pub(super) fn join<'a>(statements: impl IntoIterator<Item = Statement<'a>>) -> String {
    let mut out = String::new();
    let mut last = None;
    for statement in statements {
        if !out.is_empty() {
            out.push(' ');
        }
        if let Some(label) = statement.label.filter(|_| last != Some(statement.source)) {
            out.push_str(label);
            out.push_str(": ");
        }
        out.push_str(statement.text);
        last = Some(statement.source);
    }
    out
}

/// The speaker of an entry: its name, or its role.
pub(super) fn label(entry: &TranscriptEntry) -> String {
    let role = match entry.role {
        Role::User => "User",
        Role::Assistant => "Assistant",
        Role::Tool => "Tool",
    };
    let name: String = entry
        .name
        .iter()
        .flat_map(|name| name.chars())
        .map(|c| if fits_label(c) { c } else { ' ' })
        .take(LABEL_CHARS)
        .collect();
    let name = name.split_whitespace().take(LABEL_WORDS).collect::<Vec<_>>().join(" ");
    // Nobody speaks under another role's name.
    if name.is_empty() || Role::parse(&name.to_lowercase()).is_some() { role.to_owned() } else { name }
}

/// Whether a character may be part of a label: most do, for names are written in all scripts.
fn fits_label(c: char) -> bool {
    let punctuation = c.is_ascii_punctuation() && !matches!(c, '-' | '_' | '\'' | '@' | '&' | '/' | '+');
    !(punctuation || c.is_control() || is_format(c) || ends_sentence(c) || "“”„«»「」：，、".contains(c))
}

/// The parts of one line of a summary, each with the label that stands before it. The first may have none.
pub(super) fn labelled(line: &str) -> Vec<(Option<&str>, &str)> {
    let mut parts = Vec::new();
    let (mut label, mut begin) = (None, 0);
    for (colon, _) in line.match_indices(": ") {
        // A label is short: looking no further back keeps the time linear.
        let earliest = begin.max(line.floor_char_boundary(colon.saturating_sub(4 * LABEL_CHARS + 4)));
        let Some(head) = line.get(earliest..colon) else {
            continue; // inside the label before
        };
        let after_sentence = head
            .char_indices()
            .rev()
            .find(|(at, c)| c.is_whitespace() && head.get(..*at).is_some_and(is_finished))
            .map(|(at, c)| earliest + at + c.len_utf8());
        let Some(start) = after_sentence.or((earliest == begin).then_some(begin)) else {
            continue;
        };
        let (Some(name), Some(before)) = (line.get(start..colon), line.get(begin..start)) else {
            continue;
        };
        if !is_label(name) {
            continue;
        }
        if !before.trim().is_empty() {
            parts.push((label, before.trim()));
        }
        label = Some(name);
        begin = colon + 2;
    }
    let rest = line.get(begin..).unwrap_or_default().trim();
    if !rest.is_empty() {
        parts.push((label, rest));
    }
    parts
}

fn is_label(name: &str) -> bool {
    !name.is_empty()
        && name.trim() == name
        && name.chars().all(fits_label)
        && name.chars().count() <= LABEL_CHARS
        && name.split_whitespace().count() <= LABEL_WORDS
}

/// A sentence as plain prose: one line, no markup, no label, with an end, and with no other end before it.
pub(super) fn plain(sentence: &str) -> String {
    let mut out = String::with_capacity(sentence.len() + 1);
    let mut glue = true;
    for word in sentence.split(|c: char| c.is_whitespace() || c.is_control()) {
        let marker = out.is_empty() && is_list_marker(word) && word.len() < sentence.trim_end().len();
        if word.is_empty() || marker || is_markup(word) {
            continue;
        }
        if !glue {
            out.push(' ');
        }
        // JSON: `"key": 1` reads as well without the space.
        glue = word.ends_with("\":");
        push_word(&mut out, word);
    }
    end(unbroken(&out))
}

/// Takes away what a reader who looks at punctuation alone would take for an end: `Dr. Ng` is `Dr Ng`, and who
/// writes all in lower case has semicolons.
fn unbroken(sentence: &str) -> String {
    let mut out = String::new();
    let mut rest = sentence;
    while let Some(space) = rest.find(' ') {
        let (word, after) = rest.split_at(space);
        let core = word.trim_end_matches(closes);
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
        rest = after.get(1..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

/// Gives a sentence an end that shows, in place of whatever it was to go on with.
pub(super) fn end(mut sentence: String) -> String {
    let kept = sentence.trim_end_matches([':', ',', ';', '–', '—', '-', ' ']).len();
    sentence.truncate(kept);
    if !sentence.is_empty() && !is_finished(&sentence) {
        sentence.push(if sentence.ends_with(is_wide) { '。' } else { '.' });
    }
    sentence
}

/// Whether a character belongs to a script whose punctuation is as wide as its characters.
pub(super) fn is_wide(c: char) -> bool {
    ('\u{3040}'..='\u{9fff}').contains(&c)
}

fn push_word(out: &mut String, word: &str) {
    // Headings and quotes open with these; a hashtag inside the sentence stays.
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
            c if is_format(c) => {}
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

/// Characters that change how others are shown: they could make a line read as what it is not.
fn is_format(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
}

pub(super) fn ends_sentence(c: char) -> bool {
    matches!(
        c,
        '.' | '!'
            | '?'
            | '…'
            | '。'
            | '！'
            | '？'
            | '｡'
            | '．'
            | '؟'
            | '۔'
            | '।'
            | '‼'
            | '⁇'
            | '⁈'
            | '⁉'
    )
}

/// Whether a text ends where a sentence does.
fn is_finished(text: &str) -> bool {
    text.trim_end_matches(closes).ends_with(ends_sentence)
}

/// Whether a sentence asks, be it in surprise.
pub(super) fn is_question(sentence: &str) -> bool {
    let said = sentence.trim_end_matches(closes);
    let run = said.get(said.trim_end_matches(ends_sentence).len()..).unwrap_or_default();
    run.contains(['?', '？', '؟', '⁇', '⁈', '⁉'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_labels_do_not_survive() {
        for (said, plainly) in [
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
            assert_eq!(plain(said), plainly, "{said}");
        }
    }

    #[test]
    fn labels_are_read_back() {
        assert_eq!(
            labelled("Ada: It is so. And \"so: so\". bob_1: No! 王: 好。 Dr Who: Why"),
            [
                (Some("Ada"), "It is so. And \"so: so\"."),
                (Some("bob_1"), "No!"),
                (Some("王"), "好。"),
                (Some("Dr Who"), "Why")
            ]
        );
        assert_eq!(labelled("No label here."), [(None, "No label here.")]);
    }

    #[test]
    fn a_name_can_not_forge() {
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
