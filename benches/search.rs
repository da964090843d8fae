//! What search costs, on each store: `scripts/postgres cargo bench --bench search`.
//!
//! First the price of the index: the same exchanges by turns into a service with an index and into one without. A turn ends
//! when all of it is in the index: so what is done behind whoever stores is counted, too. Then how long a search takes among
//! a million messages of one tenant (`-- 100000` for fewer, `-- 0` to leave it out), with warm caches, and fails where the
//! median of all kinds of queries is not under 50 ms. `-- sqlite` or `-- postgres` measures that store alone. With
//! `PRECIS_TEST_POSTGRES_DURABLE=1` before it, Postgres flushes what it commits, as in production, and as SQLite does in
//! any case.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that can't go on ends")]

use precis::app::App;
use precis::config::{Settings, Sources};
use reqwest::{Client, Method};
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// As the binary has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Messages of the large tenant.
const MESSAGES: usize = 1_000_000;
/// Messages of one of its sessions.
const SESSION: usize = 10_000;
/// Exchanges that come one after the other: more than a service gathers before it indexes them.
const TURN: usize = 1000;
/// Measured turns of each side.
const TURNS: usize = 10;
/// Turns before those.
const WARM: usize = 2;
/// Measured searches of each kind.
const SEARCHES: usize = 20;
/// What the median of all searches must stay under.
const BOUND: Duration = Duration::from_millis(50);

struct Service {
    url: String,
    client: Client,
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
        Self { url, client }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<String>) -> Duration {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let kind = if path.ends_with("import") { "application/x-ndjson" } else { "application/json" };
        let request = match body {
            Some(body) => request.header("content-type", kind).body(body),
            None => request,
        };
        let began = Instant::now();
        let response = request.send().await.expect("an answer");
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.bytes().await.expect("a body");
        began.elapsed()
    }
}

/// Words as a language has them: the n-th most frequent in proportion to 1/n, a few in most messages, most in hardly any.
struct Words(u64);

/// How many different words there are.
const KINDS: f64 = 200_000.0;

impl Words {
    /// From 0 to 1; the same at every run.
    fn random(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(self.0 >> 32).expect("32 bits")) / f64::from(u32::MAX)
    }

    /// Of 20 to 60 words, as in a chat.
    fn text(&mut self) -> String {
        let (mut text, mut left) = (String::new(), 20.0 + self.random() * 40.0);
        while left > 0.0 {
            text.push_str(&word(KINDS.powf(self.random())));
            text.push(' ');
            left -= 1.0;
        }
        text
    }
}

/// The word of that rank, in syllables.
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

fn percentile(took: &mut [Duration], percent: usize) -> f64 {
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// What one side took.
#[derive(Default)]
struct Took {
    exchanges: Vec<Duration>,
    turns: Vec<Duration>,
}

impl Took {
    /// Milliseconds: of an exchange at the median and at the 99th percentile; and its part of a turn, at the median.
    fn figures(&mut self) -> [f64; 3] {
        let exchanges = f64::from(u32::try_from(TURN).expect("few"));
        [
            percentile(&mut self.exchanges, 50),
            percentile(&mut self.exchanges, 99),
            percentile(&mut self.turns, 50) / exchanges,
        ]
    }
}

/// The price of the index, by turns in one run.
async fn writing(store: &str, with: &str, without: &str) {
    let sides = [Service::start(without, false).await, Service::start(with, true).await];
    let mut took = [Took::default(), Took::default()];
    let mut words = Words(7);
    for round in 0..WARM + TURNS {
        let mut exchange =
            || serde_json::json!({"user_message": words.text(), "assistant_reply": words.text()}).to_string();
        let exchanges: Vec<String> = (0..TURN).map(|_| exchange()).collect();
        for turn_of in [round % 2, 1 - round % 2] {
            let (Some(side), Some(took)) = (sides.get(turn_of), took.get_mut(turn_of)) else { continue };
            let began = Instant::now();
            let mut turn = Vec::with_capacity(TURN);
            for (at, exchange) in exchanges.iter().enumerate() {
                let path = format!("/sessions/{}/exchanges", at % 20);
                turn.push(side.ask(Method::POST, &path, Some(exchange.clone())).await);
            }
            if turn_of == 1 {
                // A search waits until all is in the index.
                side.ask(Method::GET, "/search?q=nobodysaidthis", None).await;
            }
            if round >= WARM {
                took.turns.push(began.elapsed());
                took.exchanges.append(&mut turn);
            }
        }
    }
    let [without, with] = took.each_mut().map(Took::figures);
    println!(
        "| {store}: an exchange of two messages | p50 | p99 | until it is in the index |\n| --- | --- | --- | --- |"
    );
    for (name, [p50, p99, whole]) in [("without an index", without), ("with it", with)] {
        println!("| {name} | {p50:.2} ms | {p99:.2} ms | {whole:.2} ms |");
    }
    let [p50, p99, whole] =
        [0, 1, 2].map(|at: usize| with.get(at).zip(without.get(at)).map_or(0.0, |(a, b)| a / b));
    println!("| ratio | {p50:.2} | {p99:.2} | {whole:.2} |\n");
}

/// Searches among very many messages; whether the median of all is under the bound.
async fn searching(store: &str, database: &str, messages: usize) -> bool {
    if messages == 0 {
        return true;
    }
    let service = Service::start(database, true).await;
    let mut words = Words(11);
    let began = Instant::now();
    for session in 0..messages.div_ceil(SESSION) {
        let mut lines = String::new();
        for at in 0..SESSION.min(messages - session * SESSION) {
            let role = if at % 2 == 0 { "user" } else { "assistant" };
            let _ = writeln!(lines, r#"{{"role":"{role}","content":"{}"}}"#, words.text());
        }
        service.ask(Method::POST, &format!("/sessions/large-{session}/import"), Some(lines)).await;
    }
    println!(
        "| {store}: {messages} messages, imported in {:.0} s | p50 | p99 |",
        began.elapsed().as_secs_f64()
    );
    println!("| --- | --- | --- |");
    let mut all = Vec::new();
    let kinds: [(&str, &[f64], &str); 9] = [
        ("one rare word", &[100_000.0], ""),
        ("one word of one in 300 messages", &[1000.0], ""),
        ("one word of one in 40 messages", &[120.0], ""),
        ("one word of every second message", &[5.0], ""),
        ("two common words", &[2.0, 4.0], ""),
        ("a question: five words, common and rare", &[1.0, 3.0, 90.0, 2000.0, 60_000.0], ""),
        ("the same in one session", &[1.0, 3.0, 90.0, 2000.0, 60_000.0], "&session_id=large-0"),
        ("a common word in one session", &[5.0], "&session_id=large-0"),
        (
            "a question of one role, since the new year",
            &[1.0, 90.0, 2000.0],
            "&role=user&since=2026-01-01T00:00:00Z",
        ),
    ];
    for (name, ranks, filter) in kinds {
        let mut took = Vec::new();
        for round in 0..SEARCHES + 3 {
            // Other words of the same frequency each time.
            let shift = f64::from(u32::try_from(round).expect("small"));
            let text: Vec<String> = ranks.iter().map(|rank| word(rank * (1.0 + shift / 100.0))).collect();
            let time = service.ask(Method::GET, &format!("/search?q={}{filter}", text.join("+")), None).await;
            if round >= 3 {
                took.push(time);
            }
        }
        println!("| {name} | {:.1} ms | {:.1} ms |", percentile(&mut took, 50), percentile(&mut took, 99));
        all.append(&mut took);
    }
    let median = percentile(&mut all, 50);
    println!("| all of them | {median:.1} ms | {:.1} ms |\n", percentile(&mut all, 99));
    median < BOUND.as_secs_f64() * 1e3
}

#[tokio::main]
async fn main() -> ExitCode {
    let messages = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(MESSAGES);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str| format!("sqlite://{}", folder.path().join(name).display());
    let mut fast = true;
    let measured = |store: &str, other: &str| {
        std::env::args().all(|argument| argument != other)
            || std::env::args().any(|argument| argument == store)
    };
    if measured("sqlite", "postgres") {
        writing("SQLite", &file("with.db"), &file("without.db")).await;
        fast &= searching("SQLite", &file("large.db"), messages).await;
    }
    match std::env::var("PRECIS_TEST_POSTGRES") {
        _ if !measured("postgres", "sqlite") => {}
        Ok(server) => {
            let database = |name: &str| server.replacen("/postgres?", &format!("/{name}?"), 1);
            for name in ["with_index", "without_index", "large"] {
                let made = std::process::Command::new("psql")
                    .args([&server, "-qc", &format!("CREATE DATABASE {name}")])
                    .status();
                assert!(made.is_ok_and(|status| status.success()), "no database {name}");
            }
            writing("Postgres", &database("with_index"), &database("without_index")).await;
            fast &= searching("Postgres", &database("large"), messages).await;
        }
        Err(_) => {
            println!("Postgres was not measured. Run it as: scripts/postgres cargo bench --bench search");
        }
    }
    if fast { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
