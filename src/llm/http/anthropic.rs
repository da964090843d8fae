//! Anthropic's messages API: the system prompt apart, the answer in blocks, every event with its type in its data.

use super::super::ModelError;
use super::super::prompt::Prompt;
use super::super::provider::{Finish, Request};
use super::{ResponseBuilder, WireFormat};
use crate::domain::json::MapOnly;
use reqwest::header::HeaderName;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The version of the interface that this file speaks.
const VERSION: &str = "2023-06-01";

/// The dialect.
#[derive(Clone, Copy, Debug, Default)]
pub struct Anthropic;

impl WireFormat for Anthropic {
    fn path(&self) -> &'static [&'static str] {
        &["messages"]
    }

    fn key_header(&self) -> (HeaderName, &'static str) {
        (HeaderName::from_static("x-api-key"), "")
    }

    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        &[("anthropic-version", VERSION)]
    }

    fn body(&self, request: &Request<'_>, prompt: &Prompt) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("model".to_owned(), request.model.into());
        body.insert("max_tokens".to_owned(), request.output_limit.into());
        // An empty text is refused.
        if !prompt.system.is_empty() {
            body.insert("system".to_owned(), prompt.system.as_str().into());
        }
        body.insert("messages".to_owned(), json!([{"role": "user", "content": prompt.user}]));
        body.insert("stream".to_owned(), true.into());
        body
    }

    fn read(&self, event: &str, data: &str, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
        let known = matches!(
            event,
            "message"
                | "message_start"
                | "content_block_start"
                | "content_block_delta"
                | "message_delta"
                | "message_stop"
        );
        match serde_json::from_str::<Event>(data) {
            Ok(event) => read_event(event, builder),
            // There may be new events at any time, says the interface.
            Err(_) if !known => Ok(()),
            // Without serde's own words: they quote what they found, and that is the conversation.
            Err(_) => Err(ModelError::Protocol("not a message of the messages API".to_owned())),
        }
    }
}

fn read_event(event: Event, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
    match event {
        Event::Start { message } => builder.used(&message.usage, "input_tokens", "output_tokens"),
        Event::BlockStart { content_block } => read_block(content_block, builder)?,
        Event::BlockDelta { delta } => read_block(delta, builder)?,
        Event::Delta { delta: MapOnly(delta), usage } => {
            builder.used(&usage, "input_tokens", "output_tokens");
            read_end(delta.stop_reason.as_deref(), builder);
        }
        Event::Stop => builder.mark(),
        Event::Whole(message) => {
            builder.used(&message.usage, "input_tokens", "output_tokens");
            for block in message.content {
                read_block(block, builder)?;
            }
            read_end(message.stop_reason.as_deref(), builder);
        }
        Event::Other => {}
    }
    Ok(())
}

fn read_block(block: Block, builder: &mut ResponseBuilder) -> Result<(), ModelError> {
    match block {
        Block::Text { text } => builder.push(&text),
        Block::Other => {
            builder.thought();
            Ok(())
        }
    }
}

fn read_end(reason: Option<&str>, builder: &mut ResponseBuilder) {
    match reason {
        None => {}
        Some("max_tokens" | "model_context_window_exceeded") => builder.end(Finish::Length),
        Some("refusal") => builder.end(Finish::Filtered),
        Some(_) => builder.end(Finish::Complete),
    }
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Event {
    #[serde(rename = "message_start")]
    Start { message: Message },
    #[serde(rename = "content_block_start")]
    BlockStart { content_block: Block },
    #[serde(rename = "content_block_delta")]
    BlockDelta { delta: Block },
    #[serde(rename = "message_delta")]
    Delta {
        delta: MapOnly<End>,
        #[serde(default)]
        usage: Value,
    },
    #[serde(rename = "message_stop")]
    Stop,
    /// What a server sends that doesn't stream.
    #[serde(rename = "message")]
    Whole(Message),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    content: Vec<Block>,
    #[serde(default)]
    stop_reason: Option<String>,
    #[serde(default)]
    usage: Value,
}

#[derive(Deserialize)]
struct End {
    #[serde(default)]
    stop_reason: Option<String>,
}

/// A block, its beginning, or a piece of it.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Block {
    #[serde(rename = "text", alias = "text_delta")]
    Text { text: String },
    /// Thoughts, signatures, and what there may be one day.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Usage;

    fn read(events: &[&str]) -> Result<(String, Finish, Usage), ModelError> {
        let mut builder = ResponseBuilder::default();
        for event in events {
            Anthropic.read("message", event, &mut builder)?;
        }
        builder.finish()
    }

    const START: &str =
        r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":7,"output_tokens":1}}}"#;
    const TEXT: &str =
        r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Ada "}}"#;

    #[test]
    fn text_blocks_are_joined_and_thoughts_left_out() {
        let read = read(&[
            START,
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":""}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm."}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"x"}}"#,
            r#"{"type":"content_block_stop","index":0}"#,
            r#"{"type":"ping"}"#,
            r#"{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#,
            TEXT,
            r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"flies."}}"#,
            r#"{"type":"some_new_event","delta":5}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}"#,
            r#"{"type":"message_stop"}"#,
        ]);
        let usage = Usage { input_tokens: Some(7), output_tokens: Some(3) };
        assert_eq!(read, Ok(("Ada flies.".to_owned(), Finish::Complete, usage)));
    }

    #[test]
    fn the_end_is_told_from_a_break() {
        assert_eq!(read(&[START, TEXT]), Err(ModelError::StreamTruncated));
        assert_eq!(read(&[TEXT, r#"{"type":"message_stop"}"#]).map(|read| read.1), Ok(Finish::Complete));
        for (reason, finish) in [
            ("end_turn", Finish::Complete),
            ("stop_sequence", Finish::Complete),
            ("max_tokens", Finish::Length),
            ("refusal", Finish::Filtered),
        ] {
            let end = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
            assert_eq!(read(&[TEXT, &end]).map(|read| read.1), Ok(finish), "{reason}");
        }
    }

    #[test]
    fn a_whole_message_is_read_too() {
        let whole = r#"{"type":"message","content":[{"type":"thinking","thinking":"Hm."},{"type":"text","text":"Ada."}],
            "stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":2}}"#;
        let usage = Usage { input_tokens: Some(1), output_tokens: Some(2) };
        assert_eq!(read(&[whole]), Ok(("Ada.".to_owned(), Finish::Complete, usage)));
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let wrong = Err(ModelError::Protocol("not a message of the messages API".to_owned()));
        for event in [
            "<html>",
            "",
            "null",
            r#"{"type":"content_block_delta","delta":{"type":"text_delta"}}"#,
            r#"{"type":"message_delta","delta":["end_turn"]}"#,
        ] {
            assert_eq!(read(&[event]), wrong, "{event}");
        }
        let mut builder = ResponseBuilder::default();
        assert_eq!(Anthropic.read("whatever", "tick", &mut builder), Ok(()));
    }
}
