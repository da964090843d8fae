//! Admission control: a request is rejected only if it could not be served within the permitted wait
//! (`limits.queue_timeout`), and then at once.
//!
//! The checks, in this order:
//! 1. [`Admission::enter`] bounds the number of requests in the service.
//! 2. [`Admission::check_rate`] bounds the rate of one API key, if a rate is configured.
//! 3. [`Admission::check_wait`] rejects requests whose predicted wait is too long, before their body is read.
//! 4. [`Admission::body_memory`] bounds the memory of the bodies of all requests.
//! 5. [`Admission::permit`] bounds the number of requests that run, and the memory of their work and their responses.
//!
//! The last two are queues that divide their capacity fairly between keys, by the cost of the requests
//! ([`FairQueue`]). Requests without a key are one client. They have separate parts of the memory, so that bodies that wait
//! for memory for their work never use it up.
//!
//! The prediction compares the queue with the [`Pace`] at which it moved during the last permitted wait: a request is hopeless
//! if more claims are before it than were granted in this time. Clients that wait for each response never build a queue that
//! is longer than their number, so they are rejected only if the service is slower than their number divided by the permitted
//! wait. The layers of `tower` do not replace this: `ConcurrencyLimit` and `LoadShed` have neither a queue timeout nor a permit
//! that a request can release while it waits for a model.

use crate::blocking;
use crate::capacity::{Capacity, Claim, ClientId, FairQueue, Held, Load, QueueEnd, Turn, WorkPermit};
use crate::config::Limits;
use crate::domain::api_key::KeyId;
use crate::http::error::Problem;
use crate::service::keys::authenticator::Principal;
use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::convert::Infallible;
use std::hash::{BuildHasher as _, RandomState};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Part of the permitted wait that a prediction may use. The rest is for its error and for serving the request.
const PREDICTION_MARGIN: f64 = 0.75;

/// Cost of a request without a body, in bytes of a body.
const BASE_COST: u64 = 4 * 1024;

/// A large body exists this many times while its messages are parsed and stored, in addition to the body itself.
pub(crate) const COPIES_OF_BODY: usize = 3;

/// Bodies of at most this size are not part of the memory: the number of running requests bounds them.
const SMALL_BODY: usize = 64 * 1024;

/// Memory of an export: a page, as it is read, encoded and sent.
const EXPORT_MEMORY: usize = 3 * 1024 * 1024;

/// Most bytes of a streamed body that arrive at once: the buffer of a connection has 64 KiB.
const MAX_ARRIVING_BYTES: usize = 128 * 1024;

/// The limits and the current load.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Arc<Limits>,
    read_timeout: Duration,
    in_flight: Arc<Semaphore>,
    /// The memory of bodies.
    bodies: Arc<FairQueue>,
    /// Requests that run, and the memory of their work and their responses.
    requests: Arc<FairQueue>,
    /// Threads for long computations.
    threads: Arc<FairQueue>,
    pace: Pace,
    clients: RandomState,
    /// One limiter per API key in use, and one for requests without a key. Entries are never removed: their number is
    /// bounded by that of the keys.
    rate_limiter: Option<DefaultKeyedRateLimiter<Option<KeyId>>>,
}

/// The load of the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceLoad {
    /// Requests in the service, running and queued.
    pub(crate) in_flight: usize,
    /// The memory of bodies.
    pub(crate) bodies: Load,
    /// Requests that run, and the memory of their work and their responses.
    pub(crate) requests: Load,
}

/// The number of permits that are granted in one permitted wait while all of them are in use.
///
/// It is known when a backlog has lasted this long: earlier, a burst or a short stall could not be distinguished from
/// overload. A stall of the machine lowers it by no more than the permits of the time that the stall has taken, so requests
/// are not rejected as long as their wait, including the stall, stays within the predicted one.
#[derive(Debug)]
struct Pace {
    period: Duration,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    backlog: u64,
    /// Beginning of the present period; `None` before the first backlog.
    since: Option<Instant>,
    granted_before: u64,
    /// The number of permits that were granted in the period before; `None` if the backlog is younger.
    previous: Option<f64>,
}

impl Pace {
    fn new(period: Duration) -> Self {
        Self { period, counts: Mutex::default() }
    }

    /// Returns the number of permits that were granted in the last period; `None` if a permit was free in it.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn grants_in_period(&self, end: &QueueEnd) -> Option<f64> {
        let now = Instant::now();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let start =
            Counts { backlog: end.backlog, since: Some(now), granted_before: end.granted, previous: None };
        let Some(since) = counts.since.filter(|_| counts.backlog == end.backlog) else {
            *counts = start;
            return None;
        };
        let granted = end.granted.saturating_sub(counts.granted_before) as f64;
        let part = now.duration_since(since).as_secs_f64() / self.period.as_secs_f64();
        if part >= 1.0 {
            // The first request after a period begins the next one.
            *counts = Counts { previous: Some(granted / part), ..start };
            return counts.previous;
        }
        // The last period consists of the present one and the rest of the one before.
        counts.previous.map(|previous| previous.mul_add(1.0 - part, granted))
    }
}

impl Admission {
    pub(crate) fn new(limits: &Arc<Limits>, read_timeout: Duration) -> Self {
        let quota = NonZeroU32::new(limits.requests_per_second).map(|rate| {
            Quota::per_second(rate).allow_burst(NonZeroU32::new(limits.request_burst).unwrap_or(rate))
        });
        let memory = limits.max_bytes_in_flight / 2;
        Self {
            limits: Arc::clone(limits),
            read_timeout,
            in_flight: Arc::new(Semaphore::new(limits.max_requests_in_flight)),
            bodies: FairQueue::new(Capacity { memory, memory_of_client: memory / 2, ..Capacity::default() }),
            requests: FairQueue::new(Capacity {
                slots: limits.concurrent_requests(),
                memory,
                memory_of_client: memory / 4 * 3,
                ..Capacity::default()
            }),
            threads: FairQueue::new(blocking::thread_capacity()),
            pace: Pace::new(limits.queue_timeout),
            clients: RandomState::new(),
            rate_limiter: quota.map(RateLimiter::keyed),
        }
    }

    pub(crate) fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Returns the present load.
    pub(crate) fn load(&self) -> ServiceLoad {
        ServiceLoad {
            in_flight: self.limits.max_requests_in_flight.saturating_sub(self.in_flight.available_permits()),
            bodies: self.bodies.load(),
            requests: self.requests.load(),
        }
    }

    pub(crate) fn read_timeout(&self) -> Duration {
        self.read_timeout
    }

    /// Counts a request as long as the result exists, and rejects it above `limits.max_requests_in_flight`.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit, Problem> {
        let in_flight = Arc::clone(&self.in_flight).try_acquire_owned();
        in_flight.map_err(|_| Problem::too_many_requests(&self.limits))
    }

    /// Returns the client of an authenticated request.
    pub(crate) fn client(&self, request: &Request) -> ClientId {
        let key = request.extensions().get::<Principal>().and_then(|principal| principal.key.as_ref());
        ClientId(key.map_or(0, |key| self.clients.hash_one(key)))
    }

    /// Rejects a request that would wait longer than permitted.
    pub(crate) fn check_wait(&self, client: ClientId) -> Result<(), Problem> {
        if self.is_hopeless(client) { Err(self.no_permit()) } else { Ok(()) }
    }

    /// Returns the error for a request that got no permit in time. Its number of permits is that of the queue, because to
    /// determine the number of cores takes several system calls, a quarter of the time of a rejection.
    fn no_permit(&self) -> Problem {
        Problem::no_permit(self.requests.capacity().slots, &self.limits)
    }

    /// Rejects a request above the rate of its [`Principal`].
    pub(crate) fn check_rate(&self, request: &Request) -> Result<(), Problem> {
        let Some(rate_limiter) = &self.rate_limiter else { return Ok(()) };
        let key = request.extensions().get::<Principal>().and_then(|principal| principal.key.clone());
        rate_limiter.check_key(&key).map_err(|not_until| {
            let wait = not_until.wait_time_from(DefaultClock::default().now());
            let seconds = u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
            Problem::rate_limited(&self.limits, seconds.max(1))
        })
    }

    /// Waits until `bytes` of the memory for bodies are free. Fails after `limits.queue_timeout`.
    pub(crate) async fn body_memory(&self, client: ClientId, bytes: usize) -> Result<Held, Problem> {
        let claim = Claim { client, cost: bytes as u64, slot: false, memory: bytes, turn: Turn::New };
        self.wait_for(&self.bodies, claim).await.ok_or_else(Problem::no_memory)
    }

    /// Returns the size of the largest part of a body that can be in memory: a larger one would never get the memory of a client,
    /// together with the bytes that arrive next.
    pub(crate) fn largest_partial_body(&self) -> usize {
        self.bodies.capacity().memory_of_client.saturating_sub(MAX_ARRIVING_BYTES)
    }

    /// Waits until the memory of an export is free. Fails after `limits.queue_timeout`.
    pub(crate) async fn export_memory(&self, client: ClientId) -> Result<Held, Problem> {
        let (cost, memory) = (BASE_COST, EXPORT_MEMORY);
        let claim = Claim { client, cost, slot: false, memory, turn: Turn::New };
        self.wait_for(&self.requests, claim).await.ok_or_else(Problem::no_memory)
    }

    async fn wait_for(&self, queue: &Arc<FairQueue>, claim: Claim) -> Option<Held> {
        match queue.try_acquire(claim) {
            Some(held) => Some(held),
            None => timeout(self.limits.queue_timeout, queue.acquire(claim)).await.ok(),
        }
    }

    /// Waits for a permit for a request with a body of this size. Fails at once if the wait would be too long, or after
    /// `limits.queue_timeout`. The handler takes the [`WorkPermit`] from the extensions if it has to release it while it waits
    /// for a model.
    pub(crate) async fn permit(&self, client: ClientId, body: usize) -> Result<WorkPermit, Problem> {
        let memory = if body > SMALL_BODY { body.saturating_mul(COPIES_OF_BODY) } else { 0 };
        let claim = Claim { client, cost: BASE_COST + body as u64, slot: true, memory, turn: Turn::New };
        let held = match self.requests.try_acquire(claim) {
            Some(held) => held,
            None if memory > 0 => {
                self.wait_for(&self.requests, claim).await.ok_or_else(Problem::no_memory)?
            }
            None => self.wait_for_slot(claim).await.ok_or_else(|| self.no_permit())?,
        };
        Ok(self.work_permit(client, Some(held)))
    }

    /// Returns a permit for work that counts only its memory and its threads.
    pub(crate) fn work_permit(&self, client: ClientId, held: Option<Held>) -> WorkPermit {
        WorkPermit::new(&self.requests, &self.threads, client, Some(self.limits.queue_timeout), held)
    }

    async fn wait_for_slot(&self, claim: Claim) -> Option<Held> {
        if self.is_hopeless(claim.client) {
            return None;
        }
        timeout(self.limits.queue_timeout, self.requests.acquire(claim)).await.ok()
    }

    /// Returns `true` if a new request of this client would wait longer than permitted.
    fn is_hopeless(&self, client: ClientId) -> bool {
        let end = self.requests.end(client);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let before = end.claims_before as f64;
        before > 0.0
            && self.pace.grants_in_period(&end).is_some_and(|grants| before > grants * PREDICTION_MARGIN)
    }
}

/// Extracts the permit that the request has got, from its extensions.
impl<S: Send + Sync> FromRequestParts<S> for WorkPermit {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::api_key::Scope;
    use crate::domain::id::TenantId;
    use axum::body::Body;
    use futures_util::future::join_all;
    use std::ops::Range;

    fn admission(set: impl FnOnce(&mut Limits)) -> Arc<Admission> {
        let (second, mut limits) = (Duration::from_secs(1), Limits::default());
        limits.requests_per_second = 1;
        limits.request_burst = 1;
        limits.max_requests_in_flight = 1;
        limits.max_concurrent_requests = 1;
        limits.queue_timeout = second;
        set(&mut limits);
        Arc::new(Admission::new(&Arc::new(limits), second))
    }

    #[test]
    fn each_key_has_its_own_rate_limit() {
        let admission = admission(|limits| limits.request_burst = 2);
        let is_accepted = |key: Option<&str>| {
            let key = key.map(|key| KeyId::parse(&key.repeat(8)).expect("an id"));
            let mut request = Request::new(Body::empty());
            let (tenant, scope) = (TenantId::default(), Scope::Read);
            request.extensions_mut().insert(Principal { tenant, scope, key });
            admission.check_rate(&request).is_ok()
        };
        let mut rejected = 0;
        for _ in 0..100 {
            rejected += usize::from(!is_accepted(Some("a")));
        }
        assert!(rejected > 90, "{rejected}");
        for key in [Some("b"), None] {
            assert!(is_accepted(key) && is_accepted(key), "{key:?}");
        }
    }

    const MS: Duration = Duration::from_millis(1);

    /// A simulated service with 4 permits. It can stall: then no request proceeds.
    struct Simulation {
        admission: Arc<Admission>,
        start: Instant,
        /// Time that a request takes with a permit.
        service_time: Duration,
        stall: Range<Duration>,
    }

    impl Simulation {
        fn new(service_time: Duration, stall: Range<Duration>) -> Arc<Self> {
            let admission = admission(|limits| limits.max_concurrent_requests = 4);
            Arc::new(Self { admission, start: Instant::now(), service_time, stall })
        }

        /// Serves a request after it has passed all checks. Returns its wait for a permit; for a rejected request, an error.
        async fn serve(&self, service_time: Duration) -> Result<Duration, Duration> {
            let arrival = Instant::now();
            if self.admission.check_wait(ClientId::default()).is_err() {
                return Err(arrival.elapsed());
            }
            let permit = self.admission.permit(ClientId::default(), 0).await;
            let wait = arrival.elapsed();
            tokio::time::sleep(service_time).await;
            if self.stall.contains(&self.start.elapsed()) {
                tokio::time::sleep_until(self.start + self.stall.end).await;
            }
            permit.map_or(Err(wait), |_| Ok(wait))
        }

        /// Sends requests at fixed intervals, whatever their outcomes are (an open loop). Returns these.
        async fn send_all(
            self: &Arc<Self>,
            requests: u32,
            interval: Duration,
        ) -> Vec<Result<Duration, Duration>> {
            let mut running = Vec::new();
            for _ in 0..requests {
                let simulation = Arc::clone(self);
                running.push(tokio::spawn(async move { simulation.serve(simulation.service_time).await }));
                tokio::time::sleep(interval).await;
            }
            let mut outcomes = Vec::new();
            for request in running {
                outcomes.push(request.await.expect("no panic"));
            }
            outcomes
        }

        /// Runs clients that send their next request after the response, as often as given. Returns the longest wait.
        async fn run_clients(self: &Arc<Self>, clients: usize, requests: usize) -> Duration {
            let clients = (0..clients).map(|_| {
                let simulation = Arc::clone(self);
                async move {
                    let mut longest = Duration::ZERO;
                    for _ in 0..requests {
                        let wait = simulation.serve(simulation.service_time).await;
                        longest = longest.max(wait.expect("no rejection"));
                    }
                    longest
                }
            });
            join_all(clients).await.into_iter().max().unwrap_or_default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_wait_for_each_response_are_never_rejected() {
        // 100 requests per second: the last of 74 clients waits for 700 ms.
        let longest = Simulation::new(40 * MS, Duration::ZERO..Duration::ZERO).run_clients(74, 20).await;
        assert!((690 * MS..=740 * MS).contains(&longest), "{longest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn stall_rejects_no_request_whose_wait_stays_within_the_permitted_one() {
        // The clients connect during the stall, shortly before it, or long before it. They wait for 150 ms without it.
        for begin in [0, 5, 900, 1500, 2000, 2400] {
            let stall = begin * MS..(begin + 550) * MS;
            let longest = Simulation::new(10 * MS, stall).run_clients(64, 400).await;
            assert!((550 * MS..=750 * MS).contains(&longest), "{begin}: {longest:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn burst_of_slow_requests_rejects_none_of_the_fast_ones() {
        // 250 requests per second of 10 ms are 63 % of the capacity. Meanwhile, 50 requests of 40 ms arrive at once every three
        // seconds, which are half a second of work.
        let simulation = Simulation::new(10 * MS, Duration::ZERO..Duration::ZERO);
        let bursts = async {
            let mut outcomes = Vec::new();
            for _ in 0..3 {
                outcomes.extend(join_all((0..50).map(|_| simulation.serve(40 * MS))).await);
                tokio::time::sleep(3000 * MS).await;
            }
            outcomes
        };
        let (outcomes, of_bursts) = tokio::join!(simulation.send_all(2500, 4 * MS), bursts);
        let longest = outcomes.iter().chain(&of_bursts).map(|outcome| outcome.expect("no rejection")).max();
        assert!(longest.is_some_and(|longest| longest > 400 * MS), "{longest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn overload_rejects_hopeless_requests_at_once() {
        // 500 requests per second arrive, and 100 can be served.
        let simulation = Simulation::new(40 * MS, Duration::ZERO..Duration::ZERO);
        let outcomes = simulation.send_all(5000, 2 * MS).await;
        let accepted: Vec<_> = outcomes.iter().flatten().collect();
        assert!((1000..=1110).contains(&accepted.len()), "{} in ten seconds", accepted.len());
        // The requests of the first permitted wait may wait in vain, because overload is not certain yet.
        let after_it = outcomes.iter().skip(520);
        assert!(after_it.clone().all(|outcome| outcome.is_ok() || *outcome == Err(Duration::ZERO)));
        let longest = after_it.flatten().max();
        assert!(longest.is_some_and(|longest| *longest <= 800 * MS), "{longest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_time_does_not_reject_requests_of_a_fast_time() {
        let admission = admission(|_| ());
        let request = |service_time| {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move {
                let permit = admission.permit(ClientId::default(), 0).await;
                tokio::time::sleep(service_time).await;
                permit.is_ok()
            })
        };
        let slow: Vec<_> = (0..10).map(|_| request(1500 * MS)).collect();
        tokio::time::sleep(1200 * MS).await;
        assert!(request(MS).await.expect("no panic"), "the next one");
        assert_eq!(
            join_all(slow).await.into_iter().filter(|served| *served.as_ref().expect("no panic")).count(),
            1
        );
        for fast in (0..100).map(|_| request(MS)).collect::<Vec<_>>() {
            assert!(fast.await.expect("no panic"), "a permit was free meanwhile");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hopeless_backlog_of_a_client_rejects_no_other_one() {
        let simulation = Simulation::new(40 * MS, Duration::ZERO..Duration::ZERO);
        let overload = tokio::spawn({
            let simulation = Arc::clone(&simulation);
            async move { simulation.send_all(2000, 2 * MS).await }
        });
        tokio::time::sleep(3500 * MS).await;
        assert!(simulation.admission.check_wait(ClientId::default()).is_err());
        assert!(
            simulation.admission.check_wait(ClientId(1)).is_ok(),
            "it waits behind one claim of the other client"
        );
        overload.await.expect("no panic");
    }
}
