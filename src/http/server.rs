//! The server: accepting and serving connections, and graceful shutdown.
//!
//! `axum::serve` has no timeouts. It waits for ever for a client that sends the head of its request slowly, or does not
//! read its response. hyper limits the head to 100 headers and [`MAX_BUFFER_BYTES`]; larger heads get the status 431.

use super::connections::{Connections, ObservedStream};
use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_http::metrics::in_flight_requests::InFlightRequests;

/// Largest buffer of a connection for reading or writing, which is also the largest head. With hyper's 400 KiB, a thousand clients
/// that never end the head of a request would take 400 MB.
const MAX_BUFFER_BYTES: usize = 64 * 1024;

/// Time for the head of a request to become complete after its connection was asked to close.
const LAST_HEAD_TIME: Duration = Duration::from_secs(1);

/// Limits of the connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Largest number of open connections.
    pub max_connections: usize,
    /// Longest time for the head of a request to arrive.
    pub read_timeout: Duration,
    /// Longest time without progress while a response is sent.
    pub write_timeout: Duration,
}

/// Serves until `stop`, and then until all requests in flight are answered. A connection that exceeds a timeout is closed.
pub async fn serve(
    mut listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    stop: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.read_timeout).max_buf_size(MAX_BUFFER_BYTES);
    let tasks = TaskTracker::new();
    let connections = Arc::new(Connections::new(limits.max_connections));
    // The listener of axum ignores errors of single connections, and waits if too many files are open.
    let mut accept = async || (Listener::accept(&mut listener).await, connections.place().await);
    while let Some(((stream, _), place)) = stop.run_until_cancelled(accept()).await {
        // Send the last part of a response without waiting for the acknowledgement of earlier parts.
        let _ = stream.set_nodelay(true);
        let activity = Arc::new(connections.new_activity());
        let mut stream = TimeoutStream::new(ObservedStream::new(stream, Arc::clone(&activity)));
        stream.set_write_timeout(Some(limits.write_timeout));
        let stream = TokioIo::new(Box::pin(stream));
        let counted = InFlightRequests::new(router.clone(), activity.in_flight.clone());
        let service = TowerToHyperService::new(counted);
        let (requested, open) = (Arc::clone(&activity), Arc::clone(&connections));
        let service = service_fn(move |request| {
            open.record_request(&requested);
            service.call(request)
        });
        let connection = http.serve_connection(stream, service);
        let opened = connections.open(&activity, stop.child_token());
        tasks.spawn(async move {
            let mut connection = pin!(connection);
            // Connection errors are caused by the client, and its requests are in the log already.
            let ended = opened.close.run_until_cancelled(connection.as_mut()).await;
            if ended.is_none() {
                connection.as_mut().graceful_shutdown();
                // Without a limit, a client that never ends a head would keep its place until the timeout for heads.
                while timeout(LAST_HEAD_TIME, connection.as_mut()).await.is_err() && activity.is_responding()
                {
                }
            }
            drop((opened, place));
        });
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}
