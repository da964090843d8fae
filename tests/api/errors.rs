//! Unknown paths, unsupported methods, and errors that must not reveal internals.

use crate::answer::{get, on_sqlite, raw, send};
use reqwest::Method;
use serde_json::Value;

#[tokio::test]
async fn unknown_path_returns_route_not_found() {
    let app = on_sqlite(&[]).await;
    for path in [
        "/",
        "/nothing",
        "/sessions/",
        "/sessions/a/b",
        "/session/a",
        "/users/u",
        "/docs/nothing",
        "/Sessions",
    ] {
        let method = if path == "/users/u" { Method::DELETE } else { Method::GET };
        let answer = send(app.request(method, path)).await;
        if path == "/users/u" {
            answer.problem(404, "user-not-found");
            continue;
        }
        let detail = answer.problem(404, "route-not-found");
        assert!(detail.contains(path) && detail.contains("/openapi.json"), "{detail}");
    }
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS] {
        send(app.request(method, "/nothing")).await.problem(404, "route-not-found");
    }
}

/// Tries every route with every method that it does not document.
#[tokio::test]
async fn unsupported_method_returns_405_with_allow() {
    let app = on_sqlite(&[]).await;
    let document = app.get("/openapi.json").await;
    let mut rejected = 0;
    for (path, operations) in document["paths"].as_object().expect("paths") {
        let target = path.replace("{revision}", "1").replace(['{', '}'], "");
        let takes = |method: &str| {
            operations.get(method).is_some() || (method == "head" && operations.get("get").is_some())
        };
        for method in
            ["get", "head", "post", "put", "patch", "delete", "options"].into_iter().filter(|m| !takes(m))
        {
            let method = method.to_uppercase();
            let answer = raw(&app, &format!("{method} {target} HTTP/1.1"), b"").await;
            assert_eq!(answer.status, 405, "{method} {target}: {answer:?}");
            let allow: Vec<_> = answer.header("allow").expect("allow").split(',').map(str::trim).collect();
            let documented = operations.as_object().expect("operations").keys();
            let documented = documented.filter(|name| takes(name)).map(|name| name.to_uppercase());
            assert!(documented.clone().count() > 0);
            assert!(documented.clone().all(|name| allow.contains(&name.as_str())), "{target}: {allow:?}");
            assert!(!allow.contains(&method.as_str()), "{target}: {allow:?}");
            if method != "HEAD" {
                answer.problem(405, "method-not-allowed");
            }
            rejected += 1;
        }
    }
    assert!(rejected > 60, "{rejected}");
}

#[tokio::test]
async fn head_returns_the_headers_of_get() {
    let app = on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    let paths = [
        "/livez",
        "/readyz",
        "/sessions",
        "/sessions/s",
        "/sessions/s/messages",
        "/users/u/memory",
        "/openapi.json",
        "/docs/",
        "/sessions/none",
    ];
    for path in paths {
        let (head, full) = (send(app.request(Method::HEAD, path)).await, get(&app, path).await);
        assert_eq!((head.status, head.text.as_str()), (full.status, ""), "{path}");
        for name in ["content-type", "content-length", "etag"] {
            assert_eq!(head.header(name), full.header(name), "{path}: {name}");
        }
    }
}

#[tokio::test]
async fn error_shows_no_internals() {
    let app = on_sqlite(&[]).await;
    let answer = get(&app, "/sessions/%27%3B%20DROP%20TABLE%20sessions").await;
    answer.problem(404, "session-not-found");
    let problem = answer.json();
    let mut fields: Vec<_> = problem.as_object().expect("an object").keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["detail", "status", "title", "type"]);
    assert_eq!(problem["errors"], Value::Null);
}
