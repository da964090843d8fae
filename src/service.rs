//! The memory service: what precis does, over a store and models of any kind.
//!
//! It sees the traits [`Store`] and [`Llm`] only. Nothing in it waits on a model while it holds a connection, a
//! transaction or a lock: what keeps others out during a consolidation is a lease in the store.

use crate::domain::consolidation::{Mode, Policy};
use crate::domain::export_format::LineError;
use crate::domain::message::Message;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::query::InvalidQuery;
use crate::domain::tokens::Tokenizer;
use crate::domain::validation::FieldError;
use crate::llm::Llm;
use crate::storage::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use crate::storage::SessionPosition;
pub use crate::storage::StoreError;
pub use crate::storage::{MessageQuery, StoredMessage};

mod consolidation;
pub mod contexts;
mod exchanges;
pub mod export;
pub mod import;
pub mod indexer;
pub mod keys;
mod memory;
pub mod reindex;
pub mod search;
mod sessions;
pub mod tools;
pub mod work_permit;

/// What the settings say about the service's ways.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// The config of consolidation.
    pub policy: Policy,
    /// When consolidation happens, where a request doesn't say.
    pub mode: Mode,
    /// What is sent when consolidation was due and failed: the last messages only, instead of the whole tail.
    pub recent_on_failure: bool,
    /// The pools; `None`: consolidation is disabled.
    pub pools: Option<PoolNames>,
    /// How long a request waits for its own consolidation.
    pub inline_wait: Duration,
    /// How many tokens the consolidations of one tenant may take in a day of UTC; `None`: as many as they do. It is
    /// looked at before each question to a pool, so what is over it at the end is what was under way: up to one
    /// question, with all of its attempts, of each consolidation that runs at the time.
    pub daily_token_limit: Option<u64>,
    /// The largest memory document, in bytes.
    pub memory_max_bytes: usize,
    /// What counts the tokens of limits and answers.
    pub tokenizer: Tokenizer,
    /// The rules by which the index is made and searched; `None`: there is no search.
    pub search: Option<Analyzer>,
}

/// A message out of the store.
fn decode_message(json: String) -> Result<Message, StoreError> {
    Message::from_stored(json).map_err(corrupt_message)
}

/// What was wrong with the text goes nowhere: it may quote the message.
fn corrupt_message(_: Vec<FieldError>) -> StoreError {
    StoreError::Corrupt { what: "a message", why: "it is no message of the chat format".to_owned() }
}

/// The names of the pools that do the work.
#[derive(Clone, Debug)]
pub struct PoolNames {
    /// For consolidation.
    pub consolidation: String,
    /// For meta-consolidation.
    pub meta: String,
}

/// Why something asked of the service was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such session; or it is somebody else's.
    #[error("no such session")]
    SessionNotFound,
    /// The session has no such revision.
    #[error("no such revision")]
    RevisionNotFound,
    /// Nothing is known of the user.
    #[error("no such user")]
    UserNotFound,
    /// The session belongs to another user.
    #[error("the session belongs to another user")]
    SessionUserMismatch,
    /// The idempotency key was used for another exchange.
    #[error("the idempotency key was used for another exchange")]
    IdempotencyKeyReused,
    /// The memory document is at another version than the one named.
    #[error("the memory document is at another version")]
    VersionMismatch,
    /// The memory document is too large.
    #[error("the memory document has {bytes} bytes, at most {most} are allowed")]
    MemoryTooLarge {
        /// How large it is.
        bytes: usize,
        /// The setting `memory.max_bytes`.
        most: usize,
    },
    /// Not even what is sent always fits into `max_tokens`.
    #[error("{most} tokens are allowed, {needed} are needed")]
    BudgetTooSmall {
        /// What the request allows.
        most: i64,
        /// What system message and new message take.
        needed: i64,
        /// What counted them.
        tokenizer: Tokenizer,
    },
    /// There is nothing to search for.
    #[error("the query {0}")]
    InvalidQuery(#[from] InvalidQuery),
    /// Messages are not indexed.
    #[error("search is disabled")]
    SearchDisabled,
    /// There is no pool of models.
    #[error("consolidation is disabled")]
    ConsolidationDisabled,
    /// Another consolidation of the session runs.
    #[error("another consolidation of the session is running")]
    ConsolidationInProgress,
    /// Consolidation was asked for and failed.
    #[error("consolidation failed: {0}")]
    ConsolidationFailed(String),
    /// A line of an import is wrong.
    #[error(transparent)]
    Import(#[from] LineError),
    /// An import is too large.
    #[error("an import may have at most {most} bytes")]
    ImportTooLarge {
        /// The setting `limits.max_import_bytes`.
        most: u64,
    },
    /// There is another session of the id that is imported to.
    #[error("there is another session of this id")]
    SessionExists,
    /// What is imported can't be put down in the folder for temporary files.
    #[error("the folder for temporary files can't be used")]
    StagingFile(#[source] std::io::Error),
    /// The store could not do its part.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How long the end of the service waits for the statements that are still to be done, and for the connections.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The memory service.
#[derive(Clone, Debug)]
pub struct MemoryService {
    store: Arc<dyn Store>,
    llm: Arc<dyn Llm>,
    config: Arc<ServiceConfig>,
    /// Every consolidation runs as a task of its own, so that it ends in good order when its client goes away.
    tasks: TaskTracker,
    stop: CancellationToken,
    index_wakeup: Arc<Notify>,
}

impl MemoryService {
    /// A service over this store and these models.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, llm: Arc<dyn Llm>, config: ServiceConfig) -> Self {
        let (tasks, stop, index_wakeup) = (TaskTracker::new(), CancellationToken::new(), Arc::default());
        Self { store, llm, config: Arc::new(config), tasks, stop, index_wakeup }
    }

    /// Whether it can work.
    pub async fn ready(&self) -> Result<(), Error> {
        Ok(self.store.check_ready().await?)
    }

    /// Stops running consolidations: they give their leases back, so that another replica can begin at once, and the
    /// requests that wait for them are answered without them.
    pub fn stop_consolidations(&self) {
        self.stop.cancel();
    }

    /// Waits until running consolidations have ended, for `timeout` at most; those that have not are stopped.
    pub async fn shut_down(&self, timeout: Duration) {
        self.tasks.close();
        if tokio::time::timeout(timeout, self.tasks.wait()).await.is_err() {
            self.stop_consolidations();
        }
        // What is left to do is one statement per session.
        if tokio::time::timeout(CLOSE_TIMEOUT, self.tasks.wait()).await.is_err() {
            tracing::warn!(tasks = self.tasks.len(), "consolidations did not end; their leases will expire");
        }
        // A connection in use is waited for, and a database that hangs keeps it in use.
        if tokio::time::timeout(CLOSE_TIMEOUT, self.store.close()).await.is_err() {
            tracing::warn!("the database did not let go; its connections are cut");
        }
    }
}
