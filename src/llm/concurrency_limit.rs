//! Limits the number of simultaneous calls of one model and the number of queued calls. The queue is first in, first
//! out.

use super::ModelError;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// The concurrency limit of one model.
#[derive(Debug)]
pub(super) struct ConcurrencyLimit {
    calls: Semaphore,
    max_calls: usize,
    /// One permit for each call that may wait in the queue.
    queue: Semaphore,
    max_queued: usize,
}

impl ConcurrencyLimit {
    pub(super) fn new(max_calls: usize, max_queued: usize) -> Self {
        let semaphore = |permits: usize| Semaphore::new(permits.min(Semaphore::MAX_PERMITS));
        Self { calls: semaphore(max_calls), max_calls, queue: semaphore(max_queued), max_queued }
    }

    /// Returns the number of running calls and the number of queued calls.
    pub(super) fn in_use(&self) -> (usize, usize) {
        let used = |semaphore: &Semaphore, max: usize| {
            max.min(Semaphore::MAX_PERMITS).saturating_sub(semaphore.available_permits())
        };
        (used(&self.calls, self.max_calls), used(&self.queue, self.max_queued))
    }

    /// Returns a permit for one call; the call slot is free again when the permit is dropped. Waits in the queue for at
    /// most `queue_timeout`.
    pub(super) async fn acquire(&self, queue_timeout: Duration) -> Result<SemaphorePermit<'_>, ModelError> {
        // Fails while other calls are queued, because the semaphore is fair.
        if let Ok(permit) = self.calls.try_acquire() {
            return Ok(permit);
        }
        let Ok(_place_in_queue) = self.queue.try_acquire() else {
            return Err(ModelError::QueueFull(self.max_queued));
        };
        match timeout(queue_timeout, self.calls.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            // The semaphore is never closed, so this is always the timeout.
            Ok(Err(_)) | Err(_) => Err(ModelError::QueueTimeout(queue_timeout)),
        }
    }
}
