//! Transactions of several statements on Postgres.

use super::{Postgres, begin, begin_index, timed_out};
use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
use crate::storage::StoreError;
use crate::storage::statement::Transaction;
use sqlx::SqlSafeStr;

impl Postgres {
    pub(in crate::storage) async fn begin_transaction(
        &self,
        tenant: &TenantId,
    ) -> Result<Transaction, sqlx::Error> {
        self.begin_with(begin(tenant)).await
    }

    /// Begins a transaction on the search index of a tenant, which reads one state of the database if it is a snapshot.
    pub(in crate::storage) async fn begin_index(
        &self,
        tenant: &TenantId,
        is_snapshot: bool,
    ) -> Result<Transaction, sqlx::Error> {
        self.begin_with(begin_index(tenant, is_snapshot)).await
    }

    /// Begins a transaction of no tenant.
    pub(in crate::storage) async fn begin_global(&self) -> Result<Transaction, sqlx::Error> {
        self.begin_with("BEGIN").await
    }

    async fn begin_with(&self, sql: impl SqlSafeStr) -> Result<Transaction, sqlx::Error> {
        let (transaction, held) = self.pool.begin_with(sql).await?;
        Ok(Transaction::Postgres(transaction, held))
    }

    /// Runs the future of a transaction within the statement timeout. A transaction that takes longer is rolled back.
    pub(in crate::storage) async fn within_statement_timeout<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let limit = self.pool.statement_timeout();
        tokio::time::timeout(limit, transaction).await.unwrap_or_else(|_| Err(timed_out(limit).into()))
    }

    /// Returns the analyzer of the settings.
    pub(in crate::storage) fn analyzer(&self) -> Option<Analyzer> {
        self.search
    }
}
