//! Selects the messages that are worth parsing: the newest messages of each word of the query, however common the word is.

use crate::domain::id::TenantId;
use crate::domain::search::MessageRef;
use crate::domain::search::index_terms::TermQuery;
use crate::domain::search::query::{Query, QueryWord};
use crate::domain::search::rank;
use crate::service::to_i64;
use crate::storage::SearchFilter;
use crate::storage::{IndexMatch, MAX_MATCHES, Store, StoreError};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Number of candidates that are parsed and ranked at once. With 300, which take twice as long, the recall of a conversation is the same,
/// and among three conversations 0.765 instead of 0.763 (`PRECIS_DATA`).
pub(super) const MAX_RANKED: usize = 150;
/// Maximum number of candidates in total.
const MAX_CANDIDATES: usize = 1000;

/// Possible hits of a query.
pub(super) struct Candidates {
    /// Most promising first.
    pub(super) messages: Vec<MessageRef>,
    /// Weight of each word of the query.
    pub(super) weights: Vec<f64>,
    /// Number of messages that pass the filter.
    pub(super) all: i64,
}

/// Selects candidates. If the query has phrases, they are the messages with all words of the phrases.
pub(super) async fn select_candidates(
    store: &Store,
    tenant: &TenantId,
    filter: &SearchFilter,
    query: &Query,
) -> Result<Candidates, StoreError> {
    let required = query.phrases.iter().flatten().map(|(_, pattern)| pattern.index_terms());
    let required: Vec<_> = required.collect();
    let of_word = |word: &QueryWord| TermQuery(vec![word.pattern.index_terms()]);
    let mut queries: Vec<TermQuery> = query.words.iter().map(of_word).collect();
    // All messages that pass the filter.
    queries.push(TermQuery::default());
    if !required.is_empty() {
        queries.push(TermQuery(required));
    }
    let mut by_word = store.find_matches(tenant, filter, &queries).await?;
    let required = by_word.split_off(query.words.len() + 1).pop();
    let newest = by_word.pop().unwrap_or_default();
    let frequencies = Frequencies::new(&newest, &by_word);
    let weight = |found: &Vec<IndexMatch>| rank::weight(frequencies.of(found), frequencies.all);
    let weights: Vec<f64> = by_word.iter().map(weight).collect();
    Ok(Candidates { messages: most_promising(by_word, &weights, required), weights, all: frequencies.all })
}

/// The number of messages with a word. If a word has more matches than are looked up, it is estimated from the time in which its newest
/// ones came in, compared with that of the newest messages of the filter.
struct Frequencies {
    /// Number of messages that pass the filter.
    all: i64,
    /// The positions of the newest messages that pass the filter.
    newest: Option<(i64, i64)>,
}

impl Frequencies {
    fn new(newest: &[IndexMatch], by_word: &[Vec<IndexMatch>]) -> Self {
        let span = span(newest).filter(|_| newest.len() >= MAX_MATCHES);
        let Some((first, last)) = span else { return Self { all: to_i64(newest.len()), newest: None } };
        let oldest = by_word.iter().flatten().map(|found| found.position).fold(first, i64::min);
        Self { all: scale(newest.len(), last - oldest, last - first), newest: span }
    }

    fn of(&self, found: &[IndexMatch]) -> i64 {
        match (self.newest, span(found)) {
            (Some((first, last)), Some((first_found, _))) if found.len() >= MAX_MATCHES => {
                scale(usize::try_from(self.all).unwrap_or(usize::MAX), last - first, last - first_found)
                    .clamp(to_i64(found.len()), self.all)
            }
            _ => to_i64(found.len()),
        }
    }
}

/// Returns the least and the greatest position.
fn span(found: &[IndexMatch]) -> Option<(i64, i64)> {
    let positions = || found.iter().map(|found| found.position);
    positions().min().zip(positions().max())
}

/// Multiplies a number of messages by the ratio of two spans of positions.
fn scale(count: usize, numerator: i64, denominator: i64) -> i64 {
    let scaled =
        i128::from(to_i64(count)) * i128::from(numerator.max(0) + 1) / i128::from(denominator.max(0) + 1);
    i64::try_from(scaled).unwrap_or(i64::MAX)
}

/// Returns the messages with the greatest sums of weights, or those of the required ones; the newest first among equal sums.
fn most_promising(
    by_word: Vec<Vec<IndexMatch>>,
    weights: &[f64],
    required: Option<Vec<IndexMatch>>,
) -> Vec<MessageRef> {
    let mut sums: HashMap<MessageRef, (f64, i64)> = HashMap::new();
    for (found, weight) in by_word.into_iter().zip(weights) {
        for IndexMatch { message, position } in found {
            sums.entry(message).or_insert((0.0, position)).0 += weight;
        }
    }
    let mut messages: Vec<(f64, Reverse<i64>, MessageRef)> = match required {
        Some(required) => {
            let sum = |message: &MessageRef| sums.get(message).map_or(0.0, |(sum, _)| *sum);
            let scored = |IndexMatch { message, position }| (sum(&message), Reverse(position), message);
            required.into_iter().map(scored).collect()
        }
        None => {
            sums.into_iter().map(|(message, (sum, position))| (sum, Reverse(position), message)).collect()
        }
    };
    messages.sort_unstable_by(|(a_sum, a_place, a), (b_sum, b_place, b)| {
        b_sum.total_cmp(a_sum).then_with(|| (a_place, Reverse(a)).cmp(&(b_place, Reverse(b))))
    });
    messages.truncate(MAX_CANDIDATES);
    messages.into_iter().map(|(.., message)| message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::SessionId;

    /// Returns matches at positions up to `last`, at a distance from each other, newest first.
    fn matches(last: i64, distance: i64, count: usize) -> Vec<IndexMatch> {
        let session = SessionId::new("s").expect("an id");
        let found = |index: i64| {
            let position = last - index * distance;
            IndexMatch { message: MessageRef { session: session.clone(), seq: position }, position }
        };
        (0..to_i64(count)).map(found).collect()
    }

    #[test]
    fn frequency_is_exact_or_estimated_from_the_newest_matches() {
        let few = Frequencies::new(&matches(50, 1, 50), &[]);
        assert_eq!((few.all, few.of(&matches(50, 5, 7))), (50, 7));
        let rare = matches(100_000, 1000, 100);
        let many = Frequencies::new(&matches(100_000, 1, MAX_MATCHES), std::slice::from_ref(&rare));
        assert!((98_000..=101_000).contains(&many.all), "{}", many.all);
        assert_eq!(many.of(&rare), 100);
        let half = many.of(&matches(100_000, 2, MAX_MATCHES));
        assert!((49_000..=51_000).contains(&half), "{half}");
        assert_eq!(many.of(&matches(100_000, 1, MAX_MATCHES)), many.all);
    }
}
