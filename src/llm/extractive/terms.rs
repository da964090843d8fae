//! Terms: the words of a conversation as numbers, each with a weight.
//!
//! A term has a high weight if several messages contain it, but not all: rare words are incidental, and ubiquitous ones
//! are grammar. No list of stop words is needed, so no language is favoured. In short texts the counts are not sufficient;
//! there the length of a word helps, because frequent words are short (Zipf's law of abbreviation, which holds for all
//! examined languages).

use std::cmp::Ordering;
use std::collections::HashMap;
use unicode_segmentation::UnicodeSegmentation;

/// Length in characters above which the weight of a word does not increase.
const MAX_WEIGHTED_CHARS: u32 = 10;

/// The terms of one sentence.
#[derive(Clone, Debug, Default)]
pub(super) struct TermBag {
    /// Numbers of the distinct terms in the order of their first occurrence.
    pub(super) terms: Vec<usize>,
    /// Number of words, including repeated ones.
    pub(super) words: u32,
}

/// All terms of a conversation. They are numbered in the order of their first occurrence, so that the result does not
/// depend on the order of a hash map.
#[derive(Debug, Default)]
pub(super) struct Terms {
    ids: HashMap<String, usize>,
    entries: Vec<Term>,
    /// Number of bags.
    bags: u32,
    /// Number of documents.
    documents: u32,
    /// Weight of the current document.
    document_weight: f64,
    /// Weight of all documents.
    total_weight: f64,
}

#[derive(Debug, Default)]
struct Term {
    /// Total weight of the documents that contain the term.
    frequency: f64,
    characters: u32,
    last_document: u32,
    last_bag: u32,
}

impl Terms {
    /// Starts a document, which is a message or a part of a summary. The frequency of a term is the total weight of the
    /// documents that contain it.
    pub(super) fn begin_document(&mut self, weight: f64) {
        self.documents += 1;
        self.document_weight = weight;
        self.total_weight += weight;
    }

    /// Reads a sentence of the current document.
    pub(super) fn read(&mut self, sentence: &str) -> TermBag {
        self.bags += 1;
        let mut bag = TermBag::default();
        // The last character of a script without spaces, and the position after its word.
        let mut last = None;
        for (at, word) in sentence.unicode_word_indices() {
            bag.words += 1;
            let Some(c) = word.chars().next().filter(|c| is_script_without_spaces(*c)) else {
                self.count(&without_clitics(word).to_lowercase(), &mut bag);
                continue;
            };
            if let Some((previous, end)) = last.replace((c, at + word.len()))
                && end == at
            {
                self.count(&String::from_iter([previous, c]), &mut bag);
            }
        }
        // A sentence of a single ideograph.
        if let (true, Some((c, _))) = (bag.terms.is_empty(), last) {
            self.count(&c.to_string(), &mut bag);
        }
        bag
    }

    /// Counts one occurrence of a term, which may be a new one.
    fn count(&mut self, text: &str, bag: &mut TermBag) {
        let id = self.ids.get(text).copied().unwrap_or_else(|| {
            let characters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
            self.entries.push(Term { characters, ..Term::default() });
            self.ids.insert(text.to_owned(), self.entries.len() - 1);
            self.entries.len() - 1
        });
        let Some(term) = self.entries.get_mut(id) else {
            return;
        };
        if term.last_document != self.documents {
            term.last_document = self.documents;
            term.frequency += self.document_weight;
        }
        if term.last_bag != self.bags {
            term.last_bag = self.bags;
            bag.terms.push(id);
        }
    }

    /// Returns the weight of each term by its number: `ln(1 + f) · ln(1 + N / f) · length`, with frequency `f` and total
    /// weight `N`. It is high for terms of many, but not all documents.
    pub(super) fn weights(&self) -> Vec<f64> {
        let weight = |term: &Term| {
            let frequency = term.frequency.ln_1p();
            let specificity = (self.total_weight / term.frequency).ln_1p();
            frequency * specificity * f64::from(term.characters.min(MAX_WEIGHTED_CHARS))
        };
        self.entries.iter().map(weight).collect()
    }
}

/// Returns the longest part of a word between apostrophes: `Ada` of `Ada's`, `they` of `they're`, `eau` of `l'eau`.
fn without_clitics(word: &str) -> &str {
    if !word.contains(['\'', '’']) {
        return word;
    }
    // `max_by` returns the last of equal elements, but the first one is wanted.
    let longer = |a: &&str, b: &&str| a.len().cmp(&b.len()).then(Ordering::Greater);
    word.split(['\'', '’']).max_by(longer).unwrap_or(word)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (usize, u32) {
        let mut terms = Terms::default();
        terms.begin_document(1.0);
        let bag = terms.read(text);
        (bag.terms.len(), bag.words)
    }

    #[test]
    fn words_are_case_folded_and_ideographs_form_pairs() {
        assert_eq!(read("Straße STRASSE straße, the The"), (3, 5));
        assert_eq!(read("数据库 数据"), (2, 5));
        assert_eq!(read("ดี"), (1, 1));
        assert_eq!(read("?! 😀"), (0, 0));
    }

    #[test]
    fn shared_words_outweigh_rare_and_ubiquitous_words() {
        let mut terms = Terms::default();
        for text in ["the river rose", "the river fell", "the cloud sank", "the stone lies"] {
            terms.begin_document(1.0);
            terms.read(text);
        }
        let weights = terms.weights();
        let weight = |word: &str| weights[terms.ids[word]];
        assert!(weight("river") > weight("cloud"), "{weights:?}");
        assert!(weight("river") > weight("the"), "{weights:?}");
    }
}
