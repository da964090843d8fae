//! Length and growth of the rolling summary.

use super::invisible::is_invisible;
use super::sentence_bounds::sentence_ends;
use super::tokens;
use super::transcript::encode_text;
use super::validation::FieldError;
use time::Date;
use time::macros::format_description;
use unicode_normalization::UnicodeNormalization as _;
use unicode_segmentation::UnicodeSegmentation as _;

/// Largest stored summary: twice the largest response of a model that a consolidation accepts. Every context of the session
/// contains its summary. Imports, edits and consolidations have the same limit, so each export can be imported.
pub const MAX_BYTES: usize = 1024 * 1024;

/// Tokens of a blank line within a JSON string, at most.
const BLANK_LINE_TOKENS: usize = 4;

/// Pieces with at most this many bytes are not split further: no real model has such a small input limit.
const SMALLEST_PIECE: usize = 64;

/// Counts words by Unicode word boundaries (UAX #29): `can't` is one word, and so is each Han character.
pub fn words(text: &str) -> usize {
    text.unicode_words().count()
}

/// Returns `true` if a text contains a visible letter or digit.
pub fn has_letters(text: &str) -> bool {
    text.nfkc().any(|c| c.is_alphanumeric() && !is_invisible(c))
}

/// Returns the date of a line that consists of one, as the built-in summariser writes it.
pub fn parse_date(line: &str) -> Option<Date> {
    Date::parse(line, format_description!("[year]-[month]-[day]")).ok()
}

/// Checks a summary that a client writes, at `path`.
pub fn check_written(path: &str, text: &str) -> Result<(), FieldError> {
    if text.trim().is_empty() {
        let detail = "is empty: write the summary, or restore an earlier revision to remove it";
        return Err(FieldError::new(path, detail));
    }
    check_length(path, text)
}

/// Checks the length of a text of a revision that did not come from a model, at `path`.
pub fn check_length(path: &str, text: &str) -> Result<(), FieldError> {
    let bytes = text.len();
    if bytes <= MAX_BYTES {
        return Ok(());
    }
    let detail = format!("has {bytes} bytes, at most {MAX_BYTES} are allowed in a summary: shorten it");
    Err(FieldError::new(path, detail))
}

/// Appends `new` to a summary, after a blank line.
pub fn append(existing: &str, new: &str) -> String {
    match (existing.is_empty(), new.is_empty()) {
        (true, _) => new.to_owned(),
        (_, true) => existing.to_owned(),
        _ => format!("{existing}\n\n{new}"),
    }
}

/// Returns the last sentences of a summary that have at most `max_bytes`; the end of the last one if that is longer.
pub fn ending(text: &str, max_bytes: usize) -> &str {
    let from = text.len().saturating_sub(max_bytes);
    let mut starts = std::iter::once(0).chain(sentence_ends(text));
    let start = starts.find(|start| (from..text.len()).contains(start));
    text.get(start.unwrap_or_else(|| text.ceil_char_boundary(from))..).unwrap_or_default().trim()
}

/// Divides a summary into groups of paragraphs of at most `capacity` tokens, for a model that compresses one group at a time. A
/// summary that fits is one group, unchanged. A paragraph that is too large is split after a sentence, and a sentence that is too
/// large is split at white space if possible.
pub fn split_to_fit(text: &str, capacity: usize) -> Vec<String> {
    if size(text) <= capacity {
        return vec![text.to_owned()];
    }
    let (mut groups, mut group, mut filled) = (Vec::new(), String::new(), 0);
    for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        let (mut separator, mut separator_tokens) = ("\n\n", BLANK_LINE_TOKENS);
        for (piece, tokens) in pieces(paragraph, capacity) {
            if !group.is_empty() && filled + separator_tokens + tokens > capacity {
                groups.push(std::mem::take(&mut group));
                filled = 0;
            }
            if !group.is_empty() {
                group.push_str(separator);
                filled += separator_tokens;
            }
            group.push_str(piece);
            filled += tokens;
            (separator, separator_tokens) = ("", 0);
        }
    }
    groups.push(group);
    let trimmed = groups.iter().map(|group| group.trim());
    trimmed.filter(|group| !group.is_empty()).map(str::to_owned).collect()
}

/// Returns the tokens of a text in the form in which a model receives it.
fn size(text: &str) -> usize {
    tokens::count(&encode_text(text))
}

/// Divides a paragraph into pieces that fit, each with its size. The pieces contain the complete text.
fn pieces(paragraph: &str, capacity: usize) -> Vec<(&str, usize)> {
    let tokens = size(paragraph);
    if tokens <= capacity {
        return vec![(paragraph, tokens)];
    }
    let (mut pieces, mut start) = (Vec::new(), 0);
    for end in sentence_ends(paragraph) {
        split_sentence(paragraph.get(start..end).unwrap_or_default(), capacity, &mut pieces);
        start = end;
    }
    pieces
}

/// Splits a sentence until each piece fits.
fn split_sentence<'a>(sentence: &'a str, capacity: usize, pieces: &mut Vec<(&'a str, usize)>) {
    let tokens = size(sentence);
    if tokens <= capacity || sentence.len() <= SMALLEST_PIECE {
        pieces.push((sentence, tokens));
        return;
    }
    // A token of plain text has about four bytes, so the first guess usually fits; halving bounds the recursion.
    let bytes = sentence.len().div_ceil(2).min(capacity.saturating_mul(3)).max(SMALLEST_PIECE);
    let mut rest = sentence;
    while !rest.is_empty() {
        let (head, tail) = rest.split_at(split_point(rest, bytes));
        split_sentence(head, capacity, pieces);
        rest = tail;
    }
}

/// Returns the end of a piece of at most `bytes` bytes: before the last white space, if there is any after the first character.
fn split_point(text: &str, bytes: usize) -> usize {
    if text.len() <= bytes {
        return text.len();
    }
    let end = text.floor_char_boundary(bytes);
    let space = text.get(..end).and_then(|head| head.rfind(char::is_whitespace));
    space.filter(|at| *at > 0).unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_letters_is_recognised() {
        for text in ["", " \n", "_: 👍", "?!", "\u{3164}", "…"] {
            assert!(!has_letters(text), "{text:?}");
        }
        for text in ["a", "User: 👍", "7.", "无", "\u{200b}ⓐ"] {
            assert!(has_letters(text), "{text:?}");
        }
    }

    #[test]
    fn summary_that_fits_is_one_group() {
        assert_eq!(split_to_fit(" a\n\n\nb ", 100), [" a\n\n\nb "]);
    }

    #[test]
    fn groups_of_paragraphs_fit_and_contain_the_complete_text() {
        let paragraphs: Vec<String> =
            (0..40).map(|number| format!("Number {number} is <{}>.", "tea ".repeat(number))).collect();
        let text = paragraphs.join("\n\n");
        let groups = split_to_fit(&text, 150);
        assert!(groups.len() > 5 && groups.iter().all(|group| size(group) <= 150), "{groups:?}");
        assert_eq!(groups.join("\n\n"), text);
    }

    #[test]
    fn large_paragraphs_are_split_at_sentences_and_large_sentences_at_spaces() {
        let sentences = "The tea is ready. ".repeat(100);
        for group in split_to_fit(&sentences, 50) {
            assert!(size(&group) <= 50 && group.starts_with("The ") && group.ends_with('.'), "{group}");
        }
        let words = "tea ".repeat(1000);
        let groups = split_to_fit(&words, 50);
        assert!(groups.iter().all(|group| size(group) <= 50 && group.split(' ').all(|word| word == "tea")));
        assert_eq!(groups.iter().map(|group| group.split(' ').count()).sum::<usize>(), 1000);
        let digits: String = (0..2000).map(|number: u32| number.to_string()).collect();
        for long in [digits, "语".repeat(5000), "\u{1}".repeat(2000)] {
            let groups = split_to_fit(&long, 400);
            assert!(groups.len() > 1 && groups.iter().all(|group| size(group) <= 400), "{long}");
            assert_eq!(groups.concat(), long);
        }
    }

    #[test]
    fn ending_begins_with_a_sentence_if_possible() {
        assert_eq!(ending("One. Two.\nThree is here.", 100), "One. Two.\nThree is here.");
        assert_eq!(ending("One. Two.\nThree is here.", 17), "Three is here.");
        assert_eq!(ending("Ein langes Ö ohne Ende", 11), "ohne Ende");
        assert_eq!(ending("", 10), "");
    }

    #[test]
    fn appended_text_follows_after_a_blank_line() {
        assert_eq!(append("", "b"), "b");
        assert_eq!(append("a\n", "b"), "a\n\n\nb");
        assert_eq!(append("a", "b"), "a\n\nb");
        assert_eq!(append("a", ""), "a");
    }

    #[test]
    fn written_summary_is_checked() {
        assert_eq!(check_written("summary", " a\n"), Ok(()));
        assert_eq!(check_written("summary", &"x".repeat(MAX_BYTES)), Ok(()));
        for text in ["", " \n\t\u{3000}", &"x".repeat(MAX_BYTES + 1)] {
            assert_eq!(check_written("summary", text).expect_err("invalid").field, "summary");
        }
    }

    #[test]
    fn words_are_counted_in_every_script() {
        assert_eq!(words("Don't panic, it's 42.5 percent."), 5);
        assert_eq!(words("我喜欢喝茶"), 5);
        assert_eq!(words(" … — !"), 0);
    }
}
