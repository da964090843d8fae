//! A TCP proxy between precis and Postgres that cuts connections and delays, holds back or drops data.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::sleep;

/// The fault of all connections until another one is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyFault {
    None,
    /// Delays each chunk in both directions.
    Delay(Duration),
    /// Holds all data back and keeps the connections open, like a host that has disappeared.
    Silence,
    /// Drops the next response of the server and closes the connection: the work is done, but the client does not know.
    DropResponses,
    /// Replaces the response to the commit of the next transaction that contains [`LOST_BY_POOLER`] by the error of a pooler that has lost
    /// the server, and closes the connection.
    PoolerError,
}

/// The text that marks a request for [`ProxyFault::PoolerError`].
pub(crate) const LOST_BY_POOLER: &str = "lost by the pooler";

/// The error of `PgBouncer` if the connection to the server breaks, in the wire format of Postgres.
const POOLER_ERROR: &[u8] = b"E\0\0\0\x30SFATAL\0VFATAL\0C08P01\0Mserver conn crashed?\0\0";

struct Shared {
    server: PathBuf,
    fault: watch::Sender<ProxyFault>,
    open: Mutex<Vec<AbortHandle>>,
}

pub(crate) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Proxy {
    /// Starts a proxy for the server that listens on this Unix socket.
    pub(crate) async fn start(server: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let fault = watch::Sender::new(ProxyFault::None);
        let shared = Arc::new(Shared { server, fault, open: Mutex::default() });
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Self { address, shared, serving }
    }

    /// Returns the URL of the database `postgres`.
    pub(crate) fn url(&self) -> String {
        self.url_for_role("postgres")
    }

    /// Returns the URL for another role without a password.
    pub(crate) fn url_for_role(&self, role: &str) -> String {
        format!("postgres://{role}@{}/postgres?sslmode=disable", self.address)
    }

    pub(crate) fn set_fault(&self, fault: ProxyFault) {
        self.shared.fault.send_replace(fault);
    }

    /// Closes all connections immediately.
    pub(crate) fn cut_connections(&self) {
        let mut open = self.shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        for connection in open.drain(..) {
            connection.abort();
        }
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let connection = connections.spawn(forward(client, Arc::clone(&shared)));
        let mut open = shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|connection| !connection.is_finished());
        open.push(connection);
        drop(open);
        while connections.try_join_next().is_some() {}
    }
}

/// Forwards both directions until one side closes its connection.
async fn forward(mut client: TcpStream, shared: Arc<Shared>) {
    let Ok(mut server) = UnixStream::connect(&shared.server).await else {
        return;
    };
    // Nagle's algorithm would delay small packets.
    let _ = client.set_nodelay(true);
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let fault = &shared.fault;
    let is_lost = AtomicBool::new(false);
    let requests = async {
        let (mut bytes, mut is_marked) = (vec![0; 16 * 1024], false);
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            apply_fault(fault, false).await?;
            let mut parts = bytes[..count].windows(LOST_BY_POOLER.len());
            is_marked |= *fault.borrow() == ProxyFault::PoolerError
                && parts.any(|part| part == LOST_BY_POOLER.as_bytes());
            if is_marked && bytes[..count].windows(6).any(|part| part == b"COMMIT") {
                is_marked = false;
                fault.send_replace(ProxyFault::None);
                is_lost.store(true, Ordering::Relaxed);
            }
            to_server.write_all(&bytes[..count]).await.ok()?;
        }
        None::<()>
    };
    let responses = async {
        let mut bytes = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            if is_lost.load(Ordering::Relaxed) {
                to_client.write_all(POOLER_ERROR).await.ok()?;
                return None;
            }
            apply_fault(fault, true).await?;
            to_client.write_all(&bytes[..count]).await.ok()?;
        }
        None::<()>
    };
    tokio::select! {
        _ = requests => {}
        _ = responses => {}
    }
}

/// Returns `None` if the connection must be closed.
async fn apply_fault(fault: &watch::Sender<ProxyFault>, is_response: bool) -> Option<()> {
    let now = *fault.borrow();
    match now {
        ProxyFault::DropResponses if is_response => None,
        ProxyFault::None | ProxyFault::DropResponses | ProxyFault::PoolerError => Some(()),
        ProxyFault::Delay(time) => {
            sleep(time).await;
            Some(())
        }
        ProxyFault::Silence => {
            let mut changes = fault.subscribe();
            changes.wait_for(|fault| *fault != ProxyFault::Silence).await.ok()?;
            Some(())
        }
    }
}
