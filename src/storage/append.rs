//! Appending exchanges. Those that arrive at the same time share a transaction, which is one write to the disk.
//!
//! A transaction locks the sessions and reads them, decides about each exchange in the order of arrival, and then writes all
//! sessions, messages, keys and terms of a tenant by one statement each.

use super::batch::{BatchResults, Batcher, places_by_tenant};
use super::messages::{NewMessage, insert_messages};
use super::pool::retry_on_disconnect;
use super::rows;
use super::search_terms::{IndexedMessage, Replaces, index_messages, search_add, set_language, terms};
use super::statement::{AnyRow, Database, DbRow as _, Purpose, Sql, Transaction};
use super::values::{DbTime, to_i64, user_from_column};
use super::{AppendOutcome, AppendRequest, ExchangeTerms, StoreError};
use crate::blocking;
use crate::domain::error_chain::ErrorChain;
use crate::domain::exchange::{Exchange, IdempotencyKey, MessageFacts, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::analyzer::{Analyzer, Language};
use crate::domain::search::index_terms;
use crate::domain::search::text::OwnResults;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use time::OffsetDateTime;
use uuid::Uuid;

/// Largest number of exchanges in a transaction.
const MAX_BATCH: usize = 128;
/// Attempts of an exchange by itself whose session others change at the same time.
const MAX_ATTEMPTS: usize = 10;
/// Larger exchanges are appended by themselves, so that the others do not wait for them.
const MAX_BATCHED_BYTES: usize = 128 * 1024;

type AppendBatcher = Batcher<AppendRequest, AppendOutcome>;

/// Appends exchanges, in batches or alone.
#[derive(Debug)]
pub(super) struct Appends {
    batcher: AppendBatcher,
    alone: Alone,
}

/// The sessions with exchanges that are appended by themselves, one after another. They may wait for the lock of the session, so that
/// further exchanges of it would only delay the batches of other sessions, and use up the connections.
#[derive(Clone, Debug, Default)]
struct Alone(Arc<Mutex<HashMap<(TenantId, SessionId), Turn>>>);

/// Held by the exchange of a session that runs; the others wait for it.
type Turn = Arc<tokio::sync::Mutex<()>>;

impl Alone {
    /// Returns the turn of the session of an exchange.
    fn turn(&self, request: &AppendRequest) -> Turn {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry((request.tenant.clone(), request.session.clone())).or_default())
    }

    /// Returns `true` if an exchange of the session is appended by itself now.
    fn contains(&self, request: &AppendRequest) -> bool {
        let turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = turns.get(&(request.tenant.clone(), request.session.clone()));
        turn.is_some_and(|turn| Arc::strong_count(turn) > 1)
    }
}

impl Appends {
    pub(super) fn new(database: &Arc<Database>) -> Self {
        let (of_batches, of_singles, alone) = (Arc::clone(database), Arc::clone(database), Alone::default());
        let waiting = alone.clone();
        let append_alone = move |request: AppendRequest| {
            let (database, turn) = (Arc::clone(&of_singles), waiting.turn(&request));
            async move {
                let _turn = turn.lock().await;
                append_alone(database, request).await
            }
        };
        let append_batch = move |requests| append_batch(Arc::clone(&of_batches), requests);
        Self { batcher: Batcher::new(MAX_BATCH, append_batch, append_alone), alone }
    }

    /// Appends an exchange, together with others unless it is large or its session may be locked.
    pub(super) async fn append(&self, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
        if self.alone.contains(&request) || request.exchange.bytes() > MAX_BATCHED_BYTES {
            self.batcher.run_alone(request).await
        } else {
            self.batcher.run(request).await
        }
    }
}

/// Adds the terms of its messages to a request, if search is enabled.
pub(super) async fn analyzed(analyzer: Option<Analyzer>, mut request: AppendRequest) -> AppendRequest {
    let Some(analyzer) = analyzer else { return request };
    let exchange = Arc::clone(&request.exchange);
    let analyze = move || {
        let messages = exchange.messages.iter().map(|(message, _)| message);
        let language = if analyzer.detects() { index_terms::language(messages) } else { None };
        let of_messages = terms_of(analyzer.of_session(language), &exchange);
        ExchangeTerms { analyzer, language, of_messages }
    };
    request.terms = Some(blocking::spawn_cpu_to_count(request.exchange.bytes(), analyze).await);
    request
}

fn terms_of(analyzer: Analyzer, exchange: &Exchange) -> Vec<Option<String>> {
    let mut own_results = OwnResults::default();
    exchange.messages.iter().map(|(message, _)| terms(analyzer, message, &mut own_results)).collect()
}

async fn append_batch(
    database: Arc<Database>,
    requests: Vec<AppendRequest>,
) -> BatchResults<AppendRequest, AppendOutcome> {
    let error = match append_all(&database, Purpose::Batch, &requests).await {
        Ok(outcomes) => return requests.into_iter().zip(outcomes).map(|(q, a)| (q, Some(Ok(a)))).collect(),
        Err(error) => error,
    };
    // After a lost connection, the transaction may have committed, and without a key the exchange could be appended twice.
    let may_repeat =
        |request: &AppendRequest| !error.has_waited() && (error.is_rolled_back() || request.key.is_some());
    let result = |request: AppendRequest| {
        let result = (!may_repeat(&request)).then(|| Err(batch_unavailable(&error)));
        (request, result)
    };
    requests.into_iter().map(result).collect()
}

/// Returns the error for each exchange of a batch that failed as a whole.
fn batch_unavailable(error: &StoreError) -> StoreError {
    StoreError::Unavailable(
        io::Error::other(format!("a batch of exchanges failed: {}", ErrorChain(error))).into(),
    )
}

async fn append_alone(database: Arc<Database>, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
    let once = async || {
        let outcomes = append_all(&database, Purpose::Exchange, std::slice::from_ref(&request)).await?;
        outcomes.into_iter().next().ok_or(StoreError::BatchFailed)
    };
    let once = async || {
        // A concurrent request has created, bound or erased the session, or has the same key, and was faster: the next attempt sees its
        // rows.
        for _ in 1..MAX_ATTEMPTS {
            match once().await {
                Err(StoreError::Statement(sqlx::Error::RowNotFound)) => {}
                Err(StoreError::Statement(sqlx::Error::Database(error))) if error.is_unique_violation() => {}
                other => return other,
            }
        }
        once().await
    };
    // With a key a retry is safe, even if the lost connection had committed.
    if request.key.is_some() { retry_on_disconnect(once).await } else { once().await }
}

async fn append_all(
    database: &Database,
    purpose: Purpose,
    requests: &[AppendRequest],
) -> Result<Vec<AppendOutcome>, StoreError> {
    let first_tenant = requests.iter().map(|request| &request.tenant).min();
    let append = async {
        let mut transaction = database.begin(first_tenant, purpose).await?;
        let outcomes = append_in_transaction(&mut transaction, requests).await?;
        transaction.commit().await?;
        Ok(outcomes)
    };
    database.within_limit(append).await
}

/// Appends exchanges and returns the outcome of each. The transaction has begun with the first tenant in the order of their names.
pub(super) async fn append_in_transaction(
    transaction: &mut Transaction,
    requests: &[AppendRequest],
) -> Result<Vec<AppendOutcome>, StoreError> {
    let by_tenant = places_by_tenant(requests.iter().map(|request| &request.tenant));
    let mut outcomes: Vec<Option<AppendOutcome>> = requests.iter().map(|_| None).collect();
    for (index, (tenant, places)) in by_tenant.into_iter().enumerate() {
        if index > 0 {
            transaction.set_tenant(tenant).await?;
        }
        let of_tenant: Vec<&AppendRequest> = places.iter().filter_map(|place| requests.get(*place)).collect();
        let appended = append_of_tenant(transaction, tenant, &of_tenant).await?;
        for (place, outcome) in places.into_iter().zip(appended) {
            if let Some(slot) = outcomes.get_mut(place) {
                *slot = Some(outcome);
            }
        }
    }
    outcomes.into_iter().collect::<Option<_>>().ok_or(StoreError::BatchFailed)
}

/// A session that exchanges are appended to.
#[derive(Default)]
struct AppendedSession<'r> {
    /// `None` if the session does not exist.
    incarnation: Option<Uuid>,
    user: Option<UserId>,
    last_seq: i64,
    language: Option<Language>,
    /// The language was recognised just now.
    has_new_language: bool,
    /// `last_seq` if an existing session gets its user or another language than English: its earlier messages are found by it from then on.
    reindexed_through: i64,
    metadata: Option<&'r str>,
    messages: i64,
    tokens: i64,
    bytes: i64,
}

/// A stored idempotency key.
struct KnownKey {
    fingerprint: Vec<u8>,
    exchange: PersistedExchange,
    has_user: bool,
}

/// An exchange with its place in its session.
struct Placed<'r> {
    request: &'r AppendRequest,
    first_seq: i64,
}

impl Placed<'_> {
    fn last_seq(&self) -> i64 {
        self.first_seq + to_i64(self.request.exchange.messages.len()) - 1
    }
}

/// The decision about an exchange.
enum Decision {
    Append {
        first_seq: i64,
    },
    Known(AppendOutcome),
    /// The key is that of an earlier exchange of the same transaction.
    SameAs(usize),
}

async fn append_of_tenant(
    transaction: &mut Transaction,
    tenant: &TenantId,
    requests: &[&AppendRequest],
) -> Result<Vec<AppendOutcome>, StoreError> {
    let mut sessions = lock_sessions(transaction, tenant, requests).await?;
    let keys = known_keys(transaction, tenant, requests, &sessions).await?;
    let mut new_keys: HashMap<(&SessionId, &str), usize> = HashMap::new();
    let mut decisions = Vec::with_capacity(requests.len());
    for (place, request) in requests.iter().enumerate() {
        let session = sessions.entry(&request.session).or_default();
        let key = request.key.as_ref().map(|key| (&request.session, key.key.as_str()));
        let decision = match key.and_then(|key| Some((keys.get(&key)?, request.key.as_ref()?))) {
            Some((known, key)) => Decision::Known(known.outcome(request, key, session)),
            None => match key.and_then(|key| new_keys.get(&key)) {
                Some(same) => Decision::SameAs(*same),
                None => session.decide(request),
            },
        };
        if let (Decision::Append { .. }, Some(key)) = (&decision, key) {
            new_keys.insert(key, place);
        }
        decisions.push(decision);
    }
    let placed: Vec<Placed<'_>> = requests
        .iter()
        .zip(&decisions)
        .filter_map(|(request, decision)| match decision {
            Decision::Append { first_seq } => Some(Placed { request, first_seq: *first_seq }),
            Decision::Known(_) | Decision::SameAs(_) => None,
        })
        .collect();
    let written = write(transaction, tenant, &sessions, &placed).await?;
    let mut outcomes: Vec<AppendOutcome> = Vec::with_capacity(requests.len());
    for (request, decision) in requests.iter().zip(decisions) {
        let outcome = match decision {
            Decision::Known(outcome) => outcome,
            Decision::Append { first_seq } => {
                let last_seq = Placed { request, first_seq }.last_seq();
                let (updated_at, incarnation) =
                    *written.get(&request.session).ok_or(sqlx::Error::RowNotFound)?;
                let user_id = sessions.get(&request.session).and_then(|session| session.user.clone());
                let created_at = request.exchange.time().unwrap_or(updated_at);
                let incarnation = Some(incarnation);
                AppendOutcome::Appended(PersistedExchange {
                    first_seq,
                    last_seq,
                    created_at,
                    user_id,
                    incarnation,
                    replayed: false,
                })
            }
            Decision::SameAs(place) => {
                let first = requests.get(place).and_then(|first| first.key.as_ref());
                let is_same = request.key.as_ref().zip(first).is_some_and(|(key, first)| key == first);
                match outcomes.get(place) {
                    Some(AppendOutcome::Appended(exchange)) if is_same => {
                        AppendOutcome::Appended(PersistedExchange {
                            replayed: true,
                            incarnation: None,
                            ..exchange.clone()
                        })
                    }
                    _ => AppendOutcome::KeyReused,
                }
            }
        };
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

impl KnownKey {
    fn outcome(
        &self,
        request: &AppendRequest,
        key: &IdempotencyKey,
        session: &AppendedSession<'_>,
    ) -> AppendOutcome {
        if !key.is_of(&self.fingerprint) {
            return AppendOutcome::KeyReused;
        }
        let user_id = session.user.clone().filter(|_| self.has_user);
        let created_at = request.exchange.time().unwrap_or(self.exchange.created_at);
        AppendOutcome::Appended(PersistedExchange { created_at, user_id, ..self.exchange.clone() })
    }
}

impl<'r> AppendedSession<'r> {
    /// Decides about an exchange, and adds it to the session if it is to be appended.
    fn decide(&mut self, request: &'r AppendRequest) -> Decision {
        let AppendRequest { exchange, expected_incarnation, default_user, .. } = request;
        let named = exchange.user_id.as_ref();
        if named.is_some_and(|named| self.user.as_ref().is_some_and(|user| user != named)) {
            return Decision::Known(AppendOutcome::UserMismatch);
        }
        let is_last = exchange.expected_last_seq.is_none_or(|expected| expected == self.last_seq);
        let is_same = expected_incarnation.is_none_or(|same| self.incarnation == Some(same));
        if !is_last || !is_same {
            return Decision::Known(AppendOutcome::LastSeqMismatch { last_seq: self.last_seq });
        }
        if self.user.is_none() {
            self.user = named.or(default_user.as_ref()).cloned();
            if self.user.is_some() {
                self.reindexed_through = self.last_seq - self.messages;
            }
        }
        if self.language.is_none() {
            self.language = request.terms.as_ref().and_then(|terms| terms.language);
            self.has_new_language = self.language.is_some();
            if self.language.is_some_and(|language| language != Language::English) {
                self.reindexed_through = self.last_seq - self.messages;
            }
        }
        let (first_seq, messages) = (self.last_seq + 1, to_i64(exchange.messages.len()));
        self.last_seq += messages;
        self.messages += messages;
        self.tokens += exchange.tokens();
        self.bytes += to_i64(exchange.bytes());
        self.metadata = exchange.metadata.as_deref().or(self.metadata);
        Decision::Append { first_seq }
    }
}

/// Locks the sessions in the order of their ids, so that transactions can't deadlock, and reads them.
async fn lock_sessions<'r>(
    transaction: &mut Transaction,
    tenant: &TenantId,
    requests: &[&'r AppendRequest],
) -> Result<BTreeMap<&'r SessionId, AppendedSession<'r>>, StoreError> {
    const LOCK_SESSIONS: Sql = Sql {
        postgres: "SELECT s.* FROM json_array_elements_text(CAST($2 AS json)) AS w (id) CROSS JOIN LATERAL (
                SELECT session_id, user_id, last_seq, language, incarnation FROM sessions
                WHERE tenant_id = $1 AND session_id = w.id FOR NO KEY UPDATE
            ) AS s",
        sqlite: "SELECT session_id, user_id, last_seq, language, incarnation FROM sessions
            WHERE tenant_id = $1 AND session_id IN (SELECT value FROM json_each($2))",
    };
    let mut sessions: BTreeMap<&SessionId, AppendedSession<'_>> = BTreeMap::new();
    for request in requests {
        sessions.entry(&request.session).or_default();
    }
    let ids = sessions.keys().map(|session| session.as_str()).collect::<Value>().to_string();
    let statement = transaction.statement(LOCK_SESSIONS).bind(tenant.as_str()).bind(ids);
    for row in &statement.read_all().await? {
        if let Some(session) = sessions.get_mut(&rows::session_id(row)?) {
            session.incarnation = row.field("incarnation")?;
            session.user = user_from_column(row.field("user_id")?)?;
            session.last_seq = row.field("last_seq")?;
            session.language = rows::language(row)?;
        }
    }
    Ok(sessions)
}

/// Returns the stored keys of requests by session and key. Those of a session without messages do not count: it is being erased.
async fn known_keys<'r>(
    transaction: &mut Transaction,
    tenant: &TenantId,
    requests: &[&'r AppendRequest],
    sessions: &BTreeMap<&SessionId, AppendedSession<'_>>,
) -> Result<HashMap<(&'r SessionId, &'r str), KnownKey>, StoreError> {
    /// On Postgres, `OFFSET 0` forces a lookup of each key, whatever number of rows the planner expects.
    const SELECT_KEYS: Sql = Sql {
        postgres: "SELECT w.place, k.fingerprint, k.first_seq, k.last_seq, k.has_user, k.created_at
            FROM json_to_recordset(CAST($2 AS json)) AS w (place bigint, session text, key text)
                CROSS JOIN LATERAL (
                    SELECT * FROM idempotency_keys
                    WHERE tenant_id = $1 AND session_id = w.session AND key = w.key OFFSET 0
                ) AS k",
        sqlite: "SELECT value ->> 'place' AS place, k.fingerprint, k.first_seq, k.last_seq, k.has_user, k.created_at
            FROM json_each($2) AS w CROSS JOIN idempotency_keys AS k
                ON k.tenant_id = $1 AND k.session_id = value ->> 'session' AND k.key = value ->> 'key'",
    };
    let keyed = requests.iter().enumerate();
    let keyed = keyed.filter_map(|(place, request)| {
        sessions.get(&request.session).filter(|session| session.last_seq > 0)?;
        Some(json!({"place": place, "session": request.session.as_str(), "key": request.key.as_ref()?.key}))
    });
    let keyed: Vec<Value> = keyed.collect();
    let mut known = HashMap::new();
    if keyed.is_empty() {
        return Ok(known);
    }
    let statement = transaction.statement(SELECT_KEYS).bind(tenant.as_str());
    for row in &statement.bind(Value::from(keyed).to_string()).read_all().await? {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
        let Some(AppendRequest { session, key: Some(key), .. }) = requests.get(place).copied() else {
            continue;
        };
        let known_key = KnownKey {
            fingerprint: row.field("fingerprint")?,
            exchange: rows::keyed_exchange(row)?,
            has_user: row.field("has_user")?,
        };
        known.insert((session, key.key.as_str()), known_key);
    }
    Ok(known)
}

/// The time of the last activity and the incarnation of each session after a write.
type Written = HashMap<SessionId, (OffsetDateTime, Uuid)>;

/// Writes exchanges, with their sessions, keys and terms.
async fn write(
    transaction: &mut Transaction,
    tenant: &TenantId,
    sessions: &BTreeMap<&SessionId, AppendedSession<'_>>,
    placed: &[Placed<'_>],
) -> Result<Written, StoreError> {
    let written = write_sessions(transaction, tenant, sessions).await?;
    let terms = session_terms(sessions, placed).await;
    let (mut messages, mut indexed) = (Vec::new(), Vec::new());
    for (Placed { request, first_seq }, of_exchange) in placed.iter().zip(&terms) {
        let AppendRequest { session, exchange, .. } = request;
        let (updated_at, _) = *written.get(session).ok_or(sqlx::Error::RowNotFound)?;
        let user = sessions.get(session).and_then(|session| session.user.as_ref());
        let mut times = exchange.given_times();
        let mut terms = of_exchange.iter();
        for (seq, (message, tokens)) in (*first_seq..).zip(&exchange.messages) {
            let created_at = times.next().flatten().unwrap_or(updated_at);
            let tokens = *tokens;
            let facts = MessageFacts { created_at: Some(created_at), ..MessageFacts::default() };
            messages.push(NewMessage { session, seq, message, tokens, facts });
            let of_message = terms.next().and_then(Option::as_deref);
            indexed.extend(of_message.map(|terms| IndexedMessage { session, seq, user, created_at, terms }));
        }
    }
    insert_messages(transaction, tenant, &messages).await?;
    insert_keys(transaction, tenant, placed, &written).await?;
    search_add(transaction, tenant, &indexed, Replaces::Nothing).await?;
    let analyzer = placed.iter().find_map(|placed| Some(placed.request.terms.as_ref()?.analyzer));
    for (session, appended) in sessions.iter().filter(|(_, appended)| appended.reindexed_through > 0) {
        if let Some(analyzer) = analyzer.map(|analyzer| analyzer.of_session(appended.language)) {
            let (owner, seqs) = ((*session, appended.user.as_ref()), 1..=appended.reindexed_through);
            index_messages(transaction, analyzer, tenant, owner, seqs, Replaces::Existing).await?;
        }
    }
    Ok(written)
}

/// Returns the terms of the messages of each exchange by the language of its session. Few exchanges are in another language, or too short
/// to tell their language, and are analyzed again.
async fn session_terms<'r>(
    sessions: &BTreeMap<&SessionId, AppendedSession<'_>>,
    placed: &[Placed<'r>],
) -> Vec<Cow<'r, [Option<String>]>> {
    let mut of_exchanges = Vec::with_capacity(placed.len());
    for Placed { request, .. } in placed {
        let Some(ExchangeTerms { analyzer, language, of_messages }) = &request.terms else {
            of_exchanges.push(Cow::Borrowed(&[][..]));
            continue;
        };
        let of_session =
            analyzer.of_session(sessions.get(&request.session).and_then(|session| session.language));
        if of_session == analyzer.of_session(*language) {
            of_exchanges.push(Cow::Borrowed(of_messages));
        } else {
            let exchange = Arc::clone(&request.exchange);
            let analyze = move || terms_of(of_session, &exchange);
            of_exchanges
                .push(Cow::Owned(blocking::spawn_cpu_to_count(request.exchange.bytes(), analyze).await));
        }
    }
    of_exchanges
}

/// Creates or advances the sessions with new messages.
async fn write_sessions(
    transaction: &mut Transaction,
    tenant: &TenantId,
    sessions: &BTreeMap<&SessionId, AppendedSession<'_>>,
) -> Result<Written, StoreError> {
    /// `last_seq` is that of the locked session with the new messages. If another transaction has created the session meanwhile,
    /// the insertion of the messages fails, and if it has bound the session to another user, its row is missing in the result. A
    /// session that gets its user also gets another incarnation, so that copies without the user become invalid.
    macro_rules! upsert_sessions {
        ($columns:literal, $values:literal, $now:literal, $hour:literal, $from:literal, $greatest:literal, $random:literal) => {
            concat!(
                "INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, stored_bytes, created_at,
                    updated_at, activity_hour", $columns, ")
                SELECT $1, w.session_id, w.user_id, coalesce(w.metadata, '{}'), w.last_seq, w.tokens, w.bytes, ",
                    $now, ", ", $now, ", ", $hour, $values,
                " FROM ", $from, " WHERE true
                ON CONFLICT (tenant_id, session_id) DO UPDATE SET last_seq = excluded.last_seq,
                    tokens = s.tokens + excluded.tokens, stored_bytes = s.stored_bytes + excluded.stored_bytes,
                    user_id = excluded.user_id,
                    incarnation = CASE WHEN s.user_id <> excluded.user_id THEN ", $random, " ELSE s.incarnation END,
                    created_at = CASE WHEN s.last_seq = 0 THEN excluded.created_at ELSE s.created_at END,
                    updated_at = ", $greatest, "(excluded.updated_at, s.updated_at),
                    activity_hour = ", $greatest, "(excluded.activity_hour, s.activity_hour)
                WHERE s.user_id IN ('', excluded.user_id)
                RETURNING session_id, updated_at, incarnation"
            )
        };
    }
    const UPSERT_SESSIONS: Sql = Sql {
        postgres: upsert_sessions!(
            "",
            "",
            "now()",
            "floor(extract(epoch FROM now()) / 3600)",
            "json_to_recordset(CAST($2 AS json)) AS w (session_id text, user_id text, metadata text, last_seq bigint,
                tokens bigint, bytes bigint)",
            "greatest",
            "gen_random_uuid()"
        ),
        sqlite: upsert_sessions!(
            ", incarnation",
            ", randomblob(16)",
            "$3",
            "$3 / 3600000000",
            "(SELECT value ->> 'session_id' AS session_id, value ->> 'user_id' AS user_id, value ->> 'metadata' AS metadata,
                value ->> 'last_seq' AS last_seq, value ->> 'tokens' AS tokens, value ->> 'bytes' AS bytes
                FROM json_each($2)) AS w",
            "max",
            "randomblob(16)"
        ),
    };
    const SET_METADATA: &str = "UPDATE sessions SET metadata = $3 WHERE tenant_id = $1 AND session_id = $2";
    let changed = || sessions.iter().filter(|(_, session)| session.messages > 0);
    let encoded = changed().map(|(id, session)| {
        let user = session.user.as_ref().map_or("", UserId::as_str);
        json!({
            "session_id": id.as_str(), "user_id": user, "metadata": session.metadata, "last_seq": session.last_seq,
            "tokens": session.tokens, "bytes": session.bytes,
        })
    });
    let encoded: Vec<Value> = encoded.collect();
    if encoded.is_empty() {
        return Ok(Written::new());
    }
    let statement = transaction.statement(UPSERT_SESSIONS).bind(tenant.as_str());
    let rows = statement.bind(Value::from(encoded).to_string()).bind_now().read_all().await?;
    let written = |row: &AnyRow| -> Result<_, StoreError> {
        Ok((rows::session_id(row)?, (row.time("updated_at")?, row.field("incarnation")?)))
    };
    let written = rows.iter().map(written).collect::<Result<Written, _>>()?;
    for (id, session) in changed().filter(|(_, session)| session.incarnation.is_some()) {
        if let Some(metadata) = session.metadata {
            let statement = transaction.statement(SET_METADATA).bind(tenant.as_str());
            statement.bind(id.as_str()).bind(metadata).execute().await?;
        }
    }
    for (id, session) in changed().filter(|(_, session)| session.has_new_language) {
        set_language(transaction, tenant, id, session.language).await?;
    }
    Ok(written)
}

/// Inserts the idempotency keys of exchanges, and deletes expired keys of their sessions, so that these need no background job.
async fn insert_keys(
    transaction: &mut Transaction,
    tenant: &TenantId,
    placed: &[Placed<'_>],
    written: &Written,
) -> Result<(), StoreError> {
    /// Shortest time that a key is kept.
    const KEY_RETENTION: time::Duration = time::Duration::hours(24);
    /// On Postgres, `OFFSET 0` forces a lookup of each session, whatever number of rows the planner expects.
    macro_rules! insert_keys {
        ($decode:literal, $from:literal) => {
            concat!(
                "INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, has_user, created_at)
                SELECT $1, s.session_id, w.key, ", $decode, ", w.first_seq, w.last_seq, s.user_id <> '', s.updated_at
                FROM ", $from
            )
        };
    }
    const INSERT_KEYS: Sql = Sql {
        postgres: insert_keys!(
            "decode(w.fingerprint, 'hex')",
            "json_to_recordset(CAST($2 AS json)) AS w (session text, key text, fingerprint text, first_seq bigint,
                last_seq bigint) CROSS JOIN LATERAL (
                    SELECT session_id, user_id, updated_at FROM sessions
                    WHERE tenant_id = $1 AND session_id = w.session OFFSET 0
                ) AS s"
        ),
        sqlite: insert_keys!(
            "unhex(w.fingerprint)",
            "(SELECT value ->> 'session' AS session, value ->> 'key' AS key, value ->> 'fingerprint' AS fingerprint,
                value ->> 'first_seq' AS first_seq, value ->> 'last_seq' AS last_seq FROM json_each($2)) AS w
                CROSS JOIN sessions AS s ON s.tenant_id = $1 AND s.session_id = w.session"
        ),
    };
    const DELETE_EXPIRED_KEYS: &str = "\
        DELETE FROM idempotency_keys
        WHERE tenant_id = $1 AND session_id = $2 AND created_at < $3 AND first_seq > 0";
    let mut keys = Vec::new();
    for placed in placed {
        let AppendRequest { session, key: Some(IdempotencyKey { key, fingerprint }), .. } = placed.request
        else {
            continue;
        };
        keys.push(json!({
            "session": session.as_str(), "key": key, "fingerprint": hex::encode(fingerprint),
            "first_seq": placed.first_seq, "last_seq": placed.last_seq(),
        }));
        // About every 64th message of a session.
        if placed.first_seq % 64 <= 1
            && let Some((updated_at, _)) = written.get(session)
        {
            let statement = transaction.statement(DELETE_EXPIRED_KEYS).bind(tenant.as_str());
            statement.bind(session.as_str()).bind(DbTime(*updated_at - KEY_RETENTION)).execute().await?;
        }
    }
    if !keys.is_empty() {
        let statement = transaction.statement(INSERT_KEYS).bind(tenant.as_str());
        statement.bind(Value::from(keys).to_string()).execute().await?;
    }
    Ok(())
}
