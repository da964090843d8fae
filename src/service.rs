//! The memory service: the operations of precis, over any store and any models.
//!
//! It depends on [`Store`] and [`Llm`] only. A model call never happens while a connection, a transaction or a
//! lock is held: a lease in the store prevents concurrent consolidations of one session.

use self::metrics::{ServiceMetrics, ServiceState};
use crate::capacity::{self, Level, Resource};
use crate::domain::consolidation::{Mode, Policy};
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Message;
use crate::domain::recall::RecallOptions;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::tokens::Tokenizer;
use crate::domain::validation::FieldError;
use crate::llm::Llm;
use crate::storage::{DefaultRetention, Store};
use context_cache::ContextCache;
use keys::authenticator::Principal;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

pub use crate::storage::StoreError;
pub use crate::storage::{MessagePage, MessageQuery, Page, SessionFilter, SessionPosition, StoredMessage};
pub use error::Error;

pub mod consolidation;
mod context_cache;
pub mod contexts;
mod error;
mod exchanges;
pub mod export;
mod forks;
pub mod import;
pub mod keys;
mod leases;
mod memory;
mod metrics;
pub mod models;
pub mod placement;
mod recall;
mod redactions;
pub mod retention;
pub mod search;
mod sessions;
mod sources;
pub mod sync;
pub mod tools;
pub mod turns;

/// The size from which a page of a list ends, whatever its number of items: a page of 1,000 messages could have gigabytes.
pub const MAX_PAGE_BYTES: i64 = 4 * 1024 * 1024;
/// The memory of a page: as rows, as items, and as the body of the response.
const PAGE_MEMORY: usize = 12 * 1024 * 1024;

/// Number of sessions for which the time of the latest warning is known.
const MAX_WARNED_SESSIONS: usize = 10_000;

/// The configuration of the service, from the settings.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    pub policy: Policy,
    /// The mode of context requests that do not specify one.
    pub mode: Mode,
    /// After a failed consolidation, a context contains only the last messages of the tail.
    pub recent_on_failure: bool,
    /// `None` disables consolidation.
    pub pools: Option<PoolNames>,
    /// Longest time that a context request waits for its consolidation.
    pub inline_wait: Duration,
    /// Largest number of tokens that the consolidations of a tenant may use per day (UTC); `None` is unlimited. The limit is
    /// checked before each request to a pool, so running requests can exceed it.
    pub daily_token_limit: Option<u64>,
    pub memory_max_bytes: usize,
    /// The user of requests that name none, while no API key exists. `None`: such requests have no user.
    pub default_user: Option<UserId>,
    /// Messages that a fork or a rewind may copy.
    pub max_fork_messages: usize,
    /// Clients may remove the last messages of a session.
    pub allow_rewind: bool,
    pub retention: RetentionConfig,
    /// The part of anything that can run out that one key can hold.
    pub key_share: f64,
    /// Memory for copies of recently used sessions.
    pub context_cache_bytes: usize,
    /// The tokenizer for limits and responses.
    pub tokenizer: Tokenizer,
    /// The analyzer of the search index; `None` disables search.
    pub search: Option<Analyzer>,
    /// The recall of context requests that do not specify it.
    pub recall: Option<RecallOptions>,
    /// `None`: the hits of a search are ordered by their words.
    pub rerank: Option<RerankConfig>,
}

/// The configuration of retention, from the settings.
#[derive(Clone, Copy, Debug)]
pub struct RetentionConfig {
    pub default: DefaultRetention,
    /// Time between two searches.
    pub interval: Duration,
    pub max_sessions_per_second: u32,
}

/// The configuration of reranking.
#[derive(Clone, Debug)]
pub struct RerankConfig {
    /// The name of the pool.
    pub pool: String,
    /// Longest time that a search waits for the pool.
    pub timeout: Duration,
    /// Simultaneous calls of all clients.
    pub max_concurrent_calls: usize,
}

/// The names of the pools that write summaries.
#[derive(Clone, Debug)]
pub struct PoolNames {
    pub consolidation: String,
    /// For meta-consolidation.
    pub meta: String,
}

fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Completes a write even if the client disconnects. It holds the memory of its request until it ends.
async fn complete_write<T: Send + 'static>(
    write: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let write = tokio::spawn(capacity::scope(capacity::current(), write.in_current_span()));
    write.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Completes a write that can wait for other writes, as work of precis itself. Meanwhile, the request holds no permit to run: the other writes
/// could wait for one.
async fn complete_internally<T: Send + 'static>(
    write: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let internal = capacity::internal();
    capacity::current().release();
    capacity::scope(internal, complete_write(write)).await
}

/// Decodes a stored message.
fn decode_message(json: &str) -> Result<Message, StoreError> {
    format::read(json).map_err(invalid_message)
}

/// Returns the error for a stored message that is invalid. The error of validation is dropped, because it may quote the
/// message.
fn invalid_message(_: FieldError) -> StoreError {
    StoreError::Corrupt { what: "a message", why: "it has no role".to_owned() }
}

/// Longest wait for the last statements, and for the connections, when the service shuts down.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The memory service. Its clones share their parts, and cost one reference count.
#[derive(Clone, Debug)]
pub struct MemoryService(Arc<Parts>);

/// The parts of a [`MemoryService`].
#[derive(Debug)]
pub struct Parts {
    store: Arc<Store>,
    llm: Arc<dyn Llm>,
    config: ServiceConfig,
    /// Running consolidations. They are separate tasks, so that they finish if their client disconnects.
    tasks: TaskTracker,
    /// Relays of the proxy, which store a turn at their end.
    turns: TaskTracker,
    /// Stops running consolidations.
    stop: CancellationToken,
    metrics: ServiceMetrics,
    context_cache: ContextCache,
    /// The time of the latest warning about contexts of a session that lack messages.
    warned: quick_cache::sync::Cache<(TenantId, SessionId), tokio::time::Instant>,
    /// The calls that order search hits, shared between clients.
    rerank_calls: Resource,
}

impl Deref for MemoryService {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl MemoryService {
    /// Returns the user of requests that name none. With API keys there is none, because the users of a tenant would share
    /// its memory document unknowingly.
    #[must_use]
    pub fn default_user(&self, caller: &Principal) -> Option<&UserId> {
        self.config.default_user.as_ref().filter(|_| caller.key.is_none())
    }

    /// Creates the service. Its metrics belong to the recorder that is installed during this call.
    #[must_use]
    pub fn new(store: Arc<Store>, llm: Arc<dyn Llm>, config: ServiceConfig) -> Self {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let metrics = ServiceMetrics::new();
        let context_cache = ContextCache::new(config.context_cache_bytes, metrics.cache.clone());
        let slots = config.rerank.as_ref().map_or(0, |rerank| rerank.max_concurrent_calls);
        let rerank_calls = Resource::new(Level::Rerank, slots, config.key_share);
        Self(Arc::new(Parts {
            store,
            llm,
            config,
            tasks,
            turns: TaskTracker::new(),
            stop,
            metrics,
            context_cache,
            warned: quick_cache::sync::Cache::new(MAX_WARNED_SESSIONS),
            rerank_calls,
        }))
    }

    /// Checks that the service can work.
    pub async fn ready(&self) -> Result<(), Error> {
        self.store.check_ready().await?;
        Ok(())
    }

    /// Sets the gauges that describe the present state.
    pub fn update_metrics(&self) {
        let (cache_sessions, cache_bytes) = self.context_cache.size();
        self.metrics.set_state(&ServiceState {
            consolidations_running: self.tasks.len(),
            cache_bytes,
            cache_sessions,
            connections: self.store.connection_counts(),
        });
    }

    /// Stops running consolidations. They release their leases, so that another replica can take over at once, and
    /// waiting requests are answered without them.
    pub fn stop_consolidations(&self) {
        self.stop.cancel();
    }

    /// Runs the relay of a turn to its end, even if its client disconnects or the service shuts down.
    pub fn spawn_turn<T: Send + 'static>(
        &self,
        relay: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.turns.spawn(relay)
    }

    /// Waits up to `timeout` for running consolidations, then stops the remaining ones and closes the store.
    pub async fn shut_down(&self, timeout: Duration) {
        self.tasks.close();
        self.turns.close();
        if tokio::time::timeout(timeout, self.tasks.wait()).await.is_err() {
            self.stop_consolidations();
        }
        // Each stopped consolidation only has to release its lease: one statement.
        if tokio::time::timeout(CLOSE_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                tasks = self.tasks.len(),
                "consolidations did not stop in time; their leases will expire"
            );
        }
        // The clients of the remaining relays are disconnected, so each relay only stores the answer so far.
        if tokio::time::timeout(CLOSE_TIMEOUT, self.turns.wait()).await.is_err() {
            tracing::warn!(turns = self.turns.len(), "turns of the proxy were not stored in time");
        }
        // Closing waits for connections in use, which a hanging database never returns.
        if tokio::time::timeout(CLOSE_TIMEOUT, self.store.close()).await.is_err() {
            tracing::warn!("timed out closing database connections");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::{Capacity, CapacityLimits, ClientId, Kind, Work};
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn write_holds_the_memory_of_its_request_after_the_client_has_disconnected() {
        let capacity = Capacity::new(&CapacityLimits::small());
        let work = Work::new(&capacity, ClientId(1), Kind::Request);
        work.claim(40 * 1024).await.expect("free");
        let (end, has_ended) = oneshot::channel::<()>();
        let write = async move {
            let _ = has_ended.await;
            Ok::<_, Error>(())
        };
        let request = tokio::spawn(capacity::scope(work, complete_write(write)));
        tokio::task::yield_now().await;
        request.abort();
        assert!(request.await.is_err_and(|error| error.is_cancelled()));
        assert_eq!(capacity.memory.in_use(), 40);
        end.send(()).expect("the write runs");
        while capacity.memory.in_use() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
