//! Which passages to take: those that together cover most of what the conversation is about.
//!
//! The value of a set of passages is the weight of the terms it covers, a term counting less each time it comes
//! again (Lin and Bilmes, *A Class of Submodular Functions for Document Summarization*, ACL 2011). Taking the best
//! passage again and again is then within 1 − 1/e of the best set, keeps redundancy low by itself, and compares
//! no two passages with each other. Gains only ever fall, and that of a passage is at most the sum of its parts':
//! a heap with lazy updates begins with these sums, computes few gains at all, and the time is that of reading the
//! text.

use super::terms::{Bag, Terms, index};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;

/// What is left of a term's weight each time that it was covered before.
const AGAIN: f64 = 0.4;
/// A passage only repeats unless at least this part of its weight is terms that no picked passage has.
const NOVEL: f64 = 0.15;
/// In a passage of several sentences, each must add at least this part of what they add on the mean: otherwise it is
/// one of those that only open or close a message, or repeats, and the passage without it is as good.
const SHARE: f64 = 0.3;
/// Beyond this many words a passage gains nothing by its length: about twice a sentence of edited English prose.
const LONG: u32 = 48;

/// A sentence as part of passages.
#[derive(Debug)]
pub(super) struct Part {
    /// Its terms.
    pub(super) bag: Bag,
    /// What its place, its form and its source make of its worth: a factor.
    pub(super) factor: f64,
}

#[derive(Debug)]
struct Offer {
    gain: f64,
    passage: usize,
    /// How many were taken when the gain was computed; before that it is an upper bound.
    round: Option<usize>,
}

impl Ord for Offer {
    fn cmp(&self, other: &Self) -> Ordering {
        // Among equals the earliest, so that the result depends on nothing else.
        self.gain.total_cmp(&other.gain).then(other.passage.cmp(&self.passage))
    }
}
impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Offer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Offer {}

/// The best passages, each a range of `parts`, that together take up at most `budget`; no two share a part. What a
/// passage takes up is asked only of those about to be taken. Never one without terms, and never none while any has
/// terms: where none fits, it is the best one.
pub(super) fn pick(
    parts: &[Part],
    passages: &[Range<usize>],
    terms: &Terms,
    budget: usize,
    size: impl Fn(&Range<usize>) -> usize,
) -> Vec<Range<usize>> {
    let mut coverage = Coverage::new(terms);
    let alone: Vec<f64> = parts.iter().map(|part| coverage.weight(part)).collect();
    let bound = |passage: &Range<usize>| alone.get(passage.clone()).unwrap_or_default().iter().sum();
    let mut offers: BinaryHeap<Offer> = passages
        .iter()
        .enumerate()
        .map(|(number, passage)| Offer { gain: bound(passage), passage: number, round: None })
        .collect();
    let mut used = vec![false; parts.len()];
    let (mut taken, mut left) = (Vec::new(), budget);
    let mut too_large = None;
    while left > 0 {
        let Some(best) = offers.pop() else { break };
        let Some(passage) = passages.get(best.passage) else { continue };
        let Some(inside) = parts.get(passage.clone()) else { continue };
        if used.get(passage.clone()).is_some_and(|used| used.contains(&true)) {
            continue;
        }
        if best.round != Some(taken.len()) {
            if let Some(gain) = coverage.gain(inside) {
                offers.push(Offer { gain, round: Some(taken.len()), ..best });
            }
            continue;
        }
        let Some(rest) = left.checked_sub(size(passage)) else {
            too_large = too_large.or(Some(passage.clone()));
            continue;
        };
        left = rest;
        coverage.take(inside);
        used.iter_mut().take(passage.end).skip(passage.start).for_each(|used| *used = true);
        taken.push(passage.clone());
    }
    if taken.is_empty() {
        taken.extend(too_large);
    }
    taken
}

/// What the passages taken so far say of each term.
struct Coverage<'a> {
    terms: &'a Terms,
    weights: Vec<f64>,
    /// What is left of each weight.
    left: Vec<f64>,
}

impl<'a> Coverage<'a> {
    fn new(terms: &'a Terms) -> Self {
        let weights = terms.weights();
        Self { terms, left: weights.clone(), weights }
    }

    /// The gain of a part where nothing is covered yet.
    fn weight(&self, part: &Part) -> f64 {
        let weigh = |id: &u32| self.weights.get(index(*id)).copied().unwrap_or_default();
        self.terms.of(&part.bag).iter().map(weigh).sum::<f64>() * part.factor
    }

    /// What a passage would add; `None`: it only repeats.
    fn gain(&mut self, passage: &[Part]) -> Option<f64> {
        let (mut gain, mut least, mut whole, mut new) = (0.0, f64::INFINITY, 0.0, 0.0);
        let (mut words, mut count) = (0, 0.0);
        // The parts repeat each other, too: each is taken for as long as the next ones are looked at.
        let mut before = Vec::new();
        for part in passage {
            let mut added = 0.0;
            for id in self.terms.of(&part.bag) {
                let weight = self.weights.get(index(*id)).copied().unwrap_or_default();
                let Some(left) = self.left.get_mut(index(*id)) else { continue };
                whole += weight;
                added += *left;
                new += if *left < weight { 0.0 } else { weight };
                before.push((index(*id), *left));
                *left *= AGAIN;
            }
            added *= part.factor;
            gain += added;
            least = least.min(added);
            words += part.bag.words;
            count += 1.0;
        }
        for (id, value) in before.into_iter().rev() {
            if let Some(left) = self.left.get_mut(id) {
                *left = value;
            }
        }
        let worthy = new >= whole * NOVEL && least * count >= gain * SHARE;
        let gain = gain * f64::from(LONG) / f64::from(words.max(LONG));
        (gain > 0.0 && worthy).then_some(gain)
    }

    fn take(&mut self, passage: &[Part]) {
        for id in passage.iter().flat_map(|part| self.terms.of(&part.bag)) {
            if let Some(left) = self.left.get_mut(index(*id)) {
                *left *= AGAIN;
            }
        }
    }
}
