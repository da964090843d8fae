//! Connections, migrations and closing of a store.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use precis::domain::id::TenantId;
use precis::domain::search::analyzer::Analyzer;
use precis::domain::search::lexemes::{self, TermPattern, TermQuery};
use precis::storage::search::SearchFilter;
use precis::storage::{self, StoreError, StoreOptions};
use sqlx::migrate::Migrator;
use sqlx::{Connection as _, PgConnection, SqliteConnection};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;
use test_case::test_case;

/// Replaces the database by one without a schema.
async fn remove_schema(backend: Backend) -> Backend {
    match backend {
        Backend::Sqlite(folder) => {
            for file in std::fs::read_dir(folder.path()).unwrap() {
                std::fs::remove_file(file.unwrap().path()).unwrap();
            }
            Backend::Sqlite(folder)
        }
        Backend::Postgres(_) => {
            Backend::Postgres(Box::new(TestDatabase::create("empty", async |_| {}).await))
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_is_ready_after_migration(backend: Backend) {
    let backend = remove_schema(backend).await;
    let store = backend.store().await;
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found: 0, expected: 1.. }), "{error:?}");
    store.migrate().await.unwrap();
    store.check_ready().await.unwrap();
    backend.store().await.check_ready().await.unwrap();
    assert_eq!(Conversation::on(&backend).await.say(&["a", "b"]).await.last_seq, 2);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_migration_changes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let applied = "SELECT count(*) FROM _sqlx_migrations";
    let count = sql.number(applied).await;
    assert!(count > 0);
    demo.store.migrate().await.unwrap();
    backend.store().await.migrate().await.unwrap();
    assert_eq!((sql.number(applied).await, sql.rows().await), (count, rows));
    demo.store.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_migrations_succeed(backend: Backend) {
    let backend = remove_schema(backend).await;
    // SQLite supports a single process and therefore a single store.
    let one = backend.store().await;
    let two = if matches!(backend, Backend::Sqlite(_)) { one.clone() } else { backend.store().await };
    let (first, second, third) = tokio::join!(one.migrate(), two.migrate(), one.migrate());
    first.and(second).and(third).unwrap();
    two.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_or_newer_schema_is_reported(backend: Backend) {
    let store = backend.store().await;
    let mut sql = Sql::on(&backend).await;
    let newest = sql.number("SELECT max(version) FROM _sqlx_migrations").await;
    sql.run(&format!("UPDATE _sqlx_migrations SET version = 999 WHERE version = {newest}")).await;
    let error = store.check_ready().await.unwrap_err();
    assert!(
        matches!(error, StoreError::SchemaVersion { found: 999, expected } if expected == newest),
        "{error:?}"
    );
    // An older version does not change a newer schema.
    let error = store.migrate().await.unwrap_err();
    assert!(matches!(error, StoreError::Migration(_)), "{error:?}");
    sql.run(&format!("UPDATE _sqlx_migrations SET version = {newest}, success = false WHERE version = 999"))
        .await;
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found, .. } if found < newest), "{error:?}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_store_is_unavailable(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    demo.store.close().await;
    let read = demo.store.session(&demo.tenant, &demo.session).await.map(|_| ());
    let written = demo.store.erase_session(&demo.tenant, &demo.session).await.map(|_| ());
    for result in [read, written, demo.store.check_ready().await] {
        assert!(matches!(result, Err(StoreError::Unavailable(_))), "{result:?}");
    }
    assert_eq!(Conversation::on(&backend).await.history().await.len(), 2);
}

fn options() -> StoreOptions {
    StoreOptions {
        max_connections: 2,
        acquire_timeout: Duration::from_secs(5),
        statement_timeout: Duration::from_secs(30),
        search: Some(Analyzer::default()),
    }
}

#[tokio::test]
async fn invalid_url_is_rejected_without_revealing_the_password() {
    for url in [
        "mysql://ada:hunter2@host/x",
        "hunter2",
        "",
        "postgres://ada:hunter2@host:port/x",
        "sqlite::memory:",
        "sqlite://x?mode=memory",
        "sqlite://x?mode=hunter2",
    ] {
        let error = storage::connect(url, &options()).await.unwrap_err();
        assert!(matches!(error, StoreError::Url(_)), "{url}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn unreachable_postgres_is_unavailable() {
    // Port 1 of the loopback is closed. The pool retries until the acquire timeout.
    let hasty = StoreOptions { acquire_timeout: Duration::from_millis(50), ..options() };
    let store = storage::connect("postgres://ada:hunter2@127.0.0.1:1/x", &hasty).await.unwrap();
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(!format!("{error} {error:?} {store:?}").contains("hunter2"));
}

/// The migration to version 13 replaces the lists of pending messages by a state of each session.
#[test_case(Backend::sqlite().await, "english-2"; "sqlite")]
#[test_case(Backend::postgres().await, "english-2"; "postgres")]
#[test_case(Backend::sqlite().await, "off"; "sqlite without search")]
#[test_case(Backend::postgres().await, "off"; "postgres without search")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_pending_in_version_12_are_found_after_the_migration(backend: Backend, analyzer: &str) {
    let backend = remove_schema(backend).await;
    let store = backend.store().await;
    let is_sqlite = matches!(backend, Backend::Sqlite(_));
    let folder = if is_sqlite { "migrations/sqlite" } else { "migrations/postgres" };
    let mut version_12 = Migrator::new(Path::new(folder)).await.unwrap();
    version_12.migrations.to_mut().retain(|migration| migration.version <= 12);
    if is_sqlite {
        // The store creates the file.
        store.check_ready().await.unwrap_err();
        let mut connection = SqliteConnection::connect(&backend.url()).await.unwrap();
        version_12.run_direct(None, &mut connection, false).await.unwrap();
    } else {
        let mut connection = PgConnection::connect(&backend.url()).await.unwrap();
        version_12.run_direct(None, &mut connection, false).await.unwrap();
    }
    let mut sql = Sql::on(&backend).await;
    let (now, incarnation, lexemes) = if is_sqlite {
        ("1760000000000000", "randomblob(16)", "'PREFIXplum'")
    } else {
        ("now()", "gen_random_uuid()", "array_to_tsvector(ARRAY['PREFIXplum'])")
    };
    let prefix = lexemes::tenant_prefix(&TenantId::default());
    for (session, indexed, reindexed, pending) in
        [("complete", 4, 4, 5), ("pending", 2, 4, 3), ("reindexed", 1, 1, 5), ("both", 3, 0, 4)]
    {
        let rows = format!(
            "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
                activity_hour, incarnation)
            VALUES ('default', '{session}', '', '{{}}', 4, 4, {now}, {now}, 0, {incarnation});
            INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
            WITH RECURSIVE n (seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n WHERE seq < 4)
            SELECT 'default', '{session}', seq, 'user', 1, '{{\"role\":\"user\",\"content\":\"plums\"}}', {now} FROM n;
            INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
            SELECT tenant_id, session_id, seq, created_at, {lexemes} FROM messages
            WHERE session_id = '{session}' AND seq <= {indexed};
            INSERT INTO search_reindex (tenant_id, session_id, done_seq, through_seq)
            SELECT 'default', '{session}', {reindexed}, 4 WHERE {reindexed} < 4;
            INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
            SELECT 'default', '{session}', {pending}, 4, 99, {now} WHERE {pending} <= 4"
        );
        sql.run(&rows.replace("PREFIX", &prefix)).await;
    }
    sql.run(&format!("INSERT INTO search_analyzer (id, version) VALUES (1, '{analyzer}')")).await;
    store.migrate().await.unwrap();
    // Without search, nothing says which messages have an entry.
    let missing = if analyzer == "off" { 16 } else { 2 + 3 + 4 };
    assert_eq!(store.index_state().await.unwrap().messages, missing);
    let demo = Conversation::on(&backend).await;
    let plum = TermQuery(vec![vec![TermPattern::exact("plum")]]);
    let found = demo.lookup_terms(&SearchFilter::default(), &plum, 99).await;
    let found: BTreeSet<(String, i64)> =
        found.into_iter().map(|found| (found.session.to_string(), found.seq)).collect();
    assert_eq!(found.len(), 16, "{found:?}");
    assert_eq!(sql.number("SELECT count(*) FROM search").await, 16);
}
