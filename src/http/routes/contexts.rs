//! `POST /sessions/{session_id}/context`

use crate::blocking;
use crate::config::Limits;
use crate::domain::consolidation::Mode;
use crate::domain::coverage::Coverage;
use crate::domain::format::{self, Fields, Format, ListOptions, MessageExtra, Profile, StablePrefix};
use crate::domain::id::UserId;
use crate::domain::json::as_integer;
use crate::domain::message::{Message, Role};
use crate::domain::recall::{DEFAULT_RECALL, RecallOptions, RecallScope, RecalledMessage};
use crate::domain::skill::{self, Skill};
use crate::domain::validation::FieldError;
use crate::http::chat::{AnthropicTextBlock, ChatMessage, Content};
use crate::http::context_schemas::{
    AllMark, AnthropicMark, AnthropicMessage, OpenAiMark, OpenAiMessage, StandardMark,
};
use crate::http::error::Problem;
use crate::http::extract::{Caller, OptionalJsonBody, PathParams, SessionPath, user_id};
use crate::http::headers::preferred_text;
use crate::http::json::stored;
use crate::http::openapi::responses::SessionUserMismatch;
use crate::http::readable;
use crate::http::response_body::Json;
use crate::service::consolidation::ConsolidationReport;
use crate::service::contexts::{Context, ContextOptions, ContextTokens, MemoryInfo, SummaryInfo};
use crate::service::search::MAX_LIMIT;
use crate::service::{self, MemoryService};
use crate::trace_context::step;
use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Number;
use serde_json::value::RawValue;
use std::fmt;
use std::sync::Arc;
use utoipa::ToSchema;

/// The options of a context. All fields, and the body itself, are optional.
#[derive(Default, Deserialize, ToSchema)]
pub(crate) struct ContextRequest {
    /// First part of the system message.
    system_prompt: Option<String>,
    /// The new message, which comes last: text or content parts. It is not persisted.
    #[schema(value_type = Option<Content>)]
    user_message: Option<Box<RawValue>>,
    /// The user of the session, whose memory document the context contains. The first request that names a user binds the
    /// session to it.
    #[schema(value_type = Option<UserId>)]
    user_id: Option<String>,
    /// Adds the memory guide (`GET /skills/memory`) to the system message.
    include_memory_skill: Option<bool>,
    /// The skills of the agent: the system message contains a list of all, and the bodies that are given.
    skills: Option<Vec<Skill>>,
    /// The mode of consolidation; by default as configured.
    mode: Option<Mode>,
    /// The window: largest number of tokens of the whole list, counted by `tokens.tokenizer`. By default
    /// `consolidation.context_window`. The session is consolidated before anything has to be omitted.
    #[schema(value_type = Option<u64>, minimum = 1)]
    max_tokens: Option<Tokens<1>>,
    /// Tokens of the window that the list leaves free: for the definitions of tools, which often take 20,000 tokens, and the answer.
    #[schema(value_type = Option<u64>)]
    reserved_tokens: Option<Tokens<0>>,
    /// Earlier messages that match `user_message` precede its text. `false`: none. By default as configured (`recall.*`).
    recall: Option<RecallRequest>,
    /// Format of the list; `openai` by default.
    format: Option<Format>,
    /// In the format `openai`: the rules of the server that receives the list; `openai` by default.
    profile: Option<Profile>,
    /// Fields of the messages; `standard` by default.
    fields: Option<Fields>,
    /// Returns the fields `extra` of the messages, next to the list.
    include_extra: Option<bool>,
    /// In the format `anthropic`: marks the stable part for the provider's prompt cache.
    cache_control: Option<bool>,
}

/// A number of tokens, at least `MIN`.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "Number")]
struct Tokens<const MIN: i64>(i64);

impl<const MIN: i64> TryFrom<Number> for Tokens<MIN> {
    type Error = String;

    fn try_from(number: Number) -> Result<Self, Self::Error> {
        let tokens = as_integer(&number).filter(|tokens| *tokens >= MIN);
        tokens.map(Self).ok_or_else(|| format!("must be a whole number from {MIN} on"))
    }
}

/// `false` for no recall, `true` as configured, or limits.
#[derive(ToSchema)]
#[schema(as = RecallOptions)]
#[serde(untagged)]
enum RecallRequest {
    Enabled(bool),
    Limits(RecallLimits),
}

/// A derived implementation for an untagged enum would not name the field that is invalid.
impl<'de> Deserialize<'de> for RecallRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoolOrLimits;
        impl<'de> Visitor<'de> for BoolOrLimits {
            type Value = RecallRequest;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false or an object with limit, max_tokens and scope")
            }

            fn visit_bool<E>(self, is_enabled: bool) -> Result<RecallRequest, E> {
                Ok(RecallRequest::Enabled(is_enabled))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RecallRequest, A::Error> {
                RecallLimits::deserialize(MapAccessDeserializer::new(map)).map(RecallRequest::Limits)
            }
        }
        deserializer.deserialize_any(BoolOrLimits)
    }
}

/// The limits of a recall. Missing ones are as configured.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RecallLimits {
    /// Largest number of messages.
    #[schema(minimum = 0, maximum = 50)]
    limit: Option<u8>,
    /// Largest number of tokens.
    #[schema(minimum = 0)]
    max_tokens: Option<u32>,
    /// Messages of the session, or of all sessions of its user.
    scope: Option<RecallScope>,
}

/// A context that is ready to be sent to a model.
#[derive(Serialize)]
struct ContextResponse {
    session_id: String,
    user_id: Option<String>,
    exists: bool,
    format: Format,
    fields: Fields,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<Box<RawValue>>,
    messages: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra: Option<Vec<ExtraBody>>,
    cache: CacheBody,
    inserted: usize,
    coverage: Coverage,
    recall: Vec<RecalledMessage>,
    summary: SummaryInfo,
    memory: MemoryInfo,
    consolidation: ConsolidationReport,
    tokens: ContextTokens,
}

/// A context that is ready to be sent to a model; `format` and `fields` tell the types apart
#[derive(Serialize, ToSchema)]
#[schema(as = ContextResponse)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum ContextBody {
    OpenAi(OpenAiContext),
    Complete(CompleteContext),
    Anthropic(AnthropicContext),
}

/// Declares the schemas of [`ContextResponse`], which differ in the types of the list.
macro_rules! context_schemas {
    ($($(#[$doc:meta])* $name:ident {
        format: $format:ty, fields: $fields:ty, $(#[$of_messages:meta])* messages: $messages:ty,
        $($(#[$of_system:meta])* system: $system:ty,)?
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Serialize, ToSchema)]
            struct $name {
                session_id: String,
                /// The user whose memory document the context contains; null if the session has no user.
                #[schema(required)]
                user_id: Option<String>,
                /// `false` before the first exchange of the session: its id may be mistyped.
                exists: bool,
                #[schema(inline)]
                format: $format,
                #[schema(inline)]
                fields: $fields,
                $(
                    $(#[$of_system])*
                    #[schema(nullable = false)]
                    system: $system,
                )?
                $(#[$of_messages])*
                messages: $messages,
                /// The fields `extra` of the messages in the list, if they were requested. They are not meant for the model.
                #[schema(nullable = false)]
                extra: Option<Vec<ExtraBody>>,
                cache: CacheBody,
                /// Number of tool calls and results in `messages` that are not part of the history: providers reject a call
                /// without a result, and a result without a call, so the missing one is inserted.
                inserted: usize,
                coverage: Coverage,
                /// The recalled messages, in the order of the history.
                recall: Vec<RecalledMessage>,
                summary: SummaryInfo,
                memory: MemoryInfo,
                consolidation: ConsolidationReport,
                tokens: ContextTokens,
            }
        )*
    };
}

context_schemas! {
    /// A context of the format `openai` that all providers of the format accept
    OpenAiContext {
        format: OpenAiMark,
        fields: StandardMark,
        /// System message (left out if it is empty), verbatim part of the tail, new user message.
        messages: Vec<OpenAiMessage>,
    }
    /// A context of the format `openai` with all fields that were recorded
    CompleteContext {
        format: OpenAiMark,
        fields: AllMark,
        /// System message (left out if it is empty), verbatim part of the tail, new user message.
        messages: Vec<ChatMessage>,
    }
    /// A context of the format `anthropic`
    AnthropicContext {
        format: AnthropicMark,
        fields: Fields,
        /// Verbatim part of the tail, new user message.
        messages: Vec<AnthropicMessage>,
        /// The system prompt as a text, or as content blocks if `cache_control` was requested. Left out if it is empty.
        system: Option<SystemBody>,
    }
}

/// The field `extra` of a message of the history.
#[derive(Serialize, ToSchema)]
struct ExtraBody {
    /// `seq` of the message in the history.
    seq: i64,
    /// Position in `messages`, from 0 on. In the format `anthropic`, messages of the history can share one.
    position: usize,
    #[schema(value_type = Object)]
    extra: Box<RawValue>,
}

/// A system prompt in Anthropic's format.
#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicSystem)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum SystemBody {
    Text(String),
    Blocks(Vec<AnthropicTextBlock>),
}

/// The part that will be the same in the next context, so that a provider can cache it. It changes with the summary, the
/// memory document, the notice about omitted messages, and the `system_prompt`, `skills` and `include_memory_skill` of the
/// request.
#[derive(Serialize, ToSchema)]
#[schema(as = StablePrefix)]
#[expect(clippy::struct_field_names, reason = "the fields are part of the API")]
struct CacheBody {
    /// Number of stable messages at the beginning. In the format `anthropic`, the last one may receive further blocks.
    stable_messages: usize,
    /// In the format `anthropic`: number of stable content blocks at the beginning of the last stable message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    stable_blocks: Option<usize>,
    /// Tokens of the stable part including the system prompt.
    stable_tokens: i64,
}

/// Builds the message list that the agent should send to its model now.
///
/// Consolidates the session first if that is due. A failed consolidation neither fails the request nor loses a message: the
/// response then contains the existing summary and, verbatim, the messages that it does not cover. An unknown session is
/// treated as empty and does not exist afterwards either (`exists`). With the header `accept: text/plain` or `text/markdown`, the
/// response is readable text.
#[utoipa::path(
    post, path = "/sessions/{session_id}/context", operation_id = "build_context", tag = "sessions",
    params(SessionPath),
    request_body(content = Option<ContextRequest>, examples(
        ("turn" = (summary = "The next turn", value = json!({
            "system_prompt": "You are a travel assistant.", "user_message": "When does the ferry leave?", "user_id": "ada",
        }))),
        ("anthropic" = (summary = "In the Anthropic format, within a budget", value = json!({
            "system_prompt": "You are a travel assistant.", "format": "anthropic", "cache_control": true,
            "max_tokens": 100_000,
        }))),
    )),
    responses(
        (status = 200, description = "The context", body = ContextBody),
        SessionUserMismatch,
    )
)]
pub(crate) async fn build(
    State(service): State<MemoryService>,
    Caller { tenant, default_user }: Caller,
    PathParams(SessionPath { session_id: session }): PathParams<SessionPath>,
    Extension(limits): Extension<Arc<Limits>>,
    headers: HeaderMap,
    OptionalJsonBody(request): OptionalJsonBody<ContextRequest>,
) -> Result<Response, Problem> {
    let (bytes, include_extra) = (request.bytes(), request.include_extra.unwrap_or_default());
    let (format, fields) = (request.format.unwrap_or_default(), request.fields.unwrap_or_default());
    let guide = request.include_memory_skill.unwrap_or_default().then(|| service.memory_guide());
    let recall = service.default_recall();
    let options =
        blocking::spawn_cpu_if_large(bytes, move || request.into_options(&limits, guide.as_deref(), recall))
            .await?;
    let mut options = ContextOptions { default_user, ..options };
    let text = preferred_text(&headers);
    if text.is_some() {
        (options.format, options.cache_control) = (Format::OpenAi, false);
    }
    let context = service.build_context(&tenant, &session, options).await?;
    let step = step!("encode");
    if let Some(content_type) = text {
        let bytes = context.list.messages.len();
        let encode = move || step.in_scope(|| readable::context(content_type, &session, &context));
        return Ok(blocking::spawn_cpu_if_large(bytes, encode).await);
    }
    let bytes = context.list.messages.len();
    let encode = move || {
        step.in_scope(|| {
            let response = ContextResponse::new(session.as_str(), (format, fields), include_extra, context)?;
            Ok(Json(response).into_response())
        })
    };
    blocking::spawn_cpu_if_large(bytes, encode).await
}

impl ContextRequest {
    /// Returns the number of bytes that have to be validated.
    fn bytes(&self) -> usize {
        let skills = self.skills.iter().flatten().map(Skill::bytes);
        self.user_message.as_ref().map_or(0, |content| content.get().len()) + skills.sum::<usize>()
    }

    /// Validates the request; all errors are reported at once.
    fn into_options(
        self,
        limits: &Limits,
        memory_guide: Option<&str>,
        recall: Option<RecallOptions>,
    ) -> Result<ContextOptions, Problem> {
        let mut errors = Vec::new();
        let format = self.format.unwrap_or_default();
        let user_message = self.user_message.and_then(|content| {
            read_user_message(&content).map_err(|error| errors.push(error.in_value("user_message"))).ok()
        });
        let size_error = |message: &Message| limits.sizes().check_message("user_message", message).err();
        errors.extend(user_message.as_ref().and_then(size_error));
        errors.extend(
            self.system_prompt.as_deref().and_then(|text| limits.system_text("system_prompt", text).err()),
        );
        let skills = self.skills.unwrap_or_default();
        errors.extend(skill::check(&skills));
        let skills = skill::section(memory_guide, &skills);
        errors.extend(limits.system_text("skills", &skills).err());
        let user_id = user_id(self.user_id, &mut errors);
        let recall = match self.recall {
            Some(RecallRequest::Enabled(false)) => None,
            Some(RecallRequest::Enabled(true)) => Some(recall.unwrap_or(DEFAULT_RECALL)),
            None => recall,
            Some(RecallRequest::Limits(RecallLimits { limit, max_tokens, scope })) => {
                let default = recall.unwrap_or(DEFAULT_RECALL);
                Some(RecallOptions {
                    limit: limit.map_or(default.limit, usize::from),
                    max_tokens: max_tokens.map(i64::from).or(default.max_tokens),
                    scope: scope.unwrap_or(default.scope),
                })
            }
        };
        if recall.is_some_and(|recall| recall.limit > MAX_LIMIT) {
            errors.push(FieldError::new("recall.limit", format!("must be at most {MAX_LIMIT}")));
        }
        let profile = self.profile.unwrap_or_default();
        if profile != Profile::OpenAi && format != Format::OpenAi {
            let detail = "only the format openai has profiles: leave it out, or send format = openai";
            errors.push(FieldError::new("profile", detail));
        }
        if profile != Profile::OpenAi && self.fields == Some(Fields::All) {
            let detail = "changes messages, which fields = all does not: leave one of both out";
            errors.push(FieldError::new("profile", detail));
        }
        let cache_control = self.cache_control.unwrap_or_default();
        if cache_control && format == Format::OpenAi {
            let detail =
                "only the format anthropic has cache marks: leave it out, or send format = anthropic";
            errors.push(FieldError::new("cache_control", detail));
        }
        if !errors.is_empty() {
            return Err(Problem::invalid(errors));
        }
        Ok(ContextOptions {
            system_prompt: self.system_prompt,
            user_message,
            continuation: None,
            separates_system: false,
            user_id,
            default_user: None,
            skills,
            mode: self.mode,
            max_tokens: self.max_tokens.map(|Tokens(max)| max),
            reserved_tokens: self.reserved_tokens.map_or(0, |Tokens(tokens)| tokens),
            recall,
            format,
            list: ListOptions {
                fields: self.fields.unwrap_or_default(),
                profile,
                has_new_message: false,
                include_extra: self.include_extra.unwrap_or_default(),
            },
            cache_control,
            is_preview: false,
        })
    }
}

/// Reads the new message.
fn read_user_message(content: &RawValue) -> Result<Message, FieldError> {
    let mut messages = format::read_content(Role::User, content)?;
    if let Some(message) = messages.pop().filter(|last| messages.is_empty() && last.role() == Role::User) {
        return Ok(message);
    }
    let detail = "contains results of tools: record them as an exchange, then build the context without them";
    Err(FieldError::new("", detail))
}

impl ContextResponse {
    fn new(
        session_id: &str,
        (format, fields): (Format, Fields),
        include_extra: bool,
        context: Context,
    ) -> Result<Self, service::Error> {
        let Context { user, exists, list, coverage, recall, summary, memory, consolidation, tokens, .. } =
            context;
        let StablePrefix { messages, blocks, tokens: stable_tokens } = list.stable;
        let extra_body = |MessageExtra { seq, position, json }| {
            stored(json).map(|extra| ExtraBody { seq, position, extra })
        };
        let extra = list.extra.into_iter().map(extra_body).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            session_id: session_id.to_owned(),
            user_id: user.map(|user| user.as_str().to_owned()),
            exists,
            format,
            fields,
            system: list.system.map(stored).transpose()?,
            messages: stored(list.messages)?,
            extra: include_extra.then_some(extra),
            cache: CacheBody { stable_messages: messages, stable_blocks: blocks, stable_tokens },
            inserted: list.inserted,
            coverage,
            recall,
            summary,
            memory,
            consolidation,
            tokens,
        })
    }
}
