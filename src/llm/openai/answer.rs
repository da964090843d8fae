//! Reading an answer: the chunks of a stream, or the one object of a server that doesn't stream.
//!
//! Servers that call themselves compatible differ in small things, so whatever is not needed may be missing, null or
//! of another shape. What a model thought before it answered (`reasoning_content` and the like) is not its answer.

use super::super::provider::{Completion, Finish};
use super::super::{Cause, Usage};
use serde::Deserialize;
use serde_json::Value;

/// The longest answer, in bytes of text: far above any summary, far below what would hurt.
const TEXT_BYTES: usize = 1024 * 1024;

/// What has been read of an answer so far.
#[derive(Debug, Default)]
pub(super) struct Reading {
    text: String,
    refused: bool,
    finish: Option<Finish>,
    usage: Usage,
}

/// Both a chunk, with its `delta`, and a whole answer, with its `message`.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Value,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: Value,
    #[serde(default, alias = "message")]
    delta: Option<Delta>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    refusal: Option<String>,
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

impl Reading {
    /// Takes a chunk, or a whole answer.
    pub(super) fn add(&mut self, json: &str) -> Result<(), Cause> {
        if let Some(message) = error_message(json) {
            return Err(Cause::Protocol(message));
        }
        // Without serde's own words: they quote what they found, and that is the conversation.
        let chunk: Chunk =
            serde_json::from_str(json).map_err(|_| Cause::Protocol("not a chat completion".to_owned()))?;
        if let Some(tokens) = chunk.usage.get("prompt_tokens").and_then(Value::as_u64) {
            self.usage.input_tokens = Some(tokens);
        }
        if let Some(tokens) = chunk.usage.get("completion_tokens").and_then(Value::as_u64) {
            self.usage.output_tokens = Some(tokens);
        }
        // One answer was asked for; should there be more, they are not parts of one text.
        let first = |choice: &Choice| choice.index.as_u64().unwrap_or_default() == 0;
        for choice in chunk.choices.unwrap_or_default().into_iter().filter(first) {
            self.choice(choice)?;
        }
        Ok(())
    }

    fn choice(&mut self, choice: Choice) -> Result<(), Cause> {
        if let Some(delta) = choice.delta {
            match delta.content {
                Some(Content::Text(text)) => self.text.push_str(&text),
                Some(Content::Parts(parts)) => {
                    for part in parts.into_iter().filter(|part| part.kind == "text") {
                        self.text.push_str(&part.text.unwrap_or_default());
                    }
                }
                None => {}
            }
            self.refused |= delta.refusal.is_some_and(|refusal| !refusal.is_empty());
        }
        if self.text.len() > TEXT_BYTES {
            return Err(super::too_long());
        }
        // Some servers send an empty reason with every chunk.
        match choice.finish_reason.as_deref() {
            None | Some("") => {}
            Some("length" | "max_tokens" | "model_length") => self.finish = Some(Finish::Length),
            Some("content_filter" | "safety" | "refusal") => self.finish = Some(Finish::Filtered),
            Some("error") => return Err(Cause::Protocol("the server ended it with an error".to_owned())),
            Some(_) => self.finish = Some(Finish::Complete),
        }
        Ok(())
    }

    /// The answer; `marked` tells whether its end was: by the stream's end mark, or by being one whole object.
    /// A finish reason is as good.
    pub(super) fn finish(self, marked: bool) -> Result<Completion, Cause> {
        let finish = match self.finish {
            Some(finish) => finish,
            None if marked => Finish::Complete,
            None => return Err(Cause::BrokenOff),
        };
        let finish = if self.refused && self.text.trim().is_empty() { Finish::Filtered } else { finish };
        Ok(Completion { text: self.text, finish, usage: self.usage })
    }
}

/// What a server says in an error object, in any of the shapes that are about: `{"error": {"message": "…"}}`,
/// `{"error": "…"}`, `{"object": "error", "message": "…"}`, `{"message": "…"}`, `{"detail": "…"}`. None where the
/// text is no such object.
pub(super) fn error_message(json: &str) -> Option<String> {
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
    }
    let shapes: Shapes = serde_json::from_str(json).ok()?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    match &shapes.error {
        Value::Null | Value::Bool(false) => {}
        error => {
            let said = text(error).or_else(|| error.get("message").and_then(text));
            return Some(said.unwrap_or_else(|| "an error without a message".to_owned()));
        }
    }
    if !shapes.choices.is_null() {
        return None;
    }
    text(&shapes.message).or_else(|| text(&shapes.detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&str], marked: bool) -> Result<Completion, Cause> {
        let mut reading = Reading::default();
        for chunk in chunks {
            reading.add(chunk)?;
        }
        reading.finish(marked)
    }

    fn protocol(text: &str) -> Result<Completion, Cause> {
        Err(Cause::Protocol(text.to_owned()))
    }

    #[test]
    fn chunks_are_joined() {
        let read = read(
            &[
                r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":""}]}"#,
                r#"{"choices":[{"index":0,"delta":{"reasoning_content":"Hm."},"finish_reason":null}],"usage":null}"#,
                r#"{"choices":[{"index":1,"delta":{"content":"Other."}}]}"#,
                r#"{"choices":[{"index":0,"delta":{"content":"Ada "}}]}"#,
                r#"{"choices":[{"delta":{"content":[{"type":"thinking"},{"type":"text","text":"flies."}]}}]}"#,
                r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"error":null}"#,
                r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}"#,
            ],
            false,
        );
        let usage = Usage { input_tokens: Some(7), output_tokens: Some(2) };
        assert_eq!(read, Ok(Completion { text: "Ada flies.".to_owned(), finish: Finish::Complete, usage }));
    }

    #[test]
    fn the_end_is_told_from_a_break() {
        let text = r#"{"choices":[{"delta":{"content":"Ada"}}]}"#;
        assert_eq!(read(&[text], false), Err(Cause::BrokenOff));
        assert_eq!(read(&[], false), Err(Cause::BrokenOff));
        assert_eq!(read(&[text], true).map(|read| read.finish), Ok(Finish::Complete));
        for (reason, finish) in [
            ("stop", Finish::Complete),
            ("eos", Finish::Complete),
            ("length", Finish::Length),
            ("content_filter", Finish::Filtered),
        ] {
            let end = format!(r#"{{"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}]}}"#);
            assert_eq!(read(&[text, &end], false).map(|read| read.finish), Ok(finish), "{reason}");
        }
        let refusal = r#"{"choices":[{"message":{"content":null,"refusal":"No."},"finish_reason":"stop"}]}"#;
        assert_eq!(read(&[refusal], true).map(|read| read.finish), Ok(Finish::Filtered));
    }

    #[test]
    fn errors_are_found_in_every_shape() {
        for (chunk, message) in [
            (r#"{"error":{"message":"overloaded","code":529}}"#, "overloaded"),
            (r#"{"error":"overloaded"}"#, "overloaded"),
            (r#"{"error":{"code":5}}"#, "an error without a message"),
            (r#"{"object":"error","message":"overloaded"}"#, "overloaded"),
            (r#"{"detail":"overloaded"}"#, "overloaded"),
            (r#"{"choices":[{"delta":{},"finish_reason":"error"}]}"#, "the server ended it with an error"),
            (r#"{"choices":[{"delta":{"content":{"secret":1}}}]}"#, "not a chat completion"),
            ("<html>", "not a chat completion"),
            ("", "not a chat completion"),
            ("null", "not a chat completion"),
        ] {
            assert_eq!(read(&[chunk], true), protocol(message), "{chunk}");
        }
    }

    #[test]
    fn a_flood_ends() {
        let chunk = format!(r#"{{"choices":[{{"delta":{{"content":"{}"}}}}]}}"#, "x".repeat(300_000));
        let chunk = chunk.as_str();
        assert!(read(&[chunk; 3], true).is_ok());
        assert_eq!(read(&[chunk; 4], true), protocol("longer than any summary"));
    }
}
