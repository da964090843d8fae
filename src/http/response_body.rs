//! JSON bodies of responses. Each ends with a line feed, so that a terminal shows its prompt on a new line, and `?pretty`
//! indents it.

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use http_body::{Frame, SizeHint};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::iter::once;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The query parameter that every route accepts.
const PRETTY: &str = "pretty";
const INDENT: &str = "  ";
/// Size of a part of an indented body.
const PIECE_BYTES: usize = 32 * 1024;

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

/// Removes the parameter `pretty` from the query, so that no handler sees it. Returns `true` if it asks for an indented
/// response, or the invalid value.
pub(super) fn take_pretty(request: &mut Request) -> Result<bool, String> {
    let name = |pair: &str| pair.split('=').next() == Some(PRETTY);
    let Some(query) = request.uri().query().filter(|query| query.split('&').any(name)) else {
        return Ok(false);
    };
    let value = query.split('&').rfind(|pair| name(pair)).and_then(|pair| pair.split_once('='));
    let is_pretty = match value.map_or("", |(_, value)| value) {
        "" | "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        other => Err(other.to_owned()),
    };
    let others: Vec<&str> = query.split('&').filter(|pair| !name(pair)).collect();
    let path = request.uri().path();
    let rest = if others.is_empty() { path.to_owned() } else { format!("{path}?{}", others.join("&")) };
    // A part of a valid URI is valid.
    if let Ok(uri) = rest.parse::<Uri>() {
        *request.uri_mut() = uri;
    }
    is_pretty
}

/// Indents the body of a JSON response. Other responses stay as they are.
pub(super) async fn indented(response: Response) -> Response {
    let content_type = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !matches!(content_type, Some(b"application/json" | b"application/problem+json")) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(body) = to_bytes(body, usize::MAX).await else {
        tracing::error!("failed to read the body of a response");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut indenter = Indenter::new(body);
    let first = indenter.next().unwrap_or_default();
    let body = if indenter.has_ended {
        if let Some(length) = parts.headers.get_mut(CONTENT_LENGTH) {
            *length = HeaderValue::from(first.len());
        }
        Body::from(first)
    } else {
        // Nested lists can become a hundred times as long. So they are never in memory as a whole.
        parts.headers.remove(CONTENT_LENGTH);
        Body::from_stream(stream::iter(once(first).chain(indenter).map(Ok::<_, Infallible>)))
    };
    Response::from_parts(parts, body)
}

/// Adds the line feed to JSON that another library encoded.
pub(super) async fn with_line_feed(response: Response) -> Response {
    let extended = async |body: Bytes| {
        let mut body = Vec::from(body);
        body.push(b'\n');
        body
    };
    with_new_body(response, extended).await
}

/// Reads the body of a response and replaces it.
async fn with_new_body(response: Response, new_body: impl AsyncFnOnce(Bytes) -> Vec<u8>) -> Response {
    let (mut parts, body) = response.into_parts();
    let Ok(body) = to_bytes(body, usize::MAX).await else {
        tracing::error!("failed to read the body of a response");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let body = new_body(body).await;
    if let Some(length) = parts.headers.get_mut(CONTENT_LENGTH) {
        *length = HeaderValue::from(body.len());
    }
    Response::from_parts(parts, Body::from(body))
}

/// Indents JSON in pieces, without decoding it, because decoding would change numbers and repeated keys of stored messages.
struct Indenter {
    json: Bytes,
    position: usize,
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    has_ended: bool,
}

impl Indenter {
    fn new(json: Bytes) -> Self {
        Self { json, position: 0, depth: 0, in_string: false, is_escaped: false, has_ended: false }
    }

    fn next_byte_if(&mut self, is_expected: impl Fn(u8) -> bool) -> Option<u8> {
        let next = self.json.get(self.position).copied().filter(|byte| is_expected(*byte))?;
        self.position += 1;
        Some(next)
    }

    fn new_line(&self, piece: &mut Vec<u8>) {
        piece.push(b'\n');
        piece.extend(INDENT.bytes().cycle().take(INDENT.len() * self.depth));
    }
}

impl Iterator for Indenter {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.has_ended {
            return None;
        }
        let mut piece = Vec::with_capacity(PIECE_BYTES.min(self.json.len() * 2) + 1024);
        while piece.len() < PIECE_BYTES {
            let Some(byte) = self.next_byte_if(|_| true) else {
                piece.push(b'\n');
                self.has_ended = true;
                break;
            };
            if self.in_string {
                piece.push(byte);
                self.in_string = self.is_escaped || byte != b'"';
                self.is_escaped = !self.is_escaped && byte == b'\\';
                continue;
            }
            match byte {
                b' ' | b'\n' | b'\r' | b'\t' => {}
                b'{' | b'[' => {
                    piece.push(byte);
                    while self.next_byte_if(|next| next.is_ascii_whitespace()).is_some() {}
                    if let Some(end) = self.next_byte_if(|next| matches!(next, b'}' | b']')) {
                        piece.push(end);
                    } else {
                        self.depth += 1;
                        self.new_line(&mut piece);
                    }
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.new_line(&mut piece);
                    piece.push(byte);
                }
                b',' => {
                    piece.push(byte);
                    self.new_line(&mut piece);
                }
                b':' => piece.extend(*b": "),
                _ => {
                    piece.push(byte);
                    self.in_string = byte == b'"';
                }
            }
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    fn indent(json: &[u8]) -> Vec<u8> {
        Indenter::new(Bytes::copy_from_slice(json)).flatten().collect()
    }

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

    #[test]
    fn nested_lists_are_indented_in_pieces() {
        let json = format!("{}{}1{}", "[".repeat(99), "1,".repeat(10_000), "]".repeat(99));
        let pieces: Vec<Vec<u8>> = Indenter::new(json.clone().into()).collect();
        assert!(pieces.len() > 4 && pieces.iter().all(|piece| piece.len() < PIECE_BYTES + 1024));
        let text = String::from_utf8(pieces.concat()).expect("UTF-8");
        assert_eq!(text.split_ascii_whitespace().collect::<String>(), json);
    }

    #[test]
    fn indented_json_keeps_every_value() {
        let json = r#"{"a":[1.0,12345678901234567890123, {"b":"\" {[,: \\","b":"é"}],"empty":{ },"none":[],"x":"\\"}"#;
        let expected = r#"{
  "a": [
    1.0,
    12345678901234567890123,
    {
      "b": "\" {[,: \\",
      "b": "é"
    }
  ],
  "empty": {},
  "none": [],
  "x": "\\"
}
"#;
        let once = indent(json.as_bytes());
        assert_eq!(String::from_utf8_lossy(&once), expected);
        assert_eq!(indent(&once), once);
        assert_eq!(indent(b"null\n"), b"null\n");
    }
}
