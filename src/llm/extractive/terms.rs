//! Terms: the words of a conversation as numbers, each with a weight.
//!
//! A term has a high weight if several messages contain it, but not all: rare words are incidental, and ubiquitous ones
//! are grammar. No list of stop words is needed, so no language is favoured. In short texts the counts are not sufficient;
//! there the length of a word helps, because frequent words are short (Zipf's law of abbreviation, which holds for all
//! examined languages).

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::ops::Range;
use unicode_segmentation::UnicodeSegmentation;

/// Length in characters above which the weight of a word does not increase.
const MAX_WEIGHTED_CHARS: u32 = 10;

/// The distinct terms of one sentence; see [`Terms::of`].
#[derive(Clone, Debug)]
pub(super) struct TermBag {
    range: Range<usize>,
    /// Number of words, including repeated ones.
    pub(super) words: u32,
}

/// Size of the table of character pairs, as a power of two. It is small enough for the processor's cache, which makes a
/// million characters cheap, and large enough that nine of ten pairs of a long conversation (100,000 characters) have an
/// entry of their own. Pairs that share an entry count as one term, like homonyms.
const PAIR_BITS: u32 = 18;

/// All terms of a conversation. They are numbered in the order of their first occurrence, so that the result does not
/// depend on the order of a hash map.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// Numbers by hash. Without the strings, a million terms are cheap. In the unlikely case of a collision, two words
    /// count as one term.
    ids: HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>,
    /// Has a random key, so that nobody can construct collisions. The numbers do not depend on it.
    hasher: RandomState,
    /// Number plus one by the hash of two characters; 0 for an unused entry. Empty before the first pair.
    pairs: Vec<u32>,
    entries: Vec<Term>,
    /// The terms of all bags, one after another.
    bag_members: Vec<u32>,
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
        let (start, mut words) = (self.bag_members.len(), 0);
        // The previous character if it may start a pair, because its script has no spaces; and the last such character.
        let (mut pair_start, mut last_char) = (None::<char>, None);
        let mut text = String::new();
        let mut rest = sentence;
        while let Some(first) = rest.chars().next() {
            if is_ideographic(first) {
                // The most frequent case of the code below, without Unicode's tables.
                words += 1;
                last_char = Some(first);
                if let Some(previous) = pair_start.replace(first) {
                    self.count_pair(previous, first);
                }
                rest = rest.get(first.len_utf8()..).unwrap_or_default();
                continue;
            }
            let (piece, after) = if rest.is_ascii() {
                (rest, "")
            } else {
                rest.split_at(rest.find(is_ideographic).unwrap_or(rest.len()))
            };
            rest = after;
            let mut end = 0;
            for (at, word) in piece.unicode_word_indices() {
                words += 1;
                let previous = pair_start.take().filter(|_| at == end);
                end = at + word.len();
                if let Some(c) = word.chars().next().filter(|c| is_script_without_spaces(*c)) {
                    (pair_start, last_char) = (Some(c), Some(c));
                    if let Some(previous) = previous {
                        self.count_pair(previous, c);
                    }
                    continue;
                }
                text.clear();
                let word = without_clitics(word);
                if word.is_ascii() {
                    text.push_str(word);
                    text.make_ascii_lowercase();
                } else {
                    text.extend(word.chars().flat_map(char::to_lowercase));
                }
                self.count_word(&text);
            }
            pair_start = pair_start.filter(|_| end == piece.len());
        }
        // A sentence of a single ideograph.
        if let (true, Some(c)) = (self.bag_members.len() == start, last_char) {
            self.count_word(c.encode_utf8(&mut [0; 4]));
        }
        TermBag { range: start..self.bag_members.len(), words }
    }

    fn count_word(&mut self, text: &str) {
        let next = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        let id = *self.ids.entry(self.hasher.hash_one(text)).or_insert(next);
        let characters = || u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        self.count(id, characters);
    }

    fn count_pair(&mut self, first: char, second: char) {
        if self.pairs.is_empty() {
            self.pairs = vec![0; 1 << PAIR_BITS];
        }
        // Fibonacci hashing of both code points. The key is fixed, so that collisions are deterministic.
        let both = (u64::from(u32::from(first)) << 32) | u64::from(u32::from(second));
        let hash = (both ^ (both >> 27)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PAIR_BITS);
        let next = u32::try_from(self.entries.len()).unwrap_or(u32::MAX - 1);
        let slot = usize::try_from(hash).ok().and_then(|slot| self.pairs.get_mut(slot));
        let Some(slot) = slot else { return };
        if *slot == 0 {
            *slot = next + 1;
        }
        let id = *slot - 1;
        self.count(id, || 2);
    }

    /// Counts one occurrence of a term, which may be a new one.
    fn count(&mut self, id: u32, characters: impl Fn() -> u32) {
        if index(id) == self.entries.len() {
            self.entries.push(Term { characters: characters(), ..Term::default() });
        }
        let Some(term) = self.entries.get_mut(index(id)) else {
            return;
        };
        if term.last_document != self.documents {
            term.last_document = self.documents;
            term.frequency += self.document_weight;
        }
        if term.last_bag != self.bags {
            term.last_bag = self.bags;
            self.bag_members.push(id);
        }
    }

    /// Returns the distinct terms of a sentence in the order of their first occurrence.
    pub(super) fn of(&self, bag: &TermBag) -> &[u32] {
        self.bag_members.get(bag.range.clone()).unwrap_or_default()
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

/// A hasher for keys that are hashes already.
#[derive(Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        // Not called for `u64` keys.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
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

pub(super) fn index(id: u32) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

/// Returns `true` for ideographs and syllables that Unicode treats as words of one character.
fn is_ideographic(c: char) -> bool {
    matches!(c, '\u{4e00}'..='\u{9fff}' | '\u{3041}'..='\u{3096}' | '\u{3400}'..='\u{4dbf}')
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
        (terms.of(&bag).len(), bag.words)
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
        let weight = |word: &str| weights[index(terms.ids[&terms.hasher.hash_one(word)])];
        assert!(weight("river") > weight("cloud"), "{weights:?}");
        assert!(weight("river") > weight("the"), "{weights:?}");
    }
}
