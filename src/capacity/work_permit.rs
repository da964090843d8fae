//! The permit of a request to run, and the memory that it uses.
//!
//! A request releases its permit while it waits for a model or for a thread: otherwise a few slow requests would block all
//! others.

use super::fair_queue::{Claim, ClientId, FairQueue, Held, Turn};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

tokio::task_local! {
    static CURRENT: WorkPermit;
}

/// The share of one request in the capacity of the process. It is released when its last clone is dropped. The default is no
/// share, for work that is not limited.
#[derive(Clone, Debug, Default)]
pub struct WorkPermit(Option<Arc<Share>>);

#[derive(Debug)]
struct Share {
    /// Requests that run, and memory.
    requests: Arc<FairQueue>,
    /// Threads for long computations.
    threads: Arc<FairQueue>,
    client: ClientId,
    /// The work is a request, which needs a slot to run.
    is_request: bool,
    /// Longest wait for memory; `None` is unlimited.
    patience: Option<Duration>,
    /// `None` while the permit is released.
    held: Mutex<Option<Held>>,
    has_thread: AtomicBool,
}

/// One of the threads for long computations, until it is dropped.
#[derive(Debug)]
pub struct Thread {
    share: Arc<Share>,
    /// `None` only while the computation gives way.
    held: Option<Held>,
}

/// The memory of a request did not become free within the permitted wait.
#[derive(Debug, thiserror::Error)]
#[error("the memory for {bytes} bytes did not become free in time")]
pub struct Overloaded {
    pub bytes: usize,
}

impl WorkPermit {
    /// Creates the permit of a request that was granted `held` of `requests`.
    #[must_use]
    pub fn new(
        requests: &Arc<FairQueue>,
        threads: &Arc<FairQueue>,
        client: ClientId,
        patience: Option<Duration>,
        held: Option<Held>,
    ) -> Self {
        let (requests, threads) = (Arc::clone(requests), Arc::clone(threads));
        Self(Some(Arc::new(Share {
            requests,
            threads,
            client,
            is_request: true,
            patience,
            held: Mutex::new(held),
            has_thread: AtomicBool::new(false),
        })))
    }

    /// Releases the permit and its memory, awaits `future`, and acquires both again, before requests that have not started
    /// yet.
    pub async fn release_while<T>(&self, future: impl Future<Output = T>) -> T {
        self.release_except(0, future).await
    }

    /// Does the same, but keeps `bytes` of the memory for data that remains loaded meanwhile.
    pub async fn release_except<T>(&self, bytes: usize, future: impl Future<Output = T>) -> T {
        let Some(share) = &self.0 else { return future.await };
        let Some(mut held) = share.take() else { return future.await };
        let memory = held.memory();
        held.keep_memory_only(bytes.min(memory));
        let result = future.await;
        drop(held);
        let claim = Claim { client: share.client, cost: 0, slot: true, memory, turn: Turn::Continued };
        share.put(share.requests.acquire(claim).await);
        result
    }

    /// Adds `bytes` to the memory of the request if they are free. Returns `false` otherwise.
    #[must_use]
    pub fn try_claim(&self, bytes: usize) -> bool {
        let Some(share) = &self.0 else { return true };
        share.lock().as_mut().is_some_and(|held| held.try_add_memory(bytes))
    }

    /// Adds `bytes` to the memory of the request, before it uses them. If they are not free, the request gives its permit to
    /// others and waits. It holds nothing meanwhile, so that requests that wait can't block each other.
    pub async fn claim(&self, bytes: usize) -> Result<(), Overloaded> {
        let Some(share) = &self.0 else { return Ok(()) };
        let mut before = 0;
        if let Some(mut held) = share.take() {
            if held.try_add_memory(bytes) {
                share.put(held);
                return Ok(());
            }
            before = held.memory();
        }
        let (client, slot, memory) = (share.client, share.is_request, before.saturating_add(bytes));
        let granted =
            share.requests.acquire(Claim { client, cost: bytes as u64, slot, memory, turn: Turn::New });
        let held = match share.patience {
            Some(patience) => {
                tokio::time::timeout(patience, granted).await.map_err(|_| Overloaded { bytes })?
            }
            None => granted.await,
        };
        share.put(held);
        Ok(())
    }

    /// Ends the work of the request: releases the permit, and returns the memory of its response.
    #[must_use]
    pub fn finish(&self, response_bytes: usize) -> Option<Held> {
        let mut held = self.0.as_ref()?.take()?;
        held.keep_memory_only(response_bytes);
        (response_bytes > 0).then_some(held)
    }

    /// Waits for one of the threads for work that keeps a core busy, until the returned value is dropped. The permit to run is
    /// released meanwhile, and the memory is not. Returns `None` for work that is not limited, and if the request has a thread
    /// already: requests that hold one and wait for another would block each other.
    pub async fn thread(&self, cost: u64) -> Option<Thread> {
        let share = self.0.as_ref()?;
        if share.has_thread.load(Ordering::Acquire) {
            return None;
        }
        let claim = Claim { client: share.client, cost, slot: true, memory: 0, turn: Turn::New };
        let mut held = share.threads.try_acquire(claim);
        if held.is_none() {
            let had_slot = share.lock().as_mut().is_some_and(Held::release_slot);
            held = Some(share.threads.acquire(claim).await);
            if had_slot {
                let slot = share.requests.acquire(Claim { turn: Turn::Continued, ..claim }).await;
                if let Some(held) = share.lock().as_mut() {
                    held.take_slot(slot);
                }
            }
        }
        share.has_thread.store(true, Ordering::Release);
        Some(Thread { share: Arc::clone(share), held })
    }

    /// Releases the permit and the memory.
    pub fn release(&self) {
        drop(self.0.as_ref().and_then(|share| share.take()));
    }
}

/// Returns the permit of the work that is running, or the default.
#[must_use]
pub fn current() -> WorkPermit {
    CURRENT.try_with(Clone::clone).unwrap_or_default()
}

/// Returns the client of the work that is running; without one, that of all requests without a key.
#[must_use]
pub fn current_client() -> ClientId {
    current().0.map_or_else(ClientId::default, |share| share.client)
}

/// Adds `bytes` to the memory of the work that is running: see [`WorkPermit::claim`].
pub async fn claim(bytes: usize) -> Result<(), Overloaded> {
    let current = CURRENT.try_with(Clone::clone);
    if let Ok(current) = current { current.claim(bytes).await } else { Ok(()) }
}

/// Runs work with this permit.
pub fn scope<F: Future>(permit: WorkPermit, work: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(permit, work)
}

/// Returns a permit for work in the background on behalf of the same client. It takes no place of a request, and waits for
/// memory as long as necessary.
#[must_use]
pub fn inherited() -> WorkPermit {
    let WorkPermit(share) = current();
    WorkPermit(share.map(|share| {
        let (requests, threads) = (Arc::clone(&share.requests), Arc::clone(&share.threads));
        let (client, held) = (share.client, Mutex::new(None));
        let has_thread = AtomicBool::new(false);
        Arc::new(Share { requests, threads, client, is_request: false, patience: None, held, has_thread })
    }))
}

impl Thread {
    /// Gives the thread to another client if one waits for it, and waits until it is the turn of this computation again.
    pub async fn give_way(&mut self) {
        let Share { threads, client, .. } = &*self.share;
        if threads.is_wanted_by_others(*client) {
            drop(self.held.take());
            let claim = Claim { client: *client, cost: 0, slot: true, memory: 0, turn: Turn::NextPart };
            self.held = Some(threads.acquire(claim).await);
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.share.has_thread.store(false, Ordering::Release);
    }
}

impl Share {
    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Held> {
        self.lock().take()
    }

    fn put(&self, held: Held) {
        *self.lock() = Some(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::Capacity;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    const CLIENT: ClientId = ClientId(1);

    fn permit(
        slots: usize,
        memory: usize,
        patience: Duration,
    ) -> (WorkPermit, Arc<FairQueue>, Arc<FairQueue>) {
        let requests =
            FairQueue::new(Capacity { slots, memory, memory_of_client: memory, ..Capacity::default() });
        let threads = FairQueue::new(Capacity { slots: 1, ..Capacity::default() });
        let claim = Claim { client: CLIENT, cost: 1, slot: true, memory: 0, turn: Turn::New };
        let held = requests.try_acquire(claim);
        (WorkPermit::new(&requests, &threads, CLIENT, Some(patience), held), requests, threads)
    }

    #[tokio::test]
    async fn permit_is_available_to_others_while_its_request_waits() {
        let (permit, requests, _) = permit(1, 100, Duration::from_secs(1));
        permit.claim(7).await.expect("free");
        assert_eq!(requests.in_use(), (1, 7));
        let in_use = permit.release_while(async { requests.in_use() }).await;
        assert_eq!((in_use, requests.in_use()), ((0, 0), (1, 7)));
        let clone = permit.clone();
        drop(permit);
        assert_eq!(requests.in_use(), (1, 7));
        let response = clone.finish(9).expect("held");
        assert_eq!((requests.in_use(), response.memory()), ((0, 9), 9));
        drop(response);
        assert_eq!(requests.in_use(), (0, 0));
        assert_eq!(WorkPermit::default().release_while(async { 7 }).await, 7);
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_waits_for_memory_holds_nothing() {
        let (one, requests, threads) = permit(2, 100, Duration::from_secs(1));
        let claim = Claim { client: CLIENT, cost: 1, slot: true, memory: 50, turn: Turn::New };
        let other = requests.try_acquire(claim);
        let other = WorkPermit::new(&requests, &threads, CLIENT, Some(Duration::from_secs(9)), other);
        one.claim(25).await.expect("free");
        let mut waiting = pin!(other.claim(20));
        assert!(matches!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
        assert_eq!(requests.in_use(), (1, 25));
        one.claim(30).await.expect_err("the other one waits for 70, which come first");
        assert_eq!(requests.in_use(), (1, 70));
        waiting.await.expect("granted");
    }

    #[tokio::test]
    async fn request_that_waits_for_a_thread_holds_no_permit() {
        let (permit, requests, threads) = permit(1, 100, Duration::from_secs(1));
        permit.claim(5).await.expect("free");
        let other = WorkPermit::new(&requests, &threads, CLIENT, None, None);
        let first = other.thread(1).await.expect("free");
        assert!(other.thread(1).await.is_none(), "the request has a thread already");
        let mut waiting = pin!(permit.thread(1));
        assert!(matches!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
        assert_eq!(requests.in_use(), (0, 5));
        drop(first);
        let second = waiting.await;
        assert_eq!((requests.in_use(), threads.in_use()), ((1, 5), (1, 0)));
        drop(second);
        assert_eq!(threads.in_use(), (0, 0));
        assert!(permit.thread(1).await.is_some(), "a request gets a thread several times");
    }

    #[tokio::test]
    async fn computation_gives_way_to_other_clients_only() {
        let (permit, requests, threads) = permit(3, 0, Duration::from_secs(1));
        let of_client = |client| WorkPermit::new(&requests, &threads, client, None, None);
        let mut thread = permit.thread(100).await.expect("free");
        let (own, other) = (of_client(CLIENT), of_client(ClientId(2)));
        let poll = |waiting: Pin<&mut dyn Future<Output = Option<Thread>>>| match waiting
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(thread) => thread,
            Poll::Pending => None,
        };
        let (mut of_own, mut of_other) = (pin!(own.thread(100)), pin!(other.thread(100)));
        assert!(poll(of_own.as_mut()).is_none());
        thread.give_way().await;
        assert!(poll(of_own.as_mut()).is_none() && poll(of_other.as_mut()).is_none());
        let mut interrupted = pin!(thread.give_way());
        let mut is_interrupted =
            || interrupted.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
        assert!(is_interrupted());
        drop(poll(of_own.as_mut()).expect("it has waited longest"));
        assert!(is_interrupted());
        drop(poll(of_other.as_mut()).expect("it has waited longer than the next part"));
        assert!(!is_interrupted());
    }

    #[tokio::test]
    async fn work_in_the_background_holds_no_permit() {
        let (permit, requests, _) = permit(1, 100, Duration::from_secs(1));
        let inherited = scope(permit.clone(), async { inherited() }).await;
        drop(permit);
        scope(inherited, async {
            claim(8).await.expect("free");
            assert_eq!(requests.in_use(), (0, 8));
            current().release();
            assert_eq!(requests.in_use(), (0, 0));
        })
        .await;
        claim(1000).await.expect("work without a permit is not limited");
    }
}
