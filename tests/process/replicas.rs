//! Several processes with one database.

use crate::service::{Precis, Process, SOON, messages, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use precis::domain::consolidation::LEASE_TTL;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_case::test_case;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

async fn start(backend: &Backend, model: &ModelServer) -> Process {
    Precis::on(backend).model(&model.base_url()).start().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_requests_to_two_processes_cause_one_consolidation() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let released = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&released), "Answer 1: the team took plan 1.".to_owned()));
    let processes = [start(&backend, &model).await, start(&backend, &model).await];
    processes[0].record("s", &messages(102)).await;

    let (answered, mut responses) = mpsc::unbounded_channel();
    for index in 0..50 {
        let (request, answered) = (processes[index % 2].post("/sessions/s/context", "{}"), answered.clone());
        tokio::spawn(async move { answered.send(request.await.ok(200)).expect("awaited") });
    }
    // The model responds after all other requests: a request that waited for the model would block here.
    for _ in 0..49 {
        let context =
            timeout(SOON, responses.recv()).await.expect("no request waits for another's").expect("sent");
        assert_eq!(outcome(&context, 102), "in_progress");
        assert_eq!(context["coverage"]["verbatim_from"], 1);
    }
    assert!(responses.try_recv().is_err());
    released.add_permits(50);
    let context = timeout(SOON, responses.recv()).await.expect("answered").expect("sent");
    assert_eq!(outcome(&context, 102), "consolidated");
    assert_eq!(context["consolidation"]["messages"], 82);

    assert_eq!(model.calls().len(), 1);
    for process in &processes {
        assert_eq!(process.get("/sessions/s/revisions").await["items"].as_array().map(Vec::len), Some(1));
        let context = process.context("s", &json!({})).await;
        assert_eq!(outcome(&context, 102), "not_due");
        assert_eq!(context["coverage"]["summary_through"], 82);
    }
    assert_eq!(model.calls().len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_process_loses_no_message_and_its_lease_expires(backend: Backend) {
    let model = ModelServer::start().await;
    model.push(Behaviour::Hang);
    model.default(Behaviour::answer("Answer 1: the team took plan 1."));
    let mut killed = start(&backend, &model).await;
    let messages = messages(102);
    killed.record("s", &messages).await;
    let asked = tokio::spawn(killed.post("/sessions/s/context", "{}").unchecked());
    model.until_calls(1).await;
    killed.signal("KILL");
    let killed_at = Instant::now();
    assert_eq!(killed.ended().await.0, None);
    assert!(asked.await.expect("no panic").is_err());

    let heir = start(&backend, &model).await;
    assert_eq!(heir.history("s").await, messages);
    let context = heir.context("s", &json!({})).await;
    assert_eq!(
        outcome(&context, 102),
        "in_progress",
        "the lease outlives its holder, for as long as it lasts"
    );
    assert_eq!(model.calls().len(), 1);
    let context = loop {
        let context = heir.context("s", &json!({})).await;
        if outcome(&context, 102) != "in_progress" {
            break context;
        }
        assert!(killed_at.elapsed() < Duration::from_secs(5), "the session is still locked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(outcome(&context, 102), "consolidated");
    assert_eq!(context["coverage"]["summary_through"], 82);
    assert_eq!(model.calls().len(), 2);
    let revisions = heir.get("/sessions/s/revisions").await;
    assert_eq!(revisions["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(heir.history("s").await, messages);
    heir.delete("/sessions/s").await.ok(204);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_lasts_as_long_as_the_model_call() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let released = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&released), "Answer 1: the team took plan 1.".to_owned()));
    let patient = Precis::on(&backend).model(&model.base_url()).set("consolidation.inline_wait", "1min");
    let (holder, other) = (patient.start().await, start(&backend, &model).await);
    holder.record("s", &messages(102)).await;
    let asked = tokio::spawn(holder.post("/sessions/s/context", "{}").unchecked());
    model.until_calls(1).await;
    // Longer than a lease lasts without renewal.
    let until = Instant::now() + LEASE_TTL + Duration::from_secs(1);
    while Instant::now() < until {
        let context = other.context("s", &json!({})).await;
        assert_eq!(outcome(&context, 102), "in_progress");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    released.add_permits(1);
    assert!(asked.await.expect("no panic").is_ok());
    let context = other.context("s", &json!({})).await;
    assert_eq!((context["coverage"]["summary_through"].as_i64(), model.calls().len()), (Some(82), 1));
}
