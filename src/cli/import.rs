//! `precis import`: creates a session from a file, while the service runs or without it.

use super::args::{SessionArgs, SettingsArgs};
use super::export::{progress_bar, to_count};
use super::output::{count, error, error_with_cause, print};
use crate::app::{open_store, prepare_index};
use crate::domain::export_format::max_line_bytes;
use crate::domain::id::UserId;
use crate::service::Error as ServiceError;
use crate::service::import::{ImportLimits, Upload, write_import};
use clap::Args;
use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

#[derive(Args)]
pub(super) struct ImportArgs {
    #[command(flatten)]
    session: SessionArgs,
    /// File to read; default, or `-`: standard input
    file: Option<PathBuf>,
    /// User of the new session; default: the user of the export, or else of the session, or else the default user
    #[arg(long)]
    user: Option<String>,
}

pub(super) async fn import(
    settings: SettingsArgs,
    args: ImportArgs,
    migrate: bool,
) -> Result<(), Box<dyn Error>> {
    let (tenant, session) = args.session.parse()?;
    let user = args.user.map(UserId::new).transpose().map_err(|error| format!("--user {error}"))?;
    let settings = settings.load_and_log()?;
    let store = open_store(&settings, migrate).await?;
    let file = args.file.filter(|file| file.as_os_str() != "-");
    let name = file.as_ref().map_or_else(|| "standard input".to_owned(), |file| file.display().to_string());
    let failed = |cause| match cause {
        ServiceError::SessionExists => {
            let session = session.as_str();
            error(format!("there is another session {session:?}: import under another id, or erase it first"))
        }
        ServiceError::StagingFile(cause) => {
            let folder = std::env::temp_dir();
            let problem = format!("can't write a temporary file in {}", folder.display());
            error_with_cause(format!("{problem} (set TMPDIR to a folder with room for it)"), cause)
        }
        cause @ ServiceError::Import(_) => error_with_cause(format!("{name}: nothing was imported"), cause),
        cause => error_with_cause("the database failed", cause),
    };
    let cannot_read = |cause| error_with_cause(format!("{name}: can't be read"), cause);
    let mut input: Box<dyn Read> = match &file {
        Some(file) => Box::new(File::open(file).map_err(cannot_read)?),
        None => Box::new(io::stdin()),
    };
    let reading = progress_bar("read", 0);
    // limits.max_import_bytes protects the service's disk. Here the operator chose the file.
    let sizes = settings.limits.sizes();
    let limits = ImportLimits { sizes, max_bytes: u64::MAX, max_line_bytes: max_line_bytes(sizes) };
    let mut upload = Upload::begin(limits).map_err(failed)?;
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let read = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(cannot_read(error)),
        };
        upload.feed(buffer.get(..read).unwrap_or_default()).map_err(failed)?;
        reading.set_length(to_count(upload.declared_messages()).max(upload.messages()));
        reading.set_position(upload.messages());
    }
    let received = upload.finish().map_err(failed)?;
    reading.finish_and_clear();
    prepare_index(&store).await;
    let writing = progress_bar("written", received.messages());
    let bar = writing.clone();
    let has_keys = store.any_api_key().await.map_err(|error| failed(error.into()))?;
    let default_user = settings.memory.default_user().filter(|_| !has_keys);
    let users = (user.as_ref(), default_user.as_ref());
    let imported = write_import(&store, &tenant, &session, users, received, move |written| {
        bar.set_position(to_count(written));
    });
    let imported = imported.await.map_err(failed)?;
    writing.finish_and_clear();
    store.close().await;
    let imported_things =
        format!("{} and {}", count(imported.messages, "message"), count(imported.revisions, "revision"));
    print(&if imported.created {
        format!("imported {imported_things}\n")
    } else {
        format!("nothing to do: {imported_things} of this file were imported before\n")
    })
}
