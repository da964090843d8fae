//! Admission control. Requests are rejected early under overload, so that accepted requests keep their normal latency.
//!
//! The layers, from the outside in:
//! 1. [`limit_in_flight`] bounds the memory of all requests.
//! 2. [`limit_rate`] bounds the share of one API key.
//! 3. [`shed_if_overloaded`] rejects requests that would probably wait in vain, before their body is read.
//! 4. [`limit_time`] ends requests that hang.
//! 5. [`acquire_permit`] keeps the queue in front of the database short.
//!
//! The queue follows "controlled delay" (`CoDel`; Maurer, "Fail at Scale", ACM Queue 13/8, 2015): a queue that becomes
//! empty from time to time is a burst, and waiting helps. A standing queue is overload, and waiting only delays every
//! response; the queue timeout is short then. The layers of `tower` do not replace this: `ConcurrencyLimit` and
//! `LoadShed` have neither a queue timeout nor a permit that a request can release while it waits for a model.

use crate::config::Limits;
use crate::domain::api_key::KeyId;
use crate::http::error::Problem;
use crate::http::middleware::body_limits;
use crate::service::keys::authenticator::Principal;
use crate::service::work_permit::WorkPermit;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// The queue timeout under overload: long enough for the scheduling jitter of a busy machine.
const OVERLOADED_QUEUE_TIMEOUT: Duration = Duration::from_millis(5);

/// The times that distinguish a burst from overload.
#[derive(Clone, Copy, Debug)]
struct CodelState {
    /// The last time at which a request found a free permit.
    last_free_permit: Instant,
    /// The last queue timeout. A free permit alone does not end the overload state, because short queue timeouts can
    /// empty the queue.
    last_queue_timeout: Option<Instant>,
}

/// The limits and the current load.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Arc<Limits>,
    request_timeout: Duration,
    in_flight: Arc<Semaphore>,
    permits: Arc<Semaphore>,
    /// Requests that wait for a permit.
    waiting: AtomicUsize,
    codel: Mutex<CodelState>,
    /// One limiter per API key in use, and one for requests without a key. Entries are never removed: their number is
    /// bounded by that of the keys.
    rate_limiter: Option<DefaultKeyedRateLimiter<Option<KeyId>>>,
}

impl Admission {
    pub(crate) fn new(limits: &Arc<Limits>, request_timeout: Duration) -> Self {
        let quota = NonZeroU32::new(limits.requests_per_second).map(|rate| {
            Quota::per_second(rate).allow_burst(NonZeroU32::new(limits.request_burst).unwrap_or(rate))
        });
        Self {
            limits: Arc::clone(limits),
            request_timeout,
            in_flight: Arc::new(Semaphore::new(limits.max_requests_in_flight)),
            permits: Arc::new(Semaphore::new(limits.max_concurrent_requests)),
            waiting: AtomicUsize::new(0),
            codel: Mutex::new(CodelState { last_free_permit: Instant::now(), last_queue_timeout: None }),
            rate_limiter: quota.map(RateLimiter::keyed),
        }
    }

    /// Waits for a permit. Returns `None` after the queue timeout.
    async fn permit(&self) -> Option<WorkPermit> {
        // A released permit goes to a waiting request first, so a free permit means that the queue is empty.
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            self.codel().last_free_permit = Instant::now();
            return Some(WorkPermit::new(permit));
        }
        let max = self.limits.queue_timeout;
        let queue_timeout = if self.is_overloaded() { max.min(OVERLOADED_QUEUE_TIMEOUT) } else { max };
        let _waiting = WaitingGuard::new(&self.waiting);
        if let Ok(Ok(permit)) = timeout(queue_timeout, Arc::clone(&self.permits).acquire_owned()).await {
            return Some(WorkPermit::new(permit));
        }
        self.codel().last_queue_timeout = Some(Instant::now());
        None
    }

    /// Returns `true` if no permit was free, or a request timed out in the queue, within the last `queue_timeout`.
    fn is_overloaded(&self) -> bool {
        let (codel, now) = (*self.codel(), Instant::now());
        let is_recent = |time: Instant| now.duration_since(time) < self.limits.queue_timeout;
        !is_recent(codel.last_free_permit) || codel.last_queue_timeout.is_some_and(is_recent)
    }

    /// Returns `true` if one more request may wait for a permit. Under overload only few may: the next request is
    /// always near, so a short queue keeps all permits in use. A rejection counts as a queue timeout.
    fn accepts_waiter(&self) -> bool {
        let max_waiting = (self.limits.max_concurrent_requests / 4).max(1);
        let accepts = self.waiting.load(Ordering::Relaxed) < max_waiting || !self.is_overloaded();
        if !accepts {
            self.codel().last_queue_timeout = Some(Instant::now());
        }
        accepts
    }

    fn codel(&self) -> MutexGuard<'_, CodelState> {
        self.codel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts one waiting request while it exists.
struct WaitingGuard<'a>(&'a AtomicUsize);

impl<'a> WaitingGuard<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Rejects requests above `limits.max_requests_in_flight` before their body is read.
pub(crate) async fn limit_in_flight(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Response {
    if let Ok(in_flight) = Arc::clone(&admission.in_flight).try_acquire_owned() {
        return body_limits::hold_until_sent(in_flight, next.run(request).await);
    }
    let problem = Problem::too_many_requests(&admission.limits);
    body_limits::close_if_body_pending(&request, problem).into_response()
}

/// Rejects requests that would probably wait for a permit in vain, before their body is read.
pub(crate) async fn shed_if_overloaded(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Response {
    if admission.accepts_waiter() {
        return next.run(request).await;
    }
    body_limits::close_if_body_pending(&request, Problem::no_permit(&admission.limits)).into_response()
}

/// Rejects requests above the rate of their [`Principal`].
pub(crate) async fn limit_rate(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if let Some(rate_limiter) = &admission.rate_limiter {
        let key = request.extensions().get::<Principal>().and_then(|principal| principal.key.clone());
        if let Err(not_until) = rate_limiter.check_key(&key) {
            let wait = not_until.wait_time_from(DefaultClock::default().now());
            let seconds = u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
            return Err(Problem::rate_limited(&admission.limits, seconds.max(1)));
        }
    }
    Ok(next.run(request).await)
}

/// Ends requests after `server.request_timeout` by dropping them. Open transactions roll back. Work that must not be
/// interrupted runs in tasks of the service and continues.
pub(crate) async fn limit_time(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let request_timeout = admission.request_timeout;
    timeout(request_timeout, next.run(request)).await.map_err(|_| Problem::timeout(request_timeout))
}

/// Runs the request when it gets a permit, and rejects it after the queue timeout. The handler takes the [`WorkPermit`]
/// from the extensions if it has to release it while it waits for a model.
pub(crate) async fn acquire_permit(
    State(admission): State<Arc<Admission>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let permit = admission.permit().await.ok_or_else(|| Problem::no_permit(&admission.limits))?;
    request.extensions_mut().insert(permit.clone());
    let response = next.run(request).await;
    drop(permit);
    Ok(response)
}

/// Extracts the permit that [`acquire_permit`] has added to the request.
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
    use axum::Router;
    use axum::body::Body;
    use axum::middleware::{from_fn, from_fn_with_state};
    use axum::routing::get;
    use tower::ServiceExt as _;

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

    #[tokio::test]
    async fn each_key_has_its_own_rate_limit() {
        /// Adds a principal as the authentication layer does.
        async fn identify(mut request: Request, next: Next) -> Response {
            let id = request.headers().get("key").and_then(|key| key.to_str().ok());
            let key = id.map(|id| KeyId::parse(&id.repeat(8)).expect("an id"));
            let (tenant, scope) = (TenantId::default(), Scope::Read);
            request.extensions_mut().insert(Principal { tenant, scope, key });
            next.run(request).await
        }
        let router = Router::new()
            .route("/", get(|| async {}))
            .route_layer(from_fn_with_state(admission(|limits| limits.request_burst = 2), limit_rate))
            .route_layer(from_fn(identify));
        let ask = async |key: Option<&str>| {
            let mut request = Request::new(Body::empty());
            if let Some(key) = key {
                request.headers_mut().insert("key", key.parse().expect("a header"));
            }
            let answer = router.clone().oneshot(request).await;
            answer.expect("infallible").status().as_u16()
        };
        let mut rejected = 0;
        for _ in 0..100 {
            rejected += usize::from(ask(Some("a")).await == 429);
        }
        assert!(rejected > 90, "{rejected}");
        for key in [Some("b"), None] {
            assert_eq!((ask(key).await, ask(key).await), (200, 200), "{key:?}");
        }
    }

    /// In a burst all requests wait; under overload at most a quarter of the number of permits, and at least one.
    #[tokio::test(start_paused = true)]
    async fn queue_is_short_under_overload() {
        let admission = admission(|_| ());
        let held = admission.permit().await.expect("free");
        let waits = || {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move { admission.permit().await.is_some() })
        };
        let all = [waits(), waits(), waits()];
        tokio::task::yield_now().await;
        assert!(admission.accepts_waiter(), "a burst");
        for waited in all {
            assert!(!waited.await.expect("no panic"));
        }
        assert!(admission.accepts_waiter(), "empty queue");
        let one = waits();
        tokio::task::yield_now().await;
        assert!(!admission.accepts_waiter(), "one request waits for the only permit");
        assert!(!one.await.expect("no panic"));
        assert!(admission.accepts_waiter());
        drop(held);
        assert!(admission.permit().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn queue_timeout_is_long_in_a_burst_and_short_under_overload() {
        let admission = admission(|_| ());
        let waited = async || {
            let began = Instant::now();
            let permit = admission.permit().await;
            (permit, began.elapsed())
        };
        let (first, none) = waited().await;
        assert!(first.is_some() && none.is_zero());
        let (second, long) = waited().await;
        assert!(second.is_none() && long >= Duration::from_secs(1), "{long:?}");
        // No permit has been free for a second.
        let (third, short) = waited().await;
        assert!(third.is_none() && short < Duration::from_millis(10), "{short:?}");
        drop(first);
        let (fourth, none) = waited().await;
        assert!(fourth.is_some() && none.is_zero());
        // A free permit alone does not end the overload state.
        let (fifth, short) = waited().await;
        assert!(fifth.is_none() && short < Duration::from_millis(10), "{short:?}");
        // A second without a rejection does: requests may wait again until a permit is released.
        drop(fourth);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (sixth, _) = waited().await;
        let released = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(sixth);
        };
        let ((seventh, long), ()) = tokio::join!(waited(), released);
        assert!(seventh.is_some() && long >= Duration::from_millis(500), "{long:?}");
    }
}
