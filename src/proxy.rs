//! The proxy: requests of applications to a model provider, which get a memory on the way.
//!
//! A request with a session is answered in five steps: its list is placed in the history ([`crate::domain::reconcile`]), the context takes
//! the place of its messages, the upstream answers, the answer is relayed byte for byte ([`relay`]), and the turn is stored before its
//! last event is released. Everything else is forwarded unchanged, with the reason in a header. [`openai`] and [`anthropic`] know the
//! protocols; [`session`] finds the session and the user of a request.

use crate::blocking;
use crate::capacity;
use crate::config::{self, Limits, OnUnavailable};
use crate::domain::error_chain::ErrorChain;
use crate::domain::format::{self, Fields, Format, ListOptions};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::json_validation::{MAX_JSON_VALUES, check_json, replace_lone_surrogates};
use crate::domain::message::object::Object;
use crate::domain::message::{Message, Role};
use crate::llm::http::{CachedSecret, build_http_client};
use crate::service::contexts::{Context, ContextOptions};
use crate::service::turns::{ClientTurn, TurnPlace};
use crate::service::{Error, MemoryService};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, header};
use bytes::Bytes;
use error::HEAD_TIMEOUT;
use metrics::UpstreamMetrics;
use protocol::Protocol;
use relay::Relay;
use reqwest::{Client, Url};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use uuid::Uuid;

pub use error::ProxyError;

mod anthropic;
mod error;
mod metrics;
mod openai;
mod protocol;
mod relay;
pub mod session;

/// Longest time for a connection to an upstream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the place of a list, which takes milliseconds, and for all work of precis, which can include a consolidation, before a
/// request is forwarded without memory.
const PLACE_TIMEOUT: Duration = Duration::from_secs(2);
const FORWARD_AFTER: Duration = Duration::from_secs(15);
/// Share of a window for the answer, if the request does not limit it, and its maximum.
const ANSWER_SHARE: i64 = 8;
const MAX_ANSWER_TOKENS: i64 = 4096;
const JSON: &[u8] = b"application/json";

/// The header that tells requests of Anthropic's clients from others.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const X_SESSION: HeaderName = HeaderName::from_static("x-precis-session");
const X_STORED: HeaderName = HeaderName::from_static("x-precis-stored");
const X_COVERAGE: HeaderName = HeaderName::from_static("x-precis-coverage");
const X_TOKENS: HeaderName = HeaderName::from_static("x-precis-tokens");
const X_MEMORY: HeaderName = HeaderName::from_static("x-precis-memory");

/// A request of an application. It has no `Debug`, because it contains keys.
#[expect(missing_debug_implementations, reason = "it contains keys")]
pub struct ProxyRequest {
    pub tenant: TenantId,
    /// The user if the request names none.
    pub default_user: Option<UserId>,
    /// The session in the path, or in the header of precis.
    pub session: Option<SessionId>,
    /// The user in the header of precis.
    pub user: Option<UserId>,
    pub method: Method,
    /// The path after `/v1/`, and the query.
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// A server of the settings.
#[derive(Debug)]
struct Upstream {
    /// The name of its section.
    name: &'static str,
    /// Ends with a slash.
    base_url: Url,
    key: Option<CachedSecret>,
    metrics: UpstreamMetrics,
}

/// The upstreams, and the rules for requests to them.
#[derive(Debug)]
pub struct Proxy {
    client: Client,
    openai: Option<Upstream>,
    anthropic: Option<Upstream>,
    settings: config::Proxy,
    /// Longest time for the work of precis before a request is sent.
    timeout: Duration,
    limits: Limits,
}

/// A request that gets a memory.
struct Remembered {
    turn: ClientTurn,
    placed: TurnPlace,
    context: Context,
    body: String,
}

/// The memory of a request: used, or not used for a reason.
#[expect(clippy::large_enum_variant, reason = "one value per request, never stored")]
enum Memory {
    On(Remembered),
    Off(&'static str),
}

impl Proxy {
    /// Creates the proxy from validated settings. Its metrics belong to the recorder that is installed during this call.
    pub fn new(settings: &config::Settings) -> Result<Self, String> {
        let upstream = |(name, upstream): (&'static str, &config::Upstream)| {
            let base_url = upstream.base_url.as_deref()?;
            let base_url = Url::parse(&format!("{}/", base_url.trim_end_matches('/'))).ok()?;
            let key = upstream.api_key.as_ref().map(CachedSecret::new);
            Some(Upstream { name, base_url, key, metrics: UpstreamMetrics::new(name) })
        };
        let [openai, anthropic] = settings.proxy.upstreams().map(upstream);
        Ok(Self {
            client: build_http_client(CONNECT_TIMEOUT).map_err(|error| error.to_string())?,
            openai,
            anthropic,
            settings: settings.proxy.clone(),
            timeout: settings.server.request_timeout,
            limits: settings.limits.clone(),
        })
    }

    /// Answers a request. The response says if the memory was used, and if not, why.
    pub async fn serve(
        &self,
        service: &MemoryService,
        request: ProxyRequest,
    ) -> Result<Response<Body>, ProxyError> {
        let started_at = Instant::now();
        let path = request.path.split('?').next().unwrap_or_default();
        let protocol: Option<&'static dyn Protocol> = match path {
            openai::PATH if request.method == Method::POST => Some(&openai::OpenAi),
            anthropic::PATH if request.method == Method::POST => Some(&anthropic::Anthropic),
            _ => None,
        };
        let format = protocol.map(Protocol::format);
        let is_anthropic = format == Some(Format::Anthropic)
            || format.is_none() && request.headers.contains_key(ANTHROPIC_VERSION);
        let (name, upstream) =
            if is_anthropic { ("anthropic", &self.anthropic) } else { ("openai", &self.openai) };
        let upstream = upstream.as_ref().ok_or(ProxyError::Off(name))?;
        let url = upstream.url(&request.path)?;
        let mut headers = upstream.headers(&request.headers).await?;
        let mut memory = match protocol {
            Some(protocol) => self.remember(service, protocol, &request).await?,
            None => Memory::Off("path"),
        };
        let metrics = &upstream.metrics;
        let body = match &mut memory {
            Memory::On(remembered) => {
                metrics.requests_with_memory.increment(1);
                headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
                Bytes::from(std::mem::take(&mut remembered.body))
            }
            Memory::Off(_) => {
                metrics.requests_without_memory.increment(1);
                request.body
            }
        };
        metrics.delay.record(started_at.elapsed());
        // The request holds no permit while it waits for the model.
        capacity::current().release();
        let call = self.client.request(request.method, url).headers(headers).body(body).send();
        let response =
            timeout(HEAD_TIMEOUT, call).await.map_err(|_| ProxyError::Timeout).and_then(|response| {
                response.map_err(|error| {
                    ProxyError::Unreachable(if error.is_connect() {
                        "it refuses the connection, or its name or certificate is wrong"
                    } else {
                        "it closed the connection without a response"
                    })
                })
            });
        if !response.as_ref().is_ok_and(|response| response.status().is_success()) {
            metrics.errors.increment(1);
        }
        let response = response?;
        if response.status().is_redirection() && response.headers().contains_key(header::LOCATION) {
            return Err(ProxyError::Redirect);
        }
        let mut facts = HeaderMap::new();
        let Remembered { turn, placed, context, .. } = match memory {
            Memory::On(remembered) => remembered,
            Memory::Off(reason) => return Ok(unstored(relay::forward(response), facts, Some(reason))),
        };
        facts.insert(X_SESSION, header_value(turn.session.as_str()));
        if !response.status().is_success() {
            return Ok(unstored(relay::forward(response), facts, None));
        }
        facts.insert(X_COVERAGE, header_value(&coverage(&context, placed.keep())));
        facts.insert(X_TOKENS, HeaderValue::from(context.tokens.total));
        let (service, limits) = (service.clone(), self.limits.clone());
        let relay = Relay { service, limits, turn, placed };
        let reader = protocol.unwrap_or(&openai::OpenAi).answer();
        let (mut response, stored, reason) = relay.answer(response, reader, self.forwards()).await?;
        let Some(stored) = stored else { return Ok(unstored(response, facts, reason)) };
        facts.insert(X_STORED, header_value(&format!("{}-{}", stored.start(), stored.end())));
        response.headers_mut().extend(facts);
        Ok(response)
    }

    /// Asks each upstream for its models. An error says what to do.
    pub async fn check(&self) -> Vec<(&'static str, Result<String, String>)> {
        let mut results = Vec::new();
        for upstream in [&self.openai, &self.anthropic].into_iter().flatten() {
            results.push((upstream.name, self.check_upstream(upstream).await));
        }
        results
    }

    async fn check_upstream(&self, upstream: &Upstream) -> Result<String, String> {
        let client = HeaderMap::from_iter([(ANTHROPIC_VERSION, HeaderValue::from_static("2023-06-01"))]);
        let headers = upstream.headers(&client).await.map_err(|error| error.to_string())?;
        let url = upstream.url("models").map_err(|error| error.to_string())?;
        let call = self.client.get(url).headers(headers).timeout(CONNECT_TIMEOUT).send().await;
        let base_url = format!("proxy.{}.base_url", upstream.name);
        let status = call.map_err(|_| format!("it is unreachable: check {base_url}"))?.status();
        match status.as_u16() {
            300..=399 => Err(format!("it redirects, which the proxy does not follow: correct {base_url}")),
            401 | 403 if upstream.key.is_some() => {
                Err(format!("it refuses the key: correct proxy.{}.api_key", upstream.name))
            }
            500.. => Err(format!("it answers {status} to GET /models: check {base_url}")),
            _ => Ok(format!("answers {status} to GET /models")),
        }
    }

    /// Places the request in its session, and builds what is sent instead.
    async fn remember(
        &self,
        service: &MemoryService,
        protocol: &'static dyn Protocol,
        request: &ProxyRequest,
    ) -> Result<Memory, ProxyError> {
        let (bytes, limits) = (request.body.len(), self.limits.clone());
        let (service, body, rules) = (service.clone(), request.body.clone(), self.settings.clone());
        let read = {
            let (service, body) = (service.clone(), body.clone());
            move || ReadRequest::new(&service, protocol, &body, &limits, &rules)
        };
        let is_json = request.headers.get(header::CONTENT_TYPE).is_some_and(is_json);
        let read = blocking::spawn_cpu_if_large(bytes, read).await.filter(|_| is_json);
        let Some(read) = read else { return Ok(Memory::Off("unreadable-request")) };
        let session = match &request.session {
            Some(session) => session.clone(),
            None => match session::session(&request.headers, read.session) {
                Some(id) => SessionId::new(id).map_err(|error| ProxyError::InvalidId("session", error))?,
                None => return Ok(Memory::Off("no-session")),
            },
        };
        let user = match &request.user {
            Some(user) => Some(user.clone()),
            None => read
                .user
                .map(UserId::new)
                .transpose()
                .map_err(|error| ProxyError::InvalidId("user", error))?,
        };
        let list = match read.list {
            Ok(list) => Arc::new(list),
            Err(reason) => return Ok(Memory::Off(reason)),
        };
        let turn = ClientTurn {
            tenant: request.tenant.clone(),
            session,
            user,
            default_user: request.default_user.clone(),
            list,
            is_retry: session::is_retry(&request.headers),
            key: Uuid::new_v4(),
        };
        let options = ContextOptions {
            user_id: turn.user.clone(),
            default_user: turn.default_user.clone(),
            ..read.options
        };
        let (place_timeout, limit) = match self.settings.on_unavailable {
            OnUnavailable::Forward => (PLACE_TIMEOUT, FORWARD_AFTER.min(self.timeout)),
            OnUnavailable::Reject => (self.timeout, self.timeout),
        };
        let work = async {
            let placed = timeout(place_timeout, service.place_turn(&turn)).await;
            let Some(placed) = placed.map_err(|_| None)?.map_err(Some)? else { return Ok(None) };
            service.turn_context(&turn, placed, options).await.map(Some).map_err(Some)
        };
        let result = timeout(limit, work).await.unwrap_or(Err(None));
        let (context, placed) = match result {
            Ok(Some(result)) => result,
            Ok(None) => return Ok(Memory::Off("unrelated")),
            Err(error) => return self.without_memory(error).map(Memory::Off),
        };
        let insert = move || {
            let text = String::from_utf8_lossy(&body);
            let text = replace_lone_surrogates(text.trim_ascii());
            let mut request = Object::parse(&text);
            protocol.insert(&mut request, read.leading, &context);
            (request.to_json(), context)
        };
        let (body, context) = blocking::spawn_cpu_if_large(bytes, insert).await;
        Ok(Memory::On(Remembered { turn, placed, context, body }))
    }

    /// Returns `true` if requests are forwarded without memory while that cannot be used.
    fn forwards(&self) -> bool {
        self.settings.on_unavailable == OnUnavailable::Forward
    }

    /// Returns the reason for which a request is forwarded without memory. `None` is a timeout.
    fn without_memory(&self, error: Option<Error>) -> Result<&'static str, ProxyError> {
        Ok(match error {
            Some(Error::BudgetTooSmall { .. }) => "window-too-small",
            Some(Error::RewindForbidden) => "rewind-forbidden",
            Some(Error::CopyTooLarge { .. }) => "session-too-large",
            None | Some(Error::Store(_) | Error::Overloaded(_)) if self.forwards() => {
                let cause =
                    error.map_or_else(|| "timed out".to_owned(), |error| ErrorChain(&error).to_string());
                tracing::warn!(
                    error = cause,
                    "failed to use the memory of a session; its request is forwarded"
                );
                "unavailable"
            }
            None => return Err(ProxyError::Slow(self.timeout)),
            Some(error) => return Err(error.into()),
        })
    }
}

/// The parts of a request that matter to its memory.
struct ReadRequest {
    session: Option<String>,
    user: Option<String>,
    /// Number of messages that are the system prompt.
    leading: usize,
    /// The other messages, or the reason for which the request has no memory.
    list: Result<Vec<Message>, &'static str>,
    options: ContextOptions,
}

impl ReadRequest {
    /// Reads a body; `None` if it is no JSON object that other clients could read again.
    fn new(
        service: &MemoryService,
        protocol: &dyn Protocol,
        body: &[u8],
        limits: &Limits,
        settings: &config::Proxy,
    ) -> Option<Self> {
        let text = replace_lone_surrogates(std::str::from_utf8(body).ok()?.trim_ascii());
        check_json(&text, limits.max_json_depth, MAX_JSON_VALUES).ok().filter(|_| text.starts_with('{'))?;
        let request = Object::parse(&text);
        let (session, user) = protocol.names(&request);
        let messages = request.list("messages");
        let leading = protocol.leading(&messages);
        let (instructions, rest) = messages.split_at_checked(leading)?;
        let list = match protocol.unsupported(&request) {
            Some(reason) => Err(reason),
            None => read_messages(rest, limits),
        };
        let max_tokens = settings.window(&request.text("model")).or_else(|| service.default_window());
        // The list does not contain the system prompt, the tools and the answer.
        let reserved_tokens = max_tokens.map_or(0, |window| {
            let default = (window / ANSWER_SHARE).min(MAX_ANSWER_TOKENS);
            let answer = protocol.answer_limit(&request).unwrap_or(default).min(window / 2);
            let fields = ["tools", "functions", "system"].into_iter().filter_map(|key| request.get(key));
            let texts = fields.chain(instructions.iter().copied());
            answer + texts.map(|json| service.count_tokens(json)).sum::<i64>()
        });
        let options = ContextOptions {
            max_tokens,
            reserved_tokens,
            recall: service.default_recall(),
            format: protocol.format(),
            // The upstream knows the fields that it has sent, and those of its client.
            list: ListOptions { fields: Fields::All, ..ListOptions::default() },
            separates_system: true,
            cache_control: protocol.format() == Format::Anthropic && anthropic::may_mark(&request),
            ..ContextOptions::default()
        };
        Some(Self { session, user, leading, list, options })
    }
}

/// Reads the messages of a list.
fn read_messages(raw: &[&str], limits: &Limits) -> Result<Vec<Message>, &'static str> {
    let mut list = Vec::with_capacity(raw.len());
    for json in raw {
        let read = serde_json::from_str(json).ok().and_then(|json| format::read_given(json).ok());
        list.extend(read.ok_or("unreadable-messages")?);
    }
    if list.iter().any(|message: &Message| message.json().len() > limits.max_message_bytes) {
        return Err("message-too-large");
    }
    match list.last() {
        None => Err("unrelated"),
        // The history would have the two parts of the answer as two messages.
        Some(newest) if newest.role() == Role::Assistant => Err("prefill"),
        Some(newest) if session::is_side_request(newest) => Err("unrelated"),
        Some(_) => Ok(list),
    }
}

fn is_json(content_type: &HeaderValue) -> bool {
    let prefix = content_type.as_bytes().get(..JSON.len());
    prefix.is_some_and(|prefix| prefix.eq_ignore_ascii_case(JSON))
}

impl Upstream {
    /// Returns the URL of a path below the base URL.
    fn url(&self, path: &str) -> Result<Url, ProxyError> {
        let url = Url::parse(&format!("{}{path}", self.base_url)).map_err(|_| ProxyError::Path)?;
        let is_below = url.origin() == self.base_url.origin() && url.path().starts_with(self.base_url.path());
        is_below.then_some(url).ok_or(ProxyError::Path)
    }

    /// Returns the headers of the client, without those of the connection and of precis, and with the key of the settings if there is one.
    async fn headers(&self, client: &HeaderMap) -> Result<HeaderMap, ProxyError> {
        let mut headers = relay::end_to_end(client);
        for name in [header::HOST, header::CONTENT_LENGTH, header::COOKIE] {
            headers.remove(name);
        }
        let is_own = |name: &&HeaderName| name.as_str().starts_with("x-precis-");
        for name in headers.keys().filter(is_own).cloned().collect::<Vec<_>>() {
            headers.remove(name);
        }
        let (key_header, prefix) = match self.name {
            "anthropic" => (HeaderName::from_static("x-api-key"), ""),
            _ => (header::AUTHORIZATION, "Bearer "),
        };
        if let Some(key) = &self.key {
            let value = key.header(prefix).await.map_err(ProxyError::SecretUnavailable)?;
            for name in session::KEY_HEADERS {
                headers.remove(name);
            }
            headers.insert(key_header, value);
        } else if session::key_of_precis(&headers).is_some() {
            return Err(ProxyError::KeyOfPrecis(self.name));
        }
        Ok(headers)
    }
}

/// Returns the ranges of a context, without the messages that are not stored yet.
fn coverage(context: &Context, keep: i64) -> String {
    let coverage = &context.coverage;
    let range = |from: i64, to: i64| if from > to { "none".to_owned() } else { format!("{from}-{to}") };
    let omitted: Vec<String> =
        coverage.omitted.iter().map(|omitted| range(omitted.from_seq, omitted.to_seq)).collect();
    let omitted = if omitted.is_empty() { "none".to_owned() } else { omitted.join(",") };
    let (summary, verbatim) = (range(1, coverage.summary_through), range(coverage.verbatim_from, keep));
    format!("summary={summary}; verbatim={verbatim}; omitted={omitted}")
}

/// Adds the headers of a response of which nothing is stored.
fn unstored(mut response: Response<Body>, mut facts: HeaderMap, reason: Option<&str>) -> Response<Body> {
    facts.insert(X_STORED, HeaderValue::from_static("none"));
    if let Some(reason) = reason {
        facts.insert(X_MEMORY, header_value(&format!("off; reason={reason}")));
    }
    response.headers_mut().extend(facts);
    response
}

/// Returns the text as the value of a header; an id with characters that a header cannot have is percent-encoded.
fn header_value(text: &str) -> HeaderValue {
    let is_plain = |byte: u8| byte != b'%' && (byte.is_ascii_graphic() || byte == b' ');
    let encode = |byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    let encoded: String = text.bytes().map(encode).collect();
    HeaderValue::try_from(encoded).unwrap_or_else(|_| HeaderValue::from_static(""))
}
