//! The content words of sentences, and their weights.

use crate::domain::search::analyzer::Language;
use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;
use unicode_segmentation::UnicodeSegmentation as _;

/// Factor for numbers, names and identifiers.
const NAME_FACTOR: f64 = 2.0;
/// Longer words count by this many characters only, so that the endings of a long word do not make it another one.
const MAX_STEM_CHARS: usize = 7;

/// A content word of a sentence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Term {
    pub(super) id: usize,
    /// A number, a name or an identifier.
    pub(super) is_name: bool,
}

/// The content words of all sentences.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// All nouns have capitals, as in German, so that a capital marks no name.
    has_capital_nouns: bool,
    ids: HashMap<String, usize>,
    /// Number of documents with each term, and the last one.
    counts: Vec<(u32, u32)>,
    documents: u32,
}

impl Terms {
    /// Creates the terms of a conversation or a summary with these texts.
    pub(super) fn new<'t>(texts: impl IntoIterator<Item = &'t str>) -> Self {
        /// Of the words of German texts, about a quarter have capitals; of those of other languages, about an eighth.
        const MIN_CAPITALS: f64 = 0.2;
        let (mut words, mut capitals) = (0_u32, 0_u32);
        for word in texts.into_iter().flat_map(str::unicode_words) {
            words += 1;
            capitals += u32::from(word.starts_with(char::is_uppercase));
        }
        Self { has_capital_nouns: f64::from(capitals) > MIN_CAPITALS * f64::from(words), ..Self::default() }
    }

    /// Starts a document, which is a message or a line of a summary.
    pub(super) fn begin_document(&mut self) {
        self.documents += 1;
    }

    /// Returns the distinct content words of a sentence of the current document.
    pub(super) fn read(&mut self, sentence: &str) -> Vec<Term> {
        let mut terms = Vec::new();
        let has_capital_nouns = self.has_capital_nouns;
        for_each_content_word(sentence, has_capital_nouns, |word, is_name| {
            self.count(word, is_name, &mut terms);
        });
        terms
    }

    /// Returns the share of the weight of the content words of a text that the documents have. Returns `None` for a single word.
    pub(super) fn support(&self, text: &str) -> Option<f64> {
        let mut words = HashSet::new();
        for_each_content_word(text, self.has_capital_nouns, |word, _| {
            words.insert(word);
        });
        let (mut known, mut total) = (0.0, 0.0);
        for word in &words {
            let term = self.ids.get(word).map(|id| Term { id: *id, is_name: false });
            known += term.map_or(0.0, |term| self.weight(term));
            total += term.map_or_else(|| f64::from(self.documents).ln_1p(), |term| self.weight(term));
        }
        (words.len() > 1).then(|| known / total)
    }

    fn count(&mut self, text: String, is_name: bool, terms: &mut Vec<Term>) {
        let next = self.counts.len();
        let id = *self.ids.entry(text).or_insert(next);
        if id == next {
            self.counts.push((0, 0));
        }
        if let Some((count, last)) = self.counts.get_mut(id).filter(|(_, last)| *last != self.documents) {
            (*count, *last) = (*count + 1, self.documents);
        }
        match terms.iter_mut().find(|term| term.id == id) {
            Some(term) => term.is_name |= is_name,
            None => terms.push(Term { id, is_name }),
        }
    }

    /// Returns the number of different terms.
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Returns the weight of a term: `ln(1 + N / n)` for one that `n` of `N` documents have, and more for names.
    pub(super) fn weight(&self, term: Term) -> f64 {
        let count = self.counts.get(term.id).map_or(1, |(count, _)| *count);
        let rarity = (f64::from(self.documents) / f64::from(count.max(1))).ln_1p();
        if term.is_name { rarity * NAME_FACTOR } else { rarity }
    }
}

/// Calls a function with each content word of a text, and with `true` for a number, a name or an identifier.
fn for_each_content_word(text: &str, has_capital_nouns: bool, mut function: impl FnMut(String, bool)) {
    // The last character of a script without spaces, and the position after it.
    let mut last: Option<(char, usize)> = None;
    for (number, (at, word)) in text.unicode_word_indices().enumerate() {
        if let Some(c) = word.chars().next().filter(|c| is_script_without_spaces(*c)) {
            let pair = last.replace((c, at + word.len())).filter(|(_, end)| *end == at);
            // Pairs of Hiragana are mostly endings and particles.
            if let Some((previous, _)) =
                pair.filter(|(previous, _)| !is_hiragana(c) || !is_hiragana(*previous))
            {
                function(String::from_iter([previous, c]), false);
            }
            continue;
        }
        let word = without_clitics(word);
        let lower = word.to_lowercase();
        if !FUNCTION_WORDS.contains(lower.as_str()) {
            let is_identifier = is_identifier(word);
            let is_name = is_identifier || (number > 0 && !has_capital_nouns && is_capitalized(word));
            // The same word can be a name in one place and not in another, but its form tells an identifier everywhere.
            let stem = if is_identifier { lower } else { lower.chars().take(MAX_STEM_CHARS).collect() };
            function(stem, is_name);
        }
    }
}

/// Words such as `the` and `und`, of all languages of the search. The few that are content words of another language are lost.
static FUNCTION_WORDS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    Language::CODES.iter().filter_map(|code| stop_words::lookup(code)).flatten().copied().collect()
});

/// Returns `true` for words with a digit, an inner capital or an underscore.
fn is_identifier(word: &str) -> bool {
    word.contains(char::is_numeric) || word.chars().skip(1).any(|c| c.is_uppercase() || c == '_')
}

/// Returns `true` for a word with an initial capital and more than one letter.
fn is_capitalized(word: &str) -> bool {
    let mut chars = word.chars();
    chars.next().is_some_and(char::is_uppercase) && chars.next().is_some_and(char::is_alphanumeric)
}

/// Returns the longest part of a word between apostrophes: `Ada` of `Ada's`, `they` of `they're`, `eau` of `l'eau`.
fn without_clitics(word: &str) -> &str {
    let parts = word.split(['\'', '’']);
    // `max_by_key` returns the last of equal elements, but the first one is wanted.
    parts.rev().max_by_key(|part| part.len()).unwrap_or(word)
}

fn is_hiragana(c: char) -> bool {
    ('\u{3040}'..='\u{309f}').contains(&c)
}

/// Returns `true` for scripts without spaces between words. Unicode's default word boundaries then are between all
/// characters, because they use no dictionary; pairs of characters take the place of words, as in search engines.
fn is_script_without_spaces(c: char) -> bool {
    matches!(c,
        '\u{e00}'..='\u{eff}' // Thai, Lao
        | '\u{1000}'..='\u{109f}' // Burmese
        | '\u{1780}'..='\u{17ff}' // Khmer
        | '\u{3040}'..='\u{309f}' // Hiragana; Katakana comes in words
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' // Han
        | '\u{20000}'..='\u{3ffff}')
}
