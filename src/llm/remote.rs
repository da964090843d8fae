//! A model behind HTTP: what all dialects have in common.
//!
//! Answers are streamed, so that a break is noticed when it happens, and what the model was told to be the end can be
//! told from a lost connection. What arrives is bounded in time and size, is read for what it is, whatever its label
//! says, and a server's words about an error are cleaned before they go anywhere: they may quote the key or the
//! conversation. A new dialect is a file with a [`Dialect`] in it, like [`super::openai`], and a line in `app`.

use super::error::Missing;
use super::prompt::Prompt;
use super::provider::{Completion, Provider, Request};
use super::{Cause, Usage};
use crate::domain::chain::Chain;
use crate::domain::tokens;
use async_trait::async_trait;
use clean::clean;
use futures_util::StreamExt as _;
use key::Key;
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
};
use reqwest::{Response, Url};
use said::Said;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Map, Value};
use std::error::Error as _;
use std::fmt;
use std::time::Duration;
use tokio::time::Instant;

mod body;
mod clean;
mod key;
mod reading;
mod retry_after;
mod said;

pub use key::KeySource;
pub use reading::Reading;

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

/// A way to say it over HTTP.
pub trait Dialect: fmt::Debug + Send + Sync + 'static {
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
    fn read(&self, event: &str, data: &str, reading: &mut Reading) -> Result<(), Cause>;
}

/// Where a model is, and what every request to it holds beside the question.
#[derive(Clone, Debug, Default)]
pub struct RemoteSpec {
    /// For example `https://api.openai.com/v1`; a query is kept.
    pub base_url: String,
    /// What the server knows its callers by.
    pub key: Option<KeySource>,
    /// The header that takes the bare key in place of the dialect's own.
    pub key_header: Option<String>,
    /// Further headers.
    pub headers: Vec<(String, KeySource)>,
    /// Further fields of the body; they go over what the dialect says.
    pub body: Map<String, Value>,
}

/// Why a provider can't be made of these settings. None of the texts holds a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
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
pub struct Remote {
    http: reqwest::Client,
    endpoint: Url,
    dialect: Box<dyn Dialect>,
    key: Option<Key>,
    key_header: (HeaderName, &'static str),
    headers: Vec<(HeaderName, Key)>,
    body: Map<String, Value>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the query, in which some servers want a key.
        f.debug_struct("Remote")
            .field("dialect", &self.dialect)
            .field("host", &self.endpoint.host_str())
            .field("path", &self.endpoint.path())
            .finish_non_exhaustive()
    }
}

impl Remote {
    /// A server that speaks the dialect.
    pub fn new(http: reqwest::Client, dialect: impl Dialect, spec: RemoteSpec) -> Result<Self, RemoteError> {
        let mut endpoint = Url::parse(spec.base_url.trim()).map_err(|_| RemoteError::BaseUrl)?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err(RemoteError::BaseUrl);
        }
        if !endpoint.username().is_empty() || endpoint.password().is_some() {
            return Err(RemoteError::Credentials);
        }
        endpoint.set_fragment(None);
        let mut segments = endpoint.path_segments_mut().map_err(|()| RemoteError::BaseUrl)?;
        segments.pop_if_empty().extend(dialect.path());
        drop(segments);
        let key_header = match spec.key_header {
            Some(name) => (name.parse().map_err(|_| RemoteError::HeaderName("api_key_header"))?, ""),
            None => dialect.key_header(),
        };
        let mut headers = Vec::new();
        for (name, value) in spec.headers {
            let name: HeaderName = name.parse().map_err(|_| RemoteError::HeaderName("headers"))?;
            headers.push((name, Key::new(value)));
        }
        let key = spec.key.map(Key::new);
        Ok(Self { http, endpoint, dialect: Box::new(dialect), key, key_header, headers, body: spec.body })
    }

    /// The headers of a request, and the secrets in them.
    async fn headers(&self) -> Result<(HeaderMap, Vec<SecretString>), Cause> {
        let (mut headers, mut secrets) = (HeaderMap::new(), Vec::new());
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        for (name, value) in self.dialect.headers() {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        let (name, prefix) = &self.key_header;
        let key = self.key.iter().map(|key| (name, *prefix, key));
        for (name, prefix, key) in key.chain(self.headers.iter().map(|(name, key)| (name, "", key))) {
            let wrong = |why: &str| Cause::Key(format!("for the header {name}: {why}"));
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

/// One call under way: the question, and what must not show of it.
struct Call<'a> {
    remote: &'a Remote,
    request: &'a Request<'a>,
    prompt: &'a Prompt,
    secrets: &'a [SecretString],
    patience: Patience,
}

#[async_trait]
impl Provider for Remote {
    async fn complete(&self, request: &Request<'_>) -> Result<Completion, Cause> {
        let prompt = request.prompts.render(&request.task);
        let (headers, secrets) = self.headers().await?;
        let mut call = Call {
            remote: self,
            request,
            prompt: &prompt,
            secrets: &secrets,
            patience: Patience::new(request.first_token_timeout, request.idle_timeout),
        };
        let response = call.send(headers).await?;
        let mut reading = Reading::default();
        match call.read(response, &mut reading).await {
            // What happens after the end of the answer takes nothing from it.
            Err(Cause::BrokenOff | Cause::Timeout(..)) if reading.has_ended() => {}
            read => read?,
        }
        let first_token = call.patience.first_token();
        let (text, finish, usage) = reading.finish()?;
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

impl Call<'_> {
    async fn send(&mut self, headers: HeaderMap) -> Result<Response, Cause> {
        let mut body = self.remote.dialect.body(self.request, self.prompt);
        body.extend(self.remote.body.clone());
        let call = self.remote.http.post(self.remote.endpoint.clone()).headers(headers).json(&body);
        let sent = self.patience.wait(call.send()).await?;
        let response = sent.map_err(|error| {
            let error = error.without_url();
            // The first line alone is only "error sending request".
            let causes = Chain(error.source().unwrap_or(&error)).to_string();
            Cause::Connection(self.clean(&causes))
        })?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(response).await) }
    }

    async fn refusal(&self, response: Response) -> Cause {
        let status = response.status();
        let retry_after = retry_after::read(response.headers());
        // What was said before the connection broke, or fell silent, is still the best there is to say.
        let body = body::beginning(response, self.request.idle_timeout).await;
        let text = String::from_utf8_lossy(&body);
        let said = Said::read(&text).unwrap_or_else(|| Said::page(&text));
        let mut message = self.clean(&said.message);
        if message.is_empty() {
            status.canonical_reason().unwrap_or("no message").clone_into(&mut message);
        }
        said.in_place_of_answer(status.as_u16(), message, retry_after)
    }

    async fn read(&mut self, response: Response, reading: &mut Reading) -> Result<(), Cause> {
        let header = |name: HeaderName| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_ascii_lowercase()
        };
        let (label, encoding) = (header(CONTENT_TYPE), header(CONTENT_ENCODING));
        if !matches!(encoding.as_str(), "" | "identity") {
            let why = format!("compressed ({encoding}), though that was not asked for");
            return Err(Cause::Protocol(self.clean(&why)));
        }
        let body = body::open(response, &self.patience).await?;
        match body.kind {
            body::Kind::Json => {
                let whole = body.whole(&self.patience).await?;
                self.take("message", &String::from_utf8_lossy(&whole), reading)?;
                reading.mark();
                return Ok(());
            }
            // A web page, most often: the base_url is wrong.
            body::Kind::Other => {
                return Err(Cause::Protocol(self.clean(&format!("no event stream but \"{label}\""))));
            }
            body::Kind::Empty => return Err(Cause::BrokenOff),
            body::Kind::Events => {}
        }
        let mut events = body.events();
        while let Some(event) = self.patience.wait(events.next()).await? {
            let event = event?;
            let before = reading.pieces();
            self.take(&event.event, &event.data, reading)?;
            if reading.pieces() > before {
                self.patience.token();
            }
            if reading.is_marked() {
                break;
            }
        }
        Ok(())
    }

    fn take(&self, event: &str, data: &str, reading: &mut Reading) -> Result<(), Cause> {
        match Said::read(data) {
            Some(said) => Err(said.within_answer(self.clean(&said.message))),
            None => self.remote.dialect.read(event, data, reading),
        }
    }

    fn clean(&self, message: &str) -> String {
        clean(message, self.prompt, self.secrets)
    }
}

/// How long the next piece of an answer may take.
#[derive(Debug)]
struct Patience {
    started: Instant,
    first: Option<Duration>,
    idle: Duration,
    tokens: Option<(Instant, Instant)>,
}

impl Patience {
    fn new(first: Option<Duration>, idle: Duration) -> Self {
        Self { started: Instant::now(), first, idle, tokens: None }
    }

    /// The future, as long as the next token may take. Only tokens count: a server can send signs of life for ever.
    async fn wait<F: Future>(&self, future: F) -> Result<F::Output, Cause> {
        let (since, limit, missing) = match self.tokens {
            Some((_, last)) => (last, self.idle, Missing::NextToken),
            None => match self.first {
                Some(first) => (self.started, first, Missing::FirstToken),
                None => return Ok(future.await),
            },
        };
        tokio::time::timeout_at(since + limit, future).await.map_err(|_| Cause::Timeout(missing, limit))
    }

    fn token(&mut self) {
        let now = Instant::now();
        let first = self.tokens.map_or(now, |(first, _)| first);
        self.tokens = Some((first, now));
    }

    fn first_token(&self) -> Option<Duration> {
        self.tokens.map(|(first, _)| first - self.started)
    }
}

fn too_long() -> Cause {
    Cause::Protocol("longer than any summary".to_owned())
}

/// What the call cost, by our own count. It may take milliseconds: not on a thread that serves requests.
async fn count(prompt: &Prompt, text: &str) -> u64 {
    let texts = [prompt.system.clone(), prompt.user.clone(), text.to_owned()];
    let counted =
        tokio::task::spawn_blocking(move || texts.iter().map(|text| tokens::count(text)).sum::<usize>());
    counted.await.ok().and_then(|tokens| u64::try_from(tokens).ok()).unwrap_or_default()
}

impl Usage {
    /// Takes the fields of these names, where they are numbers.
    pub(super) fn take(&mut self, usage: &Value, input: &str, output: &str) {
        let number = |name: &str| usage.get(name).and_then(Value::as_u64);
        self.input_tokens = number(input).or(self.input_tokens);
        self.output_tokens = number(output).or(self.output_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::super::openai::OpenAi;
    use super::*;

    fn remote(base_url: &str, key_header: Option<&str>) -> Result<Remote, RemoteError> {
        let http = http_client(Duration::from_secs(1)).expect("a client");
        let spec = RemoteSpec {
            base_url: base_url.to_owned(),
            key: Some(KeySource::fixed("sk-secret")),
            key_header: key_header.map(str::to_owned),
            headers: vec![("x-more".to_owned(), KeySource::fixed("hidden"))],
            ..RemoteSpec::default()
        };
        Remote::new(http, OpenAi::default(), spec)
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
            ("api.openai.com/v1", RemoteError::BaseUrl),
            ("file:///etc/passwd", RemoteError::BaseUrl),
            ("https://user:pass@host/v1", RemoteError::Credentials),
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
            Some(RemoteError::HeaderName("api_key_header"))
        );
    }
}
