//! At most one consolidation of a session runs at a time, and a run is discarded if its session changes meanwhile.

use crate::harness::{
    Answer, PATIENCE, consolidate, covering, named, plain, record, revisions, seen, start, state, turns,
    until,
};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use precis::domain::id::{SessionId, TenantId};
use precis::storage::LeaseCondition;
use reqwest::{Method, StatusCode};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use uuid::Uuid;

/// A model that responds when the test permits it.
async fn held() -> (ModelServer, Arc<Semaphore>) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    model.default(Behaviour::reply(covering));
    (model, release)
}

/// A consolidation that waits for its model, with 82 messages after its summary of the first 82.
struct HeldConsolidation {
    /// The server ends when this value is dropped.
    _model: ModelServer,
    app: Arc<TestApp>,
    given: Arc<Vec<String>>,
    /// Permits the model to respond.
    release: Arc<Semaphore>,
    /// The request that consolidates.
    request: JoinHandle<Answer>,
}

/// Consolidates a session, lengthens it, and requests a context whose consolidation waits for its model.
async fn hold_consolidation(backend: &Backend) -> HeldConsolidation {
    let model = ModelServer::start().await;
    model.default(Behaviour::reply(covering));
    let app = Arc::new(start(backend, &model, &[]).await);
    let given = Arc::new(turns(1..=184));
    record(&app, "s", &given[..102]).await;
    plain(&app, "s", &given[..102]).await;
    record(&app, "s", &given[102..]).await;
    let release = Arc::new(Semaphore::new(0));
    model.push(Behaviour::Held(Arc::clone(&release), "Too late.".to_owned()));
    let (other, all) = (Arc::clone(&app), Arc::clone(&given));
    let request = tokio::spawn(async move { plain(&other, "s", &all).await });
    model.until_calls(2).await;
    HeldConsolidation { _model: model, app, given, release, request }
}

/// Awaits a task with a timeout, so that a deadlock fails the test.
async fn ended<T>(task: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, task).await.expect("it must not wait for this")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_concurrent_requests_make_one_call_and_do_not_wait_for_each_other(backend: Backend) {
    let (model, release) = held().await;
    let one = Arc::new(start(&backend, &model, &[]).await);
    let mut apps = vec![Arc::clone(&one)];
    if matches!(backend, Backend::Postgres(_)) {
        apps.push(Arc::new(start(&backend, &model, &[]).await));
    }
    let given = Arc::new(turns(1..=102));
    record(&one, "s", &given).await;
    let mut requests = JoinSet::new();
    for index in 0..50 {
        let (app, given) = (Arc::clone(&apps[index % apps.len()]), Arc::clone(&given));
        requests.spawn(async move { plain(&app, "s", &given).await });
    }
    for _ in 0..49 {
        let answer = ended(requests.join_next()).await.unwrap().unwrap();
        assert_eq!((answer.outcome(), answer.verbatim().len()), ("in_progress", 102));
    }
    release.add_permits(1);
    let answer = ended(requests.join_next()).await.unwrap().unwrap();
    assert_eq!((answer.outcome(), answer.verbatim().len()), ("consolidated", 20));
    assert_eq!((model.calls().len(), model.max_in_flight()), (1, 1));
    assert_eq!(revisions(&one, "s").await.len(), 1);
    for app in &apps {
        assert_eq!(plain(app, "s", &given).await.outcome(), "not_due");
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_erased_during_consolidation_is_not_recreated(backend: Backend) {
    for anew in [false, true] {
        let (model, release) = held().await;
        let app = Arc::new(start(&backend, &model, &[]).await);
        let given = turns(1..=102);
        record(&app, "s", &given).await;
        let other = Arc::clone(&app);
        let request = tokio::spawn(async move { other.context("s", &json!({})).await });
        model.until_calls(1).await;
        app.delete("/sessions/s").await.ok(204);
        if anew {
            record(&app, "s", &given[..4]).await;
        }
        release.add_permits(1);
        let answer = ended(request).await.unwrap();
        let left = if anew { 4 } else { 0 };
        let coverage = json!({
            "last_seq": left, "summary_through": 0, "verbatim_from": 1, "omitted": [], "shortened": [],
        });
        assert_eq!(
            (&answer["consolidation"]["outcome"], &answer["coverage"]),
            (&json!("not_due"), &coverage)
        );
        assert_eq!(answer["messages"].as_array().unwrap().len(), left);
        if anew {
            let state = state(&app, "s").await;
            assert_eq!(
                (&state["summary"]["text"], &state["consolidation"]["state"]),
                (&json!(""), &json!("idle"))
            );
            assert!(revisions(&app, "s").await.is_empty());
            app.delete("/sessions/s").await.ok(204);
        }
        app.get("/sessions/s").await.problem(404, "session-not-found");
    }
}

/// Erases sessions while their consolidations wait for the model and exchanges keep arriving.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_erased_during_consolidation_is_not_recreated(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
    let app = Arc::new(start(&backend, &model, &[]).await);
    let sessions = ["one", "two", "three"];
    let mut requests = JoinSet::new();
    for session in sessions {
        record(&app, session, &turns(1..=102)).await;
        let app = Arc::clone(&app);
        requests.spawn(async move { app.context(session, &json!({})).await });
    }
    let document = json!({"content": "They met."});
    app.put("/users/default/memory", &document).await.ok(200);
    model.until_calls(sessions.len()).await;
    let other = Arc::clone(&app);
    // Exchanges are ordered before or after the erasure; those after it start a new session with seq 1.
    let writing = tokio::spawn(async move {
        for _ in 0..20 {
            record(&other, "one", &turns(1..=2)).await;
        }
    });
    app.delete("/users/default").await.ok(204);
    ended(writing).await.unwrap();
    release.add_permits(sessions.len());
    while let Some(answer) = ended(requests.join_next()).await {
        let answer = answer.unwrap();
        assert_eq!(answer["coverage"]["summary_through"], 0, "{answer}");
        assert!(!answer.to_string().contains("They met."), "{answer}");
    }
    for session in ["two", "three"] {
        app.get(&format!("/sessions/{session}")).await.problem(404, "session-not-found");
    }
    assert_eq!(app.get("/users/default/memory").await["version"], 0);
    let left = app.get("/sessions/one").await;
    if left.status == 200 {
        assert!(left["last_seq"].as_i64().unwrap() <= 40 && left["last_seq"].as_i64().unwrap() % 2 == 0);
        assert_eq!((&left["cursor"], &left["summary"]["text"]), (&json!(0), &json!("")));
        assert!(revisions(&app, "one").await.is_empty());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_during_consolidation_discards_its_result(backend: Backend) {
    let held = hold_consolidation(&backend).await;
    // Each restore makes a new revision, so the pending result is discarded regardless of the cursor.
    held.app.post("/sessions/s/revisions/0/restore", "{}").await.ok(201);
    held.app.post("/sessions/s/revisions/1/restore", "{}").await.ok(201);
    held.app.post("/sessions/s/revisions/0/restore", "{}").await.ok(201);
    held.release.add_permits(1);
    let answer = ended(held.request).await.unwrap();
    assert_eq!((answer.coverage.summary_through, answer.verbatim().len()), (0, 184));
    let now = until(&held.app, "s", |state| state["consolidation"]["state"] == "idle").await;
    assert_eq!(
        (&now["cursor"], &now["summary"]["text"], &now["summary"]["revision"]),
        (&json!(0), &json!(""), &json!(4))
    );
    assert_eq!(now["consolidation"]["failures"], 0, "nothing has failed");
    // The history is complete, so all of it is summarised again.
    let answer = plain(&held.app, "s", &held.given).await;
    assert_eq!(answer.outcome(), "consolidated");
    assert_eq!(named(&answer.system()), (1..=164).collect::<Vec<_>>());
    assert_eq!(revisions(&held.app, "s").await.len(), 5);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edit_during_consolidation_discards_its_result(backend: Backend) {
    let held = hold_consolidation(&backend).await;
    let state = held.app.get("/sessions/s").await.ok(200);
    let text = format!("Edited: {}", state["summary"]["text"].as_str().unwrap());
    held.app.post("/sessions/s/revisions", json!({"summary": text, "based_on": 1})).await.ok(201);
    held.release.add_permits(1);
    let answer = ended(held.request).await.unwrap();
    let cursor = state["cursor"].as_u64().unwrap();
    assert_eq!(answer.coverage.summary_through as u64, cursor);
    let now = until(&held.app, "s", |state| state["consolidation"]["state"] == "idle").await;
    assert_eq!((&now["cursor"], &now["summary"]["text"]), (&json!(cursor), &json!(text)));
    assert_eq!(now["consolidation"]["failures"], 0, "nothing has failed");
    assert_eq!(revisions(&held.app, "s").await.len(), 2);
    // The messages are summarised again, after the edited text.
    assert_eq!(plain(&held.app, "s", &held.given).await.outcome(), "consolidated");
    assert!(held.app.get("/sessions/s").await["summary"]["text"].as_str().unwrap().starts_with(&text));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_during_consolidation_is_kept(backend: Backend) {
    let (model, release) = held().await;
    let app = Arc::new(start(&backend, &model, &[]).await);
    let mut given = turns(1..=102);
    record(&app, "s", &given).await;
    let (other, before) = (Arc::clone(&app), given.clone());
    // The response reflects the end of the request and contains messages that were written meanwhile.
    let request = tokio::spawn(async move { other.context("s", &json!({})).await });
    model.until_calls(1).await;
    given.extend(turns(103..=110));
    record(&app, "s", &given[102..]).await;
    let (status, problem) = consolidate(&app, "s").await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    release.add_permits(1);
    let answer = ended(request).await.unwrap();
    assert_eq!(
        answer["coverage"],
        json!({"last_seq": 110, "summary_through": 82, "verbatim_from": 83, "omitted": [], "shortened": []})
    );
    assert_eq!(seen(&model.calls()[0]), (1..=82).collect::<Vec<_>>());
    assert_eq!(plain(&app, "s", &given).await.verbatim().len(), given.len() - before.len() + 20);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consolidation_continues_after_client_disconnects(backend: Backend) {
    let model = ModelServer::start().await;
    let release = Arc::new(Semaphore::new(0));
    let app = start(&backend, &model, &[]).await;
    let given = turns(1..=102);
    for path in ["context", "consolidations"] {
        let session = format!("by-{path}");
        record(&app, &session, &given).await;
        model.push(Behaviour::Held(Arc::clone(&release), "They met.".to_owned()));
        let calls = model.calls().len();
        let request = app.request(Method::POST, &format!("/sessions/{session}/{path}"));
        let client = tokio::spawn(request.send());
        model.until_calls(calls + 1).await;
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled());
        assert_eq!(state(&app, &session).await["consolidation"]["state"], "running");
        release.add_permits(1);
        let done = until(&app, &session, |state| state["cursor"] == 82).await;
        assert_eq!(done["summary"]["text"], "They met.");
        until(&app, &session, |state| state["consolidation"]["state"] == "idle").await;
        assert_eq!(model.calls().len(), calls + 1);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_of_crashed_holder_expires(backend: Backend) {
    let model = ModelServer::start().await;
    let app = start(&backend, &model, &[]).await;
    let given = turns(1..=102);
    record(&app, "s", &given).await;
    let store = backend.store().await;
    let (tenant, session) = (TenantId::default(), SessionId::new("s").unwrap());
    let ttl = Duration::from_secs(1);
    let taken =
        store.take_lease(&tenant, &session, Uuid::new_v4(), LeaseCondition::Force, ttl).await.unwrap();
    assert!(taken.is_some());
    assert_eq!(plain(&app, "s", &given).await.outcome(), "in_progress");
    assert_eq!(consolidate(&app, "s").await.0, StatusCode::CONFLICT);
    assert_eq!(model.calls().len(), 0);
    until(&app, "s", |state| state["consolidation"]["state"] == "idle").await;
    assert_eq!(plain(&app, "s", &given).await.outcome(), "consolidated");
    store.close().await;
}
