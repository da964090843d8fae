//! Indexing what was stored, behind the back of whoever stored it.

use super::MemoryService;
use crate::domain::chain::Chain;
use crate::storage::{Store, StoreError};
use std::sync::Arc;
use std::time::Duration;

/// How long messages are gathered: many at a time cost the database much less than one by one, and so few wait that a
/// search which comes meanwhile soon has them indexed itself. A service that nobody writes to asks the database nothing.
const GATHERED: Duration = Duration::from_secs(1);
/// How long it takes before the next attempt after one that failed.
const AGAIN: Duration = Duration::from_secs(10);

impl MemoryService {
    /// Settles the index once, for what others left, and then whenever something has been stored; without end.
    pub async fn settle_index(self) {
        self.stored.notify_one();
        let mut settled = true;
        loop {
            self.stored.notified().await;
            tokio::time::sleep(GATHERED).await;
            // Of failures one after another, the first is told.
            settled = settle(&self.store, settled).await;
            if !settled {
                tokio::time::sleep(AGAIN).await;
                self.stored.notify_one();
            }
        }
    }
}

/// Settles the index; whether that went well. Nothing is lost or hidden where it did not: what waits is indexed by the next
/// search. With `tell`, the log has it, but for a database that is away, of which requests say enough.
pub async fn settle(store: &Arc<dyn Store>, tell: bool) -> bool {
    let settled = async {
        while store.settle_index().await? {}
        Ok(())
    };
    match settled.await {
        Ok(()) => true,
        Err(error) => {
            if tell && !matches!(error, StoreError::Unavailable(_)) {
                let error = Chain(&error);
                tracing::warn!(%error, "the index of search can't be settled: searches take longer, or fail as well");
            } else {
                tracing::debug!(error = %Chain(&error), "the index of search can't be settled");
            }
            false
        }
    }
}
