//! Erasure of sessions and users.
//!
//! On Postgres, an erasure is one transaction for each 500 sessions, for which only writers of the same sessions wait. SQLite has
//! one writer, so there, an erasure first hides the sessions, in one short transaction: a hidden session has no history, summary, user or metadata any
//! more, and its id is reserved, as that of an import that was abandoned. Then the rows of the hidden sessions are deleted in
//! small transactions, between which others write, and finally the reservations. If the process dies meanwhile, the next start
//! continues, and so does a request that writes to the session.
//!
//! Triggers remove the terms of deleted messages from the search index. Searches do not return messages of hidden sessions.

use super::pool::retry_on_deadlock;
use super::rows;
use super::statement::{AnyRow, DbRow as _, Transaction};
use super::values::to_i64;
use super::{Store, StoreError};
use crate::domain::id::{SessionId, TenantId, UserId};
use serde_json::json;
use std::time::{Duration, Instant};

/// Time after which a transaction ends and lets others write.
const TRANSACTION_TIME: Duration = Duration::from_millis(40);
/// Number of sessions of a user that a transaction hides.
const MAX_HIDDEN_SESSIONS: usize = 250;
/// Number of sessions of a user that a transaction of Postgres deletes, and number of their messages from which it deletes no further
/// session. Short sessions take about a millisecond each.
const MAX_ERASED_SESSIONS: i64 = 500;
const MAX_ERASED_MESSAGES: i64 = 50_000;
/// Number of versions of a memory document that a transaction deletes.
const MAX_VERSIONS: i64 = 32;

/// Hides the sessions that a query returns on SQLite, and the branches that rewinds removed from them. `CROSS JOIN` keeps SQLite
/// from reading all forks of the tenant. Another incarnation, and no lease, keep others from writing to them.
macro_rules! hide_with_branches {
    ($sessions:expr) => {
        concat!(
            "WITH RECURSIVE erased (session_id) AS (",
            $sessions,
            " UNION SELECT b.session_id FROM erased CROSS JOIN sessions AS b
                ON b.tenant_id = $1 AND b.forked_from = erased.session_id AND b.fork_kind = 'rewind'
            )
            UPDATE sessions SET import_token = randomblob(16), import_until = 0, import_bound = NULL,
                incarnation = randomblob(16), user_id = '', metadata = '{}', last_seq = 0, tokens = 0, stored_bytes = 0,
                cursor_seq = 0, cursor_tokens = 0, summary = '', summary_words = 0, summary_tokens = 0,
                revision = 0, lease_token = NULL, lease_until = NULL, failures = 0, retry_at = NULL, last_failure = NULL,
                forked_from = NULL, forked_through = NULL, fork_kind = NULL, lineage = NULL, retention_seconds = NULL,
                branched_at = NULL
            WHERE tenant_id = $1 AND session_id IN (SELECT session_id FROM erased) AND import_until IS NOT 0
            RETURNING session_id"
        )
    };
}
pub(super) use hide_with_branches;

/// A part of the erasure of a user.
struct ErasedPart {
    /// The user had no session. Sessions that another request has erased meanwhile do not count: it may not have erased the others yet.
    is_complete: bool,
    /// Something was erased.
    was_known: bool,
}

impl Store {
    /// Erases a session with its user, history, summary, revisions and idempotency keys, and the branches that rewinds removed
    /// from it. Returns `false` if there was none.
    pub async fn erase_session(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, StoreError> {
        /// A trigger deletes the branches.
        const DELETE_SESSION: &str = "DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        const HIDE_SESSION: &str = hide_with_branches!(
            "SELECT $2 WHERE EXISTS (SELECT 1 FROM sessions WHERE tenant_id = $1 AND session_id = $2)"
        );
        if self.sqlite().is_none() {
            let erase =
                async || self.statement(tenant, DELETE_SESSION).bind(session.as_str()).execute().await;
            let was_known = retry_on_deadlock(erase).await? > 0;
            return Ok(was_known);
        }
        let hide = async || {
            let _turn = self.copy_turn().await?;
            let mut transaction = self.begin(tenant).await?;
            let statement = transaction.statement(HIDE_SESSION).bind(tenant.as_str()).bind(session.as_str());
            let hidden = statement.read_all().await?;
            commit_hidden(transaction, tenant, &hidden).await
        };
        let hidden = self.using_reserve(hide).await?;
        if hidden.is_empty() {
            // An interrupted erasure may have hidden it, or its branches.
            let hidden = self.hidden_sessions(tenant).await?;
            if !hidden.is_empty() {
                self.remove_erased(tenant, &hidden).await?;
            }
            return Ok(false);
        }
        self.remove_erased(tenant, &hidden).await?;
        Ok(true)
    }

    /// Erases the memory document of a user, its versions, all sessions and the retention of the user. Returns `false` if there
    /// was nothing. A user with very many sessions is erased in several transactions.
    pub async fn erase_user(&self, tenant: &TenantId, user: &UserId) -> Result<bool, StoreError> {
        const HIDE_SESSIONS: &str = hide_with_branches!(
            "SELECT * FROM (SELECT session_id FROM sessions WHERE tenant_id = $1 AND user_id = $2 LIMIT $3)"
        );
        const DELETE_FROM_USER: [&str; 2] = [
            "DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2",
            "DELETE FROM retention_rules WHERE tenant_id = $1 AND user_id = $2",
        ];
        if self.sqlite().is_none() {
            let mut was_known = false;
            loop {
                let erase = || self.within_limit(self.erase_from_user(tenant, user));
                let erased = retry_on_deadlock(erase).await?;
                was_known |= erased.was_known;
                if erased.is_complete {
                    break;
                }
            }
            return Ok(was_known);
        }
        self.delete_old_versions(tenant, user).await?;
        let hide = async || {
            let _turn = self.copy_turn().await?;
            let mut transaction = self.begin(tenant).await?;
            let mut deleted = 0;
            for sql in DELETE_FROM_USER {
                let statement = transaction.statement(sql).bind(tenant.as_str());
                deleted += statement.bind(user.as_str()).execute().await?;
            }
            let statement = transaction.statement(HIDE_SESSIONS).bind(tenant.as_str()).bind(user.as_str());
            let hidden = statement.bind(to_i64(MAX_HIDDEN_SESSIONS)).read_all().await?;
            Ok((deleted > 0, commit_hidden(transaction, tenant, &hidden).await?))
        };
        let mut was_known = false;
        loop {
            let (deleted, hidden) = self.using_reserve(&hide).await?;
            was_known |= deleted || !hidden.is_empty();
            if hidden.len() < MAX_HIDDEN_SESSIONS {
                break;
            }
        }
        // Including sessions that an interrupted erasure has hidden, which have no user any more.
        let hidden = self.hidden_sessions(tenant).await?;
        if was_known || !hidden.is_empty() {
            self.remove_erased(tenant, &hidden).await?;
        }
        Ok(was_known)
    }

    /// Erases the memory document and the retention of a user on Postgres, and some sessions.
    async fn erase_from_user(&self, tenant: &TenantId, user: &UserId) -> Result<ErasedPart, StoreError> {
        /// Locks sessions in the order in which exchanges lock them. A session that is added meanwhile, as by a fork that had locked its
        /// source before, remains for the next transaction, because to lock it now could cause a deadlock. The condition of the last
        /// activity is one of the index.
        const DELETE_FROM_USER: &str = "\
            WITH wanted AS MATERIALIZED (
                SELECT session_id, activity_hour FROM (
                    SELECT session_id, activity_hour,
                        sum(last_seq) OVER (ORDER BY activity_hour DESC, session_id) - last_seq AS before
                    FROM (
                        SELECT session_id, activity_hour, last_seq FROM sessions WHERE tenant_id = $1 AND user_id = $2
                        ORDER BY activity_hour DESC LIMIT $3
                    ) AS newest
                ) AS counted WHERE before < $4
            ), locked AS MATERIALIZED (
                SELECT session_id FROM sessions
                WHERE tenant_id = $1 AND user_id = $2 AND activity_hour >= (SELECT min(activity_hour) FROM wanted)
                    AND session_id = ANY (ARRAY(SELECT session_id FROM wanted))
                ORDER BY session_id FOR UPDATE
            ), deleted_sessions AS (
                DELETE FROM sessions
                WHERE tenant_id = $1 AND user_id = $2 AND activity_hour >= (SELECT min(activity_hour) FROM wanted)
                    AND session_id = ANY (ARRAY(SELECT session_id FROM locked))
                RETURNING 1
            ), deleted_memory AS (
                DELETE FROM memories WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
            ), deleted_rule AS (
                DELETE FROM retention_rules WHERE tenant_id = $1 AND user_id = $2 RETURNING 1
            )
            SELECT NOT EXISTS (SELECT FROM wanted) AS is_complete, EXISTS (SELECT FROM deleted_memory)
                OR EXISTS (SELECT FROM deleted_sessions) OR EXISTS (SELECT FROM deleted_rule) AS was_known";
        let mut transaction = self.begin(tenant).await?;
        let statement = transaction.statement(DELETE_FROM_USER).bind(tenant.as_str()).bind(user.as_str());
        let statement = statement.bind(MAX_ERASED_SESSIONS).bind(MAX_ERASED_MESSAGES);
        let row = statement.read().await?.ok_or(sqlx::Error::RowNotFound)?;
        let erased =
            ErasedPart { is_complete: row.field("is_complete")?, was_known: row.field("was_known")? };
        transaction.commit().await?;
        Ok(erased)
    }

    /// Deletes all versions of a memory document except the last ones, a few at a time.
    async fn delete_old_versions(&self, tenant: &TenantId, user: &UserId) -> Result<(), StoreError> {
        const DELETE_OLD_VERSIONS: &str = "\
            DELETE FROM memory_revisions WHERE tenant_id = $1 AND user_id = $2 AND version <= (
                SELECT min(min(version) + $3, max(version) - $3) FROM memory_revisions WHERE tenant_id = $1 AND user_id = $2
            )";
        let delete = async || {
            let statement = self.statement(tenant, DELETE_OLD_VERSIONS).bind(user.as_str());
            statement.bind(MAX_VERSIONS).execute().await
        };
        while self.using_reserve(&delete).await? > 0 {}
        Ok(())
    }

    /// Removes sessions that were hidden, and their traces in the file.
    pub(super) async fn remove_erased(
        &self,
        tenant: &TenantId,
        hidden: &[SessionId],
    ) -> Result<(), StoreError> {
        self.using_reserve(|| self.remove_abandoned(tenant, hidden)).await?;
        self.remove_erased_traces().await;
        Ok(())
    }

    /// Removes what SQLite may keep of erased sessions outside of its rows; [`Self::merge_index`] removes their terms later.
    pub async fn remove_erased_traces(&self) {
        if let Some(database) = self.sqlite() {
            self.note_erased_terms();
            database.truncate_wal().await;
            database.fill_disk_reserve();
        }
    }

    /// Returns all hidden sessions of a tenant.
    async fn hidden_sessions(&self, tenant: &TenantId) -> Result<Vec<SessionId>, StoreError> {
        const SELECT_HIDDEN: &str =
            "SELECT session_id FROM sessions WHERE tenant_id = $1 AND import_until = 0";
        let rows = self.statement(tenant, SELECT_HIDDEN).read_all().await?;
        rows.iter().map(rows::session_id).collect()
    }

    /// Runs an erasure or a part of it. On a full disk, SQLite tries again with the space that is reserved for erasures.
    pub(super) async fn using_reserve<T, F>(&self, erase: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        loop {
            match erase().await {
                Err(error) if self.makes_room(&error) => {}
                erased => return erased,
            }
        }
    }

    /// Returns `true` if an erasure or a redaction failed because SQLite's disk is full, and now has the space that is reserved
    /// for it.
    pub(super) fn makes_room(&self, error: &StoreError) -> bool {
        let Some(database) = self.sqlite() else { return false };
        let has_room = error.is_disk_full() && database.release_disk_reserve();
        if has_room {
            tracing::warn!(
                "the disk is full: an erasure or redaction uses the space that is reserved for it"
            );
        }
        has_room
    }

    /// Deletes the rows of hidden sessions and of abandoned imports on SQLite, in small transactions. Other sessions are ignored.
    pub(super) async fn remove_abandoned(
        &self,
        tenant: &TenantId,
        sessions: &[SessionId],
    ) -> Result<(), StoreError> {
        let Some(database) = self.sqlite() else { return Ok(()) };
        let mut sessions = sessions;
        while !sessions.is_empty() {
            let _turn = database.removal_turns.wait().await;
            let mut transaction = self.begin(tenant).await?;
            let begun = Instant::now();
            while let Some((session, others)) = sessions.split_first()
                && begun.elapsed() < TRANSACTION_TIME
                && remove_rows(&mut transaction, tenant, session, begun).await?
            {
                sessions = others;
            }
            transaction.commit().await?;
        }
        Ok(())
    }
}

/// Releases the forks of hidden sessions, and commits. Returns the sessions.
pub(super) async fn commit_hidden(
    mut transaction: Transaction,
    tenant: &TenantId,
    rows: &[AnyRow],
) -> Result<Vec<SessionId>, StoreError> {
    const RELEASE_FORKS: &str = "\
        UPDATE sessions SET forked_from = NULL, forked_through = NULL, fork_kind = NULL
        WHERE tenant_id = $1 AND forked_from IN (SELECT value FROM json_each($2))";
    let hidden = rows.iter().map(rows::session_id).collect::<Result<Vec<_>, _>>()?;
    if !hidden.is_empty() {
        let ids: Vec<&str> = hidden.iter().map(SessionId::as_str).collect();
        let statement = transaction.statement(RELEASE_FORKS).bind(tenant.as_str());
        statement.bind(json!(ids).to_string()).execute().await?;
    }
    transaction.commit().await?;
    Ok(hidden)
}

/// Deletes rows of a hidden session or an abandoned import, in a transaction that began at `begun`. Returns `true` if nothing is left.
async fn remove_rows(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    begun: Instant,
) -> Result<bool, StoreError> {
    const SELECT_ABANDONED: &str = "\
        SELECT 1 AS found FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND import_until = 0";
    /// Each deletes at most 500 rows, or about 1 MiB.
    const DELETE_ROWS: [&str; 3] = [
        "DELETE FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq <= (
            SELECT max(seq) FROM (
                SELECT seq, sum(bytes) OVER (ORDER BY seq) - bytes AS before FROM (
                    SELECT seq, octet_length(message) AS bytes FROM messages
                    WHERE tenant_id = $1 AND session_id = $2 ORDER BY seq LIMIT 500
                )
            ) WHERE before < 1048576
        )",
        "DELETE FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision <= (
            SELECT max(revision) FROM (
                SELECT revision, sum(bytes) OVER (ORDER BY revision) - bytes AS before FROM (
                    SELECT revision,
                        octet_length(summary) + octet_length(added) + coalesce(octet_length(meta), 0) AS bytes
                    FROM revisions WHERE tenant_id = $1 AND session_id = $2 ORDER BY revision LIMIT 500
                )
            ) WHERE before < 1048576
        )",
        "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 AND key <= (
            SELECT max(key) FROM (
                SELECT key FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 ORDER BY key LIMIT 500
            )
        )",
    ];
    /// An abandoned import leaves the binding that the session had before.
    const END_RESERVATION: [&str; 2] = [
        "UPDATE sessions SET import_token = NULL, import_until = NULL, import_bound = NULL, retained_from = NULL
        WHERE tenant_id = $1 AND session_id = $2 AND import_bound = 1",
        "DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND import_until = 0",
    ];
    let (tenant_id, session_id) = (tenant.as_str(), session.as_str());
    let statement = transaction.statement(SELECT_ABANDONED).bind(tenant_id).bind(session_id);
    if statement.read().await?.is_none() {
        return Ok(true);
    }
    for sql in DELETE_ROWS {
        while transaction.statement(sql).bind(tenant_id).bind(session_id).execute().await? > 0 {
            if begun.elapsed() >= TRANSACTION_TIME {
                return Ok(false);
            }
        }
    }
    for sql in END_RESERVATION {
        transaction.statement(sql).bind(tenant_id).bind(session_id).execute().await?;
    }
    Ok(true)
}
