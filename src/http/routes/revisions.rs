//! `/sessions/{session_id}/revisions`

use crate::domain::revision::{MetaConsolidation, Provenance, Revision};
use crate::http::error::Problem;
use crate::http::extract::{EmptyBody, NoQuery, QueryParams, RevisionPath, SessionPath, TenantFromKey};
use crate::http::openapi::responses::{RevisionNotFound, SessionNotFound};
use crate::http::pagination::{self, Limit, Page};
use crate::service::MemoryService;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::{IntoParams, ToSchema};

/// The summary and the cursor as they stood after one change, with where they came from.
#[derive(Serialize, ToSchema)]
pub(crate) struct RevisionBody {
    /// 1, 2, 3 … per session.
    revision: i64,
    /// `consolidation` or `restore`.
    kind: &'static str,
    /// The first message that it added; null for a restore.
    from_seq: Option<i64>,
    /// The last message that it added; null for a restore.
    to_seq: Option<i64>,
    /// The last message that the summary covers after it.
    cursor: i64,
    /// The whole summary after it.
    text: String,
    /// What the model wrote for the range.
    added: String,
    /// The compression that followed, where the summary had grown too long.
    meta: Option<MetaBody>,
    /// Null where no model was asked.
    model: Option<String>,
    pool: Option<String>,
    prompt_version: Option<String>,
    /// Words of the whole summary.
    words: i64,
    /// Tokens of the whole summary.
    tokens: i64,
    /// What it took.
    usage: UsageBody,
    duration_ms: Option<i64>,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
}

/// A meta-consolidation.
#[derive(Serialize, ToSchema)]
struct MetaBody {
    /// The summary before it was compressed.
    text_before: String,
    model: String,
    pool: String,
    prompt_version: String,
    usage: UsageBody,
    duration_ms: i64,
}

/// What a text took: all calls of models for it, those that failed included. Null where it is not known.
#[derive(Default, Serialize, ToSchema)]
struct UsageBody {
    /// Tokens of the prompts, as far as providers counted them.
    input_tokens: Option<i64>,
    /// Tokens of the answers, as far as providers counted them.
    output_tokens: Option<i64>,
    /// Calls of models.
    calls: Option<i64>,
    /// Calls that failed.
    failures: Option<i64>,
    /// Milliseconds spent waiting for a turn.
    queued_ms: Option<i64>,
}

impl From<&Provenance> for UsageBody {
    fn from(source: &Provenance) -> Self {
        Self {
            input_tokens: source.input_tokens,
            output_tokens: source.output_tokens,
            calls: source.calls,
            failures: source.failures,
            queued_ms: source.queued_ms,
        }
    }
}

impl From<MetaConsolidation> for MetaBody {
    fn from(meta: MetaConsolidation) -> Self {
        Self {
            text_before: meta.text_before,
            usage: UsageBody::from(&meta.source),
            model: meta.source.model,
            pool: meta.source.pool,
            prompt_version: meta.source.prompt_version,
            duration_ms: meta.source.duration_ms,
        }
    }
}

impl From<Revision> for RevisionBody {
    fn from(revision: Revision) -> Self {
        let source = revision.source;
        Self {
            revision: revision.revision,
            kind: revision.kind.as_str(),
            from_seq: revision.range.map(|(from, _)| from),
            to_seq: revision.range.map(|(_, to)| to),
            cursor: revision.cursor,
            text: revision.summary.text,
            added: revision.added,
            meta: revision.meta.map(MetaBody::from),
            usage: source.as_ref().map(UsageBody::from).unwrap_or_default(),
            duration_ms: source.as_ref().map(|source| source.duration_ms),
            pool: source.as_ref().map(|source| source.pool.clone()),
            prompt_version: source.as_ref().map(|source| source.prompt_version.clone()),
            model: source.map(|source| source.model),
            words: revision.summary.words,
            tokens: revision.summary.tokens,
            created_at: revision.created_at,
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    /// Items of the page, 1 to 1000; 50 where it is left out.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 1000)]
    limit: Option<Limit>,
    /// `next` of the page before.
    cursor: Option<String>,
}

impl ListParams {
    /// The number of items, and the number that they come before.
    pub(crate) fn read(&self) -> Result<(i64, i64), Problem> {
        Ok((
            pagination::page_size(self.limit),
            pagination::decode_cursor(self.cursor.as_deref())?.unwrap_or(i64::MAX),
        ))
    }
}

/// How the summary came to be, newest first.
#[utoipa::path(
    get, path = "/sessions/{session_id}/revisions", operation_id = "list_revisions", tag = "summary",
    params(SessionPath, ListParams),
    responses(
        (status = 200, description = "Revisions", body = Page<RevisionBody>),
        SessionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    QueryParams(params): QueryParams<ListParams>,
) -> Result<Json<Page<RevisionBody>>, Problem> {
    let (limit, before) = params.read()?;
    let revisions = service.revisions(&tenant, &session, before, limit + 1).await?;
    Ok(Json(Page::new(revisions, limit, |revision| revision.revision, RevisionBody::from)))
}

/// One revision.
#[utoipa::path(
    get, path = "/sessions/{session_id}/revisions/{revision}", operation_id = "get_revision", tag = "summary",
    params(
        SessionPath,
        RevisionPath,
    ),
    responses(
        (status = 200, description = "The revision", body = RevisionBody),
        RevisionNotFound,
    )
)]
pub(crate) async fn get(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    RevisionPath(revision): RevisionPath,
    _: NoQuery,
) -> Result<Json<RevisionBody>, Problem> {
    Ok(Json(service.revision(&tenant, &session, revision).await?.into()))
}

/// Sets summary and cursor back to a revision, as a new revision.
///
/// The history is there, so what lies behind the cursor can be summarised anew.
#[utoipa::path(
    post, path = "/sessions/{session_id}/revisions/{revision}/restore", operation_id = "restore_revision", tag = "summary",
    params(
        SessionPath,
        RevisionPath,
    ),
    responses(
        (status = 201, description = "The new revision", body = RevisionBody),
        RevisionNotFound,
    )
)]
pub(crate) async fn restore(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    RevisionPath(revision): RevisionPath,
    _: EmptyBody,
) -> Result<(StatusCode, Json<RevisionBody>), Problem> {
    Ok((StatusCode::CREATED, Json(service.restore(&tenant, &session, revision).await?.into())))
}
