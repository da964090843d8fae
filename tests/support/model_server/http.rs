//! A minimal HTTP/1.1 server connection: one request, and a response with any framing, pauses and end. A proper HTTP
//! server cannot announce a wrong length, write single bytes, or close the connection without a response.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use std::fmt::Write as _;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::sleep;

/// Chunks of this size end within events and within characters.
const CHUNK_BYTES: usize = 501;

pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// Reads a request. Returns `None` if the client closes the connection or sends something else.
pub(super) async fn read_request(socket: &mut TcpStream) -> Option<Request> {
    socket.set_nodelay(true).ok()?;
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            break end + 4;
        }
        read_more(socket, &mut bytes).await?;
    };
    let head = String::from_utf8(bytes.drain(..head_end).collect()).ok()?;
    let mut lines = head.lines();
    let mut request_line = lines.next()?.split(' ');
    let (method, target) = (request_line.next()?.to_owned(), request_line.next()?.to_owned());
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        headers.append(HeaderName::try_from(name).ok()?, HeaderValue::try_from(value.trim()).ok()?);
    }
    let length = headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
    while bytes.len() < length.unwrap_or(0) {
        read_more(socket, &mut bytes).await?;
    }
    Some(Request { method, target, headers, body: bytes })
}

async fn read_more(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<()> {
    let read = socket.read_buf(bytes).await.ok()?;
    (read > 0).then_some(())
}

/// Waits until the client closes the connection.
pub(super) async fn closed(reader: &mut ReadHalf<'_>) {
    while reader.read(&mut [0; 512]).await.is_ok_and(|read| read > 0) {}
}

pub(super) struct Response {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    /// The parts of the body, and the pause before each of them.
    pub(super) parts: Vec<(Duration, Vec<u8>)>,
    /// The announced length, true or not. `None`: chunked.
    pub(super) content_length: Option<usize>,
    pub(super) end: End,
    /// Sends each byte separately, in a chunk of its own.
    pub(super) single_bytes: bool,
}

pub(super) enum End {
    Complete,
    /// The connection is closed.
    Broken,
    /// Nothing more is sent.
    Silence,
    /// The bytes are sent forever, after a pause each time.
    Repeat(Duration, Vec<u8>),
}

impl Response {
    /// A complete response with its true length.
    pub(super) fn complete(status: u16, headers: Vec<(&'static str, String)>, body: String) -> Self {
        let content_length = Some(body.len());
        let parts = vec![(Duration::ZERO, body.into_bytes())];
        Self { status, headers, parts, content_length, end: End::Complete, single_bytes: false }
    }

    /// Sends the response. Calls `before_end` before the last bytes of a complete response, so that the client cannot
    /// act on the end of the response before the server has recorded it.
    pub(super) async fn send(self, connection: &mut WriteHalf<'_>, before_end: impl FnOnce()) {
        let mut writes = vec![(Duration::ZERO, self.head().into_bytes())];
        let chunk_bytes = if self.single_bytes { 1 } else { CHUNK_BYTES };
        for (pause, bytes) in &self.parts {
            if !pause.is_zero() || self.single_bytes {
                writes.push((*pause, Vec::new()));
            }
            for chunk in bytes.chunks(chunk_bytes) {
                if self.single_bytes {
                    writes.push((Duration::ZERO, Vec::new()));
                }
                let (_, write) = writes.last_mut().expect("the head");
                write.extend(self.framed(chunk));
            }
        }
        if matches!((&self.content_length, &self.end), (None, End::Complete)) {
            writes.last_mut().expect("the head").1.extend(b"0\r\n\r\n");
        }
        let (last_pause, last) = writes.pop().expect("the head");
        for (pause, bytes) in writes {
            sleep(pause).await;
            if connection.write_all(&bytes).await.is_err() {
                return;
            }
        }
        sleep(last_pause).await;
        if matches!(self.end, End::Complete) {
            before_end();
        }
        if connection.write_all(&last).await.is_err() {
            return;
        }
        match &self.end {
            End::Complete | End::Broken => {}
            End::Silence => std::future::pending().await,
            End::Repeat(pause, bytes) => loop {
                sleep(*pause).await;
                if connection.write_all(&self.framed(bytes)).await.is_err() {
                    return;
                }
            },
        }
    }

    fn framed(&self, bytes: &[u8]) -> Vec<u8> {
        match self.content_length {
            Some(_) => bytes.to_vec(),
            None => [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat(),
        }
    }

    fn head(&self) -> String {
        let mut head = format!("HTTP/1.1 {} Scripted\r\nconnection: close\r\n", self.status);
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n").expect("a String");
        }
        match self.content_length {
            None => head.push_str("transfer-encoding: chunked\r\n\r\n"),
            Some(length) => write!(head, "content-length: {length}\r\n\r\n").expect("a String"),
        }
        head
    }
}
