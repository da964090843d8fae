//! Counting the rows of an import.

use super::RowBatch;
use super::row::limit;
use crate::domain::export_format::ImportedSession;

/// The number of imported rows, to compare with the header of the archive.
#[derive(Debug, Default)]
pub(super) struct ImportCounts {
    messages: i64,
    revisions: i64,
}

impl ImportCounts {
    pub(super) fn add(&mut self, batch: &RowBatch) {
        match batch {
            RowBatch::Messages(rows) => self.messages += limit(rows.len()),
            RowBatch::Revisions(rows) => self.revisions += limit(rows.len()),
        }
    }

    pub(super) fn is_complete(&self, archive: &ImportedSession) -> bool {
        (self.messages, self.revisions) == (archive.last_seq, archive.revision)
    }
}
