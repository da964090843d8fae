//! Appending exchanges on Postgres.
//!
//! The function `insert_exchanges` (migration 25) appends a batch in one statement, which is one round trip and one commit.
//! It locks the rows of the sessions, which keeps `seq` free of gaps and duplicates.

use super::{Connections, LOCK_NOT_AVAILABLE};
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{SessionId, TenantId};
use crate::storage::append::{self, AppendBatcher, SessionGroup, group};
use crate::storage::batch::{BatchResults, Batcher};
use crate::storage::index_hints::{BatchTerms, IndexHints};
use crate::storage::pool::retry_on_disconnect;
use crate::storage::rows::tool_columns;
use crate::storage::values::{to_i64, user_from_column};
use crate::storage::{AppendOutcome, AppendRequest, StoreError};
use sqlx::Row as _;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use sqlx::{Connection as _, PgConnection, PgExecutor};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use time::OffsetDateTime;

const INSERT_EXCHANGES: &str = "\
    SELECT place, fingerprint, first_seq, last_seq, created_at, incarnation, user_id, is_indexed
    FROM insert_exchanges($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
        $22, $23, $24, $25, $26, $27, $28)";

/// Longest wait for the lock of a session. A batch that waits longer is rolled back, and its exchanges are appended one by
/// one, so that a long transaction on one session, such as its erasure, does not hold up the others.
const LOCK_TIMEOUT: &str = "20ms";
/// Longest wait of an exchange by itself until its session counts as locked.
const SHORT_LOCK_TIMEOUT: &str = "5ms";
/// Waits until the statement timeout.
const NO_LOCK_TIMEOUT: &str = "0";
/// The parts that appending a single exchange needs.
#[derive(Clone)]
struct Single {
    pool: Connections,
    hints: Arc<IndexHints>,
    locked: LockedSessions,
}

/// The sessions whose lock exchanges wait for. Further exchanges of them would only delay the batches of other sessions.
#[derive(Clone, Debug, Default)]
pub(in crate::storage) struct LockedSessions(Arc<Mutex<HashSet<(TenantId, SessionId)>>>);

impl LockedSessions {
    pub(in crate::storage) fn contain(&self, request: &AppendRequest) -> bool {
        let locked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        !locked.is_empty() && locked.contains(&(request.tenant.clone(), request.session.clone()))
    }

    fn set(&self, request: &AppendRequest, is_locked: bool) {
        let session = (request.tenant.clone(), request.session.clone());
        let mut locked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = if is_locked { locked.insert(session) } else { locked.remove(&session) };
    }
}

/// Returns the batcher of a pool.
pub(super) fn batcher(pool: &Connections, hints: &Arc<IndexHints>, locked: &LockedSessions) -> AppendBatcher {
    let (batch_pool, batch_hints) = (pool.keeping(), Arc::clone(hints));
    let single = Single { pool: pool.clone(), hints: Arc::clone(hints), locked: locked.clone() };
    Batcher::new(
        append::MAX_BATCH,
        move |requests| append_batch(batch_pool.clone(), Arc::clone(&batch_hints), requests),
        move |request| append_alone(single.clone(), request),
    )
}

async fn append_alone(single: Single, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
    let is_locked = single.locked.contain(&request);
    let lock_timeout = if is_locked { NO_LOCK_TIMEOUT } else { SHORT_LOCK_TIMEOUT };
    match append_one(&single, lock_timeout, &request).await {
        // The transaction was rolled back. Only exchanges of the locked session wait for their turn.
        Err(StoreError::Statement(sqlx::Error::Database(error)))
            if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) =>
        {
            single.locked.set(&request, true);
            let appended = append_one(&single, NO_LOCK_TIMEOUT, &request).await;
            single.locked.set(&request, false);
            appended
        }
        other => other,
    }
}

async fn append_one(
    single: &Single,
    lock_timeout: &str,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let once = async || {
        let mut outcomes = [None];
        let requests = std::slice::from_ref(request);
        if append::expects_history(request) {
            append_expected(&single.pool, &single.hints, lock_timeout, requests, &mut outcomes).await?;
        } else {
            append(&single.pool, &single.hints, lock_timeout, requests, &mut outcomes).await?;
        }
        let [outcome] = outcomes;
        outcome.ok_or(StoreError::BatchFailed)
    };
    let once = async || match once().await {
        // A concurrent request with the same key was faster: the second attempt finds its result.
        Err(StoreError::Statement(sqlx::Error::Database(error)))
            if error.is_unique_violation() && error.table() == Some("idempotency_keys") =>
        {
            once().await
        }
        other => other,
    };
    // With a key a retry is safe, even if the lost connection had committed.
    if request.key.is_some() { retry_on_disconnect(once).await } else { once().await }
}

async fn append_batch(
    pool: Connections,
    hints: Arc<IndexHints>,
    requests: Vec<AppendRequest>,
) -> BatchResults<AppendRequest, AppendOutcome> {
    let mut outcomes: Vec<_> = requests.iter().map(|_| None).collect();
    let error = append(&pool, &hints, LOCK_TIMEOUT, &requests, &mut outcomes).await.err();
    let results = requests.into_iter().zip(outcomes).map(|(request, outcome)| {
        let result = match (outcome, &error) {
            (Some(outcome), _) => Some(Ok(outcome)),
            // The request has already waited for a connection as long as permitted.
            (None, Some(error @ StoreError::Unavailable(sqlx::Error::PoolTimedOut))) => {
                Some(Err(append::batch_unavailable(error)))
            }
            // The transaction may have committed, and without a key the exchange could be appended twice.
            (None, Some(error)) if !is_rolled_back(error) && request.key.is_none() => {
                Some(Err(append::batch_unavailable(error)))
            }
            (None, _) => None,
        };
        (request, result)
    });
    results.collect()
}

/// Returns `true` if the server certainly rolled the transaction back, so that its exchanges can be appended again. After a
/// lost connection, the transaction may have committed. So it may after a fatal error or one of class 08: with these, a
/// pooler reports that it has lost the server.
fn is_rolled_back(error: &StoreError) -> bool {
    let (StoreError::Statement(error) | StoreError::Unavailable(error) | StoreError::SchemaIncomplete(error)) =
        error
    else {
        return false;
    };
    let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    error.is_some_and(|error| error.severity() == PgSeverity::Error && !error.code().starts_with("08"))
}

/// Appends the exchanges and fills in their outcomes. After an error, exchanges without an outcome were not appended, except
/// if the connection failed.
async fn append(
    pool: &Connections,
    hints: &IndexHints,
    lock_timeout: &str,
    requests: &[AppendRequest],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<(), StoreError> {
    loop {
        let open = requests.iter().zip(outcomes.iter()).enumerate();
        let open =
            open.filter_map(|(index, (request, outcome))| outcome.is_none().then_some((index, request)));
        let groups = group(open);
        if groups.is_empty() {
            return Ok(());
        }
        append_groups(pool, hints, lock_timeout, requests, &groups, outcomes).await?;
    }
}

/// Appends one exchange in a transaction that is rolled back if the exchange does not follow the message that it expects.
async fn append_expected(
    pool: &Connections,
    hints: &IndexHints,
    lock_timeout: &str,
    requests: &[AppendRequest],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<(), StoreError> {
    let groups = group(requests.iter().enumerate());
    let appended = pool.with_connection(async |connection| {
        let mut transaction = connection.begin_with("BEGIN").await?;
        append_groups(&mut *transaction, hints, lock_timeout, requests, &groups, outcomes).await?;
        let mut checked = requests.iter().zip(outcomes.iter_mut());
        if checked.any(|(request, outcome)| append::reject_unexpected(request, outcome)) {
            transaction.rollback().await
        } else {
            transaction.commit().await
        }
    });
    Ok(appended.await?)
}

/// Appends an exchange in a transaction that has created or locked the session.
pub(in crate::storage) async fn append_in_transaction(
    connection: &mut PgConnection,
    request: &AppendRequest,
) -> Result<AppendOutcome, StoreError> {
    let (requests, mut outcomes) = (std::slice::from_ref(request), [None]);
    let groups = group(requests.iter().enumerate());
    append_groups(connection, &IndexHints::default(), NO_LOCK_TIMEOUT, requests, &groups, &mut outcomes)
        .await?;
    let [outcome] = outcomes;
    outcome.ok_or(StoreError::BatchFailed)
}

/// The arguments of `insert_exchanges` that have a value per tenant, group, message, key or span.
#[derive(Default)]
struct Arguments<'r> {
    tenants: Vec<&'r str>,
    tenant_groups: Vec<i64>,
    tenant_messages: Vec<i64>,
    tenant_keys: Vec<i64>,
    sessions: Vec<&'r str>,
    users: Vec<Option<&'r str>>,
    default_users: Vec<Option<&'r str>>,
    metadata: Vec<Option<&'r str>>,
    counts: Vec<i64>,
    tokens: Vec<i64>,
    bytes: Vec<i64>,
    message_groups: Vec<i64>,
    message_offsets: Vec<i64>,
    message_roles: Vec<&'static str>,
    message_call_ids: Vec<Option<String>>,
    message_result_of: Vec<Option<String>>,
    message_tokens: Vec<i64>,
    message_json: Vec<&'r str>,
    /// Empty if no client gave a time.
    message_times: Vec<Option<OffsetDateTime>>,
    terms: Option<BatchTerms>,
    key_groups: Vec<i64>,
    key_sessions: Vec<&'r str>,
    keys: Vec<&'r str>,
    key_fingerprints: Vec<&'r [u8]>,
    key_firsts: Vec<i64>,
    key_lasts: Vec<i64>,
    /// Indexes of the requests with these keys.
    key_requests: Vec<usize>,
}

impl<'r> Arguments<'r> {
    fn new(requests: &'r [AppendRequest], groups: &[SessionGroup<'r>]) -> Self {
        let mut arguments = Self::default();
        for (place, group) in (1..).zip(groups) {
            if arguments.tenants.last() != Some(&group.tenant.as_str()) {
                arguments.end_tenant();
                arguments.tenants.push(group.tenant.as_str());
            }
            arguments.sessions.push(group.session);
            arguments.users.push(group.user(requests));
            arguments.default_users.push(group.default_user(requests));
            arguments.metadata.push(group.metadata(requests));
            arguments.counts.push(group.messages);
            arguments.tokens.push(group.tokens);
            arguments.bytes.push(group.bytes);
            for (index, request, offset) in group.exchanges(requests) {
                arguments.push_exchange(place, index, request, offset);
            }
        }
        arguments.end_tenant();
        arguments.terms = BatchTerms::new(requests, groups);
        arguments
    }

    fn push_exchange(&mut self, group: i64, index: usize, request: &'r AppendRequest, offset: i64) {
        if request.exchange.has_given_times() {
            self.message_times.resize(self.message_json.len(), None);
            self.message_times.extend(request.exchange.given_times());
        }
        for (position, (message, tokens)) in (offset + 1..).zip(&request.exchange.messages) {
            let (call_ids, result_of) = tool_columns(message);
            self.message_groups.push(group);
            self.message_offsets.push(position);
            self.message_roles.push(message.role().as_str());
            self.message_call_ids.push(call_ids);
            self.message_result_of.push(result_of);
            self.message_tokens.push(*tokens);
            self.message_json.push(message.json());
        }
        if let Some(key) = &request.key {
            self.key_groups.push(group);
            self.key_sessions.push(request.session.as_str());
            self.keys.push(&key.key);
            self.key_fingerprints.push(&key.fingerprint);
            self.key_firsts.push(offset + 1);
            self.key_lasts.push(offset + to_i64(request.exchange.messages.len()));
            self.key_requests.push(index);
        }
    }

    fn end_tenant(&mut self) {
        if !self.tenants.is_empty() {
            self.tenant_groups.push(to_i64(self.sessions.len()));
            self.tenant_messages.push(to_i64(self.message_json.len()));
            self.tenant_keys.push(to_i64(self.keys.len()));
        }
    }
}

/// Appends groups of exchanges in one transaction. If an idempotency key is known, fills in the outcomes of the known
/// exchanges only.
async fn append_groups(
    executor: impl PgExecutor<'_>,
    hints: &IndexHints,
    lock_timeout: &str,
    requests: &[AppendRequest],
    groups: &[SessionGroup<'_>],
    outcomes: &mut [Option<AppendOutcome>],
) -> Result<(), sqlx::Error> {
    let arguments = Arguments::new(requests, groups);
    let terms = arguments.terms.as_ref();
    let query = sqlx::query(INSERT_EXCHANGES)
        .bind(&arguments.tenants)
        .bind(&arguments.tenant_groups)
        .bind(&arguments.tenant_messages)
        .bind(&arguments.tenant_keys)
        .bind(&arguments.sessions)
        .bind(&arguments.users)
        .bind(&arguments.metadata)
        .bind(&arguments.counts)
        .bind(&arguments.tokens)
        .bind(&arguments.default_users)
        .bind(&arguments.bytes)
        .bind(&arguments.message_groups)
        .bind(&arguments.message_offsets)
        .bind(&arguments.message_roles)
        .bind(&arguments.message_call_ids)
        .bind(&arguments.message_result_of)
        .bind(&arguments.message_tokens)
        .bind(&arguments.message_json)
        .bind(&arguments.message_times)
        .bind(terms.map_or(&[][..], |terms| &terms.of_groups))
        .bind(&arguments.key_groups)
        .bind(&arguments.key_sessions)
        .bind(&arguments.keys)
        .bind(&arguments.key_fingerprints)
        .bind(&arguments.key_firsts)
        .bind(&arguments.key_lasts)
        .bind(terms.map(|terms| terms.analyzer.version()))
        .bind(lock_timeout);
    let rows = query.fetch_all(executor).await?;
    let mut appended = vec![None; groups.len()];
    let mut found_known_key = false;
    for row in &rows {
        let place =
            usize::try_from(row.try_get::<i64, _>("place")?).ok().and_then(|place| place.checked_sub(1));
        let place = place.ok_or(sqlx::Error::RowNotFound)?;
        let exchange = PersistedExchange {
            first_seq: row.try_get("first_seq")?,
            last_seq: row.try_get("last_seq")?,
            created_at: row.try_get("created_at")?,
            incarnation: row.try_get("incarnation")?,
            user_id: user_from_column(row.try_get("user_id")?)
                .map_err(|error| sqlx::Error::Decode(error.into()))?,
            replayed: false,
        };
        let fingerprint: Option<Vec<u8>> = row.try_get("fingerprint")?;
        let is_indexed: bool = row.try_get("is_indexed")?;
        if let Some(fingerprint) = fingerprint {
            found_known_key = true;
            let index = arguments.key_requests.get(place).copied().unwrap_or(usize::MAX);
            let request = requests.get(index);
            let key = request.and_then(|request| request.key.as_ref());
            let outcome = if key.is_some_and(|key| key.is_of(&fingerprint)) {
                let given = request.and_then(|request| request.exchange.time());
                let created_at = given.unwrap_or(exchange.created_at);
                AppendOutcome::Appended(PersistedExchange { replayed: true, created_at, ..exchange })
            } else {
                AppendOutcome::KeyReused
            };
            if let Some(slot) = outcomes.get_mut(index) {
                *slot = Some(outcome);
            }
        } else if let Some((slot, group)) = appended.get_mut(place).zip(groups.get(place)) {
            *slot = Some(exchange);
            if !is_indexed {
                hints.note_unindexed(group.tenant);
            }
        }
    }
    if found_known_key {
        return Ok(());
    }
    if terms.is_some() {
        hints.note_batch(groups);
    }
    for (group, appended) in groups.iter().zip(appended) {
        group.fill_outcomes(requests, appended.as_ref(), outcomes);
    }
    Ok(())
}
