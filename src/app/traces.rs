//! Exports spans to an OpenTelemetry collector, by OTLP over HTTP with protobuf. The standard environment variables configure it;
//! without an endpoint, nothing is installed.
//!
//! A thread of its own sends the spans in batches. If the collector does not take them, they are dropped, and requests go on. Only
//! the attributes in [`EXPORTED`] leave the process, so that no text of a conversation and no id of a client does.

use crate::llm::http::build_http_client;
use crate::trace_context;
use async_trait::async_trait;
use opentelemetry::KeyValue;
use opentelemetry::trace::{Status, TracerProvider as _};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    SdkTracer, SdkTracerProvider, SpanData, SpanEvents, SpanExporter as Exporter,
};
use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;

/// The attributes that are exported.
const EXPORTED: [&str; 7] = [
    "request_id",
    "tenant",
    "pool",
    "model",
    "http.request.method",
    "http.route",
    "http.response.status_code",
];

const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const TIMEOUTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
const PROTOCOL: &str = "http/protobuf";
/// The SDK would ignore other samplers and export everything.
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for the last spans when the service stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The export of spans.
#[derive(Debug)]
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Starts the export that the environment configures; `None` without an endpoint. The error names the variable. Must be called
    /// in the runtime.
    pub fn from_environment() -> Result<Option<Self>, String> {
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        if first(ENDPOINTS).is_none() {
            return Ok(None);
        }
        match variable("OTEL_TRACES_EXPORTER").as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(exporter) => {
                return Err(format!(
                    "OTEL_TRACES_EXPORTER: {exporter:?} is not supported: leave it out, or write \"otlp\" or \"none\""
                ));
            }
        }
        if let Some((name, protocol)) = first(PROTOCOLS).filter(|(_, protocol)| protocol != PROTOCOL) {
            return Err(format!(
                "{name}: {protocol:?} is not supported: leave it out, or write {PROTOCOL:?}, which collectors receive at port 4318"
            ));
        }
        if let Some(sampler) = variable("OTEL_TRACES_SAMPLER").filter(|name| !SAMPLERS.contains(&&**name)) {
            let samplers = SAMPLERS.join(", ");
            return Err(format!(
                "OTEL_TRACES_SAMPLER: {sampler:?} is not supported: write one of {samplers}"
            ));
        }
        let ratio = variable("OTEL_TRACES_SAMPLER_ARG");
        let is_ratio = |text: &String| text.parse().is_ok_and(|ratio: f64| (0.0..=1.0).contains(&ratio));
        if let Some(text) = ratio.filter(|text| !is_ratio(text)) {
            return Err(format!("OTEL_TRACES_SAMPLER_ARG: {text:?} is not a number from 0 to 1"));
        }
        let timeout = match first(TIMEOUTS) {
            Some((name, value)) => value
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| format!("{name}: {value:?} is not a number of milliseconds"))?,
            None => DEFAULT_TIMEOUT,
        };
        let http = build_http_client(CONNECT_TIMEOUT).map_err(|error| error.to_string())?;
        let (runtime, is_failing) = (Handle::current(), AtomicBool::new(false));
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(CollectorClient { http, runtime, timeout, is_failing })
            .with_protocol(Protocol::HttpBinary)
            .build()
            .map_err(|error| {
                format!("the export of traces can't start: {error}: check the variables OTEL_EXPORTER_OTLP_*")
            })?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_batch_exporter(WithoutTexts(exporter))
            .build();
        trace_context::enable();
        Ok(Some(Self(provider)))
    }

    #[must_use]
    pub fn tracer(&self) -> SdkTracer {
        self.0.tracer("precis")
    }

    /// Sends the last spans.
    pub async fn shut_down(self) {
        // Blocks its thread. An error was logged by the client.
        let shutdown = move || drop(self.0.shutdown_with_timeout(SHUTDOWN_TIMEOUT));
        let _ = tokio::task::spawn_blocking(shutdown).await;
    }
}

/// Returns a variable unless it is empty, which means the same as a missing one.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Returns the first of the variables that is set, with its value.
fn first(names: [&'static str; 2]) -> Option<(&'static str, String)> {
    names.into_iter().find_map(|name| Some((name, variable(name)?)))
}

/// Returns the attributes of this process. The environment can name the service otherwise.
fn resource() -> Resource {
    let builder = Resource::builder();
    let is_named = variable("OTEL_SERVICE_NAME").is_some()
        || variable("OTEL_RESOURCE_ATTRIBUTES")
            .is_some_and(|attributes| attributes.contains("service.name="));
    let builder = if is_named { builder } else { builder.with_service_name("precis") };
    builder.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))).build()
}

/// The exporter behind the rule which attributes are exported.
#[derive(Debug)]
struct WithoutTexts(SpanExporter);

impl Exporter for WithoutTexts {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        for span in &mut batch {
            span.attributes.retain(|attribute| EXPORTED.contains(&attribute.key.as_str()));
            span.events = SpanEvents::default();
            if let Status::Error { .. } = span.status {
                span.status = Status::error("");
            }
        }
        self.0.export(batch).await
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

/// The HTTP client of the exporter, whose thread is outside of the runtime.
#[derive(Debug)]
struct CollectorClient {
    http: reqwest::Client,
    runtime: Handle,
    timeout: Duration,
    /// The last attempt failed, which is logged once.
    is_failing: AtomicBool,
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let request = self.http.request(parts.method, parts.uri.to_string()).headers(parts.headers);
        let request = request.timeout(self.timeout).body(body);
        let sent =
            self.runtime.spawn(async move { request.send().await.map_err(reqwest::Error::without_url) });
        match sent.await? {
            Ok(sent) => {
                let mut response = Response::new(Bytes::new());
                (*response.status_mut(), *response.headers_mut()) = (sent.status(), sent.headers().clone());
                let problem = format!("status {}", sent.status().as_u16());
                self.log((!sent.status().is_success()).then_some(problem));
                Ok(response)
            }
            Err(error) => {
                self.log(Some(error.to_string()));
                Err(error.into())
            }
        }
    }
}

impl CollectorClient {
    /// Logs when the collector begins to fail, and when it works again.
    fn log(&self, error: Option<String>) {
        let was_failing = self.is_failing.swap(error.is_some(), Ordering::Relaxed);
        match error {
            Some(error) if !was_failing => {
                tracing::warn!(
                    error,
                    "the collector of traces takes no spans; they are dropped: check OTEL_EXPORTER_OTLP_ENDPOINT"
                );
            }
            None if was_failing => tracing::info!("the collector of traces takes spans again"),
            _ => {}
        }
    }
}
