//! Background worker that adds newly stored messages to the search index.

use super::{Error, MemoryService, reindex};
use crate::domain::error_chain::ErrorChain;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::{Store, StoreError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Delay between the first new message and indexing. Indexing many messages together costs the database much less than
/// indexing them one by one, and few enough accumulate in a second that a search can index them itself. An idle service
/// sends no statements for the index.
const DEBOUNCE: Duration = Duration::from_secs(1);
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// A worker that indexes the messages of newly stored exchanges.
#[derive(Debug)]
pub struct IndexWorker {
    store: Arc<Store>,
    /// `None` if search is disabled.
    analyzer: Option<Analyzer>,
    wakeup: Arc<Notify>,
}

impl IndexWorker {
    /// Runs without end. Begins with the pending messages that an earlier process left, and indexes the messages that were
    /// stored while search was disabled.
    pub async fn run(self) {
        self.wakeup.notify_one();
        let mut succeeded = true;
        loop {
            self.wakeup.notified().await;
            tokio::time::sleep(DEBOUNCE).await;
            // Only the first of consecutive failures is logged as a warning.
            succeeded = index_pending(&self.store, succeeded).await && self.index_missing(succeeded).await;
            if !succeeded {
                tokio::time::sleep(RETRY_DELAY).await;
                self.wakeup.notify_one();
            }
        }
    }

    /// Indexes messages that no exchange has recorded as pending. Returns `false` on failure.
    async fn index_missing(&self, warn: bool) -> bool {
        let Some(analyzer) = self.analyzer else { return true };
        let indexed = async {
            if !reindex::state(&self.store, analyzer).await?.lacks_messages(analyzer) {
                return Ok(0);
            }
            tracing::info!("indexing the messages that are missing from the search index, in the background");
            reindex::reindex(&self.store, analyzer, |_| {}).await
        };
        match indexed.await {
            Ok(0) => true,
            Ok(messages) => {
                tracing::info!(messages, "the search index is complete");
                true
            }
            Err(error) => {
                if warn && !matches!(error, Error::Store(StoreError::Unavailable(_))) {
                    tracing::warn!(error = %ErrorChain(&error), "search indexing failed; searches miss messages");
                } else {
                    tracing::debug!(error = %ErrorChain(&error), "search indexing failed");
                }
                false
            }
        }
    }
}

impl MemoryService {
    /// Returns the worker that indexes the messages that this service stores.
    #[must_use]
    pub fn index_worker(&self) -> IndexWorker {
        let (store, wakeup) = (Arc::clone(&self.store), Arc::clone(&self.index_wakeup));
        IndexWorker { store, analyzer: self.config.search, wakeup }
    }
}

/// Indexes all pending messages. Returns `false` on failure; pending messages are then indexed by the next search.
///
/// With `warn`, a failure is logged as a warning. An unreachable database is not, because failing requests report it.
pub async fn index_pending(store: &Arc<Store>, warn: bool) -> bool {
    let result = async {
        while store.index_batch().await? {}
        Ok(())
    };
    match result.await {
        Ok(()) => true,
        Err(error) => {
            if warn && !matches!(error, StoreError::Unavailable(_)) {
                tracing::warn!(error = %ErrorChain(&error), "search indexing failed; searches may be slow or fail");
            } else {
                tracing::debug!(error = %ErrorChain(&error), "search indexing failed");
            }
            false
        }
    }
}
