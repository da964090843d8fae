//! Connections: accepting, serving, and graceful shutdown.
//!
//! `axum::serve` has no timeouts. It waits for ever for a client that sends the head of its request slowly, or does not
//! read its response. hyper limits the head to 100 headers and [`MAX_BUFFER_BYTES`]; larger heads get the status 431.

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Largest buffer of a connection for reading or writing, which is also the largest head. With hyper's 400 KiB, a thousand clients
/// that never end the head of a request would take 400 MB.
const MAX_BUFFER_BYTES: usize = 64 * 1024;

/// Timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Longest time for the head of a request to arrive.
    pub read: Duration,
    /// Longest time without progress while a response is sent.
    pub write: Duration,
}

/// Serves until `stop`, and then until all requests in flight are answered. A connection that exceeds a timeout is closed.
pub async fn serve(mut listener: TcpListener, router: Router, timeouts: Timeouts, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(timeouts.read).max_buf_size(MAX_BUFFER_BYTES);
    let connections = TaskTracker::new();
    // The listener of axum ignores errors of single connections, and waits if too many files are open.
    while let Some((stream, _)) = stop.run_until_cancelled(Listener::accept(&mut listener)).await {
        // Send the last part of a response without waiting for the acknowledgement of earlier parts.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(timeouts.write));
        let stream = TokioIo::new(Box::pin(stream));
        let connection = http.serve_connection(stream, TowerToHyperService::new(router.clone()));
        let stop = stop.clone();
        connections.spawn(async move {
            let mut connection = pin!(connection);
            // Connection errors are caused by the client, and its requests are in the log already.
            let ended = stop.run_until_cancelled(connection.as_mut()).await;
            if ended.is_none() {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}
