//! Runs requests of many clients together, as one statement or one transaction.
//!
//! One task per kind of request takes all queued requests, runs them as a batch, and then the requests that
//! arrived meanwhile. A request on an idle service therefore starts at once, in a batch of its own; under load, batches grow by
//! themselves. A second task for the same kind made both slower, because each got half of a batch.

use super::StoreError;
use crate::capacity;
use crate::domain::id::TenantId;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// A request with the channel for its result.
struct Queued<Q, A> {
    request: Q,
    /// Gets the result, or the request back, which must run alone then.
    result: oneshot::Sender<Result<Result<A, StoreError>, Q>>,
}

/// A queue whose requests run in batches.
pub(super) struct Batcher<Q, A> {
    queue: mpsc::UnboundedSender<Queued<Q, A>>,
    run_alone: RunAlone<Q, A>,
}

/// Returns the places of the requests of each tenant, by the tenant of each request.
pub(super) fn places_by_tenant<'t>(
    tenants: impl Iterator<Item = &'t TenantId>,
) -> BTreeMap<&'t TenantId, Vec<usize>> {
    let mut places: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (place, tenant) in tenants.enumerate() {
        places.entry(tenant).or_default().push(place);
    }
    places
}

type RunAlone<Q, A> = Arc<dyn Fn(Q) -> BoxFuture<'static, Result<A, StoreError>> + Send + Sync>;

impl<Q, A> fmt::Debug for Batcher<Q, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").finish_non_exhaustive()
    }
}

/// The requests of a batch with their results. A request without a result is run again by itself.
pub(super) type BatchResults<Q, A> = Vec<(Q, Option<Result<A, StoreError>>)>;

impl<Q, A> Batcher<Q, A>
where
    Q: Send + 'static,
    A: Send + 'static,
{
    /// Starts the task. `run` gets at most `max` requests; `run_alone` gets a request for which `run` had no result, so that
    /// a request that can't be part of a batch neither fails nor delays the others.
    pub(super) fn new<F, G>(
        max: usize,
        run: impl Fn(Vec<Q>) -> F + Send + Sync + 'static,
        run_alone: impl Fn(Q) -> G + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = BatchResults<Q, A>> + Send + 'static,
        G: Future<Output = Result<A, StoreError>> + Send + 'static,
    {
        let (queue, mut requests) = mpsc::unbounded_channel();
        let run_alone: RunAlone<Q, A> = Arc::new(move |request| Box::pin(run_alone(request)));
        tokio::spawn(async move {
            let mut queued: Vec<Queued<Q, A>> = Vec::with_capacity(max);
            while let Some(first) = requests.recv().await {
                // The runtime runs a woken task before the tasks that are ready already. Without this, most batches would
                // consist of one request, although more have arrived.
                if requests.is_empty() {
                    tokio::task::yield_now().await;
                }
                queued.push(first);
                while queued.len() < max
                    && let Ok(next) = requests.try_recv()
                {
                    queued.push(next);
                }
                let (batch, channels): (Vec<Q>, Vec<_>) =
                    queued.drain(..).map(|queued| (queued.request, queued.result)).unzip();
                // A panic ends the batch and not the queue.
                let Ok(results) = AssertUnwindSafe(run(batch)).catch_unwind().await else { continue };
                for ((request, result), channel) in results.into_iter().zip(channels) {
                    // A client that has disconnected needs no result.
                    let _ = channel.send(result.ok_or(request));
                }
            }
        });
        Self { queue, run_alone }
    }

    /// Queues a request and waits for its result. The request runs even if the caller stops waiting.
    pub(super) async fn run(&self, request: Q) -> Result<A, StoreError> {
        let (result, receiver) = oneshot::channel();
        // Both fail only if the batch has panicked or the runtime shuts down.
        let _ = self.queue.send(Queued { request, result });
        match receiver.await {
            Ok(Ok(result)) => result,
            Ok(Err(request)) => self.run_alone(request).await,
            Err(_) => Err(StoreError::BatchFailed),
        }
    }

    /// Runs a request by itself, even if the caller stops waiting.
    pub(super) async fn run_alone(&self, request: Q) -> Result<A, StoreError> {
        let result = tokio::spawn(capacity::scope(capacity::current(), (self.run_alone)(request))).await;
        result.unwrap_or(Err(StoreError::BatchFailed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use tokio::task::JoinSet;

    /// Doubles numbers in batches that take a second. 13 has no result in a batch, and 99 panics.
    fn doubler() -> (Arc<Batcher<u64, u64>>, Arc<AtomicUsize>) {
        let batches = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&batches);
        let run = move |numbers: Vec<u64>| {
            counter.fetch_add(1, Ordering::Relaxed);
            async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                assert!(!numbers.contains(&99));
                numbers.into_iter().map(|number| (number, (number != 13).then_some(Ok(number * 2)))).collect()
            }
        };
        (Arc::new(Batcher::new(10, run, |number| async move { Ok(number * 2) })), batches)
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_arrive_during_a_batch_share_the_next_one() {
        let (batcher, runs) = doubler();
        let mut requests = JoinSet::new();
        for number in 0..20 {
            let batcher = Arc::clone(&batcher);
            requests.spawn(async move {
                tokio::time::sleep(Duration::from_millis(number)).await;
                assert_eq!(batcher.run(number).await.expect("a result"), number * 2);
            });
        }
        requests.join_all().await;
        assert_eq!(runs.load(Ordering::Relaxed), 3, "the first request, ten, and nine");
    }

    #[tokio::test(start_paused = true)]
    async fn panic_ends_its_batch_only() {
        let (batcher, _) = doubler();
        assert!(matches!(batcher.run(99).await, Err(StoreError::BatchFailed)));
        assert_eq!(batcher.run(2).await.expect("a result"), 4);
    }
}
