//! `POST /sessions/{session_id}/exchanges`

use crate::blocking;
use crate::config::Limits;
use crate::domain::exchange::Exchange;
use crate::domain::message::{Message, Role};
use crate::domain::validation::FieldError;
use crate::http::error::Problem;
use crate::http::extract::{JsonBody, SessionPath, TenantFromKey, user_id};
use crate::http::openapi::responses::SessionUserMismatch;
use crate::http::openapi::schemas::schema_from_json;
use crate::service::MemoryService;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;
use time::OffsetDateTime;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The body of an exchange: either `user_message` and `assistant_reply`, or `messages`.
#[derive(Deserialize)]
pub(crate) struct ExchangeRequest {
    user_message: Option<Box<RawValue>>,
    assistant_reply: Option<Box<RawValue>>,
    messages: Option<Vec<Box<RawValue>>>,
    user_id: Option<String>,
    metadata: Option<Box<RawValue>>,
}

impl PartialSchema for ExchangeRequest {
    fn schema() -> RefOr<Schema> {
        let user_id = json!({
            "description": "User of the session; cannot change",
            "oneOf": [{"$ref": "#/components/schemas/Id"}, {"type": "null"}]
        });
        let metadata = json!({
            "type": ["object", "null"], "description": "Replaces the session's metadata: a JSON object"
        });
        let form = |title: &str, required: &[&str], fields: Value| json!({"title": title, "type": "object", "required": required, "properties": fields});
        schema_from_json(json!({
            "description": "An exchange: either `user_message` and `assistant_reply`, or `messages`",
            "oneOf": [
                form("Question and answer", &["user_message", "assistant_reply"], json!({
                    "user_id": user_id,
                    "metadata": metadata,
                    "user_message": {
                        "$ref": "#/components/schemas/ContentBody",
                        "description": "Content of the user message: text, or content parts"
                    },
                    "assistant_reply": {
                        "$ref": "#/components/schemas/ContentBody",
                        "description": "Content of the reply: text, or content parts"
                    }
                })),
                form("Messages", &["messages"], json!({
                    "user_id": user_id,
                    "metadata": metadata,
                    "messages": {
                        "type": "array",
                        "minItems": 1,
                        "description": "The messages of the exchange in the OpenAI chat format",
                        "items": {"$ref": "#/components/schemas/ChatMessage"}
                    }
                }))
            ]
        }))
    }
}

impl ToSchema for ExchangeRequest {}

/// The position of a persisted exchange.
#[derive(Serialize, ToSchema)]
pub(crate) struct ExchangeResponse {
    session_id: String,
    /// `seq` of the first message.
    first_seq: i64,
    /// `seq` of the last message.
    last_seq: i64,
    /// Number of messages.
    message_count: i64,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

/// Persists one exchange, completely or not at all.
///
/// The response is sent after the commit is durable. With an `Idempotency-Key`, repeating the request returns the same
/// response and writes nothing.
#[utoipa::path(
    post, path = "/sessions/{session_id}/exchanges", operation_id = "record_exchange", tag = "memory",
    params(
        SessionPath,
        ("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255, pattern = "^[!-~]+$", description = "1 to 255 visible ASCII characters, new for each exchange"),
    ),
    request_body = ExchangeRequest,
    responses(
        (status = 201, description = "Persisted", body = ExchangeResponse,
            headers(("Idempotent-Replayed" = Option<bool>, description = "true if an earlier request with the same key wrote the exchange"))),
        SessionUserMismatch,
    )
)]
pub(crate) async fn record(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    Extension(limits): Extension<Arc<Limits>>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<ExchangeRequest>,
) -> Result<Response, Problem> {
    let key = idempotency_key(&headers)?;
    let exchange =
        blocking::spawn_cpu_if_large(request.bytes(), move || request.into_exchange(&limits)).await?;
    let recorded = service.append_exchange(&tenant, &session, exchange, key).await?;
    let body = ExchangeResponse {
        session_id: session.as_str().to_owned(),
        first_seq: recorded.first_seq,
        last_seq: recorded.last_seq,
        message_count: recorded.last_seq - recorded.first_seq + 1,
        created_at: recorded.created_at,
    };
    let mut response = (StatusCode::CREATED, axum::Json(body)).into_response();
    if recorded.replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut keys = headers.get_all(KEY).iter();
    let Some(key) = keys.next() else {
        return Ok(None);
    };
    let sound = (1..=255).contains(&key.len()) && key.as_bytes().iter().all(u8::is_ascii_graphic);
    match (key.to_str(), keys.next()) {
        (Ok(key), None) if sound => Ok(Some(key.to_owned())),
        (_, Some(_)) => Err(Problem::invalid_field("Idempotency-Key", "given twice: send it once")),
        _ => Err(Problem::invalid_field("Idempotency-Key", "must have 1 to 255 visible ASCII characters")),
    }
}

impl ExchangeRequest {
    /// Bytes of its messages.
    fn bytes(&self) -> usize {
        let single = [&self.user_message, &self.assistant_reply].into_iter().flatten();
        single.chain(self.messages.iter().flatten()).map(|message| message.get().len()).sum()
    }

    fn into_exchange(self, limits: &Limits) -> Result<Exchange, Problem> {
        let mut wrong = Vec::new();
        let mut messages = Vec::new();
        let mut take = |path: &str, parsed: Result<Message, Vec<FieldError>>| match parsed {
            Ok(message) => {
                wrong.extend(limits.message(path, &message).err());
                messages.push(message);
            }
            Err(errors) => wrong.extend(errors.into_iter().map(|invalid| invalid.in_value(path))),
        };
        let mut lacks = Vec::new();
        // So many that each need not be looked at.
        limits.messages(self.messages.as_ref().map_or(0, Vec::len))?;
        match (self.user_message, self.assistant_reply, self.messages) {
            (None, None, Some(given)) => {
                if given.is_empty() {
                    lacks.push(("messages", "must hold at least one message"));
                }
                for (index, message) in given.iter().enumerate() {
                    take(&format!("messages[{index}]"), Message::parse(message));
                }
            }
            (user_message, assistant_reply, None) => {
                let missing =
                    "missing: send user_message and assistant_reply, or messages for any other turn";
                match user_message {
                    Some(content) => take("user_message", Message::from_content(Role::User, &content)),
                    None => lacks.push(("user_message", missing)),
                }
                match assistant_reply {
                    Some(content) => {
                        take("assistant_reply", Message::from_content(Role::Assistant, &content));
                    }
                    None => lacks.push(("assistant_reply", missing)),
                }
            }
            (_, _, Some(_)) => {
                lacks.push((
                    "messages",
                    "can't stand beside user_message or assistant_reply: send one form or the other",
                ));
            }
        }
        let lacks = lacks.into_iter();
        wrong.extend(
            lacks.map(|(field, detail)| FieldError { field: field.to_owned(), detail: detail.to_owned() }),
        );
        let user_id =
            self.user_id.and_then(|id| user_id(id, "user_id").map_err(|error| wrong.push(error)).ok());
        let metadata =
            self.metadata.and_then(|given| limits.metadata(&given).map_err(|error| wrong.push(error)).ok());
        if wrong.is_empty() {
            Ok(Exchange::new(messages, user_id, metadata))
        } else {
            Err(Problem::invalid(wrong))
        }
    }
}
