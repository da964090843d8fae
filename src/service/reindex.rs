//! Rebuilds the search index: indexes messages that were stored while search was disabled, and all messages after a change
//! of the analyzer.
//!
//! The work is done in batches next to a running service. Each batch is one transaction that also records the progress, so
//! that an interrupted run continues at the same position.

use super::{Error, decode_message};
use crate::domain::search::analyzer::Analyzer;
use crate::storage::MessageRange;
use crate::storage::search::MessageRef;
use crate::storage::search_index::IndexState;
use crate::storage::{Store, StoreError};
use std::sync::Arc;

const MAX_BATCH_MESSAGES: i64 = 500;
/// Maximum JSON size of a batch of several messages.
const MAX_BATCH_BYTES: i64 = 1024 * 1024;

/// Returns which analyzer the index uses and how many sessions must be reindexed.
pub async fn state(store: &Arc<Store>, analyzer: Analyzer) -> Result<IndexState, StoreError> {
    store.index_state(&analyzer.version()).await
}

/// Indexes the messages of all tenants that are missing from the index. Returns their number. `progress` receives the
/// number of messages indexed so far.
pub async fn reindex(store: &Arc<Store>, analyzer: Analyzer, progress: impl Fn(u64)) -> Result<u64, Error> {
    store.start_reindex(&analyzer.version()).await?;
    let mut indexed = 0;
    let mut last = None;
    loop {
        let Some(range) = store.next_reindex_range(last.as_ref()).await? else {
            // Another process may have added ranges of sessions before the last one.
            if last.take().is_some() {
                continue;
            }
            return Ok(indexed);
        };
        let message_range = MessageRange {
            after_seq: range.done_seq,
            last_seq: range.through_seq,
            limit: MAX_BATCH_MESSAGES,
            max_bytes: MAX_BATCH_BYTES,
        };
        let mut messages = Vec::new();
        for stored in store.message_range(&range.tenant, &range.session, message_range).await? {
            let message = decode_message(stored.json)?;
            let message_ref =
                MessageRef { created_at: stored.created_at, seq: stored.seq, session: range.session.clone() };
            messages.push((message_ref, message));
        }
        // Without messages the session was erased in the meantime, and its range with it.
        let done_seq = messages.last().map_or(range.through_seq, |(message_ref, _)| message_ref.seq);
        store.reindex_messages(&range, &messages, done_seq).await?;
        indexed += u64::try_from(messages.len()).unwrap_or(0);
        progress(indexed);
        last = Some(range);
    }
}
