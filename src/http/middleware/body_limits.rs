//! Buffering of request bodies within limits of size, time and memory.
//!
//! The body is complete before the request competes for a work permit, so that slow clients hold no permits.
//! `tower_http`'s limit and timeout layers do not replace this: they have no common memory budget, and their errors have
//! neither a problem document nor the limit for the metrics.

use super::admission::Admission;
use crate::capacity::{Capacity, Held, Work, kib};
use crate::config::Limits;
use crate::http::error::Problem;
use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Bodies up to this size usually arrive with the headers. They need no reservation, because the limit of requests in
/// flight bounds their memory; so large bodies never keep small ones out. If such a request is rejected, its
/// body is discarded and its connection can be reused. For larger bodies it is closed instead.
const SMALL: usize = 16 * 1024;

/// Longest time for the small body of a rejected request to arrive. It usually arrives with the head.
const DISCARD_TIMEOUT: Duration = Duration::from_millis(100);

/// Responses up to this size are not counted, because the limit of connections bounds their memory.
const SMALL_RESPONSE: usize = 64 * 1024;

/// The memory that the body of one request holds; dropping it releases the memory.
#[derive(Debug)]
pub(crate) struct Reservation<'w> {
    work: &'w Work,
    capacity: Arc<Capacity>,
    held: Option<Held>,
}

/// Buffers the body of a request, and reserves memory for it. A body whose declared length is too large is rejected before any
/// of it is read. A body of a declared length waits for its memory before it is read; one of unknown length is rejected as
/// soon as the memory does not suffice, because it holds memory already.
pub(crate) async fn buffer<'w>(
    admission: &Admission,
    work: &'w Work,
    request: Request,
) -> Result<(Request, Option<Reservation<'w>>, usize), Problem> {
    if request.body().is_end_stream() {
        return Ok((request, None, 0));
    }
    let (limits, read_timeout) = (admission.limits(), admission.read_timeout());
    let (parts, body) = request.into_parts();
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if declared > limits.max_body_bytes {
        return Err(Problem::body_too_large(limits));
    }
    let is_small = body.size_hint().upper().is_some_and(|upper| upper <= SMALL as u64);
    let mut reservation = None;
    if !is_small {
        let reserved = Reservation::new(admission, work, declared).await;
        reservation = Some(reserved.map_err(Problem::closing)?);
    }
    let body = collect_body(body, declared, limits, reservation.as_mut());
    let body = timeout(read_timeout, body).await;
    let body = body.map_err(|_| Problem::body_timeout(read_timeout))??;
    let bytes = body.len();
    Ok((Request::from_parts(parts, Body::from(body)), reservation, bytes))
}

impl<'w> Reservation<'w> {
    /// Waits for the memory of a body.
    pub(crate) async fn new(admission: &Admission, work: &'w Work, bytes: usize) -> Result<Self, Problem> {
        let capacity = Arc::clone(admission.capacity());
        let mut held = None;
        if bytes > SMALL {
            let wait = Some(admission.limits().queue_timeout);
            let acquired = work.acquire(&capacity.bodies, kib(bytes), wait).await;
            held = Some(acquired.map_err(Problem::overloaded)?);
        }
        Ok(Self { work, capacity, held })
    }

    /// Grows or shrinks the reservation to this size. It never waits: a request that holds memory and waits for more could
    /// deadlock with another one. On error, the reservation stays as it was.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Problem> {
        let needed = if bytes > SMALL { kib(bytes) } else { 0 };
        if let Some(held) = &mut self.held {
            held.shrink(needed);
        }
        let grown = self.work.grow(&self.capacity.bodies, &mut self.held, needed);
        grown.map_err(|overloaded| Problem::overloaded(overloaded).closing())
    }
}

async fn collect_body(
    body: Body,
    declared: usize,
    limits: &Limits,
    mut reservation: Option<&mut Reservation<'_>>,
) -> Result<Bytes, Problem> {
    let mut chunks = body.into_data_stream();
    // A vector that grows is copied, and its copies are in memory at the same time.
    let mut collected = BytesMut::with_capacity(declared);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| Problem::incomplete_body())?;
        let bytes = collected.len() + chunk.len();
        if bytes > limits.max_body_bytes {
            return Err(Problem::body_too_large(limits));
        }
        if let Some(reservation) = &mut reservation {
            reservation.resize(bytes.max(declared))?;
        }
        collected.extend_from_slice(&chunk);
    }
    Ok(collected.freeze())
}

/// The body of a response with a guard, which is dropped when the connection has written the body, or is closed.
struct HeldBody<T> {
    body: Bytes,
    _guard: T,
}

impl<T> AsRef<[u8]> for HeldBody<T> {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// Ends the work of a request. A large response holds its memory until it is sent or dropped, so that clients that do not
/// read use up the memory of their key and no other.
pub(crate) async fn finish(work: &Work, response: Response) -> Response {
    let bytes = response.body().size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    let Some(bytes) = bytes else {
        let memory = work.finish(0);
        return hold_until_sent(memory, response);
    };
    match work.finish(if bytes > SMALL_RESPONSE { bytes } else { 0 }) {
        Some(memory) => hold_until_written(memory, response).await,
        None => response,
    }
}

/// Holds the guard until the body of a response, which is in memory, is written or dropped.
pub(crate) async fn hold_until_written<T: Send + 'static>(guard: T, response: Response) -> Response {
    let (parts, body) = response.into_parts();
    match to_bytes(body, usize::MAX).await {
        Ok(body) => {
            let held = Bytes::from_owner(HeldBody { body, _guard: guard });
            Response::from_parts(parts, Body::from(held))
        }
        Err(_) => Problem::internal().into_response(),
    }
}

/// Holds the guard until a response of unknown length is sent or dropped. A response that is completely in memory releases it
/// at once.
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
