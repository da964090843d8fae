//! The store: what it can do, as small traits, and the two that do it.
//!
//! Each trait has a file of its name here, in [`postgres`], in [`sqlite`] and in the conformance suite. A method is
//! one intention and one transaction; absence is `Ok(None)`. Times come from the store's own clock (the database's,
//! where there is a server), so that replicas need not agree on theirs.

use crate::domain::search::analyzer::Analyzer;
use async_trait::async_trait;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub mod api_keys;
pub mod archives;
pub mod consolidations;
pub mod exchanges;
pub mod memory;
pub mod messages;
mod migrations;
mod pool;
pub mod postgres;
pub mod recall;
pub mod revisions;
mod row;
pub mod search;
pub mod search_index;
pub mod sessions;
pub mod sqlite;
pub mod token_usage;
pub mod users;

/// All that the service keeps.
#[async_trait]
pub trait Store:
    api_keys::ApiKeys
    + archives::Archives
    + consolidations::Consolidations
    + exchanges::Exchanges
    + memory::Memory
    + messages::Messages
    + recall::Recall
    + revisions::Revisions
    + search::Search
    + search_index::SearchIndex
    + sessions::Sessions
    + token_usage::TokenUsage
    + users::Users
    + Send
    + Sync
    + fmt::Debug
{
    /// Brings the schema up to date.
    async fn migrate(&self) -> Result<(), StoreError>;

    /// Whether the store answers and its schema is the one that this version works with.
    async fn ready(&self) -> Result<(), StoreError>;

    /// Lets connections end. Nothing can be asked afterwards.
    async fn close(&self);
}

/// What can go wrong in a store. The texts are for the log; a client gets to see none of them.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No connection, or none in time: worth trying again.
    #[error("the database is not reachable")]
    Unavailable(#[source] sqlx::Error),
    /// What a search could find is still being indexed: worth trying again.
    #[error("not all that waits was indexed within {0:?}")]
    Behind(Duration),
    /// The database refused a statement.
    #[error("the database refused a statement")]
    Refused(#[source] sqlx::Error),
    /// A migration can't be carried out.
    #[error("the schema can't be brought up to date")]
    Migration(#[source] sqlx::migrate::MigrateError),
    /// What is stored is not what was written.
    #[error("{what} in the store is not valid: {why}")]
    Corrupt {
        /// Which value.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The database's address can't be used.
    #[error("the database URL can't be used: {0}")]
    Url(String),
    /// A table or a column is not there.
    #[error("the schema is not the one that this version of precis works with: run `precis migrate`")]
    Unmigrated(#[source] sqlx::Error),
    /// The schema is older or newer than this version.
    #[error("the schema is at migration {found}, this version of precis works with {expected}")]
    Schema {
        /// The newest migration that was carried out; 0 = none.
        found: i64,
        /// The newest migration of this version.
        expected: i64,
    },
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            // A transaction that doesn't begin is a matter of its connection, too.
            E::Io(_)
            | E::Tls(_)
            | E::PoolTimedOut
            | E::PoolClosed
            | E::WorkerCrashed
            | E::Protocol(_)
            | E::BeginFailed => Self::Unavailable(error),
            E::Database(refused)
                if postgres::is_unavailable(&**refused) || sqlite::is_unavailable(&**refused) =>
            {
                Self::Unavailable(error)
            }
            E::Database(refused)
                if postgres::is_unmigrated(&**refused) || sqlite::is_unmigrated(&**refused) =>
            {
                Self::Unmigrated(error)
            }
            _ => Self::Refused(error),
        }
    }
}

/// How a store is reached.
#[derive(Clone, Debug)]
pub struct Options {
    /// Connections, at most.
    pub max_connections: u32,
    /// How long a request waits for one.
    pub acquire_timeout: Duration,
    /// What a statement may take, on a server. Its connection is given up then.
    pub statement_timeout: Duration,
    /// The rules by which messages are indexed for search; `None`: they are not.
    pub search: Option<Analyzer>,
}

/// Connects to the store that the URL names: `postgres://…`, `postgresql://…` or `sqlite:…`. The database itself
/// need not be reachable yet: [`Store::ready`] tells.
///
/// # Errors
/// The URL can't be used, or the file can't be opened. No text of the URL is in the error: it may hold a password.
pub async fn connect(url: &str, options: &Options) -> Result<Arc<dyn Store>, StoreError> {
    match url.split_once(':') {
        Some(("postgres" | "postgresql", _)) => Ok(Arc::new(postgres::Postgres::connect(url, options)?)),
        Some(("sqlite", _)) => Ok(Arc::new(sqlite::Sqlite::connect(url, options).await?)),
        _ => Err(StoreError::Url("must begin with postgres:, postgresql: or sqlite:".to_owned())),
    }
}
