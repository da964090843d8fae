//! Segments of the search index in the database: reading, writing, merging them, and removing messages from them.
//!
//! Exchanges and the index worker add rows to `search_recent`. The worker turns many rows into a segment, and many segments of about the same
//! size into one, so that a search reads few of them. Each of these steps replaces its sources in one transaction, if all of them still
//! exist. So several replicas can do the same work: only one of them commits, and the others begin anew.
//!
//! A transaction that removes messages from the history also adds a row to `search_removals`. Searches leave out these messages
//! from then on, and [`Store::apply_removals`] replaces the rows and segments that contain them. Until then, rows and segments before the
//! removal are not mixed with later ones, which can contain new messages of the same session.

use super::index_hints::{MAX_RECENT_MESSAGES, MAX_RECENT_ROWS};
use super::pool::retry_on_deadlock;
use super::statement::{AnyRow, DbRow as _, Sql, Transaction};
use super::values::{DbTime, to_i64};
use super::{Store, StoreError, rows};
use crate::blocking;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::MessageRef;
use crate::domain::search::index_terms;
use crate::domain::search::recent::RecentTerms;
use crate::domain::search::segment::{
    DamagedPage, KeyRange, Page, SegmentBuilder, collect_messages, collect_numbers, merge,
};
use bytes::Bytes;
use foldhash::HashMap;
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::Row as _;
use std::sync::Arc;
use time::OffsetDateTime;

/// A segment. Its pages are read when they are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) id: i64,
    /// The first id of the rows of `search_recent` that it was made of.
    pub(super) position: i64,
    pub(super) analyzer: String,
    pub(super) messages: u32,
    /// The size of its pages.
    pub(super) bytes: i64,
}

/// A message of a row of `search_recent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecentMessage {
    /// The id of the row.
    pub(super) id: i64,
    pub(super) message: MessageRef,
    micros: i64,
    /// The terms of its role and its text, separated by spaces: a part of those of all messages of its entry.
    pub(super) words: Bytes,
    /// The terms of its session, its user and its hour, separated by newlines. They are the same for most messages of an entry.
    filter_terms: Arc<str>,
}

impl RecentMessage {
    pub(super) fn terms(&self) -> impl Iterator<Item = &[u8]> {
        split_terms(&self.words, &self.filter_terms)
    }
}

fn split_terms<'t>(words: &'t [u8], filter_terms: &'t str) -> impl Iterator<Item = &'t [u8]> {
    // Splitting bytes takes fewer instructions than splitting text, which searches for each separator.
    let words = words.split(|byte| *byte == b' ');
    words.chain(filter_terms.as_bytes().split(|byte| *byte == b'\n'))
}

/// Returns the terms of a session, its user, if that is not empty, and an hour, separated by newlines. Ids contain no control characters.
fn filter_terms(session: &SessionId, user: &str, micros: i64) -> Arc<str> {
    let (session, hour) = (index_terms::session_term(session), index_terms::hour_term(micros));
    let user = (!user.is_empty()).then(|| index_terms::user_term(user));
    let terms = [session, hour].into_iter().chain(user);
    terms.collect::<Vec<_>>().join("\n").into()
}

/// The messages of rows of `search_recent`, oldest first.
#[derive(Debug, Default)]
pub(super) struct RecentMessages {
    pub(super) messages: Vec<RecentMessage>,
    /// The rows, with their analyzer.
    rows: Vec<(i64, String)>,
    /// Number of the messages of further rows.
    pub(super) unread: i64,
}

impl RecentMessages {
    /// Returns `true` if a segment should be made of them, so that searches do not read them.
    fn are_many(&self) -> bool {
        let bytes: usize = self.messages.iter().map(|message| message.words.len()).sum();
        let Self { messages, rows, unread } = self;
        rows.len() >= MAX_RECENT_ROWS
            || to_i64(messages.len()) >= MAX_RECENT_MESSAGES
            || bytes >= MAX_RECENT_TERM_BYTES
            || *unread > 0
    }
}

/// Messages that are to be removed from the index.
#[derive(Debug, Default)]
pub(super) struct Removals {
    ids: Vec<i64>,
    /// First and last `seq`, and the last position, by session.
    by_session: HashMap<SessionId, Vec<(i64, i64, i64)>>,
    /// The first and the last of all positions.
    first_position: i64,
    last_position: i64,
}

impl Removals {
    /// Reads all removals of a tenant.
    pub(super) async fn read(transaction: &mut Transaction, tenant: &TenantId) -> Result<Self, StoreError> {
        const SELECT_REMOVALS: &str =
            "SELECT id, session_id, first_seq, last_seq, position FROM search_removals WHERE tenant_id = $1";
        let mut removals = Self { first_position: i64::MAX, ..Self::default() };
        for row in &transaction.statement(SELECT_REMOVALS).bind(tenant.as_str()).read_all().await? {
            removals.ids.push(row.field("id")?);
            let position = row.field("position")?;
            removals.first_position = removals.first_position.min(position);
            removals.last_position = removals.last_position.max(position);
            let of_session = removals.by_session.entry(rows::session_id(row)?).or_default();
            of_session.push((row.field("first_seq")?, row.field("last_seq")?, position));
        }
        Ok(removals)
    }

    /// Returns, for each segment, the ascending numbers of the messages that are to be removed, so that they take no places of others.
    pub(super) async fn find_in(
        &self,
        transaction: &mut Transaction,
        tenant: &TenantId,
        segments: &[Segment],
    ) -> Result<Vec<Vec<u32>>, StoreError> {
        let mut removed = vec![Vec::new(); segments.len()];
        if self.ids.is_empty() {
            return Ok(removed);
        }
        // The parts of the lists of messages that contain messages of the sessions, or all of them if there are many sessions.
        let mut parts = vec![vec![KeyRange::all_messages()]; segments.len()];
        if self.by_session.len() <= MAX_SESSION_LOOKUPS {
            let numbers = read_numbers(transaction, tenant, segments, &self.ranges()).await?;
            for (parts, numbers) in parts.iter_mut().zip(numbers.chunks(self.by_session.len())) {
                *parts = numbers.iter().flatten().map(|number| KeyRange::of_message(*number)).collect();
                parts.sort_unstable();
                parts.dedup();
            }
        }
        for ((segment, parts), removed) in segments.iter().zip(parts).zip(&mut removed) {
            if segment.position > self.last_position {
                continue;
            }
            let wanted = page_ranges(parts.iter().map(|part| (segment.id, part)));
            let mut messages = Vec::new();
            for (_, page) in read_pages(transaction, tenant, wanted).await? {
                collect_messages(&page, &mut messages).map_err(damaged)?;
            }
            messages.retain(|(_, message)| self.contain(segment.position, message));
            removed.extend(messages.into_iter().map(|(number, _)| number));
            removed.sort_unstable();
            removed.dedup();
        }
        Ok(removed)
    }

    /// Returns the terms of the sessions.
    fn ranges(&self) -> Vec<KeyRange> {
        self.by_session.keys().map(|session| KeyRange::exact(&index_terms::session_term(session))).collect()
    }

    /// Returns `true` if a message of a row or segment is to be removed.
    pub(super) fn contain(&self, position: i64, message: &MessageRef) -> bool {
        let of_session = self.by_session.get(&message.session);
        of_session
            .into_iter()
            .flatten()
            .any(|(first, last, through)| position <= *through && (*first..=*last).contains(&message.seq))
    }
}

/// Removes the messages of a session from `$3` to `$4` from the index, in a transaction that has locked the session. After it,
/// [`Store::apply_removals`] must be called.
pub(super) const REMOVE_FROM_INDEX: Sql = Sql {
    postgres: "SELECT remove_from_index($1, $2, $3, $4)",
    sqlite: "INSERT INTO search_removal (tenant_id, session_id, first_seq, last_seq) VALUES ($1, $2, $3, $4)",
};

/// Rows of `search_recent`, or segments, that a segment replaces.
#[derive(Debug, Default)]
struct Sources {
    recent: Vec<i64>,
    segments: Vec<i64>,
}

/// A segment that replaces its sources.
struct NewSegment {
    position: i64,
    analyzer: String,
    messages: u32,
    pages: Vec<Page>,
}

/// A segment is also made of fewer recent messages if their terms have this size.
const MAX_RECENT_TERM_BYTES: usize = 1024 * 1024;
/// Approximate size of the terms of the messages that become a segment at once.
const MAX_FLUSHED_BYTES: i64 = 4 * 1024 * 1024;
/// Segments with more pages together are not merged, so that a merge or a removal writes a few megabytes at most. A row of recent messages
/// may be larger.
const MAX_MERGED_BYTES: i64 = 8 * 1024 * 1024;
/// Segments of so many messages at most are merged if there are so many of them.
const MERGED: [(u32, usize); 3] = [(512, 8), (4096, 8), (16_384, 4)];
/// Size of the pages that one statement inserts.
const MAX_INSERTED_BYTES: usize = 256 * 1024;
/// With more sessions to be removed, all lists of messages are read.
const MAX_SESSION_LOOKUPS: usize = 100;

/// Condition of rows that an analyzer has made. During a rebuild, searches use those of the earlier analyzer.
macro_rules! is_of_analyzer {
    () => {
        "($2 IS NULL OR analyzer = $2 OR EXISTS (SELECT 1 FROM search_analyzer WHERE rebuild_tenant IS NOT NULL))"
    };
}

/// Reads the segments of a tenant, newest first. Without an analyzer, those of all.
pub(super) async fn read_segments(
    transaction: &mut Transaction,
    tenant: &TenantId,
    analyzer: Option<&str>,
) -> Result<Vec<Segment>, StoreError> {
    const SELECT_SEGMENTS: &str = concat!(
        "SELECT id, position, analyzer, messages, bytes FROM search_segments WHERE tenant_id = $1 AND ",
        is_of_analyzer!(),
        " ORDER BY position DESC, id DESC"
    );
    let statement = transaction.statement(SELECT_SEGMENTS).bind(tenant.as_str()).bind(analyzer);
    let segment = |row: &AnyRow| {
        let messages =
            u32::try_from(row.field::<i64>("messages")?).map_err(StoreError::corrupt("a segment"))?;
        Ok(Segment {
            id: row.field("id")?,
            position: row.field("position")?,
            analyzer: row.field("analyzer")?,
            messages,
            bytes: row.field("bytes")?,
        })
    };
    statement.read_all().await?.iter().map(segment).collect()
}

/// Reads recent messages of a tenant: of the newest rows up to the id `through` until their terms have `max_bytes`. Without an analyzer,
/// those of all.
pub(super) async fn read_recent(
    transaction: &mut Transaction,
    tenant: &TenantId,
    analyzer: Option<&str>,
    through: i64,
    max_bytes: i64,
) -> Result<RecentMessages, StoreError> {
    /// Selects the rows first, so that no others are read.
    macro_rules! select_recent {
        ($join:literal, $columns:literal, $fence:literal) => {
            concat!(
                "SELECT r.id, r.analyzer, ", $columns, ", CAST(w.total AS bigint) AS total FROM (
                    SELECT id, sum(bytes) OVER (ORDER BY id DESC) - bytes AS before, sum(messages) OVER () AS total
                    FROM search_recent WHERE tenant_id = $1 AND id <= $4 AND ", is_of_analyzer!(), "
                ) AS w CROSS JOIN ", $join, " search_recent AS r WHERE r.id = w.id AND r.tenant_id = $1 ", $fence, "
                    w.before < $3 ORDER BY r.id"
            )
        };
    }
    const SELECT_RECENT: Sql = Sql {
        postgres: select_recent!(
            "LATERAL (SELECT r.* FROM",
            "r.sessions, r.users, r.last_seqs, r.times, r.terms",
            "OFFSET 0) AS r WHERE"
        ),
        sqlite: select_recent!("", "r.entries", "AND"),
    };
    let statement = transaction.statement(SELECT_RECENT).bind(tenant.as_str()).bind(analyzer);
    let statement = statement.bind(max_bytes).bind(through);
    let mut recent = RecentMessages::default();
    for row in &statement.read_all().await? {
        let id = row.field("id")?;
        recent.rows.push((id, row.field("analyzer")?));
        recent.unread = row.field("total")?;
        decode_recent(row, id, &mut recent.messages)?;
    }
    recent.unread -= to_i64(recent.messages.len());
    Ok(recent)
}

/// Decodes the messages of a row, oldest first.
fn decode_recent(row: &AnyRow, id: i64, messages: &mut Vec<RecentMessage>) -> Result<(), StoreError> {
    /// Messages of a session: session, user, last `seq`, time and terms.
    #[derive(Deserialize)]
    struct Entry(String, String, i64, i64, String);

    let entries = match row {
        AnyRow::Sqlite(row) => serde_json::from_str(row.field("entries")?)
            .map_err(StoreError::corrupt("recent messages of the index"))?,
        AnyRow::Postgres(row) => {
            let texts = |column| row.try_get::<Vec<String>, _>(column);
            let (last_seqs, times): (Vec<i64>, Vec<OffsetDateTime>) =
                (row.try_get("last_seqs")?, row.try_get("times")?);
            let entries = texts("sessions")?
                .into_iter()
                .zip(texts("users")?)
                .zip(last_seqs)
                .zip(times)
                .zip(texts("terms")?);
            let entry = |((((session, user), last_seq), time), terms)| {
                Entry(session, user, last_seq, DbTime(time).micros(), terms)
            };
            entries.map(entry).collect::<Vec<_>>()
        }
    };
    let first = messages.len();
    for Entry(session, user, last_seq, of_entry, terms) in entries {
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        let terms = Bytes::from(terms);
        let mut last: Option<(i64, Arc<str>)> = None;
        let text = str::from_utf8(&terms).map_err(StoreError::corrupt("terms of the index"))?;
        for message in RecentTerms::read_all(text) {
            let RecentTerms { from_end, micros, terms: of_message } = message.map_err(damaged)?;
            let message = MessageRef { session: session.clone(), seq: last_seq - from_end };
            let (micros, words) = (micros.unwrap_or(of_entry), terms.slice_ref(of_message.as_bytes()));
            let hour = index_terms::hour(micros);
            let filter_terms = match &last {
                Some((of_last, shared)) if *of_last == hour => Arc::clone(shared),
                _ => filter_terms(&session, &user, micros),
            };
            last = Some((hour, Arc::clone(&filter_terms)));
            messages.push(RecentMessage { id, message, micros, words, filter_terms });
        }
    }
    // Sessions follow each other, but a higher number means a later message.
    if let Some(of_row) = messages.get_mut(first..) {
        of_row.sort_by_key(|message| message.micros);
    }
    Ok(())
}

impl Store {
    /// Makes a segment of recent messages, and merges segments, if there are many. Removes messages that are to be removed before, unless
    /// [`Self::apply_removals`] is doing that: the worker does not wait for it, because it has work for other tenants.
    pub(super) async fn compact_index(&self, tenant: &TenantId, analyzer: &str) -> Result<(), StoreError> {
        let turn = self.hints().removal_turn(tenant);
        if let Ok(_turn) = turn.try_lock() {
            self.apply_all_removals(tenant).await.inspect_err(|_| self.note_unindexed(tenant))?;
        }
        let mut transaction = self.begin_snapshot(tenant).await?;
        // Other removals may be pending by now. Rows up to the first of their positions can become a segment without the removed messages.
        // Later rows stay, because they can contain new messages of a removed session, and a segment has one position.
        let removals = Removals::read(&mut transaction, tenant).await?;
        let through = removals.first_position;
        let recent =
            read_recent(&mut transaction, tenant, Some(analyzer), through, MAX_FLUSHED_BYTES).await?;
        drop(transaction);
        if recent.are_many() {
            let RecentMessages { mut messages, rows, unread } = recent;
            let sources = Sources { recent: rows.iter().map(|(id, _)| *id).collect(), segments: Vec::new() };
            let position = sources.recent.first().copied().unwrap_or(0);
            let analyzer = analyzer.to_owned();
            messages.retain(|message| !removals.contain(message.id, &message.message));
            let segment =
                blocking::spawn_cpu(move || NewSegment::of_messages(position, analyzer, messages)).await;
            if !self.replace(tenant, &sources, segment).await? || unread > 0 {
                self.note_unindexed(tenant);
            }
        }
        loop {
            let mut transaction = self.begin_snapshot(tenant).await?;
            let mut segments = read_segments(&mut transaction, tenant, Some(analyzer)).await?;
            // The oldest ones, in the order in which their messages were indexed.
            segments.reverse();
            let Some(segments) = mergeable(&segments) else { return Ok(()) };
            // The position of a merged segment is the first one, so a pending removal would concern messages after it, too.
            // After the removal was applied, the worker gets the tenant again.
            if !Removals::read(&mut transaction, tenant).await?.ids.is_empty() {
                return Ok(());
            }
            let sources =
                Sources { recent: Vec::new(), segments: segments.iter().map(|segment| segment.id).collect() };
            let mut pages = Vec::with_capacity(segments.len());
            for segment in &segments {
                pages.push(read_segment(&mut transaction, tenant, segment).await?);
            }
            drop(transaction);
            let (messages, pages) =
                blocking::spawn_cpu(move || merge(&pages, |_| true)).await.map_err(damaged)?;
            let position = segments.first().map_or(0, |segment| segment.position);
            let segment = NewSegment { position, analyzer: analyzer.to_owned(), messages, pages };
            if !self.replace(tenant, &sources, segment).await? {
                self.note_unindexed(tenant);
                return Ok(());
            }
        }
    }

    /// Removes the messages that are to be removed from the index. Then, or after an error, the index worker continues with the tenant.
    pub(super) async fn apply_removals(&self, tenant: &TenantId) -> Result<(), StoreError> {
        let turn = self.hints().removal_turn(tenant);
        let applied = {
            let _turn = turn.lock().await;
            self.apply_all_removals(tenant).await
        };
        if !matches!(applied, Ok(false)) {
            self.note_unindexed(tenant);
        }
        applied.map(drop)
    }

    /// Removes the messages while the caller holds the turn of the tenant. Returns `false` if there was nothing to be removed.
    async fn apply_all_removals(&self, tenant: &TenantId) -> Result<bool, StoreError> {
        const DELETE_REMOVALS: Sql = Sql {
            postgres: "DELETE FROM search_removals WHERE tenant_id = $1
                AND id = ANY (ARRAY(SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST($2 AS json))))",
            sqlite: "DELETE FROM search_removals WHERE tenant_id = $1 AND id IN (SELECT value FROM json_each($2))",
        };
        loop {
            let mut transaction = self.begin_snapshot(tenant).await?;
            let removals = Arc::new(Removals::read(&mut transaction, tenant).await?);
            if removals.ids.is_empty() {
                return Ok(false);
            }
            drop(transaction);
            // The segments are read last, because rows can become segments meanwhile.
            if self.remove_from_recent(tenant, &removals).await?
                && self.remove_from_segments(tenant, &removals).await?
            {
                let ids = json!(removals.ids).to_string();
                self.statement(tenant, DELETE_REMOVALS).bind(ids).execute().await?;
                return Ok(true);
            }
        }
    }

    /// Replaces the rows of `search_recent` with messages that are to be removed, a few megabytes of terms at a time. Returns `false` if a row
    /// does not exist any more.
    async fn remove_from_recent(&self, tenant: &TenantId, removals: &Removals) -> Result<bool, StoreError> {
        let mut through = removals.last_position;
        loop {
            let mut transaction = self.begin_snapshot(tenant).await?;
            let recent = read_recent(&mut transaction, tenant, None, through, MAX_FLUSHED_BYTES).await?;
            drop(transaction);
            for of_row in recent.messages.chunk_by(|a, b| a.id == b.id) {
                let is_kept = |message: &&RecentMessage| !removals.contain(message.id, &message.message);
                let Some(RecentMessage { id, .. }) = of_row.iter().find(|message| !is_kept(message)) else {
                    continue;
                };
                let Some((_, analyzer)) = recent.rows.iter().find(|(row, _)| row == id) else { continue };
                let (id, analyzer) = (*id, analyzer.clone());
                let kept: Vec<RecentMessage> = of_row.iter().filter(is_kept).cloned().collect();
                let segment = blocking::spawn_cpu(move || NewSegment::of_messages(id, analyzer, kept)).await;
                let sources = Sources { recent: vec![id], segments: Vec::new() };
                if !self.replace(tenant, &sources, segment).await? {
                    return Ok(false);
                }
            }
            let Some((first, _)) = recent.rows.first().filter(|_| recent.unread > 0) else { return Ok(true) };
            through = first - 1;
        }
    }

    /// Replaces the segments with messages that are to be removed. Returns `false` if one does not exist any more.
    async fn remove_from_segments(
        &self,
        tenant: &TenantId,
        removals: &Arc<Removals>,
    ) -> Result<bool, StoreError> {
        let mut transaction = self.begin_snapshot(tenant).await?;
        let segments = read_segments(&mut transaction, tenant, None).await?;
        let removed = removals.find_in(&mut transaction, tenant, &segments).await?;
        drop(transaction);
        for (segment, _) in segments.into_iter().zip(removed).filter(|(_, removed)| !removed.is_empty()) {
            let mut transaction = self.begin_snapshot(tenant).await?;
            let pages = read_segment(&mut transaction, tenant, &segment).await?;
            drop(transaction);
            let Segment { id, position, analyzer, .. } = segment;
            let removals = Arc::clone(removals);
            let is_kept = move |message: &MessageRef| !removals.contain(position, message);
            let (messages, pages) =
                blocking::spawn_cpu(move || merge(&[pages], is_kept)).await.map_err(damaged)?;
            let sources = Sources { recent: Vec::new(), segments: vec![id] };
            let new = NewSegment { position, analyzer, messages, pages };
            if !self.replace(tenant, &sources, new).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Replaces rows and segments by a segment, if that has messages. Returns `false`, and changes nothing, if one of them does not exist any
    /// more.
    async fn replace(
        &self,
        tenant: &TenantId,
        sources: &Sources,
        new: NewSegment,
    ) -> Result<bool, StoreError> {
        macro_rules! delete_sources {
            ($table:literal) => {
                Sql {
                    postgres: concat!(
                        "DELETE FROM ", $table, " = ANY (
                            ARRAY(SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST($2 AS json))))
                            AND tenant_id = $1"
                    ),
                    sqlite: concat!("DELETE FROM ", $table, " IN (SELECT value FROM json_each($2)) AND tenant_id = $1"),
                }
            };
        }
        const DELETE_RECENT: Sql = delete_sources!("search_recent WHERE id");
        const DELETE_SEGMENTS: Sql = delete_sources!("search_segments WHERE id");
        const DELETE_PAGES: Sql = delete_sources!("search_pages WHERE segment_id");
        let Sources { recent, segments } = sources;
        let replace = async || {
            let mut transaction = self.begin_index_write(tenant).await?;
            for (sql, ids) in [(DELETE_RECENT, recent), (DELETE_SEGMENTS, segments)] {
                let statement = transaction.statement(sql).bind(tenant.as_str()).bind(json!(ids).to_string());
                if !ids.is_empty() && statement.execute().await? != ids.len() as u64 {
                    return Ok(false);
                }
            }
            if !segments.is_empty() {
                let statement = transaction.statement(DELETE_PAGES).bind(tenant.as_str());
                statement.bind(json!(segments).to_string()).execute().await?;
            }
            new.insert(&mut transaction, tenant).await?;
            transaction.commit().await?;
            Ok(true)
        };
        retry_on_deadlock(replace).await
    }
}

/// Returns segments that are to be merged, if there are enough of a size. The first one of `segments` is the oldest.
fn mergeable(segments: &[Segment]) -> Option<Vec<Segment>> {
    MERGED.iter().find_map(|(max_messages, number)| {
        let is_small = |segment: &&Segment| {
            segment.messages <= *max_messages && segment.bytes <= MAX_MERGED_BYTES / to_i64(*number)
        };
        let small: Vec<Segment> = segments.iter().filter(is_small).take(*number).cloned().collect();
        (small.len() == *number).then_some(small)
    })
}

impl NewSegment {
    fn of_messages(position: i64, analyzer: String, messages: Vec<RecentMessage>) -> Self {
        let mut builder = SegmentBuilder::default();
        for RecentMessage { message, words, filter_terms, .. } in messages {
            builder.add(message, split_terms(&words, &filter_terms));
        }
        Self { position, analyzer, messages: builder.len(), pages: builder.finish() }
    }

    async fn insert(&self, transaction: &mut Transaction, tenant: &TenantId) -> Result<(), StoreError> {
        const INSERT_SEGMENT: &str = "\
            INSERT INTO search_segments (tenant_id, position, analyzer, messages, bytes)
            VALUES ($1, $2, $3, $4, $5) RETURNING id";
        /// `$3` are the keys and pages one after another, and `$4` lists of the first byte and of the lengths of each key and page.
        macro_rules! insert_pages {
            ($elements:literal, $integer:literal) => {
                concat!(
                    "INSERT INTO search_pages (tenant_id, segment_id, first_key, page)
                    SELECT $1, $2, substr($3, first_byte, key_bytes), substr($3, first_byte + key_bytes, page_bytes) FROM (
                        SELECT CAST(value ->> 0 AS ", $integer, ") AS first_byte, CAST(value ->> 1 AS ", $integer, ") AS key_bytes,
                            CAST(value ->> 2 AS ", $integer, ") AS page_bytes
                        FROM ", $elements, "
                    ) AS p"
                )
            };
        }
        const INSERT_PAGES: Sql = Sql {
            postgres: insert_pages!("json_array_elements(CAST($4 AS json))", "integer"),
            sqlite: insert_pages!("json_each($4)", "INTEGER"),
        };
        if self.messages == 0 {
            return Ok(());
        }
        let statement = transaction.statement(INSERT_SEGMENT).bind(tenant.as_str()).bind(self.position);
        let bytes = self.pages.iter().map(|page| page.bytes.len()).sum();
        let statement =
            statement.bind(self.analyzer.as_str()).bind(i64::from(self.messages)).bind(to_i64(bytes));
        let row = statement.read().await?.ok_or(sqlx::Error::RowNotFound)?;
        let id: i64 = row.field("id")?;
        let mut pages = self.pages.iter().peekable();
        while pages.peek().is_some() {
            let (mut bytes, mut lengths) = (Vec::new(), Vec::new());
            while let Some(Page { first_key, bytes: page }) =
                pages.next_if(|_| bytes.len() < MAX_INSERTED_BYTES)
            {
                lengths.push([bytes.len() + 1, first_key.len(), page.len()]);
                bytes.extend_from_slice(first_key);
                bytes.extend_from_slice(page);
            }
            let statement = transaction.statement(INSERT_PAGES).bind(tenant.as_str()).bind(id);
            statement.bind(bytes).bind(json!(lengths).to_string()).execute().await?;
        }
        Ok(())
    }
}

/// Reads all pages of a segment. They are complete, because a transaction reads a snapshot, or else the segment was replaced, and its
/// replacement fails.
async fn read_segment(
    transaction: &mut Transaction,
    tenant: &TenantId,
    segment: &Segment,
) -> Result<Vec<Vec<u8>>, StoreError> {
    const SELECT_ALL_PAGES: &str =
        "SELECT page FROM search_pages WHERE tenant_id = $1 AND segment_id = $2 ORDER BY first_key";
    let statement = transaction.statement(SELECT_ALL_PAGES).bind(tenant.as_str()).bind(segment.id);
    let rows = statement.read_all().await?;
    Ok(rows.iter().map(|row| row.field("page")).collect::<Result<_, _>>()?)
}

/// Reads the pages that can contain keys of ranges: the last one that begins at or before the range, and those that begin within it.
/// Ranges are one JSON text: place, segment, and both keys as hexadecimal digits. `OFFSET 0` forces an index scan for each range.
const SELECT_PAGES: Sql = Sql {
    postgres: "\
        WITH wanted AS MATERIALIZED (
            SELECT CAST(value ->> 0 AS bigint) AS place, CAST(value ->> 1 AS bigint) AS segment_id,
                decode(value ->> 2, 'hex') AS first_key, decode(value ->> 3, 'hex') AS last_key
            FROM json_array_elements(CAST($2 AS json))
        )
        SELECT w.place, p.page FROM wanted AS w CROSS JOIN LATERAL (
            SELECT p.page FROM search_pages AS p
            WHERE p.tenant_id = $1 AND p.segment_id = w.segment_id AND p.first_key <= w.first_key
            ORDER BY p.first_key DESC LIMIT 1
        ) AS p
        UNION ALL
        SELECT w.place, p.page FROM wanted AS w CROSS JOIN LATERAL (
            SELECT p.page FROM search_pages AS p
            WHERE p.tenant_id = $1 AND p.segment_id = w.segment_id AND p.first_key > w.first_key
                AND p.first_key <= w.last_key OFFSET 0
        ) AS p
        WHERE w.first_key < w.last_key",
    sqlite: "\
        WITH wanted AS MATERIALIZED (
            SELECT value ->> 0 AS place, value ->> 1 AS segment_id, unhex(value ->> 2) AS first_key,
                unhex(value ->> 3) AS last_key
            FROM json_each($2)
        )
        SELECT w.place, p.page FROM wanted AS w CROSS JOIN search_pages AS p ON p.rowid = (
            SELECT f.rowid FROM search_pages AS f
            WHERE f.segment_id = w.segment_id AND f.first_key <= w.first_key ORDER BY f.first_key DESC LIMIT 1
        )
        WHERE p.tenant_id = $1
        UNION ALL
        SELECT w.place, p.page FROM wanted AS w CROSS JOIN search_pages AS p
            ON p.segment_id = w.segment_id AND p.first_key > w.first_key AND p.first_key <= w.last_key
        WHERE p.tenant_id = $1 AND w.first_key < w.last_key",
};

pub(super) fn damaged(error: DamagedPage) -> StoreError {
    StoreError::corrupt("the search index")(error)
}

/// Returns the ascending numbers of the messages with a term of each range in each segment: those of all ranges in the first segment, then
/// those in the second one.
pub(super) async fn read_numbers(
    transaction: &mut Transaction,
    tenant: &TenantId,
    segments: &[Segment],
    ranges: &[KeyRange],
) -> Result<Vec<Vec<u32>>, StoreError> {
    let wanted =
        page_ranges(segments.iter().flat_map(|segment| ranges.iter().map(|range| (segment.id, range))));
    let pages = read_pages(transaction, tenant, wanted).await?;
    let messages: Vec<u32> = segments.iter().map(|segment| segment.messages).collect();
    let (ranges, bytes) = (ranges.to_vec(), pages.iter().map(|(_, page)| page.len()).sum());
    let collect = move || {
        let mut pages_of = vec![Vec::new(); messages.len() * ranges.len()];
        for (place, page) in pages {
            pages_of.get_mut(place).ok_or(DamagedPage)?.push(page);
        }
        let keys = messages.iter().flat_map(|messages| ranges.iter().map(|range| (range, *messages)));
        let numbers = |(pages, (range, messages)): (&Vec<_>, _)| collect_numbers(pages, range, messages);
        pages_of.iter().zip(keys).map(numbers).collect::<Result<_, _>>()
    };
    blocking::spawn_cpu_if_large(bytes, collect).await.map_err(damaged)
}

/// Returns ranges of keys in segments as a parameter of [`SELECT_PAGES`].
pub(super) fn page_ranges<'r>(ranges: impl Iterator<Item = (i64, &'r KeyRange)>) -> Vec<Value> {
    let range = |(place, (segment, range)): (usize, (i64, &KeyRange))| {
        json!([place, segment, hex::encode(&range.first), hex::encode(&range.last)])
    };
    ranges.enumerate().map(range).collect()
}

/// Returns the pages that can contain keys of ranges, each with the place of its range.
pub(super) async fn read_pages(
    transaction: &mut Transaction,
    tenant: &TenantId,
    wanted: Vec<Value>,
) -> Result<Vec<(usize, Vec<u8>)>, StoreError> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let wanted = Value::from(wanted).to_string();
    let rows = transaction.statement(SELECT_PAGES).bind(tenant.as_str()).bind(wanted).read_all().await?;
    let page = |row: &AnyRow| {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
        Ok((place, row.field("page")?))
    };
    rows.iter().map(page).collect()
}
