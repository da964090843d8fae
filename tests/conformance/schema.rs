//! The store as a whole: how it is reached, its schema, its end.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use precis::domain::search::analyzer::Analyzer;
use precis::storage::{self, StoreError, StoreOptions};
use std::time::Duration;
use test_case::test_case;

/// A database without a schema, in place of one with it.
async fn empty(backend: Backend) -> Backend {
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
async fn a_store_is_ready_once_it_is_migrated(backend: Backend) {
    let backend = empty(backend).await;
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
async fn migrating_again_changes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let applied = "SELECT count(*) FROM _sqlx_migrations";
    let count = sql.figure(applied).await;
    assert!(count > 0);
    demo.store.migrate().await.unwrap();
    backend.store().await.migrate().await.unwrap();
    assert_eq!((sql.figure(applied).await, sql.rows().await), (count, rows));
    demo.store.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_may_migrate_at_once(backend: Backend) {
    let backend = empty(backend).await;
    // An embedded database has one process, and with it one store.
    let one = backend.store().await;
    let two = if matches!(backend, Backend::Sqlite(_)) { one.clone() } else { backend.store().await };
    let (first, second, third) = tokio::join!(one.migrate(), two.migrate(), one.migrate());
    first.and(second).and(third).unwrap();
    two.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_schema_than_this_versions_is_told(backend: Backend) {
    let store = backend.store().await;
    let mut sql = Sql::on(&backend).await;
    let newest = sql.figure("SELECT max(version) FROM _sqlx_migrations").await;
    sql.run(&format!("UPDATE _sqlx_migrations SET version = 999 WHERE version = {newest}")).await;
    let error = store.check_ready().await.unwrap_err();
    assert!(
        matches!(error, StoreError::SchemaVersion { found: 999, expected } if expected == newest),
        "{error:?}"
    );
    // An old version leaves a newer schema alone.
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
async fn a_closed_store_is_unavailable(backend: Backend) {
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
async fn a_url_that_cannot_be_used_is_refused_without_its_password() {
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
async fn a_server_that_does_not_answer_is_unavailable() {
    // Port 1 of the loopback: nobody listens there. A connection is tried again for as long as one may wait for it.
    let hasty = StoreOptions { acquire_timeout: Duration::from_millis(50), ..options() };
    let store = storage::connect("postgres://ada:hunter2@127.0.0.1:1/x", &hasty).await.unwrap();
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(!format!("{error} {error:?} {store:?}").contains("hunter2"));
}
