//! Exports a session page by page.
//!
//! No connection is held between two pages, because the client may read slowly. The export is a snapshot nevertheless:
//! history and revisions are append-only, and the export ends at the message and the revision that were the last when it
//! began. If the session is erased or rewound, or a message is redacted meanwhile, the export ends with an error instead of its last line, even if a
//! new session with the same id exists.

use super::{Error, MemoryService};
use crate::domain::export_format::ExportWriter;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::Revision;
use crate::domain::session::Session;
use crate::storage::{MessageRange, Store, StoreError, StoredMessage};
use std::sync::Arc;

const MAX_PAGE_MESSAGES: i64 = 1000;
/// A page with one message may be larger.
const MAX_PAGE_BYTES: i64 = 1024 * 1024;
const MAX_PAGE_REVISIONS: i64 = 20;

/// A running export.
#[derive(Debug)]
pub struct Export {
    store: Arc<Store>,
    tenant: TenantId,
    session: Session,
    writer: ExportWriter,
    next: NextLines,
}

#[derive(Clone, Copy, Debug)]
enum NextLines {
    Header,
    MessagesAfter(i64),
    RevisionsAfter(i64),
    None,
}

impl MemoryService {
    pub async fn export(&self, tenant: &TenantId, session: &SessionId) -> Result<Export, Error> {
        Export::begin(self.store.clone(), tenant, session).await
    }
}

impl Export {
    /// Reads the state of the session, which determines the last message and revision of the export.
    pub async fn begin(store: Arc<Store>, tenant: &TenantId, session: &SessionId) -> Result<Self, Error> {
        let session = store.session(tenant, session).await?.ok_or(Error::SessionNotFound)?;
        let (tenant, writer) = (tenant.clone(), ExportWriter::default());
        Ok(Self { store, tenant, session, writer, next: NextLines::Header })
    }

    #[must_use]
    pub fn messages(&self) -> i64 {
        self.session.last_seq
    }

    #[must_use]
    pub fn messages_read(&self) -> i64 {
        match self.next {
            NextLines::Header => 0,
            NextLines::MessagesAfter(seq) => seq,
            NextLines::RevisionsAfter(_) | NextLines::None => self.messages(),
        }
    }

    /// Returns the next lines, or `None` after the last one.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] if the session was erased or rewound, or a message of it was redacted, meanwhile.
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        let (session, store) = (&self.session, self.store.as_ref());
        let (lines, next) = match self.next {
            NextLines::Header => {
                (self.writer.header(session).map_err(corrupt_message)?, NextLines::MessagesAfter(0))
            }
            NextLines::MessagesAfter(after_seq) => {
                let id = &session.session_id;
                let page = message_page(store, &self.tenant, id, after_seq, session.last_seq).await?;
                let last_seq = page.last().ok_or(Error::SessionNotFound)?.seq;
                let mut lines = String::new();
                for message in &page {
                    lines.push_str(&self.writer.message(message).map_err(corrupt_message)?);
                }
                let is_last_page = last_seq == session.last_seq;
                let after = NextLines::MessagesAfter(last_seq);
                (lines, if is_last_page { NextLines::RevisionsAfter(0) } else { after })
            }
            NextLines::RevisionsAfter(after) if after < session.revision => {
                let id = &session.session_id;
                let page = revision_page(store, &self.tenant, id, after, session.revision).await?;
                let mut lines = String::new();
                for revision in &page {
                    lines.push_str(&self.writer.revision(revision).map_err(corrupt_message)?);
                }
                let last = page.last().ok_or(Error::SessionNotFound)?.revision;
                (lines, NextLines::RevisionsAfter(last))
            }
            NextLines::RevisionsAfter(_) => {
                let now = store.session(&self.tenant, &session.session_id).await?;
                let now = now.ok_or(Error::SessionNotFound)?;
                if now.incarnation != session.incarnation {
                    return Err(Error::SessionNotFound);
                }
                (std::mem::take(&mut self.writer).end().map_err(corrupt_message)?, NextLines::None)
            }
            NextLines::None => return Ok(None),
        };
        self.next = next;
        Ok(Some(lines))
    }
}

/// Reads the next page of messages after `after_seq`, up to `last_seq`.
pub(super) async fn message_page(
    store: &Store,
    tenant: &TenantId,
    session: &SessionId,
    after_seq: i64,
    last_seq: i64,
) -> Result<Vec<StoredMessage>, Error> {
    let range = MessageRange { after_seq, last_seq, limit: MAX_PAGE_MESSAGES, max_bytes: MAX_PAGE_BYTES };
    Ok(store.message_range(tenant, session, range).await?)
}

/// Reads the next page of revisions after `after`, up to `last`, in ascending order.
pub(super) async fn revision_page(
    store: &Store,
    tenant: &TenantId,
    session: &SessionId,
    after: i64,
    last: i64,
) -> Result<Vec<Revision>, Error> {
    let mut count = MAX_PAGE_REVISIONS.min(last - after);
    loop {
        let page = store.revisions(tenant, session, after + count + 1, count, MAX_PAGE_BYTES).await?;
        let mut items = page.map(|page| page.items).unwrap_or_default();
        // Pages begin with the newest revision. So if the revisions are too large for a page, the oldest ones are missing.
        if count > 1 && items.last().is_some_and(|oldest| oldest.revision > after + 1) {
            count /= 2;
            continue;
        }
        items.reverse();
        return Ok(items);
    }
}

/// Converts the error of a stored message that is not JSON.
#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
fn corrupt_message(error: serde_json::Error) -> Error {
    StoreError::Corrupt { what: "a message", why: error.to_string() }.into()
}
