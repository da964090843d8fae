//! Attacks of one key on everything that can run out. Another key is served meanwhile, and as before five seconds later.

use crate::service::{Bystander, Measured, Service, flood, status_after_body};
use crate::support::backend::Backend;
use crate::support::client::{Request, TestClient};
use crate::support::factor::test_factor;
use futures_util::future::join_all;
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep, timeout};

/// The process may have this memory with default settings, in MB.
const MAX_MEMORY: u64 = 512;
/// The 99th percentile beside an attack may be so many times that of an idle service.
const MAX_FACTOR: u32 = 20 * SLOWNESS;
/// A debug build on a busy machine needs up to three times as long.
const SLOWNESS: u32 = if cfg!(debug_assertions) { 3 } else { 1 };
/// The shortest time that counts as the 99th percentile of an idle service: on a busy machine, single requests take longer.
const LEAST_IDLE: Duration = Duration::from_millis(10);
/// The default of `limits.queue_timeout`.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that ask for documents without a pause. A debug build needs about ten times as long for each.
const PIPELINING: usize = if cfg!(debug_assertions) { 100 } else { 1000 };

/// Returns the time of each attack. `scripts/abuse` takes longer ones.
fn duration() -> Duration {
    Duration::from_secs(2 * u64::from(test_factor()))
}

/// The requests that the other key sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Contexts, and an exchange now and then.
    Turns,
    /// Contexts that consolidate before.
    Consolidations,
    /// Redactions and erasures.
    Removals,
}

async fn measure(bystander: &Bystander, kind: Kind, attack: impl Future<Output = ()>) -> Measured {
    let client = bystander.client();
    let request = |number: usize| -> Request {
        match (kind, number % 3) {
            (Kind::Consolidations, 0) => {
                let turn =
                    |role: &str| json!({"role": role, "content": format!("The plan of turn {number}.")});
                let turns: Vec<Value> = (0..60).flat_map(|_| [turn("user"), turn("assistant")]).collect();
                client.post("/sessions/due/exchanges", json!({"messages": turns}))
            }
            (Kind::Consolidations, _) => {
                client.post("/sessions/due/context", json!({"user_message": "And now?"}))
            }
            (Kind::Removals, 0) => {
                client.post("/sessions/gone/exchanges", json!({"user_message": "a", "assistant_reply": "b"}))
            }
            (Kind::Removals, 1) => client.delete("/sessions/gone/messages/1"),
            (Kind::Removals, _) => client.delete("/sessions/gone"),
            (Kind::Turns, _) => unreachable!("measured below"),
        }
    };
    match kind {
        Kind::Turns => bystander.measure(Duration::from_secs(1), attack).await,
        _ => bystander.measure_requests(Duration::from_secs(1), request, attack).await,
    }
}

/// A connection that sends a request and reads the response slowly, or not at all.
async fn open(client: &TestClient, head: String) -> Option<tokio::net::TcpStream> {
    let mut stream = timeout(Duration::from_secs(5), client.connect()).await.ok()?;
    stream.write_all(head.as_bytes()).await.ok()?;
    Some(stream)
}

fn lines(messages: usize, bytes: usize) -> String {
    let text = "word ".repeat(bytes / 5);
    let mut lines = String::new();
    for number in 0..messages {
        let role = if number % 2 == 0 { "user" } else { "assistant" };
        let _ = writeln!(lines, r#"{{"role":"{role}","content":"{number} {text}"}}"#);
    }
    lines
}

async fn import(client: &TestClient, session: &str, lines: String) -> u16 {
    let request = client.request(Method::POST, &format!("/sessions/{session}/import"));
    status_after_body(request.header("content-type", "application/x-ndjson").body(lines)).await
}

/// Attacks with this key for some time. `session` has 20,000 messages, and `large` 25 MB.
async fn attack(name: &str, client: TestClient, key: String) {
    let time = duration();
    let status = async |request: Request| status_after_body(request).await;
    let statuses = match name {
        "imports and erasures" => {
            let body = lines(20, 200);
            let request = async move |number: usize| {
                let session = format!("i{number}");
                import(&client, &session, body.clone()).await;
                status(client.delete(&format!("/sessions/{session}"))).await
            };
            flood(200, time, request).await
        }
        "searches over MCP" => {
            let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "search_history", "arguments": {"query": "word plan"}}});
            flood(160, time, async move |_| status(client.post("/mcp", &call)).await).await
        }
        "heads without a body" => {
            let head = format!(
                "POST /sessions/h/exchanges HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
                 content-type: application/json\r\ncontent-length: 100\r\n\r\n"
            );
            let connections = join_all((0..2048).map(|_| open(&client, head.clone()))).await;
            sleep(time).await;
            vec![(0, connections.iter().flatten().count())]
        }
        "rewinds beside exchanges" => {
            let request = async move |number: usize| {
                if number == 0 {
                    status(client.request(Method::DELETE, "/sessions/session/messages?after=19990")).await
                } else {
                    let turn = json!({"user_message": "a", "assistant_reply": "b"});
                    status(client.post("/sessions/session/exchanges", turn)).await
                }
            };
            flood(160, time, request).await
        }
        "slow exports" => {
            let head = format!(
                "GET /sessions/large/export HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
            );
            let request = async move |_| {
                let Some(mut stream) = open(&client, head.clone()).await else { return 0 };
                let (mut part, until) = (vec![0; 1024], Instant::now() + Duration::from_millis(700));
                while Instant::now() < until && stream.read(&mut part).await.is_ok_and(|bytes| bytes > 0) {
                    sleep(Duration::from_millis(50)).await;
                }
                200
            };
            flood(24, time, request).await
        }
        "forks" => {
            let request =
                async move |_| status(client.post("/sessions/large/fork", r#"{"through_seq":25}"#)).await;
            flood(20, time, request).await
        }
        "small exchanges" => {
            let turn = json!({"user_message": "Where is it?", "assistant_reply": "Here."});
            let request = async move |number| {
                status(client.post(&format!("/sessions/w{number}/exchanges"), &turn)).await
            };
            flood(200, time, request).await
        }
        "dry runs" => {
            let request = async move |_| status(client.get("/sessions/session/consolidations/next")).await;
            flood(60, time, request).await
        }
        "documents" => {
            let head = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(20);
            let request = async move |_| {
                let Some(mut stream) = open(&client, head.clone()).await else { return 0 };
                let (mut part, until) = (vec![0; 64 * 1024], Instant::now() + Duration::from_secs(1));
                while Instant::now() < until {
                    let read = timeout(Duration::from_millis(100), stream.read(&mut part)).await;
                    if !matches!(read, Ok(Ok(1..))) {
                        break;
                    }
                }
                200
            };
            // Reading gigabytes takes a thread, which must not be that of the measurement.
            let reading = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime").block_on(flood(PIPELINING, time, request))
            };
            tokio::task::spawn_blocking(reading).await.expect("no panic")
        }
        _ => unreachable!("{name}"),
    };
    println!("{name}: {statuses:?}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run and scripts/abuse"]
async fn attack_of_one_key_leaves_others_served(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let key = service.backend.key("attacker", Scope::Admin).await;
    let attacker = service.tenant("attacker").await.with_key(key.expose());
    let bystander = Bystander::new(&service, "bystander").await;
    assert_eq!(import(&attacker, "session", lines(20_000, 50)).await, 201);
    assert_eq!(import(&attacker, "large", lines(25, 1_000_000)).await, 201);
    let mut idle = BTreeMap::new();
    for kind in [Kind::Turns, Kind::Consolidations, Kind::Removals] {
        let measured = measure(&bystander, kind, async {}).await;
        println!("idle: {kind:?} {}", measured.figures());
        idle.insert(kind, measured.percentile(99).max(LEAST_IDLE));
    }
    // Times are compared in longer runs only: the machine that runs CI has two cores, and other work.
    let compares_times = test_factor() > 1;
    let mut failures = Vec::new();
    let attacks = [
        ("imports and erasures", Kind::Turns),
        ("searches over MCP", Kind::Turns),
        ("heads without a body", Kind::Turns),
        ("rewinds beside exchanges", Kind::Turns),
        ("slow exports", Kind::Consolidations),
        ("forks", Kind::Removals),
        ("small exchanges", Kind::Turns),
        ("dry runs", Kind::Turns),
        ("documents", Kind::Turns),
    ];
    // Without a factor, a quarter of them is measured.
    let step = if compares_times { 1 } else { 4 };
    for (name, kind) in attacks.into_iter().step_by(step) {
        let beside = measure(&bystander, kind, attack(name, attacker.clone(), key.expose().to_owned())).await;
        let idle_time = idle[&kind];
        let is_slow =
            |measured: &Measured| compares_times && measured.percentile(99) > idle_time * MAX_FACTOR;
        // After five seconds at the latest, it is as before, or later if times are not compared.
        let recovery = Duration::from_secs(if compares_times { 5 } else { 30 });
        let ended = Instant::now();
        let after = loop {
            sleep(Duration::from_secs(1)).await;
            let is_last = ended.elapsed() >= recovery;
            let after = measure(&bystander, kind, async {}).await;
            if is_last || (after.served == after.sent && !is_slow(&after)) {
                break after;
            }
        };
        let peak = service.peak_memory();
        println!("beside {name}: {}; then {}; peak {peak} MB", beside.figures(), after.figures());
        let in_time = beside.served_within((QUEUE_TIMEOUT + idle_time) * SLOWNESS);
        if !beside.has_its_share()
            || compares_times && in_time * 100 < beside.sent * 99
            || is_slow(&beside)
            || after.served < after.sent
            || is_slow(&after)
            || peak >= MAX_MEMORY
        {
            failures.push(format!(
                "{name}: {}, {in_time} in time; then {}; peak {peak} MB",
                beside.figures(),
                after.figures()
            ));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
