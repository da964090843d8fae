//! Background worker that adds missing messages to the search index.

use super::MemoryService;
use super::metrics::ServiceMetrics;
use crate::domain::error_chain::ErrorChain;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::search_index::IndexState;
use crate::storage::{Store, StoreError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Delay between the first new message and the work for it. Many messages together cost the database much less than one by one.
const DEBOUNCE: Duration = Duration::from_millis(500);
const RETRY_DELAY: Duration = Duration::from_secs(10);
/// Interval after a check that failed.
const RETRY_INTERVAL: Duration = Duration::from_mins(1);
/// Interval between two checks for messages that other replicas have stored and not indexed, because they were killed.
const CHECK_INTERVAL: Duration = Duration::from_mins(10);

/// A worker that indexes messages.
#[derive(Debug)]
pub struct IndexWorker {
    store: Arc<Store>,
    wakeup: Arc<Notify>,
    metrics: ServiceMetrics,
}

impl MemoryService {
    /// Returns the worker that indexes the messages of this and other replicas.
    #[must_use]
    pub fn index_worker(&self) -> IndexWorker {
        let (store, wakeup) = (Arc::clone(&self.store), Arc::clone(&self.index_wakeup));
        IndexWorker { store, wakeup, metrics: self.metrics.clone() }
    }
}

impl IndexWorker {
    /// Runs without end.
    pub async fn run(self) {
        let (mut next_check, mut failed) = (Instant::now(), false);
        loop {
            let is_check_due = next_check <= Instant::now();
            let indexed = self.index(is_check_due).await;
            if is_check_due {
                // The check has noted all tenants with work, so that a failure of one does not hold up the others.
                let interval = if indexed.is_ok() { CHECK_INTERVAL } else { RETRY_INTERVAL };
                next_check = Instant::now() + interval;
            }
            if let Err(error) = indexed {
                // Only the first of consecutive failures is logged as a warning, and none of an unreachable database,
                // because failing requests report it.
                if failed || matches!(error, StoreError::Unavailable(_)) {
                    tracing::debug!(error = %ErrorChain(&error), "search indexing failed");
                } else {
                    tracing::warn!(error = %ErrorChain(&error), "search indexing failed; searches may miss messages");
                }
                failed = true;
                tokio::time::sleep(RETRY_DELAY).await;
                continue;
            }
            failed = false;
            _ = timeout_at(next_check, self.wakeup.notified()).await;
            tokio::time::sleep(DEBOUNCE).await;
        }
    }

    /// Indexes the missing messages. With `check`, looks for them in all tenants before and after.
    async fn index(&self, check: bool) -> Result<(), StoreError> {
        let state = if check { self.store.index_state().await? } else { IndexState::default() };
        let IndexState { messages, is_rebuilding, .. } = state;
        if check {
            self.record(&state);
        }
        let is_incomplete = messages > 0 || is_rebuilding;
        if is_incomplete {
            tracing::info!(
                messages,
                is_rebuilding,
                "indexing the messages that are missing from the search index"
            );
        }
        while self.store.index_batch().await?.is_some() {}
        if is_incomplete {
            self.record(&self.store.index_state().await?);
            tracing::info!("the search index is complete");
        }
        Ok(())
    }

    fn record(&self, state: &IndexState) {
        #[expect(clippy::cast_precision_loss, reason = "a metric may be rounded")]
        self.metrics.search_missing.set(state.messages as f64);
        self.metrics.search_rebuilding.set(f64::from(u8::from(state.is_rebuilding)));
    }
}

/// Indexes all missing messages of all tenants. If the index has another analyzer, indexes all messages again with this one.
/// `progress` receives the number of messages indexed so far. Returns the state of the index before, and that number.
pub async fn reindex(
    store: &Store,
    analyzer: Analyzer,
    progress: impl Fn(u64),
) -> Result<(IndexState, u64), StoreError> {
    let state = store.index_state().await?;
    store.record_analyzer(analyzer, true).await?;
    let mut indexed = 0;
    while let Some(batch) = store.index_batch().await? {
        indexed += u64::try_from(batch.messages).unwrap_or(0);
        progress(indexed);
    }
    Ok((state, indexed))
}
