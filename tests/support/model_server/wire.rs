//! HTTP/1.1 as far as the model server needs it: one request for each connection, and a response whose bytes, writes
//! and end are in the hands of the test.

use super::Flight;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use std::fmt::Write as _;
use std::future;
use std::iter;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::sleep;

/// Bytes of a chunk, so that chunks end in the middle of events and of characters.
const CHUNK: usize = 501;
/// The most bytes that are written at once: any usual response is.
const WRITE: usize = 64 * 1024;

pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// The request; None if the client left before it was complete, or sent something else.
pub(super) async fn read(socket: &mut TcpStream) -> Option<Request> {
    // Without it the kernel would put small writes together.
    socket.set_nodelay(true).ok()?;
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            break end + 4;
        }
        more(socket, &mut bytes).await?;
    };
    let head = String::from_utf8(bytes.drain(..end).collect()).ok()?;
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        headers.append(HeaderName::try_from(name).ok()?, HeaderValue::try_from(value.trim()).ok()?);
    }
    let length = headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
    while bytes.len() < length.unwrap_or(0) {
        more(socket, &mut bytes).await?;
    }
    Some(Request { method, target, headers, body: bytes })
}

async fn more(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<()> {
    let read = socket.read_buf(bytes).await.ok()?;
    (read > 0).then_some(())
}

/// Waits until the client has hung up. What it still says is of no interest.
pub(super) async fn gone(reader: &mut ReadHalf<'_>) {
    while reader.read(&mut [0; 512]).await.is_ok_and(|read| read > 0) {}
}

pub(super) async fn no_such_route(writer: &mut WriteHalf<'_>) {
    let response = "HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    // A client that is gone misses nothing.
    let _ = writer.write_all(response.as_bytes()).await;
}

/// A response, and how it goes over the wire.
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    /// What the body consists of, and the pause before each. The headers go out with the first, so there is one.
    pub(super) parts: Vec<(Duration, Vec<u8>)>,
    pub(super) framing: Framing,
    pub(super) end: End,
    /// The most bytes that go into one write, and into one chunk.
    pub(super) piece: usize,
}

/// How the client learns where the body ends.
pub(super) enum Framing {
    Chunked,
    /// The announced length, true or not.
    Length(usize),
}

/// What comes after the last part.
pub(super) enum End {
    /// The end of a response in good order, as far as its framing is.
    Whole,
    /// The connection ends.
    Broken,
    Silence,
    /// This, again and again, after a pause each time.
    Repeated(Duration, Vec<u8>),
}

impl Response {
    /// All of it at once, with its true length.
    pub(super) fn whole(status: u16, headers: Vec<(&'static str, String)>, body: String) -> Self {
        let framing = Framing::Length(body.len());
        let parts = vec![(Duration::ZERO, body.into_bytes())];
        Self { status, headers, parts, framing, end: End::Whole, piece: usize::MAX }
    }

    /// The flight ends with it, or just before the last bytes where the client gets all that there is.
    pub(super) async fn send(self, writer: &mut WriteHalf<'_>, flight: Flight) {
        let mut flight = Some(flight);
        let parts = self.framed_parts();
        let pieces: Vec<(Duration, &[u8])> = parts
            .iter()
            .flat_map(|(pause, bytes)| {
                let pauses = iter::once(*pause).chain(iter::repeat(Duration::ZERO));
                pauses.zip(bytes.chunks(WRITE.min(self.piece)))
            })
            .collect();
        for (index, (pause, piece)) in pieces.iter().enumerate() {
            if !pause.is_zero() {
                sleep(*pause).await;
            }
            let last = index + 1 == pieces.len();
            if let Some(flight) = flight.take_if(|_| last && matches!(self.end, End::Whole)) {
                flight.answered();
            }
            if writer.write_all(piece).await.is_err() {
                return;
            }
        }
        match &self.end {
            End::Whole | End::Broken => {}
            End::Silence => future::pending().await,
            End::Repeated(pause, bytes) => {
                let bytes = self.framed(bytes);
                loop {
                    sleep(*pause).await;
                    if writer.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Everything up to the end, as it goes over the wire.
    fn framed_parts(&self) -> Vec<(Duration, Vec<u8>)> {
        let mut parts: Vec<_> =
            self.parts.iter().map(|(pause, bytes)| (*pause, self.framed(bytes))).collect();
        if let Some((_, first)) = parts.first_mut() {
            first.splice(..0, self.head().into_bytes());
        }
        if let Some((_, last)) = parts.last_mut()
            && matches!((&self.framing, &self.end), (Framing::Chunked, End::Whole))
        {
            last.extend(b"0\r\n\r\n");
        }
        parts
    }

    fn framed(&self, bytes: &[u8]) -> Vec<u8> {
        match self.framing {
            Framing::Length(_) => bytes.to_vec(),
            Framing::Chunked => bytes
                .chunks(CHUNK.min(self.piece))
                .flat_map(|chunk| [format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat())
                .collect(),
        }
    }

    fn head(&self) -> String {
        let status = StatusCode::from_u16(self.status).expect("a status");
        let reason = status.canonical_reason().unwrap_or_default();
        let mut head = format!("HTTP/1.1 {} {reason}\r\nconnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n").expect("a String takes all");
        }
        match self.framing {
            Framing::Chunked => head.push_str("transfer-encoding: chunked\r\n\r\n"),
            Framing::Length(length) => write!(head, "content-length: {length}\r\n\r\n").expect("the same"),
        }
        head
    }
}
