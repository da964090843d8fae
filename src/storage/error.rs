//! Errors of a store.

use super::{postgres, sqlite};

/// An error of a store. The texts are for the log; clients never see them.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no connection, the database shuts down, or it accepts no writes. A retry may succeed.
    #[error("the database is not available")]
    Unavailable(#[source] sqlx::Error),
    /// The session is being imported. It exists for others when the import is complete.
    #[error("the session is being imported")]
    SessionImporting,
    /// A bug ended the batch that the request was part of, or the service is shutting down. The request may have run.
    #[error("the batch of the request ended without a result")]
    BatchFailed,
    /// A statement failed, or its result could not be decoded.
    #[error("a statement or the decoding of its result failed")]
    Statement(#[source] sqlx::Error),
    #[error("a migration failed")]
    Migration(#[source] sqlx::migrate::MigrateError),
    /// A stored value can't be decoded.
    #[error("the database holds an invalid value for {what}: {why}")]
    Corrupt { what: &'static str, why: String },
    #[error("invalid database URL: {0}")]
    Url(String),
    /// A statement names a table, a column or a function that does not exist.
    #[error(
        "a table, column or function is missing in the database: run `precis migrate`, or the release that has removed it"
    )]
    SchemaIncomplete(#[source] sqlx::Error),
    /// The schema is older than this release, or newer and this release does not work with it. `found` is 0 if there is no schema.
    #[error("the schema is at migration {found}, and this release of precis needs migration {expected}")]
    SchemaVersion { found: i64, expected: i64 },
}

impl StoreError {
    /// Returns a function that reports an undecodable value, for use with `map_err`.
    pub(super) fn corrupt<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> Self {
        move |why| Self::Corrupt { what, why: why.to_string() }
    }

    /// Returns `true` if Postgres has ended the transaction to resolve a deadlock.
    pub(super) fn is_deadlock(&self) -> bool {
        let Self::Unavailable(sqlx::Error::Database(error)) = self else { return false };
        error.code().is_some_and(|code| code == postgres::DEADLOCK_DETECTED)
    }

    /// Returns `true` if SQLite has no space on its disk.
    pub(super) fn is_disk_full(&self) -> bool {
        let Self::Unavailable(sqlx::Error::Database(error)) = self else { return false };
        sqlite::is_disk_full(&**error)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            // A transaction fails to begin if its connection is broken.
            E::Io(_)
            | E::Tls(_)
            | E::PoolTimedOut
            | E::PoolClosed
            | E::WorkerCrashed
            | E::Protocol(_)
            | E::BeginFailed => Self::Unavailable(error),
            E::Database(database)
                if postgres::is_unavailable(&**database) || sqlite::is_unavailable(&**database) =>
            {
                Self::Unavailable(error)
            }
            E::Database(database)
                if postgres::is_schema_incomplete(&**database)
                    || sqlite::is_schema_incomplete(&**database) =>
            {
                Self::SchemaIncomplete(error)
            }
            E::Database(database) if sqlite::is_session_importing(&**database) => Self::SessionImporting,
            _ => Self::Statement(error),
        }
    }
}
