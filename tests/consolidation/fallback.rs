//! A pool whose first model fails permanently: the second model writes the summaries, the circuit breaker
//! skips the first, and
//! the first is used again when it has recovered.

use crate::harness::{PATIENCE, covering, named, plain, record, revisions, turns};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer, USAGE, refused_base_url};
use serde_json::{Value, json};
use test_case::test_case;

/// Calls of the first model per task: one, and one retry.
const CALLS: usize = 2;

/// A service whose circuit breaker opens after four failed calls, for `open_for`.
async fn start(backend: &Backend, first: &str, second: &ModelServer, open_for: &str) -> TestApp {
    let second = second.base_url();
    let set = [
        ("llm.providers.here.base_url", first),
        ("llm.providers.there.base_url", &second),
        ("llm.models.first.provider", "here"),
        ("llm.models.first.model", "scripted-1"),
        ("llm.models.first.retries", "1"),
        ("llm.models.first.retry_initial", "1ms"),
        ("llm.models.first.retry_max", "1ms"),
        ("llm.models.first.breaker_min_calls", "4"),
        ("llm.models.first.breaker_open_for", open_for),
        ("llm.models.second.provider", "there"),
        ("llm.models.second.model", "scripted-2"),
        ("llm.pools.default.models", "first,second"),
    ];
    TestApp::start(backend, &set).await
}

async fn servers() -> (ModelServer, ModelServer) {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    first.default(Behaviour::fail(503, "down"));
    second.default(Behaviour::reply(covering));
    (first, second)
}

/// Consolidates a new session in its first request. Returns the model and the usage.
async fn consolidated(app: &TestApp, session: &str) -> (String, Value) {
    let given = turns(1..=102);
    record(app, session, &given).await;
    let answer = plain(app, session, &given).await;
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("consolidated", 20), "{session}");
    let revision = revisions(app, session).await.remove(0);
    assert_eq!(named(revision["text"].as_str().unwrap()), (1..=82).collect::<Vec<_>>(), "{session}");
    assert_eq!(answer.consolidation.model.as_deref(), revision["model"].as_str(), "{session}");
    (answer.consolidation.model.unwrap(), revision["usage"].clone())
}

/// Consolidates five sessions: two find the first model failing, three find its circuit breaker open.
async fn assert_soon_left_alone(app: &TestApp) {
    for session in 1..=5 {
        let (model, usage) = consolidated(app, &format!("s{session}")).await;
        assert_eq!(model, "second", "{session}");
        let failures = if session <= 2 { CALLS } else { 0 };
        let took = ["calls", "failures", "input_tokens", "output_tokens"].map(|field| &usage[field]);
        assert_eq!(json!(took), json!([failures + 1, failures, USAGE.0, USAGE.1]), "{session}");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_model_is_skipped_by_circuit_breaker(backend: Backend) {
    let (first, second) = servers().await;
    let app = start(&backend, &first.base_url(), &second, "1h").await;
    assert_soon_left_alone(&app).await;
    assert_eq!((first.calls().len(), second.calls().len()), (2 * CALLS, 5));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_model_is_skipped_by_circuit_breaker(backend: Backend) {
    let second = ModelServer::start().await;
    second.default(Behaviour::reply(covering));
    let app = start(&backend, &refused_base_url(), &second, "1h").await;
    assert_soon_left_alone(&app).await;
    assert_eq!(second.calls().len(), 5);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovered_model_is_used_again(backend: Backend) {
    let (first, second) = servers().await;
    let app = start(&backend, &first.base_url(), &second, "200ms").await;
    for session in ["s1", "s2"] {
        assert_eq!(consolidated(&app, session).await.0, "second");
    }
    first.default(Behaviour::reply(covering));
    // One of the requests probes the model, and the model stays in use. No request fails.
    let back = async {
        for session in 3.. {
            let (model, usage) = consolidated(&app, &format!("s{session}")).await;
            assert_eq!(usage["failures"], 0, "{session}");
            if model == "first" {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, back).await.expect("it is used again");
    let before = second.calls().len();
    for session in ["after1", "after2", "after3"] {
        assert_eq!(consolidated(&app, session).await.0, "first");
    }
    assert_eq!(second.calls().len(), before);
}
