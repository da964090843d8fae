//! Ranks candidates by the words that they and their neighbours contain, and by their speaker.
//!
//! - An answer often shares few words with its question, but the messages around it share others. So the words of the
//!   neighbours count, too, less with the distance. They are added to the words of the message before the saturation of
//!   repeated words, so that a word that message and neighbours contain counts little more than once.
//! - A word of the query that is the name of a speaker does not occur in the messages of that speaker. So it is no search
//!   term, but raises the scores of these messages.
//!
//! A hit contains a word of the query, or its neighbours contain at least two of them. Messages that the query excludes
//! contribute nothing to their neighbours.

use super::analyzer::{Analyzer, characters, segments};
use super::query::{Clause, Query};
use super::text::Speaker;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use time::OffsetDateTime;
use unicode_normalization::char::is_combining_mark;

/// BM25's saturation of repeated words, at its usual value. The length of the messages has no influence.
const K1: f64 = 1.2;
/// Share of the words of the neighbours at distance 1, 2, ….
const NEIGHBOUR_SHARES: [f64; 4] = [0.4, 0.3, 0.2, 0.1];
/// Factor of the score if the query names the speaker.
const SPEAKER_FACTOR: f64 = 1.7;
/// Number of words of the query that the neighbours of a hit contain if it contains none itself. With one, a search for a single
/// word would return the neighbours of its matches.
const MIN_NEIGHBOUR_WORDS: usize = 2;
/// Maximum number of messages without a word of the query that are worth loading.
const MAX_NEIGHBOURS: usize = 50;

/// A message to be ranked.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    pub session: &'a str,
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// The searchable text of the message.
    pub text: &'a str,
    pub speaker: Option<Speaker<'a>>,
}

/// Returns the weight of a word that occurs in `matching` of `all` messages: BM25's inverse document frequency.
#[must_use]
pub fn weight(matching: i64, all: i64) -> f64 {
    let (matching, all) = (to_f64(matching.max(0)), to_f64(all.max(matching)));
    ((all - matching + 0.5) / (matching + 0.5)).ln_1p()
}

#[expect(clippy::cast_precision_loss, reason = "counts, far below 2^52")]
fn to_f64(count: i64) -> f64 {
    count as f64
}

fn len_f64(items: usize) -> f64 {
    to_f64(i64::try_from(items).unwrap_or(i64::MAX))
}

/// Ranks the candidates of one query. They can be added in several steps.
pub struct Ranker {
    analyzer: Analyzer,
    words: Vec<Clause>,
    /// The part of the query that contains each word.
    parts: Vec<usize>,
    /// The weight of each word.
    weights: Vec<f64>,
    matcher: QueryMatcher,
    candidates: Vec<CountedCandidate>,
    by_position: HashMap<(String, i64), usize>,
}

/// A candidate with the words of the query that it contains.
struct CountedCandidate {
    session: String,
    seq: i64,
    created_at: OffsetDateTime,
    /// The name of the speaker, and `true` if it is only the beginning of the text.
    speaker: Option<(String, bool)>,
    /// Number of occurrences of each word of the query.
    frequencies: Vec<f64>,
    /// `false` if the text lacks a phrase of the query, or is excluded.
    is_allowed: bool,
}

impl Ranker {
    /// Creates a ranker without candidates. `weights` are those of the words of the query, in their order.
    #[must_use]
    pub fn new(analyzer: Analyzer, query: &Query, weights: Vec<f64>) -> Self {
        Self {
            analyzer,
            words: query.words.clone(),
            parts: query.word_parts.clone(),
            weights,
            matcher: QueryMatcher::new(analyzer, query),
            candidates: Vec::new(),
            by_position: HashMap::new(),
        }
    }

    /// Adds a candidate. Its index in the results is the number of those before it.
    pub fn add(&mut self, candidate: &Candidate<'_>) {
        let Candidate { session, seq, created_at, text, speaker } = *candidate;
        let found = self.matcher.find(text);
        let is_excluded = self.matcher.excludes(&found);
        let frequency = |word| if is_excluded { 0.0 } else { len_f64(found.frequency(word)) };
        self.by_position.insert((session.to_owned(), seq), self.candidates.len());
        self.candidates.push(CountedCandidate {
            session: session.to_owned(),
            seq,
            created_at,
            speaker: speaker.map(|Speaker { name, is_leading }| (name.to_owned(), is_leading)),
            frequencies: self.matcher.words.iter().map(frequency).collect(),
            is_allowed: !is_excluded && self.matcher.has_phrases(&found),
        });
    }

    /// Returns the number of candidates that contain a word, and all phrases.
    #[must_use]
    pub fn matches(&self) -> usize {
        self.candidates.iter().filter(|found| found.is_allowed && is_any(&found.frequencies)).count()
    }

    /// Returns the positions of other messages that may be among the first `limit` hits because of their neighbours, the most
    /// promising first. A position is the index of a candidate of the same session, and a `seq` from 1.
    #[must_use]
    pub fn promising_neighbours(&self, limit: usize) -> Vec<(usize, i64)> {
        // A phrase must be in the message itself.
        if !self.matcher.phrases.is_empty() {
            return Vec::new();
        }
        let names = self.names();
        let last_score = self.ranked().get(limit.saturating_sub(1)).map_or(0.0, |(_, score)| *score);
        let mut positions: HashMap<(&str, i64), usize> = HashMap::new();
        for (index, CountedCandidate { session, seq, frequencies, .. }) in self.candidates.iter().enumerate()
        {
            if is_any(frequencies) {
                let distances = (1..).zip(NEIGHBOUR_SHARES);
                let around = distances.flat_map(|(distance, _)| [seq - distance, seq + distance]);
                positions.extend(around.filter(|seq| *seq > 0).map(|seq| ((session.as_str(), seq), index)));
            }
        }
        positions.retain(|(session, seq), _| !self.by_position.contains_key(&((*session).to_owned(), *seq)));
        let scored = positions.into_iter().filter_map(|((session, seq), index)| {
            let score = self.score(&names, session, seq, None)?;
            (score * SPEAKER_FACTOR > last_score).then_some((score, session, seq, index))
        });
        let mut scored: Vec<_> = scored.collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2))));
        scored.into_iter().take(MAX_NEIGHBOURS).map(|(_, _, seq, index)| (index, seq)).collect()
    }

    /// Returns the hits as indexes and scores: best first, newest first among equal scores.
    #[must_use]
    pub fn ranked(&self) -> Vec<(usize, f64)> {
        let names = self.names();
        let mut hits = Vec::new();
        for (index, candidate) in self.candidates.iter().enumerate().filter(|(_, found)| found.is_allowed) {
            let CountedCandidate { session, seq, speaker, frequencies, .. } = candidate;
            if let Some(score) = self.score(&names, session, *seq, Some(frequencies)) {
                let is_named = speaker.as_ref().is_some_and(|(name, _)| names.named.contains(name.as_str()));
                hits.push((index, candidate, if is_named { score * SPEAKER_FACTOR } else { score }));
            }
        }
        hits.sort_by(|(_, a, a_score), (_, b, b_score)| {
            let newest_first = (b.created_at, b.seq).cmp(&(a.created_at, a.seq));
            b_score.total_cmp(a_score).then(newest_first).then_with(|| a.session.cmp(&b.session))
        });
        hits.into_iter().map(|(index, _, score)| (index, score)).collect()
    }

    /// Returns the score of a message by its own words and those of its neighbours, or `None` if it is no hit.
    fn score(
        &self,
        names: &SpeakerNames<'_>,
        session: &str,
        seq: i64,
        own: Option<&Vec<f64>>,
    ) -> Option<f64> {
        let mut window = own.cloned().unwrap_or_else(|| vec![0.0; self.words.len()]);
        let contained_parts = |window: &[f64]| {
            let words = window.iter().zip(&names.is_name).zip(&self.parts);
            let contained = words.filter(|((frequency, is_name), _)| **frequency > 0.0 && !**is_name);
            contained.map(|(_, part)| part).collect::<HashSet<_>>().len()
        };
        let contains_word = contained_parts(&window) > 0;
        let mut position = (session.to_owned(), 0);
        for (distance, share) in (1..).zip(NEIGHBOUR_SHARES) {
            for neighbour in [seq - distance, seq + distance] {
                position.1 = neighbour;
                let found = self.by_position.get(&position).and_then(|index| self.candidates.get(*index));
                for (sum, words) in window.iter_mut().zip(found.iter().flat_map(|found| &found.frequencies)) {
                    *sum += share * words;
                }
            }
        }
        if !contains_word && contained_parts(&window) < MIN_NEIGHBOUR_WORDS {
            return None;
        }
        let score = |((frequency, weight), is_name): ((&f64, &f64), &bool)| {
            if *is_name { 0.0 } else { weight * frequency * (K1 + 1.0) / (frequency + K1) }
        };
        Some(window.iter().zip(&self.weights).zip(&names.is_name).map(score).sum())
    }

    /// Returns the words of the query that are names of speakers.
    fn names(&self) -> SpeakerNames<'_> {
        // Outside of a transcript, a text may begin with `Note: `.
        let mut leading: HashMap<&str, (usize, usize)> = HashMap::new();
        for CountedCandidate { session, speaker, .. } in &self.candidates {
            let (with, all) = leading.entry(session).or_default();
            *with += usize::from(speaker.as_ref().is_some_and(|(_, is_leading)| *is_leading));
            *all += 1;
        }
        let is_transcript = |session: &str| leading.get(session).is_some_and(|(with, all)| with * 2 > *all);
        let speakers = self.candidates.iter().filter_map(|CountedCandidate { session, speaker, .. }| {
            let (name, is_leading) = speaker.as_ref()?;
            (!is_leading || is_transcript(session)).then_some(name.as_str())
        });
        SpeakerNames::new(self.analyzer, &self.words, speakers.collect())
    }
}

fn is_any(frequencies: &[f64]) -> bool {
    frequencies.iter().any(|frequency| *frequency > 0.0)
}

/// The words of a query that are names of speakers.
struct SpeakerNames<'a> {
    /// For each word of the query. If the query consists of names, they are search terms.
    is_name: Vec<bool>,
    /// The speakers that the query names.
    named: HashSet<&'a str>,
}

impl<'a> SpeakerNames<'a> {
    fn new(analyzer: Analyzer, words: &[Clause], speakers: HashSet<&'a str>) -> Self {
        let mut is_name = vec![false; words.len()];
        let mut named = HashSet::new();
        for speaker in speakers {
            for token in analyzer.tokens(speaker) {
                for (is_name, word) in is_name.iter_mut().zip(words) {
                    if matches!(word, Clause::Term(term) if *term == token.term) {
                        *is_name = true;
                        named.insert(speaker);
                    }
                }
            }
        }
        if is_name.iter().all(|is_name| *is_name) {
            is_name.fill(false);
            named.clear();
        }
        Self { is_name, named }
    }
}

/// Returns the positions of the words and phrases of a query in a text, in order.
#[must_use]
pub fn matches(analyzer: Analyzer, query: &Query, text: &str) -> Vec<Range<usize>> {
    let query = Query { excluded: Vec::new(), ..query.clone() };
    let found = QueryMatcher::new(analyzer, &query).find(text).by_key;
    let mut ranges: Vec<Range<usize>> = found.into_iter().flatten().map(|(_, range)| range).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    ranges
}

/// Index of a term or prefix of the query.
type Key = usize;

/// A clause of the query with keys instead of terms.
enum KeyedClause {
    Single(Key),
    /// Keys, each with its distance from the first.
    Phrase(Vec<(usize, Key)>),
}

/// Finds the terms of one query in texts. Caches the analysis of words, because the same words recur in many texts.
struct QueryMatcher {
    analyzer: Analyzer,
    key_count: usize,
    terms: HashMap<String, Key>,
    prefixes: HashMap<String, Key>,
    words: Vec<KeyedClause>,
    phrases: Vec<KeyedClause>,
    excluded: Vec<KeyedClause>,
    /// Analyzed words, by the word as it is written.
    analyzed: HashMap<String, AnalyzedWord>,
    /// `true` if the query contains characters of scripts without spaces.
    has_unspaced_script: bool,
}

/// The terms of a word, as far as the query contains them.
struct AnalyzedWord {
    term_count: usize,
    /// Matching keys, each with the index of its term in the word.
    keys: Vec<(usize, Key)>,
}

/// Position among the terms of the text, and byte range.
type Occurrence = (usize, Range<usize>);

/// All occurrences of the terms of a query in a text.
struct TermOccurrences {
    /// Occurrences of each key, in the order of the text.
    by_key: Vec<Vec<Occurrence>>,
}

impl QueryMatcher {
    fn new(analyzer: Analyzer, query: &Query) -> Self {
        let mut matcher = Self {
            analyzer,
            key_count: 0,
            terms: HashMap::new(),
            prefixes: HashMap::new(),
            words: Vec::new(),
            phrases: Vec::new(),
            excluded: Vec::new(),
            analyzed: HashMap::new(),
            has_unspaced_script: false,
        };
        matcher.words = query.words.iter().map(|clause| matcher.add_clause(clause)).collect();
        matcher.phrases = query.phrases.iter().map(|clause| matcher.add_clause(clause)).collect();
        matcher.excluded = query.excluded.iter().map(|clause| matcher.add_clause(clause)).collect();
        matcher
    }

    fn add_clause(&mut self, clause: &Clause) -> KeyedClause {
        match clause {
            Clause::Term(term) => KeyedClause::Single(self.add_term(term)),
            Clause::Prefix(prefix) => {
                self.has_unspaced_script |= contains_unspaced_script(prefix);
                KeyedClause::Single(key_of(&mut self.prefixes, prefix, &mut self.key_count))
            }
            Clause::Phrase(terms) => {
                let keyed = |(distance, term): &(usize, String)| (*distance, self.add_term(term));
                KeyedClause::Phrase(terms.iter().map(keyed).collect())
            }
        }
    }

    fn add_term(&mut self, term: &str) -> Key {
        self.has_unspaced_script |= contains_unspaced_script(term);
        key_of(&mut self.terms, term, &mut self.key_count)
    }

    fn find(&mut self, text: &str) -> TermOccurrences {
        let mut by_key = vec![Vec::new(); self.key_count];
        let mut position = 0;
        let mut push = |key: Key, position: usize, range: Range<usize>| {
            if let Some(occurrences) = by_key.get_mut(key) {
                occurrences.push((position, range));
            }
        };
        for segment in segments(text) {
            let raw = text.get(segment.range.clone()).unwrap_or_default();
            if segment.is_word {
                if !self.analyzed.contains_key(raw) {
                    let analyzed = self.analyze_word(raw);
                    self.analyzed.insert(raw.to_owned(), analyzed);
                }
                if let Some(AnalyzedWord { term_count, keys }) = self.analyzed.get(raw) {
                    for (term, key) in keys {
                        push(*key, position + term, segment.range.clone());
                    }
                    position += term_count;
                }
            } else if self.has_unspaced_script {
                let characters = characters(raw, segment.range.start);
                for (index, (character, range)) in characters.iter().enumerate() {
                    if let Some((next, next_range)) = characters.get(index + 1) {
                        let bigram = format!("{character}{next}");
                        for key in self.matching_keys(&bigram, &bigram) {
                            push(key, position, range.start..next_range.end);
                        }
                    }
                    for key in self.matching_keys(character, character) {
                        push(key, position, range.clone());
                    }
                    position += 1;
                }
            } else {
                position += raw.chars().filter(|c| !is_combining_mark(*c)).count();
            }
        }
        TermOccurrences { by_key }
    }

    fn analyze_word(&self, raw: &str) -> AnalyzedWord {
        let terms: Vec<_> = self.analyzer.word_terms(raw).collect();
        let keys = terms.iter().enumerate().flat_map(|(index, (term, unstemmed))| {
            self.matching_keys(term, unstemmed).map(move |key| (index, key))
        });
        AnalyzedWord { term_count: terms.len(), keys: keys.collect() }
    }

    /// Returns the keys that match a term. Prefixes match its unstemmed form.
    fn matching_keys<'a>(&'a self, term: &'a str, unstemmed: &'a str) -> impl Iterator<Item = Key> + 'a {
        let prefixes = self.prefixes.iter().filter(move |(prefix, _)| unstemmed.starts_with(*prefix));
        self.terms.get(term).copied().into_iter().chain(prefixes.map(|(_, key)| *key))
    }

    fn has_phrases(&self, found: &TermOccurrences) -> bool {
        self.phrases.iter().all(|phrase| found.frequency(phrase) > 0)
    }

    fn excludes(&self, found: &TermOccurrences) -> bool {
        self.excluded.iter().any(|clause| found.frequency(clause) > 0)
    }
}

/// Returns the key of a term or prefix. A new one gets the next key.
fn key_of(keys: &mut HashMap<String, Key>, text: &str, key_count: &mut usize) -> Key {
    *keys.entry(text.to_owned()).or_insert_with(|| {
        *key_count += 1;
        *key_count - 1
    })
}

fn contains_unspaced_script(text: &str) -> bool {
    segments(text).any(|segment| !segment.is_word)
}

impl TermOccurrences {
    fn of(&self, key: Key) -> &[Occurrence] {
        self.by_key.get(key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the number of matches of a clause.
    fn frequency(&self, clause: &KeyedClause) -> usize {
        match clause {
            KeyedClause::Single(key) => self.of(*key).len(),
            KeyedClause::Phrase(terms) => {
                let Some(((_, first), others)) = terms.split_first() else { return 0 };
                let occurs_at = |key: Key, position: usize| {
                    self.of(key).binary_search_by_key(&position, |(position, _)| *position).is_ok()
                };
                let is_complete =
                    |start: usize| others.iter().all(|(distance, key)| occurs_at(*key, start + distance));
                self.of(*first).iter().filter(|(start, _)| is_complete(*start)).count()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the hits among messages of the sessions, by position.
    fn ranked<'a>(query: &str, messages: &[(&'a str, i64, &str)]) -> Vec<((&'a str, i64), f64)> {
        let analyzer = Analyzer::default();
        let query = Query::parse(analyzer, query).expect("a query");
        let mut ranker = Ranker::new(analyzer, &query, vec![1.0; query.words.len()]);
        for (session, seq, text) in messages {
            let created_at = OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(*seq);
            let name = text.split_once(": ").map(|(name, _)| Speaker { name, is_leading: true });
            ranker.add(&Candidate { session, seq: *seq, created_at, text, speaker: name });
        }
        let position = |index: usize| (messages[index].0, messages[index].1);
        ranker.ranked().into_iter().map(|(index, score)| (position(index), score)).collect()
    }

    fn positions<'a>(query: &str, messages: &[(&'a str, i64, &str)]) -> Vec<(&'a str, i64)> {
        ranked(query, messages).into_iter().map(|(position, _)| position).collect()
    }

    /// Returns the hits among texts that are not neighbours, by index.
    fn hits(query: &str, texts: &[&str]) -> Vec<i64> {
        let messages: Vec<_> = (0..).step_by(10).zip(texts).map(|(seq, text)| ("s", seq, *text)).collect();
        positions(query, &messages).into_iter().map(|(_, seq)| seq / 10).collect()
    }

    #[test]
    fn hits_are_sorted_by_score_then_newest_first() {
        let texts = ["one ferry", "a ferry and an island", "nothing", "an island", "one ferry"];
        assert_eq!(hits("ferries islands", &texts), [1, 4, 3, 0]);
    }

    #[test]
    fn hits_contain_complete_phrases_and_no_exclusions() {
        let texts =
            ["the night ferry", "ferry by night", "night ferries, late", "a night", "The NIGHT-Ferry sank"];
        assert_eq!(hits("\"night ferry\"", &texts), [4, 2, 0]);
        assert_eq!(hits("night -ferry", &texts), [3]);
        assert_eq!(hits("night -\"night ferry\"", &texts), [3, 1]);
        assert_eq!(hits("fer* -by", &texts), [4, 2, 0]);
        assert_eq!(hits("\"数据库\"", &["关系数据库", "数据和据库", "数据库"]), [2, 0]);
    }

    #[test]
    fn words_of_neighbours_count_less_with_the_distance() {
        let messages = [
            ("a", 1, "a ferry"),
            ("b", 1, "a ferry"),
            ("b", 2, "the harbour"),
            ("c", 1, "a ferry"),
            ("c", 5, "the harbour"),
            ("d", 1, "a ferry"),
            ("d", 6, "the harbour"),
        ];
        let found = ranked("ferry harbour", &messages);
        let order: Vec<_> = found.iter().map(|(position, _)| *position).collect();
        assert_eq!(order, [("b", 2), ("b", 1), ("c", 5), ("c", 1), ("d", 6), ("a", 1), ("d", 1)]);
        let score = |position| found.iter().find(|(found, _)| *found == position).map(|(_, score)| *score);
        assert_eq!(score(("d", 1)), score(("a", 1)), "five messages away");
        // An excluded neighbour does not count.
        let found = ranked("ferry harbour -storm", &[("a", 1, "a ferry"), ("a", 2, "harbour, storm")]);
        assert_eq!(found, [(("a", 1), 1.0)]);
    }

    #[test]
    fn message_between_two_words_of_the_query_is_a_hit() {
        let messages =
            [("a", 1, "Which ferry?"), ("a", 2, "The one at 8:15."), ("a", 3, "From the harbour?")];
        assert_eq!(positions("ferry harbour", &messages), [("a", 3), ("a", 1), ("a", 2)]);
        assert_eq!(positions("ferry", &messages), [("a", 1)]);
        assert_eq!(positions("ferry \"from the harbour\"", &messages), [("a", 3)]);
        let analyzer = Analyzer::default();
        let promising = |query: &str, limit| {
            let query = Query::parse(analyzer, query).expect("a query");
            let mut ranker = Ranker::new(analyzer, &query, vec![1.0; query.words.len()]);
            for (session, seq, text) in [messages[0], messages[2]] {
                let created_at = OffsetDateTime::UNIX_EPOCH;
                ranker.add(&Candidate { session, seq, created_at, text, speaker: None });
            }
            let promising = ranker.promising_neighbours(limit);
            promising.into_iter().map(|(_, seq)| seq).collect::<Vec<_>>()
        };
        assert_eq!(promising("ferry harbour", 10), [2, 4, 5]);
        assert_eq!(promising("ferry harbour", 1), [2, 4]);
        assert_eq!(promising("ferry", 10), [0; 0]);
        assert_eq!(promising("\"ferry\" harbour", 10), [0; 0]);
    }

    #[test]
    fn name_of_a_speaker_raises_the_messages_of_that_speaker() {
        let messages = [
            ("a", 10, "Ada: The ferry leaves at 8:15."),
            ("a", 20, "Bob: The ferry is late."),
            ("a", 30, "Bob: Tell Ada!"),
        ];
        assert_eq!(positions("what did Ada say about the ferry", &messages), [("a", 10), ("a", 20)]);
        assert_eq!(positions("ferry", &messages), [("a", 20), ("a", 10)]);
        assert_eq!(positions("Ada", &messages), [("a", 30), ("a", 10)]);
        // Here, it is a word like others.
        let messages = [("a", 10, "Note: the ferry"), ("a", 20, "a note of the ferry"), ("a", 30, "a ferry")];
        assert_eq!(positions("ferry note", &messages), [("a", 20), ("a", 10), ("a", 30)]);
    }

    #[test]
    fn rarer_word_has_greater_weight() {
        assert!(weight(1, 1000) > weight(10, 1000));
        assert!(weight(1000, 1000) > 0.0 && weight(0, 0) > 0.0 && weight(7, 3) > 0.0);
    }
}
