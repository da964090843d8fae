//! Candidates of a search. The index and the messages are read here; `domain::search` ranks them.
//!
//! On Postgres, the table `search` has no row-level security, because a policy would prevent the use of its index (see the
//! migrations). Every statement filters by tenant, and the messages themselves are read from `messages`, which has a policy.
//! FTS5 on SQLite returns the newest matches first without reading the others. A lexeme of the session in the query makes it skip
//! the entries of other sessions. Only the rows of promising entries are read there.

use super::statement::{AnyRow, DbRow as _, Sql};
use super::values::DbTime;
use super::{Store, StoreError, StoredMessage, rows};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::MessageRef;
use crate::domain::search::lexemes::{self, TermPattern, TermQuery};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sqlx::Row as _;
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::RangeInclusive;
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

/// An entry of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// A higher id was stored later. The entries of all tenants have ids from 1.
    pub id: i64,
    /// The message, on Postgres. On SQLite, [`Store::locate_entries`] reads it, because that takes longer than to find the id.
    message: Option<MessageRef>,
}

/// Only a small part of a message with more JSON than this is searchable.
const LARGE_MESSAGE_BYTES: i64 = 128 * 1024;

/// Messages that are missing from the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingMessages {
    /// The analyzer version of the index. Empty if it has none.
    pub analyzer: String,
    pub newest: Vec<(SessionId, StoredMessage)>,
    /// Number of further missing messages.
    pub others: i64,
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
        let Self { and, or, and_not, quote, prefix } = self;
        let SearchFilter { session, user, role, excluded_terms, .. } = filter;
        let tenant_prefix = &lexemes::tenant_prefix(tenant);
        let quoted = |lexeme: String| format!("{quote}{lexeme}{quote}");
        let pattern = |TermPattern { term, is_prefix }: &TermPattern| {
            quoted(format!("{tenant_prefix}{term}")) + if *is_prefix { prefix } else { "" }
        };
        let any_of = |group: &Vec<TermPattern>| {
            format!("({})", group.iter().map(pattern).collect::<Vec<_>>().join(or))
        };
        let session = session.as_ref().map(|session| lexemes::session_lexeme(tenant_prefix, session));
        let user = user.as_ref().map(|user| lexemes::user_lexeme(tenant_prefix, user));
        let role = role.map(|role| lexemes::role_lexeme(tenant_prefix, role));
        let required = [session, user, role].into_iter().flatten().map(quoted);
        let all = query.0.iter().map(any_of).chain(required).collect::<Vec<_>>().join(and);
        let excluded = excluded_terms.iter().map(|term| quoted(format!("{tenant_prefix}{term}")));
        let excluded: Vec<String> = excluded.collect();
        if excluded.is_empty() { all } else { format!("({all}){and_not}({})", excluded.join(or)) }
    }
}

/// A function on Postgres, because it reads more and more of the index until it has found enough. On SQLite, the ids of each query as
/// one JSON text, because transferring a row takes longer than finding it, from the ids that messages of the time range can have. Reads
/// the row of each entry only if it must compare times, if another tenant has the same prefix, or while a session is being erased, whose
/// entries would take the places of others.
const LOOKUP_TERMS: Sql = Sql {
    postgres: "\
        SELECT ids, sessions, seqs
        FROM newest_matches($1, ARRAY(SELECT json_array_elements_text(CAST($2 AS json))), $3, $4, $5, $6) ORDER BY place",
    sqlite: "\
        WITH range AS MATERIALIZED (
            SELECT coalesce(min(bucket), 0) << 11 AS first, (coalesce(max(bucket), -1) + 1) << 11 AS after
            FROM search_times WHERE ($4 IS NULL OR newest >= $4) AND ($5 IS NULL OR oldest < $5)
        ), checks AS MATERIALIZED (
            SELECT $4 IS NOT NULL OR $5 IS NOT NULL
                OR EXISTS (SELECT 1 FROM tenants WHERE search_prefix = $7 AND tenant_id <> $1)
                OR EXISTS (SELECT 1 FROM sessions WHERE tenant_id = $1 AND import_until = 0) AS reads_rows
        )
        SELECT (
            SELECT json_group_array(id) FROM (
                SELECT l.rowid AS id FROM search_lexemes AS l
                WHERE search_lexemes MATCH q.value AND l.rowid >= (SELECT first FROM range)
                    AND l.rowid < (SELECT after FROM range) AND (NOT (SELECT reads_rows FROM checks) OR EXISTS (
                        SELECT 1 FROM search AS s
                        WHERE s.id = l.rowid AND s.tenant_id = $1 AND ($3 IS NULL OR s.session_id = $3)
                            AND ($4 IS NULL OR s.created_at >= $4) AND ($5 IS NULL OR s.created_at < $5)
                            AND s.session_id NOT IN (SELECT session_id FROM sessions WHERE tenant_id = $1 AND import_until = 0)
                    ))
                ORDER BY l.rowid DESC LIMIT $6
            )
        ) AS ids FROM json_each($2) AS q ORDER BY q.key",
};

/// Reads the messages of entries, on SQLite, except those in sessions that are being erased.
const LOCATE_ENTRIES: &str = "\
    SELECT json_group_array(json_array(s.id, s.session_id, s.seq) ORDER BY e.key) AS messages
    FROM json_each($2) AS e CROSS JOIN search AS s ON s.id = e.value
    WHERE s.tenant_id = $1 AND s.session_id NOT IN (SELECT session_id FROM sessions WHERE tenant_id = $1 AND import_until = 0)";

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
    ($elements:literal, $lateral:literal, $fence:literal, $columns:literal, $message:literal) => {
        concat!(
            "WITH spans AS MATERIALIZED (
                SELECT coalesce($1, value ->> 1) AS tenant_id, value ->> 2 AS session_id,
                    CAST(value ->> 0 AS bigint) AS place, CAST(value ->> 3 AS bigint) AS origin,
                    CAST(value ->> 4 AS bigint) AS first_seq, CAST(value ->> 5 AS bigint) AS last_seq
                FROM ", $elements, "
            ), found AS (
                SELECT (w.place << 32) + abs(m.seq - w.origin) AS place, octet_length(m.message) AS bytes, ", $columns, "
                FROM spans AS w CROSS JOIN ", $lateral, " messages AS m
                WHERE m.tenant_id = w.tenant_id AND m.session_id = w.session_id AND m.seq >= w.first_seq
                    AND m.seq <= w.last_seq ", $fence, " ($5 IS NULL OR $5 = (
                        SELECT user_id FROM sessions AS s
                        WHERE s.tenant_id = w.tenant_id AND s.session_id = w.session_id
                    ))
            ), kept AS MATERIALIZED (
                SELECT * FROM (
                    SELECT *, sum(bytes) OVER (ORDER BY bytes > $4, place) - bytes AS before FROM found
                ) AS sized WHERE before < $3
            )",
            $message
        )
    };
}

/// On Postgres, `OFFSET 0` forces an index scan for each span, whatever number of rows the planner expects. SQLite reads the kept
/// messages again, by `rowid`, because sorting them takes longer. There, small messages are in one row, because the driver copies each
/// column of each row. Each message has two lines: its [`PlacedMessage`], and its JSON, which has no line breaks.
const READ_SPANS: Sql = Sql {
    postgres: read_spans!(
        "json_array_elements(CAST($2 AS json))",
        "LATERAL (SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message FROM",
        "OFFSET 0) AS m WHERE",
        "m.*",
        "SELECT place, session_id, seq, created_at, redaction, message FROM kept"
    ),
    sqlite: read_spans!(
        "json_each($2)",
        "",
        "AND",
        "m.rowid AS id",
        ", lines AS NOT MATERIALIZED (
            SELECT json_array(w.place, m.session_id, m.seq, m.created_at, m.redaction) || char(10) || m.message AS lines,
                w.bytes > 65536 AS is_large
            FROM kept AS w CROSS JOIN messages AS m ON m.rowid = w.id
        )
        SELECT group_concat(lines, char(10)) AS lines FROM lines WHERE NOT is_large
        UNION ALL SELECT lines FROM lines WHERE is_large"
    ),
};

/// A message of [`READ_SPANS`] on SQLite: place, including the distance to the origin, session, `seq`, time and the mark of its redaction.
#[derive(Deserialize)]
struct PlacedMessage<'l>(i64, #[serde(borrow)] Cow<'l, str>, i64, i64, Option<String>);

impl Store {
    /// Returns for each query the `limit` newest matching entries, however many there are, newest first.
    pub async fn lookup_terms(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
        limit: i64,
    ) -> Result<Vec<Vec<IndexEntry>>, StoreError> {
        let syntax = if matches!(self, Self::Postgres(_)) { TSQUERY } else { FTS5 };
        let queries: Value = queries.iter().map(|query| syntax.render(tenant, filter, query)).collect();
        let statement = self.global_statement(LOOKUP_TERMS).bind(tenant.as_str()).bind(queries.to_string());
        let statement = statement.bind(filter.session.as_ref().map(SessionId::as_str));
        let mut statement =
            statement.bind(filter.since.map(DbTime)).bind(filter.until.map(DbTime)).bind(limit);
        if let Self::Sqlite(_) = self {
            statement = statement.bind(lexemes::tenant_prefix(tenant));
        }
        statement.read_all_of_search().await?.iter().map(index_entries).collect()
    }

    /// Returns the messages of entries, in order, each with the id of its entry. Leaves out sessions that are being erased, and others
    /// than that of the filter.
    pub async fn locate_entries(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        entries: &[IndexEntry],
    ) -> Result<Vec<(i64, MessageRef)>, StoreError> {
        let mut located = Vec::new();
        if let Self::Postgres(_) = self {
            located.extend(entries.iter().filter_map(|entry| Some((entry.id, entry.message.clone()?))));
            return Ok(located);
        }
        let ids = entries.iter().map(|entry| entry.id).collect::<Value>().to_string();
        let statement = self.global_statement(LOCATE_ENTRIES).bind(tenant.as_str()).bind(ids);
        for row in &statement.read_all_of_search().await? {
            for (id, session, seq) in json_field(row, "messages")? {
                located.push((id, message_ref(session, seq)?));
            }
        }
        if let Some(session) = &filter.session {
            located.retain(|(_, message)| message.session == *session);
        }
        Ok(located)
    }

    /// Returns the messages at these distances from each of `refs`, without duplicates, until their JSON, including that of duplicates,
    /// exceeds `max_bytes`. Those of the first references come first, and the nearest before others, except that messages larger than
    /// 128 KiB are considered last. With a user, only messages in sessions of the user.
    pub async fn fetch_messages(
        &self,
        tenant: &TenantId,
        user: Option<&UserId>,
        refs: &[MessageRef],
        distances: &[RangeInclusive<i64>],
        max_bytes: i64,
    ) -> Result<Vec<(SessionId, StoredMessage)>, StoreError> {
        let spans = refs.iter().enumerate().flat_map(|(place, &MessageRef { ref session, seq: origin })| {
            let span = move |distances: &RangeInclusive<i64>| {
                let [first, last] =
                    [distances.start(), distances.end()].map(|distance| origin.saturating_add(*distance));
                (place, Span { tenant, session, origin, first, last })
            };
            distances.iter().map(span)
        });
        let mut found = self.read_spans(Some(tenant), user, spans, max_bytes, LARGE_MESSAGE_BYTES).await?;
        let mut known = HashSet::with_capacity(found.len());
        found.retain(|(_, session, message)| known.insert((session.clone(), message.seq)));
        Ok(found.into_iter().map(|(_, session, message)| (session, message)).collect())
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
    ) -> Result<Vec<(usize, SessionId, StoredMessage)>, StoreError> {
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
        let mut placed = Vec::with_capacity(rows.len());
        for row in &rows {
            if let AnyRow::Postgres(row) = row {
                placed.push((row.field("place")?, rows::session_id(row)?, rows::stored_message(row)?));
            } else if let Some(lines) = row.field("lines")? {
                decode_lines(lines, &mut placed)?;
            }
        }
        placed.sort_unstable_by_key(|(place, ..)| *place);
        let of_span = |place: i64| usize::try_from(place >> 32).unwrap_or(usize::MAX);
        Ok(placed.into_iter().map(|(place, session, message)| (of_span(place), session, message)).collect())
    }
}

/// Decodes a column `lines` of [`READ_SPANS`].
fn decode_lines(lines: &str, placed: &mut Vec<(i64, SessionId, StoredMessage)>) -> Result<(), StoreError> {
    let mut lines = lines.split('\n');
    while let (Some(placement), Some(json)) = (lines.next(), lines.next()) {
        let PlacedMessage(place, session, seq, micros, redaction) =
            serde_json::from_str(placement).map_err(StoreError::corrupt("the place of a message"))?;
        let redaction = redaction.map(|mark| rows::redaction_mark(&mark)).transpose()?;
        let message = StoredMessage {
            seq,
            created_at: DbTime::from_micros(micros)?.0,
            redacted_at: redaction.map(|mark| mark.redacted_at),
            json: json.to_owned(),
        };
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        placed.push((place, session, message));
    }
    Ok(())
}

fn index_entries(row: &AnyRow) -> Result<Vec<IndexEntry>, StoreError> {
    let AnyRow::Postgres(postgres) = row else {
        let entry = |id| IndexEntry { id, message: None };
        return Ok(json_field(row, "ids")?.into_iter().map(entry).collect());
    };
    let (ids, sessions): (Vec<i64>, Vec<String>) = (postgres.try_get("ids")?, postgres.try_get("sessions")?);
    let seqs: Vec<i64> = postgres.try_get("seqs")?;
    let entries = ids.into_iter().zip(sessions).zip(seqs);
    entries
        .map(|((id, session), seq)| Ok(IndexEntry { id, message: Some(message_ref(session, seq)?) }))
        .collect()
}

fn message_ref(session: String, seq: i64) -> Result<MessageRef, StoreError> {
    let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
    Ok(MessageRef { session, seq })
}

/// Returns the elements of a JSON list.
fn json_field<T: DeserializeOwned>(row: &AnyRow, column: &'static str) -> Result<Vec<T>, StoreError> {
    serde_json::from_str(row.field(column)?).map_err(StoreError::corrupt("a list of the index"))
}
