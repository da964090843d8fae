//! API keys: the one place where a tenant is not given but found out.

use super::StoreError;
use crate::domain::api_key::{KeyHash, KeyId, KeyRecord, Scope};
use crate::domain::id::{KeyName, TenantId};
use async_trait::async_trait;

/// A key to be kept.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// Its id.
    pub id: KeyId,
    /// What will be compared.
    pub hash: KeyHash,
    /// Whose it is.
    pub tenant: TenantId,
    /// What its owner calls it.
    pub name: Option<KeyName>,
    /// What it may do.
    pub scope: Scope,
}

/// A key as it is kept.
#[derive(Clone, Debug)]
pub struct StoredKey {
    /// What is known of it.
    pub record: KeyRecord,
    /// What is compared.
    pub hash: KeyHash,
}

/// The keys of all tenants.
#[async_trait]
pub trait ApiKeys {
    /// Keeps a key. `None`: the id is another key's, and nothing was written.
    async fn create_api_key(&self, key: &NewKey) -> Result<Option<KeyRecord>, StoreError>;

    /// The key of this id, revoked or not.
    async fn api_key(&self, id: &KeyId) -> Result<Option<StoredKey>, StoreError>;

    /// The keys of a tenant, or of all, oldest first; revoked ones too.
    async fn api_keys(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError>;

    /// Revokes a key, for good; the time of the first revocation stays. `false`: there is no such key.
    async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError>;

    /// Whether there was ever a key.
    async fn any_api_key(&self) -> Result<bool, StoreError>;
}
