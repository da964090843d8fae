//! Selects the messages that are worth parsing: the newest messages of each word of the query, however common the word is.

use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
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
    pub(super) entries: Vec<IndexEntry>,
    /// Weight of each word of the query.
    pub(super) weights: Vec<f64>,
}

/// Selects candidates. If the query has phrases, they are the messages with all words of the phrases. `unindexed` are messages
/// that count for the frequencies of words, besides those of the index.
pub(super) async fn select_candidates(
    store: &Arc<Store>,
    tenant: &TenantId,
    filter: &SearchFilter,
    analyzer: Analyzer,
    query: &Query,
    unindexed: &[Candidate],
) -> Result<Candidates, StoreError> {
    let required = query.phrases.iter().flatten().map(|(_, pattern)| pattern.index_terms(analyzer));
    let required: Vec<_> = required.collect();
    let of_word = |word: &QueryWord| TermQuery(vec![word.pattern.index_terms(analyzer)]);
    let mut queries: Vec<TermQuery> = query.words.iter().map(of_word).collect();
    queries.push(all_messages(filter));
    if !required.is_empty() {
        queries.push(TermQuery(required));
    }
    let mut by_word = store.lookup_terms(tenant, filter, &queries, to_i64(MAX_CANDIDATES)).await?;
    let required = by_word.split_off(query.words.len() + 1).pop();
    let all = by_word.pop().unwrap_or_default();
    let positions = Positions::read(store, tenant, filter, &all, &by_word).await?;
    let weights = weights(&positions, &all, &by_word, unindexed);
    Ok(Candidates { entries: most_promising(by_word, &weights, required), weights })
}

/// Returns the query for all messages that pass the filter, which adds the lexemes of session, user and role.
fn all_messages(filter: &SearchFilter) -> TermQuery {
    let SearchFilter { session, user, role, .. } = filter;
    let has_lexeme = session.is_some() || user.is_some() || role.is_some();
    if has_lexeme { TermQuery::default() } else { TermQuery::any_message() }
}

/// Returns the weight of each word.
fn weights(
    positions: &Positions,
    all: &[IndexEntry],
    by_word: &[Vec<IndexEntry>],
    unindexed: &[Candidate],
) -> Vec<f64> {
    // Excluded messages have no words and are not allowed; nor are others, if the query has phrases.
    let unindexed = || unindexed.iter().map(|message| &message.text_match);
    let total = positions.estimate_frequency(all, all)
        + to_i64(unindexed().filter(|found| found.is_allowed || found.has_word()).count());
    let weight = |(word, found): (usize, &Vec<IndexEntry>)| {
        let has_word = |found: &&TextMatch| found.frequencies.get(word).is_some_and(|count| *count > 0);
        let matching =
            positions.estimate_frequency(all, found) + to_i64(unindexed().filter(has_word).count());
        rank::weight(matching, total)
    };
    by_word.iter().enumerate().map(weight).collect()
}

/// Returns the entries with the greatest sums of weights, or those of the required ones.
fn most_promising(
    by_word: Vec<Vec<IndexEntry>>,
    weights: &[f64],
    required: Option<Vec<IndexEntry>>,
) -> Vec<IndexEntry> {
    let mut sums: foldhash::HashMap<i64, (f64, Option<IndexEntry>)> = foldhash::HashMap::default();
    for (found, weight) in by_word.into_iter().zip(weights) {
        for entry in found {
            let (sum, first) = sums.entry(entry.id).or_default();
            *sum += weight;
            *first = Some(entry);
        }
    }
    let mut entries: Vec<(f64, IndexEntry)> = match required {
        Some(required) => {
            let sum = |entry: &IndexEntry| sums.get(&entry.id).map_or(0.0, |(sum, _)| *sum);
            required.into_iter().map(|entry| (sum(&entry), entry)).collect()
        }
        None => sums.into_values().filter_map(|(sum, entry)| Some((sum, entry?))).collect(),
    };
    entries.sort_unstable_by(|(a_sum, a), (b_sum, b)| b_sum.total_cmp(a_sum).then(b.id.cmp(&a.id)));
    entries.truncate(MAX_CANDIDATES);
    entries.into_iter().map(|(_, entry)| entry).collect()
}

/// Positions of entries in the history.
struct Positions {
    /// The `seq` of entries, if the filter names a session. Otherwise, positions are ids.
    seqs: Option<HashMap<i64, i64>>,
    /// The position from which frequencies are estimated. The entries of all tenants share the ids, so outside a session it is the
    /// oldest entry that was found: the filter need not match anything before.
    first: i64,
}

impl Positions {
    /// Reads the positions from which frequencies are estimated.
    async fn read(
        store: &Arc<Store>,
        tenant: &TenantId,
        filter: &SearchFilter,
        all: &[IndexEntry],
        by_word: &[Vec<IndexEntry>],
    ) -> Result<Self, StoreError> {
        if filter.session.is_none() {
            let oldest = by_word.iter().map(Vec::as_slice).chain([all]).filter_map(<[_]>::last);
            let first = oldest.map(|entry| entry.id).min().unwrap_or(1);
            return Ok(Self { seqs: None, first });
        }
        let lasts = by_word.iter().map(Vec::as_slice).chain([all]).filter_map(last_of_many);
        let entries: Vec<IndexEntry> = all.first().into_iter().chain(lasts).cloned().collect();
        let located = store.locate_entries(tenant, filter, &entries).await?;
        let seqs = located.into_iter().map(|(id, message)| (id, message.seq)).collect();
        Ok(Self { seqs: Some(seqs), first: 1 })
    }

    fn of(&self, entry: &IndexEntry) -> Option<i64> {
        self.seqs.as_ref().map_or(Some(entry.id), |seqs| seqs.get(&entry.id).copied())
    }

    /// Returns the number of messages that match a query: exact if all of them were found, else estimated from the part of all
    /// messages that the search for them went through.
    fn estimate_frequency(&self, all: &[IndexEntry], found: &[IndexEntry]) -> i64 {
        let matches = to_i64(found.len());
        let newest = all.first().and_then(|entry| self.of(entry));
        let oldest = last_of_many(found).and_then(|entry| self.of(entry));
        let Some((newest, oldest)) = newest.zip(oldest) else { return matches };
        extrapolate(matches, newest - oldest + 1, newest - self.first + 1)
    }
}

/// Returns the number of matches at `all` positions if there are so many at the newest `searched` of them.
fn extrapolate(matches: i64, searched: i64, all: i64) -> i64 {
    let estimate = i128::from(matches) * i128::from(all) / i128::from(searched.max(1));
    i64::try_from(estimate).unwrap_or(i64::MAX).max(matches)
}

/// Returns the last entry if there may be more.
fn last_of_many(found: &[IndexEntry]) -> Option<&IndexEntry> {
    found.get(MAX_CANDIDATES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_is_extrapolated_from_the_searched_positions() {
        assert_eq!(extrapolate(1000, 2000, 10_000), 5000);
        assert_eq!(extrapolate(1000, 2000, 2000), 1000);
        assert_eq!(extrapolate(1000, 2000, 0), 1000);
        assert_eq!(extrapolate(i64::MAX, 1, i64::MAX), i64::MAX);
    }
}
