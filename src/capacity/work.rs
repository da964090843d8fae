//! A piece of work, and the permits that it holds.

use super::{Capacity, ClientId, Held, Holds, Kind, Level, Overloaded, Resource, kib};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::timeout;

tokio::task_local! {
    static CURRENT: Work;
}

/// A request, or work of precis itself. What it holds is released when its last clone is dropped. The default is work that is not limited.
#[derive(Clone, Debug, Default)]
pub struct Work(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    capacity: Arc<Capacity>,
    client: ClientId,
    kind: Kind,
    held: Mutex<HeldByWork>,
    holds: Arc<Holds>,
}

#[derive(Debug, Default)]
struct HeldByWork {
    running: Option<Held>,
    memory: Option<Held>,
}

impl Work {
    /// Creates work that holds nothing.
    #[must_use]
    pub fn new(capacity: &Arc<Capacity>, client: ClientId, kind: Kind) -> Self {
        let (capacity, held, holds) = (Arc::clone(capacity), Mutex::default(), Arc::default());
        Self(Some(Arc::new(Inner { capacity, client, kind, held, holds })))
    }

    /// Acquires permits without waiting.
    #[must_use]
    pub fn try_acquire(&self, resource: &Resource, permits: usize) -> Option<Held> {
        let Some(inner) = &self.0 else { return Some(Held { permits: None, holds: None }) };
        let permits = resource.shares(inner.kind).try_acquire(inner.client, permits).ok()?;
        Some(Held { permits: Some(permits), holds: Some(inner.holds.add(resource.level)) })
    }

    /// Acquires permits: see [`Resource::acquire`].
    pub async fn acquire(
        &self,
        resource: &Resource,
        permits: usize,
        wait: Option<Duration>,
    ) -> Result<Held, Overloaded> {
        let Some(inner) = &self.0 else { return Ok(Held { permits: None, holds: None }) };
        inner.holds.check(resource.level);
        if let Some(held) = self.try_acquire(resource, permits) {
            return Ok(held);
        }
        let acquired = resource.shares(inner.kind).acquire(inner.client, permits);
        let acquired = match wait {
            Some(wait) => timeout(wait, acquired).await.ok().flatten(),
            None => acquired.await,
        };
        let permits = Some(acquired.ok_or(Overloaded(resource.level))?);
        Ok(Held { permits, holds: Some(inner.holds.add(resource.level)) })
    }

    /// Adds permits to `held` without waiting, so that it has `permits`. On error, it stays as it was.
    pub fn grow(
        &self,
        resource: &Resource,
        held: &mut Option<Held>,
        permits: usize,
    ) -> Result<(), Overloaded> {
        let missing = permits.saturating_sub(held.as_ref().map_or(0, Held::permits));
        if missing == 0 || self.0.is_none() {
            return Ok(());
        }
        let more = self.try_acquire(resource, missing).filter(|more| more.permits() == missing);
        let more = more.ok_or(Overloaded(resource.level))?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }

    /// Waits for the permit to run.
    pub async fn start(&self) -> Result<(), Overloaded> {
        let Some(inner) = &self.0 else { return Ok(()) };
        let running = self.acquire(&inner.capacity.running, 1, Some(inner.capacity.queue_timeout)).await;
        inner.capacity.record_start(running.is_ok());
        inner.lock().running = Some(running?);
        Ok(())
    }

    /// Adds memory, before the work uses it. If it is not free, the work releases the memory that it has, and waits for all of it.
    pub async fn claim(&self, bytes: usize) -> Result<(), Overloaded> {
        let Some(inner) = &self.0 else { return Ok(()) };
        let resource = &inner.capacity.memory;
        let mut memory = inner.lock().memory.take();
        let needed = memory.as_ref().map_or(0, Held::permits) + kib(bytes);
        if self.grow(resource, &mut memory, needed).is_err() {
            drop(memory);
            // Work of precis itself waits as long as necessary.
            let wait = (inner.kind == Kind::Request).then_some(inner.capacity.queue_timeout);
            memory = Some(self.acquire(resource, needed, wait).await?);
        }
        inner.lock().memory = memory;
        Ok(())
    }

    /// Releases the permit to run and the memory.
    pub fn release(&self) {
        drop(self.0.as_ref().map(|inner| inner.take()));
    }

    /// Releases the permit to run and the memory, awaits `future`, and acquires both again.
    pub async fn release_while<T>(&self, future: impl Future<Output = T>) -> Result<T, Overloaded> {
        let Some(inner) = &self.0 else { return Ok(future.await) };
        let HeldByWork { running, memory } = inner.take();
        let (was_running, bytes) = (running.is_some(), memory.map_or(0, |memory| memory.permits()) * 1024);
        drop(running);
        let result = future.await;
        if was_running {
            self.start().await?;
        }
        if bytes > 0 {
            self.claim(bytes).await?;
        }
        Ok(result)
    }

    /// Ends the work: releases the permit to run, and returns the memory of the response.
    #[must_use]
    pub fn finish(&self, response_bytes: usize) -> Option<Held> {
        let mut memory = self.0.as_ref()?.take().memory?;
        memory.shrink(kib(response_bytes));
        (response_bytes > 0).then_some(memory)
    }

    /// Waits for a thread for a long computation. Work that has a thread or a connection needs none: the number of these bounds its
    /// computations. The wait is not limited, because a request that runs would otherwise be rejected for the others of its key.
    pub async fn thread(&self) -> Option<Held> {
        let inner = self.0.as_ref()?;
        if [Level::Thread, Level::Connection].map(|level| inner.holds.of(level)) != [0, 0] {
            return None;
        }
        self.acquire(&inner.capacity.threads, 1, None).await.ok()
    }

    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.0.as_ref().and_then(|inner| inner.lock().memory.as_ref().map(Held::permits)).unwrap_or(0)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HeldByWork> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> HeldByWork {
        std::mem::take(&mut *self.lock())
    }
}

impl Resource {
    /// Acquires permits for the work that is running, at most the share of its key. Fails after `wait`; `None`: only if the work is dropped.
    pub async fn acquire(&self, permits: usize, wait: Option<Duration>) -> Result<Held, Overloaded> {
        current().acquire(self, permits, wait).await
    }
}

/// Returns the work that is running, or the default.
#[must_use]
pub fn current() -> Work {
    CURRENT.try_with(Clone::clone).unwrap_or_default()
}

/// Adds memory to the work that is running: see [`Work::claim`].
pub async fn claim(bytes: usize) -> Result<(), Overloaded> {
    current().claim(bytes).await
}

/// Runs a future as a part of this work.
pub fn scope<F: Future>(work: Work, future: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(work, future)
}

/// Returns work of precis itself on behalf of the key of the work that is running. It holds nothing.
#[must_use]
pub fn internal() -> Work {
    match current().0 {
        Some(inner) => Work::new(&inner.capacity, inner.client, Kind::Internal),
        None => Work::default(),
    }
}
