//! Connections, migrations and closing of a store.

use crate::conversation::{Conversation, exchange_of, user_id};
use crate::postgres_plans::{DIALECT, connect_once};
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use crate::support::store_calls::{self, CALLS, Filled};
use precis::domain::exchange::{Exchange, IdempotencyKey};
use precis::domain::search::analyzer::Analyzer;
use precis::storage::{self, StoreError, StoreOptions};
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

/// Compares a new database with the list that `precis doctor` uses.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_the_schema_are_listed(backend: Backend) {
    let (file, select) = match &backend {
        Backend::Sqlite(_) => (
            "migrations/sqlite/objects.txt",
            "SELECT type || ' ' || name FROM sqlite_schema WHERE substr(name, 1, 7) <> 'sqlite_' ORDER BY 1",
        ),
        Backend::Postgres(_) => (
            "migrations/postgres/objects.txt",
            "SELECT object FROM (SELECT 'table ' || tablename AS object FROM pg_tables WHERE schemaname = 'public'
             UNION SELECT 'index ' || indexname FROM pg_indexes WHERE schemaname = 'public' AND indexdef NOT LIKE '%UNIQUE%'
             UNION SELECT 'key ' || constraint_name || ' of ' || table_name FROM information_schema.table_constraints
             WHERE table_schema = 'public' AND constraint_type IN ('PRIMARY KEY', 'UNIQUE')
             UNION SELECT 'policy ' || policyname || ' of ' || tablename FROM pg_policies WHERE schemaname = 'public'
             UNION SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass FROM pg_trigger WHERE NOT tgisinternal
             UNION SELECT 'function ' || proname || ' with ' || pronargs || ' arguments' FROM pg_proc
             WHERE pronamespace = 'public'::regnamespace
            ) AS objects ORDER BY object COLLATE \"C\"",
        ),
    };
    let objects = Sql::on(&backend).await.texts(select).await.join("\n") + "\n";
    let listed = std::fs::read_to_string(file).unwrap();
    assert_eq!(listed, objects, "{file} must be:\n{objects}");
    assert_eq!(backend.store().await.examine().await.unwrap().missing_object, None);
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
    assert!(matches!(error, StoreError::SchemaVersion { found: 999, .. }), "{error:?}");
    sql.run(&format!("UPDATE _sqlx_migrations SET version = {newest}, success = false WHERE version = 999"))
        .await;
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found, .. } if found < newest), "{error:?}");
}

/// A connection keeps its prepared statements when a newer release adds columns.
#[tokio::test]
async fn statements_stay_valid_when_a_newer_release_adds_columns_on_postgres() {
    const SIZE: i64 = 256;
    const ADD_COLUMNS: &str = "DO $$
        DECLARE name text;
        BEGIN
            FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT LIKE '\\_sqlx%' LOOP
                EXECUTE format('ALTER TABLE %I ADD COLUMN next_text text, ADD COLUMN next_number bigint NOT NULL DEFAULT 7',
                    name);
            END LOOP;
        END $$";
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    sql.run(&store_calls::fill(DIALECT, SIZE)).await;
    let (store, database) = (connect_once(&backend.url()).await, Filled::new(SIZE));
    for (what, results) in CALLS {
        assert_eq!(store_calls::call(&store, &database, what).await, *results, "{what}");
    }
    sql.run(ADD_COLUMNS).await;
    for (what, results) in CALLS {
        assert_eq!(store_calls::call(&store, &database, what).await, *results, "{what} with new columns");
    }
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
        key_share: 0.5,
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

/// SQLite compares a key with a whole row, including all of its overflow pages, in an index and in a table without row ids. So
/// these must not contain large values, or each search for a key beside one of them reads the value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searching_for_a_key_on_sqlite_reads_no_large_values() {
    const WITH_OVERFLOW: &str = "SELECT DISTINCT name FROM dbstat WHERE pagetype = 'overflow' ORDER BY name";
    /// Indexes, also those of tables without row ids.
    const KEYED: &str = "\
        SELECT name FROM sqlite_schema WHERE type = 'index'
        UNION SELECT name FROM pragma_table_list WHERE wr";
    let backend = Backend::sqlite().await;
    let (demo, long) = (Conversation::on(&backend).await, "i".repeat(256));
    let large = (0..100_000).map(|word| format!("word{word}")).collect::<Vec<_>>().join(" ");
    let demo = demo.session(&long);
    for number in 0..3 {
        let metadata = Some(format!(r#"{{"a":"{large}"}}"#));
        let exchange = Exchange { metadata, ..exchange_of(&long, &[&large, "b"]) };
        let key = IdempotencyKey { key: format!("{number:0>255}"), fingerprint: exchange.fingerprint() };
        demo.append(&exchange, Some(&key)).await;
    }
    demo.consolidate(2, &large).await;
    demo.remember(&user_id(&long), &large).await;
    demo.remember(&user_id(&long), &large).await;
    let mut sql = Sql::on(&backend).await;
    let (with_overflow, keyed) = (sql.texts(WITH_OVERFLOW).await, sql.texts(KEYED).await);
    let large_tables = ["memories", "memory_revisions", "messages", "revisions", "sessions"];
    assert_eq!(with_overflow.iter().map(String::as_str).collect::<Vec<_>>(), large_tables);
    assert!(keyed.contains(&"idempotency_keys".to_owned()), "{keyed:?}");
    let slow: Vec<_> = with_overflow.iter().filter(|name| keyed.contains(name)).collect();
    assert!(slow.is_empty(), "{slow:?} contain large values beside keys");
}
