//! SQLite: a file that can't grow, and one that another process holds.

use super::{exchange, history_is, lives, recorded, refused, status, until_ready_is};
use crate::service::{Precis, Process};
use reqwest::StatusCode;
use serde_json::json;
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use std::process::Command;

/// Sets the size that files of the process may have.
fn limit_files(service: &Process, bytes: &str) {
    let limited = Command::new("prlimit")
        .args(["--pid", &service.id().to_string(), &format!("--fsize={bytes}:unlimited")])
        .status()
        .expect("prlimit of util-linux");
    assert!(limited.success());
}

/// The kernel refuses to make the log longer, as it does where the disk is full.
#[tokio::test]
async fn a_full_disk_refuses_writes_and_leaves_nothing_of_them() {
    // The signal that comes with the refusal would end it.
    let mut deaf = Command::new("/bin/sh");
    deaf.args(["-c", "trap '' XFSZ; exec \"$0\"", env!("CARGO_BIN_EXE_precis")]);
    let service = Precis::by(deaf).start().await;
    recorded(&service, 0).await;
    let log = service.folder.path().join("precis.db-wal");
    let size = std::fs::metadata(&log).expect("the log").len();
    // In the middle of what the next exchange would write.
    limit_files(&service, &(size + 5000).to_string());
    refused(exchange(&service, 1).await).await;
    lives(&service).await;
    service.context("s", &json!({})).await;
    history_is(&service, 0..1).await;
    limit_files(&service, "unlimited");
    recorded(&service, 1).await;
    until_ready_is(&service, StatusCode::OK).await;
    history_is(&service, 0..2).await;
}

/// As after a mount for reading only.
#[tokio::test]
async fn a_file_that_can_only_be_read_is_read() {
    let service = Precis::new().start().await;
    recorded(&service, 0).await;
    let url = format!("sqlite://{}?mode=ro", service.folder.path().join("precis.db").display());
    let reader = Precis::new().env("DATABASE_URL", &url).args(["--no-migrate"]).start().await;
    reader.context("s", &json!({})).await;
    refused(exchange(&reader, 1).await).await;
    lives(&reader).await;
    history_is(&reader, 0..1).await;
    recorded(&service, 1).await;
    history_is(&reader, 0..2).await;
}

#[tokio::test]
async fn a_file_that_another_process_holds_is_waited_for_and_then_refused() {
    let service = Precis::new().start().await;
    recorded(&service, 0).await;
    let url = format!("sqlite://{}", service.folder.path().join("precis.db").display());
    let mut other = SqliteConnection::connect(&url).await.expect("connected");
    other.execute("BEGIN IMMEDIATE").await.expect("held");
    refused(exchange(&service, 1).await).await;
    lives(&service).await;
    assert_eq!(status(&service, "/readyz").await, StatusCode::OK, "it is read meanwhile");
    service.context("s", &json!({})).await;
    other.execute("ROLLBACK").await.expect("let go");
    recorded(&service, 1).await;
    history_is(&service, 0..2).await;
}
