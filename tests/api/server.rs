//! Connections: a client that does not read its response occupies one and memory only for a limited time, and idle ones make room for
//! others.

use crate::support::app::TestApp;
use crate::support::backend::Backend;
use crate::support::client::TestClient;
use serde_json::json;
use std::io::ErrorKind;
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

/// Opens a connection and sends a request on it, which keeps it open.
async fn get(app: &TestClient, path: &str) -> TcpStream {
    let address = app.url.strip_prefix("http://").expect("an address");
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    stream
}

/// Reads a response to its end, which is that of its JSON.
async fn read_response(stream: &mut TcpStream) -> String {
    let mut response = Vec::new();
    while !response.ends_with(b"}\n") {
        let byte = timeout(PATIENCE, stream.read_u8()).await.expect("in time").expect("a response");
        response.push(byte);
    }
    String::from_utf8(response).expect("text")
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_connection_replaces_the_one_that_is_idle_for_the_longest_time(backend: Backend) {
    let app = start(&backend, &[("server.max_connections", "4")]).await;
    let mut responding = unread(&app, "/sessions/s/export").await;
    let mut used = get(&app, "/livez").await;
    assert!(read_response(&mut used).await.starts_with("HTTP/1.1 200"));
    let mut silent =
        TcpStream::connect(app.url.strip_prefix("http://").expect("an address")).await.expect("open");
    let mut idle = get(&app, "/livez").await;
    assert!(read_response(&mut idle).await.starts_with("HTTP/1.1 200"));
    request_again(&mut used).await;
    let mut kept = Vec::new();
    for closed in [&mut silent, &mut idle] {
        let mut new = get(&app, "/livez").await;
        assert!(read_response(&mut new).await.starts_with("HTTP/1.1 200"));
        assert_eq!(
            timeout(PATIENCE, closed.read_u8()).await.expect("closed").map_err(|error| error.kind()),
            Err(ErrorKind::UnexpectedEof)
        );
        request_again(&mut used).await;
        kept.push(new);
    }
    let mut rest = vec![0; LARGE];
    timeout(PATIENCE, responding.read_exact(&mut rest)).await.expect("in time").expect("open");
}

/// Sends another request in an open connection.
async fn request_again(stream: &mut TcpStream) {
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("sent");
    assert!(read_response(stream).await.starts_with("HTTP/1.1 200"));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_heads_keep_no_connection_out(backend: Backend) {
    let app = TestApp::start(&backend, &[("server.max_connections", "2")]).await;
    let address = app.url.strip_prefix("http://").expect("an address");
    let mut unfinished = Vec::new();
    for requests in 0..2 {
        let mut slow = TcpStream::connect(address).await.expect("open");
        for _ in 0..requests {
            request_again(&mut slow).await;
        }
        slow.write_all(b"GET /livez HT").await.expect("sent");
        unfinished.push(slow);
    }
    let mut other = get(&app, "/livez").await;
    // Half of the time after which an unfinished head ends its connection without the limit.
    let response = timeout(Duration::from_secs(30), read_response(&mut other)).await.expect("kept out");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_connection_receives_its_response(backend: Backend) {
    let app = start(&backend, &[("server.max_connections", "1")]).await;
    let mut oldest = unread(&app, "/sessions/s/export").await;
    let mut second = get(&app, "/livez").await;
    let mut rest = Vec::new();
    timeout(PATIENCE, oldest.read_to_end(&mut rest)).await.expect("in time").expect("whole");
    assert!(rest.len() > LARGE, "{} bytes", rest.len());
    assert!(read_response(&mut second).await.starts_with("HTTP/1.1 200"));
}
