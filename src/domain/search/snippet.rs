//! Cuts the excerpt of a hit that contains most of the matches, and marks the matches in it.

use super::analyzer::Analyzer;
use super::matcher::matches;
use super::query::Query;
use std::ops::Range;

/// Approximate length of a snippet, in characters.
const SNIPPET_CHARS: usize = 240;
/// Characters before the first match.
const LEADING_CHARS: usize = 60;

/// An excerpt in one line, with `…` at each cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snippet {
    text: String,
    /// Byte ranges of the matches, in order and without overlaps.
    marks: Vec<Range<usize>>,
}

impl Snippet {
    /// Returns the parts of the snippet in order, each with `true` if it is a match.
    pub fn pieces(&self) -> impl Iterator<Item = (&str, bool)> {
        let ends = self.marks.iter().flat_map(|mark| [(mark.start, false), (mark.end, true)]);
        let mut position = 0;
        ends.chain([(self.text.len(), false)]).filter_map(move |(end, is_mark)| {
            let piece = self.text.get(position..end).filter(|piece| !piece.is_empty());
            position = end;
            Some((piece?, is_mark))
        })
    }
}

/// Returns the snippet of a text that matches a query.
#[must_use]
pub fn snippet(analyzer: Analyzer, query: &Query, text: &str) -> Snippet {
    let marks = merge_overlapping(matches(analyzer, query, text));
    let shown = window(text, &marks);
    let cut = |is_cut: bool| if is_cut { "…" } else { "" };
    let (before, after) = (cut(shown.start > 0), cut(shown.end < text.len()));
    let part = text.get(shown.clone()).unwrap_or_default().replace(['\n', '\r', '\t'], " ");
    let marks = marks.iter().filter(|mark| mark.start >= shown.start && mark.end <= shown.end);
    let moved = |at: usize| at - shown.start + before.len();
    let marks = marks.map(|mark| moved(mark.start)..moved(mark.end)).collect();
    Snippet { text: format!("{before}{part}{after}"), marks }
}

/// Merges overlapping ranges: matches of bigrams overlap.
fn merge_overlapping(mut found: Vec<Range<usize>>) -> Vec<Range<usize>> {
    found.sort_by_key(|range| range.start);
    let mut marks: Vec<Range<usize>> = Vec::new();
    for range in found {
        match marks.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => marks.push(range),
        }
    }
    marks
}

/// Returns the byte range of the excerpt: it begins shortly before the mark that is followed closely by most others.
fn window(text: &str, marks: &[Range<usize>]) -> Range<usize> {
    let after_first = SNIPPET_CHARS - LEADING_CHARS;
    let following = |at: usize| {
        let from = marks.get(at).map_or(0, |mark| mark.start);
        marks.iter().skip(at).take_while(|mark| mark.end <= from + after_first).count()
    };
    // Reversed, because `max_by_key` returns the last of equal elements and the first is wanted.
    let best = (0..marks.len()).rev().max_by_key(|at| following(*at)).and_then(|at| marks.get(at));
    let first = best.map_or(0, |mark| mark.start);
    let before = text.get(..first).unwrap_or_default();
    let start = before.char_indices().rev().nth(LEADING_CHARS - 1).map_or(0, |(at, _)| at);
    // Begin after a space, if there is one, and not in the middle of a word.
    let start = match text.get(start..first).and_then(|lead| lead.find(char::is_whitespace)) {
        Some(space) if start > 0 => start + space + 1,
        _ => start,
    };
    let start = text.ceil_char_boundary(start);
    let rest = text.get(start..).unwrap_or_default();
    let Some((cut, _)) = rest.char_indices().nth(SNIPPET_CHARS) else {
        return start..text.len();
    };
    let end = rest.get(..cut).and_then(|shown| shown.rfind(char::is_whitespace));
    let least = best.map_or(0, |mark| mark.end.saturating_sub(start));
    start..start + end.filter(|end| *end >= least).unwrap_or(cut.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the snippet with its matches in brackets.
    fn bracketed(query: &str, text: &str) -> String {
        let query = Query::parse(Analyzer::default(), query).expect("a query");
        let shown = snippet(Analyzer::default(), &query, text);
        let piece = |(text, is_mark)| if is_mark { format!("[{text}]") } else { String::from(text) };
        shown.pieces().map(piece).collect()
    }

    #[test]
    fn matches_are_marked() {
        assert_eq!(
            bracketed("ferry ada -boats", "Ferries & boats\nof Ada's ferry"),
            "[Ferries] & boats of [Ada's] [ferry]"
        );
        assert_eq!(bracketed("数据库", "关系数据库好"), "关系[数据库]好");
        assert_eq!(bracketed("fer*", "fire, ferry"), "fire, [ferry]");
    }

    #[test]
    fn snippet_of_long_text_contains_most_matches() {
        let filler = "word after word goes by and nothing happens ".repeat(20);
        let text = format!("{filler}a ferry {filler}a ferry to the island {filler}");
        let shown = bracketed("ferry island", &text);
        assert!(shown.contains("[ferry] to the [island"), "{shown}");
        assert!(shown.starts_with('…') && shown.ends_with('…') && shown.len() < 400, "{shown}");
        // A word longer than the snippet is shown completely.
        let word = "é".repeat(999);
        assert_eq!(bracketed("éé*", &format!("see {word} there")), format!("see [{word}]…"));
        assert_eq!(bracketed("ferry", "nothing of it"), "nothing of it");
    }
}
