//! A call as it came in: what a test looks at to see what a model was told, whichever protocol it was told in.

use super::wire::Request;
use axum::http::HeaderMap;
use serde_json::Value;
use tokio::time::Instant;

/// What a call is written in, and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// OpenAI's chat completions.
    OpenAi,
    /// Anthropic's messages.
    Anthropic,
}

/// A call, as it came in.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// What it is written in.
    pub(crate) protocol: Protocol,
    /// The path it came to, with its query.
    pub(crate) path: String,
    /// Its headers.
    pub(crate) headers: HeaderMap,
    /// Its body; null where that was not JSON.
    pub(crate) body: Value,
    /// When it came.
    pub(crate) at: Instant,
    /// Whether the client got all that there was to get.
    pub(crate) answered: bool,
    /// Whether it was one too many at once.
    pub(crate) turned_away: bool,
    system: String,
    user: String,
}

impl Call {
    /// None where it is no call to a model.
    pub(super) fn new(request: Request) -> Option<Self> {
        let (path, _) = request.target.split_once('?').unwrap_or((&request.target, ""));
        let protocol = match (request.method.as_str(), path) {
            ("POST", "/v1/chat/completions") => Protocol::OpenAi,
            ("POST", "/v1/messages") => Protocol::Anthropic,
            _ => return None,
        };
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let system = match protocol {
            Protocol::OpenAi => of_role(&body, "system"),
            Protocol::Anthropic => text(&body["system"]),
        };
        Some(Self {
            protocol,
            path: request.target,
            headers: request.headers,
            user: of_role(&body, "user"),
            system,
            body,
            at: Instant::now(),
            answered: false,
            turned_away: false,
        })
    }

    /// The system prompt; empty without one.
    pub(crate) fn system(&self) -> &str {
        &self.system
    }

    /// The user prompt; empty without one.
    pub(crate) fn user(&self) -> &str {
        &self.user
    }

    /// The header of that name; empty without it.
    pub(crate) fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value.and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Whether it asks for a stream.
    pub(super) fn wants_stream(&self) -> bool {
        self.body["stream"] == true
    }
}

/// The content of the first message of that role.
fn of_role(body: &Value, role: &str) -> String {
    let messages = body["messages"].as_array();
    let message = messages.and_then(|messages| messages.iter().find(|message| message["role"] == role));
    message.map(|message| text(&message["content"])).unwrap_or_default()
}

/// A text may be a string or a list of blocks, in both protocols.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        _ => String::new(),
    }
}
