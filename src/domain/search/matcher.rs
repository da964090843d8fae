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
        let count =
            |word: &QueryWord| tokens.iter().filter(|token| matches_token(&word.pattern, token)).count();
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
    analyzer.tokens_with(text, query.initials, |term, unstemmed| {
        patterns.iter().any(|pattern| pattern.matches(term, unstemmed))
    })
}

fn matches_token(pattern: &Pattern, token: &Token) -> bool {
    pattern.matches(&token.term, &token.unstemmed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORDS: [&str; 16] = [
        "went",
        "Going",
        "ferries",
        "FERRY",
        "skies",
        "dying",
        "l'avion",
        "État",
        "été",
        "3rd",
        "zoë",
        "数据库",
        "yes",
        "y",
        "they’re",
        "ﬁne",
    ];

    proptest! {
        /// The initials of a query exclude only words that do not match.
        #[test]
        fn words_that_are_skipped_do_not_match(
            text in proptest::collection::vec(prop_oneof![proptest::sample::select(&WORDS[..]).prop_map(str::to_owned), "[a-zA-Z]{1,9}"], 1..12),
            at in any::<proptest::sample::Index>(),
            is_prefix in any::<bool>(),
        ) {
            let word = at.get(&text);
            let query = if is_prefix { format!("{word}* -go") } else { word.clone() };
            let Ok(query) = Query::parse(Analyzer::default(), &query) else { return Ok(()) };
            let of_all: Vec<Token> = Analyzer::default().tokens(&text.join(" "));
            let is_part = |token: &Token| query.patterns().any(|pattern| matches_token(pattern, token));
            let expected: Vec<Token> = of_all.into_iter().filter(is_part).collect();
            prop_assert_eq!(matching_tokens(Analyzer::default(), &query, &text.join(" ")), expected);
        }
    }
}
