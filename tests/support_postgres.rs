//! What the other tests rely on: databases that are alike at first, separate, and gone afterwards.

#![cfg(test)]

#[path = "support/postgres.rs"]
mod postgres;

use postgres::TestDatabase;
use sqlx::{Connection, Executor, PgConnection};

async fn connect(url: &str) -> PgConnection {
    PgConnection::connect(url).await.expect("the database answers")
}

/// With a connection left open, as a pool leaves them.
async fn migrate(url: String) {
    let mut connection = connect(&url).await;
    connection.execute("CREATE TABLE words (word text)").await.unwrap();
    connection.execute("INSERT INTO words VALUES ('first')").await.unwrap();
    std::mem::forget(connection);
}

async fn words(database: &TestDatabase) -> Vec<String> {
    let mut connection = connect(&database.url()).await;
    sqlx::query_scalar("SELECT word FROM words ORDER BY word").fetch_all(&mut connection).await.unwrap()
}

#[tokio::test]
async fn two_databases_are_separate() {
    let one = TestDatabase::create("trivial", migrate).await;
    let two = TestDatabase::create("trivial", migrate).await;
    let mut connection = connect(&one.url()).await;
    connection.execute("INSERT INTO words VALUES ('second')").await.unwrap();
    assert_eq!(words(&one).await, ["first", "second"]);
    assert_eq!(words(&two).await, ["first"]);
}

#[tokio::test]
async fn database_in_use_is_dropped() {
    let database = TestDatabase::create("trivial", migrate).await;
    let url = database.url();
    let _open = connect(&url).await;
    drop(database);
    assert!(PgConnection::connect(&url).await.is_err());
}

#[tokio::test]
async fn concurrent_tests_create_one_template() {
    let schema = format!("trivial {}", uuid::Uuid::new_v4());
    let made = std::sync::atomic::AtomicUsize::new(0);
    let databases = futures_util::future::join_all((0..8).map(|_| {
        TestDatabase::create(&schema, async |url| {
            made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            migrate(url).await;
        })
    }))
    .await;
    assert_eq!(made.into_inner(), 1);
    for database in &databases {
        assert_eq!(words(database).await, ["first"]);
    }
}

#[tokio::test]
async fn failed_migration_leaves_no_template() {
    let schema = format!("trivial {}", uuid::Uuid::new_v4());
    let failing = {
        let schema = schema.clone();
        tokio::spawn(async move {
            TestDatabase::create(&schema, async |url| {
                connect(&url).await.execute("CREATE TABLE words (half int)").await.unwrap();
                panic!("half a migration");
            })
            .await
        })
    };
    assert!(failing.await.unwrap_err().is_panic());
    let database = TestDatabase::create(&schema, migrate).await;
    assert_eq!(words(&database).await, ["first"]);
}

/// Row-level security is tested only by a role that it holds.
#[tokio::test]
async fn test_role_has_no_privileges() {
    const EXEMPT: &str = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user";
    let database = TestDatabase::create("privileges", async |_| {}).await;
    let admin = PgConnection::connect(&database.admin_url()).await;
    let owner = connect(&database.url()).await;
    for (mut connection, exempt) in [(owner, false), (admin.expect("the server answers"), true)] {
        let is: bool = sqlx::query_scalar(EXEMPT).fetch_one(&mut connection).await.expect("an answer");
        assert_eq!(is, exempt);
    }
}
