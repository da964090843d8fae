//! `/users/{user_id}/memory`

use crate::domain::invisible::without_nul;
use crate::domain::memory::{MemoryAuthor, MemoryDocument, MemoryRevision};
use crate::http::error::Problem;
use crate::http::extract::{
    JsonBody, NoQuery, PathParams, QueryParams, TenantFromKey, UserPath, body_bytes, reject_query,
};
use crate::http::headers::{is_json, media_type, preferred_text};
use crate::http::openapi::responses::VersionMismatch;
use crate::http::pagination::{Page, PageParams};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

/// A user's memory document.
#[derive(Serialize, ToSchema)]
#[schema(as = MemoryDocument)]
pub(crate) struct MemoryBody {
    user_id: String,
    /// 0 if it was never written.
    version: i64,
    /// Markdown.
    content: String,
    /// Number of words.
    words: i64,
    /// Number of tokens, counted by `o200k_base`.
    tokens: i64,
    /// Time at which this version was written; null if it was never written.
    #[schema(required)]
    #[serde(with = "time::serde::rfc3339::option")]
    updated_at: Option<OffsetDateTime>,
}

impl MemoryBody {
    fn new(user_id: &str, document: Option<MemoryDocument>) -> Self {
        let user_id = user_id.to_owned();
        match document {
            None => {
                Self { user_id, version: 0, content: String::new(), words: 0, tokens: 0, updated_at: None }
            }
            Some(MemoryDocument { version, content, words, tokens, created_at }) => {
                Self { user_id, version, content, words, tokens, updated_at: Some(created_at) }
            }
        }
    }
}

/// A version of a memory document.
// The fields of the document are listed: its schema allows no further field, so it cannot be a part of this one.
#[derive(Serialize, ToSchema)]
#[schema(as = MemoryRevision)]
pub(crate) struct MemoryRevisionBody {
    user_id: String,
    /// 1, 2, 3 … per user.
    version: i64,
    /// Markdown.
    content: String,
    /// Number of words.
    words: i64,
    /// Number of tokens, counted by `o200k_base`.
    tokens: i64,
    /// Time at which this version was written.
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
    /// By a request (`http`), by a memory tool (`tool`), or by one over the Model Context Protocol (`mcp`); null if
    /// the version was written before authors were recorded.
    #[schema(required)]
    author: Option<MemoryAuthor>,
}

impl MemoryRevisionBody {
    fn new(user_id: &str, MemoryRevision { document, author }: MemoryRevision) -> Self {
        let MemoryDocument { version, content, words, tokens, created_at } = document;
        Self { user_id: user_id.to_owned(), version, content, words, tokens, updated_at: created_at, author }
    }
}

type TaggedMemory = ([(HeaderName, HeaderValue); 1], Json<MemoryBody>);

/// Adds the version as the `ETag`, for example `"3"`.
fn with_etag(body: MemoryBody) -> TaggedMemory {
    ([etag(&body)], Json(body))
}

fn etag(body: &MemoryBody) -> (HeaderName, HeaderValue) {
    let tag = HeaderValue::from_str(&format!("\"{}\"", body.version));
    (header::ETAG, tag.unwrap_or(HeaderValue::from_static("\"0\"")))
}

/// Returns the memory document of a user; version 0 if it was never written.
///
/// The header `ETag` contains the version. Send it as `If-Match` to replace this version and no newer one. With the header
/// `accept: text/markdown` or `text/plain`, the response is the document alone.
#[utoipa::path(
    get, path = "/users/{user_id}/memory", operation_id = "read_memory", tag = "users",
    params(UserPath),
    responses(
        (status = 200, description = "The document", body = MemoryBody, headers(("ETag" = String, description = "The version, for If-Match"))),
    )
)]
pub(crate) async fn read(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    _: NoQuery,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let document = service.memory(&tenant, &user).await?;
    let body = MemoryBody::new(user.as_str(), document);
    Ok(match preferred_text(&headers) {
        Some(content_type) => {
            let tag = etag(&body);
            ([tag, (header::CONTENT_TYPE, HeaderValue::from_static(content_type))], body.content)
                .into_response()
        }
        None => with_etag(body).into_response(),
    })
}

/// The complete new document.
#[derive(Deserialize, ToSchema)]
pub(crate) struct MemoryRequest {
    /// Markdown; it replaces the whole document. Its length is limited (`memory.max_bytes`). NUL characters are removed.
    content: String,
}

/// The text of a new document: the field `content` of a JSON object, or the whole body.
pub(crate) struct NewDocument(String);

impl<S: Send + Sync> FromRequest<S> for NewDocument {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if is_json(request.headers()) {
            let JsonBody(MemoryRequest { content }) = JsonBody::from_request(request, state).await?;
            return Ok(Self(content));
        }
        if !["text/markdown", "text/plain"].contains(&media_type(request.headers()).as_str()) {
            return Err(Problem::unsupported_media_type_for_document());
        }
        reject_query(request.uri(), "unknown: this request takes no parameters")?;
        let text = String::from_utf8(body_bytes(request).await?.into());
        text.map(Self).map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            Problem::invalid_field("body", format!("is not UTF-8 from byte {valid} on"))
        })
    }
}

/// Replaces the memory document.
///
/// All sessions of the user share the document. Without `If-Match`, the last write wins; earlier versions remain readable.
/// The body can also be the Markdown itself, with the header `content-type: text/markdown` or `text/plain`.
#[utoipa::path(
    put, path = "/users/{user_id}/memory", operation_id = "write_memory", tag = "users",
    params(
        UserPath,
        ("If-Match" = Option<String>, Header, pattern = "^([*]|\"[0-9]{1,18}\")$", description = "The ETag of the version that the change is based on; 412 if there is a newer one"),
    ),
    request_body(content = MemoryRequest, examples(
        ("document" = (summary = "A document", value = json!({"content": "# Ada\n\n- Likes tea.\n"}))),
    )),
    responses(
        (status = 200, description = "The new document", body = MemoryBody, headers(("ETag" = String, description = "Its version"))),
        VersionMismatch,
    )
)]
pub(crate) async fn write(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    headers: HeaderMap,
    NewDocument(content): NewDocument,
) -> Result<TaggedMemory, Problem> {
    let expected = if_match(&headers)?;
    let content = without_nul(&content);
    let document = service.write_memory(&tenant, &user, &content, expected, MemoryAuthor::Http).await?;
    Ok(with_etag(MemoryBody::new(user.as_str(), Some(document))))
}

/// Returns the version in `If-Match`; `*` means any. The typed header accepts weak tags and lists, which are errors here.
fn if_match(headers: &HeaderMap) -> Result<Option<i64>, Problem> {
    let Some(tag) = headers.get(header::IF_MATCH) else {
        return Ok(None);
    };
    let tag = tag.to_str().unwrap_or_default().trim();
    if tag == "*" {
        return Ok(None);
    }
    let version =
        tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).and_then(|tag| tag.parse().ok());
    version
        .map(Some)
        .ok_or_else(|| Problem::invalid_field("If-Match", "must be an ETag of this document, or *"))
}

/// Lists all versions of the memory document, newest first.
///
/// The list is empty if the document was never written. A page with large documents ends before `limit`; `next` is set then.
#[utoipa::path(
    get, path = "/users/{user_id}/memory/revisions", operation_id = "list_memory_revisions", tag = "users",
    params(UserPath, PageParams),
    responses(
        (status = 200, description = "Versions", body = Page<MemoryRevisionBody>),
    )
)]
pub(crate) async fn revisions(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(UserPath { user_id: user }): PathParams<UserPath>,
    QueryParams(params): QueryParams<PageParams>,
) -> Result<Json<Page<MemoryRevisionBody>>, Problem> {
    let (limit, before) = params.read_descending()?;
    let revisions = service.memory_revisions(&tenant, &user, before, limit).await?;
    let body = |revision| MemoryRevisionBody::new(user.as_str(), revision);
    Ok(Json(Page::new(revisions, |revision: &MemoryRevision| revision.document.version, body)))
}
