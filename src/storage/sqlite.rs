//! The driver of SQLite: one process and one file.
//!
//! One connection writes, and several read. SQLite permits only one writer anyway; queueing for the single connection of a pool is
//! fair and never fails with "database is locked". Write transactions start with `BEGIN IMMEDIATE`.

use super::migrations::{self, SELECT_SCHEMA_VERSION, first_tables};
use super::{ConnectionCounts, DatabaseFacts, StoreError, StoreOptions};
use crate::capacity::{Held, Level, Resource, Turns};
use disk_reserve::DiskReserve;
use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
};
use sqlx::{ConnectOptions as _, Connection as _, Row as _, Transaction};
use std::fs::{self, OpenOptions};
use std::num::NonZero;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::str::FromStr as _;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

mod disk_reserve;
mod traces;

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, SqliteArguments>;

/// The page cache of a connection that reads, in KiB (SQLite counts them as negative). The system caches the file, too.
const READER_CACHE: &str = "-1024";

/// The settings of the connection that writes.
const PRAGMAS: [(&str, &str); 4] = [
    ("synchronous", "full"),
    ("foreign_keys", "on"),
    ("temp_store", "memory"),
    // Overwrites deleted content, so that erased data does not stay in the file.
    ("secure_delete", "on"),
];

/// Returns the largest number of connections that read. Each has a thread, and statements do not wait for anything except the
/// disk, so a few more than the cores can run at a time are enough.
fn max_readers() -> u32 {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    u32::try_from(2 * cores).unwrap_or(u32::MAX).max(4)
}

/// Creates the file if it does not exist, so that only its owner can read the conversations. SQLite gives its log the same
/// permissions. Any error also occurs when SQLite opens the file, and is reported there.
fn create_private(file: &Path) {
    let _ = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
}

/// Time for which a statement waits for another process, such as a backup, that has locked the file for a moment.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns options for a connection to an existing file.
pub(super) fn connect_options(url: &str) -> Result<SqliteConnectOptions, StoreError> {
    const EXPECTED: &str = "expected sqlite://FILE or sqlite:FILE";
    if url.contains(":memory:") || url.contains("mode=memory") {
        return Err(StoreError::Url(
            "an in-memory database is not supported, because each connection would get its own".to_owned(),
        ));
    }
    let parameters = url.split_once('?').map_or("", |(_, parameters)| parameters);
    for name in ["immutable", "vfs"] {
        if parameters.split('&').any(|parameter| parameter.split('=').next() == Some(name)) {
            return Err(StoreError::Url(format!(
                "the parameter {name:?} is not supported, because all connections must use the same locks: remove it"
            )));
        }
    }
    let options = SqliteConnectOptions::from_str(url).map_err(|_| StoreError::Url(EXPECTED.to_owned()))?;
    // SQLite would give each connection a temporary file of its own.
    if options.get_filename().as_os_str().is_empty() {
        return Err(StoreError::Url(format!("{url:?} names no file; {EXPECTED}")));
    }
    Ok(options.busy_timeout(BUSY_TIMEOUT).log_statements(tracing::log::LevelFilter::Off))
}

#[derive(Debug)]
pub(super) struct Sqlite {
    pub(super) writer: SqlitePool,
    pub(super) readers: SqlitePool,
    /// Permits for the connections that read.
    read_shares: Resource,
    /// Permits to use or to await the writer: one for each key, so that a key waits behind one transaction of each other key at most.
    write_shares: Resource,
    acquire_timeout: Duration,
    disk_reserve: DiskReserve,
    rebuilds: Rebuilds,
    /// Transactions that remove many rows run one at a time, so that other writers wait for at most one.
    pub(super) removal_turns: Turns,
    /// The turns of copies of sessions in parts, and of what must not run beside them.
    pub(super) copy_turns: Turns,
}

/// The rebuilds of the file.
#[derive(Debug)]
pub(super) struct Rebuilds {
    /// Number of rebuilds that have begun.
    begun: AtomicU64,
    /// The last successful rebuild. Locked during a rebuild.
    last: Mutex<Rebuild>,
}

/// A successful rebuild, counted from 1, and the earliest time of the next one.
#[derive(Debug)]
struct Rebuild {
    number: u64,
    next_at: Instant,
}

impl Default for Rebuilds {
    fn default() -> Self {
        let none = Rebuild { number: 0, next_at: Instant::now() };
        Self { begun: AtomicU64::new(0), last: Mutex::new(none) }
    }
}

impl Sqlite {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// The URL is invalid, or the file can't be opened.
    pub(super) async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let connect = connect_options(url)?.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
        let connect = PRAGMAS.iter().fold(connect, |connect, (name, value)| connect.pragma(*name, *value));
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(options.acquire_timeout)
                .test_before_acquire(false)
                .idle_timeout(None)
                .max_lifetime(None)
                // If a commit fails because the disk is full, SQLite ends the transaction by itself. The driver does not
                // notice, and would never begin another transaction on this connection.
                .before_acquire(|connection, _| {
                    let is_free = !connection.is_in_transaction();
                    Box::pin(async move { Ok(is_free) })
                })
        };
        let file = connect.get_filename().to_owned();
        create_private(&file);
        // The writer connects first: it enables the write-ahead log.
        let writer = pool(1).connect_with(connect.clone()).await?;
        let connect = connect.read_only(true).pragma("cache_size", READER_CACHE);
        // Statements are short, so the work of precis waits for a moment if requests use all connections.
        let max_readers = options.max_connections.clamp(1, max_readers());
        let readers = pool(max_readers).connect_lazy_with(connect);
        let count = |permits: u32| usize::try_from(permits).unwrap_or(usize::MAX);
        let read_shares = Resource::new(Level::Connection, count(max_readers), options.key_share);
        Ok(Self {
            writer,
            readers,
            disk_reserve: DiskReserve::of(&file),
            rebuilds: Rebuilds::default(),
            read_shares: read_shares.with_internal(count((max_readers / 4).max(1)), options.key_share),
            write_shares: Resource::new(Level::Connection, Semaphore::MAX_PERMITS, 0.0),
            acquire_timeout: options.acquire_timeout,
            removal_turns: Turns::new(Level::Removal),
            copy_turns: Turns::new(Level::Copy),
        })
    }

    /// Applies the pending migrations, and returns the last one.
    ///
    /// # Errors
    /// The file can't be used, a migration failed, or the schema is newer.
    pub(super) async fn migrate(&self, migrator: Migrator) -> Result<i64, StoreError> {
        migrations::check_not_newer(self.schema_version().await?, &migrator)?;
        migrator.run(&self.writer).await.map_err(StoreError::Migration)?;
        Ok(migrations::latest_version(&migrator))
    }

    pub(super) async fn check_ready(&self) -> Result<(), StoreError> {
        migrations::check_version(self.schema_version().await?, &migrations::sqlite())
    }

    /// Returns the last migration, 0 if there is none.
    async fn schema_version(&self) -> Result<i64, StoreError> {
        const COUNT_SCHEMA_TABLES: &str =
            "SELECT count(*) AS tables FROM sqlite_schema WHERE type = 'table' AND name = '_sqlx_migrations'";
        let tables = sqlx::query(COUNT_SCHEMA_TABLES).fetch_one(&self.readers).await?;
        if tables.try_get::<i64, _>("tables")? == 0 {
            return Ok(0);
        }
        Ok(sqlx::query(SELECT_SCHEMA_VERSION).fetch_one(&self.readers).await?.try_get("version")?)
    }

    pub(super) async fn examine(&self) -> Result<DatabaseFacts, StoreError> {
        const GROUP_AND_OTHERS_READ: u32 = 0o044;
        /// Fails if the file is no database.
        const SELECT_FOREIGN_TABLE: &str = concat!(
            "SELECT min(name) AS foreign_table FROM sqlite_schema WHERE type = 'table' AND name IN ",
            first_tables!(),
            " AND NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = '_sqlx_migrations')"
        );
        const SELECT_OBJECTS: &str =
            "SELECT type || ' ' || name FROM sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";
        let tables = sqlx::query(SELECT_FOREIGN_TABLE).fetch_one(&self.readers).await?;
        let objects: Vec<String> = sqlx::query_scalar(SELECT_OBJECTS).fetch_all(&self.readers).await?;
        let file = self.writer.connect_options().get_filename().to_owned();
        let mode = fs::metadata(&file).map_or(0, |file| file.permissions().mode());
        let is_public_file = mode & GROUP_AND_OTHERS_READ != 0;
        Ok(DatabaseFacts {
            time: now(),
            bypasses_row_security: false,
            unprotected_table: None,
            is_public_file,
            can_migrate: true,
            foreign_table: tables.try_get("foreign_table")?,
            inaccessible_table: None,
            missing_object: migrations::missing_object(migrations::SQLITE_OBJECTS, &objects),
        })
    }

    pub(super) fn connection_counts(&self) -> ConnectionCounts {
        let pools = [&self.writer, &self.readers].map(ConnectionCounts::of);
        ConnectionCounts {
            open: pools.iter().map(|pool| pool.open).sum(),
            idle: pools.iter().map(|pool| pool.idle).sum(),
            max: pools.iter().map(|pool| pool.max).sum(),
        }
    }

    pub(super) async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    pub(super) async fn read_all(&self, query: Query<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let _held = self.permit(&self.read_shares).await?;
        query.fetch_all(&self.readers).await
    }

    /// Runs a statement that writes, or several of them, in one transaction, and returns the rows of all. All rows are fetched, because a
    /// statement commits after its last row: an error at that point, such as a full disk, would be lost otherwise.
    pub(super) async fn write(&self, query: Query<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let (mut transaction, _held) = self.begin_write().await?;
        let rows = query.fetch_all(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(rows)
    }

    /// Runs a statement that writes, and returns the number of changed rows.
    pub(super) async fn execute(&self, query: Query<'_>) -> Result<u64, sqlx::Error> {
        let _held = self.permit(&self.write_shares).await?;
        Ok(query.execute(&self.writer).await?.rows_affected())
    }

    pub(super) async fn begin_write(
        &self,
    ) -> Result<(Transaction<'static, sqlx::Sqlite>, Held), sqlx::Error> {
        let held = self.permit(&self.write_shares).await?;
        Ok((self.writer.begin_with("BEGIN IMMEDIATE").await?, held))
    }

    pub(super) async fn begin_read(&self) -> Result<(Transaction<'static, sqlx::Sqlite>, Held), sqlx::Error> {
        let held = self.permit(&self.read_shares).await?;
        Ok((self.readers.begin().await?, held))
    }

    /// Waits for the permit for a connection.
    async fn permit(&self, resource: &Resource) -> Result<Held, sqlx::Error> {
        resource.acquire(1, Some(self.acquire_timeout)).await.map_err(|_| sqlx::Error::PoolTimedOut)
    }
}

/// Returns the time of the store's clock. There is one process, so it is the clock of the process.
pub(super) fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

#[cfg(test)]
mod tests {
    use super::*;

    mod plans;

    async fn open(folder: &Path) -> Sqlite {
        let url = format!("sqlite://{}", folder.join("precis.db").display());
        let options = StoreOptions {
            max_connections: 1,
            acquire_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(5),
            search: None,
            key_share: 0.5,
        };
        Sqlite::connect(&url, &options).await.expect("connected")
    }

    /// The options of `.cargo/config.toml`. SQLite does not list the option for `fdatasync`.
    #[tokio::test]
    async fn library_has_no_locks_that_are_common_to_all_connections() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        let options = sqlx::query_scalar("SELECT compile_options FROM pragma_compile_options");
        let options: Vec<String> = options.fetch_all(&store.writer).await.expect("options");
        assert!(options.iter().any(|option| option == "DEFAULT_MEMSTATUS=0"), "{options:?}");
        assert!(options.iter().all(|option| option != "ENABLE_MEMORY_MANAGEMENT"), "{options:?}");
        store.close().await;
    }

    #[tokio::test]
    async fn only_the_owner_can_read_the_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        store.migrate(migrations::sqlite()).await.expect("migrated");
        let mut files = 0;
        for entry in folder.path().read_dir().expect("readable") {
            let entry = entry.expect("an entry");
            let mode = entry.metadata().expect("metadata").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{:?}", entry.path());
            files += 1;
        }
        assert!(
            files >= 3,
            "the database, its log, the index of the log; if the disk has space, the reserve for erasures"
        );
        store.close().await;
    }
}
