//! Finding messages.
//!
//! The store draws candidates by its index, and they are read and ranked here by `domain::search`. How much is read is
//! bounded, whatever is asked for: a look at the newest messages tells which words are common. Candidates are drawn by the
//! others, of which few messages have each; where all are common, the newest messages that have them are walked to.

use super::{Error, MemoryService, StoredMessage};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::search::analysis::Analysis;
use crate::domain::search::index::Probe;
use crate::domain::search::query::{Query as Parsed, Word};
use crate::domain::search::rank::{self, Candidate};
use crate::domain::search::snippet::{Snippet, snippet};
use crate::domain::search::text;
use crate::storage::StoreError;
use crate::storage::search::{Found, Place, Sample, Scope};
use std::collections::HashMap;
use time::OffsetDateTime;

pub use crate::domain::search::query::InvalidQuery;

/// Hits where a query names no number.
pub const DEFAULT_LIMIT: usize = 10;
/// Hits, at most.
pub const MOST: usize = 50;

/// Messages that tell which words are common.
const SAMPLE: i64 = 1000;
/// A word that one in so many messages has is a common one. Drawing by a word costs as much as there are messages that
/// have it, walking to a message that has it as much as there are others between: at 20,000 of a million these are about
/// the same.
const COMMON: i64 = 50;
/// Messages drawn for each word, at most.
const DRAWN: i64 = 1000;
/// Messages that are walked over, at most.
const WALKED: i64 = 20_000;
/// Messages that are read and ranked, at most.
const RANKED: usize = 300;
/// Bytes of them, at most: reading a megabyte takes some 20 ms.
const RANKED_BYTES: i64 = 2 * 1024 * 1024;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Query {
    /// Words, "phrases", -exclusions, prefix*.
    pub text: String,
    /// Only in this session.
    pub session_id: Option<SessionId>,
    /// Only in sessions of this user.
    pub user_id: Option<UserId>,
    /// Only messages of this role.
    pub role: Option<Role>,
    /// Only messages stored at this time or later.
    pub since: Option<OffsetDateTime>,
    /// Only messages stored before this time.
    pub until: Option<OffsetDateTime>,
    /// Hits, at most; never more than [`MOST`].
    pub limit: usize,
    /// Messages before and after each hit.
    pub neighbours: usize,
}

/// A message that was found.
#[derive(Clone, Debug)]
pub struct Hit {
    /// Its session.
    pub session_id: SessionId,
    /// Its place there.
    pub seq: i64,
    /// When it was stored.
    pub created_at: OffsetDateTime,
    /// How good it is, among the hits of this query.
    pub score: f64,
    /// JSON, as the client gave it.
    pub message: String,
    /// Whose message it is.
    pub role: Role,
    /// The best part of it.
    pub snippet: Snippet,
    /// The messages before it, in order.
    pub before: Vec<StoredMessage>,
    /// The messages after it, in order.
    pub after: Vec<StoredMessage>,
}

impl MemoryService {
    /// The best hits, best first, the newest first among equals.
    ///
    /// # Errors
    /// [`Error::NoSearch`], [`Error::InvalidQuery`]
    pub async fn search(&self, tenant: &TenantId, query: Query) -> Result<Vec<Hit>, Error> {
        let analysis = self.rules.search.ok_or(Error::NoSearch)?;
        let parsed = Parsed::parse(analysis, &query.text)?;
        let scope = Scope {
            session: query.session_id.clone(),
            user: query.user_id.clone(),
            role: query.role,
            since: query.since,
            until: query.until,
            without: parsed.excluded_terms(),
        };
        let drawn = self.candidates(tenant, &scope, &parsed).await?;
        let found = self.store.at(tenant, query.user_id.as_ref(), &drawn.places, RANKED_BYTES).await?;
        let bytes = found.iter().map(|found| found.json.len()).sum();
        let (limit, role) = (query.limit.min(MOST), query.role);
        let hits =
            blocking::sized(bytes, move || ranked(analysis, &parsed, &drawn.weights, found, role, limit));
        let mut hits = hits.await?;
        if query.neighbours > 0 && !hits.is_empty() {
            self.add_neighbours(tenant, &mut hits, query.neighbours).await?;
        }
        Ok(hits)
    }

    async fn candidates(&self, tenant: &TenantId, scope: &Scope, query: &Parsed) -> Result<Drawn, Error> {
        let mut probes: Vec<Probe> = query.words.iter().map(Word::probe).collect();
        let words = probes.len();
        let must: Vec<_> = query.phrases.iter().flat_map(|phrase| phrase.probe().0).collect();
        if !must.is_empty() {
            probes.push(Probe(must));
        }
        let sample = self.store.sample(tenant, scope.session.as_ref(), &probes, SAMPLE).await?;
        let rare: Vec<usize> = (0..words).filter(|at| is_rare(&sample, *at)).collect();
        let chosen = match rare.as_slice() {
            // What a hit must have narrows it down the most.
            _ if probes.len() > words => vec![words],
            [] => (0..words).collect(),
            _ => rare,
        };
        let by: Vec<Probe> = chosen.iter().filter_map(|at| probes.get(*at)).cloned().collect();
        let (lists, counts) = if chosen.iter().all(|at| is_rare(&sample, *at)) {
            let lists = self.store.draw(tenant, scope, &by, DRAWN).await?;
            let counts = chosen.iter().copied().zip(lists.iter().map(|list| limit(list.len()))).collect();
            (lists, counts)
        } else {
            let list = self.store.walk(tenant, scope, &any_of(&by), WALKED, limit(RANKED)).await?;
            (vec![list], HashMap::new())
        };
        let weights: Vec<f64> = (0..words)
            .map(|at| rank::weight(frequency(&sample, at, counts.get(&at)), sample.messages))
            .collect();
        let of_list = chosen.iter().map(|at| weights.get(*at).copied().unwrap_or_default());
        Ok(Drawn { places: best(lists.into_iter().zip(of_list)), weights })
    }

    async fn add_neighbours(
        &self,
        tenant: &TenantId,
        hits: &mut [Hit],
        distance: usize,
    ) -> Result<(), Error> {
        let place =
            |hit: &Hit| Place { created_at: hit.created_at, seq: hit.seq, session: hit.session_id.clone() };
        let places: Vec<Place> = hits.iter().map(place).collect();
        let mut beside: HashMap<SessionId, Vec<StoredMessage>> = HashMap::new();
        for Found { place, json } in self.store.beside(tenant, &places, limit(distance)).await? {
            let Place { created_at, seq, session } = place;
            beside.entry(session).or_default().push(StoredMessage { seq, created_at, json });
        }
        for of_session in beside.values_mut() {
            of_session.sort_by_key(|message| message.seq);
        }
        for hit in hits {
            let near = beside.get(&hit.session_id).into_iter().flatten();
            let near = near.filter(|message| message.seq.abs_diff(hit.seq) <= distance as u64);
            for message in near {
                match message.seq.cmp(&hit.seq) {
                    std::cmp::Ordering::Less => hit.before.push(message.clone()),
                    std::cmp::Ordering::Greater => hit.after.push(message.clone()),
                    std::cmp::Ordering::Equal => {}
                }
            }
        }
        Ok(())
    }
}

/// The candidates, and what each word of the query weighs.
struct Drawn {
    places: Vec<Place>,
    weights: Vec<f64>,
}

/// What has what one of the probes asks for. Where there are several, they are words, which have one group each.
fn any_of(probes: &[Probe]) -> Probe {
    match probes {
        [only] => only.clone(),
        words => Probe(vec![words.iter().flat_map(|word| word.0.iter().flatten()).cloned().collect()]),
    }
}

/// Whether few messages have what the probe asks for.
fn is_rare(sample: &Sample, probe: usize) -> bool {
    let with = sample.with.get(probe).copied().unwrap_or_default();
    sample.rows < SAMPLE || with * COMMON < sample.rows
}

/// How many messages have a word: counted, where it was drawn by and there were not too many, else out of the sample.
fn frequency(sample: &Sample, word: usize, drawn: Option<&i64>) -> i64 {
    let with = sample.with.get(word).copied().unwrap_or_default();
    if sample.messages <= sample.rows {
        return with;
    }
    let estimated =
        i64::try_from(i128::from(with) * i128::from(sample.messages) / i128::from(sample.rows.max(1)));
    match drawn {
        Some(drawn) if *drawn < DRAWN => *drawn,
        Some(drawn) => estimated.unwrap_or(i64::MAX).max(*drawn),
        None => estimated.unwrap_or(i64::MAX),
    }
}

/// Those on most lists, by what the lists weigh; the newest among equals.
fn best(lists: impl Iterator<Item = (Vec<Place>, f64)>) -> Vec<Place> {
    let mut weights: HashMap<Place, f64> = HashMap::new();
    for (list, weight) in lists {
        for place in list {
            *weights.entry(place).or_default() += weight;
        }
    }
    let mut places: Vec<(f64, Place)> = weights.into_iter().map(|(place, weight)| (weight, place)).collect();
    places.sort_by(|(better, one), (worse, other)| worse.total_cmp(better).then_with(|| other.cmp(one)));
    places.truncate(RANKED);
    places.into_iter().map(|(_, place)| place).collect()
}

fn ranked(
    analysis: Analysis,
    query: &Parsed,
    weights: &[f64],
    found: Vec<Found>,
    role: Option<Role>,
    limit: usize,
) -> Result<Vec<Hit>, Error> {
    let read = |found: Found| {
        let message = Message::from_stored(found.json).map_err(|_| StoreError::Corrupt {
            what: "a message",
            why: "it is no message of the chat format".to_owned(),
        })?;
        Ok((found.place, text::of(&message), message))
    };
    let read: Vec<(Place, String, Message)> = found.into_iter().map(read).collect::<Result<_, Error>>()?;
    let candidates: Vec<Candidate<'_>> = read
        .iter()
        .map(|(place, text, _)| Candidate {
            session: place.session.as_str(),
            seq: place.seq,
            created_at: place.created_at,
            text,
        })
        .collect();
    let hits = rank::rank(analysis, query, weights, &candidates).into_iter();
    let hits = hits.filter_map(|(at, score)| Some((read.get(at)?, score)));
    let hits = hits.filter(|((_, _, message), _)| role.is_none_or(|role| message.role() == role));
    let hit = |((place, text, message), score): (&(Place, String, Message), f64)| Hit {
        session_id: place.session.clone(),
        seq: place.seq,
        created_at: place.created_at,
        score,
        message: message.json().to_owned(),
        role: message.role(),
        snippet: snippet(analysis, query, text),
        before: Vec::new(),
        after: Vec::new(),
    };
    Ok(hits.take(limit).map(hit).collect())
}

fn limit(most: usize) -> i64 {
    i64::try_from(most).unwrap_or(i64::MAX)
}
