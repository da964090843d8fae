//! A TCP proxy on the loopback between precis and Postgres: it cuts, delays, holds and swallows what goes through.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::sleep;

/// What happens to the bytes of every connection, until it is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    Fair,
    /// Each piece of bytes waits so long, in either direction.
    Slow(Duration),
    /// Nothing gets through, and nobody is told: a host that has gone without a word.
    Still,
    /// What the server says next is swallowed, and the connection ends there: its work is done, and nobody learns it.
    LoseAnswers,
}

struct Shared {
    server: PathBuf,
    weather: watch::Sender<Weather>,
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
    /// In front of the server that listens on this Unix socket.
    pub(crate) async fn start(server: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let weather = watch::Sender::new(Weather::Fair);
        let shared = Arc::new(Shared { server, weather, open: Mutex::default() });
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Self { address, shared, serving }
    }

    /// The URL of the database `postgres` behind it.
    pub(crate) fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The same for another role, without a password.
    pub(crate) fn url_of(&self, role: &str) -> String {
        format!("postgres://{role}@{}/postgres?sslmode=disable", self.address)
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Ends every connection, in the middle of whatever it carries.
    pub(crate) fn cut(&self) {
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
        let connection = connections.spawn(converse(client, Arc::clone(&shared)));
        let mut open = shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|connection| !connection.is_finished());
        open.push(connection);
        drop(open);
        while connections.try_join_next().is_some() {}
    }
}

/// Ends, with both sockets, when either side does.
async fn converse(mut client: TcpStream, shared: Arc<Shared>) {
    let Ok(mut server) = UnixStream::connect(&shared.server).await else {
        return;
    };
    // It would add a delay of its own to small packets.
    let _ = client.set_nodelay(true);
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let weather = &shared.weather;
    let question = async {
        let mut bytes = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            brave(weather, false).await?;
            to_server.write_all(&bytes[..count]).await.ok()?;
        }
        None::<()>
    };
    let answer = async {
        let mut bytes = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from_server.read(&mut bytes).await {
            brave(weather, true).await?;
            to_client.write_all(&bytes[..count]).await.ok()?;
        }
        None::<()>
    };
    tokio::select! {
        _ = question => {}
        _ = answer => {}
    }
}

/// Waits as the weather has it; `None`: the connection ends here.
async fn brave(weather: &watch::Sender<Weather>, is_answer: bool) -> Option<()> {
    let now = *weather.borrow();
    match now {
        Weather::LoseAnswers if is_answer => None,
        Weather::Fair | Weather::LoseAnswers => Some(()),
        Weather::Slow(time) => {
            sleep(time).await;
            Some(())
        }
        Weather::Still => {
            let mut changes = weather.subscribe();
            changes.wait_for(|weather| *weather != Weather::Still).await.ok()?;
            Some(())
        }
    }
}
