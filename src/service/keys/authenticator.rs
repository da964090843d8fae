//! Authentication of requests. The answers of the store about keys, also about revoked and unknown ones, are cached for a
//! short time, so that most requests need no query. A revocation takes effect everywhere within that time, with one
//! exception: `/metrics` accepts the last known state of a key while the store is unavailable.
//!
//! A database failure is reported as such and never as an invalid key.

use crate::domain::api_key::{ApiKey, KeyId, Scope};
use crate::domain::id::TenantId;
use crate::storage::StoredApiKey;
use crate::storage::{Store, StoreError};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// The largest number of cached keys.
const MAX_KNOWN: usize = 10_000;
/// The largest number of cached unknown ids. They have a cache of their own, so that guesses evict no valid key.
const MAX_UNKNOWN: usize = 1_000;
/// The largest number of simultaneous queries for keys that are not known to exist.
const MAX_LOOKUPS: usize = 2;

/// The authenticated origin of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    pub tenant: TenantId,
    pub scope: Scope,
    /// `None` if the service has no keys and is open.
    pub key: Option<KeyId>,
}

/// A failed authentication.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The request needs a key and has no valid one.
    #[error("no valid key")]
    Unauthorized,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The permitted age of cached keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staleness {
    /// The TTL of the cache.
    Fresh,
    /// Any age while the store is unavailable: for the metrics, which need no store and are needed most in an outage.
    AllowStale,
}

/// Checks the keys of requests.
#[derive(Clone, Debug)]
pub struct Authenticator {
    store: Arc<Store>,
    allow_unauthenticated: bool,
    ttl: Duration,
    cache: Arc<Mutex<KeyCache>>,
    /// Permits to look for keys that are not known to exist, so that guesses do not take all connections.
    lookups: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct KeyCache {
    known: HashMap<KeyId, (Instant, StoredApiKey)>,
    unknown: HashMap<KeyId, (Instant, ())>,
    any: Option<(Instant, bool)>,
}

impl Authenticator {
    /// Creates an authenticator. With `allow_unauthenticated`, requests need no key until the first key exists. A revoked
    /// key may still be accepted for `ttl`, the time for which answers of the store are cached.
    #[must_use]
    pub fn new(store: Arc<Store>, allow_unauthenticated: bool, ttl: Duration) -> Self {
        let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
        Self { store, allow_unauthenticated, ttl, cache: Arc::default(), lookups }
    }

    /// Authenticates a request with this key.
    ///
    /// The key is checked even if the service is open without keys. Its sender means its tenant; if the service runs on the
    /// wrong database, it would write the data of that tenant to another one.
    pub async fn with_key(&self, key: &ApiKey, staleness: Staleness) -> Result<Principal, AuthError> {
        let stored = self.key(key.id(), staleness).await?.ok_or(AuthError::Unauthorized)?;
        let same = stored.hash.matches(&key.hash());
        let record = stored.record;
        if !same || record.revoked_at.is_some() {
            return Err(AuthError::Unauthorized);
        }
        Ok(Principal { tenant: record.tenant, scope: record.scope, key: Some(record.id) })
    }

    /// Authenticates a request without a key.
    pub async fn without_key(&self, staleness: Staleness) -> Result<Principal, AuthError> {
        // A closed service does not query the store.
        if !self.allow_unauthenticated || self.any_key(staleness).await? {
            return Err(AuthError::Unauthorized);
        }
        Ok(Principal { tenant: TenantId::default(), scope: Scope::Admin, key: None })
    }

    async fn key(&self, id: &KeyId, staleness: Staleness) -> Result<Option<StoredApiKey>, StoreError> {
        let last = self.cached(id);
        let is_known = matches!(last, Some((_, Some(_))));
        let fetch = async {
            let _lookup = if is_known { None } else { self.lookups.acquire().await.ok() };
            self.store.api_key(id).await
        };
        let (fetched_at, stored) = self.cached_or_fetch(last, staleness, || fetch.boxed()).await?;
        let Some(fetched_at) = fetched_at else { return Ok(stored) };
        let mut cache = self.cache();
        if let Some(key) = &stored {
            cache.unknown.remove(id);
            insert(&mut cache.known, MAX_KNOWN, self.ttl, id, (fetched_at, key.clone()));
        } else {
            cache.known.remove(id);
            insert(&mut cache.unknown, MAX_UNKNOWN, self.ttl, id, (fetched_at, ()));
        }
        Ok(stored)
    }

    fn cached(&self, id: &KeyId) -> Option<(Instant, Option<StoredApiKey>)> {
        let cache = self.cache();
        let known = cache.known.get(id).map(|(fetched_at, key)| (*fetched_at, Some(key.clone())));
        known.or_else(|| cache.unknown.get(id).map(|(fetched_at, ())| (*fetched_at, None)))
    }

    async fn any_key(&self, staleness: Staleness) -> Result<bool, StoreError> {
        let last = self.cache().any;
        // This never becomes false again.
        if let Some((_, true)) = last {
            return Ok(true);
        }
        let (fetched_at, any) =
            self.cached_or_fetch(last, staleness, || self.store.any_api_key().boxed()).await?;
        if let Some(fetched_at) = fetched_at {
            self.cache().any = Some((fetched_at, any));
        }
        Ok(any)
    }

    /// Returns the cached value if it is fresh. Otherwise returns the answer of the store and its time. The time is that of
    /// the query, because a revocation during the query may be missing in the answer.
    async fn cached_or_fetch<'f, T>(
        &self,
        last: Option<(Instant, T)>,
        staleness: Staleness,
        fetch: impl FnOnce() -> BoxFuture<'f, Result<T, StoreError>>,
    ) -> Result<(Option<Instant>, T), StoreError> {
        let now = Instant::now();
        let last = match last {
            Some((fetched_at, value)) if now.duration_since(fetched_at) < self.ttl => {
                return Ok((None, value));
            }
            last => last,
        };
        match (fetch().await, last) {
            (Ok(value), _) => Ok((Some(now), value)),
            (Err(StoreError::Unavailable(_)), Some((_, value))) if staleness == Staleness::AllowStale => {
                Ok((None, value))
            }
            (Err(error), _) => Err(error),
        }
    }

    fn cache(&self) -> MutexGuard<'_, KeyCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds an entry. A full map drops expired entries first, and all entries if that does not suffice; the store has them
/// all. (A cache library does not replace this: its entries disappear when they expire, but [`Staleness::AllowStale`]
/// needs expired keys while the store is unavailable.)
fn insert<K: Clone + Eq + Hash, V>(
    map: &mut HashMap<K, (Instant, V)>,
    max: usize,
    ttl: Duration,
    id: &K,
    entry: (Instant, V),
) {
    if map.len() >= max && !map.contains_key(id) {
        map.retain(|_, (fetched_at, _)| entry.0.saturating_duration_since(*fetched_at) < ttl);
        if map.len() >= max {
            map.clear();
        }
    }
    map.insert(id.clone(), entry);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_is_bounded() {
        let (start, ttl) = (Instant::now(), Duration::from_secs(2));
        let (mut map, at) = (HashMap::new(), |second| start + Duration::from_secs(second));
        for id in 0..3 {
            insert(&mut map, 3, ttl, &id, (at(id), ()));
        }
        insert(&mut map, 3, ttl, &2, (at(3), ()));
        assert_eq!(map.len(), 3, "replacing an entry evicts none");
        insert(&mut map, 3, ttl, &3, (at(3), ()));
        let mut ids: Vec<_> = map.keys().copied().collect();
        ids.sort_unstable();
        assert_eq!(ids, [2, 3], "expired entries are dropped first");
        for id in 4..6 {
            insert(&mut map, 3, ttl, &id, (at(3), ()));
        }
        assert!(map.len() == 1 && map.contains_key(&5), "a full map is cleared");
    }
}
