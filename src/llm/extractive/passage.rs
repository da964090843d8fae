//! Passages: up to three neighbouring sentences of one message that become one sentence of the summary.
//!
//! Writers of summaries combine two or three spoken sentences into one: a sentence of chat has about a dozen words, one
//! of edited prose two dozen, one of a dense summary more. A single sentence of a message would waste most of its share
//! of the budget and would lack its context.
//!
//! The sentences of a passage are joined by semicolons. So no method of counting, neither a simple rule nor Unicode's,
//! finds more sentences than requested.

use super::plain_text;
use super::sentences::is_closing;
use std::ops::Range;
use unicode_segmentation::UnicodeSegmentation;

/// Maximum number of words of a passage with several sentences: three sentences of chat. The score of
/// `examples/rouge.rs` stays the same up to twice this value.
const MAX_WORDS: u32 = 36;
/// Maximum number of sentences of a passage; more would not read as one sentence.
const MAX_SENTENCES: usize = 3;

/// The properties of a sentence that decide with which neighbours it can form a passage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// Number of the message.
    pub(super) message: usize,
    pub(super) words: u32,
    /// `false` for code and tool calls, which form passages of their own.
    pub(super) is_prose: bool,
    /// A question can only be the last sentence of a passage, because its question mark ends the passage.
    pub(super) is_question: bool,
}

/// Returns all possible passages: each sentence alone, and together with the following sentences within the limits.
pub(super) fn candidates(sentences: &[Neighbour]) -> Vec<Range<usize>> {
    let mut passages = Vec::with_capacity(sentences.len() * 2);
    for (begin, first) in sentences.iter().enumerate() {
        passages.push(begin..begin + 1);
        let (mut words, mut last) = (first.words, first);
        for (number, next) in sentences.iter().enumerate().skip(begin + 1).take(MAX_SENTENCES - 1) {
            words = words.saturating_add(next.words);
            let joins = next.message == first.message && last.is_prose && next.is_prose && !last.is_question;
            if !joins || words > MAX_WORDS {
                break;
            }
            passages.push(begin..number + 1);
            last = next;
        }
    }
    passages
}

/// Joins the sentences of a passage into one sentence.
pub(super) fn write<'a>(sentences: impl IntoIterator<Item = &'a str>) -> String {
    let mut out = String::new();
    let mut ends_with_colon = false;
    for sentence in sentences {
        let text = plain_text::to_plain_sentence(sentence);
        if text.is_empty() {
            continue;
        }
        if !out.is_empty() {
            replace_end(&mut out, ends_with_colon);
        }
        ends_with_colon = sentence.trim_end().ends_with([':', '：']);
        out.push_str(&text);
    }
    out
}

/// Replaces the end of a sentence by a separator.
fn replace_end(text: &mut String, ends_with_colon: bool) {
    let core = text.trim_end_matches(is_closing).len();
    let closing = text.split_off(core);
    text.truncate(text.trim_end_matches(plain_text::ends_sentence).len());
    text.push_str(&closing);
    let is_wide = text.ends_with(plain_text::is_wide);
    text.push_str(match (ends_with_colon, is_wide) {
        (true, false) => " – ",
        (true, true) => "–",
        (false, false) => "; ",
        (false, true) => "；",
    });
}

/// Returns the number of sentences by the method that finds most: usually 1 for a passage, more if it contains a URL
/// with a question mark.
pub(super) fn sentence_count(text: &str) -> usize {
    text.unicode_sentences().count().max(count_by_punctuation(text)).max(1)
}

/// Counts like a split at `[.!?]+\s`.
fn count_by_punctuation(text: &str) -> usize {
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
        words
            .iter()
            .map(|words| Neighbour { message: 0, words: *words, is_prose: true, is_question: false })
            .collect()
    }

    #[test]
    fn neighbours_of_one_message_form_passages() {
        let mut sentences = neighbours(&[10, 10, 10, 10]);
        assert_eq!(candidates(&sentences), [0..1, 0..2, 0..3, 1..2, 1..3, 1..4, 2..3, 2..4, 3..4]);
        sentences[2].message = 1;
        sentences[3].message = 1;
        assert_eq!(candidates(&sentences), [0..1, 0..2, 1..2, 2..3, 2..4, 3..4]);
        assert_eq!(
            candidates(&neighbours(&[30, 6, 400])),
            [0..1, 0..2, 1..2, 2..3],
            "within the limit of words"
        );
    }

    #[test]
    fn question_ends_a_passage_and_code_is_a_passage_of_its_own() {
        let mut sentences = neighbours(&[5, 5, 5]);
        sentences[1].is_question = true;
        assert_eq!(candidates(&sentences), [0..1, 0..2, 1..2, 2..3]);
        sentences[1] = Neighbour { is_prose: false, is_question: false, ..sentences[1] };
        assert_eq!(candidates(&sentences), [0..1, 1..2, 2..3]);
    }

    #[test]
    fn passage_is_written_as_one_sentence() {
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
            assert_eq!(sentence_count(passage), 1, "{passage}");
        }
    }

    #[test]
    fn sentences_are_counted_by_the_stricter_method() {
        assert_eq!(sentence_count("One. Two! Three"), 3);
        assert_eq!(sentence_count("See https://example.org/?q=1 for it."), 2);
        assert_eq!(sentence_count("e.g. this"), 2);
        assert_eq!(sentence_count("日本。中国。"), 2);
        assert_eq!(sentence_count("😀"), 1);
    }
}
