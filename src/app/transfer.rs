//! `precis export` and `precis import`: sessions as files, straight from and to the database, with or without a service
//! that runs over it.
//!
//! Progress is shown on standard error, where that is a terminal. A file that is written has its name only when it is
//! whole.

use super::{AppError, store};
use crate::config::Settings;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::service::export::Export;
use crate::service::import::{Limits, Upload, import as write};
use crate::service::indexer::index_pending;
use crate::service::{Error, StoreError};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Why a session was not exported or imported.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The database can't be used.
    #[error(transparent)]
    App(#[from] AppError),
    /// The schema is not there, or another one.
    #[error("the database {0} (database.url) is not ready: run `precis migrate`, then try again")]
    Schema(String, #[source] StoreError),
    /// There is no such session.
    #[error("tenant {tenant} has no session {session:?} in the database {database} (database.url)")]
    NoSession {
        /// Whose it would be.
        tenant: TenantId,
        /// Its id.
        session: String,
        /// Where it was looked for.
        database: String,
    },
    /// The session was erased under the export.
    #[error("the session was erased while it was exported: what was written is cut off")]
    Erased,
    /// There is another one.
    #[error("there is another session {0:?}: import under another id, or erase it first")]
    OtherSession(String),
    /// The folder for temporary files can't be used.
    #[error("can't put the import down in {} (set TMPDIR to a folder with room for it)", std::env::temp_dir().display())]
    StagingFile(#[source] io::Error),
    /// A file can't be read or written.
    #[error("{0}")]
    File(String, #[source] io::Error),
    /// The service refused.
    #[error("{name}: nothing was imported")]
    Refused {
        /// The file.
        name: String,
        /// Why.
        #[source]
        error: Error,
    },
    /// The service failed.
    #[error("the database failed")]
    Failed(#[source] Error),
}

/// Writes a session to the file, or to standard output.
///
/// # Errors
/// There is no such session, or it can't be written.
pub async fn export(
    settings: &Settings,
    tenant: &TenantId,
    session: &SessionId,
    output: Option<&Path>,
) -> Result<(), TransferError> {
    let database = || settings.database.url.to_string();
    let store = store(settings, false).await?;
    store.check_ready().await.map_err(|error| TransferError::Schema(database(), error))?;
    let mut export = match Export::begin(store.clone(), tenant, session).await {
        Err(Error::SessionNotFound) => {
            let (tenant, session) = (tenant.clone(), session.to_string());
            return Err(TransferError::NoSession { tenant, session, database: database() });
        }
        other => other.map_err(TransferError::Failed)?,
    };
    let bar = bar("exported", export.messages());
    let mut output = Output::open(output)?;
    loop {
        match export.next().await {
            Ok(Some(lines)) => output.write(&lines)?,
            Ok(None) => break,
            Err(Error::SessionNotFound) => return Err(TransferError::Erased),
            Err(error) => return Err(TransferError::Failed(error)),
        }
        bar.set_position(count(export.messages_read()));
    }
    output.close()?;
    bar.finish();
    store.close().await;
    Ok(())
}

/// Makes a session of the file, or of standard input; the words of what was done.
///
/// # Errors
/// It is not sound, or there is another session of this id.
pub async fn import(
    settings: &Settings,
    tenant: &TenantId,
    session: &SessionId,
    user: Option<UserId>,
    file: Option<&Path>,
) -> Result<String, TransferError> {
    let store = store(settings, true).await?;
    let name = file.map_or_else(|| "standard input".to_owned(), |file| file.display().to_string());
    let refused = |error| match error {
        Error::SessionExists => TransferError::OtherSession(session.to_string()),
        Error::StagingFile(error) => TransferError::StagingFile(error),
        error @ Error::Import(_) => TransferError::Refused { name: name.clone(), error },
        error => TransferError::Failed(error),
    };
    let cannot_read = |error| TransferError::File(format!("{name}: can't be read"), error);
    let mut input: Box<dyn Read> = match file {
        Some(file) => Box::new(File::open(file).map_err(cannot_read)?),
        None => Box::new(io::stdin()),
    };
    let reading = bar("read", 0);
    // The file is here already: another of its size in the folder for temporary files is the operator's to decide.
    let limits = Limits { sizes: settings.limits.sizes(), max_bytes: u64::MAX };
    let mut upload = Upload::begin(limits).map_err(refused)?;
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let read = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(cannot_read(error)),
        };
        upload.feed(buffer.get(..read).unwrap_or_default()).map_err(refused)?;
        reading.set_length(count(upload.promised()).max(upload.messages()));
        reading.set_position(upload.messages());
    }
    let received = upload.finish().map_err(refused)?;
    reading.finish();
    let writing = bar("written", received.messages());
    let at = writing.clone();
    let done = write(&store, tenant, session, user.as_ref(), received, move |written| {
        at.set_position(count(written));
    });
    let done = done.await.map_err(refused)?;
    writing.finish();
    index_pending(&store, true).await;
    store.close().await;
    let (messages, revisions) = (done.messages, done.revisions);
    Ok(if done.created {
        format!("imported {messages} messages and {revisions} revisions")
    } else {
        format!("nothing to do: the {messages} messages and {revisions} revisions were imported before")
    })
}

/// Where an export goes.
enum Output {
    Standard(io::Stdout),
    File(tempfile::NamedTempFile, PathBuf),
}

impl Output {
    fn open(file: Option<&Path>) -> Result<Self, TransferError> {
        let Some(file) = file else {
            return Ok(Self::Standard(io::stdout()));
        };
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        match tempfile::NamedTempFile::new_in(folder) {
            Ok(temporary) => Ok(Self::File(temporary, file.to_owned())),
            Err(error) => Err(TransferError::File(format!("{}: can't be written", file.display()), error)),
        }
    }

    fn write(&mut self, lines: &str) -> Result<(), TransferError> {
        match self {
            Self::Standard(out) => out
                .write_all(lines.as_bytes())
                .map_err(|error| TransferError::File("standard output is closed".to_owned(), error)),
            Self::File(temporary, name) => temporary
                .write_all(lines.as_bytes())
                .map_err(|error| TransferError::File(format!("{}: can't be written", name.display()), error)),
        }
    }

    fn close(self) -> Result<(), TransferError> {
        match self {
            Self::Standard(mut out) => out
                .flush()
                .map_err(|error| TransferError::File("standard output is closed".to_owned(), error)),
            Self::File(temporary, name) => {
                let cannot =
                    |error| TransferError::File(format!("{}: can't be written", name.display()), error);
                temporary.as_file().sync_all().map_err(cannot)?;
                temporary.persist(&name).map(|_| ()).map_err(|error| cannot(error.error))
            }
        }
    }
}

/// Draws itself only where standard error is a terminal.
fn bar(what: &'static str, messages: i64) -> ProgressBar {
    const TEMPLATE: &str = "{msg} {wide_bar} {human_pos} of {human_len} messages, {per_sec}, {eta} to go";
    let bar = ProgressBar::new(count(messages)).with_message(what);
    match ProgressStyle::with_template(TEMPLATE) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn count(messages: i64) -> u64 {
    u64::try_from(messages).unwrap_or(0)
}
