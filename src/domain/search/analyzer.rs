//! Text analyzer: turns a text into terms, so that `cafe` finds `Cafés`, and Chinese can be searched.
//!
//! Words are normalized (lower case, no accents, no compatibility forms) and reduced to their stem by the Snowball rules
//! of one language. Irregular forms of English words, such as `went`, get the stem of their base form. Scripts without spaces
//! between words, and Hangul, where spaces separate phrases, produce a bigram for each pair of adjacent characters, as is usual in
//! search engines, and a unigram for queries of one character.

pub use super::language::Language;
use frostem::{Algorithm, Stemmer};
use quick_cache::Equivalent;
use quick_cache::sync::Cache;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use unicode_normalization::UnicodeNormalization as _;
use unicode_normalization::char::is_combining_mark;

/// Longer words are truncated to this length.
const MAX_TERM_CHARS: usize = 40;

/// Irregular English words: the base form, then its other forms. Auxiliaries are missing: most of their forms are stop words,
/// and the others, such as `done`, say more than the base form.
const IRREGULAR_ENGLISH: &str = include_str!("irregular_english.txt");

/// Apostrophes inside words.
const APOSTROPHES: [char; 2] = ['\'', '’'];

/// The analyzer of a language. Texts and queries must be analyzed alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Analyzer {
    language: Language,
    /// The languages besides it whose stems a query has, too, as bits. Messages have those of one language.
    others: u32,
}

/// Increment it with every change of the terms that a text produces.
const VERSION: u8 = 3;

/// A part of a text without spaces or punctuation: a word, or characters of a script without spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position in the text, in bytes.
    pub range: Range<usize>,
    pub is_word: bool,
}

/// An occurrence of a term in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The normalized and stemmed word. Contains letters and digits, and full stops between the digits of a [`TokenKind::Whole`].
    pub term: Arc<str>,
    /// The normalized word before stemming. Prefix queries match this form.
    pub unstemmed: Arc<str>,
    /// Position in the text, in bytes.
    pub range: Range<usize>,
    /// Number of words and characters before this one.
    pub position: usize,
    pub kind: TokenKind,
}

/// The relation of a token to the words of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Word,
    /// The stem of the same word in another language.
    Alternative,
    /// A part of a word, at its position: a single character of a script without spaces, which is part of a bigram, too, or `Load` in
    /// `selectInLoad`.
    Part,
    /// Words that punctuation joins, as one word, in addition to them: `orderid` for `order_id`, `3.14` for `3,14`.
    Whole,
}

/// The terms of words that say little about a text.
pub type StopTerms = Arc<HashSet<Arc<str>>>;

/// A term of a word.
#[derive(Clone, Debug)]
struct WordTerm {
    term: Arc<str>,
    unstemmed: Arc<str>,
    kind: TokenKind,
}

/// The terms of a word. Most words have one. A word that consists of combining marks has none, and a word with apostrophes may have
/// several.
type Terms = Arc<[WordTerm]>;

/// A word as it is written, with its analyzer.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Word<T> {
    analyzer: Analyzer,
    raw: T,
}

impl Equivalent<Word<Box<str>>> for Word<&str> {
    fn equivalent(&self, key: &Word<Box<str>>) -> bool {
        self.analyzer == key.analyzer && *self.raw == *key.raw
    }
}

/// Words that were analyzed lately: to stem a word takes ten times as long as to find it here.
static WORDS: LazyLock<Cache<Word<Box<str>>, Terms>> = LazyLock::new(|| Cache::new(16 * 1024));
/// Longer words, such as a number of 100,000 digits, are not kept.
const MAX_KEPT_BYTES: usize = 64;

impl Analyzer {
    #[must_use]
    pub fn new(language: Language) -> Self {
        Self { language, others: 0 }
    }

    /// Returns the analyzer of a session with this language, if sessions have languages of their own.
    #[must_use]
    pub fn of_session(self, language: Option<Language>) -> Self {
        match language {
            Some(language) if self.detects() && language != Language::English => Self::new(language),
            _ => self,
        }
    }

    /// Returns `true` if sessions have languages of their own.
    #[must_use]
    pub fn detects(self) -> bool {
        self.language == Language::Auto
    }

    /// Returns the analyzer of a query for sessions in English and in these languages. Stop words are those of the language of the query.
    #[must_use]
    pub fn of_query(self, text: &str, languages: &[Language]) -> Self {
        /// One word can be a stop word of another language: `war`, `die`.
        const MIN_STOP_WORDS: usize = 2;
        let words: Vec<Token> = self.words(text).collect();
        let stop_words = |analyzer: Self| {
            let stop_terms = analyzer.stop_terms();
            words.iter().filter(|word| stop_terms.contains(&*analyzer.stem(&word.unstemmed))).count()
        };
        let analyzers = languages.iter().map(|language| self.of_session(Some(*language)));
        let own = analyzers.max_by_key(|analyzer| stop_words(*analyzer));
        let own =
            own.filter(|own| stop_words(*own) >= MIN_STOP_WORDS.max(stop_words(self) + 1)).unwrap_or(self);
        let all = languages.iter().chain([&self.language]).fold(0, |bits, language| bits | bit(*language));
        Self { others: all & !bit(own.language), ..own }
    }

    /// Returns the name under which an index records its analyzer. Indexes of different versions contain different terms.
    #[must_use]
    pub fn version(self) -> String {
        format!("{}-{VERSION}", self.language.as_str())
    }

    /// Returns the analyzer of a recorded version, or `None` if this release does not know it.
    #[must_use]
    pub fn parse_version(label: &str) -> Option<Self> {
        let analyzer = Self::new(Language::parse(label.rsplit_once('-')?.0)?);
        (analyzer.version() == label).then_some(analyzer)
    }

    /// Returns the stems of irregular forms of English, by the form.
    fn irregular_stems(self) -> Option<&'static HashMap<&'static str, String>> {
        static STEMS: LazyLock<HashMap<&str, String>> = LazyLock::new(|| {
            let forms = |line: &'static str| {
                let mut words = line.split(' ');
                let stem =
                    Stemmer::new(Algorithm::English).stem(words.next().unwrap_or_default()).into_owned();
                words.map(move |form| (form, stem.clone()))
            };
            IRREGULAR_ENGLISH.lines().flat_map(forms).collect()
        });
        matches!(self.language, Language::English | Language::Auto).then(|| &*STEMS)
    }

    /// Returns all terms of a text, in order.
    #[must_use]
    pub fn tokens(self, text: &str) -> Vec<Token> {
        let mut tokens = Vec::new();
        self.visit(text, |token| tokens.push(token));
        tokens
    }

    /// Returns the words of a text with the term of the language, in order.
    pub fn words(self, text: &str) -> impl Iterator<Item = Token> {
        self.tokens(text).into_iter().filter(|token| token.kind == TokenKind::Word)
    }

    /// Calls a function with each term of a text, and with the words themselves, once, in the order of their first occurrences.
    pub fn for_each_new_term(self, text: &str, mut function: impl FnMut(&str)) {
        let mut seen = HashSet::new();
        self.visit(text, |Token { term, unstemmed, .. }| {
            for term in [term, unstemmed] {
                if seen.insert(Arc::clone(&term)) {
                    function(&term);
                }
            }
        });
    }

    /// Calls a function with each term of a text, in order.
    fn visit(self, text: &str, mut visitor: impl FnMut(Token)) {
        let (mut position, mut joined) = (0, Joined::default());
        for Segment { range, is_word } in segments(text) {
            if !joined.add(text, &range, is_word) {
                joined.visit(self, text, position, &mut visitor);
                joined = Joined::new(&range, is_word);
            }
            let raw = text.get(range.clone()).unwrap_or_default();
            if is_word {
                let terms = self.terms(raw);
                for (at, WordTerm { term, unstemmed, kind }) in terms.iter().cloned().enumerate() {
                    position += usize::from(at > 0 && kind == TokenKind::Word);
                    visitor(Token { term, unstemmed, range: range.clone(), position, kind });
                }
                position += usize::from(!terms.is_empty());
                continue;
            }
            let character = |range: Range<usize>| {
                let terms = self.terms(text.get(range.clone())?);
                terms.first().map(|first| (Arc::clone(&first.term), range))
            };
            let characters: Vec<_> = characters(text, range).into_iter().filter_map(character).collect();
            let mut visit = |term: Arc<str>, range, position, kind| {
                visitor(Token { unstemmed: Arc::clone(&term), term, range, position, kind });
            };
            for (at, (character, range)) in characters.iter().enumerate() {
                if let Some((next, end)) = characters.get(at + 1) {
                    let bigram = Arc::from(format!("{character}{next}"));
                    visit(bigram, range.start..end.end, position, TokenKind::Word);
                }
                let kind = if characters.len() > 1 { TokenKind::Part } else { TokenKind::Word };
                visit(Arc::clone(character), range.clone(), position, kind);
                position += 1;
            }
        }
        joined.visit(self, text, position, &mut visitor);
    }

    /// Returns the terms of a word.
    fn terms(self, raw: &str) -> Terms {
        if let Some(terms) = WORDS.get(&Word { analyzer: self, raw }) {
            return terms;
        }
        let terms: Terms = self.word_terms(raw).collect();
        if raw.len() <= MAX_KEPT_BYTES {
            WORDS.insert(Word { analyzer: self, raw: raw.into() }, Arc::clone(&terms));
        }
        terms
    }

    fn word_terms(self, raw: &str) -> impl Iterator<Item = WordTerm> {
        let term = |term: &str, unstemmed: &Arc<str>, kind| {
            let term = if *term == **unstemmed { Arc::clone(unstemmed) } else { Arc::from(term) };
            (!term.is_empty()).then(|| WordTerm { term, unstemmed: Arc::clone(unstemmed), kind })
        };
        let of_part = move |part: &str, kind: TokenKind| {
            let unstemmed: Arc<str> = Arc::from(normalize(part));
            let alternative = if kind == TokenKind::Word { TokenKind::Alternative } else { kind };
            let kinds = std::iter::once(kind).chain(std::iter::repeat(alternative));
            let stems = self.stems(&unstemmed).into_iter().zip(kinds);
            stems.filter_map(|(stem, kind)| term(&stem, &unstemmed, kind)).collect::<Vec<_>>()
        };
        word_parts(raw).flat_map(move |word| {
            let parts = identifier_parts(word).map(move |part| (part, TokenKind::Part));
            std::iter::once((word, TokenKind::Word))
                .chain(parts)
                .flat_map(move |(part, kind)| of_part(part, kind))
        })
    }

    /// Returns the terms of words that say little about a text, such as articles and pronouns of the language.
    #[must_use]
    pub fn stop_terms(self) -> StopTerms {
        static STOP_TERMS: Mutex<Vec<(Analyzer, StopTerms)>> = Mutex::new(Vec::new());
        let own = Self::new(self.language);
        let known = || STOP_TERMS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known().iter().find(|(analyzer, _)| *analyzer == own).map(|(_, terms)| Arc::clone(terms));
        if let Some(terms) = found {
            return terms;
        }
        // Without the lock, because the analysis of the words can give way to another computation.
        let terms = Arc::new(own.compute_stop_terms());
        known().push((own, Arc::clone(&terms)));
        terms
    }

    fn compute_stop_terms(self) -> HashSet<Arc<str>> {
        let words = self.language.rules().and_then(|(code, _)| stop_words::lookup(code)).unwrap_or_default();
        // The list contains `won` as a part of `won't`, and `win` is no stop word.
        let is_irregular =
            |token: &Token| self.irregular_stems().is_some_and(|stems| stems.contains_key(&*token.unstemmed));
        let tokens = words.iter().flat_map(|word| self.tokens(word)).filter(|token| !is_irregular(token));
        tokens.map(|token| token.term).collect()
    }

    /// Returns the stems of a normalized word: that of the language, and those of the others that differ.
    pub(super) fn stems(self, unstemmed: &str) -> Vec<String> {
        let mut stems = vec![self.stem(unstemmed).into_owned()];
        for language in Language::ALL.into_iter().filter(|language| self.others & bit(*language) != 0) {
            let stem = Self::new(language).stem(unstemmed);
            if stems.iter().all(|known| *known != *stem) {
                stems.push(stem.into_owned());
            }
        }
        stems
    }

    /// Returns the stem of a normalized word.
    fn stem(self, unstemmed: &str) -> Cow<'_, str> {
        if let Some(stem) = self.irregular_stems().and_then(|stems| stems.get(unstemmed)) {
            return Cow::Borrowed(stem);
        }
        let rules = self.language.rules().filter(|_| !unstemmed.contains(char::is_numeric));
        let stem = rules.map(|(_, algorithm)| Stemmer::new(algorithm).stem(unstemmed));
        stem.filter(|stem| !stem.is_empty()).unwrap_or(Cow::Borrowed(unstemmed))
    }
}

/// Returns the bit of a language in [`Analyzer::others`].
fn bit(language: Language) -> u32 {
    1 << (language as u32)
}

/// Words that single punctuation marks join, such as `order_id`.
#[derive(Debug, Default)]
struct Joined {
    range: Range<usize>,
    words: usize,
}

impl Joined {
    /// Begins with a segment. Scripts without spaces join nothing.
    fn new(range: &Range<usize>, is_word: bool) -> Self {
        Self { range: range.clone(), words: usize::from(is_word) }
    }

    /// Adds the next segment of a text. Returns `false` if it does not belong to the words before.
    fn add(&mut self, text: &str, range: &Range<usize>, is_word: bool) -> bool {
        let is_digit =
            |at: Option<usize>| at.and_then(|at| text.as_bytes().get(at)).is_some_and(u8::is_ascii_digit);
        let gap = text.get(self.range.end..range.start).unwrap_or_default();
        let are_numbers = || is_digit(self.range.end.checked_sub(1)) && is_digit(Some(range.start));
        let joins = matches!(gap, "_" | "-" | ".") || (matches!(gap, "," | ":" | "/") && are_numbers());
        if !joins || !is_word || self.words == 0 {
            return false;
        }
        self.range.end = range.end;
        self.words += 1;
        true
    }

    /// Calls a function with the joined word, at the position of its last part, unless it is a single word or long.
    fn visit(&self, analyzer: Analyzer, text: &str, position: usize, visitor: &mut impl FnMut(Token)) {
        if self.words < 2 || self.range.len() > MAX_TERM_CHARS {
            return;
        }
        let raw = text.get(self.range.clone()).unwrap_or_default();
        let is_number = raw.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_punctuation());
        let is_part = |c: &char| c.is_alphanumeric() || is_non_ascii_mark(*c);
        let raw: String = if is_number {
            raw.replace(|c: char| !c.is_ascii_digit(), ".")
        } else {
            raw.chars().filter(is_part).collect()
        };
        for WordTerm { term, unstemmed, kind } in analyzer.terms(&raw).iter().cloned() {
            let kind = match kind {
                TokenKind::Part => continue,
                TokenKind::Word => TokenKind::Whole,
                kind => kind,
            };
            let (range, position) = (self.range.clone(), position.saturating_sub(1));
            visitor(Token { term, unstemmed, range, position, kind });
        }
    }
}

/// Returns the parts of an identifier without punctuation, if it has several: `Missing` and `Greenlet`, `HTTP` and `Server`, `RTX` and
/// `4090`. Single letters say nothing.
fn identifier_parts(word: &str) -> impl Iterator<Item = &str> {
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Class {
        Lower,
        Upper,
        Digit,
    }
    let class = |c: char| match c {
        c if c.is_numeric() => Class::Digit,
        c if c.is_uppercase() => Class::Upper,
        _ => Class::Lower,
    };
    let mut starts = vec![0];
    let mut before: Option<(usize, Class)> = None;
    let mut run = 0;
    for (at, c) in word.char_indices() {
        let now = class(c);
        match before {
            Some((_, class)) if class == now => run += 1,
            // `Server` in `HTTPServer` begins with the last capital.
            Some((last, Class::Upper)) if now == Class::Lower => {
                starts.extend((run > 1).then_some(last));
                run = 1;
            }
            Some(_) => {
                starts.push(at);
                run = 1;
            }
            None => run = 1,
        }
        before = Some((at, now));
    }
    let is_whole = starts.len() == 1;
    let ends: Vec<usize> = starts.iter().skip(1).copied().chain([word.len()]).collect();
    let parts = starts.into_iter().zip(ends).filter_map(move |(start, end)| word.get(start..end));
    parts.filter(move |part| {
        !is_whole && (part.chars().nth(1).is_some() || part.chars().all(char::is_numeric))
    })
}

/// Splits a word at its apostrophes and drops short parts: `Ada's`, `they're` and `l'eau` become Ada, they and eau.
fn word_parts(raw: &str) -> impl Iterator<Item = &str> {
    let is_long = |part: &str| part.chars().nth(2).is_some();
    let any_long = raw.split(APOSTROPHES).any(is_long);
    raw.split(APOSTROPHES).filter(move |part| !any_long || is_long(part))
}

/// Splits a text into segments.
pub fn segments(text: &str) -> impl Iterator<Item = Segment> + '_ {
    let mut position = 0;
    std::iter::from_fn(move || {
        let start = position + text.get(position..)?.find(char::is_alphanumeric)?;
        let rest = text.get(start..)?;
        let is_word = begins_word(rest);
        let continues = |(at, c): (usize, char)| {
            (c.is_alphanumeric() && is_unspaced_script(c) != is_word)
                || is_non_ascii_mark(c)
                || (is_word
                    && APOSTROPHES.contains(&c)
                    && rest.get(at + c.len_utf8()..).is_some_and(begins_word))
        };
        let end = rest.char_indices().find(|character| !continues(*character));
        position = end.map_or(text.len(), |(at, _)| start + at);
        Some(Segment { range: start..position, is_word })
    })
}

fn begins_word(text: &str) -> bool {
    text.chars().next().is_some_and(|c| c.is_alphanumeric() && !is_unspaced_script(c))
}

fn is_non_ascii_mark(c: char) -> bool {
    !c.is_ascii() && is_combining_mark(c)
}

/// Returns the positions of the characters in a range of a text, each with its combining marks.
fn characters(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (at, c) in text.get(range.clone()).unwrap_or_default().char_indices() {
        let (start, end) = (range.start + at, range.start + at + c.len_utf8());
        match ranges.last_mut() {
            Some(last) if is_mark(c) => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}

/// Returns `true` for marks that belong to the character before. The voicing marks of half-width Katakana are letters in Unicode,
/// but their full-width forms are combining marks.
pub fn is_mark(c: char) -> bool {
    is_combining_mark(c) || matches!(c, '\u{ff9e}' | '\u{ff9f}')
}

/// Normalizes a word: lower case, no compatibility forms, no accents, at most [`MAX_TERM_CHARS`].
fn normalize(word: &str) -> String {
    if word.is_ascii() {
        return word.get(..MAX_TERM_CHARS).unwrap_or(word).to_ascii_lowercase();
    }
    let lower = word.chars().flat_map(char::to_lowercase).nfkd().flat_map(char::to_lowercase);
    let plain = lower.filter(|c| !is_accent(*c) && (c.is_alphanumeric() || is_combining_mark(*c)));
    let mut normalized = String::with_capacity(word.len());
    for c in plain {
        match c {
            'ß' => normalized.push_str("ss"),
            'æ' => normalized.push_str("ae"),
            'œ' => normalized.push_str("oe"),
            'ø' => normalized.push('o'),
            'ł' => normalized.push('l'),
            'đ' | 'ð' => normalized.push('d'),
            'ı' => normalized.push('i'),
            'ς' => normalized.push('σ'),
            c => normalized.push(c),
        }
    }
    normalized.nfc().take(MAX_TERM_CHARS).collect()
}

/// Returns `true` for marks that normalization removes: accents of Latin, Greek and Cyrillic, vowel points of Hebrew and
/// Arabic. Other marks, such as Thai vowels or Japanese voicing marks, distinguish letters.
fn is_accent(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{591}'..='\u{5c7}' | '\u{64b}'..='\u{65f}' | '\u{670}')
}

/// Returns `true` if the character belongs to a script that does not separate words by spaces.
fn is_unspaced_script(c: char) -> bool {
    !c.is_ascii()
        && matches!(c,
        '\u{e00}'..='\u{eff}' // Thai, Lao
        | '\u{f00}'..='\u{fff}' // Tibetan
        | '\u{1000}'..='\u{109f}' // Burmese
        | '\u{1100}'..='\u{11ff}' // Hangul, in parts
        | '\u{1780}'..='\u{17ff}' // Khmer
        | '\u{2e80}'..='\u{2fdf}' // radicals
        | '\u{3005}'..='\u{3007}'
        | '\u{3040}'..='\u{312f}' // Hiragana, Katakana, Bopomofo
        | '\u{3130}'..='\u{318f}' // Hangul, compatibility
        | '\u{31f0}'..='\u{31ff}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' // Han
        | '\u{ac00}'..='\u{d7ff}' // Hangul
        | '\u{f900}'..='\u{faff}'
        | '\u{ff66}'..='\u{ff9f}' // Katakana, half width
        | '\u{20000}'..='\u{3ffff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(text: &str) -> Vec<String> {
        let tokens = Analyzer::default().tokens(text);
        tokens
            .iter()
            .filter(|token| token.kind == TokenKind::Word)
            .map(|token| token.term.to_string())
            .collect()
    }

    #[test]
    fn each_term_of_a_text_is_new_once() {
        let new_terms = |text: &str| {
            let mut terms = Vec::new();
            Analyzer::default().for_each_new_term(text, |term| terms.push(term.to_owned()));
            terms
        };
        assert_eq!(
            new_terms("a ferry, the Ferries and a Boat-boat's"),
            ["a", "ferri", "ferry", "the", "ferries", "and", "boat", "boatboat", "boatboats"]
        );
        assert_eq!(new_terms("東京、東京 x"), ["東京", "東", "京", "x"]);
    }

    #[test]
    fn forms_of_one_word_have_the_same_term() {
        for (one, other) in [
            ("Cafés", "cafe"),
            ("STRASSE", "straße"),
            ("running", "RUNS"),
            ("ＦＵＬＬ", "full"),
            ("e\u{301}te\u{301}", "été"),
            ("ﬁne", "fine"),
            ("ΟΔΟΣ", "οδος"),
            ("Ångström", "angstrom"),
            ("ｶﾞ", "ガ"),
            ("Øresund", "oresund"),
            ("İstanbul", "istanbul"),
            ("Ada’s", "Ada"),
            ("went", "going"),
            ("CHILDREN", "child"),
            ("fought", "fights"),
        ] {
            assert_eq!(terms(one), terms(other), "{one} {other}");
            assert_eq!(terms(one).len(), 1, "{one}");
        }
        // The voicing mark makes another letter.
        assert_ne!(terms("が"), terms("か"));
    }

    #[test]
    fn words_and_numbers_part_where_a_reader_parts_them() {
        assert_eq!(
            terms("what's up? c++ -x user_id 3.14 they're l'eau"),
            ["what", "up", "c", "x", "user", "id", "3", "14", "they", "eau"]
        );
        assert_eq!(terms("?! 😀 '' -"), [""; 0]);
        assert_eq!(terms(&"x".repeat(1000)), ["x".repeat(MAX_TERM_CHARS)]);
    }

    #[test]
    fn scripts_without_spaces_come_in_pairs() {
        assert_eq!(terms("数据库"), ["数据", "据库"]);
        assert_eq!(terms("我 the数据"), ["我", "the", "数据"]);
        assert_eq!(terms("東京タワー"), ["東京", "京タ", "タワ", "ワー"]);
        assert_eq!(terms("ที่นี่"), ["ที่นี่"]);
        assert_eq!(terms("학교에서"), ["학교", "교에", "에서"]);
        let tokens = Analyzer::default().tokens("数据");
        assert_eq!(tokens.iter().map(|token| &*token.term).collect::<Vec<_>>(), ["数据", "数", "据"]);
    }

    #[test]
    fn token_has_its_range_in_the_text() {
        let text = "Der Café-Besuch in 東京";
        for token in Analyzer::new(Language::None).tokens(text) {
            assert_eq!(normalize(&text[token.range.clone()]), &*token.unstemmed);
        }
    }

    /// Indexes contain stems. If this test fails, an update of a crate changed the stemming rules: then the version must change,
    /// too.
    #[test]
    fn version_changes_with_the_stems() {
        let words =
            "generously happily connections relational dying university organisation skies news boxes";
        assert_eq!(
            terms(words).join(" "),
            "generous happili connect relat die universiti organis sky news box"
        );
        assert_eq!(terms("went bought children better felt"), ["go", "buy", "child", "good", "feel"]);
        assert_eq!(Analyzer::default().version(), "auto-3");
        for language in Language::ALL {
            let analyzer = Analyzer::new(language);
            assert_eq!(Analyzer::parse_version(&analyzer.version()), Some(analyzer));
        }
        for label in ["", "off", "english", "english-0", "english-2", "klingon-3", "English-3"] {
            assert_eq!(Analyzer::parse_version(label), None, "{label}");
        }
    }

    #[test]
    fn identifiers_and_numbers_have_terms_for_the_whole_and_for_parts() {
        let all = |text: &str| {
            let tokens = Analyzer::default().tokens(text);
            let of = |kind| {
                let of_kind = tokens.iter().filter(move |token: &&Token| token.kind == kind);
                of_kind.map(|token| token.term.to_string()).collect::<Vec<_>>().join(" ")
            };
            [of(TokenKind::Word), of(TokenKind::Part), of(TokenKind::Whole)]
        };
        for (text, expected) in [
            ("order_id", ["order id", "", "orderid"]),
            ("MissingGreenlet", ["missinggreenlet", "miss greenlet", ""]),
            ("parseHTTPResponse", ["parsehttprespons", "pars http respons", ""]),
            ("RTX4090 v2", ["rtx4090 v2", "rtx 4090 2", ""]),
            ("3,14 2026-04-17", ["3 14 2026 04 17", "", "3.14 2026.04.17"]),
            ("yes, no. e-mail", ["yes no e mail", "", "email"]),
            ("the-数据", ["the 数据", "数 据", ""]),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
        let words: Vec<_> =
            Analyzer::default().words("a JavaScript file").map(|token| token.position).collect();
        assert_eq!(words, [0, 1, 2], "a part has the position of its word");
    }

    #[test]
    fn query_for_several_languages_has_the_stems_of_all() {
        let languages = [Language::French, Language::German];
        let analyzer = Analyzer::default().of_query("Was kostet die Wärmepumpe?", &languages);
        let own = |term: &str| analyzer.stop_terms().contains(term);
        assert!(own("was") && own("die") && !own("the"), "the question is German");
        let terms = |text: &str| {
            let tokens = analyzer.tokens(text).into_iter();
            tokens.map(|token| token.term.to_string()).collect::<std::collections::BTreeSet<_>>()
        };
        assert!(terms("Wärmepumpen").contains("warmepump") && terms("ferries").contains("ferri"));
        assert!(Analyzer::default().of_query("the world war", &languages).stop_terms().contains("the"));
        assert_eq!(
            Analyzer::new(Language::None).of_session(Some(Language::German)),
            Analyzer::new(Language::None)
        );
    }
}
