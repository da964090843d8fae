//! The files of the inspector at `/ui/`. `tests/ui.rs` uses the page in a browser.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use precis::domain::api_key::Scope;
use reqwest::Method;
use std::collections::BTreeSet;
use std::path::Path;

/// Returns the names of the files in the folder of the page.
fn files() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http/ui");
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect()
}

/// Returns the names of other files that a file loads.
fn loaded(text: &str) -> BTreeSet<String> {
    let after = |mark: &'static str| text.split(mark).skip(1);
    let names = after("from \"./").chain(after(" href=\"")).chain(after(" src=\""));
    let names = names.filter_map(|rest| rest.split('"').next()).filter(|name| !name.starts_with('#'));
    names.map(str::to_owned).collect()
}

#[tokio::test]
async fn inspector_consists_of_files_of_the_binary() {
    let app = TestApp::on_sqlite(&[]).await;
    let (mut served, mut next) = (BTreeSet::new(), vec!["index.html".to_owned()]);
    while let Some(name) = next.pop() {
        if served.insert(name.clone()) {
            let file = app.get(&format!("/ui/{name}")).await;
            assert_eq!(file.status, 200, "{name}");
            assert!(!file.text.contains("innerHTML"), "{name}");
            next.extend(loaded(&file.text));
        }
    }
    assert_eq!(served, files());
    // All modules are loaded at once instead of one after another.
    let page = app.get("/ui/").await;
    let modules =
        served.into_iter().filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "js"));
    let missing: Vec<String> = modules.filter(|name| !page.text.contains(&format!("\"{name}\""))).collect();
    assert!(missing.is_empty(), "index.html does not name {missing:?}");
}

#[tokio::test]
async fn inspector_has_strict_headers_and_needs_no_key() {
    let backend = Backend::sqlite().await;
    let app = TestApp::start(&backend, &[]).await;
    let reader = app.with_key(backend.key("acme", Scope::Read).await.expose());
    for (path, content_type) in [
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/app.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml; charset=utf-8"),
    ] {
        let file = app.get(path).await;
        assert_eq!((file.status, file.header("content-type")), (200, Some(content_type)), "{path}");
        let policy = file.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'self'; "), "{policy}");
        for rule in ["frame-ancestors 'none'", "base-uri 'none'", "require-trusted-types-for 'script'"] {
            assert!(policy.contains(rule), "{policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(file.header("referrer-policy"), Some("no-referrer"));
        let tag = file.header("etag").expect("a tag");
        let again = app.get(path).header("if-none-match", tag).await;
        assert_eq!((again.status, again.text.as_str()), (304, ""));
        assert_eq!(app.request(Method::HEAD, path).await.status, 200);
    }
    let moved = app.raw("GET /ui HTTP/1.1", b"").await;
    assert_eq!((moved.status, moved.header("location")), (308, Some("ui/")));
    for path in ["/ui/nothing.js", "/ui/..%2fapp.js", "/ui/%FF"] {
        app.get(path).await.problem(401, "unauthorized");
        reader.get(path).await.problem(404, "route-not-found");
    }
    reader.post("/ui/", "{}").await.problem(405, "method-not-allowed");
}
