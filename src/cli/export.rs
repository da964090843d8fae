//! `precis export`: writes a session from the database to a file, while the service runs or without it.

use super::args::{SessionArgs, SettingsArgs};
use super::output::{error, error_with_cause};
use crate::app::open_store;
use crate::service::Error as ServiceError;
use crate::service::export::Export;
use clap::Args;
use indicatif::{ProgressBar, ProgressFinish, ProgressState, ProgressStyle};
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    session: SessionArgs,
    /// File to write; it appears only when the export is complete
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(long, requires = "output")]
    force: bool,
}

pub(super) async fn export(settings: SettingsArgs, args: ExportArgs) -> Result<(), Box<dyn Error>> {
    let (tenant, session) = args.session.parse()?;
    let existing = args.output.as_deref().filter(|file| !args.force && file.exists());
    existing.map_or(Ok(()), |file| Err(already_exists(file)))?;
    let settings = settings.load_and_log()?;
    let database = &settings.database.url;
    let store = open_store(&settings, false).await?;
    store.check_ready().await.map_err(|cause| {
        let problem = format!("the database {database} (database.url) is not ready");
        error_with_cause(format!("{problem}: run `precis migrate`, then try again"), cause)
    })?;
    let mut export = Export::begin(store.clone(), &tenant, &session).await.map_err(|cause| match cause {
        ServiceError::SessionNotFound => {
            let session = session.as_str();
            error(format!(
                "tenant {tenant} has no session {session:?} in the database {database} (database.url)"
            ))
        }
        cause => error_with_cause("the database failed", cause),
    })?;
    let progress = progress_bar("exported", export.messages());
    let mut output = Output::open(args.output.as_deref(), args.force)?;
    loop {
        match export.next().await {
            Ok(Some(lines)) => output.write(&lines)?,
            Ok(None) => break,
            Err(ServiceError::SessionNotFound) => {
                return Err(error("the session was erased during the export: the output is incomplete"));
            }
            Err(cause) => return Err(error_with_cause("the database failed", cause)),
        }
        progress.set_position(to_count(export.messages_read()));
    }
    output.finish()?;
    progress.finish_and_clear();
    store.close().await;
    Ok(())
}

/// The destination of an export: standard output, or a file that gets its name when it is complete.
enum Output {
    Stdout(io::Stdout),
    File { partial: tempfile::NamedTempFile, path: PathBuf, force: bool },
}

impl Output {
    fn open(path: Option<&Path>, force: bool) -> Result<Self, Box<dyn Error>> {
        let Some(path) = path else {
            return Ok(Self::Stdout(io::stdout()));
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        if !folder.is_dir() {
            return Err(error(format!(
                "there is no folder {}: create it, or choose another file",
                folder.display()
            )));
        }
        let file = tempfile::NamedTempFile::new_in(folder);
        let partial = file.map_err(|cause| cannot_write(path, cause))?;
        Ok(Self::File { partial, path: path.to_owned(), force })
    }

    fn write(&mut self, lines: &str) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Stdout(stdout) => stdout.write_all(lines.as_bytes()).map_err(stdout_closed),
            Self::File { partial, path, .. } => {
                partial.write_all(lines.as_bytes()).map_err(|cause| cannot_write(path, cause))
            }
        }
    }

    fn finish(self) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Stdout(mut stdout) => stdout.flush().map_err(stdout_closed),
            Self::File { partial, path, force } => {
                partial.as_file().sync_all().map_err(|cause| cannot_write(&path, cause))?;
                let named = if force { partial.persist(&path) } else { partial.persist_noclobber(&path) };
                match named {
                    Ok(_) => Ok(()),
                    Err(cause) if cause.error.kind() == io::ErrorKind::AlreadyExists => {
                        Err(already_exists(&path))
                    }
                    Err(cause) => Err(cannot_write(&path, cause.error)),
                }
            }
        }
    }
}

fn stdout_closed(cause: io::Error) -> Box<dyn Error> {
    error_with_cause("standard output is closed", cause)
}

fn already_exists(path: &Path) -> Box<dyn Error> {
    error(format!("{} exists: choose another file, or replace it with --force", path.display()))
}

fn cannot_write(path: &Path, cause: io::Error) -> Box<dyn Error> {
    error_with_cause(format!("{}: can't be written", path.display()), cause)
}

/// Returns a progress bar, which is visible only if standard error is a terminal.
pub(super) fn progress_bar(action: &'static str, messages: i64) -> ProgressBar {
    const TEMPLATE: &str = "{msg} {wide_bar} {human_pos} of {human_len} messages, {rate}, {eta} to go";
    // After an error, the prompt of the shell would otherwise appear behind the bar.
    let bar = ProgressBar::new(to_count(messages)).with_message(action).with_finish(ProgressFinish::AndClear);
    let rate = |state: &ProgressState, to: &mut dyn fmt::Write| {
        // An error would mean that there is no memory for the line.
        let _ = write!(to, "{:.0} per second", state.per_sec());
    };
    match ProgressStyle::with_template(TEMPLATE) {
        Ok(style) => bar.with_style(style.with_key("rate", rate)),
        Err(_) => bar,
    }
}

pub(super) fn to_count(messages: i64) -> u64 {
    u64::try_from(messages).unwrap_or(0)
}
