//! Protection in browsers: security headers of all responses, and the web pages that may send requests.

use crate::answer::{Answer, get, on_sqlite, post, raw, send};
use crate::support::app::TestApp;
use crate::support::backend::Backend;
use precis::domain::api_key::Scope;
use reqwest::Method;

#[tokio::test]
async fn every_response_has_security_headers() {
    let app = on_sqlite(&[("limits.max_body_bytes", "1000")]).await;
    app.record_turns("s", 0..1).await;
    let mut answers = Vec::new();
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
        answers.push(get(&app, path).await);
    }
    answers.push(send(app.request(Method::PUT, "/livez")).await);
    answers.push(post(&app, "/sessions/s/context", "x".repeat(1001)).await);
    answers.push(raw(&app, "GET /sessions/%zz HTTP/1.1", b"").await);
    for answer in &answers {
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{name}: {answer:?}");
        }
        let policy = answer.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
        assert_eq!(answer.header("server"), None);
    }
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    for status in [200, 400, 404, 405, 413, 422] {
        assert!(statuses.contains(&status), "{status} is not among {statuses:?}");
    }
}

#[tokio::test]
async fn documentation_page_may_run_only_its_own_scripts() {
    let app = on_sqlite(&[]).await;
    let page = get(&app, "/docs/").await;
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("script-src 'self';") && policy.contains("default-src 'none'"), "{policy}");
    // The page contains nothing that the policy forbids.
    for part in page.text.split("<script").skip(1) {
        assert!(part.starts_with(" src=\"./"), "a script in the page: {part}");
    }
    assert!(!page.text.contains("http://") && !page.text.contains("https://"), "{page:?}");
    assert_eq!(get(&app, "/docs/swagger-ui.css").await.header("x-content-type-options"), Some("nosniff"));
}

const PAGE: &str = "https://app.example.com";

/// Sends the preflight request of a browser for a page.
async fn preflight(app: &TestApp, origin: &str) -> Answer {
    let request = app.request(Method::OPTIONS, "/sessions/s/exchanges");
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    send(request.header("access-control-request-headers", "content-type,authorization")).await
}

async fn from_page(app: &TestApp, path: &str, origin: &str) -> Answer {
    send(app.request(Method::GET, path).header("origin", origin)).await
}

fn allowed(answer: &Answer) -> Option<&str> {
    answer.header("access-control-allow-origin")
}

#[tokio::test]
async fn pages_are_rejected_without_cors_origins() {
    let app = on_sqlite(&[]).await;
    for origin in [PAGE, "null", "http://localhost:3000"] {
        let answer = preflight(&app, origin).await;
        answer.problem(405, "method-not-allowed");
        assert_eq!(allowed(&answer), None);
        let answer = from_page(&app, "/sessions", origin).await;
        let detail = answer.problem(403, "origin-not-allowed");
        assert!(detail.contains(origin) && detail.contains("server.cors_origins"), "{detail}");
        assert_eq!(allowed(&answer), None);
    }
    let own = from_page(&app, "/sessions", &app.url).await;
    assert_eq!((own.status, allowed(&own)), (200, None));
}

/// Requests that a page can send without a preflight: forms and images.
#[tokio::test]
async fn cross_site_requests_without_key_are_rejected() {
    let app = on_sqlite(&[]).await;
    let body = r#"{"user_message":"a","assistant_reply":"b"}"#;
    let form = app.request(Method::POST, "/sessions/s/exchanges").header("content-type", "application/json");
    send(form.header("origin", PAGE).body(body)).await.problem(403, "origin-not-allowed");
    for site in ["cross-site", "same-site"] {
        let image = app.request(Method::GET, "/sessions").header("sec-fetch-site", site);
        send(image).await.problem(403, "origin-not-allowed");
    }
    get(&app, "/sessions/s").await.problem(404, "session-not-found");
    // Routes without user data are open to all pages.
    for path in ["/livez", "/docs/", "/openapi.json"] {
        let link = app.request(Method::GET, path).header("sec-fetch-site", "cross-site");
        assert_eq!(send(link).await.status, 200, "{path}");
    }
}

/// A foreign host name that resolves to this machine (DNS rebinding).
#[tokio::test]
async fn unknown_host_is_rejected_without_keys() {
    let other = |app: &TestApp, host: &str| send(app.request(Method::GET, "/sessions").header("host", host));
    let app = on_sqlite(&[]).await;
    for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "precis"] {
        let detail = other(&app, host).await.problem(403, "host-not-allowed");
        assert!(detail.contains("server.allowed_hosts"), "{detail}");
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]:80", "LOCALHOST:8080"] {
        other(&app, host).await.ok(200);
    }
    raw(&app, "GET http://evil.example/sessions HTTP/1.1", b"").await.problem(403, "host-not-allowed");
    let app = on_sqlite(&[("server.allowed_hosts", "precis,memory.example")]).await;
    for host in ["precis:8080", "memory.example", "localhost"] {
        other(&app, host).await.ok(200);
    }
    other(&app, "evil.example").await.problem(403, "host-not-allowed");
    let app = on_sqlite(&[("server.allow_unauthenticated", "true"), ("server.allowed_hosts", "*")]).await;
    other(&app, "evil.example").await.ok(200);
}

/// A page does not have a key and cannot guess one.
#[tokio::test]
async fn requests_with_key_may_use_any_host_and_origin() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let key = backend.key("acme", Scope::Read).await;
    let request = app.request(Method::GET, "/sessions").bearer_auth(key.expose());
    send(request.header("host", "memory.example").header("origin", PAGE)).await.ok(200);
    let stranger = app.request(Method::GET, "/sessions").header("host", "evil.example");
    send(stranger).await.problem(401, "unauthorized");
}

#[tokio::test]
async fn pages_in_cors_origins_may_call() {
    let other = "http://localhost:3000";
    let app = on_sqlite(&[("server.cors_origins", &format!("{PAGE},{other}"))]).await;
    for origin in [PAGE, other] {
        let answer = preflight(&app, origin).await;
        assert_eq!((answer.status, allowed(&answer)), (200, Some(origin)));
        let header = |name: &str| answer.header(name).unwrap_or_default().to_lowercase();
        assert!(
            ["GET", "POST", "PUT", "PATCH", "DELETE"]
                .iter()
                .all(|method| { header("access-control-allow-methods").contains(&method.to_lowercase()) })
        );
        for name in ["authorization", "content-type", "idempotency-key", "if-match", "x-request-id"] {
            assert!(header("access-control-allow-headers").contains(name), "{name}: {answer:?}");
        }
        assert_eq!(answer.header("access-control-allow-credentials"), None);
        // Pages can read errors, too.
        for path in ["/sessions", "/sessions/none", "/nothing", "/sessions?limit=x"] {
            let answer = from_page(&app, path, origin).await;
            assert_eq!(allowed(&answer), Some(origin), "{path}");
            assert!(answer.header("vary").is_some_and(|vary| vary.contains("origin")), "{answer:?}");
            let exposed = answer.header("access-control-expose-headers").expect("a list");
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
