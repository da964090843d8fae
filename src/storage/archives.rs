//! Exporting and importing whole sessions, in bounded memory.

use super::StoreError;
use super::messages::StoredMessage;
use crate::domain::archive::{Archive, Imported};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::revision::Revision;
use async_trait::async_trait;
use tokio::sync::mpsc;

/// Which part of a history to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Only messages behind this `seq`.
    pub after_seq: i64,
    /// The last of them, at most.
    pub last_seq: i64,
    /// How many, at most.
    pub limit: i64,
    /// Bytes of all of them together, at most; but the first is read whatever it has.
    pub max_bytes: i64,
}

/// Rows of an import.
#[derive(Clone, Debug)]
pub enum Batch {
    /// Messages, in order.
    Messages(Vec<Imported>),
    /// Revisions, in order, behind all messages.
    Revisions(Vec<Revision>),
}

/// The rows of an import, as they are wanted.
pub type Batches = mpsc::Receiver<Batch>;

/// What became of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Import {
    /// The session is there, whole and durable.
    Imported,
    /// There is a session of this id. Nothing was written.
    Exists,
    /// The rows are not those that the archive names. Nothing was written.
    Incomplete,
}

/// Exporting and importing whole sessions.
#[async_trait]
pub trait Archives {
    /// A part of the history, oldest first, bounded in bytes too. Empty: there is nothing, or no such session.
    async fn part(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        part: Part,
    ) -> Result<Vec<StoredMessage>, StoreError>;

    /// Creates the session with all of its rows in one transaction, or nothing. Whatever waits for a client has been
    /// waited for: the batches come as fast as they are taken. Rows without a time get the store's. Others who write
    /// to a session of this id meanwhile wait on Postgres; on SQLite whoever writes does.
    async fn import(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
        archive: &Archive,
        batches: Batches,
    ) -> Result<Import, StoreError>;
}

/// Holds what came against what an archive names.
#[derive(Debug, Default)]
pub(super) struct Tally {
    messages: i64,
    revisions: i64,
}

impl Tally {
    pub(super) fn add(&mut self, batch: &Batch) {
        match batch {
            Batch::Messages(rows) => self.messages += super::row::limit(rows.len()),
            Batch::Revisions(rows) => self.revisions += super::row::limit(rows.len()),
        }
    }

    pub(super) fn is_whole(&self, archive: &Archive) -> bool {
        (self.messages, self.revisions) == (archive.last_seq, archive.revision)
    }
}
