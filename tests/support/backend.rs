//! Databases for tests. Each test gets a fresh SQLite file or a fresh Postgres database. A test with one `test_case`
//! for [`Backend::sqlite`] and one for [`Backend::postgres`] runs on both.
#![cfg(test)]

use super::postgres::TestDatabase;
use precis::domain::search::analyzer::Analyzer;
use precis::storage::{self, Store, StoreOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// A new, migrated database that is deleted together with this value.
pub(crate) enum Backend {
    Sqlite(TempDir),
    Postgres(Box<TestDatabase>),
}

impl Backend {
    pub(crate) async fn sqlite() -> Self {
        // In memory if possible, because tests with many writes would wait for the disk.
        let parent = Some(Path::new("/dev/shm")).filter(|shm| shm.is_dir());
        let folder = parent.map_or_else(TempDir::new, TempDir::new_in).expect("a temporary folder");
        let backend = Self::Sqlite(folder);
        migrate(backend.store().await).await;
        backend
    }

    pub(crate) async fn postgres() -> Self {
        let migrate = async |url: String| migrate(connect(&url).await).await;
        Self::Postgres(Box::new(TestDatabase::create("precis", migrate).await))
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::Sqlite(folder) => format!("sqlite://{}", folder.path().join("precis.db").display()),
            Self::Postgres(database) => database.url(),
        }
    }

    pub(crate) async fn store(&self) -> Arc<Store> {
        connect(&self.url()).await
    }
}

async fn connect(url: &str) -> Arc<Store> {
    let options = StoreOptions {
        max_connections: 8,
        acquire_timeout: Duration::from_secs(20),
        statement_timeout: Duration::from_secs(30),
        search: Some(Analyzer::default()),
    };
    storage::connect(url, &options).await.expect("the store can be opened")
}

async fn migrate(store: Arc<Store>) {
    store.migrate().await.expect("the migration succeeds");
    store.close().await;
}
