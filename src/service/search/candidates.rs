//! Selects the messages that are worth parsing: the newest messages of each word of the query, however common the word is.

use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::index_terms::TermQuery;
use crate::domain::search::matcher::TextMatch;
use crate::domain::search::query::{Query, QueryWord};
use crate::domain::search::rank::{self, Candidate};
use crate::service::to_i64;
use crate::storage::StoreError;
use crate::storage::search::{IndexEntry, IndexMatches, IndexSnapshot, SearchFilter};

/// Number of candidates that are parsed and ranked at once. With 300, which take twice as long, the recall of a conversation is the same,
/// and among three conversations 0.765 instead of 0.763 (`PRECIS_DATA`).
pub(super) const MAX_RANKED: usize = 150;
/// Number of messages looked up for each word, and maximum number of candidates in total.
const MAX_CANDIDATES: usize = 1000;

/// Possible hits of a query.
pub(super) struct Candidates {
    /// Most promising first.
    pub(super) entries: Vec<IndexEntry>,
    /// Weight of each word of the query.
    pub(super) weights: Vec<f64>,
    /// Number of messages that pass the filter.
    pub(super) messages: i64,
}

/// Selects candidates. If the query has phrases, they are the messages with all words of the phrases. `unindexed` are messages
/// that count for the frequencies of words, besides those of the index.
pub(super) async fn select_candidates(
    index: &mut IndexSnapshot,
    filter: &SearchFilter,
    analyzer: Analyzer,
    query: &Query,
    unindexed: &[Candidate],
) -> Result<Candidates, StoreError> {
    let required = query.phrases.iter().flatten().map(|(_, pattern)| pattern.index_terms(analyzer));
    let required: Vec<_> = required.collect();
    let of_word = |word: &QueryWord| TermQuery(vec![word.pattern.index_terms(analyzer)]);
    let mut queries: Vec<TermQuery> = query.words.iter().map(of_word).collect();
    // All messages that pass the filter.
    queries.push(TermQuery::default());
    if !required.is_empty() {
        queries.push(TermQuery(required));
    }
    let mut by_word = index.lookup(filter, &queries, MAX_CANDIDATES).await?;
    let required = by_word.split_off(query.words.len() + 1).pop();
    let all = by_word.pop().unwrap_or_default();
    let weights = weights(all.frequency, &by_word, unindexed);
    let messages = all.frequency + to_i64(unindexed.len());
    Ok(Candidates { entries: most_promising(by_word, &weights, required), weights, messages })
}

/// Returns the weight of each word.
fn weights(all: i64, by_word: &[IndexMatches], unindexed: &[Candidate]) -> Vec<f64> {
    // Excluded messages have no words and are not allowed; nor are others, if the query has phrases.
    let unindexed = || unindexed.iter().map(|message| &message.text_match);
    let total = all + to_i64(unindexed().filter(|found| found.is_allowed || found.has_word()).count());
    let weight = |(word, found): (usize, &IndexMatches)| {
        let has_word = |found: &&TextMatch| found.frequencies.get(word).is_some_and(|count| *count > 0);
        rank::weight(found.frequency + to_i64(unindexed().filter(has_word).count()), total)
    };
    by_word.iter().enumerate().map(weight).collect()
}

/// Returns the entries with the greatest sums of weights, or those of the required ones.
fn most_promising(
    by_word: Vec<IndexMatches>,
    weights: &[f64],
    required: Option<IndexMatches>,
) -> Vec<IndexEntry> {
    let mut sums: foldhash::HashMap<IndexEntry, f64> = foldhash::HashMap::default();
    for (found, weight) in by_word.into_iter().zip(weights) {
        for entry in found.entries {
            *sums.entry(entry).or_default() += weight;
        }
    }
    let mut entries: Vec<(f64, IndexEntry)> = match required {
        Some(required) => {
            let sum = |entry: &IndexEntry| sums.get(entry).copied().unwrap_or(0.0);
            required.entries.into_iter().map(|entry| (sum(&entry), entry)).collect()
        }
        None => sums.into_iter().map(|(entry, sum)| (sum, entry)).collect(),
    };
    entries.sort_unstable_by(|(a_sum, a), (b_sum, b)| b_sum.total_cmp(a_sum).then(a.cmp(b)));
    entries.truncate(MAX_CANDIDATES);
    entries.into_iter().map(|(_, entry)| entry).collect()
}
