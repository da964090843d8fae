//! `GET /sessions/{session_id}/revisions/{revision}/sources`

use crate::domain::summary_sources::{SUPPORT_THRESHOLD, SentenceSource};
use crate::http::error::Problem;
use crate::http::extract::{Bounded, NoQuery, PathParams, RevisionPath, TenantFromKey};
use crate::http::openapi::responses::RevisionNotFound;
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

/// The sources of a summary.
#[derive(Serialize, ToSchema)]
#[schema(as = RevisionSources)]
pub(crate) struct SourcesBody {
    revision: i64,
    /// The last message that the summary covers.
    cursor: i64,
    /// The first message that the summary was compared with: the newest 2,000 messages up to the cursor, or fewer if they have more
    /// than 4 MiB. Null if the summary covers no message.
    #[schema(required)]
    compared_from_seq: Option<i64>,
    /// The score from which a sentence counts as supported.
    threshold: f64,
    /// The sentences in their order, without the white space between them.
    sentences: Vec<SentenceBody>,
    /// `false` if the summary has more than 500 sentences or 64 KiB, so that the rest is missing here, or if texts that repeat the same
    /// words and numbers took too long to compare, so that exact sentences can be `lexical`.
    is_complete: bool,
}

/// A sentence of a summary with its source.
#[derive(Serialize, ToSchema)]
#[schema(as = SentenceSource)]
struct SentenceBody {
    text: String,
    kind: SourceKind,
    /// The message; null if no compared message has a word of the sentence.
    #[schema(required)]
    seq: Option<i64>,
    /// The share of the sentence that occurs in the message, from 0 to 1; rare words weigh more.
    #[schema(minimum = 0.0, maximum = 1.0)]
    score: f64,
    /// `false` below the threshold: no single message says most of it.
    supported: bool,
}

/// `exact`: the words of the sentence follow each other in the message. `lexical`: the message has most words in common with it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum SourceKind {
    Exact,
    Lexical,
}

impl From<SentenceSource> for SentenceBody {
    fn from(source: SentenceSource) -> Self {
        Self {
            kind: if source.is_exact { SourceKind::Exact } else { SourceKind::Lexical },
            supported: source.is_supported(),
            text: source.text,
            seq: source.seq,
            score: source.score,
        }
    }
}

/// Returns the message from which each sentence of a summary comes.
///
/// The built-in summariser copies sentences, so their source is exact. For other summaries, it is the message with most words in
/// common, and a low score marks sentences to check. The words are those of the search index. A revision whose texts were removed by a
/// redaction has no sentences.
#[utoipa::path(
    get, path = "/sessions/{session_id}/revisions/{revision}/sources", operation_id = "list_revision_sources", tag = "summaries",
    params(RevisionPath),
    responses(
        (status = 200, description = "The sources", body = SourcesBody),
        RevisionNotFound,
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(RevisionPath { session_id: session, revision: Bounded(revision) }): PathParams<RevisionPath>,
    _: NoQuery,
) -> Result<Json<SourcesBody>, Problem> {
    let sources = service.revision_sources(&tenant, &session, revision).await?;
    Ok(Json(SourcesBody {
        revision,
        cursor: sources.cursor,
        compared_from_seq: sources.compared_from,
        threshold: SUPPORT_THRESHOLD,
        sentences: sources.sentences.into_iter().map(SentenceBody::from).collect(),
        is_complete: sources.is_complete,
    }))
}
