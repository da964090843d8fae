//! What of a hit is shown: the part of it that has most of what was asked for, and where in it the words found stand.

use super::analyzer::Analyzer;
use super::query::Query;
use super::rank::matches;
use std::ops::Range;

/// Characters of a snippet, about.
const LENGTH: usize = 240;
/// Of them, before the first word found.
const BEFORE: usize = 60;

/// A part of a text, with `…` where it was cut off, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snippet {
    text: String,
    /// Bytes of it, in order and apart.
    marks: Vec<Range<usize>>,
}

impl Snippet {
    /// All of it, in order: each piece, and whether it was searched for.
    pub fn pieces(&self) -> impl Iterator<Item = (&str, bool)> {
        let ends = self.marks.iter().flat_map(|mark| [(mark.start, false), (mark.end, true)]);
        let mut at = 0;
        ends.chain([(self.text.len(), false)]).filter_map(move |(end, is_mark)| {
            let piece = self.text.get(at..end).filter(|piece| !piece.is_empty());
            at = end;
            Some((piece?, is_mark))
        })
    }
}

/// The snippet of a text that was found.
#[must_use]
pub fn snippet(analyzer: Analyzer, query: &Query, text: &str) -> Snippet {
    let marks = joined(matches(analyzer, query, text));
    let shown = window(text, &marks);
    let cut = |is_cut: bool| if is_cut { "…" } else { "" };
    let (before, after) = (cut(shown.start > 0), cut(shown.end < text.len()));
    let part = text.get(shown.clone()).unwrap_or_default().replace(['\n', '\r', '\t'], " ");
    let marks = marks.iter().filter(|mark| mark.start >= shown.start && mark.end <= shown.end);
    let moved = |at: usize| at - shown.start + before.len();
    let marks = marks.map(|mark| moved(mark.start)..moved(mark.end)).collect();
    Snippet { text: format!("{before}{part}{after}"), marks }
}

/// Pairs of characters overlap: one mark.
fn joined(found: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut marks: Vec<Range<usize>> = Vec::new();
    for range in found {
        match marks.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => marks.push(range),
        }
    }
    marks
}

/// The bytes to show: from a little before the mark behind which most of the others follow.
fn window(text: &str, marks: &[Range<usize>]) -> Range<usize> {
    let room = LENGTH - BEFORE;
    let following = |at: usize| {
        let from = marks.get(at).map_or(0, |mark| mark.start);
        marks.iter().skip(at).take_while(|mark| mark.end <= from + room).count()
    };
    // Of equals the first, which `max_by_key` would not take.
    let best = (0..marks.len()).rev().max_by_key(|at| following(*at)).and_then(|at| marks.get(at));
    let first = best.map_or(0, |mark| mark.start);
    let before = text.get(..first).unwrap_or_default();
    let start = before.char_indices().rev().nth(BEFORE - 1).map_or(0, |(at, _)| at);
    // Not in the middle of a word, if there is a space to begin behind.
    let start = match text.get(start..first).and_then(|lead| lead.find(char::is_whitespace)) {
        Some(space) if start > 0 => start + space + 1,
        _ => start,
    };
    let start = text.ceil_char_boundary(start);
    let rest = text.get(start..).unwrap_or_default();
    let Some((cut, _)) = rest.char_indices().nth(LENGTH) else {
        return start..text.len();
    };
    let end = rest.get(..cut).and_then(|shown| shown.rfind(char::is_whitespace));
    let least = best.map_or(0, |mark| mark.end.saturating_sub(start));
    start..start + end.filter(|end| *end >= least).unwrap_or(cut.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks in brackets.
    fn of(query: &str, text: &str) -> String {
        let query = Query::parse(Analyzer::default(), query).expect("a query");
        let shown = snippet(Analyzer::default(), &query, text);
        let piece = |(text, is_mark)| if is_mark { format!("[{text}]") } else { String::from(text) };
        shown.pieces().map(piece).collect()
    }

    #[test]
    fn the_words_found_are_marked() {
        assert_eq!(
            of("ferry ada -boats", "Ferries & boats\nof Ada's ferry"),
            "[Ferries] & boats of [Ada's] [ferry]"
        );
        assert_eq!(of("数据库", "关系数据库好"), "关系[数据库]好");
        assert_eq!(of("fer*", "fire, ferry"), "fire, [ferry]");
    }

    #[test]
    fn of_a_long_text_the_part_with_most_words() {
        let filler = "word after word goes by and nothing happens ".repeat(20);
        let text = format!("{filler}a ferry {filler}a ferry to the island {filler}");
        let shown = of("ferry island", &text);
        assert!(shown.contains("[ferry] to the [island"), "{shown}");
        assert!(shown.starts_with('…') && shown.ends_with('…') && shown.len() < 400, "{shown}");
        // A word may be longer than a snippet.
        let word = "é".repeat(999);
        assert_eq!(of("é*", &format!("see {word} there")), format!("see [{word}]…"));
        assert_eq!(of("ferry", "nothing of it"), "nothing of it");
    }
}
