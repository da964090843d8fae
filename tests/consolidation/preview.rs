//! The dry run of a consolidation says what the next consolidation does, and does nothing itself.

use crate::harness::{covering, record, revisions, start, state, turns};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{TestClient, assert_includes};
use crate::support::model_server::{Behaviour, ModelServer};
use precis::domain::tokens;
use serde_json::{Value, json};
use test_case::test_case;

async fn preview(app: &TestClient) -> Value {
    app.get("/sessions/s/consolidations/next").await.ok(200)
}

/// Checks that the next consolidation makes the calls and the revisions of the dry run.
async fn assert_comes_true(app: &TestClient, model: &ModelServer, preview: &Value) {
    let (before, calls) = (revisions(app, "s").await.len(), model.calls().len());
    app.post("/sessions/s/consolidations", "").await.ok(201);
    let (made, calls) = (revisions(app, "s").await, model.calls().split_off(calls));
    let (made, plan) = (&made[before..], &preview["plan"]);
    assert_eq!(plan["batches"], made.len());
    assert_eq!((&plan["from_seq"], &plan["to_seq"]), (&made[0]["from_seq"], &made.last().unwrap()["to_seq"]));
    let first = &plan["first_batch"];
    assert_eq!((&first["from_seq"], &first["to_seq"]), (&made[0]["from_seq"], &made[0]["to_seq"]));
    assert_eq!(plan["calls"], calls.len());
    let Some(call) = calls.first() else { return assert_eq!(first["prompt"], Value::Null) };
    let prompt = &first["prompt"];
    assert_eq!((&prompt["system"], &prompt["user"]), (&json!(call.system()), &json!(call.user())));
    assert_eq!(prompt["is_truncated"], false);
    assert_eq!(prompt["tokens"], tokens::count(call.system()) + tokens::count(call.user()));
    assert!(call.user().contains(&format!("about {} sentences", first["sentences"])), "{first}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_is_what_the_next_consolidation_does(backend: Backend) {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let prices = [("llm.models.small.input_price", "0.5"), ("llm.models.small.output_price", "2")];
    let app = start(&backend, &model, &prices).await;
    app.get("/sessions/s/consolidations/next").await.problem(404, "session-not-found");
    record(&app, "s", &turns(1..=20)).await;
    let nothing = preview(&app).await;
    assert_includes(&nothing, &json!({"due": null, "tail_messages": 20, "threshold": 100, "plan": null}));
    assert_includes(&nothing, &json!({"max_tail_tokens": null, "pool": "default", "strategy": "fallback"}));
    assert_includes(
        &nothing["models"][0],
        &json!({"name": "small", "is_prompted": true, "estimated_cost": null}),
    );

    record(&app, "s", &turns(21..=60)).await;
    let before = state(&app, "s").await;
    let small = preview(&app).await;
    assert_includes(&small, &json!({"due": null, "tail_tokens": before["tokens"]["tail"]}));
    assert_includes(&small["plan"], &json!({"from_seq": 1, "to_seq": 40, "messages": 40, "batches": 1}));
    let (input, output) = (&small["plan"]["input_tokens"], &small["plan"]["output_tokens"]);
    assert_eq!((input, output.as_u64()), (&small["plan"]["first_batch"]["prompt"]["tokens"], Some(5 * 30)));
    let cost = (input.as_f64().unwrap() * 0.5 + 150.0 * 2.0) / 1e6;
    let estimated = small["models"][0]["estimated_cost"].as_f64().unwrap();
    assert!((estimated - cost).abs() < 1e-12, "{estimated} {cost}");
    assert_eq!(state(&app, "s").await, before, "nothing was written");
    assert_eq!((model.calls().len(), revisions(&app, "s").await.len()), (0, 0));
    assert_comes_true(&app, &model, &small).await;

    record(&app, "s", &turns(61..=141)).await;
    let due = preview(&app).await;
    assert_includes(&due, &json!({"due": "threshold", "tail_messages": 101}));
    assert_includes(&due["plan"], &json!({"from_seq": 41, "to_seq": 120, "messages": 80}));
    assert_comes_true(&app, &model, &due).await;
}

/// The messages after those of the plan still exceed `max_tail_tokens`, and a split before the last one would be safe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_ends_with_the_plan_of_its_dry_run() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    model.default(Behaviour::reply(covering));
    let set = [("consolidation.keep_recent", "1"), ("consolidation.max_tail_tokens", "10")];
    let app = start(&backend, &model, &set).await;
    record(&app, "s", &turns(1..=6)).await;
    let due = preview(&app).await;
    assert_includes(&due, &json!({"due": "max_tail_tokens"}));
    assert_includes(&due["plan"], &json!({"from_seq": 1, "to_seq": 4, "messages": 4, "batches": 1}));
    app.post("/sessions/s/context", json!({})).await.ok(200);
    assert_eq!((state(&app, "s").await["cursor"].as_i64(), model.calls().len()), (Some(4), 1));
}

/// Messages with the same size as row and as line of the transcript, so that the estimate of the batches is exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_counts_batches_and_shows_the_first_prompt() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    model.default(Behaviour::reply(covering));
    let set = [("llm.models.small.input_limit", "2500"), ("consolidation.max_tail_tokens", "500")];
    let app = start(&backend, &model, &set).await;
    let long = |seq: usize| {
        let role = if seq % 2 == 1 { "user" } else { "assistant" };
        json!({"role": role, "content": format!("m{seq} {}", "tea ".repeat(150))}).to_string()
    };
    record(&app, "s", &(1..=60).map(long).collect::<Vec<_>>()).await;
    let large = preview(&app).await;
    assert_includes(&large, &json!({"due": "max_tail_tokens", "max_tail_tokens": 500}));
    assert!(large["plan"]["batches"].as_u64() > Some(3), "{}", large["plan"]);
    assert_comes_true(&app, &model, &large).await;
    // A message that exceeds the input limit is summarised by several calls.
    record(&app, "s", &[json!({"role": "user", "content": "tea ".repeat(5000)}).to_string()]).await;
    record(&app, "s", &(62..=83).map(long).collect::<Vec<_>>()).await;
    let split = preview(&app).await;
    assert!(split["plan"]["calls"].as_u64() > split["plan"]["batches"].as_u64(), "{}", split["plan"]);
    let first = &split["plan"]["first_batch"];
    let calls = model.calls().len();
    app.post("/sessions/s/consolidations", "").await.ok(201);
    assert_eq!(first["prompt"]["user"], model.calls()[calls].user());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_needs_a_pool_and_no_prompt_of_the_built_in_summariser() {
    let app = TestApp::on_sqlite(&[("llm.default_pool", "")]).await;
    app.record_turns("s", 0..30).await;
    app.get("/sessions/s/consolidations/next").await.problem(409, "consolidation-disabled");
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("s", 0..30).await;
    let extractive = preview(&app).await;
    let plan = &extractive["plan"];
    assert_includes(plan, &json!({"to_seq": 40, "batches": 1, "calls": 1, "input_tokens": 0}));
    assert_eq!(
        (&plan["first_batch"]["prompt"], &plan["first_batch"]["sentences"]),
        (&Value::Null, &json!(5))
    );
    let expected = json!({"name": "extractive", "is_prompted": false, "prompt_version": "extractive-2"});
    assert_includes(&extractive["models"][0], &expected);
    // Messages without text advance the cursor without a call.
    record(&app, "blank", &vec![r#"{"role":"user","content":" "}"#.to_owned(); 30]).await;
    let plan = app.get("/sessions/blank/consolidations/next").await["plan"].clone();
    assert_includes(&plan, &json!({"to_seq": 10, "batches": 1, "calls": 0, "output_tokens": 0}));
}
