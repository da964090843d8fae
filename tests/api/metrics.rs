//! The metrics of HTTP requests: number, duration, and rejections by limit. Ids and unknown values from clients must not
//! create series.

use crate::support::app::TestApp;
use crate::support::client::TestClient;
use reqwest::Method;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the value of a sample; 0 if there is none.
async fn sample(app: &TestClient, sample: &str) -> u64 {
    let text = app.get("/metrics").await.text;
    let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().expect("a number"))
}

async fn requests(app: &TestClient, route: &str, method: &str, status: u16) -> u64 {
    let labels = format!("route=\"{route}\",method=\"{method}\",status=\"{status}\"");
    sample(app, &format!("precis_http_requests_total{{{labels}}}")).await
}

async fn rejected(app: &TestClient, limit: &str) -> u64 {
    sample(app, &format!("precis_requests_rejected_total{{limit=\"{limit}\"}}")).await
}

#[tokio::test]
async fn requests_are_counted_by_route_method_and_status() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("xylophon-1", 0..2).await;
    app.record_turns("xylophon-2", 0..1).await;
    for session in ["xylophon-1", "xylophon-2", "xylophon-3"] {
        let _ = app.get(&format!("/sessions/{session}")).await;
    }
    assert_eq!(app.get("/sessions/xylophon-1?xylophon-4=").await.fields(), ["?xylophon-4"]);
    app.get("/xylophon").await.problem(404, "route-not-found");
    let made_up = Method::from_bytes(b"XYLOPHON").expect("a method");
    app.request(made_up, "/livez").await.problem(405, "method-not-allowed");
    for (route, method, status, count) in [
        ("/sessions/{session_id}/exchanges", "POST", 201, 3),
        ("/sessions/{session_id}", "GET", 200, 2),
        ("/sessions/{session_id}", "GET", 404, 1),
        ("/sessions/{session_id}", "GET", 422, 1),
        ("none", "GET", 404, 1),
        ("/livez", "other", 405, 1),
    ] {
        assert_eq!(requests(&app, route, method, status).await, count, "{method} {route} {status}");
    }
    let name = "precis_http_request_duration_seconds";
    let labels = "route=\"/sessions/{session_id}/exchanges\",method=\"POST\"";
    assert_eq!(sample(&app, &format!("{name}_count{{{labels}}}")).await, 3);
    assert_eq!(sample(&app, &format!("{name}_bucket{{{labels},le=\"+Inf\"}}")).await, 3);
    // Some requests take less time than the smallest bucket of the model histograms.
    assert!(app.get("/metrics").await.text.contains(&format!("{name}_bucket{{{labels},le=\"0.001\"}}")));
    let text = app.get("/metrics").await.text.to_lowercase();
    assert!(!text.contains("xylophon"), "{text}");
}

#[tokio::test]
async fn rejections_are_counted_by_limit() {
    let set = [
        ("limits.requests_per_second", "1"),
        ("limits.request_burst", "2"),
        ("limits.max_body_bytes", "1000"),
        ("limits.max_import_bytes", "1000"),
    ];
    let app = TestApp::on_sqlite(&set).await;
    assert_eq!(rejected(&app, "limits.max_body_bytes").await, 0);
    app.post("/sessions/s/exchanges", "x".repeat(1001)).await.problem(413, "body-too-large");
    assert_eq!(rejected(&app, "limits.max_body_bytes").await, 1);
    let import =
        app.request(Method::POST, "/sessions/s/import").header("content-type", "application/x-ndjson");
    import.body("x".repeat(1001)).await.problem(413, "body-too-large");
    assert_eq!(rejected(&app, "limits.max_import_bytes").await, 1);
    let mut too_often = 0;
    for _ in 0..20 {
        too_often += u64::from(app.get("/sessions").await.status == 429);
    }
    assert!(too_often > 0);
    assert_eq!(rejected(&app, "limits.requests_per_second").await, too_often);
    let other = TestApp::on_sqlite(&[]).await;
    assert_eq!(rejected(&other, "limits.max_body_bytes").await, 0, "each service counts its own");
}

/// Returns the lines of the metrics of a service with an upstream that has answered contexts and rejected a request.
async fn all_metrics() -> String {
    let set = [("limits.max_body_bytes", "1000"), ("proxy.openai.base_url", "http://127.0.0.1:9/v1")];
    let app = TestApp::on_sqlite(&set).await;
    app.record_turns("s", 0..2).await;
    app.post("/sessions/s/context", "{}").await.ok(200);
    app.post("/sessions/s/exchanges", "x".repeat(1001)).await.problem(413, "body-too-large");
    app.get("/metrics").await.text
}

/// Returns the names of metrics in a text, without the suffixes of histograms.
fn metric_names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("precis_") || word.starts_with("process_"));
    // The remainder of `precis_llm_…` in the documentation, and of label values, is no name.
    let names = names.filter(|word| !word.ends_with('_'));
    names
        .map(|name| {
            ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
        })
        .collect()
}

/// Returns the metrics of a text by the names of their labels.
fn labels(metrics: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in metrics.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, rest) = line.split_once(['{', ' ']).expect("a sample");
        let of_metric = labels.entry(name).or_default();
        if line.contains('{') {
            let (all, _) = rest.rsplit_once('}').expect("labels");
            of_metric.extend(all.split("\",").filter_map(|label| Some(label.split_once("=\"")?.0)));
        }
    }
    labels
}

/// Returns each selector of an expression: the name of the metric and the labels that it compares.
fn selectors(expression: &str) -> Vec<(&str, Vec<&str>)> {
    let names = expression.match_indices("precis_").chain(expression.match_indices("process_"));
    let selector = |(at, _): (usize, &str)| {
        let rest = &expression[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let Some(rest) = rest.strip_prefix('{') else { return (name, Vec::new()) };
        // The values may contain braces, as in the templates of routes.
        let mut compared = Vec::new();
        let mut rest = rest;
        while let Some((label, after)) = rest.split_once('"') {
            compared.push(label.trim_start_matches(',').trim_end_matches(['=', '~', '!']));
            rest = after.split_once('"').map_or("", |(_, after)| after);
            if rest.starts_with('}') {
                break;
            }
        }
        (name, compared)
    };
    names.map(selector).collect()
}

#[tokio::test]
async fn documentation_lists_all_metrics_and_no_others() {
    let metrics = all_metrics().await;
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let (documented, models) = (include_str!("../../docs/metrics.md"), include_str!("../../docs/models.md"));
    let documented: BTreeSet<_> = &metric_names(documented) | &metric_names(models);
    // The library names those of the process.
    let existing: BTreeSet<&str> = types.filter(|name| !name.starts_with("process_")).collect();
    assert_eq!(documented, existing);
    for name in ["process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"] {
        assert!(metrics.contains(&format!("\n{name} ")), "{name}");
    }
}

#[tokio::test]
async fn dashboard_and_alerts_use_metrics_and_labels_that_exist() {
    /// Prometheus adds these.
    const TARGET: [&str; 2] = ["job", "instance"];
    let metrics = all_metrics().await;
    let labels = labels(&metrics);
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../deploy/grafana/precis.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut expressions: Vec<String> =
        targets.map(|target| target["expr"].as_str().expect("an expression").to_owned()).collect();
    assert!(expressions.len() > 20);
    // Only the expressions: texts name settings and values, too.
    let alerts = include_str!("../../deploy/prometheus/alerts.yml").split("expr: ").skip(1);
    expressions.extend(alerts.map(|rule| rule.split("labels:").next().unwrap_or_default().to_owned()));
    for expression in &expressions {
        for (name, compared) in selectors(expression) {
            let known = labels.get(name).unwrap_or_else(|| panic!("no {name}: {expression}"));
            for label in compared {
                assert!(known.contains(label) || TARGET.contains(&label), "{name}: {label}: {known:?}");
            }
        }
    }
}
