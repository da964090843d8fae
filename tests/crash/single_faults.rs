//! Single faults: the responses that clients and operators see during a fault, and the recovery after it.

mod client_disconnect;
mod clock_jump;
mod postgres;
mod sqlite_file;

use crate::service::{Process, SOON};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

/// Sends an exchange of two messages with a key. The same number is the same request.
async fn send_exchange(service: &Process, number: usize) -> Response {
    let body = json!({"user_message": format!("Question {number}?"), "assistant_reply": format!("Answer {number}.")});
    let request = service.request(Method::POST, "/sessions/s/exchanges").json(&body);
    request.header("Idempotency-Key", format!("key-{number}")).send().await.expect("an answer")
}

async fn append_exchange(service: &Process, number: usize) -> Value {
    let response = send_exchange(service, number).await;
    let status = response.status();
    let text = response.text().await.expect("a body");
    assert_eq!(status, StatusCode::CREATED, "{text}\n{}", service.log().join("\n"));
    serde_json::from_str(&text).expect("JSON")
}

/// Checks for a 503 that tells the client when and how to retry a write.
async fn assert_store_unavailable(response: Response) {
    let (status, retry_after) = (response.status(), response.headers().get("retry-after").cloned());
    let problem: Value = response.json().await.expect("JSON");
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{problem}");
    assert!(retry_after.is_some(), "{problem}");
    assert_eq!(problem["type"], "urn:precis:problem:store-unavailable");
    assert!(problem["detail"].as_str().expect("text").contains("same Idempotency-Key"), "{problem}");
}

async fn status(service: &Process, path: &str) -> StatusCode {
    service.request(Method::GET, path).send().await.expect("an answer").status()
}

/// Checks that `/livez` answers quickly, whatever the state of the database is.
async fn assert_live(service: &Process) {
    let started_at = Instant::now();
    assert_eq!(status(service, "/livez").await, StatusCode::OK);
    assert!(started_at.elapsed() < Duration::from_secs(2), "{:?}", started_at.elapsed());
}

async fn wait_for_readyz(service: &Process, expected: StatusCode) {
    let started_at = Instant::now();
    while status(service, "/readyz").await != expected {
        assert_live(service).await;
        assert!(started_at.elapsed() < SOON, "/readyz does not return {expected}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that the history consists of these exchanges, each once and complete.
async fn assert_history(service: &Process, numbers: std::ops::Range<usize>) {
    let expected: Vec<Value> = numbers
        .flat_map(|number| {
            [
                json!({"role": "user", "content": format!("Question {number}?")}),
                json!({"role": "assistant", "content": format!("Answer {number}.")}),
            ]
        })
        .collect();
    assert_eq!(service.history("s").await, expected);
}
