//! Errors as answers: problem documents (RFC 9457). This is the one table of errors and status codes, and the one
//! place that logs them.
//!
//! Each error has two texts: `detail`, which tells the client what to do, and what goes to the log.

use super::extract::redact_path;
use crate::domain::error_chain::ErrorChain;
use crate::domain::export_format::LineError;
use crate::domain::tool::{Tool, ToolError};
use crate::domain::validation::FieldError;
use crate::service::{Error, StoreError};
use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::any::Any;
use utoipa::ToSchema;

mod access;
mod limits;

pub(super) use limits::ExceededLimit;

/// What the types of problems begin with.
const TYPE: &str = "urn:precis:problem:";
/// Fields that an answer lists, at most: a request can have a million wrong ones.
const MAX_ERRORS: usize = 100;
/// What a client waits before it repeats a request that met a database that does not answer.
const RETRY_SECONDS: u32 = 2;

/// A problem document.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Problem {
    /// Stable name of the kind of problem.
    #[serde(rename = "type")]
    #[schema(example = "urn:precis:problem:session-not-found")]
    kind: String,
    /// The kind in words.
    title: String,
    /// The HTTP status.
    status: u16,
    /// What to do about it.
    detail: String,
    /// The fields that are wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
    #[serde(skip)]
    retry_after: Option<u32>,
    #[serde(skip)]
    exceeded_limit: Option<&'static ExceededLimit>,
    /// The rest of the body is not read: the client must not send its next request after it.
    #[serde(skip)]
    closing: bool,
}

impl Problem {
    fn new(status: StatusCode, name: &str, title: &str, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("{TYPE}{name}"),
            title: title.to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            retry_after: None,
            exceeded_limit: None,
            closing: false,
        }
    }

    fn retry_after(self, seconds: u32) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// The same, with the connection closed behind it.
    pub(crate) fn closing(self) -> Self {
        Self { closing: true, ..self }
    }

    /// What to do about it.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// 422: well-formed, but not what the interface takes.
    pub(crate) fn invalid(mut errors: Vec<FieldError>) -> Self {
        let more = errors.len().saturating_sub(MAX_ERRORS);
        errors.truncate(MAX_ERRORS);
        let fields: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        let detail = format!("Correct these fields and send the request again: {}{more}.", fields.join(", "));
        Self {
            errors,
            ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-input", "Invalid input", detail)
        }
    }

    /// 422 for one field.
    pub(crate) fn invalid_field(field: &str, detail: impl Into<String>) -> Self {
        Self::invalid(vec![FieldError { field: field.to_owned(), detail: detail.into() }])
    }

    /// 400: not JSON.
    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed-json", "Malformed JSON", detail)
    }

    /// 400: the path or the query can't be read.
    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "Bad request", detail)
    }

    /// 404: the path names no tool. The text is for the model, which may have made the name up.
    pub(crate) fn tool_not_found(tools: impl Iterator<Item = Tool>) -> Self {
        let ToolError(detail) = ToolError::unknown_tool(tools);
        Self::new(StatusCode::NOT_FOUND, "tool-not-found", "Tool not found", detail)
    }

    /// 400: the client went away, or its connection did.
    pub(crate) fn incomplete_body() -> Self {
        Self::bad_request("The body broke off. Send the request again.")
    }

    /// 415.
    pub(crate) fn unsupported_media_type() -> Self {
        let detail = "Send JSON, with the header content-type: application/json.";
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported-media-type",
            "Unsupported media type",
            detail,
        )
    }
}

impl Problem {
    /// 415 for JSON lines.
    pub(crate) fn unsupported_media_type_for_lines() -> Self {
        let detail = "Send JSON lines, with the header content-type: application/x-ndjson.";
        Self { detail: detail.to_owned(), ..Self::unsupported_media_type() }
    }

    /// 422 for a line of an import.
    fn invalid_line(error: LineError) -> Self {
        let line = error.line;
        let at = |field: &str| if field.is_empty() { String::new() } else { format!(", {field}") };
        let errors = error.wrong.into_iter().map(|invalid| FieldError {
            field: format!("line {line}{}", at(&invalid.field)),
            detail: invalid.detail,
        });
        Self::invalid(errors.collect())
    }
}

impl From<FieldError> for Problem {
    fn from(error: FieldError) -> Self {
        Self::invalid(vec![error])
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        use StatusCode as S;
        match error {
            Error::SessionNotFound => {
                let detail = "There is no session of this id. A session begins with its first exchange.";
                Self::new(S::NOT_FOUND, "session-not-found", "Session not found", detail)
            }
            Error::RevisionNotFound => {
                let detail = "The session has no such revision. GET its revisions for those that it has.";
                Self::new(S::NOT_FOUND, "revision-not-found", "Revision not found", detail)
            }
            Error::UserNotFound => {
                let detail = "The user has no memory document and no session.";
                Self::new(S::NOT_FOUND, "user-not-found", "User not found", detail)
            }
            Error::SessionUserMismatch => {
                let detail = "The session belongs to another user, and that can't change. \
                    Leave user_id out, or use another session.";
                Self::new(S::CONFLICT, "session-user-mismatch", "The session belongs to another user", detail)
            }
            Error::IdempotencyKeyReused => {
                let detail =
                    "This Idempotency-Key came with another body before. Make a new key for each exchange.";
                Self::new(S::UNPROCESSABLE_ENTITY, "idempotency-key-reused", "Idempotency key reused", detail)
            }
            Error::VersionMismatch => {
                let detail = "The memory document has changed since the version that If-Match names. \
                    GET it, merge, and PUT it with its new ETag.";
                Self::new(
                    S::PRECONDITION_FAILED,
                    "version-mismatch",
                    "The memory document has changed",
                    detail,
                )
            }
            Error::MemoryTooLarge { bytes, max_bytes } => {
                let detail = format!(
                    "has {bytes} bytes, at most {max_bytes} are allowed (memory.max_bytes): keep what matters and shorten it"
                );
                Self::invalid_field("content", detail)
            }
            Error::BudgetTooSmall { max_tokens, needed, tokenizer } => {
                Self::budget_too_small(max_tokens, needed, tokenizer)
            }
            Error::InvalidQuery(error) => Self::invalid_field("q", error.to_string()),
            Error::SearchDisabled => {
                let detail = "Messages are not indexed here: search.enabled is false.";
                Self::new(S::CONFLICT, "search-disabled", "Search is disabled", detail)
            }
            Error::ConsolidationDisabled => {
                let detail = "No pool of models is set (consolidation.pool, llm.default_pool), \
                    so there is nobody to write a summary.";
                Self::new(S::CONFLICT, "consolidation-disabled", "Consolidation is disabled", detail)
            }
            Error::ConsolidationInProgress => {
                let detail = "Another consolidation of this session is running. Try again when it has ended.";
                Self::new(S::CONFLICT, "consolidation-in-progress", "Consolidation in progress", detail)
                    .retry_after(RETRY_SECONDS)
            }
            Error::ConsolidationFailed(why) => {
                let detail = format!(
                    "The reason: {why}. The history is untouched, and what was summarised before stands: ask again when \
                     the reason is gone."
                );
                Self::new(S::BAD_GATEWAY, "consolidation-failed", "Consolidation failed", detail)
            }
            Error::Import(error) => Self::invalid_line(error),
            Error::ImportTooLarge { max_bytes } => Self::import_too_large(max_bytes),
            Error::SessionExists => {
                let detail = "There is another session of this id, and an import makes a new one. \
                    Import under another id, or erase that session first.";
                Self::new(S::CONFLICT, "session-exists", "The session exists", detail)
            }
            Error::StagingFile(error) => {
                tracing::error!(error = %ErrorChain(&error), "the folder for temporary files (TMPDIR) can't be used");
                let detail = "There is no room for an import where precis runs. Its log has the reason.";
                Self::new(
                    S::INSUFFICIENT_STORAGE,
                    "insufficient-storage",
                    "Insufficient storage for the import",
                    detail,
                )
            }
            Error::Store(error) => Self::from_store(&error),
        }
    }
}

impl Problem {
    pub(crate) fn from_store(error: &StoreError) -> Self {
        let causes = ErrorChain(error);
        match error {
            StoreError::SchemaVersion { .. } | StoreError::SchemaIncomplete(_) => {
                tracing::warn!(error = %causes, "the schema is another one");
                let way_out = match error {
                    StoreError::SchemaVersion { found, expected } if found > expected => {
                        "It is newer: run that version of precis."
                    }
                    _ => "Run `precis migrate`.",
                };
                let detail = format!(
                    "The schema of the database is not the one that this version works with. {way_out}"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "schema-mismatch", "Schema mismatch", detail)
                    .retry_after(RETRY_SECONDS)
            }
            StoreError::Unavailable(_) => {
                tracing::warn!(error = %causes, "the store is not available");
                let detail = "The database does not answer, or takes no writes now. What the request was to write may have \
                    been written or not: repeat it, an exchange with the same Idempotency-Key, and it is there once.";
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "store-unavailable", "Store unavailable", detail).retry_after(RETRY_SECONDS)
            }
            StoreError::IndexLagging(_) => {
                tracing::warn!(error = %causes, "a search would not find all");
                let detail = "What was stored last is still being put into the index: search again.";
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::new(status, "search-index-lagging", "Search index lagging", detail)
                    .retry_after(RETRY_SECONDS)
            }
            _ => {
                tracing::error!(error = %causes, "the store failed");
                Self::internal()
            }
        }
    }

    /// 500.
    pub(crate) fn internal() -> Self {
        let detail =
            "Something went wrong inside precis. The log has the reason, under this answer's x-request-id.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal error", detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (retry_after, exceeded_limit, closing) = (self.retry_after, self.exceeded_limit, self.closing);
        let mut response = (status, Json(self)).into_response();
        let problem = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, problem);
        if closing {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(exceeded_limit) = exceeded_limit {
            response.extensions_mut().insert(*exceeded_limit);
        }
        response
    }
}

/// 404 for a path that is none of ours.
pub(super) async fn route_not_found(method: Method, uri: Uri) -> Problem {
    let path = redact_path(uri.path());
    let mut detail = format!("There is nothing at {method} {path}. GET /openapi.json lists what there is.");
    if path.starts_with("/sessions/") || path.starts_with("/users/") {
        detail.push_str(" Inside an id, a slash is sent as %2F.");
    }
    Problem::new(StatusCode::NOT_FOUND, "route-not-found", "Route not found", detail)
}

/// 405; the header `allow` lists the methods.
pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    let path = redact_path(uri.path());
    let detail = format!("{path} does not take {method}. The header allow lists what it takes.");
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "Method not allowed", detail)
}

/// 500 for a bug. The panic's text goes to the log only.
#[expect(clippy::needless_pass_by_value, reason = "the layer hands it over like this")]
pub(super) fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("not a text");
    tracing::error!(panic = text, "a handler panicked");
    Problem::internal().into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};
    use axum::extract::Request;
    use axum::routing::get;
    use tower::ServiceExt as _;
    use tower_http::catch_panic::CatchPanicLayer;

    #[tokio::test]
    async fn a_panic_is_a_problem_without_its_text() {
        async fn bug() -> &'static str {
            panic!("secret inner state")
        }
        let router = axum::Router::new().route("/", get(bug)).layer(CatchPanicLayer::custom(panicked));
        let request = Request::builder().uri("/").body(Body::empty()).expect("a request");
        let response = router.oneshot(request).await.expect("an answer");
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
        let body = to_bytes(response.into_body(), 10_000).await.expect("a body");
        let problem: Problem = serde_json::from_slice(&body).expect("a problem");
        assert_eq!((problem.status, problem.kind.as_str()), (500, "urn:precis:problem:internal"));
        assert!(!String::from_utf8_lossy(&body).contains("secret"));
    }
}
