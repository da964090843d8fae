//! The [`Store`], and its databases Postgres and SQLite.
//!
//! SQL stands only here. A statement that is the same for both databases exists once; where they differ, both texts stand side by side.
//!
//! | file | contents |
//! | --- | --- |
//! | `pool`, `postgres`, `sqlite` | the drivers: connections, transactions, migrations |
//! | `statement` | runs a statement on either database; knows the drivers |
//! | `records`, `rows` | the values that methods take and return, and how rows become values |
//! | `append`, `heads`, `batch` | exchanges and session heads, many together |
//! | `store` | the [`Store`]: its database, and what its methods have in common |
//! | `search_terms` | the rows of the search index |
//! | others | the methods of the store, by subject |

use std::sync::Arc;

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
mod history;
mod import;
mod memory;
mod messages;
mod migrations;
mod pool;
mod postgres;
mod records;
mod redactions;
mod retention;
mod rows;
mod search;
mod search_index;
mod search_terms;
mod sessions;
mod sqlite;
mod statement;
mod store;
mod usage;
mod values;

pub use crate::domain::exchange::StoredMessage;
pub use api_keys::{NewApiKey, StoredApiKey};
pub use backup::copy_sqlite;
pub use consolidations::{LeaseCondition, NewRevision};
pub use contexts::{ContextSnapshot, LoadedContext, SMALL_TAIL_BYTES};
pub use diagnosis::{explain, missing_file};
pub use error::StoreError;
pub use forks::{ForkAppendOutcome, ForkOutcome, RewindOutcome};
pub use import::{ImportOutcome, RowBatch, RowBatches};
pub use memory::NewMemoryDocument;
pub use records::{
    AppendOutcome, AppendRequest, ConnectionCounts, DatabaseFacts, ExchangeTerms, MemoryVersion, MessagePage,
    MessageQuery, MessageRange, Page, SearchFilter, SessionFilter, SessionHead, SessionOwner,
    SessionPosition, StoreOptions,
};
pub use redactions::RedactionOutcome;
pub use retention::{Candidate, CandidatePosition, CandidateScope, DefaultRetention, SessionRetention};
pub use search_index::IndexState;
pub use search_terms::{IndexMatch, MAX_MATCHES};
pub use store::Store;

/// Connects to the store at `url`: `postgres://…`, `postgresql://…` or `sqlite:…`. A Postgres server need not be
/// reachable yet; see [`Store::check_ready`].
///
/// # Errors
/// The URL is invalid, or the file can't be opened. The error contains no part of the URL, which may hold a password.
pub async fn connect(url: &str, options: &StoreOptions) -> Result<Arc<Store>, StoreError> {
    Ok(Arc::new(Store::connect(url, options).await?))
}
