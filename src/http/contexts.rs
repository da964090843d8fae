//! `POST /sessions/{session_id}/context`

use super::chat::ContentBody;
use super::error::Problem;
use super::exchanges::at;
use super::extract::{OptionalJson, Session, Tenant, user_id};
use super::json::stored;
use super::limits::Limits;
use super::openapi::parameters::Id;
use super::openapi::refusals::OtherUser;
use crate::domain::consolidation::Mode;
use crate::domain::message::{Invalid, Message, Role};
use crate::domain::tokens::TOKENIZER;
use crate::engine::recall::{Context, Request};
use crate::engine::turn::Turn;
use crate::engine::{Error, MemoryService, blocking};
use axum::Extension;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use time::OffsetDateTime;
use utoipa::ToSchema;

/// What the context is for. Every field may be left out, and the body as a whole.
#[derive(Default, Deserialize, ToSchema)]
pub(super) struct ContextRequest {
    /// Comes first in the system message.
    system_prompt: Option<String>,
    /// The new message, which comes last: text, or content parts. It is not persisted.
    #[schema(value_type = Option<ContentBody>)]
    user_message: Option<Box<RawValue>>,
    /// Whose memory document applies where the session doesn't exist yet.
    #[schema(value_type = Option<Id>)]
    user_id: Option<String>,
    /// When to consolidate, other than the settings say.
    mode: Option<RequestMode>,
}

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(rename_all = "snake_case")]
enum RequestMode {
    /// Inside this request.
    Inline,
    /// After it was answered.
    Background,
    /// Not at all.
    Off,
}

/// A derived reader would take an object for a word.
impl TryFrom<String> for RequestMode {
    type Error = &'static str;

    fn try_from(word: String) -> Result<Self, Self::Error> {
        match word.as_str() {
            "inline" => Ok(Self::Inline),
            "background" => Ok(Self::Background),
            "off" => Ok(Self::Off),
            _ => Err("must be inline, background or off"),
        }
    }
}

/// A context, ready to be sent to a model.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextResponse {
    session_id: String,
    /// System message (left out when empty), verbatim part of the tail, new user message.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Box<RawValue>>,
    coverage: CoverageBody,
    summary: SummaryRef,
    memory: MemoryRef,
    consolidation: ConsolidationReport,
    tokens: TokenCounts,
}

/// What covers which messages: the summary, the omitted ranges and the verbatim part cover 1 … `last_seq` exactly once.
#[derive(Serialize, ToSchema)]
struct CoverageBody {
    /// The newest message; 0 = none.
    last_seq: i64,
    /// The last message that the summary covers; 0 = none.
    summary_through: i64,
    /// The first message that is sent verbatim; `last_seq + 1` where none is.
    verbatim_from: i64,
    /// What is in neither part.
    omitted: Vec<OmittedRange>,
}

#[derive(Serialize, ToSchema)]
struct OmittedRange {
    from_seq: i64,
    to_seq: i64,
    /// `max_history_messages` or `on_failure`.
    reason: &'static str,
}

#[derive(Serialize, ToSchema)]
struct SummaryRef {
    /// 0 = there is no summary.
    revision: i64,
    words: i64,
}

#[derive(Serialize, ToSchema)]
struct MemoryRef {
    /// 0 = never written.
    version: i64,
    words: i64,
}

/// What became of consolidation in this request.
#[derive(Serialize, ToSchema)]
struct ConsolidationReport {
    /// `not_due`, `consolidated`, `scheduled`, `in_progress`, `failed` or `disabled`.
    outcome: &'static str,
    /// Messages that were summarised.
    messages: i64,
    /// Whether the summary was compressed.
    meta: bool,
    /// The model that did it.
    model: Option<String>,
    /// After a failure: before this time it isn't tried again.
    #[serde(with = "time::serde::rfc3339::option")]
    retry_at: Option<OffsetDateTime>,
    /// Why it failed; null where it did not.
    reason: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct TokenCounts {
    total: i64,
    system: i64,
    history: i64,
    user_message: i64,
    /// What counted them.
    tokenizer: &'static str,
}

/// Builds the message list that the agent should send to its model now.
///
/// Consolidates the session first where that is due. A failure of that never fails the request, and never loses a
/// message: the answer has the summary as it is, and verbatim what it doesn't cover. An unknown session is an empty one,
/// and is not created.
#[utoipa::path(
    post, path = "/sessions/{session_id}/context", operation_id = "build_context", tag = "memory",
    params(Session),
    request_body = Option<ContextRequest>,
    responses(
        (status = 200, description = "The context", body = ContextResponse),
        OtherUser,
    )
)]
pub(super) async fn build(
    State(service): State<MemoryService>,
    Tenant(tenant): Tenant,
    Session(session): Session,
    Extension(limits): Extension<Limits>,
    turn: Turn,
    OptionalJson(request): OptionalJson<ContextRequest>,
) -> Result<axum::Json<ContextResponse>, Problem> {
    let bytes = request.user_message.as_ref().map_or(0, |content| content.get().len());
    let request = blocking::sized(bytes, move || request.into_request(&limits)).await?;
    let context = service.context(&tenant, &session, Request { turn, ..request }).await?;
    Ok(axum::Json(respond(session.as_str(), context)?))
}

impl ContextRequest {
    fn into_request(self, limits: &Limits) -> Result<Request, Problem> {
        let mut wrong = Vec::new();
        let user_message = self.user_message.and_then(|content| {
            let message = Message::of_content(Role::User, &content);
            let complain =
                |errors: Vec<Invalid>| errors.into_iter().map(|invalid| at("user_message", invalid));
            message.map_err(|errors| wrong.extend(complain(errors))).ok()
        });
        wrong.extend(user_message.as_ref().and_then(|message| limits.message("user_message", message).err()));
        wrong.extend(self.system_prompt.as_deref().and_then(|text| limits.system_prompt(text).err()));
        let user_id = self.user_id.map(|id| user_id(id, "user_id")).transpose();
        let user_id = user_id.map_err(|error| wrong.push(error)).unwrap_or_default();
        if !wrong.is_empty() {
            return Err(Problem::invalid(wrong));
        }
        Ok(Request {
            system_prompt: self.system_prompt,
            user_message,
            user_id,
            mode: self.mode.map(|mode| match mode {
                RequestMode::Inline => Mode::Inline,
                RequestMode::Background => Mode::Background,
                RequestMode::Off => Mode::Off,
            }),
            turn: Turn::default(),
        })
    }
}

fn respond(session_id: &str, context: Context) -> Result<ContextResponse, Error> {
    #[derive(Serialize)]
    struct System<'a> {
        role: &'static str,
        content: &'a str,
    }
    let mut messages = Vec::with_capacity(context.history.len() + 2);
    if !context.system.is_empty() {
        let system = to_raw_value(&System { role: "system", content: &context.system });
        messages.push(system.unwrap_or_else(|_| unreachable!("two strings are always JSON")));
    }
    for message in context.history {
        messages.push(stored(message)?);
    }
    if let Some(message) = &context.user_message {
        messages.push(stored(message.json().to_owned())?);
    }
    let omitted = context.coverage.omitted.iter().map(|omitted| OmittedRange {
        from_seq: omitted.from_seq,
        to_seq: omitted.to_seq,
        reason: omitted.reason.as_str(),
    });
    let (report, tokens) = (context.consolidation, context.tokens);
    Ok(ContextResponse {
        session_id: session_id.to_owned(),
        messages,
        coverage: CoverageBody {
            last_seq: context.coverage.last_seq,
            summary_through: context.coverage.summary_through,
            verbatim_from: context.coverage.verbatim_from,
            omitted: omitted.collect(),
        },
        summary: SummaryRef { revision: context.summary_revision, words: context.summary_words },
        memory: MemoryRef { version: context.memory_version, words: context.memory_words },
        consolidation: ConsolidationReport {
            outcome: report.outcome.as_str(),
            messages: report.messages,
            meta: report.meta,
            model: report.model,
            retry_at: report.retry_at,
            reason: report.reason,
        },
        tokens: TokenCounts {
            total: tokens.system + tokens.history + tokens.user_message,
            system: tokens.system,
            history: tokens.history,
            user_message: tokens.user_message,
            tokenizer: TOKENIZER,
        },
    })
}
