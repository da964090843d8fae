//! Consolidation runs: from taking the lease to the last commit.
//!
//! A [`ConsolidationRun`] plans the split points of the tail and works in batches. Each batch contains as many messages as
//! the models of the pool can read at once; it is summarised, and summary, cursor and revision are committed together. A
//! committed batch stays, even if a later one fails.

use super::leases::keep_lease;
use super::{Error, MemoryService, PoolNames};
use crate::blocking;
use crate::capacity;
use crate::domain::api_key::redact_keys;
use crate::domain::consolidation::{
    Activity, ConsolidationPlan, LEASE_TTL, PlanScope, Rule, SessionSize, divide_sentences,
    requested_sentences,
};
use crate::domain::consolidation_record::{RecordDetails, RecordOutcome, RunCause};
use crate::domain::error_chain::ErrorChain;
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::invisible::without_nul;
use crate::domain::revision::{ModelUsage, Provenance, Revision};
use crate::domain::search::text::OwnResults;
use crate::domain::session::{Session, Window};
use crate::domain::transcript::{TimeLines, TranscriptEntry, TranscriptLine};
use crate::domain::{batching, summary};
use crate::llm::{Attempt, Cost, LlmError, PoolResponse, Task, extractive};
use crate::storage::{LeaseCondition, MessagePage, MessageQuery, NewRevision, StoreError, StoredMessage};
use crate::trace_context::step;
use futures_util::FutureExt as _;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use tokio::task::JoinHandle;
use tracing::Instrument as _;
use uuid::Uuid;

mod compression;
mod preview;
mod report;

pub use preview::{ConsolidationPreview, PoolStrategy};
pub use report::{ConsolidationReport, Outcome};

/// Number of messages that are planned at once. A longer tail is planned again after the first plan.
const MAX_PLANNED_MESSAGES: i64 = 10_000;

/// Size of the messages that are loaded at once. Images count few tokens, and only their names become part of a transcript.
const MAX_LOADED_BYTES: i64 = 8 * 1024 * 1024;
/// The memory of messages that are loaded: as rows, as messages, and as lines of the transcript.
const LOADED_MEMORY: usize = 24 * 1024 * 1024;

/// Size of the end of a summary that is kept for a prompt, which contains less of it.
const MAX_PREVIOUS_BYTES: usize = 1024;

/// Number of calls of a run, at most, that compress a part of a summary. Groups beyond it stay as they are until the next run.
/// With an `input_limit` of 16,000 tokens, a summary of the largest size needs about 20 such calls.
const MAX_GROUP_CALLS: usize = 64;

/// The error that ended a run, or a reranking, early. Clients see its text, which therefore contains no conversation, key or SQL. Only the
/// log contains its sources.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    #[error(transparent)]
    Llm(#[from] LlmError),
    #[error(
        "the tenant's daily token limit is reached: {used} tokens are used, the limit is {limit} \
         (consolidation.daily_token_limit); a new day begins at midnight UTC"
    )]
    TokenLimit { used: u64, limit: u64 },
    #[error("the database could not be read or written; the log has the details")]
    Store(#[from] StoreError),
    #[error("a stored message can't be read")]
    CorruptMessage,
    #[error("superseded by a restore, an edit, a rewind, a redaction, an erasure or another consolidation")]
    Superseded,
    #[error("stopped because the service shuts down")]
    ShuttingDown,
    #[error(
        "the summary would have {bytes} bytes, at most {limit} are stored: let models with a larger input_limit \
         compress it (consolidation.meta_pool), or replace it by a shorter one \
         (POST /sessions/{{session_id}}/revisions)",
        limit = summary::MAX_BYTES
    )]
    SummaryTooLarge { bytes: usize },
    #[error(
        "the models wrote {bytes} bytes for the next messages, at most {limit} are stored as a summary: lower their \
         output_limit, or use models with a larger input_limit (consolidation.pool), so that fewer calls are necessary",
        limit = summary::MAX_BYTES
    )]
    AddedTextTooLarge { bytes: usize },
    // Without the text of the panic, which may quote the conversation.
    #[error("a bug in precis: the consolidation panicked")]
    Panicked,
}

/// A plan that a context request made from its snapshot, before the run took the lease.
pub(super) struct SnapshotPlan {
    pub(super) incarnation: Uuid,
    pub(super) plan: ConsolidationPlan,
}

/// The reason for a run, and the list that it makes room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunScope {
    pub(super) cause: RunCause,
    /// The window of the list; `None` is the latest one of the session.
    pub(super) window: Option<Window>,
    /// A new message of the user follows the tail.
    pub(super) has_new_message: bool,
    /// The list would lack messages otherwise, although no rule makes the run due.
    pub(super) lack: Option<Lack>,
}

/// The messages that a list would lack without a consolidation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lack {
    /// Number of the newest messages that are available.
    pub(super) available: usize,
    /// Messages would be omitted, and not only shortened.
    pub(super) omits: bool,
}

impl RunScope {
    /// Returns the scope of a run without a context.
    pub(super) fn new(cause: RunCause) -> Self {
        Self { cause, window: None, has_new_message: false, lack: None }
    }
}

/// One consolidation of one session.
struct ConsolidationRun {
    service: MemoryService,
    pools: PoolNames,
    tenant: TenantId,
    /// The session as of the last commit.
    session: Session,
    /// The token of the lease.
    lease: Uuid,
    scope: RunScope,
    /// Set if the run was requested explicitly, so that it ignores the rule.
    is_forced: bool,
    /// The plan that the context request made before the run, if any.
    plan: Option<ConsolidationPlan>,
    /// Transcript of the messages after the cursor, as far as they are loaded.
    lines: Vec<TranscriptLine>,
    own_results: OwnResults,
    /// Number of calls that may still compress a part of a summary.
    group_calls: usize,
    spending: Spending,
    report: ConsolidationReport,
}

/// The model calls of a run since its last commit.
struct Spending {
    since: Instant,
    /// The names of the models, in the order of their first calls.
    models: Vec<String>,
    usage: ModelUsage,
    price: Option<f64>,
}

impl Spending {
    fn new() -> Self {
        let usage =
            ModelUsage { calls: Some(0), failures: Some(0), queued_ms: Some(0), ..Default::default() };
        Self { since: Instant::now(), models: Vec::new(), usage, price: Some(0.0) }
    }

    /// Adds a request to a pool: the attempts that failed, the model that responded, and the cost of all.
    fn add(&mut self, attempts: &[Attempt], model: Option<&str>, cost: &Cost) {
        let sent = attempts.iter().filter(|attempt| attempt.error.was_sent());
        for model in sent.map(|attempt| attempt.model.as_str()).chain(model) {
            if !self.models.iter().any(|known| known == model) {
                self.models.push(model.to_owned());
            }
        }
        self.usage += usage_of(cost);
        self.price = self.price.zip(cost.price).map(|(sum, price)| sum + price);
    }
}

/// Consecutive messages that are summarised together.
struct Batch {
    lines: Vec<TranscriptLine>,
    /// Sum of the stored token counts of the messages.
    message_tokens: i64,
    /// Requested length of the summary. It depends on all messages, including those without text.
    sentences: usize,
    /// Tokens that one model call may contain.
    capacity: usize,
}

/// The author of a summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Pool,
    BuiltIn,
}

/// The part of a batch that one call summarises: usually all of it.
struct Part {
    /// Not empty, and without messages that have no text.
    lines: Vec<TranscriptLine>,
    /// Requested length of its summary: a share of the sentences of the batch.
    sentences: usize,
}

impl Batch {
    /// Divides the batch into parts for one call each, and its sentences among them. A batch without text has none.
    fn parts(&self) -> Vec<Part> {
        let sentences = self.sentences;
        let lines = self.lines.iter().filter(|line| !line.entry.is_empty()).cloned().collect();
        let parts = batching::split_to_fit(lines, self.capacity);
        let sentences = divide_sentences(sentences, parts.len());
        parts.into_iter().zip(sentences).map(|(lines, sentences)| Part { lines, sentences }).collect()
    }
}

impl MemoryService {
    /// Consolidates a session now, regardless of threshold and mode. Returns `None` if there is nothing to summarise.
    pub async fn consolidate_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Revision>, Error> {
        let pools = self.config.pools.clone().ok_or(Error::ConsolidationDisabled)?;
        self.session(tenant, session).await?;
        let scope = RunScope::new(RunCause::Request);
        let run = self.spawn_run(tenant, session, scope, LeaseCondition::Force, None, &pools);
        match run.await {
            Ok(ConsolidationReport { outcome: Outcome::Failed, reason, .. }) => {
                // Without the database, the models are not the cause.
                self.session(tenant, session).await?;
                Err(Error::ConsolidationFailed(reason.unwrap_or_default()))
            }
            Ok(ConsolidationReport { outcome: Outcome::InProgress, .. }) => {
                self.session(tenant, session).await?;
                Err(Error::ConsolidationInProgress)
            }
            Ok(report) => Ok(report.revision),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// Starts a run as its own task, so that it continues if the client disconnects. The report has the outcome
    /// [`Outcome::InProgress`] if the run could not take the lease or lost it before the first commit.
    pub(super) fn spawn_run(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        scope: RunScope,
        condition: LeaseCondition,
        plan: Option<SnapshotPlan>,
        pools: &PoolNames,
    ) -> JoinHandle<ConsolidationReport> {
        let (service, tenant, session, pools) =
            (self.clone(), tenant.clone(), session.clone(), pools.clone());
        let span = tracing::info_span!("consolidation", session = &*redact_keys(session.as_str()));
        let metrics = self.metrics.clone();
        let run = async move {
            let started_at = Instant::now();
            let report = service.take_lease_and_run(tenant, &session, scope, condition, plan, pools).await;
            metrics.record_consolidation(scope.cause, &report, started_at.elapsed());
            report
        };
        self.tasks.spawn(capacity::scope(capacity::internal(), run.instrument(span)))
    }

    /// Returns the list for which a run plans.
    pub(super) fn plan_scope(&self, session: &Session, scope: &RunScope, is_forced: bool) -> PlanScope {
        let policy = &self.config.policy;
        let rule = policy.due_by(session.into(), scope.window);
        let by_count = scope.window.is_none() || is_forced || rule == Some(Rule::Threshold);
        // A run that only makes room keeps half of the messages that are available for the list.
        let keep =
            scope.lack.filter(|_| rule.is_none()).map(|lack| policy.keep_recent.min(lack.available / 2));
        PlanScope {
            window: scope.window,
            summary_tokens: session.summary.tokens,
            keep: keep.or(by_count.then_some(policy.keep_recent)),
            overflows: scope.lack.is_some(),
            omits: scope.lack.is_some_and(|lack| lack.omits),
            has_new_message: scope.has_new_message,
        }
    }

    /// Returns the present state of a session's consolidation. It is only displayed, so the clock of this host suffices.
    #[must_use]
    pub fn activity(&self, session: &Session) -> Activity {
        self.config.policy.activity(&session.consolidation, OffsetDateTime::now_utc())
    }

    /// Has a pool complete a task. If the tenant has used its tokens of today, only models that cost nothing do so. Calls do not reserve
    /// tokens, because the cost of a call is unknown beforehand; so running calls can exceed the limit.
    pub(super) async fn complete_within_limit(
        &self,
        tenant: &TenantId,
        pool: &str,
        task: Task<'_>,
    ) -> Result<Result<PoolResponse, LlmError>, RunError> {
        if let Some(limit) = self.config.daily_token_limit {
            let used = self.store.tokens_used_today(tenant).await?;
            let used = u64::try_from(used).unwrap_or(0);
            if used >= limit {
                let response = self.llm.complete_free(pool, task).await;
                return response.ok_or(RunError::TokenLimit { used, limit });
            }
        }
        Ok(self.llm.complete(pool, task).await)
    }

    /// Adds the cost of a call to the usage of the tenant, which is recorded with or without a limit. Tokens of calls that
    /// were interrupted are unknown. A failure to record is logged and does not invalidate the response.
    pub(super) async fn record_usage(&self, tenant: &TenantId, cost: &Cost) {
        if cost.tokens == 0 {
            return;
        }
        if let Err(error) = self.store.add_token_usage(tenant, cost.tokens).await {
            let tokens = cost.tokens;
            tracing::warn!(error = %ErrorChain(&error), tokens, "failed to record the token usage of a tenant");
        }
    }

    /// Takes the lease and runs the consolidation.
    async fn take_lease_and_run(
        self,
        tenant: TenantId,
        session: &SessionId,
        scope: RunScope,
        condition: LeaseCondition,
        plan: Option<SnapshotPlan>,
        pools: PoolNames,
    ) -> ConsolidationReport {
        let lease = Uuid::new_v4();
        let session = match self.store.take_lease(&tenant, session, lease, condition, LEASE_TTL).await {
            Ok(Some(session)) => session,
            Ok(None) => return Outcome::InProgress.into(),
            Err(error) => {
                let error = RunError::from(error);
                tracing::warn!(error = %ErrorChain(&error), "failed to take the lease for a consolidation");
                return ConsolidationReport { reason: Some(error.to_string()), ..Outcome::Failed.into() };
            }
        };
        // If the session was rewound, or erased and created again, since the snapshot, it may be at the same revision.
        let plan = plan.filter(|made| made.incarnation == session.incarnation).map(|made| made.plan);
        let run = ConsolidationRun {
            service: self,
            pools,
            tenant,
            scope: RunScope { window: scope.window.or(session.window), ..scope },
            session,
            lease,
            is_forced: condition == LeaseCondition::Force,
            plan,
            lines: Vec::new(),
            own_results: OwnResults::default(),
            group_calls: MAX_GROUP_CALLS,
            spending: Spending::new(),
            report: Outcome::NotDue.into(),
        };
        run.run().await
    }
}

impl ConsolidationRun {
    /// Consolidates until consolidation is not due any more; if the run is forced, at least once. Then ends the lease, which
    /// expires if the store fails.
    async fn run(mut self) -> ConsolidationReport {
        // A message that triggers a bug does so again in the next run. A panic is therefore handled like other failures:
        // the lease ends and the retry delay grows. After a panic, only committed state is read.
        let lost_lease = self.keep_lease();
        let result = async {
            tokio::select! {
                // Checked first: a run that has ended needs no lease.
                biased;
                result = self.execute_plans() => result,
                () = lost_lease => Err(RunError::Superseded),
            }
        };
        let result = AssertUnwindSafe(result).catch_unwind().await;
        match result.unwrap_or(Err(RunError::Panicked)) {
            Ok(()) => self.release_lease().await,
            Err(reason @ (RunError::Superseded | RunError::ShuttingDown)) => {
                tracing::info!(%reason, "consolidation abandoned");
                self.record_abandoned(&reason).await;
                self.report.is_abandoned = true;
                if self.report.revision.is_none() {
                    self.report.outcome = Outcome::InProgress;
                }
            }
            Err(error) => self.record_failure(&error).await,
        }
        self.report
    }

    /// Renews the lease until the run has lost it.
    fn keep_lease(&self) -> impl Future<Output = ()> + use<> {
        let (store, tenant, lease) = (Arc::clone(&self.service.store), self.tenant.clone(), self.lease);
        let session = self.session.session_id.clone();
        async move {
            keep_lease("a consolidation", || store.renew_lease(&tenant, &session, lease, LEASE_TTL)).await;
        }
    }

    async fn execute_plans(&mut self) -> Result<(), RunError> {
        while self.is_forced || self.scope.lack.is_some() || self.rule().is_some() {
            let has_whole_tail = self.plan.is_some() || self.session.tail_len() <= MAX_PLANNED_MESSAGES;
            let plan = match self.plan.take() {
                Some(plan) => plan,
                None => match self.make_plan().instrument(step!("plan")).await? {
                    Some(plan) => plan,
                    None => break,
                },
            };
            self.execute(&plan).await?;
            // Another plan for the rest would split the tail at a point that this one has avoided.
            if has_whole_tail {
                break;
            }
        }
        Ok(())
    }

    /// Returns the rule that makes the consolidation due.
    fn rule(&self) -> Option<Rule> {
        self.service.config.policy.due_by(SessionSize::from(&self.session), self.scope.window)
    }

    /// Plans the tail. Returns `None` if it cannot be split.
    async fn make_plan(&self) -> Result<Option<ConsolidationPlan>, RunError> {
        let (store, session) = (&self.service.store, &self.session);
        let messages = store
            .message_metadata(&self.tenant, &session.session_id, session.cursor, MAX_PLANNED_MESSAGES)
            .await?;
        let tail_len = usize::try_from(session.tail_len()).unwrap_or(0);
        let scope = self.service.plan_scope(session, &self.scope, self.is_forced);
        Ok(self.service.config.policy.plan(&messages, tail_len, &scope))
    }

    /// Summarises and commits the batches of a plan. A batch that the models reject because of its content or size is divided; what cannot
    /// be divided is summarised without them, because it would be rejected again in each run.
    async fn execute(&mut self, plan: &ConsolidationPlan) -> Result<(), RunError> {
        let (mut done, mut max_messages) = (0, usize::MAX);
        self.lines.clear();
        self.own_results = OwnResults::default();
        while let Some(batch) = self.next_batch(plan, done, max_messages).instrument(step!("load")).await? {
            let (messages, capacity) = (batch.lines.len(), batch.capacity);
            let smallest = plan.batch_ends.iter().find(|end| **end > done).map_or(messages, |end| end - done);
            match self.summarize(&batch, Writer::Pool).await {
                Ok(revision) => {
                    self.commit(revision).instrument(step!("commit")).await?;
                    max_messages = max_messages.saturating_mul(2);
                }
                // The model accepts fewer tokens than its settings say: try again with a smaller batch.
                Err(RunError::Llm(error)) if error.is_prompt_too_long() && self.capacity() < capacity => {
                    continue;
                }
                Err(RunError::Llm(error)) if self.may_divide(&error) && messages > smallest => {
                    max_messages = messages / 2;
                    continue;
                }
                Err(RunError::Llm(error)) if error.is_filtered() || error.is_prompt_too_long() => {
                    tracing::warn!(
                        error = %ErrorChain(&error),
                        messages,
                        "the models reject these messages; the built-in summariser summarises them"
                    );
                    let revision = self.summarize(&batch, Writer::BuiltIn).await?;
                    self.commit(revision).instrument(step!("commit")).await?;
                    max_messages = max_messages.saturating_mul(2);
                }
                Err(error) => return Err(error),
            }
            self.lines.drain(..messages);
            done += messages;
        }
        Ok(())
    }

    /// Returns `true` if the models may accept a smaller batch. Errors whose cause is unknown must have ended the run before, too.
    fn may_divide(&self, error: &LlmError) -> bool {
        let is_second = self.session.consolidation.failures > 0;
        error.is_filtered() || error.is_prompt_too_long() || (is_second && error.may_depend_on_size())
    }

    /// Returns the next batch after the first `done` messages of the plan, or `None` at the end of the plan. It has at most `max_messages`
    /// messages if the tail can be split there.
    async fn next_batch(
        &mut self,
        plan: &ConsolidationPlan,
        done: usize,
        max_messages: usize,
    ) -> Result<Option<Batch>, RunError> {
        let capacity = self.capacity();
        let mut ends: Vec<usize> =
            plan.batch_ends.iter().filter(|end| **end > done).map(|end| end - done).collect();
        let permitted = ends.iter().filter(|end| **end <= max_messages).count();
        ends.truncate(permitted.max(1));
        let message_tokens = plan.message_tokens.get(done..).unwrap_or_default();
        self.load_lines(message_tokens, &ends, capacity).await?;
        let mut times = TimeLines::default();
        let sizes: Vec<usize> = self.lines.iter().map(|line| times.tokens_with(line)).collect();
        let loaded_ends: Vec<usize> = ends.into_iter().filter(|end| *end <= sizes.len()).collect();
        Ok(batching::batch_end(&sizes, &loaded_ends, capacity).map(|end| {
            let message_tokens = message_tokens.iter().take(end).sum();
            Batch {
                lines: self.lines.iter().take(end).cloned().collect(),
                message_tokens,
                sentences: requested_sentences(end, message_tokens, self.limit()),
                capacity,
            }
        }))
    }

    /// Returns the number of transcript tokens that one model call may contain.
    fn capacity(&self) -> usize {
        self.service.llm.capacity(&self.pools.consolidation)
    }

    /// Loads messages until `self.lines` fills `capacity` or reaches the last position in `ends`.
    ///
    /// The stored sizes determine how many messages are loaded at once. Lines can be much smaller than messages, because
    /// tool results are shortened; then more messages are loaded.
    async fn load_lines(
        &mut self,
        message_tokens: &[i64],
        ends: &[usize],
        capacity: usize,
    ) -> Result<(), RunError> {
        let sizes: Vec<usize> =
            message_tokens.iter().map(|tokens| usize::try_from(*tokens).unwrap_or(usize::MAX)).collect();
        let mut filled: usize = self.lines.iter().map(|line| line.tokens).sum();
        while self.lines.is_empty() || filled < capacity {
            let loaded = self.lines.len();
            let ends: Vec<usize> = ends.iter().filter(|end| **end > loaded).map(|end| end - loaded).collect();
            let sizes = sizes.get(loaded..).unwrap_or_default();
            let Some(count) = batching::batch_end(sizes, &ends, capacity.saturating_sub(filled)) else {
                break;
            };
            let lines = self.load(loaded, count).await?;
            filled += lines.iter().map(|line| line.tokens).sum::<usize>();
            self.lines.extend(lines);
        }
        Ok(())
    }

    /// Loads `count` messages, beginning `offset` messages after the cursor; fewer if they are large.
    async fn load(&mut self, offset: usize, count: usize) -> Result<Vec<TranscriptLine>, RunError> {
        let query = MessageQuery {
            after_seq: self.session.cursor.saturating_add(i64::try_from(offset).unwrap_or(i64::MAX)),
            before_seq: i64::MAX,
            descending: false,
            limit: i64::try_from(count).unwrap_or(i64::MAX),
            max_bytes: MAX_LOADED_BYTES,
        };
        // Work in the background waits as long as necessary, so this does not fail.
        let _ = capacity::claim(LOADED_MEMORY).await;
        let page = self.service.store.messages(&self.tenant, &self.session.session_id, query).await?;
        let is_complete = |page: &MessagePage| page.messages.len() == count;
        let is_part = |page: &MessagePage| page.has_more && !page.messages.is_empty();
        let page = page.filter(|page| is_complete(page) || is_part(page)).ok_or(RunError::Superseded)?;
        let messages = page.messages;
        // Parsing and counting a megabyte takes some tens of milliseconds.
        let mut own_results = std::mem::take(&mut self.own_results);
        let lines = move || {
            let line = |stored: StoredMessage| {
                let message = format::read(&stored.json).ok()?;
                let is_own = own_results.is_next(&message);
                let entry = if is_own || stored.redacted_at.is_some() {
                    TranscriptEntry::empty(message.role())
                } else {
                    TranscriptEntry::of(&message)
                };
                Some(TranscriptLine::at(entry, Some(stored.created_at)))
            };
            let lines = messages.into_iter().map(line).collect::<Option<Vec<TranscriptLine>>>();
            (lines, own_results)
        };
        let (lines, own_results) = blocking::spawn_cpu(lines).await;
        self.own_results = own_results;
        capacity::current().release();
        lines.ok_or(RunError::CorruptMessage)
    }

    /// Has a batch summarised, and the summary compressed if it becomes too long. Nothing is written.
    async fn summarize(&mut self, batch: &Batch, writer: Writer) -> Result<NewRevision, RunError> {
        let (messages, message_tokens) = (batch.lines.len(), batch.message_tokens);
        let (mut added, mut provenance) = (String::new(), None);
        let pool = self.pools.consolidation.clone();
        let parts = batch.parts();
        let limit = self.limit().share(1, parts.len());
        for Part { lines, sentences } in parts {
            let (text, latest) = match writer {
                Writer::Pool => {
                    let before = if added.is_empty() { &self.session.summary.text } else { &added };
                    let previous = summary::ending(before, MAX_PREVIOUS_BYTES).to_owned();
                    let task = Task::Consolidate { lines: &lines, previous: &previous, sentences, limit };
                    let response = self.complete(&pool, task).await?;
                    let provenance = provenance_of(&pool, &response);
                    (response.text, provenance)
                }
                Writer::BuiltIn => {
                    let summarize = move || extractive::summarize(&lines, limit);
                    built_in(&pool, summarize).await
                }
            };
            let text = without_nul(&text);
            // The built-in summariser found only emoji or punctuation: the messages count as messages without text.
            if summary::has_letters(&text) {
                added = summary::append(&added, &text);
                provenance = Some(add_call(latest, provenance.as_ref()));
            }
        }
        let (summary, meta) = if added.is_empty() {
            (self.session.summary.clone(), None)
        } else {
            self.append_and_compress(&added).await?
        };
        Ok(NewRevision {
            base_revision: self.session.revision,
            base_cursor: self.session.cursor,
            cursor: self.session.cursor + i64::try_from(messages).unwrap_or(0),
            range_tokens: message_tokens,
            summary,
            added,
            provenance,
            meta,
        })
    }

    /// Has a pool complete a task. The usage is recorded immediately, because the tokens are spent whether or not the response
    /// is committed.
    ///
    /// Renews the lease first, so that a session that was restored, rewound or erased meanwhile costs no further tokens.
    async fn complete(&mut self, pool: &str, task: Task<'_>) -> Result<PoolResponse, RunError> {
        let (service, session) = (&self.service, &self.session.session_id);
        if !service.store.renew_lease(&self.tenant, session, self.lease, LEASE_TTL).await? {
            return Err(RunError::Superseded);
        }
        let result = tokio::select! {
            result = service.complete_within_limit(&self.tenant, pool, task) => result?,
            () = service.stop.cancelled() => return Err(RunError::ShuttingDown),
        };
        let (attempts, model, cost) = match &result {
            Ok(response) => (&response.attempts, Some(response.model.as_str()), &response.cost),
            Err(error) => (&error.attempts, None, &error.cost),
        };
        self.spending.add(attempts, model, cost);
        service.record_usage(&self.tenant, cost).await;
        Ok(result?)
    }

    /// Commits a revision and updates the state of the run.
    async fn commit(&mut self, new: NewRevision) -> Result<(), RunError> {
        let record = self.record(RecordOutcome::Consolidated, None);
        let (store, session) = (&self.service.store, &mut self.session);
        let id = &session.session_id;
        let committed = store.commit_revision(&self.tenant, id, self.lease, &new, &record).await?;
        let revision = committed.ok_or(RunError::Superseded)?;
        self.spending = Spending::new();
        let report = &mut self.report;
        report.outcome = Outcome::Consolidated;
        report.messages += new.cursor - new.base_cursor;
        report.meta |= new.meta.is_some();
        if let Some(provenance) = &new.provenance {
            report.model = Some(provenance.model.clone());
        }
        tracing::info!(
            revision = revision.revision,
            from_seq = new.base_cursor + 1,
            to_seq = new.cursor,
            words = new.summary.words,
            meta = new.meta.is_some(),
            model = report.model,
            "consolidated"
        );
        session.cursor = new.cursor;
        session.cursor_tokens += new.range_tokens;
        session.revision = revision.revision;
        report.revision = Some(revision);
        session.summary = new.summary;
        session.consolidation.failures = 0;
        Ok(())
    }

    async fn release_lease(&self) {
        let (store, session) = (&self.service.store, &self.session.session_id);
        if let Err(error) = store.release_lease(&self.tenant, session, self.lease).await {
            tracing::warn!(error = %ErrorChain(&error), "failed to release a consolidation lease; it will expire");
        }
    }

    /// Returns the record of the run since its beginning or its last commit.
    fn record(&self, outcome: RecordOutcome, reason: Option<String>) -> RecordDetails {
        let Spending { since, models, usage, price } = &self.spending;
        RecordDetails {
            cause: self.scope.cause,
            outcome,
            reason,
            models: models.clone(),
            usage: *usage,
            cost: *price,
            duration_ms: millis(since.elapsed()),
        }
    }

    /// Records that the run was abandoned, which also ends the lease. A run that has lost its lease leaves no record.
    async fn record_abandoned(&self, reason: &RunError) {
        let record = self.record(RecordOutcome::Abandoned, Some(reason.to_string()));
        let (store, session) = (&self.service.store, &self.session.session_id);
        if let Err(error) = store.record_abandoned_run(&self.tenant, session, self.lease, &record).await {
            tracing::warn!(error = %ErrorChain(&error), "failed to release a consolidation lease; it will expire");
        }
    }

    /// Records a failure, which also ends the lease, and reports it.
    async fn record_failure(&mut self, error: &RunError) {
        let failures = u32::try_from(self.session.consolidation.failures).unwrap_or(0).saturating_add(1);
        let delay = self.service.config.policy.retry_delay(failures);
        log_failure(error, failures, delay);
        let reason = without_nul(&error.to_string());
        let record = self.record(RecordOutcome::Failed, Some(reason.clone()));
        let (store, session) = (&self.service.store, &self.session.session_id);
        // If the failure can't be recorded, the lease prevents other runs until it expires.
        let recorded = store.record_failure(&self.tenant, session, self.lease, delay, &record).await;
        self.report.outcome = Outcome::Failed;
        self.report.retry_at = recorded.unwrap_or_default();
        self.report.reason = Some(reason);
    }
}

fn log_failure(error: &RunError, failures: u32, retry_in: Duration) {
    let cause = ErrorChain(error);
    if matches!(error, RunError::TokenLimit { .. }) {
        // The operator set the limit, so this is not a malfunction.
        tracing::warn!(error = %cause, failures, ?retry_in, "consolidation postponed");
    } else {
        tracing::error!(error = %cause, failures, ?retry_in, "consolidation failed");
    }
}

/// Adds the cost of the calls before to the provenance of a text.
fn add_call(latest: Provenance, earlier: Option<&Provenance>) -> Provenance {
    match earlier {
        Some(earlier) => latest.after(earlier),
        None => latest,
    }
}

/// Has the built-in summariser write a text in the place of a pool, and returns it with its provenance.
async fn built_in(pool: &str, write: impl FnOnce() -> String + Send + 'static) -> (String, Provenance) {
    let started_at = Instant::now();
    let text = blocking::spawn_cpu(write).await;
    let provenance = Provenance {
        model: extractive::MODEL.to_owned(),
        pool: pool.to_owned(),
        prompt_version: extractive::VERSION.to_owned(),
        usage: ModelUsage::default(),
        duration_ms: millis(started_at.elapsed()),
    };
    (text, provenance)
}

fn provenance_of(pool: &str, response: &PoolResponse) -> Provenance {
    Provenance {
        model: response.model.clone(),
        pool: pool.to_owned(),
        prompt_version: response.prompt_version.clone(),
        usage: usage_of(&response.cost),
        duration_ms: millis(response.cost.duration),
    }
}

fn usage_of(cost: &Cost) -> ModelUsage {
    let tokens = |counted: Option<u64>| counted.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
    ModelUsage {
        input_tokens: tokens(cost.usage.input_tokens),
        output_tokens: tokens(cost.usage.output_tokens),
        calls: Some(cost.calls.into()),
        failures: Some(cost.failures.into()),
        queued_ms: Some(millis(cost.queued)),
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
