//! One step: a range of messages and what models make of it. Nothing is written here.

use super::{ConsolidationRun, Failure, clean};
use crate::domain::revision::{MetaConsolidation, Provenance};
use crate::domain::session::{Session, Summary};
use crate::domain::transcript::{self, TranscriptEntry};
use crate::domain::{batching, consolidation, summary, tokens};
use crate::llm::{PoolResponse, Task};
use crate::storage::NewRevision;
use std::time::Duration;

impl ConsolidationRun<'_> {
    /// Has the entries summarised, and the summary compressed where it has grown too long.
    pub(super) async fn step(
        &self,
        state: &Session,
        entries: Vec<TranscriptEntry>,
        range_tokens: i64,
        capacity: usize,
    ) -> Result<NewRevision, Failure> {
        let count = entries.len();
        let entries: Vec<TranscriptEntry> = entries.into_iter().filter(|entry| !entry.is_empty()).collect();
        let mut added = String::new();
        let mut source: Option<Provenance> = None;
        if !entries.is_empty() {
            let pool = &self.pools.consolidation;
            // The budget is for the messages of the range, those without text included.
            let whole = entries.len();
            for piece in batching::split_to_fit(entries, capacity) {
                let sentences =
                    consolidation::sentences(if piece.len() == whole { count } else { piece.len() });
                let answer = self.complete(pool, Task::Consolidate { entries: &piece, sentences }).await?;
                added = summary::append(&added, &clean(&answer.text));
                source = Some(joined(source.as_ref(), pool, &answer));
            }
        }
        let mut text = summary::append(&state.summary.text, &added);
        let mut words = summary::words(&text);
        let mut meta = None;
        let policy = &self.service.config.policy;
        if !added.is_empty()
            && policy.needs_meta(words)
            && let Some((compressed, source)) = self.compress(&text).await?
        {
            meta = Some(MetaConsolidation { text_before: std::mem::replace(&mut text, compressed), source });
            words = summary::words(&text);
        }
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        let tokens =
            if text == state.summary.text { state.summary.tokens } else { tokens::count_text(&text) };
        Ok(NewRevision {
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
    async fn compress(&self, text: &str) -> Result<Option<(String, Provenance)>, Failure> {
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
        let sentences = self.service.config.policy.summary_sentences;
        match self.complete(pool, Task::MetaConsolidate { summary: text, sentences }).await {
            Ok(answer) => Ok(Some((clean(&answer.text), joined(None, pool, &answer)))),
            Err(failure @ (Failure::Llm(_) | Failure::Limit { .. })) => {
                tracing::warn!(error = %failure, "meta-consolidation failed; the summary stays as it is");
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Asks a pool, with a lease that outlasts the call, and keeps account of what that took: at once, for it was
    /// spent whatever becomes of the answer.
    async fn complete(&self, pool: &str, task: Task<'_>) -> Result<PoolResponse, Failure> {
        let service = self.service;
        if !service.store.renew_lease(self.tenant, self.session, self.token, self.ttl).await? {
            return Err(Failure::Superseded);
        }
        self.ensure_within_budget().await?;
        let asked = tokio::select! {
            asked = service.llm.complete(pool, task) => asked,
            () = service.stop.cancelled() => return Err(Failure::Stopped),
        };
        self.record_usage(asked.as_ref().map_or_else(|error| &error.cost, |answer| &answer.cost)).await;
        Ok(asked?)
    }
}

/// The model's part of a step, with that of an earlier piece of the same step.
fn joined(earlier: Option<&Provenance>, pool: &str, answer: &PoolResponse) -> Provenance {
    let cost = &answer.cost;
    let millis = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    let sum = |before: fn(&Provenance) -> Option<i64>, now: Option<i64>| match (earlier.and_then(before), now)
    {
        (Some(before), Some(now)) => Some(before.saturating_add(now)),
        (before, now) => before.or(now),
    };
    let tokens = |counted: Option<u64>| counted.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
    Provenance {
        model: answer.model.clone(),
        pool: pool.to_owned(),
        prompt_version: answer.prompt_version.clone(),
        input_tokens: sum(|source| source.input_tokens, tokens(cost.usage.input_tokens)),
        output_tokens: sum(|source| source.output_tokens, tokens(cost.usage.output_tokens)),
        duration_ms: earlier.map_or(0, |source| source.duration_ms).saturating_add(millis(cost.duration)),
        calls: sum(|source| source.calls, Some(cost.calls.into())),
        failures: sum(|source| source.failures, Some(cost.failures.into())),
        queued_ms: sum(|source| source.queued_ms, Some(millis(cost.queued))),
    }
}
