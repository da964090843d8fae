//! JSON bodies of responses. Each ends with a line feed, so that a terminal shows its prompt on a new line.

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Shorter pieces of a body are joined, because each piece costs a step of the connection.
const MIN_PIECE_BYTES: usize = 2048;

/// A value as the JSON body of a response.
pub(super) struct Json<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let mut body = Vec::with_capacity(256);
        match serde_json::to_writer(&mut body, &self.0) {
            Ok(()) => {
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

/// A body in pieces, so that large ones need no copy. Its length is known.
#[derive(Debug, Default)]
pub(super) struct BodyPieces {
    pieces: VecDeque<Bytes>,
    /// The end of the body so far.
    last: Vec<u8>,
}

impl BodyPieces {
    /// Appends a text by copying it.
    pub(super) fn push_str(&mut self, text: &str) {
        self.last.extend_from_slice(text.as_bytes());
    }

    /// Appends bytes, without a copy if they are many.
    pub(super) fn push(&mut self, piece: Bytes) {
        if piece.len() < MIN_PIECE_BYTES {
            self.last.extend_from_slice(&piece);
        } else {
            self.end_last();
            self.pieces.push_back(piece);
        }
    }

    fn end_last(&mut self) {
        if !self.last.is_empty() {
            self.pieces.push_back(std::mem::take(&mut self.last).into());
        }
    }

    pub(super) fn into_body(mut self) -> Body {
        self.end_last();
        Body::new(self)
    }
}

impl Extend<Bytes> for BodyPieces {
    fn extend<I: IntoIterator<Item = Bytes>>(&mut self, pieces: I) {
        for piece in pieces {
            self.push(piece);
        }
    }
}

impl HttpBody for BodyPieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.pieces.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn body_in_pieces_has_a_known_length() {
        let large = Bytes::from(vec![b'x'; MIN_PIECE_BYTES]);
        let mut body = BodyPieces::default();
        body.push_str("a");
        body.push(Bytes::from_static(b"b"));
        body.push(large.clone());
        body.push_str("c");
        let pieces = body.into_body();
        assert_eq!(pieces.size_hint().exact(), Some(3 + large.len() as u64));
        let pieces: Vec<Bytes> =
            pieces.into_data_stream().map(|piece| piece.expect("a piece")).collect().await;
        assert_eq!(pieces, [Bytes::from_static(b"ab"), large.clone(), Bytes::from_static(b"c")]);
        assert_eq!(pieces[1].as_ptr(), large.as_ptr(), "not copied");
    }
}
