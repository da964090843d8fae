//! The error responses of providers: their kind and their `Retry-After`.
//!
//! Providers quote keys and conversations in their messages. A message is therefore only used to classify the error; our
//! errors contain the status, a code of [`CODES`], and a text of ours.

use crate::llm::{ModelError, Rejection};
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

/// Phrases of messages and codes that mean that a filter rejects the prompt, in lower case.
const FILTER_PHRASES: [&str; 7] = [
    "content_filter",
    "content filter",
    "content management policy",
    "content policy",
    "responsibleaipolicyviolation",
    "data_inspection_failed",
    "flagged by moderation",
];

/// Means that the prompt is too long, with any status.
const REQUEST_TOO_LARGE: &str = "request too large";

/// The types and codes of errors that our errors repeat. A type determines the status of an error within a stream: the
/// status with which the provider sends it before a response.
const CODES: [(&str, Option<u16>); 25] = [
    ("rate_limit_error", Some(429)),
    ("rate_limit_exceeded", Some(429)),
    ("rate_limit", Some(429)),
    ("overloaded_error", Some(529)),
    ("overloaded", Some(503)),
    ("service_unavailable", Some(503)),
    ("UNAVAILABLE", Some(503)),
    ("api_error", Some(500)),
    ("server_error", Some(500)),
    ("internal_error", Some(500)),
    ("internal_server_error", Some(500)),
    ("timeout_error", Some(504)),
    ("authentication_error", Some(401)),
    ("permission_error", Some(403)),
    ("not_found_error", Some(404)),
    ("invalid_request_error", Some(400)),
    ("request_too_large", Some(413)),
    ("invalid_api_key", None),
    ("insufficient_quota", None),
    ("billing_error", None),
    ("model_not_found", None),
    ("unsupported_parameter", None),
    ("unknown_parameter", None),
    ("unsupported_value", None),
    ("RESOURCE_EXHAUSTED", None),
];

/// The error of a response.
#[derive(Debug, Default)]
pub(super) struct ErrorBody {
    message: String,
    /// The type, the code and the status of the error.
    kinds: Vec<String>,
    /// A status inside the body.
    status: Option<u16>,
}

impl ErrorBody {
    /// Parses an error object of a body or of an event. Known forms: `{"error": {"message": "…"}}`, `{"error": "…"}`,
    /// `{"object": "error", "message": "…"}`, `{"message": "…"}`, `{"detail": "…"}`, and a list of one of them. `error.metadata.raw` is
    /// the text of another server behind a gateway. Returns `None` for anything else.
    pub(super) fn parse(json: &str) -> Option<Self> {
        #[derive(Deserialize)]
        #[serde(default)]
        #[derive(Default)]
        struct RawBody {
            error: Value,
            message: Value,
            detail: Value,
            choices: Value,
            #[serde(rename = "type")]
            kind: Value,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            List([RawBody; 1]),
            Object(RawBody),
        }
        let (Form::List([body]) | Form::Object(body)) = serde_json::from_str(json).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if !matches!(body.error, Value::Null | Value::Bool(false)) {
            let fields = |names: &'static [&str]| names.iter().filter_map(|name| body.error.get(name));
            let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
            let status =
                fields(&["code", "status"]).filter_map(number).find(|status| (400..600).contains(status));
            let message = text(&body.error).or_else(|| fields(&["message"]).find_map(text));
            let raw =
                body.error.pointer("/metadata/raw").map(|raw| text(raw).unwrap_or_else(|| raw.to_string()));
            return Some(Self {
                message: message.into_iter().chain(raw).collect::<Vec<_>>().join(" "),
                kinds: fields(&["type", "code", "status"]).filter_map(text).collect(),
                status: status.and_then(|status| u16::try_from(status).ok()),
            });
        }
        // A completion or a part of one; other fields are ignored.
        if !body.choices.is_null() || body.kind.as_str().is_some_and(|kind| kind != "error") {
            return None;
        }
        text(&body.message).or_else(|| text(&body.detail)).map(Self::from_text)
    }

    /// Uses a body that is not an error object as the message.
    pub(super) fn from_text(message: String) -> Self {
        Self { message, ..Self::default() }
    }

    /// Returns the error for a response with this error status.
    pub(super) fn into_response_error(self, status: u16, retry_after: Option<Duration>) -> ModelError {
        // OpenAI responds with 429 if a single prompt exceeds the tokens per minute; retrying is pointless.
        let never_fits = status == 429 && self.message.to_lowercase().contains(REQUEST_TOO_LARGE);
        // Older local servers fail with 500.
        if status == 413 || never_fits || (matches!(status, 400 | 422 | 500) && self.is_prompt_too_long()) {
            return ModelError::PromptTooLong;
        }
        if matches!(status, 400 | 403 | 422) && self.mentions(&FILTER_PHRASES) {
            return ModelError::Rejected(Rejection::Filtered);
        }
        // The code is more specific than the type, which precedes it.
        let code = self.known_codes().last().map(|(code, _)| code);
        ModelError::Status { status, code, problem: self.problem(status), retry_after }
    }

    /// Returns the error for an error object inside a response with a success status.
    pub(super) fn into_stream_error(self) -> ModelError {
        if self.is_prompt_too_long() {
            return ModelError::PromptTooLong;
        }
        match self.status.or_else(|| self.known_codes().find_map(|(_, status)| status)) {
            Some(status) => self.into_response_error(status, None),
            None => ModelError::Protocol("it contains an error of an unknown type"),
        }
    }

    fn known_codes(&self) -> impl Iterator<Item = (&'static str, Option<u16>)> {
        self.kinds.iter().filter_map(|kind| CODES.into_iter().find(|(code, _)| kind == code))
    }

    fn is_prompt_too_long(&self) -> bool {
        self.mentions(&PROMPT_TOO_LONG_PHRASES)
    }

    fn mentions(&self, phrases: &[&str]) -> bool {
        [&self.message].into_iter().chain(&self.kinds).any(|text| {
            let text = text.to_lowercase();
            phrases.iter().any(|phrase| text.contains(phrase))
        })
    }

    /// Returns our explanation of a status, with the setting that helps with a server that is not fully compatible.
    fn problem(&self, status: u16) -> &'static str {
        let mentions = |word: &str| matches!(status, 400 | 404 | 422) && self.message.contains(word);
        match status {
            _ if mentions("stream_options") => {
                "the provider rejects stream_options; try stream_options = false for its provider"
            }
            _ if mentions("max_completion_tokens") && mentions("max_tokens") => {
                "the provider rejects the output limit; try the other output_limit_field for its provider"
            }
            _ if mentions("max_completion_tokens") => {
                "the provider rejects the output limit; try output_limit_field = \"max_tokens\" for its provider"
            }
            ..400 => "the provider redirects the request; check base_url",
            401 | 403 => "the provider rejects the API key or its permissions",
            404 => "the provider does not have the model or the path; check model and base_url",
            429 => "the provider limits the number of requests or tokens",
            400..500 => "the provider rejects the request",
            500.. => "the provider failed or is overloaded",
        }
    }
}

/// Returns the delay that the headers request: `Retry-After` in seconds or as a date, or the more precise
/// `retry-after-ms` of some providers. Returns `None` without a valid header.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let seconds = |text: &str, unit: f64| Duration::try_from_secs_f64(text.parse::<f64>().ok()? * unit).ok();
    if let Some(delay) = text("retry-after-ms").and_then(|value| seconds(value, 0.001)) {
        return Some(delay);
    }
    let value = text(RETRY_AFTER.as_str())?;
    if let Some(delay) = seconds(value, 1.0) {
        return Some(delay);
    }
    let date = httpdate::parse_http_date(value).ok()?;
    // The server computed the date with its own clock, so its `Date` is preferred to ours.
    let now = text(DATE.as_str()).and_then(|now| httpdate::parse_http_date(now).ok());
    Some(date.duration_since(now.unwrap_or_else(SystemTime::now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    fn stream_error(json: &str) -> Option<ModelError> {
        ErrorBody::parse(json).map(ErrorBody::into_stream_error)
    }

    #[test_case(r#"{"error":{"message":"odd"}}"#, true)]
    #[test_case(r#"{"error":"odd"}"#, true)]
    #[test_case(r#"{"error":{"code":5}}"#, true)]
    #[test_case(r#"{"object":"error","message":"odd"}"#, true)]
    #[test_case(r#"{"detail":"odd"}"#, true)]
    #[test_case(r#"{"type":"error","error":{"type":"new_error","message":"odd"}}"#, true)]
    #[test_case(r#"{"choices":[],"message":"no"}"#, false)]
    #[test_case(r#"{"error":null}"#, false)]
    #[test_case(r#"{"type":"message_start","message":{"usage":{}}}"#, false)]
    #[test_case("<html>", false)]
    #[test_case("[]", false)]
    #[test_case(r#"[{"error":{"message":"odd"}}]"#, true)]
    fn error_objects_are_recognised_in_every_form(json: &str, is_error: bool) {
        let expected = is_error.then_some(ModelError::Protocol("it contains an error of an unknown type"));
        assert_eq!(stream_error(json), expected);
    }

    #[test_case(r#"{"error":{"type":"overloaded_error","message":"m"}}"#, 529, Some("overloaded_error"))]
    #[test_case(r#"{"error":{"code":503,"message":"m"}}"#, 503, None)]
    #[test_case(r#"{"error":{"code":"429","message":"m"}}"#, 429, None)]
    #[test_case(r#"{"error":{"type":"server_error","message":"m"}}"#, 500, Some("server_error"))]
    #[test_case(
        r#"{"error":{"type":"invalid_request_error","code":"secret"}}"#,
        400,
        Some("invalid_request_error")
    )]
    #[test_case(
        r#"{"error":{"type":"invalid_request_error","code":"model_not_found"}}"#,
        400,
        Some("model_not_found")
    )]
    fn stream_error_has_the_status_of_its_type_and_a_known_code(
        json: &str,
        expected: u16,
        known: Option<&str>,
    ) {
        let error = stream_error(json);
        let Some(ModelError::Status { status, code, .. }) = error else { panic!("{error:?}") };
        assert_eq!((status, code), (expected, known));
    }

    #[test_case("Unrecognized request argument supplied: stream_options", "stream_options = false")]
    #[test_case("extra_forbidden: max_completion_tokens", "output_limit_field = \"max_tokens\"")]
    #[test_case("'max_tokens' is not supported; use 'max_completion_tokens'", "the other output_limit_field")]
    #[test_case("no such parameter", "the provider rejects the request")]
    fn error_of_an_incompatible_server_names_the_setting(message: &str, expected: &str) {
        let error = ErrorBody::from_text(message.to_owned()).into_response_error(400, None).to_string();
        assert!(error.contains(expected) && !error.contains(message), "{error}");
    }

    #[test_case("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.")]
    #[test_case("prompt is too long: 210000 tokens > 200000 maximum")]
    #[test_case("the request exceeds the available context size. try increasing it")]
    #[test_case("The input token count (40000) exceeds the maximum number of tokens allowed (32000).")]
    #[test_case("litellm.ContextWindowExceededError: …")]
    #[test_case("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000")]
    #[test_case("This model's maximum prompt length is 131072 but the request contains 537812 tokens.")]
    #[test_case("The decoder prompt (length 10000) is longer than the maximum model length of 4096.")]
    #[test_case("`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3000 `inputs` tokens")]
    #[test_case("Input validation error: `inputs` must have less than 1024 tokens. Given: 2000")]
    #[test_case("too many tokens: total number of tokens in the prompt cannot exceed 4081")]
    #[test_case("Invalid request: Your request exceeded model token limit: 8192")]
    #[test_case("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]")]
    #[test_case(
        "prompt token count of 130000 exceeds the limit of 128000 (model_max_prompt_tokens_exceeded)"
    )]
    fn prompt_too_long_is_recognised_in_the_words_of_many_providers(message: &str) {
        let error = |status| ErrorBody::from_text(message.to_owned()).into_response_error(status, None);
        assert_eq!(error(400), ModelError::PromptTooLong);
        assert_eq!(error(500), ModelError::PromptTooLong);
        assert_ne!(error(503), ModelError::PromptTooLong);
    }

    // The prompt exceeds the tokens per minute, so a retry cannot succeed.
    #[test_case(
        429,
        "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000.",
        true
    )]
    #[test_case(
        429,
        "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29000.",
        false
    )]
    #[test_case(400, "max_tokens is too large", false)]
    #[test_case(413, "max_tokens is too large", true)]
    fn prompt_too_long_depends_on_the_status(status: u16, message: &str, is_too_long: bool) {
        let error = ErrorBody::from_text(message.to_owned()).into_response_error(status, None);
        assert_eq!(error == ModelError::PromptTooLong, is_too_long, "{error}");
        let code = r#"{"error":{"code":"context_length_exceeded","message":"m"}}"#;
        assert_eq!(stream_error(code), Some(ModelError::PromptTooLong));
    }

    fn parsed_retry_after(headers: &[(&'static str, &str)]) -> Option<Duration> {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        retry_after(&headers.collect())
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
