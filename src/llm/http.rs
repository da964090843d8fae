//! Providers over HTTP: everything that is common to all wire formats.
//!
//! Responses are streamed, so that a broken connection is noticed at once and can be distinguished from the end of a
//! completion. Everything that arrives is limited in time and size. The content type is detected from the content,
//! because servers send wrong ones. No text of a server becomes part of an error, because it may quote the key or the
//! conversation.
//!
//! A new wire format implements [`WireFormat`], like [`openai`], and is selected in `app/models.rs`.

use super::call_memory::ResponsePart;
use super::prompt::Prompt;
use super::provider::{Completion, Provider, Request};
use super::{CallMemory, CallTokens, ModelError};
use crate::config::{self, Secret, SecretSource};
use crate::domain::error_chain::ErrorChain;
use crate::domain::tokens;
use crate::trace_context;
use async_trait::async_trait;
use error_body::ErrorBody;
use futures_util::StreamExt as _;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Response, Url};
use response::{BodyKind, MAX_OBJECT_BYTES, RESPONSE_TOO_LARGE, ResponseBody};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};
use std::error::Error as _;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub mod anthropic;
mod error_body;
pub mod openai;
mod response;
mod stream_timeouts;

pub(crate) use response::MAX_RESPONSE_BYTES;
pub use response::{ParsedResponse, ResponseBuilder};
pub use stream_timeouts::StreamTimeouts;

/// Builds an HTTP client for model providers. It does not follow redirects, because a request contains a conversation
/// and a key and must only go to the configured server.
pub fn build_http_client(connect_timeout: Duration) -> Result<Client, reqwest::Error> {
    // Fails if a provider is installed already, which is the desired state.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .connect_timeout(connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .user_agent(concat!("precis/", env!("CARGO_PKG_VERSION")))
        .build()
}

/// The protocol of a provider.
pub trait WireFormat: fmt::Debug + Send + Sync + 'static {
    /// Returns the path segments after the base URL.
    fn path(&self) -> &'static [&'static str];

    /// Returns the header for the key and the prefix of its value.
    fn key_header(&self) -> (HeaderName, &'static str);

    /// Returns further headers of every request.
    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Builds the body of a request for a streamed response.
    fn body(&self, request: &Request<'_>, prompt: &Prompt) -> Map<String, Value>;

    /// Reads one event of the stream, or the single object of a server that does not stream. `event` is the event's
    /// name, "message" by default. Error objects are handled by the caller.
    fn read_event(&self, event: &str, data: &str, response: &mut ResponseBuilder) -> Result<(), ModelError>;
}

/// A model server.
pub struct HttpProvider {
    client: Client,
    endpoint: Url,
    wire_format: Box<dyn WireFormat>,
    key: Option<CachedSecret>,
    key_header: (HeaderName, &'static str),
    headers: Vec<(HeaderName, CachedSecret)>,
    /// Further fields of the body; they replace fields of the wire format.
    body: Map<String, Value>,
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the query, because some servers expect a key in it.
        f.debug_struct("HttpProvider")
            .field("wire_format", &self.wire_format)
            .field("host", &self.endpoint.host_str())
            .field("path", &self.endpoint.path())
            .finish_non_exhaustive()
    }
}

impl HttpProvider {
    /// Creates a provider from validated settings. Fails if a URL or the name of a header is invalid.
    pub fn new(
        client: Client,
        wire_format: impl WireFormat,
        settings: &config::Provider,
    ) -> Result<Self, &'static str> {
        let base_url = settings.base_url.as_deref().unwrap_or_default();
        let mut endpoint = Url::parse(base_url).map_err(|_| "base_url: must be a URL")?;
        let mut segments = endpoint.path_segments_mut().map_err(|()| "base_url: must have a path")?;
        segments.pop_if_empty().extend(wire_format.path());
        drop(segments);
        let parse = |name: &str| name.parse().map_err(|_| "headers: must be names of HTTP headers");
        let key_header = match &settings.api_key_header {
            Some(name) => (parse(name)?, ""),
            None => wire_format.key_header(),
        };
        let headers = settings.headers.iter();
        let headers = headers.map(|(name, value)| Ok((parse(name)?, CachedSecret::new(value))));
        let headers = headers.collect::<Result<_, &'static str>>()?;
        Ok(Self {
            client,
            endpoint,
            wire_format: Box::new(wire_format),
            key: settings.api_key.as_ref().map(CachedSecret::new),
            key_header,
            headers,
            body: settings.body.clone().into_iter().collect(),
        })
    }

    async fn headers(&self) -> Result<HeaderMap, ModelError> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        for (name, value) in self.wire_format.headers() {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        let (name, prefix) = &self.key_header;
        let key = self.key.iter().map(|key| (name, *prefix, key));
        for (name, prefix, secret) in key.chain(self.headers.iter().map(|(name, value)| (name, "", value))) {
            let unavailable =
                |reason: &str| ModelError::SecretUnavailable(format!("header {name}: {reason}"));
            headers.insert(name, secret.header(prefix).await.map_err(|reason| unavailable(&reason))?);
        }
        Ok(headers)
    }

    /// Builds the body. A call keeps its encoded form only.
    fn body(&self, request: &Request<'_>) -> Map<String, Value> {
        let mut body = self.wire_format.body(request, &request.prompts.render(&request.task));
        body.extend(self.body.clone());
        body
    }

    /// Sends the request and waits for the head of a successful response.
    async fn send(&self, request: &Request<'_>, timeouts: &StreamTimeouts) -> Result<Response, ModelError> {
        let mut headers = self.headers().await?;
        trace_context::inject(&mut headers);
        let call = self.client.post(self.endpoint.clone()).headers(headers).json(&self.body(request));
        let response = timeouts.apply(call.send()).await?.map_err(|error| {
            // After the connect, an error may quote the server. Before, its first part only says "error sending request".
            let source = error.source().filter(|_| error.is_connect());
            let cause = source.map(|source| ErrorChain(source).to_string());
            ModelError::Connection(
                cause.unwrap_or_else(|| "the server closed it without a response".to_owned()),
            )
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after = error_body::retry_after(response.headers());
        // An incomplete body of a broken connection still is the best available explanation.
        let body = response::read_prefix(response, request.model.idle_timeout).await;
        let text = String::from_utf8_lossy(&body);
        let error = ErrorBody::parse(&text).unwrap_or_else(|| ErrorBody::from_text(text.into_owned()));
        Err(error.into_response_error(status.as_u16(), retry_after))
    }

    /// Reads a successful response. Errors do not quote it.
    pub async fn read_response(
        &self,
        response: Response,
        timeouts: &mut StreamTimeouts,
        memory: &CallMemory,
    ) -> Result<ParsedResponse, ModelError> {
        let mut builder = ResponseBuilder::default();
        match self.read_until_end(response, timeouts, memory, &mut builder).await {
            // A broken connection after the end of the completion does no harm.
            Err(ModelError::StreamTruncated | ModelError::Timeout(..)) if builder.has_ended() => {}
            result => result?,
        }
        builder.finish()
    }

    async fn read_until_end(
        &self,
        response: Response,
        timeouts: &mut StreamTimeouts,
        memory: &CallMemory,
        builder: &mut ResponseBuilder,
    ) -> Result<(), ModelError> {
        let encoding = response.headers().get(CONTENT_ENCODING).map_or(&b""[..], HeaderValue::as_bytes);
        if !encoding.is_empty() && !encoding.eq_ignore_ascii_case(b"identity") {
            return Err(ModelError::Protocol("compressed although the request does not accept compression"));
        }
        let body = ResponseBody::open(response, timeouts).await?;
        match body.kind {
            BodyKind::Json => {
                let object = body.read_to_end(timeouts, memory).await?;
                self.read_event("message", &String::from_utf8_lossy(&object), builder)?;
                builder.end_of_stream();
                return Ok(());
            }
            // Usually a web page, because the base_url is wrong.
            BodyKind::Other => {
                return Err(ModelError::Protocol("neither an event stream nor JSON; check base_url"));
            }
            BodyKind::Empty => return Err(ModelError::StreamTruncated),
            BodyKind::Events => {}
        }
        let mut events = body.into_events(memory.clone());
        while let Some(event) = timeouts.apply(events.next()).await? {
            let event = event?;
            // Some servers send empty events to keep the connection alive.
            if event.data.is_empty() {
                continue;
            }
            if event.data.len() > MAX_OBJECT_BYTES {
                return Err(RESPONSE_TOO_LARGE);
            }
            let tokens_before = builder.token_events();
            self.read_event(&event.event, &event.data, builder)?;
            memory.hold(ResponsePart::Text, builder.text_bytes())?;
            if builder.token_events() > tokens_before {
                timeouts.token_received();
            }
            if builder.is_end_of_stream() {
                break;
            }
        }
        Ok(())
    }

    fn read_event(&self, event: &str, data: &str, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
        match ErrorBody::parse(data) {
            Some(error) => Err(error.into_stream_error()),
            None => self.wire_format.read_event(event, data, builder),
        }
    }
}

#[async_trait]
impl Provider for HttpProvider {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError> {
        let mut timeouts = StreamTimeouts::new(request.model.first_token_timeout, request.model.idle_timeout);
        let response = self.send(request, &timeouts).await?;
        let ParsedResponse { text, finish_reason, usage } =
            self.read_response(response, &mut timeouts, request.memory).await?;
        let tokens = match usage.call_tokens() {
            Some(tokens) => tokens,
            None => count_tokens(request.prompts.render(&request.task), &text).await,
        };
        Ok(Completion { text, finish_reason, usage, tokens, first_token: timeouts.time_to_first_token() })
    }

    fn endpoint(&self) -> Option<String> {
        // Some servers expect a key in the query.
        Some(format!("{}{}", self.endpoint.origin().ascii_serialization(), self.endpoint.path()))
    }

    fn has_key(&self) -> bool {
        self.key.is_some()
    }
}

/// Counts prompt and completion with our tokenizer. Takes milliseconds of CPU time for a long prompt.
async fn count_tokens(prompt: Prompt, text: &str) -> CallTokens {
    let text = text.to_owned();
    let count = tokio::task::spawn_blocking(move || CallTokens {
        input: prompt.tokens() as u64,
        output: tokens::count(&text) as u64,
    });
    count.await.unwrap_or_default()
}

/// A secret that is read again for each call, so that a key can be replaced while the service runs.
#[derive(Debug)]
pub struct CachedSecret {
    /// The error is the reason for which the secret was unavailable at start. The settings allow that only for a
    /// provider that no pool uses.
    source: Result<SecretSource, String>,
    last: Mutex<Option<SecretString>>,
}

impl CachedSecret {
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        let source = secret.source().cloned().map_err(str::to_owned);
        Self { source, last: Mutex::new(None) }
    }

    /// Returns the value of a header with the current secret after a prefix; the error is the reason why there is none.
    pub async fn header(&self, prefix: &str) -> Result<HeaderValue, String> {
        let value = HeaderValue::try_from(format!("{prefix}{}", self.read().await?.expose_secret()));
        let mut value =
            value.map_err(|_| "the secret contains a character that a header cannot".to_owned())?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Returns the current secret. A file that is missing or empty may be in the course of being replaced, so its
    /// previous content remains valid.
    async fn read(&self) -> Result<SecretString, String> {
        let source = self.source.clone();
        let result = tokio::task::spawn_blocking(move || source?.read()).await;
        let result = result.unwrap_or_else(|_| Err("it cannot be read".to_owned()));
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(secret) => {
                *last = Some(secret.clone());
                Ok(secret)
            }
            Err(reason) => last.clone().ok_or(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::openai::OpenAi;
    use super::*;

    fn secret(text: &str) -> Secret {
        SecretSource::Text(text.into()).into()
    }

    fn provider(base_url: &str, key_header: Option<&str>) -> HttpProvider {
        let client = build_http_client(Duration::from_secs(1)).expect("a client");
        let settings = config::Provider {
            base_url: Some(base_url.to_owned()),
            api_key: Some(secret("sk-secret")),
            api_key_header: key_header.map(str::to_owned),
            headers: [("x-more".to_owned(), secret("hidden"))].into(),
            ..config::Provider::default()
        };
        HttpProvider::new(client, OpenAi::new(&settings), &settings).expect(base_url)
    }

    #[test]
    fn endpoint_is_derived_from_the_base_url() {
        for (base_url, endpoint) in [
            ("https://api.openai.com/v1", "https://api.openai.com/v1/chat/completions"),
            ("https://api.openai.com/v1/", "https://api.openai.com/v1/chat/completions"),
            ("http://localhost:8000", "http://localhost:8000/chat/completions"),
            ("https://h/o/d?api-version=1", "https://h/o/d/chat/completions?api-version=1"),
        ] {
            assert_eq!(provider(base_url, None).endpoint.as_str(), endpoint);
        }
    }

    #[tokio::test]
    async fn key_is_sent_in_the_configured_header_and_never_shown() {
        for (header, name, value) in
            [(None, "authorization", "Bearer sk-secret"), (Some("api-key"), "api-key", "sk-secret")]
        {
            let provider = provider("https://host/v1?key=in-query", header);
            let headers = provider.headers().await.expect("headers");
            assert_eq!(headers[name], value);
            assert_eq!(headers["x-more"], "hidden");
            assert!(headers[name].is_sensitive() && headers["x-more"].is_sensitive());
            assert_eq!(headers.contains_key("authorization"), header.is_none());
            let debug = format!("{provider:?} {headers:?}");
            assert!(
                !["sk-secret", "hidden", "in-query"].iter().any(|secret| debug.contains(secret)),
                "{debug}"
            );
        }
    }
}
