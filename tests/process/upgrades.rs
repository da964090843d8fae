//! Upgrades: processes of two releases on one database.
//!
//! The next release is represented by its schema: a migration after those of this release, which the code of this release
//! applies. `upgrade_from_the_previous_release_fails_no_request` runs the binaries of two releases.

use crate::service::{Precis, Process, messages, outcome};
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use crate::support::postgres::TestDatabase;
use precis::storage::Store;
use serde_json::{Value, json};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, SqlSafeStr as _};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use test_case::test_case;
use tokio::sync::{RwLock, watch};
use tokio::task::{JoinHandle, JoinSet};

/// The number of a migration of a future release.
const NEXT: i64 = 9000;

/// Changes as a next release makes them while this one serves: columns, a table and its index.
const EXPANSION: &str = "\
    ALTER TABLE sessions ADD COLUMN next_text text;
    ALTER TABLE messages ADD COLUMN next_number bigint NOT NULL DEFAULT 7;
    ALTER TABLE memories ADD COLUMN next_text text;
    ALTER TABLE revisions ADD COLUMN next_text text;
    CREATE TABLE next_table (tenant_id text NOT NULL, id bigint NOT NULL, note text, PRIMARY KEY (tenant_id, id));
    CREATE INDEX next_by_note ON next_table (tenant_id, note);";

/// Applies the migration of a next release, which declares that it works with releases from this migration on.
async fn apply_next(backend: &Backend, changes: &str, oldest: Option<i64>) {
    let declaration =
        oldest.map(|oldest| format!("INSERT INTO schema_compatibility VALUES ({NEXT}, {oldest})"));
    let sql = AssertSqlSafe(format!("{changes} {}", declaration.unwrap_or_default())).into_sql_str();
    let next = Migration::new(NEXT, "next".into(), MigrationType::Simple, sql, false);
    let store = backend.store().await;
    let migrated = match &*store {
        Store::Postgres(store) => store.migrate(with("migrations/postgres", next).await).await,
        Store::Sqlite(store) => store.migrate(with("migrations/sqlite", next).await).await,
    };
    assert_eq!(migrated.expect("migrated").found, NEXT);
    store.close().await;
}

/// Returns the migrations of a folder and one more.
async fn with(folder: &str, next: Migration) -> Migrator {
    let mut migrator = Migrator::new(Path::new(folder)).await.expect("migrations");
    migrator.migrations.to_mut().push(next);
    migrator
}

/// Returns the last migration of this release.
async fn own_version(backend: &Backend) -> i64 {
    let store = backend.store().await;
    let versions = store.check_ready().await.expect("ready");
    store.close().await;
    versions.expected
}

/// The replicas that get requests, as a load balancer sees them. A request holds the lock for reading, so a replica that is removed
/// has no running request of these clients.
type Rotation = Arc<RwLock<Vec<TestClient>>>;

/// Clients that send requests without a pause, each to its own session and to one replica after another. A response that is not the
/// expected one fails the test.
struct Load {
    rotation: Rotation,
    /// The number of rounds of each client.
    rounds: Vec<watch::Receiver<usize>>,
    stop: watch::Sender<bool>,
    clients: JoinSet<(String, Vec<Value>)>,
}

impl Load {
    fn start(replicas: &[&Process]) -> Self {
        let clients: Vec<TestClient> = replicas.iter().map(|&replica| (**replica).clone()).collect();
        let (rotation, stop) = (Arc::new(RwLock::new(clients)), watch::Sender::new(false));
        let mut load = Self { rotation, rounds: Vec::new(), stop, clients: JoinSet::new() };
        for number in 0..4 {
            let (sender, receiver) = watch::channel(0);
            load.rounds.push(receiver);
            let (rotation, stop) = (Arc::clone(&load.rotation), load.stop.subscribe());
            load.clients.spawn(async move {
                let session = format!("s{number}");
                let mut stored = Vec::new();
                while !*stop.borrow() {
                    let round = *sender.borrow();
                    run_round(&rotation, &session, round, &mut stored).await;
                    sender.send_replace(round + 1);
                }
                (session, stored)
            });
        }
        load
    }

    /// Waits until each client has completed further rounds.
    async fn rounds(&mut self, count: usize) {
        let until: Vec<usize> = self.rounds.iter().map(|rounds| *rounds.borrow() + count).collect();
        for (rounds, until) in self.rounds.iter_mut().zip(until) {
            if rounds.wait_for(|rounds| *rounds >= until).await.is_err() {
                let failed = self.clients.join_next().await.expect("a client has ended");
                panic!("a client has failed: {:?}", failed.err());
            }
        }
    }

    /// Replaces a replica: the new one gets requests, then the old one gets none and is stopped.
    async fn replace(&self, old: &mut Process, new: &Process) {
        new.get("/readyz").await.ok(200);
        let mut rotation = self.rotation.write().await;
        rotation.retain(|client| client.url != old.url);
        rotation.push((**new).clone());
        drop(rotation);
        old.signal("TERM");
        assert_eq!(old.ended().await.0, Some(0), "{:?}", old.log());
    }

    /// Stops the clients, and asserts that the replica has exactly the messages that were acknowledged.
    async fn end(mut self, replica: &Process) {
        self.stop.send_replace(true);
        while let Some(client) = self.clients.join_next().await {
            let (session, stored) = client.expect("no request failed");
            assert_eq!(replica.history(&session).await, stored, "{session}");
        }
    }
}

/// Sends the requests of one client: always an exchange and a context, and sometimes others. Each takes a next replica.
async fn run_round(rotation: &Rotation, session: &str, round: usize, stored: &mut Vec<Value>) {
    let path = format!("/sessions/{session}");
    let added = ["user", "assistant"]
        .map(|role| json!({"role": role, "content": format!("The plan of round {round}, from the {role}.")}));
    let exchange = json!({"messages": added, "user_id": "ada", "expected_last_seq": stored.len()});
    let replica = rotation.read().await;
    let replica = |step: usize| &replica[(round + step) % replica.len()];
    let request = replica(0).post(&format!("{path}/exchanges"), exchange);
    let appended = request.header("idempotency-key", round.to_string()).await.ok(201);
    stored.extend(added);
    let last_seq = u64::try_from(stored.len()).expect("small");
    assert_eq!(appended["last_seq"], last_seq);
    let context = replica(1).context(session, &json!({"user_message": "And now?"})).await;
    let sent = context["messages"].as_array().expect("a list").len();
    let mut without_question = context;
    without_question["messages"].as_array_mut().expect("a list").truncate(sent - 1);
    assert!(
        ["not_due", "consolidated"].contains(&outcome(&without_question, last_seq)),
        "{without_question}"
    );
    match round % 6 {
        0 => drop(replica(0).put("/users/ada/memory", json!({"content": "Ada flies."})).await.ok(200)),
        1 => assert!(replica(0).get("/search?q=plan").await.ok(200)["items"].is_array()),
        2 => assert_eq!(replica(0).get(&path).await.ok(200)["last_seq"], last_seq),
        3 => assert!(replica(0).get("/sessions").await.ok(200)["items"].is_array()),
        4 => {
            let fork = format!("{session}-{round}");
            let body = json!({"new_id": fork, "through_seq": 2});
            replica(0).post(&format!("{path}/fork"), body).await.ok(201);
            replica(1).delete(&format!("/sessions/{fork}")).await.ok(204);
        }
        _ => assert!(replica(0).get(&format!("{path}/revisions")).await.ok(200)["items"].is_array()),
    }
}

/// Asserts that replicas stay ready until it is stopped.
struct Watch {
    stop: watch::Sender<bool>,
    task: JoinHandle<usize>,
}

impl Watch {
    fn start(replicas: &[&Process]) -> Self {
        let clients: Vec<TestClient> = replicas.iter().map(|&replica| (**replica).clone()).collect();
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut probes = 0;
            while !*stopped.borrow() {
                for client in &clients {
                    assert_eq!(client.get("/readyz").await.ok(200), json!({"status": "ok"}));
                    probes += 1;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            probes
        });
        Self { stop, task }
    }

    async fn end(self) {
        self.stop.send_replace(true);
        assert!(self.task.await.expect("always ready") > 2);
    }
}

/// Replaces two replicas under load. `migrate` runs while both old ones serve.
async fn upgrade(
    old: impl AsyncFn() -> Process,
    new: impl AsyncFn() -> Process,
    migrate: impl AsyncFnOnce(),
) {
    let (mut first, mut second) = (old().await, old().await);
    let mut load = Load::start(&[&first, &second]);
    load.rounds(8).await;
    let watch = Watch::start(&[&first, &second]);
    migrate().await;
    load.rounds(8).await;
    let new_first = new().await;
    load.rounds(8).await;
    watch.end().await;
    load.replace(&mut first, &new_first).await;
    // Each release reads and continues what the other one has written, also after a consolidation.
    let watch = Watch::start(&[&second, &new_first]);
    load.rounds(60).await;
    watch.end().await;
    let new_second = new().await;
    load.replace(&mut second, &new_second).await;
    load.rounds(8).await;
    load.end(&new_second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_with_an_expanding_migration_fails_no_request() {
    let backend = Backend::postgres().await;
    let oldest = own_version(&backend).await;
    let start = async || Precis::on(&backend).start().await;
    let start_new = async || {
        let new = Precis::on(&backend).start().await;
        new.wait_for_log("its schema still works with this release").await;
        new
    };
    upgrade(start, start_new, async || apply_next(&backend, EXPANSION, Some(oldest)).await).await;
}

/// Run with the binary of the previous release before each release:
/// `PRECIS_PREVIOUS=… scripts/postgres cargo test --test process from_the_previous_release -- --ignored`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the binary of the previous release in PRECIS_PREVIOUS"]
async fn upgrade_from_the_previous_release_fails_no_request() {
    let previous = std::env::var_os("PRECIS_PREVIOUS").expect("PRECIS_PREVIOUS names a binary");
    let previous = || Precis::started_by(Command::new(&previous));
    let backend = Backend::Postgres(Box::new(TestDatabase::create("empty", async |_| {}).await));
    let old = async || previous().env("DATABASE_URL", &backend.url()).start().await;
    let new = async || Precis::on(&backend).start().await;
    let migrate = async || drop(Precis::on(&backend).args(["migrate"]).run().await.stdout_of_success());
    upgrade(old, new, migrate).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_that_a_newer_schema_permits_starts_and_works(backend: Backend) {
    apply_next(
        &backend,
        "ALTER TABLE sessions ADD COLUMN next_text text;",
        Some(own_version(&backend).await),
    )
    .await;
    for args in [&["serve"][..], &["serve", "--no-migrate"]] {
        let service = Precis::on(&backend).args(args.iter().copied()).start().await;
        let told = service.wait_for_log("a newer release has migrated the database (migration 9000)").await;
        assert_eq!(told["level"], "WARN");
        service.get("/readyz").await.ok(200);
        service.record("s", &messages(2)).await;
        service.context("s", &json!({})).await;
    }
    Precis::on(&backend).args(["migrate"]).run().await.stdout_of_success();
    Precis::on(&backend).args(["keys", "list"]).run().await.stdout_of_success();
    let export = Precis::on(&backend).args(["export", "s"]).run().await.stdout_of_success();
    assert_eq!(export.lines().filter(|line| line.contains("\"role\"")).count(), 4, "{export}");
    let doctor = Precis::on(&backend).set("server.bind", "127.0.0.1:0").args(["doctor"]).run().await;
    assert_eq!(doctor.code, Some(0), "{doctor:?}");
    let schema = doctor.stdout.lines().find(|line| line.contains(" schema ")).expect("a line");
    assert!(schema.starts_with("warning ") && schema.contains("migration 9000"), "{schema}");
    assert!(schema.ends_with("finish the upgrade, or the rollback"), "{schema}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_that_a_newer_schema_excludes_is_refused(backend: Backend) {
    let own = own_version(&backend).await;
    let replica = Precis::on(&backend).start().await;
    replica.get("/readyz").await.ok(200);
    apply_next(&backend, "ALTER TABLE sessions ADD COLUMN next_text text;", Some(own + 1)).await;
    let detail = replica.get("/readyz").await.problem(503, "schema-mismatch");
    assert!(
        detail.contains("It is newer, and does not work with this release: run the newer release."),
        "{detail}"
    );
    replica.get("/livez").await.ok(200);
    drop(replica);
    let told = format!(
        "a newer release of precis has used this database (migration 9000), and this release (migration {own}) does not \
         work with its schema: run the newer release"
    );
    let commands: [&[&str]; 6] = [
        &[],
        &["--no-migrate"],
        &["migrate"],
        &["keys", "list"],
        &["--no-migrate", "keys", "list"],
        &["export", "s"],
    ];
    for command in commands {
        let precis = Precis::on(&backend).set("server.bind", "127.0.0.1:0").args(command.iter().copied());
        let error = { precis }.run().await.stderr_of_failure();
        assert!(error.contains(&told), "{command:?}: {error}");
    }
    let doctor = Precis::on(&backend).set("server.bind", "127.0.0.1:0").args(["doctor"]).run().await;
    assert_eq!(doctor.code, Some(1), "{doctor:?}");
    let schema = doctor.stdout.lines().find(|line| line.contains(" schema ")).expect("a line");
    assert!(schema.starts_with("PROBLEM ") && schema.contains(&told), "{schema}");
}
