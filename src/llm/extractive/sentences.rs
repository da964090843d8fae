//! Splits messages into sentences.
//!
//! The boundaries are those of Unicode (UAX #29) within each line, corrected for chat: URLs and abbreviations do not end
//! a sentence, and the end of a line always does.

use crate::domain::headings::is_line_break;
use unicode_segmentation::UnicodeSegmentation;

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
        } else if is_code {
            split_to_max_length(line, |text| sentences.push(Sentence { text, is_code }));
        } else {
            each_sentence(line, |sentence| {
                split_to_max_length(sentence, |text| sentences.push(Sentence { text, is_code }));
            });
        }
    }
    sentences
}

/// Returns `true` for sentence ends of scripts that do not put a space after them.
fn ends_without_space(c: char) -> bool {
    matches!(c, '。' | '！' | '？' | '｡' | '．')
}

/// Returns `true` for closing quotes and brackets, which may follow the full stop within the sentence.
pub(super) fn is_closing(c: char) -> bool {
    matches!(c, '"' | '\'' | ')' | ']' | '}' | '”' | '’' | '»' | '」' | '』' | '）' | '】')
}

fn each_sentence<'a>(line: &'a str, mut found: impl FnMut(&'a str)) {
    let mut begin = 0;
    each_boundary(line, |end| {
        let (head, rest) = line.split_at(end);
        let sentence = head.get(begin..).unwrap_or_default();
        if rest.is_empty() || is_boundary(sentence, rest) {
            found(sentence.trim());
            begin = end;
        }
    });
}

/// Calls `found` for each Unicode sentence boundary of a line, including its end. In ASCII lines, only boundaries after
/// white space are reported, because the others do not end a sentence here.
///
/// ASCII and plain ideographic texts, which are most, use equivalent rules without Unicode's tables: with the tables,
/// the search for boundaries would take half of the time of the summariser.
fn each_boundary(line: &str, found: impl FnMut(usize)) {
    if line.is_ascii() {
        each_latin_boundary(line, found);
    } else if line.chars().all(is_plain_ideographic) {
        each_ideographic_boundary(line, found);
    } else {
        line.split_sentence_bound_indices().map(|(start, piece)| start + piece.len()).for_each(found);
    }
}

fn each_latin_boundary(line: &str, mut found: impl FnMut(usize)) {
    let mut rest = line;
    while let Some(at) = rest.find(['.', '!', '?']) {
        let (_, tail) = rest.split_at(at);
        let after = tail.trim_start_matches(['.', '!', '?']);
        let run = tail.get(..tail.len() - after.len());
        let full_stop = run.is_some_and(|run| run.ends_with('.'));
        let said = after.trim_start_matches(['"', '\'', '(', ')', '[', ']', '{', '}']);
        let next = said.trim_start_matches([' ', '\t']);
        rest = after;
        let goes_on = next.starts_with([',', ':', ';', '-', '.', '!', '?'])
            || full_stop
                && next
                    .chars()
                    .find(|c| c.is_ascii_alphabetic() || matches!(c, '.' | '!' | '?'))
                    .is_some_and(|c| c.is_ascii_lowercase());
        if next.len() < said.len() && !next.is_empty() && !goes_on {
            found(line.len() - next.len());
        }
    }
    found(line.len());
}

/// Returns `true` for the characters of most Chinese and Japanese texts, except Latin full stops, which need lookahead.
fn is_plain_ideographic(c: char) -> bool {
    matches!(c, ' ' | '…' | '·' | '0'..='9' | 'A'..='Z' | 'a'..='z'
        | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{30fc}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}')
        || is_ideographic_end(c)
        || is_bracket(c)
        || is_ideographic_separator(c)
}

fn is_ideographic_end(c: char) -> bool {
    matches!(c, '。' | '！' | '？')
}

fn is_bracket(c: char) -> bool {
    matches!(c, '「' | '」' | '『' | '』' | '（' | '）' | '【' | '】' | '《' | '》' | '“' | '”')
}

fn is_ideographic_separator(c: char) -> bool {
    matches!(c, '，' | '、' | '：' | '；')
}

fn each_ideographic_boundary(line: &str, mut found: impl FnMut(usize)) {
    let mut rest = line;
    while let Some(at) = rest.find(is_ideographic_end) {
        let (_, tail) = rest.split_at(at);
        let after = tail.trim_start_matches(is_ideographic_end);
        let next = after.trim_start_matches(is_bracket).trim_start_matches(' ');
        rest = after;
        if !next.is_empty()
            && !next.starts_with(is_ideographic_separator)
            && !next.starts_with(is_ideographic_end)
        {
            found(line.len() - next.len());
        }
    }
    found(line.len());
}

/// Returns `true` if the Unicode boundary between `sentence` and `rest` ends a sentence.
fn is_boundary(sentence: &str, rest: &str) -> bool {
    let trimmed = sentence.trim_end();
    let core = trimmed.trim_end_matches(is_closing);
    if core.ends_with(ends_without_space) {
        return true;
    }
    // `https://example.org/?q=1`, `Node!important`: Unicode breaks after `?` and `!` whatever follows.
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
pub(super) fn is_abbreviation(text: &str) -> bool {
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
fn split_to_max_length<'a>(sentence: &'a str, mut found: impl FnMut(&'a str)) {
    let mut rest = sentence;
    // A cheap test first: a character has at least one byte.
    while rest.len() > MAX_CHARS {
        let Some((limit, _)) = rest.char_indices().nth(MAX_CHARS) else {
            break;
        };
        let (window, _) = rest.split_at(limit);
        let space = window.rfind(char::is_whitespace).filter(|at| *at >= limit / 2);
        let (piece, after) = rest.split_at(space.unwrap_or(limit));
        found(piece.trim());
        rest = after.trim_start();
    }
    if !rest.is_empty() {
        found(rest);
    }
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
    fn ascii_boundaries_equal_those_of_unicode() {
        let alphabet = b"aA1 ..!?,;-\"')(";
        let mut state: u64 = 7;
        for _ in 0..20_000 {
            let line: String = (0..16)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    char::from(alphabet[usize::try_from(state >> 33).expect("64 bits") % alphabet.len()])
                })
                .collect();
            let line = line.trim();
            let mut ours = Vec::new();
            each_boundary(line, |end| ours.push(end));
            let mut unicode: Vec<usize> = line
                .split_sentence_bound_indices()
                .map(|(start, piece)| start + piece.len())
                .filter(|end| *end == line.len() || line[..*end].ends_with(' '))
                .collect();
            if line.is_empty() {
                unicode.push(0);
            }
            assert_eq!(ours, unicode, "{line}");
        }
    }

    #[test]
    fn ideographic_boundaries_equal_those_of_unicode() {
        let alphabet: Vec<char> = "字数のカー 1aB。。！？「」（）“”《》【】『，、：；…·".chars().collect();
        let mut state: u64 = 7;
        for _ in 0..20_000 {
            let line: String = (0..16)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    alphabet[usize::try_from(state >> 33).expect("64 bits") % alphabet.len()]
                })
                .collect();
            assert!(line.chars().all(is_plain_ideographic));
            let mut ours = Vec::new();
            each_ideographic_boundary(&line, |end| ours.push(end));
            let unicode: Vec<usize> =
                line.split_sentence_bound_indices().map(|(start, piece)| start + piece.len()).collect();
            assert_eq!(ours, unicode, "{line}");
        }
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
