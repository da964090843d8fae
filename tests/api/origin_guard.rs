//! Protection in browsers: security headers of all responses, and the web pages that may send requests.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient};
use precis::domain::api_key::Scope;
use reqwest::Method;

#[tokio::test]
async fn every_response_has_security_headers() {
    let app = TestApp::on_sqlite(&[("limits.max_body_bytes", "1000")]).await;
    app.record_turns("s", 0..1).await;
    let mut responses = Vec::new();
    for path in [
        "/livez",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/sessions",
        "/sessions/s/messages",
        "/sessions/none",
        "/sessions?limit=x",
        "/users/u/memory",
        "/nothing",
        "/docs/nothing",
    ] {
        responses.push(app.get(path).await);
    }
    responses.push(app.request(Method::PUT, "/livez").await);
    responses.push(app.post("/sessions/s/context", "x".repeat(1001)).await);
    responses.push(app.raw("GET /sessions/%zz HTTP/1.1", b"").await);
    for response in &responses {
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
        ] {
            assert_eq!(response.header(name), Some(value), "{name}: {response:?}");
        }
        let policy = response.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
        assert_eq!(response.header("server"), None);
    }
    let statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    for status in [200, 400, 404, 405, 413, 422] {
        assert!(statuses.contains(&status), "{status} is not among {statuses:?}");
    }
}

#[tokio::test]
async fn documentation_page_may_run_only_its_own_scripts() {
    let app = TestApp::on_sqlite(&[]).await;
    let page = app.get("/docs/").await;
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("script-src 'self';") && policy.contains("default-src 'none'"), "{policy}");
    // The page contains nothing that the policy forbids.
    for part in page.text.split("<script").skip(1) {
        assert!(part.starts_with(" src=\"./"), "a script in the page: {part}");
    }
    assert!(!page.text.contains("http://") && !page.text.contains("https://"), "{page:?}");
    assert_eq!(app.get("/docs/swagger-ui.css").await.header("x-content-type-options"), Some("nosniff"));
}

const PAGE: &str = "https://app.example.com";

/// Sends the preflight request of a browser for a page.
async fn preflight(app: &TestClient, origin: &str) -> Response {
    let request = app.request(Method::OPTIONS, "/sessions/s/exchanges");
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    request.header("access-control-request-headers", "content-type,authorization").await
}

async fn from_page(app: &TestClient, path: &str, origin: &str) -> Response {
    app.get(path).header("origin", origin).await
}

fn allowed(response: &Response) -> Option<&str> {
    response.header("access-control-allow-origin")
}

#[tokio::test]
async fn pages_are_rejected_without_cors_origins() {
    let app = TestApp::on_sqlite(&[]).await;
    for origin in [PAGE, "null", "http://localhost:3000"] {
        let response = preflight(&app, origin).await;
        response.problem(403, "origin-not-allowed");
        assert_eq!(allowed(&response), None);
        let response = from_page(&app, "/sessions", origin).await;
        let detail = response.problem(403, "origin-not-allowed");
        assert!(detail.contains(origin) && detail.contains("server.cors_origins"), "{detail}");
        assert_eq!(allowed(&response), None);
    }
    let own = from_page(&app, "/sessions", &app.url).await;
    assert_eq!((own.status, allowed(&own)), (200, None));
}

/// Requests that a page can send without a preflight: forms and images.
#[tokio::test]
async fn cross_site_requests_without_key_are_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    let body = r#"{"user_message":"a","assistant_reply":"b"}"#;
    let form = app.request(Method::POST, "/sessions/s/exchanges").header("content-type", "application/json");
    form.header("origin", PAGE).body(body).await.problem(403, "origin-not-allowed");
    for site in ["cross-site", "same-site"] {
        let image = app.get("/sessions").header("sec-fetch-site", site);
        image.await.problem(403, "origin-not-allowed");
    }
    app.get("/sessions/s").await.problem(404, "session-not-found");
    // Routes without user data are open to all pages.
    for path in ["/livez", "/docs/", "/openapi.json"] {
        let link = app.get(path).header("sec-fetch-site", "cross-site");
        assert_eq!(link.await.status, 200, "{path}");
    }
}

/// A foreign host name that resolves to this machine (DNS rebinding).
#[tokio::test]
async fn unknown_host_is_rejected_without_keys() {
    let other = |app: &TestClient, host: &str| app.get("/sessions").header("host", host);
    let app = TestApp::on_sqlite(&[]).await;
    for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "precis"] {
        let detail = other(&app, host).await.problem(403, "host-not-allowed");
        assert!(detail.contains("server.allowed_hosts"), "{detail}");
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]:80", "LOCALHOST:8080"] {
        other(&app, host).await.ok(200);
    }
    app.raw("GET http://evil.example/sessions HTTP/1.1", b"").await.problem(403, "host-not-allowed");
    let app = TestApp::on_sqlite(&[("server.allowed_hosts", "precis,memory.example")]).await;
    for host in ["precis:8080", "memory.example", "localhost"] {
        other(&app, host).await.ok(200);
    }
    other(&app, "evil.example").await.problem(403, "host-not-allowed");
    let app =
        TestApp::on_sqlite(&[("server.allow_unauthenticated", "true"), ("server.allowed_hosts", "*")]).await;
    other(&app, "evil.example").await.ok(200);
}

/// A page does not have a key and cannot guess one.
#[tokio::test]
async fn requests_with_key_may_use_any_host_and_origin() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let key = backend.key("acme", Scope::Read).await;
    let request = app.with_key(key.expose()).get("/sessions");
    request.header("host", "memory.example").header("origin", PAGE).await.ok(200);
    let stranger = app.get("/sessions").header("host", "evil.example");
    stranger.await.problem(401, "unauthorized");
}

#[tokio::test]
async fn requests_from_pages_in_cors_origins_are_accepted() {
    let other = "http://localhost:3000";
    let app = TestApp::on_sqlite(&[("server.cors_origins", &format!("{PAGE},{other}"))]).await;
    for origin in [PAGE, other] {
        let response = preflight(&app, origin).await;
        assert_eq!((response.status, allowed(&response)), (200, Some(origin)));
        let header = |name: &str| response.header(name).unwrap_or_default().to_lowercase();
        assert!(
            ["GET", "POST", "PUT", "PATCH", "DELETE"]
                .iter()
                .all(|method| { header("access-control-allow-methods").contains(&method.to_lowercase()) })
        );
        for name in ["authorization", "content-type", "idempotency-key", "if-match", "x-request-id"] {
            assert!(header("access-control-allow-headers").contains(name), "{name}: {response:?}");
        }
        assert_eq!(response.header("access-control-allow-credentials"), None);
        // Pages can read errors, too.
        for path in ["/sessions", "/sessions/none", "/nothing", "/sessions?limit=x"] {
            let response = from_page(&app, path, origin).await;
            assert_eq!(allowed(&response), Some(origin), "{path}");
            assert!(response.header("vary").is_some_and(|vary| vary.contains("origin")), "{response:?}");
            let exposed = response.header("access-control-expose-headers").expect("a list");
            for name in ["etag", "retry-after", "idempotent-replayed", "x-request-id"] {
                assert!(exposed.contains(name), "{name}: {exposed}");
            }
        }
    }
    for origin in
        ["https://evil.example", "http://app.example.com", "https://app.example.com.evil.example", "null"]
    {
        assert_eq!(allowed(&preflight(&app, origin).await), None, "{origin}");
        assert_eq!(allowed(&from_page(&app, "/sessions", origin).await), None, "{origin}");
    }
}
