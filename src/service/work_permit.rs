//! The permit of a request to run, which it releases while it waits for a model: otherwise a few slow model calls would
//! block all other requests.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One of a limited number of permits. It is released when its last clone is dropped. The default is no permit, for callers
/// that are not limited.
#[derive(Clone, Debug, Default)]
pub struct WorkPermit(Option<Arc<SharedPermit>>);

#[derive(Debug)]
struct SharedPermit {
    semaphore: Arc<Semaphore>,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl WorkPermit {
    #[must_use]
    pub fn new(permit: OwnedSemaphorePermit) -> Self {
        let semaphore = Arc::clone(permit.semaphore());
        Self(Some(Arc::new(SharedPermit { semaphore, permit: Mutex::new(Some(permit)) })))
    }

    /// Releases the permit, awaits `future`, and acquires a permit again, before requests that have not started yet.
    pub async fn release_while<T>(&self, future: impl Future<Output = T>) -> T {
        let Some(shared) = &self.0 else {
            return future.await;
        };
        shared.replace(None);
        let result = future.await;
        // The semaphore is never closed. If it were, finishing started work would be better than dropping it.
        shared.replace(Arc::clone(&shared.semaphore).acquire_owned().await.ok());
        result
    }
}

impl SharedPermit {
    fn replace(&self, permit: Option<OwnedSemaphorePermit>) {
        *self.permit.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn permit_is_available_to_others_while_its_request_waits() {
        let semaphore = Arc::new(Semaphore::new(1));
        let permit = WorkPermit::new(Arc::clone(&semaphore).try_acquire_owned().expect("free"));
        assert_eq!(semaphore.available_permits(), 0);
        let available = permit.release_while(async { semaphore.available_permits() }).await;
        assert_eq!((available, semaphore.available_permits()), (1, 0));
        let clone = permit.clone();
        drop(permit);
        assert_eq!(semaphore.available_permits(), 0);
        drop(clone);
        assert_eq!(semaphore.available_permits(), 1);
        assert_eq!(WorkPermit::default().release_while(async { 7 }).await, 7);
    }
}
