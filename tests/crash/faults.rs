//! One fault at a time: what clients and operators get to see of it, and that it passes.

mod clients;
mod clocks;
mod file;
mod server;

use crate::service::{Process, SOON};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

/// An exchange of two messages, sent with a key; the same for the same number.
async fn exchange(service: &Process, number: usize) -> Response {
    let body = json!({"user_message": format!("Question {number}?"), "assistant_reply": format!("Answer {number}.")});
    let request = service.request(Method::POST, "/sessions/s/exchanges").json(&body);
    request.header("Idempotency-Key", format!("key-{number}")).send().await.expect("an answer")
}

async fn recorded(service: &Process, number: usize) -> Value {
    let response = exchange(service, number).await;
    let status = response.status();
    let text = response.text().await.expect("a body");
    assert_eq!(status, StatusCode::CREATED, "{text}\n{}", service.log().join("\n"));
    serde_json::from_str(&text).expect("JSON")
}

/// A 503 that says when to come back, and how to repeat a write.
async fn refused(response: Response) {
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

/// Whether the process runs is one thing; the fault doesn't touch it.
async fn lives(service: &Process) {
    let began = Instant::now();
    assert_eq!(status(service, "/livez").await, StatusCode::OK);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

/// Waits until `/readyz` says this.
async fn until_ready_is(service: &Process, wanted: StatusCode) {
    let began = Instant::now();
    while status(service, "/readyz").await != wanted {
        lives(service).await;
        assert!(began.elapsed() < SOON, "/readyz never says {wanted}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The history is these exchanges, each once and whole.
async fn history_is(service: &Process, numbers: std::ops::Range<usize>) {
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
