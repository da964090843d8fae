//! `GET /sessions/{session_id}/messages`, and the place of a message in the next context.

use crate::blocking;
use crate::domain::message::{Message, Role};
use crate::http::chat::ChatMessage;
use crate::http::error::Problem;
use crate::http::extract::{Bounded, MessagePath, PathParams, QueryParams, SessionPath, TenantFromKey};
use crate::http::json::stored;
use crate::http::openapi::responses::{MessageNotFound, SessionNotFound};
use crate::http::pagination::{self, Limit, Page};
use crate::http::response_body::Json;
use crate::service::placement::Placement;
use crate::service::{self, MAX_PAGE_BYTES, MemoryService};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};

/// A message of the history.
#[derive(Serialize, ToSchema)]
#[schema(as = StoredMessage)]
pub(crate) struct MessageBody {
    /// 1, 2, 3 … per session, without gaps.
    seq: i64,
    /// Time at which the message was stored.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    /// Time at which the content of the message was removed; missing otherwise.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    redacted_at: Option<OffsetDateTime>,
    /// The message as it was sent, or the redacted message.
    #[schema(value_type = ChatMessage)]
    message: Box<RawValue>,
}

impl MessageBody {
    pub(crate) fn new(message: service::StoredMessage) -> Result<Self, service::Error> {
        let service::StoredMessage { seq, created_at, redacted_at, json } = message;
        Ok(Self { seq, created_at, redacted_at, message: stored(json)? })
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    /// Only messages after this `seq`.
    after_seq: Option<i64>,
    /// Only messages before this `seq`.
    before_seq: Option<i64>,
    /// Items of the page, 1 to 1000; 50 if it is omitted.
    #[param(inline)]
    limit: Option<Limit>,
    /// `asc` (oldest first, the default) or `desc`.
    #[param(inline)]
    order: Option<Order>,
    /// `next` of the previous page.
    cursor: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Order {
    Asc,
    Desc,
}

/// Lists the messages of the history.
///
/// `after_seq` and `before_seq` exclude their own message. The history has no gaps, and messages never change, except by a redaction.
/// A page with large messages ends before `limit`; `next` is set then.
#[utoipa::path(
    get, path = "/sessions/{session_id}/messages", operation_id = "list_messages", tag = "sessions",
    params(SessionPath, ListParams),
    responses(
        (status = 200, description = "Messages", body = Page<MessageBody>),
        SessionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(params): QueryParams<ListParams>,
) -> Result<Response, Problem> {
    let limit = pagination::page_size(params.limit);
    let descending = params.order == Some(Order::Desc);
    let (mut after_seq, mut before_seq) =
        (params.after_seq.unwrap_or(0), params.before_seq.unwrap_or(i64::MAX));
    if let Some(last) = pagination::decode_position::<i64>(params.cursor.as_deref())? {
        if descending {
            before_seq = before_seq.min(last);
        } else {
            after_seq = after_seq.max(last);
        }
    }
    let query = service::MessageQuery { after_seq, before_seq, descending, limit, max_bytes: MAX_PAGE_BYTES };
    let service::MessagePage { messages, has_more } = service.messages(&tenant, &session, query).await?;
    let bytes = messages.iter().map(|message| message.json.len()).sum();
    let encode = move || {
        let messages = messages.into_iter().map(MessageBody::new).collect::<Result<Vec<_>, _>>()?;
        let page = Page::with_end(messages, has_more, |message| message.seq, |message| message);
        Ok(Json(page).into_response())
    };
    blocking::spawn_cpu_if_large(bytes, encode).await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlacementParams {
    /// The window of the context; by default that of the latest context request of the session.
    #[param(inline)]
    max_tokens: Option<Bounded<1, { i64::MAX }>>,
    /// The new message of the context, for which earlier messages are recalled.
    user_message: Option<String>,
}

/// Returns the part of the next context in which a message is.
///
/// Answers why an agent knows something, or not. The context is that of the next request if it is like the latest one, without a
/// consolidation before.
#[utoipa::path(
    get, path = "/sessions/{session_id}/messages/{seq}/placement", operation_id = "get_placement", tag = "sessions",
    params(MessagePath, PlacementParams),
    responses(
        (status = 200, description = "The part of the context", body = Placement),
        MessageNotFound,
    )
)]
pub(crate) async fn placement(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(MessagePath { session_id: session, seq: Bounded(seq) }): PathParams<MessagePath>,
    QueryParams(PlacementParams { max_tokens, user_message }): QueryParams<PlacementParams>,
) -> Result<Json<Placement>, Problem> {
    let max_tokens = max_tokens.map(|Bounded(max)| max);
    let user_message = user_message.map(|text| Message::text(Role::User, &text));
    Ok(Json(service.placement(&tenant, &session, seq, max_tokens, user_message).await?))
}
