//! Names of the HTTP headers that more than one file uses, and the media type of a request.

use axum::http::{HeaderMap, HeaderName, header};

/// The id of a request. Clients may choose it; every response has it.
pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The key that makes repeating an exchange safe.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Tells that the response to an exchange is that of an earlier request.
pub(super) const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The session of a request by MCP or by the proxy, percent-encoded as in a path.
pub(super) const X_PRECIS_SESSION: HeaderName = HeaderName::from_static("x-precis-session");
/// The user of a request by MCP or by the proxy, percent-encoded as in a path.
pub(super) const X_PRECIS_USER: HeaderName = HeaderName::from_static("x-precis-user");
/// The API key of precis, if `authorization` has the key for an upstream of the proxy.
pub(super) const X_PRECIS_KEY: HeaderName = HeaderName::from_static("x-precis-key");
/// The headers of MCP that pages of other origins must be allowed to send.
pub(super) const MCP_HEADERS: [HeaderName; 5] = [
    X_PRECIS_SESSION,
    X_PRECIS_USER,
    HeaderName::from_static("mcp-protocol-version"),
    HeaderName::from_static("mcp-method"),
    HeaderName::from_static("mcp-name"),
];

/// Returns the media type of the body in lower case and without parameters.
pub(super) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Returns the content type of text if the client prefers Markdown or plain text to JSON: the type with the highest quality in
/// `accept`, or the first one of these.
pub(super) fn preferred_text(headers: &HeaderMap) -> Option<&'static str> {
    let mut best: Option<(f32, Option<&'static str>)> = None;
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in values.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let text = match parts.next().unwrap_or_default().to_ascii_lowercase().as_str() {
            "text/markdown" => Some("text/markdown; charset=utf-8"),
            "text/plain" | "text/*" => Some("text/plain; charset=utf-8"),
            "application/json" | "application/*" | "*/*" => None,
            _ => continue,
        };
        let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
        if quality > 0.0 && best.is_none_or(|(highest, _)| quality > highest) {
            best = Some((quality, text));
        }
    }
    best.and_then(|(_, text)| text)
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let media_type = media_type(headers);
    media_type == "application/json"
        || (media_type.starts_with("application/") && media_type.ends_with("+json"))
}
