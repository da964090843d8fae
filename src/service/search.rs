//! Finding messages.
//!
//! The store draws candidates by its index, and they are read and ranked here by `domain::search`.

use super::{Error, MemoryService, StoredMessage, decode_message};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::query::Query as Parsed;
use crate::domain::search::rank::{self, Candidate};
use crate::domain::search::snippet::{Snippet, snippet};
use crate::domain::search::text;
use crate::storage::search::{MessageRef, SearchFilter, StoredHit};
use candidates::Candidates;
use std::collections::HashMap;
use time::OffsetDateTime;

pub use crate::domain::search::query::InvalidQuery;

mod candidates;

/// Hits where a query names no number.
pub const DEFAULT_LIMIT: usize = 10;
/// Hits, at most.
pub const MOST: usize = 50;

/// Messages that are read and ranked, at most; more of them where those don't have what must be.
const RANKED: usize = 300;
/// Bytes of them, about: reading a megabyte takes some 20 ms.
const RANKED_BYTES: i64 = 2 * 1024 * 1024;
/// Bytes of what is shown beside the hits, at most.
const BESIDE_BYTES: i64 = 2 * 1024 * 1024;

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
    /// [`Error::SearchDisabled`], [`Error::InvalidQuery`]
    pub async fn search(&self, tenant: &TenantId, query: Query) -> Result<Vec<Hit>, Error> {
        let analyzer = self.config.search.ok_or(Error::SearchDisabled)?;
        let parsed = Parsed::parse(analyzer, &query.text)?;
        let scope = SearchFilter {
            session: query.session_id.clone(),
            user: query.user_id.clone(),
            role: query.role,
            since: query.since,
            until: query.until,
            without: parsed.excluded_terms(),
        };
        // What was stored before is found.
        self.store.index_pending_for(tenant, scope.session.as_ref()).await?;
        let limit = query.limit.min(MOST);
        let Candidates { places, weights } = self.candidates(tenant, &scope, &parsed, limit).await?;
        let (mut read, mut bytes, mut hits) = (Vec::new(), 0, Vec::new());
        // Not all that have the words of a phrase have the phrase: as long as hits are missing, more are read.
        for places in places.chunks(RANKED) {
            let found = self.store.fetch_hits(tenant, query.user_id.as_ref(), places, RANKED_BYTES).await?;
            bytes += found.iter().map(|found| found.json.len()).sum::<usize>();
            let (parsed, weights) = (parsed.clone(), weights.clone());
            let ranked = move || {
                for found in found {
                    read.push(Read::new(found)?);
                }
                let hits = ranked(analyzer, &parsed, &weights, &read, limit);
                Ok::<_, Error>((read, hits))
            };
            (read, hits) = blocking::sized(bytes, ranked).await?;
            if hits.len() >= limit {
                break;
            }
        }
        if query.neighbours > 0 && !hits.is_empty() {
            self.add_neighbours(tenant, &mut hits, query.neighbours).await?;
        }
        Ok(hits)
    }

    async fn add_neighbours(
        &self,
        tenant: &TenantId,
        hits: &mut [Hit],
        distance: usize,
    ) -> Result<(), Error> {
        let place = |hit: &Hit| MessageRef {
            created_at: hit.created_at,
            seq: hit.seq,
            session: hit.session_id.clone(),
        };
        let places: Vec<MessageRef> = hits.iter().map(place).collect();
        let mut beside: HashMap<SessionId, HashMap<i64, StoredMessage>> = HashMap::new();
        for StoredHit { place, json } in
            self.store.fetch_neighbours(tenant, &places, limit(distance), BESIDE_BYTES).await?
        {
            let MessageRef { created_at, seq, session } = place;
            beside.entry(session).or_default().insert(seq, StoredMessage { seq, created_at, json });
        }
        // A message that is beside several hits is shown, and counts, with each.
        let mut left = usize::try_from(BESIDE_BYTES).unwrap_or(usize::MAX);
        for hit in hits {
            let Some(near) = beside.get(&hit.session_id) else { continue };
            let mut shown = |seq: i64| {
                let message = near.get(&seq)?;
                left = left.checked_sub(message.json.len())?;
                Some(message.clone())
            };
            // The nearest first, and none behind one that is not shown: there are no holes.
            let distances = 1..=limit(distance);
            hit.before = distances.clone().map_while(|distance| shown(hit.seq - distance)).collect();
            hit.before.reverse();
            hit.after = distances.map_while(|distance| shown(hit.seq + distance)).collect();
        }
        Ok(())
    }
}

/// A candidate that was read.
struct Read {
    place: MessageRef,
    text: String,
    message: Message,
}

impl Read {
    fn new(StoredHit { place, json }: StoredHit) -> Result<Self, Error> {
        let message = decode_message(json)?;
        Ok(Self { place, text: text::searchable_text(&message), message })
    }
}

fn ranked(analyzer: Analyzer, query: &Parsed, weights: &[f64], read: &[Read], limit: usize) -> Vec<Hit> {
    let candidates = read.iter().map(|Read { place, text, .. }| Candidate {
        session: place.session.as_str(),
        seq: place.seq,
        created_at: place.created_at,
        text,
    });
    let candidates: Vec<Candidate<'_>> = candidates.collect();
    let hit = |(Read { place, text, message }, score): (&Read, f64)| Hit {
        session_id: place.session.clone(),
        seq: place.seq,
        created_at: place.created_at,
        score,
        message: message.json().to_owned(),
        role: message.role(),
        snippet: snippet(analyzer, query, text),
        before: Vec::new(),
        after: Vec::new(),
    };
    let hits = rank::rank(analyzer, query, weights, &candidates).into_iter();
    hits.filter_map(|(at, score)| Some((read.get(at)?, score))).take(limit).map(hit).collect()
}

fn limit(most: usize) -> i64 {
    i64::try_from(most).unwrap_or(i64::MAX)
}
