//! Shares of everything that can run out.
//!
//! A [`Resource`] has a number of permits. A key never holds more than its share of them, so it can delay itself only; all requests without a
//! key are one key. A piece of [`Work`] acquires permits in the order of [`Level`]: it never waits for one while it holds a permit of the
//! same or of a later level. So the work that holds the last permits never waits for other work, and no load can stop the process.
//!
//! Work is [current] while it is served, so that no function needs it as a parameter. Code without it, such as the command line and
//! the loops in the background, is bounded by its own construction, and not here.

mod work;

pub use work::{Work, claim, current, internal, scope};

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio::time::Instant;

/// The key of a client, or all requests without a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClientId(pub u64);

/// The kinds of resources in the order in which work acquires them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    InFlight,
    /// Memory for the body of a request.
    Body,
    Export,
    /// A call of a model for a search.
    Rerank,
    /// Memory for the call of a model.
    ModelCall,
    Running,
    /// Memory for work and its response.
    Memory,
    /// A lock for copies of sessions.
    Copy,
    /// A lock for removals of many rows.
    Removal,
    /// A thread for a long computation.
    Thread,
    /// A connection of the database.
    Connection,
}

const LEVELS: usize = Level::Connection as usize + 1;

/// A resource did not become free within the permitted wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the capacity of a key was in use for longer than the permitted wait: {0:?}")]
pub struct Overloaded(pub Level);

/// A number of permits, divided between keys.
#[derive(Debug)]
pub struct Resource {
    level: Level,
    requests: Shares,
    /// For the work of precis itself, which requests can't starve; `None`: it shares the permits of requests.
    internal: Option<Shares>,
}

#[derive(Debug)]
struct Shares {
    total: Arc<Semaphore>,
    permits: usize,
    share: usize,
    /// One entry per key in use. Entries are never removed: their number is bounded by that of the keys.
    keys: Mutex<HashMap<ClientId, Arc<Semaphore>>>,
}

/// Acquired permits. Dropping them releases them.
#[derive(Debug)]
pub struct Held {
    /// Of the key, and of all keys; `None` for work that is not limited.
    permits: Option<[OwnedSemaphorePermit; 2]>,
    holds: Option<(Arc<Holds>, Level)>,
}

/// Number of the acquired permits of a piece of work by level, which checks the order of acquisition.
#[derive(Debug, Default)]
struct Holds([AtomicU32; LEVELS]);

impl Holds {
    fn of(&self, level: Level) -> u32 {
        self.0.get(level as usize).map_or(0, |holds| holds.load(Ordering::Relaxed))
    }

    fn add(self: &Arc<Self>, level: Level) -> (Arc<Self>, Level) {
        if let Some(holds) = self.0.get(level as usize) {
            holds.fetch_add(1, Ordering::Relaxed);
        }
        (Arc::clone(self), level)
    }

    /// Panics in a debug build if work would wait although it holds a permit of this or of a later level.
    fn check(&self, level: Level) {
        let later =
            self.0.iter().skip(level as usize).map(|holds| holds.load(Ordering::Relaxed)).sum::<u32>();
        debug_assert_eq!(
            later, 0,
            "work waits for {level:?} although it holds a resource of this or of a later level: {self:?}"
        );
    }
}

impl Shares {
    fn new(permits: usize, part: f64) -> Self {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a part of a number"
        )]
        let share = ((permits as f64 * part) as usize).clamp(1, permits.max(1));
        let total = Arc::new(Semaphore::new(permits.max(1)));
        Self { total, permits: permits.max(1), share, keys: Mutex::default() }
    }

    fn of_key(&self, client: ClientId) -> Arc<Semaphore> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(keys.entry(client).or_insert_with(|| Arc::new(Semaphore::new(self.share))))
    }

    /// Returns a number of permits that the share of a key permits.
    fn permitted(&self, permits: usize) -> u32 {
        u32::try_from(permits.min(self.share)).unwrap_or(u32::MAX)
    }

    fn try_acquire(
        &self,
        client: ClientId,
        permits: usize,
    ) -> Result<[OwnedSemaphorePermit; 2], TryAcquireError> {
        let permits = self.permitted(permits);
        let own = self.of_key(client).try_acquire_many_owned(permits)?;
        Ok([own, Arc::clone(&self.total).try_acquire_many_owned(permits)?])
    }

    /// Waits in the queue of the key first, so that the queue of all keys has at most the share of each.
    async fn acquire(&self, client: ClientId, permits: usize) -> Option<[OwnedSemaphorePermit; 2]> {
        let permits = self.permitted(permits);
        let own = self.of_key(client).acquire_many_owned(permits).await.ok()?;
        Some([own, Arc::clone(&self.total).acquire_many_owned(permits).await.ok()?])
    }
}

/// The origin of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Request,
    /// Work of precis itself on behalf of a key: consolidations, and writes that go on after their client has left.
    Internal,
}

impl Resource {
    /// Creates a resource of this many permits, of which a key can hold `share`, a number from 0 to 1, and at least one.
    #[must_use]
    pub fn new(level: Level, permits: usize, share: f64) -> Self {
        Self { level, requests: Shares::new(permits, share), internal: None }
    }

    /// Adds permits for the work of precis itself.
    #[must_use]
    pub fn with_internal(self, permits: usize, share: f64) -> Self {
        Self { internal: Some(Shares::new(permits, share)), ..self }
    }

    /// Returns the number of permits that requests hold.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.requests.permits.saturating_sub(self.requests.total.available_permits())
    }

    /// Returns the largest number of permits that a key can hold.
    #[must_use]
    pub fn share(&self) -> usize {
        self.requests.share
    }

    fn shares(&self, kind: Kind) -> &Shares {
        self.internal.as_ref().filter(|_| kind == Kind::Internal).unwrap_or(&self.requests)
    }
}

impl Held {
    /// Returns the number of permits.
    #[must_use]
    pub fn permits(&self) -> usize {
        self.permits.as_ref().map_or(0, |[own, _]| own.num_permits())
    }

    /// Releases permits, so that at most `permits` remain.
    pub fn shrink(&mut self, permits: usize) {
        let surplus = self.permits().saturating_sub(permits);
        for held in self.permits.iter_mut().flatten() {
            drop(held.split(surplus));
        }
    }

    /// Moves the permits into another value, for a task that goes on if its caller is cancelled. The work counts as their holder as long as
    /// `self` exists.
    #[must_use]
    pub fn detach(&mut self) -> Self {
        Self { permits: self.permits.take(), holds: None }
    }

    /// Takes back the permits of [`Self::detach`].
    pub fn attach(&mut self, mut detached: Self) {
        self.permits = detached.permits.take();
    }

    /// Adds the permits of `more`, which is of the same work and resource.
    fn merge(&mut self, mut more: Self) {
        if let Some((permits, more)) = self.permits.as_mut().zip(more.permits.take()) {
            for (held, more) in permits.iter_mut().zip(more) {
                held.merge(more);
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((holds, level)) = &self.holds
            && let Some(holds) = holds.0.get(*level as usize)
        {
            holds.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A lock of the process, for which each key waits once at most.
#[derive(Debug)]
pub struct Turns {
    keys: Resource,
    lock: AsyncMutex<()>,
}

/// The lock of [`Turns`] until it is dropped.
#[derive(Debug)]
pub struct Turn<'t> {
    _lock: MutexGuard<'t, ()>,
    _key: Option<Held>,
}

impl Turns {
    #[must_use]
    pub fn new(level: Level) -> Self {
        Self { keys: Resource::new(level, Semaphore::MAX_PERMITS, 0.0), lock: AsyncMutex::new(()) }
    }

    /// Waits for the lock. Its holders wait for later levels only, so the wait ends.
    pub async fn wait(&self) -> Turn<'_> {
        let key = self.keys.acquire(1, None).await.ok();
        Turn { _lock: self.lock.lock().await, _key: key }
    }
}

/// Settings of a [`Capacity`].
#[derive(Clone, Copy, Debug)]
pub struct CapacityLimits {
    /// The part of each resource that a key can hold.
    pub key_share: f64,
    pub requests_in_flight: usize,
    pub running_requests: usize,
    /// Memory of requests and responses, in bytes.
    pub bytes: usize,
    /// Longest wait of a request for anything but a thread.
    pub queue_timeout: Duration,
}

/// The resources of the process, except those of the database and of models.
#[derive(Debug)]
pub struct Capacity {
    pub in_flight: Resource,
    /// In KiB.
    pub bodies: Resource,
    pub running: Resource,
    /// In KiB.
    pub memory: Resource,
    pub threads: Resource,
    pub exports: Resource,
    queue_timeout: Duration,
    /// The time since which no request has started although some waited.
    stuck_since: Mutex<Option<Instant>>,
}

/// Exports that run at the same time. Each has a page of up to 3 MiB, as it is read, encoded and sent.
const EXPORTS: usize = 16;
/// Memory for the work of precis itself, in KiB: two consolidations load messages at the same time.
const INTERNAL_MEMORY: usize = 48 * 1024;
/// Threads for computations per core. So the share of a key is a thread per core.
const THREADS_PER_CORE: usize = 2;
/// Time after which a process is not ready if no request can start.
const STUCK_TIME: Duration = Duration::from_secs(10);

impl Capacity {
    #[must_use]
    pub fn new(limits: &CapacityLimits) -> Arc<Self> {
        let share = limits.key_share;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = kib(limits.bytes / 2);
        Arc::new(Self {
            in_flight: Resource::new(Level::InFlight, limits.requests_in_flight, share),
            bodies: Resource::new(Level::Body, memory, share),
            running: Resource::new(Level::Running, limits.running_requests, share),
            memory: Resource::new(Level::Memory, memory, share).with_internal(INTERNAL_MEMORY, share),
            threads: Resource::new(Level::Thread, cores * THREADS_PER_CORE, share)
                .with_internal(cores, share),
            exports: Resource::new(Level::Export, EXPORTS, share),
            queue_timeout: limits.queue_timeout,
            stuck_since: Mutex::default(),
        })
    }

    /// Records that a request has got a permit to run, or none within the permitted wait.
    fn record_start(&self, has_started: bool) {
        let mut since = self.stuck_since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = if has_started { None } else { since.or_else(|| Some(Instant::now())) };
    }

    /// Returns `true` if no request of any key could start for 10 seconds.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        let since = *self.stuck_since.lock().unwrap_or_else(PoisonError::into_inner);
        self.running.requests.total.available_permits() == 0
            && since.is_some_and(|since| since.elapsed() >= STUCK_TIME)
    }
}

/// Returns the permits for so many bytes of memory.
#[must_use]
pub fn kib(bytes: usize) -> usize {
    bytes.div_ceil(1024)
}

#[cfg(test)]
impl CapacityLimits {
    /// Returns limits of which a key has half: 2 requests that run, 4 in flight, and 100 KiB of memory.
    pub(crate) fn small() -> Self {
        let queue_timeout = Duration::from_secs(1);
        Self { key_share: 0.5, requests_in_flight: 4, running_requests: 2, bytes: 200 * 1024, queue_timeout }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use futures_util::future::join_all;

    const SECOND: Duration = Duration::from_secs(1);

    fn work(capacity: &Arc<Capacity>, client: u64) -> Work {
        Work::new(capacity, ClientId(client), Kind::Request)
    }

    #[tokio::test(start_paused = true)]
    async fn key_holds_its_share_only_and_its_queue_delays_no_other_key() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let resource = Resource::new(Level::Export, 10, 0.5);
        let (a, b) = (work(&capacity, 1), work(&capacity, 2));
        let held: Vec<Held> = (0..5).map(|_| a.try_acquire(&resource, 1).expect("free")).collect();
        assert!(a.try_acquire(&resource, 1).is_none(), "the share of the key is in use");
        // A thousand requests of the key wait.
        let waiting = join_all((0..1000).map(|_| {
            let (capacity, resource) = (&capacity, &resource);
            async move { work(capacity, 1).acquire(resource, 1, Some(SECOND)).await.is_ok() }
        }));
        let mut waiting = std::pin::pin!(waiting);
        assert!(waiting.as_mut().now_or_never().is_none());
        for client in 2..7 {
            work(&capacity, client)
                .acquire(&resource, 1, Some(SECOND))
                .now_or_never()
                .expect("at once")
                .expect("free");
        }
        let all = b.acquire(&resource, 99, Some(SECOND)).now_or_never().expect("at once").expect("free");
        assert_eq!((all.permits(), resource.in_use()), (5, 10), "a larger claim gets the share");
        drop(held);
        assert!(waiting.await.into_iter().all(|is_acquired| is_acquired), "each permit is released at once");
        drop(all);
        assert_eq!(resource.in_use(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_ends_after_the_permitted_time() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let (first, second) = (work(&capacity, 1), work(&capacity, 1));
        first.start().await.expect("free");
        let began = Instant::now();
        assert_eq!(second.start().await, Err(Overloaded(Level::Running)));
        assert_eq!(began.elapsed(), SECOND);
        work(&capacity, 2).start().await.expect("the other half is free");
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_needs_more_memory_releases_its_own_and_waits_for_all_of_it() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let (one, other) = (work(&capacity, 1), work(&capacity, 1));
        one.claim(30 * 1024).await.expect("free");
        other.claim(20 * 1024).await.expect("free");
        // Neither can get 20 KiB more of the 50 KiB of the key beside the other one.
        let claims = tokio::join!(one.claim(20 * 1024), other.claim(20 * 1024));
        assert_eq!(claims, (Ok(()), Err(Overloaded(Level::Memory))));
        assert_eq!((one.memory(), other.memory(), capacity.memory.in_use()), (50, 0, 50));
        let response = one.finish(7 * 1024).expect("memory of the response");
        assert_eq!((response.permits(), capacity.memory.in_use()), (7, 7));
        drop(response);
        assert_eq!(capacity.memory.in_use(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn permit_and_memory_are_free_while_work_waits_for_a_model() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let work = work(&capacity, 1);
        work.start().await.expect("free");
        work.claim(9 * 1024).await.expect("free");
        let in_use = || (capacity.running.in_use(), capacity.memory.in_use());
        assert_eq!(work.release_while(async { in_use() }).await, Ok((0, 0)));
        assert_eq!(in_use(), (1, 9));
        work.release();
        assert_eq!(
            work.release_while(async { in_use() }).await,
            Ok((0, 0)),
            "work that does not run stays so"
        );
        assert_eq!(in_use(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_do_not_starve_the_work_of_precis() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let requests: Vec<Work> = (0..4).map(|client| work(&capacity, client)).collect();
        let waiting = join_all(requests.iter().map(|request| request.claim(99 * 1024)));
        assert!(waiting.now_or_never().is_none());
        let internal = scope(requests[0].clone(), async { internal() }).await;
        internal.claim(30 * 1024 * 1024).now_or_never().expect("at once").expect("free");
        scope(internal, async { claim(1).now_or_never().expect("at once").expect("free") }).await;
        claim(usize::MAX).await.expect("work that is not limited");
    }

    #[tokio::test]
    #[should_panic(
        expected = "work waits for Running although it holds a resource of this or of a later level"
    )]
    async fn order_of_acquisition_is_checked() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let (work, connections) = (work(&capacity, 1), Resource::new(Level::Connection, 9, 0.5));
        let _connection = work.acquire(&connections, 1, None).await.expect("free");
        let _ = work.start().await;
    }

    #[tokio::test]
    async fn computation_of_work_with_a_thread_or_a_connection_needs_no_further_thread() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let (work, connections) = (work(&capacity, 1), Resource::new(Level::Connection, 9, 0.5));
        let thread = work.thread().await.expect("a thread");
        assert!(work.thread().await.is_none());
        drop(thread);
        let connection = work.acquire(&connections, 1, None).await.expect("free");
        assert!(work.thread().await.is_none());
        drop(connection);
        assert!(work.thread().await.is_some());
        assert_eq!(capacity.threads.in_use(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn process_is_stuck_if_no_request_can_start_for_ten_seconds() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let holders = [work(&capacity, 1), work(&capacity, 2)];
        for holder in &holders {
            holder.start().await.expect("free");
        }
        work(&capacity, 3).start().await.expect_err("all run");
        tokio::time::advance(9 * SECOND).await;
        assert!(!capacity.is_stuck());
        tokio::time::advance(SECOND).await;
        assert!(capacity.is_stuck());
        holders[0].release();
        assert!(!capacity.is_stuck(), "a request could start now");
        work(&capacity, 3).start().await.expect("free");
        assert!(capacity.stuck_since.lock().expect("no panic").is_none());
    }
}
