//! Maintenance of the search index, as far as it is common to both stores.
//!
//! Storing an exchange only records its messages as pending. They are indexed in batches, which costs much less than
//! indexing each exchange: by the index worker, usually a second later, or by a search. Imports and forks do the same. Messages that were stored without an index, or with another analyzer, are indexed by
//! `precis reindex`. Erasing a session removes its index entries and pending ranges.

use super::StoreError;
use super::statement::{Sql, Transaction};
use super::values::{to_i64, user_from_column};
use crate::blocking;
use crate::domain::exchange::Exchange;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::lexemes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

/// The state of the search index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexState {
    /// The [`Analyzer::version`] that the index was built with.
    pub analyzer_version: String,
    /// Number of sessions with messages that must be reindexed.
    pub sessions_to_reindex: i64,
}

/// Messages of a session that must be reindexed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReindexRange {
    pub tenant: TenantId,
    pub session: SessionId,
    /// Messages up to this one are done.
    pub done_seq: i64,
    /// The last message of the range.
    pub through_seq: i64,
}

pub(super) const SELECT_ANALYZER_VERSION: &str =
    "SELECT coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version";

/// Variants of a statement on pending ranges: for all tenants; for ranges of a tenant (`$1`) stored up to a time (`$2`); and
/// for one session (`$3`) of the tenant.
pub(super) struct PendingStatements {
    pub(super) all: &'static str,
    pub(super) tenant: &'static str,
    pub(super) session: &'static str,
}

macro_rules! pending_statements {
    ($select:literal, $rest:expr) => {
        $crate::storage::search_index::PendingStatements {
            all: concat!($select, " FROM search_pending", $rest),
            tenant: concat!($select, " FROM search_pending WHERE tenant_id = $1 AND created_at <= $2", $rest),
            session: concat!(
                $select,
                " FROM search_pending WHERE tenant_id = $1 AND created_at <= $2 AND session_id = $3",
                $rest
            ),
        }
    };
}

/// Selects up to [`MAX_BATCH_RANGES`] pending ranges and the analyzer version of the index, with a locking clause.
macro_rules! claim_pending {
    ($locks:literal) => {
        $crate::storage::search_index::pending_statements!(
            "SELECT tenant_id, session_id, first_seq, last_seq, bytes, created_at,
                coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version",
            concat!(" ORDER BY created_at, tenant_id, session_id, first_seq LIMIT 250", $locks)
        )
    };
}

pub(super) use {claim_pending, pending_statements};

/// Returns the time of the newest pending range, and the analyzer version of the index.
pub(super) const SELECT_NEWEST_PENDING: PendingStatements = pending_statements!(
    "SELECT max(created_at) AS until, coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version",
    ""
);

pub(super) const INSERT_ANALYZER_VERSION: &str =
    "INSERT INTO search_analyzer (id, version) VALUES (1, $1) ON CONFLICT DO NOTHING";

/// An index without entries can have any analyzer.
pub(super) const UPDATE_ANALYZER_OF_EMPTY_INDEX: &str = "UPDATE search_analyzer SET version = $1 WHERE version NOT IN ($1, 'off') AND NOT EXISTS (SELECT 1 FROM search)";

pub(super) const MAX_BATCH_RANGES: i64 = 250;
/// Approximate JSON size of a batch, and of one range. A single message may be larger.
pub(super) const MAX_BATCH_BYTES: i64 = 1024 * 1024;
/// Maximum time that a search waits for pending messages to be indexed. A batch takes about 50 ms.
const INDEXING_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns an error if a search has waited too long.
pub(super) fn check_deadline(since: Instant) -> Result<(), StoreError> {
    if since.elapsed() < INDEXING_TIMEOUT { Ok(()) } else { Err(StoreError::IndexLagging(INDEXING_TIMEOUT)) }
}

/// Consecutive messages of an exchange that become one pending range: indexes of the first and last message, and their JSON
/// size. Usually the whole exchange, except if it is too large for one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExchangeSpan {
    pub(super) first: i64,
    pub(super) last: i64,
    pub(super) bytes: i64,
}

/// Splits an exchange into pending ranges. Returns none if search is disabled.
pub(super) fn pending_spans(analyzer: Option<Analyzer>, exchange: &Exchange) -> Vec<ExchangeSpan> {
    let mut spans: Vec<ExchangeSpan> = Vec::new();
    for (index, (message, _)) in (0..).zip(&exchange.messages).take_while(|_| analyzer.is_some()) {
        let bytes = to_i64(message.json().len());
        match spans.last_mut().filter(|span| span.bytes < MAX_BATCH_BYTES) {
            Some(span) => (span.last, span.bytes) = (index, span.bytes + bytes),
            None => spans.push(ExchangeSpan { first: index, last: index, bytes }),
        }
    }
    spans
}

/// Consecutive messages of a session that are not in the index yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingRange {
    pub(super) tenant: String,
    pub(super) session: String,
    pub(super) first_seq: i64,
    pub(super) last_seq: i64,
    pub(super) bytes: i64,
    pub(super) created_at: OffsetDateTime,
}

/// Truncates up to [`MAX_BATCH_RANGES`] pending ranges to a batch. Returns the batch, and `true` if there may be more.
pub(super) fn next_batch(mut pending: Vec<PendingRange>) -> (Vec<PendingRange>, bool) {
    let is_full = to_i64(pending.len()) >= MAX_BATCH_RANGES;
    let mut bytes = 0;
    let fitting = pending.iter().take_while(|range| {
        let before = bytes;
        bytes += range.bytes;
        before < MAX_BATCH_BYTES
    });
    let (fitting, all) = (fitting.count(), pending.len());
    pending.truncate(fitting);
    (pending, is_full || fitting < all)
}

/// A message that is not in the index yet.
pub(super) struct PendingMessage {
    pub(super) tenant: String,
    pub(super) session: String,
    /// Empty if the session has no user.
    pub(super) user: String,
    pub(super) seq: i64,
    pub(super) created_at: OffsetDateTime,
    pub(super) json: String,
}

/// A row of the index.
pub(super) struct IndexEntry {
    pub(super) tenant: String,
    pub(super) session: String,
    pub(super) seq: i64,
    pub(super) created_at: OffsetDateTime,
    /// Separated by spaces.
    pub(super) lexemes: String,
}

impl IndexState {
    /// Returns `true` if messages must be reindexed for this analyzer, without a change of the settings.
    #[must_use]
    pub fn lacks_messages(&self, analyzer: Analyzer) -> bool {
        self.analyzer_version == INCOMPLETE_INDEX
            || self.sessions_to_reindex > 0 && self.analyzer_version == analyzer.version()
    }
}

impl IndexEntry {
    /// Appends the lexeme of the user, if there is one, to those of the message.
    fn new(
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&str>,
        (seq, created_at): (i64, OffsetDateTime),
        lexemes: &str,
    ) -> Self {
        let (tenant, session) = (tenant.as_str().to_owned(), session.as_str().to_owned());
        let lexemes = user.map_or_else(|| lexemes.to_owned(), |user| format!("{lexemes} {user}"));
        Self { tenant, session, seq, created_at, lexemes }
    }
}

/// Returns the entries of messages of one session.
pub(super) fn index_entries(
    tenant: &TenantId,
    session: &SessionId,
    user: Option<&UserId>,
    positions: impl Iterator<Item = (i64, OffsetDateTime)>,
    lexemes: &[String],
) -> Vec<IndexEntry> {
    let user = user.map(|user| lexemes::user_lexeme(&lexemes::tenant_prefix(tenant), user));
    let entry = |(position, lexemes): (_, &String)| {
        IndexEntry::new(tenant, session, user.as_deref(), position, lexemes)
    };
    positions.zip(lexemes).map(entry).collect()
}

/// The version of an index in which messages are missing that were stored while search was disabled.
const INCOMPLETE_INDEX: &str = "off";

/// Returns the analyzer for messages and queries. All replicas must use the analyzer recorded in the index, not their own
/// settings. Returns `None` if this release does not know the recorded analyzer; then a replica of another release indexes.
#[must_use]
pub fn analyzer_for(version: &str, own: Analyzer) -> Option<Analyzer> {
    // An incomplete index is rebuilt in any case.
    if matches!(version, "" | INCOMPLETE_INDEX) { Some(own) } else { Analyzer::parse_version(version) }
}

/// Makes a range of messages pending for the index. The range is at most one batch of the index.
pub(super) async fn insert_pending(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    (first_seq, last_seq): (i64, i64),
    bytes: i64,
) -> Result<(), StoreError> {
    const INSERT_PENDING: Sql = Sql {
        postgres: "INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
            VALUES ($1, $2, $3, $4, $5, now())",
        sqlite: "INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
            VALUES ($1, $2, $3, $4, $5, $6)",
    };
    let statement = transaction.statement(INSERT_PENDING).bind(tenant.as_str()).bind(session.as_str());
    let statement = statement.bind(first_seq).bind(last_seq).bind(bytes);
    statement.bind_now().execute().await?;
    Ok(())
}

/// Returns the entries of pending messages. Omits unreadable messages, so that they do not block the others.
pub(super) async fn entries_of_pending(analyzer: Analyzer, messages: Vec<PendingMessage>) -> Vec<IndexEntry> {
    let entry = move |message: PendingMessage| {
        let PendingMessage { tenant, session, user, seq, created_at, json } = message;
        let user = user_from_column(user);
        let ids = (TenantId::new(&*tenant), SessionId::new(&*session), user);
        let ((Ok(tenant), Ok(session), Ok(user)), Ok(message)) = (ids, Message::from_stored(json)) else {
            tracing::error!(
                tenant,
                session,
                seq,
                "failed to parse a stored message; search will not find it"
            );
            return None;
        };
        let lexemes = || lexemes::message_lexemes(analyzer, &tenant, &session, &message);
        let Ok(lexemes) = catch_unwind(AssertUnwindSafe(lexemes)) else {
            let (tenant, session) = (tenant.as_str(), session.as_str());
            tracing::error!(tenant, session, seq, "failed to index a message; search will not find it");
            return None;
        };
        let user = user.map(|user| lexemes::user_lexeme(&lexemes::tenant_prefix(&tenant), &user));
        Some(IndexEntry::new(&tenant, &session, user.as_deref(), (seq, created_at), &lexemes))
    };
    blocking::spawn_cpu(move || messages.into_iter().filter_map(entry).collect()).await
}

/// Returns the lexemes of each message, without the lexeme of the user. Empty if search is disabled.
pub(super) async fn lexemes_of_messages(
    analyzer: Option<Analyzer>,
    tenant: &TenantId,
    session: &SessionId,
    messages: impl ExactSizeIterator<Item = &Message> + Clone + Send,
) -> Vec<String> {
    let Some(analyzer) = analyzer else { return Vec::new() };
    // Small batches are processed in place: moving them to another thread requires a copy.
    if !blocking::is_large(messages.clone().map(|message| message.json().len()).sum()) {
        return messages
            .map(|message| lexemes::message_lexemes(analyzer, tenant, session, message))
            .collect();
    }
    let (tenant, session) = (tenant.clone(), session.clone());
    let messages: Vec<Message> = messages.cloned().collect();
    let work = move || {
        messages
            .iter()
            .map(|message| lexemes::message_lexemes(analyzer, &tenant, &session, message))
            .collect()
    };
    blocking::spawn_cpu(work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_waits_for_the_index_until_the_timeout() {
        let now = Instant::now();
        assert!(check_deadline(now).is_ok());
        let before = now.checked_sub(INDEXING_TIMEOUT).expect("the machine runs for longer");
        assert!(matches!(check_deadline(before), Err(StoreError::IndexLagging(INDEXING_TIMEOUT))));
    }
}
