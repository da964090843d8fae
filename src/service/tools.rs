//! The agent's tools at work: one implementation behind every door.
//!
//! What a model can mend is an [`Outcome`] with a text for it; an [`Error`] is for whoever runs the agent.

use super::{Error, MemoryService};
use crate::domain::context::MEMORY_HEADING;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::skill;
use crate::domain::tool::{LONG_MEMORY_WORDS, Tool, ToolCall, ToolError};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

mod search_history;

/// Who calls a tool.
#[derive(Clone, Debug, Default)]
pub struct ToolContext {
    /// The session that the agent is in. It gives the user.
    pub session: Option<SessionId>,
    /// Whose agent it is; needed only while there is no such session yet, and `default` without.
    pub user: Option<UserId>,
}

/// What came of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Whether nothing was done, for a reason that the text has.
    pub is_error: bool,
    /// What the model gets to read.
    pub content: String,
    /// The same as data; null where nothing was done.
    pub data: Value,
}

impl From<ToolError> for Outcome {
    fn from(ToolError(content): ToolError) -> Self {
        Self { is_error: true, content, data: Value::Null }
    }
}

impl MemoryService {
    /// The tools that a model should be offered: without an index there is nothing to search.
    pub fn tools(&self) -> impl Iterator<Item = Tool> {
        let searches = self.config.search.is_some();
        Tool::ALL.into_iter().filter(move |tool| searches || *tool != Tool::SearchHistory)
    }

    /// What an agent should know of its memory.
    #[must_use]
    pub fn memory_guide(&self) -> String {
        skill::memory_guide(self.config.search.is_some())
    }

    /// Does what the model asks.
    pub async fn call_tool(
        &self,
        tenant: &TenantId,
        context: &ToolContext,
        call: ToolCall,
    ) -> Result<Outcome, Error> {
        let user = self.user_of(tenant, context).await?;
        match call {
            ToolCall::MemoryRead => Ok(read(self.memory(tenant, &user).await?)),
            ToolCall::MemoryWrite { content } => match self.write_memory(tenant, &user, &content, None).await
            {
                Ok(document) => Ok(written(&document)),
                Err(Error::MemoryTooLarge { bytes, most }) => Ok(Outcome::from(ToolError(format!(
                    "Nothing was written: the document has {bytes} bytes, and at most {most} fit. Keep what matters, \
                     about 300 words, and write it again."
                )))),
                Err(error) => Err(error),
            },
            ToolCall::SearchHistory { query, days, max_results } => {
                self.search_history(tenant, user, context.session.as_ref(), (query, days, max_results)).await
            }
        }
    }

    /// The user of the session; of one that doesn't exist yet, the one who is named.
    async fn user_of(&self, tenant: &TenantId, context: &ToolContext) -> Result<UserId, Error> {
        let session = match &context.session {
            Some(session) => self.store.session(tenant, session).await?,
            None => None,
        };
        match (session, &context.user) {
            (Some(session), Some(user)) if session.user_id != *user => Err(Error::SessionUserMismatch),
            (Some(session), _) => Ok(session.user_id),
            (None, user) => Ok(user.clone().unwrap_or_default()),
        }
    }
}

fn read(document: Option<MemoryDocument>) -> Outcome {
    let updated_at = document.as_ref().and_then(|document| document.created_at.format(&Rfc3339).ok());
    let (version, words, text) = document
        .map_or((0, 0, String::new()), |document| (document.version, document.words, document.content));
    let data = json!({"version": version, "words": words, "updated_at": updated_at, "content": text});
    let content = if text.trim().is_empty() { "Your memory document is empty.".to_owned() } else { text };
    Outcome { is_error: false, content, data }
}

fn written(document: &MemoryDocument) -> Outcome {
    let MemoryDocument { version, words, .. } = *document;
    let hint = (words > LONG_MEMORY_WORDS).then(|| {
        format!("It has {words} words: keep it to about 300, and write it again without what matters least.")
    });
    let mut content = format!(
        "Saved as version {version}, {words} words. From the next context on it stands under `{MEMORY_HEADING}`, in all \
         sessions of this user."
    );
    if let Some(hint) = &hint {
        content.push(' ');
        content.push_str(hint);
    }
    Outcome { is_error: false, content, data: json!({"version": version, "words": words, "hint": hint}) }
}
