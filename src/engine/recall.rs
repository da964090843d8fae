//! Building a context: what should this agent send to its model now?

use super::blocking;
use super::consolidate::{Ended, Progress};
use super::turn::Turn;
use super::{Error, MemoryService, Pools};
use crate::domain::consolidation::{Due, Mode};
use crate::domain::context::{self, SystemParts};
use crate::domain::coverage::{self, Coverage, Verbatim};
use crate::domain::cut::Mark;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::Message;
use crate::domain::session::Session;
use crate::domain::tokens;
use crate::storage::StoreError;
use crate::storage::consolidations::Claim;
use crate::storage::recall::Recalled;
use time::OffsetDateTime;

/// What a request for a context says. All of it may be left out.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Comes first in the system message.
    pub system_prompt: Option<String>,
    /// Comes last in the list; it is not persisted.
    pub user_message: Option<Message>,
    /// Whose memory document applies where the session doesn't exist yet.
    pub user_id: Option<UserId>,
    /// When to consolidate, other than the settings say.
    pub mode: Option<Mode>,
    /// Given back while the request waits for its consolidation.
    pub turn: Turn,
}

/// A context, ready to be sent, with what it is made of.
#[derive(Clone, Debug)]
pub struct Context {
    /// The text of the system message; empty = there is none.
    pub system: String,
    /// The verbatim part of the tail: JSON messages, as they were given.
    pub history: Vec<String>,
    /// The new message.
    pub user_message: Option<Message>,
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
    pub tokens: Tokens,
}

/// Tokens of a context's parts, by [`tokens::TOKENIZER`].
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// The system message: the sum of its parts, counted when they were written.
    pub system: i64,
    /// The verbatim part.
    pub history: i64,
    /// The new message.
    pub user_message: i64,
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
    pub async fn context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        request: Request,
    ) -> Result<Context, Error> {
        let user = request.user_id.as_ref();
        let mut recalled = self.recall(tenant, session, user).await?;
        let report = match self.decide(&recalled, request.mode) {
            Decision::Reported(report) => report,
            Decision::Due { claim, pools, mode } => {
                let run = self.start(tenant, session, claim, &pools);
                if mode == Mode::Background {
                    Outcome::Scheduled.into()
                } else {
                    let ended = request.turn.idle(tokio::time::timeout(self.rules.inline_wait, run)).await;
                    // The state has changed, if only by a failure. What was read before is complete as well.
                    match self.recall(tenant, session, user).await {
                        Ok(now) => recalled = now,
                        Err(Error::Store(error)) => {
                            tracing::warn!(%error, "answering with what was read before consolidation");
                        }
                        Err(error) => return Err(error),
                    }
                    self.report(ended, &recalled, request.mode)
                }
            }
        };
        // What the request brought is counted now.
        let brought = request.system_prompt.as_ref().map_or(0, String::len)
            + request.user_message.as_ref().map_or(0, |message| message.json().len());
        let service = self.clone();
        blocking::sized(brought, move || service.assemble(recalled, request, report)).await
    }

    /// Reads what a context is made of, for the session's own user only.
    async fn recall(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
    ) -> Result<Recalled, Error> {
        let most = self.rules.policy.max_history_messages;
        let asking = user.cloned().unwrap_or_default();
        let recalled = self.store.recall(tenant, session, &asking, most).await?;
        match (user, &recalled.session) {
            (Some(asked), Some(session)) if *asked != session.user_id => Err(Error::OtherUser),
            _ => Ok(recalled),
        }
    }

    fn decide(&self, recalled: &Recalled, mode: Option<Mode>) -> Decision {
        let mode = mode.unwrap_or(self.rules.mode);
        let (Some(pools), Mode::Inline | Mode::Background) = (&self.rules.pools, mode) else {
            return Decision::Reported(Outcome::Disabled.into());
        };
        let Some(session) = &recalled.session else {
            return Decision::Reported(Outcome::NotDue.into());
        };
        match self.rules.policy.due(session, recalled.now, self.lease(pools)) {
            Due::No => Decision::Reported(Outcome::NotDue.into()),
            Due::InProgress => Decision::Reported(Outcome::InProgress.into()),
            Due::NotBefore(retry_at) => Decision::Reported(Report {
                retry_at: Some(retry_at),
                reason: session.consolidation.last_failure.clone(),
                ..Outcome::Failed.into()
            }),
            Due::Yes if !self.can_cut(session, recalled) => Decision::Reported(Outcome::NotDue.into()),
            Due::Yes => {
                // A wait that does not count must not be in the way of the claim either.
                let waits = session.consolidation.retry_at.is_some_and(|retry_at| retry_at > recalled.now);
                let claim = if waits { Claim::Asked } else { Claim::Due { revision: session.revision } };
                Decision::Due { claim, pools: pools.clone(), mode }
            }
        }
    }

    /// Whether there is anything to summarise in a tail that is due: while a tool call holds the cursor, there isn't,
    /// and no request should take the lease to find that out.
    fn can_cut(&self, session: &Session, recalled: &Recalled) -> bool {
        let tail_len = usize::try_from(session.tail_len()).unwrap_or(0);
        if tail_len > recalled.window.len() {
            return true;
        }
        let marks: Result<Vec<Mark>, _> = recalled.window.iter().map(|message| mark(&message.json)).collect();
        // What can't be read is for the run to report.
        marks.map_or(true, |marks| self.rules.policy.plan(&marks, tail_len).is_some())
    }

    /// What to say of a run that this request waited for.
    fn report(&self, ended: Waited, recalled: &Recalled, mode: Option<Mode>) -> Report {
        match ended {
            Ok(Ok(Ended::Done(progress))) if progress.revision.is_some() => {
                Report::of(Outcome::Consolidated, progress)
            }
            // Due by its length, but there is no safe cut yet.
            Ok(Ok(Ended::Done(_))) => Outcome::NotDue.into(),
            Ok(Ok(Ended::Failed { progress, retry_at, why })) => {
                Report { retry_at, reason: Some(why), ..Report::of(Outcome::Failed, progress) }
            }
            Ok(Ok(Ended::NotTaken)) => match self.decide(recalled, mode) {
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

    fn assemble(&self, recalled: Recalled, request: Request, report: Report) -> Result<Context, Error> {
        let policy = &self.rules.policy;
        let Recalled { session, memory, mut window, .. } = recalled;
        let verbatim = if self.rules.recent_on_failure && report.outcome == Outcome::Failed {
            Verbatim::Recent { keep: policy.keep_recent }
        } else {
            Verbatim::Tail
        };
        let coverage = coverage::decide(session.as_ref(), policy.max_history_messages, verbatim, || {
            window.iter().map(|message| mark(&message.json)).collect::<Result<_, _>>()
        })?;
        window.retain(|message| message.seq >= coverage.verbatim_from);
        let tail_len = session.as_ref().map_or(0, Session::tail_len);
        let summary = session.as_ref().map(|session| &session.summary);
        let system_prompt = request.system_prompt.unwrap_or_default();
        let parts = SystemParts {
            system_prompt: &system_prompt,
            memory: memory.as_ref().map_or("", |memory| &memory.content),
            summary: summary.map_or("", |summary| &summary.text),
            notice: context::notice_due(tail_len, policy.max_history_messages),
        };
        let system = context::system_message(&parts);
        let tokens = Tokens {
            system: if system.is_empty() { 0 } else { weigh(&parts, memory.as_ref(), session.as_ref()) },
            history: window.iter().map(|message| message.tokens).sum(),
            user_message: request.user_message.as_ref().map_or(0, tokens::of_message),
        };
        Ok(Context {
            system,
            history: window.into_iter().map(|message| message.json).collect(),
            user_message: request.user_message,
            coverage,
            summary_revision: session.as_ref().map_or(0, |session| session.revision),
            summary_words: summary.map_or(0, |summary| summary.words),
            memory_version: memory.as_ref().map_or(0, |memory| memory.version),
            memory_words: memory.as_ref().map_or(0, |memory| memory.words),
            consolidation: report,
            tokens,
        })
    }
}

type Waited = Result<Result<Ended, tokio::task::JoinError>, tokio::time::error::Elapsed>;

/// What to do about consolidation in a request.
enum Decision {
    /// Nothing; and this is what to say of it.
    Reported(Report),
    /// Do it.
    Due { claim: Claim, pools: Pools, mode: Mode },
}

fn mark(json: &str) -> Result<Mark, StoreError> {
    let message = Message::from_stored(json.to_owned());
    let message = message
        .map_err(|_| StoreError::Corrupt { what: "a message", why: "not of the chat format".into() })?;
    Ok(Mark::of(&message))
}

/// Tokens of the system message. Only the prompt that the request brought is counted now.
fn weigh(parts: &SystemParts<'_>, memory: Option<&MemoryDocument>, session: Option<&Session>) -> i64 {
    /// Two blank lines and two `#`.
    const AROUND_HEADING: i64 = 4;
    let heading = |shown: bool, heading: &str, body: i64| {
        if shown { tokens::of_text(heading) + AROUND_HEADING + body } else { 0 }
    };
    let memory_tokens = memory.map_or(0, |memory| memory.tokens);
    let summary_tokens = session.map_or(0, |session| session.summary.tokens);
    tokens::PER_MESSAGE
        + tokens::of_text(parts.system_prompt)
        + heading(!parts.memory.trim().is_empty(), context::MEMORY_HEADING, memory_tokens)
        + heading(!parts.summary.trim().is_empty(), context::SUMMARY_HEADING, summary_tokens)
        + heading(
            parts.notice,
            context::NOTICE_HEADING,
            if parts.notice { tokens::of_text(context::NOTICE) } else { 0 },
        )
}
