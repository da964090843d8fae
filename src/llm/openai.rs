//! Any server that speaks chat completions.
//!
//! Answers are streamed, so that a break is noticed when it happens and what the model was told to be the end can be
//! told from a lost connection. What arrives is bounded, and what a server says about an error is cleaned before it
//! goes anywhere: it may quote the key. How an answer is read is in [`answer`].

use super::Cause;
use super::prompt::Prompt;
use super::provider::{Completion, Provider, Request};
use crate::domain::chain::Chain;
use answer::Reading;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Response, Url};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use sseer::EventStream;
use sseer::errors::EventStreamError;
use std::error::Error;
use std::fmt;
use std::time::Duration;

mod answer;
mod quote;

/// The most that is read of an error's body.
const ERROR_BYTES: usize = 64 * 1024;
/// The most that is read of an answer: a few hundred bytes of JSON come with each token of a stream.
const ANSWER_BYTES: usize = 32 * 1024 * 1024;
/// Characters of a server's message that are kept.
const MESSAGE_CHARS: usize = 300;

/// The HTTP client for models. Redirects are errors: a request that holds a conversation and a key goes where the
/// settings say and nowhere else.
pub fn http_client(connect_timeout: Duration) -> Result<reqwest::Client, reqwest::Error> {
    // The first caller installs it; that it is there already is what every other one wants.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .connect_timeout(connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .user_agent(concat!("precis/", env!("CARGO_PKG_VERSION")))
        .build()
}

/// Why a provider can't be made of these settings. None of the texts holds the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenAiError {
    /// Not a URL that can be called.
    #[error("base_url: must be like https://api.openai.com/v1")]
    BaseUrl,
    /// A URL shows up in places where a password must not.
    #[error("base_url: must not hold a user or a password; the key belongs into api_key")]
    Credentials,
    /// A line feed at its end, most often.
    #[error("api_key: holds a character that an HTTP header can't")]
    Key,
}

/// A server that speaks chat completions.
pub struct OpenAi {
    http: reqwest::Client,
    endpoint: Url,
    authorization: Option<HeaderValue>,
    key: Option<SecretString>,
}

impl fmt::Debug for OpenAi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the query, in which some servers want a key.
        f.debug_struct("OpenAi")
            .field("host", &self.endpoint.host_str())
            .field("path", &self.endpoint.path())
            .field("key", &self.key.as_ref().map(|_| "[redacted]"))
            .finish_non_exhaustive()
    }
}

impl OpenAi {
    /// A provider at `base_url`, for example `https://api.openai.com/v1`; a query is kept. An empty key is none.
    pub fn new(
        http: reqwest::Client,
        base_url: &str,
        key: Option<SecretString>,
    ) -> Result<Self, OpenAiError> {
        let mut endpoint = Url::parse(base_url.trim()).map_err(|_| OpenAiError::BaseUrl)?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err(OpenAiError::BaseUrl);
        }
        if !endpoint.username().is_empty() || endpoint.password().is_some() {
            return Err(OpenAiError::Credentials);
        }
        endpoint.set_fragment(None);
        endpoint
            .path_segments_mut()
            .map_err(|()| OpenAiError::BaseUrl)?
            .pop_if_empty()
            .extend(["chat", "completions"]);
        let key = key.filter(|key| !key.expose_secret().is_empty());
        let authorization = key
            .as_ref()
            .map(|key| {
                let mut value = HeaderValue::try_from(format!("Bearer {}", key.expose_secret()))
                    .map_err(|_| OpenAiError::Key)?;
                value.set_sensitive(true);
                Ok(value)
            })
            .transpose()?;
        Ok(Self { http, endpoint, authorization, key })
    }

    async fn send(&self, request: &Request<'_>, prompt: &Prompt) -> Result<Response, Cause> {
        let mut call = self
            .http
            .post(self.endpoint.clone())
            .header(ACCEPT, "text/event-stream, application/json")
            .json(&Body::new(request, prompt));
        if let Some(authorization) = &self.authorization {
            call = call.header(AUTHORIZATION, authorization.clone());
        }
        let sent = call.send().await;
        sent.map_err(|error| {
            let error = error.without_url();
            // The first line alone is only "error sending request".
            let causes = Chain(error.source().unwrap_or(&error)).to_string();
            Cause::Connection(self.clean(&causes, prompt))
        })
    }

    /// A text of the server's that may go into an error: on one line, short, without the key and without a word of
    /// the conversation. In this order, since what is taken out could have parted the key, and what is cut off could
    /// be half of it.
    fn clean(&self, message: &str, prompt: &Prompt) -> String {
        if quote::is_in(message, &prompt.user) {
            return "[left out: it quotes the conversation]".to_owned();
        }
        let mut message: String = message
            .chars()
            .map(|c| if c.is_whitespace() { ' ' } else { c })
            .filter(|c| !c.is_control())
            .collect();
        if let Some(key) = &self.key {
            message = message.replace(key.expose_secret(), "[key]");
        }
        let message = message.trim();
        match message.char_indices().nth(MESSAGE_CHARS) {
            Some((end, _)) => format!("{}…", message.get(..end).unwrap_or_default()),
            None => message.to_owned(),
        }
    }

    async fn refusal(&self, response: Response, prompt: &Prompt) -> Cause {
        let status = response.status();
        // What was said before the connection broke is still the best there is to say.
        let body = body(response, ERROR_BYTES).await.0;
        let text = String::from_utf8_lossy(&body);
        let said = answer::error_message(&text);
        let message = self.clean(said.as_deref().unwrap_or(&text), prompt);
        Cause::Status {
            status: status.as_u16(),
            retry_after: None,
            message: if message.is_empty() {
                status.canonical_reason().unwrap_or("no message").to_owned()
            } else {
                message
            },
        }
    }
}

#[async_trait]
impl Provider for OpenAi {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, Cause> {
        let prompt = request.prompts.render(&request.task);
        let response = self.send(request, &prompt).await?;
        if !response.status().is_success() {
            return Err(self.refusal(response, &prompt).await);
        }
        let kind = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_ascii_lowercase();
        let read = if kind.contains("json") {
            read_whole(response).await
        } else {
            read_stream(response, &kind).await
        };
        read.map_err(|cause| match cause {
            // Here the server's own words may be in it.
            Cause::Protocol(message) => Cause::Protocol(self.clean(&message, &prompt)),
            cause => cause,
        })
    }
}

/// From a server that doesn't stream, whatever it was asked for.
async fn read_whole(response: Response) -> Result<Completion, Cause> {
    let (bytes, end) = body(response, ANSWER_BYTES).await;
    match end {
        End::Complete => {}
        End::Broken => return Err(Cause::BrokenOff),
        End::TooLong => return Err(too_long()),
    }
    let mut reading = Reading::default();
    reading.add(&String::from_utf8_lossy(&bytes))?;
    reading.finish(true)
}

async fn read_stream(response: Response, kind: &str) -> Result<Completion, Cause> {
    let mut events = EventStream::new(Box::pin(bounded(response.bytes_stream(), ANSWER_BYTES)));
    let mut reading = Reading::default();
    let mut any = false;
    while let Some(event) = events.next().await {
        any = true;
        let data = match event {
            Ok(event) => event.data,
            Err(EventStreamError::Transport(cause)) => return Err(cause),
            Err(EventStreamError::Utf8Error(_)) => return Err(Cause::Protocol("not UTF-8".to_owned())),
        };
        if data.trim() == "[DONE]" {
            return reading.finish(true);
        }
        reading.add(&data)?;
    }
    if !any && !kind.contains("event-stream") {
        // A web page, most often: the base_url is wrong.
        return Err(Cause::Protocol(format!("no event stream but \"{kind}\"")));
    }
    reading.finish(false)
}

fn too_long() -> Cause {
    Cause::Protocol("longer than any summary".to_owned())
}

/// The stream, ended with an error where it breaks or goes past `limit` bytes.
fn bounded(
    chunks: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
    limit: usize,
) -> impl Stream<Item = Result<Bytes, Cause>> + Send {
    let chunks = chunks.map_err(|_| Cause::BrokenOff);
    stream::try_unfold((Box::pin(chunks), limit), |(mut chunks, left)| async move {
        let Some(chunk) = chunks.try_next().await? else {
            return Ok(None);
        };
        let left = left.checked_sub(chunk.len()).ok_or_else(too_long)?;
        Ok(Some((chunk, (chunks, left))))
    })
}

enum End {
    Complete,
    Broken,
    TooLong,
}

/// At most `limit` bytes of a body, and whether they are all of it.
async fn body(mut response: Response, limit: usize) -> (Vec<u8>, End) {
    let mut bytes = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => {
                let room = limit - bytes.len();
                bytes.extend(chunk.iter().take(room));
                if chunk.len() > room {
                    return (bytes, End::TooLong);
                }
            }
            Ok(None) => return (bytes, End::Complete),
            Err(_) => return (bytes, End::Broken),
        }
    }
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<Message<'a>>,
    stream: bool,
    stream_options: StreamOptions,
    max_completion_tokens: u32,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl<'a> Body<'a> {
    fn new(request: &Request<'a>, prompt: &'a Prompt) -> Self {
        let system = Message { role: "system", content: &prompt.system };
        let user = Message { role: "user", content: &prompt.user };
        Self {
            model: request.model,
            messages: if prompt.system.is_empty() { vec![user] } else { vec![system, user] },
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            max_completion_tokens: request.output_limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(base_url: &str, key: &str) -> Result<OpenAi, OpenAiError> {
        let http = http_client(Duration::from_secs(1)).expect("a client");
        OpenAi::new(http, base_url, Some(SecretString::from(key)))
    }

    #[test]
    fn the_endpoint_follows_the_base_url() {
        for (base_url, endpoint) in [
            ("https://api.openai.com/v1", "https://api.openai.com/v1/chat/completions"),
            ("https://api.openai.com/v1/", "https://api.openai.com/v1/chat/completions"),
            ("http://localhost:8000", "http://localhost:8000/chat/completions"),
            ("https://h/o/d?api-version=1", "https://h/o/d/chat/completions?api-version=1"),
        ] {
            assert_eq!(provider(base_url, "").expect(base_url).endpoint.as_str(), endpoint);
        }
        for (base_url, key, error) in [
            ("api.openai.com/v1", "k", OpenAiError::BaseUrl),
            ("file:///etc/passwd", "k", OpenAiError::BaseUrl),
            ("https://user:pass@host/v1", "k", OpenAiError::Credentials),
            ("https://host/v1", "key\n", OpenAiError::Key),
        ] {
            assert_eq!(provider(base_url, key).err(), Some(error), "{base_url}");
        }
    }

    #[test]
    fn a_servers_words_are_cleaned() {
        let provider = provider("https://host/v1?key=in-query", "sk-secret").expect("valid");
        let prompt = Prompt { system: String::new(), user: "Ada flies to Zürich.".to_owned() };
        let clean = |message: &str| provider.clean(message, &prompt);
        assert_eq!(clean(" bad key\r\nsk-secret\u{7}! "), "bad key  [key]!");
        assert_eq!(clean("split: sk-se\u{0}cret"), "split: [key]");
        assert_eq!(clean("not \"ada flies\nto Zürich\""), "[left out: it quotes the conversation]");
        let long = clean(&format!("{}sk-secret", "ä".repeat(297)));
        assert_eq!(long, format!("{}[ke…", "ä".repeat(297)));
        let debug = format!("{provider:?}");
        assert!(!debug.contains("sk-secret") && !debug.contains("in-query"), "{debug}");
    }
}
