//! Building a context: the message list that an agent should send to its model now.

use super::consolidation::{ConsolidationReport, Lack, Outcome, RunScope, SnapshotPlan};
use super::metrics::SHORTENED;
use super::{Error, MemoryService, PoolNames, decode_message, invalid_message};
use crate::blocking;
use crate::capacity;
use crate::domain::api_key::redact_keys;
use crate::domain::budget::{self, Fit, MessageCost};
use crate::domain::consolidation::{Due, Mode};
use crate::domain::consolidation_record::RunCause;
use crate::domain::context::{self, Notice, SystemMessage, SystemParts};
use crate::domain::coverage::{self, Coverage, OmissionReason, ShortenedMessage, TailSelection};
use crate::domain::error_chain::ErrorChain;
use crate::domain::format::{
    self, Format, ListOptions, Opening, RenderInput, RenderedContext, RenderedMessage, needs_opening,
};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::memory::MemoryDocument;
use crate::domain::message::{Message, Role};
use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
use crate::domain::recall::{self, RecallOptions, RecalledMessage};
use crate::domain::session::{Session, Window};
use crate::domain::split_points::newest_turn;
use crate::domain::tail::Tail;
use crate::domain::tokens::{self, Tokenizer};
use crate::storage::{ContextSnapshot, LeaseCondition, StoreError};
use crate::trace_context::step;
use futures_util::FutureExt as _;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use utoipa::ToSchema;

/// A session with contexts that lack messages is logged once in this time.
const WARNING_INTERVAL: Duration = Duration::from_hours(1);
/// Number of consolidations that a context waits for at most because it would lack messages.
const MAX_ATTEMPTS: usize = 3;

/// Tokens by which a message may be larger in another format than in that of stored counts.
const FORMAT_MARGIN: i64 = 8;

/// The options of a context request. Each of them is optional.
#[derive(Clone, Debug, Default)]
pub struct ContextOptions {
    /// First part of the system message.
    pub system_prompt: Option<String>,
    /// Last message of the list; it is not persisted.
    pub user_message: Option<Message>,
    /// The history ends here, and these messages follow it, before `user_message`. They are not persisted.
    pub continuation: Option<(i64, Vec<Message>)>,
    /// Leaves the system message out of the list: see [`Context::system`].
    pub separates_system: bool,
    /// The user of the session. The first request that names a user binds the session to it.
    pub user_id: Option<UserId>,
    /// The user whose memory document applies if neither the session nor the request has a user.
    pub default_user: Option<UserId>,
    /// The part of the system message about skills: see [`crate::domain::skill::section`].
    pub skills: String,
    /// The mode of consolidation; by default as configured.
    pub mode: Option<Mode>,
    /// The window: largest number of tokens of the whole list.
    pub max_tokens: Option<i64>,
    /// Tokens of the window that the list leaves free, for definitions of tools and the answer.
    pub reserved_tokens: i64,
    /// `None`: no earlier messages are added to the new one.
    pub recall: Option<RecallOptions>,
    pub format: Format,
    pub list: ListOptions,
    /// Marks the stable part for the provider's prompt cache.
    pub cache_control: bool,
    /// The context is only looked at: it has no effect on the session, on metrics and on the log.
    pub is_preview: bool,
}

/// A message list that is ready to be sent, and a description of its parts.
#[derive(Clone, Debug)]
pub struct Context {
    /// The user whose memory document applies.
    pub user: Option<UserId>,
    /// `true` from the first exchange of the session on.
    pub exists: bool,
    pub list: RenderedContext,
    /// The text of the system message, if it is not in the list.
    pub system: String,
    pub coverage: Coverage,
    /// Earlier messages in the new message, in the order of the history.
    pub recall: Vec<RecalledMessage>,
    pub summary: SummaryInfo,
    pub memory: MemoryInfo,
    pub consolidation: ConsolidationReport,
    pub tokens: ContextTokens,
}

/// The summary in a context.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = ContextSummary)]
pub struct SummaryInfo {
    /// 0 if there is no summary.
    pub revision: i64,
    /// Number of words of the summary.
    pub words: i64,
    /// The model that wrote its newest part: `extractive` is the built-in summariser. Null if there is no summary, or a client wrote it.
    #[schema(required)]
    pub model: Option<String>,
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

impl SummaryInfo {
    fn of(snapshot: &ContextSnapshot) -> Self {
        let summary = snapshot.session.as_ref().map(|session| Self {
            revision: session.revision,
            words: session.summary.words,
            model: snapshot.summary_model.clone(),
        });
        summary.unwrap_or_default()
    }
}

impl MemoryInfo {
    fn of(snapshot: &ContextSnapshot) -> Self {
        let memory = snapshot.memory.as_ref();
        memory.map(|memory| Self { version: memory.version, words: memory.words }).unwrap_or_default()
    }
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
    /// Tokens of the new message of the request, with the recalled messages.
    pub user_message: i64,
    /// Those of them that the recalled messages have.
    pub recall: i64,
    /// The tokenizer that counted the tokens.
    pub tokenizer: String,
}

impl Context {
    /// Returns `true` if messages are missing that a consolidation could have summarised.
    fn omits(&self) -> bool {
        let is_other = |reason| matches!(reason, OmissionReason::Redacted | OmissionReason::OnFailure);
        self.coverage.omitted.iter().any(|range| !is_other(range.reason))
    }
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
    scope: RunScope,
    condition: LeaseCondition,
    /// The plan for the tail, if the snapshot contains the complete tail.
    plan: Option<SnapshotPlan>,
}

type Run = JoinHandle<ConsolidationReport>;
type State = (ContextSnapshot, ConsolidationReport);

/// A context request.
struct ContextBuilder<'a> {
    service: &'a MemoryService,
    tenant: &'a TenantId,
    session: &'a SessionId,
    options: Arc<ContextOptions>,
    /// Known once the session is read.
    window: Option<Window>,
    /// The end of the wait for a consolidation.
    deadline: Instant,
}

impl MemoryService {
    /// Builds the context of a session, and consolidates the session if that is due, or if the context would lack messages otherwise. A
    /// failed consolidation does not fail the request: the context then contains the existing summary and, verbatim, the messages that
    /// it does not cover.
    pub async fn build_context(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        options: ContextOptions,
    ) -> Result<Context, Error> {
        let (options, deadline) = (Arc::new(options), Instant::now() + self.config.inline_wait);
        ContextBuilder { service: self, tenant, session, options, window: None, deadline }.build().await
    }

    /// Returns the window of a request in tokens: that of the list, without reserved ones.
    pub(super) fn list_tokens(&self, options: &ContextOptions) -> Option<i64> {
        let window = options.max_tokens.or(self.config.policy.context_window)?;
        Some(window.saturating_sub(options.reserved_tokens))
    }
}

/// Returns what a list lacks and a consolidation can add.
fn lack_of(
    context: &Result<Context, Error>,
    report: &ConsolidationReport,
    snapshot: &ContextSnapshot,
) -> Option<Lack> {
    let omits = context.as_ref().is_ok_and(Context::omits);
    let is_complete = context.as_ref().is_ok_and(|context| !omits && context.coverage.shortened.is_empty());
    let may_change = match report.outcome {
        Outcome::NotDue | Outcome::Scheduled | Outcome::InProgress => true,
        Outcome::Consolidated => omits,
        Outcome::Failed | Outcome::Disabled => false,
    };
    (!is_complete && may_change).then_some(Lack { available: snapshot.tail.len(), omits })
}

fn revision_of(snapshot: &ContextSnapshot) -> Option<i64> {
    snapshot.session.as_ref().map(|session| session.revision)
}

impl ContextBuilder<'_> {
    async fn build(mut self) -> Result<Context, Error> {
        let mut snapshot = self.load_snapshot().await?;
        self.window = self.window_of(&snapshot).await;
        // The system prompt of the client is not known here, only the tokens that the latest one took.
        let latest = snapshot.session.as_ref().and_then(|session| session.window);
        if self.options.is_preview
            && let Some((latest, window)) = latest.zip(self.window)
        {
            let unknown = latest.fixed + self.new_message_tokens() - window.fixed;
            let reserved_tokens = self.service.config.tokenizer.scale(unknown);
            self.options =
                Arc::new(ContextOptions { reserved_tokens, ..ContextOptions::clone(&self.options) });
        }
        // People who look at a session do not change its window.
        if !self.options.is_preview && self.options.mode != Some(Mode::Off) {
            self.remember_window(&mut snapshot).boxed().await;
        }
        let mut running = None;
        let (mut snapshot, mut report) = match self.check_consolidation(&snapshot, None) {
            ConsolidationCheck::Report(report) => (snapshot, report),
            // Boxes, because few requests consolidate, and the future of each request would be larger.
            ConsolidationCheck::Due(due) if due.mode == Mode::Background => {
                running = Some(self.start(due));
                (snapshot, Outcome::Scheduled.into())
            }
            ConsolidationCheck::Due(due) => self.wait_for(self.start(due), snapshot).boxed().await?,
        };
        let mut context = self.assemble(&snapshot, &report, Vec::new()).await;
        // The run of another request may have made some room, but not enough.
        for _ in 0..MAX_ATTEMPTS {
            let Some(lack) = lack_of(&context, &report, &snapshot) else { break };
            let revision = revision_of(&snapshot);
            (snapshot, report) = self.make_room(snapshot, lack, running.take()).boxed().await?;
            let is_running = report.outcome == Outcome::InProgress && Instant::now() < self.deadline;
            if revision_of(&snapshot) == revision && !is_running {
                break;
            }
            context = self.assemble(&snapshot, &report, Vec::new()).await;
        }
        if let Ok(context) = &mut context {
            context.consolidation = report.clone();
        }
        let mut context = context?;
        let recalled = self.service.recall(self.tenant, self.session, &self.options, &context).boxed().await;
        if !recalled.is_empty() {
            context = self.assemble(&snapshot, &report, recalled).await?;
        }
        if !self.options.is_preview {
            self.service.metrics.record_context(report.outcome);
            self.service.report_omissions(self.tenant, self.session, &context);
        }
        Ok(context)
    }

    /// Returns the messages of the request that are not stored.
    fn new_messages(&self) -> impl Iterator<Item = &Message> {
        let continuation = self.options.continuation.iter().flat_map(|(_, messages)| messages);
        continuation.chain(&self.options.user_message)
    }

    fn new_message_tokens(&self) -> i64 {
        self.new_messages().map(format::count_tokens).sum()
    }

    /// Returns the window of the request in tokens of the stored encoding.
    async fn window_of(&self, snapshot: &ContextSnapshot) -> Option<Window> {
        let tokens = self.service.config.tokenizer.unscale(self.service.list_tokens(&self.options)?);
        let (memory, options) = (snapshot.memory.clone(), Arc::clone(&self.options));
        let count = move || system_message(memory.as_deref(), None, &options, None).tokens;
        let system = blocking::spawn_cpu_to_count(self.counted_bytes(snapshot), count).await;
        Some(Window { tokens, fixed: tokens::PER_LIST + system + self.new_message_tokens() })
    }

    /// Returns the size of the texts that are counted for the list.
    fn counted_bytes(&self, snapshot: &ContextSnapshot) -> usize {
        let (session, options) = (snapshot.session.as_ref(), &self.options);
        session.map_or(0, |session| session.summary.text.len())
            + snapshot.memory.as_ref().map_or(0, |memory| memory.content.len())
            + options.system_prompt.as_ref().map_or(0, String::len)
            + options.skills.len()
            + options.user_message.as_ref().map_or(0, |message| message.json().len())
    }

    /// Stores the window for the work in the background, if it has changed considerably.
    async fn remember_window(&self, snapshot: &mut ContextSnapshot) {
        let Some(state) = snapshot.session.as_mut().filter(|session| session.last_seq > 0) else { return };
        let unstored = self.new_message_tokens();
        let window = self.window.map(|window| Window { fixed: window.fixed - unstored, ..window });
        let is_near = match (state.window, window) {
            (Some(old), Some(new)) => {
                old.tokens == new.tokens && (old.fixed - new.fixed).abs() <= new.tokens / 64
            }
            (old, new) => old == new,
        };
        if is_near {
            return;
        }
        if let Err(error) = self.service.store.set_window(self.tenant, self.session, window).await {
            tracing::warn!(error = %ErrorChain(&error), "failed to store the window of a session");
        }
        state.window = window;
        self.service.context_cache.set_window(self.tenant, self.session, window);
    }

    fn start(&self, due: DueRun) -> Run {
        let DueRun { scope, condition, plan, pools, .. } = due;
        self.service.spawn_run(self.tenant, self.session, scope, condition, plan, &pools)
    }

    /// Waits for a run, and returns the new state of the session.
    async fn wait_for(&self, run: Run, snapshot: ContextSnapshot) -> Result<State, Error> {
        // The memory of the request is released while it waits, so a large snapshot is not kept.
        let kept = (!blocking::is_large(snapshot.tail.bytes())).then_some(snapshot);
        let finished = capacity::current().release_while(timeout_at(self.deadline, run)).await?;
        let snapshot = match (self.load_snapshot().await, kept) {
            (Err(Error::Store(error)), Some(kept)) => {
                tracing::warn!(%error, "failed to read a session after its consolidation");
                kept
            }
            (reloaded, _) => reloaded?,
        };
        let report = match finished {
            // The run did not get the lease. The reason is in the new state of the session.
            Ok(Ok(ConsolidationReport { outcome: Outcome::InProgress, .. })) => {
                match self.check_consolidation(&snapshot, None) {
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

    /// Waits for the consolidation that a context needs because it would lack messages otherwise: for that of the request, or of another
    /// one, or for one that starts now.
    async fn make_room(
        &self,
        mut snapshot: ContextSnapshot,
        lack: Lack,
        running: Option<Run>,
    ) -> Result<State, Error> {
        const POLL_INTERVAL: Duration = Duration::from_millis(50);
        if let Some(run) = running {
            return self.wait_for(run, snapshot).await;
        }
        let before = revision_of(&snapshot);
        loop {
            match self.check_consolidation(&snapshot, Some(lack)) {
                ConsolidationCheck::Report(report)
                    if report.outcome == Outcome::InProgress && Instant::now() < self.deadline => {}
                // The new summary of another run may have made room.
                _ if revision_of(&snapshot) != before => return Ok((snapshot, Outcome::NotDue.into())),
                ConsolidationCheck::Report(report) => return Ok((snapshot, report)),
                ConsolidationCheck::Due(due) => return self.wait_for(self.start(due), snapshot).await,
            }
            capacity::current().release_while(tokio::time::sleep(POLL_INTERVAL)).await?;
            snapshot = self.load_snapshot().await?;
        }
    }

    /// Reads everything that a context consists of. If the request names a user, binds a session without a user to it, and
    /// fails if the session belongs to another user.
    async fn load_snapshot(&self) -> Result<ContextSnapshot, Error> {
        let Self { service, tenant, session, options, .. } = self;
        let window = service.list_tokens(options).map(|tokens| service.config.tokenizer.unscale(tokens));
        let limit = service.config.policy.tail_limit(window);
        let named = options.user_id.as_ref();
        let user = named.or(options.default_user.as_ref());
        let mut snapshot = service.context_cache.load(&service.store, tenant, session, user, limit).await?;
        let owner = snapshot.session.as_ref().and_then(|session| session.user_id.as_ref());
        match (owner, named) {
            (Some(owner), Some(named)) if owner != named => return Err(Error::SessionUserMismatch),
            // The snapshot has the memory document of this user already.
            (None, Some(named)) => {
                let owner = service.bind(tenant, session, named).boxed().await?;
                if let Some(state) = &mut snapshot.session {
                    state.user_id = Some(owner);
                }
            }
            _ => {}
        }
        if let Some((last_seq, _)) = options.continuation {
            snapshot.tail = Arc::new(snapshot.tail.continued(last_seq, &[], format::count_tokens));
            if let Some(state) = &mut snapshot.session {
                state.last_seq = last_seq;
            }
        }
        Ok(snapshot)
    }

    /// Checks whether a consolidation of the session is due and possible. `lack` is what the context would lack
    /// without one.
    fn check_consolidation(&self, snapshot: &ContextSnapshot, lack: Option<Lack>) -> ConsolidationCheck {
        let (config, window) = (&self.service.config, self.window);
        let (policy, mode) = (&config.policy, self.options.mode.unwrap_or(config.mode));
        let (Some(pools), Mode::Inline | Mode::Background) = (&config.pools, mode) else {
            return ConsolidationCheck::Report(Outcome::Disabled.into());
        };
        let Some(session) = &snapshot.session else {
            return ConsolidationCheck::Report(Outcome::NotDue.into());
        };
        let due = match lack {
            Some(_) => policy.possible(session, snapshot.now),
            None => policy.due(session, window, snapshot.now),
        };
        match due {
            Due::No => ConsolidationCheck::Report(Outcome::NotDue.into()),
            Due::InProgress => ConsolidationCheck::Report(Outcome::InProgress.into()),
            Due::Backoff { until } => ConsolidationCheck::Report(ConsolidationReport {
                retry_at: Some(until),
                reason: session.consolidation.last_failure.clone(),
                ..Outcome::Failed.into()
            }),
            Due::Yes => {
                let cause = RunCause::Threshold;
                let scope =
                    RunScope { cause, window, has_new_message: self.new_messages().next().is_some(), lack };
                let tail_len = usize::try_from(session.tail_len()).unwrap_or(0);
                let mut plan = None;
                if tail_len <= snapshot.tail.len() {
                    let list = self.service.plan_scope(session, &scope, false);
                    plan = policy.plan(snapshot.tail.metadata(), tail_len, &list);
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
                ConsolidationCheck::Due(DueRun { mode, pools: pools.clone(), scope, condition, plan })
            }
        }
    }

    /// Assembles the message list within the limits of number and tokens.
    async fn assemble(
        &self,
        snapshot: &ContextSnapshot,
        report: &ConsolidationReport,
        recalled: Vec<RecalledMessage>,
    ) -> Result<Context, Error> {
        let (service, options) = (self.service.clone(), Arc::clone(&self.options));
        let mut snapshot = snapshot.clone();
        if let Some((last_seq, messages)) = &options.continuation {
            snapshot.tail = Arc::new(snapshot.tail.continued(*last_seq, messages, format::count_tokens));
        }
        let opening = self.opening(&snapshot).await?;
        // The format may rewrite messages.
        let bytes = self.counted_bytes(&snapshot) * blocking::COST_OF_COUNTING + snapshot.tail.bytes();
        let (report, step) = (report.clone(), step!("assemble"));
        let assemble =
            move || step.in_scope(|| service.assemble_list(&snapshot, &options, report, opening, &recalled));
        blocking::spawn_cpu_if_large(bytes, assemble).await
    }

    /// Returns the opening of a list that begins in the middle of a turn, with the message that the turn began with, and the `seq` of that
    /// message.
    async fn opening(&self, snapshot: &ContextSnapshot) -> Result<Option<(i64, Opening)>, Error> {
        let has_user = || snapshot.tail.metadata().iter().any(|message| message.role == Role::User);
        let Some(session) = snapshot.session.as_ref().filter(|session| session.cursor > 0) else {
            return Ok(None);
        };
        if self.options.user_message.is_some() || snapshot.tail.is_empty() || has_user() {
            return Ok(None);
        }
        let found =
            self.service.store.last_user_message(self.tenant, self.session, session.cursor).boxed().await?;
        let Some((seq, json)) = found else { return Ok(None) };
        let message = decode_message(&json)?;
        let text = budget::shorten_text(message.content(), seq, self.service.recall_tokens(&self.options));
        Ok(Some((seq, Opening::of_turn(seq, &text))))
    }
}

impl MemoryService {
    /// Assembles the list: first all messages of the tail that are loaded, then as many as fit.
    fn assemble_list(
        &self,
        snapshot: &ContextSnapshot,
        options: &ContextOptions,
        report: ConsolidationReport,
        opening: Option<(i64, Opening)>,
        recalled: &[RecalledMessage],
    ) -> Result<Context, Error> {
        #[expect(clippy::needless_late_init, reason = "what is rendered refers to it, and is dropped first")]
        let shortened;
        let (tokenizer, budget) = (self.config.tokenizer, self.list_tokens(options));
        let (memory, session, tail) =
            (snapshot.memory.as_deref(), snapshot.session.as_ref(), &*snapshot.tail);
        let owner = session.and_then(|session| session.user_id.clone());
        let mut coverage = self.plan_coverage(session, tail, budget.is_some(), &report);
        let first = usize::try_from(coverage.verbatim_from - tail.first_seq()).unwrap_or(0).min(tail.len());
        let metadata = tail.metadata().get(first..).unwrap_or_default();
        let has_new_message = options.user_message.is_some();
        let list = ListOptions { has_new_message, ..options.list };
        let render = Renderer { format: options.format, list };
        // The message of the request is rendered as if it were stored.
        let new_message = self.new_message(options, coverage.last_seq, session, recalled)?;
        let user_message = render.messages(&new_message.tail, 0)?.pop();
        let (repeated, opening) = opening.map_or((None, Opening::default()), |(seq, text)| (Some(seq), text));

        let mut history = render.messages(tail, first)?;
        let notice = self.notice(snapshot, &coverage, budget.is_some());
        let mut system = system_message(memory, session, options, notice);
        let mut costs =
            ListCosts::new(tokenizer, &system, &history, metadata.len(), user_message.as_ref(), &opening);
        let fit = |costs: &ListCosts| match budget {
            Some(budget) => costs.fit(metadata, budget, has_new_message, true),
            None => Ok(self.fit_newest_turn(costs, metadata, &report)),
        };
        let too_small = |needed: i64| self.budget_too_small(options, needed);
        let mut fitted = fit(&costs).map_err(too_small)?;
        // The agent is told before it is too late, unless a consolidation makes room.
        let has_failed = matches!(report.outcome, Outcome::Failed | Outcome::Disabled);
        let is_almost_full = budget
            .and_then(|budget| usize::try_from(budget).ok())
            .is_some_and(|budget| has_failed && context::notice_due(costs.tokens(0).total, budget));
        let soon = is_almost_full.then_some(Notice::Soon);
        let told = if fitted.first > 0 { Some(Notice::Omitted) } else { notice.or(soon) };
        if told != notice {
            let with_notice = system_message(memory, session, options, told);
            let without = std::mem::replace(&mut costs.system, tokenizer.scale(with_notice.tokens));
            match fit(&costs) {
                // A notice that takes the place of messages would not be true.
                Ok(again) if told == Some(Notice::Omitted) || again.first == fitted.first => {
                    (system, fitted) = (with_notice, again);
                }
                _ => costs.system = without,
            }
        }
        shortened = shorten(tail, first, &fitted, tokenizer);
        let (tail, mut first) = (shortened.as_ref().unwrap_or(tail), first + fitted.first);
        if fitted != Fit::default() {
            let stored = costs.history;
            let mut omitted = fitted.first;
            loop {
                history = render.messages(tail, first)?;
                let sent = tail.metadata().get(first..).unwrap_or_default();
                costs =
                    ListCosts::new(tokenizer, &system, &history, sent.len(), user_message.as_ref(), &opening);
                // Results can have ids that are larger than the texts that were left out.
                let fit = |budget| costs.fit(sent, budget, has_new_message, false).map_err(too_small);
                let rest = budget.map_or(Ok(0), |budget| fit(budget).map(|fit| fit.first))?;
                if rest == 0 {
                    break;
                }
                (first, omitted) = (first + rest, omitted + rest);
            }
            coverage.omit(omitted, OmissionReason::MaxTokens);
            let sent = |position: &usize| {
                let (index, tokens) = (position.checked_sub(omitted)?, stored.get(*position)?.tokens);
                let seq = coverage.verbatim_from + i64::try_from(index).ok()?;
                Some(ShortenedMessage { seq, tokens, sent_tokens: costs.history.get(index)?.tokens })
            };
            coverage.shortened = fitted.shortened.keys().filter_map(sent).collect();
        }
        let is_prefix_stable = coverage.omitted.is_empty() && shortened.is_none();
        coverage.report_redacted(tail.metadata().get(first..).unwrap_or_default());
        coverage.repeated = repeated.filter(|_| needs_opening(&history, false));
        let tokens = costs.tokens(new_message.recall_tokens);
        let separate =
            if options.separates_system { std::mem::take(&mut system.text) } else { String::new() };
        let rendered = options.format.render_context(RenderInput {
            system,
            history,
            opening,
            user_message,
            is_prefix_stable,
            cache_control: options.cache_control,
            profile: list.profile,
            tokenizer,
        });
        Ok(Context {
            user: owner.or_else(|| options.user_id.clone()).or_else(|| options.default_user.clone()),
            exists: session.is_some_and(|session| session.last_seq > 0),
            list: rendered,
            system: separate,
            coverage,
            recall: recalled.to_vec(),
            summary: SummaryInfo::of(snapshot),
            memory: MemoryInfo::of(snapshot),
            consolidation: report,
            tokens,
        })
    }

    /// Returns the new message of a request, with the recalled ones before its text.
    fn new_message(
        &self,
        options: &ContextOptions,
        last_seq: i64,
        session: Option<&Session>,
        recalled: &[RecalledMessage],
    ) -> Result<NewMessage, Error> {
        let (seq, tokenizer) = (last_seq + 1, self.config.tokenizer);
        let tail = |message: Option<&Message>| {
            let message = message.map(|message| {
                let metadata = MessageMetadata::new(message, format::count_tokens(message));
                ContextMessage { seq, metadata, json: message.json().to_owned() }
            });
            Tail::new(seq, message.into_iter().collect())
        };
        let given = options.user_message.as_ref();
        let with_recall = given
            .zip(session)
            .filter(|_| !recalled.is_empty())
            .and_then(|(message, session)| recall::with_recalled(message, recalled, &session.session_id));
        let Some(with_recall) = with_recall else {
            return Ok(NewMessage { tail: tail(given), recall_tokens: 0 });
        };
        let render = Renderer { format: options.format, list: options.list };
        let tokens = |message: &Message| {
            let rendered =
                render.messages(&tail(Some(message)), 0)?.pop().map_or(0, |message| message.tokens);
            Ok::<_, Error>(tokenizer.scale(rendered))
        };
        let recall_tokens = tokens(&with_recall)? - given.map_or(Ok(0), tokens)?;
        Ok(NewMessage { tail: tail(Some(&with_recall)), recall_tokens })
    }

    /// Returns the error for a list whose newest turn needs more tokens than its window has.
    fn budget_too_small(&self, options: &ContextOptions, needed: i64) -> Error {
        let (reserved, tokenizer) = (options.reserved_tokens, self.config.tokenizer);
        let max_tokens = self.list_tokens(options).unwrap_or(0).saturating_add(reserved);
        Error::BudgetTooSmall { max_tokens, reserved, needed, tokenizer }
    }

    /// Without a window: shortens the results of the newest turn if nothing else can be summarised and `max_tail_tokens` is exceeded.
    fn fit_newest_turn(
        &self,
        costs: &ListCosts,
        messages: &[MessageMetadata],
        report: &ConsolidationReport,
    ) -> Fit {
        let is_possible = matches!(report.outcome, Outcome::NotDue | Outcome::Consolidated);
        let limit = self.config.policy.max_tail_tokens.filter(|_| is_possible && newest_turn(messages) == 0);
        let fit = limit.map(|limit| {
            budget::fit(messages, &costs.history, self.config.tokenizer.scale(limit), false, true)
        });
        fit.and_then(Result::ok).filter(|fit| fit.first == 0).unwrap_or_default()
    }

    /// Returns the notice about the number and the size of the messages.
    fn notice(&self, snapshot: &ContextSnapshot, coverage: &Coverage, has_window: bool) -> Option<Notice> {
        if !coverage.omitted.is_empty() {
            return Some(Notice::Omitted);
        }
        let (policy, tail_len) =
            (&self.config.policy, snapshot.session.as_ref().map_or(0, Session::tail_len));
        let bytes = i64::try_from(snapshot.tail.bytes()).unwrap_or(i64::MAX);
        let is_due = !has_window && context::notice_due(tail_len, policy.max_history_messages)
            || context::notice_due(bytes, policy.max_context_bytes);
        is_due.then_some(Notice::Soon)
    }

    /// Plans the coverage without a token budget.
    fn plan_coverage(
        &self,
        session: Option<&Session>,
        tail: &Tail,
        has_window: bool,
        report: &ConsolidationReport,
    ) -> Coverage {
        let policy = &self.config.policy;
        let selection = if self.config.recent_on_failure && report.outcome == Outcome::Failed {
            TailSelection::Recent { keep: policy.keep_recent }
        } else {
            TailSelection::All
        };
        let (cursor, last_seq) = session.map_or((0, 0), |session| (session.cursor, session.last_seq));
        // The tail can have messages that are not stored.
        let last_seq = if tail.is_empty() { last_seq } else { tail.last_seq() };
        let max_messages = if has_window { usize::MAX } else { policy.max_history_messages };
        coverage::plan_coverage(cursor, last_seq, max_messages, selection, tail.metadata())
    }

    /// Counts a context that lacks messages, and logs the first one of a session in an hour.
    fn report_omissions(&self, tenant: &TenantId, session: &SessionId, context: &Context) {
        let Coverage { omitted, shortened, .. } = &context.coverage;
        let mut reasons: Vec<&'static str> = omitted.iter().map(|range| range.reason.name()).collect();
        reasons.extend((!shortened.is_empty()).then_some(SHORTENED));
        reasons.sort_unstable();
        reasons.dedup();
        reasons.retain(|reason| *reason != OmissionReason::Redacted.name());
        for reason in &reasons {
            self.metrics.record_omission(reason);
        }
        if reasons.is_empty() || !self.is_first_in_hour(tenant, session) {
            return;
        }
        let messages: i64 = omitted.iter().map(|range| range.to_seq - range.from_seq + 1).sum();
        tracing::warn!(
            session = &*redact_keys(session.as_str()),
            reasons = reasons.join(","),
            omitted_messages = messages,
            shortened_messages = shortened.len(),
            consolidation = context.consolidation.outcome.name(),
            "a context lacks messages that are not in the summary"
        );
    }

    /// Returns `true` once per session and hour.
    fn is_first_in_hour(&self, tenant: &TenantId, session: &SessionId) -> bool {
        let (key, now) = ((tenant.clone(), session.clone()), Instant::now());
        if self.warned.get(&key).is_some_and(|last: Instant| now - last < WARNING_INTERVAL) {
            return false;
        }
        self.warned.insert(key, now);
        true
    }
}

fn system_message(
    memory: Option<&MemoryDocument>,
    session: Option<&Session>,
    options: &ContextOptions,
    notice: Option<Notice>,
) -> SystemMessage {
    context::system_message(&SystemParts {
        system_prompt: options.system_prompt.as_deref().unwrap_or_default(),
        memory: memory.map_or("", |memory| &memory.content),
        summary: session.map_or("", |session| &session.summary.text),
        skills: &options.skills,
        notice,
    })
}

/// The new message of a request as the only message of a tail, or no message.
struct NewMessage {
    tail: Tail,
    recall_tokens: i64,
}

/// The form of the messages of a context.
#[derive(Clone, Copy)]
struct Renderer {
    format: Format,
    list: ListOptions,
}

impl Renderer {
    /// Renders the messages from a position on.
    fn messages(self, tail: &Tail, position: usize) -> Result<Vec<RenderedMessage<'_>>, StoreError> {
        self.format.render_messages(self.list, tail, position).map_err(invalid_message)
    }
}

/// Returns the tail with the results of tools that must be shortened, if there are any.
fn shorten(tail: &Tail, first: usize, fit: &Fit, tokenizer: Tokenizer) -> Option<Tail> {
    let replacement = |(position, max_tokens): (&usize, &i64)| {
        let message = tail.messages(first + position).next()?;
        let stored = decode_message(message.json).ok()?;
        let max_tokens = tokenizer.unscale(*max_tokens) - FORMAT_MARGIN;
        Some((first + position, budget::shorten_result(&stored, message.seq, max_tokens)?))
    };
    let sent = fit.shortened.iter().filter(|(position, _)| **position >= fit.first);
    let mut shortened = None;
    for (position, message) in sent.filter_map(replacement) {
        let tail = shortened.get_or_insert_with(|| tail.clone());
        tail.replace(position, &message, format::count_tokens(&message));
    }
    shortened
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
        messages: usize,
        user_message: Option<&RenderedMessage<'_>>,
        opening: &Opening,
    ) -> Self {
        let mut costs = vec![MessageCost::default(); messages];
        let mut needs_opening = user_message.is_some_and(|message| message.needs_opening(false));
        for message in history.iter().rev() {
            needs_opening = message.needs_opening(needs_opening);
            if let Some(cost) = costs.get_mut(message.position) {
                cost.tokens += tokenizer.scale(message.tokens);
                cost.tokens_if_first = if needs_opening { tokenizer.scale(opening.tokens) } else { 0 };
            }
        }
        Self {
            tokenizer,
            system: tokenizer.scale(system.tokens),
            history: costs,
            user_message: user_message.map_or(0, |message| tokenizer.scale(message.tokens)),
        }
    }

    /// Returns how the messages fit into a list of `max_tokens` tokens.
    fn fit(
        &self,
        messages: &[MessageMetadata],
        max_tokens: i64,
        has_new_message: bool,
        may_shorten: bool,
    ) -> Result<Fit, i64> {
        let fixed = tokens::PER_LIST + self.system + self.user_message;
        budget::fit(messages, &self.history, max_tokens - fixed, has_new_message, may_shorten)
            .map_err(|needed| fixed + needed)
    }

    fn history(&self) -> i64 {
        let before_first = self.history.first().map_or(0, |cost| cost.tokens_if_first);
        before_first + self.history.iter().map(|cost| cost.tokens).sum::<i64>()
    }

    /// Returns the tokens of the parts of the list.
    fn tokens(&self, recall: i64) -> ContextTokens {
        let history = self.history();
        ContextTokens {
            total: self.system + history + self.user_message,
            system: self.system,
            history,
            user_message: self.user_message,
            recall,
            tokenizer: self.tokenizer.to_string(),
        }
    }
}
