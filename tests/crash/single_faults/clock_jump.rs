//! A clock that was ahead and is corrected. The times it left in the database must not delay anything.

use crate::service::{Precis, messages, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::json;
use test_case::test_case;

const TOMORROW: &str = "(unixepoch() + 86400) * 1000000";

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_with_time_of_fast_clock_is_expired(backend: Backend) {
    let model = ModelServer::start().await;
    let service = Precis::on(&backend).model(&model.base_url()).start().await;
    service.record("s", &messages(102)).await;
    backend
        .execute(
            "UPDATE sessions SET lease_token = gen_random_uuid(), lease_until = now() + interval '1 day'",
            &format!("UPDATE sessions SET lease_token = randomblob(16), lease_until = {TOMORROW}"),
        )
        .await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "consolidated");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_time_of_fast_clock_is_ignored(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::fail(500, "down"));
    let service = Precis::on(&backend).model(&model.base_url()).start().await;
    service.record("s", &messages(102)).await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "failed");
    assert_eq!(
        outcome(&service.context("s", &json!({})).await, 102),
        "failed",
        "the retry time is not reached"
    );
    backend
        .execute(
            "UPDATE sessions SET retry_at = now() + interval '1 day'",
            &format!("UPDATE sessions SET retry_at = {TOMORROW}"),
        )
        .await;
    assert_eq!(outcome(&service.context("s", &json!({})).await, 102), "consolidated");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchanges_after_clock_correction_keep_their_order(backend: Backend) {
    let service = Precis::on(&backend).start().await;
    let all = messages(6);
    service.record("s", &all[..2]).await;
    backend
        .execute(
            "UPDATE sessions SET updated_at = now() + interval '1 day'",
            &format!("UPDATE sessions SET updated_at = {TOMORROW}"),
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
