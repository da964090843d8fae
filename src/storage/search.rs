//! Candidates of a search. The index and the messages are read here; `domain::search` ranks them.
//!
//! A search reads the index in one transaction, because segments that are merged meanwhile disappear for others.

use super::segments::{self, RecentMessage, Removals, damaged};
use super::statement::{AnyRow, DbRow as _, Sql, Statement, Transaction};
use super::values::{DbTime, to_i64};
use super::{Store, StoreError, StoredMessage, rows};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::MessageRef;
use crate::domain::search::index_query::IndexQuery;
use crate::domain::search::index_terms::{self, TermQuery};
use crate::domain::search::segment::{self, DamagedPage, KeyRange};
use foldhash::HashMap;
use serde::Deserialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
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
    /// This message and the following ones of its session are excluded: the client has them.
    pub unseen: Option<MessageRef>,
    /// Messages with any of these terms are excluded.
    pub excluded_terms: Vec<String>,
}

impl SearchFilter {
    /// Returns ranges of terms, of each of which a message that passes the filter has one. The index has the hours of messages, so the
    /// messages that it returns may be up to an hour too early or too late.
    fn required_terms(&self) -> Vec<KeyRange> {
        let Self { role, since, until, .. } = self;
        let role = role.map(index_terms::role_term).map(|term| KeyRange::exact(&term));
        let micros = |time: Option<OffsetDateTime>| time.map(|time| DbTime(time).micros());
        let hours =
            (since.is_some() || until.is_some()).then(|| index_terms::hours(micros(*since), micros(*until)));
        self.owner_terms().chain(role).chain(hours).collect()
    }

    /// Returns the required terms that few segments of a large tenant have.
    fn owner_terms(&self) -> impl Iterator<Item = KeyRange> {
        let session = self.session.as_ref().map(index_terms::session_term);
        let user = self.user.as_ref().map(|user| index_terms::user_term(user.as_str()));
        session.into_iter().chain(user).map(|term| KeyRange::exact(&term))
    }
}

/// A message in an [`IndexSnapshot`]. The newest one is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IndexEntry {
    /// 0 for the recent messages, otherwise the place of a segment from 1.
    part: usize,
    number: Reverse<u32>,
}

/// The messages that match a query of the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexMatches {
    /// Newest first.
    pub entries: Vec<IndexEntry>,
    /// Number of all matching messages; an estimate if not all parts of the index were read.
    pub frequency: i64,
}

/// The state of the index of a tenant at one time.
pub struct IndexSnapshot {
    pub(super) transaction: Transaction,
    pub(super) tenant: TenantId,
    /// The analyzer version of the index. Empty if it has none.
    pub analyzer: String,
    recent: Arc<[RecentMessage]>,
    /// Newest first.
    segments: Vec<segments::Segment>,
    /// For each segment, the ascending numbers of messages that are to be removed.
    removed: Vec<Vec<u32>>,
    removals: Removals,
    /// Number of recent messages that are not in the snapshot.
    pub unread_messages: i64,
}

/// Number of messages in the segments that are read first. They contain enough messages with a common word. Each further read has four times
/// as many.
const FIRST_MESSAGES: usize = 16_384;
/// Largest number of messages of a read, multiplied by the number of terms. A term has about one byte per message at most.
const MAX_NUMBERS: usize = 3_000_000;
/// Size of the segments of a read with prefixes: all of their terms can begin with a prefix.
const MAX_PREFIX_BYTES: i64 = 2 * 1024 * 1024;
/// With fewer segments, those of a session or user are not looked for before the words of the query.
const MANY_SEGMENTS: usize = 5;
/// Largest size of the terms of the recent messages that a search reads. Usually there are a few hundred messages at most.
const MAX_RECENT_BYTES: i64 = 8 * 1024 * 1024;

impl IndexSnapshot {
    /// Returns the newest messages that match each query: `enough`, or all.
    pub async fn lookup(
        &mut self,
        filter: &SearchFilter,
        queries: &[TermQuery],
        enough: usize,
    ) -> Result<Vec<IndexMatches>, StoreError> {
        let query = |queries: &[TermQuery]| {
            Arc::new(IndexQuery::new(filter.required_terms(), &filter.excluded_terms, queries))
        };
        let mut found: Vec<IndexMatches> = queries.iter().map(|_| IndexMatches::default()).collect();
        let (recent, of_recent) = (Arc::clone(&self.recent), query(queries));
        let bytes = recent.iter().map(|message| message.words.len()).sum();
        let evaluate = move || evaluate_recent(&of_recent, &recent);
        let matches = blocking::spawn_cpu_if_large(bytes, evaluate).await;
        let is_kept = |number: &u32| {
            let message = self.recent.get(*number as usize);
            message.is_some_and(|message| !self.removals.contain(message.id, &message.message))
        };
        for (found, mut numbers) in found.iter_mut().zip(matches) {
            numbers.retain(is_kept);
            found.extend(0, &numbers, enough);
        }
        let mut read_messages = vec![to_i64(self.recent.len()); queries.len()];
        let places = self.segments_of(filter).await?;
        let (mut unread, mut max_messages) = (places.as_slice(), FIRST_MESSAGES);
        loop {
            // A query that has found enough reads no further pages.
            let open: Vec<usize> = (0..)
                .zip(&found)
                .filter(|(_, found)| found.entries.len() < enough)
                .map(|(at, _)| at)
                .collect();
            let of_open: Vec<TermQuery> = open.iter().filter_map(|at| queries.get(*at)).cloned().collect();
            let of_open = query(&of_open);
            let has_prefixes = !of_open.ranges().iter().all(KeyRange::is_exact);
            let (mut messages, mut bytes) = (0, 0);
            let fits = |segment: &&segments::Segment| {
                let fits = messages < max_messages && (!has_prefixes || bytes < MAX_PREFIX_BYTES);
                messages += segment.messages as usize;
                bytes += segment.bytes;
                fits
            };
            let segments = unread.iter().filter_map(|place| self.segments.get(*place));
            let segments: Vec<_> = segments.take_while(fits).cloned().collect();
            if open.is_empty() || segments.is_empty() {
                break;
            }
            max_messages = (4 * max_messages).min(MAX_NUMBERS / of_open.ranges().len().max(1));
            let (part, rest) = unread.split_at(segments.len());
            let matches = evaluate_segments(&mut self.transaction, &self.tenant, &segments, &of_open).await?;
            for ((of_segment, segment), place) in matches.into_iter().zip(segments).zip(part) {
                let removed = self.removed.get(*place).map_or(&[][..], Vec::as_slice);
                for (at, mut numbers) in open.iter().zip(of_segment) {
                    if !removed.is_empty() {
                        numbers.retain(|number| removed.binary_search(number).is_err());
                    }
                    if let Some((found, read_messages)) = found.get_mut(*at).zip(read_messages.get_mut(*at)) {
                        found.extend(place + 1, &numbers, enough);
                        *read_messages += i64::from(segment.messages);
                    }
                }
            }
            unread = rest;
        }
        let searched = places.iter().filter_map(|place| self.segments.get(*place));
        let in_segments: i64 = searched.map(|segment| i64::from(segment.messages)).sum();
        let all = to_i64(self.recent.len()) + in_segments;
        for (found, read_messages) in found.iter_mut().zip(read_messages) {
            found.frequency = extrapolate(found.frequency, read_messages, all);
        }
        Ok(found)
    }

    /// Returns the places of the segments with messages of the session and user of a filter, newest first. They are read first if there are
    /// many segments, so that the words of the query are looked up in these only.
    async fn segments_of(&mut self, filter: &SearchFilter) -> Result<Vec<usize>, StoreError> {
        let owners: Vec<KeyRange> = filter.owner_terms().collect();
        let places = 0..self.segments.len();
        if owners.is_empty() || places.len() < MANY_SEGMENTS {
            return Ok(places.collect());
        }
        let numbers =
            segments::read_numbers(&mut self.transaction, &self.tenant, &self.segments, &owners).await?;
        let of_segments = places.zip(numbers.chunks(owners.len()));
        let has_all = |(_, of_owners): &(usize, &[Vec<u32>])| !of_owners.iter().any(Vec::is_empty);
        Ok(of_segments.filter(has_all).map(|(place, _)| place).collect())
    }

    /// Returns the messages of entries, in order, except those that are to be removed.
    pub async fn locate(&mut self, entries: &[IndexEntry]) -> Result<Vec<MessageRef>, StoreError> {
        let segment_of = |part: usize| self.segments.get(part.checked_sub(1)?);
        let place_of = |entry: &IndexEntry| (entry.part, KeyRange::of_message(entry.number.0));
        let mut places: Vec<_> = entries.iter().map(place_of).collect();
        places.retain(|(part, _)| segment_of(*part).is_some());
        places.sort_unstable();
        places.dedup();
        let wanted = places.iter().filter_map(|(part, range)| Some((segment_of(*part)?.id, range)));
        let wanted = segments::page_ranges(wanted);
        let pages = segments::read_pages(&mut self.transaction, &self.tenant, wanted).await?;
        let pages: HashMap<usize, Vec<u8>> = pages.into_iter().collect();
        let mut located = Vec::with_capacity(entries.len());
        for entry in entries {
            let segment = segment_of(entry.part);
            let message = if segment.is_some() {
                let page = places.binary_search(&place_of(entry)).ok().and_then(|place| pages.get(&place));
                page.ok_or(DamagedPage).and_then(|page| segment::find_message(page, entry.number.0))
            } else {
                Ok(self.recent.get(entry.number.0 as usize).map(|recent| recent.message.clone()))
            };
            let message = message.and_then(|message| message.ok_or(DamagedPage)).map_err(damaged)?;
            if segment.is_none_or(|segment| !self.removals.contain(segment.position, &message)) {
                located.push(message);
            }
        }
        Ok(located)
    }
}

impl IndexSnapshot {
    /// Returns messages until their JSON exceeds `max_bytes`: those of the first references come first, except that messages larger than
    /// 128 KiB are considered last. With a user, only messages in sessions of the user.
    ///
    /// The snapshot keeps its connection, so that searches that wait for a second one cannot wait for each other.
    pub async fn fetch_messages(
        &mut self,
        user: Option<&UserId>,
        refs: &[MessageRef],
        max_bytes: i64,
    ) -> Result<Vec<(SessionId, StoredMessage)>, StoreError> {
        let spans = spans_around(&self.tenant, refs, &[0..=0]);
        let (transaction, tenant) = (&mut self.transaction, &self.tenant);
        let found = read_spans_in(transaction, tenant, user, spans, max_bytes, LARGE_MESSAGE_BYTES).await?;
        Ok(found.into_iter().map(|(_, session, message)| (session, message)).collect())
    }
}

impl IndexMatches {
    /// Counts messages of a part, and adds the newest ones until there are enough.
    fn extend(&mut self, part: usize, numbers: &[u32], enough: usize) {
        let entry = |number: &u32| IndexEntry { part, number: Reverse(*number) };
        let missing = enough.saturating_sub(self.entries.len());
        self.entries.extend(numbers.iter().rev().take(missing).map(entry));
        self.frequency += to_i64(numbers.len());
    }
}

/// Returns the number of matches among `all` messages if there are so many among `searched` of them.
fn extrapolate(matches: i64, searched: i64, all: i64) -> i64 {
    let estimate = i128::from(matches) * i128::from(all) / i128::from(searched.max(1));
    i64::try_from(estimate).unwrap_or(i64::MAX).max(matches)
}

/// Returns the numbers of the recent messages that match each query.
fn evaluate_recent(query: &IndexQuery, recent: &[RecentMessage]) -> Vec<Vec<u32>> {
    let mut found = vec![Vec::new(); query.ranges().len()];
    for (number, message) in (0..).zip(recent) {
        message.terms().for_each(|term| query.add_number(term, number, &mut found));
    }
    query.evaluate(u32::try_from(recent.len()).unwrap_or(u32::MAX), &found)
}

/// Returns, for each segment, the numbers of the messages that match each query.
async fn evaluate_segments(
    transaction: &mut Transaction,
    tenant: &TenantId,
    segments: &[segments::Segment],
    query: &Arc<IndexQuery>,
) -> Result<Vec<Vec<Vec<u32>>>, StoreError> {
    let numbers = segments::read_numbers(transaction, tenant, segments, query.ranges()).await?;
    let messages: Vec<u32> = segments.iter().map(|segment| segment.messages).collect();
    let (query, bytes) = (Arc::clone(query), numbers.iter().map(Vec::len).sum());
    let evaluate = move || {
        let ranges = query.ranges().len();
        let of_segment = |place: usize| numbers.get(place * ranges..(place + 1) * ranges).unwrap_or_default();
        let evaluate = |(place, messages): (usize, &u32)| query.evaluate(*messages, of_segment(place));
        messages.iter().enumerate().map(evaluate).collect()
    };
    Ok(blocking::spawn_cpu_if_large(bytes, evaluate).await)
}

/// Only a small part of a message with more JSON than this is searchable.
const LARGE_MESSAGE_BYTES: i64 = 128 * 1024;

/// Messages that are missing from the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingMessages {
    pub newest: Vec<(SessionId, StoredMessage)>,
    /// Number of further missing messages.
    pub others: i64,
}

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
    /// Returns a snapshot of the index of a tenant.
    pub async fn index_snapshot(&self, tenant: &TenantId) -> Result<IndexSnapshot, StoreError> {
        const SELECT_VERSION: &str = "SELECT version FROM search_analyzer";
        let mut transaction = self.begin_search(tenant).await?;
        let version = transaction.statement(SELECT_VERSION).read().await?;
        let analyzer: String = version.map(|row| row.field("version")).transpose()?.unwrap_or_default();
        let segments = segments::read_segments(&mut transaction, tenant, Some(&analyzer)).await?;
        let removals = Removals::read(&mut transaction, tenant).await?;
        let recent =
            segments::read_recent(&mut transaction, tenant, Some(&analyzer), i64::MAX, MAX_RECENT_BYTES)
                .await?;
        let removed = removals.find_in(&mut transaction, tenant, &segments).await?;
        Ok(IndexSnapshot {
            transaction,
            tenant: tenant.clone(),
            analyzer,
            recent: recent.messages.into(),
            segments,
            removed,
            removals,
            unread_messages: recent.unread,
        })
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
        let spans = spans_around(tenant, refs, distances);
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
        let statement = match tenant {
            Some(tenant) => self.statement(tenant, READ_SPANS),
            None => self.global_statement(READ_SPANS).bind(None::<&str>),
        };
        decode_spans(&bind_spans(statement, spans, max_bytes, large_bytes, user).read_all_of_search().await?)
    }
}

/// Returns the spans of messages at distances from others.
fn spans_around<'r>(
    tenant: &'r TenantId,
    refs: &'r [MessageRef],
    distances: &'r [RangeInclusive<i64>],
) -> impl Iterator<Item = (usize, Span<'r>)> {
    refs.iter().enumerate().flat_map(move |(place, &MessageRef { ref session, seq: origin })| {
        distances.iter().map(move |distances| {
            let [first, last] =
                [distances.start(), distances.end()].map(|distance| origin.saturating_add(*distance));
            (place, Span { tenant, session, origin, first, last })
        })
    })
}

/// Does the same as [`Store::read_spans`] in a transaction.
pub(super) async fn read_spans_in(
    transaction: &mut Transaction,
    tenant: &TenantId,
    user: Option<&UserId>,
    spans: impl Iterator<Item = (usize, Span<'_>)>,
    max_bytes: i64,
    large_bytes: i64,
) -> Result<Vec<(usize, SessionId, StoredMessage)>, StoreError> {
    let statement = transaction.statement(READ_SPANS).bind(tenant.as_str());
    decode_spans(&bind_spans(statement, spans, max_bytes, large_bytes, user).read_all().await?)
}

/// Binds the parameters of [`READ_SPANS`] after the tenant.
fn bind_spans<'q, 's, P, S>(
    statement: Statement<'q, P, S>,
    spans: impl Iterator<Item = (usize, Span<'s>)>,
    max_bytes: i64,
    large_bytes: i64,
    user: Option<&UserId>,
) -> Statement<'q, P, S> {
    let span = |(place, Span { tenant, session, origin, first, last })| {
        json!([place, tenant.as_str(), session.as_str(), origin, first, last])
    };
    let spans = spans.map(span).collect::<Value>().to_string();
    statement.bind(spans).bind(max_bytes).bind(large_bytes).bind(user.map(UserId::as_str))
}

/// Decodes the rows of [`READ_SPANS`], and sorts them by place.
fn decode_spans(rows: &[AnyRow]) -> Result<Vec<(usize, SessionId, StoredMessage)>, StoreError> {
    let mut placed = Vec::with_capacity(rows.len());
    for row in rows {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_is_extrapolated_from_the_messages_that_were_read() {
        assert_eq!(extrapolate(1000, 2000, 10_000), 5000);
        assert_eq!(extrapolate(1000, 2000, 2000), 1000);
        assert_eq!(extrapolate(1000, 0, 0), 1000);
        assert_eq!(extrapolate(i64::MAX, 1, i64::MAX), i64::MAX);
    }
}
