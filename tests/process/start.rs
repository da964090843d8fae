//! Start of the service: migrations, readiness, and errors that prevent it.

use crate::service::{Precis, SOON};
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use test_case::test_case;
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

    assert_eq!(precis(&["migrate"]).run().await.stdout_of_success(), "");
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
    assert_eq!(Precis::new().args(["health", "--bind", &bind]).run().await.code, Some(1));
}

#[tokio::test]
async fn port_in_use_is_reported() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let bind = listener.local_addr().expect("an address").to_string();
    let output = Precis::new().args(["--bind", &bind]).run().await.stderr_of_failure();
    assert!(output.contains(&format!("can't listen on {bind} (server.bind)")), "{output}");
    assert!(output.contains("in use"), "{output}");
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
    let precis = Precis::new().file("clock.c", REALTIME_BEFORE_1970);
    let library = precis.folder().join("clock.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(precis.folder().join("clock.c")).arg("-ldl");
    assert!(compiler.status().expect("a C compiler").success());
    let library = library.to_str().expect("UTF-8").to_owned();
    let output = precis.env("LD_PRELOAD", &library).run().await.stderr_of_failure();
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
        assert!(output.contains(&named) && output.contains("refused"), "{output}");
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

    let output =
        Precis::new().env("DATABASE_URL", "sqlite://absent/precis.db").run().await.stderr_of_failure();
    assert!(output.contains("sqlite://absent/precis.db"), "{output}");
}

#[tokio::test]
async fn missing_database_on_postgres_is_reported() {
    let backend = Backend::postgres().await;
    let url = backend.url();
    let (server, name) = url.split_once("precis_test_").expect("a test's database");
    let rest = name.split_once('?').map(|(_, query)| format!("?{query}")).unwrap_or_default();
    let output = Precis::new()
        .env("DATABASE_URL", &format!("{server}precis_absent{rest}"))
        .run()
        .await
        .stderr_of_failure();
    assert!(output.contains("database \"precis_absent\" does not exist"), "{output}");
}
