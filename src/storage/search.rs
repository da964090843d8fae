//! The filter of a search, and reading the messages that it has found.

use super::messages::{FactColumns, message_facts, stored_message};
use super::pool::retry_on_disconnect;
use super::search_terms::{IndexMatch, search_match};
use super::statement::{AnyRow, DbRow as _, Purpose, Sql};
use super::{SearchFilter, Store, StoreError, StoredMessage, rows};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::MessageRef;
use crate::domain::search::index_terms::TermQuery;
use crate::domain::search::language::Language;
use serde::Deserialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::RangeInclusive;

/// Only a small part of a message with more JSON than this is searchable.
const LARGE_MESSAGE_BYTES: i64 = 128 * 1024;

/// A span is a JSON list: the place of the reference, its session and its `seq`, and the first and the last `seq` of the span. Sessions
/// that are being imported or erased have messages that are not part of a history. The bounds are columns, because row-level security
/// prevents index conditions on computed values, and the session is read by a scalar subquery, because Postgres may read all sessions for
/// a join. Messages beyond the size limit are not read, because both databases know the length of a text without reading it.
macro_rules! read_spans {
    ($elements:literal, $lateral:expr, $fence:literal, $columns:literal, $message:expr) => {
        concat!(
            "WITH spans AS MATERIALIZED (
                SELECT CAST(value ->> 0 AS bigint) AS place, value ->> 1 AS session_id, CAST(value ->> 2 AS bigint) AS origin,
                    CAST(value ->> 3 AS bigint) AS first_seq, CAST(value ->> 4 AS bigint) AS last_seq
                FROM ", $elements, "
            ), found AS (
                SELECT (w.place << 32) + abs(m.seq - w.origin) AS place, octet_length(m.message) AS bytes, ", $columns, "
                FROM spans AS w CROSS JOIN ", $lateral, " messages AS m
                WHERE m.tenant_id = $1 AND m.session_id = w.session_id AND m.seq >= w.first_seq
                    AND m.seq <= w.last_seq ", $fence, " (
                        SELECT s.last_seq >= m.seq AND ($5 IS NULL OR s.user_id = $5) FROM sessions AS s
                        WHERE s.tenant_id = $1 AND s.session_id = w.session_id
                    )
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
/// messages again, by id, because sorting them takes longer. There, small messages are in one row, because the driver copies each
/// column of each row. Each message has two lines: its [`PlacedMessage`], and its JSON, which has no line breaks.
const READ_SPANS: Sql = Sql {
    postgres: read_spans!(
        "json_array_elements(CAST($2 AS json))",
        concat!("LATERAL (SELECT session_id, seq, message, ", message_facts!(), " FROM"),
        "OFFSET 0) AS m WHERE",
        "m.*",
        "SELECT * FROM kept"
    ),
    sqlite: read_spans!(
        "json_each($2)",
        "",
        "AND",
        "m.id",
        concat!(
            ", lines AS NOT MATERIALIZED (
                SELECT json_array(place, session_id, seq, json_array(",
            message_facts!(),
            ")) || char(10) || message AS lines,
                    bytes > 65536 AS is_large FROM kept CROSS JOIN messages USING (id)
            )
            SELECT group_concat(lines, char(10)) AS lines FROM lines WHERE NOT is_large
            UNION ALL SELECT lines FROM lines WHERE is_large"
        )
    ),
};

/// A message of [`READ_SPANS`] on SQLite: place, including the distance to the origin, session, `seq` and facts.
#[derive(Deserialize)]
struct PlacedMessage<'l>(i64, #[serde(borrow)] Cow<'l, str>, i64, FactColumns);

impl Store {
    /// Returns the recognised language of a session.
    pub async fn session_language(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Language>, StoreError> {
        const SELECT_LANGUAGE: &str =
            "SELECT language FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        let row = self.statement(tenant, SELECT_LANGUAGE).bind(session.as_str()).read().await?;
        row.map_or(Ok(None), |row| rows::language(&row))
    }

    /// Returns the languages of the sessions of a tenant, except English.
    pub async fn languages(&self, tenant: &TenantId) -> Result<Vec<Language>, StoreError> {
        /// One lookup in the index for each language, however many sessions have it.
        const SELECT_LANGUAGES: &str = "\
            WITH RECURSIVE found (language) AS (
                SELECT min(language) FROM sessions WHERE tenant_id = $1 AND language <> 'english'
                UNION ALL
                SELECT (SELECT min(language) FROM sessions
                    WHERE tenant_id = $1 AND language <> 'english' AND language > found.language)
                FROM found WHERE found.language IS NOT NULL
            ) SELECT language FROM found WHERE language IS NOT NULL";
        let rows = self.statement(tenant, SELECT_LANGUAGES).read_all().await?;
        rows.iter().filter_map(|row| rows::language(row).transpose()).collect()
    }

    /// Returns the newest messages that match each query: see [`search_match`].
    pub async fn find_matches(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        queries: &[TermQuery],
    ) -> Result<Vec<Vec<IndexMatch>>, StoreError> {
        let find = async || {
            let mut transaction = self.database.begin(Some(tenant), Purpose::Search).await?;
            let mut found = Vec::with_capacity(queries.len());
            for query in queries {
                found.push(search_match(&mut transaction, tenant, filter, query).await?);
            }
            transaction.rollback().await?;
            Ok(found)
        };
        retry_on_disconnect(|| self.within_limit(find())).await
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
        let spans = refs.iter().enumerate().flat_map(|(place, MessageRef { session, seq })| {
            distances.iter().map(move |distances| {
                let [first, last] = [distances.start(), distances.end()].map(|by| seq.saturating_add(*by));
                json!([place, session.as_str(), seq, first, last])
            })
        });
        let statement = self.statement(tenant, READ_SPANS).bind(spans.collect::<Value>().to_string());
        let statement = statement.bind(max_bytes).bind(LARGE_MESSAGE_BYTES).bind(user.map(UserId::as_str));
        let mut found = decode_spans(&statement.read_all().await?)?;
        let mut known = HashSet::with_capacity(found.len());
        found.retain(|(session, message)| known.insert((session.clone(), message.seq)));
        Ok(found)
    }
}

/// Decodes the rows of [`READ_SPANS`], and sorts them by place.
fn decode_spans(rows: &[AnyRow]) -> Result<Vec<(SessionId, StoredMessage)>, StoreError> {
    let mut placed = Vec::with_capacity(rows.len());
    for row in rows {
        if let AnyRow::Postgres(row) = row {
            placed.push((row.field("place")?, rows::session_id(row)?, stored_message(row)?));
        } else if let Some(lines) = row.field("lines")? {
            decode_lines(lines, &mut placed)?;
        }
    }
    placed.sort_unstable_by_key(|(place, ..)| *place);
    Ok(placed.into_iter().map(|(_, session, message)| (session, message)).collect())
}

/// Decodes a column `lines` of [`READ_SPANS`].
fn decode_lines(lines: &str, placed: &mut Vec<(i64, SessionId, StoredMessage)>) -> Result<(), StoreError> {
    let mut lines = lines.split('\n');
    while let (Some(placement), Some(json)) = (lines.next(), lines.next()) {
        let PlacedMessage(place, session, seq, facts) =
            serde_json::from_str(placement).map_err(StoreError::corrupt("the place of a message"))?;
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        placed.push((place, session, facts.of_message(seq, json.to_owned())?));
    }
    Ok(())
}
