//! Execution of the agent's tools, shared by HTTP and MCP.
//!
//! Problems that the model can correct are an [`ToolOutcome`] with a text for the model. An [`Error`] is for the developer
//! or operator.

use super::{Error, MemoryService};
use crate::domain::headings::MEMORY_HEADING;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::skill;
use crate::domain::tool::{LONG_MEMORY_WORDS, Tool, ToolCall, ToolError};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

mod search_history;

/// The session and user on whose behalf a tool is called.
#[derive(Clone, Debug, Default)]
pub struct ToolContext {
    /// The session of the agent. An existing session determines the user.
    pub session: Option<SessionId>,
    /// The user, while the session does not exist yet. Defaults to `default`.
    pub user: Option<UserId>,
}

/// The result of a tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOutcome {
    /// `true` if nothing was done. The reason is in `content`.
    pub is_error: bool,
    /// Text for the model.
    pub content: String,
    /// The same as data. Null if nothing was done.
    pub data: Value,
}

impl From<ToolError> for ToolOutcome {
    fn from(ToolError(content): ToolError) -> Self {
        Self { is_error: true, content, data: Value::Null }
    }
}

impl MemoryService {
    /// Returns the available tools. `search_history` requires that search is enabled.
    pub fn tools(&self) -> impl Iterator<Item = Tool> {
        let search_enabled = self.config.search.is_some();
        Tool::ALL.into_iter().filter(move |tool| search_enabled || *tool != Tool::SearchHistory)
    }

    /// Returns the guide that teaches an agent to use its memory.
    #[must_use]
    pub fn memory_guide(&self) -> String {
        skill::memory_guide(self.config.search.is_some())
    }

    /// Executes a tool call.
    pub async fn call_tool(
        &self,
        tenant: &TenantId,
        context: &ToolContext,
        call: ToolCall,
    ) -> Result<ToolOutcome, Error> {
        let user = self.tool_user(tenant, context).await?;
        match call {
            ToolCall::MemoryRead => Ok(memory_read(self.memory(tenant, &user).await?)),
            ToolCall::MemoryWrite { content } => {
                match self.write_memory(tenant, &user, &content, None).await {
                    Ok(document) => Ok(memory_saved(&document)),
                    Err(Error::MemoryTooLarge { bytes, max_bytes }) => {
                        Ok(ToolOutcome::from(ToolError(format!(
                            "Nothing was written: the document has {bytes} bytes, and at most {max_bytes} fit. Keep what matters, \
                         about 300 words, and write it again."
                        ))))
                    }
                    Err(error) => Err(error),
                }
            }
            ToolCall::SearchHistory { query, days, max_results } => {
                self.search_history(tenant, user, context.session.as_ref(), (query, days, max_results)).await
            }
        }
    }

    /// Returns the user of the session, or the named user if the session does not exist.
    async fn tool_user(&self, tenant: &TenantId, context: &ToolContext) -> Result<UserId, Error> {
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

fn memory_read(document: Option<MemoryDocument>) -> ToolOutcome {
    let updated_at = document.as_ref().and_then(|document| document.created_at.format(&Rfc3339).ok());
    let (version, words, text) = document
        .map_or((0, 0, String::new()), |document| (document.version, document.words, document.content));
    let data = json!({"version": version, "words": words, "updated_at": updated_at, "content": text});
    let content = if text.trim().is_empty() { "Your memory document is empty.".to_owned() } else { text };
    ToolOutcome { is_error: false, content, data }
}

fn memory_saved(document: &MemoryDocument) -> ToolOutcome {
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
    ToolOutcome { is_error: false, content, data: json!({"version": version, "words": words, "hint": hint}) }
}
