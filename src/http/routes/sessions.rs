//! `/sessions` and `/sessions/{session_id}`

use crate::config::Limits;
use crate::domain::consolidation::Activity;
use crate::domain::id::{SessionId, UserId};
use crate::domain::search::language::Language;
use crate::domain::session;
use crate::http::error::Problem;
use crate::http::extract::{
    EmptyBody, JsonBody, NoQuery, PathParams, QueryParams, SessionPath, TenantFromKey,
};
use crate::http::headers::preferred_text;
use crate::http::openapi::responses::{SessionNotFound, UnsupportedMediaType};
use crate::http::pagination::{self, Limit, Page};
use crate::http::readable;
use crate::http::response_body::Json;
use crate::http::routes::forks::ForkOriginBody;
use crate::service::{MemoryService, SessionFilter, SessionPosition};
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::sync::Arc;
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};

/// The state of a session.
#[derive(Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionBody {
    session_id: String,
    /// The user of the session; null if no request has named one.
    #[schema(required)]
    user_id: Option<String>,
    /// Data of the client: any JSON object.
    #[schema(value_type = Object)]
    metadata: Box<RawValue>,
    /// Number of messages of the history.
    message_count: i64,
    /// The `seq` of the newest message; 0 = none.
    last_seq: i64,
    /// Size of the messages as JSON, in bytes.
    stored_bytes: i64,
    /// The `seq` of the last message that the summary covers; 0 = none.
    cursor: i64,
    /// Number of messages after the cursor.
    tail_messages: i64,
    /// The language by which search analyses the messages; null if it was not recognised, or if `search.language` sets one for all.
    #[schema(required)]
    language: Option<Language>,
    summary: SummaryBody,
    tokens: SessionTokens,
    consolidation: ConsolidationBody,
    /// The session that it was copied from; null if there is none, or if that session was erased.
    forked_from: Option<ForkOriginBody>,
    /// Time of the first exchange.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    /// Time of the newest exchange, fork or rewind.
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

/// The summary of a session.
#[derive(Serialize, ToSchema)]
#[schema(as = Summary)]
struct SummaryBody {
    /// 0 if there is no summary.
    revision: i64,
    /// Number of words.
    words: i64,
    /// Empty if there is no summary.
    text: String,
}

/// Token counts, made by `o200k_base` when the text was written.
#[derive(Serialize, ToSchema)]
struct SessionTokens {
    /// Tokens of all messages.
    history: i64,
    /// Tokens of the messages after the cursor.
    tail: i64,
    /// Tokens of the summary.
    summary: i64,
}

/// The state of consolidation.
#[derive(Serialize, ToSchema)]
#[schema(as = ConsolidationStatus)]
struct ConsolidationBody {
    state: ConsolidationState,
    /// Failures since the last success.
    failures: i32,
    /// Reason of the last failure.
    #[schema(required)]
    last_failure: Option<String>,
    /// The next automatic run starts after this time at the earliest.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    retry_at: Option<OffsetDateTime>,
}

/// The current activity of consolidation: `waiting` means until `retry_at`, after a failure.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ConsolidationState {
    Idle,
    Running,
    Waiting,
}

impl SessionBody {
    fn new(session: session::Session, service: &MemoryService) -> Self {
        let activity = service.activity(&session);
        let (tail_messages, tail_tokens) = (session.tail_len(), session.tail_tokens());
        let state = session.consolidation;
        Self {
            session_id: session.session_id.as_str().to_owned(),
            user_id: session.user_id.map(|user| user.as_str().to_owned()),
            metadata: RawValue::from_string(session.metadata).unwrap_or_default(),
            message_count: session.last_seq,
            last_seq: session.last_seq,
            language: session.language,
            stored_bytes: session.stored_bytes,
            cursor: session.cursor,
            tail_messages,
            tokens: SessionTokens {
                history: session.tokens,
                tail: tail_tokens,
                summary: session.summary.tokens,
            },
            summary: SummaryBody {
                revision: session.revision,
                words: session.summary.words,
                text: session.summary.text,
            },
            consolidation: ConsolidationBody {
                state: match activity {
                    Activity::Idle => ConsolidationState::Idle,
                    Activity::Running => ConsolidationState::Running,
                    Activity::Backoff { .. } => ConsolidationState::Waiting,
                },
                failures: state.failures,
                last_failure: state.last_failure,
                retry_at: state.retry_at,
            },
            forked_from: session.forked_from.map(ForkOriginBody::from),
            created_at: session.created_at,
            updated_at: session.updated_at,
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    /// Items of the page, 1 to 1000; 50 if it is omitted.
    #[param(inline)]
    limit: Option<Limit>,
    /// `next` of the previous page.
    cursor: Option<String>,
    /// Only sessions of this user.
    user_id: Option<UserId>,
    /// Only forks of this session, and the branches that rewinds have removed from it.
    forked_from: Option<SessionId>,
}

/// Lists the sessions, the most recently active first.
///
/// A session that becomes active between two requests moves to the first page, so that later pages do not contain it. A page
/// with large summaries or metadata ends before `limit`; `next` is set then.
#[utoipa::path(
    get, path = "/sessions", operation_id = "list_sessions", tag = "sessions", params(ListParams),
    responses(
        (status = 200, description = "Sessions", body = Page<SessionBody>),
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    QueryParams(params): QueryParams<ListParams>,
) -> Result<Json<Page<SessionBody>>, Problem> {
    let limit = pagination::page_size(params.limit);
    let after = match pagination::decode_position::<(i64, String)>(params.cursor.as_deref())? {
        None => None,
        Some((micros, id)) => Some(list_position(micros, id).ok_or_else(pagination::invalid_position)?),
    };
    let filter = SessionFilter { user: params.user_id.as_ref(), forked_from: params.forked_from.as_ref() };
    let sessions = service.sessions(&tenant, filter, after.as_ref(), limit).await?;
    let position = |session: &session::Session| {
        (session.updated_at.unix_timestamp_nanos() / 1000, session.session_id.as_str().to_owned())
    };
    Ok(Json(Page::new(sessions, position, |session| SessionBody::new(session, &service))))
}

fn list_position(micros: i64, session_id: String) -> Option<SessionPosition> {
    // Sessions are never older than 1970, and the calendar of Postgres ends earlier in the past than ours.
    let micros = u64::try_from(micros).ok()?;
    let updated_at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).ok()?;
    Some(SessionPosition { updated_at, session_id: SessionId::new(session_id).ok()? })
}

/// Returns the state of a session.
///
/// The state contains counts, the cursor, the summary and the state of consolidation, but no messages. With the header
/// `accept: text/plain` or `text/markdown`, the response is the summary alone.
#[utoipa::path(
    get, path = "/sessions/{session_id}", operation_id = "get_session", tag = "sessions",
    params(SessionPath),
    responses(
        (status = 200, description = "The state", body = SessionBody),
        SessionNotFound,
    )
)]
pub(crate) async fn get(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: NoQuery,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let session = service.session(&tenant, &session).await?;
    Ok(match preferred_text(&headers) {
        Some(content_type) => readable::summary(content_type, &session.summary.text),
        None => Json(SessionBody::new(session, &service)).into_response(),
    })
}

/// The fields of a session that can be changed.
#[derive(Deserialize, ToSchema)]
pub(crate) struct SessionPatch {
    /// Replaces the metadata: a JSON object.
    #[schema(value_type = Object)]
    metadata: Box<RawValue>,
}

/// Replaces the metadata of a session.
///
/// The metadata is replaced as a whole; its fields are not merged.
#[utoipa::path(
    patch, path = "/sessions/{session_id}", operation_id = "patch_session", tag = "sessions",
    params(SessionPath),
    request_body(content = SessionPatch, examples(
        ("metadata" = (summary = "New metadata", value = json!({"metadata": {"topic": "travel"}}))),
    )),
    responses(
        (status = 200, description = "The new state", body = SessionBody),
        SessionNotFound,
    )
)]
pub(crate) async fn patch(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    Extension(limits): Extension<Arc<Limits>>,
    JsonBody(patch): JsonBody<SessionPatch>,
) -> Result<Json<SessionBody>, Problem> {
    let metadata = limits.sizes().metadata("metadata", &patch.metadata)?;
    let session = service.set_metadata(&tenant, &session, &metadata).await?;
    Ok(Json(SessionBody::new(session, &service)))
}

/// Erases a session with its history, summary, revisions and idempotency keys.
///
/// The branches that rewinds have removed from it are erased, too. Its forks and the memory document of its user remain.
/// Afterwards, the id can be used for a new session.
#[utoipa::path(
    delete, path = "/sessions/{session_id}", operation_id = "erase_session", tag = "sessions",
    params(SessionPath),
    responses(
        (status = 204, description = "Erased"),
        SessionNotFound, UnsupportedMediaType,
    )
)]
pub(crate) async fn erase(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: EmptyBody,
) -> Result<StatusCode, Problem> {
    service.erase_session(&tenant, &session).await?;
    Ok(StatusCode::NO_CONTENT)
}
