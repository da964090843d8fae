//! Requests and checked responses: an error that is not a valid problem document fails the test.

use crate::support::app::{Set, TestApp};
use crate::support::backend::Backend;
use reqwest::header::HeaderMap;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;
use std::ops::Deref;
use std::sync::LazyLock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Starts a service with its own store.
pub(crate) struct Running {
    app: TestApp,
    _backend: Backend,
}

impl Deref for Running {
    type Target = TestApp;

    fn deref(&self) -> &TestApp {
        &self.app
    }
}

/// Starts a service for tests of the protocol, which do not depend on the store.
pub(crate) async fn on_sqlite(set: Set<'_>) -> Running {
    let backend = Backend::sqlite().await;
    Running { app: TestApp::start(&backend, set).await, _backend: backend }
}

/// A response. If it is an error, it is a valid problem document.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) text: String,
}

impl Answer {
    /// Checks the rules for every response to such a request.
    fn checked(self, method: &Method, path: &str) -> Self {
        // A response to HEAD has no body.
        let to_head = method == Method::HEAD;
        if let Some(statuses) = documented(method, path) {
            assert!(
                statuses.contains(&self.status.to_string()),
                "the document does not have this answer to {method} {path}, only {statuses:?}: {self:?}"
            );
        }
        let id = self.header("x-request-id").unwrap_or_default();
        assert!(!id.is_empty(), "no x-request-id: {self:?}");
        assert!(!to_head || self.text.is_empty(), "{self:?}");
        if self.status >= 400 {
            assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
            if to_head {
                return self;
            }
            let problem = self.json();
            let text = |field: &str| problem[field].as_str().unwrap_or_default().to_owned();
            assert!(text("type").starts_with("urn:precis:problem:"), "{self:?}");
            assert_eq!(problem["status"], self.status, "{self:?}");
            assert!(!text("detail").is_empty() && !text("title").is_empty(), "{self:?}");
            for error in problem["errors"].as_array().into_iter().flatten() {
                assert!(!error["field"].as_str().unwrap_or_default().is_empty(), "{self:?}");
                let detail = error["detail"].as_str().unwrap_or_default();
                let noise = [" at line ", "invalid type", "digit found", "target type", "struct ", "variant"];
                assert!(!detail.is_empty() && !noise.iter().any(|noise| detail.contains(noise)), "{self:?}");
            }
        }
        self
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns the body of a response with this success status.
    pub(crate) fn ok(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        if self.text.is_empty() { Value::Null } else { self.json() }
    }

    /// Returns the detail of an error of this type.
    pub(crate) fn problem(&self, status: u16, kind: &str) -> String {
        assert_eq!(self.status, status, "{self:?}");
        let problem = self.json();
        assert_eq!(problem["type"], format!("urn:precis:problem:{kind}"), "{self:?}");
        problem["detail"].as_str().unwrap_or_default().to_owned()
    }

    /// Returns the fields that a 422 names.
    pub(crate) fn fields(&self) -> Vec<String> {
        let detail = self.problem(422, "invalid-input");
        let problem = self.json();
        let errors = problem["errors"].as_array().unwrap_or_else(|| panic!("no fields: {self:?}"));
        let field = |error: &Value| error["field"].as_str().unwrap_or_default().to_owned();
        let fields: Vec<String> = errors.iter().map(field).collect();
        assert!(fields.iter().all(|field| detail.contains(field)), "{self:?}");
        fields
    }
}

/// Returns the statuses of an operation in the OpenAPI document, or `None` if it has no such operation.
fn documented(method: &Method, path: &str) -> Option<Vec<String>> {
    static DOCUMENT: LazyLock<Value> =
        LazyLock::new(|| serde_json::to_value(precis::http::openapi::document()).expect("JSON"));
    let given: Vec<&str> = path.split('/').collect();
    let is_meant = |template: &str| {
        let segments: Vec<&str> = template.split('/').collect();
        let fits = |(segment, given): (&&str, &&str)| segment == given || segment.starts_with('{');
        segments.len() == given.len() && segments.iter().zip(&given).all(fits)
    };
    let paths = DOCUMENT["paths"].as_object().expect("paths");
    // If two paths match, the literal one has priority.
    let (_, item) = paths.iter().rev().find(|(template, _)| is_meant(template))?;
    let name = if method == Method::HEAD { "get" } else { &method.as_str().to_lowercase() };
    let responses = item.get(name)?["responses"].as_object().expect("responses");
    Some(responses.keys().cloned().collect())
}

pub(crate) async fn send(request: RequestBuilder) -> Answer {
    let (client, request) = request.build_split();
    let request = request.expect("a request");
    let (method, path) = (request.method().clone(), request.url().path().to_owned());
    let response = client.execute(request).await.expect("an answer");
    let status = response.status().as_u16();
    let headers = texts(response.headers());
    Answer { status, headers, text: response.text().await.expect("a body") }.checked(&method, &path)
}

fn texts(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &reqwest::header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

/// Sends a body as JSON without checking it.
pub(crate) fn with_json(
    app: &TestApp,
    method: Method,
    path: &str,
    body: impl Into<String>,
) -> RequestBuilder {
    app.request(method, path).header("content-type", "application/json").body(body.into())
}

pub(crate) async fn get(app: &TestApp, path: &str) -> Answer {
    send(app.request(Method::GET, path)).await
}

pub(crate) async fn delete(app: &TestApp, path: &str) -> Answer {
    send(app.request(Method::DELETE, path)).await
}

pub(crate) async fn post(app: &TestApp, path: &str, body: impl Into<String>) -> Answer {
    send(with_json(app, Method::POST, path, body)).await
}

pub(crate) async fn put(app: &TestApp, path: &str, body: impl Into<String>) -> Answer {
    send(with_json(app, Method::PUT, path, body)).await
}

/// Sends a raw request, for requests that no client would send. `head` is the request line with the headers.
pub(crate) async fn raw(app: &TestApp, head: &str, body: &[u8]) -> Answer {
    let mut target = head.split(' ');
    let method = target.next().and_then(|method| method.parse().ok()).expect("a method");
    let path = target.next().and_then(|target| target.split('?').next()).expect("a path");
    let address = app.url.strip_prefix("http://").expect("an address");
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let head = format!("{head}\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("sent");
    stream.write_all(body).await.expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let answer = String::from_utf8(answer).expect("UTF-8");
    let (head, text) = answer.split_once("\r\n\r\n").expect("a head");
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status");
    let header = |line: &str| {
        let (name, value) = line.split_once(": ").expect("a header");
        (name.to_lowercase(), value.to_owned())
    };
    let headers = lines.map(header).collect();
    Answer { status: status.parse().expect("a number"), headers, text: text.to_owned() }
        .checked(&method, path)
}

/// Like [`raw`], with a JSON body.
pub(crate) async fn raw_json(app: &TestApp, target: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head = format!("{target} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {length}");
    raw(app, &head, body).await
}
