//! Buffering of request bodies within limits of size, time and memory.
//!
//! The body is complete before the request competes for a work permit, so that slow clients hold no permits.
//! `tower_http`'s limit and timeout layers do not replace this: they have no common memory budget, and their errors have
//! neither a problem document nor the limit for the metrics.

use crate::config::Limits;
use crate::http::error::Problem;
use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// Bodies up to this size usually arrive with the headers. They need no reservation, because the limit of requests in
/// flight bounds their memory; so large bodies never keep small ones out. If such a request is rejected, its
/// body is discarded and its connection can be reused. For larger bodies it is closed instead.
const SMALL: usize = 16 * 1024;

/// Longest time for the small body of a rejected request to arrive. It usually arrives with the head.
const DISCARD_TIMEOUT: Duration = Duration::from_millis(100);

/// The memory for large request bodies (`limits.max_body_bytes_in_flight`).
#[derive(Debug)]
pub(crate) struct BodyMemoryBudget {
    pub(crate) limits: Arc<Limits>,
    pub(crate) read_timeout: Duration,
    reserved: AtomicUsize,
}

/// The part of the budget that one request holds; dropping it releases the memory. Reservations never wait: a request
/// that holds memory and waits for more could deadlock with another one.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyMemoryBudget>,
    bytes: usize,
}

impl BodyMemoryBudget {
    pub(crate) fn new(limits: &Arc<Limits>, read_timeout: Duration) -> Self {
        Self { limits: Arc::clone(limits), read_timeout, reserved: AtomicUsize::new(0) }
    }

    pub(crate) fn reservation(self: Arc<Self>) -> Reservation {
        Reservation { budget: self, bytes: 0 }
    }

    /// Buffers the body of a request, and reserves memory for it. A body whose declared length is too large is rejected
    /// before any of it is read.
    pub(crate) async fn buffer(self: Arc<Self>, request: Request) -> Result<(Request, Reservation), Problem> {
        let (limits, read_timeout) = (Arc::clone(&self.limits), self.read_timeout);
        let mut reservation = self.reservation();
        if request.body().is_end_stream() {
            return Ok((request, reservation));
        }
        let (parts, body) = request.into_parts();
        let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if declared > limits.max_body_bytes {
            return Err(Problem::body_too_large(&limits));
        }
        reservation.resize(declared)?;
        let body = timeout(read_timeout, collect_body(body, declared, &limits, &mut reservation)).await;
        let body = body.map_err(|_| Problem::body_timeout(read_timeout))??;
        Ok((Request::from_parts(parts, Body::from(body)), reservation))
    }
}

impl Reservation {
    /// Grows or shrinks the reservation to this size. On error, the reservation stays as it was.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Problem> {
        let bytes = if bytes > SMALL { bytes } else { 0 };
        let max = self.budget.limits.max_body_bytes_in_flight;
        let resized = self.budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reserved| {
            let reserved = reserved.saturating_sub(self.bytes).saturating_add(bytes);
            (bytes <= self.bytes || reserved <= max).then_some(reserved)
        });
        resized.map_err(|_| Problem::no_body_memory(&self.budget.limits))?;
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

async fn collect_body(
    body: Body,
    declared: usize,
    limits: &Limits,
    reservation: &mut Reservation,
) -> Result<Bytes, Problem> {
    let (mut collected, mut chunks) = (BytesMut::new(), body.into_data_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| Problem::incomplete_body())?;
        let bytes = collected.len() + chunk.len();
        if bytes == declared && bytes <= SMALL && collected.is_empty() {
            return Ok(chunk);
        }
        if bytes > limits.max_body_bytes {
            return Err(Problem::body_too_large(limits));
        }
        reservation.resize(bytes.max(declared))?;
        collected.extend_from_slice(&chunk);
    }
    Ok(collected.freeze())
}

/// Holds the guard until the response is sent or dropped. A response that is completely in memory releases it at once,
/// because the connection takes over such a body immediately.
pub(crate) fn hold_until_sent<T: Send + 'static>(guard: T, response: Response) -> Response {
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    response.map(|body| {
        Body::from_stream(body.into_data_stream().inspect(move |_| {
            let _held = &guard;
        }))
    })
}

/// Reads the small body of a rejected request, so that its connection can serve the next request. The response closes the
/// connection if the body is large or does not arrive: the rest of it would be taken for the next request.
pub(crate) async fn discard_body(request: Request, problem: Problem) -> Problem {
    if problem.is_closing() || request.body().size_hint().upper().is_none_or(|bytes| bytes > SMALL as u64) {
        return problem.closing();
    }
    let body = timeout(DISCARD_TIMEOUT, to_bytes(request.into_body(), SMALL)).await;
    if matches!(body, Ok(Ok(_))) { problem } else { problem.closing() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_never_exceed_the_budget_and_are_released() {
        let limits = Arc::new(Limits { max_body_bytes_in_flight: 10 * SMALL, ..Limits::default() });
        let budget = Arc::new(BodyMemoryBudget::new(&limits, Duration::from_secs(1)));
        let reserved = || budget.reserved.load(Ordering::Relaxed);
        let [mut one, mut other, mut small] = [(); 3].map(|()| Arc::clone(&budget).reservation());
        one.resize(8 * SMALL).expect("enough memory");
        other.resize(2 * SMALL).expect("enough memory");
        other.resize(2 * SMALL + 1).expect_err("no memory left");
        assert_eq!(reserved(), 10 * SMALL, "a failed resize changes nothing");
        small.resize(SMALL).expect("small bodies need no memory");
        small.resize(SMALL + 1).expect_err("no memory left");
        one.resize(7 * SMALL).expect("smaller");
        other.resize(3 * SMALL).expect("enough memory");
        drop((one, small));
        assert_eq!(reserved(), 3 * SMALL);
        other.resize(SMALL).expect("smaller");
        assert_eq!(reserved(), 0);
        drop(other);
        assert_eq!(reserved(), 0);
    }
}
