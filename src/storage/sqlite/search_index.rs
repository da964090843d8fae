//! Keeping the index of search, on SQLite.

use super::{Sqlite, micros};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::index;
use crate::storage::StoreError;
use crate::storage::row::{corrupt, read_backlog};
use crate::storage::search::Place;
use crate::storage::search_index::{Backlog, IndexState, SearchIndex, lexemes};
use async_trait::async_trait;
use serde_json::{Value, json};
use sqlx::{Row as _, SqliteConnection};
use time::OffsetDateTime;

/// Many rows as one JSON text, as for the messages of an import.
const INDEX: &str = "\
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT $1, $2, value ->> 0, value ->> 1, (value ->> 2) || ' ' || $4 FROM json_each($3)";

const FIRST_RULES: &str = "INSERT INTO search_rules (id, label) VALUES (1, $1) ON CONFLICT DO NOTHING";

const STATE: &str = "\
    SELECT coalesce((SELECT label FROM search_rules), '') AS label, (SELECT count(*) FROM search_backlog) AS backlog";

const SUSPEND: &str = "\
    INSERT INTO search_rules (id, label) VALUES (1, 'off') ON CONFLICT (id) DO UPDATE SET label = 'off'";

const OTHER_RULES: &str = "UPDATE search_rules SET label = $1 WHERE label <> $1";

/// For all tenants at once: the work of whoever runs the service.
const ANEW: &str = "\
    INSERT INTO search_backlog (tenant_id, session_id, through_seq)
    SELECT tenant_id, session_id, last_seq FROM sessions WHERE last_seq > 0
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET done_seq = 0, through_seq = excluded.through_seq";

const BACKLOG: &str = "SELECT tenant_id, session_id, done_seq, through_seq FROM search_backlog LIMIT 1";

const OWNER: &str = "SELECT user_id FROM sessions WHERE tenant_id = $1 AND session_id = $2";

const ADVANCE: &str = "\
    UPDATE search_backlog SET done_seq = $4 WHERE tenant_id = $1 AND session_id = $2 AND done_seq = $3";

const FINISH: &str =
    "DELETE FROM search_backlog WHERE tenant_id = $1 AND session_id = $2 AND done_seq >= through_seq";

const UNINDEX: &str = "\
    DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq IN (SELECT value FROM json_each($3))";

#[async_trait]
impl SearchIndex for Sqlite {
    async fn index_state(&self, label: &str) -> Result<IndexState, StoreError> {
        let mut row = sqlx::query(STATE).fetch_one(&self.readers).await?;
        if row.try_get::<&str, _>("label")?.is_empty() {
            sqlx::query(FIRST_RULES).bind(label).execute(&self.writer).await?;
            row = sqlx::query(STATE).fetch_one(&self.readers).await?;
        }
        Ok(IndexState { label: row.try_get("label")?, backlog: row.try_get("backlog")? })
    }

    /// Whoever stores the 256th message does it: there is one writer in any case.
    async fn settle_index(&self) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn suspend_index(&self) -> Result<(), StoreError> {
        sqlx::query(SUSPEND).execute(&self.writer).await?;
        Ok(())
    }

    async fn begin_index(&self, label: &str) -> Result<(), StoreError> {
        let mut transaction = self.write().await?;
        sqlx::query(FIRST_RULES).bind(label).execute(&mut *transaction).await?;
        if sqlx::query(OTHER_RULES).bind(label).execute(&mut *transaction).await?.rows_affected() > 0 {
            sqlx::query(ANEW).execute(&mut *transaction).await?;
        }
        Ok(transaction.commit().await?)
    }

    async fn backlog(&self) -> Result<Option<Backlog>, StoreError> {
        let row = sqlx::query(BACKLOG).fetch_optional(&self.readers).await?;
        row.map(|row| Ok(read_backlog!(&row))).transpose()
    }

    async fn index(
        &self,
        piece: &Backlog,
        messages: &[(Place, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError> {
        let Backlog { tenant, session, .. } = piece;
        let all = messages.iter().map(|(_, message)| message);
        let lexemes = lexemes(self.search, tenant, session, all).await;
        let mut transaction = self.write().await?;
        let query = sqlx::query(OWNER).bind(tenant.as_str()).bind(session.as_str());
        let Some(row) = query.fetch_optional(&mut *transaction).await? else {
            return Ok(());
        };
        let user: String = row.try_get("user_id")?;
        let user = UserId::new(user).map_err(corrupt("a user id"))?;
        let query = sqlx::query(ADVANCE).bind(tenant.as_str()).bind(session.as_str()).bind(piece.done_seq);
        if query.bind(done_seq).execute(&mut *transaction).await?.rows_affected() == 0 {
            return Ok(());
        }
        let seqs = messages.iter().map(|(place, _)| place.seq).collect::<Value>().to_string();
        let query = sqlx::query(UNINDEX).bind(tenant.as_str()).bind(session.as_str()).bind(seqs);
        query.execute(&mut *transaction).await?;
        let rows =
            messages.iter().zip(lexemes).map(|((place, _), lexemes)| (place.seq, place.created_at, lexemes));
        index(&mut transaction, tenant, session, &user, rows).await?;
        let query = sqlx::query(FINISH).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        Ok(transaction.commit().await?)
    }
}

/// Indexes messages: the `seq`, the time and the lexemes of each.
pub(super) async fn index(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    session: &SessionId,
    user: &UserId,
    rows: impl Iterator<Item = (i64, OffsetDateTime, String)> + Send,
) -> Result<(), StoreError> {
    let rows: Vec<Value> = rows.map(|(seq, at, lexemes)| json!([seq, micros(at), lexemes])).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let user = index::user(&index::tag(tenant), user);
    let query = sqlx::query(INDEX).bind(tenant.as_str()).bind(session.as_str());
    query.bind(Value::Array(rows).to_string()).bind(user).execute(connection).await?;
    Ok(())
}
