//! Turns of the proxy during faults: every answer that a client received completely is stored once, at its place.
//!
//! Each client sends its complete list and repeats a request until it has received the whole answer. Meanwhile the process is killed and,
//! on Postgres, the server is stopped. Answers that come without memory are part of the next list.

use crate::postgres_server::PostgresServer;
use crate::replica::Replica;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::model_server::{Behaviour, ModelServer};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const CLIENTS: usize = 6;
const FAULTS: usize = 4;
const PAUSE: Duration = Duration::from_millis(600);
const MAX_TIME: Duration = Duration::from_mins(1);

fn message(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

/// Returns the text of a complete stream, and if its turn is stored. `None` if the connection broke.
async fn ask(url: &str, session: usize, list: &[Value]) -> Option<(String, bool)> {
    let client = TestClient::new(url.to_owned());
    let body = json!({"model": "m", "stream": true, "messages": list});
    let request = client.post(&format!("/proxy/s{session}/v1/chat/completions"), body);
    let response = request.unchecked().await.ok().filter(|response| response.status().is_success())?;
    let is_stored = response.headers()["x-precis-stored"] != "none";
    let body = response.text().await.ok().filter(|body| body.ends_with("data: [DONE]\n\n"))?;
    let events =
        body.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let texts =
        events.filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned));
    Some((texts.collect(), is_stored))
}

/// Runs clients while `fault` breaks something again and again. Returns the number of answers without memory.
async fn run(replica: &Replica, upstream: &ModelServer, mut fault: impl AsyncFnMut(usize)) -> usize {
    let number = AtomicUsize::new(0);
    upstream.default(Behaviour::choose(move |_| {
        // No two answers are the same, so that a repeated request is visible.
        let number = number.fetch_add(1, Ordering::Relaxed);
        Behaviour::Delayed(
            Duration::from_millis(number as u64 % 40),
            format!("Answer {number}, which is long enough."),
        )
    }));
    let (stop, forwarded) = (AtomicBool::new(false), AtomicUsize::new(0));
    let started_at = Instant::now();
    let client = async |session: usize| {
        let mut list = Vec::new();
        for turn in 0.. {
            let is_last = stop.load(Ordering::Relaxed);
            list.push(message("user", &format!("Question {turn} of client {session}")));
            let (answer, is_stored) = loop {
                assert!(started_at.elapsed() < MAX_TIME, "{:?}", replica.log());
                let Some(url) = replica.url() else {
                    sleep(Duration::from_millis(20)).await;
                    continue;
                };
                match ask(&url, session, &list).await {
                    // The last turn stores what the turns without memory have added.
                    Some((_, false)) if is_last => {}
                    Some(answer) => break answer,
                    None => {}
                }
                sleep(Duration::from_millis(20)).await;
            };
            forwarded.fetch_add(usize::from(!is_stored), Ordering::Relaxed);
            list.push(message("assistant", &answer));
            if is_last {
                break;
            }
        }
        list
    };
    let faults = async {
        for number in 0..FAULTS {
            sleep(PAUSE).await;
            fault(number).await;
        }
        sleep(PAUSE).await;
        stop.store(true, Ordering::Relaxed);
    };
    let (lists, ()) = tokio::join!(join_all((0..CLIENTS).map(client)), faults);
    let service = TestClient::new(replica.url().expect("it runs"));
    let texts = |list: &[Value]| -> Vec<String> {
        list.iter().map(|message| message["content"].as_str().unwrap_or_default().to_owned()).collect()
    };
    for (session, list) in lists.iter().enumerate() {
        assert!(list.len() > 2, "client {session} has had no turn before the last one");
        assert_eq!(texts(&service.history(&format!("s{session}")).await), texts(list), "session {session}");
    }
    forwarded.into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxied_turns_survive_kills_on_sqlite() {
    let (backend, upstream) = (Backend::sqlite().await, ModelServer::start().await);
    let replica =
        Replica::new(&[("database.url", &backend.url()), ("proxy.openai.base_url", &upstream.base_url())]);
    replica.start().await;
    let kill = async |_| {
        replica.kill();
        replica.start().await;
    };
    assert_eq!(run(&replica, &upstream, kill).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxied_turns_survive_kills_and_outages_of_postgres() {
    let (server, upstream) = (PostgresServer::start().await, ModelServer::start().await);
    let replica = Replica::new(&[
        ("database.url", server.url()),
        ("database.acquire_timeout", "300ms"),
        ("proxy.openai.base_url", &upstream.base_url()),
    ]);
    replica.start().await;
    let fault = async |number: usize| {
        if number.is_multiple_of(2) {
            replica.kill();
            replica.start().await;
        } else {
            server.stop_immediately().await;
            sleep(2 * PAUSE).await;
            server.restart().await;
        }
    };
    let forwarded = run(&replica, &upstream, fault).await;
    assert!(forwarded > 0, "clients get answers while the database is down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_of_the_store_is_a_header_or_an_error() {
    let (server, upstream) = (PostgresServer::start().await, ModelServer::start().await);
    let replicas = ["forward", "reject"].map(|on_unavailable| {
        Replica::new(&[
            ("database.url", server.url()),
            ("database.acquire_timeout", "300ms"),
            ("proxy.openai.base_url", &upstream.base_url()),
            ("proxy.on_unavailable", on_unavailable),
        ])
    });
    for replica in &replicas {
        replica.start().await;
        let url = replica.url().expect("it runs");
        assert!(ask(&url, 1, &[message("user", "Hello")]).await.is_some_and(|(_, is_stored)| is_stored));
    }
    server.stop_gracefully().await;
    let body = json!({"model": "m", "messages": [message("user", "Hello")]});
    for (replica, status) in replicas.iter().zip([200, 503]) {
        let client = TestClient::new(replica.url().expect("it runs"));
        let request = client.post("/proxy/s1/v1/chat/completions", &body);
        let response = request.unchecked().await.expect("a response");
        assert_eq!(response.status().as_u16(), status);
        let memory = response.headers().get("x-precis-memory").cloned();
        assert_eq!(memory.is_some_and(|memory| memory == "off; reason=unavailable"), status == 200);
    }
}
