//! `GET /skills/memory`, and the skills of a context request.

use crate::domain::skill::{self, Skill};
use crate::domain::validation::FieldError;
use crate::http::extract::NoQuery;
use crate::service::MemoryService;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use serde::Deserialize;
use utoipa::ToSchema;

/// A skill of the agent.
#[derive(Deserialize, ToSchema)]
pub(crate) struct SkillBody {
    /// One line, unique within the request.
    #[schema(
        pattern = "^[^\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029]*[^\\s\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029][^\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029]*$"
    )]
    name: String,
    /// The purpose of the skill. The model chooses skills by it.
    #[schema(pattern = "\\S")]
    description: String,
    /// Path or URL at which the agent finds the body.
    location: Option<String>,
    /// Includes the body in the system message.
    always: Option<bool>,
    /// The instructions, in Markdown. Required with `always`, ignored otherwise.
    body: Option<String>,
}

impl SkillBody {
    /// Returns the total size of the texts.
    pub(crate) fn bytes(&self) -> usize {
        let optional = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        self.name.len() + self.description.len() + optional(&self.location) + optional(&self.body)
    }
}

/// Converts and validates the skills of a request. Errors are added to `errors`.
pub(crate) fn skills(bodies: Vec<SkillBody>, errors: &mut Vec<FieldError>) -> Vec<Skill> {
    let mut invalid = Vec::new();
    let mut skills = Vec::with_capacity(bodies.len());
    for (index, skill) in bodies.into_iter().enumerate() {
        let always = skill.always.unwrap_or_default();
        let body = skill.body.filter(|_| always);
        if always && body.as_ref().is_none_or(|body| body.trim().is_empty()) {
            let detail = "missing: it goes into the system message, since always is true".to_owned();
            invalid.push(FieldError { field: format!("[{index}].body"), detail });
        }
        let SkillBody { name, description, location, .. } = skill;
        skills.push(Skill { name, description, location, body });
    }
    invalid.extend(skill::check(&skills));
    errors.extend(invalid.into_iter().map(|error| error.in_value("skills")));
    skills
}

/// Returns the guide that teaches an agent to use its memory, as Markdown for a system prompt. `include_memory_skill` adds
/// the guide to a context.
#[utoipa::path(
    get, path = "/skills/memory", operation_id = "read_memory_skill", tag = "tools",
    responses(
        (status = 200, description = "The guide", body = String, content_type = "text/markdown"),
    )
)]
pub(crate) async fn memory(State(service): State<MemoryService>, _: NoQuery) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/markdown; charset=utf-8")], service.memory_guide())
}
