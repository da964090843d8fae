//! Finding messages, on Postgres.
//!
//! The table `search` has no row-level security, so that its index is used (see its migration); every statement names
//! the tenant, and what was found is read from `messages`, which has it. A tsquery that the planner can't see through
//! may get any plan, and the index on times looks cheap to it: so the rows are found first (`OFFSET 0` keeps that apart), and
//! put in order then.

use super::{Postgres, begin};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows;
use crate::storage::search::{
    FtsSyntax, LARGE, MessageRef, SampleRange, SearchFilter, StoredHit, TermStatistics,
};
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, Row as _};

const DIALECT: FtsSyntax = FtsSyntax { and: " & ", or: " | ", and_not: " & !", quote: "'", prefix: ":*" };

const SAMPLE: &str = "\
    WITH newest AS MATERIALIZED (
        SELECT id, seq, lexemes FROM search WHERE tenant_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2
    )
    SELECT count(*) AS rows, coalesce(min(id), 0) AS first, coalesce(max(id), 0) AS last, NULL::bigint AS last_seq,
        coalesce((SELECT id FROM search WHERE tenant_id = $1 ORDER BY created_at, id LIMIT 1), 0) AS oldest,
        ARRAY(SELECT (SELECT count(*) FROM newest WHERE lexemes @@ p.probe)
            FROM unnest($3::text[]::tsquery[]) WITH ORDINALITY AS p (probe, place) ORDER BY place) AS found
    FROM newest";

const SAMPLE_OF_SESSION: &str = "\
    WITH newest AS MATERIALIZED (
        SELECT id, seq, lexemes FROM search WHERE tenant_id = $1 AND session_id = $4 ORDER BY seq DESC LIMIT $2
    )
    SELECT count(*) AS rows, 0::bigint AS first, 0::bigint AS last, max(seq) AS last_seq,
        0::bigint AS oldest,
        ARRAY(SELECT (SELECT count(*) FROM newest WHERE lexemes @@ p.probe)
            FROM unnest($3::text[]::tsquery[]) WITH ORDINALITY AS p (probe, place) ORDER BY place) AS found
    FROM newest";

const DRAW: &str = "\
    SELECT p.place, s.session_id, s.seq, s.created_at
    FROM unnest($2::text[]::tsquery[]) WITH ORDINALITY AS p (probe, place) CROSS JOIN LATERAL (
        SELECT session_id, seq, created_at, id FROM (
            SELECT tenant_id, session_id, seq, created_at, id FROM search WHERE lexemes @@ p.probe OFFSET 0
        ) AS matching
        WHERE tenant_id = $1 AND ($3::text IS NULL OR session_id = $3)
            AND created_at >= $4 AND created_at < $5
        ORDER BY id DESC LIMIT $6
    ) AS s
    ORDER BY p.place, s.id DESC";

const WALK: &str = "\
    SELECT session_id, seq, created_at FROM (
        SELECT session_id, seq, created_at, lexemes FROM search
        WHERE tenant_id = $1 AND created_at >= $3 AND created_at < $4 ORDER BY created_at DESC, id DESC LIMIT $5
    ) AS newest
    WHERE lexemes @@ $2::text::tsquery LIMIT $6";

const WALK_SESSION: &str = "\
    SELECT session_id, seq, created_at FROM (
        SELECT session_id, seq, created_at, lexemes FROM search
        WHERE tenant_id = $1 AND session_id = $7 ORDER BY seq DESC LIMIT $5
    ) AS newest
    WHERE lexemes @@ $2::text::tsquery AND created_at >= $3 AND created_at < $4 LIMIT $6";

const AT: &str = "\
    SELECT session_id, seq, created_at, message FROM (
        SELECT w.session_id, w.seq, m.created_at, m.message, w.place, sum(octet_length(m.message))
            OVER (ORDER BY octet_length(m.message) > $5, w.place) - octet_length(m.message) AS before
        FROM unnest($2::text[], $3::bigint[]) WITH ORDINALITY AS w (session_id, seq, place)
            CROSS JOIN LATERAL (
                SELECT created_at, message FROM messages
                WHERE tenant_id = $1 AND session_id = w.session_id AND seq = w.seq OFFSET 0
            ) AS m
        WHERE $6::text IS NULL OR EXISTS (
            SELECT FROM sessions WHERE tenant_id = $1 AND session_id = w.session_id AND user_id = $6
        )
    ) AS sized
    WHERE before < $4 ORDER BY place";

/// The borders come as plain values: behind row-level security the index is asked for nothing that is still to be computed.
/// `OFFSET 0` has each range read by the index, however many the planner expects.
const BESIDE: &str = "\
    SELECT session_id, seq, created_at, message FROM (
        SELECT session_id, seq, created_at, message,
            sum(octet_length(message)) OVER (ORDER BY place, distance, seq) - octet_length(message) AS before
        FROM (
            SELECT DISTINCT ON (m.session_id, m.seq)
                m.session_id, m.seq, m.created_at, m.message, w.place, abs(m.seq - w.seq) AS distance
            FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
                WITH ORDINALITY AS w (session_id, seq, first, last, place)
                CROSS JOIN LATERAL (
                    SELECT session_id, seq, created_at, message FROM messages
                    WHERE tenant_id = $1 AND session_id = w.session_id AND seq >= w.first AND seq <= w.last OFFSET 0
                ) AS m
            WHERE m.seq <> w.seq ORDER BY m.session_id, m.seq, w.place
        ) AS beside
    ) AS sized
    WHERE before < $6";

/// For one transaction: plans that read no more than they are asked for. The planner can't know how soon a walk ends, and would rather
/// read and sort the whole table than a fifth of it by an index; nor can it see through a query that comes as a parameter.
const WALK_BY_INDEX: &str = "\
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
        set_config('enable_sort', 'off', true), set_config('jit', 'off', true)";
const DRAW_BY_INDEX: &str =
    "SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)";

impl Postgres {
    /// All rows of a statement that is planned by these settings.
    async fn planned(
        &self,
        tenant: &TenantId,
        settings: &'static str,
        query: super::Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let read = self.pool.with_connection(async |connection| {
            let mut transaction = connection.begin_with(begin(tenant)).await?;
            sqlx::query(settings).execute(&mut *transaction).await?;
            query.fetch_all(&mut *transaction).await
        });
        read.await
    }
}

impl Postgres {
    pub(in crate::storage) async fn term_statistics(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<TermStatistics, StoreError> {
        let mut asked = queries(tenant, &SearchFilter::default(), probes);
        if scope.narrows() {
            asked.extend(queries(tenant, scope, probes));
        }
        let query = match &scope.session {
            None => sqlx::query(SAMPLE).bind(tenant.as_str()).bind(most).bind(asked),
            Some(session) => {
                let query = sqlx::query(SAMPLE_OF_SESSION).bind(tenant.as_str()).bind(most).bind(asked);
                query.bind(session.as_str())
            }
        };
        let row = self.read(tenant, query).await?.ok_or(sqlx::Error::RowNotFound)?;
        let newest = SampleRange {
            rows: row.try_get("rows")?,
            first: row.try_get("first")?,
            last: row.try_get("last")?,
            oldest: row.try_get("oldest")?,
            last_seq: row.try_get("last_seq")?,
        };
        let mut with: Vec<i64> = row.try_get("found")?;
        let in_scope = if scope.narrows() { with.split_off(probes.len()) } else { with.clone() };
        Ok(TermStatistics { rows: newest.rows, messages: newest.messages(most), with, in_scope })
    }

    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        let query = sqlx::query(DRAW)
            .bind(tenant.as_str())
            .bind(queries(tenant, scope, probes))
            .bind(scope.session.as_ref().map(SessionId::as_str))
            .bind(scope.from())
            .bind(scope.to())
            .bind(most);
        let mut drawn = vec![Vec::new(); probes.len()];
        for row in &self.planned(tenant, DRAW_BY_INDEX, query).await? {
            let probe: i64 = row.try_get("place")?;
            let probe = usize::try_from(probe - 1).ok().and_then(|probe| drawn.get_mut(probe));
            probe.ok_or(sqlx::Error::RowNotFound)?.push(place(row)?);
        }
        Ok(drawn)
    }

    pub(in crate::storage) async fn scan_recent(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probe: &TermQuery,
        rows: i64,
        most: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let query = sqlx::query(if scope.session.is_some() { WALK_SESSION } else { WALK })
            .bind(tenant.as_str())
            .bind(DIALECT.query(tenant, scope, probe))
            .bind(scope.from())
            .bind(scope.to())
            .bind(rows)
            .bind(most);
        let query = match &scope.session {
            Some(session) => query.bind(session.as_str()),
            None => query,
        };
        self.planned(tenant, WALK_BY_INDEX, query).await?.iter().map(place).collect()
    }

    pub(in crate::storage) async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        places: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let query = sqlx::query(AT)
            .bind(tenant.as_str())
            .bind(places.iter().map(|place| place.session.as_str()).collect::<Vec<_>>())
            .bind(places.iter().map(|place| place.seq).collect::<Vec<_>>())
            .bind(max_bytes)
            .bind(LARGE)
            .bind(user.map(UserId::as_str));
        self.read_all(tenant, query).await?.iter().map(found).collect()
    }

    pub(in crate::storage) async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        places: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let query = sqlx::query(BESIDE)
            .bind(tenant.as_str())
            .bind(places.iter().map(|place| place.session.as_str()).collect::<Vec<_>>())
            .bind(places.iter().map(|place| place.seq).collect::<Vec<_>>())
            .bind(places.iter().map(|place| place.seq.saturating_sub(distance)).collect::<Vec<_>>())
            .bind(places.iter().map(|place| place.seq.saturating_add(distance)).collect::<Vec<_>>())
            .bind(max_bytes);
        self.read_all(tenant, query).await?.iter().map(found).collect()
    }
}

fn queries(tenant: &TenantId, scope: &SearchFilter, probes: &[TermQuery]) -> Vec<String> {
    probes.iter().map(|probe| DIALECT.query(tenant, scope, probe)).collect()
}

fn place(row: &PgRow) -> Result<MessageRef, StoreError> {
    rows::message_ref(row)
}

fn found(row: &PgRow) -> Result<StoredHit, StoreError> {
    Ok(StoredHit { place: place(row)?, json: row.try_get("message")? })
}
