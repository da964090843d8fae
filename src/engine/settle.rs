//! Keeping the index of search quick to write and to read: what was stored is put into it behind the back of whoever stored it.

use super::MemoryService;
use crate::domain::chain::Chain;
use std::time::Duration;

/// How long messages are gathered: many at a time cost the database much less than one by one, and so few wait beside
/// the index that no search takes notice. A service that nobody writes to asks the database nothing.
const GATHERED: Duration = Duration::from_secs(1);

impl MemoryService {
    /// Settles the index whenever something has been stored; without end.
    pub async fn settle_index(&self) {
        loop {
            self.stored.notified().await;
            tokio::time::sleep(GATHERED).await;
            // Nothing is lost or hidden: what waits is found, and settled the next time.
            if let Err(error) = self.store.settle_index().await {
                tracing::debug!(error = %Chain(&error), "the index of search could not be settled");
            }
        }
    }
}
