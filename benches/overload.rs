//! Measures the behaviour under overload: `cargo bench --bench overload` (one minute), or `… -- 10` (ten seconds). With
//! `scripts/postgres` before it, on Postgres.
//!
//! The service runs as a separate process. The benchmark measures one client alone, then the capacity with concurrent
//! clients, then four times the capacity as an open loop: requests are sent at fixed times, independent of earlier
//! responses, and latency counts from the scheduled time. All clients run on one thread that parses as little as possible
//! of a response; its own delay is printed, too. Clients and service share the machine, so only the ratios apply to other
//! machines. The rate limit per key is off, because this measures the protection against the load of all clients.
#![expect(clippy::print_stdout, reason = "prints its result")]
#![expect(clippy::expect_used, reason = "a benchmark may panic")]
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

/// The offered load as a multiple of the capacity.
const LOAD_FACTOR: f64 = 4.0;
/// The number of connections that measure the capacity.
const CAPACITY_CLIENTS: usize = 4;
/// The maximum number of concurrent requests. Further requests are not sent, but counted.
const MAX_IN_FLIGHT: usize = 2000;
/// The interval at which scheduled requests are sent.
const TICK: Duration = Duration::from_millis(1);
/// The number of sessions that contexts are built for.
const READ_SESSIONS: usize = 32;
/// One of this number of requests appends an exchange; the others build a context.
const REQUESTS_PER_WRITE: usize = 5;
/// The number of exchanges per written session, small enough that nothing is consolidated.
const EXCHANGES_PER_SESSION: usize = 20;
/// The maximum growth of memory between a sixth of the time and the end.
const MAX_MEMORY_GROWTH: f64 = 1.25;

/// The service as a process. Dropping it kills the process.
struct Service {
    process: Child,
    address: String,
}

impl Service {
    fn start(database: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_precis"))
            .args(["--bind", "127.0.0.1:0", "--database-url", database])
            .env("PRECIS__LIMITS__REQUESTS_PER_SECOND", "0")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the service starts");
        let mut log = BufReader::new(process.stderr.take().expect("its log"));
        let line =
            log.by_ref().lines().map_while(Result::ok).find(|line| line.contains("listening on http://"));
        let line = line.expect("it listens");
        let (_, address) = line.split_once("listening on http://").expect("an address");
        let address = address.split('"').next().expect("an address").to_owned();
        // Drain the log: a full pipe would block the service.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self { process, address }
    }

    /// Returns the resident memory in MiB.
    fn memory_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("Linux");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a figure");
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
        kib / 1024.0
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A persistent connection. A client library would need more time than the service needs for many responses.
struct Connection {
    address: String,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Connection {
    fn new(address: &str) -> Self {
        Self { address: address.to_owned(), stream: None, buffer: Vec::with_capacity(64 * 1024) }
    }

    /// Returns the status after the complete response; 0 if the connection broke.
    async fn send(&mut self, request: &[u8]) -> u16 {
        let status = self.try_send(request).await;
        if status.is_none() {
            self.stream = None;
        }
        status.unwrap_or(0)
    }

    async fn try_send(&mut self, request: &[u8]) -> Option<u16> {
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

/// The requests of a client: mostly contexts, sometimes an exchange.
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
        let contexts = (0..READ_SESSIONS).map(context).collect();
        Self { name: name.to_owned(), contexts, exchange: body.to_string() }
    }

    fn nth(&self, n: usize) -> Vec<u8> {
        if n.is_multiple_of(REQUESTS_PER_WRITE) {
            let session = n / (REQUESTS_PER_WRITE * EXCHANGES_PER_SESSION);
            request(&format!("/sessions/w{}-{session}/exchanges", self.name), &self.exchange)
        } else {
            self.contexts.get(n * 7 % READ_SESSIONS).cloned().unwrap_or_default()
        }
    }
}

/// The outcomes of requests with their latencies.
#[derive(Default)]
struct Outcomes {
    accepted: Vec<Duration>,
    rejected: Vec<Duration>,
    /// The delays between scheduled and actual sending.
    delays: Vec<Duration>,
    broken: usize,
    unsent: usize,
}

impl Outcomes {
    fn add(&mut self, status: u16, took: Duration) {
        match status {
            200..300 => self.accepted.push(took),
            503 => self.rejected.push(took),
            _ => self.broken += 1,
        }
    }
}

/// Returns a percentile in milliseconds.
fn percentile(took: &mut [Duration], percent: usize) -> f64 {
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3
}

/// Runs clients that send a request as soon as they have the previous response.
async fn closed_loop(address: &str, name: &str, clients: usize, span: Duration) -> Outcomes {
    let (outcomes, end) = (Rc::new(RefCell::new(Outcomes::default())), Instant::now() + span);
    let mut all = JoinSet::new();
    for at in 0..clients {
        let (outcomes, mut connection) = (Rc::clone(&outcomes), Connection::new(address));
        let requests = Requests::new(&format!("{name}{at}"));
        all.spawn_local(async move {
            for n in at.. {
                let (started_at, request) = (Instant::now(), requests.nth(n));
                if started_at >= end {
                    break;
                }
                let status = connection.send(&request).await;
                outcomes.borrow_mut().add(status, started_at.elapsed());
            }
        });
    }
    all.join_all().await;
    outcomes.take()
}

/// Sends requests at a fixed rate, independent of their responses.
async fn open_loop(address: &str, rate: f64, span: Duration, mut each_second: impl FnMut()) -> Outcomes {
    let (outcomes, idle) = (Rc::new(RefCell::new(Outcomes::default())), Rc::new(RefCell::new(Vec::new())));
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
            if all.len() >= MAX_IN_FLIGHT {
                outcomes.borrow_mut().unsent += 1;
                continue;
            }
            let (outcomes, idle, request) = (Rc::clone(&outcomes), Rc::clone(&idle), requests.nth(due));
            let connection = idle.borrow_mut().pop().unwrap_or_else(|| Connection::new(address));
            all.spawn_local(async move {
                let mut connection = connection;
                outcomes.borrow_mut().delays.push(at.elapsed());
                let status = connection.send(&request).await;
                outcomes.borrow_mut().add(status, at.elapsed());
                idle.borrow_mut().push(connection);
            });
        }
        if from.elapsed().as_secs() >= seconds {
            seconds += 1;
            each_second();
        }
    }
    all.join_all().await;
    outcomes.take()
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
    for session in 0..READ_SESSIONS {
        let status = connection.send(&request(&format!("/sessions/r{session}/exchanges"), &body)).await;
        assert_eq!(status, 201, "seeded");
    }
}

/// Returns the time until one client is served without rejections and slow responses.
async fn recovery_time(address: &str, slow: f64) -> Duration {
    let (requests, mut connection) = (Requests::new("after"), Connection::new(address));
    let (ended, mut recovered) = (Instant::now(), Duration::ZERO);
    for n in 1.. {
        let started_at = Instant::now();
        if started_at >= ended + Duration::from_secs(3) {
            break;
        }
        let request = requests.nth(n * REQUESTS_PER_WRITE + 1);
        let response = timeout(Duration::from_secs(3), connection.send(&request)).await;
        let fine = response == Ok(200) && started_at.elapsed().as_secs_f64() * 1e3 <= slow;
        // A single slow request may be caused by the machine and is ignored.
        if !fine && started_at.duration_since(ended).saturating_sub(recovered) < Duration::from_millis(300) {
            recovered = ended.elapsed();
        }
        sleep(Duration::from_millis(2)).await;
    }
    recovered
}

async fn measure(service: &Service, span: Duration) -> (String, bool) {
    let address = service.address.clone();
    seed(&address).await;
    let calibration = Duration::from_secs(5).min(span);
    closed_loop(&address, "warm", 1, Duration::from_secs(1)).await;
    let mut alone = closed_loop(&address, "alone", 1, calibration).await;
    let mut busy = closed_loop(&address, "busy", CAPACITY_CLIENTS, calibration).await;
    let capacity = busy.accepted.len() as f64 / calibration.as_secs_f64();
    let mut memory = Vec::new();
    let mut loaded =
        open_loop(&address, capacity * LOAD_FACTOR, span, || memory.push(service.memory_mib())).await;
    let recovered = recovery_time(&address, percentile(&mut alone.accepted, 99) * 2.0).await;

    let rate = |outcomes: usize| outcomes as f64 / span.as_secs_f64();
    let offered = loaded.delays.len() + loaded.unsent;
    let base = percentile(&mut alone.accepted, 50);
    let mut out =
        String::from("| | a second | p50 | p99 | ratio of p50 |\n| --- | --- | --- | --- | --- |\n");
    let mut line = |name: &str, outcomes: &mut Vec<Duration>, rate: f64| {
        let (p50, p99) = (percentile(outcomes, 50), percentile(outcomes, 99));
        let _ = writeln!(out, "| {name} | {rate:.0} | {p50:.2} ms | {p99:.2} ms | {:.1} |", p50 / base);
        p50
    };
    let alone_rate = alone.accepted.len() as f64 / calibration.as_secs_f64();
    line("one client alone", &mut alone.accepted, alone_rate);
    line(&format!("{CAPACITY_CLIENTS} clients: the capacity"), &mut busy.accepted, capacity);
    let accepted = rate(loaded.accepted.len());
    let (rejected, sent) = (rate(loaded.rejected.len()), rate(loaded.delays.len()));
    line(
        &format!("{:.1} times the capacity: accepted", rate(offered) / capacity),
        &mut loaded.accepted,
        accepted,
    );
    let rejected_p50 = line("rejected", &mut loaded.rejected, rejected);
    line("delay before sending", &mut loaded.delays, sent);
    // Caches and pools of the process grow during the first seconds.
    let settled = memory.get(memory.len() / 6).copied().unwrap_or_default();
    let (first, last) =
        (memory.first().copied().unwrap_or_default(), memory.last().copied().unwrap_or_default());
    let max = memory.iter().copied().fold(0.0, f64::max);
    let min = memory.iter().copied().fold(f64::MAX, f64::min);
    let _ = writeln!(
        out,
        "\nFor {} s; {} requests had no response, {} were not sent. Memory {first:.0} MiB at the start, {settled:.0} after a \
         sixth of the time, {last:.0} at the end, {min:.0} to {max:.0}. Recovered after {:.0} ms.",
        span.as_secs(),
        loaded.broken,
        loaded.unsent,
        recovered.as_secs_f64() * 1e3,
    );
    let is_within_limits = rejected_p50 < 50.0
        && recovered < Duration::from_secs(1)
        && last < settled * MAX_MEMORY_GROWTH
        && loaded.broken + loaded.unsent == 0;
    (out, is_within_limits)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let seconds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(60);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sqlite = format!("sqlite://{}", folder.path().join("precis.db").display());
    let database = std::env::var("PRECIS_TEST_POSTGRES").unwrap_or(sqlite);
    let service = Service::start(&database);
    let (table, is_within_limits) =
        LocalSet::new().run_until(measure(&service, Duration::from_secs(seconds))).await;
    drop(service);
    println!("{}\n\n{table}", database.split(':').next().unwrap_or_default());
    if !is_within_limits {
        println!(
            "A limit was exceeded: rejected in under 50 ms, constant memory, recovered within a second, a response to every request."
        );
        std::process::exit(1);
    }
}
