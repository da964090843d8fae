//! Batches of exchanges, as far as they are common to both stores.

use super::batch::Batcher;
use super::{AppendOutcome, AppendRequest, StoreError};
use crate::domain::error_chain::ErrorChain;
use std::collections::BTreeMap;
use std::io;

/// Largest number of exchanges in a transaction.
pub(super) const MAX_BATCH: usize = 128;
/// Larger exchanges are appended by themselves, so that the others do not wait for them.
const MAX_BATCHED_BYTES: usize = 128 * 1024;

/// Returns `true` if the exchange is small enough to share a transaction with others.
pub(super) fn can_be_batched(request: &AppendRequest) -> bool {
    let messages = request.exchange.messages.iter();
    messages.map(|(message, _)| message.json().len()).sum::<usize>() <= MAX_BATCHED_BYTES
}

pub(super) type AppendBatcher = Batcher<AppendRequest, AppendOutcome>;

impl AppendBatcher {
    /// Appends an exchange, together with others unless it is large.
    pub(super) async fn append(&self, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
        if can_be_batched(&request) { self.run(request).await } else { self.run_alone(request).await }
    }
}

/// Exchanges of one session that are appended together. They name the same user, or none of them names a user, and their
/// idempotency keys differ.
#[derive(Debug)]
pub(super) struct SessionGroup<'r> {
    pub(super) tenant: &'r str,
    pub(super) session: &'r str,
    /// Indexes of the exchanges, with the position of their first message in the group.
    pub(super) exchanges: Vec<(usize, i64)>,
    pub(super) messages: i64,
    pub(super) tokens: i64,
}

/// Groups the exchanges by session, sorted by tenant and session. Exchanges that do not fit into the group of their session
/// are left out: they wait for the next transaction.
pub(super) fn group<'r>(
    requests: impl IntoIterator<Item = (usize, &'r AppendRequest)>,
) -> Vec<SessionGroup<'r>> {
    let mut groups: BTreeMap<(&str, &str), (SessionGroup<'r>, Vec<&'r AppendRequest>)> = BTreeMap::new();
    for (index, request) in requests {
        let (tenant, session) = (request.tenant.as_str(), request.session.as_str());
        let (group, members) = groups.entry((tenant, session)).or_insert_with(|| {
            (SessionGroup { tenant, session, exchanges: Vec::new(), messages: 0, tokens: 0 }, Vec::new())
        });
        let fits = |member: &&AppendRequest| {
            let has_same_key =
                member.key.as_ref().zip(request.key.as_ref()).is_some_and(|(a, b)| a.key == b.key);
            member.exchange.user_id == request.exchange.user_id && !has_same_key
        };
        if !members.iter().all(fits) {
            continue;
        }
        group.exchanges.push((index, group.messages));
        group.messages += i64::try_from(request.exchange.messages.len()).unwrap_or(i64::MAX);
        group.tokens += request.exchange.tokens();
        members.push(request);
    }
    groups.into_values().map(|(group, _)| group).collect()
}

/// Returns the error for each exchange of a batch that failed as a whole.
pub(super) fn batch_unavailable(error: &StoreError) -> StoreError {
    StoreError::Unavailable(
        io::Error::other(format!("a batch of exchanges failed: {}", ErrorChain(error))).into(),
    )
}
