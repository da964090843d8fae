//! Spans that a collector receives: names, parents, attributes, the header `traceparent`; and a collector that does not work.

use crate::service::{Precis, SOON, messages};
use crate::support::model_server::{Behaviour, ModelServer};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use prost::Message as _;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
/// The span of a context request.
const CONTEXT: &str = "POST /sessions/{session_id}/context";

/// A span as the collector received it.
#[derive(Clone, Debug)]
struct ReceivedSpan {
    name: String,
    trace: String,
    id: String,
    parent: String,
    kind: i32,
    attributes: BTreeMap<String, String>,
}

/// The spans received so far, their bytes, and the resource and headers of each batch.
#[derive(Default)]
struct Received {
    spans: Vec<ReceivedSpan>,
    bytes: Vec<u8>,
    resources: Vec<BTreeMap<String, String>>,
    headers: Vec<HeaderMap>,
}

/// A collector on the loopback interface.
#[derive(Clone)]
struct Collector {
    received: Arc<Mutex<Received>>,
    changed: watch::Sender<()>,
}

impl Collector {
    async fn start() -> (Self, String) {
        let collector = Self { received: Arc::default(), changed: watch::Sender::new(()) };
        let router = Router::new().fallback(receive).with_state(collector.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, router).await.expect("served") });
        (collector, url)
    }

    fn spans(&self) -> Vec<ReceivedSpan> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// Waits until spans with all of these names have arrived.
    async fn until(&self, names: &[&str]) -> Vec<ReceivedSpan> {
        let has = |spans: &[ReceivedSpan], name: &&str| spans.iter().any(|span| span.name == **name);
        let mut changed = self.changed.subscribe();
        let arrived = changed.wait_for(|()| {
            let spans = self.spans();
            names.iter().all(|name| has(&spans, name))
        });
        let arrived = tokio::time::timeout(SOON, arrived).await;
        assert!(arrived.is_ok(), "{names:?} are not all in {:#?}", self.spans());
        self.spans()
    }
}

async fn receive(
    State(collector): State<Collector>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    assert_eq!(uri.path(), "/v1/traces");
    let request = ExportTraceServiceRequest::decode(body.clone()).expect("spans");
    let text = |value: Option<AnyValue>| match value {
        Some(AnyValue::StringValue(text)) => text,
        Some(AnyValue::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    let mut received = collector.received.lock().unwrap_or_else(PoisonError::into_inner);
    received.bytes.extend(&body);
    received.headers.push(headers);
    for spans in request.resource_spans {
        let attributes = spans.resource.unwrap_or_default().attributes.into_iter();
        let attributes =
            attributes.map(|pair| (pair.key, text(pair.value.and_then(|value| value.value)))).collect();
        received.resources.push(attributes);
        for span in spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            assert!(span.events.is_empty() && span.links.is_empty(), "{span:?}");
            let attributes = span.attributes.into_iter();
            let attributes =
                attributes.map(|pair| (pair.key, text(pair.value.and_then(|value| value.value)))).collect();
            received.spans.push(ReceivedSpan {
                name: span.name,
                trace: hex::encode(span.trace_id),
                id: hex::encode(span.span_id),
                parent: hex::encode(span.parent_span_id),
                kind: span.kind,
                attributes,
            });
        }
    }
    drop(received);
    collector.changed.send_replace(());
    StatusCode::OK
}

fn traced(precis: Precis, url: &str) -> Precis {
    precis.env("OTEL_EXPORTER_OTLP_ENDPOINT", url).env("OTEL_BSP_SCHEDULE_DELAY", "50")
}

#[tokio::test]
async fn spans_of_a_context_and_its_consolidation_are_exported_without_texts() {
    let (collector, url) = Collector::start().await;
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("A xylophone was bought."));
    let precis = traced(Precis::new().model(&model.base_url()), &url)
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=sesame")
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        .set("llm.providers.scripted.api_key", "sk-hunter2-0123456789")
        .set("consolidation.keep_recent", "2")
        .set("consolidation.threshold", "4");
    let mut service = precis.start().await;
    let body = json!({"messages": messages(6), "user_id": "user-plugh", "metadata": {"m": "xyzzy"}});
    service.post("/sessions/session-plugh/exchanges", &body).await.ok(201);
    let request = json!({"system_prompt": "Say frotz.", "user_message": "Say xyzzy."});
    let request = service.post("/sessions/session-plugh/context", &request);
    let traceparent = format!("00-{TRACE}-{CALLER}-01");
    let context = request.header("traceparent", &traceparent).header("x-request-id", "id-1").await.ok(200);
    assert_eq!(context["consolidation"]["outcome"], "consolidated");
    // From the copy in memory.
    service.post("/sessions/session-plugh/context", "{}").await.ok(200);
    service.get("/sessions/nothing-plugh").await.problem(404, "session-not-found");

    let wanted = [
        CONTEXT,
        "authenticate",
        "head",
        "load",
        "assemble",
        "encode",
        "consolidation",
        "commit",
        "llm_model",
        "llm_call",
        "POST /sessions/{session_id}/exchanges",
        "GET /sessions/{session_id}",
    ];
    let spans = collector.until(&wanted).await;
    let of_trace: Vec<_> = spans.iter().filter(|span| span.trace == TRACE).collect();
    let find = |name: &str| {
        let found = of_trace.iter().find(|span| span.name == name);
        *found.unwrap_or_else(|| panic!("no {name} in the trace: {of_trace:#?}"))
    };
    let root = find(CONTEXT);
    assert_eq!((root.parent.as_str(), root.kind), (CALLER, 2), "a server in the caller's trace");
    let expected = [
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("http.route", "/sessions/{session_id}/context"),
        ("request_id", "id-1"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(root.attributes, BTreeMap::from(expected));
    for (name, parent) in [
        ("authenticate", CONTEXT),
        ("assemble", CONTEXT),
        ("encode", CONTEXT),
        ("consolidation", CONTEXT),
        ("commit", "consolidation"),
        ("llm_model", "consolidation"),
        ("llm_call", "llm_model"),
    ] {
        assert_eq!(find(name).parent, find(parent).id, "{name} in {parent}");
    }
    // Before the run, which planned with that, and after it; and the messages of the batch.
    let loads: Vec<_> = of_trace.iter().filter(|span| span.name == "load").collect();
    let within = |parent: &str| loads.iter().filter(|load| load.parent == find(parent).id).count();
    assert!(within(CONTEXT) >= 1 && within("consolidation") >= 1, "{loads:?}");
    let attributes =
        BTreeMap::from([("pool", "default"), ("model", "small")].map(|(k, v)| (k.to_owned(), v.to_owned())));
    assert_eq!(find("llm_model").attributes, attributes);

    // The model server is the next part of the trace.
    let calls = model.calls();
    assert_eq!(calls[0].header("traceparent"), format!("00-{TRACE}-{}-01", find("llm_call").id));
    // Requests without the header have traces of their own.
    let other = spans.iter().find(|span| span.name == "GET /sessions/{session_id}").expect("found");
    assert_eq!((other.parent.as_str(), other.attributes["http.response.status_code"].as_str()), ("", "404"));
    assert_ne!(other.trace, TRACE);

    service.signal("TERM");
    assert_eq!(service.ended().await.0, Some(0));
    let received = collector.received.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(received.headers.iter().all(|headers| headers["x-collector-key"] == "sesame"));
    for resource in &received.resources {
        assert_eq!(resource["service.name"], "precis");
        assert_eq!(resource["deployment.environment.name"], "test");
    }
    let bytes = String::from_utf8_lossy(&received.bytes);
    for secret in ["plugh", "xyzzy", "frotz", "xylophone", "subject", "hunter2", "sesame", "127.0.0.1"] {
        assert!(!bytes.contains(secret), "{secret} was exported");
    }
    assert!(!service.log().iter().any(|line| line.contains("sesame")));
}

/// The address accepts connections and never answers, or refuses them.
#[tokio::test]
async fn collector_that_does_not_work_neither_delays_nor_fails_requests() {
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let silent_url = format!("http://{}", silent.local_addr().expect("an address"));
    let refusing = crate::support::model_server::refused_base_url();
    for url in [silent_url.as_str(), refusing.trim_end_matches("/v1")] {
        // Each attempt lasts longer than the test, and the queue is full at once.
        let precis = traced(Precis::new(), url)
            .env("OTEL_BSP_MAX_QUEUE_SIZE", "4")
            .env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
            .env("OTEL_EXPORTER_OTLP_TIMEOUT", "60000");
        let mut service = precis.start().await;
        let requests = async {
            for _ in 0..20 {
                service.record("s", &messages(2)).await;
                service.context("s", &json!({})).await;
            }
        };
        tokio::time::timeout(SOON, requests).await.expect("requests do not wait for the collector");
        if url != silent_url {
            let warning = service.wait_for_log("the collector of traces takes no spans").await;
            assert_eq!(warning["level"], "WARN");
        }
        service.signal("TERM");
        let (code, duration) = service.ended().await;
        assert_eq!(code, Some(0));
        assert!(duration < Duration::from_secs(10), "{duration:?}");
    }
}

#[tokio::test]
async fn traces_are_off_by_default_and_invalid_variables_are_named() {
    let model = ModelServer::start().await;
    model.default(Behaviour::answer("They met."));
    // Without an endpoint, the other variables are ignored.
    let precis = Precis::new().env("OTEL_SERVICE_NAME", "memory").env("OTEL_TRACES_EXPORTER", "console");
    let precis = precis
        .model(&model.base_url())
        .set("consolidation.keep_recent", "2")
        .set("consolidation.threshold", "4");
    let service = precis.start().await;
    service.record("s", &messages(6)).await;
    let request = service.post("/sessions/s/context", json!({}));
    request.header("traceparent", format!("00-{TRACE}-{CALLER}-01")).await.ok(200);
    assert_eq!(model.calls()[0].header("traceparent"), "", "nothing is traced");

    let (_, url) = Collector::start().await;
    for (name, value) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "traceid_ratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "10%"),
    ] {
        let mut precis = traced(Precis::new(), &url).env(name, value);
        let error = precis.run().await.stderr_of_failure();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}
