//! State and maintenance of the search index.
//!
//! Each session records which of its messages are in the index: its column `indexed_seq` is NULL if all of them are, and otherwise
//! the last message before the first missing one. Imports, forks, new users and stores without search set it, and the index worker
//! adds the missing messages. On Postgres, an exchange of a complete session is indexed in its own transaction. On SQLite it is
//! indexed later, because FTS5 writes many messages together at much lower cost.

use super::search::{MissingMessages, SearchFilter, StoredHit};
use super::statement::{DbRow as _, Sql};
use super::values::{DbTime, to_i64, user_from_column};
use super::{Store, StoreError, rows};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::lexemes;
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

/// Returns the analyzer for messages and queries. All replicas must use the analyzer recorded in the index, not their own
/// settings. Returns `None` if this release does not know the recorded analyzer; then a replica of another release indexes.
#[must_use]
pub fn analyzer_for(version: &str, own: Analyzer) -> Option<Analyzer> {
    if version.is_empty() { Some(own) } else { Analyzer::parse_version(version) }
}

/// Largest number of messages of a batch, and their approximate JSON size. A single message may be larger.
const MAX_BATCH_MESSAGES: i64 = 1000;
const MAX_BATCH_BYTES: i64 = 1024 * 1024;
/// Size of the lexemes that a statement inserts; those of a single message may be larger. SQLite copies a parameter several times.
const MAX_STATEMENT_BYTES: usize = 256 * 1024;
/// Number of sessions that are marked as missing at once.
const MAX_MARKED_SESSIONS: i64 = 250;
/// Largest number of sessions whose missing messages are read and counted.
const MAX_MISSING_SESSIONS: i64 = 1000;
/// Delay before another attempt if others have changed all sessions of a batch.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Missing messages of a session that are added in one batch.
struct MissingRange {
    tenant: String,
    session: String,
    incarnation: Uuid,
    indexed_seq: i64,
    through_seq: i64,
}

struct MissingMessage {
    /// Index of the range.
    range: usize,
    seq: i64,
    created_at: DbTime,
    user: String,
    json: String,
}

/// An entry of the index.
struct Entry {
    range: usize,
    seq: i64,
    created_at: DbTime,
    /// Separated by spaces.
    lexemes: String,
}

/// Selects the missing messages of the sessions with the most recent activity. `through_seq` is a column of its own, because
/// row-level security prevents index conditions on computed values.
macro_rules! select_missing {
    ($sessions:literal, $lateral:literal, $fence:literal) => {
        concat!(
            "WITH missing AS MATERIALIZED (
                SELECT place, tenant_id, session_id, user_id, incarnation, indexed_seq, CAST(CASE
                    WHEN last_seq - indexed_seq > $2 - before THEN indexed_seq + $2 - before ELSE last_seq END AS bigint)
                    AS through_seq
                FROM (
                    SELECT s.*, row_number() OVER recent AS place,
                        sum(last_seq - indexed_seq) OVER recent - (last_seq - indexed_seq) AS before
                    FROM (
                        SELECT tenant_id, session_id, user_id, incarnation, indexed_seq, last_seq, activity_hour
                        FROM sessions
                        WHERE ", $sessions, " AND indexed_seq IS NOT NULL
                        ORDER BY tenant_id, activity_hour DESC LIMIT $2
                    ) AS s
                    WINDOW recent AS (ORDER BY tenant_id, activity_hour DESC, session_id ROWS UNBOUNDED PRECEDING)
                ) AS counted
                WHERE before < $2
            )
            SELECT place, tenant_id, session_id, user_id, incarnation, indexed_seq, seq, created_at, redaction, message
            FROM (
                SELECT w.*, m.seq, m.created_at, m.redaction, m.message,
                    sum(octet_length(m.message)) OVER (ORDER BY place, m.seq ROWS UNBOUNDED PRECEDING)
                        - octet_length(m.message) AS bytes_before
                FROM missing AS w CROSS JOIN ",
            $lateral,
            " messages AS m
                WHERE m.tenant_id = w.tenant_id AND m.session_id = w.session_id AND m.seq > w.indexed_seq
                    AND m.seq <= w.through_seq ",
            $fence,
            "
            ) AS sized WHERE bytes_before < $3 ORDER BY place, seq"
        )
    };
}

/// `OFFSET 0` makes Postgres look up the messages of each session.
macro_rules! select_missing_on_postgres {
    ($sessions:literal) => {
        select_missing!(
            $sessions,
            "LATERAL (SELECT seq, created_at, redaction, message FROM",
            "OFFSET 0) AS m"
        )
    };
}

/// The missing messages of a tenant, or of all tenants on SQLite.
const SELECT_MISSING: Sql =
    Sql { postgres: select_missing_on_postgres!("tenant_id = $1"), sqlite: select_missing!("true", "", "") };
const SELECT_MISSING_OF_SESSION: Sql = Sql {
    postgres: select_missing_on_postgres!("tenant_id = $1 AND session_id = $4"),
    sqlite: select_missing!("tenant_id = $1 AND session_id = $4", "", ""),
};

/// Condition of sessions that were not changed since their messages were read.
macro_rules! unchanged_session {
    () => {
        "s.tenant_id = w.value ->> 0 AND s.session_id = w.value ->> 1 AND hex(s.incarnation) = upper(w.value ->> 2)
            AND s.indexed_seq = w.value ->> 3"
    };
}

/// Records the progress of unchanged sessions, and deletes earlier entries of these messages: by another analyzer, or without the
/// user. Ranges are one JSON text: lists of tenant, session, incarnation, `indexed_seq` and the last message.
const ADVANCE_SESSIONS: Sql = Sql {
    postgres: "SELECT $1 AS tenant_id, session_id FROM advance_index($1, CAST($2 AS json)) AS session_id",
    sqlite: concat!(
        "DELETE FROM search WHERE id IN (
            SELECT e.id FROM json_each($2) AS w CROSS JOIN sessions AS s ON ",
        unchanged_session!(),
        " CROSS JOIN search AS e ON e.tenant_id = s.tenant_id AND e.session_id = s.session_id
                AND e.seq > w.value ->> 3 AND e.seq <= w.value ->> 4
        );
        UPDATE sessions AS s SET indexed_seq = nullif(w.value ->> 4, s.last_seq) FROM json_each($2) AS w WHERE ",
        unchanged_session!(),
        " RETURNING tenant_id, session_id"
    ),
};

/// Entries are one JSON text: lists of tenant, session, `seq`, time and lexemes. They are inserted in the given order, because a
/// higher id means a later message.
const INSERT_ENTRIES: Sql = Sql {
    postgres: "\
        INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
        SELECT $1, w ->> 1, CAST(w ->> 2 AS bigint), timestamptz 'epoch'
                + CAST(w ->> 3 AS bigint) / 1000000 * interval '1 second'
                + CAST(w ->> 3 AS bigint) % 1000000 * interval '1 microsecond',
            array_to_tsvector(string_to_array(w ->> 4, ' '))
        FROM json_array_elements(CAST($2 AS json)) WITH ORDINALITY AS e (w, place) ORDER BY place",
    sqlite: "\
        INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
        SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each($2) ORDER BY key",
};

const SELECT_ANALYZER: &str = "\
    SELECT version, rebuild_tenant, rebuild_session FROM search_analyzer";

impl Store {
    /// Returns the messages that are missing from the index, of the sessions with the most recent activity: at most
    /// `max_messages`, until their JSON exceeds `max_bytes`. Considers only session and user of the filter.
    pub async fn missing_messages(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        max_messages: i64,
        max_bytes: i64,
    ) -> Result<MissingMessages, StoreError> {
        /// The bounds of a range are columns of their own, because row-level security prevents index conditions on computed
        /// values.
        macro_rules! select_newest_missing {
            ($lateral:literal, $fence:literal) => {
                concat!("WITH due AS MATERIALIZED (
                SELECT s.*, row_number() OVER recent AS place,
                    sum(last_seq - indexed_seq) OVER recent - (last_seq - indexed_seq) AS before
                FROM (
                    SELECT session_id, indexed_seq, last_seq, activity_hour, updated_at FROM sessions
                    WHERE tenant_id = $1 AND indexed_seq IS NOT NULL AND ($2 IS NULL OR session_id = $2)
                        AND ($3 IS NULL OR user_id = $3)
                    ORDER BY activity_hour DESC LIMIT $6
                ) AS s
                WINDOW recent AS (ORDER BY activity_hour DESC, updated_at DESC, session_id ROWS UNBOUNDED PRECEDING)
            ), ranges AS MATERIALIZED (
                SELECT session_id, place, last_seq, CAST(CASE
                    WHEN last_seq - indexed_seq > $4 - before THEN last_seq - ($4 - before) ELSE indexed_seq END
                    AS bigint) AS after_seq
                FROM due WHERE before < $4
            )
            SELECT (SELECT version FROM search_analyzer) AS analyzer,
                (SELECT CAST(coalesce(sum(last_seq - indexed_seq), 0) AS bigint) FROM due) AS missing,
                found.session_id, found.seq, found.created_at, found.redaction, found.message
            FROM (SELECT 1) AS always LEFT JOIN (
                SELECT session_id, seq, created_at, redaction, message FROM (
                    SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message,
                        sum(octet_length(m.message)) OVER (ORDER BY place, m.seq DESC ROWS UNBOUNDED PRECEDING)
                            - octet_length(m.message) AS before
                    FROM ranges AS r CROSS JOIN ", $lateral, " messages AS m
                    WHERE m.tenant_id = $1 AND m.session_id = r.session_id AND m.seq > r.after_seq
                        AND m.seq <= r.last_seq ", $fence, "
                ) AS sized WHERE before < $5
            ) AS found ON true")
            };
        }
        const SELECT_NEWEST_MISSING: Sql = Sql {
            postgres: select_newest_missing!(
                "LATERAL (SELECT session_id, seq, created_at, redaction, message FROM",
                "OFFSET 0) AS m"
            ),
            sqlite: select_newest_missing!("", ""),
        };
        let statement = self.statement(tenant, SELECT_NEWEST_MISSING);
        let statement = statement.bind(filter.session.as_ref().map(SessionId::as_str));
        let statement = statement.bind(filter.user.as_ref().map(UserId::as_str)).bind(max_messages);
        let mut missing = MissingMessages::default();
        for row in &statement.bind(max_bytes).bind(MAX_MISSING_SESSIONS).read_all().await? {
            missing.analyzer = row.field::<Option<_>>("analyzer")?.unwrap_or_default();
            missing.others = row.field("missing")?;
            if let Some(json) = row.field("message")? {
                let (message_ref, redacted_at) = (rows::message_ref(row)?, rows::redacted_at(row)?);
                missing.newest.push(StoredHit { message_ref, redacted_at, json });
            }
        }
        missing.others -= to_i64(missing.newest.len());
        Ok(missing)
    }

    /// Returns the state of the index.
    pub async fn index_state(&self) -> Result<IndexState, StoreError> {
        const SELECT_UNINDEXED: Sql = Sql {
            postgres: "SELECT tenant_id, sessions, messages FROM unindexed_tenants()",
            sqlite:
                "SELECT tenant_id, count(*) AS sessions, sum(last_seq - indexed_seq) AS messages FROM sessions
                WHERE indexed_seq IS NOT NULL GROUP BY tenant_id",
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
        const UPDATE_ANALYZER: &str = "\
            UPDATE search_analyzer SET version = $1, rebuild_tenant = CASE WHEN EXISTS (SELECT 1 FROM search) THEN '' END,
                rebuild_session = CASE WHEN EXISTS (SELECT 1 FROM search) THEN '' END
            WHERE version <> $1 AND ($2 OR NOT EXISTS (SELECT 1 FROM search))";
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

    /// Returns the analyzer of the index, if this release knows it and search is enabled.
    async fn analyzer_of_index(&self) -> Result<Option<Analyzer>, StoreError> {
        let Some(own) = self.analyzer() else { return Ok(None) };
        let version = match self.global_statement(SELECT_ANALYZER).read().await? {
            Some(row) => row.field("version")?,
            None => self.record_analyzer(own, false).await?,
        };
        let analyzer = Analyzer::parse_version(&version);
        if let Self::Postgres(database) = self {
            database.hints.set_analyzer(analyzer);
        }
        Ok(analyzer)
    }

    /// Adds a batch of missing messages to the index. Returns their number, or `None` if no messages are missing. Then, Postgres also
    /// flushes the pending list of its full-text index.
    ///
    /// On Postgres, the tenants are those in which this store has seen missing messages; [`Store::index_state`] finds all of them.
    pub async fn index_batch(&self) -> Result<Option<usize>, StoreError> {
        let Some(analyzer) = self.analyzer_of_index().await? else { return Ok(None) };
        let tenant = match self {
            Self::Postgres(database) => database.hints.take_unindexed(),
            Self::Sqlite(_) => None,
        };
        if tenant.is_some() || matches!(self, Self::Sqlite(_)) {
            let indexed = self.index_missing(analyzer, tenant.as_ref(), None).await;
            if let (Some(tenant), true) = (&tenant, !matches!(indexed, Ok(None))) {
                self.note_unindexed(tenant);
            }
            if let Some(indexed) = indexed?.or(tenant.map(|_| 0)) {
                return Ok(Some(indexed));
            }
        }
        if self.mark_sessions().await? {
            return Ok(Some(0));
        }
        if let Self::Postgres(database) = self {
            database.flush_search_index().await?;
        }
        Ok(None)
    }

    /// Adds all missing messages of a session to the index.
    pub async fn index_session(&self, tenant: &TenantId, session: &SessionId) -> Result<(), StoreError> {
        let Some(analyzer) = self.analyzer_of_index().await? else { return Ok(()) };
        while self.index_missing(analyzer, Some(tenant), Some(session)).await?.is_some() {}
        Ok(())
    }

    /// Remembers that messages of a tenant may be missing.
    pub(super) fn note_unindexed(&self, tenant: &TenantId) {
        if let Self::Postgres(database) = self {
            database.hints.note_unindexed(tenant);
        }
    }

    /// Adds a batch of missing messages of a tenant to the index; on SQLite, of all tenants if none is given. Returns their number,
    /// or `None` if no messages are missing.
    async fn index_missing(
        &self,
        analyzer: Analyzer,
        tenant: Option<&TenantId>,
        session: Option<&SessionId>,
    ) -> Result<Option<usize>, StoreError> {
        let sql = if session.is_some() { SELECT_MISSING_OF_SESSION } else { SELECT_MISSING };
        let statement = match tenant {
            Some(tenant) => self.statement(tenant, sql),
            None => self.global_statement(sql).bind(None::<&str>),
        };
        let mut statement = statement.bind(MAX_BATCH_MESSAGES).bind(MAX_BATCH_BYTES);
        if let Some(session) = session {
            statement = statement.bind(session.as_str());
        }
        let rows = statement.read_all().await?;
        let (mut ranges, mut messages, mut last_place) = (Vec::<MissingRange>::new(), Vec::new(), 0);
        for row in &rows {
            let (place, seq): (i64, i64) = (row.field("place")?, row.field("seq")?);
            match ranges.last_mut().filter(|_| place == last_place) {
                Some(range) => range.through_seq = seq,
                None => ranges.push(MissingRange {
                    tenant: row.field("tenant_id")?,
                    session: row.field("session_id")?,
                    incarnation: row.field("incarnation")?,
                    indexed_seq: row.field("indexed_seq")?,
                    through_seq: seq,
                }),
            }
            last_place = place;
            if row.field::<Option<&str>>("redaction")?.is_none() {
                messages.push(MissingMessage {
                    range: ranges.len() - 1,
                    seq,
                    created_at: row.field("created_at")?,
                    user: row.field("user_id")?,
                    json: row.field("message")?,
                });
            }
        }
        let Some(first) = ranges.first() else { return Ok(None) };
        let tenant = TenantId::new(&*first.tenant).map_err(StoreError::corrupt("a tenant id"))?;
        let analyze = move || {
            let entries =
                messages.into_iter().filter_map(|message| entry(analyzer, &ranges, message)).collect();
            (ranges, entries)
        };
        let (ranges, entries): (_, Vec<Entry>) = blocking::spawn_cpu(analyze).await;
        let inserted = self.insert_entries(analyzer, &tenant, &ranges, entries).await?;
        if inserted.is_none() {
            tokio::time::sleep(RETRY_DELAY).await;
        }
        Ok(Some(inserted.unwrap_or(0)))
    }

    /// Inserts the entries of the ranges whose sessions are unchanged. Returns their number, or `None` if all have changed.
    async fn insert_entries(
        &self,
        analyzer: Analyzer,
        tenant: &TenantId,
        ranges: &[MissingRange],
        mut entries: Vec<Entry>,
    ) -> Result<Option<usize>, StoreError> {
        let mut transaction = self.begin(tenant).await?;
        let row = transaction.statement(SELECT_ANALYZER).read().await?;
        if row.is_none_or(|row| {
            row.field::<String>("version").is_ok_and(|version| version != analyzer.version())
        }) {
            return Ok(None);
        }
        let statement = transaction.statement(ADVANCE_SESSIONS).bind(tenant.as_str());
        let advanced = statement.bind(ranges_json(ranges)).read_all().await?;
        let advanced = advanced.iter().map(|row| Ok((row.field("tenant_id")?, row.field("session_id")?)));
        let advanced: BTreeSet<(String, String)> = advanced.collect::<Result<_, sqlx::Error>>()?;
        let is_advanced =
            |range: &MissingRange| advanced.contains(&(range.tenant.clone(), range.session.clone()));
        let kept: Vec<bool> = ranges.iter().map(is_advanced).collect();
        let entry = |Entry { range, seq, created_at, lexemes }: Entry| {
            let MissingRange { tenant, session, .. } = ranges.get(range)?;
            kept.get(range)?.then(|| json!([tenant, session, seq, created_at.micros(), lexemes]))
        };
        // Sessions follow each other, but a higher id means a later message.
        entries.sort_by_key(|entry| entry.created_at.micros());
        let entries: Vec<Value> = entries.into_iter().filter_map(entry).collect();
        let count = entries.len();
        let mut rest = entries.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |entry: &&Value| {
                let before = bytes;
                bytes += entry.get(4).and_then(Value::as_str).map_or(0, str::len);
                before < MAX_STATEMENT_BYTES
            };
            let (part, others) = rest.split_at(rest.iter().take_while(fits).count());
            let statement = transaction.statement(INSERT_ENTRIES).bind(tenant.as_str());
            statement.bind(Value::from(part).to_string()).execute().await?;
            rest = others;
        }
        transaction.commit().await?;
        Ok((!advanced.is_empty()).then_some(count))
    }

    /// Marks the next sessions as missing if the index is being rebuilt. Returns `false` if it is not.
    async fn mark_sessions(&self) -> Result<bool, StoreError> {
        /// Branches of rewinds are not indexed, except for later messages.
        const MARK_SESSIONS: Sql = Sql {
            postgres: "SELECT $1 AS tenant_id, session_id FROM mark_sessions($1, $2, $3) AS session_id
                WHERE session_id IS NOT NULL",
            sqlite: "UPDATE sessions
                SET indexed_seq = iif(last_seq > 0 AND coalesce(fork_kind, '') <> 'rewind', 0, indexed_seq)
                WHERE rowid IN (SELECT rowid FROM sessions WHERE (tenant_id, session_id) > ($1, $2)
                    ORDER BY tenant_id, session_id LIMIT $3)
                RETURNING tenant_id, session_id",
        };
        const SELECT_NEXT_TENANT: &str =
            "SELECT min(tenant_id) AS tenant_id FROM tenants WHERE tenant_id > $1";
        const ADVANCE_REBUILD: &str = "\
            UPDATE search_analyzer SET rebuild_tenant = $3, rebuild_session = $4
            WHERE rebuild_tenant = $1 AND rebuild_session = $2";
        let Some(row) = self.global_statement(SELECT_ANALYZER).read().await? else { return Ok(false) };
        let position = row.field::<Option<String>>("rebuild_tenant")?.zip(row.field("rebuild_session")?);
        let Some((of_tenant, after)): Option<(String, String)> = position else { return Ok(false) };
        let tenant = TenantId::new(&*of_tenant).ok();
        let mut transaction = match &tenant {
            Some(tenant) => self.begin(tenant).await?,
            None => self.begin_global().await?,
        };
        let statement = transaction.statement(MARK_SESSIONS).bind(&*of_tenant).bind(&*after);
        let marked = statement.bind(MAX_MARKED_SESSIONS).read_all().await?;
        let marked = marked.iter().map(|row| Ok((row.field("tenant_id")?, row.field("session_id")?)));
        let mut next: Option<(String, String)> =
            marked.collect::<Result<BTreeSet<_>, sqlx::Error>>()?.pop_last();
        if next.is_none() {
            let row = transaction.statement(SELECT_NEXT_TENANT).bind(&*of_tenant).read().await?;
            let tenant = row.map(|row| row.field::<Option<String>>("tenant_id")).transpose()?.flatten();
            next = tenant.map(|tenant| (tenant, String::new()));
        }
        let (next_tenant, next_session) = next.unzip();
        let statement = transaction.statement(ADVANCE_REBUILD).bind(&*of_tenant).bind(&*after);
        // Another replica may have marked the same sessions.
        if statement.bind(next_tenant).bind(next_session).execute().await? > 0 {
            transaction.commit().await?;
        }
        if let Some(tenant) = &tenant {
            self.note_unindexed(tenant);
        }
        Ok(true)
    }
}

/// Returns the entry of a message. An unreadable message gets none, so that it does not block the others.
fn entry(analyzer: Analyzer, ranges: &[MissingRange], message: MissingMessage) -> Option<Entry> {
    let MissingMessage { range, seq, created_at, user, json } = message;
    let MissingRange { tenant, session, .. } = ranges.get(range)?;
    let lexemes = || {
        let (tenant, session) = (TenantId::new(&**tenant).ok()?, SessionId::new(&**session).ok()?);
        let user = user_from_column(user).ok()?;
        let mut lexemes =
            lexemes::message_lexemes(analyzer, &tenant, &session, &Message::from_stored(json).ok()?);
        if let Some(user) = user {
            lexemes.push(' ');
            lexemes += &lexemes::user_lexeme(&lexemes::tenant_prefix(&tenant), &user);
        }
        Some(lexemes)
    };
    let lexemes = catch_unwind(AssertUnwindSafe(lexemes)).ok().flatten();
    if lexemes.is_none() {
        tracing::error!(tenant, session, seq, "failed to index a stored message; search will not find it");
    }
    Some(Entry { range, seq, created_at, lexemes: lexemes? })
}

fn ranges_json(ranges: &[MissingRange]) -> String {
    let range = |MissingRange { tenant, session, incarnation, indexed_seq, through_seq }: &MissingRange| {
        json!([tenant, session, incarnation.simple().to_string(), indexed_seq, through_seq])
    };
    ranges.iter().map(range).collect::<Value>().to_string()
}
