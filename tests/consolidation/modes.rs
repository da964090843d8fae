//! The modes of consolidation, and the limit of the tail without consolidation.

use crate::harness::{
    Answer, PATIENCE, consolidate, context, covering, named, plain, record, revisions, start, state, turns,
    until,
};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::StatusCode;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use test_case::test_case;
use tokio::sync::Semaphore;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn background_mode_responds_before_consolidation(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    let app = start(&backend, &model, &[("consolidation.mode", "background")]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    // The exchange has started it.
    model.until_calls(1).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("in_progress", 102));
    assert_eq!(state(&app, "s").await["consolidation"]["state"], "running");
    release.add_permits(1);
    let done = until(&app, "s", |state| state["cursor"] == 82).await;
    assert_eq!(done["summary"]["text"], "They met.");
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len(), answer.summary.words), ("not_due", 20, 2));
    assert_eq!((model.calls().len(), revisions(&app, "s").await.len()), (1, 1));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_off_consolidates_on_explicit_request_only(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[("consolidation.mode", "off")]).await;
    let given = turns(1..=102);
    for session in ["inline", "background", "now"] {
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!((answer.outcome(), answer.verbatim().len()), ("disabled", 102));
    }
    assert_eq!(model.calls().len(), 0);
    let answer = context(&app, "inline", &json!({"mode": "inline"}), &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("consolidated", 20));
    let answer = context(&app, "background", &json!({"mode": "background"}), &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("scheduled", 102));
    until(&app, "background", |state| state["cursor"] == 82).await;
    assert_eq!(consolidate(&app, "now").await.0, StatusCode::CREATED);
    // And in the opposite direction.
    let inline = start(&backend, &model, &[]).await;
    record(&inline, "off", &given).await;
    let answer = context(&inline, "off", &json!({"mode": "off"}), &given).await;
    assert_eq!((answer.outcome(), model.calls().len()), ("disabled", 3));
}

/// Checks a context without consolidation: the complete tail up to the limit, then the newest messages; from
/// 80 % on, a notice.
fn assert_bounded(answer: &Answer, tail: usize) {
    let noticed = answer.system().ends_with("save it with the memory tool now.");
    assert_eq!(noticed, tail >= 160, "a tail of {tail}");
    let cursor = answer.coverage.summary_through;
    let omitted: Vec<_> =
        answer.coverage.omitted.iter().map(|o| (o.from_seq, o.to_seq, &*o.reason)).collect();
    if tail > 200 {
        // The verbatim part begins with a user message.
        let first = cursor + (tail - 200).next_multiple_of(2);
        assert_eq!(omitted, [(cursor + 1, first, "max_history_messages")]);
    } else {
        assert!(omitted.is_empty(), "{omitted:?}");
        assert_eq!(answer.verbatim().len(), tail);
    }
}

async fn grow(app: &TestApp, given: &mut Vec<String>, outcome: &str) {
    let cursor = state(app, "s").await["cursor"].as_u64().unwrap();
    let cursor = usize::try_from(cursor).unwrap();
    for tail in [158, 159, 160, 161, 199, 200, 201, 202, 250] {
        let from = given.len();
        given.extend(turns(from + 1..=cursor + tail));
        record(app, "s", &given[from..]).await;
        let answer = plain(app, "s", given).await;
        assert_eq!(answer.outcome(), outcome);
        assert_bounded(&answer, tail);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_without_pool_is_limited_and_agent_is_notified(backend: Backend) {
    let app = TestApp::start(&backend, &[("llm.default_pool", "")]).await;
    let mut given = turns(1..=100);
    record(&app, "s", &given).await;
    assert_eq!(plain(&app, "s", &given).await.outcome(), "disabled");
    grow(&app, &mut given, "disabled").await;
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CONFLICT);
    // With a pool, the complete older part is summarised, including omitted messages.
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = start(&backend, &model, &[]).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("consolidated", 20));
    assert_eq!(named(&answer.system()), (1..=230).collect::<Vec<_>>());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_with_failing_model_is_limited_and_agent_is_notified(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[("consolidation.retry_initial", "1m")]).await;
    let mut given = turns(1..=102);
    record(&app, "s", &given).await;
    assert_eq!(plain(&app, "s", &given).await.outcome(), "consolidated");
    model.default(Behaviour::fail(500, "down"));
    grow(&app, &mut given, "failed").await;
    model.default(Behaviour::reply(covering));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let answer = plain(&app, "s", &given).await;
    assert!(answer.coverage.omitted.is_empty() && !answer.system().contains("## Notice"));
    assert_eq!(named(&answer.system()), (83..=312).collect::<Vec<_>>());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_waits_at_most_inline_wait(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    let app = start(&backend, &model, &[("consolidation.inline_wait", "100ms")]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    let began = Instant::now();
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("in_progress", 102));
    assert!(began.elapsed() < PATIENCE / 2);
    model.until_calls(1).await;
    assert!(!model.calls()[0].answered, "the answer came before the model's");
    release.add_permits(1);
    until(&app, "s", |state| state["cursor"] == 82).await;
    let answer = plain(&app, "s", &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("not_due", 20));
    assert_eq!(model.calls().len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn default_settings_use_built_in_model(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    let empty = plain(&app, "s", &[]).await;
    assert_eq!((empty.outcome(), empty.messages.len()), ("not_due", 0));
    app.get("/sessions/s").await.problem(404, "session-not-found");
    app.record_turns("s", 0..50).await;
    app.record("s", &[json!({"role": "user", "content": "And now?"})]).await;
    let answer = app.context("s", &json!({"user_message": "Well?"})).await;
    assert_eq!(answer["consolidation"]["model"], "extractive", "{}", answer["consolidation"]);
    assert_eq!(
        answer["coverage"],
        json!({"last_seq": 101, "summary_through": 80, "verbatim_from": 81, "omitted": [], "shortened": []})
    );
    let messages = answer["messages"].as_array().unwrap();
    assert_eq!((messages.len(), &messages[22]), (23, &json!({"role": "user", "content": "Well?"})));
    assert!(messages[0]["content"].as_str().unwrap().contains("Question"));
}
