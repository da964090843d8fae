//! Reading the inputs of a context.

use super::pool::retry_on_disconnect;
use super::rows::{self, session_columns};
use super::statement::{DbRow as _, Purpose, Sql};
use super::values::{to_i64, user_column};
use super::{MemoryVersion, Store, StoreError};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message_metadata::ContextMessage;
use crate::domain::session::{Session, Window};
use crate::domain::tail::{Tail, TailLimit};
use std::sync::Arc;
use time::OffsetDateTime;
use uuid::Uuid;

/// Largest size of a tail, or of a part of it, that is read without knowing its size before.
pub const SMALL_TAIL_BYTES: usize = 512 * 1024;

/// The inputs of a context, as of one moment.
#[derive(Clone, Debug)]
pub struct ContextSnapshot {
    /// The moment, by the clock of the store.
    pub now: OffsetDateTime,
    /// `None` before the first exchange, except if the session is bound to a user.
    pub session: Option<Session>,
    /// The incarnation of the session; `None` if there is no session.
    pub incarnation: Option<Uuid>,
    /// The memory document of the owner of the session, or of the requesting user if the session has no owner.
    pub memory: Option<Arc<MemoryDocument>>,
    pub memory_version: Option<MemoryVersion>,
    /// The model that wrote the newest part of the summary; `None` if there is no summary, a client wrote it, or it was restored from more
    /// than 20 revisions before.
    pub summary_model: Option<String>,
    /// The newest messages of the tail, oldest first.
    pub tail: Arc<Tail>,
}

/// The result of [`Store::load_context`].
#[expect(clippy::large_enum_variant, reason = "one value per request, never stored")]
#[derive(Clone, Debug)]
pub enum LoadedContext {
    Complete(ContextSnapshot),
    /// The tail has large messages: read it by [`Store::load_large_context`].
    Large {
        /// Size of the messages within the limit.
        bytes: usize,
    },
}

impl Store {
    /// Records the window of the latest context request of a session.
    pub async fn set_window(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        window: Option<Window>,
    ) -> Result<(), StoreError> {
        const SET_WINDOW: &str = "\
            UPDATE sessions SET window_tokens = $3, window_fixed = $4 WHERE tenant_id = $1 AND session_id = $2";
        let statement = self.statement(tenant, SET_WINDOW).bind(session.as_str());
        let statement = statement.bind(window.map(|window| window.tokens));
        statement.bind(window.map(|window| window.fixed)).execute().await?;
        Ok(())
    }

    /// Returns `seq` and JSON of the last message of the user up to `through_seq`, if it was not redacted.
    pub async fn last_user_message(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        through_seq: i64,
    ) -> Result<Option<(i64, String)>, StoreError> {
        const SELECT_USER_MESSAGE: &str = "\
            SELECT seq, message, redaction IS NOT NULL AS is_redacted FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq <= $3 AND role = 'user' ORDER BY seq DESC LIMIT 1";
        let statement = self.statement(tenant, SELECT_USER_MESSAGE).bind(session.as_str()).bind(through_seq);
        let Some(row) =
            statement.read().await?.filter(|row| row.field("is_redacted").is_ok_and(|is: bool| !is))
        else {
            return Ok(None);
        };
        Ok(Some((row.field("seq")?, row.field("message")?)))
    }

    /// Returns the messages after `after_seq` up to `through_seq` of an incarnation of a session, oldest first. The result is
    /// empty if the session has another incarnation, or if a message is larger than its share of [`SMALL_TAIL_BYTES`].
    pub async fn context_messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        incarnation: Uuid,
        after_seq: i64,
        through_seq: i64,
    ) -> Result<Vec<ContextMessage>, StoreError> {
        const SELECT_CONTEXT_MESSAGES: &str = "\
            SELECT seq, tokens AS message_tokens, CASE WHEN octet_length(message) <= $6 THEN message END AS message, role,
                tool_call_ids, tool_result_of, redaction IS NOT NULL AS is_redacted
            FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4
                AND EXISTS (SELECT 1 FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND incarnation = $5)
            ORDER BY seq";
        let rows = retry_on_disconnect(async || {
            let statement = self.statement(tenant, SELECT_CONTEXT_MESSAGES).bind(session.as_str());
            let statement = statement.bind(after_seq).bind(through_seq).bind(incarnation);
            statement.bind(to_i64(SMALL_TAIL_BYTES) / (through_seq - after_seq).max(1)).read_all().await
        });
        let rows = rows.await?;
        for row in &rows {
            if row.field::<Option<&str>>("message")?.is_none() {
                return Ok(Vec::new());
            }
        }
        rows.iter().map(rows::context_message).collect()
    }

    /// Reads the session, the memory document and the newest messages of the tail as of one moment, if the messages are small. `user`
    /// is the owner of the memory document if the session has no user.
    pub async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<LoadedContext, StoreError> {
        retry_on_disconnect(|| {
            self.within_limit(self.read_context(tenant, session, user, limit, SMALL_TAIL_BYTES))
        })
        .await
    }

    /// Reads the same as [`Self::load_context`] for a session with large messages.
    pub async fn load_large_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<ContextSnapshot, StoreError> {
        let read = retry_on_disconnect(|| {
            self.within_limit(self.read_context(tenant, session, user, limit, usize::MAX))
        });
        match read.await? {
            LoadedContext::Complete(snapshot) => Ok(snapshot),
            LoadedContext::Large { .. } => unreachable!("no size is too large"),
        }
    }

    /// Reads a context whose messages have at most `max_bytes`.
    async fn read_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
        max_bytes: usize,
    ) -> Result<LoadedContext, StoreError> {
        /// After a restore, one of the revisions before has the text of the summary, and tells its model. The user is a scalar subquery,
        /// because row-level security keeps Postgres from using an index for a computed value of a join.
        macro_rules! select_session {
            ($now:literal) => {
                concat!(
                    "WITH session AS MATERIALIZED (SELECT ", session_columns!(), "
                        FROM sessions WHERE tenant_id = $1 AND session_id = $2)
                    SELECT ", $now, " AS now, s.*, d.incarnation AS memory_incarnation, d.version AS memory_version,
                        d.content AS memory_content, d.words AS memory_words, d.tokens AS memory_tokens,
                        d.created_at AS memory_created_at, r.source AS summary_source, r.meta AS summary_meta
                    FROM (SELECT 1 AS one) AS always LEFT JOIN session AS s ON true
                    LEFT JOIN memories AS d ON d.tenant_id = $1
                        AND d.user_id = (SELECT coalesce((SELECT nullif(user_id, '') FROM session), $3))
                    LEFT JOIN revisions AS r ON r.tenant_id = $1 AND r.session_id = $2 AND r.revision = (
                        SELECT max(revision) FROM (
                            SELECT revision, source, summary FROM revisions WHERE tenant_id = $1 AND session_id = $2
                            ORDER BY revision DESC LIMIT 20
                        ) AS newest WHERE source IS NOT NULL AND summary = (SELECT nullif(summary, '') FROM session))"
                )
            };
        }
        const SELECT_SESSION: Sql = Sql { postgres: select_session!("now()"), sqlite: select_session!("$4") };
        /// Counts the newest messages that fit into `$5` bytes, without reading a text.
        const COUNT_TAIL: &str = "\
            SELECT count(*) AS messages, CAST(coalesce(sum(bytes), 0) AS bigint) AS bytes FROM (
                SELECT bytes, sum(bytes) OVER (ORDER BY seq DESC) AS total FROM (
                    SELECT seq, octet_length(message) AS bytes FROM messages
                    WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4
                ) AS sizes
            ) AS sums WHERE total <= $5";
        const SELECT_TAIL: &str = "\
            SELECT seq, tokens AS message_tokens, message, role, tool_call_ids, tool_result_of,
                redaction IS NOT NULL AS is_redacted
            FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4 ORDER BY seq";
        let mut transaction = self.database.begin(Some(tenant), Purpose::Snapshot).await?;
        let statement = transaction.statement(SELECT_SESSION).bind(tenant.as_str()).bind(session.as_str());
        let row =
            statement.bind(user_column(user)).bind_now().read().await?.ok_or(sqlx::Error::RowNotFound)?;
        let state =
            row.field::<Option<&str>>("session_id")?.is_some().then(|| rows::session(&row)).transpose()?;
        let has_memory = row.field::<Option<i64>>("memory_version")?.is_some();
        let memory = has_memory.then(|| rows::memory_document(&row, "memory_")).transpose()?;
        let (mut first_seq, mut tail_rows, mut bytes) = (1, Vec::new(), 0);
        if let Some(state) = &state {
            let after_seq = state.cursor.max(state.last_seq - to_i64(limit.messages));
            let statement = transaction.statement(COUNT_TAIL).bind(tenant.as_str()).bind(session.as_str());
            let statement = statement.bind(after_seq).bind(state.last_seq).bind(to_i64(limit.bytes));
            let fitting = statement.read().await?.ok_or(sqlx::Error::RowNotFound)?;
            bytes = usize::try_from(fitting.field::<i64>("bytes")?).unwrap_or(usize::MAX);
            if bytes > max_bytes {
                transaction.rollback().await?;
                return Ok(LoadedContext::Large { bytes });
            }
            let after_seq = state.last_seq - fitting.field::<i64>("messages")?;
            let statement = transaction.statement(SELECT_TAIL).bind(tenant.as_str()).bind(session.as_str());
            tail_rows = statement.bind(after_seq).bind(state.last_seq).read_all().await?;
            first_seq = after_seq + 1;
        }
        transaction.rollback().await?;
        let decode = move || -> Result<Tail, StoreError> {
            // Each row is dropped once it is decoded, so that large texts are in memory once.
            let messages = tail_rows.into_iter().map(|row| rows::context_message(&row));
            Ok(Tail::new(first_seq, messages.collect::<Result<_, _>>()?))
        };
        Ok(LoadedContext::Complete(ContextSnapshot {
            now: row.time("now")?,
            incarnation: row.field("incarnation")?,
            memory_version: rows::memory_version(&row)?,
            summary_model: rows::summary_model(&row)?,
            session: state,
            memory: memory.map(Arc::new),
            tail: Arc::new(blocking::spawn_cpu_if_large(bytes, decode).await?),
        }))
    }
}
