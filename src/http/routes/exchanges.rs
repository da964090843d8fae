//! `POST /sessions/{session_id}/exchanges`

use crate::blocking;
use crate::config::Limits;
use crate::domain::exchange::Exchange;
use crate::domain::format::{self, Format};
use crate::domain::given_time::given_time;
use crate::domain::json::as_integer;
use crate::domain::message::{Message, Role};
use crate::domain::validation::FieldError;
use crate::http::chat;
use crate::http::error::Problem;
use crate::http::extract::{Caller, JsonBody, PathParams, SessionPath, user_id};
use crate::http::headers::{IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED};
use crate::http::openapi::responses::ExchangeConflict;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Number, Value};
use std::sync::Arc;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The body of an exchange: either `user_message` and `assistant_reply`, or `messages`.
#[derive(Deserialize)]
pub(crate) struct ExchangeRequest {
    user_message: Option<Box<RawValue>>,
    /// `null` is an answer without text.
    #[serde(default, deserialize_with = "given_or_null")]
    assistant_reply: Option<Box<RawValue>>,
    messages: Option<Vec<Box<RawValue>>>,
    user_id: Option<String>,
    metadata: Option<Box<RawValue>>,
    #[expect(dead_code, reason = "messages of all formats are read alike; the value must be valid")]
    format: Option<Format>,
    created_at: Option<Value>,
    expected_last_seq: Option<Number>,
}

/// The position of a persisted exchange.
#[derive(Serialize, ToSchema)]
pub(crate) struct ExchangeResponse {
    session_id: String,
    /// The user of the session; null if no request has named one.
    #[schema(required)]
    user_id: Option<String>,
    /// `seq` of the first message.
    first_seq: i64,
    /// `seq` of the last message.
    last_seq: i64,
    /// Number of messages.
    message_count: i64,
    /// Time of the messages.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

/// Persists one exchange, completely or not at all.
///
/// The response is sent after the commit is durable. With `expected_last_seq`, nothing is written if another exchange came
/// first. With an `Idempotency-Key`, repeating the request returns the same response and writes nothing.
#[utoipa::path(
    post, path = "/sessions/{session_id}/exchanges", operation_id = "record_exchange", tag = "sessions",
    params(
        SessionPath,
        ("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255, pattern = "^[!-~]+$", description = "1 to 255 visible ASCII characters, new for each exchange"),
    ),
    request_body(content = chat::Exchange, examples(
        ("texts" = (summary = "A question and an answer", value = json!({
            "user_message": "When does the ferry leave?", "assistant_reply": "At nine.", "user_id": "ada",
        }))),
        ("messages" = (summary = "A turn with a tool call", value = json!({"messages": [
            {"role": "user", "content": "When does the ferry leave?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "timetable", "arguments": "{\"line\": 3}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "09:00"},
            {"role": "assistant", "content": "At nine."},
        ]}))),
    )),
    responses(
        (status = 201, description = "Persisted", body = ExchangeResponse,
            headers(("Idempotent-Replayed" = bool, description = "true if an earlier request with the same key wrote the exchange"))),
        ExchangeConflict,
    )
)]
pub(crate) async fn append(
    State(service): State<MemoryService>,
    Caller { tenant, default_user }: Caller,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    Extension(limits): Extension<Arc<Limits>>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<ExchangeRequest>,
) -> Result<Response, Problem> {
    let key = idempotency_key(&headers)?;
    let exchange =
        blocking::spawn_cpu_to_count(request.bytes(), move || request.into_exchange(&limits)).await?;
    let appended = service.append_exchange(&tenant, &session, exchange, key, default_user).await?;
    let body = ExchangeResponse {
        session_id: session.as_str().to_owned(),
        user_id: appended.user_id.map(|user| user.as_str().to_owned()),
        first_seq: appended.first_seq,
        last_seq: appended.last_seq,
        message_count: appended.last_seq - appended.first_seq + 1,
        created_at: appended.created_at,
    };
    let mut response = (StatusCode::CREATED, Json(body)).into_response();
    if appended.replayed {
        response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

pub(super) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = keys.next() else {
        return Ok(None);
    };
    let is_valid = (1..=255).contains(&key.len()) && key.as_bytes().iter().all(u8::is_ascii_graphic);
    match (key.to_str(), keys.next()) {
        (Ok(key), None) if is_valid => Ok(Some(key.to_owned())),
        (_, Some(_)) => Err(Problem::invalid_field("Idempotency-Key", "sent more than once: send it once")),
        _ => Err(Problem::invalid_field("Idempotency-Key", "must have 1 to 255 visible ASCII characters")),
    }
}

fn given_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

impl ExchangeRequest {
    /// Returns the size of the messages in bytes.
    fn bytes(&self) -> usize {
        let single = [&self.user_message, &self.assistant_reply].into_iter().flatten();
        single.chain(self.messages.iter().flatten()).map(|message| message.get().len()).sum()
    }

    fn into_exchange(self, limits: &Limits) -> Result<Exchange, Problem> {
        // Checked first: with too many messages, checking each of them would be wasted work.
        limits.messages(self.messages.as_ref().map_or(0, Vec::len))?;
        let (mut messages, mut errors) = (Vec::new(), Vec::new());
        let mut add = |path: &str, read: Result<Vec<Message>, FieldError>| match read {
            Ok(read) => {
                errors.extend(
                    read.iter().filter_map(|message| limits.sizes().check_message(path, message).err()),
                );
                messages.extend(read);
            }
            Err(error) => errors.push(error.in_value(path)),
        };
        let invalid = |detail: &str| Err(FieldError::new("", detail));
        let is_null = |content: &RawValue| content.get() == "null";
        let is_empty_answer = self.user_message.is_some() && self.messages.is_none();
        let assistant_reply = self.assistant_reply.filter(|reply| is_empty_answer || !is_null(reply));
        match (self.user_message, assistant_reply, self.messages) {
            (None, None, Some(given)) if given.is_empty() => {
                add("messages", invalid("must hold at least one message"));
            }
            (None, None, Some(given)) => {
                for (index, message) in given.iter().enumerate() {
                    add(&format!("messages[{index}]"), format::read_given(message));
                }
            }
            (user_message, assistant_reply, None) => {
                let missing =
                    "missing: send user_message and assistant_reply, or messages for any other turn";
                for (path, role, content) in [
                    ("user_message", Role::User, user_message),
                    ("assistant_reply", Role::Assistant, assistant_reply),
                ] {
                    let read = |content: Box<RawValue>| {
                        if is_null(&content) {
                            Ok(vec![Message::text(role, "")])
                        } else {
                            format::read_content(role, &content)
                        }
                    };
                    add(path, content.map_or_else(|| invalid(missing), read));
                }
            }
            (_, _, Some(_)) => {
                let detail =
                    "cannot be combined with user_message or assistant_reply: send one form or the other";
                add("messages", invalid(detail));
            }
        }
        // A message becomes several if it has several results of tools.
        limits.messages(messages.len())?;
        let user_id = user_id(self.user_id, &mut errors);
        let metadata = self.metadata.map(|given| limits.sizes().metadata("metadata", &given)).transpose();
        let metadata = metadata.map_err(|error| errors.push(error)).unwrap_or_default();
        let created_at = self.created_at.as_ref().map(given_time).transpose();
        let created_at = created_at.unwrap_or_else(|detail| {
            errors.push(FieldError::new("created_at", detail));
            None
        });
        let given = self.expected_last_seq.as_ref();
        let expected_last_seq = given.and_then(as_integer).filter(|seq| *seq >= 0);
        if given.is_some() && expected_last_seq.is_none() {
            let detail = "must be the seq of the last message, or 0 if the session must have no message";
            errors.push(FieldError::new("expected_last_seq", detail));
        }
        if errors.is_empty() {
            let received_at = Some(OffsetDateTime::now_utc());
            let exchange = Exchange::new(messages, user_id, metadata);
            Ok(Exchange { created_at, received_at, expected_last_seq, ..exchange })
        } else {
            Err(Problem::invalid(errors))
        }
    }
}
