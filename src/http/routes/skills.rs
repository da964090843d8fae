//! `GET /skills/memory`

use crate::http::extract::NoQuery;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

/// Returns the guide that teaches an agent to use its memory.
///
/// The guide is Markdown for a system prompt. `include_memory_skill` adds it to a context.
#[utoipa::path(
    get, path = "/skills/memory", operation_id = "read_memory_skill", tag = "tools",
    responses(
        (status = 200, description = "The guide", body = String, content_type = "text/markdown"),
    )
)]
pub(crate) async fn memory(State(service): State<MemoryService>, _: NoQuery) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/markdown; charset=utf-8")], service.memory_guide())
}
