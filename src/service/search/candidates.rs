//! Which messages are worth reading.
//!
//! How much is read is bounded, whatever is asked for: a look at the newest messages tells which words are common.
//! Candidates are drawn by the others, of which few messages have each; where these are too few, the newest messages that
//! have the common ones are walked to.

use super::{RANKED, limit};
use crate::domain::id::TenantId;
use crate::domain::search::lexemes::{TermPattern, TermQuery};
use crate::domain::search::query::{Query, Word};
use crate::domain::search::rank;
use crate::service::{Error, MemoryService};
use crate::storage::search::{MessageRef, SearchFilter, TermStatistics};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::slice::from_ref;

/// Messages that tell which words are common.
const SAMPLE: i64 = 1000;
/// A word that more than one in so many messages have is a common one, unless no more than [`RANKED`] have it. On Postgres,
/// drawing by a word reads a page of the table for each message that has it, 2 to 10 µs each, and walking to a message
/// reads all others between, 1 µs each: for 10,000 of a million, drawing takes two to three times as long.
const COMMON: i64 = 100;
/// Where all words of a query are common, those draw that at most so many times as many messages have as have the rarest.
const ALIKE: i64 = 4;
/// Messages drawn for each word, at most, and candidates in all.
const DRAWN: usize = 1000;
/// Messages that are walked over, at most: as many as hold [`RANKED`] of a word that is just common.
const WALKED: i64 = 30_000;

/// What may be a hit.
pub(super) struct Candidates {
    /// The most promising first.
    pub(super) places: Vec<MessageRef>,
    /// What each word of the query weighs.
    pub(super) weights: Vec<f64>,
}

impl MemoryService {
    /// Candidates for so many hits at least, if there are so many.
    pub(super) async fn candidates(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        query: &Query,
        wanted: usize,
    ) -> Result<Candidates, Error> {
        let words: Vec<TermQuery> = query.words.iter().map(Word::probe).collect();
        let must: Vec<_> = query.phrases.iter().flat_map(|phrase| phrase.probe().0).collect();
        let must = (!must.is_empty()).then_some(TermQuery(must));
        let probes: Vec<TermQuery> = words.iter().chain(&must).cloned().collect();
        let sample = self.store.term_statistics(tenant, scope, &probes, SAMPLE).await?;
        let mut drawn: BTreeMap<usize, Vec<MessageRef>> = BTreeMap::new();
        let places = if let Some(must) = must {
            // What a hit must have narrows it down the most.
            if is_rare(&sample, words.len()) {
                self.store.lookup_terms(tenant, scope, from_ref(&must), limit(DRAWN)).await?.concat()
            } else {
                self.store.scan_recent(tenant, scope, &must, WALKED, limit(DRAWN)).await?
            }
        } else {
            let (rare, common): (Vec<usize>, Vec<usize>) =
                (0..words.len()).partition(|word| is_rare(&sample, *word));
            if !rare.is_empty() {
                let by: Vec<TermQuery> = rare.iter().filter_map(|word| words.get(*word)).cloned().collect();
                drawn.extend(
                    rare.into_iter().zip(self.store.lookup_terms(tenant, scope, &by, limit(DRAWN)).await?),
                );
            }
            let found: HashSet<&MessageRef> = drawn.values().flatten().collect();
            if found.len() >= wanted || common.is_empty() {
                Vec::new()
            } else {
                // Few have the rare ones: one that nobody ever said must not hide what there is of the others.
                let any = TermQuery(vec![alike(&sample, &words, &common).flatten().cloned().collect()]);
                self.store.scan_recent(tenant, scope, &any, WALKED, limit(RANKED)).await?
            }
        };
        let weight = |word| {
            let found = drawn.get(&word).map(Vec::len);
            rank::weight(frequency(&sample, scope, word, found), sample.messages)
        };
        let weights: Vec<f64> = (0..query.words.len()).map(weight).collect();
        let lists =
            drawn.into_iter().map(|(word, list)| (list, weights.get(word).copied().unwrap_or_default()));
        let places = best(lists.chain([(places, 0.0)]));
        Ok(Candidates { places, weights })
    }
}

/// How many messages there are, if so many of the sample are of the kind.
fn of_all(sample: &TermStatistics, with: i64) -> i64 {
    let all = i128::from(with) * i128::from(sample.messages) / i128::from(sample.rows.max(1));
    i64::try_from(all).unwrap_or(i64::MAX)
}

/// Whether few messages in scope have what the probe asks for. Of somebody who has said nothing lately, all is rare.
fn is_rare(sample: &TermStatistics, probe: usize) -> bool {
    let with = sample.in_scope.get(probe).copied().unwrap_or_default();
    sample.rows < SAMPLE || of_all(sample, with) <= limit(RANKED).max(sample.messages / COMMON)
}

/// Of common words, what those are looked for by that are not far more so than the rarest of them.
fn alike<'a>(
    sample: &TermStatistics,
    words: &'a [TermQuery],
    common: &[usize],
) -> impl Iterator<Item = &'a Vec<TermPattern>> {
    let with = |word: &usize| sample.in_scope.get(*word).copied().unwrap_or_default();
    let most = ALIKE * common.iter().map(with).min().unwrap_or_default();
    let alike: Vec<&TermQuery> =
        common.iter().filter(|word| with(word) <= most).filter_map(|word| words.get(*word)).collect();
    alike.into_iter().flat_map(|TermQuery(groups)| groups)
}

/// How many messages have a word: counted, where all that have it were drawn, else out of the sample.
fn frequency(sample: &TermStatistics, scope: &SearchFilter, word: usize, drawn: Option<usize>) -> i64 {
    let estimated = of_all(sample, sample.with.get(word).copied().unwrap_or_default());
    let is_all = *scope == SearchFilter { session: scope.session.clone(), ..SearchFilter::default() };
    match drawn {
        _ if sample.messages <= sample.rows => estimated,
        Some(drawn) if is_all && drawn < DRAWN => limit(drawn),
        Some(drawn) => estimated.max(limit(drawn)),
        None => estimated,
    }
}

/// Those on most lists, by what the lists weigh; the newest among equals.
fn best(lists: impl Iterator<Item = (Vec<MessageRef>, f64)>) -> Vec<MessageRef> {
    let mut weights: HashMap<MessageRef, f64> = HashMap::new();
    for (list, weight) in lists {
        for place in list {
            *weights.entry(place).or_default() += weight;
        }
    }
    let mut places: Vec<(f64, MessageRef)> =
        weights.into_iter().map(|(place, weight)| (weight, place)).collect();
    places.sort_by(|(better, one), (worse, other)| worse.total_cmp(better).then_with(|| other.cmp(one)));
    places.truncate(DRAWN);
    places.into_iter().map(|(_, place)| place).collect()
}
