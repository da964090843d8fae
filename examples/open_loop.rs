//! Sends requests to a running service at a fixed average rate, independent of its responses (an open loop), and prints the
//! outcomes as JSON. `scripts/bench` runs it:
//!
//! ```text
//! cargo run --release --example open_loop -- 127.0.0.1:8080 requests.tsv 500 10
//! ```
//!
//! The arguments are the address, a file of requests (a line each: path, tab, JSON body), the rate per second, and the time
//! in seconds. The gaps between arrivals are random with an exponential distribution, as those of independent clients.
//! Latency counts from the scheduled arrival, so a delay of this program or of the service counts in full (no coordinated
//! omission). All connections run on one thread that parses as little as possible of a response.

#![expect(clippy::print_stdout, reason = "prints its result")]
#![expect(clippy::expect_used, clippy::panic, reason = "a benchmark may panic")]

use serde_json::{Value, json};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, interval, timeout};

/// The maximum number of concurrent requests, below `limits.max_requests_in_flight`. Requests that arrive beyond it are not
/// sent, but counted.
const MAX_IN_FLIGHT: usize = 1900;
/// The interval at which due requests are sent.
const TICK: Duration = Duration::from_millis(1);
/// The longest wait for a response, more than the service permits a request to wait.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A persistent connection. A client library would need more time than the service needs for many responses.
struct Connection {
    address: Rc<str>,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Connection {
    fn new(address: &Rc<str>) -> Self {
        Self { address: Rc::clone(address), stream: None, buffer: Vec::with_capacity(64 * 1024) }
    }

    /// Returns the status after the complete response; `None` if the connection broke or the response took too long.
    async fn send(&mut self, request: &[u8]) -> Option<u16> {
        let status = timeout(RESPONSE_TIMEOUT, self.try_send(request)).await.ok().flatten();
        if status.is_none() {
            self.stream = None;
        }
        status
    }

    async fn try_send(&mut self, request: &[u8]) -> Option<u16> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&*self.address).await.ok()?;
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
        let is_last = head.contains("connection: close");
        let mut missing = (end + length.parse::<usize>().ok()?).checked_sub(buffer.len())?;
        while missing > 0 {
            buffer.clear();
            missing = missing.checked_sub(stream.read_buf(buffer).await.ok().filter(|read| *read > 0)?)?;
        }
        if is_last {
            self.stream = None;
        }
        Some(status)
    }
}

/// The outcomes of requests with their latencies.
#[derive(Default)]
struct Outcomes {
    accepted: Vec<Duration>,
    /// Responses with the status 429 or 503.
    rejected: Vec<Duration>,
    rejected_by_rate: usize,
    /// Other statuses.
    failed: usize,
    /// Requests without a response.
    broken: usize,
    unsent: usize,
    /// The delays between scheduled and actual sending.
    delays: Vec<Duration>,
}

impl Outcomes {
    fn add(&mut self, status: Option<u16>, latency: Duration) {
        match status {
            Some(200..300) => self.accepted.push(latency),
            Some(429 | 503) => {
                self.rejected.push(latency);
                self.rejected_by_rate += usize::from(status == Some(429));
            }
            Some(_) => self.failed += 1,
            None => self.broken += 1,
        }
    }

    fn report(&mut self) -> Value {
        json!({
            "sent": self.delays.len(), "unsent": self.unsent, "accepted": self.accepted.len(),
            "rejected_429": self.rejected_by_rate, "rejected_503": self.rejected.len() - self.rejected_by_rate,
            "failed": self.failed, "broken": self.broken,
            "accepted_ms": percentiles(&mut self.accepted), "rejected_ms": percentiles(&mut self.rejected),
            "delay_ms": percentiles(&mut self.delays),
        })
    }
}

/// Returns the median and the 99th percentile in milliseconds; `null` without values.
fn percentiles(latencies: &mut [Duration]) -> Value {
    latencies.sort_unstable();
    let percentile = |percent: usize| {
        let index = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        latencies.get(index).map(|latency| latency.as_secs_f64() * 1e3)
    };
    json!({ "p50": percentile(50), "p99": percentile(99) })
}

/// Converts the lines of the file to HTTP requests.
fn read_requests(file: &str) -> Vec<Rc<[u8]>> {
    let text = std::fs::read_to_string(file).expect("a file of requests");
    let request = |line: &str| -> Rc<[u8]> {
        let (path, body) = line.split_once('\t').expect("path, tab, body");
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json");
        format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes().into()
    };
    text.lines().map(request).collect()
}

async fn send_all(address: Rc<str>, requests: &[Rc<[u8]>], rate: f64, time: Duration) -> Outcomes {
    let outcomes = Rc::new(RefCell::new(Outcomes::default()));
    let idle = Rc::new(RefCell::new(Vec::new()));
    let mut running = JoinSet::new();
    let mut ticks = interval(TICK);
    let start = Instant::now();
    let mut arrival = start;
    while arrival < start + time {
        ticks.tick().await;
        while running.try_join_next().is_some() {}
        while arrival <= Instant::now() && arrival < start + time {
            let scheduled = arrival;
            arrival += Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / rate);
            if running.len() >= MAX_IN_FLIGHT {
                outcomes.borrow_mut().unsent += 1;
                continue;
            }
            let request = fastrand::choice(requests).cloned().expect("at least one request");
            let (outcomes, idle) = (Rc::clone(&outcomes), Rc::clone(&idle));
            let connection = idle.borrow_mut().pop().unwrap_or_else(|| Connection::new(&address));
            running.spawn_local(async move {
                let mut connection = connection;
                outcomes.borrow_mut().delays.push(scheduled.elapsed());
                let status = connection.send(&request).await;
                outcomes.borrow_mut().add(status, scheduled.elapsed());
                idle.borrow_mut().push(connection);
            });
        }
    }
    running.join_all().await;
    outcomes.take()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, file, rate, seconds] = arguments.as_slice() else {
        panic!("usage: open_loop ADDRESS FILE REQUESTS_PER_SECOND SECONDS");
    };
    let requests = read_requests(file);
    let rate: f64 = rate.parse().expect("a rate");
    let time = Duration::from_secs_f64(seconds.parse().expect("a time in seconds"));
    let address = Rc::from(address.as_str());
    let mut outcomes = LocalSet::new().run_until(send_all(address, &requests, rate, time)).await;
    println!("{}", outcomes.report());
}
