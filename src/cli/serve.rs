//! `precis serve`: runs the service until a signal stops it.

use super::args::SettingsArgs;
use crate::app::App;
use crate::app::traces::Traces;
use clap::Args;
use std::error::Error;
use tokio::signal::unix::{SignalKind, signal};

#[derive(Args)]
pub(super) struct ServeArgs {
    /// Leave the database schema as it is; `precis migrate` brings it up to date
    #[arg(long)]
    pub(super) no_migrate: bool,
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
