//! The sentence boundaries of Unicode (UAX #29), in time proportional to the text.

use super::search::analyzer::is_mark;
use unicode_segmentation::UnicodeSegmentation as _;

/// Longer runs of characters that are neither letters nor digits end a sentence. After a full stop, the library looks for the next
/// letter at each white space and closing mark, so that a run of 20,000 spaces took two seconds.
const MAX_RUN_CHARS: usize = 50;

/// Returns the ends of the sentences of a line, in bytes. The last one is the end of the line, if it is not empty.
pub fn sentence_ends(line: &str) -> impl Iterator<Item = usize> {
    let mut start = 0;
    let pieces = std::iter::from_fn(move || {
        let rest = line.get(start..).filter(|rest| !rest.is_empty())?;
        let (run, next) = first_long_run(rest);
        let piece = (start, rest.get(..run)?, start + next);
        start += next;
        Some(piece)
    });
    pieces.flat_map(|(start, piece, next)| {
        piece.split_sentence_bound_indices().map(move |(at, sentence)| {
            let end = at + sentence.len();
            if end == piece.len() { next } else { start + end }
        })
    })
}

/// Returns the position in the first run that is too long, and that of the next letter or digit.
fn first_long_run(text: &str) -> (usize, usize) {
    let mut run = 0;
    let ends_piece = |(_, c): &(usize, char)| {
        run = if is_letter_or_digit(*c) { 0 } else { run + 1 };
        run > MAX_RUN_CHARS
    };
    let Some((at, _)) = text.char_indices().find(ends_piece) else { return (text.len(), text.len()) };
    let next = text.get(at..).and_then(|rest| rest.find(is_letter_or_digit));
    (at, next.map_or(text.len(), |next| at + next))
}

/// Returns `false` for marks, of which Unicode counts some as letters.
fn is_letter_or_digit(c: char) -> bool {
    c.is_alphanumeric() && !is_mark(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sentences_without_long_runs_are_those_of_unicode(line in "[A-Za-z0-9.!?)\" é茶。\u{301}]{0,50}") {
            let expected: Vec<usize> =
                line.split_sentence_bound_indices().map(|(at, sentence)| at + sentence.len()).collect();
            prop_assert_eq!(sentence_ends(&line).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn long_run_belongs_to_the_sentence_before() {
        let (spaces, marks) = (" ".repeat(1000), ")".repeat(1000));
        let line = format!("It costs 50.{spaces}No. Yes{marks} 3");
        let ends: Vec<&str> = sentence_ends(&line).map(|end| line[end..].trim()).collect();
        assert_eq!(
            ends,
            [format!("No. Yes{marks} 3"), format!("Yes{marks} 3"), "3".to_owned(), String::new()]
        );
        assert_eq!(sentence_ends("").count(), 0);
    }

    /// With a search of quadratic time, the test would take hours.
    #[test]
    fn runs_of_a_million_characters_are_read_once() {
        for part in [" ", ")", "\u{a0}", "\u{301} ", "\u{93e} ", "\u{ff9e} ", ". ", "1 ", ".)"] {
            let line = format!("It costs 50. {}x", part.repeat(1_000_000));
            assert!(sentence_ends(&line).last() == Some(line.len()));
        }
    }
}
