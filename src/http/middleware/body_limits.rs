//! The body of a request: whole, bounded and in time, before anything is done with it. So a client that sends slowly
//! takes nobody's turn to work. And the memory that all bodies take together.

use crate::http::error::Problem;
use crate::http::limits::Limits;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tokio::time::timeout;

/// A body up to this size has mostly arrived with its head: it takes no reservation, since the number of requests bounds what
/// such bodies take, and so large ones never keep small ones out. Of a refused request, the connection is used on; a
/// larger body would have to be taken in first.
const SMALL: usize = 64 * 1024;

/// The bytes of large bodies that there may be at a time.
#[derive(Debug)]
pub(crate) struct BodyMemoryBudget {
    pub(crate) limits: Limits,
    reserved: AtomicUsize,
}

/// What one request has of them, until it goes. It is taken or refused at once and never waited for: whoever waits
/// while it holds some might wait for others that do the same.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<BodyMemoryBudget>,
    bytes: usize,
}

impl BodyMemoryBudget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, reserved: AtomicUsize::new(0) }
    }

    /// A reservation of nothing yet.
    pub(crate) fn reservation(self: Arc<Self>) -> Reservation {
        Reservation { budget: self, bytes: 0 }
    }
}

impl Reservation {
    /// Makes it large enough for so many bytes, or smaller again.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Problem> {
        let (bytes, most) =
            (if bytes > SMALL { bytes } else { 0 }, self.budget.limits.max_body_bytes_in_flight);
        let resized = self.budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reserved| {
            let reserved = reserved.saturating_sub(self.bytes).saturating_add(bytes);
            (bytes <= self.bytes || reserved <= most).then_some(reserved)
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

/// Reads the body. One that says that it is too large is refused before any of it is read.
pub(crate) async fn buffer_body(
    State(budget): State<Arc<BodyMemoryBudget>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if request.body().is_end_stream() {
        return Ok(next.run(request).await);
    }
    let (parts, body) = request.into_parts();
    let limits = budget.limits;
    let said = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if said > limits.max_body_bytes {
        return Err(Problem::body_too_large(&limits));
    }
    let mut reservation = budget.reservation();
    reservation.resize(said)?;
    let read = timeout(limits.read_timeout, collect_body(body, said, &limits, &mut reservation)).await;
    let read = read.map_err(|_| Problem::body_timeout(&limits))??;
    let answer = next.run(Request::from_parts(parts, Body::from(read))).await;
    drop(reservation);
    Ok(answer)
}

async fn collect_body(
    body: Body,
    said: usize,
    limits: &Limits,
    reservation: &mut Reservation,
) -> Result<Bytes, Problem> {
    let (mut whole, mut chunks) = (BytesMut::new(), body.into_data_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| Problem::incomplete_body())?;
        let bytes = whole.len() + chunk.len();
        if bytes > limits.max_body_bytes {
            return Err(Problem::body_too_large(limits));
        }
        reservation.resize(bytes.max(said))?;
        whole.extend_from_slice(&chunk);
    }
    Ok(whole.freeze())
}

/// A body that keeps something until it is sent, or given up.
#[derive(Debug)]
struct GuardedBody<T> {
    body: Body,
    _guard: T,
}

/// Such a body. What is in memory as a whole is taken over by the connection at once, and keeps nothing.
pub(crate) fn hold_until_sent<T: Unpin + Send + 'static>(guard: T, answer: Response) -> Response {
    if answer.body().size_hint().exact().is_some() {
        return answer;
    }
    answer.map(|body| Body::new(GuardedBody { body, _guard: guard }))
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The refusal of a request whose body is not read.
pub(crate) fn close_if_body_pending(request: &Request, problem: Problem) -> Problem {
    let most = request.body().size_hint().upper();
    if most.is_some_and(|bytes| bytes <= SMALL as u64) { problem } else { problem.closing() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_never_exceed_the_whole_and_come_back() {
        let mut limits = Limits::tiny();
        limits.max_body_bytes_in_flight = 10 * SMALL;
        let budget = Arc::new(BodyMemoryBudget::new(limits));
        let reserved = || budget.reserved.load(Ordering::Relaxed);
        let [mut one, mut other, mut small] = [(); 3].map(|()| Arc::clone(&budget).reservation());
        one.resize(8 * SMALL).expect("room");
        other.resize(2 * SMALL).expect("room");
        other.resize(2 * SMALL + 1).expect_err("no room");
        assert_eq!(reserved(), 10 * SMALL, "what was there before stays");
        small.resize(SMALL).expect("takes nothing");
        small.resize(SMALL + 1).expect_err("no room");
        one.resize(7 * SMALL).expect("less");
        other.resize(3 * SMALL).expect("room");
        drop((one, small));
        assert_eq!(reserved(), 3 * SMALL);
        other.resize(SMALL).expect("less");
        assert_eq!(reserved(), 0);
        drop(other);
        assert_eq!(reserved(), 0);
    }
}
