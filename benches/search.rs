//! Durations of searches over HTTP in a tenant with a million messages, with warm caches, on each store:
//! `PRECIS_TEST_POSTGRES_DURABLE=1 scripts/postgres cargo bench --bench search` (`-- 100000` for fewer messages).
//!
//! Fails if the median of a kind of query is 15 ms or more, or its 99th percentile 60 ms or more.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that cannot continue ends")]

use precis::app::App;
use precis::config::{Settings, Sources};
use reqwest::{Client, Method};
use std::fmt::Write as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const MESSAGES: usize = 1_000_000;
const MESSAGES_PER_SESSION: usize = 10_000;
/// Measured searches of each kind.
const SEARCHES: usize = 100;
/// Limits of each kind of query, in milliseconds.
const MAX_MEDIAN: f64 = 15.0;
const MAX_P99: f64 = 60.0;

/// A running service and its client.
struct Service {
    url: String,
    client: Client,
}

impl Service {
    async fn start(database: &str) -> Self {
        let set = [("PRECIS__DATABASE__URL", database), ("PRECIS__SERVER__BIND", "127.0.0.1:0")];
        let environment = set.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let sources = Sources { environment, ..Sources::default() };
        let settings = Settings::load(&sources).expect("settings").settings;
        let app = App::new(&settings, true).await.expect("an app");
        let listener = app.listen().await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(app.serve(listener, std::future::pending()));
        let client = precis::llm::http::build_http_client(Duration::from_secs(5)).expect("a client");
        Self { url, client }
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

    async fn request(&self, method: Method, path: &str, lines: Option<String>) -> Duration {
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        if let Some(lines) = lines {
            request = request.header("content-type", "application/x-ndjson").body(lines);
        }
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

/// Measures searches of each kind. Returns `true` if they are below the limits.
async fn measure_searches(store: &str, service: &Service) -> bool {
    println!("| {store} | p50 | p99 |\n| --- | --- | --- |");
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
            let time = service.request(Method::GET, &format!("/search?q={query}"), None).await;
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
    let mut databases = vec![("SQLite", format!("sqlite://{}", folder.path().join("search.db").display()))];
    if let Ok(server) = std::env::var("PRECIS_TEST_POSTGRES") {
        let made = Command::new("psql").args([&*server, "-qc", "CREATE DATABASE search"]).status();
        assert!(made.is_ok_and(|status| status.success()), "no database");
        databases.push(("Postgres", server.replacen("/postgres?", "/search?", 1)));
    }
    let mut fast = true;
    for (store, database) in databases {
        let (service, mut words) = (Service::start(&database).await, TextGenerator(11));
        for session in 0..messages.div_ceil(MESSAGES_PER_SESSION) {
            let count = MESSAGES_PER_SESSION.min(messages - session * MESSAGES_PER_SESSION);
            service.import(&format!("session-{session}"), count, &mut words).await;
        }
        fast &= measure_searches(store, &service).await;
    }
    if fast { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
