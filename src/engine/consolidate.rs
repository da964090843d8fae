//! Consolidation: from the lease to the last commit.
//!
//! A run works in steps. Each step takes the next part of the tail that a model can read at once, has it summarised,
//! and commits summary, cursor and revision together; what was committed stands, whatever becomes of the next step.

use super::{Error, MemoryService, Pools};
use crate::domain::consolidation::{self, Plan};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::revision::{Meta, Revision, Source};
use crate::domain::session::{Session, Summary};
use crate::domain::transcript::{self, Entry};
use crate::domain::{chunk, summary, tokens};
use crate::llm::{Answer, LlmError, Task};
use crate::storage::StoreError;
use crate::storage::consolidations::{Claim, Step};
use crate::storage::messages::{Outline, Page};
use std::time::Duration;
use time::OffsetDateTime;
use tracing::Instrument as _;
use uuid::Uuid;

/// Messages that are planned in one go; a longer tail is planned again from where the first plan ends.
const PLANNED: i64 = 10_000;

/// What a lease lasts beyond the longest call of a model: time for the statements around it.
const LEASE_MARGIN: Duration = Duration::from_secs(30);

/// What a run has brought.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Messages that the summary covers now and did not before.
    pub messages: i64,
    /// Whether the summary was compressed.
    pub meta: bool,
    /// The model of the last step that asked one.
    pub model: Option<String>,
    /// The revision of the last step; `None`: nothing was to be done.
    pub revision: Option<Revision>,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub(super) enum Ended {
    /// All that was due is done.
    Done(Progress),
    /// It was not this run's turn: another has the lease, or what the decision was made on has changed.
    NotTaken,
    /// A step failed; what was committed before stands.
    Failed {
        progress: Progress,
        retry_at: Option<OffsetDateTime>,
    },
}

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Llm(#[from] LlmError),
    #[error("the result could not be saved: {0}")]
    Store(#[from] StoreError),
    #[error("a stored message can't be read")]
    Message,
    #[error("lost to a restore, an erasure or another consolidation")]
    Superseded,
    #[error("stopped by the end of the service")]
    Stopped,
}

/// One run, with all that its steps need.
struct Run<'a> {
    service: &'a MemoryService,
    pools: &'a Pools,
    tenant: &'a TenantId,
    session: &'a SessionId,
    token: Uuid,
    ttl: Duration,
}

impl MemoryService {
    /// Consolidates as a task of its own. The caller may stop waiting; the task goes on.
    pub(super) fn start(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        claim: Claim,
        pools: &Pools,
    ) -> tokio::task::JoinHandle<Ended> {
        let (service, tenant, session, pools) =
            (self.clone(), tenant.clone(), session.clone(), pools.clone());
        let span = tracing::info_span!("consolidation", session = %session);
        self.tasks.spawn(
            async move { service.consolidate(&tenant, &session, claim, &pools).await }.instrument(span),
        )
    }

    /// Consolidates now, whatever threshold and mode. `None`: nothing to do.
    pub async fn consolidate_now(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Revision>, Error> {
        let pools = self.rules.pools.clone().ok_or(Error::Disabled)?;
        self.session(tenant, session).await?;
        let run = self.start(tenant, session, Claim::Asked, &pools);
        match run.await {
            Ok(Ended::Done(progress)) => Ok(progress.revision),
            Ok(Ended::NotTaken) => {
                self.session(tenant, session).await?;
                Err(Error::InProgress)
            }
            Ok(Ended::Failed { retry_at, .. }) => Err(Error::ConsolidationFailed { retry_at }),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    async fn consolidate(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        claim: Claim,
        pools: &Pools,
    ) -> Ended {
        let longest = self
            .llm
            .deadline(&pools.consolidation)
            .max(self.llm.deadline(&pools.meta));
        let ttl = longest + LEASE_MARGIN;
        let run = Run {
            service: self,
            pools,
            tenant,
            session,
            token: Uuid::new_v4(),
            ttl,
        };
        match self
            .store
            .take_lease(tenant, session, run.token, claim, ttl)
            .await
        {
            Ok(Some(taken)) => run.all(taken, claim == Claim::Asked).await,
            Ok(None) => Ended::NotTaken,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "consolidation could not begin");
                Ended::Failed {
                    progress: Progress::default(),
                    retry_at: None,
                }
            }
        }
    }
}

impl Run<'_> {
    /// Takes steps until nothing is due, and gives the lease back, whatever happens.
    async fn all(&self, mut state: Session, asked: bool) -> Ended {
        let mut progress = Progress::default();
        let result = self.steps(&mut state, asked, &mut progress).await;
        let store = &self.service.store;
        let failure = match result {
            Ok(()) => None,
            Err(failure @ (Failure::Superseded | Failure::Stopped)) => {
                tracing::info!(reason = %failure, "consolidation given up");
                if progress.revision.is_none() {
                    self.give_back().await;
                    return Ended::NotTaken;
                }
                None
            }
            Err(failure) => Some(failure),
        };
        let Some(failure) = failure else {
            self.give_back().await;
            return Ended::Done(progress);
        };
        let failures = u32::try_from(state.consolidation.failures)
            .unwrap_or(0)
            .saturating_add(1);
        let retry_in = self.service.rules.policy.retry_in(failures);
        let why = Chain(&failure).to_string().replace('\0', "");
        tracing::error!(error = %why, failures, ?retry_in, "consolidation failed; history and summary are untouched");
        let noted = store
            .fail(self.tenant, self.session, self.token, retry_in, &why)
            .await;
        let retry_at = match noted {
            Ok(Some(retry_at)) => Some(retry_at),
            // The lease keeps others away until it expires; then it is tried again.
            Ok(None) | Err(_) => None,
        };
        Ended::Failed { progress, retry_at }
    }

    async fn give_back(&self) {
        if let Err(error) = self
            .service
            .store
            .release_lease(self.tenant, self.session, self.token)
            .await
        {
            tracing::warn!(error = %Chain(&error), "the lease could not be given back; it will expire");
        }
    }

    async fn steps(
        &self,
        state: &mut Session,
        mut asked: bool,
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let policy = &self.service.rules.policy;
        while asked || policy.is_due(state.tail_len(), state.tail_tokens()) {
            let store = &self.service.store;
            let outlines = store
                .outlines(self.tenant, self.session, state.cursor, PLANNED)
                .await?;
            let marks: Vec<_> = outlines.iter().map(|outline| outline.mark.clone()).collect();
            let tail_len = usize::try_from(state.tail_len()).unwrap_or(0);
            let Some(plan) = policy.plan(&marks, tail_len) else {
                break;
            };
            // A request asks for one plan; more of them only where the tail is longer than a plan.
            asked = asked && tail_len > marks.len();
            self.carry_out(state, &plan, &outlines, progress).await?;
        }
        Ok(())
    }

    async fn carry_out(
        &self,
        state: &mut Session,
        plan: &Plan,
        outlines: &[Outline],
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let capacity = self.service.llm.capacity(&self.pools.consolidation);
        let stored: Vec<usize> = outlines
            .iter()
            .map(|outline| usize::try_from(outline.tokens).unwrap_or(usize::MAX))
            .collect();
        let mut from = 0;
        while from < plan.end {
            // The stored counts tell how much is worth loading; what a model gets to see is measured then.
            let ends: Vec<usize> = plan
                .parts
                .iter()
                .filter(|end| **end > from)
                .map(|end| end - from)
                .collect();
            let rest = stored.get(from..).unwrap_or_default();
            let Some(load) = chunk::end(rest, &ends, capacity) else {
                break;
            };
            let entries = self.load(state.cursor, load).await?;
            let (entries, sizes) = measured(entries).await;
            let Some(count) = chunk::end(&sizes, &ends, capacity).map(|end| end.min(load)) else {
                break;
            };
            let entries: Vec<Entry> = entries.into_iter().take(count).collect();
            let range_tokens = outlines
                .iter()
                .skip(from)
                .take(count)
                .map(|outline| outline.tokens)
                .sum();
            let step = self.step(state, entries, range_tokens, capacity).await?;
            let committed = self
                .service
                .store
                .commit(self.tenant, self.session, self.token, &step)
                .await?;
            let revision = committed.ok_or(Failure::Superseded)?;
            progress.messages += step.cursor - step.base_cursor;
            progress.meta |= step.meta.is_some();
            if let Some(source) = &step.source {
                progress.model = Some(source.model.clone());
            }
            tracing::info!(
                revision = revision.revision,
                from_seq = step.base_cursor + 1,
                to_seq = step.cursor,
                words = step.summary.words,
                meta = step.meta.is_some(),
                model = progress.model,
                "consolidated"
            );
            state.cursor = step.cursor;
            state.cursor_tokens += step.range_tokens;
            state.revision = revision.revision;
            state.summary = step.summary;
            state.consolidation.failures = 0;
            progress.revision = Some(revision);
            from += count;
        }
        Ok(())
    }

    /// Reads the messages behind the cursor, as a summariser sees them.
    async fn load(&self, cursor: i64, count: usize) -> Result<Vec<Entry>, Failure> {
        let limit = i64::try_from(count).unwrap_or(i64::MAX);
        let page = Page {
            after_seq: cursor,
            before_seq: i64::MAX,
            descending: false,
            limit,
        };
        let messages = self
            .service
            .store
            .messages(self.tenant, self.session, page)
            .await?;
        let messages = messages.ok_or(Failure::Superseded)?;
        if messages.len() != count {
            return Err(Failure::Superseded);
        }
        messages
            .into_iter()
            .map(|stored| Message::from_stored(stored.json).map(|message| Entry::of(&message)))
            .collect::<Result<_, _>>()
            .map_err(|_| Failure::Message)
    }

    /// Has the entries summarised, and the summary compressed where it has grown too long.
    async fn step(
        &self,
        state: &Session,
        entries: Vec<Entry>,
        range_tokens: i64,
        capacity: usize,
    ) -> Result<Step, Failure> {
        let count = entries.len();
        let entries: Vec<Entry> = entries.into_iter().filter(|entry| !entry.is_empty()).collect();
        let mut added = String::new();
        let mut source: Option<Source> = None;
        if !entries.is_empty() {
            let pool = &self.pools.consolidation;
            // The budget is for the messages of the range, those without text included.
            let whole = entries.len();
            for piece in chunk::pieces(entries, capacity) {
                let sentences =
                    consolidation::sentences(if piece.len() == whole { count } else { piece.len() });
                let answer = self
                    .ask(
                        pool,
                        Task::Consolidate {
                            entries: &piece,
                            sentences,
                        },
                    )
                    .await?;
                added = summary::append(&added, &clean(&answer.text));
                source = Some(joined(source, pool, &answer));
            }
        }
        let mut text = summary::append(&state.summary.text, &added);
        let mut words = summary::words(&text);
        let mut meta = None;
        let policy = &self.service.rules.policy;
        if !added.is_empty() && policy.needs_meta(words) {
            if let Some((compressed, source)) = self.compress(&text).await? {
                meta = Some(Meta {
                    text_before: std::mem::replace(&mut text, compressed),
                    source,
                });
                words = summary::words(&text);
            }
        }
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        let tokens = if text == state.summary.text {
            state.summary.tokens
        } else {
            tokens::of_text(&text)
        };
        Ok(Step {
            base_revision: state.revision,
            base_cursor: state.cursor,
            cursor: state.cursor + i64::try_from(count).unwrap_or(0),
            range_tokens,
            summary: Summary { text, words, tokens },
            added,
            source,
            meta,
        })
    }

    /// Compresses a summary. `None`: no model did, and the summary stays as long as it is; large beats lost.
    async fn compress(&self, text: &str) -> Result<Option<(String, Source)>, Failure> {
        let pool = &self.pools.meta;
        let size = tokens::count(&transcript::encode_text(text));
        let capacity = self.service.llm.capacity(pool);
        if size > capacity {
            tracing::warn!(
                size,
                capacity,
                "the summary is larger than its models can read; it stays as it is"
            );
            return Ok(None);
        }
        let sentences = self.service.rules.policy.summary_sentences;
        match self
            .ask(
                pool,
                Task::Meta {
                    summary: text,
                    sentences,
                },
            )
            .await
        {
            Ok(answer) => Ok(Some((clean(&answer.text), joined(None, pool, &answer)))),
            Err(Failure::Llm(error)) => {
                tracing::warn!(error = %error, "meta-consolidation failed; the summary stays as it is");
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Asks a pool, with a lease that outlasts the call.
    async fn ask(&self, pool: &str, task: Task<'_>) -> Result<Answer, Failure> {
        let service = self.service;
        if !service
            .store
            .renew_lease(self.tenant, self.session, self.token, self.ttl)
            .await?
        {
            return Err(Failure::Superseded);
        }
        tokio::select! {
            answer = service.llm.ask(pool, task) => Ok(answer?),
            () = service.stop.cancelled() => Err(Failure::Stopped),
        }
    }
}

/// Counting a megabyte of tokens takes some tens of milliseconds: not on a thread that serves requests.
async fn measured(entries: Vec<Entry>) -> (Vec<Entry>, Vec<usize>) {
    let count = move || {
        let sizes = chunk::measure(&entries);
        (entries, sizes)
    };
    tokio::task::spawn_blocking(count)
        .await
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Postgres can't store the NUL character, and no summary needs it.
fn clean(text: &str) -> String {
    text.replace('\0', "")
}

/// The model's part of a step, with that of an earlier piece of the same step.
fn joined(earlier: Option<Source>, pool: &str, answer: &Answer) -> Source {
    let sum = |before: Option<i64>, now: Option<u64>| match now.and_then(|now| i64::try_from(now).ok()) {
        Some(now) => Some(before.unwrap_or(0) + now),
        None => before,
    };
    let earlier = earlier.as_ref();
    Source {
        model: answer.model.clone(),
        pool: pool.to_owned(),
        prompt_version: answer.prompt_version.clone(),
        input_tokens: sum(
            earlier.and_then(|source| source.input_tokens),
            answer.usage.input_tokens,
        ),
        output_tokens: sum(
            earlier.and_then(|source| source.output_tokens),
            answer.usage.output_tokens,
        ),
        duration_ms: i64::try_from(answer.duration.as_millis()).unwrap_or(i64::MAX)
            + earlier.map_or(0, |source| source.duration_ms),
    }
}

/// An error with what caused it, in one line.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
