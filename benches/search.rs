//! Cost of search on each store: `scripts/postgres cargo bench --bench search`.
//!
//! `indexing` measures the cost of indexing: it stores the same exchanges alternately in a service with an index and in one without.
//! A round ends with a search, which reads the recent messages. The index worker makes segments meanwhile. `large` and `small`
//! measure the duration of searches with warm caches in a million messages (`-- 100000` for fewer): of one tenant, and of 10,000
//! tenants with 100 messages each. They fail if the median of a kind of query is 15 ms or more, or its 99th percentile 60 ms or more. `-- large postgres` runs
//! one part on one store; without such words, all parts run on both. With `PRECIS_TEST_POSTGRES_DURABLE=1`, Postgres flushes every
//! commit, as in production; SQLite always does.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that cannot continue ends")]

use precis::app::App;
use precis::config::{Settings, Sources};
use precis::domain::api_key::Scope;
use precis::domain::id::TenantId;
use precis::service::keys::create_key;
use precis::storage::{self, StoreOptions};
use reqwest::{Client, Method};
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Messages of the large tenant, and of all small ones.
const MESSAGES: usize = 1_000_000;
const MESSAGES_PER_SESSION: usize = 10_000;
const MESSAGES_PER_TENANT: usize = 100;
/// Exchanges per round: enough for many segments.
const EXCHANGES_PER_ROUND: usize = 1000;
const MEASURED_ROUNDS: usize = 10;
const WARMUP_ROUNDS: usize = 2;
/// Measured searches of each kind.
const SEARCHES: usize = 100;
/// Limits of each kind of query, in milliseconds.
const MAX_MEDIAN: f64 = 15.0;
const MAX_P99: f64 = 60.0;

/// A client of a service.
#[derive(Clone)]
struct Service {
    url: String,
    client: Client,
    /// Empty if the service has no keys.
    key: String,
}

impl Service {
    async fn start(database: &str, enabled: bool) -> Self {
        let set = [
            ("PRECIS__DATABASE__URL", database),
            ("PRECIS__SERVER__BIND", "127.0.0.1:0"),
            ("PRECIS__SEARCH__ENABLED", if enabled { "true" } else { "false" }),
            ("PRECIS__LIMITS__REQUESTS_PER_SECOND", "0"),
        ];
        let environment = set.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let sources = Sources { environment, ..Sources::default() };
        let settings = Settings::load(&sources).expect("settings").settings;
        let app = App::new(&settings, true).await.expect("an app");
        let listener = app.listen().await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(app.serve(listener, std::future::pending()));
        let client = precis::llm::http::build_http_client(Duration::from_secs(5)).expect("a client");
        Self { url, client, key: String::new() }
    }

    /// Imports a session of texts.
    async fn import(&self, session: &str, messages: usize, words: &mut TextGenerator) {
        let mut lines = String::new();
        for at in 0..messages {
            let role = if at % 2 == 0 { "user" } else { "assistant" };
            let _ = writeln!(lines, r#"{{"role":"{role}","content":"{}"}}"#, words.text());
        }
        self.request(Method::POST, &format!("/sessions/{session}/import"), Some(lines)).await;
    }

    async fn request(&self, method: Method, path: &str, body: Option<String>) -> Duration {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let request = if self.key.is_empty() { request } else { request.bearer_auth(&self.key) };
        let kind = if path.ends_with("import") { "application/x-ndjson" } else { "application/json" };
        let request = match body {
            Some(body) => request.header("content-type", kind).body(body),
            None => request,
        };
        let start = Instant::now();
        let response = request.send().await.expect("an answer");
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.bytes().await.expect("a body");
        start.elapsed()
    }
}

/// A reproducible generator of texts with the word frequencies of natural language: the frequency of the n-th most frequent
/// word is proportional to 1/n.
struct TextGenerator(u64);

const VOCABULARY: f64 = 200_000.0;

impl TextGenerator {
    /// Returns a number from 0 to 1.
    fn random(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(self.0 >> 32).expect("32 bits")) / f64::from(u32::MAX)
    }

    /// Returns a text of 20 to 60 words.
    fn text(&mut self) -> String {
        let (mut text, mut left) = (String::new(), 20.0 + self.random() * 40.0);
        while left > 0.0 {
            text.push_str(&word(VOCABULARY.powf(self.random())));
            text.push(' ');
            left -= 1.0;
        }
        text
    }
}

/// Returns the word with a frequency rank, made of syllables.
fn word(rank: f64) -> String {
    let (mut rest, mut word) = (format!("{rank:.0}").parse::<usize>().expect("a number"), String::new());
    loop {
        let consonant = b"bdfgklmnprstvz".get(rest % 14).copied().unwrap_or(b'b');
        let vowel = b"aeiou".get(rest / 14 % 5).copied().unwrap_or(b'a');
        word.push(char::from(consonant));
        word.push(char::from(vowel));
        rest /= 70;
        if rest == 0 {
            return word + "k";
        }
    }
}

fn percentile(durations: &mut [Duration], percent: usize) -> f64 {
    durations.sort_unstable();
    let at = (durations.len() * percent / 100).min(durations.len().saturating_sub(1));
    durations.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// Durations of exchanges and rounds.
#[derive(Default)]
struct Durations {
    exchanges: Vec<Duration>,
    rounds: Vec<Duration>,
}

impl Durations {
    /// Returns milliseconds: median and 99th percentile of an exchange, and the median of a round divided by its exchanges.
    fn figures(&mut self) -> [f64; 3] {
        let exchanges = f64::from(u32::try_from(EXCHANGES_PER_ROUND).expect("few"));
        [
            percentile(&mut self.exchanges, 50),
            percentile(&mut self.exchanges, 99),
            percentile(&mut self.rounds, 50) / exchanges,
        ]
    }
}

/// Measures the cost of indexing.
async fn measure_indexing(store: &str, with: &str, without: &str) {
    let services = [Service::start(without, false).await, Service::start(with, true).await];
    let mut durations = [Durations::default(), Durations::default()];
    let mut words = TextGenerator(7);
    for round in 0..WARMUP_ROUNDS + MEASURED_ROUNDS {
        let mut exchange =
            || serde_json::json!({"user_message": words.text(), "assistant_reply": words.text()}).to_string();
        let exchanges: Vec<String> = (0..EXCHANGES_PER_ROUND).map(|_| exchange()).collect();
        for index in [round % 2, 1 - round % 2] {
            let (Some(service), Some(durations)) = (services.get(index), durations.get_mut(index)) else {
                continue;
            };
            let start = Instant::now();
            let mut round_durations = Vec::with_capacity(EXCHANGES_PER_ROUND);
            for (index, exchange) in exchanges.iter().enumerate() {
                let path = format!("/sessions/{}/exchanges", index % 20);
                round_durations.push(service.request(Method::POST, &path, Some(exchange.clone())).await);
            }
            if index == 1 {
                // A search reads the messages that are in no segment yet.
                service.request(Method::GET, "/search?q=nobodysaidthis", None).await;
            }
            if round >= WARMUP_ROUNDS {
                durations.rounds.push(start.elapsed());
                durations.exchanges.append(&mut round_durations);
            }
        }
    }
    let [without, with] = durations.each_mut().map(Durations::figures);
    println!(
        "| {store}: an exchange of two messages | p50 | p99 | until it is in the index |\n| --- | --- | --- | --- |"
    );
    for (name, [p50, p99, per_exchange]) in [("without an index", without), ("with it", with)] {
        println!("| {name} | {p50:.2} ms | {p99:.2} ms | {per_exchange:.2} ms |");
    }
    let [p50, p99, per_exchange] =
        [0, 1, 2].map(|at: usize| with.get(at).zip(without.get(at)).map_or(0.0, |(a, b)| a / b));
    println!("| ratio | {p50:.2} | {p99:.2} | {per_exchange:.2} |\n");
}

fn open_options() -> StoreOptions {
    let (acquire_timeout, statement_timeout) = (Duration::from_secs(5), Duration::from_mins(1));
    StoreOptions { max_connections: 1, acquire_timeout, statement_timeout, search: None, key_share: 0.5 }
}

/// Waits until all messages are indexed.
async fn wait_for_index(database: &str) {
    let store = storage::connect(database, &open_options()).await.expect("a store");
    while store.index_state().await.expect("a state").messages > 0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    store.close().await;
}

/// Measures searches in a large tenant. Returns `true` if they are below the limits.
async fn measure_large_tenant(store: &str, database: &str, messages: usize) -> bool {
    let service = Service::start(database, true).await;
    let (mut words, start) = (TextGenerator(11), Instant::now());
    for session in 0..messages.div_ceil(MESSAGES_PER_SESSION) {
        let messages = MESSAGES_PER_SESSION.min(messages - session * MESSAGES_PER_SESSION);
        service.import(&format!("session-{session}"), messages, &mut words).await;
    }
    wait_for_index(database).await;
    let seconds = start.elapsed().as_secs_f64();
    measure_searches(&format!("{store}: {messages} messages, imported in {seconds:.0} s"), &[service]).await
}

/// Measures searches in many small tenants. Returns `true` if they are below the limits.
async fn measure_small_tenants(store: &str, database: &str, messages: usize) -> bool {
    let service = Service::start(database, true).await;
    let keys = storage::connect(database, &open_options()).await.expect("a store");
    let (mut words, mut tenants, start) = (TextGenerator(13), Vec::new(), Instant::now());
    for number in 0..messages.div_ceil(MESSAGES_PER_TENANT) {
        let tenant = TenantId::new(format!("tenant-{number}")).expect("an id");
        let key = create_key(&keys, &tenant, None, Scope::Write).await.expect("a key");
        let tenant = Service { key: key.expose().to_owned(), ..service.clone() };
        tenant.import("session-0", MESSAGES_PER_TENANT, &mut words).await;
        tenants.push(tenant);
    }
    wait_for_index(database).await;
    let (count, seconds) = (tenants.len(), start.elapsed().as_secs_f64());
    let title =
        format!("{store}: {count} tenants with {MESSAGES_PER_TENANT} messages, imported in {seconds:.0} s");
    measure_searches(&title, &tenants).await
}

/// Measures searches of each kind in the tenants by turns. Returns `true` if they are below the limits.
async fn measure_searches(title: &str, tenants: &[Service]) -> bool {
    println!("| {title} | p50 | p99 |\n| --- | --- | --- |");
    let (mut all, mut fast) = (Vec::new(), true);
    // The capital letters stand for words of these ranks.
    let kinds: [(&str, &[f64], &str); 14] = [
        ("one rare word", &[100_000.0], "A"),
        ("one word of one in 300 messages", &[1000.0], "A"),
        ("one word of one in 40 messages", &[120.0], "A"),
        ("one word of every second message", &[5.0], "A"),
        ("two common words", &[2.0, 4.0], "A+B"),
        ("a question: five words, common and rare", &[1.0, 3.0, 90.0, 2000.0, 60_000.0], "A+B+C+D+E"),
        ("the same in one session", &[1.0, 3.0, 90.0, 2000.0, 60_000.0], "A+B+C+D+E&session_id=session-0"),
        ("a common word in one session", &[5.0], "A&session_id=session-0"),
        ("a question of one role", &[1.0, 90.0, 2000.0], "A+B+C&role=user"),
        ("a common word before the first message", &[5.0], "A&until=2020-01-01T00:00:00Z"),
        ("a common word since the new year", &[5.0], "A&since=2026-01-01T00:00:00Z"),
        ("a phrase of common words", &[5.0, 90.0], "%22A+B%22"),
        ("a common word without another", &[5.0, 2.0], "A+-B"),
        ("a prefix", &[120.0], "A*"),
    ];
    for (name, ranks, query) in kinds {
        let mut durations = Vec::new();
        for round in 0..SEARCHES + 3 {
            // Different words of similar frequency in each round.
            let shift = f64::from(u32::try_from(round).expect("small"));
            let texts = ('A'..).zip(ranks).map(|(name, rank)| (name, word(rank * (1.0 + shift / 100.0))));
            let query = texts.fold(query.to_owned(), |query, (name, text)| query.replace(name, &text));
            let query = if name == "a prefix" { query.replace("k*", "*") } else { query };
            let Some(tenant) = tenants.get(round * 97 % tenants.len().max(1)) else { continue };
            let time = tenant.request(Method::GET, &format!("/search?q={query}"), None).await;
            if round >= 3 {
                durations.push(time);
            }
        }
        let (median, p99) = (percentile(&mut durations, 50), percentile(&mut durations, 99));
        fast &= median < MAX_MEDIAN && p99 < MAX_P99;
        println!("| {name} | {median:.1} ms | {p99:.1} ms |");
        all.append(&mut durations);
    }
    println!("| all of them | {:.1} ms | {:.1} ms |\n", percentile(&mut all, 50), percentile(&mut all, 99));
    fast
}

#[tokio::main]
async fn main() -> ExitCode {
    let messages = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(MESSAGES);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut fast = true;
    // Without one of these words, all of them are selected.
    let is_selected = |name: &str, words: &[&str]| {
        let given = || std::env::args().filter(|argument| words.contains(&&**argument));
        given().next().is_none() || given().any(|argument| argument == name)
    };
    let is_part = |name| is_selected(name, &["indexing", "large", "small"]);
    let server = std::env::var("PRECIS_TEST_POSTGRES").ok();
    if server.is_none() {
        println!("without PRECIS_TEST_POSTGRES, only SQLite is measured");
    }
    for store in ["SQLite", "Postgres"] {
        if !is_selected(&store.to_lowercase(), &["sqlite", "postgres"])
            || (store == "Postgres" && server.is_none())
        {
            continue;
        }
        let database = |name: &str| match &server {
            Some(server) if store == "Postgres" => {
                let create = format!("CREATE DATABASE {name}");
                let made = std::process::Command::new("psql").args([server, "-qc", &create]).status();
                assert!(made.is_ok_and(|status| status.success()), "no database {name}");
                server.replacen("/postgres?", &format!("/{name}?"), 1)
            }
            _ => format!("sqlite://{}", folder.path().join(name).display()),
        };
        if is_part("indexing") {
            measure_indexing(store, &database("with_index"), &database("without_index")).await;
        }
        if is_part("large") {
            fast &= measure_large_tenant(store, &database("large"), messages).await;
        }
        if is_part("small") {
            fast &= measure_small_tenants(store, &database("small"), messages).await;
        }
    }
    if fast { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
