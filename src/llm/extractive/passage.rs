//! What one sentence of a summary's budget holds: a passage, up to three neighbouring sentences of one message.
//!
//! Who writes a summary puts into a sentence what was said in two or three: a sentence of chat has about a dozen
//! words, one of edited prose two dozen, one of a dense summary more. A single sentence of a message would waste
//! most of its place, and lack what the ones around it make clear.
//!
//! A passage is written as one sentence, its parts divided by semicolons, so that whoever counts sentences, by a
//! simple rule or by Unicode's, never counts more than were asked for.

use super::plain_text;
use super::sentences::closes;
use std::ops::Range;
use unicode_segmentation::UnicodeSegmentation;

/// The most words in a passage of several sentences: three sentences of chat. What it measures by (see
/// `examples/rouge.rs`) is flat from here to the double.
const WORDS: u32 = 36;
/// The most sentences in a passage: with more, it would no longer read as one.
const SENTENCES: usize = 3;

/// A sentence, as far as it matters to what stands beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// The message that it is in.
    pub(super) message: usize,
    pub(super) words: u32,
    /// Whether it may stand beside others: code and tool calls may not.
    pub(super) prose: bool,
    /// Whether it asks: then nothing follows it, as its question mark would end the passage.
    pub(super) asks: bool,
}

/// Every passage of a conversation: each sentence alone, and with those after it as far as they fit.
pub(super) fn all(sentences: &[Neighbour]) -> Vec<Range<usize>> {
    let mut passages = Vec::with_capacity(sentences.len() * 2);
    for (begin, first) in sentences.iter().enumerate() {
        passages.push(begin..begin + 1);
        let (mut words, mut last) = (first.words, first);
        for (number, next) in sentences.iter().enumerate().skip(begin + 1).take(SENTENCES - 1) {
            words = words.saturating_add(next.words);
            let joins = next.message == first.message && last.prose && next.prose && !last.asks;
            if !joins || words > WORDS {
                break;
            }
            passages.push(begin..number + 1);
            last = next;
        }
    }
    passages
}

/// Writes the sentences of a passage as one.
pub(super) fn write<'a>(sentences: impl IntoIterator<Item = &'a str>) -> String {
    let mut out = String::new();
    let mut introduces = false;
    for sentence in sentences {
        let text = plain_text::plain(sentence);
        if text.is_empty() {
            continue;
        }
        if !out.is_empty() {
            reopen(&mut out, introduces);
        }
        introduces = sentence.trim_end().ends_with([':', '：']);
        out.push_str(&text);
    }
    out
}

/// Takes the end of a sentence back, so that it can go on.
fn reopen(text: &mut String, introduces: bool) {
    let core = text.trim_end_matches(closes).len();
    let closing = text.split_off(core);
    text.truncate(text.trim_end_matches(plain_text::ends_sentence).len());
    text.push_str(&closing);
    let wide = text.ends_with(plain_text::is_wide);
    text.push_str(match (introduces, wide) {
        (true, false) => " – ",
        (true, true) => "–",
        (false, false) => "; ",
        (false, true) => "；",
    });
}

/// How many sentences a text has for whoever counts most: usually 1 for a passage, more where an address has a
/// question mark in it.
pub(super) fn count(text: &str) -> usize {
    text.unicode_sentences().count().max(count_simply(text)).max(1)
}

/// As `[.!?]+\s` splits it.
fn count_simply(text: &str) -> usize {
    let ends = text.char_indices().filter(|(at, c)| {
        let after = text.get(at + c.len_utf8()..).unwrap_or_default();
        matches!(c, '.' | '!' | '?') && after.starts_with(char::is_whitespace)
    });
    ends.count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn neighbours(words: &[u32]) -> Vec<Neighbour> {
        words.iter().map(|words| Neighbour { message: 0, words: *words, prose: true, asks: false }).collect()
    }

    #[test]
    fn neighbours_of_one_message_make_a_passage() {
        let mut sentences = neighbours(&[10, 10, 10, 10]);
        assert_eq!(all(&sentences), [0..1, 0..2, 0..3, 1..2, 1..3, 1..4, 2..3, 2..4, 3..4]);
        sentences[2].message = 1;
        sentences[3].message = 1;
        assert_eq!(all(&sentences), [0..1, 0..2, 1..2, 2..3, 2..4, 3..4]);
        assert_eq!(all(&neighbours(&[30, 6, 400])), [0..1, 0..2, 1..2, 2..3], "as far as they fit");
    }

    #[test]
    fn a_question_comes_last_and_code_stays_alone() {
        let mut sentences = neighbours(&[5, 5, 5]);
        sentences[1].asks = true;
        assert_eq!(all(&sentences), [0..1, 0..2, 1..2, 2..3]);
        sentences[1] = Neighbour { prose: false, asks: false, ..sentences[1] };
        assert_eq!(all(&sentences), [0..1, 1..2, 2..3]);
    }

    #[test]
    fn a_passage_is_one_sentence() {
        for (parts, passage) in [
            (["It rained.", "We stayed in!"], "It rained; We stayed in!"),
            (["They play \"Rain.\"", "Nice…"], "They play \"Rain\"; Nice…"),
            (["We need:", "- bread"], "We need – bread."),
            (["Hm...", "Dr. Ng wrote... what, e.g. to J. Doe?"], "Hm; Dr Ng wrote… what, e.g to J Doe?"),
            (
                ["hi there. how are you? i am (quite!) fine", "ok"],
                "hi there; how are you; i am (quite) fine; ok.",
            ),
            (["今日は雨です。", "傘が要ります！"], "今日は雨です；傘が要ります！"),
        ] {
            assert_eq!(write(parts), passage);
            assert_eq!(count(passage), 1, "{passage}");
        }
    }

    #[test]
    fn sentences_are_counted_by_whoever_counts_most() {
        assert_eq!(count("One. Two! Three"), 3);
        assert_eq!(count("See https://example.org/?q=1 for it."), 2);
        assert_eq!(count("e.g. this"), 2);
        assert_eq!(count("日本。中国。"), 2);
        assert_eq!(count("😀"), 1);
    }
}
