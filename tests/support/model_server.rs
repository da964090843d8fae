//! A model server that does what the test says: on a real socket, streamed, and badly on demand.
//!
//! ```ignore
//! let model = ModelServer::start().await;
//! model.push(Behaviour::fail(500, "down"));   // the next call, once
//! model.default(Behaviour::answer("Ada flies.")); // every call after those
//! // … calls to model.base_url() …
//! assert_eq!(model.calls().len(), 2);
//! ```
//!
//! A test that must see a call under way holds it with [`Behaviour::Held`] and waits with
//! [`ModelServer::until_calls`], so that none needs to sleep. Included by several test binaries; its own test
//! goes through all of it, in each of them.

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::post;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// What each whole answer says that it cost: tokens in and out.
pub(crate) const USAGE: (u64, u64) = (120, 30);

/// What the server does with a call.
#[derive(Clone)]
pub(crate) enum Behaviour {
    /// Streams the text and ends it properly; the finish reason with it.
    Finish(String, &'static str),
    /// Streams what the function makes of the call.
    Reply(Arc<dyn Fn(&Call) -> String + Send + Sync>),
    /// Streams the text as soon as the semaphore has a permit, which it takes.
    Held(Arc<Semaphore>, String),
    /// Streams the text after a time.
    Delayed(Duration, String),
    /// The text as one JSON object, whatever was asked for.
    Whole(String),
    /// Any other response: status, headers, body.
    Raw(u16, Vec<(&'static str, String)>, String),
    /// Takes the call and says nothing, not even a status.
    Hang,
    /// Streams the text, and then nothing more.
    HangAfter(String),
    /// Streams the text and breaks the connection.
    BreakOff(String),
    /// Streams the text and ends the response in good order, but without finish reason and end mark.
    EndEarly(String),
    /// Streams the text and then an error object.
    ErrorAfter(String, &'static str),
}

impl Behaviour {
    /// Streams the text and ends it properly.
    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self::Finish(text.into(), "stop")
    }

    /// Streams what `reply` makes of the call.
    pub(crate) fn reply(reply: impl Fn(&Call) -> String + Send + Sync + 'static) -> Self {
        Self::Reply(Arc::new(reply))
    }

    /// The prompt and more: an answer that is longer than what it should compress.
    pub(crate) fn echo_longer() -> Self {
        Self::reply(|call| format!("{} And so on.", call.user()))
    }

    /// An error status with an error object.
    pub(crate) fn fail(status: u16, message: &str) -> Self {
        let body = json!({"error": {"message": message, "type": "test"}});
        Self::Raw(status, vec![("content-type", "application/json".to_owned())], body.to_string())
    }

    /// A response that is no event stream, though it says so.
    pub(crate) fn garbage() -> Self {
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        Self::Raw(200, headers, "data: {\"choices\": oops\n\ndata: [DONE]\n\n".to_owned())
    }
}

/// A call, as it came in.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Its headers.
    pub(crate) headers: HeaderMap,
    /// Its body; null where that was not JSON.
    pub(crate) body: Value,
    /// When it came.
    pub(crate) at: Instant,
    /// Whether the client got all that there was to get.
    pub(crate) answered: bool,
}

impl Call {
    /// The system prompt; empty without one.
    pub(crate) fn system(&self) -> &str {
        self.content("system")
    }

    /// The user prompt; empty without one.
    pub(crate) fn user(&self) -> &str {
        self.content("user")
    }

    /// The header of that name; empty without it.
    pub(crate) fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value.and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    fn content(&self, role: &str) -> &str {
        let messages = self.body.pointer("/messages").and_then(Value::as_array);
        let of_role = |message: &&Value| message.get("role").and_then(Value::as_str) == Some(role);
        let message = messages.and_then(|messages| messages.iter().find(of_role));
        let content = message.and_then(|message| message.get("content"));
        content.and_then(Value::as_str).unwrap_or_default()
    }
}

/// The server; it stops when this is dropped.
pub(crate) struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<io::Result<()>>,
}

struct Shared {
    script: Mutex<Script>,
    record: Mutex<Record>,
    /// Marks each change of the record, for those who wait for one.
    changed: watch::Sender<()>,
}

struct Script {
    next: VecDeque<Behaviour>,
    default: Behaviour,
}

#[derive(Default)]
struct Record {
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
            script: Mutex::new(Script {
                next: VecDeque::new(),
                default: Behaviour::answer("Ada and Bo talked about the plan."),
            }),
            record: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let router =
            Router::new().route("/v1/chat/completions", post(handle)).with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, shared, serving }
    }

    /// What a provider's `base_url` must be.
    pub(crate) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Adds to the script: one call for each.
    pub(crate) fn push(&self, behaviour: Behaviour) {
        lock(&self.shared.script).next.push_back(behaviour);
    }

    /// For every call that the script has nothing for.
    pub(crate) fn default(&self, behaviour: Behaviour) {
        lock(&self.shared.script).default = behaviour;
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        lock(&self.shared.record).calls.clone()
    }

    /// The most calls that were under way at once.
    pub(crate) fn most_in_flight(&self) -> usize {
        lock(&self.shared.record).most_in_flight
    }

    /// Waits until there have been so many calls.
    pub(crate) async fn until_calls(&self, calls: usize) {
        self.until(|record| record.calls.len() >= calls).await;
    }

    /// Waits until no call is under way.
    pub(crate) async fn until_idle(&self) {
        self.until(|record| record.in_flight == 0).await;
    }

    async fn until(&self, reached: impl Fn(&Record) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let seen = changed.wait_for(|()| reached(&lock(&self.shared.record)));
        seen.await.expect("the server runs");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call under way; it ends when the response is sent or the client has gone.
struct Flight {
    shared: Arc<Shared>,
    index: usize,
}

impl Flight {
    fn begin(shared: &Arc<Shared>, call: Call) -> Self {
        let mut record = lock(&shared.record);
        record.calls.push(call);
        record.in_flight += 1;
        record.most_in_flight = record.most_in_flight.max(record.in_flight);
        let index = record.calls.len() - 1;
        drop(record);
        shared.changed.send_replace(());
        Self { shared: Arc::clone(shared), index }
    }

    fn answered(&self) {
        lock(&self.shared.record).calls[self.index].answered = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        lock(&self.shared.record).in_flight -= 1;
        self.shared.changed.send_replace(());
    }
}

/// How a stream goes on after its text.
enum Ending {
    Proper(&'static str),
    Silence,
    Break,
    Early,
    Error(&'static str),
}

async fn handle(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response<Body> {
    let call = Call {
        headers,
        body: serde_json::from_slice(&body).unwrap_or_default(),
        at: Instant::now(),
        answered: false,
    };
    let behaviour = {
        let mut script = lock(&shared.script);
        let next = script.next.pop_front();
        next.unwrap_or_else(|| script.default.clone())
    };
    let flight = Flight::begin(&shared, call.clone());
    match behaviour {
        Behaviour::Finish(text, reason) => streamed(flight, &text, &Ending::Proper(reason)),
        Behaviour::Reply(reply) => streamed(flight, &reply(&call), &Ending::Proper("stop")),
        Behaviour::Held(semaphore, text) => {
            semaphore.acquire().await.expect("never closed").forget();
            streamed(flight, &text, &Ending::Proper("stop"))
        }
        Behaviour::Delayed(time, text) => {
            tokio::time::sleep(time).await;
            streamed(flight, &text, &Ending::Proper("stop"))
        }
        Behaviour::Whole(text) => {
            let choice = json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"});
            flight.answered();
            axum::Json(json!({"object": "chat.completion", "choices": [choice], "usage": usage()}))
                .into_response()
        }
        Behaviour::Raw(status, headers, body) => {
            let mut response = Response::builder().status(status);
            for (name, value) in headers {
                response = response.header(name, value);
            }
            flight.answered();
            response.body(Body::from(body)).expect("a valid response")
        }
        Behaviour::Hang => std::future::pending().await,
        Behaviour::HangAfter(text) => streamed(flight, &text, &Ending::Silence),
        Behaviour::BreakOff(text) => streamed(flight, &text, &Ending::Break),
        Behaviour::EndEarly(text) => streamed(flight, &text, &Ending::Early),
        Behaviour::ErrorAfter(text, error) => streamed(flight, &text, &Ending::Error(error)),
    }
}

fn usage() -> Value {
    json!({"prompt_tokens": USAGE.0, "completion_tokens": USAGE.1, "total_tokens": USAGE.0 + USAGE.1})
}

/// The text as events, cut into pieces that end in the middle of events and of characters.
fn streamed(flight: Flight, text: &str, ending: &Ending) -> Response<Body> {
    let chunk = |delta: Value, reason: Option<&str>| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": reason});
        json!({"object": "chat.completion.chunk", "choices": [choice]}).to_string()
    };
    let mut events = ": a comment first\n\n".to_owned();
    let mut event = |data: &str| write!(events, "data: {data}\n\n").expect("a String takes all");
    event(&chunk(json!({"role": "assistant", "content": ""}), None));
    for piece in text.chars().collect::<Vec<_>>().chunks(9) {
        event(&chunk(json!({"content": piece.iter().collect::<String>()}), None));
    }
    match ending {
        Ending::Proper(reason) => {
            event(&chunk(json!({}), Some(reason)));
            event(&json!({"choices": [], "usage": usage()}).to_string());
            event("[DONE]");
        }
        Ending::Error(message) => event(&json!({"error": {"message": message}}).to_string()),
        Ending::Silence | Ending::Break | Ending::Early => {}
    }
    let pieces: Vec<_> = events
        .as_bytes()
        .chunks(501)
        .map(|piece| Ok::<_, io::Error>(Bytes::copy_from_slice(piece)))
        .collect();
    let pieces = stream::iter(pieces);
    let silent = matches!(ending, Ending::Silence);
    let broken = matches!(ending, Ending::Break);
    // The flight goes with the body: it ends when the body does, or with it when the client goes away.
    let end = stream::once(async move {
        if silent {
            std::future::pending::<Infallible>().await;
        }
        if broken {
            // A pause is what makes the server send what it has before the connection goes.
            tokio::task::yield_now().await;
            return Some(Err(io::Error::other("broken off")));
        }
        flight.answered();
        None
    });
    let body = Body::from_stream(pieces.chain(end.filter_map(std::future::ready)));
    Response::builder()
        .status(StatusCode::OK)
        .header("content-type", "text/event-stream")
        .body(body)
        .expect("a valid response")
}

#[path = "model_server/tests.rs"]
mod tests;
