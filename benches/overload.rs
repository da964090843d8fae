//! What happens beyond capacity: `cargo bench --bench overload` (a minute), or `… -- 10` (ten seconds); on Postgres with
//! `scripts/postgres` before it.
//!
//! The binary runs as a process of its own. First one client alone, then as many as it takes to find out what can be
//! served, then four times that, on paced connections that don't come back later when they are told to. Client and
//! service share the machine: the figures that mean something elsewhere are the ratios. The rate for each key is off,
//! since the subject is what protects the service when no single client is to blame.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that can't go on ends")]
#![expect(clippy::cast_precision_loss, reason = "counts of requests")]

use serde_json::json;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at, sleep, timeout};

/// How much more is asked than can be served.
const TIMES: f64 = 4.0;
/// Connections under overload: so many that each has time to get its answer before it sends again.
const CONNECTIONS: u32 = 256;
/// Connections that find out what can be served: as many as may be at work.
const BUSY: usize = 16;
/// Sessions that are read.
const SESSIONS: usize = 32;
/// Of so many requests one writes an exchange; the others read a context.
const WRITES: usize = 5;
/// Exchanges of a session that is written, before the next one: no consolidation is part of this.
const EXCHANGES: usize = 20;

/// The service as a process; it ends with the value.
struct Service(Child, String);

impl Service {
    fn start(database: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_precis"))
            .args(["--bind", "127.0.0.1:0", "--database-url", database])
            .env("PRECIS__LIMITS__REQUESTS_PER_SECOND", "0")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the service starts");
        let mut log = BufReader::new(child.stderr.take().expect("its log")).lines();
        let line = log.by_ref().map_while(Result::ok).find(|line| line.contains("listening on http://"));
        let line = line.expect("it listens");
        let (_, address) = line.split_once("listening on http://").expect("an address");
        let address = address.split('"').next().expect("an address").to_owned();
        // Someone has to read on, or the service would wait for room in the pipe.
        std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
        Self(child, address)
    }

    /// Resident memory, in MiB.
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("Linux");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a figure");
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
        kib / 1024.0
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One connection, kept alive. A client library would cost more than many of the answers.
struct Connection {
    address: String,
    stream: Option<TcpStream>,
}

impl Connection {
    fn new(address: &str) -> Self {
        Self { address: address.to_owned(), stream: None }
    }

    /// The status of the answer, when all of it is there; 0 if the connection broke.
    async fn ask(&mut self, request: &[u8]) -> u16 {
        let status = self.try_ask(request).await;
        if status.is_none() {
            self.stream = None;
        }
        status.unwrap_or(0)
    }

    async fn try_ask(&mut self, request: &[u8]) -> Option<u16> {
        if self.stream.is_none() {
            self.stream = Some(TcpStream::connect(&self.address).await.ok()?);
        }
        let stream = self.stream.as_mut()?;
        stream.write_all(request).await.ok()?;
        let mut answer = Vec::with_capacity(64 * 1024);
        loop {
            if stream.read_buf(&mut answer).await.ok()? == 0 {
                return None;
            }
            let Some(end) = answer.windows(4).take(2000).position(|bytes| bytes == b"\r\n\r\n") else {
                continue;
            };
            let head = String::from_utf8_lossy(answer.get(..end)?).to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
            let whole = end + 4 + length.parse::<usize>().ok()?;
            while answer.len() < whole {
                if stream.read_buf(&mut answer).await.ok()? == 0 {
                    return None;
                }
            }
            if head.contains("connection: close") {
                self.stream = None;
            }
            return head.split(' ').nth(1)?.parse().ok();
        }
    }
}

fn request(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The `n`th request of a client: mostly contexts, now and then an exchange.
fn nth(client: usize, n: usize) -> Vec<u8> {
    if n.is_multiple_of(WRITES) {
        let session = n / (WRITES * EXCHANGES);
        let body = json!({ "user_message": "What happened? ".repeat(10), "assistant_reply": "This and that. ".repeat(20) });
        request(&format!("/sessions/w{client}-{session}/exchanges"), &body.to_string())
    } else {
        let body = json!({ "system_prompt": "You are a helpful assistant.", "user_message": "And now?" });
        request(&format!("/sessions/r{}/context", (client * 7 + n) % SESSIONS), &body.to_string())
    }
}

/// What became of requests, and how long each took.
#[derive(Default)]
struct Seen {
    accepted: Vec<Duration>,
    refused: Vec<Duration>,
    broken: usize,
}

impl Seen {
    fn add(&mut self, status: u16, took: Duration) {
        match status {
            200..300 => self.accepted.push(took),
            503 => self.refused.push(took),
            _ => self.broken += 1,
        }
    }

    fn join(&mut self, other: Self) {
        self.accepted.extend(other.accepted);
        self.refused.extend(other.refused);
        self.broken += other.broken;
    }
}

/// In milliseconds.
fn percentile(took: &mut [Duration], percent: usize) -> f64 {
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// One client: asks, and asks again after the answer, at most once in each `pace`, until the end.
async fn client(address: String, client: usize, pace: Option<(Instant, Duration)>, end: Instant) -> Seen {
    let (mut connection, mut seen) = (Connection::new(&address), Seen::default());
    let mut ticks = pace.map(|(first, every)| {
        let mut ticks = interval_at(first, every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    });
    for n in 0.. {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let began = Instant::now();
        if began >= end {
            break;
        }
        let status = connection.ask(&nth(client, n)).await;
        seen.add(status, began.elapsed());
    }
    seen
}

async fn all(clients: JoinSet<Seen>) -> Seen {
    clients.join_all().await.into_iter().fold(Seen::default(), |mut all, seen| {
        all.join(seen);
        all
    })
}

async fn seed(address: &str) {
    let mut connection = Connection::new(address);
    let messages: Vec<_> = (0..90)
        .map(|at| {
            let text =
                format!("Message {at} says what happened on day {} and what follows. ", at / 10).repeat(5);
            json!({ "role": if at % 2 == 0 { "user" } else { "assistant" }, "content": text })
        })
        .collect();
    let body = json!({ "messages": messages }).to_string();
    for session in 0..SESSIONS {
        let status = connection.ask(&request(&format!("/sessions/r{session}/exchanges"), &body)).await;
        assert_eq!(status, 201, "seeded");
    }
}

async fn measure(service: &Service, span: Duration) -> (String, bool) {
    let address = service.1.clone();
    seed(&address).await;
    let few = Duration::from_secs(5).min(span);
    client(address.clone(), 900, None, Instant::now() + Duration::from_secs(1)).await;
    let mut alone = client(address.clone(), 901, None, Instant::now() + few).await;

    let mut clients = JoinSet::new();
    for at in 0..BUSY {
        clients.spawn(client(address.clone(), 910 + at, None, Instant::now() + few));
    }
    let busy = all(clients).await;
    let capacity = busy.accepted.len() as f64 / few.as_secs_f64();

    let every = Duration::from_secs_f64(f64::from(CONNECTIONS) / (capacity * TIMES));
    let (from, mut clients) = (Instant::now(), JoinSet::new());
    for at in 0..CONNECTIONS {
        let first = from + every * at / CONNECTIONS;
        clients.spawn(client(address.clone(), at as usize, Some((first, every)), from + span));
    }
    let mut memory = Vec::new();
    let mut seconds = interval(Duration::from_secs(1));
    while from.elapsed() < span {
        seconds.tick().await;
        memory.push(service.memory());
    }
    let mut loaded = all(clients).await;

    // Back to one client: until when is it refused, or slow?
    let slow = percentile(&mut alone.accepted, 99) * 2.0;
    let (ended, mut connection, mut recovered) = (Instant::now(), Connection::new(&address), Duration::ZERO);
    for n in 1.. {
        let began = Instant::now();
        if began >= ended + Duration::from_secs(3) {
            break;
        }
        let answer = timeout(Duration::from_secs(3), connection.ask(&nth(0, n * WRITES + 1))).await;
        let fine = answer == Ok(200) && began.elapsed().as_secs_f64() * 1e3 <= slow;
        // A single slow one is the machine's; what lasts is not.
        if !fine && began.duration_since(ended).saturating_sub(recovered) < Duration::from_millis(300) {
            recovered = ended.elapsed();
        }
        sleep(Duration::from_millis(2)).await;
    }

    let rate = |seen: usize| seen as f64 / span.as_secs_f64();
    let offered = loaded.accepted.len() + loaded.refused.len() + loaded.broken;
    let base = percentile(&mut alone.accepted, 50);
    let mut out =
        String::from("| | a second | p50 | p99 | ratio of p50 |\n| --- | --- | --- | --- | --- |\n");
    let mut line = |name: &str, seen: &mut Vec<Duration>, rate: f64| {
        let (p50, p99) = (percentile(seen, 50), percentile(seen, 99));
        let _ = writeln!(out, "| {name} | {rate:.0} | {p50:.2} ms | {p99:.2} ms | {:.1} |", p50 / base);
        p50
    };
    let alone_rate = alone.accepted.len() as f64 / few.as_secs_f64();
    line("one client alone", &mut alone.accepted, alone_rate);
    let mut full = busy.accepted;
    line(&format!("{BUSY} clients: what can be served"), &mut full, capacity);
    let (accepted, refused) = (rate(loaded.accepted.len()), rate(loaded.refused.len()));
    line("beyond capacity: let in", &mut loaded.accepted, accepted);
    let refused_p50 = line("beyond capacity: refused", &mut loaded.refused, refused);
    // The first seconds fill caches and pools of the process.
    let settled = memory.get(memory.len() / 6).copied().unwrap_or_default();
    let (last, most) =
        (memory.last().copied().unwrap_or_default(), memory.iter().copied().fold(0.0, f64::max));
    let _ = writeln!(
        out,
        "\n{:.0} requests a second for {} s: {:.1} times what can be served; {} without an answer. Memory {settled:.0} MiB \
         after a sixth of it, {last:.0} at the end, {most:.0} at most: ratio {:.2}. Recovered after {:.0} ms.",
        rate(offered),
        span.as_secs(),
        rate(offered) / capacity,
        loaded.broken,
        last / settled,
        recovered.as_secs_f64() * 1e3,
    );
    let holds = refused_p50 < 50.0
        && recovered < Duration::from_secs(1)
        && last < settled * 1.25
        && loaded.broken == 0;
    (out, holds)
}

#[tokio::main]
async fn main() {
    let seconds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(60);
    let folder = Arc::new(tempfile::tempdir().expect("a temporary folder"));
    let sqlite = format!("sqlite://{}", folder.path().join("precis.db").display());
    let database = std::env::var("PRECIS_TEST_POSTGRES").unwrap_or(sqlite);
    let service = Service::start(&database);
    let (table, holds) = measure(&service, Duration::from_secs(seconds)).await;
    drop(service);
    println!("{}\n\n{table}", database.split(':').next().unwrap_or_default());
    if !holds {
        println!(
            "It does not hold: refused in under 50 ms, memory flat, recovered within a second, an answer for all."
        );
        std::process::exit(1);
    }
}
