//! Clients that do not read the response: they occupy a connection and memory only for a limited time.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use serde_json::json;
use std::time::Duration;
use test_case::test_case;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// The timeout for events that must happen. It is much longer than they take, so that no test fails on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);
/// Bytes of a large response, many more than the system buffers.
const LARGE: usize = 10 * 1024 * 1024;

/// Starts a service with a session whose responses are large.
async fn start(backend: &Backend, set: &[(&str, &str)]) -> TestApp {
    let app = TestApp::start(backend, set).await;
    let text = "word ".repeat(LARGE / 5 / 5);
    let message = |role: &str| json!({ "role": role, "content": text });
    app.record("s", &["user", "assistant", "user", "assistant", "user"].map(message)).await;
    app
}

/// Sends a request and reads one byte of the response.
async fn unread(app: &TestClient, path: &str) -> TcpStream {
    let address = app.url.strip_prefix("http://").and_then(|address| address.parse().ok());
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(16 * 1024).expect("set");
    let mut stream = socket.connect(address.expect("an address")).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    assert_eq!(stream.read_u8().await.expect("an answer"), b'H');
    stream
}

/// Shutdown waits up to an hour for open connections. It ends at once here only because the service closed the connection.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_is_closed_if_client_does_not_read(backend: Backend) {
    let app = start(&backend, &[("server.write_timeout", "300ms"), ("server.shutdown_grace", "1h")]).await;
    let mut whole = unread(&app, "/sessions/s/messages").await;
    let mut streamed = unread(&app, "/sessions/s/export").await;
    timeout(PATIENCE, app.stop()).await.expect("both connections were closed");
    for stream in [&mut whole, &mut streamed] {
        let mut rest = Vec::new();
        let _ = timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("closed");
        assert!(rest.starts_with(b"TTP/1.1 200") && rest.len() < LARGE, "{} bytes", rest.len());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn export_counts_as_in_flight_until_read(backend: Backend) {
    let app = start(&backend, &[("limits.max_requests_in_flight", "1")]).await;
    let mut export = unread(&app, "/sessions/s/export").await;
    let detail = app.get("/sessions").await.problem(503, "overloaded");
    assert!(detail.contains("limits.max_requests_in_flight"), "{detail}");
    let mut rest = Vec::new();
    timeout(PATIENCE, export.read_to_end(&mut rest)).await.expect("in time").expect("whole");
    assert!(rest.len() > LARGE, "{} bytes", rest.len());
    let again = async { while app.get("/sessions").await.status != 200 {} };
    timeout(PATIENCE, again).await.expect("let in again");
}
