//! Postgres: the store for production. Any number of replicas over one database.
//!
//! Every statement stands for itself: nothing relies on the state of a connection, so a transaction pooler may stand
//! between, if it knows prepared statements (`PgBouncer` does from 1.21 on). Each method is one statement, and with that one round trip and one transaction.

use super::{Options, Store, StoreError, migrations};
use async_trait::async_trait;
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgDatabaseError, PgPool, PgPoolOptions, PgRow};
use sqlx::{ConnectOptions as _, Connection as _, Row as _};
use std::io;
use std::str::FromStr as _;
use std::time::Duration;
use time::OffsetDateTime;

mod consolidations;
mod exchanges;
mod memory;
mod messages;
mod recall;
mod revisions;
mod sessions;
mod token_usage;
mod users;

/// The store over a pool of connections.
#[derive(Debug)]
pub struct Postgres {
    pool: PgPool,
}

impl Postgres {
    /// Prepares the pool; the first connection is made when it's needed.
    ///
    /// # Errors
    /// The URL can't be read.
    pub fn connect(url: &str, options: &Options) -> Result<Self, StoreError> {
        let connect = PgConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("expected postgres://user:password@host:port/database".to_owned()))?
            .application_name("precis")
            // A pooler may refuse parameters that it doesn't know.
            .extra_float_digits(None)
            .log_statements(tracing::log::LevelFilter::Off);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            // A ping before each use costs 14 % of the throughput; connections are tested when they come back.
            .test_before_acquire(false)
            .connect_lazy_with(connect);
        Ok(Self { pool })
    }

    /// Connects once, to learn why that fails: the pool tries until its time is over, and then knows only that.
    async fn reach(&self) -> Result<(), sqlx::Error> {
        let (options, limit) = (self.pool.connect_options(), self.pool.options().get_acquire_timeout());
        match tokio::time::timeout(limit, PgConnection::connect_with(&options)).await {
            Ok(connected) => connected?.close().await,
            Err(_) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into())
            }
        }
    }
}

#[async_trait]
impl Store for Postgres {
    async fn migrate(&self) -> Result<(), StoreError> {
        /// Of the lock that lets one replica migrate at a time; any figure that nobody else uses.
        const LOCK: &str = "SELECT pg_advisory_xact_lock(8102097361971999)";
        self.reach().await.map_err(StoreError::Unavailable)?;
        // The migrator's own lock belongs to a connection, which a transaction pooler may give to somebody else.
        let mut transaction = self.pool.begin().await?;
        sqlx::query(LOCK).execute(&mut *transaction).await?;
        let mut migrator = migrations::postgres();
        migrator.set_locking(false);
        migrator.run_direct(None, &mut *transaction, false).await.map_err(StoreError::Migration)?;
        Ok(transaction.commit().await?)
    }

    async fn ready(&self) -> Result<(), StoreError> {
        const APPLIED: &str = "SELECT coalesce(max(version), 0) AS found FROM _sqlx_migrations WHERE success";
        const TABLE: &str = "SELECT to_regclass('_sqlx_migrations') IS NOT NULL AS found";
        let expected = migrations::newest(&migrations::postgres());
        let migrated: bool = sqlx::query(TABLE).fetch_one(&self.pool).await?.try_get("found")?;
        let found: i64 =
            if migrated { sqlx::query(APPLIED).fetch_one(&self.pool).await?.try_get("found")? } else { 0 };
        if found == expected { Ok(()) } else { Err(StoreError::Schema { found, expected }) }
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}

/// Whether it's worth trying again: the classes 57 (shutting down, cancelled), 53 (out of resources, such as disk), 08
/// (connection) and 40 (to be repeated), and 25006 (a standby).
pub(super) fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    error.is_some_and(|code| ["57", "53", "08", "40", "25006"].iter().any(|class| code.starts_with(class)))
}

/// Whether a table or a column is not there.
pub(super) fn is_unmigrated(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    error.is_some_and(|code| matches!(code, "42P01" | "42703"))
}

fn time(row: &PgRow, column: &str) -> Result<OffsetDateTime, sqlx::Error> {
    row.try_get(column)
}

fn maybe_time(row: &PgRow, column: &str) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    row.try_get(column)
}

/// A duration as the statements take it: microseconds.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
