//! The responses of the interface, each said once: `components/responses` of the document, and which operation has which.
//!
//! What the layers and the extractors refuse is read off the operation itself, so that a new route has it without a
//! word. What only its handler refuses stands there, by the names here: `responses((status = 200, …), SessionNotFound)`.

use super::{OPERATION, is_stream};
use axum::http::StatusCode;
use std::collections::BTreeMap;
use utoipa::IntoResponses;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Content, HeaderBuilder, Object, Ref, RefOr, Response, ResponseBuilder, Type};

macro_rules! problem_responses {
    ($($name:ident $status:ident $description:literal)*) => {
        $(
            #[doc = $description]
            pub(in crate::http) struct $name;

            impl IntoResponses for $name {
                fn responses() -> BTreeMap<String, RefOr<Response>> {
                    let problem_response = Ref::from_response_name(stringify!($name));
                    BTreeMap::from([(StatusCode::$status.as_str().to_owned(), problem_response.into())])
                }
            }
        )*

        /// All of them, by name.
        pub(super) fn all() -> impl Iterator<Item = (String, RefOr<Response>)> {
            let all = [$((stringify!($name), StatusCode::$status, $description)),*];
            all.into_iter().map(|(name, status, text)| (name.to_owned(), problem_response(status, text).into()))
        }
    };
}

problem_responses! {
    // Of the layers and the extractors.
    BadRequest BAD_REQUEST "The path, the query or the body can't be read: it is not percent-encoded UTF-8, is not JSON, or broke off"
    Unauthorized UNAUTHORIZED "No valid API key"
    Forbidden FORBIDDEN "The key's scope is not the one that `security` names, nor one that contains it"
    BodyTimeout REQUEST_TIMEOUT "The body did not come in time (`server.read_timeout`)"
    BodyTooLarge PAYLOAD_TOO_LARGE "The body is too large (`limits.max_body_bytes`)"
    UnsupportedMediaType UNSUPPORTED_MEDIA_TYPE "The body is of another media type"
    InvalidInput UNPROCESSABLE_ENTITY "Well-formed, but not what is taken: `errors` lists the fields"
    TooManyRequests TOO_MANY_REQUESTS "More requests than this key may send (`limits.requests_per_second`)"
    Internal INTERNAL_SERVER_ERROR "A bug, or a database that is broken: the log has the reason, under `x-request-id`"
    Unavailable SERVICE_UNAVAILABLE "The database does not answer, or there is more to do than can be done: try again later"
    Timeout GATEWAY_TIMEOUT "No answer in time (`server.request_timeout`)"
    // Of the handlers.
    SessionNotFound NOT_FOUND "There is no session of this id"
    RevisionNotFound NOT_FOUND "There is no session of this id, or it has no such revision"
    UserNotFound NOT_FOUND "The user has no memory document and no session"
    ToolNotFound NOT_FOUND "There is no tool of this name"
    SessionUserMismatch CONFLICT "The session belongs to another user, and that can't change"
    SessionExists CONFLICT "There is another session of this id"
    ConsolidationUnavailable CONFLICT "Another consolidation of the session is running, or there is no pool of models"
    SearchDisabled CONFLICT "Messages are not indexed here (`search.enabled`)"
    VersionMismatch PRECONDITION_FAILED "The memory document has changed since the version that `If-Match` names"
    ConsolidationFailed BAD_GATEWAY "No model wrote a summary; what was there stands"
    ImportTooLarge PAYLOAD_TOO_LARGE "The import is too large (`limits.max_import_bytes`)"
    InsufficientStorage INSUFFICIENT_STORAGE "There is no room for an import where precis runs"
}

fn problem_response(status: StatusCode, description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    let response =
        ResponseBuilder::new().description(description).content("application/problem+json", content);
    let (header, kind, meaning) = match status {
        StatusCode::UNAUTHORIZED => ("WWW-Authenticate", Type::String, "`Bearer`"),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            ("Retry-After", Type::Integer, "Seconds to wait before the next attempt")
        }
        _ => return response.build(),
    };
    let value = HeaderBuilder::new().schema(Some(Object::with_type(kind))).description(Some(meaning)).build();
    response.header(header, value).build()
}

/// The status and the response of one.
type ResponsesOf = fn() -> BTreeMap<String, RefOr<Response>>;

/// Adds to an operation what it has of the layers around it, and of its extractors. What it says itself stands.
pub(super) fn complete(operation: &mut Operation, needs_key: bool) {
    let takes_body = operation.request_body.is_some();
    let is_admitted = !operation.tags.iter().flatten().any(|tag| tag == OPERATION);
    let is_whole = !is_stream(operation);
    let of_layers: [(bool, ResponsesOf); 11] = [
        (needs_key, Unauthorized::responses),
        (needs_key, Forbidden::responses),
        // The check of a key asks the database.
        (needs_key, Internal::responses),
        (needs_key, Unavailable::responses),
        (is_admitted, TooManyRequests::responses),
        (is_admitted && is_whole, Timeout::responses),
        (is_admitted, BadRequest::responses),
        (is_admitted, InvalidInput::responses),
        (takes_body, UnsupportedMediaType::responses),
        (takes_body && is_whole, BodyTimeout::responses),
        (takes_body && is_whole, BodyTooLarge::responses),
    ];
    for (_, problem_response) in of_layers.into_iter().filter(|(has, _)| *has) {
        for (status, response) in problem_response() {
            operation.responses.responses.entry(status).or_insert(response);
        }
    }
}
