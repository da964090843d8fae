//! Clients that go away in the middle of a write: it is done, or nothing of it is.

use super::{history_is, recorded};
use crate::service::{Precis, Process, SOON};
use crate::support::backend::{Backend, on_both_stores};
use serde_json::json;
use sqlx::{Connection as _, Executor as _, PgConnection, SqliteConnection};
use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
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
                let mut connection = PgConnection::connect(&database.url()).await.expect("connected");
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

    async fn release(self) {
        match self {
            Self::Postgres(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
            Self::Sqlite(mut connection) => connection.execute("ROLLBACK").await.map(|_| ()),
        }
        .expect("let go");
    }
}

/// Sends the beginning of a request that persists exchange 1, so many bytes of it, and hangs up.
fn send_and_go(service: &Process, bytes: impl FnOnce(usize) -> usize) {
    let body = json!({"user_message": "Question 1?", "assistant_reply": "Answer 1."}).to_string();
    let head = format!(
        "POST /sessions/s/exchanges HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         idempotency-key: key-1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = head + &body;
    let mut connection = TcpStream::connect(service.url.trim_start_matches("http://")).expect("connected");
    connection.write_all(&request.as_bytes()[..bytes(request.len())]).expect("sent");
    connection.shutdown(Shutdown::Both).expect("hung up");
}

on_both_stores!(a_write_whose_client_has_gone_is_done, half_a_request_writes_nothing);

async fn a_write_whose_client_has_gone_is_done(backend: Backend) {
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    recorded(&service, 0).await;
    let lock = Lock::take(&backend).await;
    send_and_go(&service, |all| all);
    // Another connection, and so another request: by the time of its answer, the one before has been read.
    service.get("/livez").await;
    lock.release().await;
    let done = async {
        while service.get("/sessions/s").await["last_seq"] != 4 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, done).await.expect("it goes on without its client");
    history_is(&service, 0..2).await;
    recorded(&service, 1).await;
    history_is(&service, 0..2).await;
}

async fn half_a_request_writes_nothing(backend: Backend) {
    let service = Precis::new().env("DATABASE_URL", &backend.url()).start().await;
    recorded(&service, 0).await;
    for missing in [1, 10, 40, 100] {
        send_and_go(&service, |all| all - missing);
    }
    recorded(&service, 2).await;
    let expected = service.history("s").await;
    assert_eq!(expected.len(), 4);
    assert_eq!(expected[2]["content"], "Question 2?");
}
