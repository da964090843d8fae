//! Start of the service: migrations, readiness, and errors that prevent it.

use crate::service::{Precis, Process, SOON, compile_library, messages};
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use test_case::test_case;
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, timeout};

/// Returns the URL of an empty database. The second value keeps the database alive.
async fn empty(backend: &Backend) -> (String, Option<TestDatabase>) {
    match backend {
        Backend::Postgres(_) => {
            let database = TestDatabase::create("empty", async |_| {}).await;
            (database.url(), Some(database))
        }
        Backend::Sqlite(folder) => (format!("sqlite://{}", folder.path().join("empty.db").display()), None),
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrations_run_at_start_or_by_command(backend: Backend) {
    let (url, _database) = empty(&backend).await;
    let precis =
        |args: &'static [&'static str]| Precis::new().env("DATABASE_URL", &url).args(args.iter().copied());
    let service = precis(&["--no-migrate"]).start().await;
    let detail = service.get("/readyz").await.problem(503, "schema-mismatch");
    assert!(detail.contains("`precis migrate`"), "{detail}");
    service.get("/livez").await.ok(200);
    let address = service.url.trim_start_matches("http://").to_owned();
    let health = || Precis::new().args(["health", "--bind", &address]);
    assert_eq!(health().run().await.code, Some(1));

    let migrate = precis(&["migrate"]).run().await;
    assert!(migrate.stderr.trim_end().contains(" is at migration "), "{migrate:?}");
    assert_eq!(migrate.stdout_of_success(), "");
    service.get("/readyz").await.ok(200);
    assert_eq!(health().run().await.code, Some(0));
    precis(&["migrate"]).run().await.stdout_of_success();
    drop(service);

    for args in [&["serve", "--no-migrate"][..], &["--no-migrate"], &["serve"]] {
        let service = precis(args).start().await;
        service.get("/readyz").await.ok(200);
    }
}

/// Returns an unused loopback port.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

#[tokio::test]
async fn health_without_service_exits_with_1() {
    let bind = format!("127.0.0.1:{}", free_port());
    let told = Precis::new().args(["health", "--bind", &bind]).run().await.stderr_of_failure();
    let explained = format!("no service answers at http://{bind}/readyz (server.bind): start it");
    assert!(told.contains(&explained), "{told}");
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let bind = listener.local_addr().expect("an address").to_string();
    let output = Precis::new().args(["--bind", &bind]).run().await.stderr_of_failure();
    assert!(output.contains(&format!("can't listen on {bind} (server.bind)")), "{output}");
    assert!(output.ends_with("choose another address with --bind"), "{output}");
}

/// The HTTP server would panic with each response.
#[tokio::test]
async fn clock_before_1970_ends_the_start() {
    // Preloaded into the process, because only root can set the clock. The other clocks keep their time.
    const REALTIME_BEFORE_1970: &str = r#"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <time.h>
        int clock_gettime(clockid_t clock, struct timespec *time) {
            int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
            int result = real(clock, time);
            if (clock == CLOCK_REALTIME) *time = (struct timespec){-3600, 500000000};
            return result;
        }"#;
    let library = compile_library(REALTIME_BEFORE_1970);
    let mut precis = Precis::new().env("LD_PRELOAD", library.to_str().expect("UTF-8"));
    let output = precis.run().await.stderr_of_failure();
    assert!(output.contains("the clock of this machine is 3599 seconds before 1970"), "{output}");
}

/// A service that waited for its database would seem to have started. Instead it exits with the error, and its
/// supervisor starts it again.
#[tokio::test]
async fn unreachable_database_ends_the_start() {
    let unreachable = format!("postgres://precis:hunter2@127.0.0.1:{}/precis", free_port());
    let named = unreachable.replace("hunter2", "[redacted]");
    for command in ["serve", "migrate"] {
        let began = Instant::now();
        let output =
            Precis::new().env("DATABASE_URL", &unreachable).args([command]).run().await.stderr_of_failure();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert!(output.contains(&named) && output.contains("no server listens on 127.0.0.1:"), "{output}");
        assert!(!output.contains("hunter2"), "{output}");
    }
    // The address does not respond, so the attempt ends with the connection timeout.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = silent.local_addr().expect("an address").port();
    let mut precis = Precis::new()
        .env("DATABASE_URL", &format!("postgres://precis:hunter2@127.0.0.1:{port}/precis"))
        .set("database.acquire_timeout", "300ms");
    let output = timeout(SOON, precis.run()).await.expect("it ends").stderr_of_failure();
    assert!(output.contains(&format!("127.0.0.1:{port}/precis")) && !output.contains("hunter2"), "{output}");
}

/// Returns the error of `precis migrate`, which explains one problem in one line.
async fn explained(url: &str) -> String {
    let output = Precis::new().env("DATABASE_URL", url).args(["migrate"]).run().await.stderr_of_failure();
    let error = output.lines().last().unwrap_or_default().to_owned();
    assert!(error.starts_with("precis: can't work with the database "), "{output}");
    let (_, explanation) = error.split_once("(database.url): ").expect("an explanation");
    explanation.to_owned()
}

#[tokio::test]
async fn problems_of_sqlite_files_are_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let url = |name: &str| format!("sqlite://{}", path(name));
    let open = async |name: &str| {
        let file = SqliteConnectOptions::new().filename(folder.path().join(name)).create_if_missing(true);
        file.connect().await.expect("opened")
    };
    let told = explained("sqlite://absent/precis.db").await;
    assert!(told.contains("/absent does not exist: create it"), "{told}");
    let told = explained(&url("")).await;
    assert!(told.ends_with("is a folder: name a file in it"), "{told}");
    let told = explained("sqlite:///proc/precis.db").await;
    assert!(told.contains("can't open /proc/precis.db: give this user access"), "{told}");

    std::fs::write(path("text.db"), "not a database, but a text of more than a hundred bytes".repeat(9))
        .expect("written");
    let told = explained(&url("text.db")).await;
    assert_eq!(
        told,
        format!("{} is no SQLite database: name another file, or restore a backup", path("text.db"))
    );
    open("other.db").await.execute("CREATE TABLE sessions (id)").await.expect("a table");
    let told = explained(&url("other.db")).await;
    assert!(told.contains("has tables of another program (table sessions already exists)"), "{told}");

    let migrate = Precis::new().env("DATABASE_URL", &url("newer.db")).args(["migrate"]).run().await;
    assert_eq!(migrate.code, Some(0), "{migrate:?}");
    let created = format!("created the database {}", path("newer.db"));
    assert!(migrate.stderr.contains(&created), "{migrate:?}");
    let mut newer = open("newer.db").await;
    newer.execute("PRAGMA locking_mode = exclusive").await.expect("set");
    newer.execute("BEGIN EXCLUSIVE").await.expect("locked");
    let told = explained(&url("newer.db")).await;
    assert!(told.starts_with("another process has locked "), "{told}");
    newer
        .execute("UPDATE _sqlx_migrations SET version = 9999 WHERE version = 1; COMMIT")
        .await
        .expect("changed");
    newer.close().await.expect("closed");
    let told = explained(&url("newer.db")).await;
    assert!(told.starts_with("a newer release of precis has used this database (migration 9999)"), "{told}");
}

#[tokio::test]
async fn problems_of_postgres_are_explained() {
    let database = TestDatabase::create("empty", async |_| {}).await;
    let url = database.url();
    let (server, name) = url.split_once("precis_test_").expect("a test's database");
    let rest = name.split_once('?').map(|(_, query)| format!("?{query}")).unwrap_or_default();
    let told = explained(&format!("{server}precis_absent{rest}")).await;
    assert!(told.contains("has no database \"precis_absent\": create it with createdb"), "{told}");

    let mut admin = PgConnection::connect(&database.admin_url()).await.expect("connected");
    admin
        .execute("CREATE TABLE sessions (id integer); GRANT ALL ON sessions TO public")
        .await
        .expect("a table");
    let told = explained(&url).await;
    assert!(told.contains("has objects of another program (relation \"sessions\" already exists)"), "{told}");
    admin.execute("DROP TABLE sessions; REVOKE ALL ON SCHEMA public FROM public").await.expect("revoked");
    admin.execute("ALTER SCHEMA public OWNER TO CURRENT_USER").await.expect("owned");
    let told = explained(&url).await;
    assert!(told.ends_with("grant it USAGE and CREATE on one"), "{told}");
    admin.execute("GRANT USAGE ON SCHEMA public TO public").await.expect("granted");
    let told = explained(&url).await;
    assert!(told.contains("lacks a privilege (permission denied for schema public)"), "{told}");
}

/// The privileges are those of docs/operations.md.
#[tokio::test]
async fn role_without_tables_of_its_own_serves_a_migrated_database() {
    let database = TestDatabase::create("empty", async |_| {}).await;
    Precis::new().env("DATABASE_URL", &database.url()).args(["migrate"]).run().await.stdout_of_success();
    let mut admin = PgConnection::connect(&database.admin_url()).await.expect("connected");
    // Roles belong to the server, which other tests use, too.
    let role = format!("precis_service_{}", std::process::id());
    let create = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'precis';
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
    );
    admin.execute(AssertSqlSafe(create)).await.expect("created");
    let options: PgConnectOptions = database.url().parse().expect("a URL");
    let url = options.username(&role).password("precis").to_url_lossy();
    let precis = |args: &'static [&'static str]| {
        Precis::new().env("DATABASE_URL", url.as_str()).args(args.iter().copied())
    };

    assert!(precis(&["serve"]).run().await.stderr_of_failure().contains("lacks a privilege"));
    let service = precis(&["--no-migrate"]).start().await;
    service.post("/sessions/s/exchanges", json!({"messages": messages(2)})).await.ok(201);
    service.post("/sessions/s/context", json!({})).await.ok(200);
    service.get("/search?q=message").await.ok(200);
    service.delete("/sessions/s").await.ok(204);
    precis(&["--no-migrate", "keys", "create", "--tenant", "a"]).run().await.stdout_of_success();
    drop(service);
    let remove = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    admin.execute(AssertSqlSafe(remove)).await.expect("removed");
}

#[tokio::test]
async fn limit_of_open_files_leaves_files_for_the_database() {
    let start = |limit: &str| {
        let mut shell = Command::new("sh");
        let binary = env!("CARGO_BIN_EXE_precis");
        shell.args(["-c", &format!("{limit} && exec \"$0\" \"$@\""), binary]);
        Precis::started_by(shell).start()
    };
    let files = |service: &Process| {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", service.id())).expect("limits");
        let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line").to_owned();
        line.split_whitespace().nth(3).expect("the soft limit").to_owned()
    };
    // The soft limit is raised as far as needed.
    let service = start("ulimit -Sn 300").await;
    assert_eq!(files(&service), "4352");
    drop(service);
    let service = start("ulimit -n 300").await;
    assert_eq!(files(&service), "300");
    let warning = service.wait_for_log("raise the hard limit of open files").await;
    assert_eq!((&warning["fitting"], &warning["max_connections"]), (&json!(44), &json!(4096)));
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.push(TcpStream::connect(service.url.trim_start_matches("http://")).await.expect("connected"));
    }
    service.record("s", &messages(2)).await;
}
