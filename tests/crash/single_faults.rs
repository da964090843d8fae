//! Single faults: the responses that clients and operators see during a fault, and the recovery after it.

mod client_disconnect;
mod clock_jump;
mod postgres;
mod sqlite_file;

use crate::service::{Process, SOON};
use crate::support::client::{Response, TestClient};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

/// Sends an exchange of two messages with a key. The same number is the same request.
async fn send_exchange(service: &TestClient, number: usize) -> Response {
    let body = json!({"user_message": format!("Question {number}?"), "assistant_reply": format!("Answer {number}.")});
    service.post("/sessions/s/exchanges", body).header("Idempotency-Key", format!("key-{number}")).await
}

async fn append_exchange(service: &Process, number: usize) {
    let response = send_exchange(service, number).await;
    assert_eq!(response.status, 201, "{response}\n{}", service.log().join("\n"));
}

/// Checks for a 503 that tells the client when and how to retry a write.
fn assert_store_unavailable(response: &Response) {
    let detail = response.problem(503, "store-unavailable");
    assert!(response.header("retry-after").is_some(), "{response}");
    assert!(detail.contains("same Idempotency-Key"), "{detail}");
}

async fn status(service: &TestClient, path: &str) -> u16 {
    service.get(path).await.status
}

/// Checks that `/livez` answers quickly, in any state of the database.
async fn assert_live(service: &TestClient) {
    let started_at = Instant::now();
    assert_eq!(status(service, "/livez").await, 200);
    assert!(started_at.elapsed() < Duration::from_secs(2), "{:?}", started_at.elapsed());
}

async fn wait_for_readyz(service: &TestClient, expected: u16) {
    let started_at = Instant::now();
    while status(service, "/readyz").await != expected {
        assert_live(service).await;
        assert!(started_at.elapsed() < SOON, "/readyz does not return {expected}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that the history consists of these exchanges, each once and complete.
async fn assert_history(service: &TestClient, numbers: std::ops::Range<usize>) {
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
