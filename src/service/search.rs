//! Search over the stored messages.
//!
//! The store returns candidates from its index. They are parsed and ranked here by `domain::search`.

use super::{Error, MemoryService, StoredMessage, decode_message, to_i64};
use crate::blocking;
use crate::capacity;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::query::Query;
use crate::domain::search::rank::{self, Candidate};
use crate::domain::search::snippet::{Snippet, snippet};
use crate::domain::search::text::searchable_text;
use crate::storage::Store;
use crate::storage::search::{MessageRef, SearchFilter, StoredHit};
use candidates::{Candidates, MAX_RANKED, select_candidates};
use std::collections::HashMap;
use time::OffsetDateTime;

pub use crate::domain::search::query::InvalidQuery;

mod candidates;

pub const DEFAULT_LIMIT: usize = 10;
pub const MAX_LIMIT: usize = 50;

/// Approximate JSON size of the candidates that are parsed together. Parsing a megabyte takes about 20 ms.
const MAX_RANKED_BYTES: i64 = 2 * 1024 * 1024;
/// Maximum total JSON size of the neighbours in a response.
const MAX_NEIGHBOUR_BYTES: i64 = 2 * 1024 * 1024;

/// The memory of a search: its candidates as rows and parsed, its neighbours, and the body of the response.
const SEARCH_MEMORY: usize = 16 * 1024 * 1024;

/// A search request.
#[derive(Clone, Debug)]
pub struct SearchRequest {
    /// Words, "phrases", -exclusions, prefix*.
    pub text: String,
    pub session_id: Option<SessionId>,
    pub user_id: Option<UserId>,
    pub role: Option<Role>,
    /// Inclusive.
    pub since: Option<OffsetDateTime>,
    /// Exclusive.
    pub until: Option<OffsetDateTime>,
    /// Maximum number of hits. Values above [`MAX_LIMIT`] are reduced to it.
    pub limit: usize,
    /// Number of messages to return before and after each hit.
    pub neighbours: usize,
}

/// A ranked message with its snippet and its neighbours.
#[derive(Clone, Debug)]
pub struct SearchHit {
    pub session_id: SessionId,
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// Comparable only with other hits of the same search.
    pub score: f64,
    /// JSON, as the client sent it.
    pub message: String,
    pub role: Role,
    pub snippet: Snippet,
    /// Preceding messages, in order.
    pub before: Vec<StoredMessage>,
    /// Following messages, in order.
    pub after: Vec<StoredMessage>,
}

impl MemoryService {
    /// Returns the best hits: best first, newest first among equal scores.
    ///
    /// # Errors
    /// [`Error::SearchDisabled`], [`Error::InvalidQuery`]
    pub async fn search(&self, tenant: &TenantId, request: SearchRequest) -> Result<Vec<SearchHit>, Error> {
        let analyzer = self.config.search.ok_or(Error::SearchDisabled)?;
        let query = Query::parse(analyzer, &request.text)?;
        let filter = SearchFilter {
            session: request.session_id.clone(),
            user: request.user_id.clone(),
            role: request.role,
            since: request.since,
            until: request.until,
            excluded_terms: query.excluded_terms(),
        };
        capacity::claim(SEARCH_MEMORY).await?;
        // The statements keep a core busy if the database is part of the process.
        let thread = match *self.store {
            Store::Sqlite(_) => capacity::current().thread(SEARCH_MEMORY as u64).await,
            Store::Postgres(_) => None,
        };
        // A search finds everything that was stored before it.
        self.store.index_pending_for(tenant, filter.session.as_ref()).await?;
        let limit = request.limit.min(MAX_LIMIT);
        let Candidates { refs, weights } =
            select_candidates(&self.store, tenant, &filter, &query, limit).await?;
        drop(thread);
        let (mut parsed, mut bytes, mut hits) = (Vec::new(), 0, Vec::new());
        // A message with all words of a phrase need not contain the phrase: read more until there are enough hits.
        for chunk in refs.chunks(MAX_RANKED) {
            let stored =
                self.store.fetch_hits(tenant, request.user_id.as_ref(), chunk, MAX_RANKED_BYTES).await?;
            bytes += stored.iter().map(|hit| hit.json.len()).sum::<usize>();
            let (query, weights) = (query.clone(), weights.clone());
            let rank_all = move || {
                for hit in stored {
                    parsed.push(ParsedCandidate::new(hit)?);
                }
                let hits = rank_candidates(analyzer, &query, &weights, &parsed, limit);
                Ok::<_, Error>((parsed, hits))
            };
            (parsed, hits) = blocking::spawn_cpu_if_large(bytes, rank_all).await?;
            if hits.len() >= limit {
                break;
            }
        }
        if request.neighbours > 0 && !hits.is_empty() {
            self.add_neighbours(tenant, &mut hits, to_i64(request.neighbours)).await?;
        }
        Ok(hits)
    }

    async fn add_neighbours(
        &self,
        tenant: &TenantId,
        hits: &mut [SearchHit],
        max_distance: i64,
    ) -> Result<(), Error> {
        let message_ref = |hit: &SearchHit| MessageRef {
            created_at: hit.created_at,
            seq: hit.seq,
            session: hit.session_id.clone(),
        };
        let refs: Vec<MessageRef> = hits.iter().map(message_ref).collect();
        let stored = self.store.fetch_neighbours(tenant, &refs, max_distance, MAX_NEIGHBOUR_BYTES).await?;
        let mut by_session: HashMap<SessionId, HashMap<i64, StoredMessage>> = HashMap::new();
        for StoredHit { message_ref: MessageRef { created_at, seq, session }, redacted_at, json } in stored {
            let message = StoredMessage { seq, created_at, redacted_at, json };
            by_session.entry(session).or_default().insert(seq, message);
        }
        // A neighbour of several hits is returned, and counted, with each of them.
        let mut remaining = usize::try_from(MAX_NEIGHBOUR_BYTES).unwrap_or(usize::MAX);
        for hit in hits {
            let Some(messages) = by_session.get(&hit.session_id) else { continue };
            let mut take = |seq: i64| {
                let message = messages.get(&seq)?;
                remaining = remaining.checked_sub(message.json.len())?;
                Some(message.clone())
            };
            // `map_while` from the nearest outwards: a message after a missing one would leave a gap.
            let distances = 1..=max_distance;
            hit.before = distances.clone().map_while(|distance| take(hit.seq - distance)).collect();
            hit.before.reverse();
            hit.after = distances.map_while(|distance| take(hit.seq + distance)).collect();
        }
        Ok(())
    }
}

struct ParsedCandidate {
    message_ref: MessageRef,
    text: String,
    message: Message,
}

impl ParsedCandidate {
    fn new(StoredHit { message_ref, json, .. }: StoredHit) -> Result<Self, Error> {
        let message = decode_message(json)?;
        Ok(Self { message_ref, text: searchable_text(&message), message })
    }
}

fn rank_candidates(
    analyzer: Analyzer,
    query: &Query,
    weights: &[f64],
    parsed: &[ParsedCandidate],
    limit: usize,
) -> Vec<SearchHit> {
    let candidates: Vec<Candidate<'_>> = parsed
        .iter()
        .map(|ParsedCandidate { message_ref, text, .. }| Candidate {
            session: message_ref.session.as_str(),
            seq: message_ref.seq,
            created_at: message_ref.created_at,
            text,
        })
        .collect();
    let hit = |(ParsedCandidate { message_ref, text, message }, score): (&ParsedCandidate, f64)| SearchHit {
        session_id: message_ref.session.clone(),
        seq: message_ref.seq,
        created_at: message_ref.created_at,
        score,
        message: message.json().to_owned(),
        role: message.role(),
        snippet: snippet(analyzer, query, text),
        before: Vec::new(),
        after: Vec::new(),
    };
    let ranked = rank::rank(analyzer, query, weights, &candidates).into_iter();
    ranked.filter_map(|(index, score)| Some((parsed.get(index)?, score))).take(limit).map(hit).collect()
}
