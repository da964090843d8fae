//! The connections: accepted, served, and ended in good order.
//!
//! `axum::serve` would do, but for one thing: it waits for ever, for a client that sends the head of its request byte by
//! byte or not at all, and for one that does not read its answer. How large a head may be is hyper's to say: 100 headers, some 400 KiB; beyond that it answers 431.

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

/// How long a client is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the head of a request to arrive.
    pub read: Duration,
    /// For anything more of an answer to be taken.
    pub write: Duration,
}

/// Serves until `stop`, and then until the requests under way are answered. A connection whose client is waited for too
/// long is closed, and what was to be sent on it dropped.
pub async fn serve(mut listener: TcpListener, router: Router, timeouts: Timeouts, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(timeouts.read);
    let connections = TaskTracker::new();
    // axum's listener survives the errors of single connections, and waits where there are too many files open.
    while let Some((stream, _)) = stop.run_until_cancelled(Listener::accept(&mut listener)).await {
        // The last part of an answer needs no acknowledgement of those before it.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(timeouts.write));
        let stream = TokioIo::new(Box::pin(stream));
        let connection = http.serve_connection(stream, TowerToHyperService::new(router.clone()));
        let stop = stop.clone();
        connections.spawn(async move {
            let mut connection = pin!(connection);
            // How it ended is the client's doing; what was asked on it is in the log.
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
