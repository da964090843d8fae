//! Importing sessions on Postgres.

use super::search_index::{INSERT_ENTRIES, insert_entries};
use super::{Postgres, begin};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use crate::storage::import::{INSERT_IMPORTED_REVISION, ImportCounts, UPDATE_CURSOR_TOKENS};
use crate::storage::rows::{meta_column, source_column, tool_columns};
use crate::storage::search_index::{self, SELECT_ANALYZER_VERSION, analyzer_for_import, index_entries};
use crate::storage::{ImportOutcome, RowBatch, RowBatches, StoreError};
use sqlx::{PgConnection, Row as _};

const INSERT_SESSION: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq, summary,
        summary_words, summary_tokens, revision, created_at, updated_at, activity_hour)
    VALUES ($1, $2, $3, coalesce($4, '{}'), $5, $6, $7, $8, $9, $10, $11, coalesce($12, now()), coalesce($13, now()),
        floor(extract(epoch FROM coalesce($13, now())) / 3600))
    ON CONFLICT (tenant_id, session_id) DO NOTHING";

const INSERT_MESSAGES: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT $1, $2, m.seq, m.role, m.tool_call_ids, m.tool_result_of, m.tokens, m.message, coalesce(m.created_at, now())
    FROM unnest($3::bigint[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::text[], $9::timestamptz[])
        AS m (seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)";

impl Postgres {
    pub(in crate::storage) async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &ImportedSession,
        mut batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        let mut transaction = self.pool.begin_with(begin(tenant)).await?;
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
            .bind(archive.times.map(|(created_at, _)| created_at))
            .bind(archive.times.map(|(_, updated_at)| updated_at))
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
                    insert_messages(&mut transaction, tenant, session, &rows).await?;
                    let places = rows.iter().map(|row| (row.seq, row.created_at));
                    let entries = index_entries(tenant, session, user, places, &lexemes);
                    insert_entries(&mut transaction, INSERT_ENTRIES, entries).await?;
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
    connection: &mut PgConnection,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[ImportedMessage],
) -> Result<(), StoreError> {
    let (tool_call_ids, tool_result_of): (Vec<_>, Vec<_>) =
        rows.iter().map(|row| tool_columns(&row.message)).unzip();
    sqlx::query(INSERT_MESSAGES)
        .bind(tenant.as_str())
        .bind(session.as_str())
        .bind(rows.iter().map(|row| row.seq).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.message.role().as_str()).collect::<Vec<_>>())
        .bind(tool_call_ids)
        .bind(tool_result_of)
        .bind(rows.iter().map(|row| row.tokens).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.message.json()).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.created_at).collect::<Vec<_>>())
        .execute(connection)
        .await?;
    Ok(())
}

async fn insert_revisions(
    connection: &mut PgConnection,
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
            .bind(row.created_at)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}
