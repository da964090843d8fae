//! The wire format of OpenAI's chat completions and of compatible servers.
//!
//! These servers differ in details, so fields that are not needed may be missing, null or of another type. The model's
//! reasoning (`reasoning_content` and the like) is not part of the completion.

use super::{ResponseBuilder, WireFormat};
use crate::config::{self, OutputLimitField};
use crate::domain::json::MapOnly;
use crate::llm::ModelError;
use crate::llm::prompt::Prompt;
use crate::llm::provider::{FinishReason, Request};
use reqwest::header::{AUTHORIZATION, HeaderName};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Chat completions in the variant of one server.
#[derive(Clone, Copy, Debug)]
pub struct OpenAi {
    /// Newer servers use `max_completion_tokens`, older ones only know `max_tokens`.
    output_limit_field: OutputLimitField,
    /// Requests usage in the stream; some servers reject that.
    stream_options: bool,
}

impl OpenAi {
    #[must_use]
    pub fn new(settings: &config::Provider) -> Self {
        Self {
            output_limit_field: settings.output_limit_field.unwrap_or(OutputLimitField::MaxCompletionTokens),
            stream_options: settings.stream_options.unwrap_or(true),
        }
    }
}

impl WireFormat for OpenAi {
    fn path(&self) -> &'static [&'static str] {
        &["chat", "completions"]
    }

    fn key_header(&self) -> (HeaderName, &'static str) {
        (AUTHORIZATION, "Bearer ")
    }

    fn body(&self, request: &Request<'_>, prompt: &Prompt) -> Map<String, Value> {
        let mut messages = Vec::new();
        if !prompt.system.is_empty() {
            messages.push(json!({"role": "system", "content": prompt.system}));
        }
        messages.push(json!({"role": "user", "content": prompt.user}));
        let mut body = Map::new();
        body.insert("model".to_owned(), request.model.model.as_str().into());
        body.insert("messages".to_owned(), messages.into());
        body.insert("stream".to_owned(), true.into());
        if self.stream_options {
            body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        let output_limit_field = match self.output_limit_field {
            OutputLimitField::MaxCompletionTokens => "max_completion_tokens",
            OutputLimitField::MaxTokens => "max_tokens",
        };
        body.insert(output_limit_field.to_owned(), request.model.output_limit.into());
        body
    }

    fn read_event(&self, event: &str, data: &str, response: &mut ResponseBuilder) -> Result<(), ModelError> {
        if data.trim() == "[DONE]" {
            response.end_of_stream();
            return Ok(());
        }
        let Ok(chunk) = serde_json::from_str::<Chunk>(data) else {
            // Chat completions do not name their events, so a named one is an extension of the server.
            if !matches!(event, "message" | "error") {
                return Ok(());
            }
            return Err(ModelError::Protocol("not a chat completion"));
        };
        response.usage(&chunk.usage, "prompt_tokens", "completion_tokens");
        // One choice was requested. Further choices would not be parts of the same text.
        let is_first = |MapOnly(choice): &MapOnly<Choice>| choice.index.as_u64().unwrap_or_default() == 0;
        for MapOnly(choice) in chunk.choices.unwrap_or_default().into_iter().filter(is_first) {
            read_choice(choice, response)?;
        }
        Ok(())
    }
}

fn read_choice(choice: Choice, response: &mut ResponseBuilder) -> Result<(), ModelError> {
    match (choice.delta, choice.message) {
        // Some servers send a `message` with the whole text so far together with each `delta`.
        (Some(MapOnly(delta)), _) => {
            let text = read_content(delta, response);
            response.text_delta(&text)?;
        }
        // Others send it alone: as the only object, after the last `delta`, or instead of each.
        (None, Some(MapOnly(message))) => {
            let text = read_content(message, response);
            response.whole_text(&text)?;
        }
        (None, None) => {}
    }
    read_finish_reason(&choice.finish_reason.unwrap_or_default(), response)
}

/// Returns the text of a `delta` or a `message`, and notes its reasoning and its refusal.
fn read_content(delta: Delta, response: &mut ResponseBuilder) -> String {
    if !delta.reasoning_content.is_null() || !delta.reasoning.is_null() {
        response.reasoning_delta();
    }
    if delta.refusal.is_some_and(|refusal| !refusal.is_empty()) {
        response.refusal();
    }
    match delta.content {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => {
            let mut text = String::new();
            for part in parts {
                if part.kind == "text" {
                    text.push_str(&part.text.unwrap_or_default());
                } else {
                    response.reasoning_delta();
                }
            }
            text
        }
        None => String::new(),
    }
}

fn read_finish_reason(reason: &str, response: &mut ResponseBuilder) -> Result<(), ModelError> {
    let reason = reason.to_ascii_lowercase();
    if let Some(reason) = FinishReason::parse(&reason) {
        response.finish_reason(reason);
        return Ok(());
    }
    match reason.as_str() {
        "error" => Err(ModelError::Protocol("the server ended the response with an error")),
        // Servers such as vLLM, SGLang, DeepSeek and GLM report an aborted completion this way.
        "abort"
        | "aborted"
        | "cancelled"
        | "canceled"
        | "timeout"
        | "insufficient_system_resource"
        | "network_error" => Err(ModelError::StreamTruncated),
        // No reason, which some servers send with every chunk as "", "null" or "none", or an unknown one.
        _ => Ok(()),
    }
}

/// A chunk of a stream, with `delta`, or a complete response, with `message`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Option<Vec<MapOnly<Choice>>>,
    usage: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice {
    index: Value,
    delta: Option<MapOnly<Delta>>,
    message: Option<MapOnly<Delta>>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<Content>,
    refusal: Option<String>,
    reasoning_content: Value,
    reasoning: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Usage;
    use crate::llm::http::ParsedResponse;

    fn openai() -> OpenAi {
        OpenAi::new(&config::Provider::default())
    }

    fn read(chunks: &[&str]) -> Result<ParsedResponse, ModelError> {
        let mut response = ResponseBuilder::default();
        for chunk in chunks {
            openai().read_event("message", chunk, &mut response)?;
        }
        response.finish()
    }

    #[test]
    fn text_chunks_of_the_first_choice_are_joined() {
        let read = read(&[
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":""}]}"#,
            r#"{"choices":[{"index":0,"delta":{"reasoning_content":"Hm."},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"index":1,"delta":{"content":"Other."}}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"Ada "}}]}"#,
            r#"{"choices":[{"delta":{"content":[{"type":"thinking"},{"type":"text","text":"flies."}]}}]}"#,
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"error":null}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}"#,
        ]);
        let usage = Usage { input_tokens: Some(7), output_tokens: Some(2) };
        let text = "Ada flies.".to_owned();
        assert_eq!(read, Ok(ParsedResponse { text, finish_reason: FinishReason::Complete, usage }));
    }

    #[test]
    fn message_next_to_a_delta_is_ignored() {
        // Perplexity sends the whole text so far with each piece.
        let read = read(&[
            r#"{"choices":[{"message":{"content":"Ada "},"delta":{"content":"Ada "}}]}"#,
            r#"{"choices":[{"delta":{"content":"flies."},"message":{"content":"Ada flies."},"finish_reason":"stop"}]}"#,
        ]);
        assert_eq!(read.map(|response| response.text), Ok("Ada flies.".to_owned()));
    }

    #[test]
    fn message_without_a_delta_replaces_the_text_so_far() {
        let piece = |text: &str| format!(r#"{{"choices":[{{"delta":{{"content":"{text}"}}}}]}}"#);
        let whole =
            |text: &str| format!(r#"{{"choices":[{{"delta":null,"message":{{"content":"{text}"}}}}]}}"#);
        let [first, second] = ["Ada ", "flies."].map(|text| format!(r#"{{"type":"text","text":"{text}"}}"#));
        let parts = format!(r#"{{"choices":[{{"message":{{"content":[{first},{second}]}}}}]}}"#);
        let no_text =
            r#"{"choices":[{"message":{"role":"assistant","content":null},"finish_reason":"stop"}]}"#;
        for (name, chunks) in [
            ("closing", vec![piece("Ada "), piece("flies."), whole("Ada flies.")]),
            ("cumulative", vec![whole("Ada "), whole("Ada flies.")]),
            ("only", vec![whole("Ada flies.")]),
            ("only, in parts", vec![parts.clone()]),
            ("in parts after pieces", vec![piece("Ada "), piece("flies."), parts]),
            ("without a text", vec![piece("Ada "), piece("flies."), whole(""), no_text.to_owned()]),
            ("before a piece", vec![whole("Ada "), piece("flies.")]),
        ] {
            let mut chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
            chunks.push("[DONE]");
            assert_eq!(read(&chunks).map(|response| response.text), Ok("Ada flies.".to_owned()), "{name}");
        }
    }

    #[test]
    fn only_a_known_finish_reason_ends_a_stream_without_an_end_mark() {
        let text = r#"{"choices":[{"delta":{"content":"Ada"}}]}"#;
        for reason in ["", "null", "NULL", "none", "None", "unknown_thing"] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end]), Err(ModelError::StreamTruncated), "{reason}");
            let marked = read(&[text, &end, "[DONE]"]);
            assert_eq!(marked.map(|response| response.finish_reason), Ok(FinishReason::Complete), "{reason}");
            let cut = r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#;
            let cut = read(&[text, cut, &end, "[DONE]"]);
            assert_eq!(cut.map(|response| response.finish_reason), Ok(FinishReason::Length), "{reason}");
        }
    }

    #[test]
    fn tool_calls_and_paused_turns_are_unfinished() {
        let text = r#"{"choices":[{"delta":{"content":"I call a tool."}}]}"#;
        for reason in ["tool_calls", "function_call", "TOOL_CALLS", "tool_use", "pause_turn"] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            let unfinished = Ok(FinishReason::Unfinished);
            let read = read(&[text, &end, "[DONE]"]);
            assert_eq!(read.map(|response| response.finish_reason), unfinished, "{reason}");
        }
    }

    #[test]
    fn finish_reasons_are_mapped_and_a_missing_end_is_truncation() {
        let text = r#"{"choices":[{"delta":{"content":"Ada"}}]}"#;
        assert_eq!(read(&[text]), Err(ModelError::StreamTruncated));
        assert_eq!(read(&[]), Err(ModelError::StreamTruncated));
        assert_eq!(
            read(&[text, "[DONE]"]).map(|response| response.finish_reason),
            Ok(FinishReason::Complete)
        );
        for (reason, finish) in [
            ("stop", FinishReason::Complete),
            ("STOP", FinishReason::Complete),
            ("eos", FinishReason::Complete),
            ("eos_token", FinishReason::Complete),
            ("end_turn", FinishReason::Complete),
            ("stop_sequence", FinishReason::Complete),
            ("length", FinishReason::Length),
            ("MAX_TOKENS", FinishReason::Length),
            ("incomplete", FinishReason::Length),
            ("content_filter", FinishReason::Filtered),
            ("content_filter: PROHIBITED_CONTENT", FinishReason::Filtered),
            ("SAFETY", FinishReason::Filtered),
            ("sensitive", FinishReason::Filtered),
        ] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end]).map(|response| response.finish_reason), Ok(finish), "{reason}");
        }
        for reason in ["abort", "cancelled", "timeout", "insufficient_system_resource", "network_error"] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end, "[DONE]"]), Err(ModelError::StreamTruncated), "{reason}");
        }
        let [cut, end] = ["length", "stop"]
            .map(|reason| format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#));
        assert_eq!(
            read(&[text, &cut, &end]).map(|response| response.finish_reason),
            Ok(FinishReason::Length)
        );
        let refusal = r#"{"choices":[{"message":{"content":null,"refusal":"No."},"finish_reason":"stop"}]}"#;
        assert_eq!(read(&[refusal]).map(|response| response.finish_reason), Ok(FinishReason::Filtered));
    }

    #[test]
    fn malformed_chunks_are_protocol_errors_and_unknown_events_are_ignored() {
        for (chunk, message) in [
            (
                r#"{"choices":[{"delta":{},"finish_reason":"error"}]}"#,
                "the server ended the response with an error",
            ),
            (r#"{"choices":[{"delta":{"content":{"secret":1}}}]}"#, "not a chat completion"),
            (r#"{"choices":[[0,["Ada"],null,"stop"]]}"#, "not a chat completion"),
            ("<html>", "not a chat completion"),
            ("", "not a chat completion"),
            ("null", "not a chat completion"),
        ] {
            assert_eq!(read(&[chunk]), Err(ModelError::Protocol(message)), "{chunk}");
        }
        let mut response = ResponseBuilder::default();
        assert_eq!(openai().read_event("heartbeat", "tick", &mut response), Ok(()));
    }
}
