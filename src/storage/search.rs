//! Candidates of a search. The index and the messages are read here; `domain::search` ranks them.
//!
//! On Postgres, the table `search` has no row-level security, because a policy would prevent the use of its index (see the
//! migrations). Every statement filters by tenant, and the messages themselves are read from `messages`, which has a policy.
//! FTS5 on SQLite returns the newest matches first without reading the others. A lexeme of the session in the query makes it skip
//! the rows of other sessions.

use super::statement::{AnyRow, DbRow as _, Sql};
use super::values::DbTime;
use super::{Store, StoreError, rows};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::lexemes::{self, TermPattern, TermQuery};
use serde_json::{Value, json};
use sqlx::Row as _;
use time::OffsetDateTime;

/// The messages to search. The default is all messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchFilter {
    pub session: Option<SessionId>,
    pub user: Option<UserId>,
    pub role: Option<Role>,
    /// Inclusive.
    pub since: Option<OffsetDateTime>,
    /// Exclusive.
    pub until: Option<OffsetDateTime>,
    /// Messages with any of these terms are excluded.
    pub excluded_terms: Vec<String>,
}

/// The newest messages that match a query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermMatches {
    /// Newest first.
    pub refs: Vec<MessageRef>,
    /// The ids of the index entries of the first and the last of `refs`, or 0. A higher id was stored later, and the entries of
    /// all tenants have ids from 1.
    pub newest_id: i64,
    pub oldest_id: i64,
}

/// The position of a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageRef {
    pub created_at: OffsetDateTime,
    pub seq: i64,
    pub session: SessionId,
}

/// Only a small part of a message with more JSON than this is searchable.
const LARGE_MESSAGE_BYTES: i64 = 128 * 1024;

/// A message that was fetched for a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredHit {
    pub message_ref: MessageRef,
    /// Time at which the content of the message was removed.
    pub redacted_at: Option<OffsetDateTime>,
    /// JSON, as the client sent it.
    pub json: String,
}

/// Messages that are missing from the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingMessages {
    /// The analyzer version of the index. Empty if it has none.
    pub analyzer: String,
    pub newest: Vec<StoredHit>,
    /// Number of further missing messages.
    pub others: i64,
}

impl SearchFilter {
    /// Returns the lexemes that every message passing the filter contains.
    fn required_lexemes(&self, prefix: &str) -> Vec<String> {
        let session = self.session.as_ref().map(|session| lexemes::session_lexeme(prefix, session));
        let user = self.user.as_ref().map(|user| lexemes::user_lexeme(prefix, user));
        let role = self.role.map(|role| lexemes::role_lexeme(prefix, role));
        [session, user, role].into_iter().flatten().collect()
    }

    /// Returns the lexemes that no message passing the filter contains.
    fn excluded_lexemes(&self, prefix: &str) -> Vec<String> {
        self.excluded_terms.iter().map(|term| format!("{prefix}{term}")).collect()
    }
}

/// The query syntax of a full-text index.
struct FtsSyntax {
    and: &'static str,
    or: &'static str,
    and_not: &'static str,
    quote: &'static str,
    prefix: &'static str,
}

const TSQUERY: FtsSyntax = FtsSyntax { and: " & ", or: " | ", and_not: " & !", quote: "'", prefix: ":*" };
const FTS5: FtsSyntax = FtsSyntax { and: " AND ", or: " OR ", and_not: " NOT ", quote: "\"", prefix: "*" };

impl FtsSyntax {
    /// Renders a query within a filter. Lexemes consist of letters, digits and colons, so quotes need no escaping.
    fn render(&self, tenant: &TenantId, filter: &SearchFilter, query: &TermQuery) -> String {
        let tenant_prefix = lexemes::tenant_prefix(tenant);
        let Self { and, or, and_not, quote, prefix } = self;
        let quoted = |lexeme: String| format!("{quote}{lexeme}{quote}");
        let pattern = |TermPattern { term, is_prefix }: &TermPattern| {
            quoted(format!("{tenant_prefix}{term}")) + if *is_prefix { prefix } else { "" }
        };
        let any_of = |group: &Vec<TermPattern>| {
            format!("({})", group.iter().map(pattern).collect::<Vec<_>>().join(or))
        };
        let required = filter.required_lexemes(&tenant_prefix).into_iter().map(quoted);
        let all = query.0.iter().map(any_of).chain(required).collect::<Vec<_>>().join(and);
        let excluded: Vec<String> = filter.excluded_lexemes(&tenant_prefix).into_iter().map(quoted).collect();
        if excluded.is_empty() { all } else { format!("({all}){and_not}({})", excluded.join(or)) }
    }
}

/// A function on Postgres, because it reads more and more of the index until it has found enough. On SQLite, one JSON text for each
/// query, because transferring a row takes longer than finding it, from the ids that messages of the time range can have. Sessions that are
/// being erased are left out.
const LOOKUP_TERMS: Sql = Sql {
    postgres: "\
        SELECT ids, sessions, seqs, times
        FROM newest_matches($1, ARRAY(SELECT json_array_elements_text(CAST($2 AS json))), $3, $4, $5, $6) ORDER BY place",
    sqlite: "\
        WITH range AS MATERIALIZED (
            SELECT coalesce(min(bucket), 0) << 11 AS first, (coalesce(max(bucket), -1) + 1) << 11 AS after
            FROM search_times WHERE ($4 IS NULL OR newest >= $4) AND ($5 IS NULL OR oldest < $5)
        )
        SELECT (
            SELECT json_group_array(json_array(id, session_id, seq, created_at)) FROM (
                SELECT s.id, s.session_id, s.seq, s.created_at
                FROM search_lexemes AS l CROSS JOIN search AS s ON s.id = l.rowid
                WHERE search_lexemes MATCH q.value AND l.rowid >= (SELECT first FROM range)
                    AND l.rowid < (SELECT after FROM range) AND s.tenant_id = $1 AND ($3 IS NULL OR s.session_id = $3)
                    AND ($4 IS NULL OR s.created_at >= $4) AND ($5 IS NULL OR s.created_at < $5)
                    AND s.session_id NOT IN (SELECT session_id FROM sessions WHERE tenant_id = $1 AND import_until = 0)
                ORDER BY l.rowid DESC LIMIT $6
            )
        ) AS matches FROM json_each($2) AS q ORDER BY q.key",
};

/// Consecutive messages of a session. Those next to `origin` come first.
pub(super) struct Span<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) session: &'a SessionId,
    pub(super) origin: i64,
    pub(super) first: i64,
    pub(super) last: i64,
}

/// Spans are one JSON text. Their bounds are columns, because row-level security prevents index conditions on computed values.
/// Messages beyond the size limit are not read, because both databases know the length of a text without reading it.
macro_rules! read_spans {
    ($elements:literal, $lateral:literal, $fence:literal) => {
        concat!(
            "WITH spans AS MATERIALIZED (
                SELECT coalesce($1, value ->> 1) AS tenant_id, value ->> 2 AS session_id,
                    CAST(value ->> 0 AS bigint) AS place, CAST(value ->> 3 AS bigint) AS origin,
                    CAST(value ->> 4 AS bigint) AS first_seq, CAST(value ->> 5 AS bigint) AS last_seq
                FROM ", $elements, "
            ), found AS MATERIALIZED (
                SELECT w.tenant_id, w.session_id, m.seq, max(octet_length(m.message)) AS bytes,
                    min((w.place << 32) + abs(m.seq - w.origin)) AS place
                FROM spans AS w CROSS JOIN ", $lateral, " messages AS m
                WHERE m.tenant_id = w.tenant_id AND m.session_id = w.session_id AND m.seq >= w.first_seq
                    AND m.seq <= w.last_seq ", $fence, "
                GROUP BY w.tenant_id, w.session_id, m.seq
            ), kept AS MATERIALIZED (
                SELECT * FROM (
                    SELECT *, sum(bytes) OVER (ORDER BY bytes > $4, place) - bytes AS before FROM found AS f
                    WHERE $5 IS NULL OR $5 = (
                        SELECT user_id FROM sessions AS s
                        WHERE s.tenant_id = f.tenant_id AND s.session_id = f.session_id
                    )
                ) AS sized WHERE before < $3
            )
            SELECT w.place >> 32 AS place, m.session_id, m.seq, m.created_at, m.redaction, m.message
            FROM kept AS w CROSS JOIN ", $lateral, " messages AS m
            WHERE m.tenant_id = w.tenant_id AND m.session_id = w.session_id AND m.seq = w.seq ", $fence, "
            ORDER BY w.place"
        )
    };
}

/// On Postgres, `OFFSET 0` forces an index scan for each span, whatever number of rows the planner expects.
const READ_SPANS: Sql = Sql {
    postgres: read_spans!(
        "json_array_elements(CAST($2 AS json))",
        "LATERAL (SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message FROM",
        "OFFSET 0) AS m"
    ),
    sqlite: read_spans!("json_each($2)", "", ""),
};

impl Store {
    /// Returns for each query the `limit` newest matching messages, however many there are.
    pub async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<TermMatches>, StoreError> {
        let syntax = if matches!(self, Self::Postgres(_)) { TSQUERY } else { FTS5 };
        let queries: Value = queries.iter().map(|query| syntax.render(tenant, filter, query)).collect();
        let statement = self.global_statement(LOOKUP_TERMS).bind(tenant.as_str()).bind(queries.to_string());
        let statement = statement.bind(filter.session.as_ref().map(SessionId::as_str));
        let statement = statement.bind(filter.since.map(DbTime)).bind(filter.until.map(DbTime)).bind(limit);
        statement.read_all_of_search().await?.iter().map(term_matches).collect()
    }

    /// Returns the messages in the order of `refs`, until their JSON exceeds `max_bytes`. Messages larger than
    /// 128 KiB are considered last. With a user, only messages in sessions of the user.
    pub async fn fetch_hits(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        refs: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let span = |&MessageRef { seq, ref session, .. }| Span {
            tenant,
            session,
            origin: seq,
            first: seq,
            last: seq,
        };
        let spans = refs.iter().map(span).enumerate();
        let hits = self.read_spans(Some(tenant), user, spans, max_bytes, LARGE_MESSAGE_BYTES).await?;
        Ok(hits.into_iter().map(|(_, hit)| hit).collect())
    }

    /// Returns the messages up to `distance` before and after each of `refs`, without duplicates, until their
    /// JSON exceeds `max_bytes`. Neighbours of the first references come first, and the nearest before others.
    pub async fn fetch_neighbours(
        &self,
        tenant: &TenantId,
        refs: &[MessageRef],
        distance: i64,
        max_bytes: i64,
    ) -> Result<Vec<StoredHit>, StoreError> {
        let span = |(place, &MessageRef { seq, ref session, .. })| {
            let side = |first, last| (place, Span { tenant, session, origin: seq, first, last });
            [side(seq.saturating_sub(distance), seq - 1), side(seq + 1, seq.saturating_add(distance))]
        };
        let spans = refs.iter().enumerate().flat_map(span);
        let neighbours = self.read_spans(Some(tenant), None, spans, max_bytes, i64::MAX).await?;
        Ok(neighbours.into_iter().map(|(_, neighbour)| neighbour).collect())
    }

    /// Returns the messages of spans by ascending place, until their JSON exceeds `max_bytes`. Messages larger than `large_bytes`
    /// are considered last. With a user, only messages in sessions of the user.
    pub(super) async fn read_spans(
        &self,
        tenant: Option<&TenantId>,
        user: Option<&UserId>,
        spans: impl Iterator<Item = (usize, Span<'_>)>,
        max_bytes: i64,
        large_bytes: i64,
    ) -> Result<Vec<(usize, StoredHit)>, StoreError> {
        let span = |(place, Span { tenant, session, origin, first, last })| {
            json!([place, tenant.as_str(), session.as_str(), origin, first, last])
        };
        let spans = spans.map(span).collect::<Value>().to_string();
        let statement = match tenant {
            Some(tenant) => self.statement(tenant, READ_SPANS),
            None => self.global_statement(READ_SPANS).bind(None::<&str>),
        };
        let statement = statement.bind(spans).bind(max_bytes).bind(large_bytes);
        let rows = statement.bind(user.map(UserId::as_str)).read_all_of_search().await?;
        rows.iter().map(placed_hit).collect()
    }
}

/// Returns the matches of a query. Both databases return them newest first.
fn term_matches(row: &AnyRow) -> Result<TermMatches, StoreError> {
    let found: Vec<(i64, String, i64, OffsetDateTime)> = match row {
        AnyRow::Postgres(row) => {
            let (ids, sessions): (Vec<_>, Vec<_>) = (row.try_get("ids")?, row.try_get("sessions")?);
            let (seqs, times): (Vec<_>, Vec<_>) = (row.try_get("seqs")?, row.try_get("times")?);
            let columns = ids.into_iter().zip(sessions).zip(seqs).zip(times);
            columns.map(|(((id, session), seq), time)| (id, session, seq, time)).collect()
        }
        AnyRow::Sqlite(row) => {
            let found: Vec<(i64, String, i64, i64)> = serde_json::from_str(row.try_get("matches")?)
                .map_err(StoreError::corrupt("a row of the index"))?;
            let time = |(id, session, seq, micros)| Ok((id, session, seq, DbTime::from_micros(micros)?.0));
            found.into_iter().map(time).collect::<Result<_, sqlx::Error>>()?
        }
    };
    let id = |found: Option<&(i64, _, _, _)>| found.map_or(0, |(id, ..)| *id);
    let (newest_id, oldest_id) = (id(found.first()), id(found.last()));
    let message_ref = |(_, session, seq, created_at)| {
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        Ok(MessageRef { created_at, seq, session })
    };
    let refs = found.into_iter().map(message_ref).collect::<Result<_, StoreError>>()?;
    Ok(TermMatches { refs, newest_id, oldest_id })
}

fn placed_hit(row: &AnyRow) -> Result<(usize, StoredHit), StoreError> {
    let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
    let (created_at, session) = (row.time("created_at")?, rows::session_id(row)?);
    let message_ref = MessageRef { created_at, seq: row.field("seq")?, session };
    Ok((place, StoredHit { message_ref, redacted_at: rows::redacted_at(row)?, json: row.field("message")? }))
}
