//! A model that takes less than its settings say: it is asked for smaller parts, by all sessions from then on.

use crate::chunks::{assert_contiguous, long};
use crate::harness::{PATIENCE, consolidate, plain, record, revisions, seen, start, state};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, Call, ModelServer};
use reqwest::StatusCode;
use serde_json::json;
use test_case::test_case;

/// What the model takes, in bytes of the user prompt. Of its `input_limit`, 100,000 tokens, it is a twentieth.
const MOST: usize = 30_000;

fn is_taken(call: &Call) -> bool {
    call.user().len() <= MOST
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smaller_parts_from_the_first_refusal_on(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::AtMost(MOST, "They met.".to_owned()));
    let app = start(&backend, &model, &[]).await;
    let given: Vec<String> = (1..=120).map(long).collect();
    for session in ["first", "next"] {
        let before = model.calls().len();
        record(&app, session, &given).await;
        let answer = plain(&app, session, &given).await;
        assert_eq!((answer.outcome(), answer.consolidation.messages), ("consolidated", 100), "{session}");
        let (taken, refused): (Vec<_>, Vec<_>) =
            model.calls().split_off(before).into_iter().partition(is_taken);
        assert_eq!(
            taken.iter().flat_map(seen).collect::<Vec<_>>(),
            (1..=100).collect::<Vec<_>>(),
            "{session}"
        );
        let revisions = revisions(&app, session).await;
        assert_contiguous(&revisions, 100);
        assert_eq!(revisions.len(), taken.len(), "each part was committed before the next");
        // Each refusal halves what is asked next. What was found out holds for all sessions.
        let expected = if session == "first" { 1..=5 } else { 0..=0 };
        assert!(expected.contains(&refused.len()), "{session}: {} refusals", refused.len());
        let calls = |revision: &serde_json::Value| revision["usage"]["calls"].as_u64();
        assert!(revisions.iter().all(|revision| calls(revision) == Some(1)), "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_too_long_in_any_size_fails_and_costs_little(backend: Backend) {
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
    // 100,000 tokens can't be halved many times before they are hardly more than the question itself.
    let calls = model.calls().len();
    assert!((2..=10).contains(&calls), "{calls} calls");
    assert!(model.calls().is_sorted_by(|a, b| a.user().len() > b.user().len()), "each asks for less");
    // Whoever tries again finds that out with one call.
    let (status, problem) = consolidate(&app, "s").await;
    assert_eq!((status, model.calls().len()), (StatusCode::BAD_GATEWAY, calls + 1), "{problem}");
    assert_eq!(state(&app, "s").await["cursor"], json!(0));
    // And a model that takes what it is asked now gets all of it.
    model.default(Behaviour::answer("They met."));
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CREATED);
    let taken = model.calls().split_off(calls + 1);
    assert_eq!(plain(&app, "s", &given).await.coverage.summary_through, 100);
    assert!(taken.len() >= 100, "{}: in small pieces", taken.len());
}
