//! Consolidation: the lease of a session, revisions, and the tokens that models use.

use super::rows::{self, json_column, revision_columns, session_columns};
use super::statement::{AnyRow, DbRow as _, Sql};
use super::store::{bounded_page_on_postgres, bounded_page_on_sqlite, decode, decode_page, micros};
use super::{Page, Store, StoreError};
use crate::domain::consolidation_record::{ConsolidationRecord, RecordDetails};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{MetaConsolidation, Provenance, Revision, RevisionKind};
use crate::domain::session::{Session, Summary};
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// The state of a session that taking its lease requires, in addition to a free lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseCondition {
    /// For an automatic consolidation: the session is at this revision, which the decision to consolidate was based on, and
    /// not in backoff after a failure.
    IfUnchanged { revision: i64 },
    /// For a consolidation that a client requested: any revision, and a backoff is ignored.
    Force,
}

/// A revision to commit: a range of messages and the summary that covers it.
#[derive(Clone, Debug)]
pub struct NewRevision {
    /// The revision that the session must be at.
    pub base_revision: i64,
    /// The cursor that the session must have.
    pub base_cursor: i64,
    /// The new cursor.
    pub cursor: i64,
    /// Sum of the tokens of the messages between both cursors.
    pub range_tokens: i64,
    /// The complete new summary.
    pub summary: Summary,
    /// The text written for the range.
    pub added: String,
    /// `None` if the range contained no text, so that no model was called.
    pub provenance: Option<Provenance>,
    /// The meta-consolidation that followed.
    pub meta: Option<MetaConsolidation>,
}

/// Inserts a record of the session `$1`, `$2` with the next number. The holder of the lease is the only writer.
macro_rules! insert_record {
    ($revision:literal, $details:literal, $now:literal, $from:literal) => {
        concat!(
            "INSERT INTO consolidation_records (tenant_id, session_id, number, revision, details, created_at)
            SELECT $1, $2, coalesce(
                    (SELECT max(number) FROM consolidation_records WHERE tenant_id = $1 AND session_id = $2), 0
                ) + 1, ", $revision, ", ", $details, ", ", $now, $from
        )
    };
}

/// Deletes the record without a revision that follows the newest `$keep` ones. As each new record deletes one, there are no others.
/// Postgres uses the index on `revision` only if that is a sort key.
macro_rules! delete_old_records {
    ($keep:literal, $condition:literal) => {
        concat!(
            "DELETE FROM consolidation_records
            WHERE tenant_id = $1 AND session_id = $2 AND revision IS NULL AND number = (
                SELECT number FROM consolidation_records WHERE tenant_id = $1 AND session_id = $2 AND revision IS NULL
                ORDER BY revision DESC, number DESC LIMIT 1 OFFSET ", $keep, "
            ) AND ", $condition
        )
    };
}

/// Ends the lease of the session `$1`, `$2` with the token `$3`, and inserts a record with the details `$4`.
macro_rules! end_lease_with_record {
    ($set_on_postgres:literal, $set_on_sqlite:literal, $now_on_sqlite:literal) => {
        Sql {
            postgres: concat!(
                "WITH session AS (
                    UPDATE sessions SET lease_token = NULL, lease_until = NULL",
                $set_on_postgres,
                " WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at
                ), record AS (",
                insert_record!("CAST(NULL AS bigint)", "$4", "now()", " FROM session"),
                "), old AS (",
                // `MAX_RECORDS_WITHOUT_REVISION` without the new record, which the statement does not see.
                delete_old_records!("199", "EXISTS (SELECT FROM session)"),
                ") SELECT retry_at FROM session"
            ),
            sqlite: concat!(
                "UPDATE sessions SET lease_token = NULL, lease_until = NULL",
                $set_on_sqlite,
                " WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 RETURNING retry_at;",
                insert_record!("NULL", "$4", $now_on_sqlite, " WHERE changes() > 0"),
                ";",
                delete_old_records!("200", "changes() > 0")
            ),
        }
    };
}

impl Store {
    /// Takes the lease of a session for `ttl` and returns the state of the session. Returns `None` if the session does
    /// not exist, the condition does not hold, or another holder has the lease. A lease that has more than twice `ttl`
    /// left counts as expired: the clock was set back after it was taken.
    pub async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError> {
        const TAKE_LEASE: Sql = Sql {
            postgres: concat!(
                "UPDATE sessions SET lease_token = $3, lease_until = now() + $4 * interval '1 microsecond'
                WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0
                    AND (lease_until IS NULL OR lease_until <= now()
                        OR lease_until > now() + 2 * $4 * interval '1 microsecond')
                    AND ($5::bigint IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= now())))
                RETURNING ",
                session_columns!()
            ),
            sqlite: concat!(
                "UPDATE sessions SET lease_token = $3, lease_until = $6 + $4
                WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0
                    AND (lease_until IS NULL OR lease_until <= $6 OR lease_until > $6 + 2 * $4)
                    AND ($5 IS NULL OR (revision = $5 AND (retry_at IS NULL OR retry_at <= $6)))
                RETURNING ",
                session_columns!()
            ),
        };
        let statement = self
            .statement(tenant, TAKE_LEASE)
            .bind(session.as_str())
            .bind(token)
            .bind(micros(ttl))
            .bind(match condition {
                LeaseCondition::IfUnchanged { revision } => Some(revision),
                LeaseCondition::Force => None,
            })
            .bind_now();
        decode(statement.write_returning().await?, rows::session)
    }

    /// Extends the lease to `ttl` from now. Returns `false` if `token` does not hold it.
    pub async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError> {
        const RENEW_LEASE: Sql = Sql {
            postgres: "UPDATE sessions SET lease_until = now() + $4 * interval '1 microsecond'
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3",
            sqlite: "UPDATE sessions SET lease_until = $5 + $4
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3",
        };
        let statement = self.statement(tenant, RENEW_LEASE).bind(session.as_str()).bind(token);
        Ok(statement.bind(micros(ttl)).bind_now().execute().await? > 0)
    }

    /// Ends the lease if `token` holds it. No record is stored.
    pub async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError> {
        const RELEASE_LEASE: &str = "\
            UPDATE sessions SET lease_token = NULL, lease_until = NULL
            WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3";
        self.statement(tenant, RELEASE_LEASE).bind(session.as_str()).bind(token).execute().await?;
        Ok(())
    }

    /// Commits summary, cursor and revision together, with a record of the run, and clears the failure state. The lease stays.
    /// Returns `None`, and writes nothing, if revision or cursor have changed, `token` does not hold the lease, or the session
    /// was erased.
    pub async fn commit_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        revision: &NewRevision,
        record: &RecordDetails,
    ) -> Result<Option<Revision>, StoreError> {
        /// Changes nothing unless lease, revision and cursor are as expected.
        macro_rules! update_summary {
            () => {
                "UPDATE sessions SET summary = $7, summary_words = $8, summary_tokens = $9, cursor_seq = $6,
                    cursor_tokens = cursor_tokens + $10, revision = revision + 1, failures = 0, retry_at = NULL,
                    last_failure = NULL
                WHERE tenant_id = $1 AND session_id = $2 AND lease_token = $3 AND revision = $4 AND cursor_seq = $5"
            };
        }
        macro_rules! insert_revision {
            ($number:literal, $now:literal, $from:literal) => {
                concat!(
                    "INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq,
                        summary, summary_words, summary_tokens, added, meta, source, created_at)
                    SELECT $1, $2, ", $number, ", $11, $5 + 1, $6, $6, $7, $8, $9, $12, $13, $14, ", $now, $from,
                    " RETURNING ", revision_columns!()
                )
            };
        }
        const COMMIT_REVISION: Sql = Sql {
            postgres: concat!(
                "WITH session AS (",
                update_summary!(),
                " RETURNING revision AS new_revision), record AS (",
                insert_record!("new_revision", "$15", "now()", " FROM session"),
                ") ",
                insert_revision!("new_revision", "now()", " FROM session")
            ),
            sqlite: concat!(
                update_summary!(),
                ";",
                insert_revision!(
                    "revision",
                    "$16",
                    " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND changes() > 0"
                ),
                ";",
                insert_record!(
                    "revision",
                    "$15",
                    "$16",
                    " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND changes() > 0"
                )
            ),
        };
        let statement = self
            .statement(tenant, COMMIT_REVISION)
            .bind(session.as_str())
            .bind(token)
            .bind(revision.base_revision)
            .bind(revision.base_cursor)
            .bind(revision.cursor)
            .bind(revision.summary.text.as_str())
            .bind(revision.summary.words)
            .bind(revision.summary.tokens)
            .bind(revision.range_tokens)
            .bind(RevisionKind::Consolidation.as_str())
            .bind(revision.added.as_str())
            .bind(json_column(revision.meta.as_ref()))
            .bind(json_column(revision.provenance.as_ref()))
            .bind(json_column(Some(record)))
            .bind_now();
        decode(statement.write_returning().await?, rows::revision)
    }

    /// Records a failed consolidation, ends the lease, and returns the time of the next permitted run. Returns
    /// `None`, and writes nothing, if `token` does not hold the lease.
    pub async fn record_failure(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        record: &RecordDetails,
    ) -> Result<Option<OffsetDateTime>, StoreError> {
        const RECORD_FAILURE: Sql = end_lease_with_record!(
            ", failures = failures + 1, retry_at = now() + $5 * interval '1 microsecond', last_failure = $6",
            ", failures = failures + 1, retry_at = $7 + $5, last_failure = $6",
            "$7"
        );
        let statement = self
            .statement(tenant, RECORD_FAILURE)
            .bind(session.as_str())
            .bind(token)
            .bind(json_column(Some(record)))
            .bind(micros(retry_in))
            .bind(record.reason.as_deref().unwrap_or_default())
            .bind_now();
        decode(statement.write_returning().await?, |row| Ok(row.time("retry_at")?))
    }

    /// Ends the lease of a run that was abandoned, with a record of it, if `token` holds the lease.
    pub async fn record_abandoned_run(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        record: &RecordDetails,
    ) -> Result<(), StoreError> {
        const RECORD_ABANDONED_RUN: Sql = end_lease_with_record!("", "", "$5");
        let statement = self.statement(tenant, RECORD_ABANDONED_RUN).bind(session.as_str()).bind(token);
        statement.bind(json_column(Some(record))).bind_now().write_returning().await?;
        Ok(())
    }

    /// Returns the revision that summarised a message: the newest one whose range contains it.
    pub async fn revision_of_message(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        seq: i64,
    ) -> Result<Option<i64>, StoreError> {
        const SELECT_REVISION_OF_MESSAGE: &str = "\
            SELECT revision FROM revisions
            WHERE tenant_id = $1 AND session_id = $2 AND from_seq <= $3 AND to_seq >= $3 AND kind = $4
            ORDER BY revision DESC LIMIT 1";
        let statement = self.statement(tenant, SELECT_REVISION_OF_MESSAGE).bind(session.as_str()).bind(seq);
        let row = statement.bind(RevisionKind::Consolidation.as_str()).read().await?;
        row.map(|row| Ok(row.field("revision")?)).transpose()
    }

    /// Returns at most `limit` records of consolidation before `before`, newest first, or `None` if the session does not exist.
    /// There are fewer if their texts exceed `max_bytes`.
    pub async fn consolidation_records(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
        max_bytes: i64,
    ) -> Result<Option<Page<ConsolidationRecord>>, StoreError> {
        /// A session that is being erased has no history any more, but may still have records.
        macro_rules! from_records {
            () => {
                " FROM consolidation_records
                WHERE tenant_id = $1 AND session_id = $2 AND number < $3 AND EXISTS (
                    SELECT 1 FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0
                ) ORDER BY number DESC LIMIT $4"
            };
        }
        const SELECT_RECORDS: Sql = Sql {
            postgres: bounded_page_on_postgres!(
                concat!("SELECT number, revision, details, created_at", from_records!()),
                "octet_length(details)",
                "number DESC",
                "$5"
            ),
            sqlite: bounded_page_on_sqlite!(
                concat!("SELECT number AS key, octet_length(details) AS bytes", from_records!()),
                "number, revision, details, created_at",
                "consolidation_records ON tenant_id = $1 AND session_id = $2 AND number = key",
                "key DESC",
                "$5"
            ),
        };
        let statement = self.statement(tenant, SELECT_RECORDS).bind(session.as_str());
        // One more record shows if there is another page.
        let statement = statement.bind(before).bind(limit.saturating_add(1)).bind(max_bytes);
        let rows = statement.read_all().await?;
        self.page_of_session(tenant, session, &rows, limit, rows::consolidation_record).await
    }

    /// Appends a revision with another summary of the messages that the present one covers. Returns `None`, and writes nothing, if
    /// the session is not at `base_revision`, has no summary, or does not exist. A running consolidation loses its result.
    pub async fn edit_summary(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        base_revision: i64,
        summary: &Summary,
    ) -> Result<Option<Revision>, StoreError> {
        macro_rules! replace_summary {
            () => {
                "UPDATE sessions SET summary = $5, summary_words = $6, summary_tokens = $7, revision = revision + 1,
                    failures = 0, retry_at = NULL, last_failure = NULL
                WHERE tenant_id = $1 AND session_id = $2 AND revision = $3 AND cursor_seq > 0"
            };
        }
        macro_rules! insert_edited_revision {
            ($number:literal, $now:literal, $from:literal) => {
                concat!(
                    "INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words,
                        summary_tokens, added, created_at)
                    SELECT $1, $2, ", $number, ", $4, cursor_seq, $5, $6, $7, '', ", $now, $from,
                    " RETURNING ", revision_columns!()
                )
            };
        }
        const EDIT_SUMMARY: Sql = Sql {
            postgres: concat!(
                "WITH session AS (",
                replace_summary!(),
                " RETURNING revision AS new_revision, cursor_seq) ",
                insert_edited_revision!("new_revision", "now()", " FROM session")
            ),
            sqlite: concat!(
                replace_summary!(),
                ";",
                insert_edited_revision!(
                    "revision",
                    "$8",
                    " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND changes() > 0"
                )
            ),
        };
        let statement = self
            .statement(tenant, EDIT_SUMMARY)
            .bind(session.as_str())
            .bind(base_revision)
            .bind(RevisionKind::Edit.as_str())
            .bind(summary.text.as_str())
            .bind(summary.words)
            .bind(summary.tokens)
            .bind_now();
        decode(statement.write_returning().await?, rows::revision)
    }

    /// Adds to the tokens that the tenant used today (UTC, by the clock of the store). The sum stops at `i64::MAX`.
    pub async fn add_token_usage(&self, tenant: &TenantId, tokens: u64) -> Result<(), StoreError> {
        const ADD_TOKEN_USAGE: Sql = Sql {
            postgres: "INSERT INTO token_usage AS u (tenant_id, day, tokens)
                VALUES ($1, floor(extract(epoch FROM now()) / 86400)::bigint, $2)
                ON CONFLICT (tenant_id, day) DO UPDATE
                    SET tokens = least(u.tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens",
            sqlite: "INSERT INTO token_usage AS u (tenant_id, day, tokens) VALUES ($1, $3 / 86400000000, $2)
                ON CONFLICT (tenant_id, day) DO UPDATE
                    SET tokens = min(u.tokens, 9223372036854775807 - excluded.tokens) + excluded.tokens",
        };
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        self.statement(tenant, ADD_TOKEN_USAGE).bind(tokens).bind_now().execute().await?;
        Ok(())
    }

    pub async fn tokens_used_today(&self, tenant: &TenantId) -> Result<i64, StoreError> {
        const SELECT_TOKEN_USAGE: Sql = Sql {
            postgres: "SELECT tokens FROM token_usage
                WHERE tenant_id = $1 AND day = floor(extract(epoch FROM now()) / 86400)::bigint",
            sqlite: "SELECT tokens FROM token_usage WHERE tenant_id = $1 AND day = $2 / 86400000000",
        };
        let row = self.statement(tenant, SELECT_TOKEN_USAGE).bind_now().read().await?;
        row.map_or(Ok(0), |row| Ok(row.field("tokens")?))
    }

    /// Returns at most `limit` revisions before `before`, newest first, or `None` if the session does not exist. There are
    /// fewer if their texts exceed `max_bytes`.
    pub async fn revisions(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        before: i64,
        limit: i64,
        max_bytes: i64,
    ) -> Result<Option<Page<Revision>>, StoreError> {
        const SELECT_REVISIONS: Sql = Sql {
            postgres: bounded_page_on_postgres!(
                concat!(
                    "SELECT ",
                    revision_columns!(),
                    " FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision < $3
                    ORDER BY revision DESC LIMIT $4"
                ),
                "octet_length(summary) + octet_length(added) + coalesce(octet_length(meta), 0)",
                "revision DESC",
                "$5"
            ),
            sqlite: bounded_page_on_sqlite!(
                "SELECT revision AS number,
                    octet_length(summary) + octet_length(added) + coalesce(octet_length(meta), 0) AS bytes
                FROM revisions WHERE tenant_id = $1 AND session_id = $2 AND revision < $3
                ORDER BY revision DESC LIMIT $4",
                revision_columns!(),
                "revisions ON tenant_id = $1 AND session_id = $2 AND revision = number",
                "number DESC",
                "$5"
            ),
        };
        let statement = self.statement(tenant, SELECT_REVISIONS).bind(session.as_str());
        // One more revision shows if there is another page.
        let statement = statement.bind(before).bind(limit.saturating_add(1)).bind(max_bytes);
        let rows = statement.read_all().await?;
        self.page_of_session(tenant, session, &rows, limit, rows::revision).await
    }

    /// Decodes a page of a session. An empty one is `None` if the session does not exist.
    async fn page_of_session<T>(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        rows: &[AnyRow],
        limit: i64,
        item: impl Fn(&AnyRow) -> Result<T, StoreError>,
    ) -> Result<Option<Page<T>>, StoreError> {
        const SESSION_EXISTS: &str =
            "SELECT 1 AS found FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0";
        if rows.is_empty() {
            let found = self.statement(tenant, SESSION_EXISTS).bind(session.as_str()).read().await?;
            return Ok(found.map(|_| Page { items: Vec::new(), has_more: false }));
        }
        decode_page(rows, limit, item).map(Some)
    }

    /// Appends a revision that sets summary and cursor back to those of `revision` (0 = no summary). Returns `None` if
    /// the session or the revision does not exist, or the revision has lost its texts by a redaction; or if the session was
    /// rewound or redacted at the same time. A running consolidation loses its result.
    pub async fn restore_revision(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        revision: i64,
    ) -> Result<Option<Revision>, StoreError> {
        /// `t` is the revision to restore. The tokens up to its cursor follow from the messages between both cursors, so
        /// that the messages before them are not read. On Postgres, the statement may wait for a rewind or a redaction, but
        /// reads the revision as of before; then the incarnation differs.
        macro_rules! restore_summary {
            ($least:literal, $greatest:literal) => {
                concat!(
                    "UPDATE sessions AS s SET summary = t.summary, summary_words = t.summary_words,
                        summary_tokens = t.summary_tokens, cursor_seq = t.cursor_seq,
                        cursor_tokens = s.cursor_tokens + (
                            SELECT coalesce(sum(CASE WHEN seq > s.cursor_seq THEN tokens ELSE -tokens END), 0) FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq > ", $least, "(s.cursor_seq, t.cursor_seq)
                                AND seq <= ", $greatest, "(s.cursor_seq, t.cursor_seq)
                        ),
                        revision = s.revision + 1, failures = 0, retry_at = NULL, last_failure = NULL
                    FROM (
                        SELECT cursor_seq, summary, summary_words, summary_tokens FROM revisions
                        WHERE tenant_id = $1 AND session_id = $2 AND revision = $3 AND redacted_seq IS NULL
                        UNION ALL SELECT 0, '', 0, 0 WHERE $3 = 0
                    ) AS t
                    WHERE s.tenant_id = $1 AND s.session_id = $2 AND s.last_seq > 0 AND s.incarnation = (
                        SELECT incarnation FROM sessions WHERE tenant_id = $1 AND session_id = $2
                    )"
                )
            };
        }
        macro_rules! insert_restored_revision {
            ($number:literal, $now:literal, $from:literal) => {
                concat!(
                    "INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words,
                        summary_tokens, added, created_at)
                    SELECT $1, $2, ", $number, ", $4, cursor_seq, summary, summary_words, summary_tokens, '', ", $now,
                    $from, " RETURNING ", revision_columns!()
                )
            };
        }
        const RESTORE_REVISION: Sql = Sql {
            postgres: concat!(
                "WITH session AS (",
                restore_summary!("least", "greatest"),
                " RETURNING s.revision AS new_revision, s.cursor_seq, s.summary, s.summary_words, s.summary_tokens) ",
                insert_restored_revision!("new_revision", "now()", " FROM session")
            ),
            sqlite: concat!(
                restore_summary!("min", "max"),
                ";",
                insert_restored_revision!(
                    "revision",
                    "$5",
                    " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND changes() > 0"
                )
            ),
        };
        let statement = self.statement(tenant, RESTORE_REVISION).bind(session.as_str()).bind(revision);
        let statement = statement.bind(RevisionKind::Restore.as_str()).bind_now();
        decode(statement.write_returning().await?, rows::revision)
    }
}
