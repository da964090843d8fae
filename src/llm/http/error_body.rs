//! The error responses of providers: their message, their kind, and their `Retry-After`.

use crate::llm::ModelError;
use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use serde::Deserialize;
use serde_json::Value;
use std::time::{Duration, SystemTime};

/// Phrases of messages that mean that the prompt is too long, in lower case: from OpenAI, Anthropic, Gemini, vLLM,
/// llama.cpp, `LiteLLM` and others.
const PROMPT_TOO_LONG_PHRASES: [&str; 21] = [
    "context length",
    "context limit",
    "context window",
    "context size",
    "contextwindowexceeded",
    "context_length_exceeded",
    "exceed_context_size",
    "prompt is too long",
    "input is too long",
    "reduce the length",
    "maximum model length",
    "maximum number of tokens",
    "maximum prompt length",
    "model_max_prompt_tokens_exceeded",
    "model token limit",
    "range of input length",
    "`inputs` must have less than",
    "`inputs` tokens + `max_new_tokens`",
    "too many tokens",
    "too many input tokens",
    REQUEST_TOO_LARGE,
];

/// Means that the prompt is too long whatever the status is.
const REQUEST_TOO_LARGE: &str = "request too large";

/// The error of a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorBody {
    /// The message of the server, not redacted.
    pub(super) message: String,
    /// The type and the code of the error.
    kinds: Vec<String>,
    /// A status inside the body.
    status: Option<u16>,
}

impl ErrorBody {
    /// Parses an error object of a body or of an event. Known forms: `{"error": {"message": "…"}}`, `{"error": "…"}`,
    /// `{"object": "error", "message": "…"}`, `{"message": "…"}`, `{"detail": "…"}`. Returns `None` for anything else.
    pub(super) fn parse(json: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct RawBody {
            #[serde(default)]
            error: Value,
            #[serde(default)]
            message: Value,
            #[serde(default)]
            detail: Value,
            #[serde(default)]
            choices: Value,
            #[serde(default, rename = "type")]
            kind: Value,
        }
        let body: RawBody = serde_json::from_str(json).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        match &body.error {
            Value::Null | Value::Bool(false) => {}
            error => {
                let field = |name: &str| error.get(name);
                let message = text(error).or_else(|| field("message").and_then(text));
                let kinds =
                    ["type", "code", "status"].into_iter().filter_map(|name| field(name).and_then(text));
                let numbers = ["code", "status"].into_iter().filter_map(field);
                let status = numbers
                    .filter_map(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok()))
                    .find_map(|number| {
                        u16::try_from(number).ok().filter(|status| (400..600).contains(status))
                    });
                return Some(Self {
                    message: message.unwrap_or_else(|| "an error without a message".to_owned()),
                    kinds: kinds.collect(),
                    status,
                });
            }
        }
        // A completion or a part of one; other fields are ignored.
        if !body.choices.is_null() || body.kind.as_str().is_some_and(|kind| kind != "error") {
            return None;
        }
        let message = text(&body.message).or_else(|| text(&body.detail))?;
        Some(Self { message, ..Self::default() })
    }

    /// Uses a body that is not an error object as the message; for a web page its title, which is more informative
    /// than its beginning.
    pub(super) fn from_text_or_html(text: &str) -> Self {
        let lower = text.to_ascii_lowercase();
        let title_start = lower.find("<title>").map(|at| at + "<title>".len());
        let title = title_start.and_then(|start| Some(start..start + lower.get(start..)?.find("</title>")?));
        let message = title.and_then(|range| text.get(range)).unwrap_or(text);
        Self { message: message.to_owned(), ..Self::default() }
    }

    /// Returns the error for a response with this error status. `message` is the redacted [`ErrorBody::message`].
    pub(super) fn into_response_error(
        self,
        status: u16,
        message: String,
        retry_after: Option<Duration>,
    ) -> ModelError {
        // OpenAI responds with 429 if a single prompt exceeds the tokens per minute; retrying is pointless.
        let never_fits = status == 429 && self.message.to_lowercase().contains(REQUEST_TOO_LARGE);
        if status == 413 || never_fits || (matches!(status, 400 | 422) && self.is_prompt_too_long()) {
            return ModelError::PromptTooLong(message);
        }
        ModelError::Status { status, message, retry_after }
    }

    /// Returns the error for an error object inside a response with a success status.
    pub(super) fn into_stream_error(self, message: String) -> ModelError {
        if self.is_prompt_too_long() {
            return ModelError::PromptTooLong(message);
        }
        match self.status.or_else(|| self.kinds.iter().find_map(|kind| status_of(kind))) {
            Some(status) => self.into_response_error(status, message, None),
            None => ModelError::Protocol(message),
        }
    }

    fn is_prompt_too_long(&self) -> bool {
        let matches = |text: &str| {
            let text = text.to_lowercase();
            PROMPT_TOO_LONG_PHRASES.iter().any(|phrase| text.contains(phrase))
        };
        matches(&self.message) || self.kinds.iter().any(|kind| matches(kind))
    }
}

/// Returns the status with which a provider sends this type of error before a response.
fn status_of(kind: &str) -> Option<u16> {
    Some(match kind {
        "rate_limit_error" | "rate_limit_exceeded" | "rate_limit" => 429,
        "overloaded_error" => 529,
        "overloaded" | "service_unavailable" | "UNAVAILABLE" => 503,
        "api_error" | "server_error" | "internal_error" | "internal_server_error" => 500,
        "timeout_error" => 504,
        "authentication_error" => 401,
        "permission_error" => 403,
        "not_found_error" => 404,
        "invalid_request_error" => 400,
        "request_too_large" => 413,
        _ => return None,
    })
}

/// Returns the delay that the headers request: `Retry-After` in seconds or as a date, or the more precise
/// `retry-after-ms` of some providers. Returns `None` without a valid header.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if let Some(milliseconds) = text("retry-after-ms").and_then(non_negative) {
        return Duration::try_from_secs_f64(milliseconds / 1000.0).ok();
    }
    let value = text(RETRY_AFTER.as_str())?;
    if let Some(seconds) = non_negative(value) {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // The server computed the date with its own clock, so its `Date` is preferred to ours.
    let now = text(DATE.as_str()).and_then(|now| httpdate::parse_http_date(now).ok());
    Some(date.duration_since(now.unwrap_or_else(SystemTime::now)).unwrap_or_default())
}

fn non_negative(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream_error(json: &str) -> Option<ModelError> {
        ErrorBody::parse(json).map(|error| {
            let message = error.message.clone();
            error.into_stream_error(message)
        })
    }

    #[test]
    fn error_objects_are_parsed_in_every_form() {
        for (json, message) in [
            (r#"{"error":{"message":"odd"}}"#, "odd"),
            (r#"{"error":"odd"}"#, "odd"),
            (r#"{"error":{"code":5}}"#, "an error without a message"),
            (r#"{"object":"error","message":"odd"}"#, "odd"),
            (r#"{"detail":"odd"}"#, "odd"),
            (r#"{"type":"error","error":{"type":"new_error","message":"odd"}}"#, "odd"),
        ] {
            assert_eq!(stream_error(json), Some(ModelError::Protocol(message.to_owned())), "{json}");
        }
        for json in [
            r#"{"choices":[],"message":"no"}"#,
            r#"{"error":null}"#,
            r#"{"type":"message_start","message":{"usage":{}}}"#,
            "<html>",
            "[]",
        ] {
            assert_eq!(stream_error(json), None, "{json}");
        }
    }

    #[test]
    fn stream_error_has_the_status_of_its_type_or_code() {
        for (json, status) in [
            (r#"{"error":{"type":"overloaded_error","message":"m"}}"#, 529),
            (r#"{"error":{"code":503,"message":"m"}}"#, 503),
            (r#"{"error":{"code":"429","message":"m"}}"#, 429),
            (r#"{"error":{"type":"server_error","message":"m"}}"#, 500),
            (r#"{"error":{"type":"invalid_request_error","code":"x","message":"m"}}"#, 400),
        ] {
            let cause = ModelError::Status { status, message: "m".to_owned(), retry_after: None };
            assert_eq!(stream_error(json), Some(cause), "{json}");
        }
    }

    #[test]
    fn prompt_too_long_is_detected_in_the_words_of_many_providers() {
        for message in [
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
            "prompt is too long: 210000 tokens > 200000 maximum",
            "the request exceeds the available context size. try increasing it",
            "The input token count (40000) exceeds the maximum number of tokens allowed (32000).",
            "litellm.ContextWindowExceededError: …",
            "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length",
            "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
            "The decoder prompt (length 10000) is longer than the maximum model length of 4096.",
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3000 `inputs` tokens",
            "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
            "too many tokens: total number of tokens in the prompt cannot exceed 4081",
            "Invalid request: Your request exceeded model token limit: 8192",
            "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]",
            "prompt token count of 130000 exceeds the limit of 128000 (model_max_prompt_tokens_exceeded)",
        ] {
            let error = ErrorBody { message: message.to_owned(), ..ErrorBody::default() };
            assert!(
                matches!(
                    error.clone().into_response_error(400, String::new(), None),
                    ModelError::PromptTooLong(_)
                ),
                "{message}"
            );
            assert!(!matches!(
                error.clone().into_response_error(500, String::new(), None),
                ModelError::PromptTooLong(_)
            ));
        }
        assert!(matches!(
            stream_error(r#"{"error":{"code":"context_length_exceeded","message":"m"}}"#),
            Some(ModelError::PromptTooLong(_))
        ));
        // The prompt exceeds the tokens per minute, so a retry cannot succeed.
        let large = "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000.";
        let large = ErrorBody { message: large.to_owned(), ..ErrorBody::default() };
        assert!(matches!(large.into_response_error(429, String::new(), None), ModelError::PromptTooLong(_)));
        let busy = "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29000.";
        let busy = ErrorBody { message: busy.to_owned(), ..ErrorBody::default() };
        assert!(!matches!(busy.into_response_error(429, String::new(), None), ModelError::PromptTooLong(_)));
        let other = ErrorBody { message: "max_tokens is too large".to_owned(), ..ErrorBody::default() };
        assert!(!matches!(
            other.clone().into_response_error(400, String::new(), None),
            ModelError::PromptTooLong(_)
        ));
        assert!(matches!(
            other.clone().into_response_error(413, String::new(), None),
            ModelError::PromptTooLong(_)
        ));
    }

    fn parsed_retry_after(headers: &[(&'static str, &str)]) -> Option<Duration> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().expect("a valid value"));
        }
        retry_after(&map)
    }

    #[test]
    fn retry_after_is_parsed_in_every_form() {
        let now = ("date", "Sat, 21 Nov 2026 10:00:00 GMT");
        for (headers, seconds) in [
            (&[("retry-after", "7")][..], Some(7.0)),
            (&[("retry-after", " 0 ")], Some(0.0)),
            (&[("retry-after", "1.5")], Some(1.5)),
            (&[("retry-after", "9"), ("retry-after-ms", "250")], Some(0.25)),
            (&[now, ("retry-after", "Sat, 21 Nov 2026 10:00:30 GMT")], Some(30.0)),
            (&[now, ("retry-after", "Saturday, 21-Nov-26 10:00:30 GMT")], Some(30.0)),
            (&[now, ("retry-after", "Sat, 21 Nov 2026 09:00:00 GMT")], Some(0.0)),
            (&[], None),
            (&[("retry-after", "-1")], None),
            (&[("retry-after", "soon")], None),
            (&[("retry-after", "NaN")], None),
            (&[("retry-after", "1e300")], None),
        ] {
            assert_eq!(parsed_retry_after(headers), seconds.map(Duration::from_secs_f64), "{headers:?}");
        }
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_mins(10));
        let without_date = parsed_retry_after(&[("retry-after", &later)]).expect("a delay");
        assert!((Duration::from_mins(9)..=Duration::from_mins(10)).contains(&without_date));
    }
}
