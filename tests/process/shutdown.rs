//! How a process ends: requests are answered, work is given back, and it takes a bounded time.

use crate::service::{Precis, Process, SOON, messages, ok, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, timeout};

/// What may come on top of the grace: a busy machine, mostly.
const MARGIN: Duration = Duration::from_secs(4);

async fn start(backend: &Backend, model: &ModelServer, grace: &str) -> Process {
    let precis = Precis::new().env("DATABASE_URL", &backend.url()).model(&model.base_url());
    precis.set("server.shutdown_grace", grace).start().await
}

/// Sends a request for a context, and returns when the model has its consolidation.
async fn consolidating(service: &Process, model: &ModelServer, body: &Value) -> JoinHandle<Value> {
    service.record("s", &messages(102)).await;
    let request = service.context_request("s", body).send();
    let answer = tokio::spawn(async { ok(request.await.expect("an answer")).await });
    model.until_calls(1).await;
    answer
}

/// Waits until connections are refused.
async fn until_refused(service: &Process) {
    let address = service.url.trim_start_matches("http://");
    let refused = async { while tokio::net::TcpStream::connect(address).await.is_ok() {} };
    timeout(SOON, refused).await.expect("no longer listened on");
}

#[tokio::test]
async fn requests_under_way_are_answered_and_new_ones_refused() {
    // The second signal comes from whoever is impatient; it must not undo the good order of the first.
    for signals in [&["TERM"][..], &["INT"], &["TERM", "TERM"], &["TERM", "INT"]] {
        let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
        let released = Arc::new(Semaphore::new(0));
        model.default(Behaviour::Held(Arc::clone(&released), "Ada flies.".to_owned()));
        let mut service = start(&backend, &model, "20s").await;
        let answer = consolidating(&service, &model, &json!({})).await;
        for signal in signals {
            service.signal(signal);
            service.until_logged("stopping").await;
        }
        until_refused(&service).await;
        assert!(service.request(Method::GET, "/livez").send().await.is_err());
        assert!(!answer.is_finished());
        released.add_permits(1);
        let context = answer.await.expect("answered");
        assert_eq!(outcome(&context, 102), "consolidated");
        let (code, elapsed) = service.ended().await;
        assert_eq!(code, Some(0), "{signals:?}");
        assert!(elapsed < MARGIN, "{signals:?}: {elapsed:?} after the last answer");
        service.until_logged("stopped").await;
    }
}

#[tokio::test]
async fn a_request_that_waits_for_a_model_is_answered_without_it() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    model.push(Behaviour::Hang);
    model.default(Behaviour::answer("Ada flies."));
    let mut service = start(&backend, &model, "4s").await;
    let other = start(&backend, &model, "4s").await;
    let answer = consolidating(&service, &model, &json!({})).await;
    service.signal("TERM");
    let context = answer.await.expect("answered");
    assert_ne!(outcome(&context, 102), "consolidated");
    assert_eq!(context["coverage"]["verbatim_from"], 1);
    let (code, elapsed) = service.ended().await;
    assert_eq!(code, Some(0));
    assert!(elapsed < MARGIN, "{elapsed:?}");
    let late = service.log().iter().any(|line| line.contains("did not end within the grace"));
    assert!(!late, "its answer came within the grace");
    assert_eq!(outcome(&other.context("s", &json!({})).await, 102), "consolidated");
}

#[tokio::test]
async fn a_background_consolidation_is_given_back() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    model.push(Behaviour::Hang);
    model.default(Behaviour::answer("Ada flies."));
    let mut service = start(&backend, &model, "1s").await;
    let other = start(&backend, &model, "1s").await;
    let answer = consolidating(&service, &model, &json!({"mode": "background"})).await;
    assert_eq!(outcome(&answer.await.expect("answered"), 102), "scheduled");
    assert_eq!(outcome(&other.context("s", &json!({})).await, 102), "in_progress");
    service.signal("TERM");
    let (code, elapsed) = service.ended().await;
    assert_eq!(code, Some(0));
    assert!(elapsed < Duration::from_secs(1) + MARGIN, "{elapsed:?}");

    let context = other.context("s", &json!({})).await;
    assert_eq!(outcome(&context, 102), "consolidated", "at once: neither a lease nor a wait is in the way");
    assert_eq!(model.calls().len(), 2);
    assert_eq!(other.get("/sessions/s").await["consolidation"]["failures"], 0);
}

#[tokio::test]
async fn a_background_consolidation_may_end_within_the_grace() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    let released = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&released), "Ada flies.".to_owned()));
    let mut service = start(&backend, &model, "20s").await;
    let answer = consolidating(&service, &model, &json!({"mode": "background"})).await;
    answer.await.expect("answered");
    service.signal("TERM");
    until_refused(&service).await;
    released.add_permits(1);
    let (code, elapsed) = service.ended().await;
    assert_eq!(code, Some(0));
    assert!(elapsed < MARGIN, "{elapsed:?} after the model's answer");

    let service = start(&backend, &model, "1s").await;
    let context = service.context("s", &json!({})).await;
    assert_eq!(outcome(&context, 102), "not_due");
    assert_eq!(context["coverage"]["summary_through"], 82);
    assert_eq!(model.calls().len(), 1);
}

#[tokio::test]
async fn connections_that_stay_open_do_not_hold_it() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    let mut service = start(&backend, &model, "1s").await;
    let address = service.url.trim_start_matches("http://").to_owned();
    let mut open = Vec::new();
    // Nothing sent, half a head, half a body.
    for sent in [
        "",
        "GET /livez HTTP/1.1\r\nhost: x\r\n",
        "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    ] {
        let mut connection = TcpStream::connect(&address).expect("connected");
        connection.write_all(sent.as_bytes()).expect("sent");
        open.push(connection);
    }
    // And an idle one, in the client's pool.
    service.get("/livez").await;
    let began = Instant::now();
    service.signal("TERM");
    let (code, _) = service.ended().await;
    assert_eq!(code, Some(0));
    assert!(began.elapsed() < Duration::from_secs(1) + MARGIN, "{:?}", began.elapsed());
    drop(open);
}

#[tokio::test]
async fn a_database_that_hangs_does_not_hold_it() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let mut service = start(&backend, &model, "1s").await;
    service.record("s", &messages(2)).await;
    let Backend::Postgres(database) = &backend else { unreachable!() };
    let mut other = PgConnection::connect(&database.admin_url()).await.expect("connected");
    let mut lock = other.begin().await.expect("begun");
    sqlx::query("SELECT FROM sessions FOR UPDATE").execute(&mut *lock).await.expect("locked");
    let body = json!({"messages": messages(2)});
    let waiting = service.request(Method::POST, "/sessions/s/exchanges").json(&body).send();
    let waiting = tokio::spawn(waiting);
    let blocked = async {
        const BLOCKED: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock'";
        while sqlx::query_scalar::<_, i64>(BLOCKED).fetch_one(&mut *lock).await.expect("counted") == 0 {}
    };
    timeout(SOON, blocked).await.expect("the exchange waits for the lock");
    let began = Instant::now();
    service.signal("TERM");
    service.ended().await;
    assert!(began.elapsed() < Duration::from_secs(1) + MARGIN, "{:?}", began.elapsed());
    assert!(waiting.await.expect("no panic").is_err(), "what was not persisted was not acknowledged");
    lock.rollback().await.expect("rolled back");
}
