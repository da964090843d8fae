//! A request's turn to work, which it gives back while it waits for a model: otherwise a few slow models would keep
//! everyone else from working.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One of the turns that there are at a time; it is given back when the last clone goes. The default is no turn, for
/// those who need none.
#[derive(Clone, Debug, Default)]
pub struct Turn(Option<Arc<Held>>);

#[derive(Debug)]
struct Held {
    turns: Arc<Semaphore>,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Turn {
    /// A turn that lasts as long as the permit.
    #[must_use]
    pub fn new(permit: OwnedSemaphorePermit) -> Self {
        let turns = Arc::clone(permit.semaphore());
        Self(Some(Arc::new(Held { turns, permit: Mutex::new(Some(permit)) })))
    }

    /// Waits for something that is no work of ours, without the turn; afterwards takes it up again, before all who have
    /// not had one yet.
    pub async fn idle<T>(&self, wait: impl Future<Output = T>) -> T {
        let Some(held) = &self.0 else {
            return wait.await;
        };
        held.put(None);
        let result = wait.await;
        // The semaphore is never closed; and if it were, work that has begun is better done than dropped.
        held.put(Arc::clone(&held.turns).acquire_owned().await.ok());
        result
    }
}

impl Held {
    fn put(&self, permit: Option<OwnedSemaphorePermit>) {
        *self.permit.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_turn_is_free_while_its_request_waits() {
        let turns = Arc::new(Semaphore::new(1));
        let turn = Turn::new(Arc::clone(&turns).try_acquire_owned().expect("free"));
        assert_eq!(turns.available_permits(), 0);
        let seen = turn.idle(async { turns.available_permits() }).await;
        assert_eq!((seen, turns.available_permits()), (1, 0));
        let clone = turn.clone();
        drop(turn);
        assert_eq!(turns.available_permits(), 0);
        drop(clone);
        assert_eq!(turns.available_permits(), 1);
        assert_eq!(Turn::default().idle(async { 7 }).await, 7);
    }
}
