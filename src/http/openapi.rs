//! The OpenAPI document, made of what stands at the handlers, and the page that shows it.

use super::middleware::auth::Access;
use super::routes::archives::MEDIA_TYPE;
use super::routes::{
    archives, consolidations, contexts, exchanges, health, memory, messages, revisions, search, sessions,
    skills, tools, users,
};
use super::{chat, error};
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use utoipa::OpenApi;
use utoipa::openapi::RefOr;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa_swagger_ui::{Config, SwaggerUi};

mod bodies;
mod links;
pub(super) mod parameters;
pub(super) mod responses;
pub(super) mod schemas;

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
        archives::export,
        archives::import,
        consolidations::consolidate,
        revisions::list,
        revisions::get,
        revisions::restore,
        memory::read,
        memory::write,
        memory::revisions,
        users::erase,
        search::search,
        tools::list,
        tools::call,
        skills::memory,
        health::livez,
        health::readyz,
        health::metrics,
    ),
    components(schemas(
        chat::ChatMessage,
        chat::ContentBody,
        chat::ContentPart,
        chat::ToolCall,
        error::Problem,
        parameters::Id,
        tools::ToolRequest,
    )),
    tags(
        (name = "memory", description = "Turns in, contexts out"),
        (name = "summary", description = "How the summary came to be, and the way back"),
        (name = "users", description = "Memory documents"),
        (name = "tools", description = "What an agent calls, and what it should know; the same tools by MCP: /mcp"),
        (name = OPERATION, description = "For whoever runs it"),
    )
)]
struct Document;

/// The tag of what is about the service: nothing there waits for its turn, or is counted.
const OPERATION: &str = "operation";

/// The document.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("precis_…").description(Some(
        "An API key, made by `precis keys create`. Its scope, `read`, `write` or `admin`, contains those before it. \
         A service that has no key at all, and is not open to the network, asks for none.",
    ));
    let components = document.components.get_or_insert_default();
    components.add_security_scheme(KEY, SecurityScheme::Http(key.build()));
    components.responses.extend(responses::all());
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            bodies::close(operation, components);
            links::add(operation);
            parameters::without_null(operation);
            let scope = Access::of(&method, path).scope();
            if let Some(scope) = scope {
                operation.security = Some(vec![SecurityRequirement::new(KEY, [scope.as_str()])]);
            }
            responses::complete(operation, scope.is_some());
        }
    }
    document
}

/// The name of the security scheme.
const KEY: &str = "key";

fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    let operations = [
        (Method::GET, &mut item.get),
        (Method::HEAD, &mut item.head),
        (Method::POST, &mut item.post),
        (Method::PUT, &mut item.put),
        (Method::PATCH, &mut item.patch),
        (Method::DELETE, &mut item.delete),
    ];
    operations.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// Whether a body of it is read or written line by line.
fn is_stream(operation: &Operation) -> bool {
    let body = operation.request_body.iter().filter_map(|body| match body {
        RefOr::T(body) => Some(body.content.contains_key(MEDIA_TYPE)),
        RefOr::Ref(_) => None,
    });
    let answers = operation.responses.responses.values().filter_map(|response| match response {
        RefOr::T(response) => Some(response.content.contains_key(MEDIA_TYPE)),
        RefOr::Ref(_) => None,
    });
    body.chain(answers).any(|lines| lines)
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

/// What the page may do: run its own scripts, and call this service. Its style sheet has pictures in it, and its elements
/// have styles.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// The page knows nothing of problem documents, nor of what it may do.
async fn with_problems(method: Method, uri: Uri, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if response.status() == StatusCode::NOT_FOUND {
        return error::route_not_found(method, uri).await.into_response();
    }
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY);
    response
}
