//! Chat completions: OpenAI's, and any server's that calls itself compatible.
//!
//! Those servers differ in small things, so whatever is not needed may be missing, null or of another shape. What a
//! model thought before it answered (`reasoning_content` and the like) is not its answer.

use super::super::ModelError;
use super::super::prompt::Prompt;
use super::super::provider::{Finish, Request};
use super::{ResponseBuilder, WireFormat};
use crate::domain::json::MapOnly;
use reqwest::header::{AUTHORIZATION, HeaderName};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What servers differ in.
#[derive(Clone, Copy, Debug)]
pub struct OpenAi {
    /// What the output limit is called: newer servers know `max_completion_tokens`, older ones `max_tokens` only.
    pub output_limit_field: &'static str,
    /// Whether the stream is asked to end with the usage; some servers refuse the question.
    pub stream_options: bool,
}

impl Default for OpenAi {
    /// As OpenAI wants it.
    fn default() -> Self {
        Self { output_limit_field: "max_completion_tokens", stream_options: true }
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
        body.insert("model".to_owned(), request.model.into());
        body.insert("messages".to_owned(), messages.into());
        body.insert("stream".to_owned(), true.into());
        if self.stream_options {
            body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        body.insert(self.output_limit_field.to_owned(), request.output_limit.into());
        body
    }

    fn read(&self, event: &str, data: &str, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
        if data.trim() == "[DONE]" {
            builder.mark();
            return Ok(());
        }
        let Ok(chunk) = serde_json::from_str::<Chunk>(data) else {
            // An event of a name that chat completions don't know is somebody's addition.
            if !matches!(event, "message" | "error") {
                return Ok(());
            }
            // Without serde's own words: they quote what they found, and that is the conversation.
            return Err(ModelError::Protocol("not a chat completion".to_owned()));
        };
        builder.used(&chunk.usage, "prompt_tokens", "completion_tokens");
        // One answer was asked for; should there be more, they are not parts of one text.
        let first = |MapOnly(choice): &MapOnly<Choice>| choice.index.as_u64().unwrap_or_default() == 0;
        for MapOnly(choice) in chunk.choices.unwrap_or_default().into_iter().filter(first) {
            read_choice(choice, builder)?;
        }
        Ok(())
    }
}

fn read_choice(choice: Choice, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
    // Some servers send with each piece what there is so far: that is no piece.
    if let Some(MapOnly(delta)) = choice.delta.or(choice.message) {
        match delta.content {
            Some(Content::Text(text)) => builder.push(&text)?,
            Some(Content::Parts(parts)) => {
                for part in parts {
                    if part.kind == "text" {
                        builder.push(&part.text.unwrap_or_default())?;
                    } else {
                        builder.thought();
                    }
                }
            }
            None => {}
        }
        if !delta.reasoning_content.is_null() || !delta.reasoning.is_null() {
            builder.thought();
        }
        if delta.refusal.is_some_and(|refusal| !refusal.is_empty()) {
            builder.refuse();
        }
    }
    let reason = choice.finish_reason.unwrap_or_default().to_ascii_lowercase();
    // Some add the category: "content_filter: RECITATION".
    match reason.split(':').next().unwrap_or_default() {
        // Some servers send an empty reason with every chunk.
        "" => {}
        "length" | "max_tokens" | "model_length" | "model_context_window_exceeded" => {
            builder.end(Finish::Length);
        }
        "content_filter" | "safety" | "refusal" | "sensitive" | "recitation" | "prohibited_content" => {
            builder.end(Finish::Filtered);
        }
        "error" => return Err(ModelError::Protocol("the server ended it with an error".to_owned())),
        // The server gave up in the middle, and says so: vLLM and SGLang, DeepSeek, GLM.
        "abort" | "insufficient_system_resource" | "network_error" => {
            return Err(ModelError::StreamTruncated);
        }
        _ => builder.end(Finish::Complete),
    }
    Ok(())
}

/// Both a chunk, with its `delta`, and a whole answer, with its `message`.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<MapOnly<Choice>>>,
    #[serde(default)]
    usage: Value,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: Value,
    #[serde(default)]
    delta: Option<MapOnly<Delta>>,
    #[serde(default)]
    message: Option<MapOnly<Delta>>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    reasoning_content: Value,
    #[serde(default)]
    reasoning: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Usage;

    fn read(chunks: &[&str]) -> Result<(String, Finish, Usage), ModelError> {
        let mut builder = ResponseBuilder::default();
        for chunk in chunks {
            OpenAi::default().read("message", chunk, &mut builder)?;
        }
        builder.finish()
    }

    #[test]
    fn chunks_are_joined() {
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
        assert_eq!(read, Ok(("Ada flies.".to_owned(), Finish::Complete, usage)));
    }

    #[test]
    fn what_stands_beside_a_piece_is_not_read_twice() {
        // Perplexity sends with each piece what there is so far.
        let read = read(&[
            r#"{"choices":[{"message":{"content":"Ada "},"delta":{"content":"Ada "}}]}"#,
            r#"{"choices":[{"delta":{"content":"flies."},"message":{"content":"Ada flies."},"finish_reason":"stop"}]}"#,
        ]);
        assert_eq!(read.map(|read| read.0), Ok("Ada flies.".to_owned()));
    }

    #[test]
    fn the_end_is_told_from_a_break() {
        let text = r#"{"choices":[{"delta":{"content":"Ada"}}]}"#;
        assert_eq!(read(&[text]), Err(ModelError::StreamTruncated));
        assert_eq!(read(&[]), Err(ModelError::StreamTruncated));
        assert_eq!(read(&[text, "[DONE]"]).map(|read| read.1), Ok(Finish::Complete));
        for (reason, finish) in [
            ("stop", Finish::Complete),
            ("eos", Finish::Complete),
            ("length", Finish::Length),
            ("MAX_TOKENS", Finish::Length),
            ("content_filter", Finish::Filtered),
            ("content_filter: PROHIBITED_CONTENT", Finish::Filtered),
            ("SAFETY", Finish::Filtered),
            ("sensitive", Finish::Filtered),
        ] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end]).map(|read| read.1), Ok(finish), "{reason}");
        }
        for reason in ["abort", "insufficient_system_resource", "network_error"] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end, "[DONE]"]), Err(ModelError::StreamTruncated), "{reason}");
        }
        let refusal = r#"{"choices":[{"message":{"content":null,"refusal":"No."},"finish_reason":"stop"}]}"#;
        assert_eq!(read(&[refusal]).map(|read| read.1), Ok(Finish::Filtered));
    }

    #[test]
    fn what_is_no_chat_completion_is_an_error() {
        for (chunk, message) in [
            (r#"{"choices":[{"delta":{},"finish_reason":"error"}]}"#, "the server ended it with an error"),
            (r#"{"choices":[{"delta":{"content":{"secret":1}}}]}"#, "not a chat completion"),
            (r#"{"choices":[[0,["Ada"],null,"stop"]]}"#, "not a chat completion"),
            ("<html>", "not a chat completion"),
            ("", "not a chat completion"),
            ("null", "not a chat completion"),
        ] {
            assert_eq!(read(&[chunk]), Err(ModelError::Protocol(message.to_owned())), "{chunk}");
        }
        let mut builder = ResponseBuilder::default();
        assert_eq!(OpenAi::default().read("heartbeat", "tick", &mut builder), Ok(()));
    }
}
