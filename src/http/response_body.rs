//! JSON bodies of responses. Each ends with a line feed, so that a terminal shows its prompt on a new line.

use axum::body::{Body, to_bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// A value as the JSON body of a response.
pub(super) struct Json<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(mut body) => {
                body.push(b'\n');
                json_response(body)
            }
            Err(error) => {
                tracing::error!(%error, "failed to encode a response");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// Returns a response with a body of encoded JSON.
pub(super) fn json_response(body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Adds the line feed to JSON that another library encoded.
pub(super) async fn with_line_feed(response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    let Ok(body) = to_bytes(body, usize::MAX).await else {
        tracing::error!("failed to read the body of a response");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut body = Vec::from(body);
    body.push(b'\n');
    if let Some(length) = parts.headers.get_mut(CONTENT_LENGTH) {
        *length = HeaderValue::from(body.len());
    }
    Response::from_parts(parts, Body::from(body))
}
