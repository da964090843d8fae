//! Batches of exchanges, as far as they are common to both stores.

use super::batch::Batcher;
use super::values::to_i64;
use super::{AppendOutcome, AppendRequest, StoreError};
use crate::domain::error_chain::ErrorChain;
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{TenantId, UserId};
use std::collections::BTreeMap;
use std::io;

/// Largest number of exchanges in a transaction.
pub(super) const MAX_BATCH: usize = 128;
/// Larger exchanges are appended by themselves, so that the others do not wait for them.
const MAX_BATCHED_BYTES: usize = 128 * 1024;

/// Returns `true` if the exchange is so large that others would wait for it.
pub(super) fn is_large(request: &AppendRequest) -> bool {
    message_bytes(request) > MAX_BATCHED_BYTES
}

/// Returns the size of the messages as JSON.
pub(super) fn message_bytes(request: &AppendRequest) -> usize {
    request.exchange.messages.iter().map(|(message, _)| message.json().len()).sum()
}

pub(super) type AppendBatcher = Batcher<AppendRequest, AppendOutcome>;

impl AppendBatcher {
    /// Appends an exchange, together with others unless it is large or its transaction may have to be rolled back.
    pub(super) async fn append(&self, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
        if is_large(&request) || expects_history(&request) {
            self.run_alone(request).await
        } else {
            self.run(request).await
        }
    }
}

/// Returns `true` if the exchange must follow a certain message.
pub(super) fn expects_history(request: &AppendRequest) -> bool {
    request.exchange.expected_last_seq.is_some() || request.expected_incarnation.is_some()
}

/// Replaces the outcome of an exchange that does not follow the message that it expects. Returns `true` if it does so; then the
/// transaction must be rolled back. The check after the append needs no further statement, and nothing can change in between:
/// the transaction holds the lock of the session.
pub(super) fn reject_unexpected(request: &AppendRequest, outcome: &mut Option<AppendOutcome>) -> bool {
    let Some(AppendOutcome::Appended(appended)) = outcome else { return false };
    let last_seq = appended.first_seq - 1;
    let is_last = request.exchange.expected_last_seq.is_none_or(|expected| expected == last_seq);
    let is_same = request.expected_incarnation.is_none_or(|same| appended.incarnation == Some(same));
    if appended.replayed || (is_last && is_same) {
        return false;
    }
    *outcome = Some(AppendOutcome::LastSeqMismatch { last_seq });
    true
}

/// Exchanges of one session that are appended together. They name the same user, or none of them names a user; they have
/// the same default user; and their idempotency keys differ.
#[derive(Debug)]
pub(super) struct SessionGroup<'r> {
    pub(super) tenant: &'r TenantId,
    pub(super) session: &'r str,
    /// Indexes of the exchanges, with the position of their first message in the group.
    pub(super) exchanges: Vec<(usize, i64)>,
    pub(super) messages: i64,
    pub(super) tokens: i64,
    /// The size of the messages as JSON.
    pub(super) bytes: i64,
}

impl<'r> SessionGroup<'r> {
    /// Returns the exchanges with their index and the position of their first message.
    pub(super) fn exchanges(
        &self,
        requests: &'r [AppendRequest],
    ) -> impl DoubleEndedIterator<Item = (usize, &'r AppendRequest, i64)> {
        let exchanges = self.exchanges.iter();
        exchanges.filter_map(|&(index, offset)| Some((index, requests.get(index)?, offset)))
    }

    pub(super) fn user(&self, requests: &'r [AppendRequest]) -> Option<&'r str> {
        self.exchanges(requests)
            .find_map(|(_, request, _)| request.exchange.user_id.as_ref())
            .map(UserId::as_str)
    }

    /// Returns the user of a session without a user if the exchanges name none.
    pub(super) fn default_user(&self, requests: &'r [AppendRequest]) -> Option<&'r str> {
        self.exchanges(requests).find_map(|(_, request, _)| request.default_user.as_ref()).map(UserId::as_str)
    }

    /// Returns the metadata of the last exchange that has any.
    pub(super) fn metadata(&self, requests: &'r [AppendRequest]) -> Option<&'r str> {
        self.exchanges(requests)
            .filter_map(|(_, request, _)| request.exchange.metadata.as_deref())
            .next_back()
    }

    /// Fills in the outcomes of the exchanges. `appended` has all messages of the group; it is `None` if the session belongs
    /// to another user.
    pub(super) fn fill_outcomes(
        &self,
        requests: &'r [AppendRequest],
        appended: Option<&PersistedExchange>,
        outcomes: &mut [Option<AppendOutcome>],
    ) {
        for (index, request, offset) in self.exchanges(requests) {
            let outcome = appended.map_or(AppendOutcome::UserMismatch, |group| {
                let first_seq = group.first_seq + offset;
                let last_seq = first_seq + to_i64(request.exchange.messages.len()) - 1;
                let created_at = request.exchange.time().unwrap_or(group.created_at);
                AppendOutcome::Appended(PersistedExchange {
                    first_seq,
                    last_seq,
                    created_at,
                    ..group.clone()
                })
            });
            if let Some(slot) = outcomes.get_mut(index) {
                *slot = Some(outcome);
            }
        }
    }
}

/// Groups the exchanges by session, sorted by tenant and session. Exchanges that do not fit into the group of their session
/// are left out: they wait for the next transaction on Postgres, and for the next round of the same one on SQLite.
pub(super) fn group<'r>(
    requests: impl IntoIterator<Item = (usize, &'r AppendRequest)>,
) -> Vec<SessionGroup<'r>> {
    let mut groups: BTreeMap<(&TenantId, &str), (SessionGroup<'r>, Vec<&'r AppendRequest>)> = BTreeMap::new();
    for (index, request) in requests {
        let (tenant, session) = (&request.tenant, request.session.as_str());
        let (group, members) = groups.entry((tenant, session)).or_insert_with(|| {
            (
                SessionGroup { tenant, session, exchanges: Vec::new(), messages: 0, tokens: 0, bytes: 0 },
                Vec::new(),
            )
        });
        let fits = |member: &&AppendRequest| {
            let has_same_key =
                member.key.as_ref().zip(request.key.as_ref()).is_some_and(|(a, b)| a.key == b.key);
            member.exchange.user_id == request.exchange.user_id
                && member.default_user == request.default_user
                && !has_same_key
        };
        if !members.iter().all(fits) {
            continue;
        }
        group.exchanges.push((index, group.messages));
        group.messages += i64::try_from(request.exchange.messages.len()).unwrap_or(i64::MAX);
        group.tokens += request.exchange.tokens();
        group.bytes += to_i64(message_bytes(request));
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
