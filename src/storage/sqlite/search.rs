//! Search on SQLite.
//!
//! FTS5 returns the newest matches first without reading the others. A lexeme of the session in the query makes FTS5 skip
//! the rows of other sessions.

use super::{Sqlite, micros};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows::{message_ref, redacted_at};
use crate::storage::search::{
    FtsSyntax, LARGE_MESSAGE_BYTES, MessageRef, SearchFilter, StoredHit, TermMatches,
};
use crate::storage::values::DbTime;
use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

const FTS_SYNTAX: FtsSyntax =
    FtsSyntax { and: " AND ", or: " OR ", and_not: " NOT ", quote: "\"", prefix: "*" };

/// Returns one JSON text for each query, because transferring a row takes longer than finding it.
const LOOKUP_TERMS: &str = "\
    SELECT (
        SELECT json_group_array(json_array(id, session_id, seq, created_at)) FROM (
            SELECT s.id, s.session_id, s.seq, s.created_at
            FROM search_lexemes AS l CROSS JOIN search AS s ON s.id = l.rowid
            WHERE search_lexemes MATCH q.value AND l.rowid >= $7 AND l.rowid < $8 AND s.tenant_id = $1
                AND s.created_at >= $4 AND s.created_at < $5 AND ($3 IS NULL OR s.session_id = $3)
            ORDER BY l.rowid DESC LIMIT $6
        )
    ) AS matches FROM json_each($2) AS q ORDER BY q.key";

/// Returns the ids that messages of a time range can have.
const SELECT_ID_RANGE: &str = "\
    SELECT coalesce(min(bucket), 0) << 11 AS first, (coalesce(max(bucket), -1) + 1) << 11 AS after
    FROM search_times WHERE newest >= $1 AND oldest < $2";

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
    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<TermMatches>, StoreError> {
        let (since, until) = (micros(filter.since_or_min()), micros(filter.until_or_max()));
        let (mut first, mut after) = (0, i64::MAX);
        if filter.since.is_some() || filter.until.is_some() {
            let range = sqlx::query(SELECT_ID_RANGE).bind(since).bind(until).fetch_one(&self.readers).await?;
            (first, after) = (range.try_get("first")?, range.try_get("after")?);
        }
        let rendered = queries.iter().map(|query| FTS_SYNTAX.render(tenant, filter, query));
        let query = sqlx::query(LOOKUP_TERMS)
            .bind(tenant.as_str())
            .bind(rendered.collect::<Value>().to_string())
            .bind(filter.session.as_ref().map(SessionId::as_str))
            .bind(since)
            .bind(until)
            .bind(limit)
            .bind(first)
            .bind(after);
        query.fetch_all(&self.readers).await?.iter().map(term_matches).collect()
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

fn term_matches(row: &SqliteRow) -> Result<TermMatches, StoreError> {
    let matches: Vec<(i64, String, i64, i64)> =
        serde_json::from_str(row.try_get("matches")?).map_err(StoreError::corrupt("a row of the index"))?;
    let id = |found: Option<&(i64, String, i64, i64)>| found.map_or(0, |(id, ..)| *id);
    let (newest_id, oldest_id) = (id(matches.first()), id(matches.last()));
    let message_ref = |(_, session, seq, created_at): (i64, String, i64, i64)| {
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        Ok(MessageRef { created_at: DbTime::from_micros(created_at)?.0, seq, session })
    };
    let refs = matches.into_iter().map(message_ref).collect::<Result<_, StoreError>>()?;
    Ok(TermMatches { refs, newest_id, oldest_id })
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
