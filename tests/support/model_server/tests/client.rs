//! A client that sees what a real one hides: lengths that lie, chunks, and how a connection ended.

use super::super::{ModelServer, Protocol};
use axum::http::HeaderMap;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub(super) const PROTOCOLS: [Protocol; 2] = [Protocol::OpenAi, Protocol::Anthropic];

/// A request's body that both protocols take.
pub(super) fn request(stream: bool) -> String {
    format!(
        r#"{{"model": "m", "stream": {stream}, "stream_options": {{"include_usage": true}}, "messages": [{{"role": "user", "content": "U"}}]}}"#
    )
}

/// A call under way.
pub(super) struct Client {
    socket: TcpStream,
    bytes: Vec<u8>,
}

impl Client {
    pub(super) async fn call(server: &ModelServer, protocol: Protocol, body: &str) -> Self {
        let path = match protocol {
            Protocol::OpenAi => "/v1/chat/completions",
            Protocol::Anthropic => "/v1/messages",
        };
        Self::post(server, path, body).await
    }

    pub(super) async fn post(server: &ModelServer, path: &str, body: &str) -> Self {
        let base_url = server.base_url();
        let address = base_url.trim_start_matches("http://").trim_end_matches("/v1");
        let mut socket = TcpStream::connect(address).await.expect("a connection");
        let length = body.len();
        let request = format!("POST {path} HTTP/1.1\r\nX-Test: 1\r\nContent-Length: {length}\r\n\r\n{body}");
        // The server may have hung up already; what there is to read of it tells.
        let _ = socket.write_all(request.as_bytes()).await;
        Self { socket, bytes: Vec::new() }
    }

    /// Reads until the part has come so many times.
    pub(super) async fn until(&mut self, part: &str, times: usize) {
        while String::from_utf8_lossy(&self.bytes).matches(part).count() < times {
            assert!(self.socket.read_buf(&mut self.bytes).await.expect("more") > 0, "{part}: not sent");
        }
    }

    /// Reads to the end, good or bad.
    pub(super) async fn rest(mut self) -> Seen {
        while self.socket.read_buf(&mut self.bytes).await.is_ok_and(|read| read > 0) {}
        Seen::new(&self.bytes)
    }
}

/// A response. Status 0 is none.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) status: u16,
    headers: HeaderMap,
    pub(super) bytes: Vec<u8>,
    pub(super) chunks: usize,
    /// Whether the end of the body came, as the headers announced it.
    pub(super) complete: bool,
}

impl Seen {
    fn new(bytes: &[u8]) -> Self {
        let Some((head, mut rest)) = split(bytes, b"\r\n\r\n") else {
            return Self::default();
        };
        let head = String::from_utf8(head.to_vec()).expect("text");
        let mut seen = Self { status: head[9..12].parse().expect("a status"), ..Self::default() };
        for (name, value) in head.lines().skip(1).filter_map(|line| line.split_once(": ")) {
            let name: axum::http::HeaderName = name.parse().expect("a name");
            seen.headers.append(name, value.parse().expect("a value"));
        }
        if let Ok(length) = seen.header("content-length").parse::<usize>() {
            seen.complete = rest.len() >= length;
            seen.bytes = rest[..length.min(rest.len())].to_vec();
            return seen;
        }
        while let Some((size, after)) = split(rest, b"\r\n") {
            let size = String::from_utf8(size.to_vec()).expect("text");
            let size = usize::from_str_radix(&size, 16).expect("a size");
            seen.complete = size == 0;
            if seen.complete {
                break;
            }
            seen.chunks += 1;
            seen.bytes.extend(&after[..size]);
            rest = &after[size + 2..];
        }
        seen
    }

    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().expect("text")).unwrap_or_default()
    }

    pub(super) fn body(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Whether the last event has this in its data.
    pub(super) fn ends_with(&self, mark: &str) -> bool {
        self.body()
            .trim_end()
            .lines()
            .last()
            .is_some_and(|line| line.starts_with("data:") && line.contains(mark))
    }

    /// The objects: of the events, or the one.
    fn objects(&self) -> Vec<Value> {
        let body = self.body().replace("\r\n", "\n").replace('\r', "\n");
        match serde_json::from_str(&body) {
            Ok(object) => vec![object],
            Err(_) => body
                .lines()
                .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
                .collect(),
        }
    }

    fn collect(&self, places: &[&str]) -> String {
        let objects = self.objects();
        let found = objects.iter().flat_map(|object| places.iter().filter_map(|place| object.pointer(place)));
        found.filter_map(Value::as_str).collect()
    }

    /// The text of the answer, put together.
    pub(super) fn text(&self) -> String {
        let places = ["/choices/0/delta/content", "/choices/0/message/content", "/delta/text"];
        self.collect(&[&places[..], &["/content/0/text", "/content/1/text"]].concat())
    }

    pub(super) fn thoughts(&self) -> String {
        let openai = ["/choices/0/delta/reasoning_content", "/choices/0/message/reasoning_content"];
        self.collect(&[&openai[..], &["/delta/thinking", "/content/0/thinking"]].concat())
    }

    pub(super) fn finish(&self) -> Option<String> {
        let reason = self.collect(&["/choices/0/finish_reason", "/delta/stop_reason", "/stop_reason"]);
        (!reason.is_empty()).then_some(reason)
    }

    /// Tokens in and out.
    pub(super) fn usage(&self) -> (Option<u64>, Option<u64>) {
        let objects = self.objects();
        let last = |places: [&str; 3]| {
            let found = objects.iter().flat_map(|object| places.map(|place| object.pointer(place)));
            found.flatten().filter_map(Value::as_u64).next_back()
        };
        (
            last(["/usage/prompt_tokens", "/message/usage/input_tokens", "/usage/input_tokens"]),
            last(["/usage/completion_tokens", "/message/usage/output_tokens", "/usage/output_tokens"]),
        )
    }
}

fn split<'a>(bytes: &'a [u8], at: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let start = bytes.windows(at.len()).position(|window| window == at)?;
    Some((&bytes[..start], &bytes[start + at.len()..]))
}
