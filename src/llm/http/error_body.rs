//! What a server says about an error, and what kind of error that is: the words are for people, but some of them
//! decide what is done next.

use super::super::ModelError;
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Parts of messages that mean: less text, please. In the words of OpenAI, Anthropic, Gemini, vLLM, llama.cpp,
/// `LiteLLM` and others, in lower case.
const TOO_LONG: [&str; 21] = [
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
    LARGER_THAN_ALLOWED,
];

/// Whatever else a status says.
const LARGER_THAN_ALLOWED: &str = "request too large";

/// An error as a server words it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorBody {
    /// Its message, as it came.
    pub(super) message: String,
    /// Its type and its code, where it has them.
    kinds: Vec<String>,
    /// A status inside the body.
    status: Option<u16>,
}

impl ErrorBody {
    /// The error in a body or in an event, in any of the shapes that are about: `{"error": {"message": "…"}}`,
    /// `{"error": "…"}`, `{"object": "error", "message": "…"}`, `{"message": "…"}`, `{"detail": "…"}`. `None` where
    /// the text is no such object.
    pub(super) fn read(json: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Shapes {
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
        let shapes: Shapes = serde_json::from_str(json).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        match &shapes.error {
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
        // An answer, or a part of one, whatever else it holds.
        if !shapes.choices.is_null() || shapes.kind.as_str().is_some_and(|kind| kind != "error") {
            return None;
        }
        let message = text(&shapes.message).or_else(|| text(&shapes.detail))?;
        Some(Self { message, ..Self::default() })
    }

    /// A body that is no error object: its text, or of a web page its title, which says more than its beginning.
    pub(super) fn page(text: &str) -> Self {
        let lower = text.to_ascii_lowercase();
        let title = lower.find("<title>").map(|at| at + "<title>".len());
        let title = title.and_then(|from| Some(from..from + lower.get(from..)?.find("</title>")?));
        let message = title.and_then(|range| text.get(range)).unwrap_or(text);
        Self { message: message.to_owned(), ..Self::default() }
    }

    /// The cause, where the error came in place of an answer with this status. `message` is [`ErrorBody::message`],
    /// cleaned.
    pub(super) fn in_place_of_answer(
        &self,
        status: u16,
        message: String,
        retry_after: Option<Duration>,
    ) -> ModelError {
        // OpenAI says with 429 that a single prompt is more than what a minute allows: it would be in each minute.
        let never_fits = status == 429 && self.message.to_lowercase().contains(LARGER_THAN_ALLOWED);
        if status == 413 || never_fits || (matches!(status, 400 | 422) && self.is_too_long()) {
            return ModelError::PromptTooLong(message);
        }
        ModelError::Status { status, message, retry_after }
    }

    /// The cause, where the error came inside of an answer that had begun well.
    pub(super) fn within_answer(&self, message: String) -> ModelError {
        if self.is_too_long() {
            return ModelError::PromptTooLong(message);
        }
        match self.status.or_else(|| self.kinds.iter().find_map(|kind| status_of(kind))) {
            Some(status) => self.in_place_of_answer(status, message, None),
            None => ModelError::Protocol(message),
        }
    }

    fn is_too_long(&self) -> bool {
        let said = |text: &str| {
            let text = text.to_lowercase();
            TOO_LONG.iter().any(|words| text.contains(words))
        };
        said(&self.message) || self.kinds.iter().any(|kind| said(kind))
    }
}

/// The status that an error of this type has where it comes before the answer.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn within(json: &str) -> Option<ModelError> {
        ErrorBody::read(json).map(|said| said.within_answer(said.message.clone()))
    }

    #[test]
    fn errors_are_found_in_every_shape() {
        for (json, message) in [
            (r#"{"error":{"message":"odd"}}"#, "odd"),
            (r#"{"error":"odd"}"#, "odd"),
            (r#"{"error":{"code":5}}"#, "an error without a message"),
            (r#"{"object":"error","message":"odd"}"#, "odd"),
            (r#"{"detail":"odd"}"#, "odd"),
            (r#"{"type":"error","error":{"type":"new_error","message":"odd"}}"#, "odd"),
        ] {
            assert_eq!(within(json), Some(ModelError::Protocol(message.to_owned())), "{json}");
        }
        for json in [
            r#"{"choices":[],"message":"no"}"#,
            r#"{"error":null}"#,
            r#"{"type":"message_start","message":{"usage":{}}}"#,
            "<html>",
            "[]",
        ] {
            assert_eq!(within(json), None, "{json}");
        }
    }

    #[test]
    fn an_error_in_the_answer_has_the_status_that_it_names() {
        for (json, status) in [
            (r#"{"error":{"type":"overloaded_error","message":"m"}}"#, 529),
            (r#"{"error":{"code":503,"message":"m"}}"#, 503),
            (r#"{"error":{"code":"429","message":"m"}}"#, 429),
            (r#"{"error":{"type":"server_error","message":"m"}}"#, 500),
            (r#"{"error":{"type":"invalid_request_error","code":"x","message":"m"}}"#, 400),
        ] {
            let cause = ModelError::Status { status, message: "m".to_owned(), retry_after: None };
            assert_eq!(within(json), Some(cause), "{json}");
        }
    }

    #[test]
    fn too_long_is_told_from_other_errors() {
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
            let said = ErrorBody { message: message.to_owned(), ..ErrorBody::default() };
            assert!(
                matches!(said.in_place_of_answer(400, String::new(), None), ModelError::PromptTooLong(_)),
                "{message}"
            );
            assert!(!matches!(
                said.in_place_of_answer(500, String::new(), None),
                ModelError::PromptTooLong(_)
            ));
        }
        assert!(matches!(
            within(r#"{"error":{"code":"context_length_exceeded","message":"m"}}"#),
            Some(ModelError::PromptTooLong(_))
        ));
        // It asks for more than a minute's tokens, and would in any other minute.
        let large = "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 40000.";
        let large = ErrorBody { message: large.to_owned(), ..ErrorBody::default() };
        assert!(matches!(large.in_place_of_answer(429, String::new(), None), ModelError::PromptTooLong(_)));
        let busy = "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29000.";
        let busy = ErrorBody { message: busy.to_owned(), ..ErrorBody::default() };
        assert!(!matches!(busy.in_place_of_answer(429, String::new(), None), ModelError::PromptTooLong(_)));
        let other = ErrorBody { message: "max_tokens is too large".to_owned(), ..ErrorBody::default() };
        assert!(!matches!(other.in_place_of_answer(400, String::new(), None), ModelError::PromptTooLong(_)));
        assert!(matches!(other.in_place_of_answer(413, String::new(), None), ModelError::PromptTooLong(_)));
    }
}
