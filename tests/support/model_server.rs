//! A model server that does what the test says: on a real socket, in two protocols, streamed, and badly on demand.
//!
//! ```ignore
//! let model = ModelServer::start().await;
//! model.push(Behaviour::fail(500, "down"));   // the next call, once
//! model.default(Behaviour::answer("Ada flies.").with(Form::Crlf)); // every call after those
//! // … calls to model.base_url() …
//! assert_eq!(model.calls().len(), 2);
//! ```
//!
//! The path of a call decides which protocol it is answered in: `/v1/chat/completions` or `/v1/messages`. What the
//! server does is a [`Behaviour`], what its bytes look like a [`Form`], and any form goes with any behaviour.
//!
//! A test that must see a call under way holds it with [`Behaviour::Held`] and waits with
//! [`ModelServer::until_calls`], so that none needs to sleep. Included by several test binaries; its own test
//! goes through all of it, in each of them.
//!
//! It speaks HTTP itself, one call for each connection: a proper HTTP server does not let anyone lie about a length,
//! write single bytes, or hang up without an answer.

use std::collections::VecDeque;
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

// With paths, since the binaries include this file in different ways.
#[path = "model_server/answer.rs"]
mod answer;
#[path = "model_server/anthropic.rs"]
mod anthropic;
#[path = "model_server/behaviour.rs"]
mod behaviour;
#[path = "model_server/call.rs"]
mod call;
#[path = "model_server/form.rs"]
mod form;
#[path = "model_server/gzip.rs"]
mod gzip;
#[path = "model_server/openai.rs"]
mod openai;
#[path = "model_server/tests.rs"]
mod tests;
#[path = "model_server/wire.rs"]
mod wire;

pub(crate) use behaviour::Behaviour;
pub(crate) use call::{Call, Protocol};
pub(crate) use form::Form;

/// What each whole answer says that it cost: tokens in and out.
pub(crate) const USAGE: (u64, u64) = (120, 30);

/// What a provider's `base_url` must be to find nobody there.
pub(crate) fn refused_base_url() -> String {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
    let address = socket.local_addr().expect("a bound port");
    // It has the port, so that nobody else gets it, and never listens: every connection is refused.
    mem::forget(socket);
    format!("http://{address}/v1")
}

/// The server; it stops, and hangs up on everyone, when this is dropped.
pub(crate) struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Marks each change of the record, for those who wait for one.
    changed: watch::Sender<()>,
}

/// The script and the record.
struct State {
    next: VecDeque<Behaviour>,
    default: Behaviour,
    at_once: usize,
    connections: usize,
    calls: Vec<Call>,
    in_flight: usize,
    most_in_flight: usize,
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ModelServer {
    /// Starts one on a free port of the loopback. Until told otherwise it answers each call with a summary.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound port");
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                next: VecDeque::new(),
                default: Behaviour::answer("Ada and Bo talked about the plan."),
                at_once: usize::MAX,
                connections: 0,
                calls: Vec::new(),
                in_flight: 0,
                most_in_flight: 0,
            }),
            changed: watch::Sender::new(()),
        });
        let serving = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Self { address, shared, serving }
    }

    /// What a provider's `base_url` must be, in either protocol.
    pub(crate) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Adds to the script: one call for each.
    pub(crate) fn push(&self, behaviour: Behaviour) {
        self.shared.state().next.push_back(behaviour);
    }

    /// For every call that the script has nothing for.
    pub(crate) fn default(&self, behaviour: Behaviour) {
        self.shared.state().default = behaviour;
    }

    /// From now on a call that comes while so many are under way gets a 429 and takes nothing from the script.
    pub(crate) fn allow_at_once(&self, calls: usize) {
        self.shared.state().at_once = calls;
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.state().calls.clone()
    }

    /// How many connections there were: also those that were closed before a call could come.
    pub(crate) fn connections(&self) -> usize {
        self.shared.state().connections
    }

    /// The most calls that were under way at once, those that were turned away not counted.
    pub(crate) fn most_in_flight(&self) -> usize {
        self.shared.state().most_in_flight
    }

    /// Waits until there have been so many calls.
    pub(crate) async fn until_calls(&self, calls: usize) {
        self.until(|state| state.calls.len() >= calls).await;
    }

    /// Waits until no call is under way.
    pub(crate) async fn until_idle(&self) {
        self.until(|state| state.in_flight == 0).await;
    }

    async fn until(&self, reached: impl Fn(&State) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let seen = changed.wait_for(|()| reached(&self.shared.state()));
        seen.await.expect("the server runs");
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take(&mut self) -> Behaviour {
        self.next.pop_front().unwrap_or_else(|| self.default.clone())
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    // They end with the server, and it with them: the set goes when this task does.
    let mut connections = JoinSet::new();
    loop {
        // One that its client has given up already is no reason to stop.
        let Ok((socket, _)) = listener.accept().await else {
            continue;
        };
        let mut state = shared.state();
        state.connections += 1;
        if matches!(state.next.front().unwrap_or(&state.default), Behaviour::CloseOnAccept) {
            state.take();
            continue;
        }
        drop(state);
        connections.spawn(converse(socket, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
}

async fn converse(mut socket: TcpStream, shared: Arc<Shared>) {
    let Some(request) = wire::read(&mut socket).await else {
        return;
    };
    let (mut reader, mut writer) = socket.split();
    let Some(call) = Call::new(request) else {
        wire::no_such_route(&mut writer).await;
        return;
    };
    let (flight, behaviour) = Flight::begin(&shared, &call);
    tokio::select! {
        () = wire::gone(&mut reader) => {}
        () = behaviour.act(&call, flight, &mut writer) => {}
    }
}

/// A call under way; it ends when the response is sent or the client has gone.
struct Flight {
    shared: Arc<Shared>,
    index: usize,
    /// Whether it counts: one that is turned away must not keep the next one out.
    counted: bool,
}

impl Flight {
    /// Enters the call into the record and says what is to be done with it, in one step: what a test puts into the
    /// script after it saw the call is for the next one.
    fn begin(shared: &Arc<Shared>, call: &Call) -> (Self, Behaviour) {
        let mut call = call.clone();
        let mut state = shared.state();
        let counted = state.in_flight < state.at_once;
        let behaviour = if counted {
            state.in_flight += 1;
            state.most_in_flight = state.most_in_flight.max(state.in_flight);
            state.take()
        } else {
            Behaviour::fail(429, "too many at once")
        };
        call.turned_away = !counted;
        state.calls.push(call);
        let index = state.calls.len() - 1;
        drop(state);
        shared.changed.send_replace(());
        (Self { shared: Arc::clone(shared), index, counted }, behaviour)
    }

    /// Ends it before the last bytes go out: a client that has them may look at the record at once, or call again.
    fn answered(self) {
        self.shared.state().calls[self.index].answered = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.shared.state().in_flight -= usize::from(self.counted);
        self.shared.changed.send_replace(());
    }
}
