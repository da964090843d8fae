//! Statements and counters for importing a session into either database.

use super::RowBatch;
use super::values::to_i64;
use crate::domain::export_format::ImportedSession;

/// Parameters: tenant, session, and the columns of a revision.
pub(super) const INSERT_IMPORTED_REVISION: &str = "\
    INSERT INTO revisions (tenant_id, session_id, revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words,
        summary_tokens, added, meta, source, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";

/// Sets the token count of the messages up to the cursor, which an export does not contain.
pub(super) const UPDATE_CURSOR_TOKENS: &str = "\
    UPDATE sessions SET cursor_tokens = (SELECT coalesce(sum(tokens), 0) FROM messages
        WHERE tenant_id = $1 AND session_id = $2 AND seq <= sessions.cursor_seq)
    WHERE tenant_id = $1 AND session_id = $2 AND cursor_seq > 0";

/// The number of imported rows, to compare with the header of the export.
#[derive(Debug, Default)]
pub(super) struct ImportCounts {
    messages: i64,
    revisions: i64,
}

impl ImportCounts {
    pub(super) fn add(&mut self, batch: &RowBatch) {
        match batch {
            RowBatch::Messages(rows) => self.messages += to_i64(rows.len()),
            RowBatch::Revisions(rows) => self.revisions += to_i64(rows.len()),
        }
    }

    pub(super) fn is_complete(&self, header: &ImportedSession) -> bool {
        (self.messages, self.revisions) == (header.last_seq, header.revision)
    }
}
