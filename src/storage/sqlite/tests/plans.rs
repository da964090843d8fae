//! Query plans on SQLite with large tables: the work of a statement must not grow with the table. The tests compare the
//! number of steps of the virtual machine, not the text of the plans. For Postgres see `tests/conformance/plans.rs`.

use super::super::Sqlite;
use crate::domain::exchange::Exchange;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::lexemes::{self, TermPattern, TermQuery};
use crate::storage::search::{MessageRef, SearchFilter};
use crate::storage::{AppendRequest, MessageQuery, SessionPosition, Store, StoreOptions};
use sqlx::{AssertSqlSafe, SqlitePool};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use time::OffsetDateTime;

/// Fills the tables with 9 N messages of one session and N sessions of one message, a minute apart, and then a hundred pending
/// messages of another user.
const FILL: &str = "\
    CREATE TEMP TABLE n AS
        WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 9 * SIZE) SELECT n FROM n;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    SELECT 'default', 's' || n, CASE WHEN n <= SIZE THEN 'u2' ELSE 'u1' END, '{}', 1, 1, NOW - n * 60000000, NOW - n * 60000000,
        (NOW - n * 60000000) / 3600000000, randomblob(16)
    FROM n WHERE n <= SIZE + 100;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, incarnation)
    VALUES ('default', 'demo', 'u1', '{}', 9 * SIZE, 9 * SIZE, NOW, NOW, NOW / 3600000000, randomblob(16));
    INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    SELECT 'default', 'demo', n, 'user', 1, '{\"role\":\"user\",\"content\":\"a\"}', NOW FROM n;
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT 'default', 'demo', n, NOW, 'TAGcommon TAGfew' || (n / 20) || ' SESSION' FROM n;
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT 'default', 's' || n, 1, NOW - n * 60000000, 'TAGcommon TAGother' FROM n WHERE n <= SIZE + 100;
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at, incarnation)
    SELECT 'default', 'u' || n, 1, 'x', 1, 1, NOW, randomblob(16) FROM n WHERE n <= SIZE";

const CALLS: &[&str] = &[
    "load_context",
    "session_head",
    "context_messages",
    "messages",
    "messages, newest first",
    "message_metadata",
    "sessions",
    "sessions, last page",
    "sessions of a user",
    "sessions of a user, last page",
    "term_statistics",
    "term_statistics of a session",
    "lookup_terms",
    "lookup_terms of a session",
    "scan_recent",
    "scan_recent of a session",
    "scan_recent without match",
    "scan_recent without match in a session",
    "fetch_hits",
    "fetch_hits of a user",
    "fetch_neighbours",
    "index_pending_for",
];

/// A store with one reading connection, and the step counter of the connection.
struct Filled {
    store: Store,
    writer: SqlitePool,
    now: OffsetDateTime,
    sessions: i64,
    steps: Arc<AtomicU64>,
    _folder: tempfile::TempDir,
}

impl Filled {
    /// `sessions` must be a multiple of 256, the number of messages that are moved into FTS5 together.
    async fn new(sessions: i64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            max_connections: 1,
            acquire_timeout: Duration::from_secs(20),
            statement_timeout: Duration::from_secs(30),
            search: Some(Analyzer::default()),
        };
        let url = format!("sqlite://{}", folder.path().join("precis.db").display());
        let store = Sqlite::connect(&url, &options).await.unwrap();
        store.migrate().await.unwrap();
        let writer = store.writer.clone();
        let now = OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap();
        let (tag, session) = (lexemes::tenant_prefix(&TenantId::default()), demo());
        let fill = FILL
            .replace("SESSION", &lexemes::session_lexeme(&tag, &session))
            .replace("TAG", &tag)
            .replace("SIZE", &sessions.to_string())
            .replace("NOW", "1800000000000000");
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(&writer).await.unwrap();
        let steps = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&steps);
        let mut connection = store.readers.acquire().await.unwrap();
        connection.lock_handle().await.unwrap().set_progress_handler(1, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            true
        });
        drop(connection);
        Self { store: Store::Sqlite(store), writer, now, sessions, steps, _folder: folder }
    }

    /// Returns the number of steps of a call after its statements have been prepared.
    async fn steps(&self, what: &str) -> u64 {
        self.call(what).await;
        let before = self.steps.load(Ordering::Relaxed);
        self.call(what).await;
        self.steps.load(Ordering::Relaxed) - before
    }

    async fn pending_ranges(&self) -> usize {
        let query = sqlx::query_scalar("SELECT count(*) FROM search_pending");
        let ranges: i64 = query.fetch_one(&self.writer).await.unwrap();
        usize::try_from(ranges).unwrap()
    }

    async fn call(&self, what: &str) {
        let (store, tenant, session) = (&self.store, &TenantId::default(), &demo());
        let user = UserId::new("u1".to_owned()).unwrap();
        let session_filter = if what.ends_with("session") { Some(session.clone()) } else { None };
        let filter = SearchFilter { session: session_filter, ..SearchFilter::default() };
        let last_page = SessionPosition {
            updated_at: self.now - time::Duration::minutes(self.sessions + 20),
            session_id: SessionId::new("x".to_owned()).unwrap(),
        };
        let page = MessageQuery { after_seq: 100, before_seq: i64::MAX, descending: false, limit: 50 };
        let messages = async |page| store.messages(tenant, session, page).await.unwrap().unwrap().len();
        let sessions = async |user, after| store.sessions(tenant, user, after, 51).await.unwrap().len();
        let refs: Vec<MessageRef> = (1..=20)
            .map(|n| MessageRef { created_at: self.now, seq: n * 200, session: session.clone() })
            .collect();
        let (found, expected) = match what {
            "load_context" => {
                (store.load_context(tenant, session, &user, 200).await.unwrap().tail.len(), 200)
            }
            "session_head" => (usize::from(store.session_head(tenant, session).await.unwrap().is_some()), 1),
            "context_messages" => {
                let head = store.session_head(tenant, session).await.unwrap().unwrap();
                let (after, through) = (head.last_seq - 3, head.last_seq);
                let messages =
                    store.context_messages(tenant, session, head.incarnation, after, through).await;
                (messages.unwrap().len(), 3)
            }
            "messages" => (messages(page).await, 50),
            "messages, newest first" => (messages(MessageQuery { descending: true, ..page }).await, 50),
            "message_metadata" => (store.message_metadata(tenant, session, 100, 50).await.unwrap().len(), 50),
            "sessions" => (sessions(None, None).await, 51),
            "sessions, last page" => (sessions(None, Some(&last_page)).await, 51),
            "sessions of a user" => (sessions(Some(&user), None).await, 51),
            "sessions of a user, last page" => (sessions(Some(&user), Some(&last_page)).await, 51),
            "term_statistics" | "term_statistics of a session" => {
                let queries = [term("common"), term("few7")];
                let statistics = store.term_statistics(tenant, &filter, &queries, 1000).await.unwrap();
                (usize::try_from(statistics.matching[0]).unwrap(), 1000)
            }
            "lookup_terms" | "lookup_terms of a session" => {
                (store.lookup_terms(tenant, &filter, &[term("few7")], 100).await.unwrap()[0].len(), 20)
            }
            "scan_recent" | "scan_recent of a session" => {
                (store.scan_recent(tenant, &filter, &term("common"), 4000, 50).await.unwrap().len(), 50)
            }
            "scan_recent without match" | "scan_recent without match in a session" => {
                (store.scan_recent(tenant, &filter, &term("no"), 4000, 50).await.unwrap().len(), 0)
            }
            "fetch_hits" => (store.fetch_hits(tenant, None, &refs, i64::MAX).await.unwrap().len(), 20),
            "fetch_hits of a user" => {
                (store.fetch_hits(tenant, Some(&user), &refs, i64::MAX).await.unwrap().len(), 20)
            }
            "fetch_neighbours" => {
                (store.fetch_neighbours(tenant, &refs, 1, i64::MAX).await.unwrap().len(), 40)
            }
            "index_pending_for" => {
                let exchange = Exchange::new(vec![Message::text(Role::User, "a"); 2], None, None);
                store.append_exchange(AppendRequest::new(tenant, session, exchange, None)).await.unwrap();
                store.index_pending_for(tenant, None).await.unwrap();
                (self.pending_ranges().await, 0)
            }
            other => panic!("{other}"),
        };
        assert_eq!(found, expected, "{what}");
    }
}

fn demo() -> SessionId {
    SessionId::new("demo".to_owned()).unwrap()
}

fn term(term: &str) -> TermQuery {
    TermQuery(vec![vec![TermPattern::exact(term)]])
}

#[tokio::test]
async fn sqlite_steps_do_not_grow_with_the_table() {
    let (few, many) = (Filled::new(512).await, Filled::new(2048).await);
    for what in CALLS {
        let (of_few, of_many) = (few.steps(what).await, many.steps(what).await);
        assert!(of_few > 10, "{what}: {of_few} steps are too few for the call");
        // A page of the list reads the hours that it touches to their end.
        assert!(of_many * 4 < of_few * 5, "{what}: {of_many} steps, but {of_few} with a quarter of the rows");
    }
}
