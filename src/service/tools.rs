//! Execution of the agent's tools, shared by HTTP and MCP.
//!
//! Problems that the model can correct are an [`ToolOutcome`] with a text for the model. An [`Error`] is for the developer
//! or operator.

use super::{Error, MemoryService};
use crate::domain::headings::MEMORY_HEADING;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::{MemoryAuthor, MemoryDocument};
use crate::domain::skill;
use crate::domain::tool::{LONG_MEMORY_WORDS, Tool, ToolCall, ToolError};
use crate::domain::transcript::encode_text;
use serde_json::{Value, json};
use std::fmt::Write as _;
use time::format_description::well_known::Rfc3339;

mod search_history;

/// The session and user on whose behalf a tool is called.
#[derive(Clone, Debug)]
pub struct ToolContext {
    /// The session of the agent. A session with a user determines the user.
    pub session: Option<SessionId>,
    /// The user that the call names. It becomes the user of a session that has none.
    pub user: Option<UserId>,
    /// The user if neither the session nor the call has one.
    pub default_user: Option<UserId>,
    /// Permits the call to bind the session to its user. Otherwise, the call only uses the user.
    pub may_bind: bool,
    /// A sentence that tells how to name the user, for a call that needs one.
    pub user_advice: &'static str,
    /// The author of a memory document that the call writes.
    pub author: MemoryAuthor,
}

/// The user of a call, and the state of its session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCaller {
    pub user: Option<UserId>,
    /// `false` before the first exchange of the session, whose id may be mistyped; `None` without a session.
    pub session_exists: Option<bool>,
    /// Neither the session nor the call has named the user.
    is_default_user: bool,
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

/// The messages that a search finds.
enum HistoryScope {
    /// All sessions of the user.
    User(UserId),
    Session(SessionId),
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

    /// Executes a tool call, or returns its error to the model.
    pub async fn call_tool(
        &self,
        tenant: &TenantId,
        context: &ToolContext,
        call: Result<ToolCall, ToolError>,
    ) -> Result<(ToolCaller, ToolOutcome), Error> {
        let caller = self.tool_caller(tenant, context).await?;
        let mut outcome = match call {
            Ok(call) => self.execute(tenant, &caller, context, call).await?,
            Err(error) => error.into(),
        };
        if let Value::Object(data) = &mut outcome.data {
            data.insert("user_id".to_owned(), json!(caller.user.as_ref().map(UserId::as_str)));
            data.insert("session_exists".to_owned(), json!(caller.session_exists));
        }
        Ok((caller, outcome))
    }

    async fn execute(
        &self,
        tenant: &TenantId,
        caller: &ToolCaller,
        context: &ToolContext,
        call: ToolCall,
    ) -> Result<ToolOutcome, Error> {
        let session = context.session.as_ref();
        match (call, &caller.user) {
            (ToolCall::SearchHistory { query, days, max_results }, user) => {
                // Without a user, the model sees its own session only.
                let scope = match (user, session) {
                    (Some(user), _) => HistoryScope::User(user.clone()),
                    (None, Some(session)) => HistoryScope::Session(session.clone()),
                    (None, None) => return Ok(no_user(context).into()),
                };
                self.search_history(tenant, scope, session, (query, days, max_results)).await
            }
            (_, None) => Ok(no_user(context).into()),
            (ToolCall::MemoryRead, Some(user)) => Ok(memory_read(self.memory(tenant, user).await?)),
            (ToolCall::MemoryWrite { content }, Some(user)) => {
                let written = self.write_memory(tenant, user, &content, None, context.author).await;
                memory_saved(user, written, new_session(caller, context))
            }
            (ToolCall::MemoryAppend { text }, Some(user)) => {
                self.edit_memory(tenant, user, caller, context, |document| Ok(append(document, &text))).await
            }
            (ToolCall::MemoryReplace { old_text, new_text }, Some(user)) => {
                let edit = |document: &str| replace(document, &old_text, &new_text);
                self.edit_memory(tenant, user, caller, context, edit).await
            }
        }
    }

    /// Writes the document that an edit makes of the present one. If another call changes the document in between, the edit is made again.
    async fn edit_memory(
        &self,
        tenant: &TenantId,
        user: &UserId,
        caller: &ToolCaller,
        context: &ToolContext,
        edit: impl Fn(&str) -> Result<String, ToolError>,
    ) -> Result<ToolOutcome, Error> {
        /// Other sessions of the user can change the document again and again.
        const MAX_ATTEMPTS: usize = 20;
        let mut attempt = 1;
        loop {
            let document = self.memory(tenant, user).await?;
            let version = document.as_ref().map_or(0, |document| document.version);
            let text = match edit(document.as_ref().map_or("", |document| &document.content)) {
                Ok(text) => text,
                Err(error) => return Ok(error.into()),
            };
            let written = self.write_memory(tenant, user, &text, Some(version), context.author).await;
            if !matches!(written, Err(Error::VersionMismatch)) || attempt == MAX_ATTEMPTS {
                return memory_saved(user, written, new_session(caller, context));
            }
            attempt += 1;
        }
    }

    /// Returns the user on whose behalf a tool is called, and the state of the session.
    pub async fn tool_caller(&self, tenant: &TenantId, context: &ToolContext) -> Result<ToolCaller, Error> {
        let (named, default_user) = (context.user.as_ref(), context.default_user.as_ref());
        let (user, session_exists) = match &context.session {
            Some(session) => {
                let owner = self.session_owner(tenant, session, named, context.may_bind).await?;
                (owner.user, Some(owner.exists))
            }
            None => (named.cloned(), None),
        };
        let is_default_user = user.is_none();
        Ok(ToolCaller { user: user.or_else(|| default_user.cloned()), session_exists, is_default_user })
    }
}

/// Returns the error for a call without a user.
fn no_user(context: &ToolContext) -> ToolError {
    let subject = if context.session.is_some() { "this session" } else { "this call" };
    ToolError(format!(
        "Nothing was done: {subject} has no user, and a memory document belongs to a user. {}",
        context.user_advice
    ))
}

/// Returns the session of a call if the default user applies because the session is new. Its id may be mistyped.
fn new_session<'c>(caller: &ToolCaller, context: &'c ToolContext) -> Option<&'c SessionId> {
    let is_new = caller.is_default_user && caller.session_exists == Some(false);
    context.session.as_ref().filter(|_| is_new)
}

/// Adds a text on a line of its own.
fn append(document: &str, text: &str) -> String {
    let separator = if document.is_empty() || document.ends_with('\n') { "" } else { "\n" };
    format!("{document}{separator}{text}")
}

/// Replaces a passage that occurs exactly once.
fn replace(document: &str, old_text: &str, new_text: &str) -> Result<String, ToolError> {
    // Overlapping occurrences count, too.
    let starts = document
        .char_indices()
        .filter(|(at, _)| document.get(*at..).is_some_and(|rest| rest.starts_with(old_text)));
    match starts.count() {
        1 => Ok(document.replacen(old_text, new_text, 1)),
        0 if document.trim().is_empty() => {
            Err(ToolError("Nothing was written: your memory document is empty. Use memory_append.".to_owned()))
        }
        0 => Err(ToolError(
            "Nothing was written: `old_text` is not in your memory document. Read it with memory_read and copy the passage \
             exactly, with its punctuation and line breaks."
                .to_owned(),
        )),
        count => Err(ToolError(format!(
            "Nothing was written: `old_text` occurs {count} times in your memory document. Include more of the words around \
             the passage, so that it occurs once."
        ))),
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

fn memory_saved(
    user: &UserId,
    written: Result<MemoryDocument, Error>,
    new_session: Option<&SessionId>,
) -> Result<ToolOutcome, Error> {
    let MemoryDocument { version, words, .. } = match written {
        Ok(document) => document,
        Err(Error::MemoryTooLarge { bytes, max_bytes }) => {
            let text = format!(
                "Nothing was written: the document would have {bytes} bytes, and at most {max_bytes} fit. Keep what matters, \
                 about 300 words, and write it again with memory_write."
            );
            return Ok(ToolError(text).into());
        }
        Err(error) => return Err(error),
    };
    let hint = (words > LONG_MEMORY_WORDS).then(|| {
        format!("It has {words} words: keep it to about 300, and write it again without what matters least.")
    });
    let mut content = format!(
        "Saved as version {version}, {words} words. From the next context on it stands under `{MEMORY_HEADING}`, in all \
         sessions of the user {}.",
        encode_text(user.as_str())
    );
    if let Some(session) = new_session {
        // Writing to a String cannot fail.
        let _ = write!(
            content,
            " The session {} has no messages yet and names no user, so the default user applies.",
            encode_text(session.as_str())
        );
    }
    if let Some(hint) = &hint {
        content.push(' ');
        content.push_str(hint);
    }
    let data = json!({"version": version, "words": words, "hint": hint});
    Ok(ToolOutcome { is_error: false, content, data })
}
