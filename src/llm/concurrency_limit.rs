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
    /// One permit for each call that may wait in the queue.
    queue: Semaphore,
    max_queued: usize,
}

impl ConcurrencyLimit {
    pub(super) fn new(max_calls: usize, max_queued: usize) -> Self {
        let semaphore = |permits: usize| Semaphore::new(permits.min(Semaphore::MAX_PERMITS));
        Self { calls: semaphore(max_calls), queue: semaphore(max_queued), max_queued }
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn calls_beyond_the_limit_are_queued_and_beyond_the_queue_rejected() {
        let limit = ConcurrencyLimit::new(2, 1);
        let (first, _second) = (limit.acquire(TIMEOUT).await, limit.acquire(TIMEOUT).await);
        let mut third = Box::pin(limit.acquire(TIMEOUT));
        assert!(third.as_mut().now_or_never().is_none());
        assert_eq!(limit.queue.available_permits(), 0);
        assert_eq!(limit.acquire(TIMEOUT).await.err(), Some(ModelError::QueueFull(1)));
        drop(first);
        // The free slot belongs to the queued call, not to a new one.
        assert!(limit.acquire(TIMEOUT).now_or_never().is_none_or(|permit| permit.is_err()));
        let third = third.await.expect("a permit");
        assert_eq!(limit.queue.available_permits(), 1);
        drop(third);
        assert!(limit.acquire(TIMEOUT).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn expired_or_cancelled_wait_frees_its_place_in_the_queue() {
        let limit = ConcurrencyLimit::new(1, 1);
        let permit = limit.acquire(TIMEOUT).await.expect("a permit");
        assert_eq!(limit.acquire(TIMEOUT).await.err(), Some(ModelError::QueueTimeout(TIMEOUT)));
        let mut cancelled = Box::pin(limit.acquire(TIMEOUT));
        assert!(cancelled.as_mut().now_or_never().is_none());
        drop(cancelled);
        assert_eq!(limit.queue.available_permits(), 1);
        drop(permit);
        assert!(limit.acquire(TIMEOUT).now_or_never().is_some());
    }
}
