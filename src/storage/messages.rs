//! Messages of the history: inserting and reading them in a transaction.

use super::rows::{self, json_column, tool_columns};
use super::statement::{DbRow, Sql, Transaction};
use super::values::DbTime;
use super::{MessageRange, StoreError, StoredMessage};
use crate::domain::exchange::MessageFacts;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::redaction::RedactionMark;
use serde::Deserialize;
use serde_json::{Value, json};
use time::OffsetDateTime;

/// The columns that [`FactColumns`] contains.
macro_rules! message_facts {
    () => {
        "created_at, redaction"
    };
}

pub(super) use message_facts;

/// The facts of a stored message, from a row or from a JSON list of SQLite.
#[derive(Deserialize)]
pub(super) struct FactColumns(
    #[serde(with = "time::serde::timestamp::microseconds")] OffsetDateTime,
    Option<String>,
);

impl FactColumns {
    pub(super) fn of_message(self, seq: i64, json: String) -> Result<StoredMessage, StoreError> {
        let Self(created_at, redaction) = self;
        let mark = redaction.as_deref().map(rows::redaction_mark).transpose()?;
        Ok(StoredMessage { seq, created_at, redacted_at: mark.map(|mark| mark.redacted_at), json })
    }
}

/// Decodes `seq`, `message` and [`message_facts`].
pub(super) fn stored_message(row: &impl DbRow) -> Result<StoredMessage, StoreError> {
    let facts = FactColumns(row.time("created_at")?, row.field("redaction")?);
    facts.of_message(row.field("seq")?, row.field("message")?)
}

/// A message to insert.
pub(super) struct NewMessage<'m> {
    pub(super) session: &'m SessionId,
    pub(super) seq: i64,
    pub(super) message: &'m Message,
    pub(super) tokens: i64,
    pub(super) facts: MessageFacts,
}

/// Inserts messages of sessions of a tenant.
pub(super) async fn insert_messages(
    transaction: &mut Transaction,
    tenant: &TenantId,
    messages: &[NewMessage<'_>],
) -> Result<(), StoreError> {
    /// Larger messages are inserted by themselves: SQLite copies the parameter of a batch about twenty times.
    const LARGE_MESSAGE_BYTES: usize = 64 * 1024;
    /// All rows are one JSON parameter: a statement per row would take three times as long. Seconds and microseconds are added
    /// separately, because Postgres multiplies an interval in floating point.
    const INSERT_MESSAGES: Sql = Sql {
        postgres: "INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                redaction, created_at)
            SELECT $1, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, redaction,
                coalesce(timestamptz 'epoch' + micros / 1000000 * interval '1 second'
                    + micros % 1000000 * interval '1 microsecond', now())
            FROM json_to_recordset(CAST($2 AS json)) AS m (session_id text, seq bigint, role text, tool_call_ids text,
                tool_result_of text, tokens bigint, message text, redaction text, micros bigint)",
        sqlite: "INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                redaction, created_at)
            SELECT $1, value ->> 'session_id', value ->> 'seq', value ->> 'role', value ->> 'tool_call_ids',
                value ->> 'tool_result_of', value ->> 'tokens', value ->> 'message', value ->> 'redaction',
                coalesce(value ->> 'micros', $3)
            FROM json_each($2)",
    };
    let encode = |message: &NewMessage<'_>| {
        let NewMessage { session, seq, message, tokens, facts } = message;
        let MessageFacts { created_at, redacted_at } = facts;
        let (tool_call_ids, tool_result_of) = tool_columns(message);
        json!({
            "session_id": session.as_str(), "seq": seq, "role": message.role().as_str(), "tool_call_ids": tool_call_ids,
            "tool_result_of": tool_result_of, "tokens": tokens, "message": message.json(),
            "redaction": json_column(redacted_at.map(RedactionMark::imported).as_ref()),
            "micros": created_at.map(|time| DbTime(time).micros()),
        })
    };
    let is_large = |message: &NewMessage<'_>| message.message.json().len() > LARGE_MESSAGE_BYTES;
    for together in messages.chunk_by(|a, b| !is_large(a) && !is_large(b)) {
        let encoded = together.iter().map(encode).collect::<Value>().to_string();
        let statement = transaction.statement(INSERT_MESSAGES).bind(tenant.as_str());
        statement.bind(encoded).bind_now().execute().await?;
    }
    Ok(())
}

/// Sums the sizes first, so that no text is read in vain. There is a single upper bound of `seq`: with two of
/// them, the database uses the wrong one for the index and reads the rest of the history. It is a scalar subquery
/// because row-level security keeps Postgres from using `coalesce` for the index.
macro_rules! select_message_range {
    ($least:literal) => {
        concat!(
            "SELECT seq, message, ",
            message_facts!(),
            " FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= (SELECT ",
            $least,
            "($4, coalesce((
                SELECT max(seq) FROM (
                    SELECT seq, sum(bytes) OVER (ORDER BY seq) AS bytes FROM (
                        SELECT seq, octet_length(message) AS bytes FROM messages
                        WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4
                        ORDER BY seq LIMIT $5
                    ) AS sizes
                ) AS sums WHERE bytes <= $6
            ), $3 + 1)))
            ORDER BY seq"
        )
    };
}
pub(super) const SELECT_MESSAGE_RANGE: Sql =
    Sql { postgres: select_message_range!("least"), sqlite: select_message_range!("min") };

/// Reads a range of the history in a transaction, as [`Store::message_range`](super::Store::message_range).
pub(super) async fn read_range(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    range: MessageRange,
) -> Result<Vec<StoredMessage>, StoreError> {
    let statement = transaction.statement(SELECT_MESSAGE_RANGE).bind(tenant.as_str()).bind(session.as_str());
    let statement = statement.bind(range.after_seq).bind(range.last_seq).bind(range.limit);
    statement.bind(range.max_bytes).read_all().await?.iter().map(stored_message).collect()
}
