//! Contexts and summaries as text for people, who ask for it with `accept: text/markdown` or `text/plain`.

use crate::domain::id::SessionId;
use crate::service::contexts::Context;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;
use std::fmt::Write as _;

/// Returns a summary as text that ends with a line feed.
pub(super) fn summary(content_type: &'static str, text: &str) -> Response {
    let body = if text.is_empty() { String::new() } else { format!("{text}\n") };
    text_response(content_type, body)
}

/// Returns a context in the OpenAI format as text: a line about the session, then each message under its role.
pub(super) fn context(content_type: &'static str, session: &SessionId, context: &Context) -> Response {
    text_response(content_type, context_text(session, context))
}

fn text_response(content_type: &'static str, body: String) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static(content_type))], body).into_response()
}

fn context_text(session: &SessionId, context: &Context) -> String {
    let mut text = if context.exists {
        let coverage = &context.coverage;
        let mut line = format!("Session {session}: {} messages", coverage.last_seq);
        if coverage.summary_through > 0 {
            let _ = write!(line, ", of which the summary covers 1 to {}", coverage.summary_through);
        }
        line
    } else {
        format!("Session {session} does not exist: its first exchange creates it")
    };
    // Writing to a String cannot fail.
    for range in &context.coverage.omitted {
        let _ = write!(text, ", without {} to {}", range.from_seq, range.to_seq);
    }
    let user = context.user.as_ref().map_or_else(|| "no user".to_owned(), |user| format!("user {user}"));
    let _ = writeln!(text, "; {user}; {} tokens ({}).", context.tokens.total, context.tokens.tokenizer);
    let messages: Vec<Value> = serde_json::from_str(&context.list.messages).unwrap_or_default();
    for message in &messages {
        let _ =
            write!(text, "\n[{}]\n{}\n", message["role"].as_str().unwrap_or_default(), message_text(message));
    }
    text
}

/// Returns the text of a message with its tool calls. Other parts are shown by their type.
fn message_text(message: &Value) -> String {
    let mut lines = Vec::new();
    match &message["content"] {
        Value::String(text) => lines.push(text.clone()),
        Value::Array(parts) => lines.extend(parts.iter().map(|part| {
            let text = ["text", "refusal"].iter().find_map(|field| part[*field].as_str());
            text.map_or_else(|| format!("({})", part["type"].as_str().unwrap_or("part")), str::to_owned)
        })),
        _ => {}
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let (name, arguments) = (&function["name"], &function["arguments"]);
        lines.push(format!(
            "→ {} {}",
            name.as_str().unwrap_or("tool"),
            arguments.as_str().unwrap_or_default()
        ));
    }
    lines.join("\n")
}
