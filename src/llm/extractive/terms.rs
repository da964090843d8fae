//! What a sentence is about: its words as numbers, each with a weight.
//!
//! A word weighs most when several messages share it but not all of them do: it is then neither chance nor
//! grammar. No list of stop words is needed, so no language is favoured; that frequent words are short (Zipf's law
//! of abbreviation, which holds for all languages examined) settles what counting alone can't in a short text.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::ops::Range;
use unicode_segmentation::UnicodeSegmentation;

/// From this length on, in characters, a longer word says no more.
const LONG_WORD: u32 = 10;

/// The distinct terms of one sentence, as a range of [`Terms::of`].
#[derive(Clone, Debug)]
pub(super) struct Bag {
    range: Range<usize>,
    /// All its words, repeated ones included.
    pub(super) words: u32,
}

/// How many terms the pairs of characters share, as a power of two: few enough for the table of them to stay in a
/// processor's cache, which makes a million of characters cheap; enough for nine in ten of the pairs of a long
/// conversation (100,000 characters) to have one of their own. Pairs that share a term count as one, like
/// homonyms.
const PAIR_BITS: u32 = 18;

/// Every term of a conversation, numbered in the order of first appearance, so that nothing ever depends on the
/// order of a hash map.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// By hash alone, without the string: that is what makes a million of terms cheap. Should two terms ever share
    /// a hash, they count as one, and no harm is done.
    ids: HashMap<u64, u32, BuildHasherDefault<AsIs>>,
    /// Keyed at random, so that no text can be made to collide; numbers never depend on it.
    hasher: RandomState,
    /// By a hash of the two characters, the number plus one; 0: none yet. Empty until there is a pair.
    pairs: Vec<u32>,
    /// Per term.
    known: Vec<Term>,
    /// The terms of all bags, one bag after another.
    in_bags: Vec<u32>,
    /// How many bags there are.
    bag: u32,
    /// How many documents there are.
    document: u32,
    /// The weight of the current one.
    document_weight: f64,
    /// The weight of all of them.
    documents: f64,
}

#[derive(Debug, Default)]
struct Term {
    /// Summed weight of the documents that have it.
    frequency: f64,
    characters: u32,
    last_document: u32,
    last_bag: u32,
}

impl Terms {
    /// Begins a document: frequencies count those in which a term occurs, each as much as it weighs.
    pub(super) fn begin_document(&mut self, weight: f64) {
        self.document += 1;
        self.document_weight = weight;
        self.documents += weight;
    }

    /// Reads a sentence of the current document.
    pub(super) fn read(&mut self, sentence: &str) -> Bag {
        self.bag += 1;
        let (begin, mut words) = (self.in_bags.len(), 0);
        // The character before, where it belongs to a script without spaces and thus may begin a pair; and the last.
        let (mut pair, mut lone) = (None::<char>, None);
        let mut text = String::new();
        let mut rest = sentence;
        while let Some(first) = rest.chars().next() {
            if is_ideographic(first) {
                // The most frequent case of what follows, without Unicode's tables.
                words += 1;
                lone = Some(first);
                if let Some(previous) = pair.replace(first) {
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
                let previous = pair.take().filter(|_| at == end);
                end = at + word.len();
                if let Some(c) = word.chars().next().filter(|c| without_spaces(*c)) {
                    (pair, lone) = (Some(c), Some(c));
                    if let Some(previous) = previous {
                        self.count_pair(previous, c);
                    }
                    continue;
                }
                text.clear();
                let word = stem(word);
                if word.is_ascii() {
                    text.push_str(word);
                    text.make_ascii_lowercase();
                } else {
                    text.extend(word.chars().flat_map(char::to_lowercase));
                }
                self.count_word(&text);
            }
            pair = pair.filter(|_| end == piece.len());
        }
        // A single character alone, such as an answer in one ideograph.
        if let (true, Some(c)) = (self.in_bags.len() == begin, lone) {
            self.count_word(c.encode_utf8(&mut [0; 4]));
        }
        Bag { range: begin..self.in_bags.len(), words }
    }

    fn count_word(&mut self, text: &str) {
        let next = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        let id = *self.ids.entry(self.hasher.hash_one(text)).or_insert(next);
        let characters = || u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        self.count(id, characters);
    }

    fn count_pair(&mut self, first: char, second: char) {
        if self.pairs.is_empty() {
            self.pairs = vec![0; 1 << PAIR_BITS];
        }
        // Fibonacci hashing of both code points. The key is fixed: what shares a term must not depend on chance.
        let both = (u64::from(u32::from(first)) << 32) | u64::from(u32::from(second));
        let hash = (both ^ (both >> 27)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PAIR_BITS);
        let next = u32::try_from(self.known.len()).unwrap_or(u32::MAX - 1);
        let slot = usize::try_from(hash).ok().and_then(|slot| self.pairs.get_mut(slot));
        let Some(slot) = slot else { return };
        if *slot == 0 {
            *slot = next + 1;
        }
        let id = *slot - 1;
        self.count(id, || 2);
    }

    /// Counts a term of that number, which may be the next new one.
    fn count(&mut self, id: u32, characters: impl Fn() -> u32) {
        if index(id) == self.known.len() {
            self.known.push(Term { characters: characters(), ..Term::default() });
        }
        let Some(term) = self.known.get_mut(index(id)) else {
            return;
        };
        if term.last_document != self.document {
            term.last_document = self.document;
            term.frequency += self.document_weight;
        }
        if term.last_bag != self.bag {
            term.last_bag = self.bag;
            self.in_bags.push(id);
        }
    }

    /// The distinct terms of a sentence, in order of first appearance.
    pub(super) fn of(&self, bag: &Bag) -> &[u32] {
        self.in_bags.get(bag.range.clone()).unwrap_or_default()
    }

    /// What each term weighs, by its number.
    ///
    /// `ln(1 + f) · ln(1 + N / f) · length`: shared by many documents, but not by all.
    pub(super) fn weights(&self) -> Vec<f64> {
        let weight = |term: &Term| {
            let shared = term.frequency.ln_1p();
            let special = (self.documents / term.frequency).ln_1p();
            shared * special * f64::from(term.characters.min(LONG_WORD))
        };
        self.known.iter().map(weight).collect()
    }
}

/// Takes a hash for what it is.
#[derive(Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        // Not called for the keys of this map; right for any other all the same.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// The longest part of a word between apostrophes: `Ada's`, `they're` and `l'eau` are about Ada, they and eau.
fn stem(word: &str) -> &str {
    if !word.contains(['\'', '’']) {
        return word;
    }
    // Of equals the first, which `max_by` would not take.
    let longer = |a: &&str, b: &&str| a.len().cmp(&b.len()).then(Ordering::Greater);
    word.split(['\'', '’']).max_by(longer).unwrap_or(word)
}

/// A term's number as an index.
pub(super) fn index(id: u32) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

/// Whether a character is one of the ideographs and syllables that are a word to Unicode each.
fn is_ideographic(c: char) -> bool {
    matches!(c, '\u{4e00}'..='\u{9fff}' | '\u{3041}'..='\u{3096}' | '\u{3400}'..='\u{4dbf}')
}

/// Whether a script puts no spaces between words. Unicode's default word borders then fall between all characters
/// (there is no dictionary), and pairs of neighbours stand in for words, as search engines have them.
fn without_spaces(c: char) -> bool {
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
    fn words_are_folded_and_characters_paired() {
        assert_eq!(read("Straße STRASSE straße, the The"), (3, 5));
        assert_eq!(read("数据库 数据"), (2, 5));
        assert_eq!(read("ดี"), (1, 1));
        assert_eq!(read("?! 😀"), (0, 0));
    }

    #[test]
    fn shared_words_outweigh_chance_and_grammar() {
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
