//! The session, the user and the keys of a request.

use crate::domain::api_key::PREFIX;
use crate::domain::message::Message;
use crate::domain::message::object::Object;
use axum::http::{HeaderMap, HeaderName, header};

/// The headers in which known clients name their conversation, in the order in which they count. `docs/proxy.md` has the same table.
pub const SESSION_HEADERS: [&str; 10] = [
    "x-session-id",             // opencode, and many applications
    "x-thread-id",              // applications
    "x-conversation-id",        // applications
    "x-claude-code-session-id", // Claude Code
    "x-openwebui-chat-id",      // Open WebUI with ENABLE_FORWARD_USER_INFO_HEADERS
    "agent-session-id",         // goose
    "x-litellm-session-id",     // LiteLLM
    "x-session-affinity",       // opencode
    "x-opencode-session",       // opencode
    "x-task-id",                // Cline
];

/// An agent of Claude Code that works for another one in the same session: its conversation is another one.
const AGENT_HEADER: &str = "x-claude-code-agent-id";
/// The number of earlier attempts, of the official clients of OpenAI and Anthropic.
const RETRY_HEADER: &str = "x-stainless-retry-count";

/// The beginnings of the last message in requests of Claude Code about the session: suggestions for the next prompt, and the title.
const SIDE_REQUESTS: [&str; 2] = ["[SUGGESTION MODE:", "<session>"];

/// The headers that can have a key.
pub const KEY_HEADERS: [HeaderName; 2] = [header::AUTHORIZATION, HeaderName::from_static("x-api-key")];

/// Returns the first session that a header of a known client names, or that in the body.
pub(super) fn session(headers: &HeaderMap, in_body: Option<String>) -> Option<String> {
    let value = |name: &str| {
        let value = headers.get(name)?.to_str().ok()?.trim();
        (!value.is_empty()).then(|| value.to_owned())
    };
    let session = SESSION_HEADERS.into_iter().find_map(value).or(in_body)?;
    Some(match value(AGENT_HEADER) {
        Some(agent) => format!("{session}/{agent}"),
        None => session,
    })
}

/// Returns the session in Anthropic's `metadata.user_id`, as Claude Code writes it: in a JSON object, or after `_session_`.
pub(super) fn in_user_id(user_id: &str) -> Option<String> {
    let session = match Object::parse(user_id).string("session_id") {
        Some(session) => session,
        None => user_id.rsplit_once("_session_")?.1.to_owned(),
    };
    (!session.is_empty()).then_some(session)
}

/// Returns `true` if the client says that it repeats a request.
pub(super) fn is_retry(headers: &HeaderMap) -> bool {
    let count = headers.get(RETRY_HEADER).and_then(|count| count.to_str().ok()?.parse::<u32>().ok());
    count.is_some_and(|count| count > 0)
}

/// Returns `true` if a list that ends with this message is about the conversation, although it contains it.
pub(super) fn is_side_request(last: &Message) -> bool {
    let text = last.content().trim_start();
    SIDE_REQUESTS.iter().any(|beginning| text.starts_with(beginning))
}

/// Returns the key of precis in a header for keys, if there is one.
pub fn key_of_precis(headers: &HeaderMap) -> Option<&str> {
    let values = KEY_HEADERS.into_iter().flat_map(|name| headers.get_all(name));
    let words = values.filter_map(|value| value.to_str().ok()).flat_map(str::split_whitespace);
    words.into_iter().find(|word| word.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn session_is_that_of_the_first_known_header_that_is_not_empty() {
        let mut headers = HeaderMap::new();
        let set = |headers: &mut HeaderMap, name: &'static str, value: &'static str| {
            headers.insert(name, HeaderValue::from_static(value));
        };
        assert_eq!(session(&headers, None), None);
        assert_eq!(session(&headers, Some("body".to_owned())).as_deref(), Some("body"));
        set(&mut headers, "x-openwebui-chat-id", "chat");
        set(&mut headers, "x-session-id", " ");
        assert_eq!(session(&headers, Some("body".to_owned())).as_deref(), Some("chat"));
        set(&mut headers, "x-claude-code-agent-id", "explorer");
        assert_eq!(session(&headers, None).as_deref(), Some("chat/explorer"));
    }

    #[test]
    fn session_of_claude_code_is_read_in_both_forms() {
        let ids = [
            (r#"{"device_id":"d","account_uuid":"","session_id":"s-1"}"#, Some("s-1")),
            ("user_0af_account__session_s-2", Some("s-2")),
            ("ada", None),
            ("user_session_", None),
        ];
        for (user_id, expected) in ids {
            assert_eq!(in_user_id(user_id).as_deref(), expected, "{user_id}");
        }
    }
}
