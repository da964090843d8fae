//! Finds the words, phrases and exclusions of a query in texts.

use super::analyzer::{Analyzer, Token, segments};
use super::query::{Clause, Query};
use std::collections::HashMap;
use std::ops::Range;
use unicode_normalization::char::is_combining_mark;

/// Index of a term or prefix of the query.
type Key = usize;

/// The keys of a clause, each with its distance from the first. Only phrases have several.
type KeyedClause = Vec<(usize, Key)>;

/// Position among the terms of the text, and byte range.
type Occurrence = (usize, Range<usize>);

/// Finds the terms of one query in texts.
pub struct Matcher {
    analyzer: Analyzer,
    terms: HashMap<String, Key>,
    prefixes: HashMap<String, Key>,
    words: Vec<KeyedClause>,
    phrases: Vec<KeyedClause>,
    excluded: Vec<KeyedClause>,
    /// Analyzed words, by the word as it is written: the same words recur in many texts.
    analyzed: HashMap<String, AnalyzedSegment>,
    /// `true` if the query contains characters of scripts without spaces.
    has_unspaced_script: bool,
}

/// The terms of a segment, as far as the query contains them.
struct AnalyzedSegment {
    term_count: usize,
    found: Vec<(Key, Occurrence)>,
}

/// The result of a query for one text.
#[derive(Clone, Debug)]
pub struct TextMatch {
    /// Number of occurrences of each word of the query. Zero if the text is excluded.
    pub frequencies: Vec<u32>,
    /// `false` if the text lacks a phrase of the query, or is excluded.
    pub is_allowed: bool,
}

impl TextMatch {
    /// Returns `true` if the text contains a word of the query and is not excluded.
    #[must_use]
    pub fn has_word(&self) -> bool {
        self.frequencies.iter().any(|frequency| *frequency > 0)
    }
}

impl Matcher {
    #[must_use]
    pub fn new(analyzer: Analyzer, query: &Query) -> Self {
        let mut matcher = Self {
            analyzer,
            terms: HashMap::new(),
            prefixes: HashMap::new(),
            words: Vec::new(),
            phrases: Vec::new(),
            excluded: Vec::new(),
            analyzed: HashMap::new(),
            has_unspaced_script: false,
        };
        let mut add = |clauses: &[Clause]| clauses.iter().map(|clause| matcher.add_clause(clause)).collect();
        let (words, phrases, excluded) = (add(&query.words), add(&query.phrases), add(&query.excluded));
        Self { words, phrases, excluded, ..matcher }
    }

    fn add_clause(&mut self, clause: &Clause) -> KeyedClause {
        match clause {
            Clause::Term(term) => vec![(0, self.add_key(term, false))],
            Clause::Prefix { prefix, .. } => vec![(0, self.add_key(prefix, true))],
            Clause::Phrase(terms) => {
                terms.iter().map(|(distance, term)| (*distance, self.add_key(term, false))).collect()
            }
        }
    }

    fn add_key(&mut self, text: &str, is_prefix: bool) -> Key {
        self.has_unspaced_script |= segments(text).any(|segment| !segment.is_word);
        let next = self.terms.len() + self.prefixes.len();
        let keys = if is_prefix { &mut self.prefixes } else { &mut self.terms };
        *keys.entry(text.to_owned()).or_insert(next)
    }

    /// Counts the words of the query in a text.
    pub fn count(&mut self, text: &str) -> TextMatch {
        let found = self.find(text);
        let occurs = |clause| frequency(&found, clause) > 0;
        let is_excluded = self.excluded.iter().any(occurs);
        let count = |word| if is_excluded { 0 } else { frequency(&found, word) };
        TextMatch {
            frequencies: self.words.iter().map(count).collect(),
            is_allowed: !is_excluded && self.phrases.iter().all(occurs),
        }
    }

    /// Returns the occurrences of each key, in the order of the text.
    fn find(&mut self, text: &str) -> Vec<Vec<Occurrence>> {
        let mut by_key = vec![Vec::new(); self.terms.len() + self.prefixes.len()];
        let mut term_count = 0;
        for segment in segments(text) {
            let raw = text.get(segment.range.clone()).unwrap_or_default();
            let unspaced;
            let analyzed = if segment.is_word {
                if !self.analyzed.contains_key(raw) {
                    self.analyzed.insert(raw.to_owned(), self.analyze(raw));
                }
                self.analyzed.get(raw)
            } else if self.has_unspaced_script {
                unspaced = self.analyze(raw);
                Some(&unspaced)
            } else {
                term_count += raw.chars().filter(|c| !is_combining_mark(*c)).count();
                None
            };
            let Some(AnalyzedSegment { term_count: added, found }) = analyzed else { continue };
            for (key, (position, range)) in found {
                let range = segment.range.start + range.start..segment.range.start + range.end;
                by_key.get_mut(*key).into_iter().for_each(|all: &mut Vec<_>| {
                    all.push((term_count + position, range.clone()));
                });
            }
            term_count += added;
        }
        by_key
    }

    fn analyze(&self, raw: &str) -> AnalyzedSegment {
        let tokens = self.analyzer.tokens(raw);
        let term_count = tokens.last().map_or(0, |token| token.position + 1);
        let keys = |token: &Token| {
            // Prefixes match the word as it is written.
            let prefixes = self.prefixes.iter().filter(|(prefix, _)| token.unstemmed.starts_with(*prefix));
            let keys = self.terms.get(&token.term).into_iter().chain(prefixes.map(|(_, key)| key));
            keys.map(|key| (*key, (token.position, token.range.clone()))).collect::<Vec<_>>()
        };
        AnalyzedSegment { term_count, found: tokens.iter().flat_map(keys).collect() }
    }
}

/// Returns the number of occurrences of a clause.
fn frequency(found: &[Vec<Occurrence>], clause: &KeyedClause) -> u32 {
    let of = |key: Key| found.get(key).map(Vec::as_slice).unwrap_or_default();
    let occurs_at = |key, at: usize| of(key).binary_search_by_key(&at, |(position, _)| *position).is_ok();
    let Some(((_, first), others)) = clause.split_first() else { return 0 };
    let is_complete = |start: usize| others.iter().all(|(distance, key)| occurs_at(*key, start + distance));
    let count = of(*first).iter().filter(|(start, _)| is_complete(*start)).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Returns the positions of the words and phrases of a query in a text, in order.
#[must_use]
pub fn matches(analyzer: Analyzer, query: &Query, text: &str) -> Vec<Range<usize>> {
    let query = Query { excluded: Vec::new(), ..query.clone() };
    let found = Matcher::new(analyzer, &query).find(text).into_iter().flatten();
    let mut ranges: Vec<Range<usize>> = found.map(|(_, range)| range).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    ranges
}
