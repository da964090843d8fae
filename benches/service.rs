//! What a context costs, over HTTP, on each store: `scripts/postgres cargo bench --bench service`.
//!
//! Client, service and database share one machine, so the figures that mean something elsewhere are the ratios, all of
//! one run. The lines are measured by turns, so that a noisy moment meets all of them.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that can't go on ends")]

use precis::app::App;
use precis::config::{Settings, Sources};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Measured requests of each kind.
const ROUNDS: usize = 400;
/// Requests before that: they fill caches and pools.
const WARM_UP: usize = 20;
/// Messages of the long history.
const LONG: usize = 20_000;
/// Messages of the tail in both histories.
const TAIL: usize = 100;
/// Messages that consolidation leaves, by default.
const KEPT: usize = 20;

struct Service {
    url: String,
    client: Client,
}

impl Service {
    async fn start(database: &str) -> Self {
        let variables = [("PRECIS__DATABASE__URL", database), ("PRECIS__SERVER__BIND", "127.0.0.1:0")];
        let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let sources = Sources { environment, ..Sources::default() };
        let settings = Settings::load(&sources).expect("settings").settings;
        let app = App::new(&settings, true).await.expect("an app");
        let listener = app.listen().await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(app.serve(listener, std::future::pending()));
        let client = precis::llm::http::build_http_client(Duration::from_secs(5)).expect("a client");
        Self { url, client }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<&Value>) {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let request = if let Some(body) = body { request.json(body) } else { request };
        let response = request.send().await.expect("an answer");
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.bytes().await.expect("a body");
    }

    /// A session of `messages` messages, of which the last [`TAIL`] are its tail.
    async fn session(&self, name: &str, messages: usize) {
        let exchanges = format!("/sessions/{name}/exchanges");
        let older = if messages > TAIL { messages - TAIL + KEPT } else { 0 };
        for (from, to) in [(0, older), (older, messages)] {
            for begin in (from..to).step_by(500) {
                let batch: Vec<Value> = (begin..to.min(begin + 500)).map(message).collect();
                self.ask(Method::POST, &exchanges, Some(&json!({ "messages": batch }))).await;
            }
            if to == older && older > 0 {
                self.ask(Method::POST, &format!("/sessions/{name}/consolidations"), None).await;
            }
        }
    }
}

/// Of about 300 characters, as in a chat.
fn message(at: usize) -> Value {
    let role = if at.is_multiple_of(2) { "user" } else { "assistant" };
    let text =
        format!("Message {at} says what happened on day {} and what follows from it. ", at / 10).repeat(4);
    json!({ "role": role, "content": text })
}

/// One kind of work, and how long it took each time.
struct Line<'a> {
    name: &'static str,
    requests: Vec<(Method, &'a str, Option<&'a Value>)>,
    took: Vec<Duration>,
}

impl Line<'_> {
    fn percentile(&mut self, percent: usize) -> f64 {
        self.took.sort_unstable();
        let at = (self.took.len() * percent / 100).min(self.took.len().saturating_sub(1));
        self.took.get(at).copied().unwrap_or_default().as_secs_f64()
    }
}

async fn measure(database: &str) {
    let service = Service::start(database).await;
    service.session("short", TAIL).await;
    service.session("long", LONG).await;
    let document = json!({ "content": "Ada likes tea. ".repeat(60) });
    service.ask(Method::PUT, "/users/default/memory", Some(&document)).await;
    let body =
        json!({ "system_prompt": "You are a helpful assistant. ".repeat(40), "user_message": "And now?" });
    let turn = json!({ "user_message": "What happened? ".repeat(10), "assistant_reply": "This and that. ".repeat(20) });
    let get = |path| (Method::GET, path, None);
    let post = |path, body| (Method::POST, path, Some(body));
    let line = |name, requests| Line { name, requests, took: Vec::with_capacity(ROUNDS) };
    let mut lines = [
        line("context, history of 100 messages", vec![post("/sessions/short/context", &body)]),
        line("context, history of 20,000 messages", vec![post("/sessions/long/context", &body)]),
        line(
            "the same out of three reads",
            vec![
                get("/sessions/long"),
                get("/users/default/memory"),
                get("/sessions/long/messages?order=desc&limit=100"),
            ],
        ),
        line("an exchange of two messages", vec![post("/sessions/written/exchanges", &turn)]),
        line("GET /livez: HTTP alone", vec![get("/livez")]),
    ];
    for round in 0..WARM_UP + ROUNDS {
        for line in &mut lines {
            let began = Instant::now();
            for (method, path, body) in &line.requests {
                service.ask(method.clone(), path, *body).await;
            }
            if round >= WARM_UP {
                line.took.push(began.elapsed());
            }
        }
    }
    let base = lines.first_mut().map_or(1.0, |line| line.percentile(50));
    let store = database.split(':').next().unwrap_or_default();
    println!("| {store} | p50 | p99 | ratio of p50 |\n| --- | --- | --- | --- |");
    for line in &mut lines {
        let (p50, p99) = (line.percentile(50), line.percentile(99));
        println!("| {} | {:.2} ms | {:.2} ms | {:.2} |", line.name, p50 * 1e3, p99 * 1e3, p50 / base);
    }
    println!();
}

#[tokio::main]
async fn main() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    measure(&format!("sqlite://{}", folder.path().join("precis.db").display())).await;
    match std::env::var("PRECIS_TEST_POSTGRES") {
        Ok(url) => measure(&url).await,
        Err(_) => {
            println!("Postgres was not measured. Run it as: scripts/postgres cargo bench --bench service");
        }
    }
}
