//! Running a statement on either database, so that SQL and decoding that are the same for both exist once.

use super::postgres::{self, Postgres};
use super::sqlite::{self, Sqlite};
use super::values::DbTime;
use super::{AppendOutcome, AppendRequest, StoreError};
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

impl<P, S> Statement<'_, P, S> {
    pub(super) fn bind<'t>(self, value: impl Parameter<'t>) -> Self {
        match self {
            Self::Postgres { on, query } => Self::Postgres { on, query: query.bind(value) },
            Self::Sqlite { on, query, now } => Self::Sqlite { on, query: query.bind(value), now },
        }
    }

    /// Binds the current time on SQLite and nothing on Postgres. Must come last; see [`Sql`].
    pub(super) fn bind_now(self) -> Self {
        match self {
            Self::Sqlite { on, query, now } => Self::Sqlite { on, query: query.bind(DbTime(now)), now },
            postgres @ Self::Postgres { .. } => postgres,
        }
    }
}

// The futures of a database have several KiB, which would add up in the futures that await them. So they are boxed.
impl StoreStatement<'_> {
    /// Reads at most one row.
    pub(super) async fn read(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                Box::pin(database.read(tenant, query)).await?.map(AnyRow::Postgres)
            }
            Self::Sqlite { on, query, .. } => Box::pin(on.read(query)).await?.map(AnyRow::Sqlite),
        })
    }

    /// Reads all rows.
    pub(super) async fn read_all(self) -> Result<Vec<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                Box::pin(database.read_all(tenant, query)).await?.into_iter().map(AnyRow::Postgres).collect()
            }
            Self::Sqlite { on, query, .. } => {
                Box::pin(on.read_all(query)).await?.into_iter().map(AnyRow::Sqlite).collect()
            }
        })
    }

    /// Reads all rows of a statement that can keep a core busy: on SQLite, on a thread of low priority.
    pub(super) async fn read_all_of_search(self) -> Result<Vec<AnyRow>, StoreError> {
        match self {
            Self::Sqlite { on, query, .. } => {
                let rows = Box::pin(on.read_all_of_search(query)).await?;
                Ok(rows.into_iter().map(AnyRow::Sqlite).collect())
            }
            other @ Self::Postgres { .. } => other.read_all().await,
        }
    }

    /// Reads all rows of a statement that sorts and has a limit. On Postgres, the rows must come sorted from an index, at
    /// least by their first sort key. Otherwise, a plan for an average tenant reads and sorts all rows of a large one.
    pub(super) async fn read_all_in_index_order(self) -> Result<Vec<AnyRow>, StoreError> {
        match self {
            Self::Postgres { on: (database, Some(tenant)), query } => {
                let rows = Box::pin(database.read_all_in_index_order(tenant, query)).await?;
                Ok(rows.into_iter().map(AnyRow::Postgres).collect())
            }
            other => other.read_all().await,
        }
    }

    /// Runs a statement that writes at most one row, commits, and returns that row.
    pub(super) async fn write_returning(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on: (database, tenant), query } => {
                Box::pin(database.write_returning(tenant, query)).await?.map(AnyRow::Postgres)
            }
            Self::Sqlite { on, query, .. } => Box::pin(on.write_returning(query)).await?.map(AnyRow::Sqlite),
        })
    }

    /// Runs a text of several statements on SQLite, or of one on Postgres, in one transaction, and returns the last row. A
    /// statement on SQLite can refer to the success of the one before it by `changes()`.
    pub(super) async fn write_together(self) -> Result<Option<AnyRow>, StoreError> {
        match self {
            Self::Sqlite { on, query, .. } => {
                Ok(Box::pin(on.write_together(query)).await?.map(AnyRow::Sqlite))
            }
            postgres @ Self::Postgres { .. } => postgres.write_returning().await,
        }
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

/// A transaction of several statements, with the permit for its connection. Dropping it rolls it back.
pub(super) enum Transaction {
    Postgres(sqlx::Transaction<'static, sqlx::Postgres>, Held),
    /// With the current time for all statements, as Postgres has it.
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>, OffsetDateTime, Held),
}

impl Transaction {
    pub(super) fn statement(
        &mut self,
        sql: impl Into<Sql>,
    ) -> Statement<'_, &mut PgConnection, &mut SqliteConnection> {
        let sql = sql.into();
        match self {
            Self::Postgres(on, _) => Statement::Postgres { on, query: sqlx::query(sql.postgres) },
            Self::Sqlite(on, now, _) => Statement::Sqlite { on, query: sqlx::query(sql.sqlite), now: *now },
        }
    }

    /// Appends an exchange to a session that the transaction has created or locked.
    pub(super) async fn append_exchange(
        &mut self,
        request: &AppendRequest,
    ) -> Result<AppendOutcome, StoreError> {
        match self {
            Self::Postgres(on, _) => postgres::append_in_transaction(on, request).await,
            Self::Sqlite(on, ..) => sqlite::append_in_transaction(on, request).await,
        }
    }

    pub(super) async fn commit(self) -> Result<(), StoreError> {
        match self {
            Self::Postgres(transaction, _held) => Ok(transaction.commit().await?),
            Self::Sqlite(transaction, _, _held) => Ok(transaction.commit().await?),
        }
    }
}

impl Statement<'_, &mut PgConnection, &mut SqliteConnection> {
    /// Reads at most one row.
    pub(super) async fn read(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on, query } => query.fetch_optional(on).await?.map(AnyRow::Postgres),
            Self::Sqlite { on, query, .. } => query.fetch_optional(on).await?.map(AnyRow::Sqlite),
        })
    }

    /// Reads all rows.
    pub(super) async fn read_all(self) -> Result<Vec<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { on, query } => {
                query.fetch_all(on).await?.into_iter().map(AnyRow::Postgres).collect()
            }
            Self::Sqlite { on, query, .. } => {
                query.fetch_all(on).await?.into_iter().map(AnyRow::Sqlite).collect()
            }
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
