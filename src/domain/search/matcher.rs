//! Finds the words, phrases and exclusions of a query in texts.

use super::analyzer::{Analyzer, Token};
use super::query::{Pattern, Phrase, Query, QueryWord};
use std::ops::Range;

/// The result of a query for one text.
#[derive(Clone, Debug)]
pub struct TextMatch {
    /// Number of occurrences of each word of the query. Zero if the text is excluded.
    pub frequencies: Vec<usize>,
    /// `false` if the text lacks a phrase of the query, or is excluded.
    pub is_allowed: bool,
}

impl TextMatch {
    /// Counts the words of a query in a text.
    #[must_use]
    pub fn new(analyzer: Analyzer, query: &Query, text: &str) -> Self {
        let tokens = matching_tokens(analyzer, query, text);
        let is_excluded = query.excluded.iter().any(|phrase| occurs(phrase, &tokens));
        // A word and its parts have the same position.
        let count = |word: &QueryWord| {
            let matching = tokens.iter().filter(|token| matches_token(&word.pattern, token));
            let mut positions: Vec<usize> = matching.map(|token| token.position).collect();
            positions.dedup();
            positions.len()
        };
        Self {
            frequencies: query.words.iter().map(|word| if is_excluded { 0 } else { count(word) }).collect(),
            is_allowed: !is_excluded && query.phrases.iter().all(|phrase| occurs(phrase, &tokens)),
        }
    }

    /// Returns `true` if the text contains a word of the query and is not excluded.
    #[must_use]
    pub fn has_word(&self) -> bool {
        self.frequencies.iter().any(|frequency| *frequency > 0)
    }
}

fn occurs(phrase: &Phrase, tokens: &[Token]) -> bool {
    let begins = |start: usize| {
        let mut following = tokens.iter().skip(start);
        let first = following.clone().next().map_or(0, |token| token.position);
        phrase.iter().all(|(distance, pattern)| {
            let mut at_distance = following.by_ref().take_while(|token| token.position <= first + distance);
            at_distance.any(|token| token.position == first + distance && matches_token(pattern, token))
        })
    };
    (0..tokens.len()).any(begins)
}

/// Returns the positions of the words and phrases of a query in a text, in order.
#[must_use]
pub fn matches(analyzer: Analyzer, query: &Query, text: &str) -> Vec<Range<usize>> {
    let is_shown = |token: &Token| {
        let in_phrases = query.phrases.iter().flatten().map(|(_, pattern)| pattern);
        let mut patterns = query.words.iter().map(|word| &word.pattern).chain(in_phrases);
        patterns.any(|pattern| matches_token(pattern, token))
    };
    let tokens = matching_tokens(analyzer, query, text).into_iter();
    tokens.filter(is_shown).map(|token| token.range).collect()
}

/// Returns the words of a text that a part of the query matches.
fn matching_tokens(analyzer: Analyzer, query: &Query, text: &str) -> Vec<Token> {
    let patterns: Vec<_> = query.patterns().collect();
    let mut tokens = analyzer.tokens(text);
    tokens.retain(|token| patterns.iter().any(|pattern| matches_token(pattern, token)));
    tokens
}

fn matches_token(pattern: &Pattern, token: &Token) -> bool {
    pattern.matches(&token.term, &token.unstemmed)
}
