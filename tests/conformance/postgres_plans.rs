//! Query plans on Postgres with large tables: the number of rows that a statement reads must not grow with the table. The
//! tests compare the row counters of Postgres, not the text of the plans.

use crate::conversation::{Conversation, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::id::{TenantId, UserId};
use precis::domain::search::analyzer::Analyzer;
use precis::domain::search::lexemes::{self, TermPattern, TermQuery};
use precis::storage::MessageQuery;
use precis::storage::SessionPosition;
use precis::storage::search::{MessageRef, SearchFilter};
use precis::storage::{self, StoreOptions};
use std::time::Duration;
use time::OffsetDateTime;

/// Fills the tables with one session of 200,000 messages, and 20,000 sessions of one message, a minute apart.
const FILL: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    SELECT 'default', 's' || n, 'u' || n % 50, '{}', 1, 1, t, t, floor(extract(epoch FROM t) / 3600)
    FROM (SELECT n, now() - n * interval '1 minute' AS t FROM generate_series(1, 20000) AS n) AS minutes;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    SELECT 'default', 'demo', 'u1', '{}', 200000, 200000, now(), now(), floor(extract(epoch FROM now()) / 3600);
    INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    SELECT 'default', 'demo', n, 'user', 1, '{\"role\":\"user\",\"content\":\"' || repeat(md5(n::text), 4) || '\"}', now()
    FROM generate_series(1, 200000) AS n;
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT 'default', 'demo', n, now(), array_to_tsvector(ARRAY['TAGcommon', 'TAGfew' || n / 20, 'TAG:sSESSION'])
    FROM generate_series(1, 200000) AS n;
    INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
    SELECT 'default', 's' || n, 1, now(), array_to_tsvector(ARRAY['TAGcommon', 'TAGother'])
    FROM generate_series(1, 20000) AS n;
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT 'default', 'u' || n, 1, 'x', 1, 1, now() FROM generate_series(1, 20000) AS n";

const STATISTICS: &str = "\
    SELECT seq_tup_read::bigint AS whole, idx_tup_fetch::bigint AS fetched FROM pg_stat_user_tables WHERE relname = ";

const SERVICE_CONNECTIONS: &str = "\
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'precis'";

/// Waits until all connections are closed, because their statistics are complete only then.
async fn await_statistics(sql: &mut Sql) {
    let closed = async {
        while sql.number(SERVICE_CONNECTIONS).await > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed)
        .await
        .expect("connections end when the store is closed");
}

/// Returns the number of rows read so far: by sequential scans, and by index scans.
async fn read(sql: &mut Sql, table: &str) -> (i64, i64) {
    let of = |column| format!("SELECT {column} FROM ({STATISTICS}'{table}') AS statistics");
    (sql.number(&of("whole")).await, sql.number(&of("fetched")).await)
}

/// Opens a store with one connection, so that both custom and generic plans of its statements are used.
async fn connect(backend: &Backend) -> Conversation {
    let options = StoreOptions {
        max_connections: 1,
        acquire_timeout: Duration::from_secs(20),
        statement_timeout: Duration::from_secs(30),
        search: Some(Analyzer::default()),
    };
    Conversation {
        store: storage::connect(&backend.url(), &options).await.unwrap(),
        ..Conversation::on(backend).await
    }
}

/// Calls, the table to measure, and the maximum number of its rows that a call may read. A page of the session list reads
/// whole hours.
const CALLS: &[(&str, &str, i64)] = &[
    ("load_context", "messages", 200),
    ("load_context", "memories", 1),
    ("session_head", "sessions", 1),
    ("session_head", "memories", 1),
    ("context_messages", "messages", 3),
    ("messages", "messages", 50),
    ("messages, newest first", "messages", 50),
    ("message_metadata", "messages", 50),
    ("sessions", "sessions", 130),
    ("sessions, far down", "sessions", 190),
    ("sessions of a user", "sessions", 130),
    ("sessions of a user, far down", "sessions", 190),
    ("append", "messages", 0),
    // The messages of `append`, and as many more.
    ("index_session", "messages", 4),
    ("term_statistics", "search", 1001),
    ("term_statistics of a session", "search", 1000),
    ("lookup_terms", "search", 20),
    ("lookup_terms of a session", "search", 20),
    // The messages of `append` and `index_session` are newer and contain other words.
    ("scan_recent", "search", 150),
    ("scan_recent of a session", "search", 110),
    ("fetch_hits", "messages", 20),
    ("fetch_neighbours", "messages", 60),
];

fn probe(term: &str) -> TermQuery {
    TermQuery(vec![vec![TermPattern::exact(term)]])
}

fn places() -> Vec<MessageRef> {
    let place = |n: i64| MessageRef {
        created_at: OffsetDateTime::UNIX_EPOCH,
        seq: n * 1000,
        session: session_id("demo"),
    };
    (1_i64..=20).map(place).collect()
}

async fn call(demo: &Conversation, what: &str) {
    let (store, tenant, session, ada) = (&demo.store, &demo.tenant, &demo.session, user_id("u1"));
    let far = SessionPosition {
        updated_at: OffsetDateTime::now_utc() - time::Duration::days(6),
        session_id: session_id("x"),
    };
    let page = MessageQuery { after_seq: 100_000, before_seq: i64::MAX, descending: false, limit: 50 };
    let sessions = async |user, after| {
        assert_eq!(store.sessions(tenant, user, after, 51).await.unwrap().len(), 51);
    };
    match what {
        "load_context" => {
            let snapshot = store.load_context(tenant, session, &UserId::default(), 200).await.unwrap();
            assert_eq!((snapshot.tail.len(), snapshot.memory.unwrap().version), (200, 1));
        }
        "session_head" => {
            let head = store.session_head(tenant, session).await.unwrap().unwrap();
            assert_eq!(head.memory.unwrap().version, 1);
        }
        "context_messages" => {
            let head = store.session_head(tenant, session).await.unwrap().unwrap();
            let (after, through) = (head.last_seq - 3, head.last_seq);
            let messages = store.context_messages(tenant, session, head.incarnation, after, through).await;
            assert_eq!(messages.unwrap().len(), 3);
        }
        "messages" => assert_eq!(demo.page(page).await.unwrap().len(), 50),
        "messages, newest first" => {
            assert_eq!(demo.page(MessageQuery { descending: true, ..page }).await.unwrap().len(), 50);
        }
        "message_metadata" => {
            assert_eq!(store.message_metadata(tenant, session, 100_000, 50).await.unwrap().len(), 50);
        }
        "sessions" => sessions(None, None).await,
        "sessions, far down" => sessions(None, Some(&far)).await,
        "sessions of a user" => sessions(Some(&ada), None).await,
        "sessions of a user, far down" => sessions(Some(&ada), Some(&far)).await,
        "term_statistics" | "term_statistics of a session" => {
            let session = what.ends_with("session").then(|| session.clone());
            let scope = SearchFilter { session, ..SearchFilter::default() };
            let sample =
                store.term_statistics(tenant, &scope, &[probe("common"), probe("few7")], 1000).await.unwrap();
            // The messages of `append` are newer and contain other words.
            assert!(
                sample.sampled == 1000 && sample.matching[0] > 900 && sample.matching[1] == 0,
                "{sample:?}"
            );
        }
        "lookup_terms" | "lookup_terms of a session" => {
            let session = what.ends_with("session").then(|| session.clone());
            let scope = SearchFilter { session, ..SearchFilter::default() };
            assert_eq!(store.lookup_terms(tenant, &scope, &[probe("few7")], 100).await.unwrap()[0].len(), 20);
        }
        "scan_recent" | "scan_recent of a session" => {
            let session = what.ends_with("session").then(|| session.clone());
            let scope = SearchFilter { session, ..SearchFilter::default() };
            assert_eq!(
                store.scan_recent(tenant, &scope, &probe("common"), 20_000, 50).await.unwrap().len(),
                50
            );
        }
        "fetch_hits" => {
            assert_eq!(store.fetch_hits(tenant, None, &places(), i64::MAX).await.unwrap().len(), 20);
        }
        "fetch_neighbours" => {
            assert_eq!(store.fetch_neighbours(tenant, &places(), 1, i64::MAX).await.unwrap().len(), 40);
        }
        "append" => {
            demo.say(&["a", "b"]).await;
        }
        "index_session" => {
            demo.session("other").say(&["a", "b"]).await;
            demo.index_tenant().await;
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn rows_read_on_postgres_do_not_grow_with_the_table() {
    const TIMES: i64 = 8;
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    let (tenant, session) = (TenantId::default(), session_id("demo"));
    let fill =
        FILL.replace("TAG:sSESSION", &lexemes::session_lexeme(&lexemes::tenant_prefix(&tenant), &session));
    sql.run(&fill.replace("TAG", &lexemes::tenant_prefix(&tenant))).await;
    sql.run("ANALYZE").await;
    let database = sql.texts("SELECT current_database()::text").await.remove(0);
    for mode in ["auto", "force_custom_plan", "force_generic_plan"] {
        sql.run(&format!("ALTER DATABASE {database} SET plan_cache_mode = {mode}")).await;
        for &(what, table, most) in CALLS {
            let before = read(&mut sql, table).await;
            let demo = connect(&backend).await;
            for _ in 0..TIMES {
                call(&demo, what).await;
            }
            demo.store.close().await;
            await_statistics(&mut sql).await;
            let after = read(&mut sql, table).await;
            assert_eq!(after.0 - before.0, 0, "{what}, {mode}: all of {table} was read");
            let fetched = after.1 - before.1;
            assert!(fetched <= most * TIMES, "{what}, {mode}: {fetched} rows of {table} were read");
            // Missing statistics would satisfy any limit.
            assert!(fetched >= most.min(50) * TIMES, "{what}, {mode}: {fetched} rows of {table} were read");
        }
    }
}

/// A connection keeps the plans that it made while the tables were nearly empty.
#[tokio::test]
async fn cached_plan_on_postgres_stays_bounded_when_its_table_grows() {
    const SESSIONS: &str = "\
        INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
            activity_hour)
        SELECT 'default', 's' || n, 'u', '{}', 1, 1, now(), now(), 1 FROM generate_series(FROM, TO) AS n;
        INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
        SELECT 'default', 's' || n, 1, 'user', 1, '{\"role\":\"user\",\"content\":\"a\"}', now()
        FROM generate_series(FROM, TO) AS n";
    const STATISTICS_OF_NOW: &str = "\
        ALTER TABLE messages SET (autovacuum_enabled = off);
        ALTER TABLE sessions SET (autovacuum_enabled = off);
        ANALYZE";
    const MANY: i64 = 5000;
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    sql.run(&SESSIONS.replace("FROM, TO", "1, 10")).await;
    sql.run(STATISTICS_OF_NOW).await;
    let demo = connect(&backend).await;
    for _ in 0..10 {
        call(&demo, "index_session").await;
    }
    sql.run(&SESSIONS.replace("FROM, TO", &format!("11, {MANY}"))).await;
    for _ in 0..10 {
        call(&demo, "index_session").await;
    }
    demo.store.close().await;
    await_statistics(&mut sql).await;
    for table in ["messages", "sessions"] {
        let whole = read(&mut sql, table).await.0;
        assert!(whole < MANY, "{table}: {whole} rows were read by scans of the whole");
    }
}

/// Updates that change no indexed column leave no dead index entries. An index on the time itself would have some.
#[tokio::test]
async fn exchanges_and_consolidations_on_postgres_update_no_index_of_sessions() {
    const EXCHANGES: i64 = 200;
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    let demo = connect(&backend).await;
    for exchange in 1..=EXCHANGES {
        demo.say(&["user", "assistant"]).await;
        if exchange % 20 == 0 {
            demo.consolidate(exchange, "a summary of some length").await;
        }
    }
    demo.store.close().await;
    await_statistics(&mut sql).await;
    let statistics = async |sql: &mut Sql, column| {
        sql.number(&format!("SELECT {column} FROM pg_stat_user_tables WHERE relname = 'sessions'")).await
    };
    let (all, hot) = (statistics(&mut sql, "n_tup_upd").await, statistics(&mut sql, "n_tup_hot_upd").await);
    // A consolidation takes the lease, commits and releases it.
    assert_eq!(all, EXCHANGES - 1 + EXCHANGES / 20 * 3);
    // A new hour may begin, and autovacuum may delay the pruning of a page.
    assert!(hot * 20 >= all * 19, "{hot} of {all}");
}
