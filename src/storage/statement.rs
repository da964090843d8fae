//! Running a statement on either database, so that SQL and decoding that are the same for both exist once.

use super::StoreError;
use super::postgres::{self, Postgres};
use super::sqlite::{self, Sqlite};
use super::values::DbTime;
use crate::domain::id::TenantId;
use sqlx::postgres::PgRow;
use sqlx::sqlite::SqliteRow;
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

/// A statement with its parameters, and the database that runs it.
pub(super) enum Statement<'d> {
    Postgres { database: &'d Postgres, tenant: Option<&'d TenantId>, query: postgres::Query<'d> },
    Sqlite { database: &'d Sqlite, query: sqlite::Query<'d> },
}

impl Statement<'_> {
    pub(super) fn bind<'t>(self, value: impl Parameter<'t>) -> Self {
        match self {
            Self::Postgres { database, tenant, query } => {
                Self::Postgres { database, tenant, query: query.bind(value) }
            }
            Self::Sqlite { database, query } => Self::Sqlite { database, query: query.bind(value) },
        }
    }

    /// Binds the current time on SQLite and nothing on Postgres. Must come last; see [`Sql`].
    pub(super) fn bind_now(self) -> Self {
        match self {
            Self::Sqlite { database, query } => {
                Self::Sqlite { database, query: query.bind(DbTime(sqlite::now())) }
            }
            postgres @ Self::Postgres { .. } => postgres,
        }
    }

    /// Reads at most one row.
    pub(super) async fn read(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { database, tenant, query } => {
                database.read(tenant, query).await?.map(AnyRow::Postgres)
            }
            Self::Sqlite { database, query } => database.read(query).await?.map(AnyRow::Sqlite),
        })
    }

    /// Reads all rows.
    pub(super) async fn read_all(self) -> Result<Vec<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { database, tenant, query } => {
                database.read_all(tenant, query).await?.into_iter().map(AnyRow::Postgres).collect()
            }
            Self::Sqlite { database, query } => {
                database.read_all(query).await?.into_iter().map(AnyRow::Sqlite).collect()
            }
        })
    }

    /// Runs a statement that writes at most one row, commits, and returns that row.
    pub(super) async fn write_returning(self) -> Result<Option<AnyRow>, StoreError> {
        Ok(match self {
            Self::Postgres { database, tenant, query } => {
                database.write_returning(tenant, query).await?.map(AnyRow::Postgres)
            }
            Self::Sqlite { database, query } => database.write_returning(query).await?.map(AnyRow::Sqlite),
        })
    }

    /// Runs a statement, commits, and returns the number of rows that it changed.
    pub(super) async fn execute(self) -> Result<u64, StoreError> {
        Ok(match self {
            Self::Postgres { database, tenant, query } => database.execute(tenant, query).await?,
            Self::Sqlite { database, query } => database.execute(query).await?,
        })
    }
}
