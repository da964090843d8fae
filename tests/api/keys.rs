//! API keys: requests with and without a key, and the scope that each route requires.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::{Response, TestClient, assert_includes};
use precis::domain::api_key::{ApiKey, RANDOM_BYTES, Scope};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use test_case::test_case;

/// Returns every operation of the document: method, path with values for its parameters, path template, and scope.
fn operations() -> Vec<(Method, String, String, Option<Scope>)> {
    let document = serde_json::to_value(precis::http::openapi()).expect("JSON");
    let mut found = Vec::new();
    for (template, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let method: Method = method.to_uppercase().parse().expect("a method");
            let scope =
                operation["security"][0]["key"][0].as_str().map(|name| Scope::parse(name).expect("a scope"));
            let path = template.replace("{revision}", "1").replace("{seq}", "1").replace(['{', '}'], "");
            for status in ["401", "403"] {
                assert_eq!(
                    operation["responses"][status].is_object(),
                    scope.is_some(),
                    "{method} {template}"
                );
            }
            found.push((method, path, template.clone(), scope));
        }
    }
    assert!(found.len() >= 17);
    found
}

async fn ask(app: &TestClient, method: &Method, path: &str) -> Response {
    app.request(method.clone(), path).await
}

/// The contract: routes that read need `read`, routes that write need `write`, erasing and restoring need `admin`.
#[test]
fn each_route_requires_the_scope_of_the_contract() {
    let schemes = serde_json::to_value(precis::http::openapi()).expect("JSON");
    let scheme = &schemes["components"]["securitySchemes"]["key"];
    assert_includes(scheme, &json!({"type": "http", "scheme": "bearer"}));
    for (method, _, template, scope) in operations() {
        let expected = match (method.as_str(), template.as_str()) {
            (_, "/livez" | "/readyz") => None,
            // Nothing is lost: the messages remain in the branch.
            ("DELETE", path) if path.ends_with("/messages") => Some(Scope::Write),
            (_, "/metrics" | "/models") | ("DELETE", _) => Some(Scope::Admin),
            (_, path) if path.ends_with("/restore") => Some(Scope::Admin),
            ("POST", path) if path.ends_with("/revisions") => Some(Scope::Admin),
            ("PUT", path) if path.ends_with("/retention") => Some(Scope::Admin),
            ("GET", _) => Some(Scope::Read),
            // The tool that writes needs a larger scope; the modules `tools` and `mcp` test it.
            (_, path) if path.contains("/tools/") => Some(Scope::Read),
            _ => Some(Scope::Write),
        };
        assert_eq!(scope, expected, "{method} {template}");
    }
}

#[tokio::test]
async fn each_route_enforces_its_documented_scope() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let mut keys = Vec::new();
    for scope in Scope::ALL {
        keys.push((scope, app.with_key(backend.key("acme", scope).await.expose())));
    }
    for (method, path, _, needed) in operations() {
        let at = format!("{method} {path}");
        let without = ask(&app, &method, &path).await;
        let Some(needed) = needed else {
            assert_eq!(without.status, 200, "{at}");
            continue;
        };
        without.problem(401, "unauthorized");
        // Without a key, a client does not learn which methods a path has.
        ask(&app, &Method::TRACE, &path).await.problem(401, "unauthorized");
        for (scope, app) in &keys {
            let response = ask(app, &method, &path).await;
            if scope.covers(needed) {
                assert!(![401, 403].contains(&response.status), "{at} with {scope}: {response:?}");
            } else {
                let detail = response.problem(403, "forbidden");
                assert!(
                    detail.contains(&format!("scope {needed}")) && detail.contains(scope.as_str()),
                    "{detail}"
                );
            }
        }
    }
}

/// The pages and the document need no key. All other paths and methods need one.
#[tokio::test]
async fn undocumented_paths_need_a_key() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let reader = app.with_key(backend.key("acme", Scope::Read).await.expose());
    for path in ["/", "/docs/", "/openapi.json", "/ui/", "/ui/app.js"] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
        ask(&app, &Method::POST, path).await.problem(401, "unauthorized");
        ask(&reader, &Method::POST, path).await.problem(405, "method-not-allowed");
    }
    for path in ["/docs/nothing", "/ui/nothing"] {
        ask(&app, &Method::GET, path).await.problem(401, "unauthorized");
        ask(&reader, &Method::GET, path).await.problem(404, "route-not-found");
    }
    // MCP clients look here for an authorization server before they send their key.
    ask(&app, &Method::GET, "/.well-known/nothing").await.problem(404, "route-not-found");
    for path in ["/nothing", "/sessions/a/b"] {
        for method in [Method::GET, Method::POST, Method::DELETE] {
            ask(&app, &method, path).await.problem(401, "unauthorized");
            ask(&reader, &method, path).await.problem(404, "route-not-found");
        }
    }
    ask(&app, &Method::PUT, "/sessions").await.problem(401, "unauthorized");
    ask(&reader, &Method::PUT, "/sessions").await.problem(405, "method-not-allowed");
    ask(&app, &Method::HEAD, "/livez").await.ok(200);
    assert_eq!(ask(&app, &Method::HEAD, "/sessions").await.status, 401);
    assert_eq!(ask(&reader, &Method::HEAD, "/sessions").await.status, 200);
}

#[tokio::test]
async fn all_invalid_keys_get_the_same_response() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let (key, revoked) = (backend.key("acme", Scope::Admin).await, backend.key("acme", Scope::Admin).await);
    backend.revoke(revoked.id()).await;
    let key = key.expose();
    let with = |value: String| app.get("/sessions").header("authorization", value);
    for value in [format!("Bearer {key}"), format!("bearer  {key}"), format!("BEARER {key}")] {
        with(value).await.ok(200);
    }
    let none = app.get("/sessions").await;
    assert_eq!(none.header("www-authenticate"), Some("Bearer"));
    none.problem(401, "unauthorized");
    let unknown = ApiKey::new(&[7; RANDOM_BYTES]);
    let other_secret = ApiKey::parse(key).expect("a key").id().as_str().to_owned() + &unknown.expose()[15..];
    for token in [
        unknown.expose(),
        revoked.expose(),
        &key[..61],
        &format!("{key}0"),
        &key.to_uppercase(),
        &format!("precis_{other_secret}"),
        "precis_",
        "x",
        "sk-0123456789",
    ] {
        let response = with(format!("Bearer {token}")).await;
        assert_eq!((response.status, &response.text), (401, &none.text), "{token}");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    }
    for value in [
        key.to_owned(),
        format!("Basic {key}"),
        "Bearer".to_owned(),
        format!("Bearer {key} {key}"),
        String::new(),
    ] {
        let response = with(value.clone()).await;
        let detail = response.problem(401, "unauthorized");
        assert!(detail.contains("authorization") && !detail.contains(key), "{detail}");
        assert_eq!(response.header("www-authenticate"), Some("Bearer"), "{value}");
    }
    let twice = app.get("/sessions").header("authorization", format!("Bearer {key}"));
    twice.header("authorization", format!("Bearer {key}")).await.problem(401, "unauthorized");
    // A key in the query is not accepted, because logs contain queries.
    app.get(&format!("/sessions?access_token={key}")).await.problem(401, "unauthorized");
}

#[tokio::test]
async fn service_without_keys_is_open() {
    let app = TestApp::on_sqlite(&[]).await;
    app.record_turns("s", 0..1).await;
    for value in ["Bearer sk-none", "Basic dTpw", "x"] {
        app.get("/sessions/s").header("authorization", value).await.ok(200);
    }
    // A request with a precis key is meant for its tenant and must not write to another one.
    let key = ApiKey::new(&[7; RANDOM_BYTES]);
    for key in [key.expose(), "precis_x"] {
        app.with_key(key).get("/sessions/s").await.problem(401, "unauthorized");
    }
}

/// The request is rejected before its body arrives. The connection is closed, because the body would follow on it.
#[tokio::test]
async fn unauthorized_body_is_not_read() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let reader = backend.key("acme", Scope::Read).await;
    let head =
        "POST /sessions/s/exchanges HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 1000";
    let response = app.raw(head, b"").await;
    response.problem(401, "unauthorized");
    assert_eq!(response.header("connection"), Some("close"));
    let response = app.raw(&format!("{head}\r\nauthorization: Bearer {}", reader.expose()), b"").await;
    response.problem(403, "forbidden");
    let body = "x".repeat(100_000);
    let response = app.request(Method::POST, "/sessions/s/exchanges").body(body).await;
    assert_eq!((response.status, response.header("connection")), (401, Some("close")));
    assert_eq!(app.get("/sessions").await.header("connection"), None, "nothing is left to be read");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_key_is_rejected_by_all_replicas_within_seconds(backend: Backend) {
    let replicas = [TestApp::start(&backend, &[]).await, TestApp::start(&backend, &[]).await];
    let (key, other) = (backend.key("acme", Scope::Read).await, backend.key("acme", Scope::Read).await);
    for replica in &replicas {
        for key in [&key, &other] {
            replica.with_key(key.expose()).get("/sessions").await.ok(200);
        }
    }
    backend.revoke(key.id()).await;
    let began = Instant::now();
    for replica in &replicas {
        while replica.with_key(key.expose()).get("/sessions").await.status != 401 {
            assert!(began.elapsed() < Duration::from_secs(5), "it still passes");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        replica.with_key(other.expose()).get("/sessions").await.ok(200);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_key_closes_an_open_service(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    app.record_turns("s", 0..1).await;
    let key = backend.key("acme", Scope::Admin).await;
    let acme = app.with_key(key.expose());
    assert_eq!(acme.get("/sessions").await["items"], json!([]), "a key works at once, and sees its own only");
    let began = Instant::now();
    while app.get("/sessions").await.status != 401 {
        assert!(began.elapsed() < Duration::from_secs(5), "it is still open");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Sessions stored without a key belong to the default tenant.
    let default = app.with_key(backend.key("default", Scope::Admin).await.expose());
    assert_eq!(default.get("/sessions/s").await["last_seq"], 2);
    acme.get("/sessions/s").await.problem(404, "session-not-found");
    backend.revoke(key.id()).await;
    while acme.get("/sessions").await.status != 401 {
        assert!(began.elapsed() < Duration::from_secs(9), "it still passes");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    app.get("/sessions").await.problem(401, "unauthorized");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_with_equal_ids_are_isolated(backend: Backend) {
    let app =
        TestApp::start(&backend, &[("consolidation.threshold", "4"), ("consolidation.keep_recent", "1")])
            .await;
    // Names that an imprecise comparison would confuse.
    let mut tenants = Vec::new();
    for name in ["acme", "Acme", "acme ", "default"] {
        let (admin, writer) = (backend.key(name, Scope::Admin).await, backend.key(name, Scope::Write).await);
        tenants.push((name, app.with_key(admin.expose()), app.with_key(writer.expose())));
    }
    let of = |name: &str, turn: usize| json!({"user_message": format!("[{name}] asks {turn}"), "assistant_reply": format!("[{name}] is told {turn}"), "user_id": "ada"});
    let foreign = |own: &str, text: &str| {
        tenants.iter().any(|(name, ..)| *name != own && text.contains(&format!("[{name}]")))
    };
    for turn in 0..3 {
        for (name, _, app) in &tenants {
            let request = app.request(Method::POST, "/sessions/s/exchanges").header("idempotency-key", "k");
            let (request, repeated) = (request.json(of(name, 0)), turn > 0);
            let response = request.await;
            assert_eq!(response.header("idempotent-replayed").is_some(), repeated);
            assert_eq!(response.ok(201)["first_seq"], 1);
            let recorded = app.post("/sessions/s/exchanges", of(name, turn + 1)).await;
            assert_eq!(recorded["last_seq"], 2 * (turn + 2));
            let memory = json!({"content": format!("[{name}] remembers {turn}")}).to_string();
            assert_eq!(app.put("/users/ada/memory", memory).await.ok(200)["version"], turn + 1);
        }
    }
    for (name, _, app) in &tenants {
        let context = app.context("s", &json!({"user_id": "ada"})).await;
        assert_eq!(context["consolidation"]["outcome"], "consolidated", "{name}");
        for path in [
            "/sessions",
            "/sessions/s",
            "/sessions/s/messages",
            "/sessions/s/revisions",
            "/users/ada/memory/revisions",
        ] {
            let response = app.get(path).await;
            response.ok(200);
            assert!(!foreign(name, &response.text), "{name}: {path}: {response:?}");
        }
        assert!(!foreign(name, &context.to_string()), "{context}");
    }
    let histories = async || {
        let mut histories: Vec<Value> = Vec::new();
        for (.., app) in &tenants[1..] {
            histories.push(app.get("/sessions/s/messages").await.json());
            histories.push(app.get("/users/ada/memory/revisions").await.json());
        }
        histories
    };
    let before = histories().await;
    let (_, admin, _) = &tenants[0];
    admin.delete("/sessions/s").await.ok(204);
    assert_eq!(histories().await, before);
    admin.put("/users/ada/memory", r#"{"content":"x"}"#).await.ok(200);
    admin.delete("/users/ada").await.ok(204);
    assert_eq!(histories().await, before);
    admin.post("/sessions/s/context", "").await.ok(200);
    admin.get("/sessions/s").await.problem(404, "session-not-found");
}
