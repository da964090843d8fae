//! Logs: readable on a terminal, JSON otherwise; every line of a request has its id, through the request's span. And
//! the metrics, which each service of a process has for itself: nothing is global.

use crate::config::{Log, LogFormat};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// Postgres' notices are no news ("relation already exists, skipping", at each start); and the SDK of MCP writes down what
/// goes through it, which is conversations. The settings can say otherwise, by these names.
const QUIET: &str = "sqlx::postgres::notice=warn,rmcp=error";

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

/// The borders of the histograms, in seconds: from what a local server takes to what nobody waits for.
const BUCKETS: [f64; 13] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0];

/// The same for requests to precis, most of which wait for no model.
const REQUEST_BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];
const REQUESTS: &str = "precis_http_request_duration_seconds";

/// How often samples that nobody fetches are put together.
const UPKEEP: Duration = Duration::from_secs(5);

/// The metrics of one service.
#[derive(Debug)]
pub struct Metrics(Arc<PrometheusRecorder>);

impl Metrics {
    /// Without any meter yet.
    ///
    /// # Errors
    /// There are no buckets, which there are.
    pub fn new() -> Result<Self, BuildError> {
        let requests = Matcher::Full(REQUESTS.to_owned());
        let builder = PrometheusBuilder::new().set_buckets(&BUCKETS)?;
        let builder = builder.set_buckets_for_metric(requests, &REQUEST_BUCKETS)?;
        Ok(Self(Arc::new(builder.build_recorder())))
    }

    /// Makes something whose meters are to be among these.
    pub fn measure<T>(&self, make: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&*self.0, make)
    }

    /// For meters that are made as they are needed.
    #[must_use]
    pub fn recorder(&self) -> Arc<PrometheusRecorder> {
        Arc::clone(&self.0)
    }

    /// What reads them.
    #[must_use]
    pub fn handle(&self) -> PrometheusHandle {
        self.0.handle()
    }
}

/// Keeps the samples of histograms from piling up while nobody fetches them. Never ends.
pub async fn keep_up(metrics: PrometheusHandle) {
    let mut ticks = tokio::time::interval(UPKEEP);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}
