//! `GET /skills/memory`, and the skills of a context request

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
    /// One line; no two skills have the same.
    #[schema(
        pattern = "^[^\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029]*[^\\s\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029][^\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029]*$"
    )]
    name: String,
    /// What it is for: by this the model chooses.
    #[schema(pattern = "\\S")]
    description: String,
    /// Where the agent finds its body.
    location: Option<String>,
    /// Whether its body goes into the system message at once.
    always: Option<bool>,
    /// The instructions themselves, in Markdown: with `always`, and unused without.
    body: Option<String>,
}

impl SkillBody {
    /// How much there is to read.
    pub(crate) fn bytes(&self) -> usize {
        let optional = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        self.name.len() + self.description.len() + optional(&self.location) + optional(&self.body)
    }
}

/// The skills as they are shown. What is wrong with them is added to `wrong`.
pub(crate) fn skills(bodies: Vec<SkillBody>, wrong: &mut Vec<FieldError>) -> Vec<Skill> {
    let mut complaints = Vec::new();
    let mut skills = Vec::with_capacity(bodies.len());
    for (index, skill) in bodies.into_iter().enumerate() {
        let always = skill.always.unwrap_or_default();
        let body = skill.body.filter(|_| always);
        if always && body.as_ref().is_none_or(|body| body.trim().is_empty()) {
            let detail = "missing: it goes into the system message, since always is true".to_owned();
            complaints.push(FieldError { field: format!("[{index}].body"), detail });
        }
        let SkillBody { name, description, location, .. } = skill;
        skills.push(Skill { name, description, location, body });
    }
    complaints.extend(skill::check(&skills));
    wrong.extend(complaints.into_iter().map(|invalid| invalid.in_value("skills")));
    skills
}

/// What an agent should know of its memory: what it is, when to write it, how, what not to do. Markdown, for a system
/// prompt; `include_memory_skill` puts it into a context.
#[utoipa::path(
    get, path = "/skills/memory", operation_id = "read_memory_skill", tag = "tools",
    responses(
        (status = 200, description = "The guide", body = String, content_type = "text/markdown"),
    )
)]
pub(crate) async fn memory(State(service): State<MemoryService>, _: NoQuery) -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/markdown; charset=utf-8")], service.memory_guide())
}
