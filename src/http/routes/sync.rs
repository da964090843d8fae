//! `POST /sessions/{session_id}/sync`

use super::exchanges::idempotency_key;
use super::forks::ForkOriginBody;
use crate::blocking;
use crate::config::Limits;
use crate::domain::format::{self, Format};
use crate::domain::given_time::message_time;
use crate::domain::id::SessionId;
use crate::domain::sync::{ClientList, OnDivergence};
use crate::domain::validation::FieldError;
use crate::http::chat;
use crate::http::error::Problem;
use crate::http::extract::{Caller, JsonBody, PathParams, SessionPath, user_id};
use crate::http::headers::IDEMPOTENT_REPLAYED;
use crate::http::openapi::responses::SyncConflict;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::sync::Arc;
use time::OffsetDateTime;
use utoipa::ToSchema;

#[derive(Deserialize)]
pub(crate) struct SyncRequest {
    messages: Vec<Box<RawValue>>,
    user_id: Option<String>,
    metadata: Option<Box<RawValue>>,
    format: Option<Format>,
    on_divergence: Option<String>,
    new_id: Option<String>,
}

/// The result of a sync.
#[derive(Serialize, ToSchema)]
pub(crate) struct SyncResponse {
    /// The session that has the list: the one of the request, or its fork.
    session_id: String,
    /// User of the session; null if no request has named one.
    #[schema(required)]
    user_id: Option<String>,
    /// Number of messages of the list that were stored before. In a new fork, these are the messages copied from the session.
    matched: i64,
    /// Number of messages that were appended.
    appended: i64,
    /// `seq` of the first message of a fork that differs from the one in the session of the request; null without a fork.
    #[schema(required)]
    diverged_at: Option<i64>,
    /// The origin of the fork; null without a fork, or if the session of the request was erased meanwhile.
    #[schema(required)]
    forked_from: Option<ForkOriginBody>,
    /// `seq` of the first appended message; null if none was appended.
    #[schema(required)]
    first_seq: Option<i64>,
    /// `seq` of the last message of the session; 0 = none.
    last_seq: i64,
}

/// Stores what is new in the complete list of messages that a client has.
///
/// The list is compared with the history by position and meaning. What follows the history is appended in one transaction; if
/// nothing does, nothing is written. If a message differs from the stored one, the response is 409 with `diverged_at`, or with
/// `"on_divergence": "fork"`, the list is stored in a fork of the session. Repeating the request stores nothing again.
#[utoipa::path(
    post, path = "/sessions/{session_id}/sync", operation_id = "sync_session", tag = "sessions",
    params(
        SessionPath,
        ("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255, pattern = "^[!-~]+$", description = "1 to 255 visible ASCII characters, new for each list"),
    ),
    request_body(content = chat::Sync, examples(
        ("list" = (summary = "All messages of a conversation", value = json!({"messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "When does the ferry leave?"},
            {"role": "assistant", "content": "At nine."},
        ]}))),
        ("fork" = (summary = "A list that may have another beginning", value = json!({"messages": [
            {"role": "user", "content": "When does the bus leave?"},
        ], "on_divergence": "fork", "new_id": "demo-2"}))),
    )),
    responses(
        (status = 201, description = "Messages were appended", body = SyncResponse,
            headers(("Idempotent-Replayed" = bool, description = "true if an earlier request with the same key wrote the messages"))),
        (status = 200, description = "The history has all messages of the list", body = SyncResponse),
        SyncConflict,
    )
)]
pub(crate) async fn sync(
    State(service): State<MemoryService>,
    Caller { tenant, default_user }: Caller,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    Extension(limits): Extension<Arc<Limits>>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<SyncRequest>,
) -> Result<Response, Problem> {
    let (key, max_new) = (idempotency_key(&headers)?, limits.max_messages_per_exchange);
    let bytes = request.messages.iter().map(|message| message.get().len()).sum();
    let list = blocking::spawn_cpu_if_large(bytes, move || request.into_list(&limits)).await?;
    if list.on_divergence == (OnDivergence::Fork { new_id: Some(session.clone()) }) {
        return Err(Problem::invalid_field("new_id", "must differ from the id of the session"));
    }
    let synced = service.sync(&tenant, &session, list, key, default_user, max_new).await?;
    let has_new = synced.appended > 0;
    let diverged_at = synced.forked_from.as_ref().map(|origin| origin.through_seq + 1);
    let body = SyncResponse {
        session_id: synced.session.as_str().to_owned(),
        user_id: synced.user_id.map(|user| user.as_str().to_owned()),
        matched: synced.matched,
        appended: synced.appended,
        diverged_at,
        forked_from: synced.forked_from.map(ForkOriginBody::from),
        first_seq: has_new.then_some(synced.matched + 1),
        last_seq: synced.last_seq,
    };
    let status = if has_new { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = (status, Json(body)).into_response();
    if synced.replayed {
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

impl SyncRequest {
    fn into_list(self, limits: &Limits) -> Result<ClientList, Problem> {
        let (now, mut errors) = (OffsetDateTime::now_utc(), Vec::new());
        let (mut messages, mut times) = (Vec::new(), Vec::new());
        let mut instructions = Vec::new();
        for (index, raw) in self.messages.iter().enumerate() {
            let path = || format!("messages[{index}]");
            let time = message_time(raw, Some(now));
            match format::read_given(raw) {
                Ok(read) => {
                    let too_large = read
                        .iter()
                        .filter_map(|message| limits.sizes().check_message(&path(), message).err());
                    errors.extend(too_large);
                    if messages.is_empty() && read.iter().all(|message| message.role().is_instruction()) {
                        instructions.extend(read);
                        continue;
                    }
                    times.extend(read.iter().map(|_| time));
                    messages.extend(read);
                }
                Err(error) => errors.push(error.in_value(&path())),
            }
        }
        let user_id = user_id(self.user_id, &mut errors);
        let metadata = self.metadata.map(|given| limits.sizes().metadata("metadata", &given)).transpose();
        let metadata = metadata.map_err(|error| errors.push(error)).unwrap_or_default();
        let new_id = self.new_id.map(SessionId::new).transpose();
        let new_id = new_id.map_err(|error| errors.push(FieldError::new("new_id", error.to_string())));
        let on_divergence = match self.on_divergence.as_deref() {
            Some("fork") => OnDivergence::Fork { new_id: new_id.unwrap_or_default() },
            None | Some("error") => {
                if let Ok(Some(_)) = new_id {
                    let detail = "is the id of a fork: send it with \"on_divergence\": \"fork\"";
                    errors.push(FieldError::new("new_id", detail));
                }
                OnDivergence::Error
            }
            Some(_) => {
                errors.push(FieldError::new("on_divergence", "must be \"error\" or \"fork\""));
                OnDivergence::Error
            }
        };
        if errors.is_empty() {
            let format = self.format.unwrap_or_default();
            Ok(ClientList { messages, instructions, format, times, user_id, metadata, on_divergence })
        } else {
            Err(Problem::invalid(errors))
        }
    }
}
