//! Admission of requests: their rate, and the permits that they need before their handler runs.
//!
//! The steps, in this order, which is that of [`Level`]:
//! 1. [`Admission::check_rate`] bounds the rate of one API key, if a rate is configured.
//! 2. [`Admission::enter`] bounds the number of requests in the service.
//! 3. [`super::body_limits::buffer`] bounds the memory of bodies.
//! 4. [`Admission::start`] bounds the number of requests that run, and adds the memory for their work.

use crate::capacity::{Capacity, CapacityLimits, ClientId, Held, Kind, Level, Overloaded, Work};
use crate::config::Limits;
use crate::domain::api_key::KeyId;
use crate::http::error::Problem;
use crate::service::keys::authenticator::Principal;
use axum::extract::Request;
use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::hash::{BuildHasher as _, RandomState};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// A large body exists this many times while its messages are parsed and stored, in addition to the body itself.
pub(crate) const COPIES_OF_BODY: usize = 3;

/// The work with a body of at most this size needs no memory: the number of running requests bounds it.
const SMALL_BODY: usize = 64 * 1024;

/// Most bytes of a streamed body that arrive at once: the buffer of a connection has 64 KiB.
const MAX_ARRIVING_BYTES: usize = 128 * 1024;

/// The limits and the current load.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Arc<Limits>,
    read_timeout: Duration,
    capacity: Arc<Capacity>,
    clients: RandomState,
    /// One limiter per API key in use, and one for requests without a key. Entries are never removed: their number is
    /// bounded by that of the keys.
    rate_limiter: Option<DefaultKeyedRateLimiter<Option<KeyId>>>,
}

impl Admission {
    pub(crate) fn new(limits: &Arc<Limits>, read_timeout: Duration) -> Self {
        let quota = NonZeroU32::new(limits.requests_per_second).map(|rate| {
            Quota::per_second(rate).allow_burst(NonZeroU32::new(limits.request_burst).unwrap_or(rate))
        });
        let capacity = Capacity::new(&CapacityLimits {
            key_share: limits.max_key_share,
            requests_in_flight: limits.max_requests_in_flight,
            running_requests: limits.concurrent_requests(),
            bytes: limits.max_bytes_in_flight,
            queue_timeout: limits.queue_timeout,
        });
        Self {
            limits: Arc::clone(limits),
            read_timeout,
            capacity,
            clients: RandomState::new(),
            rate_limiter: quota.map(RateLimiter::keyed),
        }
    }

    pub(crate) fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    pub(crate) fn capacity(&self) -> &Arc<Capacity> {
        &self.capacity
    }

    pub(crate) fn read_timeout(&self) -> Duration {
        self.read_timeout
    }

    /// Returns the work of a request, which holds nothing yet. All requests without a key are those of one client.
    pub(crate) fn work(&self, request: &Request) -> Work {
        let key = request.extensions().get::<Principal>().and_then(|principal| principal.key.as_ref());
        let client = ClientId(key.map_or(0, |key| self.clients.hash_one(key)));
        Work::new(&self.capacity, client, Kind::Request)
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

    /// Counts a request as long as the result exists, and rejects it beyond the share of its key of `limits.max_requests_in_flight`.
    pub(crate) fn enter(&self, work: &Work) -> Result<Held, Problem> {
        work.try_acquire(&self.capacity.in_flight, 1)
            .ok_or_else(|| Problem::overloaded(Overloaded(Level::InFlight)))
    }

    /// Returns the size of the largest part of a body that can be in memory: a larger one would never get the memory of a key,
    /// together with the bytes that arrive next.
    pub(crate) fn largest_partial_body(&self) -> usize {
        (self.capacity.bodies.share() * 1024).saturating_sub(MAX_ARRIVING_BYTES)
    }

    /// Waits for an export of the key to end if it has as many as it can have.
    pub(crate) async fn start_export(&self, work: &Work) -> Result<Held, Problem> {
        let started = work.acquire(&self.capacity.exports, 1, Some(self.limits.queue_timeout)).await;
        started.map_err(Problem::overloaded)
    }

    /// Waits until a request with a body of this size can run, and for the memory of its work.
    pub(crate) async fn start(&self, work: &Work, body: usize) -> Result<(), Problem> {
        let started = async {
            work.start().await?;
            if body > SMALL_BODY { work.claim(body.saturating_mul(COPIES_OF_BODY)).await } else { Ok(()) }
        };
        started.await.map_err(Problem::overloaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::api_key::Scope;
    use crate::domain::id::TenantId;
    use axum::body::Body;

    #[test]
    fn each_key_has_its_own_rate_limit() {
        let limits = Limits { requests_per_second: 1, request_burst: 2, ..Limits::default() };
        let admission = Admission::new(&Arc::new(limits), Duration::from_secs(1));
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
}
