//! Unknown paths, unsupported methods, invalid query parameters, and errors that must not reveal internals.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use reqwest::Method;
use serde_json::{Value, json};
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

#[tokio::test]
async fn unknown_path_returns_route_not_found() {
    let app = TestApp::on_sqlite(&[]).await;
    for path in
        ["/nothing", "/sessions/", "/sessions/a/b", "/session/a", "/users/u", "/docs/nothing", "/Sessions"]
    {
        let method = if path == "/users/u" { Method::DELETE } else { Method::GET };
        let response = app.request(method, path).await;
        if path == "/users/u" {
            response.problem(404, "user-not-found");
            continue;
        }
        let detail = response.problem(404, "route-not-found");
        assert!(detail.contains(path) && detail.contains("/openapi.json"), "{detail}");
    }
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS] {
        app.request(method, "/nothing").await.problem(404, "route-not-found");
    }
}

/// Tries every route with every method that it does not document.
#[tokio::test]
async fn unsupported_method_returns_405_with_allow() {
    let app = TestApp::on_sqlite(&[]).await;
    let document = app.get("/openapi.json").await;
    let mut rejected = 0;
    for (path, operations) in document["paths"].as_object().expect("paths") {
        let target = path.replace("{revision}", "1").replace("{seq}", "1").replace(['{', '}'], "");
        let takes = |method: &str| {
            operations.get(method).is_some() || (method == "head" && operations.get("get").is_some())
        };
        for method in
            ["get", "head", "post", "put", "patch", "delete", "options"].into_iter().filter(|m| !takes(m))
        {
            let method = method.to_uppercase();
            let response = app.raw(&format!("{method} {target} HTTP/1.1"), b"").await;
            assert_eq!(response.status, 405, "{method} {target}: {response:?}");
            let allow: Vec<_> = response.header("allow").expect("allow").split(',').map(str::trim).collect();
            let documented = operations.as_object().expect("operations").keys();
            let documented = documented.filter(|name| takes(name)).map(|name| name.to_uppercase());
            assert!(documented.clone().count() > 0);
            assert!(documented.clone().all(|name| allow.contains(&name.as_str())), "{target}: {allow:?}");
            assert!(!allow.contains(&method.as_str()), "{target}: {allow:?}");
            if method != "HEAD" {
                let detail = response.problem(405, "method-not-allowed");
                assert!(detail.contains(&format!("Use {}.", allow.join(" or "))), "{detail}");
            }
            rejected += 1;
        }
    }
    assert!(rejected > 60, "{rejected}");
}

#[tokio::test]
async fn head_returns_the_headers_of_get() {
    let app = TestApp::on_sqlite(&[]).await;
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
        let (head, full) = (app.request(Method::HEAD, path).await, app.get(path).await);
        assert_eq!((head.status, head.text.as_str()), (full.status, ""), "{path}");
        for name in ["content-type", "content-length", "etag"] {
            assert_eq!(head.header(name), full.header(name), "{path}: {name}");
        }
    }
}

#[tokio::test]
async fn error_shows_no_internals() {
    let app = TestApp::on_sqlite(&[]).await;
    let response = app.get("/sessions/%27%3B%20DROP%20TABLE%20sessions").await;
    response.problem(404, "session-not-found");
    let problem = response.json();
    let mut fields: Vec<_> = problem.as_object().expect("an object").keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["detail", "status", "title", "type"]);
    assert_eq!(problem["errors"], Value::Null);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_query_parameters_are_all_reported(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_turns("s", 0..1).await;
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("/sessions", &["limit=0", "limit=1001", "limit=-1", "limit=x", "limit="], &["limit"]),
        ("/sessions", &["limit=99999999999999999999", "limit=1&limit=2"], &["limit"]),
        ("/sessions", &["user_id="], &["user_id"]),
        // 1, [1,""], [9223372036854775807,"a"], and [-300000000000000000,"a"], which is before the first time of Postgres.
        ("/sessions", &["cursor=", "cursor=zzz", "cursor=MQ", "cursor=WzEsIiJd"], &["cursor"]),
        ("/sessions", &["cursor=WzkyMjMzNzIwMzY4NTQ3NzU4MDcsImEiXQ"], &["cursor"]),
        ("/sessions", &["cursor=Wy0zMDAwMDAwMDAwMDAwMDAwMDAsImEiXQ"], &["cursor"]),
        ("/sessions", &["foo=1&limit=x&bar=2"], &["foo", "limit", "bar"]),
        ("/sessions/s/messages", &["limit=0", "limit=1001", "limit=many"], &["limit"]),
        ("/sessions/s/messages", &["after_seq=1.5"], &["after_seq"]),
        ("/sessions/s/messages", &["before_seq=99999999999999999999"], &["before_seq"]),
        ("/sessions/s/messages", &["order=up", "order=ASC"], &["order"]),
        ("/sessions/s/messages", &["cursor=zzz"], &["cursor"]),
        ("/sessions/s/messages", &["=5"], &["query"]),
        ("/sessions/s/messages", &["x"], &["x"]),
        (
            "/sessions/s/messages",
            &["order=up&limit=x&foo=7&after_seq="],
            &["order", "limit", "foo", "after_seq"],
        ),
        ("/sessions/s/revisions", &["limit=0", "limit=x"], &["limit"]),
        ("/sessions/s/revisions", &["cursor=zzz"], &["cursor"]),
        ("/sessions/s/revisions", &["after_seq=1"], &["after_seq"]),
        ("/users/u/memory/revisions", &["limit=0"], &["limit"]),
        ("/users/u/memory/revisions", &["cursor=zzz"], &["cursor"]),
        ("/users/u/memory/revisions", &["user_id=x"], &["user_id"]),
        ("/search", &["", "q=", "q=%3F%21", "q=-x"], &["q"]),
        ("/search", &["q=a&limit=0", "q=a&limit=51"], &["limit"]),
        ("/search", &["q=a&neighbours=11&role=robot"], &["neighbours", "role"]),
        ("/search", &["q=a&since=yesterday&until=2026-01-31"], &["since", "until"]),
        ("/search", &["session_id=&user_id=%00"], &["q", "session_id", "user_id"]),
        ("/search", &["q=a&days=7"], &["days"]),
    ];
    for (path, queries, expected) in cases {
        for query in *queries {
            assert_eq!(app.get(&format!("{path}?{query}")).await.fields(), *expected, "{path}?{query}");
        }
    }
    app.get("/sessions?limit=1000&").await.ok(200);
}

#[tokio::test]
async fn malformed_messages_are_rejected() {
    let app = TestApp::on_sqlite(&[]).await;
    let exchange = "POST /sessions/s/exchanges HTTP/1.1\r\ncontent-type: application/json";
    let coded = app.raw(&format!("{exchange}\r\ntransfer-encoding: gzip, chunked"), b"0\r\n\r\n").await;
    let detail = coded.problem(400, "bad-request");
    assert!(detail.contains("Transfer-Encoding"), "{detail}");
    let chunked = "transfer-encoding: chunked";
    let repeated = app.raw(&format!("{exchange}\r\n{chunked}\r\n{chunked}"), b"0\r\n\r\n").await;
    assert!(repeated.problem(400, "bad-request").contains("once"));
    let twice = app.raw("GET /sessions HTTP/1.1\r\nhost: localhost", b"").await;
    assert!(twice.problem(400, "bad-request").contains("Host"));
    let mut stream = app.connect().await;
    stream.write_all(b"GET /sessions HTTP/1.1\r\nconnection: close\r\n\r\n").await.expect("sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).await.expect("a response");
    assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
}

#[tokio::test]
async fn each_revision_has_one_path() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record("s", &["user", "assistant"].map(|role| json!({ "role": role, "content": "x" }))).await;
    app.get("/sessions/s/revisions/1").await.problem(404, "revision-not-found");
    for alias in ["+1", "01", "-0", "1.0", "%2B1"] {
        let response = app.get(&format!("/sessions/s/revisions/{alias}")).await;
        assert_eq!(response.fields(), ["revision"], "{alias}");
    }
}

#[tokio::test]
async fn empty_object_needs_its_media_type() {
    let app = TestApp::on_sqlite(&[]).await;
    for path in ["/sessions/s/consolidations", "/sessions/s/revisions/0/restore"] {
        let text = app.request(Method::POST, path).header("content-type", "text/plain").body("{}");
        text.await.problem(415, "unsupported-media-type");
        app.post(path, "{}").await.problem(404, "session-not-found");
    }
}

#[tokio::test]
async fn slash_at_the_end_gets_advice() {
    let app = TestApp::on_sqlite(&[]).await;
    for (path, without) in [("/sessions/", "/sessions"), ("/sessions/a/messages/", "/sessions/a/messages")] {
        let detail = app.get(path).await.problem(404, "route-not-found");
        assert!(detail.contains(&format!("Leave out the slash at the end: {without}.")), "{detail}");
        assert!(!detail.contains("%2F"), "{detail}");
    }
    for path in ["/nothing/", "/.well-known/", "/mcp/tools/"] {
        let detail = app.get(path).await.problem(404, "route-not-found");
        assert!(!detail.contains("Leave out"), "there is no {path} without the slash either: {detail}");
    }
    let detail = app.get("/sessions/a/b/messages").await.problem(404, "route-not-found");
    assert!(detail.contains("%2F") && detail.contains("/docs"), "{detail}");
}

#[tokio::test]
async fn unknown_field_of_a_body_is_reported_with_the_valid_names() {
    let app = TestApp::on_sqlite(&[]).await;
    for (path, names) in [
        ("/sessions/s/context", ["system_prompt", "user_message", "user_id"]),
        ("/sessions/s/exchanges", ["user_message", "assistant_reply", "messages"]),
    ] {
        let response = app.post(path, r#"{"usr_message":"a"}"#).await;
        assert!(response.fields().contains(&"usr_message".to_owned()), "{response}");
        let errors = response.json()["errors"].clone();
        let error = errors.as_array().expect("errors").iter().find(|error| error["field"] == "usr_message");
        let detail = error.expect("it is reported")["detail"].as_str().expect("a text").to_owned();
        assert!(names.iter().all(|name| detail.contains(name)), "{detail}");
    }
}
