//! Names of the HTTP headers that more than one file uses, and the media type of a request.

use axum::http::{HeaderMap, HeaderName, header};

/// The id of a request. Clients may choose it; every response has it.
pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The key that makes repeating an exchange safe.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Tells that the response to an exchange is that of an earlier request.
pub(super) const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The session of an MCP connection, percent-encoded as in a path.
pub(super) const MCP_SESSION: HeaderName = HeaderName::from_static("x-precis-session");
/// The user of an MCP connection, percent-encoded as in a path.
pub(super) const MCP_USER: HeaderName = HeaderName::from_static("x-precis-user");
/// The headers of MCP that pages of other origins must be allowed to send.
pub(super) const MCP_HEADERS: [HeaderName; 5] = [
    MCP_SESSION,
    MCP_USER,
    HeaderName::from_static("mcp-protocol-version"),
    HeaderName::from_static("mcp-method"),
    HeaderName::from_static("mcp-name"),
];

/// Returns the media type of the body in lower case and without parameters.
pub(super) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let media_type = media_type(headers);
    media_type == "application/json"
        || (media_type.starts_with("application/") && media_type.ends_with("+json"))
}
