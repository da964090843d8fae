//! Copying an SQLite database while other processes use it.

use super::StoreError;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions as _, Connection as _};
use std::path::Path;
use std::str::FromStr as _;
use std::time::Duration;

/// Writes the state of the database at one moment to `target`, an empty file. Transactions of other connections continue
/// meanwhile. The copy contains every transaction that was committed before. The copy contains no erased data and is not synchronised
/// to the disk.
///
/// # Errors
/// The URL is invalid, there is no database, or a file can't be read or written.
pub async fn copy_sqlite(url: &str, target: &Path) -> Result<(), StoreError> {
    const COPY: &str = "VACUUM INTO $1";
    let connect = SqliteConnectOptions::from_str(url)
        .map_err(|_| StoreError::Url("expected sqlite://FILE or sqlite:FILE".to_owned()))?
        .create_if_missing(false)
        .busy_timeout(Duration::from_secs(5))
        .log_statements(tracing::log::LevelFilter::Off);
    let mut connection = SqliteConnection::connect_with(&connect).await?;
    sqlx::query(COPY).bind(target.to_string_lossy()).execute(&mut connection).await?;
    Ok(connection.close().await?)
}
