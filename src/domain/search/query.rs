//! What a query means: words, "phrases", -exclusions, prefix*.
//!
//! Any text is a query: whatever is not one of these is passed over, as punctuation is.

use super::analyzer::{Analyzer, Token};
use super::lexemes::{TermPattern, TermQuery};

/// Characters of a query, at most: what a person types, or a model asks.
const MOST_CHARS: usize = 1000;
/// Words that are looked for, at most; those behind them are left out.
const MOST_WORDS: usize = 32;
/// Characters of a stem, at least; shorter ones are no stems of anything.
const SHORTEST_STEM: usize = 3;

/// Why a text is no query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidQuery {
    /// Nothing but spaces and punctuation.
    #[error("has no word to search for: send at least one letter or digit")]
    Empty,
    /// Exclusions alone.
    #[error("only says what to leave out: add a word to search for")]
    OnlyExclusions,
    /// Longer than [`MOST_CHARS`].
    #[error("has more than {MOST_CHARS} characters: send the words that matter")]
    TooLong,
}

/// One thing that a message may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// A term.
    Term(String),
    /// Any word that begins so.
    Prefix(String),
    /// Terms, each at its distance from the first.
    Phrase(Vec<(usize, String)>),
}

/// What a query asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// A hit has one of them at least; the more and the rarer, the better.
    pub words: Vec<Word>,
    /// A hit has all of them.
    pub phrases: Vec<Word>,
    /// A hit has none of them.
    pub excluded: Vec<Word>,
}

impl Query {
    /// Reads a query.
    ///
    /// # Errors
    /// There is nothing to search for, or too much.
    pub fn parse(analyzer: Analyzer, text: &str) -> Result<Self, InvalidQuery> {
        if text.chars().nth(MOST_CHARS).is_some() {
            return Err(InvalidQuery::TooLong);
        }
        let mut query = Self::default();
        for part in parts(text) {
            query.add(analyzer, &part);
        }
        if query.words.is_empty() {
            let only = !query.excluded.is_empty();
            return Err(if only { InvalidQuery::OnlyExclusions } else { InvalidQuery::Empty });
        }
        query.words.truncate(MOST_WORDS);
        query.phrases.truncate(MOST_WORDS);
        query.excluded.truncate(MOST_WORDS);
        Ok(query)
    }

    /// The terms that a hit has none of. Of an excluded phrase or prefix, the index can't tell who has it.
    #[must_use]
    pub fn excluded_terms(&self) -> Vec<String> {
        let term = |word: &Word| if let Word::Term(term) = word { Some(term.clone()) } else { None };
        self.excluded.iter().filter_map(term).collect()
    }

    fn add(&mut self, analyzer: Analyzer, part: &Part<'_>) {
        let mut tokens = analyzer.tokens(part.text);
        tokens.retain(|token| !token.is_unigram);
        let Some(last) = tokens.last() else { return };
        let (last, first) = (last.clone(), tokens.first().map_or(0, |token| token.position));
        let phrase: Vec<_> =
            tokens.iter().map(|token| (token.position - first, token.term.clone())).collect();
        let of_word = |token: &Token| Word::Term(token.term.clone());
        let mut words: Vec<Word> = tokens.iter().map(of_word).collect();
        if part.is_prefix {
            words.pop();
            words.push(Word::Prefix(last.unstemmed));
        }
        if part.is_excluded {
            // `-e-mail` is about e-mail, not about all that has an e.
            let whole = if words.len() > 1 { Some(Word::Phrase(phrase)) } else { words.pop() };
            self.excluded.extend(whole);
            return;
        }
        if part.is_quoted && words.len() > 1 {
            self.phrases.push(Word::Phrase(phrase));
        } else if part.is_quoted {
            self.phrases.extend(words.first().cloned());
        }
        for word in words {
            if !self.words.contains(&word) {
                self.words.push(word);
            }
        }
    }
}

impl Word {
    /// What the index is asked for. It may find more than the word, never less.
    #[must_use]
    pub fn probe(&self) -> TermQuery {
        TermQuery(match self {
            Self::Term(term) => vec![vec![TermPattern::exact(term)]],
            Self::Phrase(terms) => terms.iter().map(|(_, term)| vec![TermPattern::exact(term)]).collect(),
            Self::Prefix(prefix) => vec![stems(prefix)],
        })
    }
}

/// The index has stems: a word that begins with `connecti` is there as `connect`, or as something that begins with
/// `connecti`.
fn stems(prefix: &str) -> Vec<TermPattern> {
    let mut lexemes = vec![TermPattern { term: prefix.to_owned(), is_prefix: true }];
    let ends = prefix.char_indices().map(|(at, _)| at).skip(SHORTEST_STEM);
    for stem in ends.filter_map(|end| prefix.get(..end)) {
        lexemes.push(TermPattern::exact(stem));
        // A last y becomes i, a last e may come back.
        lexemes.push(TermPattern::exact(format!("{}i", stem.strip_suffix('y').unwrap_or(stem))));
    }
    if let Some(stem) = prefix.strip_suffix('y') {
        lexemes.push(TermPattern { term: format!("{stem}i"), is_prefix: true });
    }
    lexemes
}

/// A piece of a query with the signs that stand around it.
#[derive(Debug, PartialEq, Eq)]
struct Part<'a> {
    text: &'a str,
    is_quoted: bool,
    is_excluded: bool,
    is_prefix: bool,
}

fn parts(text: &str) -> Vec<Part<'_>> {
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
            // A quote that is left open ends with the query.
            let (text, after) = quoted.split_once(['"', '”', '“']).unwrap_or((quoted, ""));
            parts.push(Part { text, is_quoted: true, is_excluded, is_prefix: false });
            rest = after;
            continue;
        }
        let end = rest
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '“' | '„' | '”'))
            .unwrap_or(rest.len());
        let (text, after) = rest.split_at(end);
        let stem = text.strip_suffix('*').filter(|stem| stem.ends_with(char::is_alphanumeric));
        let is_prefix = stem.is_some();
        parts.push(Part { text: stem.unwrap_or(text), is_quoted: false, is_excluded, is_prefix });
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Query, InvalidQuery> {
        Query::parse(Analyzer::default(), text)
    }

    fn term(term: &str) -> Word {
        Word::Term(term.to_owned())
    }

    fn phrase(terms: &[&str]) -> Word {
        Word::Phrase(terms.iter().map(|term| (*term).to_owned()).enumerate().collect())
    }

    #[test]
    fn words_phrases_exclusions_and_prefixes_are_told_apart() {
        let query = parse("Ferries \"to the island\" -boats -\"night ferry\" tick* tick*").expect("a query");
        let words = [term("ferri"), term("to"), term("the"), term("island"), Word::Prefix("tick".to_owned())];
        assert_eq!(query.words, words);
        assert_eq!(query.phrases, [phrase(&["to", "the", "island"])]);
        assert_eq!(query.excluded, [term("boat"), phrase(&["night", "ferri"])]);
        assert_eq!(query.excluded_terms(), ["boat"]);
        assert_eq!(parse("\"island\"").expect("a query").phrases, [term("island")]);
        assert_eq!(parse("-e-mail spam").expect("a query").excluded, [phrase(&["e", "mail"])]);
        assert_eq!(parse("数据库").expect("a query").words, [term("数据"), term("据库")]);
        assert_eq!(parse("\"数据库\"").expect("a query").phrases, [phrase(&["数据", "据库"])]);
    }

    #[test]
    fn any_text_is_a_query_or_says_what_it_lacks() {
        for (text, words) in [
            ("what's up?", vec![term("what"), term("up")]),
            ("c++", vec![term("c")]),
            ("\"left open", vec![term("left"), term("open")]),
            ("the", vec![term("the")]),
            ("a-b", vec![term("a"), term("b")]),
            ("* AND -- \"\" -* x", vec![term("and"), term("x")]),
        ] {
            assert_eq!(parse(text).expect(text).words, words, "{text}");
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
                &"w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 a b c d e f g h i j k l m n o p q r s t u v w x y z"
                    .repeat(2)
            )
            .expect("a query")
            .words
            .len(),
            MOST_WORDS
        );
    }

    #[test]
    fn a_prefix_asks_for_the_stems_of_what_it_begins() {
        for (prefix, word) in
            [("connecti", "connections"), ("run", "running"), ("happy", "happy"), ("sk", "skies")]
        {
            let TermQuery(groups) = Word::Prefix(prefix.to_owned()).probe();
            let (stem, _) = Analyzer::default().word(word).next().unwrap();
            let finds = |lexeme: &TermPattern| {
                if lexeme.is_prefix { stem.starts_with(&lexeme.term) } else { stem == lexeme.term }
            };
            assert!(groups[0].iter().any(finds), "{prefix} {stem} {groups:?}");
        }
    }
}
