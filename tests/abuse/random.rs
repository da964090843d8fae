//! Random large requests of many clients with any scope, slow readers and disconnects.

use crate::service::{Bystander, Service};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::factor::test_factor;
use fastrand::Rng;
use futures_util::future::join_all;
use precis::domain::api_key::Scope;
use reqwest::Method;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

const CLIENTS: usize = 64;
const KEYS: usize = 8;
/// The process may have this memory with default settings, in MB.
const MAX_MEMORY: u64 = 512;
/// A client erases its session when it has more than this.
const MAX_SESSION_BYTES: usize = 24 << 20;

/// Returns the time of the requests.
fn duration() -> Duration {
    Duration::from_secs(10 * u64::from(test_factor()))
}

/// Returns a text of a random size: each order of magnitude up to `max` is as common as the others.
fn text(random: &mut Rng, max: usize) -> String {
    let parts =
        ["!", " ", "a", "7", "é", "😀", "\\n", "The ferry leaves at nine. ", "{\\\"a\\\":[1,2]} ", "茶"];
    let exponent = random.f64() * f64::from(u32::try_from(max).expect("small")).log2();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    let bytes = exponent.exp2() as usize;
    let part = parts[random.usize(..parts.len())];
    part.repeat(bytes / part.len() + 1)
}

struct Attacker<'a> {
    client: TestClient,
    key: String,
    session: String,
    stored: usize,
    random: Rng,
    statuses: &'a Mutex<BTreeMap<(&'static str, u16), usize>>,
}

impl Attacker<'_> {
    async fn run(mut self, until: Instant) {
        while Instant::now() < until {
            let (what, status) = self.attack().await;
            *self.statuses.lock().expect("no panic").entry((what, status)).or_default() += 1;
        }
    }

    /// Sends a random request. Returns its kind and the status, or 0 if it was interrupted.
    async fn attack(&mut self) -> (&'static str, u16) {
        let session = format!("/sessions/{}", self.session);
        let get = |path: &str| (Method::GET, format!("{session}{path}"), String::new());
        let (what, (method, path, body)) = match self.random.u8(..14) {
            0..=2 => {
                // A few large messages, or up to ten thousand small ones.
                let count =
                    if self.random.bool() { self.random.usize(1..5) } else { self.random.usize(1..10_000) };
                let mut messages = String::new();
                for _ in 0..count {
                    let text = text(&mut self.random, (28 << 20) / count.max(4));
                    let _ = write!(messages, r#"{{"role":"user","content":"{text}"}},"#);
                }
                self.stored += messages.len();
                let body = format!(r#"{{"messages":[{}]}}"#, messages.trim_end_matches(','));
                ("exchange", (Method::POST, format!("{session}/exchanges"), body))
            }
            3..=5 => {
                let text = text(&mut self.random, 7 << 20);
                let format = ["openai", "anthropic"][self.random.usize(..2)];
                let body = format!(r#"{{"format":"{format}","fields":"all","user_message":"{text}"}}"#);
                ("context", (Method::POST, format!("{session}/context"), body))
            }
            6 => ("messages", get("/messages?limit=1000")),
            7 => ("newest messages", get("/messages?limit=1000&order=desc")),
            8 => {
                ("search", (Method::GET, "/search?q=ferry&limit=50&neighbours=10".to_owned(), String::new()))
            }
            9 => ("revisions", get("/revisions?limit=1000")),
            10 => ("export", get("/export")),
            11 => {
                let line = json!({"role": "user", "content": text(&mut self.random, 1 << 20)}).to_string();
                let path = format!("{session}-{}/import", self.random.u8(..3));
                ("import", (Method::POST, path, format!("{line}\n").repeat(1 + self.random.usize(..20))))
            }
            12 => {
                self.stored = MAX_SESSION_BYTES;
                ("sessions", (Method::GET, "/sessions?limit=1000".to_owned(), String::new()))
            }
            _ => ("consolidation", (Method::POST, format!("{session}/consolidations"), String::new())),
        };
        if self.stored >= MAX_SESSION_BYTES {
            self.stored = 0;
            let erased = self.client.delete(&session).unchecked().await;
            for number in 0..3 {
                drop(self.client.delete(&format!("{session}-{number}")).unchecked().await);
            }
            drop(erased);
        }
        match self.random.u8(..8) {
            0 => {
                self.read_slowly(&method, &path, &body).await;
                ("slow reader", 0)
            }
            1 => {
                self.disconnect(&method, &path, &body).await;
                ("disconnect", 0)
            }
            _ => {
                let is_lines = what == "import";
                let kind = if is_lines { "application/x-ndjson" } else { "application/json" };
                let request = self.client.request(method, &path);
                let request =
                    if body.is_empty() { request } else { request.header("content-type", kind).body(body) };
                let Ok(mut response) = request.unchecked().await else { return (what, 0) };
                let status = response.status().as_u16();
                while let Ok(Some(_)) = response.chunk().await {}
                (what, status)
            }
        }
    }

    fn head(&self, method: &Method, path: &str, body: &str) -> String {
        let (key, bytes) = (&self.key, body.len());
        format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
             content-type: application/json\r\ncontent-length: {bytes}\r\n\r\n"
        )
    }

    /// Reads a little now and then, and disconnects.
    async fn read_slowly(&mut self, method: &Method, path: &str, body: &str) {
        let mut stream = self.client.connect().await;
        let head = self.head(method, path, body);
        let sent = async {
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(body.as_bytes()).await
        };
        if sent.await.is_err() {
            return;
        }
        let mut part = [0; 1024];
        for _ in 0..self.random.u8(1..30) {
            let _ = timeout(Duration::from_millis(200), stream.read(&mut part)).await;
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends a part of a request, and disconnects.
    async fn disconnect(&mut self, method: &Method, path: &str, body: &str) {
        let mut stream = self.client.connect().await;
        let _ = stream.write_all(self.head(method, path, body).as_bytes()).await;
        let part = self.random.usize(..=body.len());
        let _ = timeout(Duration::from_secs(2), stream.write_all(&body.as_bytes()[..part])).await;
        sleep(Duration::from_millis(self.random.u64(..300))).await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures memory and shares; run by .ci/run and scripts/abuse"]
async fn random_requests_of_many_clients_have_a_common_limit(backend: Backend) {
    let service = Service::start(backend, &[]).await;
    let bystander = Bystander::new(&service, "bystander").await;
    let idle = bystander.measure(Duration::from_millis(500), async {}).await;
    let mut keys = Vec::new();
    for number in 0..KEYS {
        let scope = [Scope::Admin, Scope::Admin, Scope::Write, Scope::Read][number % 4];
        keys.push(service.backend.key(&format!("tenant{}", number % 3), scope).await);
    }
    let (seed, statuses) = (fastrand::u64(..), Mutex::new(BTreeMap::new()));
    println!("seed {seed}, idle: {}", idle.figures());
    let (client, until) = (service.tenant("other").await, Instant::now() + duration());
    let attackers = (0..CLIENTS).map(|number| {
        let key = keys[number % KEYS].expose().to_owned();
        let attacker = Attacker {
            client: client.with_key(&key),
            key,
            session: format!("s{number}"),
            stored: 0,
            random: Rng::with_seed(seed.wrapping_add(number as u64)),
            statuses: &statuses,
        };
        attacker.run(until)
    });
    let attack = async {
        join_all(attackers).await;
    };
    let served = bystander.measure(duration(), attack).await;
    println!("{:?}", statuses.lock().expect("no panic"));
    println!("beside {CLIENTS} clients: {}; peak {} MB", served.figures(), service.peak_memory());
    assert!(service.peak_memory() < MAX_MEMORY, "{} MB", service.peak_memory());
    assert!(served.has_its_share(), "{}", served.figures());
    let statuses = statuses.into_inner().expect("no panic");
    assert!(statuses.keys().all(|(_, status)| *status != 500), "{statuses:?}");
}
