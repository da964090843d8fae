//! Responses of model servers in both wire formats.
//!
//! The first line of the input selects the wire format (`a` as its first byte is Anthropic's) and seeds the sizes of the
//! chunks and the point at which the connection breaks. The rest is the body of the response. The result must be the same
//! for all chunk sizes, a response without its end must be an error, and errors must not quote the prompt or a key.

#![no_main]

use bytes::Bytes;
use futures_util::stream;
use libfuzzer_sys::{Corpus, fuzz_target};
use precis::config;
use precis::llm::http::anthropic::Anthropic;
use precis::llm::http::openai::OpenAi;
use precis::llm::http::{HttpProvider, ParsedResponse, StreamTimeouts, build_http_client};
use precis::llm::{CallMemory, ModelError};
use std::io;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

type Answer = Result<ParsedResponse, ModelError>;

/// Texts that a server could quote: the conversation and a key.
const PRIVATE: [&str; 2] = ["Vermilion herons inhabit Zanzibar", "sk-0123456789"];

struct Server {
    runtime: Runtime,
    openai: HttpProvider,
    anthropic: HttpProvider,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let http = build_http_client(Duration::from_secs(1)).expect("a client");
    let settings =
        config::Provider { base_url: Some("http://localhost".to_owned()), ..config::Provider::default() };
    Server {
        runtime: Builder::new_current_thread().enable_time().build().expect("a runtime"),
        openai: HttpProvider::new(http.clone(), OpenAi::new(&settings), &settings).expect("a URL"),
        anthropic: HttpProvider::new(http, Anthropic, &settings).expect("a URL"),
    }
});

/// The part of the body that arrives, the sizes of its chunks, and the end of the connection.
#[derive(Clone, Copy)]
struct Arrival<'a> {
    body: &'a [u8],
    chunks: fn(&mut u32) -> usize,
    seed: u32,
    breaks: bool,
}

impl Arrival<'_> {
    fn read(self, is_anthropic: bool) -> Answer {
        let (mut chunks, mut rest, mut seed) = (Vec::new(), self.body, self.seed);
        while !rest.is_empty() {
            let (chunk, behind) = rest.split_at((self.chunks)(&mut seed).clamp(1, rest.len()));
            chunks.push(Ok(Bytes::copy_from_slice(chunk)));
            rest = behind;
        }
        if self.breaks {
            chunks.push(Err(io::Error::other("the line is down")));
        }
        let body = reqwest::Body::wrap_stream(stream::iter(chunks));
        let response = reqwest::Response::from(http::Response::new(body));
        let server = &*SERVER;
        let remote = if is_anthropic { &server.anthropic } else { &server.openai };
        let mut timeouts = StreamTimeouts::new(None, Duration::from_secs(60));
        server.runtime.block_on(remote.read_response(response, &mut timeouts, &CallMemory::default()))
    }
}

fn next(seed: &mut u32) -> u32 {
    *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    *seed >> 8
}

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else {
        return Corpus::Reject;
    };
    let (head, body) = (&data[..end], &data[end + 1..]);
    let is_anthropic = head.first() == Some(&b'a');
    let seed = head.iter().fold(7, |seed: u32, byte| seed.wrapping_mul(31).wrapping_add(u32::from(*byte)));
    let whole = Arrival { body, chunks: |_| usize::MAX, seed, breaks: false };
    let answer = whole.read(is_anthropic);
    is_discreet(&answer);

    let in_bytes = Arrival { chunks: |_| 1, ..whole };
    let in_pieces = Arrival { chunks: |seed| next(seed) as usize % 20, ..whole };
    for arrival in [in_pieces, in_bytes] {
        if body.len() < 1024 || arrival.seed % 8 == 0 {
            assert_eq!(arrival.read(is_anthropic), answer, "the borders of the chunks change the answer");
        }
    }

    let length = next(&mut seed.clone()) as usize % (body.len() + 1);
    let arrived = &body[..length];
    let ended = Arrival { body: arrived, ..whole }.read(is_anthropic);
    let broken = Arrival { body: arrived, breaks: true, ..whole }.read(is_anthropic);
    for (body, answer) in [(body, &answer), (arrived, &ended), (arrived, &broken)] {
        is_discreet(answer);
        assert!(answer.is_err() || says_its_end(body, is_anthropic), "an answer without an end: {answer:?}");
    }
    // A server that does not stream sends one object; a part of an object is an error.
    let is_object = body.trim_ascii_start().starts_with(b"{");
    assert!(!is_object || broken.is_err(), "half an object is an answer: {broken:?}");
    if is_object && answer.is_ok() && !body[length..].trim_ascii().is_empty() {
        assert!(ended.is_err(), "half an object is an answer: {ended:?}");
    }
    Corpus::Keep
});

/// Returns `true` if the body may contain an end. A single object needs none, and escapes can spell anything.
fn says_its_end(body: &[u8], is_anthropic: bool) -> bool {
    let has = |text: &[u8]| body.windows(text.len()).any(|window| window == text);
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    if body.trim_ascii_start().starts_with(b"{") || has(b"\\u") {
        return true;
    }
    if is_anthropic {
        has(b"message_stop") || has(b"stop_reason")
    } else {
        has(b"[DONE]") || has(b"finish_reason")
    }
}

fn is_discreet(answer: &Answer) {
    if let Err(cause) = answer {
        let text = format!("{cause} {cause:?}");
        for private in PRIVATE {
            assert!(!text.contains(private), "an error quotes the conversation or a key: {text}");
        }
    }
}
