//! Selects the messages that are worth parsing.
//!
//! The number of rows read is bounded for every query. A sample of the newest messages shows which words of the query are
//! common. Rare words are looked up in the index. If that yields too few candidates, a scan over the newest messages adds
//! messages with the common words.

use crate::domain::id::TenantId;
use crate::domain::search::lexemes::{TermPattern, TermQuery};
use crate::domain::search::query::{Clause, Query};
use crate::domain::search::rank;
use crate::service::to_i64;
use crate::storage::search::{MessageRef, SearchFilter, TermStatistics};
use crate::storage::{Store, StoreError};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::slice::from_ref;
use std::sync::Arc;

/// Number of candidates that are parsed and ranked at once.
pub(super) const MAX_RANKED: usize = 300;
/// Newest messages from which term frequencies are estimated.
const SAMPLE_SIZE: i64 = 1000;
/// A word is common if more than one in this many messages contains it, and more than [`MAX_RANKED`] messages do. On
/// Postgres, a lookup reads a page of the table for each matching message, which takes 2 to 10 µs; a scan reads every
/// message, which takes 1 µs each. For a word in 10,000 of a million messages, a lookup takes two to three times as long
/// as a scan.
const COMMON_WORD_RATIO: i64 = 100;
/// If all words are common, the scan ignores words that are this many times as frequent as the rarest one.
const MAX_FREQUENCY_RATIO: i64 = 4;
/// Maximum number of messages looked up for each word, and of candidates in total.
const MAX_CANDIDATES: usize = 1000;
/// Maximum number of messages scanned: enough to contain [`MAX_RANKED`] matches of a barely common word.
const MAX_SCANNED: i64 = 30_000;

/// Possible hits of a query.
pub(super) struct Candidates {
    /// Most promising first.
    pub(super) refs: Vec<MessageRef>,
    /// Weight of each word of the query.
    pub(super) weights: Vec<f64>,
}

/// Selects candidates for at least `wanted` hits, if there are as many.
pub(super) async fn select_candidates(
    store: &Arc<Store>,
    tenant: &TenantId,
    filter: &SearchFilter,
    query: &Query,
    wanted: usize,
) -> Result<Candidates, StoreError> {
    let words: Vec<TermQuery> = query.words.iter().map(Clause::term_query).collect();
    let required: Vec<_> = query.phrases.iter().flat_map(|phrase| phrase.term_query().0).collect();
    let required = (!required.is_empty()).then_some(TermQuery(required));
    let all: Vec<TermQuery> = words.iter().chain(&required).cloned().collect();
    let statistics = store.term_statistics(tenant, filter, &all, SAMPLE_SIZE).await?;
    let max_candidates = to_i64(MAX_CANDIDATES);
    let mut by_word: BTreeMap<usize, Vec<MessageRef>> = BTreeMap::new();
    let others = if let Some(required) = required {
        // The required terms are the most selective ones.
        if is_rare(&statistics, words.len()) {
            store.lookup_terms(tenant, filter, from_ref(&required), max_candidates).await?.concat()
        } else {
            store.scan_recent(tenant, filter, &required, MAX_SCANNED, max_candidates).await?
        }
    } else {
        let (rare, common): (Vec<usize>, Vec<usize>) =
            (0..words.len()).partition(|word| is_rare(&statistics, *word));
        if !rare.is_empty() {
            let queries: Vec<TermQuery> = rare.iter().filter_map(|word| words.get(*word)).cloned().collect();
            let found = store.lookup_terms(tenant, filter, &queries, max_candidates).await?;
            by_word.extend(rare.into_iter().zip(found));
        }
        let found: HashSet<&MessageRef> = by_word.values().flatten().collect();
        if found.len() >= wanted || common.is_empty() {
            Vec::new()
        } else {
            // A rare word without matches must not hide the matches of the common words.
            let patterns = scannable_patterns(&statistics, &words, &common);
            store
                .scan_recent(tenant, filter, &TermQuery(vec![patterns]), MAX_SCANNED, to_i64(MAX_RANKED))
                .await?
        }
    };
    let weight = |word| {
        let found = by_word.get(&word).map(Vec::len);
        rank::weight(document_frequency(&statistics, filter, word, found), statistics.total)
    };
    let weights: Vec<f64> = (0..query.words.len()).map(weight).collect();
    let weighted_lists =
        by_word.into_iter().map(|(word, list)| (list, weights.get(word).copied().unwrap_or_default()));
    let refs = best_candidates(weighted_lists.chain([(others, 0.0)]));
    Ok(Candidates { refs, weights })
}

/// Extrapolates a count in the sample to all messages.
fn extrapolate(statistics: &TermStatistics, count: i64) -> i64 {
    let all = i128::from(count) * i128::from(statistics.total) / i128::from(statistics.sampled.max(1));
    i64::try_from(all).unwrap_or(i64::MAX)
}

/// Returns `true` if few messages that pass the filter match a term query. Every word is rare for a user without recent
/// messages.
fn is_rare(statistics: &TermStatistics, index: usize) -> bool {
    let count = statistics.matching_filter.get(index).copied().unwrap_or_default();
    statistics.sampled < SAMPLE_SIZE
        || extrapolate(statistics, count) <= to_i64(MAX_RANKED).max(statistics.total / COMMON_WORD_RATIO)
}

/// Returns the patterns of the common words whose frequency is close to that of the rarest one.
fn scannable_patterns(
    statistics: &TermStatistics,
    words: &[TermQuery],
    common: &[usize],
) -> Vec<TermPattern> {
    let count = |word: &usize| statistics.matching_filter.get(*word).copied().unwrap_or_default();
    let max_count = MAX_FREQUENCY_RATIO * common.iter().map(count).min().unwrap_or_default();
    let selected = common.iter().filter(|word| count(word) <= max_count).filter_map(|word| words.get(*word));
    selected.flat_map(|TermQuery(groups)| groups).flatten().cloned().collect()
}

/// Returns the number of messages that contain a word: exact if all of them were looked up, else estimated.
fn document_frequency(
    statistics: &TermStatistics,
    filter: &SearchFilter,
    word: usize,
    found: Option<usize>,
) -> i64 {
    let estimate = extrapolate(statistics, statistics.matching.get(word).copied().unwrap_or_default());
    let is_unfiltered =
        *filter == SearchFilter { session: filter.session.clone(), ..SearchFilter::default() };
    match found {
        _ if statistics.total <= statistics.sampled => estimate,
        Some(found) if is_unfiltered && found < MAX_CANDIDATES => to_i64(found),
        Some(found) => estimate.max(to_i64(found)),
        None => estimate,
    }
}

/// Returns the messages with the greatest total weight of the lists that contain them, newest first among equals.
fn best_candidates(weighted_lists: impl Iterator<Item = (Vec<MessageRef>, f64)>) -> Vec<MessageRef> {
    let mut weights: HashMap<MessageRef, f64> = HashMap::new();
    for (list, weight) in weighted_lists {
        for message_ref in list {
            *weights.entry(message_ref).or_default() += weight;
        }
    }
    let mut refs: Vec<(f64, MessageRef)> =
        weights.into_iter().map(|(message_ref, weight)| (weight, message_ref)).collect();
    refs.sort_by(|(a_weight, a), (b_weight, b)| b_weight.total_cmp(a_weight).then_with(|| b.cmp(a)));
    refs.truncate(MAX_CANDIDATES);
    refs.into_iter().map(|(_, message_ref)| message_ref).collect()
}
