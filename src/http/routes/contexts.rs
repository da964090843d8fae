//! `POST /sessions/{session_id}/context`

use crate::blocking;
use crate::domain::consolidation::Mode;
use crate::domain::format::Format;
use crate::domain::json::as_integer;
use crate::domain::message::{Message, Role};
use crate::domain::skill;
use crate::domain::validation::FieldError;
use crate::http::chat::ContentBody;
use crate::http::error::Problem;
use crate::http::extract::{OptionalJsonBody, SessionPath, TenantFromKey, user_id};
use crate::http::format::RequestFormat;
use crate::http::limits::Limits;
use crate::http::openapi::parameters::Id;
use crate::http::openapi::responses::SessionUserMismatch;
use crate::http::routes::skills::{SkillBody, skills};
use crate::service::MemoryService;
use crate::service::contexts::ContextOptions;
use crate::service::work_permit::WorkPermit;
use answer::{ContextResponse, respond};
use axum::Extension;
use axum::extract::State;
use serde::Deserialize;
use serde_json::Number;
use serde_json::value::RawValue;
use utoipa::ToSchema;

mod answer;

/// What the context is for. Every field may be left out, and the body as a whole.
#[derive(Default, Deserialize, ToSchema)]
pub(crate) struct ContextRequest {
    /// Comes first in the system message.
    system_prompt: Option<String>,
    /// The new message, which comes last: text, or content parts. It is not persisted.
    #[schema(value_type = Option<ContentBody>)]
    user_message: Option<Box<RawValue>>,
    /// Whose memory document applies where the session doesn't exist yet.
    #[schema(value_type = Option<Id>)]
    user_id: Option<String>,
    /// Whether the system message has the guide to the memory and its tools: `GET /skills/memory`.
    include_memory_skill: Option<bool>,
    /// The agent's skills: a list of all goes into the system message, and the bodies of some.
    skills: Option<Vec<SkillBody>>,
    /// When to consolidate, other than the settings say.
    mode: Option<RequestMode>,
    /// Most tokens of the whole list, counted as `tokens.tokenizer` says. What does not fit is left out, oldest first.
    #[schema(value_type = Option<u64>, minimum = 1)]
    max_tokens: Option<MaxTokens>,
    /// How the list is written: `openai` where it is left out.
    format: Option<RequestFormat>,
    /// With the format `anthropic`: marks the stable part for the provider's cache.
    cache_control: Option<bool>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "Number")]
struct MaxTokens(i64);

impl TryFrom<Number> for MaxTokens {
    type Error = &'static str;

    fn try_from(number: Number) -> Result<Self, Self::Error> {
        as_integer(&number).filter(|most| *most > 0).map(Self).ok_or("must be a whole number from 1 on")
    }
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

/// Builds the message list that the agent should send to its model now.
///
/// Consolidates the session first where that is due. A failure of that never fails the request, and never loses a
/// message: the answer has the summary as it is, and verbatim what it doesn't cover. An unknown session is an empty one,
/// and is not created.
#[utoipa::path(
    post, path = "/sessions/{session_id}/context", operation_id = "build_context", tag = "memory",
    params(SessionPath),
    request_body = Option<ContextRequest>,
    responses(
        (status = 200, description = "The context", body = ContextResponse),
        SessionUserMismatch,
    )
)]
pub(crate) async fn build(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    SessionPath(session): SessionPath,
    Extension(limits): Extension<Limits>,
    permit: WorkPermit,
    OptionalJsonBody(request): OptionalJsonBody<ContextRequest>,
) -> Result<axum::Json<ContextResponse>, Problem> {
    let bytes = request.bytes();
    let guide = request.include_memory_skill.unwrap_or_default().then(|| service.memory_guide());
    let request = blocking::sized(bytes, move || request.into_options(&limits, guide.as_deref())).await?;
    let context = service.build_context(&tenant, &session, ContextOptions { permit, ..request }).await?;
    let bytes = context.list.messages.iter().map(String::len).sum();
    Ok(axum::Json(blocking::sized(bytes, move || respond(session.as_str(), context)).await?))
}

impl ContextRequest {
    /// How much there is to read.
    fn bytes(&self) -> usize {
        let skills = self.skills.iter().flatten().map(SkillBody::bytes);
        self.user_message.as_ref().map_or(0, |content| content.get().len()) + skills.sum::<usize>()
    }

    fn into_options(self, limits: &Limits, memory_guide: Option<&str>) -> Result<ContextOptions, Problem> {
        let mut wrong = Vec::new();
        let user_message = self.user_message.and_then(|content| {
            let message = Message::from_content(Role::User, &content);
            let complain =
                |errors: Vec<FieldError>| errors.into_iter().map(|invalid| invalid.in_value("user_message"));
            message.map_err(|errors| wrong.extend(complain(errors))).ok()
        });
        wrong.extend(user_message.as_ref().and_then(|message| limits.message("user_message", message).err()));
        wrong.extend(self.system_prompt.as_deref().and_then(|text| limits.system_prompt(text).err()));
        let skills = skills(self.skills.unwrap_or_default(), &mut wrong);
        let skills = skill::section(memory_guide, &skills);
        wrong.extend(limits.skills(&skills).err());
        let user_id = self.user_id.map(|id| user_id(id, "user_id")).transpose();
        let user_id = user_id.map_err(|error| wrong.push(error)).unwrap_or_default();
        let format = self.format.map(Format::from).unwrap_or_default();
        let cache_control = self.cache_control.unwrap_or_default();
        if cache_control && format == Format::OpenAi {
            let detail = "only the format anthropic has such marks: leave it out, or send format = anthropic";
            wrong.push(FieldError { field: "cache_control".to_owned(), detail: detail.to_owned() });
        }
        if !wrong.is_empty() {
            return Err(Problem::invalid(wrong));
        }
        Ok(ContextOptions {
            system_prompt: self.system_prompt,
            user_message,
            user_id,
            skills,
            mode: self.mode.map(|mode| match mode {
                RequestMode::Inline => Mode::Inline,
                RequestMode::Background => Mode::Background,
                RequestMode::Off => Mode::Off,
            }),
            max_tokens: self.max_tokens.map(|MaxTokens(most)| most),
            format,
            cache_control,
            permit: WorkPermit::default(),
        })
    }
}
