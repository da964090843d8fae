//! Transactions of several statements on SQLite.

use super::{Query, Sqlite, now};
use crate::domain::search::analyzer::Analyzer;
use crate::storage::statement::Transaction;
use sqlx::sqlite::SqliteRow;

impl Sqlite {
    /// Runs a text of several statements in one transaction, and returns the last row.
    pub(in crate::storage) async fn write_together(
        &self,
        query: Query<'_>,
    ) -> Result<Option<SqliteRow>, sqlx::Error> {
        let (mut transaction, _held) = self.begin_write().await?;
        let row = query.fetch_all(&mut *transaction).await?.pop();
        transaction.commit().await?;
        Ok(row)
    }

    pub(in crate::storage) async fn begin_transaction(&self) -> Result<Transaction, sqlx::Error> {
        let (transaction, held) = self.begin_write().await?;
        Ok(Transaction::Sqlite(transaction, now(), held))
    }

    pub(in crate::storage) async fn begin_read(&self, is_search: bool) -> Result<Transaction, sqlx::Error> {
        let held = self.permit(&self.read_shares).await?;
        let begun = if is_search { self.searches.begin().await } else { self.readers.begin().await };
        Ok(Transaction::Sqlite(begun?, now(), held))
    }

    /// Returns the analyzer of the settings.
    pub(in crate::storage) fn analyzer(&self) -> Option<Analyzer> {
        self.search
    }
}
