//! Search on Postgres.
//!
//! The table `search` has no row-level security, because a policy would prevent the use of its index (see the migration).
//! Every statement filters by tenant, and the messages themselves are read from `messages`, which has a policy. The planner
//! cannot estimate a tsquery that is a parameter, and tends to prefer the index on times. `OFFSET 0` separates finding the
//! rows from sorting them.

use super::Postgres;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows::{message_ref, redacted_at};
use crate::storage::search::{
    FtsSyntax, LARGE_MESSAGE_BYTES, MessageRef, SampleRange, SearchFilter, StoredHit, TermStatistics,
};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

const FTS_SYNTAX: FtsSyntax = FtsSyntax { and: " & ", or: " | ", and_not: " & !", quote: "'", prefix: ":*" };

const SAMPLE_TENANT: &str = "\
    WITH newest AS MATERIALIZED (
        SELECT id, seq, lexemes FROM search WHERE tenant_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2
    )
    SELECT count(*) AS rows, coalesce(min(id), 0) AS first, coalesce(max(id), 0) AS last, NULL::bigint AS last_seq,
        coalesce((SELECT id FROM search WHERE tenant_id = $1 ORDER BY created_at, id LIMIT 1), 0) AS oldest,
        ARRAY(SELECT (SELECT count(*) FROM newest WHERE lexemes @@ p.probe)
            FROM unnest($3::text[]::tsquery[]) WITH ORDINALITY AS p (probe, place) ORDER BY place) AS found
    FROM newest";

const SAMPLE_SESSION: &str = "\
    WITH newest AS MATERIALIZED (
        SELECT id, seq, lexemes FROM search WHERE tenant_id = $1 AND session_id = $4 ORDER BY seq DESC LIMIT $2
    )
    SELECT count(*) AS rows, 0::bigint AS first, 0::bigint AS last, max(seq) AS last_seq,
        0::bigint AS oldest,
        ARRAY(SELECT (SELECT count(*) FROM newest WHERE lexemes @@ p.probe)
            FROM unnest($3::text[]::tsquery[]) WITH ORDINALITY AS p (probe, place) ORDER BY place) AS found
    FROM newest";

const LOOKUP_TERMS: &str = "\
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

const SCAN_TENANT: &str = "\
    SELECT session_id, seq, created_at FROM (
        SELECT session_id, seq, created_at, lexemes FROM search
        WHERE tenant_id = $1 AND created_at >= $3 AND created_at < $4 ORDER BY created_at DESC, id DESC LIMIT $5
    ) AS newest
    WHERE lexemes @@ $2::text::tsquery LIMIT $6";

const SCAN_SESSION: &str = "\
    SELECT session_id, seq, created_at FROM (
        SELECT session_id, seq, created_at, lexemes FROM search
        WHERE tenant_id = $1 AND session_id = $7 ORDER BY seq DESC LIMIT $5
    ) AS newest
    WHERE lexemes @@ $2::text::tsquery AND created_at >= $3 AND created_at < $4 LIMIT $6";

/// `OFFSET 0` makes Postgres look up the session of each hit: an index on the user would return all sessions of the user.
const FETCH_HITS: &str = "\
    SELECT session_id, seq, created_at, redaction, message FROM (
        SELECT w.session_id, w.seq, m.created_at, m.redaction, m.message, w.place, sum(octet_length(m.message))
            OVER (ORDER BY octet_length(m.message) > $5, w.place) - octet_length(m.message) AS before
        FROM unnest($2::text[], $3::bigint[]) WITH ORDINALITY AS w (session_id, seq, place)
            CROSS JOIN LATERAL (
                SELECT created_at, redaction, message FROM messages
                WHERE tenant_id = $1 AND session_id = w.session_id AND seq = w.seq OFFSET 0
            ) AS m
        WHERE $6::text IS NULL OR EXISTS (
            SELECT FROM (SELECT user_id FROM sessions WHERE tenant_id = $1 AND session_id = w.session_id OFFSET 0) AS s
            WHERE user_id = $6
        )
    ) AS sized
    WHERE before < $4 ORDER BY place";

/// The bounds of each range are parameters, because row-level security prevents index conditions on computed values.
/// `OFFSET 0` forces an index scan for each range, whatever number of rows the planner expects.
const FETCH_NEIGHBOURS: &str = "\
    SELECT session_id, seq, created_at, redaction, message FROM (
        SELECT session_id, seq, created_at, redaction, message,
            sum(octet_length(message)) OVER (ORDER BY place, distance, seq) - octet_length(message) AS before
        FROM (
            SELECT DISTINCT ON (m.session_id, m.seq)
                m.session_id, m.seq, m.created_at, m.redaction, m.message, w.place, abs(m.seq - w.seq) AS distance
            FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
                WITH ORDINALITY AS w (session_id, seq, first, last, place)
                CROSS JOIN LATERAL (
                    SELECT session_id, seq, created_at, redaction, message FROM messages
                    WHERE tenant_id = $1 AND session_id = w.session_id AND seq >= w.first AND seq <= w.last OFFSET 0
                ) AS m
            WHERE m.seq <> w.seq ORDER BY m.session_id, m.seq, w.place
        ) AS beside
    ) AS sized
    WHERE before < $6";

/// Planner settings for one transaction that prevent reading the whole table. The planner does not know how soon a scan
/// ends, and would rather read and sort the table than read a fifth of it by an index. It also cannot estimate a query that
/// is a parameter.
const PLAN_INDEX_SCAN: &str = "\
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
        set_config('enable_sort', 'off', true)";
const PLAN_INDEX_LOOKUP: &str = "SELECT set_config('enable_seqscan', 'off', true)";

impl Postgres {
    pub(in crate::storage) async fn term_statistics(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        sample_size: i64,
    ) -> Result<TermStatistics, StoreError> {
        let mut rendered = render_all(tenant, &SearchFilter::default(), queries);
        if filter.is_selective() {
            rendered.extend(render_all(tenant, filter, queries));
        }
        let query = match &filter.session {
            None => sqlx::query(SAMPLE_TENANT).bind(tenant.as_str()).bind(sample_size).bind(rendered),
            Some(session) => {
                let query =
                    sqlx::query(SAMPLE_SESSION).bind(tenant.as_str()).bind(sample_size).bind(rendered);
                query.bind(session.as_str())
            }
        };
        let row = self.read(tenant, query).await?.ok_or(sqlx::Error::RowNotFound)?;
        let range = SampleRange {
            sampled: row.try_get("rows")?,
            lowest_id: row.try_get("first")?,
            highest_id: row.try_get("last")?,
            oldest_id: row.try_get("oldest")?,
            last_seq: row.try_get("last_seq")?,
        };
        let mut matching: Vec<i64> = row.try_get("found")?;
        let matching_filter =
            if filter.is_selective() { matching.split_off(queries.len()) } else { matching.clone() };
        let total = range.total_messages(sample_size);
        Ok(TermStatistics { sampled: range.sampled, total, matching, matching_filter })
    }

    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        let query = sqlx::query(LOOKUP_TERMS)
            .bind(tenant.as_str())
            .bind(render_all(tenant, filter, queries))
            .bind(filter.session.as_ref().map(SessionId::as_str))
            .bind(filter.since_or_min())
            .bind(filter.until_or_max())
            .bind(limit);
        let mut found = vec![Vec::new(); queries.len()];
        for row in &self.read_all_with_settings(tenant, PLAN_INDEX_LOOKUP, query).await? {
            let ordinal: i64 = row.try_get("place")?;
            let list = usize::try_from(ordinal - 1).ok().and_then(|index| found.get_mut(index));
            list.ok_or(sqlx::Error::RowNotFound)?.push(message_ref(row)?);
        }
        Ok(found)
    }

    pub(in crate::storage) async fn scan_recent(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        query: &TermQuery,
        max_scanned: i64,
        limit: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let query = sqlx::query(if filter.session.is_some() { SCAN_SESSION } else { SCAN_TENANT })
            .bind(tenant.as_str())
            .bind(FTS_SYNTAX.render(tenant, filter, query))
            .bind(filter.since_or_min())
            .bind(filter.until_or_max())
            .bind(max_scanned)
            .bind(limit);
        let query = match &filter.session {
            Some(session) => query.bind(session.as_str()),
            None => query,
        };
        self.read_all_with_settings(tenant, PLAN_INDEX_SCAN, query).await?.iter().map(message_ref).collect()
    }

    pub(in crate::storage) async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        refs: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let query = sqlx::query(FETCH_HITS)
            .bind(tenant.as_str())
            .bind(refs.iter().map(|message| message.session.as_str()).collect::<Vec<_>>())
            .bind(refs.iter().map(|message| message.seq).collect::<Vec<_>>())
            .bind(max_bytes)
            .bind(LARGE_MESSAGE_BYTES)
            .bind(user.map(UserId::as_str));
        self.read_all(tenant, query).await?.iter().map(stored_hit).collect()
    }

    pub(in crate::storage) async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        refs: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let query = sqlx::query(FETCH_NEIGHBOURS)
            .bind(tenant.as_str())
            .bind(refs.iter().map(|message| message.session.as_str()).collect::<Vec<_>>())
            .bind(refs.iter().map(|message| message.seq).collect::<Vec<_>>())
            .bind(refs.iter().map(|message| message.seq.saturating_sub(distance)).collect::<Vec<_>>())
            .bind(refs.iter().map(|message| message.seq.saturating_add(distance)).collect::<Vec<_>>())
            .bind(max_bytes);
        self.read_all(tenant, query).await?.iter().map(stored_hit).collect()
    }
}

fn render_all(tenant: &TenantId, filter: &SearchFilter, queries: &[TermQuery]) -> Vec<String> {
    queries.iter().map(|query| FTS_SYNTAX.render(tenant, filter, query)).collect()
}

fn stored_hit(row: &PgRow) -> Result<StoredHit, StoreError> {
    Ok(StoredHit {
        message_ref: message_ref(row)?,
        redacted_at: redacted_at(row)?,
        json: row.try_get("message")?,
    })
}
