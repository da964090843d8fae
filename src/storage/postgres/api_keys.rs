//! API keys, on Postgres.

use super::{Postgres, maybe_time, time};
use crate::domain::api_key::{KeyHash, KeyId, KeyRecord};
use crate::domain::id::{KeyName, TenantId};
use crate::storage::StoreError;
use crate::storage::pool::again;
use crate::storage::row::{key_columns, read_key};
use crate::storage::{NewApiKey, StoredApiKey};
use sqlx::Row as _;

const CREATE: &str = concat!(
    "INSERT INTO api_keys (key_id, tenant_id, name, scope, hash, created_at) VALUES ($1, $2, $3, $4, $5, now())
    ON CONFLICT (key_id) DO NOTHING RETURNING ",
    key_columns!()
);

const GET: &str = concat!("SELECT hash, ", key_columns!(), " FROM api_keys WHERE key_id = $1");

const LIST: &str = concat!(
    "SELECT ",
    key_columns!(),
    " FROM api_keys WHERE $1 IS NULL OR tenant_id = $1 ORDER BY created_at, key_id"
);

const REVOKE: &str = "UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = $1";

const ANY: &str = "SELECT EXISTS (SELECT 1 FROM api_keys) AS found";

impl Postgres {
    pub(in crate::storage) async fn create_api_key(
        &self,
        key: &NewApiKey,
    ) -> Result<Option<KeyRecord>, StoreError> {
        let query = sqlx::query(CREATE)
            .bind(key.id.as_str())
            .bind(key.tenant.as_str())
            .bind(key.name.as_ref().map(KeyName::as_str))
            .bind(key.scope.as_str())
            .bind(key.hash.as_bytes());
        let row = query.fetch_optional(&self.pool).await?;
        row.as_ref().map(|row| Ok(read_key!(row, time, maybe_time))).transpose()
    }

    pub(in crate::storage) async fn api_key(&self, id: &KeyId) -> Result<Option<StoredApiKey>, StoreError> {
        let get = async || Ok(sqlx::query(GET).bind(id.as_str()).fetch_optional(&self.pool).await?);
        let row = again(get).await?;
        let Some(row) = &row else {
            return Ok(None);
        };
        let hash = KeyHash::from_bytes(row.try_get("hash")?);
        let hash = hash.ok_or("its length").map_err(StoreError::corrupt("the hash of a key"))?;
        Ok(Some(StoredApiKey { record: read_key!(row, time, maybe_time), hash }))
    }

    pub(in crate::storage) async fn api_keys(
        &self,
        tenant: Option<&TenantId>,
    ) -> Result<Vec<KeyRecord>, StoreError> {
        let rows = sqlx::query(LIST).bind(tenant.map(TenantId::as_str)).fetch_all(&self.pool).await?;
        rows.iter().map(|row| Ok(read_key!(row, time, maybe_time))).collect()
    }

    pub(in crate::storage) async fn revoke_api_key(&self, id: &KeyId) -> Result<bool, StoreError> {
        let query = sqlx::query(REVOKE).bind(id.as_str());
        Ok(query.execute(&self.pool).await?.rows_affected() > 0)
    }

    pub(in crate::storage) async fn any_api_key(&self) -> Result<bool, StoreError> {
        again(async || Ok(sqlx::query(ANY).fetch_one(&self.pool).await?.try_get("found")?)).await
    }
}
