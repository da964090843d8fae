//! Orders the best hits of a search with the models of a pool.
//!
//! The lexical order remains if no model returns an order in time. Hits are only reordered: whatever a stored message makes a
//! model answer, it cannot add, remove or change a hit.

use super::{SearchHit, SearchOrder, SearchRanking};
use crate::capacity::{self, Overloaded};
use crate::domain::id::TenantId;
use crate::domain::tokens;
use crate::domain::transcript::encode_text;
use crate::llm::order::read_order;
use crate::llm::{LlmError, Task};
use crate::service::consolidation::RunError;
use crate::service::{MemoryService, RerankConfig};
use std::time::Duration;
use tokio::time::Instant;

/// Upper bound of the tokens that the prompt adds to a text: number, names of the fields, line feed.
const LINE_TOKENS: usize = 16;
/// The reason for which the lexical order remains. Clients see its text, which therefore contains no message and no query.
#[derive(Debug, thiserror::Error)]
enum RerankError {
    #[error("no call slot became free within {0:.1?} (search.rerank_timeout)")]
    Busy(Duration),
    #[error("the input limit of the models of the pool is too small for two results")]
    InputLimit,
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("the response is not an order of the search results")]
    NotAnOrder,
}

impl From<LlmError> for RerankError {
    fn from(error: LlmError) -> Self {
        Self::Run(error.into())
    }
}

impl SearchRanking {
    #[must_use]
    pub fn lexical(reason: Option<String>) -> Self {
        Self { order: SearchOrder::Lexical, model: None, reason }
    }
}

impl MemoryService {
    /// Orders the hits with the configured pool. `texts` are those of the hits. Releases the permit of the request while it waits
    /// for a model, and fails if it does not get it again.
    pub(super) async fn rerank(
        &self,
        tenant: &TenantId,
        query: &str,
        hits: &mut Vec<SearchHit>,
        texts: &[String],
    ) -> Result<SearchRanking, Overloaded> {
        let Some(config) = self.config.rerank.as_ref().filter(|_| hits.len() > 1) else {
            return Ok(SearchRanking::lexical(None));
        };
        let order = self.order(tenant, config, query, texts);
        Ok(match capacity::current().release_while(order).await? {
            Ok((order, model)) => {
                self.metrics.reranked.increment(1);
                let mut lexical: Vec<Option<SearchHit>> = hits.drain(..).map(Some).collect();
                hits.extend(order.into_iter().filter_map(|index| lexical.get_mut(index)?.take()));
                SearchRanking { order: SearchOrder::Reranked, model: Some(model), reason: None }
            }
            Err(error) => {
                self.metrics.rerank_failed.increment(1);
                tracing::warn!(%error, "no model ordered the hits of a search; they keep the order by their words");
                SearchRanking::lexical(Some(error.to_string()))
            }
        })
    }

    /// Returns the order of the texts as indexes, and the name of the model.
    async fn order(
        &self,
        tenant: &TenantId,
        config: &RerankConfig,
        query: &str,
        texts: &[String],
    ) -> Result<(Vec<usize>, String), RerankError> {
        let deadline = Instant::now() + config.timeout;
        let capacity = self.llm.capacity(&config.pool).saturating_sub(query.len());
        // The remaining hits keep their places after these.
        let (texts, others) = texts.split_at(fitting_texts(texts, capacity));
        if texts.len() < 2 {
            return Err(RerankError::InputLimit);
        }
        let slot = self.rerank_calls.acquire(1, Some(config.timeout)).await;
        let _slot = slot.map_err(|_| RerankError::Busy(config.timeout))?;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let task = Task::Rerank { query, texts, timeout };
        let result = self.complete_within_limit(tenant, &config.pool, task).await?;
        let cost = result.as_ref().map_or_else(|error| &error.cost, |response| &response.cost);
        self.record_usage(tenant, cost).await;
        let response = result?;
        let mut order = read_order(&response.text, texts.len()).ok_or(RerankError::NotAnOrder)?;
        order.extend(texts.len()..texts.len() + others.len());
        Ok((order, response.model))
    }
}

/// Returns the number of texts that one prompt may contain.
fn fitting_texts(texts: &[String], capacity: usize) -> usize {
    // A token has at least one byte, so short texts need not be counted.
    if texts.iter().map(|text| text.len() + LINE_TOKENS).sum::<usize>() <= capacity {
        return texts.len();
    }
    let mut tokens = 0;
    let fits = |text: &&String| {
        tokens += tokens::count(&encode_text(text)) + LINE_TOKENS;
        tokens <= capacity
    };
    texts.iter().take_while(fits).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_fit_the_capacity_of_the_pool() {
        let texts = vec!["word ".repeat(100); 50];
        assert_eq!(fitting_texts(&texts, 100_000), 50);
        let fitting = fitting_texts(&texts, 3000);
        assert!((20..30).contains(&fitting), "{fitting}");
        assert_eq!(fitting_texts(&texts, 50), 0);
    }
}
