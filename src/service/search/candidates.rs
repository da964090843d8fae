//! Selects the messages that are worth parsing: the newest messages of each word of the query, however common the word is.

use crate::domain::id::TenantId;
use crate::domain::search::lexemes::TermQuery;
use crate::domain::search::matcher::TextMatch;
use crate::domain::search::query::{Clause, Query};
use crate::domain::search::rank::{self, Candidate};
use crate::service::to_i64;
use crate::storage::search::{MessageRef, SearchFilter, TermMatches};
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
    let required: Vec<_> = query.phrases.iter().flat_map(|phrase| phrase.term_query().0).collect();
    let mut queries: Vec<TermQuery> = query.words.iter().map(Clause::term_query).collect();
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
    let weight = |(word, found): (usize, &TermMatches)| {
        let has_word = |found: &&TextMatch| found.frequencies.get(word).is_some_and(|count| *count > 0);
        rank::weight(
            estimate_frequency(filter, &all, found) + to_i64(unindexed().filter(has_word).count()),
            total,
        )
    };
    let weights: Vec<f64> = by_word.iter().enumerate().map(weight).collect();
    let mut candidates: HashMap<MessageRef, f64> = HashMap::new();
    let required = others.next().map(|required| required.refs);
    candidates.extend(required.iter().flatten().map(|message_ref| (message_ref.clone(), 0.0)));
    for (found, weight) in by_word.into_iter().zip(&weights) {
        for message_ref in found.refs {
            if required.is_none() {
                *candidates.entry(message_ref).or_default() += weight;
            } else if let Some(sum) = candidates.get_mut(&message_ref) {
                *sum += weight;
            }
        }
    }
    Ok(Candidates { refs: most_promising(candidates), weights })
}

/// Returns the number of messages that match a query: exact if all of them were found, else estimated from the part of all
/// messages that the search for them went through.
fn estimate_frequency(filter: &SearchFilter, all: &TermMatches, found: &TermMatches) -> i64 {
    let matches = to_i64(found.refs.len());
    if found.refs.len() < MAX_CANDIDATES {
        return matches;
    }
    let (newest, oldest) = if filter.session.is_some() {
        let seqs = all.refs.iter().map(|message_ref| message_ref.seq);
        (seqs.max().unwrap_or_default(), found.refs.last().map_or(0, |message_ref| message_ref.seq))
    } else {
        (all.newest_id, found.oldest_id)
    };
    let estimate = i128::from(matches) * i128::from(newest) / i128::from((newest - oldest + 1).max(1));
    i64::try_from(estimate).unwrap_or(i64::MAX).max(matches)
}

/// Returns the messages with the greatest weights, newest first among equals.
fn most_promising(candidates: HashMap<MessageRef, f64>) -> Vec<MessageRef> {
    let mut refs: Vec<(MessageRef, f64)> = candidates.into_iter().collect();
    refs.sort_by(|(a, a_weight), (b, b_weight)| b_weight.total_cmp(a_weight).then_with(|| b.cmp(a)));
    refs.truncate(MAX_CANDIDATES);
    refs.into_iter().map(|(message_ref, _)| message_ref).collect()
}
