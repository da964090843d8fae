//! API keys: making, listing and revoking them. Who a request is from: [`authenticator`].

use crate::domain::api_key::{ApiKey, KeyId, KeyRecord, RANDOM_BYTES, Scope};
use crate::domain::id::{KeyName, TenantId};
use crate::storage::NewApiKey;
use crate::storage::{Store, StoreError};
use std::sync::Arc;

pub mod authenticator;

/// The keys of a store.
#[derive(Clone, Debug)]
pub struct Keys {
    store: Arc<dyn Store>,
}

/// Why there is no new key.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    Random(#[source] getrandom::Error),
    /// The store could not do its part.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Keys {
    /// Those of this store.
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Makes a key. What is returned is all there will ever be of it: the store keeps its hash.
    pub async fn create(
        &self,
        tenant: &TenantId,
        name: Option<&KeyName>,
        scope: Scope,
    ) -> Result<ApiKey, CreateError> {
        loop {
            let mut random = [0; RANDOM_BYTES];
            getrandom::fill(&mut random).map_err(CreateError::Random)?;
            let key = ApiKey::new(&random);
            let (id, hash) = (key.id().clone(), key.hash());
            let new = NewApiKey { id, hash, tenant: tenant.clone(), name: name.cloned(), scope };
            // Ids are short, so one may be taken: with a million keys, one in a million is.
            if self.store.create_api_key(&new).await?.is_some() {
                return Ok(key);
            }
        }
    }

    /// The keys of a tenant, or of all, oldest first.
    pub async fn list(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError> {
        self.store.api_keys(tenant).await
    }

    /// Revokes a key. `false`: there is no such key.
    pub async fn revoke(&self, id: &KeyId) -> Result<bool, StoreError> {
        self.store.revoke_api_key(id).await
    }

    /// Whether there was ever a key.
    pub async fn any(&self) -> Result<bool, StoreError> {
        self.store.any_api_key().await
    }
}
