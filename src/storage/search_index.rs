//! State and maintenance of the search index.
//!
//! Each session records which of its messages are in the index: its column `indexed_seq` is NULL if all of them are, and otherwise
//! the last message before the first missing one. An exchange of a complete session is indexed in its own transaction. Imports, forks, new
//! users, large exchanges and stores without search set the column, and the index worker adds the missing messages.

use super::index_hints::IndexHints;
use super::search::{IndexSnapshot, MissingMessages, SearchFilter, Span, read_spans_in};
use super::statement::{AnyRow, DbRow as _, Sql};
use super::values::{DbTime, to_i64, user_column, user_from_column};
use super::{Store, StoreError, StoredMessage, rows};
use crate::blocking;
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::index_terms;
use crate::domain::search::recent::RecentTerms;
use crate::domain::search::text::OwnResults;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use uuid::Uuid;

/// The state of the search index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexState {
    /// The [`Analyzer::version`] that the index was built with. Empty if it has none.
    pub analyzer: String,
    /// `true` if sessions are still to be marked as missing, after a change of the analyzer.
    pub is_rebuilding: bool,
    /// Number of sessions with missing messages.
    pub sessions: i64,
    /// Number of missing messages.
    pub messages: i64,
}

/// The messages that were added to the index together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexedBatch {
    pub messages: usize,
}

/// Returns the analyzer for messages and queries. All replicas must use the analyzer recorded in the index, not their own
/// settings. Returns `None` if this release does not know the recorded analyzer; then a replica of another release indexes.
#[must_use]
pub fn analyzer_for(version: &str, own: Analyzer) -> Option<Analyzer> {
    if version.is_empty() { Some(own) } else { Analyzer::parse_version(version) }
}

/// Largest number of messages of a batch, and their approximate JSON size. A single message may be larger.
const MAX_BATCH_MESSAGES: i64 = 1000;
const MAX_BATCH_BYTES: i64 = 512 * 1024;
/// Largest number of sessions whose missing messages are counted: more than a search reads messages, so that its response counts others
/// if there are more sessions.
const MAX_MISSING_SESSIONS: i64 = 5001;
/// Number of sessions that are marked as missing at once.
const MAX_MARKED_SESSIONS: i64 = 250;
/// Delay before another attempt if others have changed all sessions of a batch.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// A session with missing messages.
struct UnindexedSession {
    tenant: TenantId,
    session: SessionId,
    user: Option<UserId>,
    incarnation: Uuid,
    indexed_seq: i64,
    last_seq: i64,
}

/// A session with the messages of a batch.
struct Part {
    session: UnindexedSession,
    /// The last message of the batch.
    through_seq: i64,
    own_results: OwnResults,
    /// Number of messages with terms. Redacted ones have none.
    messages: i64,
    /// The terms, as [`RecentTerms`] that end with the last message of the session.
    terms: String,
}

/// Selects the version of the analyzer, and the sessions with missing messages by the time of their last activity. Each order is that of
/// an index, in one of its directions.
macro_rules! select_unindexed {
    ($tenant:literal, newest first) => {
        select_unindexed!($tenant, "", "DESC")
    };
    ($tenant:literal, oldest first) => {
        select_unindexed!($tenant, "DESC", "")
    };
    ($tenant:literal, $of_tenants:literal, $of_times:literal) => {
        concat!(
            "SELECT a.version, s.* FROM (SELECT 1) AS always LEFT JOIN search_analyzer AS a ON true LEFT JOIN (
                SELECT tenant_id, session_id, user_id, incarnation, indexed_seq, last_seq, activity_hour, updated_at
                FROM sessions
                WHERE ", $tenant, " AND indexed_seq IS NOT NULL AND ($2 IS NULL OR session_id = $2)
                    AND ($3 IS NULL OR user_id = $3)
                ORDER BY tenant_id ", $of_tenants, ", activity_hour ", $of_times, " LIMIT $4
            ) AS s ON true
            ORDER BY tenant_id ", $of_tenants, ", activity_hour ", $of_times, ", updated_at ", $of_times, ", session_id"
        )
    };
}

/// Condition of a part whose session was not changed since its messages were read.
macro_rules! is_unchanged {
    () => {
        "s.tenant_id = p.value ->> 0 AND s.session_id = p.value ->> 1 AND hex(s.incarnation) = upper(p.value ->> 2)
            AND s.indexed_seq = p.value ->> 3 AND EXISTS (SELECT 1 FROM search_analyzer WHERE version = $2)"
    };
}

/// Adds the messages of the parts `$3` whose sessions are unchanged and records their progress, if the analyzer of the index is `$2`. Parts
/// are lists of tenant, session, incarnation, `indexed_seq`, the last message, user, `last_seq`, and the number and the terms of the messages.
/// Returns the number of sessions.
const INDEX_BATCH: Sql = Sql {
    postgres: "SELECT index_parts($1, $2, CAST($3 AS json)) AS sessions",
    sqlite: concat!(
        "INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, entries)
            SELECT s.tenant_id, $2, sum(p.value ->> 7), sum(octet_length(p.value ->> 8)),
                json_group_array(json_array(s.session_id, p.value ->> 5, p.value ->> 6, 0, p.value ->> 8))
            FROM jsonb_each($3) AS p CROSS JOIN sessions AS s ON ",
        is_unchanged!(),
        " WHERE p.value ->> 7 > 0 GROUP BY s.tenant_id;
        UPDATE sessions AS s SET indexed_seq = nullif(p.value ->> 4, s.last_seq) FROM jsonb_each($3) AS p WHERE ",
        is_unchanged!(),
        "; SELECT changes() AS sessions"
    ),
};

const SELECT_ANALYZER: &str = "SELECT version, rebuild_tenant, rebuild_session FROM search_analyzer";

/// Condition of the statements of a rebuild: another process has not continued it.
macro_rules! is_at_position {
    () => {
        "EXISTS (SELECT 1 FROM search_analyzer WHERE rebuild_tenant = $1 AND rebuild_session = $2)"
    };
}

/// Condition of the last statements of a rebuild: all sessions are marked.
macro_rules! is_last_position {
    () => {
        concat!(
            is_at_position!(),
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE (tenant_id, session_id) > ($1, $2))"
        )
    };
}

/// Marks the next sessions of a rebuild as missing, after this tenant and session. Empties the index after all sessions are marked: until
/// then, searches use the entries of the earlier analyzer. Nothing is added to the index meanwhile. Branches of rewinds are not indexed,
/// except for later messages.
const MARK_SESSIONS: Sql = Sql {
    postgres: "SELECT mark_next_sessions($1, $2, $3)",
    sqlite: concat!(
        "DELETE FROM search_recent WHERE id IN (SELECT id FROM search_recent ORDER BY id LIMIT 64) AND ",
        is_last_position!(),
        "; DELETE FROM search_pages WHERE segment_id IN (SELECT id FROM search_segments ORDER BY id LIMIT 16) AND ",
        is_last_position!(),
        "; DELETE FROM search_segments WHERE id IN (SELECT id FROM search_segments ORDER BY id LIMIT 16) AND ",
        is_last_position!(),
        "; UPDATE sessions
        SET indexed_seq = iif(last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind', 0, indexed_seq)
        WHERE ", is_at_position!(), " AND rowid IN (
            SELECT rowid FROM sessions WHERE (tenant_id, session_id) > ($1, $2) ORDER BY tenant_id, session_id LIMIT $3
        );
        UPDATE search_analyzer SET (rebuild_tenant, rebuild_session) = (
            SELECT tenant_id, session_id FROM (
                SELECT tenant_id, session_id FROM sessions WHERE (tenant_id, session_id) > ($1, $2)
                ORDER BY tenant_id, session_id LIMIT $3
            ) ORDER BY tenant_id DESC, session_id DESC LIMIT 1
        )
        WHERE rebuild_tenant = $1 AND rebuild_session = $2 AND (
            EXISTS (SELECT 1 FROM sessions WHERE (tenant_id, session_id) > ($1, $2))
            OR NOT EXISTS (SELECT 1 FROM search_recent) AND NOT EXISTS (SELECT 1 FROM search_segments)
        )"
    ),
};

impl Store {
    /// Returns the sessions with missing messages, of all tenants if none is given, the least recently active ones first.
    async fn unindexed_sessions(
        &self,
        tenant: Option<&TenantId>,
        session: Option<&SessionId>,
        limit: i64,
    ) -> Result<Vec<UnindexedSession>, StoreError> {
        let statement = match tenant {
            Some(tenant) => self.statement(tenant, select_unindexed!("tenant_id = $1", oldest first)),
            None => self.global_statement(select_unindexed!("$1 IS NULL", oldest first)).bind(None::<&str>),
        };
        let statement = statement.bind(session.map(SessionId::as_str)).bind(None::<&str>).bind(limit);
        Ok(decode_unindexed(&statement.read_all().await?)?.1)
    }

    /// Returns the messages that are missing from the index, as [`IndexSnapshot::missing_messages`] does.
    pub async fn missing_messages(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        max_messages: i64,
        max_bytes: i64,
    ) -> Result<MissingMessages, StoreError> {
        let mut index = self.index_snapshot(tenant).await?;
        index.missing_messages(filter, max_messages, max_bytes).await
    }

    /// Returns the state of the index, and remembers the tenants with work for [`Self::index_batch`], which are also those with removals or
    /// [`MAX_RECENT_ROWS`](super::index_hints::MAX_RECENT_ROWS).
    pub async fn index_state(&self) -> Result<IndexState, StoreError> {
        const SELECT_UNINDEXED: Sql = Sql {
            postgres: "SELECT tenant_id, sessions, messages FROM unindexed_tenants()",
            sqlite:
                "SELECT tenant_id, count(*) AS sessions, sum(last_seq - indexed_seq) AS messages FROM sessions
                WHERE indexed_seq IS NOT NULL GROUP BY tenant_id
                UNION ALL SELECT tenant_id, 0, 0 FROM (
                    SELECT tenant_id FROM search_recent GROUP BY tenant_id HAVING count(*) >= 32
                    UNION SELECT tenant_id FROM search_removals
                )",
        };
        let recorded = self.global_statement(SELECT_ANALYZER).read().await?;
        let mut state = IndexState::default();
        if let Some(row) = recorded {
            state.analyzer = row.field("version")?;
            state.is_rebuilding = row.field::<Option<&str>>("rebuild_tenant")?.is_some();
        }
        for row in &self.global_statement(SELECT_UNINDEXED).read_all().await? {
            state.sessions += row.field::<i64>("sessions")?;
            state.messages += row.field::<i64>("messages")?;
            self.note_unindexed(&rows::tenant_id(row)?);
        }
        Ok(state)
    }

    /// Records the analyzer of the index if it has none or no entries. If it has another one, `rebuild` replaces it; all messages
    /// are then indexed again. Returns the version of the analyzer of the index.
    pub async fn record_analyzer(&self, analyzer: Analyzer, rebuild: bool) -> Result<String, StoreError> {
        /// Waits for the exchanges that are being indexed by another analyzer.
        const LOCK_ANALYZER: Sql =
            Sql { postgres: "LOCK TABLE search_analyzer IN ACCESS EXCLUSIVE MODE", sqlite: "SELECT 1" };
        const INSERT_ANALYZER: &str =
            "INSERT INTO search_analyzer (id, version) VALUES (1, $1) ON CONFLICT DO NOTHING";
        macro_rules! update_analyzer {
            ($is_empty:literal) => {
                concat!(
                    "UPDATE search_analyzer SET version = $1, rebuild_tenant = CASE WHEN NOT e.is_empty THEN '' END,
                        rebuild_session = CASE WHEN NOT e.is_empty THEN '' END
                    FROM (SELECT ", $is_empty, " AS is_empty) AS e WHERE version <> $1 AND ($2 OR e.is_empty)"
                )
            };
        }
        const UPDATE_ANALYZER: Sql = Sql {
            postgres: update_analyzer!("is_search_index_empty()"),
            sqlite: update_analyzer!(
                "NOT EXISTS (SELECT 1 FROM search_recent) AND NOT EXISTS (SELECT 1 FROM search_segments)"
            ),
        };
        let version = analyzer.version();
        let recorded = self.global_statement(SELECT_ANALYZER).read().await?;
        if recorded.is_none_or(|row| row.field::<&str>("version").is_ok_and(|recorded| recorded != version)) {
            let mut transaction = self.begin_global().await?;
            transaction.statement(LOCK_ANALYZER).execute().await?;
            transaction.statement(INSERT_ANALYZER).bind(&*version).execute().await?;
            transaction.statement(UPDATE_ANALYZER).bind(&*version).bind(rebuild).execute().await?;
            transaction.commit().await?;
        }
        let row = self.global_statement(SELECT_ANALYZER).read().await?.ok_or(sqlx::Error::RowNotFound)?;
        Ok(row.field("version")?)
    }

    /// Returns the analyzer of the index, if this release knows it and search is enabled, and the position of a rebuild.
    async fn analyzer_of_index(&self) -> Result<Option<(Analyzer, Option<(String, String)>)>, StoreError> {
        let Some(own) = self.analyzer() else { return Ok(None) };
        let (version, position) = match self.global_statement(SELECT_ANALYZER).read().await? {
            Some(row) => {
                let tenant: Option<String> = row.field("rebuild_tenant")?;
                (row.field("version")?, tenant.zip(row.field("rebuild_session")?))
            }
            None => (self.record_analyzer(own, false).await?, None),
        };
        let analyzer = Analyzer::parse_version(&version);
        self.hints().set_analyzer(analyzer);
        Ok(analyzer.map(|analyzer| (analyzer, position)))
    }

    /// Adds a batch of missing messages to the index. Returns `None` if no messages are missing.
    ///
    /// On Postgres, the tenants are those in which this store has seen missing messages; [`Store::index_state`] finds all of them.
    pub async fn index_batch(&self) -> Result<Option<IndexedBatch>, StoreError> {
        let Some((analyzer, position)) = self.analyzer_of_index().await? else { return Ok(None) };
        // All sessions are marked before the first one is indexed: until then, a search does not find the messages of a session by the
        // new analyzer, and does not know that they are missing.
        if let Some((tenant, session)) = position {
            let statement = self.global_statement(MARK_SESSIONS).bind(&*tenant).bind(&*session);
            statement.bind(MAX_MARKED_SESSIONS).write_together().await?;
            if let Ok(tenant) = TenantId::new(tenant) {
                self.note_unindexed(&tenant);
            }
            return Ok(Some(IndexedBatch::default()));
        }
        let tenant = self.hints().take_tenant();
        let of_tenant = match self {
            Self::Postgres(_) if tenant.is_none() => return Ok(None),
            Self::Postgres(_) => tenant.as_ref(),
            Self::Sqlite(_) => None,
        };
        let indexed = self.index_missing(analyzer, of_tenant, None).await;
        if let (Some(tenant), Ok(Some(_)) | Err(_)) = (of_tenant, &indexed) {
            self.note_unindexed(tenant);
        }
        if let Some(tenant) = &tenant {
            self.compact_index(tenant, &analyzer.version()).await?;
        }
        let indexed = indexed?;
        Ok(indexed.or(tenant.map(|_| IndexedBatch::default())))
    }

    /// Adds all missing messages of a session to the index.
    pub async fn index_session(&self, tenant: &TenantId, session: &SessionId) -> Result<(), StoreError> {
        let Some((analyzer, None)) = self.analyzer_of_index().await? else { return Ok(()) };
        while self.index_missing(analyzer, Some(tenant), Some(session)).await?.is_some() {}
        Ok(())
    }

    /// Remembers that messages of a tenant may be missing.
    pub(super) fn note_unindexed(&self, tenant: &TenantId) {
        self.hints().note_unindexed(tenant);
    }

    pub(super) fn hints(&self) -> &IndexHints {
        match self {
            Self::Postgres(database) => &database.hints,
            Self::Sqlite(database) => &database.hints,
        }
    }

    /// Adds a batch of missing messages of a tenant to the index; on SQLite, of all tenants if none is given. Returns `None` if no
    /// messages are missing.
    async fn index_missing(
        &self,
        analyzer: Analyzer,
        tenant: Option<&TenantId>,
        session: Option<&SessionId>,
    ) -> Result<Option<IndexedBatch>, StoreError> {
        let sessions = self.unindexed_sessions(tenant, session, MAX_BATCH_MESSAGES).await?;
        let spans = missing_spans(&sessions, false, MAX_BATCH_MESSAGES);
        let messages = if spans.is_empty() {
            Vec::new()
        } else {
            self.read_spans(tenant, None, spans.into_iter(), MAX_BATCH_BYTES, i64::MAX).await?
        };
        let parts = blocking::spawn_cpu(move || analyze(analyzer, sessions, messages)).await;
        let Some(Part { session: UnindexedSession { tenant, .. }, .. }) = parts.first() else {
            return Ok(None);
        };
        let encoded = parts.iter().map(Part::encode).collect::<Value>().to_string();
        let statement = self.statement(tenant, INDEX_BATCH).bind(analyzer.version());
        let row = statement.bind(encoded).write_together().await?.ok_or(sqlx::Error::RowNotFound)?;
        let unchanged: i64 = row.field("sessions")?;
        for tenant in parts.iter().map(|part| &part.session.tenant).collect::<BTreeSet<_>>() {
            self.hints().note_unindexed(tenant);
        }
        if unchanged == 0 {
            tokio::time::sleep(RETRY_DELAY).await;
            return Ok(Some(IndexedBatch::default()));
        }
        let messages = parts.iter().map(|part| part.messages).sum::<i64>();
        Ok(Some(IndexedBatch { messages: usize::try_from(messages).unwrap_or_default() }))
    }
}

impl IndexSnapshot {
    /// Returns the messages that are missing from the index, of the sessions with the most recent activity: at most
    /// `max_messages`, until their JSON exceeds `max_bytes`. Considers only session and user of the filter. Counts the others in
    /// [`MAX_MISSING_SESSIONS`] sessions.
    pub async fn missing_messages(
        &mut self,
        filter: &SearchFilter,
        max_messages: i64,
        max_bytes: i64,
    ) -> Result<MissingMessages, StoreError> {
        let (tenant, transaction) = (&self.tenant, &mut self.transaction);
        let statement = transaction.statement(select_unindexed!("tenant_id = $1", newest first));
        let statement = statement.bind(tenant.as_str()).bind(filter.session.as_ref().map(SessionId::as_str));
        let statement = statement.bind(filter.user.as_ref().map(UserId::as_str)).bind(MAX_MISSING_SESSIONS);
        let (_, sessions) = decode_unindexed(&statement.read_all().await?)?;
        let missing: i64 = sessions.iter().map(UnindexedSession::missing).sum();
        let spans = missing_spans(&sessions, true, max_messages);
        let newest = if spans.is_empty() {
            Vec::new()
        } else {
            read_spans_in(transaction, tenant, None, spans.into_iter(), max_bytes, i64::MAX).await?
        };
        let newest: Vec<_> = newest.into_iter().map(|(_, session, message)| (session, message)).collect();
        Ok(MissingMessages { others: missing - to_i64(newest.len()), newest })
    }
}

/// Decodes the version of the analyzer, and the sessions with missing messages.
fn decode_unindexed(rows: &[AnyRow]) -> Result<(String, Vec<UnindexedSession>), StoreError> {
    let version = rows.first().map(|row| row.field::<Option<String>>("version")).transpose()?.flatten();
    let sessions = rows.iter().filter_map(|row| unindexed_session(row).transpose());
    Ok((version.unwrap_or_default(), sessions.collect::<Result<_, _>>()?))
}

/// Returns the spans of missing messages with the position of their session in `sessions`: of the newest or the oldest `max_messages`.
fn missing_spans(
    sessions: &[UnindexedSession],
    newest: bool,
    mut max_messages: i64,
) -> Vec<(usize, Span<'_>)> {
    let mut spans = Vec::new();
    for (place, unindexed) in sessions.iter().enumerate() {
        let count = unindexed.missing().min(max_messages);
        max_messages -= count;
        let UnindexedSession { tenant, session, indexed_seq, last_seq, .. } = unindexed;
        let (origin, first) = if newest { (*last_seq, last_seq - count + 1) } else { (0, indexed_seq + 1) };
        if count > 0 {
            spans.push((place, Span { tenant, session, origin, first, last: first + count - 1 }));
        }
    }
    spans
}

impl Part {
    /// Returns the part as [`INDEX_BATCH`] reads it.
    fn encode(&self) -> Value {
        let Self { session: of, through_seq, messages, terms, .. } = self;
        let (incarnation, user) = (of.incarnation.simple().to_string(), user_column(of.user.as_ref()));
        json!([
            of.tenant.as_str(),
            of.session.as_str(),
            incarnation,
            of.indexed_seq,
            through_seq,
            user,
            of.last_seq,
            messages,
            terms
        ])
    }
}

impl UnindexedSession {
    fn missing(&self) -> i64 {
        self.last_seq - self.indexed_seq
    }

    /// Returns the terms of a message, or `None` if it is unreadable.
    fn terms(analyzer: Analyzer, json: &str, own_results: &mut OwnResults) -> Option<String> {
        let message = format::read(json).ok()?;
        Some(index_terms::message_terms(analyzer, &message, own_results))
    }
}

fn unindexed_session(row: &AnyRow) -> Result<Option<UnindexedSession>, StoreError> {
    let Some(user) = row.field::<Option<String>>("user_id")? else { return Ok(None) };
    Ok(Some(UnindexedSession {
        tenant: rows::tenant_id(row)?,
        session: rows::session_id(row)?,
        user: user_from_column(user)?,
        incarnation: row.field("incarnation")?,
        indexed_seq: row.field("indexed_seq")?,
        last_seq: row.field("last_seq")?,
    }))
}

/// Returns the sessions with the terms of their messages, which have the positions of their sessions. An unreadable message gets no terms, so
/// that it does not block the others.
fn analyze(
    analyzer: Analyzer,
    sessions: Vec<UnindexedSession>,
    messages: Vec<(usize, SessionId, StoredMessage)>,
) -> Vec<Part> {
    let part = |session: UnindexedSession| Part {
        through_seq: session.indexed_seq,
        session,
        own_results: OwnResults::default(),
        messages: 0,
        terms: String::new(),
    };
    let mut parts: Vec<Part> = sessions.into_iter().map(part).collect();
    // The last sessions may have no messages in the batch.
    parts.truncate(messages.last().map_or(0, |(place, ..)| place + 1));
    for (place, _, StoredMessage { seq, created_at, redacted_at, json }) in messages {
        let Some(Part { session, through_seq, own_results, messages, terms }) = parts.get_mut(place) else {
            continue;
        };
        *through_seq = seq;
        if redacted_at.is_some() {
            continue;
        }
        let of_message =
            catch_unwind(AssertUnwindSafe(|| UnindexedSession::terms(analyzer, &json, own_results)))
                .ok()
                .flatten();
        if let Some(of_message) = of_message {
            let (from_end, micros) = (session.last_seq - seq, Some(DbTime(created_at).micros()));
            RecentTerms { from_end, micros, terms: &of_message }.write(terms);
            *messages += 1;
        } else {
            let (tenant, session) = (session.tenant.as_str(), session.session.as_str());
            tracing::error!(
                tenant,
                session,
                seq,
                "failed to index a stored message; search will not find it"
            );
        }
    }
    parts
}
