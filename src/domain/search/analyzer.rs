//! Text analyzer: turns a text into terms, so that `cafe` finds `Cafés`, and Chinese can be searched.
//!
//! Words are normalized (lower case, no accents, no compatibility forms) and reduced to their stem by the Snowball rules
//! of one language. Irregular forms of English words, such as `went`, get the stem of their base form. Scripts without spaces
//! between words, and Hangul, where spaces separate phrases, produce a bigram for each pair of adjacent characters, as is usual in
//! search engines, and a unigram for queries of one character.

use frostem::{Algorithm, Stemmer};
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error, StrDeserializer};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::mem;
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

/// Defines [`Language`], with the two-letter codes of ISO 639-1.
macro_rules! languages {
    ($($(#[$default:meta])? $language:ident $code:literal,)*) => {
        /// The language whose stemming rules apply.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Language {
            /// No stemming: a query finds only the exact form of a word.
            None,
            $($(#[$default])? $language,)*
        }

        impl Language {
            /// The codes of all languages with stemming rules.
            pub const CODES: &[&str] = &[$($code),*];

            /// Returns the code and the stemming rules.
            fn rules(self) -> Option<(&'static str, Algorithm)> {
                match self {
                    Self::None => None,
                    $(Self::$language => Some(($code, Algorithm::$language)),)*
                }
            }
        }
    };
}

languages! {
    Arabic "ar", Danish "da", Dutch "nl", #[default] English "en", Finnish "fi", French "fr", German "de", Greek "el",
    Hungarian "hu", Italian "it", Norwegian "no", Portuguese "pt", Romanian "ro", Russian "ru", Spanish "es",
    Swedish "sv", Turkish "tr",
}

/// The analyzer of one language in one of its versions. Texts and queries must be analyzed alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Analyzer {
    language: Language,
    /// Increment it with every change of the terms that a text produces, and keep the earlier versions: existing indexes use
    /// them.
    version: u8,
}

impl Default for Analyzer {
    fn default() -> Self {
        Self::new(Language::default())
    }
}

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
    /// The normalized and stemmed word. Contains only letters and digits.
    pub term: Arc<str>,
    /// The normalized word before stemming. Prefix queries match this form.
    pub unstemmed: Arc<str>,
    /// Position in the text, in bytes.
    pub range: Range<usize>,
    /// Number of words and characters before this one.
    pub position: usize,
    /// `true` for a single character of a longer segment. Such a character is part of a bigram, too.
    pub is_unigram: bool,
}

/// A [`Token`] that is not kept.
struct Occurrence<'t> {
    term: &'t Arc<str>,
    unstemmed: &'t Arc<str>,
    range: Range<usize>,
    position: usize,
    is_unigram: bool,
    /// `true` if the same word, as it is written, occurred before. `None` if that is not known.
    is_repeated: Option<bool>,
}

/// The terms of words that say little about a text.
pub type StopTerms = Arc<HashSet<Arc<str>>>;

/// The terms of a word, each with its unstemmed form. Most words have one. A word that consists of combining marks has none, and a
/// word with apostrophes may have several.
type Terms = Box<[(Arc<str>, Arc<str>)]>;

/// Words that were analyzed, as they are written: to stem a word takes ten times as long as to find it here.
#[derive(Debug, Default)]
struct RecentWords {
    analyzer: Option<Analyzer>,
    /// The number of the present text.
    text: u32,
    newer: foldhash::HashMap<String, RecentWord>,
    /// The words of `newer` move here when they are [`MAX_NEWER_WORDS`], and those that occur again move back.
    older: foldhash::HashMap<String, RecentWord>,
}

#[derive(Debug)]
struct RecentWord {
    terms: Terms,
    /// The last text with the word.
    text: u32,
}

const MAX_NEWER_WORDS: usize = 2048;
/// Longer words, such as a number of 100,000 digits, are not kept.
const MAX_KEPT_BYTES: usize = 64;

/// The words of the threads that analyze no text now. Threads for computations end soon, so a thread does not keep its words.
static IDLE_WORDS: Mutex<Vec<RecentWords>> = Mutex::new(Vec::new());

impl RecentWords {
    /// Calls a function with words of the analyzer that another thread has left, if there are any.
    fn with<T>(analyzer: Analyzer, work: impl FnOnce(&mut Self) -> T) -> T {
        let idle = || IDLE_WORDS.lock().unwrap_or_else(PoisonError::into_inner);
        let left = idle().pop().filter(|words| words.analyzer == Some(analyzer));
        let mut words = left.unwrap_or_else(|| Self { analyzer: Some(analyzer), ..Self::default() });
        words.text = words.text.wrapping_add(1);
        let result = work(&mut words);
        idle().push(words);
        result
    }

    /// Calls a function with the terms of a word, and with `true` if the word occurred in the text before.
    fn with_terms<T>(&mut self, raw: &str, function: impl FnOnce(&Terms, Option<bool>) -> T) -> T {
        let text = self.text;
        let is_repeated = |word: &mut RecentWord| Some(mem::replace(&mut word.text, text) == text);
        if let Some(word) = self.newer.get_mut(raw) {
            let is_repeated = is_repeated(word);
            return function(&word.terms, is_repeated);
        }
        let analyze = || self.analyzer.iter().flat_map(|analyzer| analyzer.word_terms(raw)).collect();
        if raw.len() > MAX_KEPT_BYTES {
            return function(&analyze(), None);
        }
        if self.newer.len() >= MAX_NEWER_WORDS {
            mem::swap(&mut self.older, &mut self.newer);
            self.newer.clear();
        }
        let new = || (raw.to_owned(), RecentWord { terms: analyze(), text: text.wrapping_sub(1) });
        let (raw, mut word) = self.older.remove_entry(raw).unwrap_or_else(new);
        let is_repeated = is_repeated(&mut word);
        function(&self.newer.entry(raw).or_insert(word).terms, is_repeated)
    }
}

/// A set of the letters from `a` to `z`, as bits. To look at the first letter of a word is faster than to find its terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Initials(u32);

impl Initials {
    const ALL: Self = Self(u32::MAX);

    fn bit(letter: u8) -> Option<u32> {
        letter.is_ascii_alphabetic().then(|| 1 << (letter.to_ascii_lowercase() - b'a'))
    }

    /// Returns `true` for a word that begins with another letter. Words with accents or apostrophes can begin with any letter.
    fn exclude(self, word: &str) -> bool {
        let is_other = word.bytes().next().and_then(Self::bit).is_some_and(|bit| self.0 & bit == 0);
        is_other && word.bytes().all(|byte| byte.is_ascii_alphanumeric())
    }
}

impl Analyzer {
    #[must_use]
    pub fn new(language: Language) -> Self {
        Self { language, version: if language == Language::English { 2 } else { 1 } }
    }

    /// Returns the name under which an index records its analyzer. Indexes of different versions contain different terms.
    #[must_use]
    pub fn version(self) -> String {
        format!("{:?}-{}", self.language, self.version).to_lowercase()
    }

    /// Returns the analyzer of a recorded version, or `None` if this release does not know it.
    #[must_use]
    pub fn parse_version(label: &str) -> Option<Self> {
        let language: StrDeserializer<'_, Error> = label.rsplit_once('-')?.0.into_deserializer();
        let newest = Self::new(Language::deserialize(language).ok()?);
        let mut versions = (1..=newest.version).map(|version| Self { version, ..newest });
        versions.find(|analyzer| analyzer.version() == label)
    }

    /// Returns `true` if the words have English endings.
    pub fn is_english(self) -> bool {
        self.language == Language::English
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
        (self.language == Language::English && self.version >= 2).then(|| &*STEMS)
    }

    /// Returns the stems of irregular forms that begin with a text. These stems may begin differently.
    pub fn irregular_stems_of(self, prefix: &str) -> impl Iterator<Item = &'static str> {
        let forms = self.irregular_stems().into_iter().flatten();
        forms.filter(move |(form, _)| form.starts_with(prefix)).map(|(_, stem)| stem.as_str())
    }

    /// Returns the initials of the words that produce one of these terms or begin with one of these prefixes. In English, a stem
    /// begins like its word, except for irregular forms.
    #[must_use]
    pub fn initials<'p>(self, terms_and_prefixes: impl Iterator<Item = &'p str>) -> Initials {
        if self.language != Language::English {
            return Initials::ALL;
        }
        let mut initials = Initials(0);
        for term in terms_and_prefixes {
            let forms = self.irregular_stems().into_iter().flatten().filter(|(_, stem)| *stem == term);
            for word in forms.map(|(form, _)| *form).chain([term]) {
                initials.0 |= word.bytes().next().and_then(Initials::bit).unwrap_or(0);
            }
        }
        initials
    }

    /// Returns all terms of a text, in order.
    #[must_use]
    pub fn tokens(self, text: &str) -> Vec<Token> {
        self.tokens_with(text, Initials::ALL, |_, _| true)
    }

    /// Returns the terms of a text for which the condition is true, in order. The condition gets each term and its unstemmed form.
    /// Skips most words with other initials, of which the condition is never true.
    pub fn tokens_with(
        self,
        text: &str,
        initials: Initials,
        condition: impl Fn(&str, &str) -> bool,
    ) -> Vec<Token> {
        let mut tokens = Vec::new();
        self.visit(text, initials, |occurrence| {
            let Occurrence { term, unstemmed, range, position, is_unigram, .. } = occurrence;
            if condition(term, unstemmed) {
                let (term, unstemmed) = (Arc::clone(term), Arc::clone(unstemmed));
                tokens.push(Token { term, unstemmed, range, position, is_unigram });
            }
        });
        tokens
    }

    /// Calls a function with the terms of a text, in the order of their first occurrences. Repeats a term if words that are written
    /// differently have it, such as `ferry` and `Ferries`.
    pub fn for_each_new_term(self, text: &str, mut function: impl FnMut(&str)) {
        let mut seen = foldhash::HashSet::default();
        self.visit(text, Initials::ALL, |Occurrence { term, is_repeated, .. }| {
            if !is_repeated.unwrap_or_else(|| !seen.insert(Arc::clone(term))) {
                function(term);
            }
        });
    }

    /// Calls a function with each term of a text, in order, except those of words with other initials.
    fn visit(self, text: &str, initials: Initials, mut visitor: impl FnMut(Occurrence<'_>)) {
        RecentWords::with(self, |recent| {
            let mut position = 0;
            for Segment { range, is_word } in segments(text) {
                if is_word {
                    let raw = text.get(range.clone()).unwrap_or_default();
                    if initials.exclude(raw) {
                        position += 1;
                        continue;
                    }
                    recent.with_terms(raw, |terms, is_repeated| {
                        for (term, unstemmed) in terms {
                            let range = range.clone();
                            visitor(Occurrence {
                                term,
                                unstemmed,
                                range,
                                position,
                                is_unigram: false,
                                is_repeated,
                            });
                            position += 1;
                        }
                    });
                    continue;
                }
                let character = |range: Range<usize>| {
                    let raw = text.get(range.clone())?;
                    let term =
                        recent.with_terms(raw, |terms, _| terms.first().map(|(term, _)| Arc::clone(term)));
                    term.map(|character| (character, range))
                };
                let characters: Vec<_> = characters(text, range).into_iter().filter_map(character).collect();
                let mut visit = |term: &Arc<str>, range, position, is_unigram| {
                    visitor(Occurrence {
                        term,
                        unstemmed: term,
                        range,
                        position,
                        is_unigram,
                        is_repeated: None,
                    });
                };
                for (at, (character, range)) in characters.iter().enumerate() {
                    if let Some((next, end)) = characters.get(at + 1) {
                        let bigram = Arc::from(format!("{character}{next}"));
                        visit(&bigram, range.start..end.end, position, false);
                    }
                    visit(character, range.clone(), position, characters.len() > 1);
                    position += 1;
                }
            }
        });
    }

    fn word_terms(self, raw: &str) -> impl Iterator<Item = (Arc<str>, Arc<str>)> {
        word_parts(raw).filter_map(move |part| {
            let unstemmed = normalize(part);
            let stem = self.stem(&unstemmed);
            let shared: Arc<str> = Arc::from(&*unstemmed);
            let term = if *stem == *unstemmed { Arc::clone(&shared) } else { Arc::from(&*stem) };
            (!term.is_empty()).then_some((term, shared))
        })
    }

    /// Returns the terms of words that say little about a text, such as articles and pronouns of the language.
    #[must_use]
    pub fn stop_terms(self) -> StopTerms {
        static STOP_TERMS: Mutex<Vec<(Analyzer, StopTerms)>> = Mutex::new(Vec::new());
        let known = || STOP_TERMS.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            known().iter().find(|(analyzer, _)| *analyzer == self).map(|(_, terms)| Arc::clone(terms));
        if let Some(terms) = found {
            return terms;
        }
        // Without the lock, because the analysis of the words can give way to another computation.
        let terms = Arc::new(self.compute_stop_terms());
        known().push((self, Arc::clone(&terms)));
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

    /// Returns the stem of a normalized word.
    pub(super) fn stem(self, unstemmed: &str) -> Cow<'_, str> {
        if let Some(stem) = self.irregular_stems().and_then(|stems| stems.get(unstemmed)) {
            return Cow::Borrowed(stem);
        }
        let rules = self.language.rules().filter(|_| !unstemmed.contains(char::is_numeric));
        let stem = rules.map(|(_, algorithm)| Stemmer::new(algorithm).stem(unstemmed));
        stem.filter(|stem| !stem.is_empty()).unwrap_or(Cow::Borrowed(unstemmed))
    }
}

/// Splits a word at its apostrophes and drops short parts: `Ada's`, `they're` and `l'eau` become Ada, they and eau.
fn word_parts(raw: &str) -> impl Iterator<Item = &str> {
    let is_long = |part: &str| part.chars().nth(2).is_some();
    let any_long = raw.split(APOSTROPHES).any(is_long);
    raw.split(APOSTROPHES).filter(move |part| !any_long || is_long(part))
}

/// The role of a byte when a text is split. Most characters are ASCII, so their properties need not be looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteClass {
    /// ASCII characters between words.
    Separator,
    /// ASCII letters and digits.
    Alphanumeric,
    /// A byte of a character that is not ASCII.
    NotAscii,
}

/// The class of each byte: a lookup in the table is faster than comparisons with the ranges of letters and digits.
#[expect(clippy::indexing_slicing, reason = "the compiler evaluates it")]
static BYTE_CLASSES: [ByteClass; 256] = {
    let mut classes = [ByteClass::Separator; 256];
    let mut byte: u8 = 0;
    loop {
        if byte.is_ascii_alphanumeric() {
            classes[byte as usize] = ByteClass::Alphanumeric;
        } else if !byte.is_ascii() {
            classes[byte as usize] = ByteClass::NotAscii;
        }
        if byte == u8::MAX {
            break classes;
        }
        byte += 1;
    }
};

/// Splits a text into segments.
pub fn segments(text: &str) -> impl Iterator<Item = Segment> + '_ {
    let mut position = 0;
    std::iter::from_fn(move || {
        let class = |byte: &u8| BYTE_CLASSES.get(usize::from(*byte)).copied();
        let rest = text.as_bytes().get(position..)?;
        let skipped = rest.iter().position(|byte| class(byte) != Some(ByteClass::Separator))?;
        let is_ascii = rest.get(skipped).is_some_and(u8::is_ascii);
        let start = position + skipped;
        let start = if is_ascii { start } else { start + text.get(start..)?.find(char::is_alphanumeric)? };
        let is_word = is_ascii || begins_word(text.get(start..)?);
        let rest = text.as_bytes().get(start..)?;
        let length =
            rest.iter().position(|byte| class(byte) != Some(ByteClass::Alphanumeric)).unwrap_or(rest.len());
        position = match rest.get(length) {
            Some(byte) if !byte.is_ascii() || *byte == b'\'' => end_of_segment(text, start, length, is_word)?,
            _ => start + length,
        };
        Some(Segment { range: start..position, is_word })
    })
}

/// Returns the position after the segment that begins at `start`. Its first `known_length` bytes are known to belong to it.
fn end_of_segment(text: &str, start: usize, known_length: usize, is_word: bool) -> Option<usize> {
    let rest = text.get(start..)?;
    let continues = |(at, c): (usize, char)| {
        (c.is_alphanumeric() && is_unspaced_script(c) != is_word)
            || is_non_ascii_mark(c)
            || (is_word && APOSTROPHES.contains(&c) && rest.get(at + c.len_utf8()..).is_some_and(begins_word))
    };
    let others = rest.get(known_length..)?.char_indices();
    let mut others = others.map(|(at, c)| (known_length + at, c));
    let end = others.find(|character| !continues(*character));
    Some(start + end.map_or(rest.len(), |(at, _)| at))
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
        tokens.iter().filter(|token| !token.is_unigram).map(|token| token.term.to_string()).collect()
    }

    #[test]
    fn recent_words_have_a_limit() {
        let mut recent = RecentWords { analyzer: Some(Analyzer::default()), ..RecentWords::default() };
        recent.with_terms(&"7".repeat(MAX_KEPT_BYTES + 1), |_, _| ());
        assert!(recent.newer.is_empty());
        for number in 0..3 * MAX_NEWER_WORDS {
            recent.with_terms(&number.to_string(), |_, _| ());
            recent.with_terms("again", |_, _| ());
        }
        assert!(recent.newer.len() <= MAX_NEWER_WORDS && recent.older.len() <= MAX_NEWER_WORDS);
        assert!(recent.newer.contains_key("again"));
    }

    #[test]
    fn each_word_of_a_text_is_new_once() {
        let new_terms = |text: &str| {
            let mut terms = Vec::new();
            Analyzer::default().for_each_new_term(text, |term| terms.push(term.to_owned()));
            terms
        };
        for _ in 0..2 {
            assert_eq!(
                new_terms("a ferry, the ferry and a Boat-boat's"),
                ["a", "ferri", "the", "and", "boat", "boat"]
            );
            assert_eq!(new_terms("東京、東京 x"), ["東京", "東", "京", "x"]);
            let long = "7".repeat(MAX_KEPT_BYTES + 1);
            assert_eq!(new_terms(&format!("{long} {long}")), ["7".repeat(MAX_TERM_CHARS)]);
        }
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
        assert_eq!(Analyzer::default().version(), "english-2");
        for language in [Language::None, Language::English, Language::Turkish] {
            let analyzer = Analyzer::new(language);
            assert_eq!(Analyzer::parse_version(&analyzer.version()), Some(analyzer));
        }
        assert_eq!(Analyzer::new(Language::None).version(), "none-1");
        let first = Analyzer::parse_version("english-1").expect("a version that indexes use");
        assert_eq!(first.version(), "english-1");
        // Words of the other version are not reused.
        let of = |analyzer: Analyzer, text: &str| analyzer.tokens(text)[0].term.to_string();
        assert_eq!(
            (of(Analyzer::default(), "went"), of(first, "went")),
            ("go".to_owned(), "went".to_owned())
        );
        for label in ["", "off", "english", "english-0", "english-3", "german-2", "klingon-1", "English-1"] {
            assert_eq!(Analyzer::parse_version(label), None, "{label}");
        }
    }
}
