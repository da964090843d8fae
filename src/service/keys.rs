//! Creation, listing and revocation of API keys. [`authenticator`] checks the keys of requests.

use crate::domain::api_key::{ApiKey, KeyId, KeyRecord, RANDOM_BYTES, Scope};
use crate::domain::id::{KeyName, TenantId};
use crate::storage::NewApiKey;
use crate::storage::{Store, StoreError};
use std::sync::Arc;

pub mod authenticator;

/// The API keys in a store.
#[derive(Clone, Debug)]
pub struct Keys {
    store: Arc<Store>,
}

/// A failed creation of a key.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The operating system provided no random numbers.
    #[error("cannot read random numbers from the operating system")]
    Random(#[source] getrandom::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Keys {
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    /// Creates a key. The returned key cannot be retrieved again, because the store has only its hash.
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
            // Ids are short, so an id may be taken: with a million keys, one attempt in a million fails.
            if self.store.create_api_key(&new).await?.is_some() {
                return Ok(key);
            }
        }
    }

    /// Lists the keys of one tenant or of all tenants, oldest first.
    pub async fn list(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError> {
        self.store.api_keys(tenant).await
    }

    /// Revokes a key. Returns `false` if there is no such key.
    pub async fn revoke(&self, id: &KeyId) -> Result<bool, StoreError> {
        self.store.revoke_api_key(id).await
    }

    /// Returns `true` if a key has ever existed.
    pub async fn any(&self) -> Result<bool, StoreError> {
        self.store.any_api_key().await
    }
}
