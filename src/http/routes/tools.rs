//! `GET /tools` and `POST /sessions/{session_id}/tools/{name}`: the agent's tools for clients that call a model API
//! themselves. [`mcp`](super::mcp) serves the same tools to MCP clients.

use crate::blocking;
use crate::domain::api_key::Scope;
use crate::domain::format::Format;
use crate::domain::id::UserId;
use crate::domain::memory::MemoryAuthor;
use crate::domain::tool::provider_call::ProviderToolCall;
use crate::domain::tool::{Tool, ToolCall};
use crate::domain::validation::FieldError;
use crate::http::chat::{ToolRequest, ToolResultMessage};
use crate::http::context_schemas::ToolListBody;
use crate::http::error::Problem;
use crate::http::extract::{JsonTextBody, PathParams, QueryParams, TenantFromKey, ToolPath};
use crate::http::openapi::responses::{SessionUserMismatch, ToolNotFound};
use crate::http::response_body::Json;
use crate::service::MemoryService;
use crate::service::keys::authenticator::Principal;
use crate::service::tools::{ToolCaller, ToolContext, ToolOutcome};
use axum::Extension;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    /// Format of the definitions: `openai` (chat completions) or `anthropic` (messages).
    #[param(inline, required = false)]
    format: Option<Format>,
}

/// Tool definitions. [`ToolListBody`] is the schema.
#[derive(Serialize)]
pub(crate) struct ToolList {
    format: Format,
    tools: Vec<Value>,
}

/// Returns the definitions of the tools for a request to a model.
///
/// They are the value of `tools` in a request in this format. `/mcp` offers the same tools over MCP.
#[utoipa::path(
    get, path = "/tools", operation_id = "list_tools", tag = "tools",
    params(ListParams),
    responses(
        (status = 200, description = "Definitions", body = ToolListBody),
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    QueryParams(params): QueryParams<ListParams>,
) -> Json<ToolList> {
    let format = params.format.unwrap_or_default();
    Json(ToolList { format, tools: service.tools().map(|tool| tool.definition(format)).collect() })
}

/// The result of a tool call.
#[derive(Serialize, ToSchema)]
pub(crate) struct ToolResult {
    #[schema(value_type = Tool)]
    tool: &'static str,
    /// The user on whose behalf the tool was called; null if there is none.
    #[schema(required)]
    user_id: Option<String>,
    /// `false` before the first exchange of the session: its id may be mistyped.
    exists: bool,
    /// `true` if nothing was done. `content` then tells the model what to do.
    is_error: bool,
    /// Text for the model.
    content: String,
    /// The same as data. The fields depend on the tool; null if nothing was done.
    #[schema(value_type = Option<Object>, required)]
    data: Value,
    /// The message to send to the model: a message with the role `tool`, or a `tool_result` block. Null if the request was
    /// arguments alone.
    #[schema(value_type = Option<ToolResultMessage>, required)]
    result: Option<Value>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct CallParams {
    /// The user. The first request that names a user binds the session to it; 409 if the session belongs to another one.
    user_id: Option<UserId>,
}

/// Tells how to name the user of a call.
pub(crate) const USER_ADVICE: &str =
    "Name the user with `user_id`: in this call, or before it in an exchange or a context of this session.";

/// Executes a tool call and returns the message for the model.
///
/// Errors that the model can correct (invalid arguments, a document that is too long) are results with `is_error`, so that
/// the loop of the agent continues. The same applies to a call without a user. The user is that of the session. A session
/// without a user is bound to `user_id`, except if the API key has the scope `read`; an unknown session does not exist
/// afterwards either. `memory_read` and `search_history` require an API key with the scope `read`, the other tools one with the scope
/// `write`.
#[utoipa::path(
    post, path = "/sessions/{session_id}/tools/{name}", operation_id = "call_tool", tag = "tools",
    params(ToolPath, CallParams),
    request_body(content = Option<ToolRequest>, examples(
        ("openai" = (summary = "A call of the chat format", value = json!({
            "id": "call_1", "type": "function",
            "function": {"name": "search_history", "arguments": "{\"query\": \"ferry\"}"},
        }))),
        ("anthropic" = (summary = "A tool_use block", value = json!({
            "type": "tool_use", "id": "toolu_1", "name": "search_history", "input": {"query": "ferry"},
        }))),
        ("arguments" = (summary = "The arguments alone", value = json!({"query": "ferry"}))),
    )),
    responses(
        (status = 200, description = "The result", body = ToolResult),
        ToolNotFound, SessionUserMismatch,
    )
)]
pub(crate) async fn call(
    State(service): State<MemoryService>,
    Extension(caller): Extension<Principal>,
    TenantFromKey(tenant): TenantFromKey,
    PathParams(ToolPath { session_id: session, name }): PathParams<ToolPath>,
    QueryParams(params): QueryParams<CallParams>,
    JsonTextBody(body): JsonTextBody,
) -> Result<Json<ToolResult>, Problem> {
    let tool = Tool::parse(&name).ok_or_else(|| Problem::tool_not_found(allowed_tools(&service, &caller)))?;
    check_scope(tool, &caller)?;
    let (provider_call, call) = blocking::spawn_cpu_if_large(body.len(), move || {
        let provider_call = ProviderToolCall::parse(&body)?;
        let call = ToolCall::parse(tool, &provider_call.arguments);
        Ok((provider_call, call))
    })
    .await
    .map_err(|errors: Vec<FieldError>| {
        let with_path = |error: FieldError| {
            let path = if error.field.is_empty() { "body" } else { "" };
            error.in_value(path)
        };
        Problem::invalid(errors.into_iter().map(with_path).collect())
    })?;
    if let Some((field, name)) = provider_call.name.as_ref().filter(|(_, name)| name != tool.as_str()) {
        let detail =
            format!("is {name:?}, but the path names {}: POST to the path of the call's tool", tool.as_str());
        return Err(Problem::invalid_field(field, detail));
    }
    let context = ToolContext {
        session: Some(session),
        user: params.user_id,
        default_user: service.default_user(&caller).cloned(),
        may_bind: caller.scope.covers(Scope::Write),
        user_advice: USER_ADVICE,
        author: MemoryAuthor::Tool,
    };
    let (ToolCaller { user, session_exists, .. }, outcome) =
        service.call_tool(&tenant, &context, call).await?;
    let exists = session_exists.unwrap_or_default();
    let ToolOutcome { is_error, content, data } = outcome;
    let result = provider_call.result(&content, is_error);
    let user_id = user.map(|user| user.as_str().to_owned());
    Ok(Json(ToolResult { tool: tool.as_str(), user_id, exists, is_error, content, data, result }))
}

/// Returns the tools that the API key permits. Models should not be offered others.
pub(crate) fn allowed_tools(service: &MemoryService, caller: &Principal) -> impl Iterator<Item = Tool> {
    service.tools().filter(|tool| check_scope(*tool, caller).is_ok())
}

/// Checks the scope of the API key: one route serves tools that read and tools that write.
pub(crate) fn check_scope(tool: Tool, caller: &Principal) -> Result<(), Problem> {
    let needed = if tool.writes() { Scope::Write } else { Scope::Read };
    if caller.scope.covers(needed) { Ok(()) } else { Err(Problem::forbidden(caller.scope, needed)) }
}
