//! Copies of a session within the database, which forks and rewinds make. A copy has rows of its own, so that erasing one session
//! never affects the other.
//!
//! SQLite has one writer. So a large copy consists of parts, each in a transaction of its own, and its rows belong to a
//! reservation, like those of an import, until the last transaction publishes it. Only one such copy runs at a time, and redactions
//! and erasures wait for it: otherwise, they would have to find the rows of a copy that does not exist yet.

use super::import::{Reservation, ReservedFor};
use super::messages::message_facts;
use super::rows;
use super::search_terms::{Replaces, index_messages};
use super::statement::{AnyRow, DbRow as _, Sql, Transaction};
use super::values::user_from_column;
use super::{Store, StoreError};
use crate::capacity::Turn;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::language::Language;
use crate::domain::session::ForkKind;
use std::ops::RangeInclusive;
use uuid::Uuid;

/// A copy that may begin.
pub(super) struct CopyPlan<'a> {
    pub(super) tenant: &'a TenantId,
    pub(super) source: &'a SessionId,
    pub(super) target: &'a SessionId,
    /// On SQLite.
    parts: Parts,
    reservation: Reservation<'a>,
    _turn: Option<Turn<'a>>,
}

/// The messages and the revisions of a session in parts of about a megabyte, and its incarnation when they were read. A copy of
/// at most one part of each has one transaction.
#[derive(Default)]
struct Parts {
    /// The first and the last `seq` of each part.
    messages: Vec<RangeInclusive<i64>>,
    /// The first and the last revision of each part.
    revisions: Vec<RangeInclusive<i64>>,
    incarnation: Option<Uuid>,
}

impl Parts {
    fn are_several(&self) -> bool {
        self.messages.len() > 1 || self.revisions.len() > 1
    }
}

/// The result of an attempt to copy a session.
pub(super) enum Attempt<T> {
    /// The copy is complete and durable.
    Committed(T),
    /// There is no copy.
    Rejected(T),
    /// The source was rewound, or bound to a user, while it was copied in parts.
    SourceChanged,
}

/// A copy of a session.
pub(super) struct Copy<'a> {
    pub(super) plan: &'a CopyPlan<'a>,
    /// The last message of the copy.
    pub(super) through_seq: i64,
    pub(super) source_state: SourceState,
    pub(super) kind: ForkKind,
    /// The last message that both sessions have in common.
    pub(super) forked_through: i64,
}

/// The state of a session when its row was locked.
pub(super) struct SourceState {
    pub(super) user: Option<UserId>,
    pub(super) last_seq: i64,
    pub(super) revision: i64,
    pub(super) incarnation: Uuid,
    /// `None` if the session was never copied.
    pub(super) lineage: Option<Uuid>,
    pub(super) language: Option<Language>,
}

/// The result of [`Copy::insert`].
pub(super) enum Inserted {
    /// The transaction that commits the copy.
    Complete(Transaction),
    /// A session with the id of the copy exists.
    Exists,
    /// See [`Attempt::SourceChanged`].
    SourceChanged,
}

/// Other transactions may append to the session and consolidate it, but not rewind or erase it.
pub(super) const LOCK_FORK_SOURCE: Sql = Sql {
    postgres: "SELECT user_id, last_seq, revision, incarnation, lineage, language FROM sessions
        WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0 FOR KEY SHARE",
    sqlite: "SELECT user_id, last_seq, revision, incarnation, lineage, language FROM sessions
        WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0",
};

impl SourceState {
    /// Reads the row of a session by a statement that locks it.
    pub(super) async fn lock(
        transaction: &mut Transaction,
        sql: Sql,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Self>, StoreError> {
        let row = transaction.statement(sql).bind(tenant.as_str()).bind(session.as_str()).read().await?;
        let decode = |row: AnyRow| {
            Ok(Self {
                user: user_from_column(row.field("user_id")?)?,
                last_seq: row.field("last_seq")?,
                revision: row.field("revision")?,
                incarnation: row.field("incarnation")?,
                lineage: row.field("lineage")?,
                language: rows::language(&row)?,
            })
        };
        row.map(decode).transpose()
    }
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
pub(super) use {state_at, tokens_through};

/// Copies the revisions of the session `$2` from `$5` to `$6` that cover no message after `$4`. They follow the last revision of the
/// session `$3` without gaps, because those between them may be left out.
pub(super) const COPY_REVISIONS: &str = "\
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
        summary_words, summary_tokens, added, meta, source, redacted_seq, created_at)
    SELECT tenant_id, $3, (
            SELECT coalesce(max(revision), 0) FROM revisions WHERE tenant_id = $1 AND session_id = $3
        ) + row_number() OVER (ORDER BY revision), kind, from_seq, to_seq, cursor_seq, summary,
        summary_words, summary_tokens, added, meta, source, redacted_seq, created_at
    FROM revisions
    WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq <= $4 AND revision >= $5 AND revision <= $6";

impl Store {
    /// Prepares a copy of the messages up to `through_seq`. Waits for its turn if it consists of several parts.
    pub(super) async fn plan_copy<'a>(
        &'a self,
        tenant: &'a TenantId,
        source: &'a SessionId,
        target: &'a SessionId,
        through_seq: i64,
    ) -> Result<CopyPlan<'a>, StoreError> {
        let (mut parts, mut turn) = (self.parts(tenant, source, through_seq).await?, None);
        if parts.are_several() {
            turn = self.copy_turn().await?;
            // The session may have changed meanwhile.
            parts = self.parts(tenant, source, through_seq).await?;
        }
        let reservation = Reservation::new(tenant, target);
        Ok(CopyPlan { tenant, source, target, parts, reservation, _turn: turn })
    }

    /// Reads the parts of a session. On Postgres, there are none.
    async fn parts(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        through_seq: i64,
    ) -> Result<Parts, StoreError> {
        /// Others write between two parts: the rows of one take some ten milliseconds.
        const MAX_PART_BYTES: i64 = 256 * 1024;
        macro_rules! select_parts {
            ($number:literal, $bytes:literal, $rows:literal, $condition:literal) => {
                concat!(
                    "SELECT min(number) AS first, max(number) AS last,
                        (SELECT incarnation FROM sessions WHERE tenant_id = $1 AND session_id = $2) AS incarnation
                    FROM (
                        SELECT number, (sum(bytes) OVER (ORDER BY number) - bytes) / $4 AS place FROM (
                            SELECT ", $number, " AS number, ", $bytes, " AS bytes FROM ", $rows,
                    " WHERE tenant_id = $1 AND session_id = $2 AND ", $condition, "
                        ) AS sizes
                    ) AS sums GROUP BY place ORDER BY place"
                )
            };
        }
        const SELECT_PARTS: [&str; 2] = [
            select_parts!("seq", "octet_length(message)", "messages", "seq <= $3"),
            select_parts!(
                "revision",
                "octet_length(summary) + octet_length(added) + coalesce(octet_length(meta), 0)",
                "revisions",
                "cursor_seq <= $3"
            ),
        ];
        let mut parts = Parts::default();
        if self.sqlite().is_none() {
            return Ok(parts);
        }
        for (sql, ranges) in SELECT_PARTS.into_iter().zip([&mut parts.messages, &mut parts.revisions]) {
            let statement = self.statement(tenant, sql).bind(session.as_str());
            for row in &statement.bind(through_seq).bind(MAX_PART_BYTES).read_all().await? {
                ranges.push(row.field("first")?..=row.field("last")?);
                parts.incarnation = row.field("incarnation")?;
            }
        }
        Ok(parts)
    }

    /// Waits until no session is copied in parts, and removes the rows of copies that a failure or a killed process has left. No
    /// copy begins until the turn is dropped.
    pub(super) async fn copy_turn(&self) -> Result<Option<Turn<'_>>, StoreError> {
        const SELECT_COPIES: &str = "\
            SELECT tenant_id, session_id, import_token FROM sessions
            WHERE import_until IS NOT NULL AND import_bound = $1";
        let Some(database) = self.sqlite() else { return Ok(None) };
        let turn = database.copy_turns.wait().await;
        for row in self.global_statement(SELECT_COPIES).bind(ReservedFor::Copy as i64).read_all().await? {
            let (tenant, session) = (rows::tenant_id(&row)?, rows::session_id(&row)?);
            let token = row.field("import_token")?;
            self.remove_reservation(&Reservation { tenant: &tenant, session: &session, token }).await?;
        }
        Ok(Some(turn))
    }

    /// Removes what an attempt has left. Returns `None` if there must be another attempt.
    pub(super) async fn end_copy<T>(
        &self,
        plan: CopyPlan<'_>,
        attempt: Result<Attempt<T>, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        if plan.parts.are_several()
            && !matches!(attempt, Ok(Attempt::Committed(_)))
            && let Err(error) = self.remove_reservation(&plan.reservation).await
        {
            tracing::warn!(%error, "failed to remove an incomplete copy of a session; the next copy, redaction or erasure removes it");
            if attempt.is_ok() {
                return Err(error);
            }
        }
        match attempt? {
            Attempt::Committed(outcome) | Attempt::Rejected(outcome) => Ok(Some(outcome)),
            Attempt::SourceChanged => Ok(None),
        }
    }
}

impl Copy<'_> {
    /// Inserts the session with its messages and revisions. `transaction` has locked the source. The copy becomes visible with the
    /// returned transaction, which is another one if the copy has several parts. The messages of a fork are also in the search index.
    pub(super) async fn insert(
        &mut self,
        store: &Store,
        mut transaction: Transaction,
    ) -> Result<Inserted, StoreError> {
        if self.plan.parts.are_several() {
            return self.insert_in_parts(store, transaction).await;
        }
        if !self.insert_session(&mut transaction, None).await? {
            return Ok(Inserted::Exists);
        }
        self.copy_revisions(&mut transaction, 1..=self.source_state.revision).await?;
        self.copy_messages(store, &mut transaction, 1..=self.through_seq).await?;
        Ok(Inserted::Complete(transaction))
    }

    async fn insert_in_parts(
        &mut self,
        store: &Store,
        mut transaction: Transaction,
    ) -> Result<Inserted, StoreError> {
        let CopyPlan { tenant, ref parts, ref reservation, .. } = *self.plan;
        if parts.incarnation != Some(self.source_state.incarnation) {
            return Ok(Inserted::SourceChanged);
        }
        if !reservation.insert(&mut transaction, self.source_state.user.as_ref(), ReservedFor::Copy).await? {
            return Ok(Inserted::Exists);
        }
        transaction.commit().await?;
        for part in &parts.messages {
            let Some(mut transaction) = self.begin_part(store).await? else {
                return Ok(Inserted::SourceChanged);
            };
            self.copy_messages(store, &mut transaction, part.clone()).await?;
            transaction.commit().await?;
        }
        for part in &parts.revisions {
            let Some(mut transaction) = self.begin_part(store).await? else {
                return Ok(Inserted::SourceChanged);
            };
            self.copy_revisions(&mut transaction, part.clone()).await?;
            transaction.commit().await?;
        }
        let mut transaction = store.begin(tenant).await?;
        let Some(source) = self.read_unchanged_source(&mut transaction).await? else {
            return Ok(Inserted::SourceChanged);
        };
        if self.kind == ForkKind::Rewind {
            self.through_seq = source.last_seq;
            self.source_state = source;
        }
        // Messages and revisions that were added after the parts had been read.
        let next = |ranges: &[RangeInclusive<i64>]| ranges.last().map_or(1, |range| range.end() + 1);
        self.copy_messages(store, &mut transaction, next(&parts.messages)..=self.through_seq).await?;
        if !self.insert_session(&mut transaction, Some(reservation.token)).await? {
            return Ok(Inserted::SourceChanged);
        }
        let new = next(&parts.revisions)..=self.source_state.revision;
        self.copy_revisions(&mut transaction, new).await?;
        Ok(Inserted::Complete(transaction))
    }

    /// Begins the transaction of a part. Returns `None` if the source has changed, or the reservation was removed.
    async fn begin_part(&self, store: &Store) -> Result<Option<Transaction>, StoreError> {
        let mut transaction = store.begin(self.plan.tenant).await?;
        let is_same = self.read_unchanged_source(&mut transaction).await?.is_some();
        let may_copy = is_same && self.plan.reservation.renew(&mut transaction).await?;
        Ok(may_copy.then_some(transaction))
    }

    /// Reads the source again, on SQLite. Returns `None` if it was rewound or bound to a user.
    async fn read_unchanged_source(
        &self,
        transaction: &mut Transaction,
    ) -> Result<Option<SourceState>, StoreError> {
        let source =
            SourceState::lock(transaction, LOCK_FORK_SOURCE, self.plan.tenant, self.plan.source).await?;
        Ok(source.filter(|source| source.incarnation == self.source_state.incarnation))
    }

    /// Inserts the row of the session, or completes that of a reservation. Returns `false` if there is another row.
    async fn insert_session(
        &self,
        transaction: &mut Transaction,
        reservation: Option<Uuid>,
    ) -> Result<bool, StoreError> {
        /// A branch has the times of its session, as it has everything else, but its retention begins now. A fork is an
        /// activity.
        macro_rules! insert_copy {
            ($columns:literal, $now:literal, $updated_at:literal, $hour:literal, $values:literal, $reserved:literal) => {
                concat!(
                    "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq,
                        cursor_tokens, summary, summary_words, summary_tokens, revision, forked_from, forked_through,
                        fork_kind, retention_seconds, retained_from, branched_at, lineage, language, stored_bytes,
                        created_at, updated_at, activity_hour", $columns, ")
                    SELECT tenant_id, $5, user_id, metadata, $3, tokens, cursor_seq, cursor_tokens, summary,
                        summary_words, summary_tokens, revisions, $2, $6, $7, retention_seconds, branched_at,
                        branched_at, lineage, language, stored_bytes, created_at, updated_at, ", $hour, $values,
                    " FROM (", state_at!(
                        "s.tenant_id, s.user_id, s.metadata, s.lineage, s.language, s.created_at, s.retention_seconds,
                            CASE WHEN $7 = 'rewind' THEN ", $now, " END AS branched_at,
                            (SELECT count(*) FROM revisions WHERE tenant_id = $1 AND session_id = $2
                                AND cursor_seq <= $3 AND revision <= $4) AS revisions,
                            CASE WHEN $7 = 'rewind' THEN s.updated_at ELSE ", $updated_at, " END AS updated_at"
                    ),
                    ") AS copied WHERE true
                    ON CONFLICT (tenant_id, session_id) ", $reserved
                )
            };
        }
        const INSERT_COPY: Sql = Sql {
            postgres: insert_copy!(
                "",
                "now()",
                "greatest(now(), s.updated_at)",
                "floor(extract(epoch FROM updated_at) / 3600)",
                "",
                "DO NOTHING"
            ),
            sqlite: insert_copy!(
                ", incarnation",
                "$9",
                "max($9, s.updated_at)",
                "updated_at / 3600000000",
                ", randomblob(16)",
                "DO UPDATE SET user_id = excluded.user_id, metadata = excluded.metadata, last_seq = excluded.last_seq,
                    tokens = excluded.tokens, cursor_seq = excluded.cursor_seq, cursor_tokens = excluded.cursor_tokens,
                    summary = excluded.summary, summary_words = excluded.summary_words,
                    summary_tokens = excluded.summary_tokens, revision = excluded.revision,
                    forked_from = excluded.forked_from, forked_through = excluded.forked_through,
                    fork_kind = excluded.fork_kind, retention_seconds = excluded.retention_seconds,
                    retained_from = excluded.retained_from, branched_at = excluded.branched_at,
                    lineage = excluded.lineage, language = excluded.language, stored_bytes = excluded.stored_bytes,
                    created_at = excluded.created_at, updated_at = excluded.updated_at,
                    activity_hour = excluded.activity_hour, incarnation = excluded.incarnation,
                    import_token = NULL, import_bound = NULL, import_until = NULL
                WHERE sessions.import_token = $8"
            ),
        };
        let (source, target) = (self.plan.source.as_str(), self.plan.target.as_str());
        let statement = transaction.statement(INSERT_COPY).bind(self.plan.tenant.as_str()).bind(source);
        let statement = statement.bind(self.through_seq).bind(self.source_state.revision).bind(target);
        let mut statement = statement.bind(self.forked_through).bind(self.kind.as_str());
        if statement.is_sqlite() {
            statement = statement.bind(reservation);
        }
        Ok(statement.bind_now().execute().await? > 0)
    }

    async fn copy_revisions(
        &self,
        transaction: &mut Transaction,
        revisions: RangeInclusive<i64>,
    ) -> Result<(), StoreError> {
        let statement = transaction.statement(COPY_REVISIONS).bind(self.plan.tenant.as_str());
        let statement = statement.bind(self.plan.source.as_str()).bind(self.plan.target.as_str());
        let statement = statement.bind(self.through_seq).bind(*revisions.start()).bind(*revisions.end());
        statement.execute().await?;
        Ok(())
    }

    async fn copy_messages(
        &self,
        store: &Store,
        transaction: &mut Transaction,
        seqs: RangeInclusive<i64>,
    ) -> Result<(), StoreError> {
        const COPY_MESSAGES: &str = concat!(
            "INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, ",
            message_facts!(),
            ")
            SELECT tenant_id, $3, seq, role, tool_call_ids, tool_result_of, tokens, message, ",
            message_facts!(),
            " FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq >= $4 AND seq <= $5 ORDER BY seq"
        );
        let statement = transaction.statement(COPY_MESSAGES).bind(self.plan.tenant.as_str());
        let statement = statement.bind(self.plan.source.as_str()).bind(self.plan.target.as_str());
        statement.bind(*seqs.start()).bind(*seqs.end()).execute().await?;
        // Searches would find each message of a branch twice.
        if let Some(analyzer) = store.analyzer().filter(|_| self.kind == ForkKind::Fork) {
            let analyzer = analyzer.of_session(self.source_state.language);
            let owner = (self.plan.target, self.source_state.user.as_ref());
            index_messages(transaction, analyzer, self.plan.tenant, owner, seqs, Replaces::Nothing).await?;
        }
        Ok(())
    }
}
