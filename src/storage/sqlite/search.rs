//! Search on SQLite.
//!
//! FTS5 returns the newest matches first without reading the others. A lexeme of the session in the query makes FTS5 skip
//! the rows of other sessions. The newest rows are not in FTS5 yet (see the migration); they are matched before it is
//! queried.

use super::{Sqlite, micros};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows::{message_ref, redacted_at};
use crate::storage::search::{
    FtsSyntax, LARGE_MESSAGE_BYTES, MessageRef, SampleRange, SearchFilter, StoredHit, TermStatistics,
};
use crate::storage::statement::DbRow;
use crate::storage::values::to_i64;
use rows::{RowMatcher, parse_rows};
use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use std::ops::RangeInclusive;
use std::slice::from_ref;

mod rows;

const FTS_SYNTAX: FtsSyntax =
    FtsSyntax { and: " AND ", or: " OR ", and_not: " NOT ", quote: "\"", prefix: "*" };

/// Concatenates the columns of `search` for [`parse_rows`].
macro_rules! rows {
    () => {
        "group_concat(
            session_id || char(31) || seq || char(31) || created_at || char(31) || id || char(31) || ' ' || lexemes || ' ',
            char(30)
        ) AS rows"
    };
}

const SAMPLE_TENANT: &str = concat!(
    "SELECT ",
    rows!(),
    ", (SELECT id FROM search WHERE tenant_id = $1 ORDER BY created_at, id LIMIT 1) AS oldest
    FROM (SELECT * FROM search WHERE tenant_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2)"
);

const SAMPLE_SESSION: &str = concat!(
    "SELECT ",
    rows!(),
    ", NULL AS oldest
    FROM (SELECT * FROM search WHERE tenant_id = $1 AND session_id = $3 ORDER BY seq DESC LIMIT $2)"
);

/// Reads only the rows that are not in FTS5 yet: `+id` keeps SQLite from starting at the lower bound of the id range.
const SELECT_UNINDEXED_ROWS: &str = concat!(
    "SELECT ",
    rows!(),
    " FROM (
        SELECT * FROM search WHERE +tenant_id = $1 AND id > (SELECT through_id FROM search_lexemes_progress)
            AND +id BETWEEN $2 AND $3 AND created_at >= $4 AND created_at < $5 ORDER BY id DESC
    )"
);

const LOOKUP_TERMS: &str = "\
    SELECT s.session_id, s.seq, s.created_at
    FROM search_lexemes AS l CROSS JOIN search AS s ON s.id = l.rowid
    WHERE search_lexemes MATCH $6 AND l.rowid BETWEEN $2 AND $3 AND s.tenant_id = $1
        AND s.created_at >= $4 AND s.created_at < $5 AND ($7 IS NULL OR s.session_id = $7)
    ORDER BY l.rowid DESC LIMIT $8";

/// Returns the id range of the newest rows. An index covers both statements.
const SCAN_BOUNDS_OF_TENANT: &str = "\
    SELECT min(id) AS first, max(id) AS last, min(created_at) AS since FROM (
        SELECT id, created_at FROM search WHERE tenant_id = $1 AND created_at >= $2 AND created_at < $4
        ORDER BY created_at DESC, id DESC LIMIT $3
    )";

const SCAN_BOUNDS_OF_SESSION: &str = "\
    SELECT min(id) AS first, max(id) AS last, $2 AS since FROM (
        SELECT id FROM search WHERE tenant_id = $1 AND session_id = $4 ORDER BY seq DESC LIMIT $3
    )";

/// Number of rows that a scan reads first; only if they hold too few matches does it read up to its limit.
const FIRST_SCAN_ROWS: i64 = 2000;

/// References are one JSON text: lists of session and `seq`. Messages beyond the size limit are not read, because SQLite
/// knows the length of a text without reading it.
const FETCH_HITS: &str = "\
    SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message
    FROM (
        SELECT place, session_id, seq, sum(bytes) OVER (ORDER BY bytes > $4, place) - bytes AS before
        FROM (
            SELECT w.key AS place, m.session_id, m.seq, octet_length(m.message) AS bytes
            FROM json_each($2) AS w
                CROSS JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = w.value ->> 0 AND m.seq = w.value ->> 1
                CROSS JOIN sessions AS s ON s.tenant_id = $1 AND s.session_id = m.session_id
            WHERE $5 IS NULL OR s.user_id = $5
        )
    ) AS sized CROSS JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = sized.session_id AND m.seq = sized.seq
    WHERE before < $3 ORDER BY place";

/// SQLite takes bare columns next to `min` from the row with the minimum.
const FETCH_NEIGHBOURS: &str = "\
    SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message
    FROM (
        SELECT session_id, seq, sum(bytes) OVER (ORDER BY place, distance, seq) - bytes AS before
        FROM (
            SELECT m.session_id, m.seq, octet_length(m.message) AS bytes, min(w.key) AS place,
                abs(m.seq - (w.value ->> 1)) AS distance
            FROM json_each($2) AS w
                CROSS JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = w.value ->> 0
                    AND m.seq BETWEEN (w.value ->> 1) - $3 AND (w.value ->> 1) + $3
            WHERE m.seq <> w.value ->> 1 GROUP BY m.session_id, m.seq
        )
    ) AS sized CROSS JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = sized.session_id AND m.seq = sized.seq
    WHERE before < $4";

impl Sqlite {
    pub(in crate::storage) async fn term_statistics(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        sample_size: i64,
    ) -> Result<TermStatistics, StoreError> {
        let query = sqlx::query(if filter.session.is_some() { SAMPLE_SESSION } else { SAMPLE_TENANT });
        let query = query.bind(tenant.as_str()).bind(sample_size);
        let query = match &filter.session {
            Some(session) => query.bind(session.as_str()),
            None => query,
        };
        let row = query.fetch_one(&self.readers).await?;
        let (text, oldest_id): (Option<String>, Option<i64>) = (row.try_get("rows")?, row.try_get("oldest")?);
        let text = text.unwrap_or_default();
        let sample: Vec<_> = parse_rows(&text).collect();
        let counts = |filter: &SearchFilter| {
            let matchers = queries.iter().map(|query| RowMatcher::new(tenant, filter, query));
            matchers.map(|matcher| to_i64(sample.iter().filter(|row| matcher.matches(row)).count())).collect()
        };
        let ids = || sample.iter().map(|row| row.id);
        let range = SampleRange {
            sampled: to_i64(sample.len()),
            lowest_id: ids().min().unwrap_or_default(),
            highest_id: ids().max().unwrap_or_default(),
            oldest_id: oldest_id.unwrap_or_default(),
            last_seq: filter.session.as_ref().and_then(|_| sample.iter().map(|row| row.seq).max()),
        };
        let matching: Vec<i64> = counts(&SearchFilter::default());
        let matching_filter = if filter.is_selective() { counts(filter) } else { matching.clone() };
        Ok(TermStatistics {
            sampled: range.sampled,
            total: range.total_messages(sample_size),
            matching,
            matching_filter,
        })
    }

    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        self.lookup_in_range(tenant, filter, 0..=i64::MAX, queries, limit).await
    }

    /// Uses FTS5, too, because it returns the newest rows first. Computing the bounds of a large scan takes longer than the
    /// lookup, and a common term usually has enough matches among few rows, so a small scan is tried first.
    pub(in crate::storage) async fn scan_recent(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        term_query: &TermQuery,
        max_scanned: i64,
        limit: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let found = self.scan(tenant, filter, term_query, max_scanned.min(FIRST_SCAN_ROWS), limit).await?;
        if max_scanned <= FIRST_SCAN_ROWS || found.len() >= to_usize(limit) {
            return Ok(found);
        }
        self.scan(tenant, filter, term_query, max_scanned, limit).await
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
            .bind(refs_json(refs))
            .bind(max_bytes)
            .bind(LARGE_MESSAGE_BYTES)
            .bind(user.map(UserId::as_str));
        query.fetch_all(&self.readers).await?.iter().map(stored_hit).collect()
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
            .bind(refs_json(refs))
            .bind(distance)
            .bind(max_bytes);
        query.fetch_all(&self.readers).await?.iter().map(stored_hit).collect()
    }
}

impl Sqlite {
    async fn scan(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        term_query: &TermQuery,
        max_scanned: i64,
        limit: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let query = sqlx::query(if filter.session.is_some() {
            SCAN_BOUNDS_OF_SESSION
        } else {
            SCAN_BOUNDS_OF_TENANT
        });
        let query = query.bind(tenant.as_str()).bind(micros(filter.since_or_min())).bind(max_scanned);
        let query = match &filter.session {
            Some(session) => query.bind(session.as_str()),
            None => query.bind(micros(filter.until_or_max())),
        };
        let bounds = query.fetch_one(&self.readers).await?;
        let (Some(first), Some(last)) = (bounds.try_get("first")?, bounds.try_get("last")?) else {
            return Ok(Vec::new());
        };
        let filter = SearchFilter { since: Some(DbRow::time(&bounds, "since")?), ..filter.clone() };
        let found = self.lookup_in_range(tenant, &filter, first..=last, from_ref(term_query), limit).await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Returns for each query the `limit` matching messages with the highest ids in a range.
    async fn lookup_in_range(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        ids: RangeInclusive<i64>,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        let bounded = |statement| {
            let query = sqlx::query(statement).bind(tenant.as_str()).bind(*ids.start()).bind(*ids.end());
            query.bind(micros(filter.since_or_min())).bind(micros(filter.until_or_max()))
        };
        // In one transaction, every row is either unindexed or in the index.
        let mut transaction = self.readers.begin().await?;
        let unindexed: Option<String> =
            bounded(SELECT_UNINDEXED_ROWS).fetch_one(&mut *transaction).await?.try_get("rows")?;
        let unindexed = unindexed.unwrap_or_default();
        let mut lists = Vec::with_capacity(queries.len());
        for term_query in queries {
            let matcher = RowMatcher::new(tenant, filter, term_query);
            let found = parse_rows(&unindexed).filter(|row| matcher.matches(row)).take(to_usize(limit));
            let mut refs: Vec<MessageRef> = found.map(|row| row.message_ref()).collect::<Result<_, _>>()?;
            let query = bounded(LOOKUP_TERMS)
                .bind(FTS_SYNTAX.render(tenant, filter, term_query))
                .bind(filter.session.as_ref().map(SessionId::as_str))
                .bind(limit - to_i64(refs.len()));
            for row in &query.fetch_all(&mut *transaction).await? {
                refs.push(message_ref(row)?);
            }
            lists.push(refs);
        }
        Ok(lists)
    }
}

fn to_usize(limit: i64) -> usize {
    usize::try_from(limit).unwrap_or_default()
}

fn refs_json(refs: &[MessageRef]) -> String {
    refs.iter().map(|message| json!([message.session.as_str(), message.seq])).collect::<Value>().to_string()
}

fn stored_hit(row: &SqliteRow) -> Result<StoredHit, StoreError> {
    Ok(StoredHit {
        message_ref: message_ref(row)?,
        redacted_at: redacted_at(row)?,
        json: row.try_get("message")?,
    })
}
