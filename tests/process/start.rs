//! From the command to the first request: migrations, readiness, and what stands in the way of a start.

use crate::service::{Precis, SOON};
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::net::{Ipv4Addr, TcpListener};
use test_case::test_case;
use tokio::time::{Duration, Instant, timeout};

/// An empty database of each kind, by its URL. The second value keeps it alive.
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
async fn migrations_are_run_at_start_or_by_hand(backend: Backend) {
    let (url, _database) = empty(&backend).await;
    let precis =
        |args: &'static [&'static str]| Precis::new().env("DATABASE_URL", &url).args(args.iter().copied());
    let service = precis(&["--no-migrate"]).start().await;
    let response = service.request(Method::GET, "/readyz").send().await.expect("an answer");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let problem: Value = response.json().await.expect("JSON");
    assert!(problem["detail"].as_str().expect("text").contains("`precis migrate`"), "{problem}");
    service.get("/livez").await;
    let address = service.url.trim_start_matches("http://").to_owned();
    let health = || Precis::new().args(["health", "--bind", &address]);
    assert_eq!(health().run().await.code, Some(1));

    assert_eq!(precis(&["migrate"]).run().await.printed(), "");
    service.get("/readyz").await;
    assert_eq!(health().run().await.code, Some(0));
    precis(&["migrate"]).run().await.printed();
    drop(service);

    for args in [&["serve", "--no-migrate"][..], &["--no-migrate"], &["serve"]] {
        let service = precis(args).start().await;
        service.get("/readyz").await;
    }
}

/// A port of the loopback on which nothing listens.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

#[tokio::test]
async fn health_of_no_service_is_1() {
    let bind = format!("127.0.0.1:{}", free_port());
    assert_eq!(Precis::new().args(["health", "--bind", &bind]).run().await.code, Some(1));
}

#[tokio::test]
async fn a_port_in_use_is_said() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let bind = listener.local_addr().expect("an address").to_string();
    let said = Precis::new().args(["--bind", &bind]).run().await.refused();
    assert!(said.contains(&format!("can't listen on {bind} (server.bind)")), "{said}");
    assert!(said.contains("in use"), "{said}");
}

/// A service that waits for its database looks as if it had started; one that ends is started again by whatever
/// watches over it, and says why each time.
#[tokio::test]
async fn a_database_that_cannot_be_had_ends_the_start() {
    let nobody = format!("postgres://precis:hunter2@127.0.0.1:{}/precis", free_port());
    let named = nobody.replace("hunter2", "[redacted]");
    for command in ["serve", "migrate"] {
        let began = Instant::now();
        let said = Precis::new().env("DATABASE_URL", &nobody).args([command]).run().await.refused();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert!(said.contains(&named) && said.contains("refused"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    // Nobody there to say no: the time for a connection is what ends it.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = silent.local_addr().expect("an address").port();
    let mut precis = Precis::new()
        .env("DATABASE_URL", &format!("postgres://precis:hunter2@127.0.0.1:{port}/precis"))
        .set("database.acquire_timeout", "300ms");
    let said = timeout(SOON, precis.run()).await.expect("it ends").refused();
    assert!(said.contains(&format!("127.0.0.1:{port}/precis")) && !said.contains("hunter2"), "{said}");

    let said = Precis::new().env("DATABASE_URL", "sqlite://absent/precis.db").run().await.refused();
    assert!(said.contains("sqlite://absent/precis.db"), "{said}");
}

#[tokio::test]
async fn a_database_that_does_not_exist_is_said() {
    let backend = Backend::postgres().await;
    let url = backend.url();
    let (server, name) = url.split_once("precis_test_").expect("a test's database");
    let rest = name.split_once('?').map(|(_, query)| format!("?{query}")).unwrap_or_default();
    let said =
        Precis::new().env("DATABASE_URL", &format!("{server}precis_absent{rest}")).run().await.refused();
    assert!(said.contains("database \"precis_absent\" does not exist"), "{said}");
}
