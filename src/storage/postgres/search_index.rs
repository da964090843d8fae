//! Keeping the index of search, on Postgres.

use super::{Postgres, Query, begin, time};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::search::analysis::Analysis;
use crate::storage::StoreError;
use crate::storage::row::{corrupt, read_backlog, read_unindexed, read_waiting};
use crate::storage::search::Place;
use crate::storage::search_index::{
    Backlog, Entry, IndexState, PIECE, SearchIndex, Unindexed, Waiting, entries, lexemes, piece,
};
use async_trait::async_trait;
use sqlx::{Connection as _, PgConnection, Row as _};
use time::OffsetDateTime;

/// In this order: a higher id was stored later. What is there already was indexed anew meanwhile.
const INDEX: &str = "\
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT tenant_id, session_id, seq, coalesce(created_at, now()), array_to_tsvector(string_to_array(lexemes, ' '))
    FROM unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[], $5::text[])
        WITH ORDINALITY AS i (tenant_id, session_id, seq, created_at, lexemes, place)
    ORDER BY place ON CONFLICT DO NOTHING";

const FIRST_RULES: &str = "INSERT INTO search_rules (id, label) VALUES (1, $1) ON CONFLICT DO NOTHING";

const STATE: &str = "\
    SELECT coalesce((SELECT label FROM search_rules), '') AS label, (SELECT count(*) FROM search_backlog) AS backlog";

/// Whoever takes what waits holds the rows until it is indexed. Others pass over them and wait for nobody, so that no two
/// can wait for each other.
const TAKE: &str = "\
    SELECT tenant_id, session_id, first_seq, last_seq, bytes, created_at FROM search_waiting
    ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED";

const TAKE_OF: &str = "\
    SELECT tenant_id, session_id, first_seq, last_seq, bytes, created_at FROM search_waiting
    WHERE tenant_id = $2 AND ($3::text IS NULL OR session_id = $3) AND created_at <= $4
    ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED";

/// Until when what waits was stored.
const UNTIL: &str = "\
    SELECT max(created_at) AS until FROM search_waiting WHERE tenant_id = $1 AND ($2::text IS NULL OR session_id = $2)";

/// Waits for whoever is at it, with nothing in hand. There is a row where they gave up.
const LEFT: &str = "\
    SELECT first_seq FROM search_waiting
    WHERE tenant_id = $1 AND ($2::text IS NULL OR session_id = $2) AND created_at <= $3 LIMIT 1 FOR UPDATE";

/// What is lost in a crash waits again.
const BEGIN_LAZILY: &str = "BEGIN; SET LOCAL synchronous_commit = off";

const UNINDEXED: &str = "\
    SELECT place - 1 AS place, seq, created_at, user_id, message
    FROM search_unindexed($1::text[], $2::text[], $3::bigint[], $4::bigint[]) ORDER BY place, seq";

const INDEXED: &str = "\
    DELETE FROM search_waiting AS w USING unnest($1::text[], $2::text[], $3::bigint[]) AS i (tenant_id, session_id, first_seq)
    WHERE w.tenant_id = i.tenant_id AND w.session_id = i.session_id AND w.first_seq = i.first_seq";

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
        let Some(analysis) = self.search else { return Ok(false) };
        if self.settle(analysis, sqlx::query(TAKE).bind(PIECE)).await? {
            return Ok(true);
        }
        match sqlx::query(SETTLE).fetch_one(&self.pool).await {
            Ok(_) => Ok(false),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCKED) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn settle_index_of(
        &self,
        tenant: &TenantId,
        session: Option<&SessionId>,
    ) -> Result<(), StoreError> {
        let Some(analysis) = self.search else { return Ok(()) };
        let (tenant, session) = (tenant.as_str(), session.map(SessionId::as_str));
        let newest = sqlx::query(UNTIL).bind(tenant).bind(session).fetch_one(&self.pool).await?;
        let Some(until) = newest.try_get::<Option<OffsetDateTime>, _>("until")? else { return Ok(()) };
        loop {
            let take = sqlx::query(TAKE_OF).bind(PIECE).bind(tenant).bind(session).bind(until);
            if self.settle(analysis, take).await? {
                continue;
            }
            let left = sqlx::query(LEFT).bind(tenant).bind(session).bind(until);
            if left.fetch_optional(&self.pool).await?.is_none() {
                return Ok(());
            }
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
        let entry = |((place, _), lexemes): (&(Place, Message), String)| {
            Entry::new(tenant, session, &user, (place.seq, Some(place.created_at)), lexemes)
        };
        index(&mut transaction, messages.iter().zip(lexemes).map(entry).collect()).await?;
        let query = sqlx::query(FINISH).bind(tenant.as_str()).bind(session.as_str());
        query.execute(&mut *transaction).await?;
        Ok(transaction.commit().await?)
    }
}

impl Postgres {
    /// Indexes what a statement takes of what waits. Returns whether more may wait.
    async fn settle(&self, analysis: Analysis, take: Query<'_>) -> Result<bool, StoreError> {
        let settled = self.pool.ask(async |connection| {
            let mut transaction = connection.begin_with(BEGIN_LAZILY).await?;
            let rows = take.fetch_all(&mut *transaction).await?;
            let waiting = rows.iter().map(|row| Ok(read_waiting!(row, time)));
            let (piece, more) = piece(waiting.collect::<Result<_, sqlx::Error>>()?);
            if piece.is_empty() {
                return Ok(false);
            }
            let messages = unindexed(&mut transaction, &piece).await?;
            index(&mut transaction, entries(analysis, messages).await).await?;
            sqlx::query(INDEXED)
                .bind(column(&piece, |run| run.tenant.as_str()))
                .bind(column(&piece, |run| run.session.as_str()))
                .bind(column(&piece, |run| run.first_seq))
                .execute(&mut *transaction)
                .await?;
            transaction.commit().await?;
            Ok(more)
        });
        Ok(settled.await?)
    }
}

/// The messages of runs that wait, in their order.
async fn unindexed(connection: &mut PgConnection, piece: &[Waiting]) -> Result<Vec<Unindexed>, sqlx::Error> {
    let query = sqlx::query(UNINDEXED)
        .bind(column(piece, |run| run.tenant.as_str()))
        .bind(column(piece, |run| run.session.as_str()))
        .bind(column(piece, |run| run.first_seq))
        .bind(column(piece, |run| run.last_seq));
    let rows = query.fetch_all(connection).await?;
    rows.iter().map(|row| Ok(read_unindexed!(row, time, piece))).collect()
}

/// Writes rows of the index, in their order.
pub(super) async fn index(connection: &mut PgConnection, entries: Vec<Entry>) -> Result<(), sqlx::Error> {
    if entries.is_empty() {
        return Ok(());
    }
    sqlx::query(INDEX)
        .bind(column(&entries, |entry| entry.tenant.as_str()))
        .bind(column(&entries, |entry| entry.session.as_str()))
        .bind(column(&entries, |entry| entry.seq))
        .bind(column(&entries, |entry| entry.created_at))
        .bind(column(&entries, |entry| entry.lexemes.as_str()))
        .execute(connection)
        .await?;
    Ok(())
}

fn column<'a, R, C>(rows: &'a [R], column: impl Fn(&'a R) -> C) -> Vec<C> {
    rows.iter().map(column).collect()
}
