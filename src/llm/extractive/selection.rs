//! Selects the passages that together cover most of the weight of a conversation.
//!
//! The value of a set of passages is the weight of the terms that it covers; a repeated term counts less each time (Lin
//! and Bilmes, *A Class of Submodular Functions for Document Summarization*, ACL 2011). So greedy selection avoids
//! redundancy and needs no pairwise comparison of passages. Its usual bound (1 − 1/e of the optimum) does not apply,
//! because passages differ in size, may not overlap, and are dropped if they are mostly a repetition or have a sentence
//! that adds little. A dropped passage is not considered again; its sentences are candidates of their own. Gains never
//! increase, and the gain of a passage is at most the sum of the gains of its sentences. So a heap with lazy
//! updates starts with these sums and computes only few gains; most of the time is spent on reading the text.

use super::passage::SourceSentence;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Factor of a term's weight for each repetition.
const REPEAT_DISCOUNT: f64 = 0.4;
/// Minimum share of a passage's weight in terms that no selected passage has.
const MIN_NOVELTY: f64 = 0.15;
/// Minimum gain of each sentence of a passage, relative to their mean gain. A sentence below it is a repetition or only
/// opens or closes a message, and the passage without it is as good.
const MIN_SENTENCE_SHARE: f64 = 0.3;
/// Number of words above which a passage gains nothing by its length: about two sentences of edited English prose.
const MAX_SCORED_WORDS: u32 = 48;

/// A passage in the heap: its gain, its number, and the number of passages that were selected when the gain was computed, or
/// `None` for the initial sum. The gain is exact if no passage was selected since, otherwise an upper bound. It is stored as
/// bits, because non-negative numbers have the order of their bits. The earliest of equal passages wins, so that the result
/// is deterministic.
type Candidate = (u64, Reverse<usize>, Option<usize>);

/// Returns the best passages whose sizes add up to at most `budget`. `weights` are those of the terms. Each passage is a
/// range of `sentences`; selected passages do not overlap. `size` is only called for passages that are about to be
/// selected. Passages without terms are never selected. If no passage fits into the budget, the best one is returned
/// alone.
pub(super) fn select(
    sentences: &[SourceSentence<'_>],
    passages: &[Range<usize>],
    weights: Vec<f64>,
    budget: usize,
    size: impl Fn(&Range<usize>) -> usize,
) -> Vec<Range<usize>> {
    let mut coverage = Coverage { discounted: weights.clone(), weights };
    let weights: Vec<f64> = sentences.iter().map(|sentence| coverage.weight(sentence)).collect();
    let upper_bound =
        |passage: &Range<usize>| weights.get(passage.clone()).unwrap_or_default().iter().sum::<f64>();
    let candidates = passages.iter().map(upper_bound).enumerate();
    let mut candidates: BinaryHeap<Candidate> =
        candidates.map(|(number, gain)| (gain.to_bits(), Reverse(number), None)).collect();
    let mut used = vec![false; sentences.len()];
    let (mut selected, mut remaining) = (Vec::new(), budget);
    let mut too_large = None;
    while remaining > 0 {
        let Some((_, Reverse(number), round)) = candidates.pop() else { break };
        let Some(passage) = passages.get(number) else { continue };
        let Some(members) = sentences.get(passage.clone()) else { continue };
        if used.get(passage.clone()).is_some_and(|used| used.contains(&true)) {
            continue;
        }
        if round != Some(selected.len()) {
            if let Some(gain) = coverage.gain(members) {
                candidates.push((gain.to_bits(), Reverse(number), Some(selected.len())));
            }
            continue;
        }
        let Some(rest) = remaining.checked_sub(size(passage)) else {
            too_large = too_large.or(Some(passage.clone()));
            continue;
        };
        remaining = rest;
        coverage.add(members);
        used.iter_mut().take(passage.end).skip(passage.start).for_each(|used| *used = true);
        selected.push(passage.clone());
    }
    if selected.is_empty() {
        selected.extend(too_large);
    }
    selected
}

/// The terms that the selected passages cover.
struct Coverage {
    weights: Vec<f64>,
    /// The discounted weight of each term.
    discounted: Vec<f64>,
}

impl Coverage {
    /// Returns the gain of a sentence before the first selection.
    fn weight(&self, sentence: &SourceSentence<'_>) -> f64 {
        let weight_of = |id: &usize| self.weights.get(*id).copied().unwrap_or_default();
        sentence.bag.terms.iter().map(weight_of).sum::<f64>() * sentence.factor
    }

    /// Returns the gain of a passage, or `None` if it is mostly a repetition.
    fn gain(&mut self, passage: &[SourceSentence<'_>]) -> Option<f64> {
        let (mut gain, mut min_gain, mut total_weight, mut new_weight) = (0.0, f64::INFINITY, 0.0, 0.0);
        let (mut words, mut count) = (0, 0.0);
        // The sentences may repeat each other: the discounts of each apply to the next ones and are undone at the end.
        let mut previous = Vec::new();
        for sentence in passage {
            let mut added = 0.0;
            for id in &sentence.bag.terms {
                let weight = self.weights.get(*id).copied().unwrap_or_default();
                let Some(discounted) = self.discounted.get_mut(*id) else { continue };
                total_weight += weight;
                added += *discounted;
                new_weight += if *discounted < weight { 0.0 } else { weight };
                previous.push((*id, *discounted));
                *discounted *= REPEAT_DISCOUNT;
            }
            added *= sentence.factor;
            gain += added;
            min_gain = min_gain.min(added);
            words += sentence.bag.words;
            count += 1.0;
        }
        for (id, value) in previous.into_iter().rev() {
            if let Some(discounted) = self.discounted.get_mut(id) {
                *discounted = value;
            }
        }
        let is_novel = new_weight >= total_weight * MIN_NOVELTY;
        let is_balanced = min_gain * count >= gain * MIN_SENTENCE_SHARE;
        let gain = gain * f64::from(MAX_SCORED_WORDS) / f64::from(words.max(MAX_SCORED_WORDS));
        (gain > 0.0 && is_novel && is_balanced).then_some(gain)
    }

    /// Discounts the terms of a selected passage.
    fn add(&mut self, passage: &[SourceSentence<'_>]) {
        for id in passage.iter().flat_map(|sentence| &sentence.bag.terms) {
            if let Some(discounted) = self.discounted.get_mut(*id) {
                *discounted *= REPEAT_DISCOUNT;
            }
        }
    }
}
