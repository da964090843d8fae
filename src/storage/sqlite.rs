//! SQLite: the embedded default. One process, one file, and as durable as the disk is.
//!
//! One connection writes and several read: SQLite has one writer anyhow, and waiting for it in a queue of ours is
//! fair and never ends in "database is locked". A write transaction begins as one (`BEGIN IMMEDIATE`).

use super::{StoreError, StoreOptions, migrations};
use crate::domain::search::analyzer::Analyzer;
use sqlx::error::DatabaseError;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteError, SqliteJournalMode, SqlitePool, SqlitePoolOptions,
    SqliteRow, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Row as _, Sqlite as Driver, Transaction};
use std::str::FromStr as _;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::Mutex;

mod api_keys;
mod archives;
mod consolidations;
mod context_snapshot;
mod exchanges;
mod memory;
mod messages;
mod revisions;
mod search;
mod search_index;
mod sessions;
mod token_usage;
mod users;

/// The store over one file.
#[derive(Debug)]
pub struct Sqlite {
    writer: SqlitePool,
    readers: SqlitePool,
    search: Option<Analyzer>,
    settling: Mutex<()>,
}

type Query<'q> = sqlx::query::Query<'q, Driver, SqliteArguments>;

impl Sqlite {
    /// Opens the file, and creates it where there is none.
    ///
    /// # Errors
    /// The URL can't be read, or the file can't be opened.
    pub async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        if url.contains(":memory:") || url.contains("mode=memory") {
            return Err(StoreError::Url(
                "an in-memory database would be another one on each connection".to_owned(),
            ));
        }
        let connect = SqliteConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("expected sqlite://FILE or sqlite:FILE".to_owned()))?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            // Another process, such as a backup, may hold the file for a moment.
            .busy_timeout(Duration::from_secs(5))
            .pragma("temp_store", "memory")
            // What is erased must not stay in the file: its bytes are overwritten.
            .pragma("secure_delete", "on")
            .log_statements(tracing::log::LevelFilter::Off);
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(options.acquire_timeout)
                .test_before_acquire(false)
                .idle_timeout(None)
                .max_lifetime(None)
                // Where a commit fails, on a full disk, SQLite has ended the transaction by itself. The driver believes
                // that it goes on, and would never begin another one on the connection.
                .before_acquire(|connection, _| {
                    let is_free = !connection.is_in_transaction();
                    Box::pin(async move { Ok(is_free) })
                })
        };
        // The writer comes first: it creates the file and turns the log on.
        let writer = pool(1).connect_with(connect.clone()).await?;
        let readers = pool(options.max_connections.max(1)).connect_lazy_with(connect.read_only(true));
        Ok(Self { writer, readers, search: options.search, settling: Mutex::default() })
    }

    /// The row of a statement that writes one row at most. It is read to its end: the statement commits after its rows,
    /// and what goes wrong then (a full disk) would be lost with the first row.
    async fn written(&self, query: Query<'_>) -> Result<Option<SqliteRow>, sqlx::Error> {
        Ok(query.fetch_all(&self.writer).await?.pop())
    }

    /// Takes what was erased out of the log too: its frames would stay in that file until others are written over them.
    /// Best effort: with a reader in the way, the next checkpoint does it.
    async fn forget(&self) {
        const CHECKPOINT: &str = "PRAGMA wal_checkpoint(TRUNCATE)";
        if let Err(error) = sqlx::query(CHECKPOINT).fetch_all(&self.writer).await {
            tracing::warn!(%error, "what was erased may still be in the log of the database");
        }
    }

    async fn write(&self) -> Result<Transaction<'static, Driver>, sqlx::Error> {
        self.writer.begin_with("BEGIN IMMEDIATE").await
    }
}

impl Sqlite {
    pub(super) async fn migrate(&self) -> Result<(), StoreError> {
        migrations::sqlite().run(&self.writer).await.map_err(StoreError::Migration)
    }

    pub(super) async fn check_ready(&self) -> Result<(), StoreError> {
        const APPLIED: &str = "SELECT coalesce(max(version), 0) AS found FROM _sqlx_migrations WHERE success";
        const TABLE: &str = "SELECT count(*) AS found FROM sqlite_schema WHERE name = '_sqlx_migrations'";
        let expected = migrations::latest_version(&migrations::sqlite());
        let tables: i64 = sqlx::query(TABLE).fetch_one(&self.readers).await?.try_get("found")?;
        let found: i64 = if tables > 0 {
            sqlx::query(APPLIED).fetch_one(&self.readers).await?.try_get("found")?
        } else {
            0
        };
        if found == expected { Ok(()) } else { Err(StoreError::SchemaVersion { found, expected }) }
    }

    pub(super) async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

/// Whether it's worth trying again: `BUSY`, `LOCKED`, `READONLY`, `IOERR`, `FULL`, `CANTOPEN`, in any of their kinds.
pub(super) fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<SqliteError>().and_then(|error| error.code()?.parse::<u32>().ok());
    error.is_some_and(|code| matches!(code & 0xff, 5 | 6 | 8 | 10 | 13 | 14))
}

/// Whether a table or a column is not there; SQLite has no code of its own for that.
pub(super) fn is_schema_incomplete(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<SqliteError>().map(DatabaseError::message);
    error.is_some_and(|message| {
        ["no such table", "no such column"].iter().any(|lack| message.starts_with(lack))
    })
}

/// The store's clock: with one process, the process's own.
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// A time as the file has it: microseconds since 1970.
fn micros(time: OffsetDateTime) -> i64 {
    i64::try_from(time.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX)
}

fn time(row: &SqliteRow, column: &str) -> Result<OffsetDateTime, sqlx::Error> {
    from_micros(row.try_get(column)?)
}

fn maybe_time(row: &SqliteRow, column: &str) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    row.try_get::<Option<i64>, _>(column)?.map(from_micros).transpose()
}

fn from_micros(micros: i64) -> Result<OffsetDateTime, sqlx::Error> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000)
        .map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

#[cfg(test)]
mod tests {
    mod plans;
}
