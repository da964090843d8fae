//! A model that accepts less than its settings say gets smaller batches from then on, in all sessions.

use crate::batches::{assert_contiguous, long};
use crate::harness::{PATIENCE, consolidate, plain, record, revisions, seen, start, state};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use reqwest::StatusCode;
use serde_json::json;
use test_case::test_case;

/// Limit of the model in bytes of the user prompt: a twentieth of its `input_limit` of 100,000 tokens.
const MOST: usize = 30_000;

fn is_taken(call: &Call) -> bool {
    call.user().len() <= MOST
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_shrink_after_first_too_long_error(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::AtMost(MOST, "They met.".to_owned()));
    let app = start(&backend, &model, &[]).await;
    let given: Vec<String> = (1..=120).map(long).collect();
    for session in ["first", "next"] {
        let before = model.calls().len();
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!((answer.outcome(), answer.consolidation.messages), ("consolidated", 100), "{session}");
        let (taken, rejected): (Vec<_>, Vec<_>) =
            model.calls().split_off(before).into_iter().partition(is_taken);
        assert_eq!(
            taken.iter().flat_map(seen).collect::<Vec<_>>(),
            (1..=100).collect::<Vec<_>>(),
            "{session}"
        );
        let revisions = revisions(&app, session).await;
        assert_contiguous(&revisions, 100);
        assert_eq!(revisions.len(), taken.len(), "each part was committed before the next");
        // Each rejection halves the next batch. The observed limit applies to all sessions.
        let expected = if session == "first" { 1..=5 } else { 0..=0 };
        assert!(expected.contains(&rejected.len()), "{session}: {} rejections", rejected.len());
        let calls = |revision: &serde_json::Value| revision["usage"]["calls"].as_u64();
        assert!(revisions.iter().all(|revision| calls(revision) == Some(1)), "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_too_long_at_any_size_fails_with_few_calls(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::AtMost(0, String::new()));
    let set = [("consolidation.retry_initial", "1h"), ("consolidation.retry_max", "1h")];
    let app = start(&backend, &model, &set).await;
    let given: Vec<String> = (1..=120).map(long).collect();
    record(&app, "s", &given).await;
    let answer = tokio::time::timeout(PATIENCE, plain(&app, "s", &given)).await.expect("it ends");
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("failed", 120));
    let reason = answer.consolidation.reason.as_deref().unwrap();
    assert!(reason.contains("small: the prompt is too long for the model"), "{reason}");
    // After a few halvings, 100,000 tokens are hardly more than the prompt without data.
    let calls = model.calls().len();
    assert!((2..=10).contains(&calls), "{calls} calls");
    assert!(model.calls().is_sorted_by(|a, b| a.user().len() > b.user().len()), "each asks for less");
    // The next attempt needs a single call to fail.
    let (status, problem) = consolidate(&app, "s").await;
    assert_eq!((status, model.calls().len()), (StatusCode::BAD_GATEWAY, calls + 1), "{problem}");
    assert_eq!(state(&app, "s").await["cursor"], json!(0));
    // A model that accepts the smaller size gets all messages.
    model.default(Behaviour::answer("They met."));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let taken = model.calls().split_off(calls + 1);
    assert_eq!(plain(&app, "s", &given).await.coverage.summary_through, 100);
    assert!(taken.len() >= 100, "{}: in small pieces", taken.len());
}
