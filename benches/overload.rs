//! What happens beyond capacity: `cargo bench --bench overload` (a minute), or `… -- 10` (ten seconds); on Postgres with
//! `scripts/postgres` before it.
//!
//! The service runs as a process of its own. First one client alone, then as many as it takes to find out what can be
//! served, then four times that. These requests come when they are due, whatever became of those before (an open loop),
//! and their time counts from then. The clients are one thread that makes its requests beforehand and looks at no more of
//! an answer than it must; how late it was itself is printed too. They share the machine with the service: the figures
//! that mean something elsewhere are the ratios. The rate for each key is off, since the subject is what protects the
//! service when no single client is to blame.
#![expect(clippy::print_stdout, reason = "the result of a benchmark")]
#![expect(clippy::expect_used, reason = "a benchmark that can't go on ends")]
#![expect(clippy::cast_precision_loss, reason = "counts of requests")]

use serde_json::json;
use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, interval, sleep, timeout};

/// How much more is asked than can be served.
const TIMES: f64 = 4.0;
/// Connections that find out what can be served: as many as may be at work.
const BUSY: usize = 4;
/// Requests that wait for their answer at a time; those beyond are not sent, and counted.
const MOST: usize = 2000;
/// How often requests are sent that have become due.
const TICK: Duration = Duration::from_millis(1);
/// Sessions that are read.
const SESSIONS: usize = 32;
/// Of so many requests one writes an exchange; the others read a context.
const WRITES: usize = 5;
/// Exchanges of a session that is written, before the next one: no consolidation is part of this.
const EXCHANGES: usize = 20;
/// What is not unchanging memory: at the end so many times as much as after a sixth of the time.
const FLAT: f64 = 1.25;

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
        let mut log = BufReader::new(child.stderr.take().expect("its log"));
        let line =
            log.by_ref().lines().map_while(Result::ok).find(|line| line.contains("listening on http://"));
        let line = line.expect("it listens");
        let (_, address) = line.split_once("listening on http://").expect("an address");
        let address = address.split('"').next().expect("an address").to_owned();
        // Someone has to read on, or the service would wait for room in the pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
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
    buffer: Vec<u8>,
}

impl Connection {
    fn new(address: &str) -> Self {
        Self { address: address.to_owned(), stream: None, buffer: Vec::with_capacity(64 * 1024) }
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
            let stream = TcpStream::connect(&self.address).await.ok()?;
            stream.set_nodelay(true).ok()?;
            self.stream = Some(stream);
        }
        let (stream, buffer) = (self.stream.as_mut()?, &mut self.buffer);
        stream.write_all(request).await.ok()?;
        buffer.clear();
        let end = loop {
            if stream.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
            if let Some(end) = buffer.windows(4).take(2000).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let head = std::str::from_utf8(buffer.get(..end)?).ok()?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
        let closed = head.contains("connection: close");
        let mut missing = (end + length.parse::<usize>().ok()?).checked_sub(buffer.len())?;
        while missing > 0 {
            buffer.clear();
            missing = missing.checked_sub(stream.read_buf(buffer).await.ok().filter(|read| *read > 0)?)?;
        }
        if closed {
            self.stream = None;
        }
        Some(status)
    }
}

fn request(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The requests of a client: mostly contexts, now and then an exchange.
struct Requests {
    name: String,
    contexts: Vec<Vec<u8>>,
    exchange: String,
}

impl Requests {
    fn new(name: &str) -> Self {
        let body = json!({ "system_prompt": "You are a helpful assistant.", "user_message": "And now?" });
        let context = |session| request(&format!("/sessions/r{session}/context"), &body.to_string());
        let body = json!({ "user_message": "What happened? ".repeat(10), "assistant_reply": "This and that. ".repeat(20) });
        let contexts = (0..SESSIONS).map(context).collect();
        Self { name: name.to_owned(), contexts, exchange: body.to_string() }
    }

    fn nth(&self, n: usize) -> Vec<u8> {
        if n.is_multiple_of(WRITES) {
            let session = n / (WRITES * EXCHANGES);
            request(&format!("/sessions/w{}-{session}/exchanges", self.name), &self.exchange)
        } else {
            self.contexts.get(n * 7 % SESSIONS).cloned().unwrap_or_default()
        }
    }
}

/// What became of requests, and how long each took.
#[derive(Default)]
struct Seen {
    accepted: Vec<Duration>,
    refused: Vec<Duration>,
    /// How much later than due each was sent.
    late: Vec<Duration>,
    broken: usize,
    unsent: usize,
}

impl Seen {
    fn add(&mut self, status: u16, took: Duration) {
        match status {
            200..300 => self.accepted.push(took),
            503 => self.refused.push(took),
            _ => self.broken += 1,
        }
    }
}

/// In milliseconds.
fn percentile(took: &mut [Duration], percent: usize) -> f64 {
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// So many clients, each of which asks again as soon as it has its answer.
async fn closed_loop(address: &str, name: &str, clients: usize, span: Duration) -> Seen {
    let (seen, end) = (Rc::new(RefCell::new(Seen::default())), Instant::now() + span);
    let mut all = JoinSet::new();
    for at in 0..clients {
        let (seen, mut connection) = (Rc::clone(&seen), Connection::new(address));
        let requests = Requests::new(&format!("{name}{at}"));
        all.spawn_local(async move {
            for n in at.. {
                let (began, request) = (Instant::now(), requests.nth(n));
                if began >= end {
                    break;
                }
                let status = connection.ask(&request).await;
                seen.borrow_mut().add(status, began.elapsed());
            }
        });
    }
    all.join_all().await;
    seen.take()
}

/// So many requests a second, whatever becomes of them.
async fn open_loop(address: &str, rate: f64, span: Duration, mut each_second: impl FnMut()) -> Seen {
    let (seen, idle) = (Rc::new(RefCell::new(Seen::default())), Rc::new(RefCell::new(Vec::new())));
    let (requests, mut all) = (Requests::new("o"), JoinSet::new());
    let (from, mut ticks, mut due, mut seconds) = (Instant::now(), interval(TICK), 0_usize, 0);
    while from.elapsed() < span {
        ticks.tick().await;
        while all.try_join_next().is_some() {}
        loop {
            let at = from + Duration::from_secs_f64(due as f64 / rate);
            if at > Instant::now() {
                break;
            }
            due += 1;
            if all.len() >= MOST {
                seen.borrow_mut().unsent += 1;
                continue;
            }
            let (seen, idle, request) = (Rc::clone(&seen), Rc::clone(&idle), requests.nth(due));
            let connection = idle.borrow_mut().pop().unwrap_or_else(|| Connection::new(address));
            all.spawn_local(async move {
                let mut connection = connection;
                seen.borrow_mut().late.push(at.elapsed());
                let status = connection.ask(&request).await;
                seen.borrow_mut().add(status, at.elapsed());
                idle.borrow_mut().push(connection);
            });
        }
        if from.elapsed().as_secs() >= seconds {
            seconds += 1;
            each_second();
        }
    }
    all.join_all().await;
    seen.take()
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

/// How long one client is refused, or slow.
async fn recovery(address: &str, slow: f64) -> Duration {
    let (requests, mut connection) = (Requests::new("after"), Connection::new(address));
    let (ended, mut recovered) = (Instant::now(), Duration::ZERO);
    for n in 1.. {
        let began = Instant::now();
        if began >= ended + Duration::from_secs(3) {
            break;
        }
        let request = requests.nth(n * WRITES + 1);
        let answer = timeout(Duration::from_secs(3), connection.ask(&request)).await;
        let fine = answer == Ok(200) && began.elapsed().as_secs_f64() * 1e3 <= slow;
        // A single slow one is the machine's; what lasts is not.
        if !fine && began.duration_since(ended).saturating_sub(recovered) < Duration::from_millis(300) {
            recovered = ended.elapsed();
        }
        sleep(Duration::from_millis(2)).await;
    }
    recovered
}

async fn measure(service: &Service, span: Duration) -> (String, bool) {
    let address = service.1.clone();
    seed(&address).await;
    let few = Duration::from_secs(5).min(span);
    closed_loop(&address, "warm", 1, Duration::from_secs(1)).await;
    let mut alone = closed_loop(&address, "alone", 1, few).await;
    let mut busy = closed_loop(&address, "busy", BUSY, few).await;
    let capacity = busy.accepted.len() as f64 / few.as_secs_f64();
    let mut memory = Vec::new();
    let mut loaded = open_loop(&address, capacity * TIMES, span, || memory.push(service.memory())).await;
    let recovered = recovery(&address, percentile(&mut alone.accepted, 99) * 2.0).await;

    let rate = |seen: usize| seen as f64 / span.as_secs_f64();
    let offered = loaded.late.len() + loaded.unsent;
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
    line(&format!("{BUSY} clients: what can be served"), &mut busy.accepted, capacity);
    let accepted = rate(loaded.accepted.len());
    let (refused, sent) = (rate(loaded.refused.len()), rate(loaded.late.len()));
    line(&format!("{:.1} times that: let in", rate(offered) / capacity), &mut loaded.accepted, accepted);
    let refused_p50 = line("refused", &mut loaded.refused, refused);
    line("sent later than due", &mut loaded.late, sent);
    // The first seconds fill caches and pools of the process.
    let settled = memory.get(memory.len() / 6).copied().unwrap_or_default();
    let (first, last) =
        (memory.first().copied().unwrap_or_default(), memory.last().copied().unwrap_or_default());
    let most = memory.iter().copied().fold(0.0, f64::max);
    let low = memory.iter().copied().fold(f64::MAX, f64::min);
    let _ = writeln!(
        out,
        "\nFor {} s; {} requests had no answer, {} were not sent. Memory {first:.0} MiB at the start, {settled:.0} after a \
         sixth of the time, {last:.0} at the end, {low:.0} to {most:.0}. Recovered after {:.0} ms.",
        span.as_secs(),
        loaded.broken,
        loaded.unsent,
        recovered.as_secs_f64() * 1e3,
    );
    let holds = refused_p50 < 50.0
        && recovered < Duration::from_secs(1)
        && last < settled * FLAT
        && loaded.broken + loaded.unsent == 0;
    (out, holds)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let seconds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(60);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sqlite = format!("sqlite://{}", folder.path().join("precis.db").display());
    let database = std::env::var("PRECIS_TEST_POSTGRES").unwrap_or(sqlite);
    let service = Service::start(&database);
    let (table, holds) = LocalSet::new().run_until(measure(&service, Duration::from_secs(seconds))).await;
    drop(service);
    println!("{}\n\n{table}", database.split(':').next().unwrap_or_default());
    if !holds {
        println!(
            "It does not hold: refused in under 50 ms, memory flat, recovered within a second, an answer for all."
        );
        std::process::exit(1);
    }
}
