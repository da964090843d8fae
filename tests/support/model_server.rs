//! A scripted model server for tests: a real socket, two wire formats, and many kinds of faults.
//!
//! ```ignore
//! let model = ModelServer::start().await;
//! model.push(Behaviour::fail(500, "down"));         // the next call
//! model.default(Behaviour::answer("Ada flies."));   // all later calls
//! // … calls to model.base_url() …
//! assert_eq!(model.calls().len(), 2);
//! ```
//!
//! The path of a call selects the wire format: `/v1/chat/completions` or `/v1/messages`. A test that needs a running call
//! holds it with [`Behaviour::Held`] and waits with [`ModelServer::until_calls`], so that no test sleeps.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header::CONNECTION};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use wire_formats::{Finish, object, stream_of};

// With a path, because the test binaries include this file from different directories.
#[path = "model_server/wire_formats.rs"]
mod wire_formats;

/// The usage of each complete response: input tokens and output tokens.
pub(crate) const USAGE: (u64, u64) = (120, 30);

/// Chunks of this size end within events and within characters.
const CHUNK_BYTES: usize = 61;

/// Returns a base URL at which every connection is refused.
pub(crate) fn refused_base_url() -> String {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
    let address = socket.local_addr().expect("a bound port");
    // The leaked socket keeps the port without listening.
    std::mem::forget(socket);
    format!("http://{address}/v1")
}

/// The reaction to a call. A text is streamed if the call requests a stream, otherwise it is sent as one JSON object.
#[derive(Clone)]
pub(crate) enum Behaviour {
    /// Sends the text and a finish reason in the words of chat completions.
    Finish(String, &'static str),
    /// Sends the result of the function.
    Reply(Arc<dyn Fn(&Call) -> String + Send + Sync>),
    /// Reacts as the result of the function.
    Choose(Arc<dyn Fn(&Call) -> Behaviour + Send + Sync>),
    /// Sends the text as soon as the semaphore has a permit, and takes the permit.
    Held(Arc<Semaphore>, String),
    Delayed(Duration, String),
    /// Sends the text as one JSON object even if a stream is requested.
    Whole(String),
    /// Status, headers and body.
    Raw(u16, Vec<(&'static str, String)>, String),
    /// Sends the parts of an event stream with a pause before each.
    Slow(Duration, Vec<String>),
    /// An error object with status and message.
    Fail(u16, String),
    /// Sends the text, or an error if the user prompt has more bytes than this.
    AtMost(usize, String),
    /// Leaves the call without a response.
    Hang,
    /// Sends the text and keeps the response open.
    HangAfter(String),
    /// Sends the text and breaks the connection.
    BreakOff(String),
    /// Sends the text and ends the response without finish reason and end mark.
    EndEarly(String),
    /// Sends the text and then an error object.
    ErrorAfter(String, &'static str),
}

impl Behaviour {
    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self::Finish(text.into(), "stop")
    }

    pub(crate) fn reply(reply: impl Fn(&Call) -> String + Send + Sync + 'static) -> Self {
        Self::Reply(Arc::new(reply))
    }

    pub(crate) fn choose(choose: impl Fn(&Call) -> Self + Send + Sync + 'static) -> Self {
        Self::Choose(Arc::new(choose))
    }

    /// Tool calls as one chat completion object: id, name and arguments of each.
    pub(crate) fn tool_calls(calls: &[(&str, &str, &str)]) -> Self {
        let call = |&(id, name, arguments): &(&str, &str, &str)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let calls: Vec<Value> = calls.iter().map(call).collect();
        let message = json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": calls});
        let body = json!({
            "id": "chatcmpl-test",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": null}],
        });
        Self::Raw(200, vec![("content-type", "application/json".to_owned())], body.to_string())
    }

    pub(crate) fn fail(status: u16, message: &str) -> Self {
        Self::Fail(status, message.to_owned())
    }

    /// An event stream with invalid JSON.
    pub(crate) fn garbage() -> Self {
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        Self::Raw(200, headers, "data: {\"choices\": oops\n\ndata: [DONE]\n\n".to_owned())
    }

    async fn reply_to(self, call: &Call) -> Reply {
        let is_stream = call.body["stream"] == true;
        let complete = |text: &str, finish| {
            if is_stream {
                Reply::stream(stream_of(call, text, finish))
            } else {
                Reply::json(200, &object(call, text, finish))
            }
        };
        match self {
            Self::Finish(text, reason) => complete(&text, Finish::Reason(reason)),
            Self::Reply(reply) => complete(&reply(call), Finish::Reason("stop")),
            Self::Choose(choose) => Box::pin(choose(call).reply_to(call)).await,
            Self::Held(semaphore, text) => {
                semaphore.acquire().await.expect("never closed").forget();
                complete(&text, Finish::Reason("stop"))
            }
            Self::Delayed(delay, text) => {
                sleep(delay).await;
                complete(&text, Finish::Reason("stop"))
            }
            Self::Whole(text) => Reply::json(200, &object(call, &text, Finish::Reason("stop"))),
            Self::Raw(status, headers, body) => Reply { status, headers, ..Reply::stream(body) },
            Self::Slow(pause, parts) => {
                let parts = parts.into_iter().map(|part| (pause, part.into())).collect();
                Reply { parts, ..Reply::stream(String::new()) }
            }
            Self::Fail(status, message) => Reply::json(status, &call.protocol.error(status, &message)),
            Self::AtMost(bytes, _) if call.user().len() > bytes => {
                let message = format!("prompt is too long: more than {bytes} bytes");
                Reply::json(400, &call.protocol.error(400, &message))
            }
            Self::AtMost(_, text) => complete(&text, Finish::Reason("stop")),
            Self::Hang => std::future::pending().await,
            Self::HangAfter(text) => Reply { end: End::Silence, ..complete(&text, Finish::Nothing) },
            Self::BreakOff(text) => Reply { end: End::Broken, ..complete(&text, Finish::Nothing) },
            Self::EndEarly(text) => complete(&text, Finish::Nothing),
            Self::ErrorAfter(text, error) => complete(&text, Finish::Error(error)),
        }
    }
}

enum End {
    Complete,
    /// The connection is closed.
    Broken,
    /// The connection stays open.
    Silence,
}

/// The response to a call.
struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    /// The parts of the body, and the pause before each of them.
    parts: VecDeque<(Duration, Bytes)>,
    end: End,
}

impl Reply {
    fn stream(body: String) -> Self {
        let body = Bytes::from(body);
        let chunks = (0..body.len()).step_by(CHUNK_BYTES);
        let chunk = |start: usize| body.slice(start..body.len().min(start + CHUNK_BYTES));
        let parts = chunks.map(|start| (Duration::ZERO, chunk(start))).collect();
        Self {
            status: 200,
            headers: vec![("content-type", "text/event-stream".to_owned())],
            parts,
            end: End::Complete,
        }
    }

    fn json(status: u16, body: &Value) -> Self {
        let headers = vec![("content-type", "application/json".to_owned())];
        Self { status, headers, ..Self::stream(body.to_string()) }
    }

    /// Returns the next part of the body. Ends the running call before the last part of a complete response, so that the
    /// client cannot act on the end of the response before the server has recorded it.
    async fn next_part(
        mut self,
        mut running: Option<RunningCall>,
    ) -> Option<(io::Result<Bytes>, (Self, Option<RunningCall>))> {
        let Some((pause, part)) = self.parts.pop_front() else {
            match self.end {
                End::Complete => return None,
                // The pause lets the HTTP server send the parts before.
                End::Broken => sleep(Duration::from_millis(20)).await,
                End::Silence => std::future::pending().await,
            }
            return Some((Err(io::Error::other("broken off by the script")), (self, running)));
        };
        if !pause.is_zero() {
            sleep(pause).await;
        }
        if self.parts.is_empty() && matches!(self.end, End::Complete) {
            running.take().into_iter().for_each(RunningCall::finish);
        }
        Some((Ok(part), (self, running)))
    }

    fn into_response(mut self, running: RunningCall) -> Response {
        let (status, headers) = (self.status, std::mem::take(&mut self.headers));
        let body = stream::unfold((self, Some(running)), |(reply, running)| reply.next_part(running));
        let mut response = Response::builder().status(status).header(CONNECTION, "close");
        for (name, value) in headers {
            response = response.header(name, value);
        }
        response.body(Body::from_stream(body)).expect("a valid response")
    }
}

/// A wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// OpenAI's chat completions.
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
}

/// A received call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) protocol: Protocol,
    /// The path with its query.
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
    /// `true` if the client received a complete response.
    pub(crate) answered: bool,
    system: String,
    user: String,
}

impl Call {
    /// Returns `None` if the request is not a call of a model.
    async fn read(request: Request) -> Option<Self> {
        let (head, body) = request.into_parts();
        let protocol = match head.uri.path() {
            "/v1/chat/completions" => Protocol::OpenAi,
            "/v1/messages" => Protocol::Anthropic,
            _ => return None,
        };
        let body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.ok()?).unwrap_or_default();
        let of_role = |role: &str| {
            let mut messages = body["messages"].as_array().into_iter().flatten();
            messages.find(|message| message["role"] == role).map(|message| text(&message["content"]))
        };
        let system = match protocol {
            Protocol::OpenAi => of_role("system").unwrap_or_default(),
            Protocol::Anthropic => text(&body["system"]),
        };
        let user = of_role("user").unwrap_or_default();
        let path = head.uri.to_string();
        Some(Self { protocol, path, headers: head.headers, body, answered: false, system, user })
    }

    /// Returns the system prompt, or an empty text.
    pub(crate) fn system(&self) -> &str {
        &self.system
    }

    /// Returns the user prompt, or an empty text.
    pub(crate) fn user(&self) -> &str {
        &self.user
    }

    /// Returns the value of a header, or an empty text.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

/// The text of a content, which is a string or a list of blocks.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// Returns the first words of the conversation, because precis rejects a summary that shares no word with it.
pub(crate) fn first_words(call: &Call) -> String {
    let lines = call.user().lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let texts: String = lines.filter_map(|line| Some(format!("{} ", line["text"].as_str()?))).collect();
    // Words with numbers would look like the numbers of messages.
    let words = texts.split(|c: char| !c.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty() && !word.contains(char::is_numeric));
    words.take(3).collect::<Vec<_>>().join(" ")
}

/// The server. It stops when it is dropped.
pub(crate) struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<io::Result<()>>,
}

struct Shared {
    state: Mutex<ServerState>,
    /// Notifies waiting tests of each change.
    changed: watch::Sender<()>,
}

struct ServerState {
    script: VecDeque<Behaviour>,
    default: Behaviour,
    calls: Vec<Call>,
    in_flight: usize,
    max_in_flight: usize,
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ModelServer {
    /// Starts a server on a free port. By default it answers each call with a summary.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound port");
        let state = ServerState {
            script: VecDeque::new(),
            default: Behaviour::reply(|call| format!("They talked about {}.", first_words(call))),
            calls: Vec::new(),
            in_flight: 0,
            max_in_flight: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: watch::Sender::new(()) });
        let router = Router::new().fallback(respond).with_state(Arc::clone(&shared));
        let task = tokio::spawn(axum::serve(listener, router).into_future());
        Self { address, shared, task }
    }

    /// Returns the base URL for both wire formats.
    pub(crate) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Appends a behaviour for one call to the script.
    pub(crate) fn push(&self, behaviour: Behaviour) {
        self.shared.state().script.push_back(behaviour);
    }

    /// Sets the behaviour for all calls after the end of the script.
    pub(crate) fn default(&self, behaviour: Behaviour) {
        self.shared.state().default = behaviour;
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.state().calls.clone()
    }

    /// Returns the largest number of simultaneous calls.
    pub(crate) fn max_in_flight(&self) -> usize {
        self.shared.state().max_in_flight
    }

    /// Waits until the server has received this number of calls.
    pub(crate) async fn until_calls(&self, calls: usize) {
        self.until(|state| state.calls.len() >= calls).await;
    }

    /// Waits until no call is running.
    pub(crate) async fn until_idle(&self) {
        self.until(|state| state.in_flight == 0).await;
    }

    async fn until(&self, condition: impl Fn(&ServerState) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let result = changed.wait_for(|()| condition(&self.shared.state()));
        result.await.expect("the server runs");
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn respond(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let Some(call) = Call::read(request).await else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let (running, behaviour) = RunningCall::start(shared, &call);
    behaviour.reply_to(&call).await.into_response(running)
}

/// A running call. It ends when the response is sent or the client closes the connection.
struct RunningCall {
    shared: Arc<Shared>,
    index: usize,
}

impl RunningCall {
    /// Records the call and takes its behaviour from the script in one step: a behaviour that a test adds after it has
    /// seen the call is for the next call.
    fn start(shared: Arc<Shared>, call: &Call) -> (Self, Behaviour) {
        let mut state = shared.state();
        state.in_flight += 1;
        state.max_in_flight = state.max_in_flight.max(state.in_flight);
        state.calls.push(call.clone());
        let index = state.calls.len() - 1;
        let behaviour = state.script.pop_front().unwrap_or_else(|| state.default.clone());
        drop(state);
        shared.changed.send_replace(());
        (Self { shared, index }, behaviour)
    }

    fn finish(self) {
        self.shared.state().calls[self.index].answered = true;
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.shared.state().in_flight -= 1;
        self.shared.changed.send_replace(());
    }
}
