//! Runs requests of many clients together, as one statement or one transaction.
//!
//! One task per kind of request takes all queued requests, runs them as a batch, and then takes those that arrived
//! meanwhile. A request on an idle service therefore starts at once, in a batch of its own; under load, batches grow by
//! themselves. A second task for the same kind made both slower, because each got half of a batch.

use super::StoreError;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// A request with the channel for its result.
struct Queued<Q, A> {
    request: Q,
    result: oneshot::Sender<Result<A, StoreError>>,
}

/// A queue whose requests run in batches.
pub(super) struct Batcher<Q, A> {
    queue: mpsc::UnboundedSender<Queued<Q, A>>,
}

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
        let run_alone = Arc::new(run_alone);
        tokio::spawn(async move {
            let mut queued: Vec<Queued<Q, A>> = Vec::with_capacity(max);
            while requests.recv_many(&mut queued, max).await > 0 {
                let (batch, channels): (Vec<Q>, Vec<_>) =
                    queued.drain(..).map(|queued| (queued.request, queued.result)).unzip();
                // In a task of its own, so that a panic ends the batch and not the queue.
                let Ok(results) = tokio::spawn(run(batch)).await else { continue };
                for ((request, result), channel) in results.into_iter().zip(channels) {
                    // A client that has disconnected needs no result.
                    if let Some(result) = result {
                        let _ = channel.send(result);
                    } else {
                        let run_alone = Arc::clone(&run_alone);
                        tokio::spawn(async move { channel.send(run_alone(request).await) });
                    }
                }
            }
        });
        Self { queue }
    }

    /// Queues a request and waits for its result. The request runs even if the caller stops waiting.
    pub(super) async fn run(&self, request: Q) -> Result<A, StoreError> {
        let (result, receiver) = oneshot::channel();
        // Both fail only if the batch has panicked or the runtime shuts down.
        let _ = self.queue.send(Queued { request, result });
        receiver.await.unwrap_or(Err(StoreError::BatchFailed))
    }
}
