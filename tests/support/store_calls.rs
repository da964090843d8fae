//! Calls of every method of the store, and a database that they need: one long session, many short ones, and many users,
//! tenants and API keys. The work of a call must not grow with the size of the database.
//!
//! `tests/conformance/postgres_plans.rs` measures the work on Postgres and `src/storage/sqlite/tests/plans.rs` on SQLite.
#![cfg(test)]

use precis::domain::api_key::{ApiKey, RANDOM_BYTES, Scope};
use precis::domain::consolidation::Policy;
use precis::domain::consolidation_record::{RecordDetails, RecordOutcome, RunCause};
use precis::domain::exchange::{Exchange, IdempotencyKey, MessageFacts};
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::id::{SessionId, TenantId, UserId};
use precis::domain::memory::MemoryAuthor;
use precis::domain::message::{Message, Role};
use precis::domain::retention::{self, RetentionPeriod};
use precis::domain::revision::ModelUsage;
use precis::domain::search::MessageRef;
use precis::domain::search::index_terms::{self, TermPattern, TermQuery};
use precis::domain::session::{Session, Summary, Window};
use precis::domain::tail::TailLimit;
use precis::storage::SearchFilter;
use precis::storage::{
    AppendOutcome, AppendRequest, CandidateScope, DefaultRetention, ForkAppendOutcome, ForkOutcome,
    ImportOutcome, LeaseCondition, LoadedContext, MAX_MATCHES, MessageQuery, MessageRange, NewApiKey,
    NewMemoryDocument, NewRevision, RedactionOutcome, RewindOutcome, RowBatch, SessionFilter,
    SessionPosition, Store,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use uuid::Uuid;

/// The calls, and the number of results that each of them has.
pub(crate) const CALLS: &[(&str, usize)] = &[
    ("append_exchange", 2),
    ("append_exchange, new session", 2),
    // Every exchange of 64 messages deletes expired keys.
    ("append_exchange, new key", 64),
    ("append_exchange, known key", 1),
    ("append_exchange, expected message", 2),
    ("keyed_exchange", 2),
    ("load_context", 200),
    ("load_large_context", 200),
    ("session_head", 1),
    ("context_messages", 3),
    ("set_window", 1),
    ("last_user_message", 1),
    ("revision_of_message", 1),
    ("messages", 50),
    ("messages, newest first", 50),
    ("message_metadata", 50),
    ("message_range", 50),
    ("session", 1),
    ("session_owner", 1),
    ("bind_session", 1),
    ("bind_session, new session", 1),
    ("sessions", 51),
    ("sessions, last page", 51),
    ("sessions of a user", 51),
    ("sessions of a user, last page", 51),
    ("sessions forked from one", 51),
    ("sessions forked from one, last page", 51),
    ("set_metadata", 1),
    ("erase_session", 1),
    ("erase_user", 1),
    ("take_lease, commit_revision", 1),
    ("take_lease, record_failure", 1),
    ("take_lease, record_abandoned_run", 1),
    ("consolidation_records", 20),
    ("restore_revision", 1),
    ("edit_summary", 1),
    ("revisions", 20),
    ("add_token_usage", 0),
    ("tokens_used_today", 1),
    ("memory_document", 1),
    ("memory_owners", 20),
    ("write_memory_document", 1),
    ("write_memory_document, expected version", 1),
    ("memory_revisions", 20),
    ("create_api_key", 1),
    ("api_key", 0),
    ("api_keys of a tenant", 0),
    ("revoke_api_key", 0),
    ("any_api_key", 1),
    ("import_session", 1),
    ("fork_session", 1),
    ("fork_and_append", 1),
    ("rewind_session", 1),
    ("retention_periods", 1),
    ("set_retention", 1),
    ("session_retention", 1),
    ("set_session_retention", 1),
    ("users_with_retention", 50),
    ("retention_candidates of the tenant", 50),
    ("retention_candidates of a user", 50),
    ("retention_candidates with a period", 50),
    ("retention_candidates that are branches", 50),
    ("erase_expired_session", 1),
    ("take_worker_lease", 1),
    ("redact_message", 2),
    ("redactions", 0),
    ("due_sessions", 1),
    ("session_language", 1),
    ("languages", 2),
    ("find_matches", 20),
    ("find_matches of a session", 20),
    ("find_matches, common word", MAX_MATCHES),
    ("find_matches, common word of a session", MAX_MATCHES),
    ("find_matches, rare and common word", 20),
    ("fetch_messages", 20),
    ("fetch_messages of a user", 20),
    ("fetch_messages of neighbours", 40),
];

/// Methods without a call, and the reason.
const NOT_CALLED: [(&str, &str); 14] = [
    ("migrate", "runs once, before there is data, or as long as a migration needs"),
    ("check_ready", "reads no table of data"),
    ("close", "runs no statement"),
    ("examine", "reads no table of data"),
    ("time", "reads no table"),
    ("tenants", "lists all tenants, for the worker that searches for expired sessions in each of them"),
    ("remove_redacted_traces", "rebuilds the file of SQLite"),
    ("remove_stale_import", "reads one row of SQLite by its key, and erases it after a crash"),
    ("remove_stale_imports", "reads a partial index of SQLite, which has an entry for each running import"),
    ("stored_bytes", "sums over all sessions of the tenant"),
    ("index_state", "reads one row of a table with one row, and whether there is a tenant"),
    ("prepare_index", "does the same, and writes that row"),
    ("reindex", "analyses all messages"),
    ("merge_index", "merges the index of SQLite, in steps of some pages"),
];

#[test]
fn each_method_of_the_store_is_called_on_large_tables() {
    let calls = include_str!("store_calls.rs");
    let mut methods = 0;
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/storage")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(path).unwrap();
            let blocks = text.split("impl Store {").skip(1).filter_map(|rest| rest.split("\n}\n").next());
            for method in blocks.flat_map(|block| block.split("    pub async fn ").skip(1)) {
                let name = method.split('(').next().unwrap();
                let is_exempt = NOT_CALLED.iter().any(|(exempt, _)| *exempt == name);
                assert!(is_exempt || calls.contains(&format!(".{name}(")), "{name} is not called");
                methods += 1;
            }
        }
    }
    assert!(methods > 40, "{methods} methods were found");
}

/// Fills the tables. `n` is a table with the numbers up to 9 N. The session `demo` gets 9 N messages, N revisions with records and 200 other records, the user
/// `u1` N versions of a memory document. There are N sessions of one message, a minute apart, the older half of `u1`, N users
/// with a memory document, and N other tenants. N sessions that are older by full hours are forks of the session `origin`, so that the pages of all sizes touch
/// the same number of hours at any minute. The tenant `aged` has N expired sessions of each kind, 20 per hour, and N users with
/// a retention period.
const FILL: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, language, created_at, updated_at,
        activity_hour, incarnation)
    SELECT 'default', 's' || n, CASE WHEN n <= SIZE / 2 THEN 'u2' ELSE 'u1' END, '{}', 1, 1,
        CASE WHEN n % 2 = 0 THEN 'french' ELSE 'german' END, TIME[NOW - n * 60000000]TIME,
        TIME[NOW - n * 60000000]TIME, (NOW - n * 60000000) / 3600000000, UUID
    FROM n WHERE n <= SIZE + 100;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq, cursor_tokens, summary,
        revision, created_at, updated_at, activity_hour, incarnation)
    SELECT 'default', 'demo', 'u1', '{}', 9 * SIZE, 9 * SIZE, 9 * SIZE - 300, 9 * SIZE - 300, 'x', SIZE, TIME[NOW]TIME,
        TIME[NOW]TIME, NOW / 3600000000, UUID FROM n WHERE n = 1;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    SELECT 't' || n, 'demo', 'u1', '{}', 1, 1, TIME[NOW]TIME, TIME[NOW]TIME, NOW / 3600000000, UUID FROM n WHERE n <= SIZE;
    INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    SELECT 'default', 'demo', n, 'user', 1, '{\"role\":\"user\",\"content\":\"a\"}', TIME[NOW]TIME FROM n;
    INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    SELECT tenant_id, session_id, 1, 'user', 1, '{\"role\":\"user\",\"content\":\"a\"}', created_at
    FROM sessions WHERE last_seq = 1;
    SCOPES
    TERMS;
    INSERT INTO search_analyzer (id, version) VALUES (1, 'english-3') ON CONFLICT DO NOTHING;
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, created_at)
    SELECT 'default', 'demo', n, 'consolidation', CASE WHEN n >= 40 THEN 9 * n - 308 END, CASE WHEN n >= 40 THEN 9 * n - 300 END,
        CASE WHEN n < 40 THEN 0 ELSE 9 * n - 300 END, 'x', 1, 1, 'x', TIME[NOW]TIME
    FROM n WHERE n <= SIZE;
    INSERT INTO consolidation_records (tenant_id, session_id, number, revision, details, created_at)
    SELECT 'default', 'demo', 200 + n, n, RECORD, TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO consolidation_records (tenant_id, session_id, number, details, created_at)
    SELECT 'default', 'demo', n, RECORD, TIME[NOW]TIME FROM n WHERE n <= 200;
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, has_user, created_at)
    SELECT 'default', 'demo', 'k' || n, HASH, n, n, TRUE, TIME[NOW]TIME FROM n;
    INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens, added,
        created_at)
    SELECT 'default', 's' || n, 1, 'consolidation', 0, 'x', 1, 1, 'x', TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO consolidation_records (tenant_id, session_id, number, revision, details, created_at)
    SELECT 'default', 's' || n, 1, 1, RECORD, TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, has_user, created_at)
    SELECT 'default', 's' || n, 'k', HASH, 1, 1, TRUE, TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at, incarnation)
    SELECT 'default', 'u' || n, CASE WHEN n = 1 THEN SIZE ELSE 1 END, 'x', 1, 1, TIME[NOW]TIME, UUID FROM n WHERE n <= SIZE;
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT 'default', 'u1', n, 'x', 1, 1, TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO memory_revisions (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT 'default', 'u' || n, 1, 'x', 1, 1, TIME[NOW]TIME FROM n WHERE n > 1 AND n <= SIZE;
    INSERT INTO token_usage (tenant_id, day, tokens) SELECT 'default', -n, 1 FROM n WHERE n <= SIZE;
    INSERT INTO token_usage (tenant_id, day, tokens) SELECT 'default', NOW / 86400000000, 1 FROM n WHERE n = 1;
    INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at)
    SELECT 'k' || n, 't' || n, NULL, 'read', HASH, TIME[NOW]TIME FROM n WHERE n <= SIZE;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, retention_seconds, created_at,
        updated_at, activity_hour, incarnation)
    SELECT 'aged', 'own' || n, 'u2', '{}', 0, 0, 3600, TIME[NOW - (n / 20 + 3) * 3600000000]TIME,
        TIME[NOW - (n / 20 + 3) * 3600000000]TIME, (NOW - (n / 20 + 3) * 3600000000) / 3600000000, UUID FROM n WHERE n <= SIZE;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    SELECT 'aged', 'idle' || n, 'u1', '{}', 0, 0, TIME[NOW - (n / 20 + 3) * 3600000000]TIME,
        TIME[NOW - (n / 20 + 3) * 3600000000]TIME, (NOW - (n / 20 + 3) * 3600000000) / 3600000000, UUID FROM n WHERE n <= SIZE;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, forked_from, forked_through, fork_kind,
        branched_at, created_at, updated_at, activity_hour, incarnation)
    SELECT 'aged', 'branch' || n, 'u2', '{}', 0, 0, 'idle1', 1, 'rewind', TIME[NOW - (n / 20 + 3) * 3600000000]TIME,
        TIME[NOW - (n / 20 + 3) * 3600000000]TIME, TIME[NOW - (n / 20 + 3) * 3600000000]TIME,
        (NOW - (n / 20 + 3) * 3600000000) / 3600000000, UUID FROM n WHERE n <= SIZE;
    INSERT INTO retention_rules (tenant_id, user_id, seconds) SELECT 'aged', 'u' || n, 3600 FROM n WHERE n <= SIZE;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, forked_from, forked_through, fork_kind,
        created_at, updated_at, activity_hour, incarnation)
    SELECT 'default', 'fork' || n, 'u3', '{}', 1, 1, 'origin', 1, 'fork', TIME[NOW - (n + SIZE / 60 * 120) * 60000000]TIME,
        TIME[NOW - (n + SIZE / 60 * 120) * 60000000]TIME, (NOW - (n + SIZE / 60 * 120) * 60000000) / 3600000000, UUID
    FROM n WHERE n <= SIZE + 100";

/// The parts of [`fill`] that differ between the databases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    /// A query that returns the column `n` with the numbers up to 9 N.
    pub(crate) numbers: &'static str,
    /// The text before and after a number of microseconds that becomes a time.
    pub(crate) time: (&'static str, &'static str),
    /// A statement that adds the messages of the sessions of `scopes` to the index, with these terms.
    pub(crate) terms: (&'static str, &'static str),
    /// A random UUID.
    pub(crate) uuid: &'static str,
    /// Any 32 bytes.
    pub(crate) hash: &'static str,
}

/// Returns statements that fill an empty database for [`call`] with N = `size`.
pub(crate) fn fill(dialect: Dialect, size: i64) -> String {
    let statements =
        format!("CREATE TEMP TABLE n AS {}; {FILL}; DROP TABLE n; DROP TABLE scopes", dialect.numbers);
    let now = OffsetDateTime::now_utc().unix_timestamp() * 1_000_000;
    statements
        .replace("]TIME", dialect.time.1)
        .replace("TIME[", dialect.time.0)
        .replace("SCOPES\n", &scopes(size))
        .replace("TERMS", &[dialect.terms.0, TERMS, dialect.terms.1].concat())
        .replace("RECORD", &format!("'{}'", serde_json::to_string(&record()).unwrap()))
        .replace("UUID", dialect.uuid)
        .replace("HASH", dialect.hash)
        .replace("SIZE", &size.to_string())
        .replace("NOW", &now.to_string())
}

/// The terms of the message `m` of the session `s`, as SQL. All have one word, and 20 messages of the large session share another.
const TERMS: &str = "':ruser common few' || (m.seq / 20) || ' ' || s.terms";

/// Returns statements that create the table `scopes` with the terms of the sessions.
fn scopes(size: i64) -> String {
    let of_sessions = (1..=size + 100).map(|number| ("default".to_owned(), format!("s{number}")));
    let of_tenants = (1..=size).map(|number| (format!("t{number}"), "demo".to_owned()));
    let all = of_sessions.chain(of_tenants).chain([("default".to_owned(), "demo".to_owned())]);
    let row = |(tenant, id): (String, String)| {
        let user = user(if id.starts_with('s') { "u2" } else { "u1" });
        let terms =
            index_terms::scope_terms(&TenantId::new(tenant.as_str()).unwrap(), &session(&id), Some(&user));
        format!("('{tenant}', '{id}', '{terms}')")
    };
    let rows: Vec<String> = all.map(row).collect();
    let inserts = rows.chunks(400).map(|rows| format!("INSERT INTO scopes VALUES {};", rows.join(", ")));
    let create = "CREATE TEMP TABLE scopes (tenant_id text, session_id text, terms text);";
    [create.to_owned()].into_iter().chain(inserts).collect()
}

fn session(id: &str) -> SessionId {
    SessionId::new(id).unwrap()
}

fn user(id: &str) -> UserId {
    UserId::new(id).unwrap()
}

/// A database that [`fill`] has filled.
pub(crate) struct Filled {
    pub(crate) size: i64,
    next_number: AtomicU64,
}

impl Filled {
    pub(crate) fn new(size: i64) -> Self {
        Self { size, next_number: AtomicU64::new(0) }
    }

    /// Returns a number that no other call on this database gets. Databases with the same calls give the same numbers, so
    /// that the sessions that are named after them are in the same partitions.
    fn unused_number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }
}

fn exchange(messages: usize) -> Exchange {
    let messages = vec![(Message::text(Role::User, "hello"), 1); messages];
    Exchange { messages, ..Exchange::default() }
}

/// The store under test with N, and the ids that the calls use.
struct Calls<'s> {
    store: &'s Store,
    database: &'s Filled,
    tenant: TenantId,
    session: SessionId,
    user: UserId,
}

/// Runs a call of [`CALLS`] on a store of this database. Returns the number of results. The calls do not
/// depend on each other, and can be repeated.
pub(crate) async fn call(store: &Store, database: &Filled, what: &str) -> usize {
    let (tenant, session, user) = (TenantId::default(), session("demo"), user("u1"));
    let calls = Calls { store, database, tenant, session, user };
    let (method, variant) = what.split_once([' ', ',']).unwrap_or((what, ""));
    match method {
        "append_exchange" => calls.append(variant.trim()).await,
        "keyed_exchange" => {
            let stored = store.keyed_exchange(&calls.tenant, &calls.session, "k1").await.unwrap();
            stored.map_or(0, |(_, fingerprint)| fingerprint.len() / 16)
        }
        "load_context" | "load_large_context" | "session_head" | "context_messages" | "set_window"
        | "last_user_message" => calls.context(what).await,
        "messages" | "message_metadata" | "message_range" => calls.history(what).await,
        "session" | "session_owner" | "bind_session" | "sessions" | "set_metadata" => {
            calls.sessions(what).await
        }
        "erase_session" | "erase_user" => calls.erase(what).await,
        "revision_of_message"
        | "take_lease"
        | "restore_revision"
        | "edit_summary"
        | "revisions"
        | "consolidation_records" => calls.consolidation(what).await,
        "add_token_usage" | "tokens_used_today" => calls.token_usage(what).await,
        "memory_document" | "write_memory_document" | "memory_revisions" | "memory_owners" => {
            calls.memory(what).await
        }
        "create_api_key" | "api_key" | "api_keys" | "revoke_api_key" | "any_api_key" => {
            calls.keys(what).await
        }
        "import_session" => calls.import().await,
        "retention_periods"
        | "set_retention"
        | "session_retention"
        | "set_session_retention"
        | "users_with_retention"
        | "retention_candidates"
        | "erase_expired_session"
        | "due_sessions"
        | "take_worker_lease" => calls.retention(what).await,
        "fork_session" | "fork_and_append" | "rewind_session" => calls.fork(what).await,
        "redact_message" | "redactions" => calls.redact(what).await,
        _ => calls.search(method, what).await,
    }
}

impl Calls<'_> {
    async fn say(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: Exchange,
        key: Option<&str>,
    ) -> usize {
        let key = key.map(|key| IdempotencyKey { key: key.to_owned(), fingerprint: exchange.fingerprint() });
        let request = AppendRequest::new(tenant, session, exchange, key);
        match self.store.append_exchange(request).await.unwrap() {
            AppendOutcome::Appended(stored) => {
                usize::try_from(stored.last_seq - stored.first_seq + 1).unwrap()
            }
            AppendOutcome::KeyReused => 1,
            AppendOutcome::UserMismatch | AppendOutcome::LastSeqMismatch { .. } => 0,
        }
    }

    async fn append(&self, variant: &str) -> usize {
        let number = self.database.unused_number();
        if variant == "expected message" {
            let session = session(&format!("new{number}"));
            let exchange = Exchange { expected_last_seq: Some(0), ..exchange(2) };
            return self.say(&self.tenant, &session, exchange, None).await;
        }
        let (session, messages, key) = match variant {
            "" => (self.session.clone(), 2, None),
            "new session" => (session(&format!("new{number}")), 2, None),
            "new key" => (self.session.clone(), 64, Some(format!("new{number}"))),
            "known key" => (self.session.clone(), 2, Some("k1".to_owned())),
            other => panic!("{other}"),
        };
        self.say(&self.tenant, &session, exchange(messages), key.as_deref()).await
    }

    async fn context(&self, what: &str) -> usize {
        let Self { store, tenant, session, user, .. } = self;
        if what == "load_context" {
            let limit = TailLimit { messages: 200, bytes: 1 << 20 };
            let LoadedContext::Complete(snapshot) =
                store.load_context(tenant, session, Some(user), limit).await.unwrap()
            else {
                return 0;
            };
            return snapshot.tail.len();
        }
        if what == "load_large_context" {
            let limit = TailLimit { messages: 200, bytes: 1 << 20 };
            return store.load_large_context(tenant, session, Some(user), limit).await.unwrap().tail.len();
        }
        let Some(head) = store.session_head(tenant, session).await.unwrap() else { return 0 };
        if what == "set_window" {
            let window = Window { tokens: head.last_seq, fixed: 0 };
            store.set_window(tenant, session, Some(window)).await.unwrap();
            return 1;
        }
        if what == "last_user_message" {
            return usize::from(
                store.last_user_message(tenant, session, head.last_seq).await.unwrap().is_some(),
            );
        }
        if what == "session_head" {
            return usize::from(head.memory.is_some());
        }
        let (after, through) = (head.last_seq - 3, head.last_seq);
        store.context_messages(tenant, session, head.incarnation, after, through).await.unwrap().len()
    }

    async fn history(&self, what: &str) -> usize {
        let Self { store, tenant, session, database: Filled { size, .. }, .. } = self;
        let page = MessageQuery {
            after_seq: 4 * size,
            before_seq: i64::MAX,
            descending: false,
            limit: 50,
            max_bytes: 1 << 20,
        };
        let messages = async |page| {
            store.messages(tenant, session, page).await.unwrap().map_or(0, |page| page.messages.len())
        };
        match what {
            "messages" => messages(page).await,
            "messages, newest first" => messages(MessageQuery { descending: true, ..page }).await,
            "message_metadata" => store.message_metadata(tenant, session, 4 * size, 50).await.unwrap().len(),
            "message_range" => {
                let range =
                    MessageRange { after_seq: 4 * size, last_seq: 9 * size, limit: 50, max_bytes: 1 << 20 };
                store.message_range(tenant, session, range).await.unwrap().len()
            }
            other => panic!("{other}"),
        }
    }

    async fn sessions(&self, what: &str) -> usize {
        let Self { store, tenant, user, .. } = self;
        // Full hours, because a page reads the hours that it touches to their end.
        let last_page = SessionPosition {
            updated_at: OffsetDateTime::now_utc() - time::Duration::hours(self.database.size / 60 - 1),
            session_id: session("x"),
        };
        let last_fork = SessionPosition {
            updated_at: OffsetDateTime::now_utc() - time::Duration::hours(3 * self.database.size / 60 - 1),
            session_id: session("x"),
        };
        let origin = session("origin");
        let forks = SessionFilter { forked_from: Some(&origin), ..SessionFilter::default() };
        let of_user = SessionFilter { user: Some(user), ..SessionFilter::default() };
        let sessions = async |filter, after| {
            store.sessions(tenant, filter, after, 51, 1 << 20).await.unwrap().items.len()
        };
        match what {
            "session" => usize::from(store.session(tenant, &self.session).await.unwrap().is_some()),
            "session_owner" => usize::from(store.session_owner(tenant, &self.session).await.unwrap().exists),
            "bind_session" => {
                usize::from(store.bind_session(tenant, &self.session, user).await.unwrap() == *user)
            }
            "bind_session, new session" => {
                let new = session(&format!("bound{}", self.database.unused_number()));
                usize::from(store.bind_session(tenant, &new, user).await.unwrap() == *user)
            }
            "sessions" => sessions(SessionFilter::default(), None).await,
            "sessions, last page" => sessions(SessionFilter::default(), Some(&last_page)).await,
            "sessions of a user" => sessions(of_user, None).await,
            "sessions of a user, last page" => sessions(of_user, Some(&last_page)).await,
            "sessions forked from one" => sessions(forks, None).await,
            "sessions forked from one, last page" => sessions(forks, Some(&last_fork)).await,
            "set_metadata" => {
                usize::from(store.set_metadata(tenant, &self.session, "{}").await.unwrap().is_some())
            }
            other => panic!("{other}"),
        }
    }

    /// Erases a session or a user with messages in the index and a memory document.
    async fn erase(&self, what: &str) -> usize {
        let (store, tenant) = (self.store, &self.tenant);
        let (session, user) = (
            session(&format!("erased{}", self.database.unused_number())),
            user(&format!("erased{}", self.database.unused_number())),
        );
        let exchange = || Exchange { user_id: Some(user.clone()), ..exchange(2) };
        self.say(tenant, &session, exchange(), Some("k")).await;
        self.say(tenant, &session, exchange(), None).await;
        let document = NewMemoryDocument { content: "x", words: 1, tokens: 1, author: MemoryAuthor::Http };
        store.write_memory_document(tenant, &user, document, None).await.unwrap();
        usize::from(match what {
            "erase_session" => store.erase_session(tenant, &session).await.unwrap(),
            _ => store.erase_user(tenant, &user).await.unwrap(),
        })
    }

    async fn consolidation(&self, what: &str) -> usize {
        let Self { store, tenant, session, .. } = self;
        let (token, ttl) = (Uuid::new_v4(), Duration::from_mins(1));
        let lease =
            async || store.take_lease(tenant, session, token, LeaseCondition::Force, ttl).await.unwrap();
        match what {
            "take_lease, commit_revision" => {
                let Some(state) = lease().await else { return 0 };
                assert!(store.renew_lease(tenant, session, token, ttl).await.unwrap());
                let revision = next_revision(&state);
                let committed =
                    store.commit_revision(tenant, session, token, &revision, &record()).await.unwrap();
                store.release_lease(tenant, session, token).await.unwrap();
                usize::from(committed.is_some())
            }
            "take_lease, record_failure" => {
                lease().await;
                let failure = store.record_failure(tenant, session, token, ttl, &record()).await;
                usize::from(failure.unwrap().is_some())
            }
            "take_lease, record_abandoned_run" => {
                let session_state = lease().await;
                store.record_abandoned_run(tenant, session, token, &record()).await.unwrap();
                usize::from(session_state.is_some())
            }
            "revision_of_message" => {
                let state = store.session(tenant, session).await.unwrap().unwrap();
                let revision = store.revision_of_message(tenant, session, state.cursor).await.unwrap();
                usize::from(revision.is_some())
            }
            "consolidation_records" => store
                .consolidation_records(tenant, session, self.database.size / 2, 20, 1 << 20)
                .await
                .unwrap()
                .map_or(0, |page| page.items.len()),
            "restore_revision" => {
                let revision =
                    store.session(tenant, session).await.unwrap().map_or(0, |session| session.revision);
                usize::from(store.restore_revision(tenant, session, revision - 1).await.unwrap().is_some())
            }
            "edit_summary" => {
                let state = store.session(tenant, session).await.unwrap().unwrap();
                let edited = store.edit_summary(tenant, session, state.revision, &state.summary).await;
                usize::from(edited.unwrap().is_some())
            }
            "revisions" => store
                .revisions(tenant, session, self.database.size / 2, 20, 1 << 20)
                .await
                .unwrap()
                .map_or(0, |page| page.items.len()),
            other => panic!("{other}"),
        }
    }

    async fn token_usage(&self, what: &str) -> usize {
        if what == "add_token_usage" {
            self.store.add_token_usage(&self.tenant, 1).await.unwrap();
            return 0;
        }
        usize::from(self.store.tokens_used_today(&self.tenant).await.unwrap() > 0)
    }

    async fn memory(&self, what: &str) -> usize {
        let Self { store, tenant, user, .. } = self;
        let version = store.memory_document(tenant, user).await.unwrap().map(|document| document.version);
        let new = NewMemoryDocument { content: "x", words: 1, tokens: 1, author: MemoryAuthor::Http };
        let written = match what {
            "memory_document" => return usize::from(version.is_some()),
            "memory_owners" => return store.memory_owners(tenant, "u", 20).await.unwrap().items.len(),
            "memory_revisions" => {
                return store
                    .memory_revisions(tenant, user, self.database.size / 2, 20, 1 << 20)
                    .await
                    .unwrap()
                    .items
                    .len();
            }
            "write_memory_document" => store.write_memory_document(tenant, user, new, None).await,
            _ => store.write_memory_document(tenant, user, new, version).await,
        };
        usize::from(written.unwrap().is_some())
    }

    /// Lists, reads and revokes an unknown key.
    async fn keys(&self, what: &str) -> usize {
        let (store, number) = (self.store, self.database.unused_number());
        let mut random = [0; RANDOM_BYTES];
        random[..8].copy_from_slice(&number.to_le_bytes());
        let (key, tenant) = (ApiKey::new(&random), TenantId::new(format!("new{number}")).unwrap());
        match what {
            "create_api_key" => {
                let (id, hash, scope) = (key.id().clone(), key.hash(), Scope::Read);
                let new = NewApiKey { id, hash, tenant, name: None, scope };
                usize::from(store.create_api_key(&new).await.unwrap().is_some())
            }
            "api_key" => usize::from(store.api_key(key.id()).await.unwrap().is_some()),
            "api_keys of a tenant" => store.api_keys(Some(&tenant)).await.unwrap().len(),
            "revoke_api_key" => usize::from(store.revoke_api_key(key.id()).await.unwrap()),
            "any_api_key" => usize::from(store.any_api_key().await.unwrap()),
            other => panic!("{other}"),
        }
    }

    async fn import(&self) -> usize {
        let message = |seq| {
            let (message, facts) = (Message::text(Role::User, "hello"), MessageFacts::default());
            ImportedMessage { seq, facts, message, tokens: 1 }
        };
        let imported = ImportedSession {
            user_id: None,
            metadata: None,
            times: None,
            last_seq: 2,
            tokens: 2,
            revision: 0,
            cursor: 1,
            summary: Summary { text: "x".to_owned(), words: 1, tokens: 1 },
            fingerprint: String::new(),
            messages_only: true,
        };
        let (sender, batches) = mpsc::channel(1);
        sender.send(RowBatch { messages: vec![message(1), message(2)], revisions: vec![] }).await.unwrap();
        drop(sender);
        let session = session(&format!("imported{}", self.database.unused_number()));
        let users = (Some(&self.user), None);
        let outcome = self.store.import_session(&self.tenant, &session, users, &imported, batches).await;
        usize::from(outcome.unwrap() == ImportOutcome::Imported)
    }

    async fn retention(&self, what: &str) -> usize {
        let Self { store, user, .. } = self;
        let (aged, idle) = (TenantId::new("aged").unwrap(), session("idle1"));
        let now = store.time().await.unwrap();
        let last_hour = retention::hour(now) - 1;
        let default = DefaultRetention {
            after_last_exchange: Some(RetentionPeriod::Seconds(3600)),
            branches_after: Some(RetentionPeriod::Seconds(3600)),
        };
        let candidates = async |scope| {
            let found = store.retention_candidates(&aged, scope, None, default, now, 50).await.unwrap();
            found.iter().filter(|candidate| candidate.is_expired).count()
        };
        match what {
            "retention_periods" => {
                let periods = store.retention_periods(&aged, Some(user)).await.unwrap();
                usize::from(periods.user.is_some())
            }
            "set_retention" => {
                let period = Some(RetentionPeriod::Seconds(3600));
                store.set_retention(&aged, Some(user), period).await.unwrap();
                1
            }
            "session_retention" => {
                let retention = store.session_retention(&self.tenant, &self.session).await.unwrap();
                usize::from(retention.is_some())
            }
            "set_session_retention" => {
                let period = Some(RetentionPeriod::Never);
                let is_set = store.set_session_retention(&self.tenant, &self.session, period).await;
                usize::from(is_set.unwrap())
            }
            "users_with_retention" => store.users_with_retention(&aged, None, 50).await.unwrap().len(),
            "retention_candidates of the tenant" => candidates(CandidateScope::Tenant { last_hour }).await,
            "retention_candidates of a user" => candidates(CandidateScope::User { user, last_hour }).await,
            "retention_candidates with a period" => candidates(CandidateScope::OwnPeriod { last_hour }).await,
            "retention_candidates that are branches" => {
                let until = now - time::Duration::hours(1);
                candidates(CandidateScope::Branches { until }).await
            }
            "erase_expired_session" => {
                let expired = session(&format!("expired{}", self.database.unused_number()));
                self.say(&aged, &expired, exchange(2), Some("k")).await;
                let later = now + time::Duration::hours(2);
                let erased = store.erase_expired_session(&aged, &expired, default, later).await.unwrap();
                store.remove_erased_traces().await;
                assert!(store.session_retention(&aged, &idle).await.unwrap().is_none(), "it has no exchange");
                usize::from(erased)
            }
            // These read the sessions that were active in the last hours.
            "due_sessions" => {
                usize::from(store.due_sessions(&aged, last_hour, &Policy::default()).await.unwrap() >= 0)
            }
            "take_worker_lease" => {
                let (token, ttl) = (Uuid::new_v4(), Duration::from_mins(1));
                let is_free = store.take_worker_lease("retention", token, ttl, Duration::ZERO).await.unwrap();
                assert!(store.renew_worker_lease("retention", token, ttl).await.unwrap());
                store.release_worker_lease("retention", token, true).await.unwrap();
                usize::from(is_free)
            }
            other => panic!("{other}"),
        }
    }

    /// Forks or rewinds a small session: both copy it. Other sessions are larger, and have forks and branches.
    async fn fork(&self, what: &str) -> usize {
        let (store, tenant, number) = (self.store, &self.tenant, self.database.unused_number());
        let (source, target) = (session(&format!("source{number}")), session(&format!("copy{number}")));
        self.say(tenant, &source, exchange(2), Some("k")).await;
        self.say(tenant, &source, exchange(2), Some("l")).await;
        usize::from(match what {
            "fork_session" => {
                let outcome = store.fork_session(tenant, &source, &target, 3).await.unwrap();
                matches!(outcome, ForkOutcome::Forked(_))
            }
            "fork_and_append" => {
                let request = AppendRequest::new(tenant, &target, exchange(2), None);
                let outcome = store.fork_and_append(&source, 3, &request).await.unwrap();
                matches!(outcome, ForkAppendOutcome::Appended(_))
            }
            _ => {
                let outcome = store.rewind_session(tenant, &source, &target, 1, 1000).await.unwrap();
                matches!(outcome, RewindOutcome::Rewound(_))
            }
        })
    }

    /// Redacts a message of a small session and of its fork, or lists the redactions of another session: both read all revisions
    /// of the session.
    async fn redact(&self, what: &str) -> usize {
        let (store, tenant, number) = (self.store, &self.tenant, self.database.unused_number());
        if what == "redactions" {
            return store.redactions(tenant, &session("s1"), 0, 10).await.unwrap().len();
        }
        let (source, target) =
            (session(&format!("redacted{number}")), session(&format!("redacted copy{number}")));
        self.say(tenant, &source, exchange(2), Some("k")).await;
        store.fork_session(tenant, &source, &target, 2).await.unwrap();
        match store.redact_message(tenant, &source, 2, None).await.unwrap() {
            RedactionOutcome::Redacted(affected) => affected.len(),
            other => panic!("not redacted: {other:?}"),
        }
    }

    async fn search(&self, method: &str, what: &str) -> usize {
        let Self { store, tenant, session, user, .. } = self;
        let scope = if what.ends_with("session") { Some(session.clone()) } else { None };
        let filter = SearchFilter { session: scope, ..SearchFilter::default() };
        let refs: Vec<MessageRef> = (1..=20)
            .map(|n| MessageRef { session: session.clone(), seq: n * self.database.size / 10 })
            .collect();
        match method {
            "session_language" => {
                let id = SessionId::new("s1").unwrap();
                usize::from(store.session_language(tenant, &id).await.unwrap().is_some())
            }
            "languages" => store.languages(tenant).await.unwrap().len(),
            "find_matches" => {
                let words = ["few7", "common"].map(|word| vec![TermPattern::exact(word)]);
                let query = match (what.contains("rare"), what.contains("common")) {
                    (true, _) => TermQuery(words.to_vec()),
                    (false, true) => TermQuery(words[1..].to_vec()),
                    (false, false) => TermQuery(words[..1].to_vec()),
                };
                store.find_matches(tenant, &filter, &[query]).await.unwrap()[0].len()
            }
            "fetch_messages" => {
                let user = what.ends_with("user").then_some(user);
                let sides = if what.ends_with("neighbours") { &[-1..=-1, 1..=1][..] } else { &[0..=0] };
                store.fetch_messages(tenant, user, &refs, sides, i64::MAX).await.unwrap().len()
            }
            other => panic!("{other}"),
        }
    }
}

fn record() -> RecordDetails {
    RecordDetails {
        cause: RunCause::Request,
        outcome: RecordOutcome::Failed,
        reason: Some("reason".to_owned()),
        models: Vec::new(),
        usage: ModelUsage::default(),
        cost: None,
        duration_ms: 1,
    }
}

/// Returns a revision that moves the cursor by one message.
fn next_revision(session: &Session) -> NewRevision {
    NewRevision {
        base_revision: session.revision,
        base_cursor: session.cursor,
        cursor: session.cursor + 1,
        range_tokens: 1,
        summary: Summary { text: "x".to_owned(), words: 1, tokens: 1 },
        added: "x".to_owned(),
        provenance: None,
        meta: None,
    }
}
