//! Databases for tests. Each test gets a fresh SQLite file or a fresh Postgres database. A test with one `test_case`
//! for [`Backend::sqlite`] and one for [`Backend::postgres`] runs on both.
#![cfg(test)]

use super::postgres::TestDatabase;
use precis::domain::search::analyzer::Analyzer;
use precis::storage::{self, Store, StoreOptions};
use rustix::fs::statvfs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// Creates a folder in memory if there is enough, because tests with many writes would wait for the disk. `/dev/shm` of a container
/// often has only 64 MB.
pub(crate) fn temporary_folder() -> TempDir {
    const ENOUGH: u64 = 2 << 30;
    let shm = Path::new("/dev/shm");
    let has_enough = statvfs(shm).is_ok_and(|memory| memory.f_bavail * memory.f_frsize >= ENOUGH);
    if has_enough { TempDir::new_in(shm) } else { TempDir::new() }.expect("a temporary folder")
}

/// A new, migrated database that is deleted together with this value.
pub(crate) enum Backend {
    Sqlite(TempDir),
    Postgres(Box<TestDatabase>),
}

impl Backend {
    pub(crate) async fn sqlite() -> Self {
        let backend = Self::Sqlite(temporary_folder());
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
        key_share: 0.5,
    };
    storage::connect(url, &options).await.expect("the store can be opened")
}

async fn migrate(store: Arc<Store>) {
    store.migrate().await.expect("the migration succeeds");
    store.close().await;
}
