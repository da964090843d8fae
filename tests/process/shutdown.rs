//! Shutdown: running requests are answered, leases are released, and it takes a bounded time.

use crate::service::{Precis, Process, SOON, messages, outcome};
use crate::support::backend::Backend;
use crate::support::model_server::{Behaviour, ModelServer};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, timeout};

/// Tolerance in addition to the grace period, for busy machines.
const MARGIN: Duration = Duration::from_secs(4);

async fn start(backend: &Backend, model: &ModelServer, grace: &str) -> Process {
    let precis = Precis::on(backend).model(&model.base_url());
    precis.set("server.shutdown_grace", grace).start().await
}

/// Sends a context request. Returns when the model has received the request for its consolidation.
async fn start_consolidation(service: &Process, model: &ModelServer, body: &Value) -> JoinHandle<Value> {
    service.record("s", &messages(102)).await;
    let request = service.post("/sessions/s/context", body);
    let response = tokio::spawn(async { request.await.ok(200) });
    model.until_calls(1).await;
    response
}

/// Waits until connections are refused.
async fn wait_until_refused(service: &Process) {
    let address = service.url.trim_start_matches("http://");
    let refused = async { while tokio::net::TcpStream::connect(address).await.is_ok() {} };
    timeout(SOON, refused).await.expect("no longer listened on");
}

#[tokio::test]
async fn shutdown_answers_running_requests_and_rejects_new_ones() {
    // A second signal must not interrupt the graceful shutdown.
    for signals in [&["TERM"][..], &["INT"], &["TERM", "TERM"], &["TERM", "INT"]] {
        let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
        let released = Arc::new(Semaphore::new(0));
        model.default(Behaviour::Held(Arc::clone(&released), "Answer 1: the team took plan 1.".to_owned()));
        let mut service = start(&backend, &model, "20s").await;
        let response = start_consolidation(&service, &model, &json!({})).await;
        for signal in signals {
            service.signal(signal);
            service.wait_for_log("stopping").await;
        }
        wait_until_refused(&service).await;
        assert!(service.get("/livez").unchecked().await.is_err());
        assert!(!response.is_finished());
        released.add_permits(1);
        let context = response.await.expect("answered");
        assert_eq!(outcome(&context, 102), "consolidated");
        let (code, elapsed) = service.ended().await;
        assert_eq!(code, Some(0), "{signals:?}");
        assert!(elapsed < MARGIN, "{signals:?}: {elapsed:?} after the last answer");
        service.wait_for_log("stopped").await;
    }
}

#[tokio::test]
async fn shutdown_answers_request_that_waits_for_model() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    model.push(Behaviour::Hang);
    model.default(Behaviour::answer("Answer 1: the team took plan 1."));
    let mut service = start(&backend, &model, "4s").await;
    let other = start(&backend, &model, "4s").await;
    let response = start_consolidation(&service, &model, &json!({})).await;
    service.signal("TERM");
    let context = response.await.expect("answered");
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
async fn shutdown_releases_lease_of_background_consolidation() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    model.push(Behaviour::Hang);
    model.default(Behaviour::answer("Answer 1: the team took plan 1."));
    let mut service = start(&backend, &model, "1s").await;
    let other = start(&backend, &model, "1s").await;
    let response = start_consolidation(&service, &model, &json!({"mode": "background"})).await;
    assert_eq!(outcome(&response.await.expect("answered"), 102), "scheduled");
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
async fn shutdown_waits_for_background_consolidation() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    let released = Arc::new(Semaphore::new(0));
    model.default(Behaviour::Held(Arc::clone(&released), "Answer 1: the team took plan 1.".to_owned()));
    let mut service = start(&backend, &model, "20s").await;
    let response = start_consolidation(&service, &model, &json!({"mode": "background"})).await;
    response.await.expect("answered");
    service.signal("TERM");
    wait_until_refused(&service).await;
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
async fn open_connections_do_not_delay_shutdown() {
    let (backend, model) = (Backend::sqlite().await, ModelServer::start().await);
    let mut service = start(&backend, &model, "1s").await;
    let address = service.url.trim_start_matches("http://").to_owned();
    let mut open = Vec::new();
    // Connections with no data, with half of a head, with half of a body.
    for sent in [
        "",
        "GET /livez HTTP/1.1\r\nhost: x\r\n",
        "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    ] {
        let mut connection = TcpStream::connect(&address).expect("connected");
        connection.write_all(sent.as_bytes()).expect("sent");
        open.push(connection);
    }
    // An idle connection in the client's pool.
    service.get("/livez").await.ok(200);
    let began = Instant::now();
    service.signal("TERM");
    let (code, _) = service.ended().await;
    assert_eq!(code, Some(0));
    assert!(began.elapsed() < Duration::from_secs(1) + MARGIN, "{:?}", began.elapsed());
    drop(open);
}

#[tokio::test]
async fn hanging_postgres_does_not_delay_shutdown() {
    let (backend, model) = (Backend::postgres().await, ModelServer::start().await);
    let mut service = start(&backend, &model, "1s").await;
    service.record("s", &messages(2)).await;
    let Backend::Postgres(database) = &backend else { unreachable!() };
    let mut other = PgConnection::connect(&database.admin_url()).await.expect("connected");
    let mut lock = other.begin().await.expect("begun");
    sqlx::query("SELECT FROM sessions FOR UPDATE").execute(&mut *lock).await.expect("locked");
    let body = json!({"messages": messages(2)});
    let waiting = tokio::spawn(service.post("/sessions/s/exchanges", body).unchecked());
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
    // The connection is closed, or, if the exchange was between two attempts, its next one finds the store closed.
    let status = waiting.await.expect("no panic").ok().map(|response| response.status().as_u16());
    assert!(
        matches!(status, None | Some(503)),
        "the exchange was not persisted, but its status is {status:?}"
    );
    lock.rollback().await.expect("rolled back");
}
