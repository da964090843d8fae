//! Real clients of model providers talk through the proxy with a scripted provider, for 30 turns with tools.
//!
//! `scripts/proxy-clients` installs the clients. `tests/proxy_clients/check.py` runs one of them with the provider, and checks that the
//! provider receives valid lists that fit the window, that the client receives the bytes of the provider, and that the history is the
//! conversation, without branches:
//!
//! ```sh
//! scripts/proxy-clients cargo test --locked --test proxy_clients -- --ignored
//! ```
#![cfg(test)]

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use support::app::TestApp;
use support::backend::Backend;
use support::factor::test_factor;
use test_case::test_case;

#[path = "support"]
mod support {
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod app;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    pub(crate) mod factor;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod postgres;
}

/// Number of turns, and of those with a `PRECIS_TEST_FACTOR`. A summary is necessary after about 20.
const TURNS: usize = 30;
const MORE_TURNS: usize = 60;

#[test_case("openai"; "openai")]
#[test_case("openai-trimmed"; "openai without the beginning of its list")]
#[test_case("openai-newest"; "openai with new messages only")]
#[test_case("openai-lossy"; "openai that repeats requests")]
#[test_case("openai-newest-lossy"; "openai that repeats new messages only")]
#[test_case("anthropic"; "anthropic")]
#[test_case("anthropic-cached"; "anthropic with marks for its cache")]
#[test_case("node-openai"; "openai for node")]
#[test_case("node-anthropic"; "anthropic for node")]
#[test_case("node-ai-sdk-openai"; "ai sdk with chat completions")]
#[test_case("node-ai-sdk-anthropic"; "ai sdk with messages")]
#[test_case("langchain-openai"; "langchain with chat completions")]
#[test_case("langchain-anthropic"; "langchain with messages")]
#[test_case("litellm-openai"; "litellm with chat completions")]
#[test_case("litellm-anthropic"; "litellm with messages")]
#[test_case("llm"; "llm")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs scripts/proxy-clients"]
async fn client_gets_a_memory_that_it_does_not_notice(client: &str) {
    let python = env::var("PRECIS_PROXY_CLIENTS_PYTHON").expect("run this with scripts/proxy-clients");
    let turns = if test_factor() > 1 { MORE_TURNS } else { TURNS };
    let home = tempfile::tempdir().expect("a folder");
    let mut check = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/proxy_clients/check.py"))
        .args([client, &turns.to_string()])
        .current_dir(home.path())
        .env("HOME", home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let mut output = BufReader::new(check.stdout.take().expect("piped"));
    let mut upstream = String::new();
    output.read_line(&mut upstream).expect("the URL of the provider");
    let backend = Backend::sqlite().await;
    let settings = [
        ("proxy.openai.base_url", upstream.trim()),
        ("proxy.anthropic.base_url", upstream.trim()),
        ("proxy.context_window", "4000"),
    ];
    let app = TestApp::start(&backend, &settings).await;
    writeln!(check.stdin.take().expect("piped"), "{}", app.url).expect("it reads");
    let ended = tokio::task::spawn_blocking(move || check.wait().expect("it ran")).await.expect("it ran");
    assert!(ended.success(), "see above");
}
