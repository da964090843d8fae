//! Consolidates conversations with a real and weak model: prompts overflow its context, and it repeats itself, leaks marks of its
//! template, and writes about something else. Whatever it does, each message is in the summary or in the tail, and the summary is short
//! and clean. Prints the outcome of each run and the failures of the model:
//!
//! ```sh
//! scripts/local-model cargo test --locked --test local_model -- --ignored --nocapture
//! ```
#![cfg(test)]

use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use support::app::TestApp;
use support::backend::Backend;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

/// The model answers in seconds, and a run has several calls.
const PATIENCE: Duration = Duration::from_mins(15);

const SET: [(&str, &str); 12] = [
    ("consolidation.threshold", "20"),
    ("consolidation.keep_recent", "6"),
    ("consolidation.mode", "background"),
    ("consolidation.summary_word_limit", "200"),
    ("llm.models.small.provider", "local"),
    ("llm.models.small.model", "gemma"),
    ("llm.models.small.output_limit", "800"),
    ("llm.models.small.timeout", "120s"),
    ("llm.models.small.idle_timeout", "60s"),
    ("llm.models.small.retries", "0"),
    ("llm.pools.default.models", "small,extractive"),
    ("llm.pools.default.deadline", "300s"),
];

/// Returns the messages of a conversation of `tests/data/facts`.
fn conversation(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/facts/{name}.json"));
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON");
    let message = |said: &Value| json!({"role": said["role"], "content": said["text"]});
    file["messages"].as_array().expect("messages").iter().map(message).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a model: scripts/local-model"]
async fn weak_model_loses_no_message_and_leaves_no_marks() {
    let base_url = std::env::var("PRECIS_LOCAL_MODEL").expect("run this by scripts/local-model");
    let backend = Backend::sqlite().await;
    let mut set = vec![("llm.providers.local.base_url", base_url.as_str())];
    set.extend(SET);
    let app = TestApp::start(&backend, &set).await;
    for name in ["en-programming", "de-support", "ja-travel"] {
        let messages = conversation(name);
        let started = Instant::now();
        // In two parts, so that the second summary continues the first one.
        for part in messages.chunks(messages.len().div_ceil(2)) {
            app.post(&format!("/sessions/{name}/exchanges"), json!({"messages": part})).await.ok(201);
            app.context(name, &json!({})).await;
            while app.get(&format!("/sessions/{name}")).await["consolidation"]["state"] == "running" {
                assert!(started.elapsed() < PATIENCE, "{name}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
        let context = app.context(name, &json!({"mode": "off"})).await;
        let coverage = &context["coverage"];
        let through = coverage["summary_through"].as_u64().expect("a number");
        assert!(through > 0 && coverage["verbatim_from"] == through + 1, "{coverage}");
        assert_eq!((&coverage["omitted"], &coverage["last_seq"]), (&json!([]), &json!(messages.len())));
        let session = app.get(&format!("/sessions/{name}")).await;
        let summary = session["summary"]["text"].as_str().expect("a text");
        for mark in ["<|", "|>", "<start_of_turn>", "<end_of_turn>", "<think", "<conversation>", "<previous>"]
        {
            assert!(!summary.contains(mark), "{mark} in {summary}");
        }
        assert!(session["summary"]["words"].as_u64() <= Some(400), "twice the limit at most: {summary}");
        println!("== {name}: {} messages, {:.0?}", messages.len(), started.elapsed());
        for record in
            app.get(&format!("/sessions/{name}/consolidations")).await["items"].as_array().expect("records")
        {
            println!("   {} by {}, {}", record["outcome"], record["models"], record["usage"]);
        }
        let model = app.get("/models").await["models"].as_array().expect("models")[1].clone();
        println!(
            "   last failure: {}, input limit {}",
            model["last_failure"]["reason"], model["input_limit"]
        );
        println!("   {} words by {}: {summary}", session["summary"]["words"], context["summary"]["model"]);
    }
    let metrics = app.get("/metrics").await.text;
    metrics
        .lines()
        .filter(|line| line.starts_with("precis_llm_failures_total{model=\"small\""))
        .filter(|line| !line.ends_with(" 0"))
        .for_each(|line| println!("{line}"));
}
