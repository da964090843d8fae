//! A summary that exceeds the input limit of its pool is compressed in groups of paragraphs. No stored summary exceeds the limit
//! of imports.

use crate::batches::assert_within;
use crate::harness::{COMPRESSED, consolidate, covering, is_meta, record, revisions, start, state, turns};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer, USAGE};
use reqwest::{Method, StatusCode};
use serde_json::json;
use test_case::test_case;

const LIMIT: usize = 3000;

/// The limit of imports and edits.
const MAX_SUMMARY: usize = 1024 * 1024;

/// Returns the summary in a prompt for a compression.
fn summary_in(call: &Call) -> String {
    let (_, block) = call.user().split_once("\n<summary>\n").expect("the block begins");
    serde_json::from_str(block.lines().next().expect("a line")).expect("a JSON string")
}

/// Returns the numbers of the paragraphs of [`long_summary`] in a text.
fn paragraphs_in(text: &str) -> Vec<usize> {
    text.split_whitespace().filter_map(|word| word.strip_prefix('p')?.parse().ok()).collect()
}

/// Answers as a model that compresses each paragraph of [`long_summary`] to its number, and other summaries to [`COMPRESSED`].
fn compressing(call: &Call) -> String {
    if !is_meta(call) {
        return covering(call);
    }
    let summary = summary_in(call);
    if !summary.contains("word") {
        return COMPRESSED.to_owned();
    }
    paragraphs_in(&summary).iter().map(|number| format!("p{number}")).collect::<Vec<_>>().join(" ")
}

/// Returns a summary of 120 paragraphs, which takes several calls within [`LIMIT`].
fn long_summary() -> String {
    let paragraph = |number| format!("p{number} {}", ["word"; 60].join(" "));
    (1..=120).map(paragraph).collect::<Vec<_>>().join("\n\n")
}

/// Consolidates a new session, replaces its summary, and records further messages.
async fn with_summary(app: &TestApp, session: &str, summary: &str) {
    record(app, session, &turns(1..=22)).await;
    assert_eq!(consolidate(app, session).await.0, StatusCode::CREATED);
    let edit = json!({"summary": summary, "based_on": 1});
    app.post(&format!("/sessions/{session}/revisions"), edit).await.ok(201);
    record(app, session, &turns(23..=24)).await;
}

/// Exports a session and imports it as another one.
async fn copy(app: &TestApp, from: &str, to: &str) {
    let export = app.get(&format!("/sessions/{from}/export")).await.text;
    let import = app.request(Method::POST, &format!("/sessions/{to}/import"));
    import.header("content-type", "application/x-ndjson").body(export).await.ok(201);
    assert_eq!(state(app, from).await["summary"], state(app, to).await["summary"]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn summary_beyond_input_limit_is_compressed_in_groups(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(compressing));
    let limit = LIMIT.to_string();
    for (session, word_limit, is_repeated) in [("once", "600", false), ("again", "100", true)] {
        let set =
            [("llm.models.small.input_limit", &*limit), ("consolidation.summary_word_limit", word_limit)];
        let app = start(&backend, &model, &set).await;
        with_summary(&app, session, &long_summary()).await;
        let before = model.calls().len();
        assert_eq!(consolidate(&app, session).await.0, StatusCode::CREATED);
        let calls = model.calls().split_off(before);
        assert_within(&calls, LIMIT);
        let mut compressions: Vec<Call> = calls.into_iter().filter(is_meta).collect();
        let count = compressions.len();
        let last = if is_repeated { compressions.pop() } else { None };
        assert!(compressions.len() > 2, "{count} calls");
        let read: Vec<usize> =
            compressions.iter().flat_map(|call| paragraphs_in(&summary_in(call))).collect();
        assert_eq!(read, (1..=120).collect::<Vec<_>>(), "each paragraph once, in order");
        let joined = compressions.iter().map(compressing).collect::<Vec<_>>().join("\n\n");
        let revision = revisions(&app, session).await.pop().unwrap();
        match last {
            Some(last) => {
                assert_eq!(summary_in(&last), joined);
                assert_eq!(revision["text"], COMPRESSED);
            }
            None => assert_eq!(revision["text"], joined),
        }
        let meta = &revision["meta"];
        let added = revision["added"].as_str().unwrap();
        assert_eq!(meta["text_before"], format!("{}\n\n{added}", long_summary()));
        assert_eq!((&meta["model"], &meta["usage"]["calls"]), (&json!("small"), &json!(count)));
        assert_eq!(meta["usage"]["input_tokens"], USAGE.0 * count as u64);
        app.stop().await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_of_one_group_keeps_its_text_and_compresses_the_others(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(compressing));
    let limit = LIMIT.to_string();
    let app = start(&backend, &model, &[("llm.models.small.input_limit", &*limit)]).await;
    with_summary(&app, "s", &long_summary()).await;
    let before = model.calls().len();
    model.push(Behaviour::reply(compressing));
    model.push(Behaviour::reply(compressing));
    model.push(Behaviour::fail(500, "down"));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    assert!(model.calls().len() - before > 3, "the other groups are compressed");
    let revision = revisions(&app, "s").await.pop().unwrap();
    assert!(revision["meta"].is_object(), "{revision}");
    let text = revision["text"].as_str().unwrap();
    assert!(text.len() < long_summary().len() / 2, "{text}");
    let kept = long_summary().split("\n\n").filter(|paragraph| text.contains(paragraph)).count();
    assert!(kept > 0, "the group that failed is complete: {text}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn summary_that_no_model_compresses_is_compressed_without_one(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[]).await;
    let largest = "word ".repeat(MAX_SUMMARY / 5 + 1).split_at(MAX_SUMMARY).0.to_owned();
    with_summary(&app, "s", &largest).await;
    let old = state(&app, "s").await;
    let is_broken = |call: &Call| {
        if is_meta(call) { Behaviour::fail(500, "down") } else { Behaviour::reply(covering) }
    };
    model.default(Behaviour::choose(is_broken));
    // The summary with the added text would exceed the limit of imports.
    copy(&app, "s", "before").await;
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let revision = revisions(&app, "s").await.pop().unwrap();
    assert_eq!(revision["meta"]["model"], "extractive", "{}", revision["meta"]);
    assert!(revision["meta"]["text_before"] == largest);
    let now = state(&app, "s").await;
    assert!(now["cursor"].as_u64() > old["cursor"].as_u64());
    assert!(now["summary"]["words"].as_u64() <= Some(600), "{}", now["summary"]["words"]);
    copy(&app, "s", "after").await;
}
