//! Errors of a store.

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use sqlx::sqlite::SqliteError;

/// The code of the error that ends a transaction on Postgres to resolve a deadlock.
const DEADLOCK_DETECTED: &str = "40P01";
/// SQLite's code for a full disk.
const FULL: u32 = 13;

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
    /// The schema is that of another release. `found` is 0 if there is no schema.
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
        error.code().is_some_and(|code| code == DEADLOCK_DETECTED)
    }

    /// Returns `true` if the transaction was certainly rolled back. After a lost connection, it may have committed. So it may after
    /// a fatal error or one of class 08: with these, a pooler reports that it has lost the server.
    pub(super) fn is_rolled_back(&self) -> bool {
        let Self::Unavailable(error) = self else { return !matches!(self, Self::BatchFailed) };
        let Some(error) = error.as_database_error() else { return false };
        let of_postgres = error.try_downcast_ref::<PgDatabaseError>();
        of_postgres
            .is_none_or(|error| error.severity() == PgSeverity::Error && !error.code().starts_with("08"))
    }

    /// Returns `true` if the operation has waited for a connection, or for SQLite's writer, as long as permitted.
    pub(super) fn has_waited(&self) -> bool {
        let Self::Unavailable(error) = self else { return false };
        matches!(error, sqlx::Error::PoolTimedOut)
            || error.as_database_error().is_some_and(|error| sqlite_code(error).is_some())
    }

    /// Returns `true` if SQLite has no space on its disk.
    pub(super) fn is_disk_full(&self) -> bool {
        let Self::Unavailable(sqlx::Error::Database(error)) = self else { return false };
        sqlite_code(&**error) == Some(FULL)
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
            E::Database(database) if is_unavailable(&**database) => Self::Unavailable(error),
            E::Database(database) if is_schema_incomplete(&**database) => Self::SchemaIncomplete(error),
            E::Database(database) if is_session_importing(&**database) => Self::SessionImporting,
            _ => Self::Statement(error),
        }
    }
}

fn postgres_code(error: &dyn DatabaseError) -> Option<&str> {
    error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code)
}

/// Returns the error code of SQLite without its extension.
pub(super) fn sqlite_code(error: &dyn DatabaseError) -> Option<u32> {
    let code: u32 = error.try_downcast_ref::<SqliteError>()?.code()?.parse().ok()?;
    Some(code & 0xff)
}

/// Returns `true` if a retry may succeed. On Postgres, the error is of class 57 (shutting down, cancelled), 53 (out of resources such
/// as disk space), 08 (connection) or 40 (transaction rollback), or is 25006 (read-only server) or 25P03 (idle in transaction for too
/// long). On SQLite, it is `BUSY`, `LOCKED`, `READONLY`, `IOERR`, `FULL` or `CANTOPEN`.
fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let is_class =
        |code: &str| ["57", "53", "08", "40", "25006", "25P03"].iter().any(|class| code.starts_with(class));
    postgres_code(error).is_some_and(is_class)
        || sqlite_code(error).is_some_and(|code| matches!(code, 5 | 6 | 8 | 10 | FULL | 14))
}

/// Returns `true` if a table, a column or a function does not exist. SQLite has no error code for that.
fn is_schema_incomplete(error: &dyn DatabaseError) -> bool {
    let is_missing = |error: &SqliteError| {
        ["no such table", "no such column"].iter().any(|prefix| error.message().starts_with(prefix))
    };
    postgres_code(error).is_some_and(|code| matches!(code, "42P01" | "42703" | "42883"))
        || error.try_downcast_ref::<SqliteError>().is_some_and(is_missing)
}

/// Returns `true` if a trigger of SQLite has rejected a change of a session that is being imported.
fn is_session_importing(error: &dyn DatabaseError) -> bool {
    error.try_downcast_ref::<SqliteError>().is_some_and(|error| error.message() == "session-importing")
}
