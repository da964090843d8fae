//! Copies of recently used sessions, so that a context reads only the head of its session from the database.
//!
//! A copy is never trusted by itself. Each context reads the head first, and uses the copy only if incarnation, revision
//! and memory version are the same. Then all texts are the same, because they never change within a revision or version,
//! and the messages up to the copy's last one are the same, because a history is append-only. Newer messages are read and
//! appended. So a copy needs no invalidation: other replicas, imports, restores, rewinds, redactions and erasures change the
//! head. In particular, a session that was rewound or redacted, or erased and created again, has another incarnation.

use super::Error;
use super::metrics::CacheMetrics;
use crate::blocking;
use crate::capacity;
use crate::domain::exchange::{Exchange, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
use crate::domain::session::Window;
use crate::domain::session::{ForkKind, Session};
use crate::domain::tail::TailLimit;
use crate::storage::{ContextSnapshot, LoadedContext, SMALL_TAIL_BYTES, SessionHead, Store, StoreError};
use crate::trace_context::step;
use futures_util::FutureExt as _;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use std::sync::Arc;
use tracing::Instrument as _;

/// A hint for the initial size of the map; it grows as needed.
const EXPECTED_SESSIONS: usize = 1024;
/// A session that would take more than this part of the cache is not kept.
const MAX_PART: usize = 16;

/// The messages of a context exist about this many times besides the tail: as rows or items, in the list, and in the body.
const COPIES: usize = 3;

type Key = (TenantId, SessionId);

/// A bounded cache of snapshots. The least valuable ones are evicted.
#[derive(Debug)]
pub(super) struct ContextCache {
    snapshots: Cache<Key, Arc<ContextSnapshot>, ByMemory>,
    max_snapshot_bytes: usize,
    metrics: CacheMetrics,
}

/// Weighs a snapshot by the memory that it takes.
#[derive(Clone, Debug)]
struct ByMemory;

impl Weighter<Key, Arc<ContextSnapshot>> for ByMemory {
    fn weight(&self, key: &Key, snapshot: &Arc<ContextSnapshot>) -> u64 {
        (key.0.as_str().len() + key.1.as_str().len() + memory_of(snapshot)) as u64
    }
}

fn memory_of(snapshot: &ContextSnapshot) -> usize {
    let session = snapshot.session.as_ref();
    size_of::<ContextSnapshot>()
        + session.map_or(0, |session| session.summary.text.len() + session.metadata.len())
        + snapshot.memory.as_ref().map_or(0, |memory| memory.content.len())
        + snapshot.tail.memory()
}

impl ContextCache {
    /// Creates a cache of at most this size; with 0, nothing is kept.
    pub(super) fn new(max_bytes: usize, metrics: CacheMetrics) -> Self {
        let mut options = OptionsBuilder::new();
        // Each shard has its part of the memory, and evicts sessions although others have free memory.
        options.estimated_items_capacity(EXPECTED_SESSIONS).weight_capacity(max_bytes as u64).shards(1);
        let options = options.build().unwrap_or_else(|_| unreachable!("both capacities are set"));
        let hasher = DefaultHashBuilder::default();
        let snapshots = Cache::with_options(options, ByMemory, hasher, DefaultLifecycle::default());
        Self { snapshots, max_snapshot_bytes: max_bytes / MAX_PART, metrics }
    }

    /// Returns the number of sessions in the cache, and their memory in bytes.
    pub(super) fn size(&self) -> (usize, u64) {
        (self.snapshots.len(), self.snapshots.weight())
    }

    /// Returns everything that a context consists of, with the newest messages of the tail, as of one moment.
    /// `user` is the owner of the memory document if the session has no user.
    pub(super) async fn load(
        &self,
        store: &Store,
        tenant: &TenantId,
        session: &SessionId,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<ContextSnapshot, Error> {
        let key = (tenant.clone(), session.clone());
        if let Some(copy) = self.snapshots.get(&key).filter(|copy| is_independent_of(user, copy)) {
            match store.session_head(tenant, session).instrument(step!("head")).await? {
                Some(head) => {
                    if let Some(snapshot) = self.refresh(store, &key, &copy, head, limit).await? {
                        self.metrics.hits.increment(1);
                        let bytes = snapshot.tail.bytes();
                        if blocking::is_large(bytes) {
                            capacity::claim(bytes.saturating_mul(COPIES)).await?;
                        }
                        return Ok(snapshot);
                    }
                }
                None => self.forget_session(tenant, session),
            }
        }
        self.metrics.misses.increment(1);
        self.load_from_store(store, key, user, limit).boxed().await
    }

    /// Reads a session, and keeps its copy.
    async fn load_from_store(
        &self,
        store: &Store,
        key: Key,
        user: Option<&UserId>,
        limit: TailLimit,
    ) -> Result<ContextSnapshot, Error> {
        let (tenant, session) = &key;
        capacity::claim(SMALL_TAIL_BYTES * COPIES).await?;
        let snapshot =
            match store.load_context(tenant, session, user, limit).instrument(step!("load")).await? {
                LoadedContext::Complete(snapshot) => snapshot,
                LoadedContext::Large { bytes } => {
                    capacity::claim(bytes.saturating_mul(COPIES)).await?;
                    store.load_large_context(tenant, session, user, limit).instrument(step!("load")).await?
                }
            };
        // The first exchange changes the time of creation of a session that is only bound to its user.
        let exists = snapshot.session.as_ref().is_some_and(|session| session.last_seq > 0);
        if exists && is_independent_of(user, &snapshot) {
            self.keep(key, snapshot.clone());
        }
        Ok(snapshot)
    }

    /// Returns the snapshot at the moment of `head`, or `None` if the copy belongs to another state of the session.
    async fn refresh(
        &self,
        store: &Store,
        key: &Key,
        copy: &Arc<ContextSnapshot>,
        head: SessionHead,
        limit: TailLimit,
    ) -> Result<Option<ContextSnapshot>, StoreError> {
        let Some(session) = &copy.session else { return Ok(None) };
        let is_same = copy.incarnation == Some(head.incarnation)
            && (session.revision, session.cursor) == (head.revision, head.cursor)
            && copy.memory_version == head.memory;
        // A request with a larger window needs more messages.
        let wanted = first_seq(head.cursor, head.last_seq, limit.messages);
        if !is_same || copy.tail.last_seq() > head.last_seq || copy.tail.first_seq() > wanted {
            return Ok(None);
        }
        let mut snapshot = ContextSnapshot {
            now: head.now,
            session: Some(Session {
                last_seq: head.last_seq,
                tokens: head.tokens,
                cursor_tokens: head.cursor_tokens,
                consolidation: head.consolidation,
                updated_at: head.updated_at,
                ..session.clone()
            }),
            ..ContextSnapshot::clone(copy)
        };
        let known = copy.tail.last_seq();
        if known < head.last_seq {
            let (tenant, session) = key;
            let new = store.context_messages(tenant, session, head.incarnation, known, head.last_seq);
            let new = new.instrument(step!("load")).boxed().await?;
            match copy.tail.advance(wanted, limit.bytes, new) {
                Some(tail) if tail.last_seq() == head.last_seq => snapshot.tail = Arc::new(tail),
                // The session was erased meanwhile, or most of its tail is new, or the new messages are large.
                _ => return Ok(None),
            }
            self.keep(key.clone(), snapshot.clone());
        }
        Ok(Some(snapshot))
    }

    fn keep(&self, key: Key, snapshot: ContextSnapshot) {
        if memory_of(&snapshot) <= self.max_snapshot_bytes {
            self.snapshots.insert(key, Arc::new(snapshot));
        }
    }

    /// Changes the copy of a session, if there is one. If `change` returns `None`, the copy stays as it is.
    fn update(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        change: impl FnOnce(&mut ContextSnapshot) -> Option<()>,
    ) {
        let key = (tenant.clone(), session.clone());
        let Some(copy) = self.snapshots.get(&key) else { return };
        let mut copy = ContextSnapshot::clone(&copy);
        if change(&mut copy).is_some() {
            self.keep(key, copy);
        }
    }

    /// Records the window of a session in its copy.
    pub(super) fn set_window(&self, tenant: &TenantId, session: &SessionId, window: Option<Window>) {
        self.update(tenant, session, |copy| {
            copy.session.as_mut()?.window = window;
            Some(())
        });
    }

    /// Removes the copy of an erased session, so that its texts stay in memory only until the responses that contain them are
    /// sent.
    pub(super) fn forget_session(&self, tenant: &TenantId, session: &SessionId) {
        drop(self.snapshots.remove(&(tenant.clone(), session.clone())));
    }

    /// Removes the copies of the branches of an erased session, which were erased with it.
    pub(super) fn forget_branches(&self, tenant: &TenantId, session: &SessionId) {
        self.snapshots.retain(|(of_tenant, _), copy| {
            let origin = copy.session.as_ref().and_then(|session| session.forked_from.as_ref());
            let is_branch =
                origin.is_some_and(|origin| origin.kind == ForkKind::Rewind && origin.session_id == *session);
            of_tenant != tenant || !is_branch
        });
    }

    /// Removes the copies of all sessions of an erased user.
    pub(super) fn forget_user(&self, tenant: &TenantId, user: &UserId) {
        self.snapshots.retain(|(of_tenant, _), copy| {
            of_tenant != tenant
                || copy.session.as_ref().is_none_or(|session| session.user_id.as_ref() != Some(user))
        });
    }

    /// Appends an exchange that was just stored to the copy of its session, if there is one and the exchange follows it.
    pub(super) fn append(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        exchange: &Exchange,
        stored: &PersistedExchange,
        limit: impl Fn(Option<i64>) -> TailLimit,
    ) {
        if exchange.bytes() > self.max_snapshot_bytes {
            return;
        }
        let messages = (stored.first_seq..).zip(&exchange.messages).map(|(seq, (message, tokens))| {
            let metadata = MessageMetadata::new(message, *tokens);
            ContextMessage { seq, metadata, json: message.json().to_owned() }
        });
        self.update(tenant, session, |copy| {
            let state = copy.session.as_ref().filter(|_| copy.incarnation == stored.incarnation)?;
            let limit = limit(state.window.map(|window| window.tokens));
            let first_seq = first_seq(state.cursor, stored.last_seq, limit.messages);
            copy.tail = Arc::new(copy.tail.advance(first_seq, limit.bytes, messages.collect())?);
            Some(())
        });
    }
}

/// Returns `true` if the snapshot is the same for all requests. The memory document of a session without a user is that of the
/// requesting user.
fn is_independent_of(user: Option<&UserId>, snapshot: &ContextSnapshot) -> bool {
    user.is_none() || snapshot.session.as_ref().is_some_and(|session| session.user_id.is_some())
}

/// Returns the first of the newest `limit` messages of a tail.
fn first_seq(cursor: i64, last_seq: i64, limit: usize) -> i64 {
    cursor.max(last_seq.saturating_sub_unsigned(limit as u64)) + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Role;
    use crate::domain::message_metadata::ToolIds;
    use crate::domain::tail::Tail;
    use metrics::Counter;
    use time::OffsetDateTime;

    #[test]
    fn sessions_of_the_size_of_the_cache_are_all_kept() {
        const SESSIONS: usize = 200;
        let metadata = MessageMetadata::from_parts(Role::User, 1, ToolIds::default(), false);
        let message = ContextMessage { seq: 1, metadata, json: "a".repeat(10_000) };
        let snapshot = ContextSnapshot {
            now: OffsetDateTime::UNIX_EPOCH,
            session: None,
            incarnation: None,
            memory: None,
            memory_version: None,
            summary_model: None,
            tail: Arc::new(Tail::new(1, vec![message])),
        };
        let tenant = TenantId::default();
        let sessions = (0..SESSIONS).map(|n| SessionId::new(format!("session-{n:03}")).expect("an id"));
        let key_bytes = tenant.as_str().len() + "session-000".len();
        let metrics = CacheMetrics { hits: Counter::noop(), misses: Counter::noop() };
        let cache = ContextCache::new(SESSIONS * (memory_of(&snapshot) + key_bytes), metrics);
        for session in sessions {
            cache.keep((tenant.clone(), session), snapshot.clone());
        }
        assert_eq!(cache.size().0, SESSIONS);
    }
}
