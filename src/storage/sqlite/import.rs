//! Importing sessions on SQLite.

use super::search_index::insert_entries;
use super::{Sqlite, micros, now};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use crate::storage::import::{INSERT_IMPORTED_REVISION, ImportCounts, UPDATE_CURSOR_TOKENS};
use crate::storage::rows::{meta_column, source_column, tool_columns};
use crate::storage::search_index::{self, SELECT_ANALYZER_VERSION, analyzer_for_import, index_entries};
use crate::storage::{ImportOutcome, RowBatch, RowBatches, StoreError};
use serde_json::json;
use sqlx::{Row as _, SqliteConnection};
use time::OffsetDateTime;

const INSERT_SESSION: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq, summary,
        summary_words, summary_tokens, revision, created_at, updated_at, activity_hour)
    VALUES ($1, $2, $3, coalesce($4, '{}'), $5, $6, $7, $8, $9, $10, $11, $12, $13, $13 / 3600000000)
    ON CONFLICT (tenant_id, session_id) DO NOTHING";

/// All rows are one JSON parameter: a statement per row would take three times as long, while other writers wait.
const INSERT_MESSAGES: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT $1, $2, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6
    FROM json_each($3)";

impl Sqlite {
    pub(in crate::storage) async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        mut batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        let mut transaction = self.begin_write().await?;
        let now = now();
        let inserted = sqlx::query(INSERT_SESSION)
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
        if inserted.rows_affected() == 0 {
            return Ok(ImportOutcome::Exists);
        }
        let row = sqlx::query(SELECT_ANALYZER_VERSION).fetch_one(&mut *transaction).await?;
        let analyzer = analyzer_for_import(row.try_get("analyzer_version")?, self.search);
        let mut counts = ImportCounts::default();
        while let Some(batch) = batches.recv().await {
            counts.add(&batch);
            match batch {
                RowBatch::Messages(rows) => {
                    let lexemes = search_index::lexemes_of_messages(
                        analyzer,
                        tenant,
                        session,
                        rows.iter().map(|row| &row.message),
                    );
                    let lexemes = lexemes.await;
                    insert_messages(&mut transaction, tenant, session, &rows, now).await?;
                    let places = rows.iter().map(|row| (row.seq, row.created_at));
                    let entries = index_entries(tenant, session, user, places, &lexemes);
                    insert_entries(&mut transaction, entries, now).await?;
                }
                RowBatch::Revisions(rows) => {
                    insert_revisions(&mut transaction, tenant, session, &rows).await?;
                }
            }
        }
        if !counts.is_complete(archive) {
            return Ok(ImportOutcome::Incomplete);
        }
        let query = sqlx::query(UPDATE_CURSOR_TOKENS).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(ImportOutcome::Imported)
    }
}

async fn insert_messages(
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
    let query = sqlx::query(INSERT_MESSAGES).bind(tenant.as_str()).bind(session.as_str()).bind(rows);
    query.execute(connection).await?;
    Ok(())
}

async fn insert_revisions(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[Revision],
) -> Result<(), StoreError> {
    for row in rows {
        sqlx::query(INSERT_IMPORTED_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(row.revision)
            .bind(row.kind.as_str())
            .bind(row.from_seq)
            .bind(row.to_seq)
            .bind(row.cursor)
            .bind(&row.summary.text)
            .bind(row.summary.words)
            .bind(row.summary.tokens)
            .bind(&row.added)
            .bind(meta_column(row.meta.as_ref()))
            .bind(source_column(row.provenance.as_ref()))
            .bind(micros(row.created_at))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}
