//! The sources of a summary: for each of its sentences, the message that says it, or that has most words in common with it.
//!
//! The extractive summariser copies sentences, and changes only white space, markup and punctuation. So the words of such a sentence
//! follow each other in its message, and it is *exact*. For other sentences, the words in common decide, weighted by their rarity
//! among the messages: a name or a number that no message has weighs most. The score is the share of the weight of the sentence that
//! one message covers. A sentence with a low score is not wrong for certain: it may combine several messages, or use other words.

use super::search::analyzer::{Analyzer, StopTerms, segments};
use super::sentence_bounds::sentence_ends;
use super::summary::parse_date;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
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
/// Steps of the search for exact sentences. Usual texts take about one per word. Texts that repeat the same words and numbers could
/// take as many as the product of their lengths.
const MAX_EXACT_STEPS: usize = 50_000_000;

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

/// Returns the sources of the sentences of a summary, and `false` if the summary is so long that only its beginning was compared, or
/// if its words and those of the messages repeat so often that exact sentences can be missing.
/// `messages` are in the order of the conversation. Of equal sources, the first one is returned.
pub fn find(analyzer: Analyzer, summary: &str, messages: &[SourceMessage]) -> (Vec<SentenceSource>, bool) {
    find_within(MAX_EXACT_STEPS, analyzer, summary, messages)
}

fn find_within(
    exact_steps: usize,
    analyzer: Analyzer,
    summary: &str,
    messages: &[SourceMessage],
) -> (Vec<SentenceSource>, bool) {
    let compared = summary.get(..summary.floor_char_boundary(MAX_SUMMARY_BYTES)).unwrap_or_default();
    let mut texts = sentences(compared);
    let is_whole = compared.len() == summary.len() && texts.len() <= MAX_SENTENCES;
    texts.truncate(MAX_SENTENCES);
    let mut vocabulary = Vocabulary::new(analyzer);
    let sentences: Vec<Sentence> = texts.iter().map(|text| Sentence::new(text, &mut vocabulary)).collect();
    let mut exact = ExactSearch::new(&sentences, exact_steps);
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
    let is_complete = is_whole && !exact.is_cut_off();
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

/// Splits a summary into sentences, without lines that are dates. A part of one word, such as `Dr.`, belongs to the next sentence.
fn sentences(summary: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    for line in summary.lines().filter(|line| parse_date(line).is_none()) {
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
    /// Could be the number of an item of a list, which the extractive summariser leaves out. Equal forms have equal values.
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
                let is_item_number = is_item_number(&form);
                let [term, form] = [term.to_string(), format!("={form}")].map(|key| {
                    let next = self.ids.len();
                    *self.ids.entry(key).or_insert(next)
                });
                if is_stop_term {
                    self.stop_terms.insert(term);
                }
                words.push(Word { term: Some(term), form: Some(form), is_item_number });
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
                is_item_number: is_item_number(&form),
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
    analyzer.words(raw).map(|token| (token.term, token.unstemmed))
}

fn is_item_number(form: &str) -> bool {
    form.len() <= 3 && form.bytes().all(|byte| byte.is_ascii_digit())
}

/// The words of a sentence, without its speaker.
struct Sentence {
    /// The unstemmed words, in order.
    forms: Vec<usize>,
    /// The same without item numbers.
    unnumbered: Vec<usize>,
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
        let unnumbered =
            words.iter().filter(|word| !word.is_item_number).filter_map(|word| word.form).collect();
        Self { forms: words.iter().filter_map(|word| word.form).collect(), unnumbered, terms }
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

/// Searches for the words of all sentences in one pass over each message, by the algorithm of Aho and Corasick.
///
/// A message can have more item numbers than a sentence, so the pass skips them. The numbers of a sentence are compared only if its
/// other words follow each other in the message.
struct ExactSearch<'s> {
    sentences: &'s [Sentence],
    /// The beginnings of all sentences without item numbers. The first one is empty.
    beginnings: Vec<Beginning>,
    /// The beginnings by the one that is a word shorter and by their last word.
    longer: HashMap<(usize, usize), usize>,
    /// The first message that contains the words of each sentence.
    found: Vec<Option<usize>>,
    /// Number of searched sentences that are not found yet.
    missing: usize,
    steps: Steps,
}

/// The first words of a sentence.
#[derive(Default)]
struct Beginning {
    /// Number of words.
    length: usize,
    /// The beginning without its last word.
    shorter: usize,
    last_word: usize,
    /// The longest other beginning with which the words of this one end; 0 for the empty one.
    suffix: usize,
    /// The first one of the suffixes that is a whole sentence; 0 if there is none.
    whole_suffix: usize,
    /// The sentences of exactly these words that are not found yet.
    sentences: Vec<usize>,
}

/// The steps that a search may still take.
struct Steps {
    left: usize,
}

impl Steps {
    fn spend(&mut self, steps: usize) {
        self.left = self.left.saturating_sub(steps);
    }
}

impl<'s> ExactSearch<'s> {
    fn new(sentences: &'s [Sentence], steps: usize) -> Self {
        let mut search = Self {
            sentences,
            beginnings: vec![Beginning::default()],
            longer: HashMap::new(),
            found: vec![None; sentences.len()],
            missing: 0,
            steps: Steps { left: steps },
        };
        for (number, sentence) in sentences.iter().enumerate() {
            // A sequence of fewer than three words occurs in many messages by chance.
            if sentence.forms.len() > 2 {
                search.add(number, &sentence.unnumbered);
            }
        }
        search.link();
        search
    }

    /// Adds the beginnings of a sentence.
    fn add(&mut self, number: usize, words: &[usize]) {
        let mut shorter = 0;
        for (word, length) in words.iter().zip(1..) {
            let next = self.beginnings.len();
            let beginning = *self.longer.entry((shorter, *word)).or_insert(next);
            if beginning == next {
                let added = Beginning { length, shorter, last_word: *word, ..Beginning::default() };
                self.beginnings.push(added);
            }
            shorter = beginning;
        }
        if let Some(whole) = self.beginnings.get_mut(shorter) {
            whole.sentences.push(number);
            self.missing += 1;
        }
    }

    /// Links all beginnings to their suffixes.
    fn link(&mut self) {
        let mut by_length: Vec<(usize, usize)> =
            self.beginnings.iter().map(|beginning| beginning.length).zip(0..).collect();
        // A suffix is shorter, and has its own links by then.
        by_length.sort_unstable();
        for (length, number) in by_length {
            let Some(&Beginning { shorter, last_word, .. }) = self.beginnings.get(number) else { continue };
            // The suffix of a single word is empty.
            let suffix = match self.beginnings.get(shorter) {
                Some(shorter) if length > 1 => self.append(shorter.suffix, last_word),
                _ => 0,
            };
            let whole_suffix = match self.beginnings.get(suffix) {
                Some(linked) if linked.sentences.is_empty() => linked.whole_suffix,
                _ => suffix,
            };
            if let Some(beginning) = self.beginnings.get_mut(number) {
                (beginning.suffix, beginning.whole_suffix) = (suffix, whole_suffix);
            }
        }
    }

    /// Returns the longest beginning with which the words of a beginning and another word end.
    fn append(&self, mut beginning: usize, word: usize) -> usize {
        loop {
            if let Some(longer) = self.longer.get(&(beginning, word)) {
                return *longer;
            }
            if beginning == 0 {
                return 0;
            }
            beginning = self.beginnings.get(beginning).map_or(0, |beginning| beginning.suffix);
        }
    }

    fn search(&mut self, message: usize, words: &[Word]) {
        // The positions after the words that are no item numbers, and the beginning of the message.
        let mut ends = vec![0];
        let mut beginning = 0;
        let mut numbers = 0;
        for (at, word) in words.iter().enumerate() {
            if word.is_item_number {
                numbers += 1;
                continue;
            }
            if self.missing == 0 || self.steps.left == 0 {
                return;
            }
            self.compare_numbers(message, words, &(at - numbers..at));
            numbers = 0;
            ends.push(at + 1);
            beginning = word.form.map_or(0, |form| self.append(beginning, form));
            let mut whole = beginning;
            while whole != 0 {
                let Some(&Beginning { length, whole_suffix, .. }) = self.beginnings.get(whole) else { break };
                // A sentence that begins with numbers starts among those before its first other word.
                let first = ends.len().saturating_sub(length + 1);
                let Some([start, end, ..]) = ends.get(first..) else { break };
                self.steps.spend(1);
                self.compare(whole, message, words, &(*start..*end));
                whole = whole_suffix;
            }
        }
        self.compare_numbers(message, words, &(words.len() - numbers..words.len()));
    }

    /// Compares successive numbers of a message with the sentences that consist of numbers.
    fn compare_numbers(&mut self, message: usize, words: &[Word], numbers: &Range<usize>) {
        // Each of these sentences has at least three numbers.
        if numbers.len() > 2 {
            self.compare(0, message, words, numbers);
        }
    }

    /// Compares the words that start in a range with the sentences of a beginning. All words of the range except the last one are item
    /// numbers.
    fn compare(&mut self, beginning: usize, message: usize, words: &[Word], starts: &Range<usize>) {
        let Some(beginning) = self.beginnings.get_mut(beginning) else { return };
        beginning.sentences.retain(|number| {
            let Some(sentence) = self.sentences.get(*number) else { return false };
            let is_found = self.steps.left > 0 && contains(words, starts, &sentence.forms, &mut self.steps);
            if is_found && let Some(found) = self.found.get_mut(*number) {
                *found = Some(message);
                self.missing -= 1;
            }
            !is_found
        });
    }

    /// Returns `true` if the search has ended before all messages were compared.
    fn is_cut_off(&self) -> bool {
        self.missing > 0 && self.steps.left == 0
    }
}

/// Returns `true` if the words have these forms from a position in a range on. All words of the range except the last one are item
/// numbers.
fn contains(words: &[Word], starts: &Range<usize>, forms: &[usize], steps: &mut Steps) -> bool {
    let [first, second, ..] = *forms else { return false };
    steps.spend(starts.len() + 1);
    // The first start decides, because all others leave fewer numbers to choose from.
    let start = starts.clone().find(|at| {
        let pair = words.get(*at..).unwrap_or_default();
        matches!(pair, [one, two, ..] if one.form == Some(first) && two.form == Some(second))
    });
    start.is_some_and(|at| begins_with(words.get(at..).unwrap_or_default(), forms, steps))
}

/// Returns `true` if the words begin with these forms. Numbers of list items between them are ignored.
fn begins_with(words: &[Word], forms: &[usize], steps: &mut Steps) -> bool {
    let mut rest = words.iter();
    let is_match = forms.iter().all(|form| {
        let word = rest.find(|word| word.form == Some(*form) || !word.is_item_number);
        word.is_some_and(|word| word.form == Some(*form))
    });
    steps.spend(words.len() - rest.len());
    is_match
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::search::analyzer::Language;
    use proptest::prelude::*;
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

    /// Compares a sentence of at least three words with the words at each position.
    fn contains_anywhere(words: &[Word], forms: &[usize]) -> bool {
        let [first, second, _, ..] = *forms else { return false };
        (1..words.len()).any(|next| {
            (words[next - 1].form, words[next].form) == (Some(first), Some(second))
                && begins_with(&words[next - 1..], forms, &mut Steps { left: usize::MAX })
        })
    }

    proptest! {
        #[test]
        fn exact_sentences_are_those_that_a_comparison_at_each_position_finds(
            texts in prop::collection::vec("([12xyz] ){0,7}", 1..8),
            messages in prop::collection::vec("([12xyz\u{ff11}] ){0,16}", 1..4),
        ) {
            let mut vocabulary = Vocabulary::new(Analyzer::default());
            let sentences: Vec<Sentence> =
                texts.iter().map(|text| Sentence::new(text, &mut vocabulary)).collect();
            let messages: Vec<Vec<Word>> = messages.iter().map(|text| vocabulary.read(text)).collect();
            let mut search = ExactSearch::new(&sentences, MAX_EXACT_STEPS);
            for (number, words) in messages.iter().enumerate() {
                search.search(number, words);
            }
            let first = |sentence: &Sentence| {
                messages.iter().position(|words| contains_anywhere(words, &sentence.forms))
            };
            let expected: Vec<Option<usize>> = sentences.iter().map(first).collect();
            prop_assert!(!search.is_cut_off());
            prop_assert_eq!(search.found, expected);
        }
    }

    #[test_case("I paid 5 euros." => Some(1); "same number")]
    #[test_case("I paid 6 euros." => None; "other number")]
    #[test_case("I paid euros." => Some(1); "number is left out")]
    #[test_case("5 7 euros." => None; "number is missing")]
    #[test_case("1,200,500." => Some(2); "only numbers")]
    #[test_case("1,200,501." => None; "other last number")]
    #[test_case("2 pears and milk." => Some(3); "begins with a number")]
    fn numbers_of_exact_sentence_are_those_of_the_message(sentence: &str) -> Option<i64> {
        let messages =
            messages(&["I paid 5 euros.", "The price: 1,200,500.", "1. 2 pears\n2. and milk\n3. bread"]);
        let (sources, is_complete) = find(Analyzer::default(), sentence, &messages);
        assert!(is_complete);
        sources[0].seq.filter(|_| sources[0].is_exact)
    }

    #[test]
    fn periodic_texts_are_compared_in_linear_time() {
        let numbers: Vec<String> = (0..400).map(|i| format!("1 1 banana{i} pear.")).collect();
        let words = format!("{}oh.\n{}", "ha ".repeat(20_000), "Ha ha oh.\n".repeat(300));
        // A comparison at each position would take hours for the first summary and minutes for the second one.
        for (periodic, summary) in [("1 ", numbers.join("\n")), ("ha ", words)] {
            let messages = messages(&[&periodic.repeat(200_000), "Ha ha oh: 1 1 banana399 pear."]);
            let (sources, is_complete) = find(Analyzer::default(), &summary, &messages);
            assert!(is_complete && !sources[0].is_exact);
            assert!(sources.last().is_some_and(|last| last.is_exact && last.seq == Some(2)));
        }
    }

    #[test]
    fn comparison_of_many_numbers_ends_after_its_steps() {
        let summary = format!("The train leaves Madrid.\n{}2 x.", "1 x ".repeat(1000));
        let messages = messages(&["So the train leaves Madrid.", &"1 x ".repeat(5000)]);
        let (sources, is_complete) = find_within(100_000, Analyzer::default(), &summary, &messages);
        let found: Vec<_> = sources.iter().map(|source| (source.seq, source.is_exact)).collect();
        assert_eq!((found, is_complete), (vec![(Some(1), true), (Some(2), false)], false));
    }
}
