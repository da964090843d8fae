//! The binary as a process, its peak of memory, and a tenant whose small requests are measured.

use crate::support::backend::Backend;
use crate::support::client::TestClient;
use precis::domain::api_key::Scope;
use serde_json::json;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard, oneshot};

/// One attack at a time: another one would change its figures.
static RUNNING: Mutex<()> = Mutex::const_new(());

/// Messages of the session whose contexts are measured.
const SMALL_TURNS: usize = 10;

pub(crate) struct Service {
    process: Child,
    /// Without a key.
    client: TestClient,
    pub(crate) backend: Backend,
    _folder: TempDir,
    _running: MutexGuard<'static, ()>,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Service {
    /// Starts a process with these settings, given by their paths.
    pub(crate) async fn start(backend: Backend, settings: &[(&str, &str)]) -> Self {
        let running = RUNNING.lock().await;
        let folder = TempDir::new().expect("a folder");
        let variable = |path: &str| format!("PRECIS__{}", path.replace('.', "__").to_uppercase());
        let mut process = Command::new(env!("CARGO_BIN_EXE_precis"))
            .env_clear()
            .env("DATABASE_URL", backend.url())
            .env(variable("server.bind"), "127.0.0.1:0")
            .envs(settings.iter().map(|(path, value)| (variable(path), value)))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the service starts");
        let log = BufReader::new(process.stderr.take().expect("its log"));
        let (send_url, url) = oneshot::channel();
        std::thread::spawn(move || {
            let mut send_url = Some(send_url);
            for line in log.lines().map_while(Result::ok) {
                let url = line.split_once("listening on ").and_then(|(_, rest)| rest.split('"').next());
                if let Some((url, send_url)) = url.map(str::to_owned).zip(send_url.take_if(|_| url.is_some()))
                {
                    let _ = send_url.send(url);
                }
            }
        });
        let client = TestClient::new(url.await.expect("it listens"));
        Self { process, client, backend, _folder: folder, _running: running }
    }

    /// Returns a client with a new key of a tenant.
    pub(crate) async fn tenant(&self, name: &str) -> TestClient {
        let key = self.backend.key(name, Scope::Admin).await;
        self.client.with_key(key.expose())
    }

    /// Returns the largest memory that the process has had, in MB.
    pub(crate) fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("running");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("on Linux");
        let kib: u64 = peak.split_whitespace().next().expect("a number").parse().expect("a number");
        kib / 1024
    }
}

/// A tenant that sends one small request after another.
pub(crate) struct Bystander {
    client: TestClient,
}

/// The requests of a [`Bystander`].
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) sent: usize,
    pub(crate) served: usize,
    latencies: Vec<Duration>,
}

impl Bystander {
    pub(crate) async fn new(service: &Service, name: &str) -> Self {
        let client = service.tenant(name).await;
        client.record_turns("small", 0..SMALL_TURNS).await;
        Self { client }
    }

    /// Sends contexts, and an exchange now and then, until the attack ends, at least for this long.
    pub(crate) async fn measure(&self, time: Duration, attack: impl Future<Output = ()>) -> Measured {
        let (mut sent, mut served, mut latencies) = (0, 0, Vec::new());
        let began = Instant::now();
        let mut attack = std::pin::pin!(attack);
        let mut has_ended = false;
        while began.elapsed() < time || !has_ended {
            let at = Instant::now();
            let request = if sent % 20 == 19 {
                let body = json!({"user_message": "a", "assistant_reply": "b"});
                self.client.post("/sessions/other/exchanges", body)
            } else {
                self.client.post("/sessions/small/context", r#"{"user_message":"And now?"}"#)
            };
            let request = request.unchecked();
            let mut request = std::pin::pin!(request);
            let response = loop {
                tokio::select! {
                    response = &mut request => break response,
                    () = &mut attack, if !has_ended => has_ended = true,
                }
            };
            sent += 1;
            served += usize::from(response.is_ok_and(|response| response.status().is_success()));
            latencies.push(at.elapsed());
            // The body is small and has arrived. A client that thinks between its requests.
            let pause = tokio::time::sleep(Duration::from_millis(5));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    () = &mut attack, if !has_ended => has_ended = true,
                }
            }
        }
        latencies.sort_unstable();
        Measured { sent, served, latencies }
    }
}

impl Measured {
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        self.latencies[(self.latencies.len() * percent / 100).min(self.latencies.len() - 1)]
    }

    pub(crate) fn figures(&self) -> String {
        let [half, most] = [50, 99].map(|percent| self.percentile(percent).as_secs_f64() * 1000.0);
        format!("{} of {} served, p50 {half:.1} ms, p99 {most:.1} ms", self.served, self.sent)
    }
}

/// Repeats a request of each client until the time is over. Returns the number of responses by status.
pub(crate) async fn flood(
    clients: usize,
    time: Duration,
    request: impl AsyncFn(usize) -> u16 + Send + Sync + 'static,
) -> Vec<(u16, usize)> {
    let request = Arc::new(request);
    let mut statuses = std::collections::BTreeMap::new();
    let until = Instant::now() + time;
    let runs = (0..clients).map(|client| {
        let request = Arc::clone(&request);
        async move {
            let mut statuses = Vec::new();
            while Instant::now() < until {
                statuses.push(request(client).await);
            }
            statuses
        }
    });
    for status in futures_util::future::join_all(runs).await.into_iter().flatten() {
        *statuses.entry(status).or_default() += 1;
    }
    statuses.into_iter().collect()
}
