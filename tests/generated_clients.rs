//! Runs a round trip with each client that a generator makes from the OpenAPI document.
//!
//! `scripts/clients` makes the clients, and checks the types of the programs that use them:
//!
//! ```sh
//! scripts/postgres scripts/clients cargo test --locked --test generated_clients -- --ignored
//! ```
#![cfg(test)]

use precis::domain::api_key::Scope;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::app::TestApp;
use support::backend::Backend;
use support::client::assert_includes;
use support::factor::test_factor;
use test_case::test_case;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod keys;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

/// Returns the command that runs a program of `tests/generated_clients`.
fn program(name: &str) -> Command {
    let clients = std::env::var_os("PRECIS_CLIENTS").expect("run this with scripts/clients");
    let clients = PathBuf::from(clients);
    let (interpreter, file) = if Path::new(name).extension().is_some_and(|extension| extension == "py") {
        ("python", PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/generated_clients").join(name))
    } else {
        ("node", clients.join("node/build").join(name))
    };
    let mut command = Command::new(clients.join("venv/bin").join(interpreter));
    command.arg(file).env_clear().env("NO_PROXY", "*");
    command.env("PYTHONPATH", clients.join("python")).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

#[test_case("openapi_python_client.py"; "openapi_python_client")]
#[test_case("openapi_generator.py"; "openapi_generator")]
#[test_case("openapi_fetch.js"; "openapi_fetch")]
#[test_case("hey_api.js"; "hey_api")]
#[tokio::test]
#[ignore = "needs scripts/clients"]
async fn generated_client_makes_a_round_trip(name: &str) {
    let mut backends = vec![Backend::sqlite().await];
    if test_factor() > 1 {
        backends.push(Backend::postgres().await);
    }
    for backend in backends {
        make_round_trip(&backend, name).await;
    }
}

async fn make_round_trip(backend: &Backend, name: &str) {
    let app = TestApp::start(backend, &[("consolidation.keep_recent", "2")]).await;
    let key = backend.key("acme", Scope::Write).await;
    let app = app.with_key(key.expose());
    let mut command = program(name);
    command.args([&app.url, "café/1", "ada", key.expose()]);
    let ended =
        tokio::task::spawn_blocking(move || command.output()).await.expect("no panic").expect("it runs");
    let (output, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{output}\n{errors}");
    // The program checks the responses. These are the effects of its requests.
    let session = app.get("/sessions/caf%C3%A9%2F1").await.ok(200);
    let expected = json!({
        "user_id": "ada", "metadata": {"topic": "travel"}, "message_count": 6, "summary": {"revision": 1},
    });
    assert_includes(&session, &expected);
    let memory = app.get("/users/ada/memory").await.ok(200);
    assert_includes(&memory, &json!({"version": 1, "content": "# Ada\n\n- Likes ferries.\n"}));
}
