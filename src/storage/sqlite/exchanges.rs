//! Appending exchanges on SQLite.
//!
//! A thread of its own runs the transaction of a batch ([`super::write_thread`]). If it fails, as when another process has locked the
//! file, a connection of the pool runs the same statements.

use super::checkpoints::Checkpoints;
use super::statements::{Columns, Statements, Value};
use super::write_thread::WriteThread;
use super::{micros, now};
use crate::capacity::Resource;
use crate::domain::exchange::{IdempotencyKey, PersistedExchange};
use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::append::{self, AppendBatcher, SessionGroup, group};
use crate::storage::batch::Batcher;
use crate::storage::index_hints::{BatchTerms, IndexHints};
use crate::storage::rows::tool_columns;
use crate::storage::values::{DbTime, to_i64, user_from_column};
use crate::storage::{AppendOutcome, AppendRequest, StoreError};
use futures_util::FutureExt as _;
use rusqlite::Transaction;
use sqlx::{Connection as _, SqliteConnection, SqlitePool};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// The columns of a session that [`StoredSession`] has.
macro_rules! session_columns {
    () => {
        "user_id, last_seq, updated_at, activity_hour <> updated_at / 3600000000 AS is_moved, incarnation,
        indexed_seq IS NULL AS is_indexed"
    };
}

/// The condition that the index is complete up to the new messages, and that `?9` is its analyzer. Then, the transaction indexes them.
macro_rules! is_indexed {
    () => {
        "EXISTS (SELECT 1 FROM search_analyzer WHERE version = ?9 AND rebuild_tenant IS NULL)"
    };
}

/// Adds the exchanges of a [`SessionGroup`] to its session, unless it belongs to another user than `?3`. Columns of indexes that seldom
/// change are left to other statements: an update that names them replaces the entries of the indexes even if the values stay the same.
const UPDATE_SESSION: &str = concat!(
    "UPDATE sessions SET last_seq = last_seq + ?4, tokens = tokens + ?5, stored_bytes = stored_bytes + ?6,
        metadata = coalesce(?7, metadata), created_at = iif(last_seq = 0, ?8, created_at), updated_at = max(?8, updated_at),
        indexed_seq = coalesce(indexed_seq, iif(",
    is_indexed!(),
    ", NULL, last_seq))
    WHERE tenant_id = ?1 AND session_id = ?2 AND user_id IN ('', coalesce(?3, user_id))
    RETURNING ",
    session_columns!()
);

/// Creates a session with the exchanges of a [`SessionGroup`], unless it exists.
const INSERT_SESSION: &str = concat!(
    "INSERT INTO sessions (tenant_id, session_id, user_id, last_seq, tokens, stored_bytes, metadata, created_at, updated_at,
        activity_hour, incarnation, indexed_seq)
    VALUES (?1, ?2, coalesce(?3, ''), ?4, ?5, ?6, coalesce(?7, '{}'), ?8, ?8, ?8 / 3600000000, randomblob(16), iif(",
    is_indexed!(),
    ", NULL, 0))
    ON CONFLICT DO NOTHING
    RETURNING ",
    session_columns!()
);

const UPDATE_HOUR: &str = "\
    UPDATE sessions SET activity_hour = updated_at / 3600000000 WHERE tenant_id = ?1 AND session_id = ?2";

/// Gives a session its user and another incarnation, so that copies of the session without the user become invalid. A trigger may change
/// other columns.
const SET_USER: &str = "\
    UPDATE sessions SET user_id = ?3, incarnation = randomblob(16) WHERE tenant_id = ?1 AND session_id = ?2";

const SELECT_SESSION: &str =
    concat!("SELECT ", session_columns!(), " FROM sessions WHERE tenant_id = ?1 AND session_id = ?2");

const INSERT_MESSAGE: &str = "\
    INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";

const INSERT_TERMS: &str = "\
    INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, entries) VALUES (?1, ?2, ?3, ?4, ?5)";

const SELECT_KEY: &str = "\
    SELECT k.fingerprint, k.first_seq, k.last_seq, k.created_at, iif(k.has_user, s.user_id, '') AS user_id
    FROM idempotency_keys AS k CROSS JOIN sessions AS s
        ON s.tenant_id = k.tenant_id AND s.session_id = k.session_id AND s.last_seq > 0
    WHERE k.tenant_id = ?1 AND k.session_id = ?2 AND k.key = ?3";

/// Deletes the expired keys of a session, so that these need no background job.
const DELETE_EXPIRED_KEYS: &str =
    "DELETE FROM idempotency_keys WHERE tenant_id = ?1 AND session_id = ?2 AND created_at < ?3";

const INSERT_KEY: &str = "\
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at, has_user)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";

/// Shortest time that a key is kept.
const KEY_RETENTION: time::Duration = time::Duration::hours(24);

/// Bytes of messages that a round appends. The terms of a round are one row of the index for each tenant, which a search reads and the
/// index worker decodes as a whole.
const MAX_ROUND_BYTES: usize = 1024 * 1024;

/// The connections that append exchanges.
#[derive(Clone)]
pub(super) struct Writers {
    /// The connection of all transactions that write. They queue for it.
    pub(super) pool: SqlitePool,
    /// Writes while the connection of the pool is held, so it never waits for another transaction.
    pub(super) thread: Arc<WriteThread>,
    /// Permits for exchanges that are no part of a batch.
    pub(super) shares: Arc<Resource>,
}

/// Returns the batcher of the connections.
pub(super) fn batcher(
    writers: Writers,
    checkpoints: &Arc<Checkpoints>,
    hints: &Arc<IndexHints>,
    acquire_timeout: Duration,
) -> AppendBatcher {
    let (batch_writers, single_writers) = (writers.clone(), writers);
    let checkpoints = Arc::clone(checkpoints);
    let (batch_hints, single_hints) = (Arc::clone(hints), Arc::clone(hints));
    let append_batch = move |requests: Vec<AppendRequest>| {
        let (writers, checkpoints) = (batch_writers.clone(), Arc::clone(&checkpoints));
        let hints = Arc::clone(&batch_hints);
        async move {
            let requests = Arc::new(requests);
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
            Arc::unwrap_or_clone(requests).into_iter().zip(results).collect()
        }
    };
    let append_alone = move |request: AppendRequest| {
        let (writers, hints) = (single_writers.clone(), Arc::clone(&single_hints));
        async move {
            let permit = writers.shares.acquire(1, Some(acquire_timeout)).await;
            let _permit = permit.map_err(|_| sqlx::Error::PoolTimedOut)?;
            append_one(&writers, &hints, request).await
        }
    };
    Batcher::new(append::MAX_BATCH, append_batch, append_alone)
}

async fn append_one(
    writers: &Writers,
    hints: &IndexHints,
    request: AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let outcomes = append_all(writers, hints, &Arc::new(vec![request])).await?;
    outcomes.into_iter().next().flatten().ok_or(StoreError::BatchFailed)
}

/// Appends the exchanges in one transaction, which is one write to the disk. Each of them has an outcome then.
pub(super) async fn append_all(
    writers: &Writers,
    hints: &IndexHints,
    requests: &Arc<Vec<AppendRequest>>,
) -> Result<Outcomes, StoreError> {
    let mut connection = writers.pool.acquire().await?;
    let of_thread = Arc::clone(requests);
    let write = move |mut transaction: &Transaction<'_>| {
        let appended = append_requests(&mut transaction, &of_thread).now_or_never();
        let mut appended = appended.unwrap_or(Err(StoreError::BatchFailed.into()))?;
        let is_valid = appended.follows_expected(&of_thread);
        Ok((appended, is_valid))
    };
    let appended = match writers.thread.write(write).await {
        Ok(appended) => appended,
        Err(error) => {
            tracing::debug!(%error, "failed to append a batch of exchanges; the connection of the pool appends it");
            let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
            let mut appended = append_requests(&mut *transaction, requests).await?;
            if appended.follows_expected(requests) {
                transaction.commit().await?;
            } else {
                transaction.rollback().await?;
            }
            appended
        }
    };
    for (tenant, messages) in &appended.indexed {
        hints.note_row(tenant, *messages);
    }
    Ok(appended.outcomes)
}

/// Appends an exchange in a transaction that has created the session.
pub(in crate::storage) async fn append_in_transaction(
    connection: &mut SqliteConnection,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let appended = append_requests(connection, std::slice::from_ref(request)).await?;
    appended.outcomes.into_iter().next().flatten().ok_or(StoreError::BatchFailed)
}

/// The outcome of each exchange of a batch.
type Outcomes = Vec<Option<AppendOutcome>>;

/// Exchanges of a transaction.
#[derive(Default)]
struct Appended {
    outcomes: Outcomes,
    /// The rows with terms that were added: the tenant and the number of messages.
    indexed: Vec<(TenantId, i64)>,
}

impl Appended {
    /// Returns `true` if all exchanges follow the messages that they expect. Otherwise, the transaction must be rolled back.
    fn follows_expected(&mut self, requests: &[AppendRequest]) -> bool {
        let mut checked = requests.iter().zip(&mut self.outcomes);
        let follows = !checked.any(|(request, outcome)| append::reject_unexpected(request, outcome));
        if !follows {
            self.indexed.clear();
        }
        follows
    }
}

/// Appends exchanges. Each of them has an outcome then.
async fn append_requests<S: Statements>(
    statements: &mut S,
    requests: &[AppendRequest],
) -> Result<Appended, S::Error> {
    let now = now();
    let mut appended = Appended { outcomes: requests.iter().map(|_| None).collect(), ..Appended::default() };
    loop {
        for (request, outcome) in requests.iter().zip(&mut appended.outcomes) {
            if let (None, Some(key)) = (&outcome, &request.key) {
                *outcome = known_outcome(statements, request, key).await?;
            }
        }
        let open = requests.iter().zip(&appended.outcomes).enumerate();
        let open =
            open.filter_map(|(index, (request, outcome))| outcome.is_none().then_some((index, request)));
        let mut bytes = 0;
        let groups = group(open.take_while(|(_, request)| {
            let before = bytes;
            bytes += append::message_bytes(request);
            before < MAX_ROUND_BYTES
        }));
        if groups.is_empty() {
            return Ok(appended);
        }
        append_groups(statements, now, requests, &groups, &mut appended).await?;
    }
}

/// Returns the outcome of an exchange whose idempotency key is known.
async fn known_outcome<S: Statements>(
    statements: &mut S,
    request: &AppendRequest,
    key: &IdempotencyKey,
) -> Result<Option<AppendOutcome>, S::Error> {
    let decode = |row: &dyn Columns| {
        let stored = PersistedExchange {
            first_seq: row.integer("first_seq")?,
            last_seq: row.integer("last_seq")?,
            created_at: DbTime::from_micros(row.integer("created_at")?)?.0,
            incarnation: None,
            user_id: user_from_column(row.text("user_id")?)?,
            replayed: true,
        };
        Ok((row.bytes("fingerprint")?, stored))
    };
    let values = [request.tenant.as_str().into(), request.session.as_str().into(), key.key.as_str().into()];
    let known = statements.read(SELECT_KEY, &values, decode).await?;
    Ok(known.map(|(fingerprint, stored)| {
        if key.is_of(&fingerprint) {
            let created_at = request.exchange.time().unwrap_or(stored.created_at);
            AppendOutcome::Appended(PersistedExchange { created_at, ..stored })
        } else {
            AppendOutcome::KeyReused
        }
    }))
}

/// A session after exchanges were added to it.
struct StoredSession {
    user_id: String,
    last_seq: i64,
    updated_at: i64,
    /// The hour of the last activity has changed.
    is_moved: bool,
    incarnation: Uuid,
    /// The index has all earlier messages, so the transaction adds these.
    is_indexed: bool,
}

impl StoredSession {
    fn decode(row: &dyn Columns) -> Result<Self, StoreError> {
        let incarnation = row.bytes("incarnation")?;
        Ok(Self {
            user_id: row.text("user_id")?,
            last_seq: row.integer("last_seq")?,
            updated_at: row.integer("updated_at")?,
            is_moved: row.integer("is_moved")? != 0,
            incarnation: Uuid::from_slice(&incarnation).map_err(StoreError::corrupt("an incarnation"))?,
            is_indexed: row.integer("is_indexed")? != 0,
        })
    }

    /// Returns the `seq` of the first message of the group that was added.
    fn first_seq(&self, group: &SessionGroup<'_>) -> i64 {
        self.last_seq - group.messages + 1
    }

    fn persisted(self, group: &SessionGroup<'_>) -> Result<PersistedExchange, StoreError> {
        Ok(PersistedExchange {
            first_seq: self.first_seq(group),
            last_seq: self.last_seq,
            created_at: DbTime::from_micros(self.updated_at)?.0,
            incarnation: Some(self.incarnation),
            user_id: user_from_column(self.user_id)?,
            replayed: false,
        })
    }
}

/// Adds the exchanges of a group to their session, without their messages. Returns `None` if the session belongs to another user.
async fn append_to_session<S: Statements>(
    statements: &mut S,
    now: OffsetDateTime,
    analyzer: Option<&str>,
    requests: &[AppendRequest],
    group: &SessionGroup<'_>,
) -> Result<Option<StoredSession>, S::Error> {
    let (tenant, id): (Value<'_>, Value<'_>) = (group.tenant.as_str().into(), group.session.into());
    let user = group.user(requests);
    let new_user = user.or_else(|| group.default_user(requests));
    let mut values = [
        tenant,
        id,
        user.into(),
        group.messages.into(),
        group.tokens.into(),
        group.bytes.into(),
        group.metadata(requests).into(),
        micros(now).into(),
        analyzer.into(),
    ];
    let Some(session) = statements.read(UPDATE_SESSION, &values, StoredSession::decode).await? else {
        values[2] = new_user.into();
        return statements.read(INSERT_SESSION, &values, StoredSession::decode).await;
    };
    if session.is_moved {
        statements.execute(UPDATE_HOUR, &[tenant, id]).await?;
    }
    if let Some(user) = new_user.filter(|_| session.user_id.is_empty()) {
        statements.execute(SET_USER, &[tenant, id, user.into()]).await?;
        return statements.read(SELECT_SESSION, &[tenant, id], StoredSession::decode).await;
    }
    Ok(Some(session))
}

async fn insert_messages<S: Statements>(
    statements: &mut S,
    requests: &[AppendRequest],
    group: &SessionGroup<'_>,
    session: &StoredSession,
) -> Result<(), S::Error> {
    for (_, AppendRequest { exchange, .. }, offset) in group.exchanges(requests) {
        let mut times = exchange.given_times();
        for (seq, (message, tokens)) in (session.first_seq(group) + offset..).zip(&exchange.messages) {
            let created_at = times.next().flatten().map_or(session.updated_at, micros);
            let (tool_call_ids, tool_result_of) = tool_columns(message);
            let values = [
                group.tenant.as_str().into(),
                group.session.into(),
                seq.into(),
                message.role().as_str().into(),
                tool_call_ids.as_deref().into(),
                tool_result_of.as_deref().into(),
                (*tokens).into(),
                message.json().into(),
                created_at.into(),
            ];
            statements.execute(INSERT_MESSAGE, &values).await?;
        }
    }
    Ok(())
}

/// Inserts the idempotency keys of a group, and deletes expired ones of its session.
async fn insert_keys<S: Statements>(
    statements: &mut S,
    now: OffsetDateTime,
    requests: &[AppendRequest],
    group: &SessionGroup<'_>,
    session: &StoredSession,
) -> Result<(), S::Error> {
    let (tenant, id): (Value<'_>, Value<'_>) = (group.tenant.as_str().into(), group.session.into());
    let has_user = i64::from(!session.user_id.is_empty());
    let exchanges = group.exchanges(requests);
    let keyed = exchanges.filter_map(|(_, request, offset)| Some((request, request.key.as_ref()?, offset)));
    let keyed: Vec<_> = keyed.collect();
    if !keyed.is_empty() {
        let expired_before = micros(now - KEY_RETENTION);
        statements.execute(DELETE_EXPIRED_KEYS, &[tenant, id, expired_before.into()]).await?;
    }
    for (AppendRequest { exchange, .. }, IdempotencyKey { key, fingerprint }, offset) in keyed {
        let first_seq = session.first_seq(group) + offset;
        let last_seq = first_seq + to_i64(exchange.messages.len()) - 1;
        let values = [
            tenant,
            id,
            key.as_str().into(),
            fingerprint.as_slice().into(),
            first_seq.into(),
            last_seq.into(),
            session.updated_at.into(),
            has_user.into(),
        ];
        statements.execute(INSERT_KEY, &values).await?;
    }
    Ok(())
}

/// Appends groups of exchanges with the terms of their messages.
async fn append_groups<S: Statements>(
    statements: &mut S,
    now: OffsetDateTime,
    requests: &[AppendRequest],
    groups: &[SessionGroup<'_>],
    appended: &mut Appended,
) -> Result<(), S::Error> {
    let (analyzer, terms) = match BatchTerms::new(requests, groups) {
        Some(BatchTerms { analyzer, of_groups }) => (Some(analyzer), of_groups),
        None => (None, Vec::new()),
    };
    let version = analyzer.map(Analyzer::version);
    let mut terms = terms.iter();
    let mut recent: BTreeMap<&TenantId, RecentRow<'_>> = BTreeMap::new();
    let mut sessions = Vec::with_capacity(groups.len());
    for group in groups {
        let terms = terms.next();
        let session = append_to_session(statements, now, version.as_deref(), requests, group).await?;
        if let Some(session) = &session {
            insert_messages(statements, requests, group, session).await?;
            insert_keys(statements, now, requests, group, session).await?;
            if let Some(terms) = terms.filter(|_| session.is_indexed) {
                recent.entry(group.tenant).or_default().add(group, session, terms);
            }
        }
        sessions.push(session);
    }
    for (tenant, RecentRow { messages, bytes, entries }) in recent {
        let entries = serde_json::to_string(&entries)
            .unwrap_or_else(|_| unreachable!("strings and numbers can be JSON"));
        let values = [
            tenant.as_str().into(),
            version.as_deref().into(),
            messages.into(),
            bytes.into(),
            entries.as_str().into(),
        ];
        statements.execute(INSERT_TERMS, &values).await?;
        appended.indexed.push((tenant.clone(), messages));
    }
    for (group, session) in groups.iter().zip(sessions) {
        let exchange = session.map(|session| session.persisted(group)).transpose()?;
        group.fill_outcomes(requests, exchange.as_ref(), &mut appended.outcomes);
    }
    Ok(())
}

/// The terms of messages of a tenant, as a row of `search_recent`.
#[derive(Default)]
struct RecentRow<'r> {
    messages: i64,
    /// The size of the terms.
    bytes: i64,
    /// Session, user, `last_seq`, time and terms of each group.
    entries: Vec<(&'r str, String, i64, i64, &'r str)>,
}

impl<'r> RecentRow<'r> {
    fn add(&mut self, group: &SessionGroup<'r>, session: &StoredSession, terms: &'r str) {
        self.messages += group.messages;
        self.bytes += to_i64(terms.len());
        let StoredSession { user_id, last_seq, updated_at, .. } = session;
        self.entries.push((group.session, user_id.clone(), *last_seq, *updated_at, terms));
    }
}
