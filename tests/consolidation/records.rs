//! Records of consolidation: outcome, models, tokens, cost and duration of each run, also of failed ones.

use crate::harness::{PATIENCE, consolidate, covering, plain, record, revisions, start, state, turns, until};
use crate::metrics::Metrics;
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::model_server::{Behaviour, ModelServer, USAGE};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Returns the records of a session, oldest first.
async fn records(app: &TestClient, session: &str) -> Vec<Value> {
    let list = app.get(&format!("/sessions/{session}/consolidations?limit=1000")).await.ok(200);
    assert_eq!(list["next"], Value::Null);
    let mut records = list["items"].as_array().expect("a list").clone();
    records.reverse();
    records
}

/// Returns the price of complete calls, given the prices of a million tokens.
fn price(calls: u32, input: f64, output: f64) -> f64 {
    let [input_tokens, output_tokens] =
        [USAGE.0, USAGE.1].map(|tokens| f64::from(u32::try_from(tokens).unwrap()));
    f64::from(calls) * (input_tokens * input + output_tokens * output) / 1e6
}

fn assert_cost(record: &Value, expected: f64) {
    let cost = record["cost"].as_f64().expect("a number");
    assert!((cost - expected).abs() < 1e-12, "{record}: {expected} expected");
}

/// A pool of two models: the first one has no price in these tests unless `set` has it.
async fn with_two_models(
    backend: &Backend,
    small: &ModelServer,
    large: &ModelServer,
    set: &[(&str, &str)],
) -> TestApp {
    let base_url = large.base_url();
    let both = [
        ("llm.providers.second.base_url", base_url.as_str()),
        ("llm.models.large.provider", "second"),
        ("llm.models.large.model", "scripted-2"),
        ("llm.models.large.input_price", "100"),
        ("llm.models.large.output_price", "1000.5"),
        ("llm.models.small.retries", "1"),
        ("llm.models.small.retry_initial", "1ms"),
        ("llm.models.small.retry_max", "1ms"),
        ("llm.pools.both.models", "small,large"),
        ("consolidation.pool", "both"),
    ];
    start(backend, small, &[&both, set].concat()).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_run_has_a_record_with_its_models_and_cost(backend: Backend) {
    let (small, large) = (ModelServer::start().await, ModelServer::start().await);
    let app = with_two_models(&backend, &small, &large, &[]).await;
    app.get("/sessions/s/consolidations").await.problem(404, "session-not-found");
    let mut given = turns(1..=102);
    record(&app, "s", &given).await;
    assert_eq!(records(&app, "s").await, Vec::<Value>::new());

    // Both models fail. The text of the provider is not recorded.
    small.default(Behaviour::fail(503, "xyzzy overloaded"));
    large.default(Behaviour::answer("None."));
    assert_eq!(plain(&app, "s", &given).await.outcome(), "failed");
    let [failed] = &records(&app, "s").await[..] else { panic!("one record") };
    let reason = state(&app, "s").await["consolidation"]["last_failure"].clone();
    assert!(reason.as_str().expect("a reason").contains("small: status 503"), "{reason}");
    assert_eq!(failed["reason"], reason);
    assert!(!failed.to_string().contains("xyzzy"), "{failed}");
    for (field, value) in [
        ("number", json!(1)),
        ("cause", json!("threshold")),
        ("outcome", json!("failed")),
        ("revision", Value::Null),
        ("models", json!(["small", "large"])),
    ] {
        assert_eq!(failed[field], value, "{failed}");
    }
    assert_eq!((&failed["usage"]["calls"], &failed["usage"]["failures"]), (&json!(3), &json!(3)));
    assert_eq!(
        (&failed["usage"]["input_tokens"], &failed["usage"]["output_tokens"]),
        (&json!(USAGE.0), &json!(USAGE.1)),
        "the rejected response has used tokens"
    );
    assert_cost(failed, price(1, 100.0, 1000.5));
    assert!(failed["duration_ms"].as_i64() >= Some(0));

    // The first model still fails, and the second one responds.
    large.default(Behaviour::reply(covering));
    assert_eq!(consolidate(&app, "s").await.0, 201);
    // A model without prices responds.
    small.default(Behaviour::reply(covering));
    given.extend(turns(103..=184));
    record(&app, "s", &given[102..]).await;
    assert_eq!(plain(&app, "s", &given).await.outcome(), "consolidated");
    let [_, fallback, unpriced] = &records(&app, "s").await[..] else { panic!("three records") };
    let revisions = revisions(&app, "s").await;
    for (record, revision) in [(fallback, &revisions[0]), (unpriced, &revisions[1])] {
        assert_eq!(record["revision"], revision["revision"]);
        assert_eq!(record["usage"], revision["usage"]);
        assert_eq!(record["created_at"], revision["created_at"]);
        assert_eq!((&record["outcome"], &record["reason"]), (&json!("consolidated"), &Value::Null));
        assert!(record["duration_ms"].as_i64() >= revision["duration_ms"].as_i64(), "{record}");
    }
    assert_eq!((&fallback["cause"], &fallback["models"]), (&json!("request"), &json!(["small", "large"])));
    assert_cost(fallback, price(1, 100.0, 1000.5));
    assert_eq!((&unpriced["cause"], &unpriced["models"]), (&json!("threshold"), &json!(["small"])));
    assert_eq!(unpriced["cost"], Value::Null);

    let page = app.get("/sessions/s/consolidations?limit=2").await.ok(200);
    assert_eq!(page["items"], json!([unpriced, fallback]));
    let next = page["next"].as_str().expect("a next page");
    let page = app.get(&format!("/sessions/s/consolidations?limit=2&cursor={next}")).await.ok(200);
    assert_eq!((&page["items"], &page["next"]), (&json!([failed]), &Value::Null));
    app.delete("/sessions/s").await.ok(204);
    app.get("/sessions/s/consolidations").await.problem(404, "session-not-found");
    record(&app, "s", &given[..2]).await;
    assert_eq!(records(&app, "s").await, Vec::<Value>::new());
}

/// A record contains what a revision does not: a compression that failed.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cost_includes_compressions_also_failed_ones(backend: Backend) {
    let model = ModelServer::start().await;
    let set = [
        ("consolidation.summary_word_limit", "1"),
        ("llm.models.small.input_price", "1"),
        ("llm.models.small.output_price", "0"),
    ];
    let app = start(&backend, &model, &set).await;
    for (session, compressed) in [("shorter", "So far."), ("rejected", "None.")] {
        model.push(Behaviour::reply(covering));
        model.push(Behaviour::answer(compressed));
        record(&app, session, &turns(1..=102)).await;
        assert_eq!(plain(&app, session, &turns(1..=102)).await.outcome(), "consolidated");
        let [record] = &records(&app, session).await[..] else { panic!("one record") };
        assert_eq!(record["usage"]["calls"], 2, "{session}");
        assert_eq!(record["usage"]["input_tokens"], 2 * USAGE.0, "{session}");
        assert_cost(record, price(2, 1.0, 0.0));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn built_in_summariser_costs_nothing(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    record(&app, "s", &turns(1..=102)).await;
    assert_eq!(plain(&app, "s", &turns(1..=102)).await.outcome(), "consolidated");
    let [record] = &records(&app, "s").await[..] else { panic!("one record") };
    assert_eq!((&record["models"], &record["usage"]["calls"]), (&json!(["extractive"]), &json!(1)));
    assert_cost(record, 0.0);
}

/// A restore during a model call ends the run at its next request to the database.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_a_restore_made_obsolete_is_recorded_as_abandoned(backend: Backend) {
    let model = ModelServer::start().await;
    let prices = [("llm.models.small.input_price", "1"), ("llm.models.small.output_price", "1")];
    let app = start(&backend, &model, &prices).await;
    record(&app, "s", &turns(1..=102)).await;
    let held = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&held), "They met.".to_owned()));
    let restore = async {
        while model.calls().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        app.post("/sessions/s/revisions/0/restore", "").await.ok(201);
        held.add_permits(1);
    };
    let (status, problem) =
        timeout(PATIENCE, async { tokio::join!(consolidate(&app, "s"), restore).0 }).await.unwrap();
    assert_eq!(status, 409);
    assert!(problem["detail"].as_str().expect("a detail").contains("a change of the session"), "{problem}");
    let [record] = &records(&app, "s").await[..] else { panic!("one record") };
    assert_eq!((&record["outcome"], &record["revision"]), (&json!("abandoned"), &Value::Null));
    assert!(record["reason"].as_str().expect("a reason").starts_with("superseded by a restore"), "{record}");
    assert_cost(record, price(1, 1.0, 1.0));
    let metrics = Metrics::of(&app).await;
    let runs = |outcome: &str| {
        metrics.count(&format!("precis_consolidations_total{{outcome=\"{outcome}\",cause=\"request\"}}"))
    };
    assert_eq!(["abandoned", "in_progress"].map(runs), [1, 0]);
    let idle = until(&app, "s", |state| state["consolidation"]["state"] == "idle").await;
    assert_eq!(idle["consolidation"]["failures"], 0);
}

/// Two replicas consolidate the sessions of one database. Each reads the records of both.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_are_the_same_on_every_replica(backend: Backend) {
    let (failing, working) = (ModelServer::start().await, ModelServer::start().await);
    failing.default(Behaviour::fail(401, "no"));
    working.default(Behaviour::reply(covering));
    let prices = [("llm.models.small.input_price", "2"), ("llm.models.small.output_price", "4")];
    let replicas = [start(&backend, &failing, &[]).await, start(&backend, &working, &prices).await];
    let mut given = Vec::new();
    for last in [102, 184, 266] {
        let from = given.len();
        given.extend(turns(from + 1..=last));
        record(&replicas[0], "s", &given[from..]).await;
        assert_eq!(consolidate(&replicas[0], "s").await.0, 502);
        assert_eq!(consolidate(&replicas[1], "s").await.0, 201);
    }
    let seen = records(&replicas[0], "s").await;
    assert_eq!(records(&replicas[1], "s").await, seen);
    let outcomes: Vec<_> = seen.iter().map(|record| (&record["outcome"], &record["revision"])).collect();
    let (failed, consolidated) = (json!("failed"), json!("consolidated"));
    let revisions = [Value::Null, json!(1), json!(2), json!(3)];
    let expected: Vec<_> =
        (1..=3).flat_map(|n| [(&failed, &revisions[0]), (&consolidated, &revisions[n])]).collect();
    assert_eq!(outcomes, expected);
    for pair in seen.chunks(2) {
        assert_cost(&pair[0], 0.0);
        assert_cost(&pair[1], price(1, 2.0, 4.0));
    }
}
