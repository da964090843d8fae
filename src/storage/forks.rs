//! Forks and rewinds of a session, each in one transaction.
//!
//! Both copy a session within the database. The copy has rows of its own, so that erasing one session never affects the other.
//! A rewind copies the whole session first, and then removes the messages after its target, so that nothing is lost.

use super::rows::{self, session_columns};
use super::statement::{AnyRow, DbRow as _, Sql, Transaction};
use super::{AppendOutcome, AppendRequest, Store, StoreError};
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::search::analyzer::Analyzer;
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

/// A part of a session that is copied.
struct Copy<'a> {
    tenant: &'a TenantId,
    source: &'a SessionId,
    target: &'a SessionId,
    /// The last message of the copy.
    through_seq: i64,
    /// The newest revision of the source.
    revision: i64,
    kind: ForkKind,
    /// The last message that both sessions have in common.
    forked_through: i64,
}

/// The state of a session whose row is locked.
struct LockedSession {
    last_seq: i64,
    revision: i64,
    incarnation: Uuid,
    /// `None` if the session was never copied.
    lineage: Option<Uuid>,
}

/// Other transactions may append to the session and consolidate it, but not rewind or erase it.
const LOCK_FORK_SOURCE: Sql = Sql {
    postgres: "SELECT last_seq, revision, incarnation, lineage FROM sessions
        WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0 FOR KEY SHARE",
    sqlite: "SELECT last_seq, revision, incarnation, lineage FROM sessions
        WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0",
};

impl Store {
    /// Creates a session with the messages of `source` up to `through_seq`, and with the revisions whose summary covers none
    /// of the others. Its messages are missing from the search index then.
    pub async fn fork_session(
        &self,
        tenant: &TenantId,
        source: &SessionId,
        target: &SessionId,
        through_seq: i64,
    ) -> Result<ForkOutcome, StoreError> {
        let fork = async {
            self.check_not_importing(tenant, target).await?;
            self.set_lineage(tenant, source).await?;
            let mut transaction = self.begin(tenant).await?;
            let Some(locked) = lock(&mut transaction, LOCK_FORK_SOURCE, tenant, source).await? else {
                return Ok(ForkOutcome::NotFound);
            };
            if through_seq > locked.last_seq {
                return Ok(ForkOutcome::AfterEnd { last_seq: locked.last_seq });
            }
            if locked.lineage.is_none() {
                // The session was erased, and created again, since it got its lineage.
                return Ok(ForkOutcome::NotFound);
            }
            let (revision, kind, forked_through) = (locked.revision, ForkKind::Fork, through_seq);
            let copy = Copy { tenant, source, target, through_seq, revision, kind, forked_through };
            if !copy.insert(&mut transaction).await? {
                return Ok(ForkOutcome::Exists);
            }
            let session = read_session(&mut transaction, tenant, target).await?;
            transaction.commit().await?;
            self.note_unindexed(tenant);
            Ok(ForkOutcome::Forked(Box::new(session)))
        };
        self.within_limit(fork).await
    }

    /// Forks `source`, whose incarnation is the expected one of the request, through `through_seq`, and appends the exchange to
    /// the new session, the one of the request: in one transaction, so that no fork without the exchange exists.
    pub async fn fork_and_append(
        &self,
        source: &SessionId,
        through_seq: i64,
        request: &AppendRequest,
    ) -> Result<ForkAppendOutcome, StoreError> {
        let (tenant, target) = (&request.tenant, &request.session);
        let fork = async {
            self.check_not_importing(tenant, target).await?;
            self.set_lineage(tenant, source).await?;
            let mut transaction = self.begin(tenant).await?;
            let locked = lock(&mut transaction, LOCK_FORK_SOURCE, tenant, source).await?;
            let is_expected = |locked: &LockedSession| {
                request.expected_incarnation.is_none_or(|expected| locked.incarnation == expected)
                    && through_seq <= locked.last_seq
                    && locked.lineage.is_some()
            };
            let Some(locked) = locked.filter(is_expected) else {
                return Ok(ForkAppendOutcome::SourceChanged);
            };
            let (revision, kind, forked_through) = (locked.revision, ForkKind::Fork, through_seq);
            let copy = Copy { tenant, source, target, through_seq, revision, kind, forked_through };
            if !copy.insert(&mut transaction).await? {
                return Ok(ForkAppendOutcome::Exists);
            }
            match transaction.append_exchange(request).await? {
                AppendOutcome::Appended(appended) => {
                    transaction.commit().await?;
                    self.note_unindexed(tenant);
                    Ok(ForkAppendOutcome::Appended(appended))
                }
                AppendOutcome::UserMismatch => Ok(ForkAppendOutcome::UserMismatch),
                AppendOutcome::KeyReused | AppendOutcome::LastSeqMismatch { .. } => {
                    Err(StoreError::corrupt("a new session")("it has idempotency keys"))
                }
            }
        };
        self.within_limit(fork).await
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
        const LOCK_REWIND_TARGET: Sql = Sql {
            postgres: "SELECT last_seq, revision, incarnation, lineage FROM sessions
                WHERE tenant_id = $1 AND session_id = $2 FOR UPDATE",
            sqlite: "SELECT last_seq, revision, incarnation, lineage FROM sessions
                WHERE tenant_id = $1 AND session_id = $2 AND import_token IS NULL",
        };
        let _unindexing = match self {
            Self::Postgres(_) => None,
            Self::Sqlite(database) => Some(database.unindexing.add(tenant, session)),
        };
        self.remove_entries_after(tenant, session, after_seq, max_messages).await?;
        let rewind = async {
            let mut transaction = self.begin(tenant).await?;
            let locked = lock(&mut transaction, LOCK_REWIND_TARGET, tenant, session).await?;
            let Some(LockedSession { last_seq, revision, .. }) = locked else {
                return Ok(RewindOutcome::NotFound);
            };
            // A session without messages does not exist, but a rewind to its beginning can be repeated.
            if last_seq == 0 && after_seq > 0 {
                return Ok(RewindOutcome::NotFound);
            }
            if after_seq > last_seq {
                return Ok(RewindOutcome::AfterEnd { last_seq });
            }
            if after_seq == last_seq {
                let session = read_session(&mut transaction, tenant, session).await?;
                return Ok(RewindOutcome::Unchanged(Box::new(session)));
            }
            if last_seq > max_messages {
                return Ok(RewindOutcome::TooLarge { last_seq });
            }
            let statement = transaction.statement(SET_LINEAGE).bind(tenant.as_str()).bind(session.as_str());
            statement.bind(Uuid::new_v4()).execute().await?;
            let (through_seq, kind, forked_through) = (last_seq, ForkKind::Rewind, after_seq);
            let copy =
                Copy { tenant, source: session, target: branch, through_seq, revision, kind, forked_through };
            if !copy.insert(&mut transaction).await? {
                return Err(StoreError::corrupt("the id of a branch")("another session has it"));
            }
            shorten(&mut transaction, tenant, session, branch, after_seq).await?;
            let session = read_session(&mut transaction, tenant, session).await?;
            transaction.commit().await?;
            Ok(RewindOutcome::Rewound(Box::new(session)))
        };
        self.within_limit(rewind).await
    }

    /// Gives a session its lineage in a transaction of its own, so that exchanges of the session do not wait for the fork.
    async fn set_lineage(&self, tenant: &TenantId, session: &SessionId) -> Result<(), StoreError> {
        let statement = self.statement(tenant, SET_LINEAGE).bind(session.as_str());
        statement.bind(Uuid::new_v4()).execute().await?;
        Ok(())
    }

    pub(super) async fn begin(&self, tenant: &TenantId) -> Result<Transaction, StoreError> {
        Ok(match self {
            Self::Postgres(database) => database.begin_transaction(tenant).await?,
            Self::Sqlite(database) => database.begin_transaction().await?,
        })
    }

    /// Begins a transaction of no tenant.
    pub(super) async fn begin_global(&self) -> Result<Transaction, StoreError> {
        Ok(match self {
            Self::Postgres(database) => Transaction::Postgres(database.pool.begin_with("BEGIN").await?),
            Self::Sqlite(database) => database.begin_transaction().await?,
        })
    }

    /// Returns the analyzer of the settings.
    pub(super) fn analyzer(&self) -> Option<Analyzer> {
        match self {
            Self::Postgres(database) => database.analyzer(),
            Self::Sqlite(database) => database.analyzer(),
        }
    }

    /// Runs the future of a transaction, within the statement timeout on Postgres.
    pub(super) async fn within_limit<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        // The future is boxed because it is large.
        let transaction = Box::pin(transaction);
        match self {
            Self::Postgres(database) => database.within_statement_timeout(transaction).await,
            Self::Sqlite(_) => transaction.await,
        }
    }
}

/// Gives a session its lineage, which all copies of it, and their copies, get. So a redaction finds every copy of a message, even
/// if the session itself was erased.
const SET_LINEAGE: &str =
    "UPDATE sessions SET lineage = $3 WHERE tenant_id = $1 AND session_id = $2 AND lineage IS NULL";

async fn lock(
    transaction: &mut Transaction,
    sql: Sql,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Option<LockedSession>, StoreError> {
    let row = transaction.statement(sql).bind(tenant.as_str()).bind(session.as_str()).read().await?;
    let decode = |row: AnyRow| {
        Ok(LockedSession {
            last_seq: row.field("last_seq")?,
            revision: row.field("revision")?,
            incarnation: row.field("incarnation")?,
            lineage: row.field("lineage")?,
        })
    };
    row.map(decode).transpose()
}

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

/// Sums the tokens of the messages of the session `$2` up to a message.
macro_rules! tokens_through {
    ($seq:literal) => {
        concat!(
            "(SELECT coalesce(sum(tokens), 0) FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq <= ",
            $seq,
            ")"
        )
    };
}

/// Selects `$columns` and the state of the session `$2` as of the message `$3`: its tokens and bytes, and the summary of the latest
/// revision that covers no later message. Revisions after `$4` are left out, because they may have been added since the session
/// was read.
macro_rules! state_at {
    ($($columns:expr),+) => {
        concat!(
            "SELECT ", $($columns,)+ ", ", tokens_through!("$3"), " AS tokens,
                (SELECT coalesce(sum(octet_length(message)), 0) FROM messages
                    WHERE tenant_id = $1 AND session_id = $2 AND seq <= $3) AS stored_bytes,
                coalesce(point.cursor_seq, 0) AS cursor_seq, ", tokens_through!("point.cursor_seq"),
                " AS cursor_tokens, coalesce(point.summary, '') AS summary,
                coalesce(point.summary_words, 0) AS summary_words,
                coalesce(point.summary_tokens, 0) AS summary_tokens
            FROM sessions AS s LEFT JOIN (
                SELECT cursor_seq, summary, summary_words, summary_tokens FROM revisions
                WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq <= $3 AND revision <= $4
                    AND redacted_seq IS NULL
                ORDER BY revision DESC LIMIT 1
            ) AS point ON true
            WHERE s.tenant_id = $1 AND s.session_id = $2"
        )
    };
}

/// Copies the revisions of the session `$2` after `$5`, up to `$6`, that cover no message after `$4`. They follow the revision
/// `$5` of the session `$3` without gaps, because those between them may be left out.
const COPY_REVISIONS: &str = "\
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
        summary_words, summary_tokens, added, meta, source, redacted_seq, created_at)
    SELECT tenant_id, $3, $5 + row_number() OVER (ORDER BY revision), kind, from_seq, to_seq, cursor_seq, summary,
        summary_words, summary_tokens, added, meta, source, redacted_seq, created_at
    FROM revisions
    WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq <= $4 AND revision > $5 AND revision <= $6";

impl Copy<'_> {
    /// Inserts the session with its messages and revisions. The messages of a fork are missing from the search index then. Returns
    /// `false` if the target exists.
    async fn insert(&self, transaction: &mut Transaction) -> Result<bool, StoreError> {
        /// A branch has the times of its session, as it has everything else, but its retention begins now. A fork is an
        /// activity.
        macro_rules! insert_copy {
            ($columns:literal, $now:literal, $updated_at:literal, $hour:literal, $values:literal) => {
                concat!(
                    "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq,
                        cursor_tokens, summary, summary_words, summary_tokens, revision, forked_from, forked_through,
                        fork_kind, retention_seconds, retained_from, branched_at, lineage, stored_bytes,
                        settled_bytes, created_at, updated_at, indexed_seq, activity_hour", $columns, ")
                    SELECT tenant_id, $5, user_id, metadata, $3, tokens, cursor_seq, cursor_tokens, summary,
                        summary_words, summary_tokens, revisions, $2, $6, $7, retention_seconds, branched_at,
                        branched_at, lineage, stored_bytes, stored_bytes, created_at, updated_at,
                        CASE WHEN $3 > 0 AND $7 <> 'rewind' THEN 0 END, ", $hour, $values,
                    " FROM (", state_at!(
                        "s.tenant_id, s.user_id, s.metadata, s.lineage, s.created_at, s.retention_seconds,
                            CASE WHEN $7 = 'rewind' THEN ", $now, " END AS branched_at,
                            (SELECT count(*) FROM revisions WHERE tenant_id = $1 AND session_id = $2
                                AND cursor_seq <= $3 AND revision <= $4) AS revisions,
                            CASE WHEN $7 = 'rewind' THEN s.updated_at ELSE ", $updated_at, " END AS updated_at"
                    ),
                    ") AS copied WHERE true
                    ON CONFLICT (tenant_id, session_id) DO NOTHING"
                )
            };
        }
        const INSERT_COPY: Sql = Sql {
            postgres: insert_copy!(
                "",
                "now()",
                "greatest(now(), s.updated_at)",
                "floor(extract(epoch FROM updated_at) / 3600)",
                ""
            ),
            sqlite: insert_copy!(
                ", incarnation",
                "$8",
                "max($8, s.updated_at)",
                "updated_at / 3600000000",
                ", randomblob(16)"
            ),
        };
        let (tenant, source, target) = (self.tenant.as_str(), self.source.as_str(), self.target.as_str());
        let inserted = transaction
            .statement(INSERT_COPY)
            .bind(tenant)
            .bind(source)
            .bind(self.through_seq)
            .bind(self.revision)
            .bind(target)
            .bind(self.forked_through)
            .bind(self.kind.as_str())
            .bind_now()
            .execute()
            .await?;
        if inserted == 0 {
            return Ok(false);
        }
        let statement = transaction.statement(COPY_REVISIONS).bind(tenant).bind(source).bind(target);
        statement.bind(self.through_seq).bind(0_i64).bind(self.revision).execute().await?;
        self.insert_messages(transaction).await?;
        Ok(true)
    }

    /// Inserts the messages. Each statement copies about a megabyte, because SQLite keeps the rows of a statement in memory if it
    /// reads from the table that it writes to.
    async fn insert_messages(&self, transaction: &mut Transaction) -> Result<(), StoreError> {
        const MAX_COPIED_BYTES: i64 = 1024 * 1024;
        const SELECT_COPY_RANGES: &str = "\
            SELECT min(seq) AS first_seq, max(seq) AS last_seq FROM (
                SELECT seq, (sum(bytes) OVER (ORDER BY seq) - bytes) / $4 AS place FROM (
                    SELECT seq, octet_length(message) AS bytes FROM messages
                    WHERE tenant_id = $1 AND session_id = $2 AND seq <= $3
                ) AS sizes
            ) AS sums GROUP BY place ORDER BY place";
        const COPY_MESSAGES: &str = "\
            INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                redaction, created_at)
            SELECT tenant_id, $3, seq, role, tool_call_ids, tool_result_of, tokens, message, redaction, created_at
            FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq >= $4 AND seq <= $5 ORDER BY seq";
        let (tenant, source, target) = (self.tenant.as_str(), self.source.as_str(), self.target.as_str());
        let statement = transaction.statement(SELECT_COPY_RANGES).bind(tenant).bind(source);
        let ranges = statement.bind(self.through_seq).bind(MAX_COPIED_BYTES).read_all().await?;
        for range in &ranges {
            let (first_seq, last_seq): (i64, i64) = (range.field("first_seq")?, range.field("last_seq")?);
            let statement = transaction.statement(COPY_MESSAGES).bind(tenant).bind(source).bind(target);
            statement.bind(first_seq).bind(last_seq).execute().await?;
        }
        Ok(())
    }
}

/// Removes the messages of a session after `after_seq`, with their idempotency keys and index entries. Sets summary,
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
                    ", updated_at = n.updated_at, indexed_seq = CASE WHEN s.indexed_seq < $3 THEN s.indexed_seq END,
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
    const REMOVE_AFTER: [&str; 3] = [
        "DELETE FROM messages WHERE tenant_id = $1 AND session_id = $2 AND seq > $3",
        "DELETE FROM idempotency_keys WHERE tenant_id = $1 AND session_id = $2 AND last_seq > $3",
        "DELETE FROM search WHERE tenant_id = $1 AND session_id = $2 AND seq > $3",
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
    let statement = statement.bind(after_seq).bind(kept_revision).bind(i64::MAX);
    let copied = i64::try_from(statement.execute().await?).unwrap_or(i64::MAX);
    let statement = transaction.statement(ADVANCE_REVISION).bind(tenant).bind(session).bind(copied);
    statement.execute().await?;
    for sql in REMOVE_AFTER {
        transaction.statement(sql).bind(tenant).bind(session).bind(after_seq).execute().await?;
    }
    Ok(())
}
