//! The inspector in Chromium: the tasks of `tests/ui/` against the running binary.
//!
//! `scripts/ui` installs Chromium, Playwright and axe:
//!
//! ```sh
//! scripts/postgres scripts/ui cargo test --locked --test ui -- --include-ignored
//! ```
//!
//! `PRECIS_UI_TASKS` selects tasks by words of their names, separated by spaces. `PRECIS_UI_SCREENSHOTS` is the folder for the
//! pictures, which `docs/` has: `PRECIS_UI_SCREENSHOTS=$PWD/docs PRECIS_UI_TASKS=screenshots` with the command above renews them.
#![cfg(test)]

use precis::domain::api_key::Scope;
use service::Precis;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::backend::Backend;
use support::model_server::refused_base_url;
use test_case::test_case;

#[path = "process/service.rs"]
#[expect(dead_code, reason = "other tests use the rest of it")]
mod service;

#[path = "support"]
mod support {
    pub(crate) mod backend;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod client;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod keys;
    #[expect(dead_code, reason = "other tests use the rest of it")]
    pub(crate) mod model_server;
    pub(crate) mod postgres;
}

#[test_case(Backend::sqlite().await, Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await, Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs scripts/ui"]
async fn every_task_in_the_inspector_can_be_performed(backend: Backend, with_key: Backend) {
    let installed = env::var("PRECIS_UI_NODE").expect("run this with scripts/ui");
    let chromium = env::var("PRECIS_UI_CHROMIUM").expect("run this with scripts/ui");
    let service = Precis::on(&backend).start().await;
    let key = with_key.key("acme", Scope::Admin).await;
    let read_key = with_key.key("acme", Scope::Read).await;
    let keyed = Precis::on(&with_key).model(&refused_base_url()).start().await;
    let pictures = env::var("PRECIS_UI_SCREENSHOTS").map(PathBuf::from);
    let pictures = pictures.unwrap_or_else(|_| Path::new(&installed).join("screenshots"));
    std::fs::create_dir_all(&pictures).expect("a folder");
    let home = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("node");
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ui/run.mjs"))
        .args(env::var("PRECIS_UI_TASKS").unwrap_or_default().split_whitespace())
        .current_dir(home.path())
        .env_clear()
        .env("PATH", env::var_os("PATH").unwrap_or_default())
        .env("HOME", home.path())
        .env("NO_PROXY", "*")
        .env("PRECIS_UI_NODE", installed)
        .env("PRECIS_UI_CHROMIUM", chromium)
        .env("PRECIS_URL", &service.url)
        .env("PRECIS_KEYED_URL", &keyed.url)
        .env("PRECIS_KEY", key.expose())
        .env("PRECIS_READ_KEY", read_key.expose())
        .env("PRECIS_UI_SCREENSHOTS", &pictures)
        .stdin(Stdio::null());
    let ended =
        tokio::task::spawn_blocking(move || command.output()).await.expect("no panic").expect("it runs");
    let (output, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    println!("{output}");
    assert!(ended.status.success(), "{errors}");
}
