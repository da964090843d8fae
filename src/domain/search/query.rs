//! Parser of the query language: words, "phrases", -exclusions, prefix*.
//!
//! Every text with a word is a valid query, unless it is too long or has too short or too many prefixes. Punctuation
//! without a meaning is ignored.

use super::analyzer::{Analyzer, Token, TokenKind, segments};
use super::index_terms::TermPattern;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

const MAX_QUERY_CHARS: usize = 1000;
/// Further clauses of a query are ignored.
const MAX_CLAUSES: usize = 32;
/// A lookup of a prefix reads every term of the index that begins with it.
const MAX_PREFIXES: usize = 4;

/// The reason why a query is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidQuery {
    #[error("has no word to search for: send at least one letter or digit")]
    Empty,
    #[error("only says what to leave out: add a word to search for")]
    OnlyExclusions,
    #[error("has more than {MAX_QUERY_CHARS} characters: send the words that matter")]
    TooLong,
    #[error("has {0} prefixes, at most {MAX_PREFIXES} are allowed: send the other words without the *")]
    TooManyPrefixes(usize),
}

/// A condition that a word of a message can match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// A term, and those of the same word in other languages.
    Term(Vec<String>),
    /// Any word that begins with this text.
    Prefix(String),
}

/// Patterns of words that follow each other, each with its distance from the first. A single word is a phrase, too.
pub type Phrase = Vec<(usize, Pattern)>;

/// A word of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryWord {
    pub pattern: Pattern,
    /// The number of the part of the query that contains it. The words of a part are a word with hyphens, a phrase, or a text of a
    /// script without spaces.
    pub part: usize,
}

/// A parsed query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// A hit matches at least one. Every match raises the score, matches of rare words more.
    pub words: Vec<QueryWord>,
    /// A hit contains all of them.
    pub phrases: Vec<Phrase>,
    /// A hit contains none of them.
    pub excluded: Vec<Phrase>,
    /// `true` if stop words were removed from the query, as from a question.
    pub is_sentence: bool,
    /// Removed stop words that are written as names, such as `Will`: they can name a speaker.
    pub possible_names: Vec<Arc<str>>,
}

impl Query {
    /// Parses a query.
    ///
    /// # Errors
    /// The query contains no word to search for, is too long, or has prefixes that too many words begin with.
    pub fn parse(analyzer: Analyzer, text: &str) -> Result<Self, InvalidQuery> {
        if text.chars().nth(MAX_QUERY_CHARS).is_some() {
            return Err(InvalidQuery::TooLong);
        }
        let mut query = Self::default();
        for (number, part) in split(text).iter().enumerate() {
            query.add(analyzer, number, part);
        }
        let prefixes = query.words.iter().filter(|word| matches!(word.pattern, Pattern::Prefix(_))).count();
        if prefixes > MAX_PREFIXES {
            return Err(InvalidQuery::TooManyPrefixes(prefixes));
        }
        if query.words.is_empty() {
            let only = !query.excluded.is_empty();
            return Err(if only { InvalidQuery::OnlyExclusions } else { InvalidQuery::Empty });
        }
        query.drop_stop_words(analyzer);
        query.words.truncate(MAX_CLAUSES);
        query.phrases.truncate(MAX_CLAUSES);
        query.excluded.truncate(MAX_CLAUSES);
        Ok(query)
    }

    /// Returns `true` if the query consists of words that say nothing about a message.
    #[must_use]
    pub fn has_only_stop_words(&self, analyzer: Analyzer) -> bool {
        let stop_terms = analyzer.stop_terms();
        self.words.iter().all(|word| word.pattern.is_term_in(&stop_terms))
    }

    /// Returns the excluded single terms. The index cannot evaluate excluded phrases and prefixes.
    #[must_use]
    pub fn excluded_terms(&self) -> Vec<String> {
        let terms = |phrase: &Phrase| match &**phrase {
            [(_, Pattern::Term(terms))] => terms.clone(),
            _ => Vec::new(),
        };
        self.excluded.iter().flat_map(terms).collect()
    }

    /// Returns the patterns of all words, phrases and exclusions.
    pub fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        let phrases = self.phrases.iter().chain(&self.excluded).flatten();
        self.words.iter().map(|word| &word.pattern).chain(phrases.map(|(_, pattern)| pattern))
    }

    /// Removes words that say nothing about a message, such as `the` and `what`, unless only such words remain.
    fn drop_stop_words(&mut self, analyzer: Analyzer) {
        let stop_terms = analyzer.stop_terms();
        let is_stop_word = |word: &QueryWord| word.pattern.is_term_in(&stop_terms);
        if !self.words.iter().all(is_stop_word) {
            self.is_sentence = self.words.iter().any(is_stop_word);
            self.words.retain(|word| !is_stop_word(word));
        }
        self.possible_names.retain(|term| stop_terms.contains(term));
    }

    fn add(&mut self, analyzer: Analyzer, number: usize, part: &QueryPart<'_>) {
        let mut tokens = analyzer.tokens(part.text);
        tokens.retain(|token| token.kind != TokenKind::Part);
        let words = tokens.iter().filter(|token| token.kind == TokenKind::Word);
        let (Some(first), Some(last)) = (words.clone().next(), words.clone().next_back()) else { return };
        // Too many words begin with one letter, and `A* algorithm` and `5* hotel` mean something else. Exclusions need no lookup.
        let is_letter = last.unstemmed.chars().nth(1).is_none()
            && segments(part.text).last().is_some_and(|segment| segment.is_word);
        let is_prefix = part.is_prefix && (part.is_excluded || !is_letter);
        let pattern = |token: &Token| {
            if !is_prefix || token.position < last.position {
                let others = tokens.iter().filter(|other| {
                    other.kind == TokenKind::Alternative && other.unstemmed == token.unstemmed
                });
                let terms: BTreeSet<_> = others.map(|other| other.term.to_string()).collect();
                return Pattern::Term([token.term.to_string()].into_iter().chain(terms).collect());
            }
            Pattern::Prefix(token.unstemmed.to_string())
        };
        let phrase = words.clone().map(|token| (token.position - first.position, pattern(token)));
        let phrase: Phrase = phrase.collect();
        if part.is_excluded {
            // `-e-mail` excludes the phrase, not every message with an e.
            self.excluded.push(phrase);
            return;
        }
        if number > 0 && !part.is_prefix {
            // The first word of a question is capitalized, too.
            let is_capitalized = |token: &&Token| {
                let word = part.text.get(token.range.clone()).unwrap_or_default();
                word.starts_with(char::is_uppercase)
            };
            let names = words.filter(is_capitalized).map(|token| Arc::clone(&token.term));
            self.possible_names.extend(names);
        }
        if part.is_quoted {
            self.phrases.push(phrase.clone());
        }
        let wholes = tokens.iter().filter(|token| token.kind == TokenKind::Whole && !is_prefix).map(pattern);
        for pattern in phrase.into_iter().map(|(_, pattern)| pattern).chain(wholes) {
            if self.words.iter().all(|word| word.pattern != pattern) {
                self.words.push(QueryWord { pattern, part: number });
            }
        }
    }
}

impl Pattern {
    /// Returns `true` if a word of a text matches. Prefixes match the word as it is written.
    #[must_use]
    pub fn matches(&self, term: &str, unstemmed: &str) -> bool {
        match self {
            Self::Term(of_query) => of_query.iter().any(|of_query| of_query == term),
            Self::Prefix(prefix) => unstemmed.starts_with(prefix),
        }
    }

    /// Returns the term or the prefix.
    #[must_use]
    pub fn beginning(&self) -> &str {
        match self {
            Self::Term(terms) => terms.first().map_or("", |term| term),
            Self::Prefix(prefix) => prefix,
        }
    }

    /// Returns `true` if the pattern is one of these terms.
    pub fn is_term_in(&self, terms: &HashSet<Arc<str>>) -> bool {
        matches!(self, Self::Term(_) if terms.contains(self.beginning()))
    }

    /// Returns the terms of the index of which a matching message has one.
    #[must_use]
    pub fn index_terms(&self) -> Vec<TermPattern> {
        match self {
            Self::Term(terms) => terms.iter().map(TermPattern::exact).collect(),
            Self::Prefix(prefix) => vec![TermPattern { term: prefix.clone(), is_prefix: true }],
        }
    }
}

/// A part of a query with its operators.
#[derive(Debug, PartialEq, Eq)]
struct QueryPart<'a> {
    text: &'a str,
    is_quoted: bool,
    is_excluded: bool,
    is_prefix: bool,
}

fn split(text: &str) -> Vec<QueryPart<'_>> {
    let (mut parts, mut rest) = (Vec::new(), text);
    loop {
        rest = rest.trim_start();
        let after = rest
            .strip_prefix('-')
            .filter(|after| after.starts_with(|c: char| c == '"' || c.is_alphanumeric()));
        let is_excluded = after.is_some();
        rest = after.unwrap_or(rest);
        if rest.is_empty() {
            return parts;
        }
        if let Some(quoted) = rest.strip_prefix(['"', '“', '„', '”']) {
            // An unclosed phrase ends with the query.
            let (text, after) = quoted.split_once(['"', '”', '“']).unwrap_or((quoted, ""));
            parts.push(QueryPart { text, is_quoted: true, is_excluded, is_prefix: false });
            rest = after;
            continue;
        }
        let end = rest
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '“' | '„' | '”'))
            .unwrap_or(rest.len());
        let (text, after) = rest.split_at(end);
        let stem = text.strip_suffix('*').filter(|stem| stem.ends_with(char::is_alphanumeric));
        let is_prefix = stem.is_some();
        parts.push(QueryPart { text: stem.unwrap_or(text), is_quoted: false, is_excluded, is_prefix });
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Query, InvalidQuery> {
        Query::parse(Analyzer::default(), text)
    }

    fn words(text: &str) -> Vec<Pattern> {
        parse(text).expect(text).words.into_iter().map(|word| word.pattern).collect()
    }

    fn term(term: &str) -> Pattern {
        Pattern::Term(vec![term.to_owned()])
    }

    fn prefix(prefix: &str) -> Pattern {
        Pattern::Prefix(prefix.to_owned())
    }

    fn phrase(terms: &[&str]) -> Phrase {
        terms.iter().map(|text| term(text)).enumerate().collect()
    }

    #[test]
    fn query_is_split_into_words_phrases_exclusions_and_prefixes() {
        let text = "Ferries \"to the island\" -boats -\"night ferry\" tick* tick*";
        assert_eq!(words(text), [term("ferri"), term("island"), prefix("tick")]);
        let query = parse(text).expect("a query");
        assert_eq!(query.phrases, [phrase(&["to", "the", "island"])]);
        assert_eq!(query.excluded, [phrase(&["boat"]), phrase(&["night", "ferri"])]);
        assert_eq!(query.excluded_terms(), ["boat"]);
        assert_eq!(parse("\"island\"").expect("a query").phrases, [phrase(&["island"])]);
        assert_eq!(parse("-e-mail spam").expect("a query").excluded, [phrase(&["e", "mail"])]);
        assert_eq!(words("数据库"), [term("数据"), term("据库")]);
        assert_eq!(parse("\"数据库\"").expect("a query").phrases, [phrase(&["数据", "据库"])]);
    }

    #[test]
    fn query_without_words_or_too_long_is_rejected() {
        for (text, expected) in [
            ("what's up?", vec![term("what"), term("up")]),
            ("c++", vec![term("c")]),
            ("\"left open", vec![term("leav"), term("open")]),
            ("the", vec![term("the")]),
            ("a-b", vec![term("b"), term("ab")]),
            ("* AND -- \"\" -* x", vec![term("x")]),
        ] {
            assert_eq!(words(text), expected, "{text}");
        }
        for (text, error) in [
            ("", InvalidQuery::Empty),
            (" \"\" -\"?\" * 😀", InvalidQuery::Empty),
            ("-x", InvalidQuery::OnlyExclusions),
            ("-x -\"y z\"", InvalidQuery::OnlyExclusions),
            (&"é ".repeat(501), InvalidQuery::TooLong),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
        assert_eq!(
            parse(
                &"w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 a b c d e f g h i j k l m n o p q r s t u v w x y z"
                    .repeat(2)
            )
            .expect("a query")
            .words
            .len(),
            MAX_CLAUSES
        );
    }

    #[test]
    fn prefix_of_one_letter_is_a_word_and_too_many_prefixes_are_rejected() {
        for (text, word) in
            [("a*", "a"), ("É*", "é"), ("5* hotel", "5 hotel"), ("e-m*", "e-m"), ("-a* ferry", "-a* ferry")]
        {
            assert_eq!(parse(text), parse(word), "{text}");
        }
        // Repetitions need no lookup, and a character of a script without spaces is as rare as a word.
        for text in ["ab*", "数*", "aa* bb* cc* dd* aa*"] {
            let query = parse(text).expect(text);
            assert!(query.words.iter().all(|word| matches!(word.pattern, Pattern::Prefix(_))), "{text}");
        }
        let error = parse("aa* bb* cc* dd* ee*").expect_err("too many");
        let text = "has 5 prefixes, at most 4 are allowed: send the other words without the *";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn stop_word_that_is_written_as_a_name_is_a_possible_name() {
        let names = |text: &str| {
            let names = parse(text).expect(text).possible_names;
            names.iter().map(ToString::to_string).collect::<Vec<String>>()
        };
        assert_eq!(names("what did Will buy"), ["will"]);
        for text in ["Will it rain", "it will rain in Paris", "rain -Will", "rain Will*"] {
            assert_eq!(names(text), [""; 0], "{text}");
        }
    }
}
