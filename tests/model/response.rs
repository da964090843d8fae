//! An HTTP response with the parts that the reference model predicts.

use reqwest::RequestBuilder;
use serde_json::Value;

#[derive(Debug)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) replayed: bool,
    pub(super) etag: Option<String>,
    pub(super) text: String,
}

pub(super) async fn send(request: RequestBuilder) -> Response {
    let response = request.send().await.expect("a response");
    let header =
        |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (replayed, etag) = (header("idempotent-replayed").is_some(), header("etag"));
    let status = response.status().as_u16();
    Response { status, replayed, etag, text: response.text().await.expect("a body") }
}

impl Response {
    #[track_caller]
    pub(super) fn ok(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        if self.text.is_empty() { Value::Null } else { serde_json::from_str(&self.text).expect("JSON") }
    }

    #[track_caller]
    pub(super) fn problem(&self, status: u16, name: &str) {
        let problem = self.ok(status);
        assert_eq!(problem["type"], format!("urn:precis:problem:{name}"), "{self:?}");
    }
}
