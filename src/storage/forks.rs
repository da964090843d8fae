//! Forks and rewinds of a session. Each becomes visible in one transaction.
//!
//! A rewind copies the whole session first, and then removes the messages after its target, so that nothing is lost.

use super::append::{analyzed, append_in_transaction};
use super::copies::{
    Attempt, COPY_REVISIONS, Copy, CopyPlan, Inserted, LOCK_FORK_SOURCE, SourceState, state_at,
    tokens_through,
};
use super::rows::{self, session_columns};
use super::statement::{DbRow as _, Sql, Transaction};
use super::{AppendOutcome, AppendRequest, Store, StoreError};
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::session::{ForkKind, Session};
use uuid::Uuid;

/// The result of [`Store::fork_session`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForkOutcome {
    /// The new session is complete and durable.
    Forked(Box<Session>),
    /// There is no session to fork. Nothing was written.
    NotFound,
    /// The session has fewer messages. Nothing was written.
    AfterEnd { last_seq: i64 },
    /// A session with the new id exists. Nothing was written.
    Exists,
}

/// The result of [`Store::fork_and_append`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForkAppendOutcome {
    /// The new session is complete and durable, with the exchange.
    Appended(PersistedExchange),
    /// The source has another incarnation or fewer messages than expected. Nothing was written.
    SourceChanged,
    /// A session with the new id exists, or the id is bound to a user. Nothing was written.
    Exists,
    /// The source belongs to another user than the one that the exchange names. Nothing was written.
    UserMismatch,
}

/// The result of [`Store::rewind_session`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RewindOutcome {
    /// The session ends at the target, and the branch has all messages that it had before.
    Rewound(Box<Session>),
    /// The session ends at the target already. Nothing was written.
    Unchanged(Box<Session>),
    /// There is no such session. Nothing was written.
    NotFound,
    /// The session has fewer messages. Nothing was written.
    AfterEnd { last_seq: i64 },
    /// The session has more messages than may be copied. Nothing was written.
    TooLarge { last_seq: i64 },
}

impl Store {
    /// Creates a session with the messages of `source` up to `through_seq`, and with the revisions whose summary covers none
    /// of the others.
    pub async fn fork_session(
        &self,
        tenant: &TenantId,
        source: &SessionId,
        target: &SessionId,
        through_seq: i64,
    ) -> Result<ForkOutcome, StoreError> {
        loop {
            let plan = self.plan_copy(tenant, source, target, through_seq).await?;
            let attempt = self.within_limit(self.try_to_fork(&plan, through_seq)).await;
            if let Some(outcome) = self.end_copy(plan, attempt).await? {
                return Ok(outcome);
            }
        }
    }

    async fn try_to_fork(
        &self,
        plan: &CopyPlan<'_>,
        through_seq: i64,
    ) -> Result<Attempt<ForkOutcome>, StoreError> {
        let CopyPlan { tenant, source, target, .. } = *plan;
        self.check_not_importing(tenant, target).await?;
        self.set_lineage(tenant, source).await?;
        let mut transaction = self.begin(tenant).await?;
        let locked = SourceState::lock(&mut transaction, LOCK_FORK_SOURCE, tenant, source).await?;
        let Some(source_state) = locked else { return Ok(Attempt::Rejected(ForkOutcome::NotFound)) };
        if through_seq > source_state.last_seq {
            return Ok(Attempt::Rejected(ForkOutcome::AfterEnd { last_seq: source_state.last_seq }));
        }
        if source_state.lineage.is_none() {
            // The session was erased, and created again, since it got its lineage.
            return Ok(Attempt::Rejected(ForkOutcome::NotFound));
        }
        let (kind, forked_through) = (ForkKind::Fork, through_seq);
        let mut copy = Copy { plan, through_seq, source_state, kind, forked_through };
        let mut transaction = match copy.insert(self, transaction).await? {
            Inserted::Complete(transaction) => transaction,
            Inserted::Exists => return Ok(Attempt::Rejected(ForkOutcome::Exists)),
            Inserted::SourceChanged => return Ok(Attempt::SourceChanged),
        };
        let session = read_session(&mut transaction, tenant, target).await?;
        transaction.commit().await?;
        Ok(Attempt::Committed(ForkOutcome::Forked(Box::new(session))))
    }

    /// Forks `source`, whose incarnation is the expected one of the request, through `through_seq`, and appends the exchange to
    /// the new session, the one of the request. Both become visible in one transaction, so that no fork without the exchange exists.
    pub async fn fork_and_append(
        &self,
        source: &SessionId,
        through_seq: i64,
        request: &AppendRequest,
    ) -> Result<ForkAppendOutcome, StoreError> {
        // The transaction checks the incarnation of the source.
        let appended = AppendRequest { expected_incarnation: None, ..request.clone() };
        let appended = analyzed(self.analyzer(), appended).await;
        loop {
            let plan = self.plan_copy(&request.tenant, source, &request.session, through_seq).await?;
            let attempt =
                self.within_limit(self.try_to_fork_and_append(&plan, through_seq, request, &appended)).await;
            if let Some(outcome) = self.end_copy(plan, attempt).await? {
                return Ok(outcome);
            }
        }
    }

    async fn try_to_fork_and_append(
        &self,
        plan: &CopyPlan<'_>,
        through_seq: i64,
        request: &AppendRequest,
        appended: &AppendRequest,
    ) -> Result<Attempt<ForkAppendOutcome>, StoreError> {
        let CopyPlan { tenant, source, target, .. } = *plan;
        self.check_not_importing(tenant, target).await?;
        self.set_lineage(tenant, source).await?;
        let mut transaction = self.begin(tenant).await?;
        let locked = SourceState::lock(&mut transaction, LOCK_FORK_SOURCE, tenant, source).await?;
        let is_expected = |locked: &SourceState| {
            request.expected_incarnation.is_none_or(|expected| locked.incarnation == expected)
                && through_seq <= locked.last_seq
                && locked.lineage.is_some()
        };
        let Some(source_state) = locked.filter(is_expected) else {
            return Ok(Attempt::Rejected(ForkAppendOutcome::SourceChanged));
        };
        let (kind, forked_through) = (ForkKind::Fork, through_seq);
        let mut copy = Copy { plan, through_seq, source_state, kind, forked_through };
        let mut transaction = match copy.insert(self, transaction).await? {
            Inserted::Complete(transaction) => transaction,
            Inserted::Exists => return Ok(Attempt::Rejected(ForkAppendOutcome::Exists)),
            Inserted::SourceChanged => return Ok(Attempt::SourceChanged),
        };
        let appended = append_in_transaction(&mut transaction, std::slice::from_ref(appended)).await?;
        match appended.into_iter().next().ok_or(StoreError::BatchFailed)? {
            AppendOutcome::Appended(appended) => {
                transaction.commit().await?;
                Ok(Attempt::Committed(ForkAppendOutcome::Appended(appended)))
            }
            AppendOutcome::UserMismatch => Ok(Attempt::Rejected(ForkAppendOutcome::UserMismatch)),
            AppendOutcome::KeyReused | AppendOutcome::LastSeqMismatch { .. } => {
                Err(StoreError::corrupt("a new session")("it has idempotency keys"))
            }
        }
    }

    /// Removes the messages after `after_seq` from a session, which then is what a fork through `after_seq` would be. Before,
    /// copies the whole session to `branch`, a session that does not exist. The branch is not in the search index, because
    /// searches would find each message that both have in common twice.
    ///
    /// A running consolidation of the session loses its lease. The session gets another incarnation, so that no copy of it in
    /// the memory of a replica is used again.
    pub async fn rewind_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        branch: &SessionId,
        after_seq: i64,
        max_messages: i64,
    ) -> Result<RewindOutcome, StoreError> {
        loop {
            let plan = self.plan_copy(tenant, session, branch, max_messages).await?;
            let attempt = self.within_limit(self.try_to_rewind(&plan, after_seq, max_messages)).await;
            if let Some(outcome) = self.end_copy(plan, attempt).await? {
                self.note_erased_terms();
                return Ok(outcome);
            }
        }
    }

    async fn try_to_rewind(
        &self,
        plan: &CopyPlan<'_>,
        after_seq: i64,
        max_messages: i64,
    ) -> Result<Attempt<RewindOutcome>, StoreError> {
        const LOCK_REWIND_TARGET: Sql = Sql {
            postgres: "SELECT user_id, last_seq, revision, incarnation, lineage, language FROM sessions
                WHERE tenant_id = $1 AND session_id = $2 FOR UPDATE",
            sqlite: "SELECT user_id, last_seq, revision, incarnation, lineage, language FROM sessions
                WHERE tenant_id = $1 AND session_id = $2 AND import_token IS NULL",
        };
        let CopyPlan { tenant, source: session, target: branch, .. } = *plan;
        let mut transaction = self.begin(tenant).await?;
        let locked = SourceState::lock(&mut transaction, LOCK_REWIND_TARGET, tenant, session).await?;
        let Some(source_state) = locked else { return Ok(Attempt::Rejected(RewindOutcome::NotFound)) };
        let last_seq = source_state.last_seq;
        // A session without messages does not exist, but a rewind to its beginning can be repeated.
        if last_seq == 0 && after_seq > 0 {
            return Ok(Attempt::Rejected(RewindOutcome::NotFound));
        }
        if after_seq > last_seq {
            return Ok(Attempt::Rejected(RewindOutcome::AfterEnd { last_seq }));
        }
        if after_seq == last_seq {
            let session = read_session(&mut transaction, tenant, session).await?;
            return Ok(Attempt::Rejected(RewindOutcome::Unchanged(Box::new(session))));
        }
        if last_seq > max_messages {
            return Ok(Attempt::Rejected(RewindOutcome::TooLarge { last_seq }));
        }
        let statement = transaction.statement(SET_LINEAGE).bind(tenant.as_str()).bind(session.as_str());
        statement.bind(Uuid::new_v4()).execute().await?;
        let (through_seq, kind, forked_through) = (last_seq, ForkKind::Rewind, after_seq);
        let mut copy = Copy { plan, through_seq, source_state, kind, forked_through };
        let mut transaction = match copy.insert(self, transaction).await? {
            Inserted::Complete(transaction) => transaction,
            Inserted::Exists => {
                return Err(StoreError::corrupt("the id of a branch")("another session has it"));
            }
            Inserted::SourceChanged => return Ok(Attempt::SourceChanged),
        };
        shorten(&mut transaction, tenant, session, branch, after_seq).await?;
        let session = read_session(&mut transaction, tenant, session).await?;
        transaction.commit().await?;
        Ok(Attempt::Committed(RewindOutcome::Rewound(Box::new(session))))
    }

    /// Gives a session its lineage in a transaction of its own, so that exchanges of the session do not wait for the fork.
    async fn set_lineage(&self, tenant: &TenantId, session: &SessionId) -> Result<(), StoreError> {
        let statement = self.statement(tenant, SET_LINEAGE).bind(session.as_str());
        statement.bind(Uuid::new_v4()).execute().await?;
        Ok(())
    }
}

/// Gives a session its lineage, which all copies of it, and their copies, get. So a redaction finds every copy of a message, even
/// if the session itself was erased.
const SET_LINEAGE: &str =
    "UPDATE sessions SET lineage = $3 WHERE tenant_id = $1 AND session_id = $2 AND lineage IS NULL";

async fn read_session(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Session, StoreError> {
    const SELECT_COPIED_SESSION: &str =
        concat!("SELECT ", session_columns!(), " FROM sessions WHERE tenant_id = $1 AND session_id = $2");
    let statement = transaction.statement(SELECT_COPIED_SESSION);
    let row = statement.bind(tenant.as_str()).bind(session.as_str()).read().await?;
    rows::session(&row.ok_or(sqlx::Error::RowNotFound)?)
}

/// Removes the messages of a session after `after_seq`, with their idempotency keys. Sets summary,
/// cursor and revisions back to that message.
async fn shorten(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    branch: &SessionId,
    after_seq: i64,
) -> Result<(), StoreError> {
    /// Returns the last revision before the first one that covers a removed message.
    const SELECT_KEPT_REVISION: &str = "\
        SELECT coalesce(min(r.revision), max(s.revision) + 1) - 1 AS revision
        FROM sessions AS s LEFT JOIN revisions AS r
            ON r.tenant_id = $1 AND r.session_id = $2 AND r.cursor_seq > $3
        WHERE s.tenant_id = $1 AND s.session_id = $2";
    macro_rules! shorten_session {
        ($now:literal, $greatest:literal, $step:literal, $hour:literal, $incarnation:literal) => {
            concat!(
                "UPDATE sessions AS s SET last_seq = $3, tokens = n.tokens, stored_bytes = n.stored_bytes, cursor_seq = n.cursor_seq,
                    cursor_tokens = n.cursor_tokens, summary = n.summary, summary_words = n.summary_words,
                    summary_tokens = n.summary_tokens, revision = $5, lease_token = NULL, lease_until = NULL,
                    failures = 0, retry_at = NULL, last_failure = NULL, incarnation = ", $incarnation,
                    ", updated_at = n.updated_at,
                    activity_hour = ", $hour,
                " FROM (", state_at!($greatest, "(", $now, ", s.updated_at + ", $step, ") AS updated_at"),
                ") AS n WHERE s.tenant_id = $1 AND s.session_id = $2"
            )
        };
    }
    const SHORTEN_SESSION: Sql = Sql {
        postgres: shorten_session!(
            "now()",
            "greatest",
            "interval '1 microsecond'",
            "floor(extract(epoch FROM n.updated_at) / 3600)",
            "gen_random_uuid()"
        ),
        sqlite: shorten_session!("$6", "max", "1", "n.updated_at / 3600000000", "randomblob(16)"),
    };
    const DELETE_REVISIONS_AFTER: &str =
        "DELETE FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision > $3";
    const ADVANCE_REVISION: &str =
        "UPDATE sessions SET revision = revision + $3 WHERE tenant_id = $1 AND session_id = $2";
    const REMOVE_AFTER: [&str; 2] = [
        "DELETE FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq > $3",
        "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 AND last_seq > $3",
    ];
    let (tenant, session) = (tenant.as_str(), session.as_str());
    let statement = transaction.statement(SELECT_KEPT_REVISION).bind(tenant).bind(session).bind(after_seq);
    let row = statement.read().await?.ok_or(sqlx::Error::RowNotFound)?;
    let kept_revision: i64 = row.field("revision")?;
    // The summary is that of the latest revision that covers no removed message. It may follow the kept ones.
    let statement = transaction.statement(SHORTEN_SESSION).bind(tenant).bind(session).bind(after_seq);
    statement.bind(i64::MAX).bind(kept_revision).bind_now().execute().await?;
    let statement = transaction.statement(DELETE_REVISIONS_AFTER).bind(tenant).bind(session);
    statement.bind(kept_revision).execute().await?;
    // Revisions that belong to the kept messages can follow a removed one. The branch has them.
    let statement = transaction.statement(COPY_REVISIONS).bind(tenant).bind(branch.as_str()).bind(session);
    let statement = statement.bind(after_seq).bind(kept_revision + 1).bind(i64::MAX);
    let copied = statement.execute().await?.cast_signed();
    let statement = transaction.statement(ADVANCE_REVISION).bind(tenant).bind(session).bind(copied);
    statement.execute().await?;
    for sql in REMOVE_AFTER {
        transaction.statement(sql).bind(tenant).bind(session).bind(after_seq).execute().await?;
    }
    Ok(())
}
