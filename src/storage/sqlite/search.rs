//! Finding messages, on SQLite.
//!
//! FTS5 keeps where each lexeme is, and gives the newest first without looking for the others. A lexeme of the session among those
//! asked for makes it leap over what other sessions say. The last few rows wait to be put into it (see its migration), and
//! are looked at before it is asked.

use super::{Sqlite, micros};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::lexemes::TermQuery;
use crate::storage::StoreError;
use crate::storage::rows::{message_ref, to_i64};
use crate::storage::search::{
    FtsSyntax, LARGE, MessageRef, SampleRange, SearchFilter, StoredHit, TermStatistics,
};
use crate::storage::statement::DbRow;
use rows::{Sought, rows};
use serde_json::{Value, json};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use std::ops::RangeInclusive;
use std::slice::from_ref;

mod rows;

const DIALECT: FtsSyntax = FtsSyntax { and: " AND ", or: " OR ", and_not: " NOT ", quote: "\"", prefix: "*" };

/// For [`rows()`], of a table or subquery with the columns of `search`.
macro_rules! rows {
    () => {
        "group_concat(
            session_id || char(31) || seq || char(31) || created_at || char(31) || id || char(31) || ' ' || lexemes || ' ',
            char(30)
        ) AS rows"
    };
}

const NEWEST: &str = concat!(
    "SELECT ",
    rows!(),
    ", (SELECT id FROM search WHERE tenant_id = $1 ORDER BY created_at, id LIMIT 1) AS oldest
    FROM (SELECT * FROM search WHERE tenant_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2)"
);

const NEWEST_OF_SESSION: &str = concat!(
    "SELECT ",
    rows!(),
    ", NULL AS oldest
    FROM (SELECT * FROM search WHERE tenant_id = $1 AND session_id = $3 ORDER BY seq DESC LIMIT $2)"
);

/// The rows that wait, and not a step below them: `+id` is no range to begin at.
const WAITING: &str = concat!(
    "SELECT ",
    rows!(),
    " FROM (
        SELECT * FROM search WHERE +tenant_id = $1 AND id > (SELECT through_id FROM search_lexemes_progress)
            AND +id BETWEEN $2 AND $3 AND created_at >= $4 AND created_at < $5 ORDER BY id DESC
    )"
);

const DRAW: &str = "\
    SELECT s.session_id, s.seq, s.created_at
    FROM search_lexemes AS l CROSS JOIN search AS s ON s.id = l.rowid
    WHERE search_lexemes MATCH $6 AND l.rowid BETWEEN $2 AND $3 AND s.tenant_id = $1
        AND s.created_at >= $4 AND s.created_at < $5 AND ($7 IS NULL OR s.session_id = $7)
    ORDER BY l.rowid DESC LIMIT $8";

/// How far back the newest rows go. Both are answered by an index alone.
const REACH: &str = "\
    SELECT min(id) AS first, max(id) AS last, min(created_at) AS since FROM (
        SELECT id, created_at FROM search WHERE tenant_id = $1 AND created_at >= $2 AND created_at < $4
        ORDER BY created_at DESC, id DESC LIMIT $3
    )";

const REACH_OF_SESSION: &str = "\
    SELECT min(id) AS first, max(id) AS last, $2 AS since FROM (
        SELECT id FROM search WHERE tenant_id = $1 AND session_id = $4 ORDER BY seq DESC LIMIT $3
    )";

/// SampleRange rows that a walk goes over before all that it may.
const FEW: i64 = 2000;

/// Places come as one JSON text: lists of session and `seq`. What is too much is not read: SQLite knows the length of a text
/// without it.
const AT: &str = "\
    SELECT m.session_id, m.seq, m.created_at, m.message
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

/// Of the columns beside `min`, SQLite takes those of the row that has it.
const BESIDE: &str = "\
    SELECT m.session_id, m.seq, m.created_at, m.message
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
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<TermStatistics, StoreError> {
        let query = sqlx::query(if scope.session.is_some() { NEWEST_OF_SESSION } else { NEWEST });
        let query = query.bind(tenant.as_str()).bind(most);
        let query = match &scope.session {
            Some(session) => query.bind(session.as_str()),
            None => query,
        };
        let row = query.fetch_one(&self.readers).await?;
        let (text, oldest): (Option<String>, Option<i64>) = (row.try_get("rows")?, row.try_get("oldest")?);
        let text = text.unwrap_or_default();
        let newest: Vec<_> = rows(&text).collect();
        let counts = |scope: &SearchFilter| {
            let sought = probes.iter().map(|probe| Sought::new(tenant, scope, probe));
            sought.map(|sought| to_i64(newest.iter().filter(|row| sought.is_in(row)).count())).collect()
        };
        let ids = || newest.iter().map(|row| row.id);
        let figures = SampleRange {
            rows: to_i64(newest.len()),
            first: ids().min().unwrap_or_default(),
            last: ids().max().unwrap_or_default(),
            oldest: oldest.unwrap_or_default(),
            last_seq: scope.session.as_ref().and_then(|_| newest.iter().map(|row| row.seq).max()),
        };
        let with: Vec<i64> = counts(&SearchFilter::default());
        let in_scope = if scope.narrows() { counts(scope) } else { with.clone() };
        Ok(TermStatistics { rows: figures.rows, messages: figures.messages(most), with, in_scope })
    }

    pub(in crate::storage) async fn lookup_terms(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        self.drawn(tenant, scope, 0..=i64::MAX, probes, most).await
    }

    /// By the index all the same: it comes by the newest first. How far back the newest go takes longer to tell than what
    /// is found there, and of what most messages have, enough is found among few.
    pub(in crate::storage) async fn scan_recent(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probe: &TermQuery,
        rows: i64,
        most: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let found = self.walked(tenant, scope, probe, rows.min(FEW), most).await?;
        if rows <= FEW || found.len() >= count(most) {
            return Ok(found);
        }
        self.walked(tenant, scope, probe, rows, most).await
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
            .bind(listed(places))
            .bind(max_bytes)
            .bind(LARGE)
            .bind(user.map(UserId::as_str));
        query.fetch_all(&self.readers).await?.iter().map(found).collect()
    }

    pub(in crate::storage) async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        places: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let query =
            sqlx::query(BESIDE).bind(tenant.as_str()).bind(listed(places)).bind(distance).bind(max_bytes);
        query.fetch_all(&self.readers).await?.iter().map(found).collect()
    }
}

impl Sqlite {
    async fn walked(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        probe: &TermQuery,
        rows: i64,
        most: i64,
    ) -> Result<Vec<MessageRef>, StoreError> {
        let query = sqlx::query(if scope.session.is_some() { REACH_OF_SESSION } else { REACH });
        let query = query.bind(tenant.as_str()).bind(micros(scope.from())).bind(rows);
        let query = match &scope.session {
            Some(session) => query.bind(session.as_str()),
            None => query.bind(micros(scope.to())),
        };
        let reach = query.fetch_one(&self.readers).await?;
        let (Some(first), Some(last)) = (reach.try_get("first")?, reach.try_get("last")?) else {
            return Ok(Vec::new());
        };
        let scope = SearchFilter { since: Some(DbRow::time(&reach, "since")?), ..scope.clone() };
        let drawn = self.drawn(tenant, &scope, first..=last, from_ref(probe), most).await?;
        Ok(drawn.into_iter().flatten().collect())
    }

    /// For each probe, the `most` messages of the scope that have what it asks for and the highest of these ids.
    async fn drawn(
        &self,
        tenant: &TenantId,
        scope: &SearchFilter,
        ids: RangeInclusive<i64>,
        probes: &[TermQuery],
        most: i64,
    ) -> Result<Vec<Vec<MessageRef>>, StoreError> {
        let bounded = |statement| {
            let query = sqlx::query(statement).bind(tenant.as_str()).bind(*ids.start()).bind(*ids.end());
            query.bind(micros(scope.from())).bind(micros(scope.to()))
        };
        // One transaction: a row is either waiting or in the index.
        let mut transaction = self.readers.begin().await?;
        let waiting: Option<String> = bounded(WAITING).fetch_one(&mut *transaction).await?.try_get("rows")?;
        let waiting = waiting.unwrap_or_default();
        let mut drawn = Vec::with_capacity(probes.len());
        for probe in probes {
            let sought = Sought::new(tenant, scope, probe);
            let found = rows(&waiting).filter(|row| sought.is_in(row)).take(count(most));
            let mut places: Vec<MessageRef> = found.map(|row| row.place()).collect::<Result<_, _>>()?;
            let query = bounded(DRAW)
                .bind(DIALECT.query(tenant, scope, probe))
                .bind(scope.session.as_ref().map(SessionId::as_str))
                .bind(most - to_i64(places.len()));
            for row in &query.fetch_all(&mut *transaction).await? {
                places.push(place(row)?);
            }
            drawn.push(places);
        }
        Ok(drawn)
    }
}

fn count(most: i64) -> usize {
    usize::try_from(most).unwrap_or_default()
}

fn listed(places: &[MessageRef]) -> String {
    places.iter().map(|place| json!([place.session.as_str(), place.seq])).collect::<Value>().to_string()
}

fn place(row: &SqliteRow) -> Result<MessageRef, StoreError> {
    message_ref(row)
}

fn found(row: &SqliteRow) -> Result<StoredHit, StoreError> {
    Ok(StoredHit { place: place(row)?, json: row.try_get("message")? })
}
