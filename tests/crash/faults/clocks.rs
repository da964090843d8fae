//! A clock that was ahead and is put right: what it left in the store makes nobody wait for it.

use crate::service::{Precis, messages, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, SqliteConnection};
use test_case::test_case;

/// Sets the times of every session, as a clock left them that was a day ahead.
async fn a_day_ahead(backend: &Backend, postgres: &str, sqlite: &str) {
    match backend {
        Backend::Postgres(database) => {
            let mut connection = PgConnection::connect(&database.admin_url()).await.expect("connected");
            connection.execute(AssertSqlSafe(postgres.to_owned())).await.expect("set");
        }
        Backend::Sqlite(_) => {
            let mut connection = SqliteConnection::connect(&backend.url()).await.expect("connected");
            connection.execute(AssertSqlSafe(sqlite.to_owned())).await.expect("set");
        }
    }
}

const DAY: &str = "(unixepoch() + 86400) * 1000000";

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_a_clock_that_was_ahead_is_over(backend: Backend) {
    let model = ModelServer::start().await;
    let service = Precis::new().env("DATABASE_URL", &backend.url()).model(&model.base_url()).start().await;
    service.record("s", &messages(102)).await;
    a_day_ahead(
        &backend,
        "UPDATE sessions SET lease_token = gen_random_uuid(), lease_until = now() + interval '1 day'",
        &format!("UPDATE sessions SET lease_token = randomblob(16), lease_until = {DAY}"),
    )
    .await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "consolidated");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_of_a_clock_that_was_ahead_is_over(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::fail(500, "down"));
    let service = Precis::new().env("DATABASE_URL", &backend.url()).model(&model.base_url()).start().await;
    service.record("s", &messages(102)).await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "failed");
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "failed", "it waits");
    a_day_ahead(
        &backend,
        "UPDATE sessions SET retry_at = now() + interval '1 day'",
        &format!("UPDATE sessions SET retry_at = {DAY}"),
    )
    .await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "consolidated");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_after_a_clock_was_put_back_keep_their_order(backend: Backend) {
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    let all = messages(6);
    service.record("s", &all[..2]).await;
    a_day_ahead(
        &backend,
        "UPDATE sessions SET updated_at = now() + interval '1 day'",
        &format!("UPDATE sessions SET updated_at = {DAY}"),
    )
    .await;
    service.record("s", &all[2..4]).await;
    service.record("s", &all[4..]).await;
    assert_eq!(service.history("s").await, all);
    let page = service.get("/sessions/s/messages").await;
    let times: Vec<&str> = page["items"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|item| item["created_at"].as_str().expect("a time"))
        .collect();
    assert!(times.is_sorted(), "{times:?}");
}
