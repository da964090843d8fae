//! Who a request is from. Answers of the store are remembered for a moment, so that a request costs no look-up of its
//! own, and a revocation is seen everywhere within that moment.
//!
//! What the store can't be asked is never guessed: a database that is away is another error than a key that is none.

use crate::domain::api_key::{ApiKey, KeyId, Scope};
use crate::domain::id::TenantId;
use crate::storage::StoredApiKey;
use crate::storage::{Store, StoreError};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Keys remembered, at most.
const MAX_KNOWN: usize = 10_000;
/// Ids remembered of which there is no key, at most. They are apart, so that guesses drive no real key out.
const MAX_UNKNOWN: usize = 1_000;

/// Who a request is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Whom it acts for.
    pub tenant: TenantId,
    /// What it may do.
    pub scope: Scope,
    /// The key; `None`: the service has none, and is open.
    pub key: Option<KeyId>,
}

/// Why a request is not let in.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// It needs a key, and has none that counts.
    #[error("no valid key")]
    Unauthorized,
    /// The store can't say.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How long what the store said is taken for true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staleness {
    /// For the moment that is set.
    Fresh,
    /// While the store is away, for longer: for what needs no store and is needed then most, the metrics.
    AllowStale,
}

/// Knows callers by their keys.
#[derive(Clone, Debug)]
pub struct Authenticator {
    store: Arc<dyn Store>,
    allow_unauthenticated: bool,
    ttl: Duration,
    cache: Arc<Mutex<KeyCache>>,
}

#[derive(Debug, Default)]
struct KeyCache {
    known: HashMap<KeyId, (Instant, StoredApiKey)>,
    unknown: HashMap<KeyId, (Instant, ())>,
    any: Option<(Instant, bool)>,
}

impl Authenticator {
    /// Over this store. `allow_unauthenticated`: whoever comes is let in while there was never a key. `ttl`: for how long
    /// the store's answers are remembered, which is how long a revoked key may still pass.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, allow_unauthenticated: bool, ttl: Duration) -> Self {
        Self { store, allow_unauthenticated, ttl, cache: Arc::default() }
    }

    /// The caller who sent this key.
    ///
    /// A key is looked at although the service may be open: who sends one means its tenant, and would write to another
    /// where the service runs over the wrong database.
    pub async fn with_key(&self, key: &ApiKey, staleness: Staleness) -> Result<Principal, AuthError> {
        let stored = self.stored(key.id(), staleness).await?.ok_or(AuthError::Unauthorized)?;
        let same = stored.hash.matches(&key.hash());
        let record = stored.record;
        if !same || record.revoked_at.is_some() {
            return Err(AuthError::Unauthorized);
        }
        Ok(Principal { tenant: record.tenant, scope: record.scope, key: Some(record.id) })
    }

    /// The caller who sent none.
    pub async fn without_key(&self, staleness: Staleness) -> Result<Principal, AuthError> {
        // Asked for nothing where the answer is no anyway.
        if !self.allow_unauthenticated || self.any(staleness).await? {
            return Err(AuthError::Unauthorized);
        }
        Ok(Principal { tenant: TenantId::default(), scope: Scope::Admin, key: None })
    }

    async fn stored(&self, id: &KeyId, staleness: Staleness) -> Result<Option<StoredApiKey>, StoreError> {
        let last = self.last(id);
        let answer = self.answer(last, staleness, self.store.api_key(id)).await?;
        let Answer::New(asked, stored) = answer else {
            return Ok(answer.value());
        };
        let mut cache = self.cache();
        if let Some(key) = &stored {
            cache.unknown.remove(id);
            insert(&mut cache.known, MAX_KNOWN, self.ttl, id, (asked, key.clone()));
        } else {
            cache.known.remove(id);
            insert(&mut cache.unknown, MAX_UNKNOWN, self.ttl, id, (asked, ()));
        }
        Ok(stored)
    }

    fn last(&self, id: &KeyId) -> Option<(Instant, Option<StoredApiKey>)> {
        let cache = self.cache();
        let known = cache.known.get(id).map(|(asked, key)| (*asked, Some(key.clone())));
        known.or_else(|| cache.unknown.get(id).map(|(asked, ())| (*asked, None)))
    }

    async fn any(&self, staleness: Staleness) -> Result<bool, StoreError> {
        let last = self.cache().any;
        // Once there was a key, there was one for good.
        if let Some((_, true)) = last {
            return Ok(true);
        }
        let answer = self.answer(last, staleness, self.store.any_api_key()).await?;
        if let Answer::New(asked, any) = answer {
            self.cache().any = Some((asked, any));
        }
        Ok(answer.value())
    }

    /// What is remembered if it is young enough, else what the store says. Its time is that of the question: what was
    /// revoked meanwhile may be missing in the answer.
    async fn answer<T>(
        &self,
        last: Option<(Instant, T)>,
        staleness: Staleness,
        ask: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<Answer<T>, StoreError> {
        let now = Instant::now();
        let last = match last {
            Some((asked, value)) if now.duration_since(asked) < self.ttl => return Ok(Answer::Old(value)),
            last => last,
        };
        match (ask.await, last) {
            (Ok(value), _) => Ok(Answer::New(now, value)),
            (Err(StoreError::Unavailable(_)), Some((_, value))) if staleness == Staleness::AllowStale => {
                Ok(Answer::Old(value))
            }
            (Err(error), _) => Err(error),
        }
    }

    fn cache(&self) -> MutexGuard<'_, KeyCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known, and since when.
enum Answer<T> {
    Old(T),
    New(Instant, T),
}

impl<T> Answer<T> {
    fn value(self) -> T {
        match self {
            Self::Old(value) | Self::New(_, value) => value,
        }
    }
}

/// Keeps one more. Where there is no room, what is too old goes, and everything if that is not enough: it is all in the
/// store.
fn insert<K: Clone + Eq + Hash, V>(
    map: &mut HashMap<K, (Instant, V)>,
    most: usize,
    ttl: Duration,
    id: &K,
    entry: (Instant, V),
) {
    if map.len() >= most && !map.contains_key(id) {
        map.retain(|_, (asked, _)| entry.0.saturating_duration_since(*asked) < ttl);
        if map.len() >= most {
            map.clear();
        }
    }
    map.insert(id.clone(), entry);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded() {
        let (start, ttl) = (Instant::now(), Duration::from_secs(2));
        let (mut map, at) = (HashMap::new(), |second| start + Duration::from_secs(second));
        for id in 0..3 {
            insert(&mut map, 3, ttl, &id, (at(id), ()));
        }
        insert(&mut map, 3, ttl, &2, (at(3), ()));
        assert_eq!(map.len(), 3, "a known one takes no room");
        insert(&mut map, 3, ttl, &3, (at(3), ()));
        let mut ids: Vec<_> = map.keys().copied().collect();
        ids.sort_unstable();
        assert_eq!(ids, [2, 3], "those too old went");
        for id in 4..6 {
            insert(&mut map, 3, ttl, &id, (at(3), ()));
        }
        assert!(map.len() == 1 && map.contains_key(&5), "all went");
    }
}
