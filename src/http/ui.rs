//! The inspector at `/ui/`: a page that shows sessions, contexts, summaries and memory documents.
//!
//! Its files are in `src/http/ui/` and part of the binary. They are plain ES modules, so there is no build step. The page calls
//! the same API as every client, with the key that its user enters. To add a file, add its line to [`FILES`].

use super::error;
use axum::Router;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest as _, Sha256};
use std::sync::LazyLock;

/// The page may load its own files and call this service. It may neither contain scripts or styles nor turn text into
/// HTML, so that the text of a message stays text.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'",
);

/// A browser keeps the files, and asks each time if they have changed.
const CACHE: HeaderValue = HeaderValue::from_static("no-cache");

/// A file of the page.
struct File {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($name:literal: $content_type:literal,)*) => {
        &[$(File {
            name: $name,
            content_type: concat!($content_type, "; charset=utf-8"),
            text: include_str!(concat!("ui/", $name)),
        },)*]
    };
}

const FILES: &[File] = files! {
    "index.html": "text/html",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "api.js": "text/javascript",
    "app.js": "text/javascript",
    "context.js": "text/javascript",
    "diff.js": "text/javascript",
    "dom.js": "text/javascript",
    "dry_run.js": "text/javascript",
    "history.js": "text/javascript",
    "memory.js": "text/javascript",
    "messages.js": "text/javascript",
    "models.js": "text/javascript",
    "revisions.js": "text/javascript",
    "session.js": "text/javascript",
    "sessions.js": "text/javascript",
    "timeline.js": "text/javascript",
};

/// The entity tag of all files: they change together, with the binary.
static ETAG: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = FILES.iter().fold(Sha256::new(), |hash, file| hash.chain_update(file.text));
    let tag = format!("\"{}\"", hex::encode(hash.finalize()));
    HeaderValue::from_str(&tag).unwrap_or(HeaderValue::from_static("\"precis\""))
});

/// Returns the routes of the page.
pub(super) fn pages<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        // Relative, so that the address is right behind a proxy that adds a prefix.
        .route("/ui", get(async || (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, "ui/")])))
        .route("/ui/", get(serve))
        .route("/ui/{file}", get(serve))
}

/// Returns a file, or 304 if the browser has it.
async fn serve(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let name = uri.path().rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("index.html");
    let Some(File { content_type, text, .. }) = FILES.iter().find(|file| file.name == name) else {
        return error::route_not_found(&method, &uri, |_| false).into_response();
    };
    let common = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, CACHE),
        (header::ETAG, ETAG.clone()),
    ];
    if headers.get_all(header::IF_NONE_MATCH).iter().any(|tag| *tag == *ETAG) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    (common, [(header::CONTENT_TYPE, *content_type)], *text).into_response()
}
