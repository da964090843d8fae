//! Running a statement on either database, so that SQL and decoding that are the same for both exist once. Other files of
//! the store know neither of the drivers.

use super::StoreError;
use super::pool::OpenTransaction;
use super::postgres::{self, Beginning, Postgres};
use super::sqlite::{self, Sqlite};
use super::values::DbTime;
use crate::capacity::Held;
use crate::domain::id::TenantId;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Decode, Encode, Row as _, Type};
use time::OffsetDateTime;

/// The text of a statement for each database. A `&'static str` is a text for both: SQLite accepts `$1`, too.
///
/// For the current time, the text for Postgres uses `now()`, the clock of the server that all replicas share. The text for
/// SQLite gets the time of the process as an additional last parameter, by [`Statement::bind_now`].
#[derive(Clone, Copy)]
pub(super) struct Sql {
    pub(super) postgres: &'static str,
    pub(super) sqlite: &'static str,
}

impl From<&'static str> for Sql {
    fn from(text: &'static str) -> Self {
        Self { postgres: text, sqlite: text }
    }
}

/// A value that can be a parameter on both databases.
pub(super) trait Parameter<'t>:
    Encode<'t, sqlx::Postgres> + Type<sqlx::Postgres> + Encode<'t, sqlx::Sqlite> + Type<sqlx::Sqlite>
{
}

impl<'t, T> Parameter<'t> for T where
    T: Encode<'t, sqlx::Postgres> + Type<sqlx::Postgres> + Encode<'t, sqlx::Sqlite> + Type<sqlx::Sqlite>
{
}

/// A value that can be a column on both databases.
pub(super) trait Column<'r>:
    Decode<'r, sqlx::Postgres> + Type<sqlx::Postgres> + Decode<'r, sqlx::Sqlite> + Type<sqlx::Sqlite>
{
}

impl<'r, T> Column<'r> for T where
    T: Decode<'r, sqlx::Postgres> + Type<sqlx::Postgres> + Decode<'r, sqlx::Sqlite> + Type<sqlx::Sqlite>
{
}

/// A row of a result.
pub(super) trait DbRow {
    fn field<'r, T: Column<'r>>(&'r self, name: &str) -> Result<T, sqlx::Error>;

    fn time(&self, name: &str) -> Result<OffsetDateTime, sqlx::Error> {
        Ok(self.field::<DbTime>(name)?.0)
    }

    fn optional_time(&self, name: &str) -> Result<Option<OffsetDateTime>, sqlx::Error> {
        Ok(self.field::<Option<DbTime>>(name)?.map(|time| time.0))
    }
}

impl DbRow for PgRow {
    fn field<'r, T: Column<'r>>(&'r self, name: &str) -> Result<T, sqlx::Error> {
        self.try_get(name)
    }
}

impl DbRow for SqliteRow {
    fn field<'r, T: Column<'r>>(&'r self, name: &str) -> Result<T, sqlx::Error> {
        self.try_get(name)
    }
}

/// A row of either database.
pub(super) enum AnyRow {
    Postgres(PgRow),
    Sqlite(SqliteRow),
}

impl DbRow for AnyRow {
    fn field<'r, T: Column<'r>>(&'r self, name: &str) -> Result<T, sqlx::Error> {
        match self {
            Self::Postgres(row) => row.field(name),
            Self::Sqlite(row) => row.field(name),
        }
    }
}

/// A statement with its parameters and the object that runs it, which is a `P` on Postgres and an `S` on SQLite.
pub(super) enum Statement<'q, P, S> {
    Postgres { on: P, query: postgres::Query<'q> },
    Sqlite { on: S, query: sqlite::Query<'q>, now: OffsetDateTime },
}

/// A statement that runs in a transaction of its own, which is bound to a tenant or not.
pub(super) type StoreStatement<'d> = Statement<'d, (&'d Postgres, Option<&'d TenantId>), &'d Sqlite>;

/// A statement of a transaction.
pub(super) type TransactionStatement<'t> = Statement<'t, &'t mut PgConnection, &'t mut SqliteConnection>;

impl<P, S> Statement<'_, P, S> {
    pub(super) fn bind<'t>(self, value: impl Parameter<'t>) -> Self {
        match self {
            Self::Postgres { on, query } => Self::Postgres { on, query: query.bind(value) },
            Self::Sqlite { on, query, now } => Self::Sqlite { on, query: query.bind(value), now },
        }
    }

    pub(super) fn is_sqlite(&self) -> bool {
        matches!(self, Self::Sqlite { .. })
    }

    /// Binds the current time on SQLite and nothing on Postgres. Must come last; see [`Sql`].
    pub(super) fn bind_now(self) -> Self {
        match self {
            Self::Sqlite { on, query, now } => Self::Sqlite { on, query: query.bind(DbTime(now)), now },
            postgres @ Self::Postgres { .. } => postgres,
        }
    }
}

fn postgres_rows(rows: Vec<PgRow>) -> Vec<AnyRow> {
    rows.into_iter().map(AnyRow::Postgres).collect()
}

fn sqlite_rows(rows: Vec<SqliteRow>) -> Vec<AnyRow> {
    rows.into_iter().map(AnyRow::Sqlite).collect()
}

// The futures of a database have several KiB, which would add up in the futures that await them. So they are boxed.
impl StoreStatement<'_> {
    /// Reads at most one row.
    pub(super) async fn read(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(self.read_all().await?.into_iter().next())
    }

    /// Reads all rows.
    pub(super) async fn read_all(self) -> Result<Vec<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                postgres_rows(Box::pin(database.read_all(tenant, query)).await?)
            }
            Self::Sqlite { on, query, .. } => sqlite_rows(Box::pin(on.read_all(query)).await?),
        })
    }

    /// Reads all rows of a statement that sorts and has a limit. On Postgres, the rows must come sorted from an index, at
    /// least by their first sort key. Otherwise, a plan for an average tenant reads and sorts all rows of a large one.
    pub(super) async fn read_all_in_index_order(self) -> Result<Vec<AnyRow>, StoreError> {
        match self {
            Self::Postgres { on: (database, Some(tenant)), query } => {
                Ok(postgres_rows(Box::pin(database.read_all_in_index_order(tenant, query)).await?))
            }
            other => other.read_all().await,
        }
    }

    /// Runs a text of several statements on SQLite, or of one on Postgres, in one transaction, commits, and returns the last row. A
    /// statement on SQLite can refer to the success of the one before it by `changes()`.
    pub(super) async fn write_returning(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                Box::pin(database.write_returning(tenant, query)).await?.map(AnyRow::Postgres)
            }
            Self::Sqlite { on, query, .. } => Box::pin(on.write(query)).await?.pop().map(AnyRow::Sqlite),
        })
    }

    /// Runs a statement, commits, and returns the number of rows that it changed.
    pub(super) async fn execute(self) -> Result<u64, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                Box::pin(database.execute(tenant, query)).await?
            }
            Self::Sqlite { on, query, .. } => Box::pin(on.execute(query)).await?,
        })
    }
}

/// The database of a store.
#[derive(Debug)]
pub(super) enum Database {
    Postgres(Postgres),
    Sqlite(Box<Sqlite>),
}

/// The purpose of a transaction, which decides about its settings on Postgres.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Write,
    /// Exchanges of several sessions: fails if a session is locked.
    Batch,
    /// One exchange, which waits for the lock of its session.
    Exchange,
    /// Reads one state of the database.
    Snapshot,
    /// Reads the search index.
    Search,
}

impl Database {
    /// Returns a statement on the rows of one tenant. The tenant is its first parameter.
    pub(super) fn statement<'d>(&'d self, tenant: &'d TenantId, sql: impl Into<Sql>) -> StoreStatement<'d> {
        self.new_statement(Some(tenant), sql.into()).bind(tenant.as_str())
    }

    /// Returns a statement on tables that are not bound to a tenant.
    pub(super) fn global_statement(&self, sql: impl Into<Sql>) -> StoreStatement<'_> {
        self.new_statement(None, sql.into())
    }

    fn new_statement<'d>(&'d self, tenant: Option<&'d TenantId>, sql: Sql) -> StoreStatement<'d> {
        match self {
            Self::Postgres(database) => {
                Statement::Postgres { on: (database, tenant), query: sqlx::query(sql.postgres) }
            }
            Self::Sqlite(on) => Statement::Sqlite { on, query: sqlx::query(sql.sqlite), now: sqlite::now() },
        }
    }

    /// Runs the future of a transaction, within the statement timeout on Postgres. A transaction that takes longer is rolled back.
    pub(super) async fn within_limit<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        // The future is boxed because it is large.
        let transaction = Box::pin(transaction);
        match self {
            Self::Postgres(database) => database.pool.within_statement_timeout(transaction).await,
            Self::Sqlite(_) => transaction.await,
        }
    }

    /// Begins a transaction of a tenant, or of none.
    pub(super) async fn begin(
        &self,
        tenant: Option<&TenantId>,
        purpose: Purpose,
    ) -> Result<Transaction, StoreError> {
        Ok(match self {
            Self::Postgres(database) => {
                let beginning = match purpose {
                    Purpose::Write => Beginning::PLAIN,
                    Purpose::Exchange => Beginning::EXCHANGE,
                    Purpose::Batch => Beginning::BATCH,
                    Purpose::Snapshot => Beginning::SNAPSHOT,
                    Purpose::Search => Beginning::SEARCH,
                };
                Transaction::Postgres(Box::pin(database.begin(tenant, beginning)).await?)
            }
            Self::Sqlite(database) => {
                let begun = match purpose {
                    Purpose::Snapshot | Purpose::Search => Box::pin(database.begin_read()).await?,
                    _ => Box::pin(database.begin_write()).await?,
                };
                Transaction::Sqlite(begun.0, sqlite::now(), begun.1)
            }
        })
    }
}

/// A transaction of several statements, with the permit for its connection. Dropping it rolls it back, at the price of a connection on
/// Postgres.
pub(super) enum Transaction {
    Postgres(OpenTransaction),
    /// With the current time for all statements, as Postgres has it.
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>, OffsetDateTime, Held),
}

impl Transaction {
    pub(super) fn statement(&mut self, sql: impl Into<Sql>) -> TransactionStatement<'_> {
        let sql = sql.into();
        match self {
            Self::Postgres(transaction) => {
                Statement::Postgres { on: transaction.connection(), query: sqlx::query(sql.postgres) }
            }
            Self::Sqlite(on, now, _) => Statement::Sqlite { on, query: sqlx::query(sql.sqlite), now: *now },
        }
    }

    pub(super) fn is_sqlite(&self) -> bool {
        matches!(self, Self::Sqlite(..))
    }

    /// Sets the tenant whose rows the following statements see on Postgres.
    pub(super) async fn set_tenant(&mut self, tenant: &TenantId) -> Result<(), StoreError> {
        const SET_TENANT: &str = "SELECT set_config('precis.tenant', $1, true)";
        if !self.is_sqlite() {
            self.statement(SET_TENANT).bind(tenant.as_str()).execute().await?;
        }
        Ok(())
    }

    pub(super) async fn commit(self) -> Result<(), StoreError> {
        match self {
            Self::Postgres(transaction) => Ok(transaction.end("COMMIT").await?),
            Self::Sqlite(transaction, _, _held) => Ok(transaction.commit().await?),
        }
    }

    pub(super) async fn rollback(self) -> Result<(), StoreError> {
        match self {
            Self::Postgres(transaction) => Ok(transaction.end("ROLLBACK").await?),
            Self::Sqlite(transaction, _, _held) => Ok(transaction.rollback().await?),
        }
    }
}

impl TransactionStatement<'_> {
    /// Reads at most one row.
    pub(super) async fn read(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(self.read_all().await?.into_iter().next())
    }

    /// Reads all rows.
    pub(super) async fn read_all(self) -> Result<Vec<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on, query } => postgres_rows(query.fetch_all(on).await?),
            Self::Sqlite { on, query, .. } => sqlite_rows(query.fetch_all(on).await?),
        })
    }

    /// Runs a statement and returns the number of rows that it changed.
    pub(super) async fn execute(self) -> Result<u64, StoreError> {
        Ok(match self {
            Self::Postgres { on, query } => query.execute(on).await?.rows_affected(),
            Self::Sqlite { on, query, .. } => query.execute(on).await?.rows_affected(),
        })
    }
}
