//! API keys. Only here is the tenant not an argument but a result.

use super::pool::retry_on_disconnect;
use super::rows::{self, api_key_columns};
use super::statement::{DbRow as _, Sql};
use super::store::decode;
use super::{Store, StoreError};
use crate::domain::api_key::{KeyHash, KeyId, KeyRecord, Scope};
use crate::domain::id::{KeyName, TenantId};

#[derive(Clone, Debug)]
pub struct NewApiKey {
    pub id: KeyId,
    pub hash: KeyHash,
    pub tenant: TenantId,
    pub name: Option<KeyName>,
    pub scope: Scope,
}

#[derive(Clone, Debug)]
pub struct StoredApiKey {
    pub record: KeyRecord,
    pub hash: KeyHash,
}

impl Store {
    /// Stores a key. Returns `None`, and stores nothing, if the id exists already.
    pub async fn create_api_key(&self, key: &NewApiKey) -> Result<Option<KeyRecord>, StoreError> {
        const INSERT_API_KEY: Sql = Sql {
            postgres: concat!(
                "INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at)
                VALUES ($1, $2, $3, $4, $5, now()) ON CONFLICT (key_id) DO NOTHING RETURNING ",
                api_key_columns!()
            ),
            sqlite: concat!(
                "INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at)
                VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (key_id) DO NOTHING RETURNING ",
                api_key_columns!()
            ),
        };
        let statement = self
            .global_statement(INSERT_API_KEY)
            .bind(key.id.as_str())
            .bind(key.tenant.as_str())
            .bind(key.name.as_ref().map(KeyName::as_str))
            .bind(key.scope.as_str())
            .bind(key.hash.as_bytes())
            .bind_now();
        decode(statement.write_returning().await?, rows::api_key)
    }

    /// Returns a key, revoked or not.
    pub async fn api_key(&self, id: &KeyId) -> Result<Option<StoredApiKey>, StoreError> {
        const SELECT_API_KEY: &str =
            concat!("SELECT hash, ", api_key_columns!(), " FROM api_keys WHERE key_id = $1");
        let read = async || self.global_statement(SELECT_API_KEY).bind(id.as_str()).read().await;
        decode(retry_on_disconnect(read).await?, |row| {
            let hash = KeyHash::from_bytes(row.field("hash")?).ok_or("wrong length");
            let hash = hash.map_err(StoreError::corrupt("the hash of an API key"))?;
            Ok(StoredApiKey { record: rows::api_key(row)?, hash })
        })
    }

    /// Returns the keys of one tenant or of all, oldest first, including revoked keys.
    pub async fn api_keys(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, StoreError> {
        macro_rules! select_api_keys {
            ($condition:literal) => {
                concat!(
                    "SELECT ",
                    api_key_columns!(),
                    " FROM api_keys ",
                    $condition,
                    " ORDER BY created_at, key_id"
                )
            };
        }
        const SELECT_API_KEYS: &str = select_api_keys!("");
        const SELECT_API_KEYS_OF_TENANT: &str = select_api_keys!("WHERE tenant_id = $1");
        let statement = match tenant {
            None => self.global_statement(SELECT_API_KEYS),
            Some(tenant) => self.global_statement(SELECT_API_KEYS_OF_TENANT).bind(tenant.as_str()),
        };
        statement.read_all().await?.iter().map(rows::api_key).collect()
    }

    /// Revokes a key permanently; a second call keeps the time of the first. Returns `false` if there is no such key.
    pub async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError> {
        const REVOKE_API_KEY: Sql = Sql {
            postgres: "UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = $1",
            sqlite: "UPDATE api_keys SET revoked_at = coalesce(revoked_at, $2) WHERE key_id = $1",
        };
        Ok(self.global_statement(REVOKE_API_KEY).bind(id.as_str()).bind_now().execute().await? > 0)
    }

    /// Returns `true` if a key was ever created, even if all keys are revoked.
    pub async fn any_api_key(&self) -> Result<bool, StoreError> {
        const ANY_API_KEY: &str = "SELECT 1 AS found FROM api_keys LIMIT 1";
        let row = retry_on_disconnect(async || self.global_statement(ANY_API_KEY).read().await).await?;
        Ok(row.is_some())
    }
}
