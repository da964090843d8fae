//! Clients that disconnect during a write: the write completes, or nothing is written.

use super::{append_exchange, assert_history};
use crate::service::{Precis, Process, SOON};
use crate::support::backend::Backend;
use serde_json::json;
use sqlx::{Connection as _, Executor as _, PgConnection, SqliteConnection};
use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use test_case::test_case;
use tokio::time::{Duration, sleep, timeout};

/// A lock that blocks every write.
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

    /// Waits until a write is blocked by the lock. SQLite does not show this.
    async fn wait_for_blocked_write(&mut self) {
        const BLOCKED: &str = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database =
            (SELECT oid FROM pg_database WHERE datname = current_database())";
        if let Self::Postgres(connection) = self {
            let blocked = async {
                while sqlx::query_scalar::<_, i64>(BLOCKED)
                    .fetch_one(&mut *connection)
                    .await
                    .expect("queried")
                    == 0
                {}
            };
            timeout(SOON, blocked).await.expect("the write waits for the lock");
        }
    }

    async fn release(self) {
        match self {
            Self::Postgres(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
            Self::Sqlite(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
        }
        .expect("released");
    }
}

/// Sends the first bytes of a request that appends exchange 1. The closure returns their number for the request size.
fn send_prefix(service: &Process, bytes: impl FnOnce(usize) -> usize) -> TcpStream {
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

fn disconnect(connection: &TcpStream) {
    connection.shutdown(Shutdown::Both).expect("disconnected");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_of_disconnected_client_completes(backend: Backend) {
    let service = Precis::on(&backend).start().await;
    append_exchange(&service, 0).await;
    let mut lock = Lock::take(&backend).await;
    let client = send_prefix(&service, |all| all);
    lock.wait_for_blocked_write().await;
    disconnect(&client);
    lock.release().await;
    if matches!(backend, Backend::Postgres(_)) {
        let done = async {
            while service.get("/sessions/s").await["last_seq"] != 4 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, done).await.expect("the write completes without its client");
    }
    // On SQLite the write may not have begun. Then this request appends the exchange.
    append_exchange(&service, 1).await;
    assert_history(&service, 0..2).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_request_writes_nothing(backend: Backend) {
    let service = Precis::on(&backend).start().await;
    append_exchange(&service, 0).await;
    for missing in [1, 10, 40, 100] {
        disconnect(&send_prefix(&service, |all| all - missing));
    }
    append_exchange(&service, 2).await;
    let expected = service.history("s").await;
    assert_eq!(expected.len(), 4);
    assert_eq!(expected[2]["content"], "Question 2?");
}
