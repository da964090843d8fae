//! What search finds messages by, kept up with them.
//!
//! An exchange that is stored waits to be indexed with others, which costs much less than each by itself: until the service
//! gets to it, a second later as a rule, or until somebody searches. Messages of an import are indexed in its
//! transaction, and what was stored while there was no index, or one by other rules, piece by piece later. What is indexed
//! goes with its session, and so does what waits.

use super::StoreError;
use super::rows::to_i64;
use crate::blocking;
use crate::domain::exchange::Exchange;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::lexemes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

/// How far the index is behind the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexState {
    /// The rules that it is made by: [`Analyzer::version`].
    pub label: String,
    /// Sessions with messages that are still to be indexed.
    pub backlog: i64,
}

/// A piece of what is still to be indexed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReindexRange {
    /// Whose it is.
    pub tenant: TenantId,
    /// In which session.
    pub session: SessionId,
    /// Messages up to here are done.
    pub done_seq: i64,
    /// The last that is to be done.
    pub through_seq: i64,
}

/// The rules that the index goes by.
pub(super) const SELECT_ANALYZER_VERSION: &str =
    "SELECT coalesce((SELECT version FROM search_analyzer), '') AS analyzer_version";

/// A statement about what waits: of all tenants; of a tenant (`$1`), what was stored by then (`$2`); and of one of its
/// sessions (`$3`).
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

/// What waits, as many as are in a [`MAX_BATCH_RANGES`], with the rules that the index goes by then; and what is said of locks.
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

/// Until when what waits was stored.
pub(super) const SELECT_NEWEST_PENDING: PendingStatements =
    pending_statements!("SELECT max(created_at) AS until", "");

/// Runs of messages that are indexed together, at most.
pub(super) const MAX_BATCH_RANGES: i64 = 250;
/// Bytes of JSON in them, and in one run, about: one message may have more.
const MAX_BATCH_BYTES: i64 = 1024 * 1024;
/// How long a search waits for what it could find to be indexed. A piece takes some 50 ms.
const INDEXING_TIMEOUT: Duration = Duration::from_secs(5);

/// An error where a search has waited since then for longer than it may.
pub(super) fn check_deadline(since: Instant) -> Result<(), StoreError> {
    if since.elapsed() < INDEXING_TIMEOUT { Ok(()) } else { Err(StoreError::IndexLagging(INDEXING_TIMEOUT)) }
}

/// Messages of an exchange that wait together: its first and its last by their places in it, and their bytes of JSON. All of
/// them, but where they are too large to be indexed in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExchangeSpan {
    pub(super) first: i64,
    pub(super) last: i64,
    pub(super) bytes: i64,
}

/// The runs in which an exchange waits; none without rules to index it by.
pub(super) fn pending_spans(analyzer: Option<Analyzer>, exchange: &Exchange) -> Vec<ExchangeSpan> {
    let mut runs: Vec<ExchangeSpan> = Vec::new();
    for (at, (message, _)) in (0..).zip(&exchange.messages).take_while(|_| analyzer.is_some()) {
        let bytes = to_i64(message.json().len());
        match runs.last_mut().filter(|run| run.bytes < MAX_BATCH_BYTES) {
            Some(run) => (run.last, run.bytes) = (at, run.bytes + bytes),
            None => runs.push(ExchangeSpan { first: at, last: at, bytes }),
        }
    }
    runs
}

/// Messages that are stored and not in the index yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingRange {
    pub(super) tenant: String,
    pub(super) session: String,
    pub(super) first_seq: i64,
    pub(super) last_seq: i64,
    pub(super) bytes: i64,
    pub(super) created_at: OffsetDateTime,
}

/// Of up to [`MAX_BATCH_RANGES`] that wait, those that are indexed together, and whether more may wait.
pub(super) fn next_batch(mut waiting: Vec<PendingRange>) -> (Vec<PendingRange>, bool) {
    let is_full = to_i64(waiting.len()) >= MAX_BATCH_RANGES;
    let mut bytes = 0;
    let fits = waiting.iter().take_while(|run| {
        let before = bytes;
        bytes += run.bytes;
        before < MAX_BATCH_BYTES
    });
    let (fits, all) = (fits.count(), waiting.len());
    waiting.truncate(fits);
    (waiting, is_full || fits < all)
}

/// A message that is not in the index yet.
pub(super) struct PendingMessage {
    pub(super) tenant: String,
    pub(super) session: String,
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
    /// `None`: now.
    pub(super) created_at: Option<OffsetDateTime>,
    /// With a space between any two.
    pub(super) lexemes: String,
}

impl IndexEntry {
    /// With the lexeme of the user beside those of the message.
    fn new(
        tenant: &TenantId,
        session: &SessionId,
        user: &str,
        (seq, created_at): (i64, Option<OffsetDateTime>),
        lexemes: &str,
    ) -> Self {
        let (tenant, session) = (tenant.as_str().to_owned(), session.as_str().to_owned());
        Self { tenant, session, seq, created_at, lexemes: format!("{lexemes} {user}") }
    }
}

/// The rows of messages of one session, by their places and lexemes.
pub(super) fn index_entries(
    tenant: &TenantId,
    session: &SessionId,
    user: &UserId,
    places: impl Iterator<Item = (i64, Option<OffsetDateTime>)>,
    lexemes: &[String],
) -> Vec<IndexEntry> {
    let user = lexemes::user_lexeme(&lexemes::tenant_prefix(tenant), user);
    let entry = |(place, lexemes): (_, &String)| IndexEntry::new(tenant, session, &user, place, lexemes);
    places.zip(lexemes).map(entry).collect()
}

/// The rules by which what waits is indexed: those that the index goes by, whatever the settings of this process are, so
/// that it has one kind of words. `None`: they are of another version, and so is whoever indexes.
pub(super) fn analyzer_for(label: &str, own: Analyzer) -> Option<Analyzer> {
    // What is suspended begins anew in any case.
    if matches!(label, "" | "off") { Some(own) } else { Analyzer::parse_version(label) }
}

/// The rules by which an import is indexed.
pub(super) fn analyzer_for_import(label: &str, own: Option<Analyzer>) -> Option<Analyzer> {
    own.map(|own| analyzer_for(label, own).unwrap_or(own))
}

/// The rows of messages that wait. One that can't be read must not keep the others from being found: it is left out.
pub(super) async fn entries_of_pending(analyzer: Analyzer, messages: Vec<PendingMessage>) -> Vec<IndexEntry> {
    let entry = move |unindexed: PendingMessage| {
        let PendingMessage { tenant, session, user, seq, created_at, json } = unindexed;
        let ids = (TenantId::new(&*tenant), SessionId::new(&*session), UserId::new(user));
        let ((Ok(tenant), Ok(session), Ok(user)), Ok(message)) = (ids, Message::from_stored(json)) else {
            tracing::error!(tenant, session, seq, "a stored message can't be read: search won't find it");
            return None;
        };
        let lexemes = || lexemes::message_lexemes(analyzer, &tenant, &session, &message);
        let Ok(lexemes) = catch_unwind(AssertUnwindSafe(lexemes)) else {
            let (tenant, session) = (tenant.as_str(), session.as_str());
            tracing::error!(tenant, session, seq, "a message can't be indexed: search won't find it");
            return None;
        };
        let user = lexemes::user_lexeme(&lexemes::tenant_prefix(&tenant), &user);
        Some(IndexEntry::new(&tenant, &session, &user, (seq, Some(created_at)), &lexemes))
    };
    blocking::run(move || messages.into_iter().filter_map(entry).collect()).await
}

/// The lexemes of each message, but that of its user; none at all without rules to make them by.
pub(super) async fn lexemes_of_messages(
    analyzer: Option<Analyzer>,
    tenant: &TenantId,
    session: &SessionId,
    messages: impl ExactSizeIterator<Item = &Message> + Clone + Send,
) -> Vec<String> {
    let Some(analyzer) = analyzer else { return Vec::new() };
    // Few are not worth a copy.
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
    blocking::run(work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_waits_for_so_long_and_no_longer() {
        let now = Instant::now();
        assert!(check_deadline(now).is_ok());
        let before = now.checked_sub(INDEXING_TIMEOUT).expect("the machine runs for longer");
        assert!(matches!(check_deadline(before), Err(StoreError::IndexLagging(INDEXING_TIMEOUT))));
    }
}
