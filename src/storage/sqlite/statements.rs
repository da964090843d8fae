//! Statements that a transaction runs on a connection of sqlx, or on one of rusqlite, which needs no other thread.

use super::write_thread::WriteError;
use crate::storage::StoreError;
use crate::storage::statement::DbRow as _;
use rusqlite::ToSql;
use rusqlite::types::{ToSqlOutput, ValueRef};
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

/// A parameter of a statement, as one of the types of SQLite.
#[derive(Clone, Copy)]
pub(super) enum Value<'v> {
    Null,
    Integer(i64),
    Text(&'v str),
    Blob(&'v [u8]),
}

impl From<i64> for Value<'_> {
    fn from(number: i64) -> Self {
        Self::Integer(number)
    }
}

impl<'v> From<&'v str> for Value<'v> {
    fn from(text: &'v str) -> Self {
        Self::Text(text)
    }
}

impl<'v> From<&'v [u8]> for Value<'v> {
    fn from(bytes: &'v [u8]) -> Self {
        Self::Blob(bytes)
    }
}

impl<T: Into<Self>> From<Option<T>> for Value<'_> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match *self {
            Self::Null => ValueRef::Null,
            Self::Integer(number) => ValueRef::Integer(number),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

/// A row, with columns that are never NULL.
pub(super) trait Columns {
    fn integer(&self, name: &'static str) -> Result<i64, StoreError>;
    fn text(&self, name: &'static str) -> Result<String, StoreError>;
    fn bytes(&self, name: &'static str) -> Result<Vec<u8>, StoreError>;
}

impl Columns for rusqlite::Row<'_> {
    fn integer(&self, name: &'static str) -> Result<i64, StoreError> {
        self.get(name).map_err(StoreError::corrupt(name))
    }

    fn text(&self, name: &'static str) -> Result<String, StoreError> {
        self.get(name).map_err(StoreError::corrupt(name))
    }

    fn bytes(&self, name: &'static str) -> Result<Vec<u8>, StoreError> {
        self.get(name).map_err(StoreError::corrupt(name))
    }
}

impl Columns for SqliteRow {
    fn integer(&self, name: &'static str) -> Result<i64, StoreError> {
        Ok(self.field(name)?)
    }

    fn text(&self, name: &'static str) -> Result<String, StoreError> {
        Ok(self.field(name)?)
    }

    fn bytes(&self, name: &'static str) -> Result<Vec<u8>, StoreError> {
        Ok(self.field(name)?)
    }
}

/// A connection in a transaction. Statements name their parameters `?1`, `?2`, …
pub(super) trait Statements {
    type Error: From<StoreError>;

    /// Runs a statement.
    async fn execute(&mut self, sql: &'static str, values: &[Value<'_>]) -> Result<(), Self::Error>;

    /// Runs a statement and decodes its first row, if there is one.
    async fn read<T>(
        &mut self,
        sql: &'static str,
        values: &[Value<'_>],
        decode: fn(&dyn Columns) -> Result<T, StoreError>,
    ) -> Result<Option<T>, Self::Error>;
}

impl Statements for SqliteConnection {
    type Error = StoreError;

    async fn execute(&mut self, sql: &'static str, values: &[Value<'_>]) -> Result<(), StoreError> {
        query(sql, values).execute(self).await?;
        Ok(())
    }

    async fn read<T>(
        &mut self,
        sql: &'static str,
        values: &[Value<'_>],
        decode: fn(&dyn Columns) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        query(sql, values).fetch_optional(self).await?.map(|row| decode(&row)).transpose()
    }
}

fn query<'v>(sql: &'static str, values: &[Value<'v>]) -> super::Query<'v> {
    values.iter().fold(sqlx::query(sql), |query, value| match *value {
        Value::Null => query.bind(None::<i64>),
        Value::Integer(number) => query.bind(number),
        Value::Text(text) => query.bind(text),
        Value::Blob(bytes) => query.bind(bytes),
    })
}

/// Each call returns a result without waiting.
impl Statements for &rusqlite::Transaction<'_> {
    type Error = WriteError;

    async fn execute(&mut self, sql: &'static str, values: &[Value<'_>]) -> Result<(), WriteError> {
        self.prepare_cached(sql)?.execute(rusqlite::params_from_iter(values))?;
        Ok(())
    }

    async fn read<T>(
        &mut self,
        sql: &'static str,
        values: &[Value<'_>],
        decode: fn(&dyn Columns) -> Result<T, StoreError>,
    ) -> Result<Option<T>, WriteError> {
        let mut statement = self.prepare_cached(sql)?;
        let mut rows = statement.query(rusqlite::params_from_iter(values))?;
        let decoded = rows.next()?.map(|row| decode(row)).transpose()?;
        // Dropping the rows before their end would ignore an error of the statement.
        while rows.next()?.is_some() {}
        Ok(decoded)
    }
}
