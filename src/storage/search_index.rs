//! Maintenance of the search index: rebuilding it for another analyzer, and merging it.

use super::rows;
use super::search_terms::{Replaces, index_messages, recognise_language};
use super::statement::{DbRow as _, Purpose, Sql, Transaction};
use super::values::user_from_column;
use super::{Store, StoreError};
use crate::domain::search::analyzer::Analyzer;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// The state of the search index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexState {
    /// The index has all messages, by the analyzer of the settings.
    Complete,
    /// The index was built with another analyzer, with this [`Analyzer::version`].
    OtherAnalyzer(String),
    /// Messages may be missing: the service has run without search.
    Incomplete,
}

impl Store {
    /// Returns the analyzer of the index, or `None` if search is disabled. All replicas use the analyzer that the index was built with,
    /// not that of their settings.
    pub fn analyzer(&self) -> Option<Analyzer> {
        *self.analyzer.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state of the index.
    pub async fn index_state(&self, own: Analyzer) -> Result<IndexState, StoreError> {
        const SELECT_STATE: &str = "\
            SELECT (SELECT version FROM search_analyzer) AS version, EXISTS (SELECT 1 FROM tenants) AS has_sessions";
        let row = self.database.global_statement(SELECT_STATE).read().await?;
        let row = row.ok_or(sqlx::Error::RowNotFound)?;
        Ok(match row.field::<Option<String>>("version")? {
            Some(version) if version == own.version() => IndexState::Complete,
            Some(version) => IndexState::OtherAnalyzer(version),
            None if row.field("has_sessions")? => IndexState::Incomplete,
            None => IndexState::Complete,
        })
    }

    /// Prepares the index for the exchanges and searches of a service, and returns its state. Without search, the index becomes
    /// incomplete.
    pub async fn prepare_index(&self) -> Result<IndexState, StoreError> {
        const FORGET_ANALYZER: &str = "DELETE FROM search_analyzer";
        let Some(own) = self.analyzer() else {
            self.database.global_statement(FORGET_ANALYZER).execute().await?;
            return Ok(IndexState::Incomplete);
        };
        let state = self.index_state(own).await?;
        match &state {
            IndexState::Complete => self.record_analyzer(own).await?,
            IndexState::OtherAnalyzer(version) => {
                // An analyzer of a newer release is unknown: then new messages and queries use that of the settings.
                self.use_analyzer(Analyzer::parse_version(version).unwrap_or(own));
            }
            IndexState::Incomplete => {}
        }
        Ok(state)
    }

    fn use_analyzer(&self, analyzer: Analyzer) {
        *self.analyzer.write().unwrap_or_else(PoisonError::into_inner) = Some(analyzer);
    }

    async fn record_analyzer(&self, analyzer: Analyzer) -> Result<(), StoreError> {
        const RECORD_ANALYZER: &str = "\
            INSERT INTO search_analyzer (id, version) VALUES (1, $1)
            ON CONFLICT (id) DO UPDATE SET version = excluded.version";
        self.database.global_statement(RECORD_ANALYZER).bind(analyzer.version()).execute().await?;
        self.use_analyzer(analyzer);
        Ok(())
    }

    /// Analyses all messages again with this analyzer, session by session. `progress` gets the number of messages so far, which is
    /// returned. Of the branches of rewinds, only the messages that are in the index, which were appended later: searches would find those
    /// that they have in common with their session twice.
    pub async fn reindex(&self, analyzer: Analyzer, progress: impl Fn(u64)) -> Result<u64, StoreError> {
        const SELECT_NEXT_SESSION: Sql = Sql {
            postgres: "SELECT session_id, user_id, last_seq, fork_kind FROM sessions
                WHERE tenant_id = $1 AND session_id > $2 AND last_seq > 0 ORDER BY session_id LIMIT 1 FOR NO KEY UPDATE",
            sqlite: "SELECT session_id, user_id, last_seq, fork_kind FROM sessions
                WHERE tenant_id = $1 AND session_id > $2 AND last_seq > 0 ORDER BY session_id LIMIT 1",
        };
        let mut indexed = 0;
        self.use_analyzer(analyzer);
        for tenant in self.tenants().await? {
            let mut last = String::new();
            loop {
                let mut transaction = self.database.begin(Some(&tenant), Purpose::Exchange).await?;
                let statement = transaction.statement(SELECT_NEXT_SESSION).bind(tenant.as_str());
                let Some(row) = statement.bind(&*last).read().await? else {
                    transaction.rollback().await?;
                    break;
                };
                let (session, user) = (rows::session_id(&row)?, user_from_column(row.field("user_id")?)?);
                let owner = (&session, user.as_ref());
                let seqs = 1..=row.field("last_seq")?;
                let analyzer = recognise_language(&mut transaction, analyzer, &tenant, &session).await?;
                let is_branch = row.field::<Option<&str>>("fork_kind")? == Some("rewind");
                let replaces = if is_branch { Replaces::Existing } else { Replaces::All };
                let added =
                    index_messages(&mut transaction, analyzer, &tenant, owner, seqs, replaces).await?;
                indexed += u64::try_from(added).unwrap_or(0);
                transaction.commit().await?;
                progress(indexed);
                session.as_str().clone_into(&mut last);
            }
        }
        self.record_analyzer(analyzer).await?;
        Ok(indexed)
    }

    /// Records that messages have left the index, so that [`Self::merge_index`] removes their terms from the file.
    pub(super) fn note_erased_terms(&self) {
        self.has_erased_terms.store(true, Ordering::Relaxed);
    }

    /// Merges the index of SQLite if messages have left it, or if that is not known because the process has just started: until a merge,
    /// their terms stay in the file. Other transactions write between its steps.
    pub async fn merge_index(&self) -> Result<(), StoreError> {
        let Some(database) = self.sqlite() else { return Ok(()) };
        if !self.has_erased_terms.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let mut is_first = true;
        while self.merge_step(is_first).await.inspect_err(|_| self.note_erased_terms())? {
            is_first = false;
        }
        database.truncate_wal().await;
        Ok(())
    }

    /// Merges some pages of the index of SQLite. Returns `false` if there is nothing left to be merged.
    async fn merge_step(&self, is_first: bool) -> Result<bool, StoreError> {
        /// A negative number of pages makes all parts of the index one group, which later steps continue with.
        const MERGE: &str = "INSERT INTO search_terms (search_terms, rank) VALUES ('merge', $1)";
        const PAGES: i64 = 500;
        let mut transaction = self.database.begin(None, Purpose::Write).await?;
        let before = total_changes(&mut transaction).await?;
        transaction.statement(MERGE).bind(if is_first { -PAGES } else { PAGES }).execute().await?;
        let after = total_changes(&mut transaction).await?;
        transaction.commit().await?;
        // As documented for FTS5: a merge without work changes fewer than two rows.
        Ok(after - before >= 2)
    }
}

/// Returns the number of rows that the connection to SQLite has changed, including those of the tables behind the index.
async fn total_changes(transaction: &mut Transaction) -> Result<i64, StoreError> {
    let statement = transaction.statement("SELECT total_changes() AS changes");
    Ok(statement.read().await?.ok_or(sqlx::Error::RowNotFound)?.field("changes")?)
}
