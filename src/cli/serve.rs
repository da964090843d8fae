//! `precis serve`: runs the service until a signal stops it.

use super::SettingsArgs;
use crate::app::App;
use crate::app::traces::Traces;
use clap::Args;
use std::env;
use std::error::Error;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// Variables of the allocators, which make them return free memory to the system soon.
///
/// mimalloc otherwise keeps it for a second, in which large requests leave so much free memory behind that the process becomes
/// twice as large. The allocator of the C library, which SQLite uses, raises the size from which it returns memory to 32 MiB
/// when it has freed a large value once. Both keep memory for small values in any case.
const ALLOCATOR_SETTINGS: [(&str, &str); 2] =
    [("MIMALLOC_PURGE_DELAY", "10"), ("MALLOC_MMAP_THRESHOLD_", "131072")];

#[derive(Args)]
pub(super) struct ServeArgs {
    /// Leave the database schema as it is; `precis migrate` brings it up to date
    #[arg(long)]
    pub(super) no_migrate: bool,
}

/// Makes the allocators return free memory soon: see [`ALLOCATOR_SETTINGS`].
///
/// They read the variables when the process starts, and their options can't be set later without unsafe code. So the process
/// replaces itself once, with the same process ID, arguments and files.
pub(super) fn return_memory_soon() {
    let is_missing = |(name, _): &(&str, &str)| env::var_os(name).is_none();
    let missing: Vec<_> = ALLOCATOR_SETTINGS.into_iter().filter(is_missing).collect();
    if missing.is_empty() {
        return;
    }
    let mut arguments = env::args_os();
    let replaced = env::current_exe().map(|program| {
        let mut command = Command::new(program);
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        command.args(arguments).envs(missing).exec()
    });
    let (Ok(error) | Err(error)) = replaced;
    eprintln!(
        "precis: can't restart itself with the settings of its allocators ({error}), and needs more memory; set the \
         environment variables {ALLOCATOR_SETTINGS:?}"
    );
}

pub(super) async fn serve(settings: SettingsArgs, migrate: bool) -> Result<(), Box<dyn Error>> {
    let traces = Traces::from_environment()?;
    let settings = settings.load_and_trace(traces.as_ref().map(Traces::tracer))?;
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
    let served = app.serve(listener, stop).await;
    if let Some(traces) = traces {
        traces.shut_down().await;
    }
    Ok(served?)
}
