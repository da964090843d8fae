//! Keeping the index of search, on Postgres.

use super::{Postgres, begin};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::index;
use crate::storage::StoreError;
use crate::storage::row::{corrupt, read_backlog};
use crate::storage::search::Place;
use crate::storage::search_index::{Backlog, IndexState, SearchIndex, lexemes};
use async_trait::async_trait;
use sqlx::{PgConnection, Row as _};
use time::OffsetDateTime;

const INDEX: &str = "\
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT $1, $2, i.seq, coalesce(i.created_at, now()), array_to_tsvector(string_to_array(i.lexemes || ' ' || $3, ' '))
    FROM unnest($4::bigint[], $5::timestamptz[], $6::text[]) AS i (seq, created_at, lexemes)";

const FIRST_RULES: &str = "INSERT INTO search_rules (id, label) VALUES (1, $1) ON CONFLICT DO NOTHING";

const STATE: &str = "\
    SELECT coalesce((SELECT label FROM search_rules), '') AS label, (SELECT count(*) FROM search_backlog) AS backlog";

const SETTLE: &str = "SELECT settle_search() AS pages";
/// Somebody else has the lock.
const LOCKED: &str = "55P03";

const SUSPEND: &str = "\
    INSERT INTO search_rules (id, label) VALUES (1, 'off') ON CONFLICT (id) DO UPDATE SET label = 'off'";

const OTHER_RULES: &str = "UPDATE search_rules SET label = $1 WHERE label <> $1";

/// For all tenants at once: the work of whoever runs the service. The policies hold the owner of a table, too, unless it
/// says that they don't; nobody else gets at the table until the transaction ends, with the policies in force again.
const LIFT_POLICY: &str = "ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY";
const RESTORE_POLICY: &str = "ALTER TABLE sessions FORCE ROW LEVEL SECURITY";

const ANEW: &str = "\
    INSERT INTO search_backlog (tenant_id, session_id, through_seq)
    SELECT tenant_id, session_id, last_seq FROM sessions WHERE last_seq > 0
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET done_seq = 0, through_seq = excluded.through_seq";

const BACKLOG: &str = "SELECT tenant_id, session_id, done_seq, through_seq FROM search_backlog LIMIT 1";

/// Takes the lock of the session, so that whoever erases it comes before or after.
const OWNER: &str = "SELECT user_id FROM sessions WHERE tenant_id = $1 AND session_id = $2 FOR NO KEY UPDATE";

const ADVANCE: &str = "\
    UPDATE search_backlog SET done_seq = $4 WHERE tenant_id = $1 AND session_id = $2 AND done_seq = $3";

const FINISH: &str =
    "DELETE FROM search_backlog WHERE tenant_id = $1 AND session_id = $2 AND done_seq >= through_seq";

const UNINDEX: &str = "DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY ($3)";

#[async_trait]
impl SearchIndex for Postgres {
    async fn index_state(&self, label: &str) -> Result<IndexState, StoreError> {
        let mut row = sqlx::query(STATE).fetch_one(&self.pool).await?;
        if row.try_get::<&str, _>("label")?.is_empty() {
            sqlx::query(FIRST_RULES).bind(label).execute(&self.pool).await?;
            row = sqlx::query(STATE).fetch_one(&self.pool).await?;
        }
        Ok(IndexState { label: row.try_get("label")?, backlog: row.try_get("backlog")? })
    }

    async fn settle_index(&self) -> Result<bool, StoreError> {
        if self.search.is_none() {
            return Ok(false);
        }
        match sqlx::query(SETTLE).fetch_one(&self.pool).await {
            Ok(row) => Ok(row.try_get::<i64, _>("pages")? > 0),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCKED) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    async fn suspend_index(&self) -> Result<(), StoreError> {
        sqlx::query(SUSPEND).execute(&self.pool).await?;
        Ok(())
    }

    async fn begin_index(&self, label: &str) -> Result<(), StoreError> {
        let mut transaction = self.pool.begin().await?;
        sqlx::query(FIRST_RULES).bind(label).execute(&mut *transaction).await?;
        if sqlx::query(OTHER_RULES).bind(label).execute(&mut *transaction).await?.rows_affected() > 0 {
            for statement in [LIFT_POLICY, ANEW, RESTORE_POLICY] {
                sqlx::query(statement).execute(&mut *transaction).await?;
            }
        }
        Ok(transaction.commit().await?)
    }

    async fn backlog(&self) -> Result<Option<Backlog>, StoreError> {
        let row = sqlx::query(BACKLOG).fetch_optional(&self.pool).await?;
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
        let mut transaction = self.pool.begin_with(begin(tenant)).await?;
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
        let seqs: Vec<i64> = messages.iter().map(|(place, _)| place.seq).collect();
        let query = sqlx::query(UNINDEX).bind(tenant.as_str()).bind(session.as_str()).bind(seqs);
        query.execute(&mut *transaction).await?;
        let places = messages.iter().map(|(place, _)| (place.seq, Some(place.created_at)));
        index(&mut transaction, tenant, session, &user, places.zip(lexemes)).await?;
        let query = sqlx::query(FINISH).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        Ok(transaction.commit().await?)
    }
}

/// Indexes messages: the `seq`, the time (the store's own where there is none) and the lexemes of each.
pub(super) async fn index(
    connection: &mut PgConnection,
    tenant: &TenantId,
    session: &SessionId,
    user: &UserId,
    rows: impl Iterator<Item = ((i64, Option<OffsetDateTime>), String)> + Send,
) -> Result<(), StoreError> {
    let (places, lexemes): (Vec<_>, Vec<_>) = rows.unzip();
    if lexemes.is_empty() {
        return Ok(());
    }
    let (seqs, times): (Vec<_>, Vec<_>) = places.into_iter().unzip();
    sqlx::query(INDEX)
        .bind(tenant.as_str())
        .bind(session.as_str())
        .bind(index::user(&index::tag(tenant), user))
        .bind(seqs)
        .bind(times)
        .bind(lexemes)
        .execute(connection)
        .await?;
    Ok(())
}
