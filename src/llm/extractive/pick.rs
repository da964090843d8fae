//! Which sentences to take: those that together cover most of what the conversation is about.
//!
//! The value of a set of sentences is the weight of the terms it covers, a term counting less each time it comes
//! again (Lin and Bilmes, *A Class of Submodular Functions for Document Summarization*, ACL 2011). Taking the best
//! sentence again and again is then within 1 − 1/e of the best set, keeps redundancy low by itself, and compares
//! no two sentences with each other: gains only ever fall, so a heap with lazy updates visits few of them twice,
//! and the time is that of reading the text.

use super::terms::{Bag, Terms, index};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// What is left of a term's weight each time that it was covered before.
const AGAIN: f64 = 0.4;
/// A sentence only repeats unless at least this part of its weight is terms that no picked sentence has.
const NOVEL: f64 = 0.15;
/// Beyond this many words a sentence gains nothing by its length: about twice the mean of edited English prose.
const LONG_SENTENCE: u32 = 48;

/// A sentence that can be picked.
#[derive(Debug)]
pub(super) struct Candidate {
    /// Its terms.
    pub(super) bag: Bag,
    /// What its place, its form and its source make of its worth: a factor.
    pub(super) factor: f64,
}

#[derive(Debug)]
struct Offer {
    gain: f64,
    candidate: usize,
    /// How many were taken when the gain was computed.
    round: usize,
}

impl Ord for Offer {
    fn cmp(&self, other: &Self) -> Ordering {
        // Among equals the earliest, so that the result depends on nothing else.
        self.gain.total_cmp(&other.gain).then(other.candidate.cmp(&self.candidate))
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

/// At most `count` of the candidates by their numbers, the best first. Those without terms are never taken.
pub(super) fn pick(candidates: &[Candidate], terms: &Terms, count: usize) -> Vec<usize> {
    let weights = terms.weights();
    let mut covered = vec![1.0_f64; weights.len()];
    let offer = |candidate: &Candidate, covered: &[f64]| {
        let (mut whole, mut left, mut new) = (0.0, 0.0, 0.0);
        for id in terms.of(&candidate.bag) {
            let weight = weights.get(index(*id)).copied().unwrap_or_default();
            let part = covered.get(index(*id)).copied().unwrap_or_default();
            whole += weight;
            left += weight * part;
            new += if part < 1.0 { 0.0 } else { weight };
        }
        let length = f64::from(LONG_SENTENCE) / f64::from(candidate.bag.words.max(LONG_SENTENCE));
        let gain = left * length * candidate.factor;
        (gain > 0.0 && new >= whole * NOVEL).then_some(gain)
    };
    let mut offers: BinaryHeap<Offer> = candidates
        .iter()
        .enumerate()
        .filter_map(|(number, candidate)| {
            offer(candidate, &covered).map(|gain| Offer { gain, candidate: number, round: 0 })
        })
        .collect();
    let mut taken = Vec::new();
    while taken.len() < count {
        let Some(best) = offers.pop() else { break };
        let Some(candidate) = candidates.get(best.candidate) else {
            continue;
        };
        if best.round == taken.len() {
            for id in terms.of(&candidate.bag) {
                if let Some(part) = covered.get_mut(index(*id)) {
                    *part *= AGAIN;
                }
            }
            taken.push(best.candidate);
        } else if let Some(gain) = offer(candidate, &covered) {
            offers.push(Offer { gain, round: taken.len(), ..best });
        }
    }
    taken
}
