//! The OpenAPI document, made from the routes, and the page that shows it.

use super::api_routes::ApiRoutes;
use super::error;
use super::response_body::{self, Json};
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use bytes::Bytes;
use operations::operations;
use serde_json::json;
use utoipa::OpenApi;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa_swagger_ui::{Config, SwaggerUi};

mod links;
pub(super) mod operations;
pub(super) mod responses;
mod schemas;

/// A memory for LLM agents that fits their context window.
#[derive(OpenApi)]
#[openapi(
    info(title = "precis", license(name = "Apache-2.0", identifier = "Apache-2.0")),
    servers((url = "/", description = "The service that returned this document")),
    components(schemas(error::Problem)),
    tags(
        (name = "sessions", description = "Sessions: exchanges, contexts, history, export and import"),
        (name = "summaries", description = "Consolidation of sessions, and the revisions of their summaries"),
        (name = "users", description = "Memory documents, and the erasure of users"),
        (name = "retention", description = "The time after which sessions are erased: of the tenant, of users and of sessions"),
        (name = "search", description = "Search in the messages of all sessions"),
        (name = "tools", description = "Tools and instructions for agents; /mcp offers the same tools by MCP"),
        (name = "operations", description = "Health and metrics, for operators"),
    )
)]
struct Document;

/// Returns the document of routes.
pub(super) fn document(routes: impl IntoIterator<Item = ApiRoutes>) -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    for routes in routes {
        document.merge(routes.into_openapi());
    }
    let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "An API key (`precis_…`), created by `precis keys create`. Each scope (`read`, `write`, `admin`) includes the scopes before it. \
         A service without any key that is not reachable from the network needs none.",
    ));
    let components = document.components.get_or_insert_default();
    components.add_security_scheme(responses::SECURITY_SCHEME, SecurityScheme::Http(key.build()));
    components.responses.extend(responses::all());
    for name in REQUESTS {
        components.schemas.entry((*name).to_owned()).and_modify(schemas::deny_unknown_fields);
    }
    for name in OVERLAPPING {
        components.schemas.entry((*name).to_owned()).and_modify(schemas::allow_several);
    }
    schemas::name_pages(&mut components.schemas);
    components.schemas.values_mut().for_each(schemas::open_objects_without_fields);
    for item in document.paths.paths.values_mut() {
        for (_, operation) in operations(item) {
            schemas::remove_null(operation);
            schemas::rename_pages(operation);
            links::add(operation);
        }
    }
    document
}

/// The bodies whose unknown fields are rejected, and the objects in them.
const REQUESTS: &[&str] = &[
    "ContextRequest",
    "EditRequest",
    "ForkRequest",
    "MemoryRequest",
    "MessagesExchange",
    "QuestionAndAnswer",
    "RetentionRequest",
    "SessionPatch",
    "Skill",
    "SyncRequest",
];

/// The unions with types of the same members. A linter does not see that their values differ.
const OVERLAPPING: &[&str] = &["AnthropicBlock", "AnthropicDocumentSource", "OpenAiMessage", "ToolRequest"];

const PATH: &str = "/openapi.json";

/// Returns the routes `/`, `/openapi.json` and `/docs`. The page is part of the binary, so that it works without internet.
pub(super) fn page<S: Clone + Send + Sync + 'static>(document: &utoipa::openapi::OpenApi) -> Router<S> {
    let config = Config::from(PATH).validator_url("none").try_it_out_enabled(true);
    let page = SwaggerUi::new("/docs").config(config);
    let page = Router::from(page).layer(middleware::from_fn(adapt_page_response));
    // Encoded once, because a client can ask for it thousands of times per second.
    let encoded = document.to_json().unwrap_or_else(|_| unreachable!("the document is JSON"));
    let encoded = Bytes::from(encoded + "\n");
    page.route(PATH, get(async || response_body::json_response(encoded))).route("/", get(index))
}

/// Returns the 404 for all paths below `/.well-known`. MCP clients look there for an authorization server before they send their key.
pub(super) fn well_known<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let not_found = async |method: Method, uri: Uri| error::route_not_found(&method, &uri, |_| false);
    Router::new().route("/.well-known/{*rest}", any(not_found))
}

/// Names the places to begin with, for people who open the address of the service.
async fn index() -> impl IntoResponse {
    Json(json!({
        "service": "precis", "version": env!("CARGO_PKG_VERSION"),
        "inspector": "/ui/", "docs": "/docs", "openapi": "/openapi.json", "ready": "/readyz",
    }))
}

/// The content security policy of the page: it may run its own scripts and call this service. Its style sheet contains
/// images, and its elements have inline styles.
const PAGE_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// Replaces the plain-text 404 of the page by a problem document, and sets the policy.
async fn adapt_page_response(method: Method, uri: Uri, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if response.status() == StatusCode::NOT_FOUND {
        return error::route_not_found(&method, &uri, |_| false).into_response();
    }
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, PAGE_POLICY);
    let is_json = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if is_json { response_body::with_line_feed(response).await } else { response }
}
