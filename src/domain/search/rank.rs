//! Ranks candidates by the words that they and their neighbours contain, and by their speaker.
//!
//! - An answer often shares few words with its question, but the messages around it share others. So the words of the
//!   neighbours count, too, less with the distance. They are added to the words of the message before the saturation of
//!   repeated words, so that a word that message and neighbours contain counts little more than once.
//! - A word of the query that is the name of a speaker does not occur in the messages of that speaker. So it is no search
//!   term, but raises the scores of these messages.
//!
//! A hit contains a word of the query, or its neighbours contain at least two of them; one of them if the query contains stop
//! words, as questions do. Messages that the query excludes contribute nothing to their neighbours.

use super::MessageRef;
use super::analyzer::Analyzer;
use super::matcher::TextMatch;
use super::query::Query;
use super::text::{Speaker, searchable_text, speaker};
use crate::domain::id::SessionId;
use crate::domain::message::{Message, Role};
use foldhash::{HashMap, HashSet};
use time::OffsetDateTime;

/// BM25's saturation of repeated words, at its usual value. The length of the messages has no influence.
const K1: f64 = 1.2;
/// Share of the words of the neighbours at distance 1, 2, ….
const NEIGHBOUR_SHARES: [f64; 4] = [0.4, 0.3, 0.2, 0.1];
/// Factor of the score if the query names the speaker.
const SPEAKER_FACTOR: f64 = 1.7;
/// Number of words of the query that the neighbours of a hit contain if it contains none itself. With one, a search for a single
/// word would return the neighbours of its matches, which is desired only for a question.
const MIN_NEIGHBOUR_WORDS: usize = 2;
const MIN_NEIGHBOUR_WORDS_OF_SENTENCE: usize = 1;
/// Maximum number of messages without a word of the query that are worth loading.
const MAX_NEIGHBOURS: usize = 50;

/// A message to be ranked.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub place: MessageRef,
    pub created_at: OffsetDateTime,
    pub role: Role,
    /// The searchable text. `None` if the message can only be a neighbour of hits.
    pub text: Option<String>,
    pub text_match: TextMatch,
    speaker: Option<Speaker>,
}

impl Candidate {
    /// Counts the words of a query in a message.
    pub fn new(
        (analyzer, query): (Analyzer, &Query),
        place: MessageRef,
        created_at: OffsetDateTime,
        message: &Message,
    ) -> Self {
        let text = searchable_text(message);
        let (speaker, text_match) = (speaker(message, &text), TextMatch::new(analyzer, query, &text));
        let text = text_match.is_allowed.then(|| text.into_owned());
        Self { place, created_at, role: message.role(), text, text_match, speaker }
    }
}

/// Returns the weight of a word that occurs in `matching` of `all` messages: BM25's inverse document frequency.
#[must_use]
pub fn weight(matching: i64, all: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts, far below 2^52")]
    let (matching, all) = (matching.max(0) as f64, all.max(matching) as f64);
    ((all - matching + 0.5) / (matching + 0.5)).ln_1p()
}

/// The candidates of a session, by `seq`.
type BySeq<'a> = HashMap<i64, &'a Candidate>;

/// The candidates of one query with all that their scores depend on.
pub struct Ranking<'a> {
    query: &'a Query,
    candidates: &'a [Candidate],
    by_position: HashMap<&'a SessionId, BySeq<'a>>,
    /// The weight of each word of the query. Zero for names of speakers.
    weights: Vec<f64>,
    /// The speakers that the query names.
    named: HashSet<&'a str>,
}

impl<'a> Ranking<'a> {
    /// Prepares the ranking of candidates. `weights` are those of the words of the query, in their order.
    #[must_use]
    pub fn new(analyzer: Analyzer, query: &'a Query, weights: &[f64], candidates: &'a [Candidate]) -> Self {
        let mut by_position: HashMap<&SessionId, BySeq<'_>> = HashMap::default();
        for candidate in candidates {
            let MessageRef { session, seq } = &candidate.place;
            by_position.entry(session).or_default().insert(*seq, candidate);
        }
        let (all_weights, mut weights, mut named) = (weights, weights.to_vec(), HashSet::default());
        for speaker in by_position.values().flat_map(speakers).collect::<HashSet<_>>() {
            let name: std::collections::HashSet<_> =
                analyzer.words(speaker).map(|token| token.term).collect();
            if !name.is_empty() && name.iter().all(|term| query.possible_names.contains(term)) {
                named.insert(speaker);
            }
            for (weight, word) in weights.iter_mut().zip(&query.words) {
                if word.pattern.is_term_in(&name) {
                    *weight = 0.0;
                    named.insert(speaker);
                }
            }
        }
        let contains_other_word = |candidate: &Candidate| {
            let mut words = candidate.text_match.frequencies.iter().zip(&weights);
            words.any(|(frequency, weight)| *frequency > 0 && *weight > 0.0)
        };
        // If the query consists of names, or its other words are nowhere, the names are search terms.
        if !candidates.iter().any(contains_other_word) {
            (weights, named) = (all_weights.to_vec(), HashSet::default());
        }
        Self { query, candidates, by_position, weights, named }
    }

    /// Returns the hits as indexes of candidates and scores: best first, newest first among equal scores.
    #[must_use]
    pub fn hits(&self) -> Vec<(usize, f64)> {
        let mut hits = Vec::new();
        for (index, candidate) in self.candidates.iter().enumerate() {
            let Candidate { place: MessageRef { session, seq }, speaker, text_match, .. } = candidate;
            if let Some(score) = self.score(session, *seq).filter(|_| text_match.is_allowed) {
                let is_named = speaker.as_ref().is_some_and(|speaker| self.named.contains(&*speaker.name));
                hits.push((index, candidate, if is_named { score * SPEAKER_FACTOR } else { score }));
            }
        }
        hits.sort_by(|(_, a, a_score), (_, b, b_score)| {
            let newest_first = (b.created_at, b.place.seq).cmp(&(a.created_at, a.place.seq));
            b_score.total_cmp(a_score).then(newest_first).then_with(|| a.place.cmp(&b.place))
        });
        hits.into_iter().map(|(index, _, score)| (index, score)).collect()
    }

    /// Returns the positions of other messages that may be among the first `limit` of these hits because of their neighbours,
    /// the most promising first.
    #[must_use]
    pub fn promising_neighbours(&self, hits: &[(usize, f64)], limit: usize) -> Vec<MessageRef> {
        // A phrase must be in the message itself.
        if !self.query.phrases.is_empty() {
            return Vec::new();
        }
        let last_score = hits.get(limit.saturating_sub(1)).map_or(0.0, |(_, score)| *score);
        let mut positions = HashSet::default();
        for candidate in self.candidates.iter().filter(|candidate| candidate.text_match.has_word()) {
            let around = neighbours(candidate.place.seq).map(|(seq, _)| (&candidate.place.session, seq));
            let of_session = self.by_position.get(&candidate.place.session);
            let is_other = |(_, seq): &(&SessionId, i64)| {
                *seq > 0 && of_session.is_none_or(|known| !known.contains_key(seq))
            };
            positions.extend(around.filter(is_other));
        }
        let scored = positions.into_iter().filter_map(|(session, seq)| {
            let score = self.score(session, seq)?;
            (score * SPEAKER_FACTOR > last_score).then_some((score, session, seq))
        });
        let mut scored: Vec<_> = scored.collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2))));
        let best = scored.into_iter().take(MAX_NEIGHBOURS);
        best.map(|(_, session, seq)| MessageRef { session: session.clone(), seq }).collect()
    }

    /// Returns the score of a message by its own words and those of its neighbours, or `None` if it is no hit.
    fn score(&self, session: &SessionId, seq: i64) -> Option<f64> {
        let of_session = self.by_position.get(session)?;
        let mut window = vec![0.0; self.weights.len()];
        let add = |window: &mut [f64], seq: i64, share| {
            let words = of_session.get(&seq).into_iter().flat_map(|found| &found.text_match.frequencies);
            #[expect(clippy::cast_precision_loss, reason = "counts, far below 2^52")]
            window.iter_mut().zip(words).for_each(|(sum, frequency)| *sum += share * *frequency as f64);
        };
        add(&mut window, seq, 1.0);
        // A message without the phrases of the query is not allowed. Phrases can consist of stop words, which are no words.
        let contains_word = !self.query.phrases.is_empty() || self.contained_parts(&window) > 0;
        neighbours(seq).for_each(|(seq, share)| add(&mut window, seq, share));
        let min_words =
            if self.query.is_sentence { MIN_NEIGHBOUR_WORDS_OF_SENTENCE } else { MIN_NEIGHBOUR_WORDS };
        if !contains_word && self.contained_parts(&window) < min_words {
            return None;
        }
        let score = |(frequency, weight): (&f64, &f64)| weight * frequency * (K1 + 1.0) / (frequency + K1);
        Some(window.iter().zip(&self.weights).map(score).sum())
    }

    /// Returns the number of parts of the query of which a word, except names, has a frequency.
    fn contained_parts(&self, frequencies: &[f64]) -> usize {
        let words = frequencies.iter().zip(&self.weights).zip(&self.query.words);
        let contained = words.filter(|((frequency, weight), _)| **frequency > 0.0 && **weight > 0.0);
        let mut parts: Vec<_> = contained.map(|(_, word)| word.part).collect();
        parts.dedup();
        parts.len()
    }
}

/// Returns the positions around a message with the share of their words.
fn neighbours(seq: i64) -> impl Iterator<Item = (i64, f64)> {
    let distances = (1..).zip(NEIGHBOUR_SHARES);
    distances.flat_map(move |(distance, share)| [(seq - distance, share), (seq + distance, share)])
}

/// Returns the speakers of the messages of a session. A text that begins with `Note: ` has none, except in a transcript.
fn speakers<'a>(messages: &BySeq<'a>) -> Vec<&'a str> {
    let speakers = messages.values().filter_map(|candidate| candidate.speaker.as_ref());
    let leading = speakers.clone().filter(|speaker| speaker.is_leading).count();
    let is_transcript = leading * 2 > messages.len();
    speakers.filter(|speaker| !speaker.is_leading || is_transcript).map(|speaker| &*speaker.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> (Query, Vec<f64>) {
        let query = Query::parse(Analyzer::default(), query).expect("a query");
        let weights = vec![1.0; query.words.len()];
        (query, weights)
    }

    fn candidates(query: &Query, messages: &[(&str, i64, &str)]) -> Vec<Candidate> {
        let candidate = |&(session, seq, text): &(&str, i64, &str)| {
            let place = MessageRef { session: SessionId::new(session).expect("an id"), seq };
            let created_at = OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(seq);
            let message = Message::text(Role::User, text);
            Candidate::new((Analyzer::default(), query), place, created_at, &message)
        };
        messages.iter().map(candidate).collect()
    }

    /// Returns the hits among messages of the sessions, by position.
    fn ranked<'a>(query: &str, messages: &[(&'a str, i64, &str)]) -> Vec<((&'a str, i64), f64)> {
        let (query, weights) = parse(query);
        let candidates = candidates(&query, messages);
        let hits = Ranking::new(Analyzer::default(), &query, &weights, &candidates).hits();
        hits.into_iter().map(|(index, score)| ((messages[index].0, messages[index].1), score)).collect()
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
        // A phrase of stop words.
        let texts = ["I love The Who", "a concert", "who is the one", "The Who in concert"];
        assert_eq!(hits("\"the who\" concert", &texts), [3, 0]);
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
        let promising = |query: &str, limit| {
            let (query, weights) = parse(query);
            let candidates = candidates(&query, &[messages[0], messages[2]]);
            let ranking = Ranking::new(Analyzer::default(), &query, &weights, &candidates);
            let promising = ranking.promising_neighbours(&ranking.hits(), limit);
            promising.into_iter().map(|place| place.seq).collect::<Vec<_>>()
        };
        assert_eq!(promising("ferry harbour", 10), [2, 4, 5]);
        assert_eq!(promising("ferry harbour", 1), [2, 4]);
        assert_eq!(promising("ferry", 10), [0; 0]);
        assert_eq!(promising("which ferry", 10), [2, 4, 5]);
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
        for query in ["Ada", "Ada zebra", "what did Ada say about zebras"] {
            assert_eq!(positions(query, &messages), [("a", 30), ("a", 10)], "{query}");
        }
        // Here, it is a word like others.
        let messages = [("a", 10, "Note: the ferry"), ("a", 20, "a note of the ferry"), ("a", 30, "a ferry")];
        assert_eq!(positions("ferry note", &messages), [("a", 20), ("a", 10), ("a", 30)]);
    }

    #[test]
    fn name_of_a_speaker_can_be_a_stop_word() {
        let messages = [("a", 10, "Will: the boat is blue"), ("a", 20, "Ada: the boat is red")];
        assert_eq!(positions("which boat has Will", &messages), [("a", 10), ("a", 20)]);
        assert_eq!(positions("which boat will come", &messages), [("a", 20), ("a", 10)]);
    }

    #[test]
    fn rarer_word_has_greater_weight() {
        assert!(weight(1, 1000) > weight(10, 1000));
        assert!(weight(1000, 1000) > 0.0 && weight(0, 0) > 0.0 && weight(7, 3) > 0.0);
    }
}
