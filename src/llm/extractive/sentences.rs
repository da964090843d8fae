//! Where sentences begin and end in what people and machines write to each other.
//!
//! The borders are Unicode's (UAX #29), taken line by line, and corrected where chat differs from print: a URL is
//! no place to stop, an abbreviation neither, and a line without punctuation still has an end.

use unicode_segmentation::UnicodeSegmentation;

/// The longest sentence, in characters: beyond it a line is a dump, not a statement, and is cut at white space.
/// The longest sentences of edited English prose are about this long.
const MAX_CHARS: usize = 400;

/// Words whose full stop ends no sentence, in lower case without it. Single letters need no entry. Few on purpose:
/// a missed one costs a short candidate, a wrong one glues two sentences together.
const ABBREVIATIONS: [&str; 24] = [
    "approx", "bzw", "ca", "cf", "dr", "e.g", "i.e", "jr", "mr", "mrs", "ms", "mme", "nr", "p.s", "prof",
    "resp", "sr", "sra", "st", "usw", "vs", "vgl", "z.b", "u.s",
];

/// A sentence, as it stands in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sentence<'a> {
    /// Its text, trimmed, still with whatever markup the message has.
    pub(super) text: &'a str,
    /// Whether it is a line of a fenced code block.
    pub(super) code: bool,
}

/// The sentences of a text, in order; none for white space. Fences of code blocks are left out.
pub(super) fn split(text: &str) -> Vec<Sentence<'_>> {
    let mut sentences = Vec::new();
    let mut code = false;
    for line in text.split(is_line_break).map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("```") || line.starts_with("~~~") {
            code = !code;
        } else if code {
            cap(line, |text| sentences.push(Sentence { text, code }));
        } else {
            each_sentence(line, |sentence| {
                cap(sentence, |text| sentences.push(Sentence { text, code }));
            });
        }
    }
    sentences
}

fn is_line_break(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Whether a character ends a sentence in scripts that put no space after it.
fn ends_without_space(c: char) -> bool {
    matches!(c, '。' | '！' | '？' | '｡' | '．')
}

/// Whether a character may follow the full stop inside the sentence: quotes and brackets that close.
pub(super) fn closes(c: char) -> bool {
    matches!(c, '"' | '\'' | ')' | ']' | '}' | '”' | '’' | '»' | '」' | '』' | '）' | '】')
}

fn each_sentence<'a>(line: &'a str, mut found: impl FnMut(&'a str)) {
    let mut begin = 0;
    each_border(line, |end| {
        let (head, rest) = line.split_at(end);
        let sentence = head.get(begin..).unwrap_or_default();
        if rest.is_empty() || is_border(sentence, rest) {
            found(sentence.trim());
            begin = end;
        }
    });
}

/// Where Unicode has a sentence border within one line, its end included; in a line of ASCII only those with white
/// space before them, as the others are none here.
///
/// The plainest texts, which are most, have the same rules without Unicode's tables: with these, finding borders
/// would be half of the whole summariser's work.
fn each_border(line: &str, found: impl FnMut(usize)) {
    if line.is_ascii() {
        each_latin_border(line, found);
    } else if line.chars().all(is_plain_ideographic) {
        each_ideographic_border(line, found);
    } else {
        line.split_sentence_bound_indices().map(|(start, piece)| start + piece.len()).for_each(found);
    }
}

fn each_latin_border(line: &str, mut found: impl FnMut(usize)) {
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

/// What most Chinese and Japanese is written in, without what needs a look ahead: Latin full stops.
fn is_plain_ideographic(c: char) -> bool {
    matches!(c, ' ' | '…' | '·' | '0'..='9' | 'A'..='Z' | 'a'..='z'
        | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{30fc}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}')
        || ends_ideographic(c)
        || brackets(c)
        || goes_on(c)
}

fn ends_ideographic(c: char) -> bool {
    matches!(c, '。' | '！' | '？')
}

fn brackets(c: char) -> bool {
    matches!(c, '「' | '」' | '『' | '』' | '（' | '）' | '【' | '】' | '《' | '》' | '“' | '”')
}

fn goes_on(c: char) -> bool {
    matches!(c, '，' | '、' | '：' | '；')
}

fn each_ideographic_border(line: &str, mut found: impl FnMut(usize)) {
    let mut rest = line;
    while let Some(at) = rest.find(ends_ideographic) {
        let (_, tail) = rest.split_at(at);
        let after = tail.trim_start_matches(ends_ideographic);
        let next = after.trim_start_matches(brackets).trim_start_matches(' ');
        rest = after;
        if !next.is_empty() && !next.starts_with(goes_on) && !next.starts_with(ends_ideographic) {
            found(line.len() - next.len());
        }
    }
    found(line.len());
}

/// Whether one of Unicode's borders, between `sentence` and `rest`, is one here.
fn is_border(sentence: &str, rest: &str) -> bool {
    let said = sentence.trim_end();
    let core = said.trim_end_matches(closes);
    if core.ends_with(ends_without_space) {
        return true;
    }
    // `https://example.org/?q=1`, `Node!important`: Unicode breaks after `?` and `!` whatever follows.
    if said.len() == sentence.len() {
        return false;
    }
    // `Yahoo! announced`, `"Really?" she asked`: Unicode looks ahead only after a full stop.
    if rest.chars().next().is_some_and(char::is_lowercase) {
        return false;
    }
    !core.strip_suffix('.').is_some_and(is_abbreviation)
}

/// Whether a full stop after this text abbreviates its last word.
pub(super) fn is_abbreviation(text: &str) -> bool {
    let word = text.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default();
    let mut chars = word.chars();
    match (chars.next(), chars.next()) {
        // Initials, and the numbers of a list; `I.` is more often the end of a sentence.
        (Some(c), None) => c != 'I' && c.is_alphanumeric() && (!c.is_numeric() || word.len() == text.len()),
        (None, _) => false,
        _ => word.len() <= 8 && ABBREVIATIONS.contains(&word.to_lowercase().as_str()),
    }
}

/// Cuts what is longer than [`MAX_CHARS`], at white space where there is any in the second half of a piece.
fn cap<'a>(sentence: &'a str, mut found: impl FnMut(&'a str)) {
    let mut rest = sentence;
    // The first test is the cheap one: a character has at least one byte.
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
    fn borders_of_print_and_chat() {
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
    fn plain_text_has_the_borders_of_unicode() {
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
            each_border(line, |end| ours.push(end));
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
    fn plain_ideographs_have_the_borders_of_unicode() {
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
            each_ideographic_border(&line, |end| ours.push(end));
            let unicode: Vec<usize> =
                line.split_sentence_bound_indices().map(|(start, piece)| start + piece.len()).collect();
            assert_eq!(ours, unicode, "{line}");
        }
    }

    #[test]
    fn code_is_told_from_prose() {
        let found = split("Run this:\n```sh\nmake all\n```\nThen rest.");
        let code: Vec<_> = found.iter().map(|sentence| (sentence.text, sentence.code)).collect();
        assert_eq!(code, [("Run this:", false), ("make all", true), ("Then rest.", false)]);
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let line = "ก".repeat(100_000);
        let found = texts(&line);
        assert_eq!(found.concat(), line);
        assert!(found.iter().all(|piece| piece.chars().count() <= MAX_CHARS));
        let words = "word ".repeat(1000);
        assert!(texts(&words).iter().all(|piece| piece.ends_with("word") && piece.len() <= MAX_CHARS));
    }
}
