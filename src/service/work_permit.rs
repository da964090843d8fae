//! A request's permit to work, which it gives back while it waits for a model: otherwise a few slow models would keep
//! everyone else from working.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One of the semaphore that there are at a time; it is given back when the last clone goes. The default is no permit, for
/// those who need none.
#[derive(Clone, Debug, Default)]
pub struct WorkPermit(Option<Arc<SharedPermit>>);

#[derive(Debug)]
struct SharedPermit {
    semaphore: Arc<Semaphore>,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl WorkPermit {
    /// A permit that lasts as long as the permit.
    #[must_use]
    pub fn new(permit: OwnedSemaphorePermit) -> Self {
        let semaphore = Arc::clone(permit.semaphore());
        Self(Some(Arc::new(SharedPermit { semaphore, permit: Mutex::new(Some(permit)) })))
    }

    /// Waits for something that is no work of ours, without the permit; afterwards takes it up again, before all who have
    /// not had one yet.
    pub async fn release_while<T>(&self, wait: impl Future<Output = T>) -> T {
        let Some(held) = &self.0 else {
            return wait.await;
        };
        held.put(None);
        let result = wait.await;
        // The semaphore is never closed; and if it were, work that has begun is better done than dropped.
        held.put(Arc::clone(&held.semaphore).acquire_owned().await.ok());
        result
    }
}

impl SharedPermit {
    fn put(&self, permit: Option<OwnedSemaphorePermit>) {
        *self.permit.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_turn_is_free_while_its_request_waits() {
        let semaphore = Arc::new(Semaphore::new(1));
        let permit = WorkPermit::new(Arc::clone(&semaphore).try_acquire_owned().expect("free"));
        assert_eq!(semaphore.available_permits(), 0);
        let seen = permit.release_while(async { semaphore.available_permits() }).await;
        assert_eq!((seen, semaphore.available_permits()), (1, 0));
        let clone = permit.clone();
        drop(permit);
        assert_eq!(semaphore.available_permits(), 0);
        drop(clone);
        assert_eq!(semaphore.available_permits(), 1);
        assert_eq!(WorkPermit::default().release_while(async { 7 }).await, 7);
    }
}
