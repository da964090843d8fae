//! The error responses of the document, each defined once in `components/responses`.
//!
//! Responses of layers and extractors are added to every route that has them. A handler lists only its own errors, by
//! the names here: `responses((status = 200, …), SessionNotFound)`.

use crate::domain::api_key::Scope;
use crate::http::access::RouteKind;
use axum::http::StatusCode;
use std::collections::BTreeMap;
use utoipa::IntoResponses;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{Content, HeaderBuilder, Object, Ref, RefOr, Response, ResponseBuilder, Type};

pub(super) const SECURITY_SCHEME: &str = "key";

macro_rules! problem_responses {
    ($($name:ident $status:ident $description:literal)*) => {
        $(
            #[doc = $description]
            pub(in crate::http) struct $name;

            impl IntoResponses for $name {
                fn responses() -> BTreeMap<String, RefOr<Response>> {
                    let response = Ref::from_response_name(stringify!($name));
                    BTreeMap::from([(StatusCode::$status.as_str().to_owned(), response.into())])
                }
            }
        )*

        /// Returns all error responses by name.
        pub(super) fn all() -> impl Iterator<Item = (String, RefOr<Response>)> {
            let all = [$((stringify!($name), StatusCode::$status, $description)),*];
            all.into_iter().map(|(name, status, text)| (name.to_owned(), problem_response(status, text).into()))
        }
    };
}

problem_responses! {
    // Of layers and extractors.
    BadRequest BAD_REQUEST "The path, the query or the body cannot be read: it is not percent-encoded UTF-8, not JSON, or incomplete"
    Unauthorized UNAUTHORIZED "No valid API key"
    Forbidden FORBIDDEN "The key has neither the scope that `security` names nor one that includes it. Without a key: the host or the origin is not allowed (`server.allowed_hosts`, `server.cors_origins`)"
    BodyTimeout REQUEST_TIMEOUT "The body did not arrive in time (`server.read_timeout`)"
    BodyTooLarge PAYLOAD_TOO_LARGE "The body is too large (`limits.max_body_bytes`)"
    UnsupportedMediaType UNSUPPORTED_MEDIA_TYPE "The body has an unsupported media type"
    InvalidInput UNPROCESSABLE_ENTITY "The request has missing, invalid or unknown fields; `errors` lists them"
    TooManyRequests TOO_MANY_REQUESTS "The key exceeds its rate (`limits.requests_per_second`)"
    Internal INTERNAL_SERVER_ERROR "An internal error; the log has the cause under `x-request-id`"
    Unavailable SERVICE_UNAVAILABLE "The database is unavailable, or the service is overloaded; retry later"
    Timeout GATEWAY_TIMEOUT "The request took too long (`server.request_timeout`)"
    // Of handlers.
    RewindForbidden FORBIDDEN "The settings forbid it (`sessions.allow_rewind`), or the key lacks the scope. Without a key: the host or the origin is not allowed (`server.allowed_hosts`, `server.cors_origins`)"
    SessionNotFound NOT_FOUND "There is no session with this id"
    RevisionNotFound NOT_FOUND "There is no session with this id, or it has no such revision"
    MessageNotFound NOT_FOUND "There is no session with this id, or it has no such message"
    UserNotFound NOT_FOUND "The user has no memory document and no session"
    ToolNotFound NOT_FOUND "There is no tool with this name"
    ExchangeConflict CONFLICT "The session belongs to another user, or its last message is not `expected_last_seq`"
    SyncConflict CONFLICT "The session belongs to another user, or the list is not a continuation of its history: `diverged_at` names the first message that differs. With `on_divergence` `fork`: another session has the id `new_id`"
    SessionUserMismatch CONFLICT "The session belongs to another user, which cannot be changed"
    SessionExists CONFLICT "Another session has this id"
    RevisionRedacted CONFLICT "The texts of the revision were removed, because a message that it covers was redacted"
    EditConflict CONFLICT "The session is at another revision than `based_on`, which `revision` names, or it has no summary"
    ConsolidationUnavailable CONFLICT "Another consolidation of the session is running, a change of the session or a shutdown ended this one, or no pool of models is configured"
    ConsolidationDisabled CONFLICT "No pool of models is configured"
    SearchDisabled CONFLICT "Messages are not indexed (`search.enabled`)"
    VersionMismatch PRECONDITION_FAILED "The memory document has changed since the version in `If-Match`"
    ConsolidationFailed BAD_GATEWAY "No model produced a summary; the existing summary is unchanged"
    ImportTooLarge PAYLOAD_TOO_LARGE "The import is too large (`limits.max_import_bytes`)"
    InsufficientStorage INSUFFICIENT_STORAGE "The server cannot store the temporary file of the import"
}

fn problem_response(status: StatusCode, description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    let response =
        ResponseBuilder::new().description(description).content("application/problem+json", content);
    let (header, kind, description) = match status {
        StatusCode::UNAUTHORIZED => ("WWW-Authenticate", Type::String, "`Bearer`"),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            ("Retry-After", Type::Integer, "Seconds to wait before the next attempt")
        }
        _ => return response.build(),
    };
    let header_value = HeaderBuilder::new().schema(Some(Object::with_type(kind)));
    response.header(header, header_value.description(Some(description)).build()).build()
}

type ResponsesFn = fn() -> BTreeMap<String, RefOr<Response>>;

/// Adds the security requirement and the error responses of layers and extractors. Responses that the operation lists
/// itself stay.
pub(in crate::http) fn complete(operation: &mut Operation, kind: RouteKind, scope: Option<Scope>) {
    // An empty list says that the route is open. Without the list, generators and linters have to guess.
    let requirement = scope.map(|scope| SecurityRequirement::new(SECURITY_SCHEME, [scope.as_str()]));
    operation.security = Some(requirement.into_iter().collect());
    let (needs_key, takes_body) = (scope.is_some(), operation.request_body.is_some());
    let (is_admitted, is_buffered) = (kind != RouteKind::Operational, kind == RouteKind::Buffered);
    let responses: [(bool, ResponsesFn); 11] = [
        (needs_key, Unauthorized::responses),
        (needs_key, Forbidden::responses),
        // The authentication queries the database.
        (needs_key, Internal::responses),
        (needs_key, Unavailable::responses),
        (is_admitted, TooManyRequests::responses),
        (is_admitted, BadRequest::responses),
        (is_admitted, InvalidInput::responses),
        (is_buffered, Timeout::responses),
        (takes_body, UnsupportedMediaType::responses),
        (takes_body && is_buffered, BodyTimeout::responses),
        (takes_body && is_buffered, BodyTooLarge::responses),
    ];
    for (_, responses) in responses.into_iter().filter(|(applies, _)| *applies) {
        for (status, response) in responses() {
            operation.responses.responses.entry(status).or_insert(response);
        }
    }
}
