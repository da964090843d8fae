//! Meta-consolidation: a summary that has become too long is compressed.
//!
//! A summary that fits into the input limit of its pool is compressed by one call. A larger one is compressed in groups of
//! paragraphs, one call each, and the results are compressed again until the summary is short enough. Otherwise a summary that
//! once exceeds the limit could only grow.

use super::{ConsolidationRun, MAX_GROUP_CALLS, RunError, add_call, built_in, provenance_of};
use crate::blocking;
use crate::domain::consolidation::{SENTENCE_TOKENS, SummaryLimit};
use crate::domain::invisible::without_nul;
use crate::domain::revision::{MetaConsolidation, Provenance};
use crate::domain::session::Summary;
use crate::domain::summary::{self, MAX_BYTES};
use crate::llm::{Task, extractive};

/// A group has at least this many words for each requested sentence, so that its compression is about half as long at most. A
/// smaller group stays as it is.
const WORDS_PER_SENTENCE: usize = 50;

/// Smallest capacity for groups, in tokens: smaller groups have a few sentences, which no model could compress.
const MIN_CAPACITY: usize = 128;

/// Number of groups that may fail in a round. A single group can fail each time, for example because a content filter rejects it, and must
/// not keep the others from being compressed; more failures suggest that the models are unavailable.
const MAX_FAILED_GROUPS: usize = 2;

/// A summary of more than this number of limits is compressed by the built-in summariser.
const HARD_LIMIT_FACTOR: i64 = 2;

/// A summary after it was compressed once, as a whole or in groups.
struct Round {
    text: String,
    provenance: Provenance,
    /// `true` if one call compressed the whole summary.
    is_whole: bool,
    /// `true` if no further round follows.
    is_last: bool,
}

impl ConsolidationRun {
    /// Appends a text to the summary of the session, and compresses the result if it is too long. Fails if it still exceeds the
    /// limit of imports, because the export of the session could not be imported.
    pub(super) async fn append_and_compress(
        &mut self,
        added: &str,
    ) -> Result<(Summary, Option<MetaConsolidation>), RunError> {
        if added.len() > MAX_BYTES {
            return Err(RunError::AddedTextTooLarge { bytes: added.len() });
        }
        let mut summary = Summary::new(summary::append(&self.session.summary.text, added));
        let mut meta = None;
        let mut compressed = None;
        if self.is_too_long(&summary) {
            compressed = self.compress(&summary.text).await?;
            let result =
                compressed.as_ref().map_or_else(|| summary.clone(), |(text, _)| Summary::new(text.clone()));
            if self.limit().is_exceeded(&result, HARD_LIMIT_FACTOR) {
                compressed = self.compress_without_model(result, compressed).await;
            }
        }
        if let Some((text, provenance)) = compressed {
            let whole = std::mem::replace(&mut summary, Summary::new(text)).text;
            // The limit applies to this text, too. Without the added text, which the revision contains separately, it is that
            // of the revision before.
            let candidates = [whole.as_str(), self.session.summary.text.as_str()];
            let text_before = candidates.into_iter().find(|text| text.len() <= MAX_BYTES).unwrap_or_default();
            meta = Some(MetaConsolidation { text_before: text_before.to_owned(), provenance });
        }
        let bytes = summary.text.len();
        if bytes > MAX_BYTES { Err(RunError::SummaryTooLarge { bytes }) } else { Ok((summary, meta)) }
    }

    pub(super) fn limit(&self) -> SummaryLimit {
        self.service.config.policy.summary_limit(self.scope.window)
    }

    fn is_too_long(&self, summary: &Summary) -> bool {
        summary.text.len() > MAX_BYTES || self.limit().is_exceeded(summary, 1)
    }

    /// Has the built-in summariser compress a summary that models left far too long. `earlier` is their result.
    async fn compress_without_model(
        &self,
        summary: Summary,
        earlier: Option<(String, Provenance)>,
    ) -> Option<(String, Provenance)> {
        let limit = self.limit();
        let (text, provenance) =
            built_in(&self.pools.meta, move || extractive::compress(&summary.text, limit)).await;
        if !summary::has_letters(&text) {
            return earlier;
        }
        Some((text, add_call(provenance, earlier.as_ref().map(|(_, provenance)| provenance))))
    }

    /// Compresses a summary until it is short enough, or one call has compressed all of it. Returns `None` if no model did: a
    /// summary that is too long is better than none. If a later round fails, the result of the rounds before it stays.
    async fn compress(&mut self, text: &str) -> Result<Option<(String, Provenance)>, RunError> {
        let mut compressed: Option<(String, Provenance)> = None;
        loop {
            let before = compressed.as_ref().map_or(text, |(text, _)| text.as_str());
            let Some(Round { text, provenance, is_whole, is_last }) = self.compress_once(before).await?
            else {
                return Ok(compressed);
            };
            // A group can end within a word, which then counts as two.
            if !is_whole && summary::words(&text) >= summary::words(before) {
                return Ok(compressed);
            }
            let is_done = is_last || !self.is_too_long(&Summary::new(text.clone()));
            let earlier = compressed.as_ref().map(|(_, provenance)| provenance);
            compressed = Some((text, add_call(provenance, earlier)));
            if is_done {
                return Ok(compressed);
            }
        }
    }

    /// Compresses a summary by one call, or each of its groups by one. A group whose call fails stays as it is. Returns `None` if nothing
    /// was compressed.
    async fn compress_once(&mut self, text: &str) -> Result<Option<Round>, RunError> {
        let pool = self.pools.meta.clone();
        let capacity = self.service.llm.capacity(&pool);
        let whole = text.to_owned();
        let split = move || summary::split_to_fit(&whole, capacity.max(MIN_CAPACITY));
        let groups = blocking::spawn_cpu_if_large(text.len(), split).await;
        let max_sentences = match self.limit() {
            SummaryLimit::Words(_) => self.service.config.policy.summary_sentences,
            // About half of the limit.
            SummaryLimit::Tokens(tokens) => {
                let sentences = usize::try_from(tokens / (2 * SENTENCE_TOKENS)).unwrap_or(0);
                sentences.max(self.service.config.policy.summary_sentences)
            }
        };
        if let [group] = groups.as_slice() {
            let compressed = self.compress_text(&pool, group, max_sentences, self.limit()).await?;
            return Ok(compressed.map(|(text, provenance)| Round {
                text,
                provenance,
                is_whole: true,
                is_last: true,
            }));
        }
        if capacity < MIN_CAPACITY {
            tracing::warn!(
                capacity,
                "the input limit of the pool for summaries is too small to compress parts of a summary; it stays uncompressed"
            );
            return Ok(None);
        }
        let (mut texts, mut provenance, mut failures) = (Vec::with_capacity(groups.len()), None, 0);
        for group in groups {
            let sentences = max_sentences.min(summary::words(&group) / WORDS_PER_SENTENCE);
            if sentences == 0 || self.group_calls == 0 || failures == MAX_FAILED_GROUPS {
                texts.push(group);
                continue;
            }
            self.group_calls -= 1;
            let limit = self.limit().share(group.len(), text.len());
            if let Some((text, latest)) = self.compress_text(&pool, &group, sentences, limit).await? {
                texts.push(text);
                provenance = Some(add_call(latest, provenance.as_ref()));
            } else {
                texts.push(group);
                failures += 1;
            }
        }
        if self.group_calls == 0 {
            tracing::warn!(
                calls = MAX_GROUP_CALLS,
                "the run has made all its calls for parts of a summary; the rest stays uncompressed until the next run"
            );
        }
        let text = texts.join("\n\n");
        Ok(provenance.map(|provenance| Round { text, provenance, is_whole: false, is_last: failures > 0 }))
    }

    /// Compresses a text by one call. Returns `None` if no model did.
    async fn compress_text(
        &mut self,
        pool: &str,
        text: &str,
        sentences: usize,
        limit: SummaryLimit,
    ) -> Result<Option<(String, Provenance)>, RunError> {
        match self.complete(pool, Task::MetaConsolidate { summary: text, sentences, limit }).await {
            Ok(response) => Ok(Some((without_nul(&response.text), provenance_of(pool, &response)))),
            Err(error @ (RunError::Llm(_) | RunError::TokenLimit { .. })) => {
                tracing::warn!(%error, "meta-consolidation failed; the text stays uncompressed");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
