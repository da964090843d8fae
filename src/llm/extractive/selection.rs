//! Selects the sentences that add most weight for their length.
//!
//! A term counts once, so a repetition adds almost nothing. The gain of a sentence therefore never increases, and a heap with lazy updates
//! computes few gains: the gain in the heap is an upper bound. A sentence that a later one replaces counts little.

use super::terms::{Term, Terms};
use crate::domain::consolidation::SummaryLimit;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use time::Date;

/// The gain of a sentence is divided by its length to this power. With 1, fragments would win, which are unclear without their context.
const LENGTH_POWER: f64 = 0.8;
/// Factor for a word that the summary has already: it only fills the rest of the summary.
const REPEAT_FACTOR: f64 = 0.03;
/// Factor for a sentence that a later one replaces.
const REPLACED_FACTOR: f64 = 0.05;
/// The share of the weight of a sentence that a later one must have to replace it, if that one says that it corrects something.
const CORRECTED_SHARE: f64 = 0.4;
/// Otherwise, the share of the weight of its words except those names and numbers that the later one lacks, and of all words.
const REPLACED_SHARE: f64 = 0.65;
const MIN_SHARE: f64 = 0.3;
/// Terms of more sentences than this show no common subject.
const MAX_POSTINGS: usize = 64;

/// A line of the summary without its sentences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// The day of the message (UTC), if it is known.
    pub(super) date: Option<Date>,
    /// The speaker, if known.
    pub(super) label: Option<String>,
}

/// A sentence that the summary may contain.
#[derive(Debug)]
pub(super) struct Statement {
    /// The number of its line.
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) terms: Vec<Term>,
    /// Product of the factors for role and form.
    pub(super) factor: f64,
    /// The sentence says that it corrects something.
    pub(super) is_correction: bool,
}

/// Returns the numbers of the best sentences, the best one first. Their sizes, with those of their lines, add up to the limit at most;
/// but one sentence is selected in any case.
pub(super) fn select(
    statements: &[Statement],
    lines: &[Line],
    terms: &Terms,
    limit: SummaryLimit,
) -> Vec<usize> {
    let budget = limit.largest();
    let sizes: Vec<usize> = statements.iter().map(|statement| limit.size(&statement.text).max(1)).collect();
    let replaced = replaced(statements, terms);
    let mut is_covered = vec![false; terms.len()];
    let score = |number: usize, is_covered: &[bool]| -> Option<f64> {
        let (statement, size) = (statements.get(number)?, *sizes.get(number)?);
        let gain = statement.terms.iter().fold(0.0, |sum, term| {
            let is_covered = is_covered.get(term.id).copied().unwrap_or(true);
            sum + terms.weight(*term) * if is_covered { REPEAT_FACTOR } else { 1.0 }
        });
        let factor = if replaced.get(number) == Some(&true) { REPLACED_FACTOR } else { 1.0 };
        let length = f64::from(u32::try_from(size).unwrap_or(u32::MAX)) + LABEL_SIZE;
        Some(gain * factor * statement.factor / length.powf(LENGTH_POWER))
    };
    // Non-negative numbers have the order of their bits. The earliest of equal sentences wins.
    let entry = |number: usize, is_covered: &[bool], round: usize| {
        Some((score(number, is_covered)?.to_bits(), Reverse(number), round))
    };
    let mut heap: BinaryHeap<(u64, Reverse<usize>, usize)> =
        (0..statements.len()).filter_map(|number| entry(number, &is_covered, 0)).collect();
    let (mut selected, mut used) = (Vec::new(), 0);
    let mut has_line = vec![false; lines.len()];
    let (mut dates, mut texts) = (Vec::new(), HashSet::new());
    while let Some((bits, Reverse(number), round)) = heap.pop() {
        if bits == 0 {
            break;
        }
        if round < selected.len() {
            heap.extend(entry(number, &is_covered, selected.len()));
            continue;
        }
        let (Some(statement), Some(size)) = (statements.get(number), sizes.get(number)) else { continue };
        let Some((line, has_line)) = lines.get(statement.line).zip(has_line.get_mut(statement.line)) else {
            continue;
        };
        let label = line.label.as_ref().filter(|_| !*has_line);
        let label = label.map_or(0, |label| limit.size(&format!("{label}: \n")));
        let date = line.date.filter(|date| !dates.contains(date));
        let size = size + label + date.map_or(0, |date| limit.size(&format!("{date}\n")));
        let fits = used + size <= budget || selected.is_empty();
        if !fits || !texts.insert(statement.text.as_str()) {
            continue;
        }
        used += size;
        *has_line = true;
        dates.extend(date);
        selected.push(number);
        for term in &statement.terms {
            if let Some(covered) = is_covered.get_mut(term.id) {
                *covered = true;
            }
        }
    }
    selected
}

/// Size of a line without its sentences, about that of a label.
const LABEL_SIZE: f64 = 2.0;

/// Finds the sentences that a later one replaces: most of their words are the same, but a name or a number is not.
fn replaced(statements: &[Statement], terms: &Terms) -> Vec<bool> {
    let mut replaced = vec![false; statements.len()];
    let mut postings: Vec<Vec<usize>> = vec![Vec::new(); terms.len()];
    let mut shared = vec![0.0; statements.len()];
    for (number, statement) in statements.iter().enumerate() {
        let has_value = statement.terms.iter().any(|term| term.is_name);
        let mut touched = Vec::new();
        if statement.is_correction || has_value {
            for term in &statement.terms {
                let posting = postings.get(term.id).filter(|posting| posting.len() <= MAX_POSTINGS);
                for earlier in posting.into_iter().flatten() {
                    if let Some(sum) = shared.get_mut(*earlier) {
                        touched.push(*earlier);
                        *sum += terms.weight(*term);
                    }
                }
            }
        }
        for earlier in touched {
            let Some(sum) = shared.get_mut(earlier).map(std::mem::take).filter(|sum| *sum > 0.0) else {
                continue;
            };
            let Some(other) = statements.get(earlier).filter(|other| other.line < statement.line) else {
                continue;
            };
            let total: f64 = other.terms.iter().map(|term| terms.weight(*term)).sum();
            let is_lost = |term: &&Term| {
                (term.is_name || statement.is_correction)
                    && !statement.terms.iter().any(|own| own.id == term.id)
            };
            let lost: f64 = other.terms.iter().filter(is_lost).map(|term| terms.weight(*term)).sum();
            let has_subject = if statement.is_correction {
                sum >= CORRECTED_SHARE * total
            } else {
                sum >= REPLACED_SHARE * (total - lost) && sum >= MIN_SHARE * total
            };
            if lost > 0.0
                && has_subject
                && let Some(replaced) = replaced.get_mut(earlier)
            {
                *replaced = true;
            }
        }
        for term in &statement.terms {
            if let Some(posting) = postings.get_mut(term.id) {
                posting.push(number);
            }
        }
    }
    replaced
}
