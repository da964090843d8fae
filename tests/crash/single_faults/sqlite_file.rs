//! Faults of a SQLite file: a full disk, a read-only file, and a lock of another process.

use super::{
    append_exchange, assert_history, assert_live, assert_store_unavailable, send_exchange, status,
    wait_for_readyz,
};
use crate::service::{Precis, Process, compile_library};
use serde_json::json;
use sqlx::{Connection as _, Executor as _, SqliteConnection};
use std::fs::{File, remove_file};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The size of the disk. The service reserves space for erasures only on a disk with much more space than that.
const DISK_BYTES: u64 = 112 * 1024 * 1024;

/// Starts the service with its database in a folder that is as limited as a small disk.
async fn start_on_small_disk() -> (Process, TempDir) {
    let disk = TempDir::new().expect("a folder");
    let code = include_str!("small_disk.c");
    let code = format!("#define DISK {:?}\n#define BYTES {DISK_BYTES}L\n{code}", disk.path());
    let library = compile_library(&code);
    let database = disk.path().join("precis.db");
    let precis = Precis::new().env("LD_PRELOAD", library.to_str().expect("UTF-8"));
    let service = precis.env("DATABASE_URL", &format!("sqlite://{}", database.display())).start().await;
    (service, disk)
}

/// Fills the disk, except for a part of the pages of an exchange.
fn fill_disk(disk: &Path) -> PathBuf {
    let files = disk.read_dir().expect("a folder").map(|file| file.and_then(|file| file.metadata()));
    let used: u64 = files.map(|metadata| metadata.expect("a file").len()).sum();
    let file = disk.join("other");
    File::create(&file).and_then(|other| other.set_len(DISK_BYTES - used - 5000)).expect("created");
    file
}

#[tokio::test]
async fn full_disk_on_sqlite_rejects_writes_without_partial_data() {
    let (service, disk) = start_on_small_disk().await;
    append_exchange(&service, 0).await;
    let other = fill_disk(disk.path());
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert_live(&service).await;
    service.context("s", &json!({})).await;
    assert_history(&service, 0..1).await;
    remove_file(other).expect("removed");
    append_exchange(&service, 1).await;
    wait_for_readyz(&service, 200).await;
    assert_history(&service, 0..2).await;
}

#[tokio::test]
async fn sessions_are_erased_on_full_disk() {
    let (service, disk) = start_on_small_disk().await;
    let reserve = disk.path().join("precis.db-reserve");
    append_exchange(&service, 0).await;
    for _ in 0..50 {
        let body = json!({"user_message": "x".repeat(40_000), "assistant_reply": "ok"});
        service.post("/sessions/old/exchanges", body).await.ok(201);
    }
    let other = fill_disk(disk.path());
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
    let reserve = disk.path().join("precis.db-reserve");
    for number in 0..50 {
        let text = format!("plugh{number}q {}", "x".repeat(40_000));
        let body = json!({"user_message": text, "assistant_reply": "ok"});
        service.post("/sessions/old/exchanges", body).await.ok(201);
    }
    append_exchange(&service, 0).await;
    assert!(files_contain(disk.path(), "plugh7q"));
    let other = fill_disk(disk.path());
    assert_store_unavailable(&send_exchange(&service, 1).await);
    assert!(reserve.exists());
    service.delete("/sessions/old/messages/15").await.ok(200);
    assert!(!reserve.exists());
    assert!(!files_contain(disk.path(), "plugh7q"));
    assert!(files_contain(disk.path(), "plugh8q"), "the other messages stay");
    assert_eq!(service.get("/sessions/old/redactions").await["items"][0]["seq"], 15);
    remove_file(other).expect("removed");
    service.delete("/sessions/old/messages/17").await.ok(200);
    assert_eq!(reserve.metadata().expect("created again").len(), 16 * 1024 * 1024);
    assert!(!files_contain(disk.path(), "plugh8q"));
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
