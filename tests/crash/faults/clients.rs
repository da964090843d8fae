//! Clients that go away in the middle of a write: it is done, or nothing of it is.

use super::{history_is, recorded};
use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use serde_json::json;
use sqlx::{Connection as _, Executor as _, PgConnection, SqliteConnection};
use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use test_case::test_case;
use tokio::time::{Duration, sleep, timeout};

/// A lock that every write waits for.
enum Lock {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Lock {
    async fn take(backend: &Backend) -> Self {
        match backend {
            Backend::Postgres(database) => {
                let mut connection = PgConnection::connect(&database.admin_url()).await.expect("connected");
                connection.execute("BEGIN").await.expect("begun");
                connection.execute("LOCK TABLE messages IN EXCLUSIVE MODE").await.expect("locked");
                Self::Postgres(connection)
            }
            Backend::Sqlite(_) => {
                let mut connection = SqliteConnection::connect(&backend.url()).await.expect("connected");
                connection.execute("BEGIN IMMEDIATE").await.expect("locked");
                Self::Sqlite(connection)
            }
        }
    }

    /// Waits until a write waits for it, where that is to be seen from outside.
    async fn until_wanted(&mut self) {
        const WANTED: &str = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database =
            (SELECT oid FROM pg_database WHERE datname = current_database())";
        if let Self::Postgres(connection) = self {
            let wanted = async {
                while sqlx::query_scalar::<_, i64>(WANTED).fetch_one(&mut *connection).await.expect("seen")
                    == 0
                {}
            };
            timeout(SOON, wanted).await.expect("the write waits for the lock");
        }
    }

    async fn release(self) {
        match self {
            Self::Postgres(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
            Self::Sqlite(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
        }
        .expect("let go");
    }
}

/// Sends the beginning of a request that persists exchange 1, so many bytes of it.
fn send(service: &Process, bytes: impl FnOnce(usize) -> usize) -> TcpStream {
    let body = json!({"user_message": "Question 1?", "assistant_reply": "Answer 1."}).to_string();
    let head = format!(
        "POST /sessions/s/exchanges HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         idempotency-key: key-1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = head + &body;
    let mut connection = TcpStream::connect(service.url.trim_start_matches("http://")).expect("connected");
    connection.write_all(&request.as_bytes()[..bytes(request.len())]).expect("sent");
    connection
}

fn hang_up(connection: &TcpStream) {
    connection.shutdown(Shutdown::Both).expect("hung up");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_client_has_gone_is_done(backend: Backend) {
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    recorded(&service, 0).await;
    let mut lock = Lock::take(&backend).await;
    let client = send(&service, |all| all);
    lock.until_wanted().await;
    hang_up(&client);
    lock.release().await;
    if matches!(backend, Backend::Postgres(_)) {
        let done = async {
            while service.get("/sessions/s").await["last_seq"] != 4 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, done).await.expect("it goes on without its client");
    }
    // On SQLite it may not have begun: then nothing of it is there, and now it is done.
    recorded(&service, 1).await;
    history_is(&service, 0..2).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_request_writes_nothing(backend: Backend) {
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    recorded(&service, 0).await;
    for missing in [1, 10, 40, 100] {
        hang_up(&send(&service, |all| all - missing));
    }
    recorded(&service, 2).await;
    let expected = service.history("s").await;
    assert_eq!(expected.len(), 4);
    assert_eq!(expected[2]["content"], "Question 2?");
}
