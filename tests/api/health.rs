//! `/livez`, `/readyz`, and the id of each request.

use crate::support::app::{TestApp, settings};
use crate::support::backend::Backend;
use precis::app::App;
use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readyz_succeeds_with_a_current_schema(backend: Backend) {
    let app = TestApp::start(&backend, &[]).await;
    for path in ["/livez", "/readyz"] {
        assert_eq!(app.get(path).await.ok(200), json!({"status": "ok"}));
    }
}

#[tokio::test]
async fn readyz_fails_without_schema_and_livez_succeeds() {
    let empty = Backend::Sqlite(TempDir::new().expect("a folder"));
    let app = App::new(&settings(&empty, &[]), false).await.expect("an app");
    let app = TestApp::serve(app).await;
    app.get("/livez").await.ok(200);
    let response = app.get("/readyz").await;
    let detail = response.problem(503, "schema-mismatch");
    assert!(detail.contains("precis migrate"), "{detail}");
    assert!(response.header("retry-after").expect("a time").parse::<u32>().is_ok());
    let response = app.get("/sessions").await;
    assert!(response.problem(503, "schema-mismatch").contains("precis migrate"));
    assert!(!response.text.to_lowercase().contains("table"), "no SQL: {response:?}");
}

#[tokio::test]
async fn response_has_a_request_id() {
    let app = TestApp::on_sqlite(&[]).await;
    let with = |path: &str, id: &str| app.get(path).header("x-request-id", id);
    let longest = "x.".repeat(64);
    // The secret part of a key, and the key with an escaped separator.
    let secret = "000g40o40k30e209185go38e1s8124gj2gahc5oo34d1m70t19vue2a";
    let escaped = format!("precis%255f{secret}");
    for path in ["/livez", "/sessions", "/sessions/none", "/nothing", "/sessions?limit=x", "/sessions/%zz"] {
        let trace = "Root=1-67891233-abcdef012345678912345678;Sampled=1";
        for id in ["abc-1", trace, &longest] {
            assert_eq!(with(path, id).await.header("x-request-id"), Some(id), "{path}");
        }
        let mut made = vec![app.get(path).await.header("x-request-id").expect("an id").to_owned()];
        for garbage in ["", "a b", "é", "a\tb", "{}", &"x.".repeat(65), secret, &escaped] {
            made.push(with(path, garbage).await.header("x-request-id").expect("an id").to_owned());
            assert_ne!(made.last().map(String::as_str), Some(garbage), "{path}");
        }
        assert!(made.iter().all(|id| id.len() == 36), "{made:?}");
        made.sort_unstable();
        made.dedup();
        assert_eq!(made.len(), 9, "{path}: ids are unique");
    }
    let wrong_method = app.request(Method::PUT, "/livez").header("x-request-id", "m").await;
    assert_eq!((wrong_method.status, wrong_method.header("x-request-id")), (405, Some("m")));
    let too_large = "POST /sessions/s/exchanges HTTP/1.1\r\ncontent-length: 99999999999\r\nx-request-id: big";
    let response = app.raw(too_large, b"").await;
    assert_eq!((response.status, response.header("x-request-id")), (413, Some("big")));
}
