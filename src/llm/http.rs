//! A model behind HTTP: what all dialects have in common.
//!
//! Answers are streamed, so that a break is noticed when it happens, and what the model was told to be the end can be
//! told from a lost connection. What arrives is bounded in time and size, is read for what it is, whatever its label
//! says, and a server's words about an error are cleaned before they go anywhere: they may quote the key or the
//! conversation. A new dialect is a file with a [`WireFormat`] in it, like [`super::openai`], and a line in `app`.

use super::ModelError;
use super::prompt::Prompt;
use super::provider::{Completion, Provider, Request};
use async_trait::async_trait;
use call::count;
use reqwest::Url;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use secrecy::{ExposeSecret as _, SecretString};
use secret_source::CachedSecret;
use serde_json::{Map, Value};
use std::fmt;
use std::time::Duration;

pub mod anthropic;
mod call;
mod error_body;
pub mod openai;
mod redact;
mod response_body;
mod response_builder;
mod retry_after;
mod secret_source;
mod stream_timeouts;

pub use call::ProviderCall;
pub use response_builder::ResponseBuilder;
pub use secret_source::SecretSource;

/// The HTTP client for models. Redirects are errors: a request that holds a conversation and a key goes where the
/// settings say and nowhere else.
pub fn build_http_client(connect_timeout: Duration) -> Result<reqwest::Client, reqwest::Error> {
    // The first caller installs it; that it is there already is what every other one wants.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .connect_timeout(connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .user_agent(concat!("precis/", env!("CARGO_PKG_VERSION")))
        .build()
}

/// A way to say it over HTTP.
pub trait WireFormat: fmt::Debug + Send + Sync + 'static {
    /// What follows the base URL.
    fn path(&self) -> &'static [&'static str];

    /// The header for a key, and what stands in it before the key.
    fn key_header(&self) -> (HeaderName, &'static str);

    /// Further headers of every request.
    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The body of a request for a streamed answer.
    fn body(&self, request: &Request<'_>, prompt: &Prompt) -> Map<String, Value>;

    /// Takes an event of the stream, or the one object of a server that doesn't stream. `event` is its name,
    /// "message" where it has none. Error objects don't come here. A cause's text must not quote `data`.
    fn read(&self, event: &str, data: &str, builder: &mut ResponseBuilder) -> Result<(), ModelError>;
}

/// Where a model is, and what every request to it holds beside the question.
#[derive(Clone, Debug, Default)]
pub struct HttpProviderSpec {
    /// For example `https://api.openai.com/v1`; a query is kept.
    pub base_url: String,
    /// What the server knows its callers by.
    pub key: Option<SecretSource>,
    /// The header that takes the bare key in place of the dialect's own.
    pub key_header: Option<String>,
    /// Further headers.
    pub headers: Vec<(String, SecretSource)>,
    /// Further fields of the body; they go over what the dialect says.
    pub body: Map<String, Value>,
}

/// Why a provider can't be made of these settings. None of the texts holds a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpProviderError {
    /// Not a URL that can be called.
    #[error("base_url: must be like https://api.openai.com/v1")]
    BaseUrl,
    /// A URL shows up in places where a password must not.
    #[error("base_url: must not hold a user or a password; the key belongs into api_key")]
    Credentials,
    /// Not the name of a header.
    #[error("{0}: not a name that an HTTP header can have")]
    HeaderName(&'static str),
}

/// A model server.
pub struct HttpProvider {
    http: reqwest::Client,
    endpoint: Url,
    dialect: Box<dyn WireFormat>,
    key: Option<CachedSecret>,
    key_header: (HeaderName, &'static str),
    headers: Vec<(HeaderName, CachedSecret)>,
    body: Map<String, Value>,
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the query, in which some servers want a key.
        f.debug_struct("HttpProvider")
            .field("dialect", &self.dialect)
            .field("host", &self.endpoint.host_str())
            .field("path", &self.endpoint.path())
            .finish_non_exhaustive()
    }
}

impl HttpProvider {
    /// A server that speaks the dialect.
    pub fn new(
        http: reqwest::Client,
        dialect: impl WireFormat,
        spec: HttpProviderSpec,
    ) -> Result<Self, HttpProviderError> {
        let mut endpoint = Url::parse(spec.base_url.trim()).map_err(|_| HttpProviderError::BaseUrl)?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err(HttpProviderError::BaseUrl);
        }
        if !endpoint.username().is_empty() || endpoint.password().is_some() {
            return Err(HttpProviderError::Credentials);
        }
        endpoint.set_fragment(None);
        let mut segments = endpoint.path_segments_mut().map_err(|()| HttpProviderError::BaseUrl)?;
        segments.pop_if_empty().extend(dialect.path());
        drop(segments);
        let key_header = match spec.key_header {
            Some(name) => (name.parse().map_err(|_| HttpProviderError::HeaderName("api_key_header"))?, ""),
            None => dialect.key_header(),
        };
        let mut headers = Vec::new();
        for (name, value) in spec.headers {
            let name: HeaderName = name.parse().map_err(|_| HttpProviderError::HeaderName("headers"))?;
            headers.push((name, CachedSecret::new(value)));
        }
        let key = spec.key.map(CachedSecret::new);
        Ok(Self { http, endpoint, dialect: Box::new(dialect), key, key_header, headers, body: spec.body })
    }

    /// The headers of a request, and the secrets in them.
    async fn headers(&self) -> Result<(HeaderMap, Vec<SecretString>), ModelError> {
        let (mut headers, mut secrets) = (HeaderMap::new(), Vec::new());
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        for (name, value) in self.dialect.headers() {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        let (name, prefix) = &self.key_header;
        let key = self.key.iter().map(|key| (name, *prefix, key));
        for (name, prefix, key) in key.chain(self.headers.iter().map(|(name, key)| (name, "", key))) {
            let wrong = |why: &str| ModelError::SecretUnavailable(format!("for the header {name}: {why}"));
            let secret = key.current().await.map_err(|why| wrong(&why))?;
            let value = format!("{prefix}{}", secret.expose_secret());
            let mut value = HeaderValue::try_from(value)
                .map_err(|_| wrong("it holds a character that an HTTP header can't"))?;
            value.set_sensitive(true);
            headers.insert(name, value);
            secrets.push(secret);
        }
        Ok((headers, secrets))
    }
}

#[async_trait]
impl Provider for HttpProvider {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, ModelError> {
        let prompt = request.prompts.render(&request.task);
        let (headers, secrets) = self.headers().await?;
        let mut call = ProviderCall::begin(self, request, &prompt, &secrets);
        let response = call.send(headers).await?;
        let (text, finish, usage) = call.answer(response).await?;
        let first_token = call.first_token();
        let tokens = match usage.total() {
            Some(tokens) => tokens,
            None => count(&prompt, &text).await,
        };
        Ok(Completion { text, finish, usage, tokens, first_token })
    }

    fn has_key(&self) -> bool {
        self.key.is_some()
    }
}

fn too_long() -> ModelError {
    ModelError::Protocol("longer than any summary".to_owned())
}

#[cfg(test)]
mod tests {
    use super::openai::OpenAi;
    use super::*;

    fn remote(base_url: &str, key_header: Option<&str>) -> Result<HttpProvider, HttpProviderError> {
        let http = build_http_client(Duration::from_secs(1)).expect("a client");
        let spec = HttpProviderSpec {
            base_url: base_url.to_owned(),
            key: Some(SecretSource::fixed("sk-secret")),
            key_header: key_header.map(str::to_owned),
            headers: vec![("x-more".to_owned(), SecretSource::fixed("hidden"))],
            ..HttpProviderSpec::default()
        };
        HttpProvider::new(http, OpenAi::default(), spec)
    }

    #[test]
    fn the_endpoint_follows_the_base_url() {
        for (base_url, endpoint) in [
            ("https://api.openai.com/v1", "https://api.openai.com/v1/chat/completions"),
            ("https://api.openai.com/v1/", "https://api.openai.com/v1/chat/completions"),
            ("http://localhost:8000", "http://localhost:8000/chat/completions"),
            ("https://h/o/d?api-version=1", "https://h/o/d/chat/completions?api-version=1"),
        ] {
            assert_eq!(remote(base_url, None).expect(base_url).endpoint.as_str(), endpoint);
        }
        for (base_url, error) in [
            ("api.openai.com/v1", HttpProviderError::BaseUrl),
            ("file:///etc/passwd", HttpProviderError::BaseUrl),
            ("https://user:pass@host/v1", HttpProviderError::Credentials),
        ] {
            assert_eq!(remote(base_url, None).err(), Some(error), "{base_url}");
        }
    }

    #[tokio::test]
    async fn the_key_stands_where_the_server_wants_it() {
        for (header, name, value) in
            [(None, "authorization", "Bearer sk-secret"), (Some("api-key"), "api-key", "sk-secret")]
        {
            let remote = remote("https://host/v1?key=in-query", header).expect("valid");
            let (headers, secrets) = remote.headers().await.expect("headers");
            assert_eq!(headers[name], value);
            assert_eq!(headers["x-more"], "hidden");
            assert!(headers[name].is_sensitive() && headers["x-more"].is_sensitive());
            assert_eq!((headers.contains_key("authorization"), secrets.len()), (header.is_none(), 2));
            let debug = format!("{remote:?} {headers:?}");
            assert!(
                !["sk-secret", "hidden", "in-query"].iter().any(|secret| debug.contains(secret)),
                "{debug}"
            );
        }
        assert_eq!(
            remote("https://host", Some("a b")).err(),
            Some(HttpProviderError::HeaderName("api_key_header"))
        );
    }
}
