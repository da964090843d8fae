//! `precis export`: writes a session from the database to a file, while the service runs or without it.

use super::{SessionArgs, SettingsArgs, error, error_with_cause};
use crate::app::open_store;
use crate::service::Error as ServiceError;
use crate::service::export::Export;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    session: SessionArgs,
    /// File to write; it appears only when the export is complete
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) async fn export(settings: SettingsArgs, args: ExportArgs) -> Result<(), Box<dyn Error>> {
    let (tenant, session) = args.session.parse()?;
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
    let mut output = Output::open(args.output.as_deref())?;
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
    progress.finish();
    store.close().await;
    Ok(())
}

/// The destination of an export: standard output, or a file that gets its name when it is complete.
enum Output {
    Stdout(io::Stdout),
    File(tempfile::NamedTempFile, PathBuf),
}

impl Output {
    fn open(path: Option<&Path>) -> Result<Self, Box<dyn Error>> {
        let Some(path) = path else {
            return Ok(Self::Stdout(io::stdout()));
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")));
        Ok(Self::File(file.map_err(|cause| cannot_write(path, cause))?, path.to_owned()))
    }

    fn write(&mut self, lines: &str) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Stdout(stdout) => stdout.write_all(lines.as_bytes()).map_err(stdout_closed),
            Self::File(file, path) => {
                file.write_all(lines.as_bytes()).map_err(|cause| cannot_write(path, cause))
            }
        }
    }

    fn finish(self) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Stdout(mut stdout) => stdout.flush().map_err(stdout_closed),
            Self::File(file, path) => {
                let written = file.as_file().sync_all().and_then(|()| Ok(file.persist(&path)?));
                written.map(drop).map_err(|cause| cannot_write(&path, cause))
            }
        }
    }
}

fn stdout_closed(cause: io::Error) -> Box<dyn Error> {
    error_with_cause("standard output is closed", cause)
}

fn cannot_write(path: &Path, cause: io::Error) -> Box<dyn Error> {
    error_with_cause(format!("{}: can't be written", path.display()), cause)
}

/// Returns a progress bar, which is visible only if standard error is a terminal.
pub(super) fn progress_bar(action: &'static str, messages: i64) -> ProgressBar {
    const TEMPLATE: &str = "{msg} {wide_bar} {human_pos} of {human_len} messages, {per_sec}, {eta} to go";
    let bar = ProgressBar::new(to_count(messages)).with_message(action);
    match ProgressStyle::with_template(TEMPLATE) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

pub(super) fn to_count(messages: i64) -> u64 {
    u64::try_from(messages).unwrap_or(0)
}
