//! Building a context: what should this agent send to its model now?

use super::consolidation::{Ended, Progress};
use super::work_permit::WorkPermit;
use super::{Error, MemoryService, PoolNames};
use crate::blocking;
use crate::domain::consolidation::{Due, Mode};
use crate::domain::coverage::Coverage;
use crate::domain::format::{Format, RenderedContext};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::session::Session;
use crate::domain::tokens::Tokenizer;
use crate::storage::ContextSnapshot;
use crate::storage::LeaseCondition;
use time::OffsetDateTime;

mod assemble;

/// What a request for a context says. All of it may be left out.
#[derive(Clone, Debug, Default)]
pub struct ContextOptions {
    /// Comes first in the system message.
    pub system_prompt: Option<String>,
    /// Comes last in the list; it is not persisted.
    pub user_message: Option<Message>,
    /// Whose memory document applies where the session doesn't exist yet.
    pub user_id: Option<UserId>,
    /// What the system message says of skills: `domain::skill::section`.
    pub skills: String,
    /// When to consolidate, other than the settings say.
    pub mode: Option<Mode>,
    /// Most tokens of the whole list.
    pub max_tokens: Option<i64>,
    /// How the list is written.
    pub format: Format,
    /// Whether the stable part is marked for the provider's cache.
    pub cache_control: bool,
    /// Given back while the request waits for its consolidation.
    pub permit: WorkPermit,
}

/// A context, ready to be sent, with what it is made of.
#[derive(Clone, Debug)]
pub struct Context {
    /// The list.
    pub list: RenderedContext,
    /// What covers which messages.
    pub coverage: Coverage,
    /// The revision of the summary; 0 = there is none.
    pub summary_revision: i64,
    /// Words of the summary.
    pub summary_words: i64,
    /// The version of the memory document; 0 = never written.
    pub memory_version: i64,
    /// Words of the memory document.
    pub memory_words: i64,
    /// What became of consolidation.
    pub consolidation: Report,
    /// What it weighs.
    pub tokens: ContextTokens,
}

/// ContextTokens of a context's parts.
#[derive(Clone, Copy, Debug)]
pub struct ContextTokens {
    /// The system message.
    pub system: i64,
    /// The verbatim part.
    pub history: i64,
    /// The new message.
    pub user_message: i64,
    /// The part that will be the same in the next context.
    pub stable: i64,
    /// What counted them.
    pub tokenizer: Tokenizer,
}

/// What became of consolidation in a request.
#[derive(Clone, Debug)]
pub struct Report {
    /// How it went.
    pub outcome: Outcome,
    /// Messages that were summarised.
    pub messages: i64,
    /// Whether the summary was compressed.
    pub meta: bool,
    /// The model that did it.
    pub model: Option<String>,
    /// When it will be tried again, after a failure.
    pub retry_at: Option<OffsetDateTime>,
    /// Why it failed, for the developer who asks.
    pub reason: Option<String>,
}

/// How consolidation went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The tail is short enough.
    NotDue,
    /// Its older part was summarised.
    Consolidated,
    /// Its older part is going to be summarised after this answer.
    Scheduled,
    /// Another request is at it.
    InProgress,
    /// It failed, now or so recently that it isn't tried again yet.
    Failed,
    /// There is no pool, or the mode is off.
    Disabled,
}

impl Outcome {
    /// The word of the interface.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotDue => "not_due",
            Self::Consolidated => "consolidated",
            Self::Scheduled => "scheduled",
            Self::InProgress => "in_progress",
            Self::Failed => "failed",
            Self::Disabled => "disabled",
        }
    }
}

impl From<Outcome> for Report {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, messages: 0, meta: false, model: None, retry_at: None, reason: None }
    }
}

impl Report {
    fn of(outcome: Outcome, progress: Progress) -> Self {
        let Progress { messages, meta, model, .. } = progress;
        Self { messages, meta, model, ..Self::from(outcome) }
    }
}

impl MemoryService {
    /// Builds the context of a session, and consolidates it where that is due. Whatever becomes of that, the
    /// request is answered: with the summary as it is and the messages that it doesn't cover.
    pub async fn build_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        request: ContextOptions,
    ) -> Result<Context, Error> {
        let user = request.user_id.as_ref();
        let mut snapshot = self.load_context(tenant, session, user).await?;
        let report = match self.decide(&snapshot, request.mode) {
            Decision::Reported(report) => report,
            Decision::Due { condition, pools, mode } => {
                let run = self.start(tenant, session, condition, &pools);
                if mode == Mode::Background {
                    Outcome::Scheduled.into()
                } else {
                    let ended = request
                        .permit
                        .release_while(tokio::time::timeout(self.config.inline_wait, run))
                        .await;
                    // The state has changed, if only by a failure. What was read before is complete as well.
                    match self.load_context(tenant, session, user).await {
                        Ok(now) => snapshot = now,
                        Err(Error::Store(error)) => {
                            tracing::warn!(%error, "answering with what was read before consolidation");
                        }
                        Err(error) => return Err(error),
                    }
                    self.report(ended, &snapshot, request.mode)
                }
            }
        };
        // What the request brought is counted now, and so is what is put in.
        let brought = request.system_prompt.as_ref().map_or(0, String::len)
            + request.skills.len()
            + request.user_message.as_ref().map_or(0, |message| message.json().len());
        let bytes = brought + request.format.work(&snapshot.tail);
        let service = self.clone();
        blocking::sized(bytes, move || service.assemble(snapshot, request, report)).await
    }

    /// Reads what a context is made of, for the session's own user only.
    async fn load_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
    ) -> Result<ContextSnapshot, Error> {
        let most = self.config.policy.max_history_messages;
        let asking = user.cloned().unwrap_or_default();
        let snapshot = self.store.load_context(tenant, session, &asking, most).await?;
        match (user, &snapshot.session) {
            (Some(asked), Some(session)) if *asked != session.user_id => Err(Error::SessionUserMismatch),
            _ => Ok(snapshot),
        }
    }

    fn decide(&self, snapshot: &ContextSnapshot, mode: Option<Mode>) -> Decision {
        let mode = mode.unwrap_or(self.config.mode);
        let (Some(pools), Mode::Inline | Mode::Background) = (&self.config.pools, mode) else {
            return Decision::Reported(Outcome::Disabled.into());
        };
        let Some(session) = &snapshot.session else {
            return Decision::Reported(Outcome::NotDue.into());
        };
        match self.config.policy.due(session, snapshot.now, self.lease(pools)) {
            Due::No => Decision::Reported(Outcome::NotDue.into()),
            Due::InProgress => Decision::Reported(Outcome::InProgress.into()),
            Due::NotBefore(retry_at) => Decision::Reported(Report {
                retry_at: Some(retry_at),
                reason: session.consolidation.last_failure.clone(),
                ..Outcome::Failed.into()
            }),
            Due::Yes if !self.can_cut(session, snapshot) => Decision::Reported(Outcome::NotDue.into()),
            Due::Yes => {
                // A wait that does not count must not be in the way of the condition either.
                let waits = session.consolidation.retry_at.is_some_and(|retry_at| retry_at > snapshot.now);
                let condition = if waits {
                    LeaseCondition::Force
                } else {
                    LeaseCondition::IfDue { revision: session.revision }
                };
                Decision::Due { condition, pools: pools.clone(), mode }
            }
        }
    }

    /// Whether there is anything to summarise in a tail that is due: while a tool call holds the cursor, there isn't,
    /// and no request should take the lease to find that out.
    fn can_cut(&self, session: &Session, snapshot: &ContextSnapshot) -> bool {
        let tail_len = usize::try_from(session.tail_len()).unwrap_or(0);
        if tail_len > snapshot.tail.len() {
            return true;
        }
        let marks: Vec<MessageMetadata> =
            snapshot.tail.iter().map(|message| message.metadata.clone()).collect();
        self.config.policy.plan(&marks, tail_len).is_some()
    }

    /// What to say of a run that this request waited for.
    fn report(&self, ended: Waited, snapshot: &ContextSnapshot, mode: Option<Mode>) -> Report {
        match ended {
            Ok(Ok(Ended::Done(progress))) if progress.revision.is_some() => {
                Report::of(Outcome::Consolidated, progress)
            }
            // Due by its length, but there is no safe cut yet.
            Ok(Ok(Ended::Done(_))) => Outcome::NotDue.into(),
            Ok(Ok(Ended::Failed { progress, retry_at, why })) => {
                Report { retry_at, reason: Some(why), ..Report::of(Outcome::Failed, progress) }
            }
            Ok(Ok(Ended::NotTaken)) => match self.decide(snapshot, mode) {
                Decision::Reported(report) => report,
                Decision::Due { .. } => Outcome::InProgress.into(),
            },
            Ok(Err(panic)) => {
                tracing::error!(%panic, "consolidation panicked; its lease will expire");
                Report { reason: Some("a bug in precis".to_owned()), ..Outcome::Failed.into() }
            }
            // It goes on, and the next request finds what it has done.
            Err(_) => Outcome::InProgress.into(),
        }
    }
}

type Waited = Result<Result<Ended, tokio::task::JoinError>, tokio::time::error::Elapsed>;

/// What to do about consolidation in a request.
enum Decision {
    /// Nothing; and this is what to say of it.
    Reported(Report),
    /// Do it.
    Due { condition: LeaseCondition, pools: PoolNames, mode: Mode },
}
