//! A scripted model server for tests: a real socket, two wire formats, and many kinds of faults.
//!
//! ```ignore
//! let model = ModelServer::start().await;
//! model.push(Behaviour::fail(500, "down"));   // the next call
//! model.default(Behaviour::answer("Ada flies.").with(Form::Crlf)); // all later calls
//! // … calls to model.base_url() …
//! assert_eq!(model.calls().len(), 2);
//! ```
//!
//! The path of a call selects the wire format: `/v1/chat/completions` or `/v1/messages`. [`Behaviour`] is the content of
//! the response, [`Form`] its bytes. A test that needs a running call holds it with [`Behaviour::Held`] and waits with
//! [`ModelServer::until_calls`], so that no test sleeps.

use axum::http::HeaderMap;
use http::{End, Request, Response, closed, read_request};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::tcp::WriteHalf;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use wire_formats::{Completion, Event, ping};

// With paths, because the test binaries include this file from different directories.
#[path = "model_server/http.rs"]
mod http;
#[path = "model_server/wire_formats.rs"]
mod wire_formats;

/// The usage of each complete response: input tokens and output tokens.
pub(crate) const USAGE: (u64, u64) = (120, 30);

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
    /// Sends the text as soon as the semaphore has a permit, and takes the permit.
    Held(Arc<Semaphore>, String),
    Delayed(Duration, String),
    /// Sends the text as one JSON object even if a stream is requested.
    Whole(String),
    /// Sends reasoning in its own field, and then the text.
    Reasoning(String, String),
    /// Sends the pieces of a text with a pause before each.
    Trickle(Duration, Vec<String>),
    /// Sends comments forever.
    CommentsOnly(Duration),
    /// Sends events without content forever.
    PingsOnly(Duration),
    /// Status, headers and body.
    Raw(u16, Vec<(&'static str, String)>, String),
    /// An error object with status, message and headers.
    Fail(u16, String, Vec<(&'static str, String)>),
    /// Sends the text, or an error if the user prompt has more bytes than this.
    AtMost(usize, String),
    /// Closes the connection before the request is read; it does not count as a call.
    CloseOnAccept,
    /// Closes the connection without a response.
    Close,
    /// Sends nothing.
    Hang,
    /// Sends the text and then nothing more.
    HangAfter(String),
    /// Sends the text and breaks the connection.
    BreakOff(String),
    /// Sends the text and ends the response without finish reason and end mark.
    EndEarly(String),
    /// Sends the text and the end mark, but no finish reason.
    MarkOnly(String),
    /// Sends the text and the finish reason, but no end mark.
    ReasonOnly(String),
    /// Sends the text and then an error object.
    ErrorAfter(String, &'static str),
    Formed(Box<Behaviour>, Form),
}

/// A variation of the bytes of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    SingleBytes,
    /// Lines end with CR LF.
    Crlf,
    /// Lines end with CR.
    Cr,
    ByteOrderMark,
    Comments,
    UnknownEvents,
    UnknownFields,
    /// Starts with a comment of this size.
    LargeComment(usize),
    /// Starts with an unknown event of this size.
    LargeEvent(usize),
    NoUsage,
    ContentType(&'static str),
    /// Announces more bytes than are sent.
    LengthOver(usize),
    /// Announces fewer bytes than are sent.
    LengthUnder(usize),
}

impl Behaviour {
    pub(crate) fn answer(text: impl Into<String>) -> Self {
        Self::Finish(text.into(), "stop")
    }

    pub(crate) fn reply(reply: impl Fn(&Call) -> String + Send + Sync + 'static) -> Self {
        Self::Reply(Arc::new(reply))
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

    /// A response that is longer than the prompt.
    pub(crate) fn echo_longer() -> Self {
        Self::reply(|call| format!("{} And so on.", call.user()))
    }

    /// Reasoning in a think block within the text.
    pub(crate) fn reasoning_in_text(reasoning: &str, text: &str) -> Self {
        Self::answer(format!("<think>\n{reasoning}\n</think>\n\n{text}"))
    }

    pub(crate) fn fail(status: u16, message: &str) -> Self {
        Self::fail_with(status, message, &[])
    }

    pub(crate) fn fail_with(status: u16, message: &str, headers: &[(&'static str, &str)]) -> Self {
        let headers = headers.iter().map(|&(name, value)| (name, value.to_owned()));
        Self::Fail(status, message.to_owned(), headers.collect())
    }

    /// The error page of a proxy.
    pub(crate) fn web_page(status: u16) -> Self {
        let page =
            format!("<html>\r\n<head><title>{status}</title></head>\r\n<body>{status}</body>\r\n</html>\r\n");
        Self::Raw(status, vec![("content-type", "text/html".to_owned())], page)
    }

    pub(crate) fn redirect(status: u16, location: impl Into<String>) -> Self {
        Self::Raw(status, vec![("location", location.into())], String::new())
    }

    /// An event stream with invalid JSON.
    pub(crate) fn garbage() -> Self {
        let headers = vec![("content-type", "text/event-stream".to_owned())];
        Self::Raw(200, headers, "data: {\"choices\": oops\n\ndata: [DONE]\n\n".to_owned())
    }

    /// Adds a form; their order does not matter.
    pub(crate) fn with(self, form: Form) -> Self {
        Self::Formed(Box::new(self), form)
    }

    /// Returns the response, or `None` if the connection is closed without one.
    async fn response(mut self, call: &Call) -> Option<Response> {
        let mut forms = Vec::new();
        while let Self::Formed(behaviour, form) = self {
            forms.push(form);
            self = *behaviour;
        }
        let mut is_stream = call.body["stream"] == true;
        let mut end = End::Complete;
        let mut completion = match self {
            Self::Finish(text, reason) => {
                Completion { finish_reason: Some(reason), ..Completion::complete(&text) }
            }
            Self::Reply(reply) => Completion::complete(&reply(call)),
            Self::Held(semaphore, text) => {
                semaphore.acquire().await.expect("never closed").forget();
                Completion::complete(&text)
            }
            Self::Delayed(delay, text) => {
                tokio::time::sleep(delay).await;
                Completion::complete(&text)
            }
            Self::Whole(text) => {
                is_stream = false;
                Completion::complete(&text)
            }
            Self::Reasoning(reasoning, text) => Completion { reasoning, ..Completion::complete(&text) },
            Self::Trickle(pause, pieces) => Completion { pieces, pause, ..Completion::complete("") },
            Self::CommentsOnly(pause) => {
                end = End::Repeat(pause, b": still here\n\n".to_vec());
                Completion::without_end("")
            }
            Self::PingsOnly(pause) => {
                end = End::Repeat(pause, event_text(&ping(call), &forms).into_bytes());
                Completion::without_end("")
            }
            Self::HangAfter(text) => {
                end = End::Silence;
                Completion::without_end(&text)
            }
            Self::BreakOff(text) => {
                end = End::Broken;
                Completion::without_end(&text)
            }
            Self::EndEarly(text) => Completion::without_end(&text),
            Self::MarkOnly(text) => Completion { finish_reason: None, ..Completion::complete(&text) },
            Self::ReasonOnly(text) => Completion { has_end_mark: false, ..Completion::complete(&text) },
            Self::ErrorAfter(text, error) => {
                Completion { error: Some(error), ..Completion::without_end(&text) }
            }
            Self::Raw(status, headers, body) => return Some(Response::complete(status, headers, body)),
            Self::Fail(status, message, headers) => return Some(error(call, status, &message, headers)),
            Self::AtMost(bytes, _) if call.user().len() > bytes => {
                let message = format!("prompt is too long: more than {bytes} bytes");
                return Some(error(call, 400, &message, Vec::new()));
            }
            Self::AtMost(_, text) => Completion::complete(&text),
            Self::Close | Self::CloseOnAccept => return None,
            Self::Hang => std::future::pending().await,
            Self::Formed(..) => unreachable!("the forms are removed above"),
        };
        completion.has_usage = !forms.contains(&Form::NoUsage);
        let response = if is_stream {
            let parts = if matches!(end, End::Repeat(..)) {
                Vec::new()
            } else {
                event_parts(&completion.events(call), &forms)
            };
            let headers = vec![("content-type", "text/event-stream".to_owned())];
            Response { status: 200, headers, parts, content_length: None, end, single_bytes: false }
        } else {
            let mut text = completion.object(call).to_string();
            let has_end = completion.error.is_some() || completion.finish_reason.is_some();
            if !has_end && !completion.has_end_mark {
                text.truncate(text.floor_char_boundary(text.len() / 2));
            }
            let headers = vec![("content-type", "application/json".to_owned())];
            Response { end, ..Response::complete(200, headers, text) }
        };
        Some(formed(response, &forms))
    }
}

fn error(call: &Call, status: u16, message: &str, mut headers: Vec<(&'static str, String)>) -> Response {
    headers.push(("content-type", "application/json".to_owned()));
    Response::complete(status, headers, call.protocol.error(status, message).to_string())
}

fn formed(mut response: Response, forms: &[Form]) -> Response {
    let length: usize = response.parts.iter().map(|(_, bytes)| bytes.len()).sum();
    for form in forms {
        match *form {
            Form::ContentType(content_type) => {
                response.headers.retain(|(name, _)| *name != "content-type");
                response.headers.push(("content-type", content_type.to_owned()));
            }
            Form::LengthOver(more) => response.content_length = Some(length + more),
            Form::LengthUnder(less) => response.content_length = Some(length.saturating_sub(less)),
            Form::SingleBytes => response.single_bytes = true,
            _ => {}
        }
    }
    response
}

/// The bytes of a stream, and the pause before each part.
fn event_parts(events: &[Event], forms: &[Form]) -> Vec<(Duration, Vec<u8>)> {
    let mut prefix = ": a comment first\n\n".to_owned();
    for form in forms {
        match *form {
            Form::ByteOrderMark => prefix.insert(0, '\u{feff}'),
            Form::LargeComment(bytes) => prefix.push_str(&[": ", &"x".repeat(bytes), "\n\n"].concat()),
            Form::LargeEvent(bytes) => prefix.push_str(&unknown_event(&"x".repeat(bytes))),
            _ => {}
        }
    }
    let mut parts = vec![(Duration::ZERO, prefix)];
    for event in events {
        if !event.pause.is_zero() {
            parts.push((event.pause, String::new()));
        }
        parts.last_mut().expect("the prefix").1.push_str(&event_text(event, forms));
    }
    let line_end = match forms.iter().find(|form| matches!(form, Form::Crlf | Form::Cr)) {
        Some(Form::Crlf) => "\r\n",
        Some(_) => "\r",
        None => "\n",
    };
    parts.into_iter().map(|(pause, text)| (pause, text.replace('\n', line_end).into_bytes())).collect()
}

fn event_text(event: &Event, forms: &[Form]) -> String {
    let has = |form| forms.contains(&form);
    let mut text = String::new();
    if has(Form::Comments) {
        text.push_str(": a comment: data: {\n:\n\n:\n");
    }
    if has(Form::UnknownEvents) {
        text.push_str(&unknown_event("not a part of the response"));
    }
    if has(Form::UnknownFields) {
        text.push_str("id: 7\nretry: 60000\nx-unknown: 1\nx-empty\n");
    }
    if let Some(name) = event.name {
        text.push_str(&["event: ", name, "\n"].concat());
    }
    if has(Form::Comments) {
        text.push_str(": within an event\n");
    }
    let mut data = event.data.clone();
    if has(Form::UnknownFields) && data.is_object() {
        data["x_unknown"] = json!({"list": [1, null, {}], "text": "not a part of the response"});
    }
    let data = data.as_str().map_or_else(|| data.to_string(), str::to_owned);
    text.push_str(&["data: ", &data, "\n\n"].concat());
    text
}

fn unknown_event(text: &str) -> String {
    format!("event: whatever\ndata: {}\n\n", json!({"type": "whatever", "text": text}))
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
    fn new(request: Request) -> Option<Self> {
        let path = request.target.split('?').next().unwrap_or_default();
        let protocol = match (request.method.as_str(), path) {
            ("POST", "/v1/chat/completions") => Protocol::OpenAi,
            ("POST", "/v1/messages") => Protocol::Anthropic,
            _ => return None,
        };
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let of_role = |role: &str| {
            let mut messages = body["messages"].as_array().into_iter().flatten();
            messages.find(|message| message["role"] == role).map(|message| text(&message["content"]))
        };
        let system = match protocol {
            Protocol::OpenAi => of_role("system").unwrap_or_default(),
            Protocol::Anthropic => text(&body["system"]),
        };
        let user = of_role("user").unwrap_or_default();
        let (path, headers) = (request.target, request.headers);
        Some(Self { protocol, path, headers, body, answered: false, system, user })
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

/// The server. It stops and closes all connections when it is dropped.
pub(crate) struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Notifies waiting tests of each change.
    changed: watch::Sender<()>,
}

struct State {
    script: VecDeque<Behaviour>,
    default: Behaviour,
    connections: usize,
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
        let state = State {
            script: VecDeque::new(),
            default: Behaviour::answer("Ada and Bo talked about the plan."),
            connections: 0,
            calls: Vec::new(),
            in_flight: 0,
            max_in_flight: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: watch::Sender::new(()) });
        let task = tokio::spawn(serve(listener, Arc::clone(&shared)));
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

    /// Returns the number of connections, including those without a call.
    pub(crate) fn connections(&self) -> usize {
        self.shared.state().connections
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

    async fn until(&self, condition: impl Fn(&State) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let result = changed.wait_for(|()| condition(&self.shared.state()));
        result.await.expect("the server runs");
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            continue;
        };
        {
            let mut state = shared.state();
            state.connections += 1;
            if matches!(state.script.front().unwrap_or(&state.default), Behaviour::CloseOnAccept) {
                state.script.pop_front();
                continue;
            }
        }
        connections.spawn(handle_connection(socket, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
}

async fn handle_connection(mut socket: TcpStream, shared: Arc<Shared>) {
    let Some(request) = read_request(&mut socket).await else {
        return;
    };
    let (mut reader, mut writer) = socket.split();
    let Some(call) = Call::new(request) else {
        Response::complete(404, Vec::new(), String::new()).send(&mut writer, || ()).await;
        return;
    };
    let (running, behaviour) = RunningCall::start(shared, &call);
    tokio::select! {
        () = closed(&mut reader) => {}
        () = respond(behaviour, &call, running, &mut writer) => {}
    }
}

async fn respond(behaviour: Behaviour, call: &Call, running: RunningCall, writer: &mut WriteHalf<'_>) {
    if let Some(response) = behaviour.response(call).await {
        let mut running = Some(running);
        response.send(writer, || running.take().into_iter().for_each(RunningCall::finish)).await;
    }
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
