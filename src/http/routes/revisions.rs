//! `/sessions/{session_id}/revisions`: the history of the summary.

use crate::domain::invisible::without_nul;
use crate::domain::json::as_integer;
use crate::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use crate::domain::summary;
use crate::domain::validation::FieldError;
use crate::http::error::Problem;
use crate::http::extract::{
    Bounded, EmptyBody, JsonBody, NoQuery, PathParams, QueryParams, RevisionPath, SessionPath, TenantFromKey,
};
use crate::http::headers::preferred_text;
use crate::http::openapi::responses::{
    EditConflict, RevisionNotFound, RevisionRedacted, SessionNotFound, UnsupportedMediaType,
};
use crate::http::pagination::{Page, PageParams};
use crate::http::readable;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use serde_json::Number;
use time::OffsetDateTime;
use utoipa::ToSchema;

/// Summary and cursor after one change, and their provenance.
// The API lists the fields of summary and provenance next to the others; export and store nest them.
#[derive(Serialize, ToSchema)]
#[schema(as = Revision)]
pub(crate) struct RevisionBody {
    /// 1, 2, 3 … per session.
    revision: i64,
    kind: RevisionKind,
    /// First message that was added to the summary; null for a restore and an edit. Of a redaction, the redacted message.
    #[schema(required)]
    from_seq: Option<i64>,
    /// Last message that was added to the summary; null for a restore and an edit. Of a redaction, the redacted message.
    #[schema(required)]
    to_seq: Option<i64>,
    /// The last message that the summary covers.
    cursor: i64,
    /// The complete summary.
    text: String,
    /// The text that was written for the added messages.
    added: String,
    /// The meta-consolidation that followed because the summary had become too long.
    #[schema(required)]
    meta: Option<MetaConsolidationBody>,
    /// Null if no model was called.
    #[schema(required)]
    model: Option<String>,
    /// The pool of the model.
    #[schema(required)]
    pool: Option<String>,
    /// The version of the prompts.
    #[schema(required)]
    prompt_version: Option<String>,
    /// Words of the complete summary.
    words: i64,
    /// Tokens of the complete summary.
    tokens: i64,
    usage: ModelUsage,
    /// Milliseconds from the first attempt to the text. Null if no model was called.
    #[schema(required)]
    duration_ms: Option<i64>,
    /// The message whose redaction removed the texts of the revision, which then are empty; otherwise null.
    #[schema(required)]
    redacted_seq: Option<i64>,
    /// Time at which the revision was stored.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

/// The meta-consolidation that followed a consolidation.
// The fields of the provenance are listed: its schema allows no further field, so it cannot be a part of this one.
#[derive(Serialize, ToSchema)]
#[schema(as = MetaConsolidation)]
struct MetaConsolidationBody {
    /// The summary before it was compressed.
    text_before: String,
    model: String,
    pool: String,
    prompt_version: String,
    usage: ModelUsage,
    duration_ms: i64,
}

impl From<Revision> for RevisionBody {
    fn from(revision: Revision) -> Self {
        let meta = revision.meta.map(|MetaConsolidation { text_before, provenance }| {
            let Provenance { model, pool, prompt_version, usage, duration_ms } = provenance;
            MetaConsolidationBody { text_before, model, pool, prompt_version, usage, duration_ms }
        });
        let provenance = revision.provenance;
        let name = |name: fn(&Provenance) -> &String| provenance.as_ref().map(name).cloned();
        Self {
            revision: revision.revision,
            kind: revision.kind,
            from_seq: revision.from_seq,
            to_seq: revision.to_seq,
            cursor: revision.cursor,
            text: revision.summary.text,
            added: revision.added,
            meta,
            model: name(|made| &made.model),
            pool: name(|made| &made.pool),
            prompt_version: name(|made| &made.prompt_version),
            words: revision.summary.words,
            tokens: revision.summary.tokens,
            usage: provenance.as_ref().map(|made| made.usage).unwrap_or_default(),
            duration_ms: provenance.as_ref().map(|made| made.duration_ms),
            redacted_seq: revision.redacted_seq,
            created_at: revision.created_at,
        }
    }
}

/// Lists the revisions of the summary, newest first.
///
/// Each contains the complete summary after the change, the text that was added, and the cost in tokens and time. A page with
/// large summaries ends before `limit`; `next` is set then.
#[utoipa::path(
    get, path = "/sessions/{session_id}/revisions", operation_id = "list_revisions", tag = "summaries",
    params(SessionPath, PageParams),
    responses(
        (status = 200, description = "Revisions", body = Page<RevisionBody>),
        SessionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(params): QueryParams<PageParams>,
) -> Result<Json<Page<RevisionBody>>, Problem> {
    let (limit, before) = params.read_descending()?;
    let revisions = service.revisions(&tenant, &session, before, limit).await?;
    Ok(Json(Page::new(revisions, |revision| revision.revision, RevisionBody::from)))
}

/// Returns one revision.
///
/// Revision 0 is the session before its first revision and has no text, so it is not found. With the header `accept: text/plain`
/// or `text/markdown`, the response is the summary alone.
#[utoipa::path(
    get, path = "/sessions/{session_id}/revisions/{revision}", operation_id = "get_revision", tag = "summaries",
    params(RevisionPath),
    responses(
        (status = 200, description = "The revision", body = RevisionBody),
        RevisionNotFound,
    )
)]
pub(crate) async fn get(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(RevisionPath { session_id: session, revision: Bounded(revision) }): PathParams<RevisionPath>,
    _: NoQuery,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let revision = service.revision(&tenant, &session, revision).await?;
    Ok(match preferred_text(&headers) {
        Some(content_type) => readable::summary(content_type, &revision.summary.text),
        None => Json(RevisionBody::from(revision)).into_response(),
    })
}

/// A new summary of the messages that the present one covers.
#[derive(Deserialize, ToSchema)]
pub(crate) struct EditRequest {
    /// The complete summary; at most 1 MiB.
    #[schema(
        required,
        value_type = String,
        min_length = 1,
        max_length = 1_048_576,
        pattern = r"[^\s\u0000]"
    )]
    summary: Option<String>,
    /// The revision that the edit is based on: the present one, or the request fails.
    #[schema(required, value_type = i64, minimum = 0)]
    based_on: Option<Number>,
}

impl EditRequest {
    /// Returns the text and its base. Reports all invalid fields together.
    fn read(self) -> Result<(String, i64), Problem> {
        let missing = |field: &str| FieldError::new(field, "missing");
        let text = self.summary.as_deref().map(without_nul).ok_or_else(|| missing("summary"));
        let text = text.and_then(|text| summary::check_written("summary", &text).map(|()| text));
        let based_on = self.based_on.ok_or_else(|| missing("based_on")).and_then(|number| {
            let number = as_integer(&number).filter(|revision| *revision >= 0);
            let detail = "must be a whole number from 0 on: the revision of the summary that was edited";
            number.ok_or_else(|| FieldError::new("based_on", detail))
        });
        match (text, based_on) {
            (Ok(text), Ok(based_on)) => Ok((text, based_on)),
            (text, based_on) => Err(Problem::invalid(text.err().into_iter().chain(based_on.err()).collect())),
        }
    }
}

/// Replaces the summary by an edited one, as a new revision.
///
/// The cursor stays, so the new summary takes the place of the same messages. Later consolidations append to it, and compress it
/// if it has become too long. The edit fails if another revision was stored since `based_on`; a running consolidation discards its
/// result.
#[utoipa::path(
    post, path = "/sessions/{session_id}/revisions", operation_id = "edit_summary", tag = "summaries",
    params(SessionPath),
    request_body(content = EditRequest, examples(
        ("edit" = (summary = "A corrected summary", value = json!({"summary": "Ada prefers tea.", "based_on": 1}))),
    )),
    responses(
        (status = 201, description = "The new revision", body = RevisionBody),
        SessionNotFound, EditConflict,
    )
)]
pub(crate) async fn edit(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    JsonBody(request): JsonBody<EditRequest>,
) -> Result<(StatusCode, Json<RevisionBody>), Problem> {
    let (text, based_on) = request.read()?;
    let edited = service.edit_summary(&tenant, &session, based_on, text).await?;
    Ok((StatusCode::CREATED, Json(edited.into())))
}

/// Sets summary and cursor back to a revision, as a new revision.
///
/// The history is unchanged, so the messages after the cursor can be summarised again. Revision 0 removes the summary.
#[utoipa::path(
    post, path = "/sessions/{session_id}/revisions/{revision}/restore", operation_id = "restore_revision", tag = "summaries",
    params(RevisionPath),
    responses(
        (status = 201, description = "The new revision", body = RevisionBody),
        RevisionNotFound, RevisionRedacted, UnsupportedMediaType,
    )
)]
pub(crate) async fn restore(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(RevisionPath { session_id: session, revision: Bounded(revision) }): PathParams<RevisionPath>,
    _: EmptyBody,
) -> Result<(StatusCode, Json<RevisionBody>), Problem> {
    Ok((StatusCode::CREATED, Json(service.restore(&tenant, &session, revision).await?.into())))
}
