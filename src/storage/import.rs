//! Importing a session, and the reservations of sessions that are written in several transactions.

use super::messages::{NewMessage, insert_messages};
use super::rows::{self, json_column};
use super::search_terms::{Replaces, index_messages, recognise_language};
use super::statement::{DbRow as _, Sql, Transaction};
use super::values::{DbTime, to_i64, user_column, user_from_column};
use super::{Store, StoreError};
use crate::domain::export_format::{ImportedMessage, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use std::slice;
use std::time::Duration;
use tokio::sync::mpsc;
use uuid::Uuid;

/// Time after which the reservation of an import is stale if the import has not renewed it, in microseconds. A batch takes a
/// small part of it.
const RESERVATION_MICROS: i64 = 5_000_000;
/// Interval between two looks at a reservation by another import.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A part of the rows of an import, in order.
#[derive(Clone, Debug, Default)]
pub struct RowBatch {
    pub messages: Vec<ImportedMessage>,
    pub revisions: Vec<Revision>,
}

pub type RowBatches = mpsc::Receiver<RowBatch>;

/// The result of [`Store::import_session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The session is complete and durable.
    Imported,
    /// A session with this id exists, or the id is bound to another user. Nothing was written.
    Exists,
    /// Another import of the session runs, on SQLite. Nothing was written.
    Importing,
    /// The number of rows differs from that in the header of the export. Nothing was written.
    Incomplete,
    /// The session was erased while its rows were written.
    Erased,
}

/// The reason of a reservation: the column `import_bound`.
#[derive(Clone, Copy)]
pub(super) enum ReservedFor {
    Import = 0,
    /// The session was bound to its user before.
    ImportOfBound = 1,
    Copy = 2,
}

/// The reservation of a session that is being imported or copied, on SQLite.
pub(super) struct Reservation<'i> {
    pub(super) tenant: &'i TenantId,
    pub(super) session: &'i SessionId,
    pub(super) token: Uuid,
}

impl Store {
    /// Creates a session with all of its rows, or nothing. Without `user`, the session gets the user that it is bound to, or
    /// else `default_user`. Rows without a time get the time of the store.
    ///
    /// On Postgres this is one transaction, for which only writers of the same session wait. SQLite has one writer, so there
    /// every batch is a transaction of its own, between which others write. The first one reserves the session, and the last
    /// one publishes it; requests that write to a reserved session fail with [`StoreError::SessionImporting`]. The caller must
    /// have all batches at hand and never wait for a client in between.
    pub async fn import_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        users: (Option<&UserId>, Option<&UserId>),
        imported: &ImportedSession,
        batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        let reservation = Reservation::new(tenant, session);
        let outcome = self.write_import(&reservation, users, imported, batches).await;
        if self.sqlite().is_some() && matches!(outcome, Err(_) | Ok(ImportOutcome::Incomplete)) {
            // On failure, the reservation expires, and is removed later.
            let removed = self.remove_reservation(&reservation).await;
            removed.inspect_err(|error| tracing::warn!(%error, "failed to remove an incomplete import")).ok();
        }
        outcome
    }

    async fn write_import(
        &self,
        reservation: &Reservation<'_>,
        (user, default_user): (Option<&UserId>, Option<&UserId>),
        imported: &ImportedSession,
        mut batches: RowBatches,
    ) -> Result<ImportOutcome, StoreError> {
        let Reservation { tenant, session, .. } = *reservation;
        let mut transaction = self.begin(tenant).await?;
        let mut known = None;
        while let Some(until) = reserved_until(&mut transaction, tenant, session).await? {
            drop(transaction);
            if !self.remove_stale_import(tenant, session).await? {
                // An import that runs renews its reservation with each batch. Another one was interrupted, and expires.
                if known.is_some_and(|known| known != until) {
                    return Ok(ImportOutcome::Importing);
                }
                known = Some(until);
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            transaction = self.begin(tenant).await?;
        }
        let statement = transaction.statement(DELETE_BINDING).bind(tenant.as_str()).bind(session.as_str());
        let bound = match statement.read().await? {
            Some(row) => user_from_column(row.field("user_id")?)?,
            None => None,
        };
        if user.is_some_and(|user| bound.as_ref().is_some_and(|bound| bound != user)) {
            return Ok(ImportOutcome::Exists);
        }
        let user = user.or(bound.as_ref()).or(default_user);
        let reason = if bound.is_some() { ReservedFor::ImportOfBound } else { ReservedFor::Import };
        if !reservation.insert(&mut transaction, user, reason).await? {
            return Ok(ImportOutcome::Exists);
        }
        let (mut row_counts, mut stored_bytes, mut cursor_tokens) = ((0, 0), 0, 0);
        let mut of_session = None;
        while let Some(RowBatch { messages, revisions }) = batches.recv().await {
            transaction = self.let_others_write(transaction, tenant).await?;
            if !reservation.renew(&mut transaction).await? {
                return Ok(ImportOutcome::Erased);
            }
            row_counts.0 += to_i64(messages.len());
            row_counts.1 += to_i64(revisions.len());
            insert_messages(&mut transaction, tenant, &new_messages(session, &messages)).await?;
            if let (Some(analyzer), Some(first), Some(last)) =
                (self.analyzer(), messages.first(), messages.last())
            {
                let analyzer = match of_session {
                    Some(analyzer) => analyzer,
                    None => recognise_language(&mut transaction, analyzer, tenant, session).await?,
                };
                of_session = Some(analyzer);
                let seqs = first.seq..=last.seq;
                index_messages(&mut transaction, analyzer, tenant, (session, user), seqs, Replaces::Nothing)
                    .await?;
            }
            insert_revisions(&mut transaction, tenant, session, &revisions).await?;
            let bytes: i64 = messages.iter().map(|row| to_i64(row.message.json().len())).sum();
            stored_bytes += bytes;
            let covered = messages.iter().filter(|row| row.seq <= imported.cursor);
            cursor_tokens += covered.map(|row| row.tokens).sum::<i64>();
        }
        if row_counts != (imported.last_seq, imported.revision) {
            return Ok(ImportOutcome::Incomplete);
        }
        transaction = self.let_others_write(transaction, tenant).await?;
        if !reservation.publish(&mut transaction, imported, cursor_tokens, stored_bytes).await? {
            return Ok(ImportOutcome::Erased);
        }
        transaction.commit().await?;
        Ok(ImportOutcome::Imported)
    }

    /// Commits and begins another transaction on SQLite, where all writers wait for this one.
    async fn let_others_write(
        &self,
        transaction: Transaction,
        tenant: &TenantId,
    ) -> Result<Transaction, StoreError> {
        if !transaction.is_sqlite() {
            return Ok(transaction);
        }
        transaction.commit().await?;
        self.begin(tenant).await
    }

    /// Removes the reservation of a session if the process that imported or erased it has died. Waits for an erasure that runs.
    /// Returns `false` if an import runs, or was running a moment ago.
    pub async fn remove_stale_import(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<bool, StoreError> {
        const SELECT_RESERVATION: &str = "\
            SELECT import_token, import_until < $3 AS is_stale FROM sessions
            WHERE tenant_id = $1 AND session_id = $2 AND import_until IS NOT NULL";
        if self.sqlite().is_none() {
            return Ok(false);
        }
        let statement = self.statement(tenant, SELECT_RESERVATION).bind(session.as_str());
        let Some(row) = statement.bind_now().read().await? else { return Ok(true) };
        let token = row.field("import_token")?;
        let is_stale = row.field::<i64>("is_stale")? == 1;
        if is_stale {
            self.remove_reservation(&Reservation { tenant, session, token }).await?;
        }
        Ok(is_stale)
    }

    /// Returns an error if an import of the session runs on SQLite.
    pub(super) async fn check_not_importing(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<(), StoreError> {
        let is_importing = self.sqlite().is_some() && !self.remove_stale_import(tenant, session).await?;
        if is_importing { Err(StoreError::SessionImporting) } else { Ok(()) }
    }

    /// Removes what processes have left that died during an import or an erasure, and its traces in the file. Returns the number
    /// of reservations that remain, because their imports run or were running a moment ago.
    pub async fn remove_stale_imports(&self) -> Result<usize, StoreError> {
        const SELECT_IMPORTS: &str =
            "SELECT tenant_id, session_id FROM sessions WHERE import_until IS NOT NULL";
        let Some(database) = self.sqlite() else { return Ok(0) };
        let mut remaining = 0;
        for row in self.global_statement(SELECT_IMPORTS).read_all().await? {
            let (tenant, session) = (rows::tenant_id(&row)?, rows::session_id(&row)?);
            remaining += usize::from(!self.remove_stale_import(&tenant, &session).await?);
        }
        database.truncate_wal().await;
        Ok(remaining)
    }

    /// Removes a reservation with the rows written so far, and restores the binding of the session to its user. It gets another
    /// token, so that an import that still runs can't continue.
    pub(super) async fn remove_reservation(&self, reservation: &Reservation<'_>) -> Result<(), StoreError> {
        const ABANDON_RESERVATION: &str = "\
            UPDATE sessions SET import_token = randomblob(16), import_until = 0
            WHERE tenant_id = $1 AND session_id = $2 AND import_token = $3";
        let Reservation { tenant, session, token } = *reservation;
        let statement = self.statement(tenant, ABANDON_RESERVATION).bind(session.as_str());
        statement.bind(token).execute().await?;
        self.remove_abandoned(tenant, slice::from_ref(session)).await
    }
}

/// Removes the row of a session that is only bound to its user, except if rewinds have removed branches from it: these would be
/// erased with the row.
const DELETE_BINDING: &str = "\
    DELETE FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq = 0
        AND NOT EXISTS (SELECT 1 FROM sessions AS b
            WHERE b.tenant_id = $1 AND b.forked_from = $2 AND b.fork_kind = 'rewind')
    RETURNING user_id";

/// Returns the end of the reservation of the session by another import, or `None` if there is none. On Postgres, no transaction
/// sees a reservation.
async fn reserved_until(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Option<i64>, StoreError> {
    const SELECT_RESERVED_UNTIL: &str = "SELECT import_until FROM sessions
        WHERE tenant_id = $1 AND session_id = $2 AND import_until IS NOT NULL";
    if !transaction.is_sqlite() {
        return Ok(None);
    }
    let statement = transaction.statement(SELECT_RESERVED_UNTIL).bind(tenant.as_str());
    let row = statement.bind(session.as_str()).read().await?;
    row.map(|row| Ok(row.field("import_until")?)).transpose()
}

impl<'i> Reservation<'i> {
    pub(super) fn new(tenant: &'i TenantId, session: &'i SessionId) -> Self {
        Self { tenant, session, token: Uuid::new_v4() }
    }

    /// Inserts the row of the session. Returns `false` if it exists.
    pub(super) async fn insert(
        &self,
        transaction: &mut Transaction,
        user: Option<&UserId>,
        reason: ReservedFor,
    ) -> Result<bool, StoreError> {
        const INSERT_RESERVATION: Sql = Sql {
            postgres:
                "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
                    activity_hour, retained_from)
                VALUES ($1, $2, $3, '{}', 0, 0, now(), now(), floor(extract(epoch FROM now()) / 3600), now())
                ON CONFLICT (tenant_id, session_id) DO NOTHING",
            sqlite:
                "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
                    activity_hour, retained_from, incarnation, import_token, import_bound, import_until)
                VALUES ($1, $2, $3, '{}', 0, 0, $7, $7, $7 / 3600000000, $7, randomblob(16), $4, $5, $7 + $6)
                ON CONFLICT (tenant_id, session_id) DO NOTHING",
        };
        let statement = transaction.statement(INSERT_RESERVATION).bind(self.tenant.as_str());
        let mut statement = statement.bind(self.session.as_str()).bind(user_column(user));
        if statement.is_sqlite() {
            statement = statement.bind(self.token).bind(reason as i64).bind(RESERVATION_MICROS);
        }
        Ok(statement.bind_now().execute().await? > 0)
    }

    /// Renews the reservation. Returns `false` if the session was erased.
    pub(super) async fn renew(&self, transaction: &mut Transaction) -> Result<bool, StoreError> {
        const RENEW_RESERVATION: &str = "UPDATE sessions SET import_until = $5 + $4
            WHERE tenant_id = $1 AND session_id = $2 AND import_token = $3";
        if !transaction.is_sqlite() {
            return Ok(true);
        }
        let statement = transaction.statement(RENEW_RESERVATION).bind(self.tenant.as_str());
        let statement = statement.bind(self.session.as_str()).bind(self.token).bind(RESERVATION_MICROS);
        Ok(statement.bind_now().execute().await? > 0)
    }

    /// Makes the session visible. Returns `false` if it was erased. The time of the last exchange can't be in the future: the
    /// session would be the first of the list, and would not expire, until then.
    async fn publish(
        &self,
        transaction: &mut Transaction,
        imported: &ImportedSession,
        cursor_tokens: i64,
        stored_bytes: i64,
    ) -> Result<bool, StoreError> {
        const PUBLISH_SESSION: Sql = Sql {
            postgres:
                "UPDATE sessions SET metadata = coalesce($3, '{}'), last_seq = $4, tokens = $5, cursor_seq = $6,
                    cursor_tokens = $7, summary = $8, summary_words = $9, summary_tokens = $10, revision = $11,
                    stored_bytes = $12, created_at = least($13, now()),
                    updated_at = least($14, now()),
                    activity_hour = floor(extract(epoch FROM least($14, now())) / 3600), retained_from = now()
                WHERE tenant_id = $1 AND session_id = $2",
            sqlite:
                "UPDATE sessions SET metadata = coalesce($3, '{}'), last_seq = $4, tokens = $5, cursor_seq = $6,
                    cursor_tokens = $7, summary = $8, summary_words = $9, summary_tokens = $10, revision = $11,
                    stored_bytes = $12, created_at = min(coalesce($13, $16), $16),
                    updated_at = min(coalesce($14, $16), $16),
                    activity_hour = min(coalesce($14, $16), $16) / 3600000000, retained_from = $16,
                    incarnation = randomblob(16), import_token = NULL, import_bound = NULL, import_until = NULL
                WHERE tenant_id = $1 AND session_id = $2 AND import_token = $15",
        };
        let mut statement = transaction
            .statement(PUBLISH_SESSION)
            .bind(self.tenant.as_str())
            .bind(self.session.as_str())
            .bind(imported.metadata.as_deref())
            .bind(imported.last_seq)
            .bind(imported.tokens)
            .bind(imported.cursor)
            .bind(cursor_tokens)
            .bind(imported.summary.text.as_str())
            .bind(imported.summary.words)
            .bind(imported.summary.tokens)
            .bind(imported.revision)
            .bind(stored_bytes)
            .bind(imported.times.map(|(created_at, _)| DbTime(created_at)))
            .bind(imported.times.map(|(_, updated_at)| DbTime(updated_at)));
        if statement.is_sqlite() {
            statement = statement.bind(self.token);
        }
        Ok(statement.bind_now().execute().await? > 0)
    }
}

fn new_messages<'m>(session: &'m SessionId, messages: &'m [ImportedMessage]) -> Vec<NewMessage<'m>> {
    let new = |imported: &'m ImportedMessage| {
        let ImportedMessage { seq, ref facts, ref message, tokens } = *imported;
        NewMessage { session, seq, message, tokens, facts: facts.clone() }
    };
    messages.iter().map(new).collect()
}

async fn insert_revisions(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    rows: &[Revision],
) -> Result<(), StoreError> {
    const INSERT_IMPORTED_REVISION: &str = "\
        INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary,
            summary_words, summary_tokens, added, meta, source, redacted_seq, created_at)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)";
    for row in rows {
        transaction
            .statement(INSERT_IMPORTED_REVISION)
            .bind(tenant.as_str())
            .bind(session.as_str())
            .bind(row.revision)
            .bind(row.kind.as_str())
            .bind(row.from_seq)
            .bind(row.to_seq)
            .bind(row.cursor)
            .bind(row.summary.text.as_str())
            .bind(row.summary.words)
            .bind(row.summary.tokens)
            .bind(row.added.as_str())
            .bind(json_column(row.meta.as_ref()))
            .bind(json_column(row.provenance.as_ref()))
            .bind(row.redacted_seq)
            .bind(DbTime(row.created_at))
            .execute()
            .await?;
    }
    Ok(())
}
