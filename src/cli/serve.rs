//! `precis serve`: runs the service until a signal stops it.

use super::SettingsArgs;
use crate::app::App;
use clap::Args;
use std::env;
use std::error::Error;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// The variable of mimalloc for the time after which it returns free memory to the system, in milliseconds.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";
/// The memory of a small request is used again by the next one long before this time.
const PURGE_DELAY_MILLIS: &str = "10";

#[derive(Args)]
pub(super) struct ServeArgs {
    /// Leave the database schema as it is; `precis migrate` brings it up to date
    #[arg(long)]
    pub(super) no_migrate: bool,
}

/// Makes the allocator return free memory soon. Its default is a second, in which large requests leave so much free memory
/// behind that the process becomes twice as large.
///
/// The allocator reads the variable when the process starts, and an option can't be set later without unsafe code. So the
/// process replaces itself once, with the same process ID, arguments and files.
pub(super) fn return_memory_soon() {
    if env::var_os(PURGE_DELAY).is_some() {
        return;
    }
    let mut arguments = env::args_os();
    let replaced = env::current_exe().map(|program| {
        let mut command = Command::new(program);
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        command.args(arguments).env(PURGE_DELAY, PURGE_DELAY_MILLIS).exec()
    });
    let (Ok(error) | Err(error)) = replaced;
    eprintln!(
        "precis: can't restart itself with {PURGE_DELAY}={PURGE_DELAY_MILLIS} ({error}); set the variable, or the process \
         will keep free memory for longer"
    );
}

pub(super) async fn serve(settings: SettingsArgs, migrate: bool) -> Result<(), Box<dyn Error>> {
    let settings = settings.load_and_log()?;
    // Installed first, so that a signal during the start is not lost.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let app = App::new(&settings, migrate).await?;
    let listener = app.listen().await?;
    if settings.uses_only_extractive() {
        tracing::info!(
            "summaries are made by the built-in extractive summariser; a real model writes better ones: \
             set one in [llm], see precis.example.toml"
        );
    }
    tracing::info!(database = %settings.database.url, "listening on http://{}", listener.local_addr()?);
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(app.serve(listener, stop).await?)
}
