//! Stores what is new in the complete list of messages that a client has.
//!
//! The history is read in pages and compared with the list, up to the first difference. So the cost of a sync grows with the
//! history, in time but not in memory: every page reads up to a mebibyte, which is compared byte by byte; only messages whose
//! bytes differ are parsed. The rest of the list is appended like an exchange that expects the last message compared. If
//! another exchange comes first, the sync continues to compare after the last message compared. So two clients that send the same list at the same time store it
//! once.

use super::export::message_page;
use super::{Error, MemoryService, StoreError, invalid_message};
use crate::blocking;
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::sync::{ClientList, Divergence, difference};
use crate::storage::{AppendRequest, StoredMessage};
use std::sync::Arc;
use uuid::Uuid;

/// The result of a sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Synced {
    /// The user of the session, if it has one.
    pub user_id: Option<UserId>,
    /// Number of messages of the list that were stored before.
    pub matched: i64,
    /// Number of messages that were appended.
    pub appended: i64,
    /// The `seq` of the last message of the session; 0 without a session.
    pub last_seq: i64,
    /// An earlier request with the same key appended the messages.
    pub replayed: bool,
}

impl From<PersistedExchange> for Synced {
    fn from(exchange: PersistedExchange) -> Self {
        let PersistedExchange { user_id, first_seq, last_seq, replayed, .. } = exchange;
        Self { user_id, matched: first_seq - 1, appended: last_seq - first_seq + 1, last_seq, replayed }
    }
}

impl MemoryService {
    /// Appends the messages of the list that follow the history, at most `max_new`, in one transaction. With a key, a repeated
    /// request has the result of the first one.
    ///
    /// # Errors
    /// [`Error::HistoryDiverged`] if a message of the list is not the stored one.
    pub async fn sync(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        list: ClientList,
        key: Option<String>,
        default_user: Option<UserId>,
        max_new: usize,
    ) -> Result<Synced, Error> {
        let list = Arc::new(list);
        let key = key.map(|key| IdempotencyKey { key, fingerprint: list.fingerprint() });
        let (mut matched, mut incarnation): (_, Option<Uuid>) = (0, None);
        loop {
            let owner = self.store.session_owner(tenant, session).await?;
            if owner.user.as_ref().zip(list.user_id.as_ref()).is_some_and(|(owner, named)| owner != named) {
                return Err(Error::SessionUserMismatch);
            }
            let head = self.store.session_head(tenant, session).await?;
            let last_seq = head.as_ref().map_or(0, |head| head.last_seq);
            if owner.exists != (last_seq > 0) {
                // The session was created or erased between the two reads.
                continue;
            }
            // After the head: if it contains the messages of a concurrent request with the same key, the key is known.
            if let Some(key) = &key
                && let Some((known, fingerprint)) =
                    self.store.keyed_exchange(tenant, session, &key.key).await?
            {
                let is_same = fingerprint == key.fingerprint;
                return if is_same { Ok(known.into()) } else { Err(Error::IdempotencyKeyReused) };
            }
            let known = head.map(|head| head.incarnation);
            if known != incarnation {
                // Stored messages of one incarnation never change; those of another one must be compared again.
                (matched, incarnation) = (0, known);
            }
            matched = self.match_history(tenant, session, &list, matched, last_seq).await?;
            let new = list.messages.len().saturating_sub(usize::try_from(matched).unwrap_or(usize::MAX));
            if new == 0 {
                let user_id = match (owner.user, &list.user_id) {
                    (None, Some(named)) => Some(self.bind(tenant, session, named).await?),
                    (user, _) => user,
                };
                if let Some(metadata) = list.metadata.as_deref().filter(|_| owner.exists) {
                    self.store.set_metadata(tenant, session, metadata).await?;
                }
                return Ok(Synced { user_id, matched, appended: 0, last_seq, replayed: false });
            }
            if new > max_new {
                return Err(Error::TooManyMessages { new, max_new });
            }
            if owner.user.is_none()
                && incarnation.is_some()
                && let Some(user) = list.user_id.as_ref().or(default_user.as_ref())
            {
                // The append would bind the session, and thereby change the incarnation that it expects.
                self.bind(tenant, session, user).await?;
                continue;
            }
            let exchange = Exchange { expected_last_seq: Some(matched), ..new_messages(&list, new).await };
            let request = AppendRequest {
                expected_incarnation: incarnation,
                default_user: default_user.clone(),
                ..AppendRequest::new(tenant, session, exchange, key.clone())
            };
            match self.append(request).await {
                // Another exchange came first: it may be the same one.
                Err(Error::LastSeqMismatch { .. }) => {}
                result => return Ok(result?.into()),
            }
        }
    }

    /// Compares the list with the history after the first `matched` messages, up to `last_seq` or the end of the list. Returns
    /// the number of equal messages.
    async fn match_history(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        list: &Arc<ClientList>,
        mut matched: i64,
        last_seq: i64,
    ) -> Result<i64, Error> {
        let end = last_seq.min(i64::try_from(list.messages.len()).unwrap_or(i64::MAX));
        while matched < end {
            let page = message_page(&self.store, tenant, session, matched, end).await?;
            let Some(newest) = page.last() else {
                // Erased meanwhile: the append finds out.
                return Ok(matched);
            };
            matched = newest.seq;
            let (list, bytes) = (Arc::clone(list), page.iter().map(|message| message.json.len()).sum());
            let compare = move || first_divergence(&list, &page);
            if let Some(divergence) = blocking::spawn_cpu_if_large(bytes, compare).await? {
                return Err(Error::HistoryDiverged(divergence));
            }
        }
        Ok(matched)
    }
}

/// Returns the last `new` messages of the list as an exchange.
async fn new_messages(list: &Arc<ClientList>, new: usize) -> Exchange {
    let list = Arc::clone(list);
    let matched = list.messages.len().saturating_sub(new);
    let bytes = list.messages.iter().skip(matched).map(|message| message.json().len()).sum();
    let count_tokens = move || {
        let messages = list.messages.iter().skip(matched).cloned().collect();
        let exchange = Exchange::new(messages, list.user_id.clone(), list.metadata.clone());
        let times: Vec<_> = list.times.iter().skip(matched).copied().collect();
        let has_times = times.iter().any(Option::is_some);
        Exchange { message_times: if has_times { times } else { Vec::new() }, ..exchange }
    };
    blocking::spawn_cpu_if_large(bytes, count_tokens).await
}

/// Returns the first stored message that differs from the one in the list.
fn first_divergence(list: &ClientList, stored: &[StoredMessage]) -> Result<Option<Divergence>, StoreError> {
    for StoredMessage { seq, json, .. } in stored {
        let index = usize::try_from(*seq).ok().and_then(|seq| seq.checked_sub(1));
        let Some(given) = index.and_then(|index| list.messages.get(index)) else { break };
        if let Some(difference) = difference(json, given.json()) {
            let stored_role = Message::from_stored(json.clone()).map_err(invalid_message)?.role();
            return Ok(Some(Divergence { seq: *seq, difference, stored_role, given_role: given.role() }));
        }
    }
    Ok(None)
}
