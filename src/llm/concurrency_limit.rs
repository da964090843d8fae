//! How many calls of a model are made at once, and how many may wait for their turn, first come, first served.

use super::ModelError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// The places of one model.
#[derive(Debug)]
pub(super) struct ConcurrencyLimit {
    free: Semaphore,
    waiting: AtomicUsize,
    most_waiting: usize,
}

impl ConcurrencyLimit {
    pub(super) fn new(most: usize, most_waiting: usize) -> Self {
        // More than the semaphore can count is no limit.
        let free = Semaphore::new(most.min(Semaphore::MAX_PERMITS));
        Self { free, waiting: AtomicUsize::new(0), most_waiting }
    }

    /// A place, which is free again when this is dropped; or why there is none within `patience`.
    pub(super) async fn take(&self, patience: Duration) -> Result<SemaphorePermit<'_>, ModelError> {
        // Those who wait are served first: while there are any, nothing is free.
        if let Ok(slot) = self.free.try_acquire() {
            return Ok(slot);
        }
        let Some(_place) = Place::in_queue(self) else {
            return Err(ModelError::QueueFull(self.most_waiting));
        };
        match timeout(patience, self.free.acquire()).await {
            Ok(Ok(slot)) => Ok(slot),
            // It is never closed.
            Ok(Err(_)) | Err(_) => Err(ModelError::QueueTimeout(patience)),
        }
    }

    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// A place in the queue; given up when it is dropped, by whoever goes away too.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn in_queue(slots: &'a ConcurrencyLimit) -> Option<Self> {
        let taken = slots.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waiting| {
            (waiting < slots.most_waiting).then_some(waiting + 1)
        });
        taken.ok().map(|_| Self(&slots.waiting))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn so_many_at_once_so_many_in_the_queue() {
        let slots = ConcurrencyLimit::new(2, 1);
        let (first, _second) = (slots.take(PATIENCE).await, slots.take(PATIENCE).await);
        let mut third = Box::pin(slots.take(PATIENCE));
        assert!(third.as_mut().now_or_never().is_none());
        assert_eq!(slots.waiting(), 1);
        assert_eq!(slots.take(PATIENCE).await.err(), Some(ModelError::QueueFull(1)));
        drop(first);
        // It is the turn of the one that waits, not of who comes now.
        assert!(slots.take(PATIENCE).now_or_never().is_none_or(|taken| taken.is_err()));
        let third = third.await.expect("a place");
        assert_eq!(slots.waiting(), 0);
        drop(third);
        assert!(slots.take(PATIENCE).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn patience_ends_and_leaves_no_trace() {
        let slots = ConcurrencyLimit::new(1, 1);
        let taken = slots.take(PATIENCE).await.expect("a place");
        assert_eq!(slots.take(PATIENCE).await.err(), Some(ModelError::QueueTimeout(PATIENCE)));
        let mut gone = Box::pin(slots.take(PATIENCE));
        assert!(gone.as_mut().now_or_never().is_none());
        drop(gone);
        assert_eq!(slots.waiting(), 0);
        drop(taken);
        assert!(slots.take(PATIENCE).now_or_never().is_some());
    }
}
