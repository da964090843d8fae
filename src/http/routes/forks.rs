//! `POST /sessions/{session_id}/fork` and `DELETE /sessions/{session_id}/messages`: continue from an earlier message, in
//! another session or in the same one.

use crate::domain::id::SessionId;
use crate::domain::json::as_integer;
use crate::domain::session::{ForkKind, ForkOrigin};
use crate::http::error::Problem;
use crate::http::extract::{Bounded, JsonBody, PathParams, QueryParams, SessionPath, TenantFromKey};
use crate::http::openapi::responses::{RewindForbidden, SessionExists, SessionNotFound};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use utoipa::{IntoParams, ToSchema};

/// The session and the message that a session was copied from.
#[derive(Serialize, ToSchema)]
#[schema(as = ForkOrigin)]
pub(crate) struct ForkOriginBody {
    session_id: String,
    /// The `seq` of the last message that both sessions had in common.
    through_seq: i64,
    /// `fork`: the session continues from that message. `rewind`: the session is the branch of a rewind: after that message,
    /// it has the messages that were removed from the other session.
    kind: ForkKind,
}

impl From<ForkOrigin> for ForkOriginBody {
    fn from(origin: ForkOrigin) -> Self {
        let ForkOrigin { session_id, through_seq, kind } = origin;
        Self { session_id: session_id.as_str().to_owned(), through_seq, kind }
    }
}

/// The point at which a session is forked.
#[derive(Deserialize, ToSchema)]
pub(crate) struct ForkRequest {
    /// The `seq` of the last message of the new session.
    #[schema(value_type = i64, minimum = 1)]
    through_seq: Number,
    /// The id of the new session; random if it is omitted.
    #[schema(value_type = Option<SessionId>)]
    new_id: Option<String>,
}

/// The new session.
#[derive(Serialize, ToSchema)]
pub(crate) struct ForkResponse {
    session_id: String,
    /// The `seq` of the newest message.
    last_seq: i64,
    /// The `seq` of the last message that the summary covers; 0 = none.
    cursor: i64,
    /// The newest revision of the summary; 0 = none.
    revision: i64,
    forked_from: Option<ForkOriginBody>,
}

/// Creates a session with the messages of another one up to `through_seq`.
///
/// The summary is the latest one that covers none of the other messages. User, metadata and times stay. Both sessions are
/// independent then: erasing one leaves the other as it is.
#[utoipa::path(
    post, path = "/sessions/{session_id}/fork", operation_id = "fork_session", tag = "sessions",
    params(SessionPath),
    request_body(content = ForkRequest, examples(
        ("fork" = (summary = "Continue after message 20", value = json!({"through_seq": 20, "new_id": "demo-2"}))),
    )),
    responses(
        (status = 201, description = "The new session", body = ForkResponse),
        SessionNotFound, SessionExists,
    )
)]
pub(crate) async fn fork(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    JsonBody(request): JsonBody<ForkRequest>,
) -> Result<(StatusCode, Json<ForkResponse>), Problem> {
    let through_seq = as_integer(&request.through_seq).filter(|seq| *seq >= 1).ok_or_else(|| {
        let detail = "must be a whole number from 1 on: a session exists from its first message on";
        Problem::invalid_field("through_seq", detail)
    })?;
    let new_id = request.new_id.map(SessionId::new).transpose();
    let new_id = new_id.map_err(|error| Problem::invalid_field("new_id", error.to_string()))?;
    let forked = service.fork_session(&tenant, &session, new_id, through_seq).await?;
    let body = ForkResponse {
        session_id: forked.session_id.as_str().to_owned(),
        last_seq: forked.last_seq,
        cursor: forked.cursor,
        revision: forked.revision,
        forked_from: forked.forked_from.map(ForkOriginBody::from),
    };
    Ok((StatusCode::CREATED, Json(body)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct RewindParams {
    /// The `seq` of the last message to keep; 0 removes all messages, and the session is as before its first exchange, except for
    /// its user and its metadata.
    #[param(inline)]
    after: Bounded<0, { i64::MAX }>,
}

/// The shorter session.
#[derive(Serialize, ToSchema)]
pub(crate) struct RewindResponse {
    session_id: String,
    /// The `seq` of the newest message; 0 = none.
    last_seq: i64,
    /// The `seq` of the last message that the summary covers; 0 = none.
    cursor: i64,
    /// The newest revision of the summary; 0 = none.
    revision: i64,
    /// The session that has all messages as of before; null if there was nothing to remove.
    branch: Option<String>,
}

/// Removes the messages after a `seq`, so that an agent can retry a turn.
///
/// Nothing is lost: the response names the branch, a session that has all messages, summaries and times as of before. Its
/// messages are not in the search index. It is erased with this session. Summary and cursor of this session become those of the
/// latest revision that covers none of the removed messages. A running consolidation discards its result, and idempotency keys
/// of removed messages are forgotten. Repeating the request changes nothing.
#[utoipa::path(
    delete, path = "/sessions/{session_id}/messages", operation_id = "rewind_session", tag = "sessions",
    params(SessionPath, RewindParams),
    responses(
        (status = 200, description = "The shorter session", body = RewindResponse),
        RewindForbidden, SessionNotFound,
    )
)]
pub(crate) async fn rewind(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(RewindParams { after: Bounded(after) }): QueryParams<RewindParams>,
) -> Result<Json<RewindResponse>, Problem> {
    let rewound = service.rewind_session(&tenant, &session, after).await?;
    Ok(Json(RewindResponse {
        session_id: session.as_str().to_owned(),
        last_seq: rewound.session.last_seq,
        cursor: rewound.session.cursor,
        revision: rewound.session.revision,
        branch: rewound.branch.map(|branch| branch.as_str().to_owned()),
    }))
}
