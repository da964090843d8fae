//! Reading the inputs of a context.

use super::pool::retry_on_disconnect;
use super::rows::{self, session_columns};
use super::statement::{AnyRow, DbRow as _, Sql};
use super::values::{to_i64, user_column};
use super::{MemoryVersion, Store, StoreError};
use crate::blocking;
use crate::domain::context::StoredParts;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message_metadata::{ContextMessage, MessageMetadata, ToolIds};
use crate::domain::session::{Session, Window};
use crate::domain::tail::{Tail, TailLimit};
use serde::Deserialize;
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
    /// The summary and the document as parts of the system message. Snapshots of the same revision and version share them.
    pub parts: Arc<StoredParts>,
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

/// Selects the inputs of a context: `$message` is the text of a message, and `$after` the message before the first one.
///
/// A single statement reads a consistent snapshot. The user and the bounds of the tail are scalar subqueries, which are
/// evaluated before the index is used; with joins, the database read all documents and the whole history. The upper bound
/// excludes nothing, but tells the planner that the range is short: it would expect a third of the history. The first row,
/// with `seq` 0, holds session and memory document, the others a message each. They are rows because building JSON or arrays
/// in the database halves its capacity.
macro_rules! select_context_on_postgres {
    ($message:expr, $after:expr) => {
        concat!(
            "WITH session AS MATERIALIZED (
                SELECT ",
            session_columns!(),
            " FROM sessions WHERE tenant_id = $1 AND session_id = $2
            )
            SELECT now() AS now, session.*, d.incarnation AS memory_incarnation, d.version AS memory_version,
                d.content AS memory_content, d.words AS memory_words, d.tokens AS memory_tokens,
                d.created_at AS memory_created_at, 0::bigint AS seq, 0::bigint AS message_tokens, '' AS message, '' AS role,
                NULL::text AS tool_call_ids, NULL::text AS tool_result_of, 0::bigint AS bytes, false AS is_redacted
            FROM (SELECT 1) AS always LEFT JOIN session ON true
                LEFT JOIN memories AS d
                    ON d.tenant_id = $1 AND d.user_id = (SELECT coalesce((SELECT nullif(user_id, '') FROM session), $3))
            UNION ALL
            SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                m.seq, m.tokens, ",
            $message,
            ", m.role, m.tool_call_ids, m.tool_result_of, octet_length(m.message)::bigint, m.redaction IS NOT NULL
            FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2
                AND m.seq > ",
            $after,
            " AND m.seq <= (SELECT last_seq FROM session)"
        )
    };
}

/// Selects session and memory document on SQLite, and further columns.
macro_rules! select_session_on_sqlite {
    ($columns:expr) => {
        concat!(
            "WITH session AS MATERIALIZED (
                SELECT ",
            session_columns!(),
            " FROM sessions WHERE tenant_id = $1 AND session_id = $2
            )
            SELECT $6 AS now, session.*, d.incarnation AS memory_incarnation, d.version AS memory_version,
                d.content AS memory_content, d.words AS memory_words, d.tokens AS memory_tokens,
                d.created_at AS memory_created_at, ",
            $columns,
            " FROM (SELECT 1) AS always LEFT JOIN session ON true
                LEFT JOIN memories AS d ON d.tenant_id = $1 AND d.user_id = coalesce(nullif(session.user_id, ''), $3)"
        )
    };
}

/// Selects the same as [`select_context_on_postgres`] in one row, with small messages only. `tail` has two lines for each message:
/// its [`TailMetadata`], and its JSON, which has no line breaks. A message that is larger than its share has no lines.
///
/// The driver copies each column of each row. With a row for each message, 100 messages took five times the CPU time.
const SELECT_SMALL_CONTEXT_ON_SQLITE: &str = concat!(
    select_session_on_sqlite!("tail.*"),
    " CROSS JOIN (
            SELECT count(*) AS messages, coalesce(sum(octet_length(m.message)), 0) AS bytes,
                group_concat(
                    CASE WHEN octet_length(m.message) <= (
                        SELECT $5 / max(1, min($4, last_seq - cursor_seq)) FROM session
                    ) THEN json_array(m.seq, m.tokens, m.role, json(m.tool_call_ids), json(m.tool_result_of),
                        m.redaction IS NOT NULL) || char(10) || m.message END,
                    char(10)
                ) AS tail
            FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2
                AND m.seq > (SELECT max(cursor_seq, last_seq - $4) FROM session)
                AND m.seq <= (SELECT last_seq FROM session)
        ) AS tail"
);

/// The metadata of a message in [`SELECT_SMALL_CONTEXT_ON_SQLITE`]: `seq`, tokens, role, ids of tool calls, answered tool call, and 1
/// if the message is redacted.
#[derive(Deserialize)]
struct TailMetadata<'l>(i64, i64, &'l str, Option<Vec<String>>, Option<String>, u8);

/// Returns `true` if `tail` of [`SELECT_SMALL_CONTEXT_ON_SQLITE`] has the lines of all messages.
fn has_all_messages(row: &AnyRow) -> Result<bool, StoreError> {
    let lines = row.field::<Option<&str>>("tail")?.map_or(0, |tail| tail.split('\n').count());
    Ok(to_i64(lines) == 2 * row.field::<i64>("messages")?)
}

/// Decodes the row of [`SELECT_SMALL_CONTEXT_ON_SQLITE`].
fn decode_single_row(rows: Vec<AnyRow>) -> Result<ContextSnapshot, StoreError> {
    let row = &rows.into_iter().next().ok_or(sqlx::Error::RowNotFound)?;
    let tail = row.field::<Option<&str>>("tail")?.map_or(Ok(Vec::new()), tail_messages)?;
    context_snapshot(row, tail)
}

/// Decodes the column `tail` of [`SELECT_SMALL_CONTEXT_ON_SQLITE`].
fn tail_messages(lines: &str) -> Result<Vec<ContextMessage>, StoreError> {
    let mut lines = lines.split('\n');
    let mut messages = Vec::new();
    while let (Some(metadata), Some(json)) = (lines.next(), lines.next()) {
        let TailMetadata(seq, tokens, role, calls, result_of, is_redacted) =
            serde_json::from_str(metadata).map_err(StoreError::corrupt("the metadata of a message"))?;
        let tool_ids = ToolIds { calls: calls.unwrap_or_default(), result_of };
        let metadata = MessageMetadata::from_parts(rows::role(role)?, tokens, tool_ids, is_redacted != 0);
        messages.push(ContextMessage { seq, metadata, json: json.to_owned() });
    }
    Ok(messages)
}

/// Decodes rows of which the first one, with `seq` 0, holds session and memory document, the others a message each.
fn decode_message_rows(rows: Vec<AnyRow>) -> Result<ContextSnapshot, StoreError> {
    let mut tail = Vec::with_capacity(rows.len());
    let mut first_row = None;
    // Each row is dropped once it is decoded, so that large texts are in memory once.
    for row in rows {
        if row.field::<i64>("seq")? == 0 {
            first_row = Some(row);
        } else {
            tail.push(rows::context_message(&row)?);
        }
    }
    context_snapshot(&first_row.ok_or(sqlx::Error::RowNotFound)?, tail)
}

/// Decodes a row with session and memory document, and adds the messages.
fn context_snapshot(row: &AnyRow, mut tail: Vec<ContextMessage>) -> Result<ContextSnapshot, StoreError> {
    tail.sort_unstable_by_key(|message| message.seq);
    let has_session = row.field::<Option<&str>>("session_id")?.is_some();
    let has_memory = row.field::<Option<i64>>("memory_version")?.is_some();
    let last_seq = row.field::<Option<i64>>("last_seq")?.unwrap_or(0);
    let first_seq = tail.first().map_or(last_seq + 1, |message| message.seq);
    Ok(ContextSnapshot {
        now: row.time("now")?,
        session: has_session.then(|| rows::session(row)).transpose()?,
        incarnation: row.field("incarnation")?,
        memory_version: rows::memory_version(row)?,
        memory: has_memory.then(|| rows::memory_document(row, "memory_")).transpose()?.map(Arc::new),
        parts: Arc::default(),
        tail: Arc::new(Tail::new(first_seq, tail)),
    })
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

    /// Reads the session, the memory document and the newest messages of the tail in one round trip and as of one moment, if
    /// they are small. `user` is the owner of the memory document if the session has no user.
    ///
    /// The statement returns the text of a message only if it is at most its share of [`SMALL_TAIL_BYTES`]. That costs less
    /// than adding up the sizes, and bounds the memory before anything is known about the session.
    pub async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<LoadedContext, StoreError> {
        const SELECT_CONTEXT: Sql = Sql {
            postgres: select_context_on_postgres!(
                "CASE WHEN octet_length(m.message) <= (
                    SELECT $5 / greatest(1, least($4, last_seq - cursor_seq)) FROM session
                ) THEN m.message END",
                "(SELECT greatest(cursor_seq, last_seq - $4) FROM session)"
            ),
            sqlite: SELECT_SMALL_CONTEXT_ON_SQLITE,
        };
        let small = to_i64(limit.bytes.min(SMALL_TAIL_BYTES));
        let rows = retry_on_disconnect(async || {
            let statement = self.statement(tenant, SELECT_CONTEXT).bind(session.as_str());
            let statement = statement.bind(user_column(user)).bind(to_i64(limit.messages)).bind(small);
            statement.bind_now().read_all().await
        });
        let rows = rows.await?;
        let (mut bytes, mut is_complete) = (0_i64, true);
        for row in &rows {
            is_complete &= match self {
                Self::Postgres(_) => row.field::<Option<&str>>("message")?.is_some(),
                Self::Sqlite(_) => has_all_messages(row)?,
            };
            bytes = bytes.saturating_add(row.field("bytes")?);
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if !is_complete {
            return Ok(LoadedContext::Large { bytes: bytes.min(limit.bytes) });
        }
        let decode = match self {
            Self::Postgres(_) => decode_message_rows,
            Self::Sqlite(_) => decode_single_row,
        };
        Ok(LoadedContext::Complete(blocking::spawn_cpu_if_large(bytes, move || decode(rows)).await?))
    }

    /// Reads the same as [`Self::load_context`] for a session with large messages. The texts of messages beyond the limit are
    /// not read.
    pub async fn load_large_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<ContextSnapshot, StoreError> {
        /// Returns the last message before the limit of the size: the sum of the sizes from the newest message to it exceeds
        /// the limit.
        macro_rules! last_excluded {
            ($greatest:literal) => {
                concat!(
                    "(SELECT ",
                    $greatest,
                    "(cursor_seq, last_seq - $4, (
                        SELECT coalesce(max(seq), 0) FROM (
                            SELECT seq, sum(bytes) OVER (ORDER BY seq DESC) AS bytes FROM (
                                SELECT seq, octet_length(message) AS bytes FROM messages
                                WHERE tenant_id = $1 AND session_id = $2
                                    AND seq > (SELECT ",
                    $greatest,
                    "(cursor_seq, last_seq - $4) FROM session)
                                    AND seq <= (SELECT last_seq FROM session)
                            ) AS sizes
                        ) AS sums WHERE bytes > $5
                    )) FROM session)"
                )
            };
        }
        const SELECT_LARGE_CONTEXT: Sql = Sql {
            postgres: select_context_on_postgres!("m.message", last_excluded!("greatest")),
            sqlite: concat!(
                select_session_on_sqlite!(
                    "0 AS seq, 0 AS message_tokens, '' AS message, '' AS role, NULL AS tool_call_ids, NULL AS tool_result_of,
                    0 AS is_redacted"
                ),
                " UNION ALL
                SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                    m.seq, m.tokens, m.message, m.role, m.tool_call_ids, m.tool_result_of, m.redaction IS NOT NULL
                FROM messages AS m WHERE m.tenant_id = $1 AND m.session_id = $2 AND m.seq > ",
                last_excluded!("max"),
                // A session that is being imported has messages after its last one.
                " AND m.seq <= (SELECT last_seq FROM session)"
            ),
        };
        let rows = retry_on_disconnect(async || {
            let statement = self.statement(tenant, SELECT_LARGE_CONTEXT).bind(session.as_str());
            let statement = statement.bind(user_column(user)).bind(to_i64(limit.messages));
            statement.bind(to_i64(limit.bytes)).bind_now().read_all().await
        });
        self.record_statement(SMALL_TAIL_BYTES);
        let rows = rows.await?;
        // Finds the form in which each message is sent, which takes milliseconds per megabyte.
        blocking::spawn_cpu(move || decode_message_rows(rows)).await
    }
}
