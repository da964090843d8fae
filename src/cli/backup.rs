//! `precis backup`: copies an SQLite database to a file, while the service runs or without it.

use super::output::{error, error_with_cause, print};
use crate::config::Settings;
use crate::storage;
use clap::Args;
use std::error::Error;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(super) struct BackupArgs {
    /// File to create; it appears only when the backup is complete, and only its owner can read it
    file: PathBuf,
}

pub(super) async fn backup(
    settings: &Settings,
    BackupArgs { file }: BackupArgs,
) -> Result<(), Box<dyn Error>> {
    let database = &settings.database.url;
    if !database.is_sqlite() {
        return Err(error(format!(
            "`precis backup` copies SQLite databases, and {database} (database.url) is none: use pg_dump as described in \
             docs/backup.md"
        )));
    }
    let name = file.display();
    if file.exists() {
        return Err(already_exists(&file));
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let cannot_write = |cause: io::Error| {
        error_with_cause(
            format!("{name} can't be written: choose a file in a folder that you can write to"),
            cause,
        )
    };
    let partial = tempfile::NamedTempFile::new_in(folder).map_err(cannot_write)?;
    if partial.path().to_str().is_none() {
        return Err(error(format!("the path of {name} is not UTF-8: choose another folder")));
    }
    storage::copy_sqlite(database.expose(), partial.path()).await.map_err(|cause| {
        let problem = format!("the database {database} (database.url) can't be copied to {name}");
        error_with_cause(
            format!("{problem}; check that it exists and that the disk has space for both"),
            cause,
        )
    })?;
    let bytes = partial.as_file().sync_all().and_then(|()| Ok(partial.as_file().metadata()?.len()));
    let bytes = bytes.map_err(cannot_write)?;
    partial.persist_noclobber(&file).map_err(|cause| match cause.error.kind() {
        ErrorKind::AlreadyExists => already_exists(&file),
        _ => cannot_write(cause.error),
    })?;
    // The name of the file is durable when its folder is.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(cannot_write)?;
    print(&format!("copied {database} to {name} ({bytes} bytes)\n"))
}

fn already_exists(file: &Path) -> Box<dyn Error> {
    error(format!(
        "{} exists, and a backup replaces no file: choose another name or remove it",
        file.display()
    ))
}
