//! The metrics of HTTP requests: number, duration, and rejections by limit. Ids and unknown values from clients must not
//! create series.

use crate::support::app::TestApp;
use crate::support::client::TestClient;
use reqwest::Method;

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
