//! The service as a process, and a tenant whose small requests are measured.

use crate::process::{Precis, Process};
use crate::support::backend::Backend;
use crate::support::client::{Request, TestClient};
use crate::support::factor::test_factor;
use crate::support::memory::peak_kib;
use precis::domain::api_key::Scope;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, MutexGuard};

/// One attack at a time: another one would change its figures.
static RUNNING: Mutex<()> = Mutex::const_new(());

/// Messages of the session whose contexts are measured.
const SMALL_TURNS: usize = 10;

pub(crate) struct Service {
    process: Process,
    pub(crate) backend: Backend,
    _running: MutexGuard<'static, ()>,
}

impl Service {
    /// Starts a process with these settings, given by their paths.
    pub(crate) async fn start(backend: Backend, settings: &[(&str, &str)]) -> Self {
        let running = RUNNING.lock().await;
        // The default, because attacks are measured with the default limits.
        let precis = Precis::on(&backend).set("limits.queue_timeout", "1s");
        let precis = settings.iter().fold(precis, |precis, (path, value)| precis.set(path, value));
        Self { process: precis.start().await, backend, _running: running }
    }

    /// Returns a client with a new key of a tenant.
    pub(crate) async fn tenant(&self, name: &str) -> TestClient {
        let key = self.backend.key(name, Scope::Admin).await;
        self.process.with_key(key.expose())
    }

    /// Returns the largest memory that the process has had, in MB.
    pub(crate) fn peak_memory(&self) -> u64 {
        peak_kib(self.process.id()) / 1024
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
    /// Those of the served requests.
    served_latencies: Vec<Duration>,
}

impl Bystander {
    pub(crate) async fn new(service: &Service, name: &str) -> Self {
        let client = service.tenant(name).await;
        client.record_turns("small", 0..SMALL_TURNS).await;
        Self { client }
    }

    /// Sends contexts, and an exchange now and then, until the attack ends, at least for this long.
    pub(crate) async fn measure(&self, time: Duration, attack: impl Future<Output = ()>) -> Measured {
        let request = |number: usize| {
            if number % 20 == 19 {
                let body = json!({"user_message": "a", "assistant_reply": "b"});
                self.client.post("/sessions/other/exchanges", body)
            } else {
                self.client.post("/sessions/small/context", r#"{"user_message":"And now?"}"#)
            }
        };
        self.measure_requests(time, request, attack).await
    }

    /// Sends searches, as [`Self::measure`].
    pub(crate) async fn measure_searches(
        &self,
        time: Duration,
        attack: impl Future<Output = ()>,
    ) -> Measured {
        self.measure_requests(time, |_| self.client.get("/search?q=subject+%22in+favour%22"), attack).await
    }

    pub(crate) fn client(&self) -> &TestClient {
        &self.client
    }

    pub(crate) async fn measure_requests(
        &self,
        time: Duration,
        request: impl Fn(usize) -> Request,
        attack: impl Future<Output = ()>,
    ) -> Measured {
        let (mut sent, mut latencies, mut served_latencies) = (0, Vec::new(), Vec::new());
        let began = Instant::now();
        let mut attack = std::pin::pin!(attack);
        let mut has_ended = false;
        while began.elapsed() < time || !has_ended {
            let at = Instant::now();
            let request = request(sent).unchecked();
            let mut request = std::pin::pin!(request);
            let response = loop {
                tokio::select! {
                    response = &mut request => break response,
                    () = &mut attack, if !has_ended => has_ended = true,
                }
            };
            sent += 1;
            let latency = at.elapsed();
            served_latencies
                .extend(response.is_ok_and(|response| response.status().is_success()).then_some(latency));
            latencies.push(latency);
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
        Measured { sent, served: served_latencies.len(), latencies, served_latencies }
    }
}

impl Measured {
    pub(crate) fn percentile(&self, percent: usize) -> Duration {
        self.latencies[(self.latencies.len() * percent / 100).min(self.latencies.len() - 1)]
    }

    /// Returns true if the service left this tenant its share. Without shares, at most a tenth is served. A busy machine has outliers,
    /// so less is expected without a factor.
    pub(crate) fn has_its_share(&self) -> bool {
        let least = if test_factor() > 1 { 90 } else { 50 };
        self.served * 100 >= self.sent * least
    }

    /// Returns the number of requests that were served within this time.
    pub(crate) fn served_within(&self, time: Duration) -> usize {
        self.served_latencies.iter().filter(|latency| **latency <= time).count()
    }

    pub(crate) fn figures(&self) -> String {
        let [half, most] = [50, 99].map(|percent| self.percentile(percent).as_secs_f64() * 1000.0);
        format!("{} of {} served, p50 {half:.1} ms, p99 {most:.1} ms", self.served, self.sent)
    }
}

/// Sends a request and reads its response. Returns the status, or 0 if there is no response.
pub(crate) async fn status_after_body(request: Request) -> u16 {
    let Ok(response) = request.unchecked().await else { return 0 };
    let status = response.status().as_u16();
    drop(response.bytes().await);
    status
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
