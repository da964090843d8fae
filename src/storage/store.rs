//! The store: its database, and what all of its methods use. The conformance suite tests every method on both databases.
//!
//! A method is one intention and one transaction, except that [`Store::revisions`], [`Store::consolidation_records`] and
//! [`Store::reindex`] may run several statements, which are transactions of their own, as do imports and erasures on SQLite. Absence
//! is `Ok(None)`. Times come from the clock of the store (the database server's, if there is one), so the clocks of replicas need
//! not agree.

use super::append::Appends;
use super::heads::{self, HeadBatcher};
use super::postgres::Postgres;
use super::sqlite::Sqlite;
use super::statement::{AnyRow, Database, DbRow as _, Purpose, Sql, StoreStatement, Transaction};
use super::values::to_i64;
use super::{ConnectionCounts, DatabaseFacts, Page, StoreError, StoreOptions, migrations};
use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// The database behind the service.
#[derive(Debug)]
pub struct Store {
    pub(super) database: Arc<Database>,
    pub(super) appends: Appends,
    pub(super) heads: HeadBatcher,
    /// The analyzer of the search index; `None` if search is disabled.
    pub(super) analyzer: RwLock<Option<Analyzer>>,
    /// Messages may have left the search index of SQLite since its last merge.
    pub(super) has_erased_terms: AtomicBool,
}

impl Store {
    /// Connects to a database: see [`super::connect`].
    pub(super) async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let database = Arc::new(match url.split_once(':') {
            Some(("postgres" | "postgresql", _)) => Database::Postgres(Postgres::connect(url, options)?),
            Some(("sqlite", _)) => Database::Sqlite(Box::new(Sqlite::connect(url, options).await?)),
            _ => return Err(StoreError::Url("must begin with postgres:, postgresql: or sqlite:".to_owned())),
        });
        Ok(Self {
            appends: Appends::new(&database),
            heads: heads::batcher(&database),
            database,
            analyzer: RwLock::new(options.search),
            has_erased_terms: AtomicBool::new(true),
        })
    }

    /// Returns a statement on the rows of one tenant. The tenant is its first parameter.
    pub(super) fn statement<'d>(&'d self, tenant: &'d TenantId, sql: impl Into<Sql>) -> StoreStatement<'d> {
        self.database.statement(tenant, sql)
    }

    /// Returns a statement on tables that are not bound to a tenant.
    pub(super) fn global_statement(&self, sql: impl Into<Sql>) -> StoreStatement<'_> {
        self.database.global_statement(sql)
    }

    /// Begins a transaction that writes.
    pub(super) async fn begin(&self, tenant: &TenantId) -> Result<Transaction, StoreError> {
        self.database.begin(Some(tenant), Purpose::Write).await
    }

    /// Runs the future of a transaction: see [`Database::within_limit`].
    pub(super) async fn within_limit<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.database.within_limit(transaction).await
    }

    /// Returns SQLite, if that is the database.
    pub(super) fn sqlite(&self) -> Option<&Sqlite> {
        match &*self.database {
            Database::Sqlite(database) => Some(database),
            Database::Postgres(_) => None,
        }
    }
}

/// Calls the method of the database. The futures are boxed because they are large.
macro_rules! dispatch {
    ($self:ident, $method:ident) => {
        match &*$self.database {
            Database::Postgres(database) => Box::pin(database.$method()).await,
            Database::Sqlite(database) => Box::pin(database.$method()).await,
        }
    };
}

/// Restricts a page, which is the query `$select` with a limit, in bytes: the page ends with the row that exceeds the
/// parameter `$max`, so that it has at least one row. The column `found` is the number of rows without that restriction.
macro_rules! bounded_page_on_postgres {
    ($select:expr, $bytes:literal, $order:literal, $max:literal) => {
        concat!(
            "SELECT * FROM (
                SELECT *, sum(",
            $bytes,
            ") OVER (ORDER BY ",
            $order,
            ") - (",
            $bytes,
            ") AS bytes_before,
                    count(*) OVER () AS found
                FROM (",
            $select,
            ") AS page
            ) AS sized WHERE bytes_before < ",
            $max,
            " ORDER BY ",
            $order
        )
    };
}

/// Restricts a page in the same way. Adds the sizes up without the texts, which SQLite would copy: `$select` selects the keys of
/// the rows and their size as `bytes`, and `$rows` is the table with the condition that finds the row of a key.
macro_rules! bounded_page_on_sqlite {
    ($select:expr, $columns:expr, $rows:literal, $order:literal, $max:literal) => {
        concat!(
            "SELECT ",
            $columns,
            ", found FROM (
                SELECT *, sum(bytes) OVER (ORDER BY ",
            $order,
            ") - bytes AS bytes_before, count(*) OVER () AS found
                FROM (",
            $select,
            ")
            ) AS sized CROSS JOIN ",
            $rows,
            " WHERE bytes_before < ",
            $max,
            " ORDER BY ",
            $order
        )
    };
}

pub(super) use {bounded_page_on_postgres, bounded_page_on_sqlite};

/// Decodes the row, if there is one.
pub(super) fn decode<T>(
    row: Option<AnyRow>,
    decode: impl FnOnce(&AnyRow) -> Result<T, StoreError>,
) -> Result<Option<T>, StoreError> {
    row.map(|row| decode(&row)).transpose()
}

/// Decodes a [bounded page](bounded_page_on_postgres) of at most `limit` items.
pub(super) fn decode_page<T>(
    rows: &[AnyRow],
    limit: i64,
    decode: impl Fn(&AnyRow) -> Result<T, StoreError>,
) -> Result<Page<T>, StoreError> {
    let found = rows.first().map_or(Ok(0), |row| row.field::<i64>("found"))?;
    let limit = usize::try_from(limit).unwrap_or(0);
    let items = rows.iter().take(limit).map(decode).collect::<Result<Vec<_>, _>>()?;
    Ok(Page { has_more: to_i64(items.len()) < found, items })
}

/// Converts a duration to the unit that statements expect.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl Store {
    /// Applies all pending migrations, and returns the last one. Returns an error if the schema is that of a newer release.
    pub async fn migrate(&self) -> Result<i64, StoreError> {
        match &*self.database {
            Database::Postgres(database) => Box::pin(database.migrate(migrations::postgres())).await,
            Database::Sqlite(database) => Box::pin(database.migrate(migrations::sqlite())).await,
        }
    }

    /// Returns an error if the database is unavailable, or if its schema is not the one of this release.
    pub async fn check_ready(&self) -> Result<(), StoreError> {
        dispatch!(self, check_ready)
    }

    /// Connects to the database and returns facts about it, without writing.
    pub async fn examine(&self) -> Result<DatabaseFacts, StoreError> {
        dispatch!(self, examine)
    }

    /// Returns the number of connections. On SQLite, one of them writes.
    #[must_use]
    pub fn connection_counts(&self) -> ConnectionCounts {
        match &*self.database {
            Database::Postgres(database) => ConnectionCounts::of(&database.pool),
            Database::Sqlite(database) => database.connection_counts(),
        }
    }

    /// Closes all connections. Later calls fail.
    pub async fn close(&self) {
        dispatch!(self, close);
    }
}
