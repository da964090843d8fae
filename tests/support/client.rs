//! The HTTP client of the tests. It checks every response: the status is documented, there is a request id, and an error
//! is a valid problem document.
//!
//! ```ignore
//! assert_eq!(client.get("/sessions/s").await["last_seq"], 2); // fails if the response is an error
//! client.post("/sessions/s/exchanges", r#"{"messages": []}"#).header("idempotency-key", "k").await.ok(201);
//! client.delete("/sessions/unknown").await.problem(404, "session-not-found");
//! assert_eq!(client.put("/users/u/memory", "{}").await.fields(), ["content"]);
//! ```
#![cfg(test)]

use reqwest::{Body, Client, Method, RequestBuilder};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::ops::{Deref, Range};
use std::pin::Pin;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longer than any request of a test takes on a busy machine.
const TIMEOUT: Duration = Duration::from_mins(3);

/// A client of one service, with or without an API key.
#[derive(Clone)]
pub(crate) struct TestClient {
    pub(crate) url: String,
    pub(crate) http: Client,
    key: Option<String>,
}

/// The size from which a page of messages ends.
const MAX_PAGE_BYTES: usize = 4 * 1024 * 1024;

impl TestClient {
    pub(crate) fn new(url: String) -> Self {
        let http = precis::llm::http::build_http_client(Duration::from_secs(5)).expect("a client");
        Self { url, http, key: None }
    }

    /// Returns a client that sends this API key.
    pub(crate) fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> Request {
        let request = self.http.request(method, format!("{}{path}", self.url)).timeout(TIMEOUT);
        Request(if let Some(key) = &self.key { request.bearer_auth(key) } else { request })
    }

    pub(crate) fn get(&self, path: &str) -> Request {
        self.request(Method::GET, path)
    }

    pub(crate) fn delete(&self, path: &str) -> Request {
        self.request(Method::DELETE, path)
    }

    /// Returns a request with a JSON body, which is a value or text.
    pub(crate) fn post(&self, path: &str, body: impl fmt::Display) -> Request {
        self.request(Method::POST, path).json(body)
    }

    pub(crate) fn put(&self, path: &str, body: impl fmt::Display) -> Request {
        self.request(Method::PUT, path).json(body)
    }

    pub(crate) fn patch(&self, path: &str, body: impl fmt::Display) -> Request {
        self.request(Method::PATCH, path).json(body)
    }

    /// Sends a request that no client would send. `head` is the request line with the headers.
    pub(crate) async fn raw(&self, head: &str, body: &[u8]) -> Response {
        let mut target = head.split(' ');
        let method = target.next().and_then(|method| method.parse().ok()).expect("a method");
        let path = target.next().and_then(|target| target.split('?').next()).expect("a path");
        let mut stream = self.connect().await;
        let head = format!("{head}\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("sent");
        stream.write_all(body).await.expect("sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).await.expect("a response");
        let (head, text) = response.split_once("\r\n\r\n").expect("a head");
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status");
        let header = |line: &str| {
            let (name, value) = line.split_once(": ").expect("a header");
            (name.to_lowercase(), value.to_owned())
        };
        Response::new(status, lines.map(header).collect(), text.to_owned()).checked(&method, path)
    }

    /// Sends a request that no client would send, with a JSON body. `target` is the method and the path.
    pub(crate) async fn raw_json(&self, target: &str, body: impl AsRef<[u8]>) -> Response {
        let body = body.as_ref();
        let head = format!("content-type: application/json\r\ncontent-length: {}", body.len());
        self.raw(&format!("{target} HTTP/1.1\r\n{head}"), body).await
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        let address = self.url.strip_prefix("http://").expect("an address");
        TcpStream::connect(address).await.expect("connected")
    }

    /// Returns all items of a list, page by page.
    pub(crate) async fn all_pages<T: DeserializeOwned>(&self, path: &str, limit: usize) -> Vec<T> {
        #[derive(Deserialize)]
        struct Page<T> {
            items: Vec<T>,
            next: Option<String>,
        }
        let sign = if path.contains('?') { '&' } else { '?' };
        let (mut items, mut cursor) = (Vec::new(), String::new());
        loop {
            let response = self.get(&format!("{path}{sign}limit={limit}{cursor}")).await;
            response.ok(200);
            let page: Page<T> = serde_json::from_str(&response.text).expect("a page");
            let is_full = page.items.len() == limit || response.text.len() >= MAX_PAGE_BYTES;
            assert!(page.items.len() <= limit && (is_full || page.next.is_none()), "{response}");
            items.extend(page.items);
            let Some(next) = page.next else { return items };
            cursor = format!("&cursor={next}");
        }
    }

    /// Appends messages as one exchange.
    pub(crate) async fn record(&self, session: &str, messages: &[Value]) -> Value {
        self.post(&format!("/sessions/{session}/exchanges"), json!({ "messages": messages })).await.ok(201)
    }

    /// Appends an exchange of a user message and a reply for each number.
    pub(crate) async fn record_turns(&self, session: &str, turns: Range<usize>) {
        for turn in turns {
            let body = json!({
                "user_message": format!("Question {turn}: what did we decide about subject {turn}?"),
                "assistant_reply": format!("Answer {turn}: subject {turn} was decided in favour of plan {turn}."),
            });
            self.post(&format!("/sessions/{session}/exchanges"), body).await.ok(201);
        }
    }

    /// Appends an exchange of two short messages for a user.
    pub(crate) async fn record_for(&self, session: &str, user: &str) -> Value {
        let body = json!({"user_message": "a", "assistant_reply": "b", "user_id": user});
        self.post(&format!("/sessions/{session}/exchanges"), body).await.ok(201)
    }

    /// Returns all messages of a session as they were appended.
    pub(crate) async fn history(&self, session: &str) -> Vec<Value> {
        let items: Vec<Value> = self.all_pages(&format!("/sessions/{session}/messages"), 1000).await;
        items.into_iter().map(|mut item| item["message"].take()).collect()
    }

    pub(crate) async fn context(&self, session: &str, body: &Value) -> Value {
        self.post(&format!("/sessions/{session}/context"), body).await.ok(200)
    }
}

/// A request that is sent by `.await`.
pub(crate) struct Request(RequestBuilder);

impl Request {
    pub(crate) fn header(self, name: &str, value: impl AsRef<str>) -> Self {
        Self(self.0.header(name, value.as_ref()))
    }

    pub(crate) fn json(self, body: impl fmt::Display) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }

    pub(crate) fn body(self, body: impl Into<Body>) -> Self {
        Self(self.0.body(body))
    }

    pub(crate) async fn send(self) -> Response {
        let (client, request) = self.0.build_split();
        let request = request.expect("a valid request");
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let response = client.execute(request).await.expect("a response");
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let headers = response.headers().iter();
        let headers = headers.map(|(name, value)| (name.to_string(), text(value.as_bytes()))).collect();
        let status = response.status().as_u16();
        Response::new(status, headers, response.text().await.expect("a body")).checked(&method, &path)
    }

    /// Sends the request without checking the response and without reading its body.
    pub(crate) async fn unchecked(self) -> reqwest::Result<reqwest::Response> {
        self.0.send().await
    }
}

impl IntoFuture for Request {
    type Output = Response;
    type IntoFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.send())
    }
}

/// A checked response. It dereferences to its JSON; this fails the test if the response is an error.
#[must_use = "check the status with `ok` or `problem`"]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) text: String,
    json: OnceLock<Value>,
}

impl Deref for Response {
    type Target = Value;

    #[track_caller]
    fn deref(&self) -> &Value {
        assert!((200..300).contains(&self.status), "{self}");
        self.parsed()
    }
}

impl PartialEq<Value> for Response {
    fn eq(&self, other: &Value) -> bool {
        **self == *other
    }
}

impl PartialEq<Response> for Value {
    fn eq(&self, other: &Response) -> bool {
        *self == **other
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.status, self.headers, self.text)
    }
}

impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Response {
    fn new(status: u16, headers: Vec<(String, String)>, text: String) -> Self {
        Self { status, headers, text, json: OnceLock::new() }
    }

    fn parsed(&self) -> &Value {
        let parse = || serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self}"));
        self.json.get_or_init(parse)
    }

    /// Checks the rules for every response to such a request.
    fn checked(self, method: &Method, path: &str) -> Self {
        let is_head = method == Method::HEAD;
        if let Some(statuses) = documented_statuses(method, path) {
            let is_documented = statuses.contains(&self.status.to_string());
            assert!(is_documented, "{method} {path}: the document has only {statuses:?}: {self}");
        }
        assert!(self.header("x-request-id").is_some_and(|id| !id.is_empty()), "no x-request-id: {self}");
        assert!(!is_head || self.text.is_empty(), "{self}");
        if self.status < 400 {
            return self;
        }
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self}");
        if is_head {
            return self;
        }
        let problem = self.parsed();
        let text = |field: &str| problem[field].as_str().unwrap_or_default();
        assert!(text("type").starts_with("urn:precis:problem:"), "{self}");
        assert_eq!(problem["status"], self.status, "{self}");
        assert!(!text("detail").is_empty() && !text("title").is_empty(), "{self}");
        for error in problem["errors"].as_array().into_iter().flatten() {
            assert!(!error["field"].as_str().unwrap_or_default().is_empty(), "{self}");
            let detail = error["detail"].as_str().unwrap_or_default();
            let internal = [" at line ", "invalid type", "digit found", "target type", "struct ", "variant"];
            assert!(!detail.is_empty() && !internal.iter().any(|text| detail.contains(text)), "{self}");
        }
        self
    }

    /// Returns the JSON of any response.
    pub(crate) fn json(&self) -> Value {
        self.parsed().clone()
    }

    pub(crate) fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns `true` if the response repeats that of an earlier request with the same idempotency key.
    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    /// Returns the body of a response with this success status.
    #[track_caller]
    pub(crate) fn ok(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self}");
        if self.text.is_empty() { Value::Null } else { self.json() }
    }

    /// Checks the status of a response that is perhaps no JSON.
    #[track_caller]
    pub(crate) fn ok_text(&self, status: u16) {
        assert_eq!(self.status, status, "{self}");
    }

    /// Returns the detail of an error of this type.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16, kind: &str) -> String {
        assert_eq!(self.status, status, "{self}");
        let problem = self.parsed();
        assert_eq!(problem["type"], format!("urn:precis:problem:{kind}"), "{self}");
        problem["detail"].as_str().unwrap_or_default().to_owned()
    }

    /// Returns the fields that a 422 names.
    #[track_caller]
    pub(crate) fn fields(&self) -> Vec<String> {
        let detail = self.problem(422, "invalid-input");
        let errors = self.parsed()["errors"].as_array().unwrap_or_else(|| panic!("no fields: {self}"));
        let fields: Vec<_> =
            errors.iter().filter_map(|error| Some(error["field"].as_str()?.to_owned())).collect();
        assert!(fields.iter().all(|field| detail.contains(field)), "{self}");
        fields
    }
}

/// Returns the statuses of an operation in the OpenAPI document, or `None` if the document has no such operation.
fn documented_statuses(method: &Method, path: &str) -> Option<Vec<String>> {
    static DOCUMENT: LazyLock<Value> =
        LazyLock::new(|| serde_json::to_value(precis::http::openapi()).expect("JSON"));
    let given: Vec<&str> = path.split('/').collect();
    let matches = |template: &str| {
        let segments: Vec<&str> = template.split('/').collect();
        let fits = |(segment, given): (&&str, &&str)| segment == given || segment.starts_with('{');
        segments.len() == given.len() && segments.iter().zip(&given).all(fits)
    };
    let paths = DOCUMENT["paths"].as_object().expect("paths");
    // If two paths match, the literal one has priority.
    let (_, item) = paths.iter().rev().find(|(template, _)| matches(template))?;
    let name = if method == Method::HEAD { "get" } else { &method.as_str().to_lowercase() };
    let responses = item.get(name)?["responses"].as_object().expect("responses");
    Some(responses.keys().cloned().collect())
}

/// Returns the values of one field in a list of objects.
pub(crate) fn column(list: &Value, field: &str) -> Value {
    list.as_array()
        .unwrap_or_else(|| panic!("not a list: {list}"))
        .iter()
        .map(|item| item[field].clone())
        .collect()
}

/// Asserts that an object has these fields. Objects in it may have further fields, too.
#[track_caller]
pub(crate) fn assert_includes(actual: &Value, expected: &Value) {
    fn includes(actual: &Value, expected: &Value) -> bool {
        match expected {
            Value::Object(fields) => fields
                .iter()
                .all(|(name, expected)| actual.get(name).is_some_and(|actual| includes(actual, expected))),
            _ => actual == expected,
        }
    }
    assert!(includes(actual, expected), "expected {expected:#} in {actual:#}");
}
