//! Consolidation: from the lease to the last commit.
//!
//! A run works in steps. Each step takes the next part of the tail that a model can read at once, has it summarised,
//! and commits summary, cursor and revision together; what was committed stands, whatever becomes of the next step.

use super::{Error, MemoryService, PoolNames};
use crate::blocking;
use crate::domain::api_key::redact_keys;
use crate::domain::batching;
use crate::domain::consolidation::Plan;
use crate::domain::error_chain::ErrorChain;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::revision::Revision;
use crate::domain::session::Session;
use crate::domain::transcript::TranscriptEntry;
use crate::llm::LlmError;
use crate::storage::LeaseCondition;
use crate::storage::MessageQuery;
use crate::storage::StoreError;
use futures_util::FutureExt as _;
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use time::OffsetDateTime;
use tracing::Instrument as _;
use uuid::Uuid;

mod step;
mod token_budget;

/// Messages that are planned in one go; a longer tail is planned again from where the first plan ends.
const PLANNED: i64 = 10_000;

/// What a lease lasts beyond the longest call of a model: time for the statements around it.
const LEASE_MARGIN: Duration = Duration::from_secs(30);

/// What a run has brought.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
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
    /// It was not this run's permit: another has the lease, or what the decision was made on has changed.
    NotTaken,
    /// A step failed; what was committed before stands.
    Failed { progress: Progress, retry_at: Option<OffsetDateTime>, why: String },
}

/// Why a step was not taken. Clients get to see these texts: they hold no text of a conversation, no key, no SQL. What
/// is for the log alone is in the sources.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Llm(#[from] LlmError),
    #[error(
        "the tenant's daily token limit is reached: {used} tokens are used, the limit is {limit} \
         (consolidation.daily_token_limit); a new day begins at midnight UTC"
    )]
    Limit { used: u64, limit: u64 },
    #[error("the database could not be read or written; the log has the details")]
    Store(#[from] StoreError),
    #[error("a stored message can't be read")]
    Message,
    #[error("lost to a restore, an erasure or another consolidation")]
    Superseded,
    #[error("stopped by the end of the service")]
    Stopped,
    // Without the panic's text: it may quote the conversation.
    #[error("a bug in precis: a step panicked")]
    Panicked,
}

impl Failure {
    fn log(&self, failures: u32, retry_in: Duration) {
        let error = ErrorChain(self);
        if matches!(self, Self::Limit { .. }) {
            // Nothing is broken: somebody wanted it so.
            tracing::warn!(%error, failures, ?retry_in, "consolidation has to wait; what was committed before stands");
        } else {
            tracing::error!(%error, failures, ?retry_in, "consolidation failed; what was committed before stands");
        }
    }
}

/// One run, with all that its steps need.
struct ConsolidationRun<'a> {
    service: &'a MemoryService,
    pools: &'a PoolNames,
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
        condition: LeaseCondition,
        pools: &PoolNames,
    ) -> tokio::task::JoinHandle<Ended> {
        let (service, tenant, session, pools) =
            (self.clone(), tenant.clone(), session.clone(), pools.clone());
        let span = tracing::info_span!("consolidation", session = &*redact_keys(session.as_str()));
        self.tasks.spawn(
            async move { service.consolidate(&tenant, &session, condition, &pools).await }.instrument(span),
        )
    }

    /// Consolidates now, whatever threshold and mode. `None`: nothing to do.
    pub async fn consolidate_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Revision>, Error> {
        let pools = self.config.pools.clone().ok_or(Error::ConsolidationDisabled)?;
        self.session(tenant, session).await?;
        let run = self.start(tenant, session, LeaseCondition::Force, &pools);
        match run.await {
            Ok(Ended::Done(progress)) => Ok(progress.revision),
            Ok(Ended::NotTaken) => {
                self.session(tenant, session).await?;
                Err(Error::ConsolidationInProgress)
            }
            Ok(Ended::Failed { why, .. }) => Err(Error::ConsolidationFailed(why)),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// What a lease is taken for.
    pub(super) fn lease(&self, pools: &PoolNames) -> Duration {
        self.llm.deadline(&pools.consolidation).max(self.llm.deadline(&pools.meta)) + LEASE_MARGIN
    }

    async fn consolidate(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        condition: LeaseCondition,
        pools: &PoolNames,
    ) -> Ended {
        let ttl = self.lease(pools);
        let run = ConsolidationRun { service: self, pools, tenant, session, token: Uuid::new_v4(), ttl };
        match self.store.take_lease(tenant, session, run.token, condition, ttl).await {
            Ok(Some(taken)) => run.all(taken, condition == LeaseCondition::Force).await,
            Ok(None) => Ended::NotTaken,
            Err(error) => {
                let failure = Failure::from(error);
                tracing::warn!(error = %ErrorChain(&failure), "consolidation could not begin");
                Ended::Failed { progress: Progress::default(), retry_at: None, why: failure.to_string() }
            }
        }
    }
}

impl ConsolidationRun<'_> {
    /// Takes steps until nothing is due, and gives the lease back, whatever happens.
    async fn all(&self, mut state: Session, asked: bool) -> Ended {
        let mut progress = Progress::default();
        // A bug that a message brings out comes back with it: as any failure it gives the lease back and waits longer
        // each time. What the steps leave behind is read only as far as it was committed.
        let steps = AssertUnwindSafe(self.steps(&mut state, asked, &mut progress)).catch_unwind();
        let result = steps.await.unwrap_or(Err(Failure::Panicked));
        let store = &self.service.store;
        let failure = match result {
            Ok(()) => None,
            Err(failure @ (Failure::Superseded | Failure::Stopped)) => {
                tracing::info!(reason = %failure, "consolidation given up");
                if progress.revision.is_none() {
                    self.release_lease().await;
                    return Ended::NotTaken;
                }
                None
            }
            Err(failure) => Some(failure),
        };
        let Some(failure) = failure else {
            self.release_lease().await;
            return Ended::Done(progress);
        };
        let failures = u32::try_from(state.consolidation.failures).unwrap_or(0).saturating_add(1);
        let retry_in = self.service.config.policy.retry_in(failures);
        failure.log(failures, retry_in);
        let why = clean(&failure.to_string());
        let noted = store.record_failure(self.tenant, self.session, self.token, retry_in, &why).await;
        let retry_at = match noted {
            Ok(Some(retry_at)) => Some(retry_at),
            // The lease keeps others away until it expires; then it is tried again.
            Ok(None) | Err(_) => None,
        };
        Ended::Failed { progress, retry_at, why }
    }

    async fn release_lease(&self) {
        if let Err(error) = self.service.store.release_lease(self.tenant, self.session, self.token).await {
            tracing::warn!(error = %ErrorChain(&error), "the lease could not be given back; it will expire");
        }
    }

    async fn steps(
        &self,
        state: &mut Session,
        mut asked: bool,
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let policy = &self.service.config.policy;
        while asked || policy.is_due(state.tail_len(), state.tail_tokens()) {
            let store = &self.service.store;
            let metadata = store.message_metadata(self.tenant, self.session, state.cursor, PLANNED).await?;
            let tail_len = usize::try_from(state.tail_len()).unwrap_or(0);
            let Some(plan) = policy.plan(&metadata, tail_len) else {
                break;
            };
            // A request asks for one plan; more of them only where the tail is longer than a plan.
            asked = asked && tail_len > metadata.len();
            self.carry_out(state, &plan, &metadata, progress).await?;
        }
        Ok(())
    }

    async fn carry_out(
        &self,
        state: &mut Session,
        plan: &Plan,
        metadata: &[MessageMetadata],
        progress: &mut Progress,
    ) -> Result<(), Failure> {
        let stored: Vec<usize> =
            metadata.iter().map(|metadata| usize::try_from(metadata.tokens).unwrap_or(usize::MAX)).collect();
        let mut from = 0;
        while from < plan.end {
            let capacity = self.capacity();
            let ends: Vec<usize> =
                plan.parts.iter().filter(|end| **end > from).map(|end| end - from).collect();
            let rest = stored.get(from..).unwrap_or_default();
            let (entries, sizes) = self.fill(state.cursor, rest, &ends, capacity).await?;
            let Some(count) = batching::batch_end(&sizes, &ends, capacity).map(|end| end.min(entries.len()))
            else {
                break;
            };
            let entries: Vec<TranscriptEntry> = entries.into_iter().take(count).collect();
            let range_tokens = metadata.iter().skip(from).take(count).map(|metadata| metadata.tokens).sum();
            let step = match self.step(state, entries, range_tokens, capacity).await {
                // A model has shown that it takes less than its settings say: again, with as much as it may take.
                Err(Failure::Llm(error)) if error.is_prompt_too_long() && self.capacity() < capacity => {
                    continue;
                }
                step => step?,
            };
            let committed =
                self.service.store.commit_revision(self.tenant, self.session, self.token, &step).await?;
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

    /// ContextTokens that one question may hold.
    fn capacity(&self) -> usize {
        self.service.llm.capacity(&self.pools.consolidation)
    }

    /// Reads the messages behind the cursor, as a summariser sees them, and what each takes: as many as fit, up to one
    /// of `ends` and a unit beyond. The stored counts tell how much is worth loading at once; what a model gets to see
    /// may be far less, of a tool's result its beginning and its end, and then there is room for more.
    async fn fill(
        &self,
        cursor: i64,
        stored: &[usize],
        ends: &[usize],
        capacity: usize,
    ) -> Result<(Vec<TranscriptEntry>, Vec<usize>), Failure> {
        let (mut entries, mut sizes) = (Vec::new(), Vec::new());
        let mut filled = 0;
        while filled < capacity {
            let had = entries.len();
            let ends: Vec<usize> = ends.iter().filter(|end| **end > had).map(|end| end - had).collect();
            let rest = stored.get(had..).unwrap_or_default();
            let Some(load) = batching::batch_end(rest, &ends, capacity - filled) else {
                break;
            };
            let from = cursor + i64::try_from(had).unwrap_or(i64::MAX);
            let (more, measured) = measured(self.load(from, load).await?).await;
            filled += measured.iter().sum::<usize>();
            entries.extend(more);
            sizes.extend(measured);
        }
        Ok((entries, sizes))
    }

    /// Reads the messages behind the cursor, as a summariser sees them.
    async fn load(&self, cursor: i64, count: usize) -> Result<Vec<TranscriptEntry>, Failure> {
        let limit = i64::try_from(count).unwrap_or(i64::MAX);
        let page = MessageQuery { after_seq: cursor, before_seq: i64::MAX, descending: false, limit };
        let messages = self.service.store.messages(self.tenant, self.session, page).await?;
        let messages = messages.ok_or(Failure::Superseded)?;
        if messages.len() != count {
            return Err(Failure::Superseded);
        }
        messages
            .into_iter()
            .map(|stored| Message::from_stored(stored.json).map(|message| TranscriptEntry::of(&message)))
            .collect::<Result<_, _>>()
            .map_err(|_| Failure::Message)
    }
}

/// Counting a megabyte of tokens takes some tens of milliseconds: not on a thread that serves requests.
async fn measured(entries: Vec<TranscriptEntry>) -> (Vec<TranscriptEntry>, Vec<usize>) {
    let count = move || {
        let sizes = batching::measure(&entries);
        (entries, sizes)
    };
    blocking::run(count).await
}

/// Postgres can't store the NUL character, and no text of ours needs it.
fn clean(text: &str) -> String {
    text.replace('\0', "")
}
