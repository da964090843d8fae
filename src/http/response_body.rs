//! JSON bodies of responses. Each ends with a line feed, so that a terminal shows its prompt on a new line, and `?pretty`
//! indents it.

use crate::blocking;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// The query parameter that every route accepts.
const PRETTY: &str = "pretty";
const INDENT: &str = "  ";

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
    let indented = async |body: Bytes| blocking::spawn_cpu_if_large(body.len(), move || indent(&body)).await;
    with_new_body(response, indented).await
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

/// Indents JSON without decoding it, because decoding would change numbers and repeated keys of stored messages.
fn indent(json: &[u8]) -> Vec<u8> {
    let mut indented = Vec::with_capacity(json.len() * 2);
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    let new_line = |indented: &mut Vec<u8>, depth: usize| {
        indented.push(b'\n');
        indented.extend(INDENT.bytes().cycle().take(INDENT.len() * depth));
    };
    let mut rest = json.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if in_string {
            indented.push(byte);
            in_string = is_escaped || byte != b'"';
            is_escaped = !is_escaped && byte == b'\\';
            continue;
        }
        match byte {
            b' ' | b'\n' | b'\r' | b'\t' => {}
            b'{' | b'[' => {
                indented.push(byte);
                while rest.next_if(u8::is_ascii_whitespace).is_some() {}
                if let Some(end) = rest.next_if(|next| matches!(next, b'}' | b']')) {
                    indented.push(end);
                } else {
                    depth += 1;
                    new_line(&mut indented, depth);
                }
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut indented, depth);
                indented.push(byte);
            }
            b',' => {
                indented.push(byte);
                new_line(&mut indented, depth);
            }
            b':' => indented.extend(*b": "),
            _ => {
                indented.push(byte);
                in_string = byte == b'"';
            }
        }
    }
    indented.push(b'\n');
    indented
}

#[cfg(test)]
mod tests {
    use super::*;

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
