//! Imports a session, completely or not at all.
//!
//! Arriving lines are validated and written to a temporary file. After the last line, the session is created from that file.
//! So a slow or vanished client never holds a connection, a lock or the only writer of SQLite. The store shows the complete
//! session, or nothing; after a crash, it removes what SQLite has of an incomplete import.

use super::export::{message_page, revision_page};
use super::{Error, MemoryService, complete_write};
use crate::capacity;
use crate::domain::error_chain::ErrorChain;
use crate::domain::export_format::{ExportReader, Fingerprint, ImportedSession};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::limits::SizeLimits;
use crate::domain::session::Session;
use crate::storage::{ImportOutcome, Store, StoreError};
use staging_file::StagingFile;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;

mod staging_file;

/// Memory of an import that is being written: a batch as rows and as the parameter of its statement, and the batches that were
/// read ahead. A batch has 1 MiB, or one row.
const WRITE_MEMORY: usize = 8 * 1024 * 1024;
/// Pause between two searches for reservations that have expired.
const ABANDONED_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Size limits of an import.
#[derive(Clone, Copy, Debug)]
pub struct ImportLimits {
    /// Limits of each message and of the metadata.
    pub sizes: SizeLimits,
    /// Limit of the import as a whole, and so about that of the temporary file.
    pub max_bytes: u64,
    pub max_line_bytes: usize,
}

/// An import that is still arriving.
#[derive(Debug)]
pub struct Upload {
    limits: ImportLimits,
    bytes: u64,
    reader: ExportReader,
    staging_file: StagingFile,
    /// Beginning of a line whose end has not arrived.
    partial_line: Vec<u8>,
}

/// A complete, valid import that is not in the database yet.
#[derive(Debug)]
pub struct StagedImport {
    session: ImportedSession,
    staging_file: StagingFile,
}

/// The result of an import.
#[derive(Clone, Debug)]
pub struct ImportResult {
    /// `false` if an earlier import had created the session.
    pub created: bool,
    /// Number of imported messages.
    pub messages: i64,
    /// Number of imported revisions.
    pub revisions: i64,
    pub session: Session,
}

impl Upload {
    pub fn begin(limits: ImportLimits) -> Result<Self, Error> {
        let staging_file = StagingFile::new().map_err(Error::StagingFile)?;
        let reader = ExportReader::new(limits.sizes).with_clock(OffsetDateTime::now_utc());
        Ok(Self { limits, bytes: 0, reader, staging_file, partial_line: Vec::new() })
    }

    /// Returns an error if `more` further bytes would exceed the limit.
    pub fn check_size(&self, more: u64) -> Result<(), Error> {
        let max_bytes = self.limits.max_bytes;
        if self.bytes.saturating_add(more) > max_bytes {
            return Err(Error::ImportTooLarge { max_bytes });
        }
        Ok(())
    }

    /// Returns the number of messages according to the first line, or 0 if it does not declare one.
    #[must_use]
    pub fn declared_messages(&self) -> i64 {
        self.reader.declared_messages()
    }

    /// Returns the number of messages that have arrived.
    #[must_use]
    pub fn messages(&self) -> u64 {
        u64::try_from(self.reader.messages()).unwrap_or(0)
    }

    /// Returns the memory held for the line whose end has not arrived.
    #[must_use]
    pub fn partial_line_bytes(&self) -> usize {
        self.partial_line.len()
    }

    /// Processes the next bytes. Parses JSON and counts tokens, so it must not run on a thread that serves requests.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.check_size(more)?;
        self.bytes += more;
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let remainder = lines.next_back().unwrap_or_default();
        for end_of_line in lines {
            if self.partial_line.is_empty() {
                self.read_line(end_of_line)?;
            } else {
                let mut line = std::mem::take(&mut self.partial_line);
                line.extend_from_slice(end_of_line);
                self.read_line(&line)?;
                line.clear();
                self.partial_line = line;
            }
        }
        self.partial_line.extend_from_slice(remainder);
        self.check_line_size(self.partial_line.len())
    }

    /// Ends the upload after the last byte.
    pub fn finish(mut self) -> Result<StagedImport, Error> {
        let last_line = std::mem::take(&mut self.partial_line);
        if !last_line.is_empty() {
            self.read_line(&last_line)?;
        }
        Ok(StagedImport { session: self.reader.finish()?, staging_file: self.staging_file })
    }

    fn read_line(&mut self, line: &[u8]) -> Result<(), Error> {
        self.check_line_size(line.len())?;
        for row in self.reader.line(line)? {
            self.staging_file.write(&row).map_err(Error::StagingFile)?;
        }
        Ok(())
    }

    fn check_line_size(&self, bytes: usize) -> Result<(), Error> {
        let max_bytes = self.limits.max_line_bytes;
        if bytes <= max_bytes {
            return Ok(());
        }
        let detail = format!("has more than {max_bytes} bytes, the most of a line: shorten it");
        Err(Error::Import(self.reader.error_in_next_line(detail)))
    }
}

impl StagedImport {
    /// Returns the number of messages.
    #[must_use]
    pub fn messages(&self) -> i64 {
        self.session.last_seq
    }
}

impl MemoryService {
    /// Creates the session. The write continues if the client disconnects.
    pub async fn import(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<UserId>,
        default_user: Option<UserId>,
        staged: StagedImport,
    ) -> Result<ImportResult, Error> {
        let (this, tenant, session) = (self.clone(), tenant.clone(), session.clone());
        // The upload is complete: waiting for memory is better than another upload.
        let work = capacity::internal();
        let write = async move {
            capacity::claim(WRITE_MEMORY).await?;
            let users = (user.as_ref(), default_user.as_ref());
            write_import(&this.store, &tenant, &session, users, staged, |_| {}).await
        };
        capacity::scope(work, complete_write(write)).await
    }

    /// Removes what processes have left in the database that died during an import. Returns when no import is left whose
    /// process may have died.
    pub async fn remove_abandoned_imports(&self) {
        loop {
            match self.store.remove_stale_imports().await {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(error = %ErrorChain(&error), "failed to remove incomplete imports");
                }
            }
            tokio::time::sleep(ABANDONED_CHECK_INTERVAL).await;
        }
    }
}

/// Creates the session for `user`; if that is `None`, for the user in the export; without one, for the user that the session is
/// bound to, or else for `default_user`. A repeated import finds the session that it created, even if messages were added since. `progress` receives the number of messages written so far.
pub async fn write_import(
    store: &Arc<Store>,
    tenant: &TenantId,
    session: &SessionId,
    (user, default_user): (Option<&UserId>, Option<&UserId>),
    staged: StagedImport,
    progress: impl Fn(i64) + Send + 'static,
) -> Result<ImportResult, Error> {
    let StagedImport { session: imported, staging_file } = staged;
    let user = user.or(imported.user_id.as_ref()).cloned();
    let (batches, reading) = staging_file.into_batches(progress);
    let users = (user.as_ref(), default_user);
    let outcome = store.import_session(tenant, session, users, &imported, batches).await?;
    if outcome == ImportOutcome::Importing {
        return Err(StoreError::SessionImporting.into());
    }
    if outcome == ImportOutcome::Incomplete {
        let result = reading.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let truncated = || std::io::Error::other("the staging file of an import was truncated");
        return Err(Error::StagingFile(result.err().unwrap_or_else(truncated)));
    }
    let created = outcome != ImportOutcome::Exists;
    let missing = if created { Error::SessionNotFound } else { Error::SessionExists };
    let stored = store.session(tenant, session).await?.ok_or(missing)?;
    if !created {
        let same_user = user.is_none_or(|user| Some(user) == stored.user_id);
        if !same_user || !begins_with(store.as_ref(), tenant, &stored, &imported).await? {
            return Err(Error::SessionExists);
        }
    }
    Ok(ImportResult { created, messages: imported.last_seq, revisions: imported.revision, session: stored })
}

/// Returns `true` if the history and the revisions of the session begin with the imported ones.
async fn begins_with(
    store: &Store,
    tenant: &TenantId,
    session: &Session,
    imported: &ImportedSession,
) -> Result<bool, Error> {
    if session.last_seq < imported.last_seq || session.revision < imported.revision {
        return Ok(false);
    }
    let id = &session.session_id;
    let mut fingerprint = Fingerprint::new(imported.messages_only);
    let mut last_seq = 0;
    while last_seq < imported.last_seq {
        let page = message_page(store, tenant, id, last_seq, imported.last_seq).await?;
        let Some(last) = page.last() else {
            return Ok(false);
        };
        last_seq = last.seq;
        for message in &page {
            fingerprint.message(message.seq, &message.facts(), &message.json);
        }
    }
    let mut last_revision = 0;
    while last_revision < imported.revision {
        let page = revision_page(store, tenant, id, last_revision, imported.revision).await?;
        let Some(last) = page.last() else {
            return Ok(false);
        };
        last_revision = last.revision;
        for revision in &page {
            fingerprint.revision(revision);
        }
    }
    Ok(fingerprint.finish() == imported.fingerprint)
}
