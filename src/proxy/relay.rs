//! Relays the response of an upstream byte for byte, reads the answer in it, and stores the turn before its last event is released.

use super::error::ProxyError;
use super::protocol::{AnswerReader, Progress};
use crate::capacity;
use crate::config::Limits;
use crate::domain::error_chain::ErrorChain;
use crate::domain::format;
use crate::domain::json_validation::{MAX_JSON_VALUES, check_json, replace_lone_surrogates};
use crate::domain::message::minify_json;
use crate::domain::reconcile::mark_answer;
use crate::llm::http::MAX_RESPONSE_BYTES;
use crate::service::turns::{ClientTurn, TurnPlace};
use crate::service::{Error, MemoryService, StoreError};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt as _, StreamExt as _};
use sseer::EventStream;
use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::unconstrained;
use tokio::time::timeout;
use tracing::Instrument as _;

/// Longest pause of an upstream within a response.
const IDLE_TIMEOUT: Duration = Duration::from_mins(5);
/// The answer in memory grows by about an eighth of its stream.
const CLAIMED_BYTES: usize = 64 * 1024;
const BYTES_PER_CLAIM: usize = 8 * CLAIMED_BYTES;

const EVENTS: &[u8] = b"text/event-stream";

/// The headers of one connection, which are not forwarded.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::EXPECT,
];

type Chunks = BoxStream<'static, Result<Bytes, io::Error>>;
type Stored = Option<RangeInclusive<i64>>;

/// The relay of one response.
pub(super) struct Relay {
    pub(super) service: MemoryService,
    pub(super) limits: Limits,
    pub(super) turn: ClientTurn,
    pub(super) placed: TurnPlace,
}

/// Relays a response unchanged.
pub(super) fn forward(response: reqwest::Response) -> Response<Body> {
    let (head, chunks) = split(response);
    head.map(|()| Body::from_stream(chunks))
}

impl Relay {
    /// Relays a successful response. Returns the messages that are stored, or will be; if there are none, the reason. An answer that is
    /// no stream is stored before this returns; if it cannot be, it is relayed nevertheless if `forwards` is set.
    pub(super) async fn answer(
        self,
        response: reqwest::Response,
        reader: Box<dyn AnswerReader>,
        forwards: bool,
    ) -> Result<(Response<Body>, Stored, Option<&'static str>), ProxyError> {
        let header = |name| response.headers().get(name).map_or(&b""[..], HeaderValue::as_bytes);
        let encoding = header(header::CONTENT_ENCODING);
        if !encoding.is_empty() && !encoding.eq_ignore_ascii_case(b"identity") {
            return Ok((forward(response), None, Some("compressed-answer")));
        }
        let kind = header(header::CONTENT_TYPE).get(..EVENTS.len());
        let is_stream = kind.is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS));
        let (head, mut chunks) = split(response);
        if is_stream {
            let expected = self.placed.expected(&self.turn);
            let (sender, mut receiver) = mpsc::channel(1);
            let service = self.service.clone();
            let relay = capacity::scope(capacity::current(), self.relay_events(chunks, reader, sender));
            drop(service.spawn_turn(relay.in_current_span()));
            let body = Body::from_stream(stream::poll_fn(move |context| receiver.poll_recv(context)));
            return Ok((head.map(|()| body), Some(expected), None));
        }
        let mut body = BytesMut::new();
        while let Some(chunk) = chunks.next().await {
            let broken = |_| ProxyError::Unreachable("it broke the connection within its answer");
            body.extend_from_slice(&chunk.map_err(broken)?);
            if body.len() > MAX_RESPONSE_BYTES {
                let chunks = stream::once(std::future::ready(Ok(body.freeze()))).chain(chunks);
                return Ok((head.map(|()| Body::from_stream(chunks)), None, Some("answer-too-large")));
            }
        }
        let body = body.freeze();
        let text = std::str::from_utf8(&body).map(replace_lone_surrogates);
        let message = text.ok().and_then(|text| reader.message_of(text.trim_ascii()));
        let response = |body: Bytes| head.map(|()| Body::from(body));
        let Some(message) = message else { return Ok((response(body), None, Some("unreadable-answer"))) };
        // The turn is stored even if the client disconnects now.
        let service = self.service.clone();
        let store = async move { self.store(&message, false).await };
        let stored = service.spawn_turn(capacity::scope(capacity::current(), store.in_current_span()));
        match stored.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
            Ok(stored) => Ok((response(body), Some(stored), None)),
            Err(error) if forwards => {
                tracing::warn!(error = %ErrorChain(&error), "failed to store a turn of the proxy");
                Ok((response(body), None, Some("unavailable")))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Relays a stream until it ends, or until the client disconnects: then the answer so far is stored, and the upstream stops.
    async fn relay_events(
        self,
        mut chunks: Chunks,
        mut reader: Box<dyn AnswerReader>,
        client: mpsc::Sender<Result<Bytes, io::Error>>,
    ) {
        let (bytes, mut unread) = mpsc::unbounded_channel::<Result<Bytes, io::Error>>();
        let mut events = EventStream::new(stream::poll_fn(move |context| unread.poll_recv(context)));
        let (mut received, mut progress) = (0, Progress::Running);
        loop {
            let chunk = tokio::select! {
                biased;
                () = client.closed() => break,
                chunk = chunks.next() => chunk,
            };
            let chunk = match chunk {
                None if progress == Progress::Running && reader.has_finished() => {
                    if let Err(error) = self.store_read(&*reader, false).await {
                        drop(client.send(Err(error)).await);
                    }
                    return;
                }
                None => {
                    if progress == Progress::Running {
                        tracing::warn!("an upstream ended its answer early; nothing is stored");
                    }
                    return;
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "failed to read the answer of an upstream; nothing is stored");
                    return drop(client.send(Err(error)).await);
                }
                Some(Ok(chunk)) => chunk,
            };
            let claims = received / BYTES_PER_CLAIM;
            received += chunk.len();
            let has_memory =
                received / BYTES_PER_CLAIM == claims || capacity::claim(CLAIMED_BYTES).await.is_ok();
            if received > MAX_RESPONSE_BYTES || !has_memory {
                tracing::warn!(received, has_memory, "cut the response of an upstream, which is too large");
                return drop(client.send(Err(io::Error::other("the response is too large"))).await);
            }
            if progress == Progress::Running {
                // The receiver is a variable of this function, so the channel is open.
                let _ = bytes.send(Ok(chunk.clone()));
                while progress == Progress::Running
                    && let Some(Some(Ok(event))) = unconstrained(events.next()).now_or_never()
                {
                    progress = reader.read_event(&event.event, &replace_lone_surrogates(&event.data));
                }
                if progress == Progress::End
                    && let Err(error) = self.store_read(&*reader, false).await
                {
                    return drop(client.send(Err(error)).await);
                }
            }
            if client.send(Ok(chunk)).await.is_err() {
                break;
            }
        }
        if progress == Progress::Running {
            drop(chunks);
            // The client is gone, so an error is logged only.
            let _ = self.store_read(&*reader, !reader.has_finished()).await;
        }
    }

    /// Stores the answer that has been read, if it has any content. Fails only if a repeated request could succeed.
    async fn store_read(&self, reader: &dyn AnswerReader, is_partial: bool) -> Result<(), io::Error> {
        let Some(message) = reader.message() else { return Ok(()) };
        let Err(error) = self.store(&message, is_partial).await else { return Ok(()) };
        tracing::error!(error = %ErrorChain(&error), is_partial, "failed to store a turn of the proxy");
        match error {
            Error::Store(StoreError::Corrupt { .. }) => Ok(()),
            _ => Err(io::Error::other("the turn cannot be stored")),
        }
    }

    async fn store(&self, message: &str, is_partial: bool) -> Result<RangeInclusive<i64>, Error> {
        let message = mark_answer(&minify_json(message), is_partial);
        let invalid = |why: &str| StoreError::Corrupt { what: "an answer", why: why.to_owned() };
        if message.len() > self.limits.max_message_bytes {
            return Err(invalid("it has more bytes than limits.max_message_bytes").into());
        }
        if check_json(&message, self.limits.max_json_depth, MAX_JSON_VALUES).is_err() {
            return Err(invalid("it is nested deeper than limits.max_json_depth, or is no JSON").into());
        }
        let answer = format::read(&message).map_err(|_| invalid("it is no message"))?;
        self.service.store_turn(&self.turn, self.placed, answer).await
    }
}

/// Returns the head of a response, and its body with a limited pause between two parts.
fn split(response: reqwest::Response) -> (Response<()>, Chunks) {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    *head.headers_mut() = end_to_end(response.headers());
    let chunks = response.bytes_stream().map(|chunk| {
        // The error of the library can quote the server.
        chunk.map_err(|_| io::Error::other("the upstream broke the connection"))
    });
    let chunks = stream::unfold(Some(chunks.boxed()), |chunks| async {
        let mut chunks = chunks?;
        match timeout(IDLE_TIMEOUT, chunks.next()).await {
            Ok(chunk) => Some((chunk?, Some(chunks))),
            Err(_) => Some((Err(io::Error::other("the upstream sent nothing for too long")), None)),
        }
    });
    (head, chunks.boxed())
}

/// Returns the headers that do not belong to a single connection.
pub(super) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut forwarded = headers.clone();
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    for name in named.flat_map(|value| value.split(',')).map(str::trim) {
        forwarded.remove(name);
    }
    for name in HOP_BY_HOP {
        forwarded.remove(name);
    }
    forwarded
}
