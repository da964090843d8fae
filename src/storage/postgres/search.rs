//! Search on Postgres.
//!
//! The table `search` has no row-level security, because a policy would prevent the use of its index (see the migrations).
//! Every statement filters by tenant, and the messages themselves are read from `messages`, which has a policy.

use super::Postgres;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows::{message_ref, redacted_at};
use crate::storage::search::{
    FtsSyntax, LARGE_MESSAGE_BYTES, MessageRef, SearchFilter, StoredHit, TermMatches,
};
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use time::OffsetDateTime;

const FTS_SYNTAX: FtsSyntax = FtsSyntax { and: " & ", or: " | ", and_not: " & !", quote: "'", prefix: ":*" };

/// A function, because it reads more and more of the index until it has found enough.
const LOOKUP_TERMS: &str = "\
    SELECT ids, sessions, seqs, times FROM newest_matches($1, $2, $3, $4, $5, $6) ORDER BY place";

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

/// Moves the pending list of the GIN index into its main structure.
const FLUSH_GIN_PENDING_LIST: &str = "SELECT flush_search_index()";
/// SQLSTATE of a lock timeout.
const LOCK_NOT_AVAILABLE: &str = "55P03";

impl Postgres {
    /// Flushes the pending list of the index, except if another connection is doing so.
    pub(in crate::storage) async fn flush_search_index(&self) -> Result<(), sqlx::Error> {
        match sqlx::query(FLUSH_GIN_PENDING_LIST).fetch_one(&self.pool).await {
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
                Ok(())
            }
            flushed => flushed.map(drop),
        }
    }

    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<TermMatches>, StoreError> {
        let rendered = queries.iter().map(|query| FTS_SYNTAX.render(tenant, filter, query));
        let query = sqlx::query(LOOKUP_TERMS)
            .bind(tenant.as_str())
            .bind(rendered.collect::<Vec<_>>())
            .bind(filter.session.as_ref().map(SessionId::as_str))
            .bind(filter.since)
            .bind(filter.until)
            .bind(limit);
        query.fetch_all(&self.pool).await?.iter().map(term_matches).collect()
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

fn term_matches(row: &PgRow) -> Result<TermMatches, StoreError> {
    let ids: Vec<i64> = row.try_get("ids")?;
    let sessions: Vec<String> = row.try_get("sessions")?;
    let (seqs, times): (Vec<i64>, Vec<OffsetDateTime>) = (row.try_get("seqs")?, row.try_get("times")?);
    let message_ref = |((session, seq), created_at): ((String, i64), OffsetDateTime)| {
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        Ok(MessageRef { created_at, seq, session })
    };
    let refs =
        sessions.into_iter().zip(seqs).zip(times).map(message_ref).collect::<Result<_, StoreError>>()?;
    let id = |id: Option<&i64>| id.copied().unwrap_or_default();
    Ok(TermMatches { refs, newest_id: id(ids.first()), oldest_id: id(ids.last()) })
}

fn stored_hit(row: &PgRow) -> Result<StoredHit, StoreError> {
    Ok(StoredHit {
        message_ref: message_ref(row)?,
        redacted_at: redacted_at(row)?,
        json: row.try_get("message")?,
    })
}
