//! Selects the messages that are worth parsing: the newest messages of each word of the query, however common the word is.

use crate::domain::id::TenantId;
use crate::domain::search::MessageRef;
use crate::domain::search::lexemes::TermQuery;
use crate::domain::search::matcher::TextMatch;
use crate::domain::search::query::{Query, QueryWord};
use crate::domain::search::rank::{self, Candidate};
use crate::service::to_i64;
use crate::storage::search::{IndexEntry, SearchFilter};
use crate::storage::{Store, StoreError};
use std::collections::HashMap;
use std::sync::Arc;

/// Number of candidates that are parsed and ranked at once.
pub(super) const MAX_RANKED: usize = 300;
/// Maximum number of messages looked up for each word, and of candidates in total.
const MAX_CANDIDATES: usize = 1000;

/// Possible hits of a query.
pub(super) struct Candidates {
    /// Most promising first.
    pub(super) refs: Vec<MessageRef>,
    /// Weight of each word of the query.
    pub(super) weights: Vec<f64>,
}

/// Selects candidates. If the query has phrases, they are the messages with all words of the phrases. `unindexed` are messages
/// that count for the frequencies of words, besides those of the index.
pub(super) async fn select_candidates(
    store: &Arc<Store>,
    tenant: &TenantId,
    filter: &SearchFilter,
    query: &Query,
    unindexed: &[Candidate],
) -> Result<Candidates, StoreError> {
    let required = query.phrases.iter().flatten().map(|(_, pattern)| pattern.index_terms());
    let required: Vec<_> = required.collect();
    let of_word = |word: &QueryWord| TermQuery(vec![word.pattern.index_terms()]);
    let mut queries: Vec<TermQuery> = query.words.iter().map(of_word).collect();
    queries.push(TermQuery::any_message());
    if !required.is_empty() {
        queries.push(TermQuery(required));
    }
    let mut by_word = store.lookup_terms(tenant, filter, &queries, to_i64(MAX_CANDIDATES)).await?;
    let mut others = by_word.split_off(query.words.len()).into_iter();
    let all = others.next().unwrap_or_default();
    // Excluded messages have no words and are not allowed; nor are others, if the query has phrases.
    let unindexed = || unindexed.iter().map(|message| &message.text_match);
    let total = estimate_frequency(filter, &all, &all)
        + to_i64(unindexed().filter(|found| found.is_allowed || found.has_word()).count());
    let weight = |(word, found): (usize, &Vec<IndexEntry>)| {
        let has_word = |found: &&TextMatch| found.frequencies.get(word).is_some_and(|count| *count > 0);
        rank::weight(
            estimate_frequency(filter, &all, found) + to_i64(unindexed().filter(has_word).count()),
            total,
        )
    };
    let weights: Vec<f64> = by_word.iter().enumerate().map(weight).collect();
    let mut sums: HashMap<i64, f64> = HashMap::new();
    for (found, weight) in by_word.iter().zip(&weights) {
        for entry in found {
            *sums.entry(entry.id).or_default() += weight;
        }
    }
    let sum = |entry: &IndexEntry| sums.get(&entry.id).copied().unwrap_or_default();
    let mut entries = others.next().unwrap_or_else(|| by_word.concat());
    entries.sort_by(|a, b| sum(b).total_cmp(&sum(a)).then_with(|| b.id.cmp(&a.id)));
    entries.dedup_by_key(|entry| entry.id);
    let refs = entries.into_iter().take(MAX_CANDIDATES).map(|entry| entry.message).collect();
    Ok(Candidates { refs, weights })
}

/// Returns the number of messages that match a query: exact if all of them were found, else estimated from the part of all
/// messages that the search for them went through.
fn estimate_frequency(filter: &SearchFilter, all: &[IndexEntry], found: &[IndexEntry]) -> i64 {
    let matches = to_i64(found.len());
    let (Some(first), Some(last)) = (all.first(), found.get(MAX_CANDIDATES - 1)) else { return matches };
    let (newest, oldest) = if filter.session.is_some() {
        (all.iter().map(|entry| entry.message.seq).max().unwrap_or_default(), last.message.seq)
    } else {
        (first.id, last.id)
    };
    let estimate = i128::from(matches) * i128::from(newest) / i128::from((newest - oldest + 1).max(1));
    i64::try_from(estimate).unwrap_or(i64::MAX).max(matches)
}
