//! `GET /sessions/{session_id}/export` and `POST /sessions/{session_id}/import`
//!
//! Both are streamed and never held in memory as a whole. An import has a size limit of its own. `docs/export.md` describes
//! the format.

use crate::blocking;
use crate::capacity;
use crate::domain::export_format::max_line_bytes;
use crate::domain::id::UserId;
use crate::http::error::Problem;
use crate::http::extract::{Caller, NoQuery, PathParams, QueryParams, SessionPath, TenantFromKey};
use crate::http::headers::media_type;
use crate::http::middleware::admission::Admission;
use crate::http::middleware::body_limits::Reservation;
use crate::http::openapi::responses::{ImportTooLarge, InsufficientStorage, SessionExists, SessionNotFound};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use crate::service::import::{ImportLimits, StagedImport, Upload};
use axum::Extension;
use axum::body::{Body, BodyDataStream, HttpBody as _};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

pub(crate) const MEDIA_TYPE: &str = "application/x-ndjson";
/// The accepted media types. Clients use several names for JSON lines.
const MEDIA_TYPES: [&str; 4] =
    [MEDIA_TYPE, "application/ndjson", "application/jsonl", "application/x-jsonlines"];

/// The schema of JSON lines. Generators read them into a file instead of a text because of its format.
#[derive(ToSchema)]
#[schema(format = Binary)]
#[expect(dead_code, reason = "only its schema is used")]
struct JsonLines(String);

/// Maximum number of bytes that are read after an error. Without reading on, a client that is still sending would not
/// receive the response.
const MAX_DRAIN_BYTES: usize = 8 * 1024 * 1024;
/// Maximum duration of this reading.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the whole session as JSON lines: its state, its messages, its revisions, and a last line with a checksum.
///
/// The export is a snapshot of the moment when it begins. If it fails, the connection is closed before the last line.
#[utoipa::path(
    get, path = "/sessions/{session_id}/export", operation_id = "export_session", tag = "sessions",
    params(SessionPath),
    responses(
        (status = 200, description = "The lines; docs/export.md describes their format", body = inline(JsonLines), content_type = "application/x-ndjson"),
        SessionNotFound,
    )
)]
pub(crate) async fn export(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    _: NoQuery,
) -> Result<impl IntoResponse, Problem> {
    let export = service.export(&tenant, &session).await?;
    let work = capacity::current();
    let lines = stream::try_unfold((export, work), |(mut export, work)| async move {
        let next = capacity::scope(work.clone(), export.next()).await;
        // The status is already sent. The client sees an incomplete body.
        let next = next.inspect_err(|error| tracing::warn!(%error, "export failed"))?;
        Ok::<_, crate::service::Error>(next.map(|lines| (lines, (export, work))))
    });
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], Body::from_stream(lines)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImportParams {
    /// User of the new session. Without it, the user in the export; without that, the user that the session is bound to, or
    /// else `memory.default_user`.
    user_id: Option<UserId>,
}

/// The imported session.
#[derive(Serialize, ToSchema)]
pub(crate) struct ImportResponse {
    session_id: String,
    /// The user of the session; null if it has none.
    #[schema(required)]
    user_id: Option<String>,
    /// Number of imported messages.
    messages: i64,
    /// Number of imported revisions.
    revisions: i64,
    /// The `seq` of the newest message.
    last_seq: i64,
    /// The `seq` of the last message that the summary covers; 0 = none.
    cursor: i64,
}

/// Creates a session from an export, or from JSON lines with `role` and `content`, completely or not at all.
///
/// Such a line is a message of an exchange, in the format `openai` or `anthropic`. Repeating an import returns 200 and writes nothing. An import into any other existing session returns 409.
#[utoipa::path(
    post, path = "/sessions/{session_id}/import", operation_id = "import_session", tag = "sessions",
    params(SessionPath, ImportParams),
    request_body(
        content = inline(JsonLines), content_type = "application/x-ndjson",
        description = "An export, or one message per line, such as `{\"role\": \"user\", \"content\": \"Hi\"}`; at most limits.max_import_bytes",
    ),
    responses(
        (status = 201, description = "Imported", body = ImportResponse),
        (status = 200, description = "Imported by an earlier request", body = ImportResponse),
        SessionNotFound, SessionExists, ImportTooLarge, InsufficientStorage,
    )
)]
pub(crate) async fn import(
    State(service): State<MemoryService>,
    Caller { tenant, default_user }: Caller,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    QueryParams(params): QueryParams<ImportParams>,
    Extension(admission): Extension<Arc<Admission>>,
    headers: HeaderMap,
    body: Body,
) -> Result<impl IntoResponse, Problem> {
    let limits = admission.limits();
    let sizes = limits.sizes();
    let max_line_bytes = max_line_bytes(sizes).min(admission.largest_partial_body());
    let upload = Upload::begin(ImportLimits { sizes, max_bytes: limits.max_import_bytes, max_line_bytes })?;
    // Rejects a body before reading it if its Content-Length exceeds the limit.
    upload.check_size(body.size_hint().lower())?;
    let mut body = body.into_data_stream();
    let received = async {
        if !MEDIA_TYPES.contains(&media_type(&headers).as_str()) {
            return Err(Problem::unsupported_media_type_for_lines());
        }
        receive(upload, &mut body, &admission).await
    };
    let received = match received.await {
        Ok(received) => received,
        Err(problem) => {
            let _ = timeout(DRAIN_TIMEOUT, drain(body)).await;
            return Err(problem);
        }
    };
    let imported = service.import(&tenant, &session, params.user_id, default_user, received).await?;
    let status = if imported.created { StatusCode::CREATED } else { StatusCode::OK };
    let body = ImportResponse {
        session_id: session.as_str().to_owned(),
        user_id: imported.session.user_id.map(|user| user.as_str().to_owned()),
        messages: imported.messages,
        revisions: imported.revisions,
        last_seq: imported.session.last_seq,
        cursor: imported.session.cursor,
    };
    Ok((status, Json(body)))
}

/// Reads the body to its end. Parsing runs outside the threads that serve requests. The total time is unlimited, but each
/// chunk must arrive within `read_timeout`.
async fn receive(
    mut upload: Upload,
    body: &mut BodyDataStream,
    admission: &Admission,
) -> Result<StagedImport, Problem> {
    let read_timeout = admission.read_timeout();
    let work = capacity::current();
    let mut reservation = Reservation::new(admission, &work, 0).await?;
    loop {
        let next = timeout(read_timeout, body.next()).await;
        let Some(chunk) = next.map_err(|_| Problem::body_timeout(read_timeout))? else {
            break;
        };
        let chunk = chunk.map_err(|_| {
            Problem::bad_request("The body is incomplete. Nothing was imported: send the request again.")
        })?;
        // The reservation covers the incomplete line, because a line of an export may be larger than any other body.
        reservation.resize(upload.partial_line_bytes() + chunk.len())?;
        upload = blocking::spawn_cpu(move || upload.feed(&chunk).map(|()| upload)).await?;
    }
    Ok(blocking::spawn_cpu(move || upload.finish()).await?)
}

async fn drain(mut body: BodyDataStream) {
    let mut read = 0;
    while let Some(Ok(chunk)) = body.next().await {
        read += chunk.len();
        if read > MAX_DRAIN_BYTES {
            return;
        }
    }
}
