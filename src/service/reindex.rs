//! Bringing the index up to the messages: those stored before there was one, and all of them when its rules have changed.
//!
//! Piece by piece, beside a running service: a piece is one transaction that also says how far the work is, so that it
//! may be stopped at any time and goes on where it was.

use super::{Error, decode_message};
use crate::domain::search::analyzer::Analyzer;
use crate::storage::MessageRange;
use crate::storage::search::MessageRef;
use crate::storage::search_index::IndexState;
use crate::storage::{Store, StoreError};
use std::sync::Arc;

/// Messages of a piece, at most.
const ROWS: i64 = 500;
/// Bytes of a piece, at most; but one message may have more.
const BYTES: i64 = 1024 * 1024;

/// How far the index is behind the messages and the rules.
pub async fn state(store: &Arc<dyn Store>, analyzer: Analyzer) -> Result<IndexState, StoreError> {
    store.index_state(&analyzer.version()).await
}

/// Indexes what is to be indexed, for all tenants. `progress` gets the number of messages indexed so far.
pub async fn reindex(
    store: &Arc<dyn Store>,
    analyzer: Analyzer,
    progress: impl Fn(u64),
) -> Result<u64, Error> {
    store.start_reindex(&analyzer.version()).await?;
    let mut indexed = 0;
    while let Some(piece) = store.next_reindex_range().await? {
        let part = MessageRange {
            after_seq: piece.done_seq,
            last_seq: piece.through_seq,
            limit: ROWS,
            max_bytes: BYTES,
        };
        let mut messages = Vec::new();
        for stored in store.message_range(&piece.tenant, &piece.session, part).await? {
            let message = decode_message(stored.json)?;
            let place =
                MessageRef { created_at: stored.created_at, seq: stored.seq, session: piece.session.clone() };
            messages.push((place, message));
        }
        // Nothing there: the session was erased meanwhile, and with it the piece.
        let done = messages.last().map_or(piece.through_seq, |(place, _)| place.seq);
        store.reindex_messages(&piece, &messages, done).await?;
        indexed += u64::try_from(messages.len()).unwrap_or(0);
        progress(indexed);
    }
    Ok(indexed)
}
