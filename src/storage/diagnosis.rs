//! Explanations of errors that prevent the use of a database, for the operator.

use super::StoreError;
use super::error::sqlite_code;
use super::sqlite::connect_options;
use sqlx::migrate::MigrateError;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError};
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::str::FromStr as _;

/// Explains why the database at a URL can't be used: the problem and its fix. Returns `None` for errors without a known cause.
/// The text contains no password.
#[must_use]
pub fn explain(url: &str, error: &StoreError) -> Option<String> {
    match error {
        StoreError::SchemaVersion { found, expected } if found > expected => Some(format!(
            "a newer release of precis has used this database (migration {found}), and this release (migration {expected}) does \
             not work with its schema: run the newer release, or restore a backup that was made before"
        )),
        StoreError::Migration(
            MigrateError::VersionMissing(version) | MigrateError::VersionMismatch(version),
        ) => Some(format!(
            "another build of precis has used this database (its migration {version} differs): run that build, or use \
             another database"
        )),
        StoreError::Migration(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _))
        | StoreError::Unavailable(error)
        | StoreError::Statement(error)
        | StoreError::SchemaIncomplete(error) => {
            if url.starts_with("sqlite:") {
                explain_sqlite(url, error)
            } else {
                explain_postgres(url, error)
            }
        }
        _ => None,
    }
}

/// Returns the absolute path of an SQLite database that does not exist, and would be created when it is opened.
#[must_use]
pub fn missing_file(url: &str) -> Option<PathBuf> {
    let options =
        Some(url).filter(|url| url.starts_with("sqlite:")).and_then(|url| connect_options(url).ok())?;
    let path = follow_links(absolute(options.get_filename()).ok()?);
    matches!(path.try_exists(), Ok(false)).then_some(path)
}

/// Returns the file at the end of symbolic links, which need not exist.
fn follow_links(mut path: PathBuf) -> PathBuf {
    /// The limit of Linux.
    const MAX_LINKS: usize = 40;
    for _ in 0..MAX_LINKS {
        let Ok(target) = path.read_link() else { break };
        path = path.parent().unwrap_or(Path::new("/")).join(target);
    }
    path
}

fn explain_sqlite(url: &str, error: &sqlx::Error) -> Option<String> {
    let options = connect_options(url).ok()?;
    let path = follow_links(absolute(options.get_filename()).ok()?);
    let (file, user) = (path.display(), rustix::process::geteuid().as_raw());
    let locked = || {
        format!(
            "another process has locked {file} for longer than precis waits: end its transaction, for example in an open \
             sqlite3 shell"
        )
    };
    // At the start, only a lock delays a connection.
    if matches!(error, sqlx::Error::PoolTimedOut) {
        return Some(locked());
    }
    let database_error = error.as_database_error()?;
    Some(match sqlite_code(database_error)? {
        // ERROR
        1 if database_error.message().contains("already exists") => format!(
            "{file} has tables of another program ({}): name a file of its own for precis",
            database_error.message()
        ),
        // BUSY, LOCKED
        5 | 6 => locked(),
        // READONLY
        8 => format!(
            "user {user} may not write {file}: give this user write access to the file and to its folder"
        ),
        // IOERR
        10 => format!(
            "{file} can't be read or written: check its disk, and that its file system supports locks"
        ),
        // CORRUPT
        11 => format!("{file} is damaged: restore a backup"),
        // FULL
        13 => format!("the disk of {file} is full: free space on it"),
        14 => explain_cannot_open(&path, user),
        // NOTADB
        26 => format!("{file} is no SQLite database: name another file, or restore a backup"),
        _ => return None,
    })
}

fn explain_cannot_open(path: &Path, user: u32) -> String {
    let file = path.display();
    match path.parent() {
        _ if path.is_dir() => format!("{file} is a folder: name a file in it"),
        Some(folder) if matches!(folder.try_exists(), Ok(false)) => {
            format!("the folder {} does not exist: create it, or name another file", folder.display())
        }
        Some(folder) if !folder.is_dir() => {
            format!("{} is no folder: name another file", folder.display())
        }
        _ => format!("user {user} can't open {file}: give this user access to the file and to its folder"),
    }
}

fn explain_postgres(url: &str, error: &sqlx::Error) -> Option<String> {
    let options = PgConnectOptions::from_str(url).ok()?;
    let (role, database) = (options.get_username(), options.get_database().unwrap_or(options.get_username()));
    let server = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    Some(match error {
        sqlx::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            format!("no server listens on {server}: start Postgres, or correct host and port")
        }
        sqlx::Error::Io(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            format!("{server} is read-only: connect to the primary server, or permit writing")
        }
        sqlx::Error::Io(error) => format!("{server} can't be reached ({error}): correct host and port"),
        sqlx::Error::Tls(error) => {
            format!("the TLS connection to {server} failed ({error}): check sslmode and the certificate")
        }
        sqlx::Error::PoolTimedOut => format!(
            "there was no connection to {server} within database.acquire_timeout: check the server, and its max_connections"
        ),
        sqlx::Error::Database(error) => {
            let error = error.try_downcast_ref::<PgDatabaseError>()?;
            let message = error.message();
            match error.code() {
                "28P01" => {
                    format!("{server} rejects the password of the role {role:?}: correct the password")
                }
                "28000" => format!(
                    "{server} does not admit the role {role:?} ({message}): create the role, or admit it in pg_hba.conf"
                ),
                "3D000" => format!(
                    "{server} has no database {database:?}: create it with createdb, or correct its name"
                ),
                "42501" => format!(
                    "the role {role:?} lacks a privilege ({message}): grant it as docs/operations.md describes; `precis migrate` \
                     needs the owner of the tables"
                ),
                "3F000" => format!(
                    "the role {role:?} may use no schema of {database:?} ({message}): grant it USAGE and CREATE on one"
                ),
                "42P07" | "42710" | "42723" => format!(
                    "the database {database:?} has objects of another program ({message}): create a database for precis"
                ),
                "53300" => format!(
                    "{server} has no free connection ({message}): lower database.max_connections, or raise max_connections \
                     of the server"
                ),
                "55P03" => format!(
                    "other transactions use the tables that a migration changes ({message}), so nothing was changed: try again \
                     when imports, backups and other long transactions have ended"
                ),
                "57P03" => format!("{server} is starting or stopping ({message}): try again"),
                _ => return None,
            }
        }
        _ => return None,
    })
}
