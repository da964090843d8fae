//! Connections: accepting, serving, and graceful shutdown.
//!
//! `axum::serve` has no timeouts. It waits for ever for a client that sends the head of its request slowly, or does not
//! read its response. hyper limits the head to 100 headers and [`MAX_BUFFER_BYTES`]; larger heads get the status 431.

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Largest buffer of a connection for reading or writing, which is also the largest head. With hyper's 400 KiB, a thousand clients
/// that never end the head of a request would take 400 MB.
const MAX_BUFFER_BYTES: usize = 64 * 1024;

/// Time for a connection to close, after which the next one is asked to close, too.
const CLOSE_INTERVAL: Duration = Duration::from_millis(100);

/// Time for the head of the first request of a connection to become complete after the connection was asked to close.
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

/// The open connections, oldest first.
///
/// A new connection beyond the limit takes the place of the oldest one, which is closed after its current response. So clients that
/// keep connections open without using them do not keep others out.
#[derive(Debug)]
struct OpenConnections {
    places: Arc<Semaphore>,
    /// The signals to close, except those that were given.
    open: Mutex<BTreeMap<u64, CancellationToken>>,
}

impl OpenConnections {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, CancellationToken>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the place of a new connection. If all places are taken, asks the oldest connections to close, one after another,
    /// until one of them has.
    async fn place(&self) -> OwnedSemaphorePermit {
        loop {
            let place = Arc::clone(&self.places).acquire_owned();
            let patience = if self.places.available_permits() == 0 {
                if let Some((_, oldest)) = self.lock().pop_first() {
                    oldest.cancel();
                }
                CLOSE_INTERVAL
            } else {
                Duration::MAX
            };
            if let Ok(Ok(place)) = timeout(patience, place).await {
                return place;
            }
        }
    }
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
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let open = Arc::new(OpenConnections { places, open: Mutex::default() });
    let mut number = 0;
    // The listener of axum ignores errors of single connections, and waits if too many files are open.
    let mut accept = async || (Listener::accept(&mut listener).await, open.place().await);
    while let Some(((stream, _), place)) = stop.run_until_cancelled(accept()).await {
        // Send the last part of a response without waiting for the acknowledgement of earlier parts.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(limits.write_timeout));
        let stream = TokioIo::new(Box::pin(stream));
        let has_request = Arc::new(AtomicBool::new(false));
        let (seen, service) = (Arc::clone(&has_request), TowerToHyperService::new(router.clone()));
        let service = service_fn(move |request| {
            seen.store(true, Ordering::Relaxed);
            service.call(request)
        });
        let connection = http.serve_connection(stream, service);
        number += 1;
        let (number, close, open) = (number, stop.child_token(), Arc::clone(&open));
        open.lock().insert(number, close.clone());
        connections.spawn(async move {
            let mut connection = pin!(connection);
            // Connection errors are caused by the client, and its requests are in the log already.
            let ended = close.run_until_cancelled(connection.as_mut()).await;
            if ended.is_none() {
                connection.as_mut().graceful_shutdown();
                // A client that sends a head slowly would keep its place until the timeout for the head.
                let has_ended = timeout(LAST_HEAD_TIME, connection.as_mut()).await.is_ok();
                if !has_ended && has_request.load(Ordering::Relaxed) {
                    let _ = connection.await;
                }
            }
            open.lock().remove(&number);
            drop(place);
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}
