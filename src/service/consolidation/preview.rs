//! The dry run of a consolidation: what the next one would summarise, with which prompt, at which estimated cost. It calls no model,
//! takes no lease and writes nothing.

use super::{
    Batch, ConsolidationRun, Error, MAX_PREVIOUS_BYTES, MemoryService, Outcome, Part, RunError, RunScope,
    Spending,
};
use crate::blocking;
use crate::capacity;
use crate::domain::batching;
use crate::domain::consolidation::{
    ConsolidationPlan, Rule, SENTENCE_TOKENS, SummaryLimit, requested_sentences,
};
use crate::domain::consolidation_record::RunCause;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::text::OwnResults;
use crate::domain::summary;
use crate::llm::status::{ModelStatus, Strategy};
use crate::llm::{Llm, LlmStatus, Task};
use crate::service::{MAX_PAGE_BYTES, PAGE_MEMORY, StoreError};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;
use uuid::Uuid;

/// The consolidation that would run now. Tokens are counted by `o200k_base`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ConsolidationPreview {
    /// The rule by which the next context starts a consolidation, unless one is running, a failure delays it, or the mode is
    /// `off`; null if none is due. A client can request one in any case.
    #[schema(required)]
    due: Option<Rule>,
    /// Number of messages after the cursor.
    tail_messages: i64,
    /// Tokens of the messages after the cursor.
    tail_tokens: i64,
    /// The window of the latest context request of the session; null if it had none.
    #[schema(required)]
    window: Option<i64>,
    /// The number of messages above which a consolidation is due (`consolidation.threshold`).
    threshold: i64,
    /// The number of tokens above which a consolidation is due (`consolidation.max_tail_tokens`); null without this limit.
    #[schema(required)]
    max_tail_tokens: Option<i64>,
    /// The pool that summarises.
    pool: String,
    strategy: PoolStrategy,
    /// The models of the pool, in the order of the settings.
    models: Vec<PreviewModel>,
    /// The messages that would be summarised; null if all of them stay verbatim, or an unanswered tool call precedes the others.
    #[schema(required)]
    plan: Option<PreviewPlan>,
}

/// The model of a pool that is tried first: always the first one, or each in rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolStrategy {
    Fallback,
    RoundRobin,
}

impl From<Strategy> for PoolStrategy {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Fallback => Self::Fallback,
            Strategy::RoundRobin => Self::RoundRobin,
        }
    }
}

/// A model that may write the summary.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct PreviewModel {
    /// Name of the model in the settings.
    name: String,
    /// `false` for the built-in summariser, which reads no prompt.
    is_prompted: bool,
    /// The prompt version of its summaries.
    prompt_version: String,
    /// Largest response, in tokens.
    output_limit: usize,
    /// Estimated cost of the plan in the currency of the prices; null if these are not configured (`input_price`,
    /// `output_price`), or without a plan. A meta-consolidation is not included.
    #[schema(required)]
    estimated_cost: Option<f64>,
}

/// The messages that would be summarised, in batches that the models of the pool can read at once.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct PreviewPlan {
    /// First message.
    from_seq: i64,
    /// Last message. A tail of more than 10,000 messages is planned in several steps, of which this is the first.
    to_seq: i64,
    /// Number of messages.
    messages: i64,
    /// Number of batches. Those after the first one are estimated from the stored sizes of the messages.
    batches: usize,
    first_batch: PreviewBatch,
    /// Number of model calls, if none fails; an estimate if there are several batches.
    calls: usize,
    /// Estimated tokens of all prompts; 0 if only the built-in summariser is called.
    input_tokens: usize,
    /// Estimated tokens of all responses: 30 for each requested sentence.
    output_tokens: usize,
}

/// The first batch of a consolidation.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct PreviewBatch {
    /// First message.
    from_seq: i64,
    /// Last message.
    to_seq: i64,
    /// Requested sentences of the first call; 0 if the messages have no text, so that no model is called.
    sentences: usize,
    /// The prompt of the first call; null if the messages have no text, or only the built-in summariser is called.
    #[schema(required)]
    prompt: Option<PreviewPrompt>,
}

/// A prompt, as a model receives it.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct PreviewPrompt {
    /// The system message.
    system: String,
    /// The user message, with the messages of the conversation.
    user: String,
    /// `true` if `user` exceeds 4 MiB, so that only its beginning is returned.
    is_truncated: bool,
    /// Tokens of the complete prompt.
    tokens: usize,
}

impl MemoryService {
    /// Returns what a consolidation of the session would do if it began now.
    pub async fn preview_consolidation(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<ConsolidationPreview, Error> {
        let pools = self.config.pools.clone().ok_or(Error::ConsolidationDisabled)?;
        loop {
            let mut run = ConsolidationRun {
                service: self.clone(),
                pools: pools.clone(),
                tenant: tenant.clone(),
                session: self.session(tenant, session).await?,
                // No lease has this token, so the run could not commit.
                lease: Uuid::nil(),
                scope: RunScope::new(RunCause::Request),
                is_forced: true,
                plan: None,
                lines: Vec::new(),
                own_results: OwnResults::default(),
                group_calls: 0,
                spending: Spending::new(),
                report: Outcome::NotDue.into(),
            };
            run.scope.window = run.session.window;
            // A run releases its memory by itself, and the share of the request must stay.
            match capacity::scope(capacity::internal(), run.preview()).await {
                Ok(preview) => return Ok(preview),
                // The session was rewound in the meantime.
                Err(RunError::Superseded) => {}
                Err(RunError::Store(error)) => return Err(error.into()),
                Err(_) => {
                    return Err(
                        StoreError::Corrupt { what: "a message", why: "it has no role".to_owned() }.into()
                    );
                }
            }
        }
    }
}

impl ConsolidationRun {
    async fn preview(mut self) -> Result<ConsolidationPreview, RunError> {
        let plan = match self.make_plan().await? {
            Some(plan) => match self.next_batch(&plan, 0, usize::MAX).await? {
                Some(batch) => Some(self.preview_plan(&plan, batch).await),
                None => None,
            },
            None => None,
        };
        let policy = &self.service.config.policy;
        let (tail_messages, tail_tokens) = (self.session.tail_len(), self.session.tail_tokens());
        let due = self.rule();
        let LlmStatus { pools, models } = self.service.llm.status();
        let pool = pools.into_iter().find(|pool| pool.name == self.pools.consolidation);
        let (names, strategy) =
            pool.map_or((Vec::new(), Strategy::Fallback), |pool| (pool.models, pool.strategy));
        let model = |name: String| {
            let model: &ModelStatus = models.iter().find(|model| model.name == name)?;
            let plan = plan.as_ref();
            Some(PreviewModel {
                name,
                is_prompted: model.is_prompted,
                prompt_version: model.prompt_version.clone(),
                output_limit: model.output_limit,
                estimated_cost: plan.and_then(|plan| model.cost(plan.input_tokens, plan.output_tokens)),
            })
        };
        Ok(ConsolidationPreview {
            due,
            tail_messages,
            tail_tokens,
            window: self.scope.window.map(|window| self.service.config.tokenizer.scale(window.tokens)),
            threshold: policy.threshold,
            max_tail_tokens: policy.max_tail_tokens,
            models: names.into_iter().filter_map(model).collect(),
            pool: self.pools.consolidation.clone(),
            strategy: strategy.into(),
            plan,
        })
    }

    async fn preview_plan(&self, plan: &ConsolidationPlan, batch: Batch) -> PreviewPlan {
        let (cursor, first) = (self.session.cursor, batch.lines.len());
        let seq = |messages: usize| cursor.saturating_add(i64::try_from(messages).unwrap_or(i64::MAX));
        let messages = plan.message_tokens.len();
        let later = LaterBatches::estimate(plan, first, batch.capacity, self.limit());
        let batches = later.batches.saturating_add(1);
        // Work in the background waits as long as necessary, so this does not fail.
        let _ = capacity::claim(PAGE_MEMORY).await;
        let (llm, pool) = (Arc::clone(&self.service.llm), self.pools.consolidation.clone());
        let previous = summary::ending(&self.session.summary.text, MAX_PREVIOUS_BYTES).to_owned();
        let estimate = move || Estimate::new(&*llm, &pool, &previous, &batch.parts(), &later);
        let Estimate { sentences, prompt, calls, input_tokens, output_tokens } =
            blocking::spawn_cpu(estimate).await;
        capacity::current().release();
        PreviewPlan {
            from_seq: seq(1),
            to_seq: seq(messages),
            messages: seq(messages).saturating_sub(cursor),
            batches,
            first_batch: PreviewBatch { from_seq: seq(1), to_seq: seq(first), sentences, prompt },
            calls,
            input_tokens,
            output_tokens,
        }
    }
}

/// The batches after the first one, by the stored sizes of their messages: their transcripts are not loaded.
#[derive(Debug, Default, PartialEq, Eq)]
struct LaterBatches {
    batches: usize,
    calls: usize,
    message_tokens: usize,
    sentences: usize,
}

impl LaterBatches {
    /// Estimates the batches after the first `done` messages of a plan.
    fn estimate(plan: &ConsolidationPlan, mut done: usize, capacity: usize, limit: SummaryLimit) -> Self {
        let size = |tokens: &i64| usize::try_from(*tokens).unwrap_or(0);
        let sizes: Vec<usize> = plan.message_tokens.iter().map(size).collect();
        let mut later = Self::default();
        loop {
            let ends: Vec<usize> =
                plan.batch_ends.iter().filter(|end| **end > done).map(|end| end - done).collect();
            let rest = sizes.get(done..).unwrap_or_default();
            let Some(messages) = batching::batch_end(rest, &ends, capacity) else { return later };
            let tokens: usize = rest.iter().take(messages).sum();
            let calls = tokens.div_ceil(capacity.max(1)).max(1);
            later.batches += 1;
            later.calls += calls;
            later.message_tokens = later.message_tokens.saturating_add(tokens);
            let sentences = requested_sentences(messages, i64::try_from(tokens).unwrap_or(i64::MAX), limit);
            later.sentences += sentences.max(calls);
            done += messages;
        }
    }
}

/// The prompt of the first call, and the tokens of all calls.
struct Estimate {
    sentences: usize,
    prompt: Option<PreviewPrompt>,
    calls: usize,
    input_tokens: usize,
    output_tokens: usize,
}

impl Estimate {
    fn new(llm: &dyn Llm, pool: &str, previous: &str, parts: &[Part], later: &LaterBatches) -> Self {
        let sentences = parts.first().map_or(0, |part| part.sentences);
        let limit = SummaryLimit::Words(0); // no part of the prompt
        let prompt = |part: &Part| {
            let task = Task::Consolidate { lines: &part.lines, previous, sentences: part.sentences, limit };
            let prompt = llm.prompt(pool, task)?;
            let tokens = prompt.tokens();
            let (mut user, max) = (prompt.user, usize::try_from(MAX_PAGE_BYTES).unwrap_or(usize::MAX));
            let is_truncated = user.len() > max;
            user.truncate(user.floor_char_boundary(max));
            Some(PreviewPrompt { system: prompt.system, user, is_truncated, tokens })
        };
        let prompt = parts.first().and_then(prompt);
        let empty = llm.prompt(pool, Task::Consolidate { lines: &[], previous, sentences, limit });
        let input_tokens = empty.map_or(0, |empty| {
            let overhead = empty.tokens();
            let lines = |part: &Part| part.lines.iter().map(|line| line.tokens).sum::<usize>();
            let further: usize = parts.iter().skip(1).map(|part| overhead + lines(part)).sum();
            let later = later.calls.saturating_mul(overhead).saturating_add(later.message_tokens);
            prompt.as_ref().map_or(0, |prompt| prompt.tokens).saturating_add(further).saturating_add(later)
        });
        let requested = parts.iter().map(|part| part.sentences).sum::<usize>() + later.sentences;
        let calls = parts.len() + later.calls;
        let output_tokens = requested.saturating_mul(usize::try_from(SENTENCE_TOKENS).unwrap_or(0));
        Self { sentences, prompt, calls, input_tokens, output_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: SummaryLimit = SummaryLimit::Words(600);

    #[test]
    fn later_batches_are_estimated_from_stored_sizes() {
        let plan = ConsolidationPlan { batch_ends: vec![2, 4, 6, 8], message_tokens: vec![10; 8] };
        let later = LaterBatches::estimate(&plan, 2, 40, WORDS);
        let expected = LaterBatches { batches: 2, calls: 2, message_tokens: 60, sentences: 10 };
        assert_eq!(later, expected, "messages 3 to 6, then 7 and 8");
        assert_eq!(LaterBatches::estimate(&plan, 8, 40, WORDS), LaterBatches::default());
        let large = ConsolidationPlan { batch_ends: vec![1, 2], message_tokens: vec![10, 95] };
        assert_eq!(LaterBatches::estimate(&large, 1, 40, WORDS).calls, 3, "a large message is split");
        let sentences = LaterBatches::estimate(&large, 1, 10, WORDS).sentences;
        assert_eq!(sentences, 10, "one for each of its parts, if these are more than its sentences");
    }
}
