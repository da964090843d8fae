//! Checks that the official clients accept contexts of generated sessions and of all shapes of the corpus as request
//! bodies in both formats: the bodies match the declared types, and the clients send them.
//!
//! `scripts/sdks` installs the clients, `scripts/sdks_check.py` runs them:
//!
//! ```sh
//! scripts/sdks cargo test --locked --test sdks -- --ignored
//! ```
#![cfg(test)]

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use std::io::Write as _;
use std::process::{Command, Stdio};
use support::app::TestApp;
use support::backend::Backend;
use support::lists::generated::sessions;
use support::shapes;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod lists;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod shapes;
}

const SESSIONS: usize = 40;

/// Returns a request body with the messages of a context.
fn body(context: &Value, max_tokens: Option<u32>) -> Value {
    let mut body = json!({"model": "m", "messages": context["messages"]});
    if let Some(system) = context.get("system") {
        body["system"] = system.clone();
    }
    if let Some(most) = max_tokens {
        body["max_tokens"] = most.into();
    }
    body
}

#[tokio::test]
#[ignore = "needs scripts/sdks"]
async fn official_clients_accept_every_list() {
    let backend = Backend::sqlite().await;
    let set = [("consolidation.threshold", "12"), ("consolidation.keep_recent", "3")];
    let app = TestApp::start(&backend, &set).await;
    let mut runner = TestRunner::deterministic();
    let mut lines = Vec::new();
    for session in 0..SESSIONS {
        let messages = sessions(12).new_tree(&mut runner).expect("a session").current();
        let session = format!("s{session}");
        for part in messages.chunks(6) {
            app.record(&session, part).await;
            for asked in [
                json!({}),
                json!({"system_prompt": "Be kind.", "user_message": "And now?", "max_tokens": 1500}),
                json!({"format": "anthropic"}),
                json!({"format": "anthropic", "system_prompt": "Be kind.", "user_message": "And now?", "max_tokens": 1500}),
                json!({"format": "anthropic", "system_prompt": "Be kind.", "cache_control": true}),
            ] {
                let format = asked["format"].as_str().unwrap_or("openai");
                let max_tokens = (format == "anthropic").then_some(100);
                let body = body(&app.context(&session, &asked).await, max_tokens);
                lines.push(json!({"format": format, "body": body}).to_string());
            }
        }
    }
    assert_clients_accept(&lines);
}

#[tokio::test]
#[ignore = "needs scripts/sdks"]
async fn official_clients_accept_every_shape() {
    let app = TestApp::on_sqlite(&[]).await;
    let mut lines = Vec::new();
    for shape in shapes::load().iter().filter(|shape| shape.rejects.is_none()) {
        app.post(&format!("/sessions/{}/exchanges", shape.name), shape.exchange()).await.ok(201);
        for format in ["openai", "anthropic"] {
            if format == shape.format && shape.produced.starts_with("beta: ") {
                continue; // The types of the client's beta are others.
            }
            let asked = json!({"format": format, "user_message": "And now?"});
            let max_tokens = (format == "anthropic").then_some(100);
            let body = body(&app.context(&shape.name, &asked).await, max_tokens);
            lines.push(json!({"format": format, "body": body, "name": shape.name}).to_string());
        }
    }
    assert!(lines.len() > 100, "{}", lines.len());
    assert_clients_accept(&lines);
}

/// Validates requests with the official clients.
fn assert_clients_accept(lines: &[String]) {
    let python =
        std::env::var("PRECIS_SDKS_PYTHON").expect("PRECIS_SDKS_PYTHON is not set: run this by scripts/sdks");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/sdks_check.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let mut input = child.stdin.take().expect("piped");
    // A failed check stops reading and prints its reason.
    let _ = input.write_all((lines.join("\n") + "\n").as_bytes());
    drop(input);
    let output = child.wait_with_output().expect("ended");
    assert!(output.status.success(), "see above");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), lines.len().to_string());
}
