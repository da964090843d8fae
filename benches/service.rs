//! Measures the time of contexts and exchanges over HTTP on both databases:
//! `scripts/postgres cargo bench --bench service`.
//!
//! Client, service and database share one machine, so only the ratios within one run apply to other machines. The
//! measurements alternate, so that a noisy period affects all of them.
#![expect(clippy::print_stdout, reason = "prints its result")]
#![expect(clippy::expect_used, reason = "a benchmark may panic")]

use precis::app::App;
use precis::config::{Settings, Sources};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The number of measured requests of each kind.
const ROUNDS: usize = 400;
/// The number of requests before the measurement. They fill caches and pools.
const WARM_UP_ROUNDS: usize = 20;
const LONG_HISTORY_MESSAGES: usize = 20_000;
const TAIL_MESSAGES: usize = 100;
/// The default of `consolidation.keep_recent`.
const KEEP_RECENT: usize = 20;

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

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let request = if let Some(body) = body { request.json(body) } else { request };
        let response = request.send().await.expect("an answer");
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.bytes().await.expect("a body");
    }

    /// Creates a session in which the last [`TAIL_MESSAGES`] messages are not summarised.
    async fn create_session(&self, name: &str, messages: usize) {
        let exchanges = format!("/sessions/{name}/exchanges");
        let older = if messages > TAIL_MESSAGES { messages - TAIL_MESSAGES + KEEP_RECENT } else { 0 };
        for (from, to) in [(0, older), (older, messages)] {
            for begin in (from..to).step_by(500) {
                let batch: Vec<Value> = (begin..to.min(begin + 500)).map(message).collect();
                self.send(Method::POST, &exchanges, Some(&json!({ "messages": batch }))).await;
            }
            if to == older && older > 0 {
                self.send(Method::POST, &format!("/sessions/{name}/consolidations"), None).await;
            }
        }
    }
}

/// Returns a message of about 300 characters.
fn message(index: usize) -> Value {
    let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
    let text = format!("Message {index} says what happened on day {} and what follows from it. ", index / 10)
        .repeat(4);
    json!({ "role": role, "content": text })
}

/// One measured operation.
struct Measurement<'a> {
    name: &'static str,
    requests: Vec<(Method, &'a str, Option<&'a Value>)>,
    times: Vec<Duration>,
}

impl Measurement<'_> {
    fn percentile(&mut self, percent: usize) -> f64 {
        self.times.sort_unstable();
        let index = (self.times.len() * percent / 100).min(self.times.len().saturating_sub(1));
        self.times.get(index).copied().unwrap_or_default().as_secs_f64()
    }
}

async fn measure(database: &str) {
    let service = Service::start(database).await;
    service.create_session("short", TAIL_MESSAGES).await;
    service.create_session("long", LONG_HISTORY_MESSAGES).await;
    let document = json!({ "content": "Ada likes tea. ".repeat(60) });
    service.send(Method::PUT, "/users/default/memory", Some(&document)).await;
    let body =
        json!({ "system_prompt": "You are a helpful assistant. ".repeat(40), "user_message": "And now?" });
    let exchange = json!({ "user_message": "What happened? ".repeat(10), "assistant_reply": "This and that. ".repeat(20) });
    let get = |path| (Method::GET, path, None);
    let post = |path, body| (Method::POST, path, Some(body));
    let measurement = |name, requests| Measurement { name, requests, times: Vec::with_capacity(ROUNDS) };
    let mut measurements = [
        measurement("context, history of 100 messages", vec![post("/sessions/short/context", &body)]),
        measurement("context, history of 20,000 messages", vec![post("/sessions/long/context", &body)]),
        measurement(
            "the same from three separate reads",
            vec![
                get("/sessions/long"),
                get("/users/default/memory"),
                get("/sessions/long/messages?order=desc&limit=100"),
            ],
        ),
        measurement("an exchange of two messages", vec![post("/sessions/written/exchanges", &exchange)]),
        measurement("GET /livez (HTTP only)", vec![get("/livez")]),
    ];
    for round in 0..WARM_UP_ROUNDS + ROUNDS {
        for measurement in &mut measurements {
            let started_at = Instant::now();
            for (method, path, body) in &measurement.requests {
                service.send(method.clone(), path, *body).await;
            }
            if round >= WARM_UP_ROUNDS {
                measurement.times.push(started_at.elapsed());
            }
        }
    }
    let base = measurements.first_mut().map_or(1.0, |measurement| measurement.percentile(50));
    let store = database.split(':').next().unwrap_or_default();
    println!("| {store} | p50 | p99 | ratio of p50 |\n| --- | --- | --- | --- |");
    for measurement in &mut measurements {
        let (p50, p99) = (measurement.percentile(50), measurement.percentile(99));
        println!("| {} | {:.2} ms | {:.2} ms | {:.2} |", measurement.name, p50 * 1e3, p99 * 1e3, p50 / base);
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
