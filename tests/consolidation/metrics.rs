//! `/metrics` reports the calls of each model and contains nothing of the conversations.

use crate::harness::{covering, plain, record, turns};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer, USAGE};
use serde_json::json;
use std::fmt::Debug;
use std::str::FromStr;
use std::sync::Arc;
use test_case::test_case;
use tokio::sync::Semaphore;

const KEY: &str = "sk-hunter2-key-0123456789";

/// The metrics of a service.
pub(crate) struct Metrics(String);

impl Metrics {
    pub(crate) async fn of(app: &TestApp) -> Self {
        let response = app.get("/metrics").await;
        assert_eq!(response.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        Self(response.text)
    }

    /// Returns the value of a sample: `name{label="value"}`.
    fn value<T: FromStr<Err: Debug>>(&self, sample: &str) -> T {
        let mut values = self.0.lines().filter_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        let value = values.next().unwrap_or_else(|| panic!("no {sample}:\n{}", self.0));
        value.parse().expect(sample)
    }

    pub(crate) fn count(&self, sample: &str) -> u64 {
        self.value(sample)
    }
}

/// A service with two models. The first fails with errors that quote its key; its circuit breaker opens after
/// two failed calls.
async fn service(backend: &Backend, first: &ModelServer, second: &ModelServer) -> TestApp {
    let (here, there) = (first.base_url(), second.base_url());
    let set = [
        ("llm.providers.here.base_url", here.as_str()),
        ("llm.providers.here.api_key", KEY),
        ("llm.providers.there.base_url", &there),
        ("llm.providers.there.api_key", KEY),
        ("llm.models.first.provider", "here"),
        ("llm.models.first.model", "scripted-1"),
        ("llm.models.first.retries", "1"),
        ("llm.models.first.retry_initial", "1ms"),
        ("llm.models.first.breaker_min_calls", "2"),
        ("llm.models.first.breaker_open_for", "1h"),
        ("llm.models.second.provider", "there"),
        ("llm.models.second.model", "scripted-2"),
        ("llm.pools.default.models", "first,second"),
    ];
    TestApp::start(backend, &set).await
}

/// Consolidates a session in its first request.
async fn consolidated(app: &TestApp, session: &str) {
    let given = turns(1..=102);
    record(app, session, &given).await;
    assert_eq!(plain(app, session, &given).await.outcome(), "consolidated");
}

#[tokio::test]
async fn metrics_report_calls_failures_and_breaker_of_each_model() {
    let backend = Backend::sqlite().await;
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    second.default(Behaviour::reply(covering));
    let app = service(&backend, &first, &second).await;
    // One summary, one rejected response, and two failed calls; then the circuit breaker is open.
    first.push(Behaviour::reply(covering));
    first.push(Behaviour::answer("None."));
    first.default(Behaviour::fail(500, &format!("no summary with {KEY} of m1 a question")));
    for session in ["xylophon-1", "xylophon-2", "xylophon-3", "xylophon-4"] {
        consolidated(&app, session).await;
    }
    second.push(Behaviour::fail(400, "no summary"));
    record(&app, "xylophon-5", &turns(1..=102)).await;
    assert_eq!(plain(&app, "xylophon-5", &turns(1..=102)).await.outcome(), "failed");
    let metrics = Metrics::of(&app).await;
    assert_eq!((first.calls().len(), second.calls().len()), (4, 4));
    for (model, calls, answered) in [("first", 4, 2), ("second", 4, 3)] {
        let of = |name: &str| metrics.count(&format!("precis_llm_{name}{{model=\"{model}\"}}"));
        assert_eq!(of("calls_total"), calls, "{model}");
        assert_eq!((of("calls_in_flight"), of("calls_waiting")), (0, 0), "{model}");
        // A rejected response costs tokens, too.
        for (direction, tokens) in [("input", USAGE.0), ("output", USAGE.1)] {
            let sample = format!("precis_llm_tokens_total{{model=\"{model}\",direction=\"{direction}\"}}");
            assert_eq!(metrics.count(&sample), answered * tokens, "{sample}");
        }
        for (histogram, expected) in [
            ("call_duration_seconds", calls),
            ("time_to_first_token_seconds", answered),
            ("queue_duration_seconds", calls),
        ] {
            assert_eq!(of(&format!("{histogram}_count")), expected, "{model}: {histogram}");
            let sum: f64 = metrics.value(&format!("precis_llm_{histogram}_sum{{model=\"{model}\"}}"));
            assert!((0.0..60.0).contains(&sum), "{model}: {histogram}: {sum}");
            let largest = format!("precis_llm_{histogram}_bucket{{model=\"{model}\",le=\"+Inf\"}}");
            assert_eq!(metrics.count(&largest), expected, "{model}: {histogram}");
        }
        let failures = |cause: &str| {
            metrics.count(&format!("precis_llm_failures_total{{model=\"{model}\",cause=\"{cause}\"}}"))
        };
        let failed = ["rejected", "server_error", "breaker_open", "connection"].map(failures);
        // The circuit breaker was open for the last two sessions.
        let expected = if model == "first" { [1, 2, 2, 0] } else { [0; 4] };
        assert_eq!(failed, expected, "{model}");
        assert_eq!(of("breaker_state"), if model == "first" { 2 } else { 0 }, "{model}");
    }
    let runs = |cause: &str| {
        let labels = |outcome| format!("{{outcome=\"{outcome}\",cause=\"{cause}\"}}");
        ["consolidated", "not_due", "in_progress", "abandoned", "failed"]
            .map(|outcome| metrics.count(&format!("precis_consolidations_total{}", labels(outcome))))
    };
    assert_eq!(runs("threshold"), [4, 0, 0, 0, 1]);
    assert_eq!(runs("request"), [0; 5]);
    let contexts = ["not_due", "consolidated", "scheduled", "in_progress", "failed", "disabled"]
        .map(|outcome| metrics.count(&format!("precis_contexts_total{{consolidation=\"{outcome}\"}}")));
    assert_eq!(contexts, [0, 4, 0, 0, 1, 0]);
    assert_eq!(metrics.count("precis_consolidation_duration_seconds_count"), 5);
    assert!(metrics.count("precis_consolidated_messages_total") > 4 * 50);
    assert_eq!(metrics.count("precis_meta_consolidations_total"), 0);
    assert_eq!(metrics.count("precis_consolidations_running"), 0);
    for (family, kind) in [
        ("precis_consolidations_total", "counter"),
        ("precis_contexts_total", "counter"),
        ("precis_consolidation_duration_seconds", "histogram"),
        ("precis_llm_calls_total", "counter"),
        ("precis_llm_failures_total", "counter"),
        ("precis_llm_tokens_total", "counter"),
        ("precis_llm_calls_in_flight", "gauge"),
        ("precis_llm_calls_waiting", "gauge"),
        ("precis_llm_breaker_state", "gauge"),
    ] {
        assert!(metrics.0.contains(&format!("# TYPE {family} {kind}\n")), "{family}");
    }
    for private in [KEY, "hunter2", "xylophon", "question", "m1 ", "It covers", "127.0.0.1"] {
        assert!(!metrics.0.contains(private), "{private} in:\n{}", metrics.0);
    }
}

#[tokio::test]
async fn metrics_show_running_calls_per_service() {
    let backend = Backend::sqlite().await;
    let (model, unused) = (ModelServer::start().await, ModelServer::start().await);
    let busy = service(&backend, &model, &unused).await;
    let idle = service(&backend, &model, &unused).await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    let in_flight = "precis_llm_calls_in_flight{model=\"first\"}";
    let calls = "precis_llm_calls_total{model=\"first\"}";
    let look = async {
        model.until_calls(1).await;
        let (busy, idle) = (Metrics::of(&busy).await, Metrics::of(&idle).await);
        let running = "precis_consolidations_running";
        assert_eq!((busy.count(running), idle.count(running)), (1, 0));
        // A call is counted when it ends.
        assert_eq!((busy.count(in_flight), busy.count(calls)), (1, 0));
        assert_eq!((idle.count(in_flight), idle.count(calls)), (0, 0));
        release.add_permits(1);
    };
    tokio::join!(consolidated(&busy, "s"), look);
    let (busy, idle) = (Metrics::of(&busy).await, Metrics::of(&idle).await);
    assert_eq!((busy.count(in_flight), busy.count(calls)), (0, 1));
    assert_eq!((idle.count(in_flight), idle.count(calls)), (0, 0));
}

/// The same service as seen by `GET /models`: breakers, last results and the tokens of the tenant.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_report_breakers_queues_and_last_results(backend: Backend) {
    let (first, second) = (ModelServer::start().await, ModelServer::start().await);
    second.default(Behaviour::reply(covering));
    let app = service(&backend, &first, &second).await;
    let models = async || {
        let response = app.get("/models").await;
        for secret in [KEY, "127.0.0.1", "http", "question"] {
            assert!(!response.text.contains(secret), "{secret}: {}", response.text);
        }
        response.ok(200)
    };
    let fresh = models().await;
    let pool = json!({
        "name": "default", "models": ["first", "second"], "strategy": "fallback", "deadline_ms": 60_000,
        "tasks": ["consolidation", "meta_consolidation"],
    });
    assert_eq!(fresh["pools"], json!([pool]));
    assert_eq!(fresh["tokens"], json!({"used_today": 0, "daily_limit": null}));
    let expected = json!({
        "name": "first", "provider": "here", "model": "scripted-1",
        "circuit_breaker": {"state": "closed", "until": null},
        "calls_in_progress": 0, "max_concurrent_calls": 8, "queued_calls": 0, "max_queued_calls": 100,
        "retry_not_before": null, "input_limit": 100_000, "output_limit": 4096,
        "last_success_at": null, "last_failure": null,
    });
    assert_eq!(fresh["models"][0], expected);
    assert_eq!(fresh["models"][1]["name"], "second");

    first.push(Behaviour::reply(covering));
    consolidated(&app, "a").await;
    let after = models().await;
    assert!(after["models"][0]["last_success_at"].is_string(), "{after}");
    assert_eq!(after["models"][1], fresh["models"][1], "not called");
    assert_eq!(after["tokens"]["used_today"], USAGE.0 + USAGE.1);

    // Two failures open the circuit breaker, which hides neither of them.
    first.default(Behaviour::fail(500, &format!("no summary with {KEY} of m1 a question")));
    consolidated(&app, "b").await;
    consolidated(&app, "c").await;
    let failing = models().await["models"][0].clone();
    assert_eq!(failing["circuit_breaker"]["state"], "open");
    assert!(
        failing["circuit_breaker"]["until"].as_str() > failing["last_failure"]["at"].as_str(),
        "{failing}"
    );
    let reason = failing["last_failure"]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("status 500"), "{reason}");
    assert_eq!(failing["last_success_at"], after["models"][0]["last_success_at"]);

    // A running call has a slot.
    let release = Arc::new(Semaphore::new(0));
    second.push(Behaviour::Held(Arc::clone(&release), "Tea.".to_owned()));
    record(&app, "d", &turns(1..=102)).await;
    let calls = second.calls().len();
    let request = app.post("/sessions/d/context", json!({}));
    let request = tokio::spawn(async move { request.await.ok(200) });
    second.until_calls(calls + 1).await;
    assert_eq!(models().await["models"][1]["calls_in_progress"], 1);
    release.add_permits(1);
    request.await.expect("a context");
    assert_eq!(models().await["models"][1]["calls_in_progress"], 0);
}
