//! The sources of a summary: for each of its sentences, the message that says it, or that has most words in common with it.
//!
//! The extractive summariser copies sentences, and changes only white space, markup and punctuation. So the words of such a sentence
//! follow each other in its message, and it is *exact*. For other sentences, the words in common decide, weighted by their rarity
//! among the messages: a name or a number that no message has weighs most. The score is the share of the weight of the sentence that
//! one message covers. A sentence with a low score is not wrong for certain: it may combine several messages, or use other words.

use super::search::analyzer::{Analyzer, StopTerms, segments};
use super::sentence_bounds::sentence_ends;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The score from which a sentence counts as supported.
pub const SUPPORT_THRESHOLD: f64 = 0.3;
/// Number of sentences that are compared.
const MAX_SENTENCES: usize = 500;
/// Only this much of a summary is compared.
const MAX_SUMMARY_BYTES: usize = 64 * 1024;
/// Longest name of a speaker before a sentence, in words and in bytes.
const MAX_LABEL_WORDS: usize = 5;
const MAX_LABEL_BYTES: usize = 256;

/// A message that the summary covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMessage {
    pub seq: i64,
    /// The searchable text.
    pub text: String,
}

/// A sentence of a summary and its source.
#[derive(Clone, Debug, PartialEq)]
pub struct SentenceSource {
    /// The sentence as in the summary, without the white space around it.
    pub text: String,
    /// The words of the sentence are those of the message, in this order.
    pub is_exact: bool,
    /// The message; `None` if no message has a word of the sentence.
    pub seq: Option<i64>,
    /// From 0 to 1; 1 for an exact sentence.
    pub score: f64,
}

impl SentenceSource {
    pub fn is_supported(&self) -> bool {
        self.is_exact || self.score >= SUPPORT_THRESHOLD
    }
}

/// Returns the sources of the sentences of a summary, and `false` if the summary is so long that only its beginning was compared.
/// `messages` are in the order of the conversation. Of equal sources, the first one is returned.
pub fn find(analyzer: Analyzer, summary: &str, messages: &[SourceMessage]) -> (Vec<SentenceSource>, bool) {
    let compared = summary.get(..summary.floor_char_boundary(MAX_SUMMARY_BYTES)).unwrap_or_default();
    let mut texts = sentences(compared);
    let is_complete = compared.len() == summary.len() && texts.len() <= MAX_SENTENCES;
    texts.truncate(MAX_SENTENCES);
    let mut vocabulary = Vocabulary::new(analyzer);
    let sentences: Vec<Sentence> = texts.iter().map(|text| Sentence::new(text, &mut vocabulary)).collect();
    let mut exact = ExactSearch::new(&sentences);
    let mut postings: Vec<Vec<usize>> = vec![Vec::new(); vocabulary.ids.len()];
    for (number, message) in messages.iter().enumerate() {
        let words = vocabulary.read(&message.text);
        exact.search(number, &words);
        let terms: HashSet<usize> = words.iter().filter_map(|word| word.term).collect();
        for term in terms {
            if let Some(posting) = postings.get_mut(term) {
                posting.push(number);
            }
        }
    }
    let mut scores = vec![0.0; messages.len()];
    let sources = sentences.iter().zip(texts).zip(exact.found).map(|((sentence, text), exact)| {
        let text = text.to_owned();
        if let Some(message) = exact.and_then(|number| messages.get(number)) {
            return SentenceSource { text, is_exact: true, seq: Some(message.seq), score: 1.0 };
        }
        let (number, score) = sentence.best_match(&postings, &mut scores);
        let seq = messages.get(number).filter(|_| score > 0.0).map(|message| message.seq);
        SentenceSource { text, is_exact: false, seq, score: (score * 1000.0).round() / 1000.0 }
    });
    (sources.collect(), is_complete)
}

/// Splits a summary into sentences. A part of one word, such as `Dr.`, belongs to the next sentence.
fn sentences(summary: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    for line in summary.lines() {
        let (mut start, mut part_start, mut words) = (0, 0, 0);
        for end in sentence_ends(line) {
            // Only the new part, because a line can have many parts without words.
            words += segments(line.get(part_start..end).unwrap_or_default()).take(2).count();
            part_start = end;
            if words > 1 || end == line.len() {
                sentences.push(line.get(start..end).unwrap_or_default().trim());
                (start, words) = (end, 0);
            }
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// Returns a sentence without the name of its speaker: `Ada: It rained.`
fn without_label(sentence: &str) -> &str {
    match sentence.split_once(": ") {
        Some((label, rest))
            if label.len() <= MAX_LABEL_BYTES
                && label.split_whitespace().count() <= MAX_LABEL_WORDS
                && segments(rest).next().is_some() =>
        {
            rest
        }
        _ => sentence,
    }
}

/// A word of a text: the numbers of its term and of its unstemmed form, if the summary contains them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    term: Option<usize>,
    form: Option<usize>,
    /// Could be the number of an item of a list, which the extractive summariser leaves out.
    is_item_number: bool,
}

/// The terms and unstemmed words of the summary. Repeated words are analyzed once.
struct Vocabulary {
    analyzer: Analyzer,
    ids: HashMap<String, usize>,
    analyzed: HashMap<String, Vec<Word>>,
    stop_words: StopTerms,
    stop_terms: HashSet<usize>,
}

impl Vocabulary {
    fn new(analyzer: Analyzer) -> Self {
        let (stop_words, stop_terms) = (analyzer.stop_terms(), HashSet::new());
        Self { analyzer, ids: HashMap::new(), analyzed: HashMap::new(), stop_words, stop_terms }
    }

    /// Adds the words of a sentence of the summary and returns them.
    fn add(&mut self, text: &str) -> Vec<Word> {
        let mut words = Vec::new();
        for segment in segments(text) {
            let raw = text.get(segment.range.clone()).unwrap_or_default();
            for (term, form) in forms(self.analyzer, raw) {
                let is_stop_term = self.stop_words.contains(&*term);
                let [term, form] = [term.to_string(), format!("={form}")].map(|key| {
                    let next = self.ids.len();
                    *self.ids.entry(key).or_insert(next)
                });
                if is_stop_term {
                    self.stop_terms.insert(term);
                }
                words.push(Word { term: Some(term), form: Some(form), is_item_number: is_item_number(raw) });
            }
        }
        words
    }

    /// Returns the words of a message.
    fn read(&mut self, text: &str) -> Vec<Word> {
        let mut words = Vec::new();
        for segment in segments(text) {
            let raw = text.get(segment.range.clone()).unwrap_or_default();
            if let Some(known) = self.analyzed.get(raw) {
                words.extend(known);
                continue;
            }
            let id = |key: &str| self.ids.get(key).copied();
            let word = |(term, form): (Arc<str>, Arc<str>)| Word {
                term: id(&term),
                form: id(&format!("={form}")),
                is_item_number: is_item_number(raw),
            };
            let read: Vec<Word> = forms(self.analyzer, raw).map(word).collect();
            words.extend(&read);
            self.analyzed.insert(raw.to_owned(), read);
        }
        words
    }
}

/// Returns the terms of a segment, each with its unstemmed form.
fn forms(analyzer: Analyzer, raw: &str) -> impl Iterator<Item = (Arc<str>, Arc<str>)> {
    let tokens = analyzer.tokens(raw).into_iter().filter(|token| !token.is_unigram);
    tokens.map(|token| (token.term, token.unstemmed))
}

fn is_item_number(raw: &str) -> bool {
    raw.len() <= 3 && raw.bytes().all(|byte| byte.is_ascii_digit())
}

/// The words of a sentence, without its speaker.
struct Sentence {
    /// The unstemmed words, in order.
    forms: Vec<usize>,
    /// The distinct terms, without stop words if there are others.
    terms: Vec<usize>,
}

impl Sentence {
    fn new(text: &str, vocabulary: &mut Vocabulary) -> Self {
        let words = vocabulary.add(without_label(text));
        let all: HashSet<usize> = words.iter().filter_map(|word| word.term).collect();
        let mut terms: Vec<usize> = all.difference(&vocabulary.stop_terms).copied().collect();
        if terms.is_empty() {
            terms = all.into_iter().collect();
        }
        // The order of a set differs between runs, and so would sums.
        terms.sort_unstable();
        Self { forms: words.iter().filter_map(|word| word.form).collect(), terms }
    }

    /// Returns the number of the message that covers most of the sentence, and its score. `scores` has a zero for each message, and
    /// has it again afterwards.
    fn best_match(&self, postings: &[Vec<usize>], scores: &mut [f64]) -> (usize, f64) {
        let mut total = 0.0;
        let of = |term: &usize| postings.get(*term).map(Vec::as_slice).unwrap_or_default();
        for posting in self.terms.iter().map(of) {
            let weight = weight(posting.len(), scores.len());
            total += weight;
            for number in posting {
                if let Some(score) = scores.get_mut(*number) {
                    *score += weight;
                }
            }
        }
        let mut best = (0, 0.0);
        for number in self.terms.iter().flat_map(of) {
            let score = scores.get(*number).copied().unwrap_or_default();
            let is_better = match score.total_cmp(&best.1) {
                Ordering::Greater => true,
                Ordering::Equal => *number < best.0,
                Ordering::Less => false,
            };
            if is_better {
                best = (*number, score);
            }
        }
        for number in self.terms.iter().flat_map(of) {
            if let Some(score) = scores.get_mut(*number) {
                *score = 0.0;
            }
        }
        if total > 0.0 { (best.0, best.1 / total) } else { best }
    }
}

/// Returns the weight of a term that `frequency` of the messages contain: greater than 0, and greatest for one that none contains.
fn weight(frequency: usize, messages: usize) -> f64 {
    let number = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    ((number(messages) + 1.0) / (number(frequency) + 0.5)).ln()
}

/// Searches for the words of all sentences in one pass over each message.
struct ExactSearch<'s> {
    sentences: &'s [Sentence],
    /// Numbers of the sentences by their first two words.
    by_beginning: HashMap<(usize, usize), Vec<usize>>,
    /// The first message that contains the words of each sentence.
    found: Vec<Option<usize>>,
}

impl<'s> ExactSearch<'s> {
    fn new(sentences: &'s [Sentence]) -> Self {
        let mut by_beginning: HashMap<_, Vec<usize>> = HashMap::new();
        for (number, sentence) in sentences.iter().enumerate() {
            // A sequence of fewer than three words occurs in many messages by chance.
            if let [first, second, _, ..] = *sentence.forms {
                by_beginning.entry((first, second)).or_default().push(number);
            }
        }
        Self { sentences, by_beginning, found: vec![None; sentences.len()] }
    }

    fn search(&mut self, message: usize, words: &[Word]) {
        for (at, pair) in words.windows(2).enumerate() {
            let [Word { form: Some(first), .. }, Word { form: Some(second), .. }] = *pair else { continue };
            for number in self.by_beginning.get(&(first, second)).into_iter().flatten() {
                let (Some(found), Some(sentence)) =
                    (self.found.get_mut(*number), self.sentences.get(*number))
                else {
                    continue;
                };
                if found.is_none() && begins_with(words.get(at..).unwrap_or_default(), &sentence.forms) {
                    *found = Some(message);
                }
            }
        }
    }
}

/// Returns `true` if the words begin with these forms. Numbers of list items between them are ignored.
fn begins_with(words: &[Word], forms: &[usize]) -> bool {
    let mut words = words.iter();
    forms.iter().all(|form| {
        words
            .by_ref()
            .find(|word| word.form == Some(*form) || !word.is_item_number)
            .is_some_and(|word| word.form == Some(*form))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::search::analyzer::Language;
    use test_case::test_case;

    fn messages(texts: &[&str]) -> Vec<SourceMessage> {
        (1..).zip(texts).map(|(seq, text)| SourceMessage { seq, text: (*text).to_owned() }).collect()
    }

    const TEXTS: [&str; 5] = [
        "Hello! I'm Ada. I'd like to plan a trip to **Lisbon**.",
        "Nice. When do you leave, and what is your budget?",
        "On 14 May, by train. We have 1,200 euros:\n1. trains\n2. a hotel near the river",
        "The night train to Lisbon costs 89 euros; it leaves Madrid at 21:50.",
        "我喜欢喝茶，也喜欢看书。",
    ];

    fn sources(summary: &str) -> Vec<SentenceSource> {
        find(Analyzer::default(), summary, &messages(&TEXTS)).0
    }

    #[test_case("User: I'd like to plan a trip to Lisbon." => Some(1); "copied with a speaker")]
    #[test_case("On 14 May, by train; We have 1,200 euros – trains; a hotel near the river." => Some(3); "joined sentences of a list")]
    #[test_case("We have 1,200 euros." => Some(3); "a part of a message")]
    #[test_case("我喜欢喝茶。" => Some(5); "without spaces")]
    #[test_case("The night train leaves Madrid." => None; "words are left out")]
    #[test_case("To a trip plan to like." => None; "another order")]
    #[test_case("Ada: Nice." => None; "too short")]
    fn copied_sentence_is_exact(sentence: &str) -> Option<i64> {
        let [source] = &sources(sentence)[..] else { panic!("one sentence: {:?}", sources(sentence)) };
        assert_eq!(source.text, sentence);
        assert!(!source.is_exact || (source.is_supported() && (source.score - 1.0).abs() < f64::EPSILON));
        source.seq.filter(|_| source.is_exact)
    }

    #[test_case("Ada is planning trips to Lisbon." => (Some(1), true); "other forms of the words")]
    #[test_case("They have a budget of 1,200 euros and want a hotel close to the river." => (Some(3), true); "paraphrase")]
    #[test_case("A night train from Madrid costs 89 euros." => (Some(4), true); "reordered")]
    #[test_case("Bo bought a blue bicycle in Oslo for 450 crowns." => (None, false); "invented")]
    #[test_case("The train to Paris with Grace Hopper costs 310 crowns per person in August." => (Some(4), false); "mostly invented")]
    fn other_sentence_has_its_best_match(sentence: &str) -> (Option<i64>, bool) {
        let [source] = &sources(sentence)[..] else { panic!("one sentence: {:?}", sources(sentence)) };
        assert!(!source.is_exact && (0.0..=1.0).contains(&source.score), "{source:?}");
        (source.seq, source.is_supported())
    }

    #[test]
    fn summary_is_split_into_sentences_without_losing_text() {
        let summary = "Ada met Dr. Ng. They agreed!\n\n- 3 trains  \nNo. \"Really?\" she asked.\n…";
        let found: Vec<String> = sources(summary).into_iter().map(|source| source.text).collect();
        let without_space = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(without_space(&found.concat()), without_space(summary));
        assert_eq!(found[0], "Ada met Dr.");
        assert_eq!(found.last().map(String::as_str), Some("…"));
        assert_eq!(sources(""), []);
    }

    #[test]
    fn first_of_equal_sources_is_returned() {
        let messages = messages(&["Tea is ready now.", "Tea is ready now.", "Milk and tea"]);
        let find = |summary: &str| find(Analyzer::new(Language::None), summary, &messages).0[0].seq;
        assert_eq!(find("Tea is ready now."), Some(1));
        assert_eq!(find("Someone made tea with lemon."), Some(1));
        assert_eq!(find("Someone drank milk."), Some(3));
    }

    #[test]
    fn sentence_of_stop_words_is_compared_by_them() {
        let found = sources("What is your and do you?");
        assert_eq!((found[0].seq, found[0].is_supported()), (Some(2), true));
    }

    #[test]
    fn long_summary_is_compared_up_to_a_limit() {
        let messages = messages(&TEXTS);
        let sentence = "A night train costs 89 euros. ";
        let (found, is_complete) = find(Analyzer::default(), &sentence.repeat(MAX_SENTENCES), &messages);
        assert_eq!((found.len(), is_complete), (MAX_SENTENCES, true));
        let (found, is_complete) = find(Analyzer::default(), &sentence.repeat(MAX_SENTENCES + 1), &messages);
        assert_eq!((found.len(), is_complete), (MAX_SENTENCES, false));
        let long = "é".repeat(MAX_SUMMARY_BYTES);
        let (found, is_complete) = find(Analyzer::default(), &long, &messages);
        assert_eq!((found[0].text.len(), is_complete), (MAX_SUMMARY_BYTES, false));
        assert_eq!(find(Analyzer::default(), "No message at all.", &[]).0[0].seq, None);
    }
}
