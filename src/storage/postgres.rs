//! Postgres: the store for production. Any number of replicas over one database.
//!
//! Each method is one statement in a transaction of its own, which names the tenant whose rows it may see: behind the
//! tenant in every statement stands the database's row-level security. Nothing relies on the state of a connection
//! beyond a transaction, so a transaction pooler may stand between, if it knows prepared statements (`PgBouncer` does
//! from 1.21 on).

use super::pool::Connections;
use super::{StoreError, StoreOptions, migrations};
use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgDatabaseError, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _, SqlSafeStr as _, SqlStr};
use std::fmt::Write as _;
use std::io;
use std::str::FromStr as _;
use std::time::Duration;
use time::OffsetDateTime;

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

/// The store over a pool of connections.
#[derive(Debug)]
pub struct Postgres {
    pool: Connections,
    search: Option<Analyzer>,
}

impl Postgres {
    /// Prepares the pool; the first connection is made when it's needed.
    ///
    /// # Errors
    /// The URL can't be read.
    pub fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let connect = PgConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("expected postgres://user:password@host:port/database".to_owned()))?
            .application_name("precis")
            // A pooler may refuse parameters that it doesn't know.
            .extra_float_digits(None)
            .log_statements(tracing::log::LevelFilter::Off);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout);
        let pool = Connections::new(pool, connect, options.statement_timeout);
        Ok(Self { pool, search: options.search })
    }

    /// The newest migration; 0 = none. A server that takes no writes is one that is not available.
    async fn schema(&self) -> Result<i64, StoreError> {
        const APPLIED: &str = "SELECT coalesce(max(version), 0) AS found FROM _sqlx_migrations WHERE success";
        const TABLE: &str = "SELECT to_regclass('_sqlx_migrations') IS NOT NULL AS found,
            current_setting('transaction_read_only')::boolean AS read_only";
        let row = sqlx::query(TABLE).fetch_one(&self.pool).await?;
        if row.try_get("read_only")? {
            let error = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the server takes no writes");
            return Err(StoreError::Unavailable(error.into()));
        }
        let migrated: bool = row.try_get("found")?;
        if !migrated {
            return Ok(0);
        }
        Ok(sqlx::query(APPLIED).fetch_one(&self.pool).await?.try_get("found")?)
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

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, PgArguments>;

/// Begins a transaction that sees one tenant's rows and no others, whatever its statements say. One round trip: that is
/// why the tenant is part of the text. As hexadecimal digits nothing in it can end the literal.
fn begin(tenant: &TenantId) -> SqlStr {
    let mut begin = "BEGIN; SELECT set_config('precis.tenant', convert_from('\\x".to_owned();
    for byte in tenant.as_str().bytes() {
        let _ = write!(begin, "{byte:02x}");
    }
    begin.push_str("', 'UTF8'), true)");
    AssertSqlSafe(begin).into_sql_str()
}

impl Postgres {
    /// All rows of a statement that changes nothing. Its transaction is given up, which nobody waits for.
    async fn read_all(&self, tenant: &TenantId, query: Query<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        let read = self.pool.ask(async |connection| {
            let mut transaction = connection.begin_with(begin(tenant)).await?;
            query.fetch_all(&mut *transaction).await
        });
        read.await
    }

    /// The row of a statement that changes nothing.
    async fn read(&self, tenant: &TenantId, query: Query<'_>) -> Result<Option<PgRow>, sqlx::Error> {
        let read = self.pool.ask(async |connection| {
            let mut transaction = connection.begin_with(begin(tenant)).await?;
            query.fetch_optional(&mut *transaction).await
        });
        read.await
    }

    /// The row that a statement returns which changes something; committed.
    async fn write(&self, tenant: &TenantId, query: Query<'_>) -> Result<Option<PgRow>, sqlx::Error> {
        let written = self.pool.ask(async |connection| {
            let mut transaction = connection.begin_with(begin(tenant)).await?;
            let row = query.fetch_optional(&mut *transaction).await?;
            transaction.commit().await?;
            Ok(row)
        });
        written.await
    }

    /// How many rows a statement changed; committed.
    async fn execute(&self, tenant: &TenantId, query: Query<'_>) -> Result<u64, sqlx::Error> {
        let done = self.pool.ask(async |connection| {
            let mut transaction = connection.begin_with(begin(tenant)).await?;
            let done = query.execute(&mut *transaction).await?;
            transaction.commit().await?;
            Ok(done.rows_affected())
        });
        done.await
    }
}

impl Postgres {
    pub(super) async fn migrate(&self) -> Result<(), StoreError> {
        /// Of the lock that lets one replica migrate at a time; any figure that nobody else uses.
        const LOCK: &str = "SELECT pg_advisory_xact_lock(8102097361971999)";
        const EXEMPT: &str =
            "SELECT rolsuper OR rolbypassrls AS exempt FROM pg_roles WHERE rolname = current_user";
        self.reach().await.map_err(StoreError::Unavailable)?;
        // The migrator's own lock belongs to a connection, which a transaction pooler may give to somebody else.
        let mut transaction = self.pool.begin().await?;
        sqlx::query(LOCK).execute(&mut *transaction).await?;
        let mut migrator = migrations::postgres();
        migrator.set_locking(false);
        migrator.run_direct(None, &mut *transaction, false).await.map_err(StoreError::Migration)?;
        let exempt: bool = sqlx::query(EXEMPT).fetch_one(&mut *transaction).await?.try_get("exempt")?;
        if exempt {
            tracing::warn!(
                "the database's role is a superuser or has BYPASSRLS: row-level security does not hold it, and only \
                 the statements keep tenants apart. Give precis a role of its own"
            );
        }
        Ok(transaction.commit().await?)
    }

    pub(super) async fn check_ready(&self) -> Result<(), StoreError> {
        // Whoever asks wants to know it now.
        let limit = self.pool.options().get_acquire_timeout();
        let silent = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}"));
        let answered = tokio::time::timeout(limit, self.schema()).await;
        let found = answered.map_err(|_| sqlx::Error::from(silent()))??;
        let expected = migrations::latest_version(&migrations::postgres());
        if found == expected { Ok(()) } else { Err(StoreError::SchemaVersion { found, expected }) }
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// Whether it's worth trying again: the classes 57 (shutting down, cancelled), 53 (out of resources, such as disk), 08
/// (connection) and 40 (to be repeated), 25006 (a standby) and 25P03 (it heard nothing for too long).
pub(super) fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    error.is_some_and(|code| {
        ["57", "53", "08", "40", "25006", "25P03"].iter().any(|class| code.starts_with(class))
    })
}

/// Whether a table, a column or a function is not there.
pub(super) fn is_schema_incomplete(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    error.is_some_and(|code| matches!(code, "42P01" | "42703" | "42883"))
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
