//! Which requests are let in, and how long each may take. Whoever is refused is told at once, before anything was done:
//! under more load than it can serve, precis answers those that it lets in as fast as ever.
//!
//! From the outside in: [`limit_in_flight`] bounds memory, [`limit_rate`] keeps one key from taking the share of all others,
//! [`shed_if_overloaded`] refuses what would wait in vain before its body is read, [`limit_time`] ends what hangs, [`acquire_permit`] keeps the queue
//! before the database short. The last follows "controlled delay"
//! (Maurer, "Fail at Scale", ACM Queue 13/8, 2015): a queue that empties now and then is a burst, and waiting helps; one
//! that never does is overload, and waiting only makes every answer late.

use crate::domain::api_key::KeyId;
use crate::http::error::Problem;
use crate::http::limits::Limits;
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

/// How long a request waits for its turn under overload: long enough for the jitter of a machine that has enough to do.
const OVERLOADED_QUEUE_TIMEOUT: Duration = Duration::from_millis(5);

/// What tells a burst from overload.
#[derive(Clone, Copy, Debug)]
struct CodelState {
    /// When a turn was free last.
    last_free_permit: Instant,
    /// When somebody waited for one in vain last. Under overload a turn is free now and then, just because those who
    /// wait for so short a time were all gone: that alone is not the end of it.
    last_queue_timeout: Option<Instant>,
}

/// What may be let in, and what is there now.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Limits,
    in_flight: Arc<Semaphore>,
    turns: Arc<Semaphore>,
    /// Requests that wait for a turn.
    waiting: AtomicUsize,
    codel: Mutex<CodelState>,
    /// For each key that was used, and one for those who need none; there are as many as keys, so none is forgotten.
    rate_limiter: Option<DefaultKeyedRateLimiter<Option<KeyId>>>,
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        let quota = NonZeroU32::new(limits.requests_per_second).map(|rate| {
            Quota::per_second(rate).allow_burst(NonZeroU32::new(limits.request_burst).unwrap_or(rate))
        });
        Self {
            limits,
            in_flight: Arc::new(Semaphore::new(limits.max_requests_in_flight)),
            turns: Arc::new(Semaphore::new(limits.max_concurrent_requests)),
            waiting: AtomicUsize::new(0),
            codel: Mutex::new(CodelState { last_free_permit: Instant::now(), last_queue_timeout: None }),
            rate_limiter: quota.map(RateLimiter::keyed),
        }
    }

    /// A turn to work; `None` where there is more to do than can be done.
    async fn turn(&self) -> Option<WorkPermit> {
        let turns = || Arc::clone(&self.turns);
        // A turn that is given back goes to those who wait; one is free only if nobody does.
        if let Ok(free) = turns().try_acquire_owned() {
            self.codel().last_free_permit = Instant::now();
            return Some(WorkPermit::new(free));
        }
        let most = self.limits.queue_timeout;
        let queue_timeout = if self.is_overloaded() { most.min(OVERLOADED_QUEUE_TIMEOUT) } else { most };
        let _one_more = Waiting::among(&self.waiting);
        if let Ok(Ok(given)) = timeout(queue_timeout, turns().acquire_owned()).await {
            return Some(WorkPermit::new(given));
        }
        self.codel().last_queue_timeout = Some(Instant::now());
        None
    }

    fn is_overloaded(&self) -> bool {
        let (codel, now) = (*self.codel(), Instant::now());
        let is_recent = |time: Instant| now.duration_since(time) < self.limits.queue_timeout;
        !is_recent(codel.last_free_permit) || codel.last_queue_timeout.is_some_and(is_recent)
    }

    /// Whether there is a point in waiting for a turn: under overload few may, since the next request is never far.
    fn accepts_waiter(&self) -> bool {
        let few = (self.limits.max_concurrent_requests / 4).max(1);
        let crowded = self.waiting.load(Ordering::Relaxed) >= few;
        let room = !crowded || !self.is_overloaded();
        if !room {
            self.codel().last_queue_timeout = Some(Instant::now());
        }
        room
    }

    fn codel(&self) -> MutexGuard<'_, CodelState> {
        self.codel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of those who wait.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn among(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Refuses what is more than may be under way, before its body is read.
pub(crate) async fn limit_in_flight(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Response {
    if let Ok(until_answered) = Arc::clone(&admission.in_flight).try_acquire_owned() {
        return body_limits::hold_until_sent(until_answered, next.run(request).await);
    }
    body_limits::close_if_body_pending(&request, Problem::too_many_requests(&admission.limits))
        .into_response()
}

/// Refuses what would wait for a turn in vain, before its body is read.
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

/// Refuses what comes faster than its [`Principal`] may send.
pub(crate) async fn limit_rate(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if let Some(rate_limiter) = &admission.rate_limiter {
        let key = request.extensions().get::<Principal>().and_then(|caller| caller.key.clone());
        if let Err(not_until) = rate_limiter.check_key(&key) {
            let wait = not_until.wait_time_from(DefaultClock::default().now());
            let seconds = u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
            return Err(Problem::rate_limited(&admission.limits, seconds.max(1)));
        }
    }
    Ok(next.run(request).await)
}

/// Ends a request that takes too long. What it was at is dropped: a transaction rolls back; what must not end half-way
/// is a task of its own in the service, and goes on.
pub(crate) async fn limit_time(
    State(admission): State<Arc<Admission>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let limits = &admission.limits;
    timeout(limits.request_timeout, next.run(request)).await.map_err(|_| Problem::timeout(limits))
}

/// Lets a request work when it is its turn, and refuses it if that does not come soon.
pub(crate) async fn acquire_permit(
    State(admission): State<Arc<Admission>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let turn = admission.turn().await.ok_or_else(|| Problem::no_permit(&admission.limits))?;
    request.extensions_mut().insert(turn.clone());
    let answer = next.run(request).await;
    drop(turn);
    Ok(answer)
}

/// The request's own.
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
        let mut limits = Limits::tiny();
        set(&mut limits);
        Arc::new(Admission::new(limits))
    }

    #[tokio::test]
    async fn each_caller_has_a_rate_of_its_own() {
        /// As the check of keys does.
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
        let mut refused = 0;
        for _ in 0..100 {
            refused += usize::from(ask(Some("a")).await == 429);
        }
        assert!(refused > 90, "{refused}");
        for key in [Some("b"), None] {
            assert_eq!((ask(key).await, ask(key).await), (200, 200), "{key:?}");
        }
    }

    /// In a burst all wait; under overload as many as there are turns.
    #[tokio::test(start_paused = true)]
    async fn under_overload_few_wait() {
        let admission = admission(|_| ());
        let held = admission.turn().await.expect("free");
        let waits = || {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move { admission.turn().await.is_some() })
        };
        let all = [waits(), waits(), waits()];
        tokio::task::yield_now().await;
        assert!(admission.accepts_waiter(), "a burst");
        for waited in all {
            assert!(!waited.await.expect("no panic"));
        }
        assert!(admission.accepts_waiter(), "nobody waits");
        let one = waits();
        tokio::task::yield_now().await;
        assert!(!admission.accepts_waiter(), "one waits for the one turn");
        assert!(!one.await.expect("no panic"));
        assert!(admission.accepts_waiter());
        drop(held);
        assert!(admission.turn().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_waited_for_and_overload_is_not() {
        let admission = admission(|_| ());
        let waited = async || {
            let began = Instant::now();
            let turn = admission.turn().await;
            (turn, began.elapsed())
        };
        let (first, none) = waited().await;
        assert!(first.is_some() && none.is_zero());
        let (second, long) = waited().await;
        assert!(second.is_none() && long >= Duration::from_secs(1), "{long:?}");
        // There has been no free moment for a second now.
        let (third, short) = waited().await;
        assert!(third.is_none() && short < Duration::from_millis(10), "{short:?}");
        drop(first);
        let (fourth, none) = waited().await;
        assert!(fourth.is_some() && none.is_zero());
        // A free moment alone does not end it.
        let (fifth, short) = waited().await;
        assert!(fifth.is_none() && short < Duration::from_millis(10), "{short:?}");
        // A second without a refusal does: others may wait again, and get the turn when it comes.
        drop(fourth);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (sixth, _) = waited().await;
        let given_back = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(sixth);
        };
        let ((seventh, long), ()) = tokio::join!(waited(), given_back);
        assert!(seventh.is_some() && long >= Duration::from_millis(500), "{long:?}");
    }
}
