//! The [`Store`], and its databases Postgres and SQLite.
//!
//! SQL stands only here. A statement that is the same for both databases exists once, here; the folders [`postgres`] and
//! [`sqlite`] hold the rest.

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
mod index_hints;
mod memory;
mod migrations;
mod pool;
pub mod postgres;
mod redactions;
mod retention;
mod rows;
pub mod search;
pub mod search_index;
mod segments;
pub mod sqlite;
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
pub use migrations::SchemaVersions;
pub use redactions::RedactionOutcome;
pub use retention::{Candidate, CandidatePosition, CandidateScope, DefaultRetention, SessionRetention};
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
    let database = match url.split_once(':') {
        Some(("postgres" | "postgresql", _)) => Store::Postgres(postgres::Postgres::connect(url, options)?),
        Some(("sqlite", _)) => Store::Sqlite(Box::new(sqlite::Sqlite::connect(url, options).await?)),
        _ => return Err(StoreError::Url("must begin with postgres:, postgresql: or sqlite:".to_owned())),
    };
    Ok(Arc::new(database))
}
