//! Copying an SQLite database while other processes use it.

use super::StoreError;
use super::sqlite::connect_options;
use sqlx::{ConnectOptions as _, Connection as _};
use std::path::Path;

/// Writes the state of the database at one moment to `target`, an empty file. Transactions of other connections continue
/// meanwhile. The copy contains every transaction that was committed before. The copy contains no erased data and is not synchronised
/// to the disk.
///
/// # Errors
/// The URL is invalid, there is no database, or a file can't be read or written.
pub async fn copy_sqlite(url: &str, target: &Path) -> Result<(), StoreError> {
    const COPY: &str = "VACUUM INTO $1";
    let mut connection = connect_options(url)?.connect().await?;
    sqlx::query(COPY).bind(target.to_string_lossy()).execute(&mut connection).await?;
    Ok(connection.close().await?)
}
