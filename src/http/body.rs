//! The body of a request: whole, bounded and in time, before anything is done with it. So a client that sends slowly
//! takes nobody's turn to work.

use super::error::Problem;
use super::limits::Limits;
use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::time::timeout;

/// Reads the body. One that says that it is too large is refused before any of it is read.
pub(super) async fn whole(
    State(limits): State<Limits>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if request.body().is_end_stream() {
        return Ok(next.run(request).await);
    }
    let (parts, body) = request.into_parts();
    if body.size_hint().lower() > limits.max_body_bytes as u64 {
        return Err(Problem::too_large(&limits));
    }
    let read = timeout(limits.read_timeout, Limited::new(body, limits.max_body_bytes).collect()).await;
    let read = read.map_err(|_| Problem::too_slow(&limits))?.map_err(|error| {
        if error.is::<LengthLimitError>() { Problem::too_large(&limits) } else { Problem::broken_off() }
    })?;
    Ok(next.run(Request::from_parts(parts, Body::from(read.to_bytes()))).await)
}
