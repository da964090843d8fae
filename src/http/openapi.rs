//! The OpenAPI document, made of what stands at the handlers, and the page that shows it.

use super::{
    consolidations, contexts, error, exchanges, memory, messages, operation, revisions, sessions, users,
};
use axum::Router;
use axum::extract::Request;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use utoipa::OpenApi;
use utoipa_swagger_ui::{Config, SwaggerUi};

/// A memory for LLM agents that fits their context window.
#[derive(OpenApi)]
#[openapi(
    info(title = "precis", license(name = "Apache-2.0", identifier = "Apache-2.0")),
    paths(
        exchanges::record,
        contexts::build,
        messages::list,
        sessions::list,
        sessions::get,
        sessions::patch,
        sessions::erase,
        consolidations::consolidate,
        revisions::list,
        revisions::get,
        revisions::restore,
        memory::read,
        memory::write,
        memory::revisions,
        users::erase,
        operation::livez,
        operation::readyz,
        operation::metrics,
    ),
    tags(
        (name = "memory", description = "Turns in, contexts out"),
        (name = "summary", description = "How the summary came to be, and the way back"),
        (name = "users", description = "Memory documents"),
        (name = "operation", description = "For whoever runs it"),
    )
)]
struct Document;

/// The document.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

/// The document as it is committed: `openapi/openapi.json`.
///
/// # Errors
/// A value of it can't be written as JSON.
pub fn json() -> Result<String, serde_json::Error> {
    Ok(document().to_pretty_json()? + "\n")
}

/// `/openapi.json`, and `/docs`: all of it is in the binary, so that it works without internet.
pub(super) fn page<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let config = Config::default().validator_url("none").try_it_out_enabled(true);
    let page = SwaggerUi::new("/docs").url("/openapi.json", document()).config(config);
    Router::from(page).layer(middleware::from_fn(with_problems))
}

/// The page knows nothing of problem documents.
async fn with_problems(method: Method, uri: Uri, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    match response.status() {
        StatusCode::NOT_FOUND => error::no_route(method, uri).await.into_response(),
        _ => response,
    }
}
