//! `/sessions/{session_id}/revisions`: the history of the summary.

use crate::domain::revision::{MetaConsolidation, ModelUsage, Provenance, Revision, RevisionKind};
use crate::http::error::Problem;
use crate::http::extract::{
    Bounded, EmptyBody, NoQuery, PathParams, QueryParams, RevisionPath, SessionPath, TenantFromKey,
};
use crate::http::headers::preferred_text;
use crate::http::openapi::responses::{
    RevisionNotFound, RevisionRedacted, SessionNotFound, UnsupportedMediaType,
};
use crate::http::pagination::{Page, PageParams};
use crate::http::readable;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
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
    /// First message that was added to the summary; null for a restore. Of a redaction, the redacted message.
    #[schema(required)]
    from_seq: Option<i64>,
    /// Last message that was added to the summary; null for a restore. Of a redaction, the redacted message.
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
