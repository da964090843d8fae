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
use super::terms::TermBag;
use std::borrow::Cow;
use std::ops::Range;
use unicode_segmentation::UnicodeSegmentation;

/// Maximum number of words of a passage with several sentences: three sentences of chat. The score of
/// `examples/rouge.rs` stays the same up to twice this value.
const MAX_WORDS: u32 = 36;
/// Maximum number of sentences of a passage; more would not read as one sentence.
const MAX_SENTENCES: usize = 3;

/// A sentence with its origin and its terms.
#[derive(Debug)]
pub(super) struct SourceSentence<'a> {
    /// The speaker, if known.
    pub(super) label: Option<&'a str>,
    /// Number of the message; in a summary, number of the part that begins with a speaker.
    pub(super) source: usize,
    pub(super) text: Cow<'a, str>,
    pub(super) bag: TermBag,
    /// Product of the factors for position, form and role.
    pub(super) factor: f64,
    /// `false` for code and tool calls.
    pub(super) is_prose: bool,
}

/// Returns all possible passages: each sentence alone, and together with the following sentences within the limits.
pub(super) fn candidates(sentences: &[SourceSentence<'_>]) -> Vec<Range<usize>> {
    let mut passages = Vec::with_capacity(sentences.len() * 2);
    for (begin, first) in sentences.iter().enumerate() {
        passages.push(begin..begin + 1);
        let (mut words, mut last) = (first.bag.words, first);
        for (number, next) in sentences.iter().enumerate().skip(begin + 1).take(MAX_SENTENCES - 1) {
            words = words.saturating_add(next.bag.words);
            // Code and tool calls form passages of their own. The mark of a question ends the passage.
            let is_joined = last.is_prose && next.is_prose && !plain_text::is_question(&last.text);
            if next.source != first.source || !is_joined || words > MAX_WORDS {
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
    use super::super::terms::TermBag;
    use super::*;

    fn sentence(source: usize, words: u32, text: &str) -> SourceSentence<'_> {
        let bag = TermBag { words, ..TermBag::default() };
        SourceSentence { label: None, source, text: text.into(), bag, factor: 1.0, is_prose: true }
    }

    #[test]
    fn neighbours_of_one_message_form_passages() {
        let of = |sentences: &[(usize, u32)]| {
            let sentences: Vec<_> =
                sentences.iter().map(|&(source, words)| sentence(source, words, "text")).collect();
            candidates(&sentences)
        };
        let all = [0..1, 0..2, 0..3, 1..2, 1..3, 1..4, 2..3, 2..4, 3..4];
        assert_eq!(of(&[(0, 10), (0, 10), (0, 10), (0, 10)]), all);
        assert_eq!(of(&[(0, 10), (0, 10), (1, 10), (1, 10)]), [0..1, 0..2, 1..2, 2..3, 2..4, 3..4]);
        assert_eq!(of(&[(0, 30), (0, 6), (0, 400)]), [0..1, 0..2, 1..2, 2..3], "within the limit of words");
    }

    #[test]
    fn question_ends_a_passage_and_code_is_a_passage_of_its_own() {
        let mut sentences = [sentence(0, 5, "a."), sentence(0, 5, "b?"), sentence(0, 5, "c.")];
        assert_eq!(candidates(&sentences), [0..1, 0..2, 1..2, 2..3]);
        sentences[1] = SourceSentence { is_prose: false, ..sentence(0, 5, "b") };
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
