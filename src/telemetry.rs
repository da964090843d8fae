//! Logs: readable on a terminal, JSON otherwise; every line of a request has its id, through the request's span.

use crate::config::{Log, LogFormat};
use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// Postgres' notices are no news ("relation already exists, skipping", at each start). The settings can say otherwise.
const QUIET: &str = "sqlx::postgres::notice=warn";

/// Starts logging to standard error, so that standard output stays free for what a command prints.
///
/// # Errors
/// The filter can't be read.
pub fn start(log: &Log) -> Result<(), ParseError> {
    let filter = EnvFilter::try_new(format!("{QUIET},{}", log.filter))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let terminal = std::io::stderr().is_terminal();
    // A second start is a test's: the first one stays.
    let _ = match log.format {
        LogFormat::Json => subscriber.json().flatten_event(true).with_current_span(false).try_init(),
        LogFormat::Auto if !terminal => {
            subscriber.json().flatten_event(true).with_current_span(false).try_init()
        }
        LogFormat::Text | LogFormat::Auto => subscriber.with_ansi(terminal).with_target(false).try_init(),
    };
    Ok(())
}
