//! Appending exchanges on SQLite.
//!
//! The statements are set-based: a batch takes as many statements as one exchange, and their parameters are JSON lists. A thread of its
//! own runs the transaction of most batches ([`super::write_thread`]), and a connection of the pool those of others.

use super::checkpoints::Checkpoints;
use super::write_thread::WriteThread;
use super::{micros, now};
use crate::domain::error_chain::ErrorChain;
use crate::domain::exchange::PersistedExchange;
use crate::domain::message::Message;
use crate::storage::append::{self, AppendBatcher, SessionGroup, group};
use crate::storage::batch::Batcher;
use crate::storage::index_hints::{BatchTerms, IndexHints};
use crate::storage::rows::tool_columns;
use crate::storage::statement::DbRow as _;
use crate::storage::values::{DbTime, to_i64, user_from_column};
use crate::storage::{AppendOutcome, AppendRequest, StoreError};
use rusqlite::{ToSql, Transaction};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, SqliteConnection, SqlitePool};
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use uuid::Uuid;

/// Reads the keys of exchanges that are known. `$1` is a list of [`RequestKey`]s.
const SELECT_IDEMPOTENCY_KEYS: &str = "\
    SELECT w.value ->> 'request' AS request, k.fingerprint, k.first_seq, k.last_seq, k.created_at,
        iif(k.has_user, s.user_id, '') AS user_id
    FROM jsonb_each($1) AS w
        CROSS JOIN idempotency_keys AS k ON k.tenant_id = w.value ->> 'tenant'
            AND k.session_id = w.value ->> 'session' AND k.key = w.value ->> 'key'
        CROSS JOIN sessions AS s ON s.tenant_id = k.tenant_id AND s.session_id = k.session_id AND s.last_seq > 0";

/// Joins each group with its session, except if the session belongs to another user. In the statements after the first one,
/// `last_seq` of the session is the `seq` of the last message of the group.
macro_rules! from_groups {
    () => {
        from_groups!("$1")
    };
    ($groups:literal) => {
        concat!(
            "FROM jsonb_each(", $groups, ") AS g
            CROSS JOIN sessions AS s ON s.tenant_id = g.value ->> 'tenant' AND s.session_id = g.value ->> 'session'
                AND s.user_id IN ('', coalesce(g.value ->> 'user', s.user_id))"
        )
    };
}

/// Appends groups of exchanges and returns a list of [`AppendedGroup`]s, which is one row, because the driver copies each column of
/// each row. `$1` is a list of [`Group`]s, and `$2` the time. `$3` is the analyzer of the terms of all messages, `$4` a list of
/// [`GroupTerms`], and `$5` a list of [`GroupMessages`]: each statement parses its list, so these texts are in lists of their own.
///
/// The hour and the user of an existing session change in a statement of their own, because an update that names these columns
/// replaces the entries of two indexes even if the values stay the same. A session that gets its user also gets another
/// incarnation, so that copies of the session without the user become invalid.
pub(super) const APPEND_GROUPS: &str = concat!(
    "INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, stored_bytes, created_at,
        updated_at, activity_hour, incarnation, indexed_seq)
    SELECT g.value ->> 'tenant', g.value ->> 'session',
        coalesce(g.value ->> 'user', nullif(old.user_id, ''), g.value ->> 'default_user', ''),
        coalesce(g.value ->> 'metadata', old.metadata, '{}'), g.value ->> 'count', g.value ->> 'tokens',
        g.value ->> 'bytes', $2, $2,
        $2 / 3600000000, randomblob(16),
        iif(EXISTS (SELECT 1 FROM search_analyzer WHERE version = $3 AND rebuild_tenant IS NULL), NULL, 0)
    FROM jsonb_each($1) AS g
        LEFT JOIN sessions AS old
            ON old.tenant_id = g.value ->> 'tenant' AND old.session_id = g.value ->> 'session'
    WHERE true
    ON CONFLICT (tenant_id, session_id) DO UPDATE SET
        last_seq = s.last_seq + excluded.last_seq,
        tokens = s.tokens + excluded.tokens,
        stored_bytes = s.stored_bytes + excluded.stored_bytes,
        metadata = excluded.metadata,
        created_at = iif(s.last_seq = 0, excluded.created_at, s.created_at),
        updated_at = max(excluded.updated_at, s.updated_at),
        indexed_seq = coalesce(s.indexed_seq, iif(excluded.indexed_seq IS NULL, NULL, s.last_seq))
    WHERE s.user_id IN ('', excluded.user_id);

    UPDATE sessions SET activity_hour = updated_at / 3600000000,
        incarnation = iif(user_id = '', randomblob(16), incarnation),
        user_id = iif(user_id = '', (
            SELECT coalesce(g.value ->> 'user', g.value ->> 'default_user', '') FROM jsonb_each($1) AS g
            WHERE g.value ->> 'tenant' = tenant_id AND g.value ->> 'session' = session_id
        ), user_id)
    WHERE rowid IN (SELECT s.rowid ",
    from_groups!(),
    " WHERE s.activity_hour <> s.updated_at / 3600000000
        OR (s.user_id = '' AND coalesce(g.value ->> 'user', g.value ->> 'default_user') IS NOT NULL));

    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    SELECT s.tenant_id, s.session_id, s.last_seq - (m.value ->> 'from_end'), m.value ->> 'role',
        m.value ->> 'tool_call_ids', m.value ->> 'tool_result_of', m.value ->> 'tokens', m.value ->> 'json',
        coalesce(m.value ->> 'created_at', s.updated_at) ",
    from_groups!("$5"),
    " CROSS JOIN jsonb_each(g.value, '$.messages') AS m;

    INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, entries)
    SELECT s.tenant_id, $3, sum(g.value ->> 'count'), sum(octet_length(g.value ->> 'terms')),
        json_group_array(json_array(s.session_id, s.user_id, s.last_seq, s.updated_at, g.value ->> 'terms')) ",
    from_groups!("$4"),
    " WHERE s.indexed_seq IS NULL GROUP BY s.tenant_id;

    SELECT json_group_array(json_array(g.key, s.last_seq, s.updated_at, hex(s.incarnation), s.user_id)) AS appended ",
    from_groups!()
);

/// Adds the idempotency keys of groups that were appended, and deletes expired keys of their sessions, so that these need no
/// background job. `$1` is a list of [`Group`]s; keys stored before `$2` are expired.
pub(super) const APPEND_KEYS: &str = concat!(
    "DELETE FROM idempotency_keys
    WHERE created_at < $2 AND (tenant_id, session_id) IN (SELECT s.tenant_id, s.session_id ",
    from_groups!(),
    ");

    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at, has_user)
    SELECT s.tenant_id, s.session_id, k.value ->> 'key', unhex(k.value ->> 'fingerprint'),
        s.last_seq - (k.value ->> 'first_from_end'), s.last_seq - (k.value ->> 'last_from_end'), s.updated_at, s.user_id <> '' ",
    from_groups!(),
    " CROSS JOIN jsonb_each(g.value, '$.keys') AS k"
);

/// Shortest time that a key is kept.
const KEY_RETENTION: time::Duration = time::Duration::hours(24);

/// Bytes of messages that are appended at once. Encoding more would delay other tasks. The remaining exchanges of a batch follow
/// in the same transaction, and so do the remaining messages of a group, each by itself.
const MAX_BYTES: usize = 1024 * 1024;

/// Larger messages are inserted by themselves: the database copies the messages of a batch several times.
const LARGE_MESSAGE_BYTES: usize = 64 * 1024;

/// Largest number of large exchanges that wait for the writer or use it at the same time. The queue of the writer is first in, first
/// out, so a batch of small exchanges would wait for all of them.
const MAX_WAITING_LARGE: usize = 1;

const INSERT_MESSAGE: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// A [`SessionGroup`] as the statements read it, without its messages. Positions of messages (`from_end`) count backwards from the last
/// message of the group, so that a statement needs no value of the group for each key or message: SQLite would copy the whole group for it.
#[derive(Serialize)]
struct Group<'r> {
    tenant: &'r str,
    session: &'r str,
    user: Option<&'r str>,
    default_user: Option<&'r str>,
    metadata: Option<&'r str>,
    /// The number of messages.
    count: i64,
    tokens: i64,
    bytes: i64,
    keys: Vec<GroupKey<'r>>,
}

/// The messages of a [`Group`] that are not inserted by themselves.
#[derive(Serialize)]
struct GroupMessages<'r> {
    tenant: &'r str,
    session: &'r str,
    user: Option<&'r str>,
    messages: Vec<GroupMessage<'r>>,
}

#[derive(Serialize)]
struct GroupMessage<'r> {
    from_end: i64,
    role: &'static str,
    tool_call_ids: Option<String>,
    tool_result_of: Option<String>,
    tokens: i64,
    json: &'r str,
    /// Microseconds since 1970, if the client gave the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<i64>,
}

/// The terms of the messages of a [`Group`], as [`RecentTerms`](crate::domain::search::recent::RecentTerms).
#[derive(Serialize)]
struct GroupTerms<'r> {
    tenant: &'r str,
    session: &'r str,
    user: Option<&'r str>,
    /// The number of messages.
    count: i64,
    terms: String,
}

#[derive(Serialize)]
struct GroupKey<'r> {
    key: &'r str,
    fingerprint: String,
    first_from_end: i64,
    last_from_end: i64,
}

/// A group that was appended: its position, then `last_seq`, time, incarnation and user of the session.
#[derive(Deserialize)]
struct AppendedGroup(usize, i64, i64, String, String);

/// The key of an exchange that may be known.
#[derive(Serialize)]
struct RequestKey<'r> {
    /// The index of the exchange.
    request: usize,
    tenant: &'r str,
    session: &'r str,
    key: &'r str,
}

impl<'r> Group<'r> {
    fn new(requests: &'r [AppendRequest], group: &SessionGroup<'r>) -> Self {
        let mut row = Self {
            tenant: group.tenant,
            session: group.session,
            user: group.user(requests),
            default_user: group.default_user(requests),
            metadata: group.metadata(requests),
            count: group.messages,
            tokens: group.tokens,
            bytes: group.bytes,
            keys: Vec::new(),
        };
        for (_, request, offset) in group.exchanges(requests) {
            let first_from_end = group.messages - 1 - offset;
            row.keys.extend(request.key.iter().map(|key| GroupKey {
                key: &key.key,
                fingerprint: hex::encode(&key.fingerprint),
                first_from_end,
                last_from_end: first_from_end + 1 - to_i64(request.exchange.messages.len()),
            }));
        }
        row
    }
}

impl<'r> GroupMessages<'r> {
    fn new(requests: &'r [AppendRequest], group: &SessionGroup<'r>) -> Self {
        let message = |PlacedMessage { position, message, tokens, created_at, .. }: PlacedMessage<'r>| {
            let (tool_call_ids, tool_result_of) = tool_columns(message);
            GroupMessage {
                from_end: group.messages - 1 - position,
                role: message.role().as_str(),
                tool_call_ids,
                tool_result_of,
                tokens,
                json: message.json(),
                created_at: created_at.map(micros),
            }
        };
        Self {
            tenant: group.tenant,
            session: group.session,
            user: group.user(requests),
            messages: messages(requests, group).filter(|message| message.is_batched).map(message).collect(),
        }
    }
}

/// Returns the analyzer and the [`GroupTerms`] of groups as parameters of [`APPEND_GROUPS`].
fn terms_of<'r>(requests: &'r [AppendRequest], groups: &[SessionGroup<'r>]) -> (Option<String>, String) {
    let Some(BatchTerms { analyzer, of_groups }) = BatchTerms::new(requests, groups) else {
        return (None, "[]".to_owned());
    };
    let of_group = |(group, terms): (&SessionGroup<'r>, String)| {
        let (tenant, session, user) = (group.tenant, group.session, group.user(requests));
        GroupTerms { tenant, session, user, count: group.messages, terms }
    };
    let of_groups: Vec<_> = groups.iter().zip(of_groups).map(of_group).collect();
    (Some(analyzer.version()), encode(&of_groups))
}

/// A message of a [`SessionGroup`].
struct PlacedMessage<'r> {
    /// The position in the group, from 0.
    position: i64,
    message: &'r Message,
    tokens: i64,
    /// The time that the client gave.
    created_at: Option<OffsetDateTime>,
    /// `false` if the message is inserted by itself.
    is_batched: bool,
}

/// Returns the messages of a group, in order.
fn messages<'r>(
    requests: &'r [AppendRequest],
    group: &SessionGroup<'r>,
) -> impl Iterator<Item = PlacedMessage<'r>> {
    let placed = group.exchanges(requests).flat_map(|(_, request, offset)| {
        let mut times = request.exchange.given_times();
        (offset..)
            .zip(&request.exchange.messages)
            .map(move |(position, (message, tokens))| (position, message, *tokens, times.next().flatten()))
    });
    let mut bytes = 0;
    placed.map(move |(position, message, tokens, created_at)| {
        let size = message.json().len();
        let is_batched = size <= LARGE_MESSAGE_BYTES && bytes + size <= MAX_BYTES;
        bytes += if is_batched { size } else { 0 };
        PlacedMessage { position, message, tokens, created_at, is_batched }
    })
}

/// The connections that append exchanges.
#[derive(Clone)]
pub(super) struct Writers {
    /// The connection of all transactions that write. They queue for it.
    pub(super) pool: SqlitePool,
    /// Writes while the connection of the pool is held, so it never waits for another transaction.
    pub(super) thread: Arc<WriteThread>,
}

/// Returns the batcher of the connections.
pub(super) fn batcher(
    writers: Writers,
    checkpoints: &Arc<Checkpoints>,
    hints: &Arc<IndexHints>,
    acquire_timeout: Duration,
) -> AppendBatcher {
    let (batch_writers, single_writers) = (writers.clone(), writers);
    let large = Arc::new(Semaphore::new(MAX_WAITING_LARGE));
    let checkpoints = Arc::clone(checkpoints);
    let (batch_hints, single_hints) = (Arc::clone(hints), Arc::clone(hints));
    let append_batch = move |requests: Vec<AppendRequest>| {
        let (writers, checkpoints) = (batch_writers.clone(), Arc::clone(&checkpoints));
        let hints = Arc::clone(&batch_hints);
        async move {
            let appended = append_all(&writers, &hints, &requests).await;
            checkpoints.count(requests.len());
            let results: Vec<_> = match appended {
                Ok(outcomes) => outcomes.into_iter().map(|outcome| outcome.map(Ok)).collect(),
                // The writer is busy or the file is not writable: another attempt would only wait once more.
                Err(error @ StoreError::Unavailable(_)) => {
                    requests.iter().map(|_| Some(Err(append::batch_unavailable(&error)))).collect()
                }
                Err(StoreError::BatchFailed) => {
                    requests.iter().map(|_| Some(Err(StoreError::BatchFailed))).collect()
                }
                // The transaction was rolled back, and each exchange is appended by itself.
                Err(_) => requests.iter().map(|_| None).collect(),
            };
            requests.into_iter().zip(results).collect()
        }
    };
    let append_alone = move |request: AppendRequest| {
        let (writers, hints) = (single_writers.clone(), Arc::clone(&single_hints));
        let large = Arc::clone(&large);
        async move {
            let _permit = if append::is_large(&request) {
                let permit = timeout(acquire_timeout, large.acquire()).await;
                Some(permit.map_err(|_| StoreError::Unavailable(sqlx::Error::PoolTimedOut))?)
            } else {
                None
            };
            append_one(&writers, &hints, &request).await
        }
    };
    Batcher::new(append::MAX_BATCH, append_batch, append_alone)
}

async fn append_one(
    writers: &Writers,
    hints: &IndexHints,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let outcomes = append_all(writers, hints, std::slice::from_ref(request)).await?;
    outcomes.into_iter().next().flatten().ok_or(StoreError::BatchFailed)
}

/// Appends the exchanges in one transaction, which is one write to the disk. Each of them has an outcome then.
pub(super) async fn append_all(
    writers: &Writers,
    hints: &IndexHints,
    requests: &[AppendRequest],
) -> Result<Vec<Option<AppendOutcome>>, StoreError> {
    let mut outcomes: Vec<_> = requests.iter().map(|_| None).collect();
    let mut connection = writers.pool.acquire().await?;
    if append_at_once(&writers.thread, hints, requests, &mut outcomes).await? {
        return Ok(outcomes);
    }
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    loop {
        let mut bytes = 0;
        let open = requests.iter().zip(&outcomes).enumerate();
        let open =
            open.filter_map(|(index, (request, outcome))| outcome.is_none().then_some((index, request)));
        let fitting = open.take_while(|(_, request)| {
            let before = bytes;
            bytes += append::message_bytes(request);
            before < MAX_BYTES
        });
        let groups = group(fitting);
        if groups.is_empty() {
            let mut checked = requests.iter().zip(&mut outcomes);
            if checked.any(|(request, outcome)| append::reject_unexpected(request, outcome)) {
                transaction.rollback().await?;
            } else {
                transaction.commit().await?;
            }
            return Ok(outcomes);
        }
        append_groups(&mut transaction, hints, requests, &groups, &mut outcomes).await?;
    }
}

/// Appends the exchanges in one transaction of the thread. Returns `false`, and has appended nothing, if they need several steps:
/// because of known keys, their size, or because some of them must follow others. Also if one does not follow the message that it expects, and
/// after an error: the connection of the pool then waits for other processes, and returns the outcome or its own error.
async fn append_at_once(
    thread: &WriteThread,
    hints: &IndexHints,
    requests: &[AppendRequest],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<bool, StoreError> {
    if requests.iter().map(append::message_bytes).sum::<usize>() > MAX_BYTES {
        return Ok(false);
    }
    let groups = group(requests.iter().enumerate());
    let grouped: usize = groups.iter().map(|group| group.exchanges.len()).sum();
    let is_batched =
        groups.iter().flat_map(|group| messages(requests, group)).all(|message| message.is_batched);
    let expecting: Vec<_> =
        requests.iter().filter(|request| append::expects_history(request)).cloned().collect();
    let is_mixed = !expecting.is_empty() && expecting.len() < requests.len();
    if grouped < requests.len() || !is_batched || is_mixed {
        return Ok(false);
    }
    let parameters = Parameters::new(requests, &groups);
    let is_indexed = parameters.analyzer.is_some();
    let write = move |transaction: &Transaction<'_>| {
        let appended = parameters.append(transaction)?;
        Ok(appended.filter(|appended| expecting.is_empty() || follow_expected(&expecting, appended)))
    };
    let appended = match thread.write(write).await {
        Ok(Some(appended)) => appended,
        Ok(None) => return Ok(false),
        Err(error) => {
            tracing::debug!(%error, "failed to append a batch of exchanges; the connection of the pool appends it");
            return Ok(false);
        }
    };
    // The exchanges are stored, so they must not be appended again if their results are invalid.
    let appended = appended_groups(&appended, &groups).map_err(|error| {
        tracing::error!(error = %ErrorChain(&error), "failed to read the results of stored exchanges");
        StoreError::BatchFailed
    })?;
    if is_indexed {
        hints.note_batch(requests, &groups);
    }
    for (group, appended) in groups.iter().zip(appended) {
        group.fill_outcomes(requests, appended.as_ref(), outcomes);
    }
    Ok(true)
}

/// Returns `true` if exchanges follow the messages that they expect. These are all exchanges of the transaction, and `appended` is the
/// result of [`APPEND_GROUPS`].
fn follow_expected(requests: &[AppendRequest], appended: &str) -> bool {
    let mut outcomes: Vec<_> = requests.iter().map(|_| None).collect();
    let groups = group(requests.iter().enumerate());
    let Ok(appended) = appended_groups(appended, &groups) else { return false };
    for (group, appended) in groups.iter().zip(appended) {
        group.fill_outcomes(requests, appended.as_ref(), &mut outcomes);
    }
    !requests.iter().zip(&mut outcomes).any(|(request, outcome)| append::reject_unexpected(request, outcome))
}

/// The parameters of the statements that append groups of exchanges.
struct Parameters {
    groups: String,
    now: OffsetDateTime,
    analyzer: Option<String>,
    terms: String,
    messages: String,
    /// The parameter of [`SELECT_IDEMPOTENCY_KEYS`], if the exchanges have keys.
    keys: Option<String>,
}

impl Parameters {
    fn new(requests: &[AppendRequest], groups: &[SessionGroup<'_>]) -> Self {
        let keys = request_keys(requests, groups);
        let (analyzer, terms) = terms_of(requests, groups);
        Self {
            groups: encode(&groups.iter().map(|group| Group::new(requests, group)).collect::<Vec<_>>()),
            now: now(),
            analyzer,
            terms,
            messages: encode(
                &groups.iter().map(|group| GroupMessages::new(requests, group)).collect::<Vec<_>>(),
            ),
            keys: (!keys.is_empty()).then(|| encode(&keys)),
        }
    }

    /// Appends the groups and returns the result of [`APPEND_GROUPS`], or `None` if a key is known.
    fn append(&self, transaction: &Transaction<'_>) -> rusqlite::Result<Option<String>> {
        if let Some(keys) = &self.keys
            && transaction.prepare_cached(SELECT_IDEMPOTENCY_KEYS)?.exists([keys])?
        {
            return Ok(None);
        }
        let now = micros(self.now);
        let appended = run_statements(
            transaction,
            APPEND_GROUPS,
            &[&self.groups, &now, &self.analyzer, &self.terms, &self.messages],
        )?;
        if self.keys.is_some() {
            run_statements(transaction, APPEND_KEYS, &[&self.groups, &self.expired_before()])?;
        }
        Ok(appended)
    }

    /// Returns the time before which stored keys are expired.
    fn expired_before(&self) -> i64 {
        micros(self.now - KEY_RETENTION)
    }
}

/// Runs a text of several statements, of which each uses some of the parameters. Returns the value that the last one selects.
fn run_statements(
    transaction: &Transaction<'_>,
    statements: &str,
    parameters: &[&dyn ToSql],
) -> rusqlite::Result<Option<String>> {
    let mut selected = None;
    for text in statements.split(';') {
        let mut statement = transaction.prepare_cached(text)?;
        for index in 1..=statement.parameter_count() {
            // SQLite numbers the parameters of a statement in the order in which they occur.
            let name = statement.parameter_name(index).unwrap_or_default();
            let number = name.get(1..).and_then(|number| number.parse::<usize>().ok());
            let parameter = number.and_then(|number| parameters.get(number.checked_sub(1)?));
            let missing = || rusqlite::Error::InvalidParameterName(name.to_owned());
            let parameter = *parameter.ok_or_else(missing)?;
            statement.raw_bind_parameter(index, parameter)?;
        }
        selected = match statement.column_count() {
            0 => statement.raw_execute().map(|_| None)?,
            _ => statement.raw_query().next()?.map(|row| row.get(0)).transpose()?,
        };
    }
    Ok(selected)
}

/// Decodes the result of [`APPEND_GROUPS`] for each group: `None` if it was not appended.
fn appended_groups(
    appended: &str,
    groups: &[SessionGroup<'_>],
) -> Result<Vec<Option<PersistedExchange>>, StoreError> {
    let appended: Vec<AppendedGroup> =
        serde_json::from_str(appended).map_err(StoreError::corrupt("the appended groups"))?;
    let mut of_groups = vec![None; groups.len()];
    for AppendedGroup(place, last_seq, updated_at, incarnation, user_id) in appended {
        let incarnation = Uuid::try_parse(&incarnation).map_err(StoreError::corrupt("an incarnation"))?;
        if let Some((slot, group)) = of_groups.get_mut(place).zip(groups.get(place)) {
            *slot = Some(PersistedExchange {
                first_seq: last_seq - group.messages + 1,
                last_seq,
                created_at: DbTime::from_micros(updated_at)?.0,
                incarnation: Some(incarnation),
                user_id: user_from_column(user_id)?,
                replayed: false,
            });
        }
    }
    Ok(of_groups)
}

/// Appends an exchange in a transaction that has created the session.
pub(in crate::storage) async fn append_in_transaction(
    connection: &mut SqliteConnection,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let (requests, mut outcomes) = (std::slice::from_ref(request), [None]);
    let groups = group(requests.iter().enumerate());
    append_groups(connection, &IndexHints::default(), requests, &groups, &mut outcomes).await?;
    let [outcome] = outcomes;
    outcome.ok_or(StoreError::BatchFailed)
}

/// Appends groups of exchanges. If an idempotency key is known, fills in the outcomes of the known exchanges only.
async fn append_groups(
    transaction: &mut SqliteConnection,
    hints: &IndexHints,
    requests: &[AppendRequest],
    groups: &[SessionGroup<'_>],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<(), StoreError> {
    let parameters = Parameters::new(requests, groups);
    if let Some(keys) = &parameters.keys
        && replay_known_keys(transaction, keys, requests, outcomes).await?
    {
        return Ok(());
    }
    if parameters.analyzer.is_some() {
        hints.note_batch(requests, groups);
    }
    let Parameters { groups: rows, analyzer, terms, messages, .. } = &parameters;
    let append = sqlx::query(APPEND_GROUPS).bind(rows).bind(micros(parameters.now)).bind(analyzer);
    let appended = append.bind(terms).bind(messages).fetch_all(&mut *transaction).await?;
    let appended = appended.last().ok_or(sqlx::Error::RowNotFound)?.field("appended")?;
    let of_groups = appended_groups(appended, groups)?;
    for (group, appended) in groups.iter().zip(&of_groups) {
        if let Some(appended) = appended {
            insert_separate_messages(transaction, requests, group, appended).await?;
        }
    }
    if parameters.keys.is_some() {
        sqlx::query(APPEND_KEYS).bind(rows).bind(parameters.expired_before()).execute(transaction).await?;
    }
    for (group, appended) in groups.iter().zip(of_groups) {
        group.fill_outcomes(requests, appended.as_ref(), outcomes);
    }
    Ok(())
}

fn encode(rows: &impl Serialize) -> String {
    serde_json::to_string(rows).unwrap_or_else(|_| unreachable!("strings and numbers can be JSON"))
}

/// Returns the keys of all exchanges that have one.
fn request_keys<'r>(requests: &'r [AppendRequest], groups: &[SessionGroup<'r>]) -> Vec<RequestKey<'r>> {
    let of_group = |group: &SessionGroup<'r>| {
        let (tenant, session) = (group.tenant, group.session);
        let keys = group.exchanges(requests).filter_map(|(request, exchange, _)| {
            exchange.key.as_ref().map(|key| RequestKey { request, tenant, session, key: &key.key })
        });
        keys.collect::<Vec<_>>()
    };
    groups.iter().flat_map(of_group).collect()
}

/// Inserts the messages of a group that are not part of its batch.
async fn insert_separate_messages(
    transaction: &mut SqliteConnection,
    requests: &[AppendRequest],
    group: &SessionGroup<'_>,
    appended: &PersistedExchange,
) -> Result<(), StoreError> {
    let separate = messages(requests, group).filter(|message| !message.is_batched);
    for PlacedMessage { position, message, tokens, created_at, .. } in separate {
        let (seq, created_at) = (appended.first_seq + position, created_at.unwrap_or(appended.created_at));
        let (tool_call_ids, tool_result_of) = tool_columns(message);
        let insert = sqlx::query(INSERT_MESSAGE).bind(group.tenant).bind(group.session).bind(seq);
        let insert = insert.bind(message.role().as_str()).bind(tool_call_ids).bind(tool_result_of);
        let insert = insert.bind(tokens).bind(message.json()).bind(micros(created_at));
        insert.execute(&mut *transaction).await?;
    }
    Ok(())
}

/// Fills in the outcomes of exchanges whose key is known. Returns `true` if there are any.
async fn replay_known_keys(
    transaction: &mut SqliteConnection,
    keys: &str,
    requests: &[AppendRequest],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<bool, StoreError> {
    let known = sqlx::query(SELECT_IDEMPOTENCY_KEYS).bind(keys).fetch_all(transaction).await?;
    for row in &known {
        let index = usize::try_from(row.field::<i64>("request")?).unwrap_or(usize::MAX);
        let request = requests.get(index).zip(outcomes.get_mut(index));
        let Some((AppendRequest { key: Some(key), exchange, .. }, outcome)) = request else { continue };
        *outcome = Some(if key.is_of(&row.field::<Vec<u8>>("fingerprint")?) {
            AppendOutcome::Appended(PersistedExchange {
                first_seq: row.field("first_seq")?,
                last_seq: row.field("last_seq")?,
                created_at: match exchange.created_at {
                    Some(given) => given,
                    None => row.time("created_at")?,
                },
                incarnation: None,
                user_id: user_from_column(row.field("user_id")?)?,
                replayed: true,
            })
        } else {
            AppendOutcome::KeyReused
        });
    }
    Ok(!known.is_empty())
}
