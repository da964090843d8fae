//! Creation of API keys. [`authenticator`] checks the keys of requests.

use crate::domain::api_key::{ApiKey, RANDOM_BYTES, Scope};
use crate::domain::id::{KeyName, TenantId};
use crate::storage::{NewApiKey, Store, StoreError};

pub mod authenticator;

/// A failed creation of a key.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("cannot read random numbers from the operating system")]
    Random(#[source] getrandom::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Creates a key. The returned key cannot be retrieved again, because the store has only its hash.
pub async fn create_key(
    store: &Store,
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
        if store.create_api_key(&new).await?.is_some() {
            return Ok(key);
        }
    }
}
