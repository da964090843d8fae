//! The implementation of [`Store`]. Statements that are the same on both databases, or differ only in a function, stand
//! here; [`postgres`](super::postgres) and [`sqlite`](super::sqlite) implement the methods whose statements differ.

use super::pool::retry_on_disconnect;
use super::postgres::Postgres;
use super::rows::{self, api_key_columns, revision_columns, session_columns};
use super::search::{MessageRef, SearchFilter, StoredHit, TermStatistics};
use super::search_index::{IndexState, ReindexRange};
use super::sqlite::Sqlite;
use super::statement::{AnyRow, DbRow as _, Sql, Statement};
use super::values::{DbTime, to_i64};
use super::{
    AppendOutcome, ContextSnapshot, ImportOutcome, LeaseCondition, MessageQuery, MessageRange, NewApiKey,
    NewMemoryDocument, NewRevision, RowBatches, SessionPosition, Store, StoreError, StoredApiKey,
    StoredMessage,
};
use crate::domain::api_key::{KeyHash, KeyId, KeyRecord};
use crate::domain::exchange::{Exchange, IdempotencyKey};
use crate::domain::export_format::ImportedSession;
use crate::domain::id::{KeyName, SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::Message;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::revision::Revision;
use crate::domain::search::lexemes::TermQuery;
use crate::domain::session::Session;
use async_trait::async_trait;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// Also the first step of a write on SQLite.
pub(super) const SELECT_MEMORY_DOCUMENT: &str = "\
    SELECT version, content, words, tokens, created_at FROM memories WHERE tenant_id = $1 AND user_id = $2";

/// A database of one of the two kinds.
#[derive(Debug)]
pub(super) enum Database {
    Postgres(Postgres),
    Sqlite(Sqlite),
}

impl Database {
    /// Returns a statement on the rows of one tenant. The tenant is its first parameter.
    fn statement<'d>(&'d self, tenant: &'d TenantId, sql: impl Into<Sql>) -> Statement<'d> {
        self.new_statement(Some(tenant), sql.into()).bind(tenant.as_str())
    }

    /// Returns a statement on tables that are not bound to a tenant.
    fn global_statement(&self, sql: impl Into<Sql>) -> Statement<'_> {
        self.new_statement(None, sql.into())
    }

    fn new_statement<'d>(&'d self, tenant: Option<&'d TenantId>, sql: Sql) -> Statement<'d> {
        match self {
            Self::Postgres(database) => {
                Statement::Postgres { database, tenant, query: sqlx::query(sql.postgres) }
            }
            Self::Sqlite(database) => Statement::Sqlite { database, query: sqlx::query(sql.sqlite) },
        }
    }
}

/// Calls the method of the database, for methods whose statements differ.
macro_rules! dispatch {
    ($self:ident, $method:ident($($argument:ident),*)) => {
        match $self {
            Self::Postgres(database) => database.$method($($argument),*).await,
            Self::Sqlite(database) => database.$method($($argument),*).await,
        }
    };
}

/// Decodes the row, if there is one.
fn decode<T>(
    row: Option<AnyRow>,
    decode: impl FnOnce(&AnyRow) -> Result<T, StoreError>,
) -> Result<Option<T>, StoreError> {
    row.map(|row| decode(&row)).transpose()
}

/// Converts a duration to the unit that statements expect.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[async_trait]
impl Store for Database {
    async fn migrate(&self) -> Result<(), StoreError> {
        dispatch!(self, migrate())
    }

    async fn check_ready(&self) -> Result<(), StoreError> {
        dispatch!(self, check_ready())
    }

    async fn close(&self) {
        dispatch!(self, close());
    }

    async fn create_api_key(&self, key: &NewApiKey) -> Result<Option<KeyRecord>, StoreError> {
        const INSERT_API_KEY: Sql = Sql {
            postgres: concat!(
                "INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at)
                VALUES ($1, $2, $3, $4, $5, now()) ON CONFLICT (key_id) DO NOTHING RETURNING ",
                api_key_columns!()
            ),
            sqlite: concat!(
                "INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at)
                VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (key_id) DO NOTHING RETURNING ",
                api_key_columns!()
            ),
        };
        let statement = self
            .global_statement(INSERT_API_KEY)
            .bind(key.id.as_str())
            .bind(key.tenant.as_str())
            .bind(key.name.as_ref().map(KeyName::as_str))
            .bind(key.scope.as_str())
            .bind(key.hash.as_bytes())
            .bind_now();
        decode(statement.write_returning().await?, rows::api_key)
    }

    async fn api_key(&self, id: &KeyId) -> Result<Option<StoredApiKey>, StoreError> {
        const SELECT_API_KEY: &str =
            concat!("SELECT hash, ", api_key_columns!(), " FROM api_keys WHERE key_id = $1");
        let read = async || self.global_statement(SELECT_API_KEY).bind(id.as_str()).read().await;
        decode(retry_on_disconnect(read).await?, |row| {
            let hash = KeyHash::from_bytes(row.field("hash")?).ok_or("wrong length");
            let hash = hash.map_err(StoreError::corrupt("the hash of an API key"))?;
            Ok(StoredApiKey { record: rows::api_key(row)?, hash })
        })
    }

    async fn api_keys(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError> {
        const SELECT_API_KEYS: &str = concat!(
            "SELECT ",
            api_key_columns!(),
            " FROM api_keys WHERE $1 IS NULL OR tenant_id = $1 ORDER BY created_at, key_id"
        );
        let statement = self.global_statement(SELECT_API_KEYS).bind(tenant.map(TenantId::as_str));
        statement.read_all().await?.iter().map(rows::api_key).collect()
    }

    async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError> {
        const REVOKE_API_KEY: Sql = Sql {
            postgres: "UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = $1",
            sqlite: "UPDATE api_keys SET revoked_at = coalesce(revoked_at, $2) WHERE key_id = $1",
        };
        Ok(self.global_statement(REVOKE_API_KEY).bind(id.as_str()).bind_now().execute().await? > 0)
    }

    async fn any_api_key(&self) -> Result<bool, StoreError> {
        const ANY_API_KEY: &str = "SELECT 1 AS found FROM api_keys LIMIT 1";
        let row = retry_on_disconnect(async || self.global_statement(ANY_API_KEY).read().await).await?;
        Ok(row.is_some())
    }

    async fn append_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        key: Option<&IdempotencyKey>,
    ) -> Result<AppendOutcome, StoreError> {
        dispatch!(self, append_exchange(tenant, session, exchange, key))
    }

    async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        query: MessageQuery,
    ) -> Result<Option<Vec<StoredMessage>>, StoreError> {
        /// The first row, with `seq` 0, exists if the session exists: it distinguishes an empty page from a missing
        /// session.
        macro_rules! select_messages {
            ($order:literal) => {
                concat!(
                    "SELECT CAST(0 AS bigint) AS seq, CAST(NULL AS timestamptz) AS created_at,
                        CAST(NULL AS text) AS message
                    FROM sessions WHERE tenant_id = $1 AND session_id = $2
                    UNION ALL SELECT * FROM (
                        SELECT seq, created_at, message FROM messages
                        WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4
                        ORDER BY ",
                    $order,
                    " LIMIT $5
                    ) AS page"
                )
            };
        }
        const SELECT_MESSAGES: &str = select_messages!("seq");
        const SELECT_MESSAGES_DESCENDING: &str = select_messages!("seq DESC");
        let sql = if query.descending { SELECT_MESSAGES_DESCENDING } else { SELECT_MESSAGES };
        let statement = self
            .statement(tenant, sql)
            .bind(session.as_str())
            .bind(query.after_seq)
            .bind(query.before_seq)
            .bind(query.limit);
        let rows = statement.read_all().await?;
        let mut messages = Vec::with_capacity(rows.len());
        let mut session_exists = false;
        for row in &rows {
            if row.field::<i64>("seq")? == 0 {
                session_exists = true;
            } else {
                messages.push(rows::stored_message(row)?);
            }
        }
        Ok(session_exists.then_some(messages))
    }

    async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError> {
        const SELECT_MESSAGE_METADATA: &str = "\
            SELECT role, tool_call_ids, tool_result_of, tokens AS message_tokens FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 ORDER BY seq LIMIT $4";
        let statement = self.statement(tenant, SELECT_MESSAGE_METADATA);
        let statement = statement.bind(session.as_str()).bind(after_seq).bind(limit);
        statement.read_all().await?.iter().map(rows::message_metadata).collect()
    }

    async fn message_range(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        range: MessageRange,
    ) -> Result<Vec<StoredMessage>, StoreError> {
        /// Sums the sizes first, so that no text is read in vain. There is a single upper bound of `seq`: with two of
        /// them, the database uses the wrong one for the index and reads the rest of the history.
        macro_rules! select_message_range {
            ($least:literal) => {
                concat!(
                    "SELECT seq, created_at, message FROM messages
                    WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= ",
                    $least,
                    "($4, coalesce((
                        SELECT max(seq) FROM (
                            SELECT seq, sum(bytes) OVER (ORDER BY seq) AS bytes FROM (
                                SELECT seq, octet_length(message) AS bytes FROM messages
                                WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4
                                ORDER BY seq LIMIT $5
                            ) AS sizes
                        ) AS sums WHERE bytes <= $6
                    ), $3 + 1))
                    ORDER BY seq"
                )
            };
        }
        const SELECT_MESSAGE_RANGE: Sql =
            Sql { postgres: select_message_range!("least"), sqlite: select_message_range!("min") };
        let statement = self
            .statement(tenant, SELECT_MESSAGE_RANGE)
            .bind(session.as_str())
            .bind(range.after_seq)
            .bind(range.last_seq)
            .bind(range.limit)
            .bind(range.max_bytes);
        statement.read_all().await?.iter().map(rows::stored_message).collect()
    }

    async fn session(&self, tenant: &TenantId, session: &SessionId) -> Result<Option<Session>, StoreError> {
        const SELECT_SESSION: &str =
            concat!("SELECT ", session_columns!(), " FROM sessions WHERE tenant_id = $1 AND session_id = $2");
        let statement = self.statement(tenant, SELECT_SESSION).bind(session.as_str());
        decode(statement.read().await?, rows::session)
    }

    async fn sessions(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        after: Option<&SessionPosition>,
        limit: i64,
    ) -> Result<Vec<Session>, StoreError> {
        /// The hour comes first because the index contains the hour, not the time; see the migration. It is compared
        /// even on the first page, so that every plan of the statement starts in the index. It is a parameter because
        /// row-level security keeps Postgres from using the index for anything that is still to be computed.
        macro_rules! select_sessions {
            ($condition:literal) => {
                concat!(
                    "SELECT ",
                    session_columns!(),
                    " FROM sessions WHERE tenant_id = $1 AND activity_hour <= $2
                        AND ($3 IS NULL OR (updated_at, session_id) < ($3, $4)) ",
                    $condition,
                    " ORDER BY activity_hour DESC, updated_at DESC, session_id DESC LIMIT $5"
                )
            };
        }
        const SELECT_SESSIONS: &str = select_sessions!("");
        const SELECT_SESSIONS_OF_USER: &str = select_sessions!("AND user_id = $6");
        let hour = after.map_or(i64::MAX, |after| after.updated_at.unix_timestamp().div_euclid(3600));
        let statement = self
            .statement(tenant, if user.is_some() { SELECT_SESSIONS_OF_USER } else { SELECT_SESSIONS })
            .bind(hour)
            .bind(after.map(|after| DbTime(after.updated_at)))
            .bind(after.map(|after| after.session_id.as_str()))
            .bind(limit);
        let statement = if let Some(user) = user { statement.bind(user.as_str()) } else { statement };
        statement.read_all().await?.iter().map(rows::session).collect()
    }

    async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError> {
        const UPDATE_METADATA: &str = concat!(
            "UPDATE sessions SET metadata = $3 WHERE tenant_id = $1 AND session_id = $2 RETURNING ",
            session_columns!()
        );
        let statement = self.statement(tenant, UPDATE_METADATA).bind(session.as_str()).bind(metadata);
        decode(statement.write_returning().await?, rows::session)
    }

    async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, StoreError> {
        const DELETE_SESSION: &str = "DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        let erased = self.statement(tenant, DELETE_SESSION).bind(session.as_str()).execute().await? > 0;
        if let (true, Self::Sqlite(database)) = (erased, self) {
            database.truncate_wal().await;
        }
        Ok(erased)
    }

    async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<bool, StoreError> {
        dispatch!(self, erase_user(tenant, user))
    }

    async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        dispatch!(self, import_session(tenant, session, user, archive, batches))
    }

    async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        limit: usize,
    ) -> Result<ContextSnapshot, StoreError> {
        /// A single statement reads a consistent snapshot. The user and the bounds of the tail are scalar subqueries,
        /// which are evaluated before the index is used; with joins, the database read all documents and the whole
        /// history. On Postgres, the upper bound excludes nothing, but tells the planner that the range is short: it
        /// would expect a third of the history. The first row, with `seq` 0, holds session and memory document, the
        /// others a message each. They are rows because building JSON or arrays in the database halves its capacity.
        const SELECT_CONTEXT: Sql = Sql {
            postgres: concat!(
                "WITH session AS MATERIALIZED (
                    SELECT ",
                session_columns!(),
                " FROM sessions WHERE tenant_id = $1 AND session_id = $2
                )
                SELECT now() AS now, session.*, d.version AS memory_version, d.content AS memory_content,
                    d.words AS memory_words, d.tokens AS memory_tokens, d.created_at AS memory_created_at,
                    0::bigint AS seq, 0::bigint AS message_tokens, '' AS message, '' AS role,
                    NULL::text AS tool_call_ids, NULL::text AS tool_result_of
                FROM (SELECT 1) AS always LEFT JOIN session ON true
                    LEFT JOIN memories AS d
                        ON d.tenant_id = $1 AND d.user_id = (SELECT coalesce((SELECT user_id FROM session), $3))
                UNION ALL
                SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    m.seq, m.tokens, m.message, m.role, m.tool_call_ids, m.tool_result_of
                FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2
                    AND m.seq > (SELECT greatest(cursor_seq, last_seq - $4) FROM session)
                    AND m.seq <= (SELECT last_seq FROM session)"
            ),
            sqlite: concat!(
                "WITH session AS MATERIALIZED (
                    SELECT ",
                session_columns!(),
                " FROM sessions WHERE tenant_id = $1 AND session_id = $2
                )
                SELECT $5 AS now, session.*, d.version AS memory_version, d.content AS memory_content,
                    d.words AS memory_words, d.tokens AS memory_tokens, d.created_at AS memory_created_at,
                    0 AS seq, 0 AS message_tokens, '' AS message, '' AS role,
                    NULL AS tool_call_ids, NULL AS tool_result_of
                FROM (SELECT 1) AS always LEFT JOIN session ON true
                    LEFT JOIN memories AS d ON d.tenant_id = $1 AND d.user_id = coalesce(session.user_id, $3)
                UNION ALL
                SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    m.seq, m.tokens, m.message, m.role, m.tool_call_ids, m.tool_result_of
                FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2
                    AND m.seq > (SELECT max(cursor_seq, last_seq - $4) FROM session)"
            ),
        };
        let rows = retry_on_disconnect(async || {
            let statement = self.statement(tenant, SELECT_CONTEXT).bind(session.as_str());
            statement.bind(user.as_str()).bind(to_i64(limit)).bind_now().read_all().await
        });
        let rows = rows.await?;
        let mut tail = Vec::with_capacity(rows.len());
        let mut first_row = None;
        for row in &rows {
            if row.field::<i64>("seq")? == 0 {
                first_row = Some(row);
            } else {
                tail.push(rows::context_message(row)?);
            }
        }
        tail.sort_unstable_by_key(|message| message.seq);
        let row = first_row.ok_or(sqlx::Error::RowNotFound)?;
        let has_session = row.field::<Option<&str>>("session_id")?.is_some();
        let has_memory = row.field::<Option<i64>>("memory_version")?.is_some();
        Ok(ContextSnapshot {
            now: row.time("now")?,
            session: has_session.then(|| rows::session(row)).transpose()?,
            memory: has_memory.then(|| rows::memory_document(row, "memory_")).transpose()?,
            tail,
        })
    }

    async fn memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        let statement = self.statement(tenant, SELECT_MEMORY_DOCUMENT).bind(user.as_str());
        decode(statement.read().await?, |row| rows::memory_document(row, ""))
    }

    async fn write_memory_document(
        &self,
        tenant: &TenantId,
        user: &UserId,
        document: NewMemoryDocument<'_>,
        expected: Option<i64>,
    ) -> Result<Option<MemoryDocument>, StoreError> {
        dispatch!(self, write_memory_document(tenant, user, document, expected))
    }

    async fn memory_revisions(
        &self,
        tenant: &TenantId,
        user: &UserId,
        before: i64,
        limit: i64,
    ) -> Result<Vec<MemoryDocument>, StoreError> {
        const SELECT_MEMORY_REVISIONS: &str = "\
            SELECT version, content, words, tokens, created_at FROM memory_revisions
            WHERE tenant_id = $1 AND user_id = $2 AND version < $3 ORDER BY version DESC LIMIT $4";
        let statement = self.statement(tenant, SELECT_MEMORY_REVISIONS);
        let rows = statement.bind(user.as_str()).bind(before).bind(limit).read_all().await?;
        rows.iter().map(|row| rows::memory_document(row, "")).collect()
    }

    async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError> {
        const TAKE_LEASE: Sql = Sql {
            postgres: concat!(
                "UPDATE sessions SET lease_token = $3, lease_until = now() + $4 * interval '1 microsecond'
                WHERE tenant_id = $1 AND session_id = $2
                    AND (lease_until IS NULL OR lease_until <= now()
                        OR lease_until > now() + 2 * $4 * interval '1 microsecond')
                    AND ($5::bigint IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= now())))
                RETURNING ",
                session_columns!()
            ),
            sqlite: concat!(
                "UPDATE sessions SET lease_token = $3, lease_until = $6 + $4
                WHERE tenant_id = $1 AND session_id = $2
                    AND (lease_until IS NULL OR lease_until <= $6 OR lease_until > $6 + 2 * $4)
                    AND ($5 IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= $6)))
                RETURNING ",
                session_columns!()
            ),
        };
        let statement = self
            .statement(tenant, TAKE_LEASE)
            .bind(session.as_str())
            .bind(token)
            .bind(micros(ttl))
            .bind(condition.revision())
            .bind_now();
        decode(statement.write_returning().await?, rows::session)
    }

    async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        const RENEW_LEASE: Sql = Sql {
            postgres: "UPDATE sessions SET lease_until = now() + $4 * interval '1 microsecond'
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3",
            sqlite: "UPDATE sessions SET lease_until = $5 + $4
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3",
        };
        let statement = self.statement(tenant, RENEW_LEASE).bind(session.as_str()).bind(token);
        Ok(statement.bind(micros(ttl)).bind_now().execute().await? > 0)
    }

    async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError> {
        const RELEASE_LEASE: &str = "\
            UPDATE sessions SET lease_token = NULL, lease_until = NULL
            WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";
        self.statement(tenant, RELEASE_LEASE).bind(session.as_str()).bind(token).execute().await?;
        Ok(())
    }

    async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
    ) -> Result<Option<Revision>, StoreError> {
        dispatch!(self, commit_revision(tenant, session, token, revision))
    }

    async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        reason: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        const RECORD_FAILURE: Sql = Sql {
            postgres: "UPDATE sessions SET failures = failures + 1,
                    retry_at = now() + $4 * interval '1 microsecond', last_failure = $5,
                    lease_token = NULL, lease_until = NULL
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at",
            sqlite: "UPDATE sessions SET failures = failures + 1, retry_at = $6 + $4, last_failure = $5,
                    lease_token = NULL, lease_until = NULL
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at",
        };
        let statement = self
            .statement(tenant, RECORD_FAILURE)
            .bind(session.as_str())
            .bind(token)
            .bind(micros(retry_in))
            .bind(reason)
            .bind_now();
        decode(statement.write_returning().await?, |row| Ok(row.time("retry_at")?))
    }

    async fn add_token_usage(&self, tenant: &TenantId, tokens: u64) -> Result<(), StoreError> {
        const ADD_TOKEN_USAGE: Sql = Sql {
            postgres: "INSERT INTO token_usage AS u (tenant_id, day, tokens)
                VALUES ($1, floor(extract(epoch FROM now()) / 86400)::bigint, $2)
                ON CONFLICT (tenant_id, day) DO UPDATE
                    SET tokens = least(u.tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens",
            sqlite: "INSERT INTO token_usage AS u (tenant_id, day, tokens) VALUES ($1, $3 / 86400000000, $2)
                ON CONFLICT (tenant_id, day) DO UPDATE
                    SET tokens = min(u.tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens",
        };
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        self.statement(tenant, ADD_TOKEN_USAGE).bind(tokens).bind_now().execute().await?;
        Ok(())
    }

    async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        const SELECT_TOKEN_USAGE: Sql = Sql {
            postgres: "SELECT tokens FROM token_usage
                WHERE tenant_id = $1 AND day = floor(extract(epoch FROM now()) / 86400)::bigint",
            sqlite: "SELECT tokens FROM token_usage WHERE tenant_id = $1 AND day = $2 / 86400000000",
        };
        let row = self.statement(tenant, SELECT_TOKEN_USAGE).bind_now().read().await?;
        row.map_or(Ok(0), |row| Ok(row.field("tokens")?))
    }

    async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
    ) -> Result<Option<Vec<Revision>>, StoreError> {
        const SELECT_REVISIONS: &str = concat!(
            "SELECT ",
            revision_columns!(),
            " FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision < $3
            ORDER BY revision DESC LIMIT $4"
        );
        const SESSION_EXISTS: &str =
            "SELECT 1 AS found FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        let statement = self.statement(tenant, SELECT_REVISIONS).bind(session.as_str());
        let rows = statement.bind(before).bind(limit).read_all().await?;
        if rows.is_empty() {
            let session = self.statement(tenant, SESSION_EXISTS).bind(session.as_str()).read().await?;
            return Ok(session.map(|_| Vec::new()));
        }
        rows.iter().map(rows::revision).collect::<Result<_, _>>().map(Some)
    }

    async fn revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        const SELECT_REVISION: &str = concat!(
            "SELECT ",
            revision_columns!(),
            " FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision = $3"
        );
        let statement = self.statement(tenant, SELECT_REVISION).bind(session.as_str()).bind(revision);
        decode(statement.read().await?, rows::revision)
    }

    async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        dispatch!(self, restore_revision(tenant, session, revision))
    }

    async fn term_statistics(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        sample_size: i64,
    ) -> Result<TermStatistics, StoreError> {
        dispatch!(self, term_statistics(tenant, filter, queries, sample_size))
    }

    async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        dispatch!(self, lookup_terms(tenant, filter, queries, limit))
    }

    async fn scan_recent(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        query: &TermQuery,
        max_scanned: i64,
        limit: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        dispatch!(self, scan_recent(tenant, filter, query, max_scanned, limit))
    }

    async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        refs: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        dispatch!(self, fetch_hits(tenant, user, refs, max_bytes))
    }

    async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        refs: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        dispatch!(self, fetch_neighbours(tenant, refs, distance, max_bytes))
    }

    async fn index_state(&self, version: &str) -> Result<IndexState, StoreError> {
        dispatch!(self, index_state(version))
    }

    async fn index_batch(&self) -> Result<bool, StoreError> {
        dispatch!(self, index_batch())
    }

    async fn index_pending_for(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<(), StoreError> {
        dispatch!(self, index_pending_for(tenant, session))
    }

    async fn disable_index(&self) -> Result<(), StoreError> {
        dispatch!(self, disable_index())
    }

    async fn start_reindex(&self, version: &str) -> Result<(), StoreError> {
        dispatch!(self, start_reindex(version))
    }

    async fn next_reindex_range(&self) -> Result<Option<ReindexRange>, StoreError> {
        dispatch!(self, next_reindex_range())
    }

    async fn reindex_messages(
        &self,
        range: &ReindexRange,
        messages: &[(MessageRef, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError> {
        dispatch!(self, reindex_messages(range, messages, done_seq))
    }
}
