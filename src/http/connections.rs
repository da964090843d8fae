//! The open connections. A new connection beyond their limit takes the place of the one that was without a request for the longest
//! time, so that clients that keep connections open without using them do not keep others out.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower_http::metrics::in_flight_requests::InFlightRequestsCounter;

/// Time for a connection to close, after which the next one is asked to close, too.
const CLOSE_INTERVAL: Duration = Duration::from_millis(100);

/// The open connections of a server.
#[derive(Debug)]
pub(super) struct Connections {
    places: Arc<Semaphore>,
    /// Number of connections and requests until now, which orders them by time.
    events: AtomicU64,
    /// The connections by the value of `events` when they opened. A connection that is asked to close is removed.
    open: Mutex<BTreeMap<u64, (Arc<Activity>, CancellationToken)>>,
}

/// The activity of a connection.
#[derive(Debug)]
pub(super) struct Activity {
    opened: u64,
    /// The number of the last request, or of the connection itself.
    last_event: AtomicU64,
    /// Requests whose response is not completely in the buffers of the connection.
    pub(super) in_flight: InFlightRequestsCounter,
    /// `true` while the client does not read, and the connection has something to send.
    is_write_blocked: AtomicBool,
}

impl Activity {
    /// Returns `true` until the response to the last request is sent.
    pub(super) fn is_responding(&self) -> bool {
        self.in_flight.get() > 0 || self.is_write_blocked.load(Ordering::Relaxed)
    }
}

impl Connections {
    pub(super) fn new(max_connections: usize) -> Self {
        let places = Arc::new(Semaphore::new(max_connections));
        Self { places, events: AtomicU64::new(0), open: Mutex::default() }
    }

    pub(super) fn new_activity(&self) -> Activity {
        let opened = self.events.fetch_add(1, Ordering::Relaxed);
        let in_flight = InFlightRequestsCounter::new();
        Activity {
            opened,
            last_event: AtomicU64::new(opened),
            in_flight,
            is_write_blocked: AtomicBool::new(false),
        }
    }

    /// Records the arrival of a request.
    pub(super) fn record_request(&self, activity: &Activity) {
        activity.last_event.store(self.events.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Adds a connection, which `close` asks to close, until the result is dropped.
    pub(super) fn open(
        self: &Arc<Self>,
        activity: &Arc<Activity>,
        close: CancellationToken,
    ) -> OpenConnection {
        self.lock().insert(activity.opened, (Arc::clone(activity), close.clone()));
        OpenConnection { connections: Arc::clone(self), opened: activity.opened, close }
    }

    /// Returns the place of a new connection. If all places are taken, asks connections to close, one after another, until one of
    /// them has: first those without a response to send, and of these the one whose last request is the oldest.
    pub(super) async fn place(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                return place;
            }
            self.close_idle();
            if let Ok(Ok(place)) = timeout(CLOSE_INTERVAL, Arc::clone(&self.places).acquire_owned()).await {
                return place;
            }
        }
    }

    fn close_idle(&self) {
        let mut open = self.lock();
        let order =
            |activity: &Activity| (activity.is_responding(), activity.last_event.load(Ordering::Relaxed));
        let idle = open.iter().min_by_key(|(_, (activity, _))| order(activity)).map(|(opened, _)| *opened);
        if let Some((_, close)) = idle.and_then(|opened| open.remove(&opened)) {
            close.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (Arc<Activity>, CancellationToken)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that is open until it is dropped.
#[derive(Debug)]
pub(super) struct OpenConnection {
    connections: Arc<Connections>,
    opened: u64,
    /// The signal to close after the current response.
    pub(super) close: CancellationToken,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.opened);
    }
}

/// A stream that records if the client does not read.
#[derive(Debug)]
pub(super) struct ObservedStream {
    stream: TcpStream,
    activity: Arc<Activity>,
}

impl ObservedStream {
    pub(super) fn new(stream: TcpStream, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    fn observed<T>(&self, written: Poll<T>) -> Poll<T> {
        self.activity.is_write_blocked.store(written.is_pending(), Ordering::Relaxed);
        written
    }
}

impl AsyncRead for ObservedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ObservedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.observed(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.observed(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
