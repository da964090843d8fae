//! Importing a session in one transaction.

use super::rows::{json_column, tool_columns};
use super::statement::{DbRow as _, Sql, Transaction};
use super::values::{DbTime, to_i64, user_column, user_from_column};
use super::{Store, StoreError};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::redaction::RedactionMark;
use crate::domain::revision::Revision;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// A part of the rows of an import, in order.
#[derive(Clone, Debug, Default)]
pub struct RowBatch {
    pub messages: Vec<ImportedMessage>,
    pub revisions: Vec<Revision>,
}

pub type RowBatches = mpsc::Receiver<RowBatch>;

/// The result of [`Store::import_session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The session is complete and durable.
    Imported,
    /// A session with this id exists, or the id is bound to another user. Nothing was written.
    Exists,
    /// The number of rows differs from that in the header of the export. Nothing was written.
    Incomplete,
}

impl Store {
    /// Creates a session with all of its rows in one transaction, or nothing. Without `user`, the session gets the user that it
    /// is bound to, or else `default_user`. Rows without a time get the time of the store. The messages are missing
    /// from the search index then.
    ///
    /// The caller must have all batches at hand and never wait for a client in between, because other writers wait for the
    /// transaction: on Postgres those of the same session, on SQLite all.
    pub async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        (user, default_user): (Option<&UserId>, Option<&UserId>),
        imported: &ImportedSession,
        mut batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        /// The time of the last exchange can't be in the future: the session would be the first of the list, and would not
        /// expire, until then.
        const INSERT_SESSION: Sql = Sql {
            postgres:
                "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq,
                    summary, summary_words, summary_tokens, revision, created_at, updated_at, activity_hour,
                    retained_from, indexed_seq)
                VALUES ($1, $2, $3, coalesce($4, '{}'), $5, $6, $7, $8, $9, $10, $11, least($12, now()),
                    least($13, now()), floor(extract(epoch FROM least($13, now())) / 3600), now(),
                    CASE WHEN $5 > 0 THEN 0 END)
                ON CONFLICT (tenant_id, session_id) DO NOTHING",
            sqlite:
                "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq,
                    summary, summary_words, summary_tokens, revision, created_at, updated_at, activity_hour,
                    retained_from, incarnation, indexed_seq)
                VALUES ($1, $2, $3, coalesce($4, '{}'), $5, $6, $7, $8, $9, $10, $11, min(coalesce($12, $14), $14),
                    min(coalesce($13, $14), $14), min(coalesce($13, $14), $14) / 3600000000, $14, randomblob(16),
                    CASE WHEN $5 > 0 THEN 0 END)
                ON CONFLICT (tenant_id, session_id) DO NOTHING",
        };
        /// Removes the row of a session that is only bound to its user, except if rewinds have removed branches from it: these
        /// would be erased with the row.
        const DELETE_BINDING: &str = "\
            DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq = 0
                AND NOT EXISTS (SELECT 1 FROM sessions AS b
                    WHERE b.tenant_id = $1 AND b.forked_from = $2 AND b.fork_kind = 'rewind')
            RETURNING user_id";
        /// Sets the token count of the messages up to the cursor, which an export does not contain.
        const UPDATE_CURSOR_TOKENS: &str = "\
            UPDATE sessions SET cursor_tokens = (SELECT coalesce(sum(tokens), 0) FROM messages
                WHERE tenant_id = $1 AND session_id = $2 AND seq <= sessions.cursor_seq)
            WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq > 0";
        /// The session may be old, so the bytes are settled.
        const UPDATE_STORED_BYTES: &str = "\
            UPDATE sessions SET stored_bytes = $3, settled_bytes = $3 WHERE tenant_id = $1 AND session_id = $2";
        let mut transaction = self.begin(tenant).await?;
        let statement = transaction.statement(DELETE_BINDING).bind(tenant.as_str()).bind(session.as_str());
        let bound = match statement.read().await? {
            Some(row) => user_from_column(row.field("user_id")?)?,
            None => None,
        };
        if user.is_some_and(|user| bound.as_ref().is_some_and(|bound| bound != user)) {
            return Ok(ImportOutcome::Exists);
        }
        let user = user.or(bound.as_ref()).or(default_user);
        let inserted = transaction
            .statement(INSERT_SESSION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(user_column(user))
            .bind(imported.metadata.as_deref())
            .bind(imported.last_seq)
            .bind(imported.tokens)
            .bind(imported.cursor)
            .bind(imported.summary.text.as_str())
            .bind(imported.summary.words)
            .bind(imported.summary.tokens)
            .bind(imported.revision)
            .bind(imported.times.map(|(created_at, _)| DbTime(created_at)))
            .bind(imported.times.map(|(_, updated_at)| DbTime(updated_at)))
            .bind_now()
            .execute()
            .await?;
        if inserted == 0 {
            return Ok(ImportOutcome::Exists);
        }
        let (mut row_counts, mut stored_bytes) = ((0, 0), 0);
        while let Some(RowBatch { messages, revisions }) = batches.recv().await {
            row_counts.0 += to_i64(messages.len());
            row_counts.1 += to_i64(revisions.len());
            insert_messages(&mut transaction, tenant, session, &messages).await?;
            stored_bytes += messages.iter().map(|row| to_i64(row.message.json().len())).sum::<i64>();
            insert_revisions(&mut transaction, tenant, session, &revisions).await?;
        }
        if row_counts != (imported.last_seq, imported.revision) {
            return Ok(ImportOutcome::Incomplete);
        }
        let statement = transaction.statement(UPDATE_CURSOR_TOKENS).bind(tenant.as_str());
        statement.bind(session.as_str()).execute().await?;
        let statement = transaction.statement(UPDATE_STORED_BYTES).bind(tenant.as_str());
        statement.bind(session.as_str()).bind(stored_bytes).execute().await?;
        transaction.commit().await?;
        self.note_unindexed(tenant);
        Ok(ImportOutcome::Imported)
    }
}

async fn insert_messages(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[ImportedMessage],
) -> Result<(), StoreError> {
    /// All rows are one JSON parameter: a statement per row would take three times as long, while other writers wait. Seconds
    /// and microseconds are added separately, because Postgres multiplies an interval in floating point.
    const INSERT_MESSAGES: Sql = Sql {
        postgres: "INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                redaction, created_at)
            SELECT $1, $2, seq, role, tool_call_ids, tool_result_of, tokens, message, redaction,
                coalesce(timestamptz 'epoch' + micros / 1000000 * interval '1 second'
                    + micros % 1000000 * interval '1 microsecond', now())
            FROM json_to_recordset($3::json) AS m (seq bigint, role text, tool_call_ids text, tool_result_of text,
                tokens bigint, message text, redaction text, micros bigint)",
        sqlite: "INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                redaction, created_at)
            SELECT $1, $2, value ->> 'seq', value ->> 'role', value ->> 'tool_call_ids', value ->> 'tool_result_of',
                value ->> 'tokens', value ->> 'message', value ->> 'redaction', coalesce(value ->> 'micros', $4)
            FROM json_each($3)",
    };
    let rows = rows.iter().map(|ImportedMessage { seq, created_at, redacted_at, message, tokens }| {
        let (tool_call_ids, tool_result_of) = tool_columns(message);
        let micros = created_at.map(|time| DbTime(time).micros());
        let redaction = json_column(redacted_at.map(RedactionMark::imported).as_ref());
        json!({
            "seq": seq, "role": message.role().as_str(), "tool_call_ids": tool_call_ids,
            "tool_result_of": tool_result_of, "tokens": tokens, "message": message.json(), "redaction": redaction, "micros": micros,
        })
    });
    let statement = transaction.statement(INSERT_MESSAGES).bind(tenant.as_str()).bind(session.as_str());
    statement.bind(rows.collect::<Value>().to_string()).bind_now().execute().await?;
    Ok(())
}

async fn insert_revisions(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[Revision],
) -> Result<(), StoreError> {
    const INSERT_IMPORTED_REVISION: &str = "\
        INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
            summary_words, summary_tokens, added, meta, source, redacted_seq, created_at)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)";
    for row in rows {
        transaction
            .statement(INSERT_IMPORTED_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(row.revision)
            .bind(row.kind.as_str())
            .bind(row.from_seq)
            .bind(row.to_seq)
            .bind(row.cursor)
            .bind(row.summary.text.as_str())
            .bind(row.summary.words)
            .bind(row.summary.tokens)
            .bind(row.added.as_str())
            .bind(json_column(row.meta.as_ref()))
            .bind(json_column(row.provenance.as_ref()))
            .bind(row.redacted_seq)
            .bind(DbTime(row.created_at))
            .execute()
            .await?;
    }
    Ok(())
}
