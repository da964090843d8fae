//! Redaction of a message, in one transaction with all of its copies.
//!
//! Forks and rewinds copy messages. A redaction waits for copies in parts (see [`super::copies`]), and locks the sessions of a
//! lineage first, so that no further copy is made. The message is redacted in each of them that has the same one: the same `seq`,
//! time and JSON. After a rewind, a session may have another message with that `seq`.
//!
//! A summary contains a message, or what a model made of it, if its cursor is at or after the message. So these revisions lose
//! their texts, and the session continues from the last one before the message.

use super::pool::retry_on_deadlock;
use super::rows::{self, json_column, redaction_mark};
use super::statement::{DbRow as _, Sql, Transaction, TransactionStatement};
use super::values::{DbTime, to_i64};
use super::{Store, StoreError};
use crate::blocking;
use crate::domain::api_key::KeyId;
use crate::domain::error_chain::ErrorChain;
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::redaction::{Redaction, RedactionMark};
use crate::domain::revision::{MetaConsolidation, RevisionKind};
use uuid::Uuid;

/// The result of [`Store::redact_message`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedactionOutcome {
    /// The message was redacted in these sessions.
    Redacted(Vec<SessionId>),
    /// The message was redacted earlier. Nothing was written.
    Unchanged,
    /// There is no such session. Nothing was written.
    SessionNotFound,
    /// The session has no such message. Nothing was written.
    MessageNotFound { last_seq: i64 },
}

/// A message and what remains of it.
struct Removal<'a> {
    tenant: &'a TenantId,
    seq: i64,
    /// The redacted message.
    json: String,
    tokens: i64,
    /// Tokens of the message before.
    tokens_before: i64,
    mark: RedactionMark,
}

impl Store {
    /// Removes the content of a message, of its copies in other sessions, and of every summary that covers it. Appends a revision
    /// with the last summary before the message to each of these sessions. `key` is the API key that requests it.
    ///
    /// Call [`Self::remove_redacted_traces`] afterwards. If the disk of SQLite is full, the redaction uses the space that is
    /// reserved for erasures. A running consolidation loses its lease. The sessions get another
    /// incarnation, so that no copy of them in the memory of a replica is used again.
    pub async fn redact_message(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        seq: i64,
        key: Option<&KeyId>,
    ) -> Result<RedactionOutcome, StoreError> {
        const SELECT_MESSAGE_TO_REDACT: Sql = Sql {
            postgres: "SELECT message, tokens, redaction, now() AS now FROM messages
                WHERE tenant_id = $1 AND session_id = $2 AND seq = $3",
            sqlite: "SELECT message, tokens, redaction, $4 AS now FROM messages
                WHERE tenant_id = $1 AND session_id = $2 AND seq = $3",
        };
        let redact = async || {
            let _turn = self.copy_turn().await?;
            let mut transaction = self.begin(tenant).await?;
            let (last_seq, sessions) = match lock_lineage(&mut transaction, tenant, session).await? {
                Lineage::NotFound => return Ok(Some(RedactionOutcome::SessionNotFound)),
                Lineage::Locked { last_seq, sessions } => (last_seq, sessions),
                Lineage::Changed => return Ok(None),
            };
            let statement = transaction.statement(SELECT_MESSAGE_TO_REDACT).bind(tenant.as_str());
            let Some(row) = statement.bind(session.as_str()).bind(seq).bind_now().read().await? else {
                return Ok(Some(RedactionOutcome::MessageNotFound { last_seq }));
            };
            if row.field::<Option<&str>>("redaction")?.is_some() {
                return Ok(Some(RedactionOutcome::Unchanged));
            }
            let affected = copies(&mut transaction, tenant, session, seq, sessions).await?;
            let (json, tokens) = redacted(row.field("message")?).await?;
            let copies = to_i64(affected.len()) - 1;
            let mark = RedactionMark::new(row.time("now")?, key, copies);
            let removal = Removal { tenant, seq, json, tokens, tokens_before: row.field("tokens")?, mark };
            for session in &affected {
                removal.apply(&mut transaction, session).await?;
            }
            transaction.commit().await?;
            Ok(Some(RedactionOutcome::Redacted(affected)))
        };
        loop {
            let redact = || retry_on_deadlock(|| self.within_limit(redact()));
            if let Some(outcome) = self.using_reserve(redact).await? {
                self.note_erased_terms();
                return Ok(outcome);
            }
        }
    }

    /// Removes what SQLite may keep of redacted messages outside of its rows. Postgres keeps it in its files until other rows take the space,
    /// or `VACUUM FULL` writes the tables again.
    pub async fn remove_redacted_traces(&self) {
        let Some(database) = self.sqlite() else { return };
        if let Err(error) = self.merge_index().await {
            let error = ErrorChain(&error);
            tracing::warn!(%error, "failed to remove the terms of a redacted message from the search index; the next merge does it");
        }
        while let Err(error) = database.rebuild_file().await {
            // The space of the failed attempt is needed again.
            database.truncate_wal().await;
            if !self.makes_room(&error) {
                let error = ErrorChain(&error);
                tracing::warn!(%error, "failed to rebuild the database after a redaction; run VACUUM");
                break;
            }
        }
        database.truncate_wal().await;
        database.fill_disk_reserve();
    }

    /// Returns the records of at most `limit` redacted messages after `after_seq`, in order. The result is empty if the session
    /// does not exist.
    pub async fn redactions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<Redaction>, StoreError> {
        /// Each redaction has a revision, so that the messages need not be searched. After a rewind, a revision may name a message
        /// that was removed, or another one with its `seq`.
        const SELECT_REDACTIONS: &str = "\
            SELECT p.seq, p.redaction, r.revision, r.cursor_seq, l.revision AS redacted_revision
            FROM (
                SELECT m.seq, m.redaction, made.revision FROM (
                    SELECT from_seq, max(revision) AS revision FROM revisions
                    WHERE tenant_id = $1 AND session_id = $2 AND kind = $3 AND from_seq > $4 GROUP BY from_seq
                ) AS made JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = $2 AND m.seq = made.from_seq
                    AND m.redaction IS NOT NULL
                ORDER BY m.seq LIMIT $5
            ) AS p
                JOIN revisions AS r ON r.tenant_id = $1 AND r.session_id = $2 AND r.revision = p.revision
                LEFT JOIN revisions AS l ON l.tenant_id = $1 AND l.session_id = $2 AND l.redacted_seq = p.seq
            ORDER BY p.seq, l.revision";
        let statement = self.statement(tenant, SELECT_REDACTIONS).bind(session.as_str());
        let statement = statement.bind(RevisionKind::Redaction.as_str()).bind(after_seq).bind(limit);
        let mut redactions: Vec<Redaction> = Vec::new();
        for row in &statement.read_all().await? {
            let seq: i64 = row.field("seq")?;
            let lost: Option<i64> = row.field("redacted_revision")?;
            match redactions.last_mut().filter(|last| last.seq == seq) {
                Some(known) => known.redacted_revisions.extend(lost),
                None => redactions.push(Redaction {
                    seq,
                    mark: redaction_mark(row.field("redaction")?)?,
                    revision: row.field("revision")?,
                    cursor: row.field("cursor_seq")?,
                    redacted_revisions: lost.into_iter().collect(),
                }),
            }
        }
        Ok(redactions)
    }
}

/// The result of [`lock_lineage`].
enum Lineage {
    NotFound,
    /// The last message of the session, and all sessions of the lineage.
    Locked {
        last_seq: i64,
        sessions: Vec<SessionId>,
    },
    /// A fork that began before its source was locked has added a session. To lock it now could cause a deadlock, so the transaction
    /// must begin anew.
    Changed,
}

/// Locks a session and all sessions of its lineage. No session can be forked while it is locked.
async fn lock_lineage(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Lineage, StoreError> {
    const LOCK_SESSION: Sql = Sql {
        postgres: "SELECT session_id FROM sessions WHERE tenant_id = $1 AND session_id = $2 FOR UPDATE",
        sqlite: "SELECT session_id FROM sessions WHERE tenant_id = $1 AND session_id = $2",
    };
    /// In the order in which exchanges lock sessions, too.
    const LOCK_LINEAGE: Sql = Sql {
        postgres: "SELECT session_id FROM sessions WHERE tenant_id = $1 AND lineage = $2
            ORDER BY session_id FOR UPDATE",
        // The plus keeps SQLite from reading all sessions of the tenant by the index that is sorted.
        sqlite: "SELECT session_id FROM sessions WHERE tenant_id = $1 AND lineage = $2 ORDER BY +session_id",
    };
    const COUNT_LINEAGE: &str =
        "SELECT count(*) AS sessions FROM sessions WHERE tenant_id = $1 AND lineage = $2";
    let Some((_, lineage)) = read_lineage(transaction, tenant, session).await? else {
        return Ok(Lineage::NotFound);
    };
    let statement = match lineage {
        Some(lineage) => transaction.statement(LOCK_LINEAGE).bind(tenant.as_str()).bind(lineage),
        None => transaction.statement(LOCK_SESSION).bind(tenant.as_str()).bind(session.as_str()),
    };
    let rows = statement.read_all().await?;
    let sessions = rows.iter().map(rows::session_id).collect::<Result<Vec<_>, _>>()?;
    // The session may have been erased, or have got its lineage, before it was locked.
    let Some((last_seq, lineage)) = read_lineage(transaction, tenant, session).await? else {
        return Ok(Lineage::NotFound);
    };
    let known = match lineage {
        Some(lineage) => {
            let statement = transaction.statement(COUNT_LINEAGE).bind(tenant.as_str()).bind(lineage);
            statement.read().await?.ok_or(sqlx::Error::RowNotFound)?.field("sessions")?
        }
        None => 1,
    };
    if !sessions.contains(session) || known != to_i64(sessions.len()) {
        return Ok(Lineage::Changed);
    }
    Ok(Lineage::Locked { last_seq, sessions })
}

/// Returns the last message and the lineage of a session, which has none if it was never copied. Returns `None` if the session does
/// not exist.
async fn read_lineage(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Option<(i64, Option<Uuid>)>, StoreError> {
    const SELECT_LINEAGE: &str = "\
        SELECT lineage, last_seq FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0";
    let statement = transaction.statement(SELECT_LINEAGE).bind(tenant.as_str()).bind(session.as_str());
    let Some(row) = statement.read().await? else { return Ok(None) };
    Ok(Some((row.field("last_seq")?, row.field("lineage")?)))
}

/// Returns the sessions, among those of a lineage, that have the message of `session`.
async fn copies(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    seq: i64,
    lineage: Vec<SessionId>,
) -> Result<Vec<SessionId>, StoreError> {
    const SELECT_COPY: &str = "\
        SELECT 1 AS found FROM messages AS c, messages AS m
        WHERE c.tenant_id = $1 AND c.session_id = $2 AND c.seq = $4 AND c.redaction IS NULL
            AND m.tenant_id = $1 AND m.session_id = $3 AND m.seq = $4
            AND c.created_at = m.created_at AND c.message = m.message";
    let mut copies = Vec::new();
    for candidate in lineage {
        let statement = transaction.statement(SELECT_COPY).bind(tenant.as_str()).bind(candidate.as_str());
        if statement.bind(session.as_str()).bind(seq).read().await?.is_some() {
            copies.push(candidate);
        }
    }
    Ok(copies)
}

/// Returns what remains of a message, and its tokens.
async fn redacted(json: String) -> Result<(String, i64), StoreError> {
    let bytes = json.len();
    let redact = move || {
        let redacted = format::read(&json).ok()?.redacted();
        Some((redacted.json().to_owned(), format::count_tokens(&redacted)))
    };
    let redacted = blocking::spawn_cpu_if_large(bytes, redact).await;
    redacted.ok_or("it is not a message of the chat format").map_err(StoreError::corrupt("a message"))
}

impl Removal<'_> {
    /// Removes the message from a session.
    async fn apply(&self, transaction: &mut Transaction, session: &SessionId) -> Result<(), StoreError> {
        /// Subtracts the messages between both cursors, so that those before them are not read.
        macro_rules! revert_session {
            ($incarnation:literal) => {
                concat!(
                    "UPDATE sessions AS s SET tokens = s.tokens + $4,
                        stored_bytes = s.stored_bytes + $5 - (SELECT octet_length(message) FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq = $3),
                        cursor_seq = n.cursor_seq,
                        cursor_tokens = s.cursor_tokens - (SELECT coalesce(sum(tokens), 0) FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq > n.cursor_seq AND seq <= s.cursor_seq),
                        summary = n.summary, summary_words = n.summary_words, summary_tokens = n.summary_tokens,
                        revision = s.revision + 1, lease_token = NULL, lease_until = NULL, failures = 0,
                        retry_at = NULL, last_failure = NULL, incarnation = ", $incarnation,
                    " FROM (
                        SELECT coalesce(point.cursor_seq, 0) AS cursor_seq, coalesce(point.summary, '') AS summary,
                            coalesce(point.summary_words, 0) AS summary_words,
                            coalesce(point.summary_tokens, 0) AS summary_tokens
                        FROM (SELECT 1) AS always LEFT JOIN (
                            SELECT cursor_seq, summary, summary_words, summary_tokens FROM revisions
                            WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq < $3 AND redacted_seq IS NULL
                            ORDER BY revision DESC LIMIT 1
                        ) AS point ON true
                    ) AS n WHERE s.tenant_id = $1 AND s.session_id = $2"
                )
            };
        }
        const REVERT_SESSION: Sql =
            Sql { postgres: revert_session!("gen_random_uuid()"), sqlite: revert_session!("randomblob(16)") };
        const INSERT_REDACTION: &str = "\
            INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
                summary_words, summary_tokens, added, created_at)
            SELECT tenant_id, session_id, revision, $4, $3, $3, cursor_seq, summary, summary_words, summary_tokens, '', $5
            FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        /// Returns the first one after `$4`, because each contains a text of up to 1 MiB.
        const SELECT_COMPRESSED_REVISION: &str = "\
            SELECT revision, meta FROM revisions
            WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq >= $3 AND redacted_seq IS NULL AND meta IS NOT NULL
                AND revision > $4
            ORDER BY revision LIMIT 1";
        macro_rules! empty_revisions {
            ($meta:literal, $condition:literal) => {
                concat!(
                    "UPDATE revisions SET redacted_seq = $3, summary = '', summary_words = 0, summary_tokens = 0,
                        added = ''", $meta, " WHERE tenant_id = $1 AND session_id = $2 AND ", $condition
                )
            };
        }
        const EMPTY_COMPRESSED_REVISION: &str = empty_revisions!(", meta = $5", "revision = $4");
        const EMPTY_REVISIONS: &str = empty_revisions!("", "cursor_seq >= $3 AND redacted_seq IS NULL");
        const EMPTY_MESSAGE: &str = "\
            UPDATE messages SET message = $4, tokens = $5, redaction = $6
            WHERE tenant_id = $1 AND session_id = $2 AND seq = $3";
        const EMPTY_FINGERPRINTS: &str = "\
            UPDATE idempotency_keys SET fingerprint = $4
            WHERE tenant_id = $1 AND session_id = $2 AND first_seq <= $3 AND last_seq >= $3";
        let statement = self.statement(transaction, session, REVERT_SESSION);
        statement.bind(self.tokens - self.tokens_before).bind(to_i64(self.json.len())).execute().await?;
        let statement = self.statement(transaction, session, INSERT_REDACTION);
        let statement = statement.bind(RevisionKind::Redaction.as_str());
        statement.bind(DbTime(self.mark.redacted_at)).execute().await?;
        // Keeps models and costs. Not by a function of Postgres, because none of them accepts every text of JSON.
        let mut revision = 0_i64;
        loop {
            let statement = self.statement(transaction, session, SELECT_COMPRESSED_REVISION).bind(revision);
            let Some(row) = statement.read().await? else { break };
            revision = row.field("revision")?;
            let meta = rows::meta(&row)?.map(|meta| MetaConsolidation { text_before: String::new(), ..meta });
            let statement = self.statement(transaction, session, EMPTY_COMPRESSED_REVISION).bind(revision);
            statement.bind(json_column(meta.as_ref())).execute().await?;
        }
        self.statement(transaction, session, EMPTY_REVISIONS).execute().await?;
        let statement = self.statement(transaction, session, EMPTY_MESSAGE).bind(self.json.as_str());
        statement.bind(self.tokens).bind(json_column(Some(&self.mark))).execute().await?;
        let statement = self.statement(transaction, session, EMPTY_FINGERPRINTS);
        statement.bind(Vec::<u8>::new()).execute().await?;
        Ok(())
    }

    /// Returns a statement whose first parameters are the tenant, the session and the message.
    fn statement<'t>(
        &self,
        transaction: &'t mut Transaction,
        session: &SessionId,
        sql: impl Into<Sql>,
    ) -> TransactionStatement<'t> {
        let statement = transaction.statement(sql).bind(self.tenant.as_str());
        statement.bind(session.as_str()).bind(self.seq)
    }
}
