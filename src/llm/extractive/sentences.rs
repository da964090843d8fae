//! Splits messages into sentences.
//!
//! The boundaries are those of Unicode (UAX #29) within each line, corrected for chat: URLs and abbreviations do not end
//! a sentence, and the end of a line always does.

use crate::domain::headings::is_line_break;
use crate::domain::sentence_bounds::sentence_ends;

/// Maximum length of a sentence in characters, about that of the longest sentences of edited English prose. Longer lines
/// are usually dumps of data; they are cut at white space.
const MAX_CHARS: usize = 400;

/// Words whose full stop does not end a sentence, in lower case and without the full stop. Single letters are recognised
/// without an entry. The list is short on purpose: a missing entry produces a short candidate, a wrong one joins two
/// sentences.
const ABBREVIATIONS: [&str; 24] = [
    "approx", "bzw", "ca", "cf", "dr", "e.g", "i.e", "jr", "mr", "mrs", "ms", "mme", "nr", "p.s", "prof",
    "resp", "sr", "sra", "st", "usw", "vs", "vgl", "z.b", "u.s",
];

/// A sentence of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sentence<'a> {
    /// The trimmed text, including markup.
    pub(super) text: &'a str,
    /// `true` for a line of a fenced code block.
    pub(super) is_code: bool,
}

/// Returns the sentences of a text in order. The fences of code blocks are left out.
pub(super) fn split(text: &str) -> Vec<Sentence<'_>> {
    let mut sentences = Vec::new();
    let mut is_code = false;
    for line in text.split(is_line_break).map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("```") || line.starts_with("~~~") {
            is_code = !is_code;
            continue;
        }
        let parts = if is_code { vec![line] } else { split_line(line) };
        let pieces = parts.into_iter().flat_map(split_to_max_length);
        sentences.extend(pieces.map(|text| Sentence { text, is_code }));
    }
    sentences
}

fn split_line(line: &str) -> Vec<&str> {
    let (mut sentences, mut begin) = (Vec::new(), 0);
    for end in sentence_ends(line) {
        let (head, rest) = line.split_at(end);
        let sentence = head.get(begin..).unwrap_or_default();
        if rest.is_empty() || is_boundary(sentence, rest) {
            sentences.push(sentence.trim());
            begin = end;
        }
    }
    sentences
}

/// Returns `true` for sentence ends of scripts that do not put a space after them.
fn ends_without_space(c: char) -> bool {
    "。！？｡．".contains(c)
}

/// Returns `true` for closing quotes and brackets, which may follow the full stop within the sentence.
pub(super) fn is_closing(c: char) -> bool {
    "\"')]}”’»」』）】".contains(c)
}

/// Returns `true` if the Unicode boundary between `sentence` and `rest` ends a sentence.
fn is_boundary(sentence: &str, rest: &str) -> bool {
    let trimmed = sentence.trim_end();
    let core = trimmed.trim_end_matches(is_closing);
    if core.ends_with(ends_without_space) {
        return true;
    }
    // `https://example.org/?q=1`, `Node!important`: Unicode breaks after `?` and `!` before any character.
    if trimmed.len() == sentence.len() {
        return false;
    }
    // `Yahoo! announced`, `"Really?" she asked`: Unicode looks ahead only after a full stop.
    if rest.chars().next().is_some_and(char::is_lowercase) {
        return false;
    }
    !core.strip_suffix('.').is_some_and(is_abbreviation)
}

/// Returns `true` if a full stop after this text belongs to an abbreviation.
fn is_abbreviation(text: &str) -> bool {
    let word = text.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default();
    let mut chars = word.chars();
    match (chars.next(), chars.next()) {
        // Initials and list numbers. `I.` usually is the end of a sentence.
        (Some(c), None) => c != 'I' && c.is_alphanumeric() && (!c.is_numeric() || word.len() == text.len()),
        (None, _) => false,
        _ => word.len() <= 8 && ABBREVIATIONS.contains(&word.to_lowercase().as_str()),
    }
}

/// Splits a sentence into pieces of at most [`MAX_CHARS`] characters, at white space if the second half of a piece has
/// any.
fn split_to_max_length(sentence: &str) -> Vec<&str> {
    let (mut pieces, mut rest) = (Vec::new(), sentence);
    while let Some((limit, _)) = rest.char_indices().nth(MAX_CHARS) {
        let (window, _) = rest.split_at(limit);
        let space = window.rfind(char::is_whitespace).filter(|at| *at >= limit / 2);
        let (piece, after) = rest.split_at(space.unwrap_or(limit));
        pieces.push(piece.trim());
        rest = after.trim_start();
    }
    pieces.extend(Some(rest).filter(|rest| !rest.is_empty()));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<&str> {
        split(text).into_iter().map(|sentence| sentence.text).collect()
    }

    #[test]
    fn sentences_of_prose_and_chat_are_split() {
        assert_eq!(texts("It works. Does it?! Yes!"), ["It works.", "Does it?!", "Yes!"]);
        assert_eq!(texts("no punctuation\nbut two lines\r\n"), ["no punctuation", "but two lines"]);
        assert_eq!(
            texts("See https://example.org/a?b=c!d for it. Dr. Ng and J. Doe agree, e.g. on 3.5 percent."),
            ["See https://example.org/a?b=c!d for it.", "Dr. Ng and J. Doe agree, e.g. on 3.5 percent."]
        );
        assert_eq!(
            texts("\"Really?\" she asked. (Yes.) Good."),
            ["\"Really?\" she asked.", "(Yes.)", "Good."]
        );
        assert_eq!(
            texts("今日は雨です。傘が要ります！行こう"),
            ["今日は雨です。", "傘が要ります！", "行こう"]
        );
        assert_eq!(texts(" \n\t "), [""; 0]);
    }

    #[test]
    fn lines_of_code_blocks_are_marked_as_code() {
        let found = split("Run this:\n```sh\nmake all\n```\nThen rest.");
        let code: Vec<_> = found.iter().map(|sentence| (sentence.text, sentence.is_code)).collect();
        assert_eq!(code, [("Run this:", false), ("make all", true), ("Then rest.", false)]);
    }

    #[test]
    fn long_line_is_split_at_white_space() {
        let line = "ก".repeat(100_000);
        let found = texts(&line);
        assert_eq!(found.concat(), line);
        assert!(found.iter().all(|piece| piece.chars().count() <= MAX_CHARS));
        let words = "word ".repeat(1000);
        assert!(texts(&words).iter().all(|piece| piece.ends_with("word") && piece.len() <= MAX_CHARS));
    }
}
