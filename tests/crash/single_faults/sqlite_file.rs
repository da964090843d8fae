//! Faults of a SQLite file: a full disk, a read-only file, and a lock of another process.

use super::{
    append_exchange, assert_history, assert_live, assert_store_unavailable, send_exchange, status,
    wait_for_readyz,
};
use crate::service::{Precis, Process};
use serde_json::json;
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use std::fs::{File, remove_file};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Limits the size of the files that the process may write.
fn limit_file_size(service: &Process, bytes: &str) {
    let limited = Command::new("prlimit")
        .args(["--pid", &service.id().to_string(), &format!("--fsize={bytes}:unlimited")])
        .status()
        .expect("prlimit of util-linux");
    assert!(limited.success());
}

#[tokio::test]
async fn full_disk_on_sqlite_rejects_writes_without_partial_data() {
    // A file size limit has the same effect as a full disk, except for a signal that would end the process.
    let mut ignoring_signal = Command::new("/bin/sh");
    ignoring_signal.args(["-c", "trap '' XFSZ; exec \"$0\"", env!("CARGO_BIN_EXE_precis")]);
    let service = Precis::started_by(ignoring_signal).start().await;
    append_exchange(&service, 0).await;
    let log = service.folder.path().join("precis.db-wal");
    let size = std::fs::metadata(&log).expect("the log").len();
    // The next exchange would need more bytes than this.
    limit_file_size(&service, &(size + 5000).to_string());
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert_live(&service).await;
    service.context("s", &json!({})).await;
    assert_history(&service, 0..1).await;
    limit_file_size(&service, "unlimited");
    append_exchange(&service, 1).await;
    wait_for_readyz(&service, 200).await;
    assert_history(&service, 0..2).await;
}

/// Starts the service with its database on a disk of its own: a file system in memory, which only this process sees. Returns
/// the path of its folder for others.
async fn start_on_small_disk() -> (Process, PathBuf) {
    const MOUNT_AND_START: &str = "mkdir disk && mount -t tmpfs -o size=112m disk disk && exec \"$0\"";
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "/bin/sh", "-c", MOUNT_AND_START]);
    command.arg(env!("CARGO_BIN_EXE_precis"));
    let precis = Precis::started_by(command).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
    let service = precis.env("DATABASE_URL", "sqlite://disk/precis.db").start().await;
    let folder = service.folder.path().strip_prefix("/").expect("absolute").join("disk");
    let disk = Path::new("/proc").join(service.id().to_string()).join("root").join(folder);
    (service, disk)
}

/// Writes until the disk is full.
fn fill_disk(disk: &Path) -> PathBuf {
    let file = disk.join("other");
    let mut other = File::create(&file).expect("created");
    let full = loop {
        if let Err(error) = other.write_all(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    file
}

#[tokio::test]
async fn sessions_are_erased_on_full_disk() {
    let (service, disk) = start_on_small_disk().await;
    let reserve = disk.join("precis.db-reserve");
    append_exchange(&service, 0).await;
    for _ in 0..50 {
        let body = json!({"user_message": "x".repeat(40_000), "assistant_reply": "ok"});
        service.post("/sessions/old/exchanges", body).await.ok(201);
    }
    let other = fill_disk(&disk);
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert!(reserve.exists());
    service.delete("/sessions/old").await.ok(204);
    assert!(!reserve.exists());
    // The log has room for exchanges, and these use the pages of the erased session.
    append_exchange(&service, 1).await;
    assert_history(&service, 0..2).await;
    remove_file(other).expect("removed");
    service.delete("/sessions/s").await.ok(204);
    assert_eq!(reserve.metadata().expect("created again").len(), 16 * 1024 * 1024);
}

/// Returns `true` if a file of the database contains the text.
fn files_contain(disk: &Path, text: &str) -> bool {
    ["precis.db", "precis.db-wal"].iter().any(|file| {
        let bytes = std::fs::read(disk.join(file)).expect("readable");
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

#[tokio::test]
async fn message_is_redacted_on_full_disk() {
    let (service, disk) = start_on_small_disk().await;
    let reserve = disk.join("precis.db-reserve");
    for number in 0..50 {
        let text = format!("plugh{number}q {}", "x".repeat(40_000));
        let body = json!({"user_message": text, "assistant_reply": "ok"});
        service.post("/sessions/old/exchanges", body).await.ok(201);
    }
    append_exchange(&service, 0).await;
    assert!(files_contain(&disk, "plugh7q"));
    let other = fill_disk(&disk);
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert!(reserve.exists());
    service.delete("/sessions/old/messages/15").await.ok(200);
    assert!(!reserve.exists());
    assert!(!files_contain(&disk, "plugh7q"));
    assert!(files_contain(&disk, "plugh8q"), "the other messages stay");
    assert_eq!(service.get("/sessions/old/redactions").await["items"][0]["seq"], 15);
    remove_file(other).expect("removed");
    service.delete("/sessions/old/messages/17").await.ok(200);
    assert_eq!(reserve.metadata().expect("created again").len(), 16 * 1024 * 1024);
    assert!(!files_contain(&disk, "plugh8q"));
}

#[tokio::test]
async fn read_only_file_serves_reads_and_rejects_writes() {
    let service = Precis::new().start().await;
    append_exchange(&service, 0).await;
    let url = format!("sqlite://{}?mode=ro", service.folder.path().join("precis.db").display());
    let reader = Precis::new().env("DATABASE_URL", &url).args(["--no-migrate"]).start().await;
    reader.context("s", &json!({})).await;
    assert_store_unavailable(&send_exchange(&reader, 1).await);
    assert_live(&reader).await;
    assert_history(&reader, 0..1).await;
    append_exchange(&service, 1).await;
    assert_history(&reader, 0..2).await;
}

#[tokio::test]
async fn locked_file_rejects_writes_and_serves_reads() {
    let service = Precis::new().start().await;
    append_exchange(&service, 0).await;
    let url = format!("sqlite://{}", service.folder.path().join("precis.db").display());
    let mut other = SqliteConnection::connect(&url).await.expect("connected");
    other.execute("BEGIN IMMEDIATE").await.expect("locked");
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert_live(&service).await;
    assert_eq!(status(&service, "/readyz").await, 200, "reads are possible meanwhile");
    service.context("s", &json!({})).await;
    other.execute("ROLLBACK").await.expect("released");
    append_exchange(&service, 1).await;
    assert_history(&service, 0..2).await;
}
