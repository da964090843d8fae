//! Logging, metrics and the spans of traces. Logs are text on a terminal and JSON otherwise; each line of a request has the request
//! ID.

use crate::config::{Log, LogFormat};
use crate::trace_context;
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use opentelemetry_sdk::trace::SdkTracer;
use serde::Serialize;
use std::fmt;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::Record;
use tracing::{Level, Metadata as SpanMetadata};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FormatFields, FormattedFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Filters that `log.filter` can override. Postgres sends notices such as "relation already exists, skipping" at every
/// start. The MCP library logs the messages that it transports, which contain conversations.
const DEFAULT_FILTERS: &str = "sqlx::postgres::notice=warn,rmcp=error";

/// Starts logging to standard error. Standard output is reserved for the results of commands. With a tracer, spans are exported,
/// too.
pub fn init_logging(log: &Log, tracer: Option<SdkTracer>) -> Result<(), ParseError> {
    let filter = EnvFilter::try_new(format!("{DEFAULT_FILTERS},{}", log.filter))?;
    let is_terminal = std::io::stderr().is_terminal();
    let is_text = log.format == LogFormat::Text || (log.format == LogFormat::Auto && is_terminal);
    if let Some(tracer) = tracer {
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let lines = if is_text {
            lines.with_ansi(is_terminal).with_target(false).boxed()
        } else {
            lines.json().flatten_event(true).with_current_span(false).fmt_fields(SpanFields).boxed()
        };
        let spans = tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_level(false)
            .with_target(false)
            .with_filter(filter_fn(is_exported).with_max_level_hint(LevelFilter::TRACE));
        let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans);
        let _ = subscriber.try_init();
        return Ok(());
    }
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Only tests start logging twice. The first subscriber stays.
    let _ = if is_text {
        subscriber.with_ansi(is_terminal).with_target(false).try_init()
    } else {
        subscriber.json().flatten_event(true).with_current_span(false).fmt_fields(SpanFields).try_init()
    };
    Ok(())
}

/// Formats the fields of a span as a JSON object.
///
/// `JsonFields` of the library sorts the fields and parses the object again for each field that is recorded later, as tenant and key of each
/// request are. That took a tenth of the instructions of a context with an API key.
struct SpanFields;

impl<'w> FormatFields<'w> for SpanFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut object = OpenObject("{".to_owned());
        fields.record(&mut object);
        write!(writer, "{}}}", object.0)
    }

    fn add_fields(&self, current: &'w mut FormattedFields<Self>, fields: &Record<'_>) -> fmt::Result {
        let mut object = OpenObject(std::mem::take(&mut current.fields));
        object.0.pop();
        fields.record(&mut object);
        object.0.push('}');
        current.fields = object.0;
        Ok(())
    }
}

/// A JSON object without its closing brace. If a name occurs again, its last value counts.
struct OpenObject(String);

impl OpenObject {
    fn push(&mut self, field: &Field, value: impl Serialize) {
        let (Ok(name), Ok(value)) = (serde_json::to_string(field.name()), serde_json::to_string(&value))
        else {
            return;
        };
        let separator = if self.0.len() > 1 { "," } else { "" };
        self.0.extend([separator, &name, ":", &value]);
    }
}

impl Visit for OpenObject {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format!("{value:?}"));
    }
}

/// Returns `true` for our own spans, at the level of the log or as steps. Events are for the log only.
fn is_exported(metadata: &SpanMetadata<'_>) -> bool {
    let is_ours = metadata.target() == trace_context::STEPS
        || (metadata.target().starts_with("precis") && *metadata.level() <= Level::INFO);
    metadata.is_span() && is_ours
}

/// The histogram buckets of model calls in seconds, from a fast local server to a call that times out.
const BUCKETS: [f64; 13] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0];

/// The histogram buckets of HTTP requests in seconds; most requests do not call a model.
const REQUEST_BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// The interval at which histogram samples are aggregated if no client reads the metrics.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The metrics of one service. Several services can run in one process, because nothing is global.
#[derive(Debug)]
pub struct Metrics(Arc<PrometheusRecorder>);

impl Metrics {
    /// Creates a recorder. `request_duration` is the name of the histogram of HTTP requests, which has its own buckets.
    pub fn new(request_duration: &str) -> Result<Self, BuildError> {
        let requests = Matcher::Full(request_duration.to_owned());
        let builder = PrometheusBuilder::new().set_buckets(&BUCKETS)?;
        let builder = builder.set_buckets_for_metric(requests, &REQUEST_BUCKETS)?;
        Ok(Self(Arc::new(builder.build_recorder())))
    }

    /// Calls a function that registers metrics.
    pub fn with_recorder<T>(&self, register: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&*self.0, register)
    }

    #[must_use]
    pub fn recorder(&self) -> Arc<PrometheusRecorder> {
        Arc::clone(&self.0)
    }

    #[must_use]
    pub fn handle(&self) -> PrometheusHandle {
        self.0.handle()
    }
}

/// Aggregates histogram samples periodically, so that they do not pile up while no client reads the metrics. Runs
/// until it is cancelled.
pub async fn run_upkeep(metrics: PrometheusHandle) {
    let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
    loop {
        interval.tick().await;
        metrics.run_upkeep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::io::{self, Write};
    use std::sync::{Mutex, PoisonError};
    use tracing::field::Empty;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn line_has_the_fields_that_a_span_had_and_those_recorded_later() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().json().fmt_fields(SpanFields);
        tracing::subscriber::with_default(subscriber.with_writer(move || writer.clone()).finish(), || {
            for later in [&[][..], &["}\"{"], &["first", "second"]] {
                let with_fields = tracing::info_span!("with", request_id = "1}", count = 2, is_new = true, size = ?Some(1), tenant = Empty);
                let without = tracing::info_span!(parent: &with_fields, "without", tenant = Empty);
                for value in later {
                    with_fields.record("tenant", value);
                    without.record("tenant", value);
                }
                without.in_scope(|| tracing::info!("answered"));
            }
        });
        let text = String::from_utf8(std::mem::take(&mut *lines.0.lock().expect("no panic"))).expect("text");
        let line = |line| serde_json::from_str::<Value>(line).expect("JSON")["spans"].clone();
        let with_tenant = |tenant| json!([{"name": "with", "request_id": "1}", "count": 2, "is_new": true, "size": "Some(1)", "tenant": tenant}, {"name": "without", "tenant": tenant}]);
        let spans: Vec<_> = text.lines().map(line).collect();
        let none = json!([{"name": "with", "request_id": "1}", "count": 2, "is_new": true, "size": "Some(1)"}, {"name": "without"}]);
        assert_eq!(spans, [none, with_tenant("}\"{"), with_tenant("second")]);
    }
}
