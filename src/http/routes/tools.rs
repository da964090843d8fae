//! `GET /tools` and `POST /sessions/{session_id}/tools/{name}`: the agent's tools for programs that call a model API
//! themselves. For clients of MCP, `mcp` has the same.

use crate::blocking;
use crate::domain::api_key::Scope;
use crate::domain::format::Format;
use crate::domain::tool::call;
use crate::domain::tool::{Tool, ToolCall};
use crate::domain::validation::FieldError;
use crate::http::error::Problem;
use crate::http::extract::{JsonTextBody, QueryParams, SessionPath, TenantFromKey, ToolPath, user_id};
use crate::http::format::RequestFormat;
use crate::http::openapi::parameters::Id;
use crate::http::openapi::responses::{SessionUserMismatch, ToolNotFound};
use crate::http::openapi::schemas::schema_from_json;
use crate::service::MemoryService;
use crate::service::keys::authenticator::Principal;
use crate::service::tools::{Outcome, ToolContext};
use axum::Extension;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    /// Whose format: `openai` (chat completions) or `anthropic` (messages).
    #[param(inline, required = false)]
    format: Option<RequestFormat>,
}

/// Definitions.
#[derive(Serialize, ToSchema)]
pub(crate) struct ToolList {
    /// The value of `tools` in a request to the model.
    #[schema(value_type = Vec<Object>)]
    tools: Vec<Value>,
}

/// The definitions of the tools, as a request to a model takes them.
#[utoipa::path(
    get, path = "/tools", operation_id = "list_tools", tag = "tools",
    params(ListParams),
    responses(
        (status = 200, description = "Definitions", body = ToolList),
    )
)]
pub(crate) async fn list(
    State(service): State<MemoryService>,
    QueryParams(params): QueryParams<ListParams>,
) -> axum::Json<ToolList> {
    let format = params.format.map(Format::from).unwrap_or_default();
    axum::Json(ToolList { tools: service.tools().map(|tool| tool.definition(format)).collect() })
}

/// A call as the model made it.
pub(crate) struct ToolRequest;

impl PartialSchema for ToolRequest {
    fn schema() -> RefOr<Schema> {
        let nothing = json!({"type": "null"});
        schema_from_json(json!({
            "description": "A call as the model made it; bare arguments are those of the tool, and other fields of a call are \
                            passed over",
            "anyOf": [
                {
                    "title": "A call of the OpenAI chat format",
                    "type": "object",
                    "required": ["id", "function"],
                    "properties": {
                        "type": {"type": ["string", "null"], "enum": ["function", null]},
                        "id": {"type": "string", "minLength": 1},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {
                                "name": {"type": "string", "minLength": 1},
                                "arguments": {"type": ["string", "null"], "description": "JSON text, as the model wrote it"}
                            },
                            "additionalProperties": true
                        }
                    },
                    "additionalProperties": true
                },
                {
                    "title": "A block of the Anthropic messages format",
                    "type": "object",
                    "required": ["type", "id", "name"],
                    "properties": {
                        "type": {"type": "string", "enum": ["tool_use"]},
                        "id": {"type": "string", "minLength": 1},
                        "name": {"type": "string", "minLength": 1},
                        "input": {"type": ["object", "null"]}
                    },
                    "additionalProperties": true
                },
                {
                    "title": "The arguments alone",
                    "type": "object",
                    "properties": {"type": nothing, "function": nothing},
                    "additionalProperties": true
                }
            ]
        }))
    }
}

impl ToSchema for ToolRequest {}

/// What came of a call.
#[derive(Serialize, ToSchema)]
pub(crate) struct ToolResult {
    tool: &'static str,
    /// Whether nothing was done: then `content` tells the model what to do.
    is_error: bool,
    /// What the model gets to read.
    content: String,
    /// The same as data: its fields depend on the tool; null where nothing was done.
    #[schema(value_type = Option<Object>)]
    data: Value,
    /// What goes back to the model, as it is: a message of the role `tool`, or a `tool_result` block; null where the call
    /// was arguments alone.
    #[schema(value_type = Option<Object>)]
    result: Option<Value>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct CallParams {
    /// Whose agent it is, where the session doesn't exist yet.
    #[param(value_type = Option<Id>)]
    user_id: Option<String>,
}

/// Does what the model asks, and answers with what to send back to it.
///
/// A mistake of the model (wrong arguments, a document that is too long) is an answer for the model, with `is_error`, so
/// that an agent's loop goes on. The session gives the user, and an unknown one is not created. `memory_read` and `search_history` need a key of the scope `read`, `memory_write` one of
/// the scope `write`.
#[utoipa::path(
    post, path = "/sessions/{session_id}/tools/{name}", operation_id = "call_tool", tag = "tools",
    params(SessionPath, ToolPath, CallParams),
    request_body = Option<ToolRequest>,
    responses(
        (status = 200, description = "What came of it", body = ToolResult),
        ToolNotFound, SessionUserMismatch,
    )
)]
pub(crate) async fn call(
    State(service): State<MemoryService>,
    Extension(caller): Extension<Principal>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    ToolPath(name): ToolPath,
    QueryParams(params): QueryParams<CallParams>,
    JsonTextBody(body): JsonTextBody,
) -> Result<axum::Json<ToolResult>, Problem> {
    let tool = Tool::parse(&name).ok_or_else(|| Problem::tool_not_found(allowed(&service, &caller)))?;
    allow(tool, &caller)?;
    let user = params.user_id.map(|id| user_id(id, "user_id")).transpose()?;
    let (given, call) = blocking::sized(body.len(), move || {
        let given = call::read(&body)?;
        let call = ToolCall::parse(tool, &given.arguments);
        Ok((given, call))
    })
    .await
    .map_err(|wrong: Vec<FieldError>| {
        let whole = |invalid: &FieldError| if invalid.field.is_empty() { "body" } else { "" };
        Problem::invalid(
            wrong
                .into_iter()
                .map(|invalid| {
                    let path = whole(&invalid);
                    invalid.in_value(path)
                })
                .collect(),
        )
    })?;
    if let Some((field, name)) = given.name.filter(|(_, name)| name != tool.name()) {
        let detail =
            format!("is {name:?}, but the path names {}: POST to the path of the call's tool", tool.name());
        return Err(Problem::invalid_field(field, detail));
    }
    let outcome = match call {
        Ok(call) => service.call_tool(&tenant, &ToolContext { session: Some(session), user }, call).await?,
        Err(mistake) => mistake.into(),
    };
    let Outcome { is_error, content, data } = outcome;
    let result = given.form.result(&content, is_error);
    Ok(axum::Json(ToolResult { tool: tool.name(), is_error, content, data, result }))
}

/// What the caller may call: no model should be told of more.
pub(crate) fn allowed(service: &MemoryService, caller: &Principal) -> impl Iterator<Item = Tool> {
    service.tools().filter(|tool| allow(*tool, caller).is_ok())
}

/// One route serves tools that read and tools that write.
pub(crate) fn allow(tool: Tool, caller: &Principal) -> Result<(), Problem> {
    let needed = if tool.writes() { Scope::Write } else { Scope::Read };
    if caller.scope.covers(needed) { Ok(()) } else { Err(Problem::forbidden(caller.scope, needed)) }
}
