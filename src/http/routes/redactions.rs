//! `DELETE /sessions/{session_id}/messages/{seq}` and `GET /sessions/{session_id}/redactions`: remove the content of a message.

use crate::domain::redaction::{Redaction, RedactionMark};
use crate::http::error::Problem;
use crate::http::extract::{
    Bounded, EmptyBody, MessagePath, PathParams, QueryParams, SessionPath, TenantAndKey, TenantFromKey,
};
use crate::http::openapi::responses::{MessageNotFound, SessionNotFound};
use crate::http::pagination::{Page, PageParams};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use serde::Serialize;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// The record of a redaction. It contains nothing of the message.
#[derive(Serialize, ToSchema)]
#[schema(as = Redaction)]
pub(crate) struct RedactionBody {
    /// The message.
    seq: i64,
    #[serde(with = "time::serde::rfc3339")]
    redacted_at: OffsetDateTime,
    /// The API key that requested it; null without keys, and after an import.
    #[schema(required)]
    key_id: Option<String>,
    /// The revision that the redaction appended: the last summary before the message.
    revision: i64,
    /// The last message that this revision covers. The messages after it will be summarised again.
    cursor: i64,
    /// The revisions that lost their texts.
    redacted_revisions: Vec<i64>,
    /// Number of forks and branches in which the same message was redacted with it.
    copies: i64,
}

impl From<Redaction> for RedactionBody {
    fn from(redaction: Redaction) -> Self {
        let Redaction { seq, mark, revision, cursor, redacted_revisions } = redaction;
        let RedactionMark { redacted_at, key_id, copies } = mark;
        Self { seq, redacted_at, key_id, revision, cursor, redacted_revisions, copies }
    }
}

/// Removes the content of a message permanently.
///
/// Role and `seq` of the message remain, and the ids and names of its tool calls; a placeholder replaces everything else. It is
/// removed from its copies in forks and branches, too, from the search index, and from every summary that covers it: these
/// revisions lose their texts, and the session continues from the last summary before the message, as a new revision. The messages
/// after that are summarised again as soon as consolidation is due or requested. A running consolidation discards its result.
/// Repeating the request changes nothing and returns the same record.
#[utoipa::path(
    delete, path = "/sessions/{session_id}/messages/{seq}", operation_id = "redact_message", tag = "sessions",
    params(MessagePath),
    responses(
        (status = 200, description = "The record of the redaction", body = RedactionBody),
        MessageNotFound,
    )
)]
pub(crate) async fn redact(
    State(service): State<MemoryService>,
    TenantAndKey(tenant, key): TenantAndKey,
    PathParams(MessagePath { session_id: session, seq: Bounded(seq) }): PathParams<MessagePath>,
    _: EmptyBody,
) -> Result<Json<RedactionBody>, Problem> {
    Ok(Json(service.redact_message(&tenant, &session, seq, key).await?.into()))
}

/// Lists the redacted messages of a session, oldest message first.
///
/// A record says when, and with which API key, a message was redacted, and contains nothing of the message.
#[utoipa::path(
    get, path = "/sessions/{session_id}/redactions", operation_id = "list_redactions", tag = "sessions",
    params(SessionPath, PageParams),
    responses(
        (status = 200, description = "Records of redactions", body = Page<RedactionBody>),
        SessionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(params): QueryParams<PageParams>,
) -> Result<Json<Page<RedactionBody>>, Problem> {
    let (limit, after_seq) = params.read_ascending()?;
    let redactions = service.redactions(&tenant, &session, after_seq, limit).await?;
    Ok(Json(Page::new(redactions, |redaction| redaction.seq, RedactionBody::from)))
}
