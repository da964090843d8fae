//! What of a hit is shown: the part of it that has most of what was asked for, as HTML in which the words found stand in
//! `<mark>`. All else is escaped, so that no text can forge a mark.

use super::analysis::Analysis;
use super::query::Query;
use super::rank::matches;
use std::ops::Range;

/// Characters of a snippet, about.
const LENGTH: usize = 240;
/// Of them, before the first word found.
const BEFORE: usize = 60;

/// The snippet of a text that was found.
#[must_use]
pub fn snippet(analysis: Analysis, query: &Query, text: &str) -> String {
    let marks = joined(matches(analysis, query, text));
    let shown = window(text, &marks);
    let mut out = String::with_capacity(shown.len() + 64);
    if shown.start > 0 {
        out.push('…');
    }
    let mut at = shown.start;
    for mark in marks.iter().filter(|mark| mark.start >= shown.start && mark.end <= shown.end) {
        escape(&mut out, text.get(at..mark.start).unwrap_or_default());
        out.push_str("<mark>");
        escape(&mut out, text.get(mark.clone()).unwrap_or_default());
        out.push_str("</mark>");
        at = mark.end;
    }
    escape(&mut out, text.get(at..shown.end).unwrap_or_default());
    if shown.end < text.len() {
        out.push('…');
    }
    out
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

fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\r' | '\t' => out.push(' '),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(query: &str, text: &str) -> String {
        let query = Query::parse(Analysis::default(), query).expect("a query");
        snippet(Analysis::default(), &query, text)
    }

    #[test]
    fn words_found_are_marked_and_nothing_else_can_pass_for_a_mark() {
        let text = "<mark>Ferries</mark> & \"boats\"\nof Ada's ferry";
        let shown = "&lt;mark&gt;<mark>Ferries</mark>&lt;/mark&gt; &amp; &quot;boats&quot; of <mark>Ada&#39;s</mark> \
                     <mark>ferry</mark>";
        assert_eq!(of("ferry ada -boats", text), shown);
        assert_eq!(of("数据库", "关系数据库好"), "关系<mark>数据库</mark>好");
        assert_eq!(of("fer*", "fire, ferry"), "fire, <mark>ferry</mark>");
    }

    #[test]
    fn of_a_long_text_the_part_with_most_words() {
        let filler = "word after word goes by and nothing happens ".repeat(20);
        let text = format!("{filler}a ferry {filler}a ferry to the island {filler}");
        let shown = of("ferry island", &text);
        assert!(shown.contains("<mark>ferry</mark> to the <mark>island"), "{shown}");
        assert!(shown.starts_with('…') && shown.ends_with('…') && shown.len() < 400, "{shown}");
        // A word may be longer than a snippet.
        let word = "é".repeat(999);
        assert_eq!(of("é*", &format!("see {word} there")), format!("see <mark>{word}</mark>…"));
        assert_eq!(of("ferry", "nothing of it"), "nothing of it");
    }
}
