//! Exporting a session, piece by piece.
//!
//! A page at a time is read, and no connection is held between two of them: whoever reads an export may be slow. It is
//! one snapshot all the same, because history and revisions only ever grow: what they were at the beginning is what is
//! read. Erasure is the exception; the export then ends with an error instead of its last line, also where a session
//! of the same id has begun meanwhile.

use super::{Error, MemoryService};
use crate::domain::export_format::ExportWriter;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::session::Session;
use crate::storage::MessageRange;
use crate::storage::{Store, StoreError};
use std::sync::Arc;

/// Rows of a page of messages, at most.
pub(super) const ROWS: i64 = 1000;
/// Bytes of a page of messages, at most; but one message may have more.
pub(super) const BYTES: i64 = 1024 * 1024;
/// Revisions of a page. Each holds a whole summary.
pub(super) const REVISIONS: i64 = 20;

/// An export under way.
#[derive(Debug)]
pub struct Export {
    store: Arc<dyn Store>,
    tenant: TenantId,
    session: Session,
    writer: ExportWriter,
    next: Next,
}

#[derive(Clone, Copy, Debug)]
enum Next {
    Header,
    MessagesAfter(i64),
    RevisionsAfter(i64),
    Nothing,
}

impl MemoryService {
    /// Begins an export.
    pub async fn export(&self, tenant: &TenantId, session: &SessionId) -> Result<Export, Error> {
        Export::begin(self.store.clone(), tenant, session).await
    }
}

impl Export {
    /// Takes note of how far the session goes.
    pub async fn begin(store: Arc<dyn Store>, tenant: &TenantId, session: &SessionId) -> Result<Self, Error> {
        let session = store.session(tenant, session).await?.ok_or(Error::SessionNotFound)?;
        Ok(Self {
            store,
            tenant: tenant.clone(),
            session,
            writer: ExportWriter::default(),
            next: Next::Header,
        })
    }

    /// How many messages it has.
    #[must_use]
    pub fn messages(&self) -> i64 {
        self.session.last_seq
    }

    /// How many messages were read.
    #[must_use]
    pub fn messages_read(&self) -> i64 {
        match self.next {
            Next::Header => 0,
            Next::MessagesAfter(seq) => seq,
            Next::RevisionsAfter(_) | Next::Nothing => self.messages(),
        }
    }

    /// The next lines; `None` behind the last.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]: it was erased meanwhile.
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        let (id, store) = (&self.session.session_id, &self.store);
        let (lines, next) = match self.next {
            Next::Header => (self.writer.header(&self.session).map_err(corrupt)?, Next::MessagesAfter(0)),
            Next::MessagesAfter(after_seq) => {
                let part = MessageRange {
                    after_seq,
                    last_seq: self.session.last_seq,
                    limit: ROWS,
                    max_bytes: BYTES,
                };
                let page = store.message_range(&self.tenant, id, part).await?;
                let last = page.last().ok_or(Error::SessionNotFound)?.seq;
                let mut lines = String::new();
                for message in page {
                    let line = self.writer.message(message.seq, message.created_at, &message.json);
                    lines.push_str(&line.map_err(corrupt)?);
                }
                let more = last < self.session.last_seq;
                (lines, if more { Next::MessagesAfter(last) } else { Next::RevisionsAfter(0) })
            }
            Next::RevisionsAfter(after) if after < self.session.revision => {
                let last = (after + REVISIONS).min(self.session.revision);
                let page = store.revisions(&self.tenant, id, last + 1, last - after).await?;
                let mut lines = String::new();
                for revision in page.unwrap_or_default().iter().rev() {
                    lines.push_str(&self.writer.revision(revision).map_err(corrupt)?);
                }
                (lines, Next::RevisionsAfter(last))
            }
            Next::RevisionsAfter(_) => {
                let now = store.session(&self.tenant, id).await?.ok_or(Error::SessionNotFound)?;
                if now.created_at != self.session.created_at || now.last_seq < self.session.last_seq {
                    return Err(Error::SessionNotFound);
                }
                (std::mem::take(&mut self.writer).end().map_err(corrupt)?, Next::Nothing)
            }
            Next::Nothing => return Ok(None),
        };
        self.next = next;
        Ok(Some(lines))
    }
}

/// What is stored can't be written as JSON.
#[expect(clippy::needless_pass_by_value, reason = "handed over by map_err")]
pub(super) fn corrupt(error: serde_json::Error) -> Error {
    StoreError::Corrupt { what: "a message", why: error.to_string() }.into()
}
