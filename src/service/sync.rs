//! Stores what is new in the complete list of messages that a client has.
//!
//! The history is read in pages and compared with the list, up to the first difference. So the cost of a sync grows with the
//! history, in time but not in memory: every page reads up to a mebibyte, which is compared byte by byte; only messages whose
//! bytes differ are parsed. The rest of the list is appended like an exchange that expects the last message compared. If
//! another exchange comes first, the sync compares the new messages, too. So two clients that send the same list at the same time
//! store it once.
//!
//! If the list diverges and the client wants a fork, one transaction forks the session and appends the rest to the fork. The
//! request determines the id of the fork, so a repeated request finds the fork, and is a sync to it.

use super::export::message_page;
use super::{Error, MemoryService, StoreError, invalid_message};
use crate::blocking;
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::session::{ForkKind, ForkOrigin, Session};
use crate::domain::sync::{ClientList, Divergence, OnDivergence, difference};
use crate::storage::{AppendRequest, ForkAppendOutcome, StoredMessage};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;
use uuid::{Builder, Uuid};

/// The result of a sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Synced {
    /// The session that has the list: the one of the request, or its fork.
    pub session: SessionId,
    /// The user of the session, if it has one.
    pub user_id: Option<UserId>,
    /// Number of messages of the list that were stored before.
    pub matched: i64,
    /// Number of messages that were appended.
    pub appended: i64,
    /// The `seq` of the last message of the session; 0 without a session.
    pub last_seq: i64,
    /// The origin of the fork if the session of the request diverges; `None` also if that session was erased meanwhile.
    pub forked_from: Option<ForkOrigin>,
    /// An earlier request with the same key appended the messages.
    pub replayed: bool,
}

impl Synced {
    fn new(session: SessionId, exchange: PersistedExchange) -> Self {
        let PersistedExchange { user_id, first_seq, last_seq, replayed, .. } = exchange;
        let (matched, appended) = (first_seq - 1, last_seq - first_seq + 1);
        Self { session, user_id, matched, appended, last_seq, forked_from: None, replayed }
    }
}

/// The result of comparing a list with a session, and storing the rest of it.
enum SyncOutcome {
    Synced(Synced),
    /// Nothing was written.
    Diverged {
        divergence: Divergence,
        /// The incarnation of the session whose history was compared.
        incarnation: Option<Uuid>,
    },
    /// The session must exist and does not. Nothing was written.
    NotFound,
}

/// A list to store, with everything that is the same for the session and its fork.
struct SyncRequest<'a> {
    tenant: &'a TenantId,
    list: Arc<ClientList>,
    key: Option<IdempotencyKey>,
    default_user: Option<UserId>,
    max_new: usize,
}

impl SyncRequest<'_> {
    /// Returns the id that the client chose for a fork.
    fn new_id(&self) -> Option<&SessionId> {
        match &self.list.on_divergence {
            OnDivergence::Error => None,
            OnDivergence::Fork { new_id } => new_id.as_ref(),
        }
    }

    /// Returns the id of the fork: that of the client, or one that only the same request has. It depends on the key if there is
    /// one, so that another list with this key finds it. The number of the attempt yields further ids.
    fn fork_id(&self, source: &SessionId, attempt: u64) -> SessionId {
        if let Some(id) = self.new_id() {
            return id.clone();
        }
        let mut hash = Sha256::new();
        hash.update([u8::from(self.key.is_some())]);
        hash.update(attempt.to_le_bytes());
        hash.update((source.as_str().len() as u64).to_le_bytes());
        hash.update(source.as_str());
        match &self.key {
            Some(key) => hash.update(&key.key),
            None => hash.update(self.list.fingerprint()),
        }
        // A hash has 32 bytes.
        let bytes = hash.finalize().first_chunk().copied().unwrap_or_default();
        Builder::from_custom_bytes(bytes).into_uuid().into()
    }
}

impl MemoryService {
    /// Appends the messages of the list that follow the history, at most `max_new`, in one transaction. With a key, a repeated
    /// request has the result of the first one.
    ///
    /// # Errors
    /// [`Error::HistoryDiverged`] if a message of the list is not the stored one, unless the list asks for a fork.
    /// [`Error::SessionExists`] if a session has the id of the fork, and is no fork whose history the list continues.
    pub async fn sync(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        mut list: ClientList,
        key: Option<String>,
        default_user: Option<UserId>,
        max_new: usize,
    ) -> Result<Synced, Error> {
        let key = key.map(|key| IdempotencyKey { key, fingerprint: list.fingerprint() });
        let instructions = std::mem::take(&mut list.instructions);
        if !instructions.is_empty() && self.begins_with_instruction(tenant, session).await? {
            list.times.splice(0..0, instructions.iter().map(|_| None));
            list.messages.splice(0..0, instructions);
        }
        let list = Arc::new(list);
        let forks = list.on_divergence != OnDivergence::Error;
        let request = SyncRequest { tenant, list, key, default_user, max_new };
        if forks && let Some(known) = self.replay_fork(session, &request).await? {
            return Ok(known);
        }
        loop {
            match self.sync_into(session, &request, false).await? {
                SyncOutcome::Synced(synced) => return Ok(synced),
                SyncOutcome::Diverged { divergence, incarnation } if forks => {
                    let fork = self.sync_fork(session, &request, divergence.seq, incarnation).await?;
                    if let Some(synced) = fork {
                        return Ok(synced);
                    }
                }
                SyncOutcome::Diverged { divergence, .. } => return Err(Error::HistoryDiverged(divergence)),
                SyncOutcome::NotFound => {}
            }
        }
    }

    /// Returns `true` if the first message of the history is an instruction.
    async fn begins_with_instruction(&self, tenant: &TenantId, session: &SessionId) -> Result<bool, Error> {
        let first = message_page(&self.store, tenant, session, 0, 1).await?.pop();
        let first = first.map(|first| format::read(&first.json)).transpose().map_err(invalid_message)?;
        Ok(first.is_some_and(|first| first.role().is_instruction()))
    }

    /// Returns the result of an earlier request with the same key that has forked the session.
    async fn replay_fork(
        &self,
        source: &SessionId,
        request: &SyncRequest<'_>,
    ) -> Result<Option<Synced>, Error> {
        let Some(key) = &request.key else { return Ok(None) };
        let target = request.fork_id(source, 0);
        let known = self.store.keyed_exchange(request.tenant, &target, &key.key).await?;
        let Some((known, fingerprint)) = known else { return Ok(None) };
        if !key.is_of(&fingerprint) {
            // An id that the client chose may have a key of another request.
            return if request.new_id().is_some() { Ok(None) } else { Err(Error::IdempotencyKeyReused) };
        }
        let fork = self.store.session(request.tenant, &target).await?;
        if request.new_id().is_some() && !fork.as_ref().is_some_and(|fork| is_fork_of(fork, source)) {
            return Ok(None);
        }
        let forked_from = fork.and_then(|fork| fork.forked_from);
        Ok(Some(Synced { forked_from, ..Synced::new(target, known) }))
    }

    /// Stores the list in a fork of the session, from whose history it diverges. Returns `None` if the session has changed since
    /// it was compared.
    async fn sync_fork(
        &self,
        source: &SessionId,
        request: &SyncRequest<'_>,
        diverged_at: i64,
        incarnation: Option<Uuid>,
    ) -> Result<Option<Synced>, Error> {
        let mut attempt = 0;
        loop {
            let target = request.fork_id(source, attempt);
            match self.store.session(request.tenant, &target).await? {
                Some(fork) if is_fork_of(&fork, source) => {
                    match self.sync_into(&target, request, true).await? {
                        SyncOutcome::Synced(synced) => {
                            return Ok(Some(Synced { forked_from: fork.forked_from, ..synced }));
                        }
                        SyncOutcome::Diverged { .. } => {}
                        SyncOutcome::NotFound => continue,
                    }
                }
                Some(_) => {}
                None => match self.new_fork(source, &target, request, diverged_at - 1, incarnation).await? {
                    ForkAppendOutcome::Appended(appended) => {
                        let (session_id, through_seq) = (source.clone(), diverged_at - 1);
                        let forked_from = Some(ForkOrigin { session_id, through_seq, kind: ForkKind::Fork });
                        return Ok(Some(Synced { forked_from, ..Synced::new(target, appended) }));
                    }
                    ForkAppendOutcome::SourceChanged => return Ok(None),
                    ForkAppendOutcome::UserMismatch => return Err(Error::SessionUserMismatch),
                    // Another request has created it meanwhile, or the id is only bound to a user.
                    ForkAppendOutcome::Exists
                        if self.store.session(request.tenant, &target).await?.is_some() =>
                    {
                        continue;
                    }
                    ForkAppendOutcome::Exists => {}
                },
            }
            if request.new_id().is_some() {
                return Err(Error::SessionExists);
            }
            attempt += 1;
        }
    }

    /// Forks the session, and appends the messages of the list after `through_seq` to the fork.
    async fn new_fork(
        &self,
        source: &SessionId,
        target: &SessionId,
        request: &SyncRequest<'_>,
        through_seq: i64,
        incarnation: Option<Uuid>,
    ) -> Result<ForkAppendOutcome, Error> {
        let new = messages_after(&request.list, through_seq);
        if new > request.max_new {
            return Err(Error::TooManyMessages { new, max_new: request.max_new });
        }
        let exchange = new_messages(&request.list, new).await;
        let append = AppendRequest {
            expected_incarnation: incarnation,
            default_user: request.default_user.clone(),
            ..AppendRequest::new(request.tenant, target, exchange, request.key.clone())
        };
        self.fork_and_append(source, through_seq, append).await
    }

    /// Compares the list with a session, and appends the rest of it. If `must_exist`, a session that does not exist is not
    /// created.
    async fn sync_into(
        &self,
        session: &SessionId,
        request: &SyncRequest<'_>,
        must_exist: bool,
    ) -> Result<SyncOutcome, Error> {
        let SyncRequest { tenant, ref list, ref key, ref default_user, max_new } = *request;
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
            if must_exist && !owner.exists {
                return Ok(SyncOutcome::NotFound);
            }
            // After the head: if it contains the messages of a concurrent request with the same key, the key is known.
            if let Some(key) = key
                && let Some((known, fingerprint)) =
                    self.store.keyed_exchange(tenant, session, &key.key).await?
            {
                if !key.is_of(&fingerprint) {
                    return Err(Error::IdempotencyKeyReused);
                }
                return Ok(SyncOutcome::Synced(Synced::new(session.clone(), known)));
            }
            let known = head.map(|head| head.incarnation);
            if known != incarnation {
                // Stored messages of one incarnation never change; those of another one must be compared again.
                (matched, incarnation) = (0, known);
            }
            matched = match self.match_history(tenant, session, list, matched, last_seq).await? {
                Ok(matched) => matched,
                Err(divergence) => return Ok(SyncOutcome::Diverged { divergence, incarnation }),
            };
            let new = messages_after(list, matched);
            if new == 0 {
                let user_id = match (owner.user, &list.user_id) {
                    (None, Some(named)) => Some(self.bind(tenant, session, named).await?),
                    (user, _) => user,
                };
                if let Some(metadata) = list.metadata.as_deref().filter(|_| owner.exists) {
                    self.store.set_metadata(tenant, session, metadata).await?;
                }
                let (session, appended, forked_from, replayed) = (session.clone(), 0, None, false);
                let synced = Synced { session, user_id, matched, appended, last_seq, forked_from, replayed };
                return Ok(SyncOutcome::Synced(synced));
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
            let exchange = Exchange { expected_last_seq: Some(matched), ..new_messages(list, new).await };
            let append = AppendRequest {
                expected_incarnation: incarnation,
                default_user: default_user.clone(),
                ..AppendRequest::new(tenant, session, exchange, key.clone())
            };
            match self.append(append).await {
                // Another exchange came first: it may be the same one.
                Err(Error::LastSeqMismatch { .. }) => {}
                result => return Ok(SyncOutcome::Synced(Synced::new(session.clone(), result?))),
            }
        }
    }

    /// Compares the list with the history after the first `matched` messages, up to `last_seq` or the end of the list. Returns
    /// the number of equal messages, or the first one that differs.
    async fn match_history(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        list: &Arc<ClientList>,
        mut matched: i64,
        last_seq: i64,
    ) -> Result<Result<i64, Divergence>, Error> {
        let end = last_seq.min(i64::try_from(list.messages.len()).unwrap_or(i64::MAX));
        while matched < end {
            let page = message_page(&self.store, tenant, session, matched, end).await?;
            let Some(newest) = page.last() else {
                // Erased meanwhile: the append finds out.
                return Ok(Ok(matched));
            };
            matched = newest.seq;
            let (list, bytes) = (Arc::clone(list), page.iter().map(|message| message.json.len()).sum());
            let compare = move || first_divergence(&list, &page);
            if let Some(divergence) = blocking::spawn_cpu_if_large(bytes, compare).await? {
                return Ok(Err(divergence));
            }
        }
        Ok(Ok(matched))
    }
}

/// Returns `true` if a client has forked the session from `source`.
fn is_fork_of(session: &Session, source: &SessionId) -> bool {
    let origin = session.forked_from.as_ref();
    origin.is_some_and(|origin| origin.kind == ForkKind::Fork && origin.session_id == *source)
}

/// Returns the number of messages of the list after the first `matched` ones.
fn messages_after(list: &ClientList, matched: i64) -> usize {
    list.messages.len().saturating_sub(usize::try_from(matched).unwrap_or(usize::MAX))
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
    blocking::spawn_cpu_to_count(bytes, count_tokens).await
}

/// Returns the first stored message that differs from the one in the list.
fn first_divergence(list: &ClientList, stored: &[StoredMessage]) -> Result<Option<Divergence>, StoreError> {
    for StoredMessage { seq, json, redacted_at, .. } in stored {
        let index = usize::try_from(*seq).ok().and_then(|seq| seq.checked_sub(1));
        let Some(given) = index.and_then(|index| list.messages.get(index)) else { break };
        // Equal bytes, the usual case, cost no parsing.
        if json == given.json() {
            continue;
        }
        let (stored, given_role) = (format::read(json).map_err(invalid_message)?, given.role());
        let difference = match redacted_at {
            Some(_) => difference(&stored, &given.redacted()),
            None => difference(&stored, given),
        };
        if let Some(difference) = difference {
            return Ok(Some(Divergence { seq: *seq, difference, stored_role: stored.role(), given_role }));
        }
    }
    Ok(None)
}
