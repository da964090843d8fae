//! Importing a session: all of it or nothing.
//!
//! What arrives is checked line by line and put down in a temporary file; only when all of it is there and sound, one
//! transaction makes the session of it. So a client may be slow, or go away, without a connection, a lock or SQLite's
//! only writer being held, no half of a session is ever in the database, and nothing has to be cleaned up after a
//! crash. A staging table would hold the writer just as long in the end, for the copy, and write everything twice.

use super::export::{BYTES, REVISIONS, ROWS, corrupt};
use super::{Error, MemoryService};
use crate::domain::export_format::{Entry, ExportReader, Fingerprint, ImportedSession, max_line_bytes};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::limits::SizeLimits;
use crate::domain::session::Session;
use crate::domain::validation::FieldError;
use crate::storage::Store;
use crate::storage::{ImportOutcome, MessageRange};
use staging_file::StagingFile;
use std::sync::Arc;
use tracing::Instrument as _;

mod staging_file;

/// How large an import may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Its messages and its metadata.
    pub sizes: SizeLimits,
    /// All of it, in bytes, and so the temporary file.
    pub max_bytes: u64,
}

/// What has arrived of an import.
#[derive(Debug)]
pub struct Upload {
    limits: Limits,
    bytes: u64,
    checker: ExportReader,
    staging_file: StagingFile,
    /// The beginning of a line that has not arrived whole.
    rest: Vec<u8>,
}

/// An import that has arrived, whole and sound.
#[derive(Debug)]
pub struct Received {
    archive: ImportedSession,
    staging_file: StagingFile,
}

/// The outcome of an import.
#[derive(Clone, Debug)]
pub struct Imported {
    /// `false`: an earlier import had made the session already.
    pub created: bool,
    /// How many messages were imported.
    pub messages: i64,
    /// How many revisions were imported.
    pub revisions: i64,
    /// The session.
    pub session: Session,
}

impl Upload {
    /// Of nothing yet.
    pub fn begin(limits: Limits) -> Result<Self, Error> {
        let staging_file = StagingFile::new().map_err(Error::StagingFile)?;
        Ok(Self {
            limits,
            bytes: 0,
            checker: ExportReader::new(limits.sizes),
            staging_file,
            rest: Vec::new(),
        })
    }

    /// Refuses it where so many more bytes are too many.
    pub fn expect(&self, more: u64) -> Result<(), Error> {
        let most = self.limits.max_bytes;
        if self.bytes.saturating_add(more) > most {
            Err(Error::ImportTooLarge { max_bytes: most })
        } else {
            Ok(())
        }
    }

    /// How many messages the first line promises; 0 where it promises none.
    #[must_use]
    pub fn promised(&self) -> i64 {
        self.checker.promised()
    }

    /// How many messages have arrived.
    #[must_use]
    pub fn messages(&self) -> u64 {
        u64::try_from(self.checker.messages()).unwrap_or(0)
    }

    /// Bytes of the line that has not come whole yet.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.rest.len()
    }

    /// Takes the next bytes. Reads JSON and counts tokens: nothing for a thread that serves requests.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.expect(more)?;
        self.bytes += more;
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let rest = lines.next_back().unwrap_or_default();
        for end in lines {
            if self.rest.is_empty() {
                self.line(end)?;
            } else {
                let mut line = std::mem::take(&mut self.rest);
                line.extend_from_slice(end);
                self.line(&line)?;
                line.clear();
                self.rest = line;
            }
        }
        self.rest.extend_from_slice(rest);
        self.within_limit(self.rest.len())
    }

    /// Ends it: everything has arrived.
    pub fn finish(mut self) -> Result<Received, Error> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.line(&rest)?;
        }
        Ok(Received { archive: self.checker.finish()?, staging_file: self.staging_file })
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Error> {
        self.within_limit(line.len())?;
        match self.checker.line(line)? {
            Entry::Nothing => Ok(()),
            Entry::Message(message) => self.staging_file.message(&message).map_err(Error::StagingFile),
            Entry::Revision(revision) => self.staging_file.revision(&revision).map_err(Error::StagingFile),
        }
    }

    fn within_limit(&self, bytes: usize) -> Result<(), Error> {
        let most = max_line_bytes(self.limits.sizes);
        if bytes <= most {
            return Ok(());
        }
        let detail = format!("the line behind it is longer than {most} bytes");
        Err(Error::Import(self.checker.error(vec![FieldError { field: String::new(), detail }])))
    }
}

impl Received {
    /// How many messages there are.
    #[must_use]
    pub fn messages(&self) -> i64 {
        self.archive.last_seq
    }
}

impl MemoryService {
    /// Makes a session of what was received. The write goes on if the caller goes away.
    pub async fn import(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<UserId>,
        received: Received,
    ) -> Result<Imported, Error> {
        let (this, tenant, session) = (self.clone(), tenant.clone(), session.clone());
        let write = async move {
            let imported = import(&this.store, &tenant, &session, user.as_ref(), received, |_| {}).await;
            this.index_wakeup.notify_one();
            imported
        };
        let write = tokio::spawn(write.in_current_span());
        write.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }
}

/// Makes a session of what was received: of `user`, or else of the user that the export names. The same import again
/// finds the session that it made, however much was said there since. `progress` gets the messages written so far.
pub async fn import(
    store: &Arc<dyn Store>,
    tenant: &TenantId,
    session: &SessionId,
    user: Option<&UserId>,
    received: Received,
    progress: impl Fn(i64) + Send + 'static,
) -> Result<Imported, Error> {
    let Received { archive, staging_file } = received;
    let owner = user.or(archive.user_id.as_ref()).cloned();
    let (batches, reading) = staging_file.read(progress);
    let new_owner = owner.clone().unwrap_or_default();
    let outcome = store.import_session(tenant, session, &new_owner, &archive, batches).await?;
    if outcome == ImportOutcome::Incomplete {
        let why = reading.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let short = || std::io::Error::other("a temporary file is shorter than it was");
        return Err(Error::StagingFile(why.err().unwrap_or_else(short)));
    }
    let state = store.session(tenant, session).await?.ok_or(Error::SessionNotFound)?;
    let created = outcome == ImportOutcome::Imported;
    let its_own = owner.is_none_or(|owner| owner == state.user_id);
    if !created {
        let same = its_own && begins_with(store, tenant, &state, &archive).await?;
        same.then_some(()).ok_or(Error::SessionExists)?;
    }
    Ok(Imported { created, messages: archive.last_seq, revisions: archive.revision, session: state })
}

/// Whether the session's history and revisions begin with those of the archive.
async fn begins_with(
    store: &Arc<dyn Store>,
    tenant: &TenantId,
    session: &Session,
    archive: &ImportedSession,
) -> Result<bool, Error> {
    if session.last_seq < archive.last_seq || session.revision < archive.revision {
        return Ok(false);
    }
    let mut fingerprint = Fingerprint::new(archive.bare);
    let mut part = MessageRange { after_seq: 0, last_seq: archive.last_seq, limit: ROWS, max_bytes: BYTES };
    while part.after_seq < part.last_seq {
        let page = store.message_range(tenant, &session.session_id, part).await?;
        let Some(last) = page.last() else {
            return Ok(false);
        };
        part.after_seq = last.seq;
        for message in &page {
            fingerprint.message(message.seq, message.created_at, &message.json).map_err(corrupt)?;
        }
    }
    let mut after = 0;
    while after < archive.revision {
        let last = (after + REVISIONS).min(archive.revision);
        let page = store.revisions(tenant, &session.session_id, last + 1, last - after).await?;
        for revision in page.unwrap_or_default().iter().rev() {
            fingerprint.revision(revision).map_err(corrupt)?;
        }
        after = last;
    }
    Ok(fingerprint.finish() == archive.fingerprint)
}
