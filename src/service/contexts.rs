//! Building a context: the message list that an agent should send to its model now.

use super::consolidation::{ConsolidationReport, Outcome, SnapshotPlan};
use super::{Error, MemoryService, PoolNames, invalid_message};
use crate::blocking;
use crate::capacity::WorkPermit;
use crate::domain::budget::{self, MessageCost};
use crate::domain::consolidation::{Due, Mode};
use crate::domain::consolidation_record::RunCause;
use crate::domain::context::{self, SystemMessage, SystemParts};
use crate::domain::coverage::{self, Coverage, OmissionReason, TailSelection};
use crate::domain::format::{Format, ListOptions, RenderInput, RenderedContext, RenderedMessage};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
use crate::domain::session::Session;
use crate::domain::tail::Tail;
use crate::domain::tokens::{self, Tokenizer};
use crate::storage::{ContextSnapshot, LeaseCondition};
use crate::trace_context::step;
use futures_util::FutureExt as _;
use serde::Serialize;
use utoipa::ToSchema;

/// The options of a context request. Each of them is optional.
#[derive(Clone, Debug, Default)]
pub struct ContextOptions {
    /// First part of the system message.
    pub system_prompt: Option<String>,
    /// Last message of the list; it is not persisted.
    pub user_message: Option<Message>,
    /// The user of the session. The first request that names a user binds the session to it.
    pub user_id: Option<UserId>,
    /// The user whose memory document applies if neither the session nor the request has a user.
    pub default_user: Option<UserId>,
    /// The part of the system message about skills: see [`crate::domain::skill::section`].
    pub skills: String,
    /// The mode of consolidation; by default as configured.
    pub mode: Option<Mode>,
    /// Largest number of tokens of the whole list.
    pub max_tokens: Option<i64>,
    pub format: Format,
    pub list: ListOptions,
    /// Marks the stable part for the provider's prompt cache.
    pub cache_control: bool,
    /// Released while the request waits for its consolidation.
    pub permit: WorkPermit,
}

/// A message list that is ready to be sent, and a description of its parts.
#[derive(Clone, Debug)]
pub struct Context {
    /// The user whose memory document applies.
    pub user: Option<UserId>,
    /// `true` from the first exchange of the session on.
    pub exists: bool,
    pub list: RenderedContext,
    pub coverage: Coverage,
    pub summary: SummaryInfo,
    pub memory: MemoryInfo,
    pub consolidation: ConsolidationReport,
    pub tokens: ContextTokens,
}

/// The summary in a context.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ContextSummary)]
pub struct SummaryInfo {
    /// 0 if there is no summary.
    pub revision: i64,
    /// Number of words of the summary.
    pub words: i64,
}

/// The memory document in a context.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[schema(as = ContextMemory)]
pub struct MemoryInfo {
    /// 0 if the document was never written.
    pub version: i64,
    /// Number of words of the document.
    pub words: i64,
}

/// Tokens of the parts of a context.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ContextTokens {
    /// The sum of the parts. `max_tokens` reserves 3 more tokens, which a provider adds to each list.
    pub total: i64,
    /// Tokens of the system message.
    pub system: i64,
    /// Tokens of the messages of the history, and of inserted ones.
    pub history: i64,
    /// Tokens of the new message of the request.
    pub user_message: i64,
    /// The tokenizer that counted the tokens.
    pub tokenizer: String,
}

/// The decision of a context request about consolidation.
#[expect(clippy::large_enum_variant, reason = "one value per request, never stored")]
enum ConsolidationCheck {
    /// No run is needed or possible now; the report says why.
    Report(ConsolidationReport),
    /// A run is due.
    Due(DueRun),
}

/// The parameters of a run that is due.
struct DueRun {
    mode: Mode,
    pools: PoolNames,
    condition: LeaseCondition,
    /// The plan for the tail, if the snapshot contains the complete tail.
    plan: Option<SnapshotPlan>,
}

impl MemoryService {
    /// Builds the context of a session, and consolidates the session if that is due. A failed consolidation does not fail the
    /// request: the context then contains the existing summary and, verbatim, the messages that it does not cover.
    pub async fn build_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        options: ContextOptions,
    ) -> Result<Context, Error> {
        let snapshot = self.load_snapshot(tenant, session, &options).await?;
        let (snapshot, report) = match self.check_consolidation(&snapshot, options.mode) {
            ConsolidationCheck::Report(report) => (snapshot, report),
            // A box, because few requests consolidate, and the future of each request would be larger.
            ConsolidationCheck::Due(due) => {
                self.consolidate_before(tenant, session, &options, snapshot, due).boxed().await?
            }
        };
        self.metrics.record_context(report.outcome);
        // Counts the texts of the request and prepares those of the system message, unless caches have them. The format may rewrite
        // messages.
        let session = snapshot.session.as_ref();
        let system_bytes = session.map_or(0, |session| session.summary.text.len())
            + snapshot.memory.as_ref().map_or(0, |memory| memory.content.len());
        let request_bytes = options.system_prompt.as_ref().map_or(0, String::len)
            + options.skills.len()
            + options.user_message.as_ref().map_or(0, |message| message.json().len());
        let bytes = system_bytes
            + request_bytes * blocking::COST_OF_COUNTING
            + options.format.estimate_bytes(options.list, &snapshot.tail);
        let (service, tenant, step) = (self.clone(), tenant.clone(), step!("assemble"));
        let assemble = move || step.in_scope(|| service.assemble(&tenant, snapshot, options, report));
        blocking::spawn_cpu_if_large(bytes, assemble).await
    }

    /// Starts a consolidation. Waits for it in the mode `inline`, and then returns the new state of the session.
    async fn consolidate_before(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        options: &ContextOptions,
        snapshot: ContextSnapshot,
        due: DueRun,
    ) -> Result<(ContextSnapshot, ConsolidationReport), Error> {
        let cause = RunCause::Threshold;
        let run = self.spawn_run(tenant, session, cause, due.condition, due.plan, &due.pools);
        if due.mode == Mode::Background {
            return Ok((snapshot, Outcome::Scheduled.into()));
        }
        // The memory of the request is released while it waits, so a large snapshot is not kept.
        let kept = (!blocking::is_large(snapshot.tail.bytes())).then_some(snapshot);
        let wait = tokio::time::timeout(self.config.inline_wait, run);
        let finished = options.permit.release_while(wait).await;
        let snapshot = match (self.load_snapshot(tenant, session, options).await, kept) {
            (Err(Error::Store(error)), Some(kept)) => {
                tracing::warn!(%error, "failed to read a session after its consolidation");
                kept
            }
            (reloaded, _) => reloaded?,
        };
        let report = match finished {
            // The run did not get the lease. The reason is in the new state of the session.
            Ok(Ok(ConsolidationReport { outcome: Outcome::InProgress, .. })) => {
                match self.check_consolidation(&snapshot, options.mode) {
                    ConsolidationCheck::Report(report) => report,
                    ConsolidationCheck::Due(_) => Outcome::InProgress.into(),
                }
            }
            Ok(Ok(report)) => report,
            Ok(Err(panic)) => {
                tracing::error!(%panic, "a consolidation panicked; its lease will expire");
                let reason = Some("a bug in precis".to_owned());
                ConsolidationReport { reason, ..Outcome::Failed.into() }
            }
            // The run continues after `inline_wait`.
            Err(_elapsed) => Outcome::InProgress.into(),
        };
        Ok((snapshot, report))
    }

    /// Reads everything that a context consists of. If the request names a user, binds a session without a user to it, and
    /// fails if the session belongs to another user.
    async fn load_snapshot(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        options: &ContextOptions,
    ) -> Result<ContextSnapshot, Error> {
        let limit = self.config.policy.tail_limit();
        let named = options.user_id.as_ref();
        let user = named.or(options.default_user.as_ref());
        let mut snapshot = self.context_cache.load(&self.store, tenant, session, user, limit).await?;
        let owner = snapshot.session.as_ref().and_then(|session| session.user_id.as_ref());
        match (owner, named) {
            (Some(owner), Some(named)) if owner != named => return Err(Error::SessionUserMismatch),
            // The snapshot has the memory document of this user already.
            (None, Some(named)) => {
                let owner = self.bind(tenant, session, named).boxed().await?;
                if let Some(state) = &mut snapshot.session {
                    state.user_id = Some(owner);
                }
            }
            _ => {}
        }
        Ok(snapshot)
    }

    /// Checks whether a consolidation of the session is due and possible.
    fn check_consolidation(&self, snapshot: &ContextSnapshot, mode: Option<Mode>) -> ConsolidationCheck {
        let mode = mode.unwrap_or(self.config.mode);
        let (Some(pools), Mode::Inline | Mode::Background) = (&self.config.pools, mode) else {
            return ConsolidationCheck::Report(Outcome::Disabled.into());
        };
        let Some(session) = &snapshot.session else {
            return ConsolidationCheck::Report(Outcome::NotDue.into());
        };
        match self.config.policy.due(session, snapshot.now) {
            Due::No => ConsolidationCheck::Report(Outcome::NotDue.into()),
            Due::InProgress => ConsolidationCheck::Report(Outcome::InProgress.into()),
            Due::Backoff { until } => ConsolidationCheck::Report(ConsolidationReport {
                retry_at: Some(until),
                reason: session.consolidation.last_failure.clone(),
                ..Outcome::Failed.into()
            }),
            Due::Yes => {
                let tail_len = usize::try_from(session.tail_len()).unwrap_or(0);
                let mut plan = None;
                if tail_len <= snapshot.tail.len() {
                    plan = self.config.policy.plan(snapshot.tail.metadata(), tail_len);
                    if plan.is_none() {
                        // An open tool call holds the cursor. Do not take the lease just to find that out again.
                        return ConsolidationCheck::Report(Outcome::NotDue.into());
                    }
                }
                // The policy ignores a retry time that lies implausibly far in the future; so must the condition. The run
                // then plans for itself, because the session may be at another revision.
                let ignores_retry_at =
                    session.consolidation.retry_at.is_some_and(|retry_at| retry_at > snapshot.now);
                let (condition, plan) = if ignores_retry_at {
                    (LeaseCondition::Force, None)
                } else {
                    let incarnation = session.incarnation;
                    let plan = plan.map(|plan| SnapshotPlan { incarnation, plan });
                    (LeaseCondition::IfUnchanged { revision: session.revision }, plan)
                };
                ConsolidationCheck::Due(DueRun { mode, pools: pools.clone(), condition, plan })
            }
        }
    }

    /// Assembles the message list within the limits of number and tokens.
    fn assemble(
        &self,
        tenant: &TenantId,
        snapshot: ContextSnapshot,
        options: ContextOptions,
        report: ConsolidationReport,
    ) -> Result<Context, Error> {
        let tokenizer = self.config.tokenizer;
        let system = self.system_message(tenant, &snapshot, &options);
        let ContextSnapshot { session, memory, tail, .. } = snapshot;
        let exists = session.as_ref().is_some_and(|session| session.last_seq > 0);
        let owner = session.as_ref().and_then(|session| session.user_id.clone());
        let user = owner.or(options.user_id).or(options.default_user);
        let mut coverage = self.plan_coverage(session.as_ref(), tail.metadata(), &report);
        let omitted = usize::try_from(coverage.verbatim_from - tail.first_seq()).unwrap_or(0).min(tail.len());
        let mut metadata = tail.metadata().get(omitted..).unwrap_or_default();
        // The message of the request is rendered as if it were stored.
        let new_tail = options.user_message.map_or_else(Tail::default, |message| {
            let metadata = MessageMetadata::new(&message, tokens::count_message(&message));
            let json = message.json().to_owned();
            let seq = coverage.last_seq + 1;
            Tail::new(seq, vec![ContextMessage { seq, metadata, json }])
        });
        let render = |tail, position| options.format.render_messages(options.list, tail, position);
        let mut history = render(&tail, omitted).map_err(invalid_message)?;
        let user_message = render(&new_tail, 0).map_err(invalid_message)?.pop();
        let mut costs = ListCosts::new(tokenizer, &system, &history, user_message.as_ref());
        if let Some(max_tokens) = options.max_tokens {
            let first = costs.first_within_budget(metadata, max_tokens)?;
            coverage.omit(first, OmissionReason::MaxTokens);
            metadata = metadata.get(first..).unwrap_or_default();
            history.drain(..first);
            costs.history.drain(..first);
        }
        let is_prefix_stable = coverage.omitted.is_empty();
        coverage.report_redacted(metadata);
        let list = options.format.render_context(RenderInput {
            system_json: system.json,
            system_tokens: system.tokens,
            history,
            tail: Some(&tail),
            user_message,
            is_prefix_stable,
            cache_control: options.cache_control,
            tokenizer,
        });
        let summary =
            session.map(|session| SummaryInfo { revision: session.revision, words: session.summary.words });
        let memory = memory.map(|memory| MemoryInfo { version: memory.version, words: memory.words });
        Ok(Context {
            user,
            exists,
            list,
            coverage,
            summary: summary.unwrap_or_default(),
            memory: memory.unwrap_or_default(),
            consolidation: report,
            tokens: costs.tokens(),
        })
    }

    fn system_message(
        &self,
        tenant: &TenantId,
        snapshot: &ContextSnapshot,
        options: &ContextOptions,
    ) -> SystemMessage {
        let (parts, session) = (&snapshot.parts, snapshot.session.as_ref());
        let system_prompt = options.system_prompt.as_deref().and_then(|text| self.prompts.part(tenant, text));
        let tail_len = session.map_or(0, Session::tail_len);
        let (policy, tail) = (&self.config.policy, &snapshot.tail);
        let is_cut = usize::try_from(tail_len).is_ok_and(|tail_len| tail_len > tail.len());
        context::system_message(&SystemParts {
            system_prompt: system_prompt.as_deref(),
            memory: snapshot.memory.as_ref().map(|document| parts.memory(document)),
            summary: session.map(|session| parts.summary(&session.summary)),
            skills: self.prompts.part(tenant, &options.skills).as_deref(),
            notice: is_cut
                || context::notice_due(tail_len, policy.max_history_messages)
                || context::notice_due(
                    i64::try_from(tail.bytes()).unwrap_or(i64::MAX),
                    policy.max_context_bytes,
                ),
        })
    }

    /// Plans the coverage without a token budget.
    fn plan_coverage(
        &self,
        session: Option<&Session>,
        tail: &[MessageMetadata],
        report: &ConsolidationReport,
    ) -> Coverage {
        let policy = &self.config.policy;
        let selection = if self.config.recent_on_failure && report.outcome == Outcome::Failed {
            TailSelection::Recent { keep: policy.keep_recent }
        } else {
            TailSelection::All
        };
        let (cursor, last_seq) = session.map_or((0, 0), |session| (session.cursor, session.last_seq));
        coverage::plan_coverage(cursor, last_seq, policy.max_history_messages, selection, tail)
    }
}

/// Scaled token counts of the parts of a list. Each message is scaled by itself.
struct ListCosts {
    tokenizer: Tokenizer,
    system: i64,
    history: Vec<MessageCost>,
    user_message: i64,
}

impl ListCosts {
    fn new(
        tokenizer: Tokenizer,
        system: &SystemMessage,
        history: &[RenderedMessage<'_>],
        user_message: Option<&RenderedMessage<'_>>,
    ) -> Self {
        let cost = |message: &RenderedMessage<'_>| MessageCost {
            tokens: tokenizer.scale(message.tokens),
            tokens_if_first: tokenizer.scale(message.tokens_if_first),
        };
        Self {
            tokenizer,
            system: tokenizer.scale(system.tokens),
            history: history.iter().map(cost).collect(),
            user_message: user_message.map_or(0, |message| tokenizer.scale(message.tokens)),
        }
    }

    /// Returns the position of the first message in a list of at most `max_tokens` tokens.
    fn first_within_budget(&self, messages: &[MessageMetadata], max_tokens: i64) -> Result<usize, Error> {
        let needed = tokens::PER_LIST + self.system + self.user_message;
        if needed > max_tokens {
            return Err(Error::BudgetTooSmall { max_tokens, needed, tokenizer: self.tokenizer });
        }
        Ok(budget::first_within_budget(messages, &self.history, max_tokens - needed))
    }

    fn tokens(&self) -> ContextTokens {
        let before_first = self.history.first().map_or(0, |cost| cost.tokens_if_first);
        let history = before_first + self.history.iter().map(|cost| cost.tokens).sum::<i64>();
        ContextTokens {
            total: self.system + history + self.user_message,
            system: self.system,
            history,
            user_message: self.user_message,
            tokenizer: self.tokenizer.to_string(),
        }
    }
}
