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
//! The prediction follows Little's law: a request waits for as many grants of permits as claims are before it, and the time of a
//! grant is measured. Clients that wait for each response never build a queue that is longer than their number, so they are
//! rejected only if the service is slower than their number divided by the permitted wait. The layers of `tower` do not
//! replace this: `ConcurrencyLimit` and `LoadShed` have neither a queue timeout nor a permit that a request can release while
//! it waits for a model.

use crate::capacity::{Capacity, Claim, ClientId, FairQueue, Held, Load, WorkPermit};
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
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Weight of the newest sample in the average time of a grant: the average follows a change within about 16 grants.
const SAMPLE_WEIGHT: f64 = 1.0 / 16.0;

/// Part of the permitted wait that a prediction may use. The rest is for its error and for serving the request.
const PREDICTION_MARGIN: f64 = 0.75;

/// Cost of a request without a body, in bytes of a body.
const BASE_COST: u64 = 4 * 1024;

/// A large body exists this many times while its messages are parsed and stored, in addition to the body itself.
const COPIES_OF_BODY: usize = 3;

/// Bodies of at most this size are not part of the memory: the number of running requests bounds them.
const SMALL_BODY: usize = 64 * 1024;

/// Memory of an export: a page, as it is read, encoded and sent.
const EXPORT_MEMORY: usize = 3 * 1024 * 1024;

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
    grants: GrantTime,
    clients: RandomState,
    /// One limiter per API key in use, and one for requests without a key. Entries are never removed: their number is
    /// bounded by that of the keys.
    rate_limiter: Option<DefaultKeyedRateLimiter<Option<KeyId>>>,
}

/// The load of the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceLoad {
    /// Requests in the service, including those that wait.
    pub(crate) in_flight: usize,
    /// The memory of bodies.
    pub(crate) bodies: Load,
    /// Requests that run, and the memory of their work and their responses.
    pub(crate) requests: Load,
}

/// Average time in which one waiting request gets its permit, in seconds, as the bits of an `f64`; 0 before the first one has
/// waited.
#[derive(Debug, Default)]
struct GrantTime(AtomicU64);

impl GrantTime {
    /// Returns the time that a new request would wait behind others. With no others it is no wait, so that an outdated
    /// average of a slow time can't reject requests for ever: the next one that waits corrects it.
    fn predicted_wait(&self, claims_before: usize) -> Duration {
        let seconds = f64::from_bits(self.0.load(Ordering::Relaxed));
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        Duration::try_from_secs_f64(seconds * claims_before as f64).unwrap_or(Duration::MAX)
    }

    /// Records that a request behind `claims_before` others got its permit after `wait`.
    fn record(&self, claims_before: usize, wait: Duration) {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let sample = wait.as_secs_f64() / (claims_before + 1) as f64;
        // A lost update between two grants loses one sample, which does not matter.
        let average = f64::from_bits(self.0.load(Ordering::Relaxed));
        // The average begins at zero: the first sample alone may be many times too high, and would reject the requests of
        // clients that have just connected.
        let average = average + (sample - average) * SAMPLE_WEIGHT;
        self.0.store(average.to_bits(), Ordering::Relaxed);
    }
}

impl Admission {
    pub(crate) fn new(limits: &Arc<Limits>, read_timeout: Duration) -> Self {
        let quota = NonZeroU32::new(limits.requests_per_second).map(|rate| {
            Quota::per_second(rate).allow_burst(NonZeroU32::new(limits.request_burst).unwrap_or(rate))
        });
        let memory = limits.max_bytes_in_flight / 2;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            limits: Arc::clone(limits),
            read_timeout,
            in_flight: Arc::new(Semaphore::new(limits.max_requests_in_flight)),
            bodies: FairQueue::new(Capacity { slots: 0, memory, memory_of_client: memory / 2 }),
            requests: FairQueue::new(Capacity {
                slots: limits.concurrent_requests(),
                memory,
                memory_of_client: memory / 4 * 3,
            }),
            threads: FairQueue::new(Capacity { slots: cores, memory: 0, memory_of_client: 0 }),
            grants: GrantTime::default(),
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
        if self.is_hopeless(self.requests.claims_before(client)) {
            Err(Problem::no_permit(&self.limits))
        } else {
            Ok(())
        }
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
        let claim = Claim { client, cost: bytes as u64, slot: false, memory: bytes, continues: false };
        self.wait_for(&self.bodies, claim).await.ok_or_else(Problem::no_memory)
    }

    /// Waits until the memory of an export is free. Fails after `limits.queue_timeout`.
    pub(crate) async fn export_memory(&self, client: ClientId) -> Result<Held, Problem> {
        let (cost, memory) = (BASE_COST, EXPORT_MEMORY);
        let claim = Claim { client, cost, slot: false, memory, continues: false };
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
        let claim = Claim { client, cost: BASE_COST + body as u64, slot: true, memory, continues: false };
        let held = match self.requests.try_acquire(claim) {
            Some(held) => held,
            None if memory > 0 => {
                self.wait_for(&self.requests, claim).await.ok_or_else(Problem::no_memory)?
            }
            None => self.wait_for_slot(claim).await.ok_or_else(|| Problem::no_permit(&self.limits))?,
        };
        Ok(self.work_permit(client, Some(held)))
    }

    /// Returns a permit for work that counts only its memory and its threads.
    pub(crate) fn work_permit(&self, client: ClientId, held: Option<Held>) -> WorkPermit {
        WorkPermit::new(&self.requests, &self.threads, client, Some(self.limits.queue_timeout), held)
    }

    async fn wait_for_slot(&self, claim: Claim) -> Option<Held> {
        let before = self.requests.claims_before(claim.client);
        if self.is_hopeless(before) {
            return None;
        }
        let since = Instant::now();
        let held = timeout(self.limits.queue_timeout, self.requests.acquire(claim)).await;
        // A request that timed out has waited at least this long, which the average has to know.
        self.grants.record(before, since.elapsed());
        held.ok()
    }

    /// Returns `true` if a request behind this many others would wait longer than permitted.
    fn is_hopeless(&self, claims_before: usize) -> bool {
        self.grants.predicted_wait(claims_before) > self.limits.queue_timeout.mul_f64(PREDICTION_MARGIN)
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

    /// Holds the only permit, lets `waiting` requests wait for 100 ms each, and returns how many were served.
    async fn serve(admission: &Arc<Admission>, waiting: usize) -> usize {
        let held = admission.permit(ClientId::default(), 0).await.expect("free");
        let requests: Vec<_> = (0..waiting)
            .map(|_| {
                let admission = Arc::clone(admission);
                tokio::spawn(async move {
                    let permit = admission.permit(ClientId::default(), 0).await;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    permit.is_ok()
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(held);
        let mut served = 0;
        for request in requests {
            served += usize::from(request.await.expect("no panic"));
        }
        served
    }

    #[tokio::test(start_paused = true)]
    async fn request_is_rejected_at_once_if_the_queue_is_too_long_for_the_permitted_wait() {
        let admission = admission(|_| ());
        // 100 ms per grant: ten requests are served within the permitted second, more are not.
        for _ in 0..10 {
            assert_eq!(serve(&admission, 5).await, 5);
        }
        let held = admission.permit(ClientId::default(), 0).await.expect("free");
        let waiting: Vec<_> = (0..12)
            .map(|_| {
                let admission = Arc::clone(&admission);
                tokio::spawn(async move { admission.permit(ClientId::default(), 0).await.is_ok() })
            })
            .collect();
        tokio::task::yield_now().await;
        let began = Instant::now();
        assert!(admission.check_wait(ClientId::default()).is_err());
        assert!(admission.check_wait(ClientId(1)).is_ok(), "another client waits behind fewer claims");
        assert!(admission.permit(ClientId::default(), 0).await.is_err());
        assert!(began.elapsed().is_zero(), "the rejection does not wait");
        drop(held);
        let mut served = 0;
        for request in waiting {
            served += usize::from(request.await.expect("no panic"));
        }
        assert!((7..=8).contains(&served), "{served} of 12 had a predicted wait below 750 ms");
    }

    #[tokio::test(start_paused = true)]
    async fn one_slow_grant_does_not_reject_clients_that_have_just_connected() {
        let admission = admission(|_| ());
        assert_eq!(serve(&admission, 1).await, 1);
        let held = admission.permit(ClientId::default(), 0).await.expect("free");
        let waiting: Vec<_> = (0..20)
            .map(|_| {
                let admission = Arc::clone(&admission);
                tokio::spawn(async move { admission.permit(ClientId::default(), 0).await.is_ok() })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(held);
        for request in waiting {
            assert!(request.await.expect("no panic"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_wait_for_each_response_are_never_rejected() {
        let admission = admission(|limits| limits.max_concurrent_requests = 4);
        let clients: Vec<_> = (0..64)
            .map(|_| {
                let admission = Arc::clone(&admission);
                tokio::spawn(async move {
                    for _ in 0..100 {
                        let permit = admission
                            .permit(ClientId::default(), 0)
                            .await
                            .expect("64 clients × 10 ms / 4 permits < 1 s");
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        drop(permit);
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.expect("no request was rejected");
        }
    }

    /// After a slow time, the first requests that wait correct the average.
    #[tokio::test(start_paused = true)]
    async fn slow_time_does_not_reject_requests_of_a_fast_time() {
        let admission = admission(|_| ());
        let held = admission.permit(ClientId::default(), 0).await.expect("free");
        assert!(admission.permit(ClientId::default(), 0).await.is_err(), "waited a second in vain");
        drop(held);
        for _ in 0..100 {
            let held = admission.permit(ClientId::default(), 0).await.expect("free");
            let next = {
                let admission = Arc::clone(&admission);
                tokio::spawn(async move { admission.permit(ClientId::default(), 0).await.is_ok() })
            };
            tokio::task::yield_now().await;
            drop(held);
            assert!(next.await.expect("no panic"), "an empty queue accepts a request");
        }
        assert!(f64::from_bits(admission.grants.0.load(Ordering::Relaxed)) < 0.01);
    }
}
