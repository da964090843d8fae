//! Background worker that adds newly stored messages to the search index.

use super::MemoryService;
use crate::domain::error_chain::ErrorChain;
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
    wakeup: Arc<Notify>,
}

impl IndexWorker {
    /// Runs without end. Begins with the pending messages that an earlier process left.
    pub async fn run(self) {
        self.wakeup.notify_one();
        let mut succeeded = true;
        loop {
            self.wakeup.notified().await;
            tokio::time::sleep(DEBOUNCE).await;
            // Only the first of consecutive failures is logged as a warning.
            succeeded = index_pending(&self.store, succeeded).await;
            if !succeeded {
                tokio::time::sleep(RETRY_DELAY).await;
                self.wakeup.notify_one();
            }
        }
    }
}

impl MemoryService {
    /// Returns the worker that indexes the messages that this service stores.
    #[must_use]
    pub fn index_worker(&self) -> IndexWorker {
        IndexWorker { store: Arc::clone(&self.store), wakeup: Arc::clone(&self.index_wakeup) }
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
