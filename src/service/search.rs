//! Search over the stored messages.
//!
//! The store returns candidates from its index. They are parsed and ranked here by `domain::search`.

use super::{Error, MemoryService, StoredMessage, decode_message, to_i64};
use crate::blocking;
use crate::capacity;
use crate::domain::error_chain::ErrorChain;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::MessageRef;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::query::Query;
use crate::domain::search::rank::{self, Candidate, Ranking};
use crate::domain::search::snippet::{Snippet, snippet};
use crate::domain::search::text::OwnResults;
use candidates::{Candidates, MAX_RANKED, select_candidates};
use serde::Serialize;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use utoipa::ToSchema;

pub use crate::domain::search::query::InvalidQuery;
pub use crate::storage::SearchFilter;

mod candidates;
mod rerank;

/// Number of hits that the models order. Of the evidence among the first 100 hits, 97 % is among these.
const MAX_RERANKED: usize = 50;
/// Longer messages are represented by their snippets, so that an English prompt has about 6,000 tokens at most.
const MAX_TEXT_CHARS: usize = 500;

pub const DEFAULT_LIMIT: usize = 10;
pub const MAX_LIMIT: usize = 50;

/// Approximate JSON size of the candidates that are parsed together. Parsing a megabyte takes about 20 ms.
const MAX_RANKED_BYTES: i64 = 2 * 1024 * 1024;
/// JSON size of all candidates of a search, after which no further ones are read, so that a phrase that is nowhere does not keep a thread
/// for seconds.
const MAX_READ_BYTES: usize = 32 * 1024 * 1024;
/// JSON size of the messages of a response after which it has no further messages of hits.
const MAX_HIT_BYTES: i64 = 4 * 1024 * 1024;
/// Maximum total JSON size of the neighbours in a response.
const MAX_NEIGHBOUR_BYTES: i64 = 2 * 1024 * 1024;

/// The memory of a search: its candidates as rows and parsed, its neighbours, and the body of the response. It is less than the 10 MiB from
/// which claims of memory wait for each other.
const SEARCH_MEMORY: usize = 8 * 1024 * 1024;

/// A search request.
#[derive(Clone, Debug)]
pub struct SearchRequest {
    /// Words, "phrases", -exclusions, prefix*.
    pub text: String,
    /// The excluded terms are those of the text.
    pub filter: SearchFilter,
    /// Maximum number of hits. Values above [`MAX_LIMIT`] are reduced to it.
    pub limit: usize,
    /// Number of messages to return before and after each hit.
    pub neighbours: usize,
    /// If `false`, hits have a snippet and no message.
    pub with_messages: bool,
    /// A model orders the hits, if a pool for that is configured.
    pub reranks: bool,
}

/// A ranked message with its snippet and its neighbours.
#[derive(Clone, Debug)]
pub struct SearchHit {
    pub session_id: SessionId,
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// Comparable only with other hits of the same search.
    pub score: f64,
    /// JSON, as the client sent it. `None` without [`SearchRequest::with_messages`], and if the messages of better hits have more than
    /// [`MAX_HIT_BYTES`]; messages of more than 128 KiB are considered last.
    pub message: Option<String>,
    pub role: Role,
    pub snippet: Snippet,
    /// The greatest weight of a word of the query that the message contains.
    pub word_weight: f64,
    /// Hash of the message's JSON.
    pub(super) fingerprint: u64,
    /// Preceding messages, in order.
    pub before: Vec<StoredMessage>,
    /// Following messages, in order.
    pub after: Vec<StoredMessage>,
}

/// The order of the hits, and its origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct SearchRanking {
    pub order: SearchOrder,
    /// The model that ordered the hits; null in lexical order.
    #[schema(required)]
    pub model: Option<String>,
    /// The reason for which no model of the pool ordered the hits; null if one did, or if no pool is configured.
    #[schema(required)]
    pub reason: Option<String>,
}

/// The order of search hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SearchOrder {
    /// By score.
    Lexical,
    /// By a model.
    Reranked,
}

/// The hits of a search: best first, newest first among equal scores, or in the order of a model.
#[derive(Clone, Debug)]
pub struct SearchResults {
    pub hits: Vec<SearchHit>,
    /// The weight of a word that occurs in one of the messages that the filter permits.
    pub greatest_weight: f64,
    pub ranking: SearchRanking,
}

/// Interval between two merges of the search index.
const MERGE_INTERVAL: Duration = Duration::from_mins(30);

impl MemoryService {
    /// Removes the terms of erased messages from the file of SQLite now and then, without end.
    pub async fn merge_index(&self) {
        loop {
            if let Err(error) = self.store.merge_index().await {
                tracing::warn!(error = %ErrorChain(&error), "failed to remove the terms of erased messages from the search index");
            }
            tokio::time::sleep(MERGE_INTERVAL).await;
        }
    }

    /// Returns the best hits.
    ///
    /// # Errors
    /// [`Error::SearchDisabled`], [`Error::InvalidQuery`]
    pub async fn search(&self, tenant: &TenantId, request: SearchRequest) -> Result<SearchResults, Error> {
        let analyzer = self.store.analyzer().ok_or(Error::SearchDisabled)?;
        let analyzer = match &request.filter.session {
            Some(session) if analyzer.detects() => {
                analyzer.of_session(self.store.session_language(tenant, session).await?)
            }
            None if analyzer.detects() => {
                analyzer.of_query(&request.text, &self.store.languages(tenant).await?)
            }
            _ => analyzer,
        };
        let query = Arc::new(Query::parse(analyzer, &request.text)?);
        capacity::claim(SEARCH_MEMORY).await?;
        let thread = capacity::current().thread().await;
        let filter = SearchFilter { excluded_terms: query.excluded_terms(), ..request.filter };
        let user = filter.user.as_ref();
        let limit = request.limit.min(MAX_LIMIT);
        // Hits beyond the limit can become the best ones.
        let is_reranked = request.reranks && self.config.rerank.is_some();
        let ranked_hits = if is_reranked { MAX_RERANKED.max(limit) } else { limit };
        let Candidates { messages: candidates, weights, all } =
            select_candidates(&self.store, tenant, &filter, &query).await?;
        let mut read = ReadMessages {
            analyzer,
            query: Arc::clone(&query),
            candidates: Vec::new(),
            fingerprints: Vec::new(),
            has_results: true,
        };
        // A message with all words of a phrase need not contain the phrase: read more until there are enough hits.
        let (mut unread, mut read_bytes) = (VecDeque::from(candidates), 0);
        while !unread.is_empty() && read_bytes < MAX_READ_BYTES && read.matches() < ranked_hits {
            let part: Vec<MessageRef> = unread.drain(..unread.len().min(MAX_RANKED)).collect();
            let stored = self.store.fetch_messages(tenant, user, &part, &[0..=0], MAX_RANKED_BYTES).await?;
            let bytes = stored.iter().map(|(_, message)| message.json.len()).sum::<usize>();
            // The others of the part come next.
            if to_i64(bytes) >= MAX_RANKED_BYTES {
                let found: HashSet<_> =
                    stored.iter().map(|(session, message)| (session, message.seq)).collect();
                let others =
                    part.into_iter().filter(|message| !found.contains(&(&message.session, message.seq)));
                others.rev().for_each(|message| unread.push_front(message));
            }
            read_bytes += bytes;
            read = read.add(&filter, stored).await?;
        }
        let ranking = Ranking::new(analyzer, &query, &weights, &read.candidates);
        let mut ranked = ranking.hits();
        // Messages around those of the index can be better hits than these.
        let neighbours = ranking.promising_neighbours(&ranked, ranked_hits);
        if !neighbours.is_empty() {
            let stored =
                self.store.fetch_messages(tenant, user, &neighbours, &[0..=0], MAX_RANKED_BYTES).await?;
            // The index has the results of tools that contain words of the query, except those of precis' own tools.
            read.has_results = false;
            read = read.add(&filter, stored).await?;
            ranked = Ranking::new(analyzer, &query, &weights, &read.candidates).hits();
        }
        ranked.truncate(ranked_hits);
        // The order of a model decides which messages the response has.
        let messages = if request.with_messages && !is_reranked {
            let places: Vec<_> = read.ranked(&ranked).map(|found| found.place.clone()).collect();
            self.store.fetch_messages(tenant, user, &places, &[0..=0], MAX_HIT_BYTES).await?
        } else {
            Vec::new()
        };
        let bytes = read.ranked(&ranked).filter_map(|found| found.text.as_ref()).map(String::len).sum();
        let greatest_weight = rank::weight(1, all);
        let hits = blocking::spawn_cpu_if_large(bytes, move || read.hits(&ranked, &weights, messages));
        let (mut hits, texts): (Vec<_>, Vec<_>) = hits.await.into_iter().unzip();
        drop(thread);
        let mut ranking = SearchRanking::lexical(None);
        if is_reranked {
            ranking = self.rerank(tenant, &request.text, &mut hits, &texts).await?;
            hits = self.confirm(tenant, user, hits, limit, request.with_messages).await?;
        }
        if request.neighbours > 0 && !hits.is_empty() {
            self.add_neighbours(tenant, &mut hits, to_i64(request.neighbours)).await?;
        }
        Ok(SearchResults { hits, greatest_weight, ranking })
    }

    /// Returns the best hits whose messages are still stored, with these messages if `with_messages`. Messages beyond [`MAX_HIT_BYTES`]
    /// are not read: their hits are returned without them.
    async fn confirm(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        mut hits: Vec<SearchHit>,
        limit: usize,
        with_messages: bool,
    ) -> Result<Vec<SearchHit>, Error> {
        let mut confirmed = Vec::new();
        while confirmed.len() < limit && !hits.is_empty() {
            let others = hits.split_off(hits.len().min(limit - confirmed.len()));
            let refs: Vec<MessageRef> = hits.iter().map(SearchHit::place).collect();
            let stored = self.store.fetch_messages(tenant, user, &refs, &[0..=0], MAX_HIT_BYTES).await?;
            let bytes: usize = stored.iter().map(|(_, message)| message.json.len()).sum();
            let is_complete = to_i64(bytes) < MAX_HIT_BYTES;
            let mut messages = by_place(stored);
            hits.retain_mut(|hit| match messages.remove(&hit.place()) {
                // A session that was erased or rewound can have another message with the same number, and even the same time.
                Some(message) => {
                    let is_same = fingerprint(&message.json) == hit.fingerprint;
                    hit.message = with_messages.then_some(message.json);
                    is_same
                }
                None => !is_complete,
            });
            confirmed.append(&mut hits);
            hits = others;
        }
        Ok(confirmed)
    }

    async fn add_neighbours(
        &self,
        tenant: &TenantId,
        hits: &mut [SearchHit],
        max_distance: i64,
    ) -> Result<(), Error> {
        let refs: Vec<MessageRef> = hits.iter().map(SearchHit::place).collect();
        let sides = [-max_distance..=-1, 1..=max_distance];
        let stored = self.store.fetch_messages(tenant, None, &refs, &sides, MAX_NEIGHBOUR_BYTES).await?;
        let messages = by_place(stored);
        // A neighbour of several hits is returned, and counted, with each of them.
        let mut remaining = usize::try_from(MAX_NEIGHBOUR_BYTES).unwrap_or(usize::MAX);
        for hit in hits {
            let mut take = |seq: i64| {
                let message = messages.get(&MessageRef { session: hit.session_id.clone(), seq })?;
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

fn fingerprint(json: &str) -> u64 {
    foldhash::quality::FixedState::default().hash_one(json)
}

/// Returns messages by their position.
fn by_place(messages: Vec<(SessionId, StoredMessage)>) -> HashMap<MessageRef, StoredMessage> {
    let place = |(session, message): (_, StoredMessage)| (MessageRef { session, seq: message.seq }, message);
    messages.into_iter().map(place).collect()
}

/// The messages that were read for a search.
struct ReadMessages {
    analyzer: Analyzer,
    query: Arc<Query>,
    candidates: Vec<Candidate>,
    /// The hash of the JSON of each candidate.
    fingerprints: Vec<u64>,
    /// Further results of tools can be hits.
    has_results: bool,
}

impl ReadMessages {
    /// Adds the messages that pass the filter.
    async fn add(
        mut self,
        filter: &SearchFilter,
        mut stored: Vec<(SessionId, StoredMessage)>,
    ) -> Result<Self, Error> {
        let SearchFilter { role, since, until, ref unseen, .. } = *filter;
        stored.retain(|(session, StoredMessage { seq, created_at, redacted_at, .. })| {
            redacted_at.is_none()
                && unseen.as_ref().is_none_or(|unseen| unseen.session != *session || *seq < unseen.seq)
                && since.is_none_or(|since| *created_at >= since)
                && until.is_none_or(|until| *created_at < until)
        });
        // Calls precede their results.
        stored.sort_by(|(a, one), (b, other)| (a, one.seq).cmp(&(b, other.seq)));
        let bytes = stored.iter().map(|(_, message)| message.json.len()).sum();
        let parse = move || {
            let mut own_results: HashMap<SessionId, OwnResults> = HashMap::new();
            for (session, StoredMessage { seq, created_at, json, .. }) in stored {
                let fingerprint = fingerprint(&json);
                let message = decode_message(&json)?;
                let is_own = own_results.entry(session.clone()).or_default().is_next(&message);
                if is_own || (message.role() == Role::Tool && !self.has_results) {
                    continue;
                }
                if role.is_none_or(|role| message.role() == role) {
                    let (query, place) = ((self.analyzer, &*self.query), MessageRef { session, seq });
                    self.candidates.push(Candidate::new(query, place, created_at, &message));
                    self.fingerprints.push(fingerprint);
                }
            }
            Ok(self)
        };
        blocking::spawn_cpu_if_large(bytes, parse).await
    }

    /// Returns the candidates of a ranking.
    fn ranked(&self, ranked: &[(usize, f64)]) -> impl Iterator<Item = &Candidate> {
        ranked.iter().filter_map(|(index, _)| self.candidates.get(*index))
    }

    /// Returns the hits of a ranking, each with its text as a model gets it. `messages` are those of the hits.
    fn hits(
        &self,
        ranked: &[(usize, f64)],
        weights: &[f64],
        messages: Vec<(SessionId, StoredMessage)>,
    ) -> Vec<(SearchHit, String)> {
        let mut messages = by_place(messages);
        let hit = |(index, score): &(usize, f64)| {
            let candidate = self.candidates.get(*index)?;
            let text = candidate.text.as_ref()?;
            let message = messages.remove(&candidate.place).map(|message| message.json);
            let snippet = snippet(self.analyzer, &self.query, text);
            let fingerprint = *self.fingerprints.get(*index)?;
            let contained =
                candidate.text_match.frequencies.iter().zip(weights).filter(|(count, _)| **count > 0);
            let word_weight = contained.map(|(_, weight)| *weight).fold(0.0, f64::max);
            let hit = SearchHit::new(candidate, snippet);
            let hit = SearchHit { score: *score, message, word_weight, fingerprint, ..hit };
            let short_text = hit.short_text(text);
            Some((hit, short_text))
        };
        ranked.iter().filter_map(hit).collect()
    }

    /// Returns the number of messages that contain all phrases, or a word if the query has no phrases.
    fn matches(&self) -> usize {
        let text_matches = self.candidates.iter().map(|candidate| &candidate.text_match);
        // The words of a phrase may all be stop words, which are no words of the query.
        let has_phrase = !self.query.phrases.is_empty();
        text_matches.filter(|found| found.is_allowed && (has_phrase || found.has_word())).count()
    }
}

impl SearchHit {
    fn new(candidate: &Candidate, snippet: Snippet) -> Self {
        let Candidate { place: MessageRef { session, seq }, created_at, role, .. } = candidate;
        Self {
            session_id: session.clone(),
            seq: *seq,
            created_at: *created_at,
            score: 0.0,
            message: None,
            role: *role,
            snippet,
            word_weight: 0.0,
            fingerprint: 0,
            before: Vec::new(),
            after: Vec::new(),
        }
    }

    fn place(&self) -> MessageRef {
        MessageRef { session: self.session_id.clone(), seq: self.seq }
    }

    /// Returns the text, or the snippet of a long one.
    fn short_text(&self, text: &str) -> String {
        if text.char_indices().nth(MAX_TEXT_CHARS).is_none() {
            return text.to_owned();
        }
        self.snippet.pieces().map(|(piece, _)| piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Message;

    #[test]
    fn message_with_a_phrase_of_stop_words_matches() {
        for (text, matches) in [("\"the who\" concert", 1), ("concert", 2), ("\"a concert\" ferry", 1)] {
            let analyzer = Analyzer::default();
            let query = Arc::new(Query::parse(analyzer, text).expect("a query"));
            let candidate = |(seq, text): (i64, &str)| {
                let place = MessageRef { session: SessionId::new("s").expect("an id"), seq };
                let message = Message::text(Role::User, text);
                Candidate::new((analyzer, query.as_ref()), place, OffsetDateTime::UNIX_EPOCH, &message)
            };
            let texts = ["I love The Who", "a concert", "one concert", "who is the one"];
            let candidates = (1..).zip(texts).map(candidate).collect();
            let read = ReadMessages {
                analyzer,
                query: Arc::clone(&query),
                candidates,
                fingerprints: Vec::new(),
                has_results: true,
            };
            assert_eq!(read.matches(), matches, "{text}");
        }
    }
}
