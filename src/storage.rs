//! The [`Store`], and its databases Postgres and SQLite.
//!
//! SQL stands only here. A statement that is the same for both databases exists once; where they differ, both texts stand side by side.
//!
//! | file | contents |
//! | --- | --- |
//! | `pool`, `postgres`, `sqlite` | the drivers: connections, transactions, migrations |
//! | `statement` | runs a statement on either database; knows the drivers |
//! | `append`, `heads`, `batch` | exchanges and session heads, many together |
//! | `search_terms`, `search_index` | the search index |
//! | others | the statements of one subject each |

use crate::domain::search::analyzer::Analyzer;
use std::sync::Arc;
use std::time::Duration;

mod api_keys;
mod append;
mod backup;
mod batch;
mod consolidations;
mod contexts;
mod copies;
mod diagnosis;
mod erasures;
mod error;
mod forks;
mod heads;
mod import;
mod memory;
mod messages;
mod migrations;
mod pool;
mod postgres;
mod redactions;
mod retention;
mod rows;
pub mod search;
mod search_index;
mod search_terms;
mod sqlite;
mod statement;
mod store;
mod usage;
mod values;

pub use api_keys::{NewApiKey, StoredApiKey};
pub use backup::copy_sqlite;
pub use consolidations::{LeaseCondition, NewRevision};
pub use contexts::{ContextSnapshot, LoadedContext, SMALL_TAIL_BYTES};
pub use diagnosis::{DatabaseFacts, explain, missing_file};
pub use error::StoreError;
pub use forks::{ForkAppendOutcome, ForkOutcome, RewindOutcome};
pub use import::{ImportOutcome, RowBatch, RowBatches};
pub use memory::NewMemoryDocument;
pub use redactions::RedactionOutcome;
pub use retention::{Candidate, CandidatePosition, CandidateScope, DefaultRetention, SessionRetention};
pub use search_index::IndexState;
pub use search_terms::{IndexMatch, MAX_MATCHES};
pub use store::{
    AppendOutcome, AppendRequest, MemoryVersion, MessagePage, MessageQuery, MessageRange, Page,
    SessionFilter, SessionHead, SessionOwner, SessionPosition, Store, StoredMessage,
};

/// The connections of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionCounts {
    pub open: usize,
    /// Open connections that no statement uses.
    pub idle: usize,
    pub max: usize,
}

impl ConnectionCounts {
    fn of<D: sqlx::Database>(pool: &sqlx::Pool<D>) -> Self {
        let max = usize::try_from(pool.options().get_max_connections()).unwrap_or(usize::MAX);
        Self { open: usize::try_from(pool.size()).unwrap_or(usize::MAX), idle: pool.num_idle(), max }
    }
}

#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Largest number of connections.
    pub max_connections: u32,
    /// Longest wait for a free connection.
    pub acquire_timeout: Duration,
    /// Longest duration of a statement on Postgres. The connection is closed then.
    pub statement_timeout: Duration,
    /// The analyzer that messages are indexed with. `None` disables search.
    pub search: Option<Analyzer>,
    /// The part of the connections that one key can hold.
    pub key_share: f64,
}

/// Connects to the store at `url`: `postgres://…`, `postgresql://…` or `sqlite:…`. A Postgres server need not be
/// reachable yet; see [`Store::check_ready`].
///
/// # Errors
/// The URL is invalid, or the file can't be opened. The error contains no part of the URL, which may hold a password.
pub async fn connect(url: &str, options: &StoreOptions) -> Result<Arc<Store>, StoreError> {
    Ok(Arc::new(Store::connect(url, options).await?))
}
