//! API keys for tests.
#![cfg(test)]

use super::backend::Backend;
use precis::domain::api_key::{ApiKey, KeyId, Scope};
use precis::domain::id::TenantId;
use precis::service::keys::create_key;

impl Backend {
    /// Creates an API key in the store. After the first key, the service rejects requests without a key.
    pub(crate) async fn key(&self, tenant: &str, scope: Scope) -> ApiKey {
        let store = self.store().await;
        let tenant = TenantId::new(tenant).expect("a tenant");
        let key = create_key(&store, &tenant, None, scope).await.expect("a key");
        store.close().await;
        key
    }

    pub(crate) async fn revoke(&self, id: &KeyId) {
        let store = self.store().await;
        assert!(store.revoke_api_key(id).await.expect("an answer"), "there is no key {id}");
        store.close().await;
    }
}
