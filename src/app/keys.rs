//! `precis keys`: what it does and what it says.

use super::AppError;
use crate::config::Settings;
use crate::domain::api_key::{ApiKey, KeyId, KeyRecord, Scope};
use crate::domain::id::{KeyName, TenantId};
use crate::service::keys::{CreateError, Keys};
use crate::storage::{Store, StoreError};
use std::sync::Arc;
use time::OffsetDateTime;
use time::macros::format_description;

/// Why a command about keys did nothing.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The database can't be had.
    #[error(transparent)]
    App(#[from] AppError),
    /// It can't do its part.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No key came to be.
    #[error("no key was made")]
    Create(#[source] CreateError),
    /// What was given is neither an id nor a key. It is not repeated: it may be a key.
    #[error("that is no id of a key: it has 8 characters; `precis keys list` shows those there are")]
    NoId,
    /// Nothing to revoke.
    #[error("there is no key {0} in {1}; `precis keys list` shows those there are")]
    NoKey(KeyId, String),
}

/// The keys of the settings' database.
#[derive(Debug)]
pub struct Command {
    store: Arc<dyn Store>,
    keys: Keys,
    database: String,
}

/// A new key, and what its owner should know.
#[derive(Debug)]
pub struct Created {
    /// Shown once.
    pub key: ApiKey,
    /// Some lines.
    pub explanation: String,
}

impl Command {
    /// Opens the database, and brings its schema up to date if `migrate`.
    ///
    /// # Errors
    /// It can't be had.
    pub async fn open(settings: &Settings, migrate: bool) -> Result<Self, KeysError> {
        let store = super::store(settings, migrate).await?;
        let keys = Keys::new(Arc::clone(&store));
        Ok(Self { store, keys, database: settings.database.url.to_string() })
    }

    /// Lets the database go.
    pub async fn close(self) {
        self.store.close().await;
    }

    /// Makes a key.
    pub async fn create(
        &self,
        tenant: &TenantId,
        name: Option<&KeyName>,
        scope: Scope,
    ) -> Result<Created, KeysError> {
        let first = !self.keys.any().await?;
        let key = self.keys.create(tenant, name, scope).await.map_err(KeysError::Create)?;
        let (id, database) = (key.id(), &self.database);
        let mut explanation = format!(
            "Key {id} of tenant {tenant}, scope {scope}, in {database}. It is shown this once; only its hash is stored. \
             Send it as `Authorization: Bearer …`; `precis keys revoke {id}` ends it."
        );
        if first {
            explanation.push_str(
                "\nIt is the first one: within seconds every request to this database's services needs a key. What was \
                 stored without a key belongs to the tenant `default`.",
            );
        }
        Ok(Created { key, explanation })
    }

    /// The keys of a tenant, or of all, as a table.
    pub async fn list(&self, tenant: Option<&TenantId>) -> Result<String, KeysError> {
        let keys = self.keys.list(tenant).await?;
        Ok(table(&keys))
    }

    /// Revokes the key of this id. The whole key will do, too: that is what one has at hand when it leaked.
    pub async fn revoke(&self, id_or_key: &str) -> Result<String, KeysError> {
        let whole = || ApiKey::parse(id_or_key).map(|key| key.id().clone());
        let id = KeyId::parse(id_or_key).or_else(|_| whole()).map_err(|_| KeysError::NoId)?;
        if !self.keys.revoke(&id).await? {
            return Err(KeysError::NoKey(id, self.database.clone()));
        }
        Ok(format!("Key {id} is revoked: services refuse it within seconds."))
    }
}

const COLUMNS: [&str; 6] = ["ID", "TENANT", "NAME", "SCOPE", "CREATED", "REVOKED"];

fn table(keys: &[KeyRecord]) -> String {
    let rows = [COLUMNS.map(str::to_owned)].into_iter().chain(keys.iter().map(row));
    let rows: Vec<[String; COLUMNS.len()]> = rows.collect();
    let width =
        |column: usize| rows.iter().filter_map(move |row| row.get(column)).map(|cell| cell.chars().count());
    let widths: Vec<usize> =
        (0..COLUMNS.len()).map(|column| width(column).max().unwrap_or_default()).collect();
    let line = |row: &[String; COLUMNS.len()]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn row(key: &KeyRecord) -> [String; COLUMNS.len()] {
    let seconds = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
    let time =
        |time: OffsetDateTime| time.to_offset(time::UtcOffset::UTC).format(&seconds).unwrap_or_default();
    [
        key.id.to_string(),
        key.tenant.to_string(),
        key.name.as_ref().map_or("-".to_owned(), ToString::to_string),
        key.scope.to_string(),
        time(key.created_at),
        key.revoked_at.map_or("-".to_owned(), time),
    ]
}
