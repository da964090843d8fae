//! Exporting and importing whole sessions, on SQLite.

use super::search_index::insert_entries;
use super::{Sqlite, micros, now, time};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use crate::storage::StoreError;
use crate::storage::archives::ImportCounts;
use crate::storage::row::{meta_column, read_message, source_column, tool_columns};
use crate::storage::search_index::{self, SELECT_ANALYZER_VERSION, analyzer_for_import, index_entries};
use crate::storage::{ImportOutcome, MessageRange, RowBatch, RowBatches, StoredMessage};
use serde_json::json;
use sqlx::{Row as _, SqliteConnection};
use time::OffsetDateTime;

/// The sizes are summed up first, so that no text is read that is not wanted. There is one upper bound, because of two
/// the index gets the one that leaves all the rest of the history to be read and passed over.
const PART: &str = "\
    SELECT seq, created_at, message FROM messages
    WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= min($4, coalesce((
        SELECT max(seq) FROM (
            SELECT seq, sum(bytes) OVER (ORDER BY seq) AS bytes FROM (
                SELECT seq, octet_length(message) AS bytes FROM messages
                WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq <= $4 ORDER BY seq LIMIT $5
            ) AS sizes
        ) AS sums WHERE bytes <= $6
    ), $3 + 1))
    ORDER BY seq";

const CREATE: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq, summary,
        summary_words, summary_tokens, revision, created_at, updated_at, activity_hour)
    VALUES ($1, $2, $3, coalesce($4, '{}'), $5, $6, $7, $8, $9, $10, $11, $12, $13, $13 / 3600000000)
    ON CONFLICT (tenant_id, session_id) DO NOTHING";

/// Many rows as one JSON text: a statement for each row would take three times as long, and others wait meanwhile.
const STORE: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT $1, $2, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6
    FROM json_each($3)";

const KEEP: &str = "\
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, meta, source, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";

const COUNT_CURSOR: &str = "\
    UPDATE sessions SET cursor_tokens = (SELECT coalesce(sum(tokens), 0) FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND seq <= sessions.cursor_seq)
    WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq > 0";

impl Sqlite {
    pub(in crate::storage) async fn message_range(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        part: MessageRange,
    ) -> Result<Vec<StoredMessage>, StoreError> {
        let rows = sqlx::query(PART)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(part.after_seq)
            .bind(part.last_seq)
            .bind(part.limit)
            .bind(part.max_bytes)
            .fetch_all(&self.readers)
            .await?;
        rows.iter().map(|row| Ok(read_message!(row, time))).collect()
    }

    pub(in crate::storage) async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        mut batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        let mut transaction = self.write().await?;
        let now = now();
        let created = sqlx::query(CREATE)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(user.as_str())
            .bind(archive.metadata.as_deref())
            .bind(archive.last_seq)
            .bind(archive.tokens)
            .bind(archive.cursor)
            .bind(&archive.summary.text)
            .bind(archive.summary.words)
            .bind(archive.summary.tokens)
            .bind(archive.revision)
            .bind(micros(archive.times.map_or(now, |(created_at, _)| created_at)))
            .bind(micros(archive.times.map_or(now, |(_, updated_at)| updated_at)))
            .execute(&mut *transaction)
            .await?;
        if created.rows_affected() == 0 {
            return Ok(ImportOutcome::Exists);
        }
        let label = sqlx::query(SELECT_ANALYZER_VERSION).fetch_one(&mut *transaction).await?;
        let analyzer = analyzer_for_import(label.try_get("analyzer_version")?, self.search);
        let mut tally = ImportCounts::default();
        while let Some(batch) = batches.recv().await {
            tally.add(&batch);
            match batch {
                RowBatch::Messages(rows) => {
                    let lexemes = search_index::lexemes_of_messages(
                        analyzer,
                        tenant,
                        session,
                        rows.iter().map(|row| &row.message),
                    );
                    let lexemes = lexemes.await;
                    store(&mut transaction, tenant, session, &rows, now).await?;
                    let places = rows.iter().map(|row| (row.seq, row.created_at));
                    let entries = index_entries(tenant, session, user, places, &lexemes);
                    insert_entries(&mut transaction, entries, now).await?;
                }
                RowBatch::Revisions(rows) => keep(&mut transaction, tenant, session, &rows).await?,
            }
        }
        if !tally.is_complete(archive) {
            return Ok(ImportOutcome::Incomplete);
        }
        let query = sqlx::query(COUNT_CURSOR).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(ImportOutcome::Imported)
    }
}

async fn store(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[ImportedMessage],
    now: OffsetDateTime,
) -> Result<(), StoreError> {
    let rows = rows.iter().map(|row| {
        let (tool_call_ids, tool_result_of) = tool_columns(&row.message);
        let (role, at) = (row.message.role().as_str(), micros(row.created_at.unwrap_or(now)));
        json!([row.seq, role, tool_call_ids, tool_result_of, row.tokens, row.message.json(), at])
    });
    let rows = rows.collect::<serde_json::Value>().to_string();
    let query = sqlx::query(STORE).bind(tenant.as_str()).bind(session.as_str()).bind(rows);
    query.execute(connection).await?;
    Ok(())
}

async fn keep(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[Revision],
) -> Result<(), StoreError> {
    for row in rows {
        sqlx::query(KEEP)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(row.revision)
            .bind(row.kind.as_str())
            .bind(row.range.map(|(from, _)| from))
            .bind(row.range.map(|(_, to)| to))
            .bind(row.cursor)
            .bind(&row.summary.text)
            .bind(row.summary.words)
            .bind(row.summary.tokens)
            .bind(&row.added)
            .bind(meta_column(row.meta.as_ref()))
            .bind(source_column(row.source.as_ref()))
            .bind(micros(row.created_at))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}
