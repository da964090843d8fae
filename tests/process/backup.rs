//! The commands of `docs/backup.md`, run by a shell while clients write.

use crate::service::{Precis, Process, SOON, outcome};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use reqwest::Url;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

const WRITERS: usize = 4;

/// Returns the commands of a section.
fn commands(store: &str, section: &str) -> String {
    let page = include_str!("../../docs/backup.md");
    let (_, part) = page.split_once(&format!("\n## {store}\n")).expect("the part of the store");
    let part = part.split("\n## ").next().expect("its text");
    let (_, part) = part.split_once(&format!("\n### {section}\n")).expect("the section");
    let part = part.split("\n### ").next().expect("its text");
    let (_, block) = part.split_once("```sh\n").expect("commands");
    block.split("```").next().expect("their end").to_owned()
}

/// Runs commands in a folder, with `precis` and the programs of Postgres on the path.
fn run(script: &str, folder: &Path, variables: &[(&str, &str)]) -> String {
    let precis = Path::new(env!("CARGO_BIN_EXE_precis")).parent().expect("a folder").to_owned();
    let find = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/postgres")).arg("--find").output();
    let postgres = String::from_utf8(find.expect("it starts").stdout).expect("a path");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [precis, PathBuf::from(postgres.trim())].into_iter().chain(std::env::split_paths(&path));
    let output = Command::new("sh")
        .args(["-e", "-c", script])
        .current_dir(folder)
        .env_clear()
        .env("PATH", std::env::join_paths(folders).expect("a path"))
        .envs(variables.iter().copied())
        .output()
        .expect("a shell");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn message(session: &str, seq: i64) -> Value {
    let role = if seq % 2 == 1 { "user" } else { "assistant" };
    json!({"role": role, "content": format!("Message {seq} of {session} is about plan {seq}.")})
}

/// Clients that append exchanges, and the last acknowledged message of each session.
struct Writers {
    acknowledged: Arc<Mutex<BTreeMap<String, i64>>>,
    stop: CancellationToken,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Writers {
    fn start(client: &TestClient) -> Self {
        let (acknowledged, stop) = (Arc::new(Mutex::new(BTreeMap::new())), CancellationToken::new());
        let write = |writer| {
            let (client, acknowledged, stop) = (client.clone(), Arc::clone(&acknowledged), stop.clone());
            tokio::spawn(async move {
                for turn in 0_i64.. {
                    if stop.is_cancelled() {
                        return;
                    }
                    // Each writer has a new session from time to time.
                    let (session, first) = (format!("s{writer}-{}", turn / 100), turn % 100 * 2 + 1);
                    let exchange = [message(&session, first), message(&session, first + 1)];
                    let recorded = client.record(&session, &exchange).await;
                    let last_seq = recorded["last_seq"].as_i64().expect("a number");
                    assert_eq!(last_seq, first + 1);
                    acknowledged.lock().expect("no panic").insert(session, last_seq);
                }
            })
        };
        let tasks = (0..WRITERS).map(write).collect();
        Self { acknowledged, stop, tasks }
    }

    fn acknowledged(&self) -> BTreeMap<String, i64> {
        self.acknowledged.lock().expect("no panic").clone()
    }

    fn count(&self) -> i64 {
        self.acknowledged().values().sum()
    }

    /// Waits until further messages are acknowledged.
    async fn until_more(&self, more: i64) {
        let (before, begun) = (self.count(), Instant::now());
        while self.count() < before + more {
            assert!(begun.elapsed() < SOON, "the writers have stopped");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.expect("each exchange was acknowledged");
        }
    }
}

/// Asserts that a restored service has all messages that were acknowledged before, that each history is one of complete
/// exchanges without gaps, and that it works.
async fn check(restored: &Process, before: &BTreeMap<String, i64>) {
    assert!(before.len() >= WRITERS);
    for (session, acknowledged) in before {
        let history = restored.history(session).await;
        let last_seq = i64::try_from(history.len()).expect("few");
        assert!(last_seq >= *acknowledged && last_seq % 2 == 0, "{session}: {last_seq} of {acknowledged}");
        let expected: Vec<Value> = (1..=last_seq).map(|seq| message(session, seq)).collect();
        assert_eq!(history, expected);
        let context = restored.context(session, &json!({})).await;
        outcome(&context, last_seq.unsigned_abs());
        let found = restored.get(&format!("/search?q=plan+{last_seq}&session_id={session}")).await;
        assert!(!found["items"].as_array().expect("hits").is_empty());
        let next = [message(session, last_seq + 1), message(session, last_seq + 2)];
        assert_eq!(restored.record(session, &next).await["first_seq"], last_seq + 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn documented_backup_and_restore_of_sqlite_lose_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("precis.db");
    let start = || {
        let url = format!("sqlite://{}", path.display());
        Precis::new().env("DATABASE_URL", &url).set("consolidation.threshold", "50").start()
    };
    let mut service = start().await;
    let writers = Writers::start(&service);
    writers.until_more(500).await;
    let before = writers.acknowledged();
    let (script, place) = (commands("SQLite", "Back up"), folder.path().to_owned());
    let running = tokio::task::spawn_blocking(move || run(&script, &place, &[]));
    writers.until_more(2).await;
    assert!(running.await.expect("it succeeds").starts_with("copied sqlite://precis.db to backup.db ("));
    writers.until_more(50).await;
    writers.stop().await;
    let mode = std::fs::metadata(folder.path().join("backup.db")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    service.signal("TERM");
    service.ended().await;
    run(&commands("SQLite", "Restore"), folder.path(), &[]);
    let restored = start().await;
    check(&restored, &before).await;
}

/// Returns the URL without the parameter that only our driver knows.
fn for_programs(url: &str) -> Url {
    let url = Url::parse(url).expect("a URL");
    let mut plain = url.clone();
    let pairs = url.query_pairs().filter(|(name, _)| name != "statement-cache-capacity");
    plain.query_pairs_mut().clear().extend_pairs(pairs);
    plain
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn documented_backup_and_restore_of_postgres_lose_nothing() {
    let (backend, target, folder) =
        (Backend::postgres().await, Backend::postgres().await, tempfile::tempdir().expect("a folder"));
    let (Backend::Postgres(database), Backend::Postgres(empty)) = (&backend, &target) else { return };
    let mut admin = PgConnection::connect(&database.admin_url()).await.expect("connected");
    // The dump goes into a database without a schema, and the role may be left from an earlier run on the same server.
    let mut owner = PgConnection::connect(&empty.admin_url()).await.expect("connected");
    for statement in ["DROP SCHEMA public CASCADE", "CREATE SCHEMA public AUTHORIZATION pg_database_owner"] {
        owner.execute(statement).await.expect(statement);
    }
    admin.execute("DROP ROLE IF EXISTS precis_backup").await.expect("dropped");

    let service = Precis::on(&backend).set("consolidation.threshold", "50").start().await;
    let writers = Writers::start(&service);
    writers.until_more(500).await;
    let admin_url = for_programs(&database.admin_url());
    let mut backup_url = admin_url.clone();
    backup_url.set_username("precis_backup").expect("a URL with a host");
    backup_url.set_password(Some("choose-a-password")).expect("a URL with a host");
    run(&commands("Postgres", "Prepare"), folder.path(), &[("ADMIN_URL", admin_url.as_str())]);
    let before = writers.acknowledged();
    let (script, place) = (commands("Postgres", "Back up"), folder.path().to_owned());
    let running =
        tokio::task::spawn_blocking(move || run(&script, &place, &[("BACKUP_URL", backup_url.as_str())]));
    writers.until_more(2).await;
    running.await.expect("it succeeds");
    writers.until_more(50).await;
    writers.stop().await;

    let target_url = for_programs(&empty.url());
    run(&commands("Postgres", "Restore"), folder.path(), &[("DATABASE_URL", target_url.as_str())]);
    let restored = Precis::on(&target).set("consolidation.threshold", "50").start().await;
    check(&restored, &before).await;
    // The restored database isolates tenants as the original one does.
    let count = "SELECT count(*) FROM messages";
    let mut tenant = PgConnection::connect(&empty.url()).await.expect("connected");
    let visible: i64 =
        sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(&mut tenant).await.expect("counted");
    assert_eq!(visible, 0);
    admin.execute("DROP ROLE precis_backup").await.expect("dropped");
}

#[tokio::test]
async fn backup_reports_what_prevents_it() {
    let existing = Precis::new().file("backup.db", "mine").args(["backup", "backup.db"]).run().await;
    let error = existing.stderr_of_failure();
    assert!(error.contains("backup.db exists") && error.contains("choose another name"), "{error}");

    let mut missing = Precis::new().args(["backup", "backup.db"]);
    let error = missing.run().await.stderr_of_failure();
    assert!(error.contains("sqlite://precis.db (database.url) can't be copied to backup.db"), "{error}");
    assert_eq!(std::fs::read_dir(missing.folder()).expect("a folder").count(), 0, "no file is left");

    let folder = Precis::new().args(["backup", "missing/backup.db"]).run().await.stderr_of_failure();
    assert!(folder.contains("missing/backup.db can't be written"), "{folder}");

    let url = "postgres://ada:hunter2@localhost/precis";
    let postgres = Precis::new().env("DATABASE_URL", url).args(["backup", "backup.db"]).run().await;
    let error = postgres.stderr_of_failure();
    assert!(error.contains("pg_dump") && !error.contains("hunter2"), "{error}");
}
