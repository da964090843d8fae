//! `/mcp`: the agent's tools over the Model Context Protocol (streamable HTTP).
//!
//! The server is stateless: every replica can answer every request, and each response is one JSON object. There is no
//! stream to GET and no protocol session to DELETE. All use of the SDK (`rmcp`) is in this file, because new major versions
//! of it are frequent.

use crate::blocking;
use crate::capacity::{self, Work};
use crate::config::Limits;
use crate::domain::api_key::Scope;
use crate::domain::id::{InvalidId, SessionId, UserId};
use crate::domain::json::read;
use crate::domain::memory::MemoryAuthor;
use crate::domain::shorten::shorten_middle;
use crate::domain::tool::{Tool, ToolCall, ToolError};
use crate::domain::validation::FieldError;
use crate::http::error::Problem;
use crate::http::extract::{MAX_VALUES_OF_CALL, ids_from_headers};
use crate::http::headers::is_json;
use crate::http::json;
use crate::http::path::percent_decode;
use crate::http::response_body::with_line_feed;
use crate::http::routes::tools;
use crate::service::keys::authenticator::Principal;
use crate::service::tools::{ToolContext, ToolOutcome};
use crate::service::{Error, MemoryService};
use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use rmcp::model::{
    CallToolRequestMethod, CallToolRequestParams, CallToolResponse, CallToolResult, ConstString as _,
    ContentBlock, CustomRequest, CustomResult, DiscoverRequestMethod, DiscoverRequestParams, ErrorCode,
    GetPromptRequestMethod, GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation,
    InitializeRequestParams, InitializeResultMethod, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, Prompt, PromptMessage, ProtocolVersion,
    ReadResourceRequestMethod, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, Resource,
    ResourceContents, ResourceTemplate, Role, ServerCapabilities, ServerConfig, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// Version 2024-11-05 has another transport, but the first official clients with this one ask for it. Version 2025-03-26 also
/// permits batches, which its clients do not send by themselves; they are rejected.
const SUPPORTED_VERSIONS: [ProtocolVersion; 5] = [
    ProtocolVersion::V_2024_11_05,
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// The memory document of the user.
const MEMORY_URI: &str = "precis://memory";
/// The summary of the session that a header names.
const SUMMARY_URI: &str = "precis://summary";
/// The summaries of other sessions, if no header names session or user.
const SUMMARY_TEMPLATE: &str = "precis://sessions/{session_id}/summary";
/// The memory guide as a prompt.
const GUIDE: &str = "memory_guide";
const MARKDOWN: &str = "text/markdown";
/// Longest name of an unknown method, prompt or resource in an error.
const MAX_SHOWN_CHARS: usize = 100;

/// Tells how to name the user of a connection whose headers name the session.
const HEADER_ADVICE: &str = "Only the application can name the user: with the header x-precis-user, or before this call in an \
    exchange or a context of this session.";

/// Handles one message of the protocol.
pub(crate) async fn serve(
    State(service): State<MemoryService>,
    Extension(limits): Extension<Arc<Limits>>,
    Extension(caller): Extension<Principal>,
    request: Request,
) -> Result<Response, Problem> {
    if !is_json(request.headers()) {
        return Err(Problem::unsupported_media_type());
    }
    let (session, user) = ids_from_headers(request.headers())?;
    let server = McpServer { service, caller, session, user, work: capacity::current() };
    let (mut parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.map_err(|_| Problem::incomplete_body())?;
    let size = body.len();
    let body = blocking::spawn_cpu_if_large(size, move || json::without_lone_surrogates(body)).await;
    let (levels, checked) = (limits.max_json_depth, body.clone());
    let check = move || json::check_body(&checked, levels, MAX_VALUES_OF_CALL).map(|_| ());
    blocking::spawn_cpu_if_large(size, check).await?;
    // The response is always JSON. The SDK requires that the client accepts both types.
    let accept = HeaderValue::from_static("application/json, text/event-stream");
    parts.headers.insert(header::ACCEPT, accept);
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        // The middleware has checked host, origin and size already.
        .disable_allowed_hosts()
        .with_max_request_body_bytes(usize::MAX);
    let sessions = Arc::new(NeverSessionManager::default());
    let protocol = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
    let answer = protocol.handle(Request::from_parts(parts, Body::from(body))).await.map(Body::new);
    let json = HeaderValue::from_static("application/json");
    if answer.headers().get(header::CONTENT_TYPE) == Some(&json) {
        return Ok(with_line_feed(answer).await);
    }
    if answer.status().is_success() {
        return Ok(answer);
    }
    Err(problem_from_plain_text(answer).await)
}

/// Shortens a value of the client for an error text.
fn shorten(text: &str) -> String {
    shorten_middle(text, MAX_SHOWN_CHARS, |_| "…".to_owned())
}

/// Converts a plain-text error of the SDK into a problem.
async fn problem_from_plain_text(answer: Response) -> Problem {
    let status = answer.status();
    let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    match status {
        StatusCode::UNSUPPORTED_MEDIA_TYPE => Problem::bad_request(
            "The body is not one message of the Model Context Protocol, in JSON-RPC 2.0: send a request or a notification, its params in an object.",
        ),
        _ if status.is_client_error() => Problem::bad_request(text),
        _ => {
            tracing::error!(%status, text, "the MCP SDK failed to handle a message");
            Problem::internal()
        }
    }
}

/// The MCP server for one request.
#[derive(Clone, Debug)]
struct McpServer {
    service: MemoryService,
    caller: Principal,
    /// The session that a header names.
    session: Option<SessionId>,
    /// The user that a header names.
    user: Option<UserId>,
    /// The SDK handles the message in another task.
    work: Work,
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().enable_prompts();
        ServerConfig::new(capabilities.build())
            .with_server_info(Implementation::new("precis", env!("CARGO_PKG_VERSION")))
            .with_instructions(self.service.memory_guide())
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(&SUPPORTED_VERSIONS)
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        check_page(request)?;
        let allowed = tools::allowed_tools(&self.service, &self.caller);
        Ok(ListToolsResult::with_all_items(allowed.map(|tool| self.definition(tool)).collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        // Clients show tool results to the model, but hide protocol errors from it.
        let outcome = capacity::scope(self.work.clone(), self.call(&request.name, arguments)).await;
        let ToolOutcome { is_error, content, data } = outcome.unwrap_or_else(ToolOutcome::from);
        let mut result = CallToolResult::success(vec![ContentBlock::text(content)]);
        result.is_error = Some(is_error);
        result.structured_content = Some(data).filter(|data| !data.is_null());
        Ok(result.into())
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        check_page(request)?;
        let memory =
            Resource::new(MEMORY_URI, "memory").with_title("Memory document").with_mime_type(MARKDOWN);
        let memory = memory.with_description("What the agent remembers about the user, in all sessions.");
        let summary = Resource::new(SUMMARY_URI, "summary").with_title("Session summary");
        let summary =
            summary.with_mime_type("text/plain").with_description("The older part of this session.");
        let summary = self.session.is_some().then_some(summary);
        Ok(ListResourcesResult::with_all_items([Some(memory), summary].into_iter().flatten().collect()))
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        check_page(request)?;
        let summary = ResourceTemplate::new(SUMMARY_TEMPLATE, "summary").with_title("Session summary");
        let summary = summary.with_mime_type("text/plain").with_description("The older part of a session.");
        let summaries = if self.has_fixed_context() { Vec::new() } else { vec![summary] };
        Ok(ListResourceTemplatesResult::with_all_items(summaries))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let read = async {
            let uri = request.uri;
            Ok::<_, ErrorData>(if uri == MEMORY_URI {
                ResourceContents::text(self.memory_document().await?, uri).with_mime_type(MARKDOWN)
            } else {
                ResourceContents::text(self.summary(&uri).await?, uri).with_mime_type("text/plain")
            })
        };
        let contents = capacity::scope(self.work.clone(), read).await?;
        Ok(ReadResourceResult::new(vec![contents]).into())
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        check_page(request)?;
        let description = "How an agent uses its memory: when to read and write it, and what to avoid.";
        let guide = Prompt::new(GUIDE, Some(description), None).with_title("Memory guide");
        Ok(ListPromptsResult::with_all_items(vec![guide]))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        if request.name != GUIDE {
            let error = format!(
                "params.name: there is no prompt {:?}: the only one is {GUIDE}",
                shorten(&request.name)
            );
            return Err(ErrorData::invalid_params(error, None));
        }
        let guide = PromptMessage::new_text(Role::User, self.service.memory_guide());
        Ok(GetPromptResult::new(vec![guide]).into())
    }

    /// Handles requests that the SDK cannot parse: unknown methods and invalid parameters.
    async fn on_custom_request(
        &self,
        CustomRequest { method, params, .. }: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let error = match method.as_str() {
            InitializeResultMethod::VALUE => params_error::<InitializeRequestParams>(params),
            DiscoverRequestMethod::VALUE => params_error::<DiscoverRequestParams>(params),
            CallToolRequestMethod::VALUE => params_error::<CallToolRequestParams>(params),
            ReadResourceRequestMethod::VALUE => params_error::<ReadResourceRequestParams>(params),
            GetPromptRequestMethod::VALUE => params_error::<GetPromptRequestParams>(params),
            _ => {
                let method = shorten(&method);
                return Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, method, None));
            }
        };
        Err(ErrorData::invalid_params(error, None))
    }
}

/// Returns the error of a request that is no tool call.
fn protocol_error(error: Error) -> ErrorData {
    let is_of_client = matches!(error, Error::SessionUserMismatch);
    let detail = Problem::from(error).detail().to_owned();
    if is_of_client {
        ErrorData::invalid_params(detail, None)
    } else {
        ErrorData::internal_error(detail, None)
    }
}

/// Rejects a cursor: each list has one page.
fn check_page(request: Option<PaginatedRequestParams>) -> Result<(), ErrorData> {
    if request.is_none_or(|request| request.cursor.is_none()) {
        return Ok(());
    }
    let error = "params.cursor: unknown: there is one page, and so no cursor. Leave it out.";
    Err(ErrorData::invalid_params(error, None))
}

/// Returns the error of invalid parameters.
fn params_error<P: DeserializeOwned>(params: Option<Value>) -> String {
    let Some(params) = params else {
        return "params: missing".to_owned();
    };
    match read::<P>(&params.to_string()) {
        Err(FieldError { field, detail }) => format!("params.{field}: {detail}"),
        Ok(_) => "params: not those of this method".to_owned(),
    }
}

impl McpServer {
    async fn call(&self, name: &str, mut arguments: Map<String, Value>) -> Result<ToolOutcome, ToolError> {
        let tool_error = |problem: Problem| ToolError(problem.detail().to_owned());
        let tool = Tool::parse(name)
            .ok_or_else(|| ToolError::unknown_tool(tools::allowed_tools(&self.service, &self.caller)))?;
        tools::check_scope(tool, &self.caller).map_err(tool_error)?;
        let (session, user) = if self.has_fixed_context() {
            (self.session.clone(), self.user.clone())
        } else {
            (take_id(&mut arguments, SESSION_ID)?, take_id(&mut arguments, USER_ID)?)
        };
        let call = ToolCall::from_arguments(tool, arguments);
        let called =
            self.service.call_tool(&self.caller.tenant, &self.tool_context(session, user), call).await;
        called.map(|(_, outcome)| outcome).map_err(|error| tool_error(Problem::from(error)))
    }

    fn tool_context(&self, session: Option<SessionId>, user: Option<UserId>) -> ToolContext {
        ToolContext {
            session,
            user,
            default_user: self.service.default_user(&self.caller).cloned(),
            may_bind: self.caller.scope.covers(Scope::Write),
            // With a header, the tools have no argument for the user.
            user_advice: if self.has_fixed_context() { HEADER_ADVICE } else { tools::USER_ADVICE },
            author: MemoryAuthor::Mcp,
        }
    }

    /// Returns the memory document of the user of this connection. Reading binds no session.
    async fn memory_document(&self) -> Result<String, ErrorData> {
        let context =
            ToolContext { may_bind: false, ..self.tool_context(self.session.clone(), self.user.clone()) };
        let tenant = &self.caller.tenant;
        let caller = self.service.tool_caller(tenant, &context).await.map_err(protocol_error)?;
        let user = caller.user.ok_or_else(|| {
            let error = "params.uri: the memory document belongs to a user, and this connection has none: name the user \
                with the header x-precis-user, or a session that has a user with x-precis-session";
            ErrorData::invalid_params(error, None)
        })?;
        let document = self.service.memory(tenant, &user).await.map_err(protocol_error)?;
        Ok(document.map(|document| document.content).unwrap_or_default())
    }

    /// Returns the summary with this URI.
    async fn summary(&self, uri: &str) -> Result<String, ErrorData> {
        let not_found = |reason: &str| {
            let uri = shorten(uri);
            ErrorData::resource_not_found(format!("params.uri: there is no resource {uri:?}: {reason}"), None)
        };
        let session = if uri == SUMMARY_URI {
            self.session.clone()
        } else {
            let id = SUMMARY_TEMPLATE
                .split_once("{session_id}")
                .and_then(|(start, end)| percent_decode(uri.strip_prefix(start)?.strip_suffix(end)?));
            id.filter(|_| !self.has_fixed_context()).and_then(|id| SessionId::new(id).ok())
        };
        let session = session.ok_or_else(|| not_found("list the resources and their templates"))?;
        match self.service.session(&self.caller.tenant, &session).await {
            Ok(session) => {
                let is_of_another =
                    self.user.is_some() && session.user_id.is_some() && self.user != session.user_id;
                if is_of_another {
                    Err(protocol_error(Error::SessionUserMismatch))
                } else {
                    Ok(session.summary.text)
                }
            }
            Err(Error::SessionNotFound) => {
                let reason =
                    format!("the session {:?} does not exist before its first exchange", session.as_str());
                Err(not_found(&reason))
            }
            Err(error) => Err(protocol_error(error)),
        }
    }

    /// Returns `true` if headers name the session or user. The tools then have no arguments for them.
    fn has_fixed_context(&self) -> bool {
        self.session.is_some() || self.user.is_some()
    }

    fn definition(&self, tool: Tool) -> rmcp::model::Tool {
        let mut schema = tool.parameters();
        if let Some(Value::Object(properties)) =
            schema.get_mut("properties").filter(|_| !self.has_fixed_context())
        {
            let optional = |detail: &str| json!({"type": "string", "description": detail});
            let session = "The session that you are in, if you were told its id; it gives the user.";
            let user = "The user, if you were told an id and the session has no user yet.";
            properties.insert(SESSION_ID.to_owned(), optional(session));
            properties.insert(USER_ID.to_owned(), optional(user));
        }
        let hints =
            ToolAnnotations::with_title(tool.title()).read_only(!tool.writes()).destructive(tool.writes());
        // Every write creates a new version, even with unchanged text.
        let hints = hints.idempotent(!tool.writes()).open_world(false);
        let definition = rmcp::model::Tool::new(tool.as_str(), tool.description(), Arc::new(schema));
        definition
            .with_title(tool.title())
            .with_raw_output_schema(Arc::new(tool.output()))
            .with_annotations(hints)
    }
}

const SESSION_ID: &str = "session_id";
const USER_ID: &str = "user_id";

/// Removes an id from the arguments of a call.
fn take_id<T: TryFrom<String, Error = InvalidId>>(
    arguments: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<T>, ToolError> {
    match arguments.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => {
            let tool_error = |error| {
                ToolError(format!("Nothing was done: `{name}` {error}. Correct it, or leave it out."))
            };
            T::try_from(text).map(Some).map_err(tool_error)
        }
        Some(_) => Err(ToolError(format!(
            "Nothing was done: `{name}` must be a string. Correct it, or leave it out."
        ))),
    }
}
