//! The wire format of Anthropic's messages API.

use super::{ResponseBuilder, WireFormat};
use crate::domain::json::MapOnly;
use crate::llm::ModelError;
use crate::llm::prompt::Prompt;
use crate::llm::provider::{FinishReason, Request};
use reqwest::header::HeaderName;
use serde::Deserialize;
use serde_json::{Map, Value, json};

const API_VERSION: &str = "2023-06-01";

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
        &[("anthropic-version", API_VERSION)]
    }

    fn body(&self, request: &Request<'_>, prompt: &Prompt) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("model".to_owned(), request.model.model.as_str().into());
        body.insert("max_tokens".to_owned(), request.model.output_limit.into());
        // The API rejects an empty text.
        if !prompt.system.is_empty() {
            body.insert("system".to_owned(), prompt.system.as_str().into());
        }
        body.insert("messages".to_owned(), json!([{"role": "user", "content": prompt.user}]));
        body.insert("stream".to_owned(), true.into());
        body
    }

    fn read_event(&self, event: &str, data: &str, response: &mut ResponseBuilder) -> Result<(), ModelError> {
        let is_known = matches!(
            event,
            "message"
                | "message_start"
                | "content_block_start"
                | "content_block_delta"
                | "message_delta"
                | "message_stop"
        );
        match serde_json::from_str::<Event>(data) {
            Ok(event) => handle_event(event, response),
            // The API may introduce new events at any time.
            Err(_) if !is_known => Ok(()),
            Err(_) => Err(ModelError::Protocol("not a message of the messages API")),
        }
    }
}

fn handle_event(event: Event, response: &mut ResponseBuilder) -> Result<(), ModelError> {
    match event {
        Event::Start { message } => response.usage(&message.usage, "input_tokens", "output_tokens"),
        Event::BlockStart { content_block } => handle_block(content_block, response)?,
        Event::BlockDelta { delta } => handle_block(delta, response)?,
        Event::Delta { delta: MapOnly(delta), usage } => {
            response.usage(&usage, "input_tokens", "output_tokens");
            handle_stop_reason(&delta.stop_reason.unwrap_or_default(), response);
        }
        Event::Stop => response.end_of_stream(),
        Event::CompleteMessage(message) => {
            response.usage(&message.usage, "input_tokens", "output_tokens");
            for block in message.content {
                handle_block(block, response)?;
            }
            handle_stop_reason(&message.stop_reason.unwrap_or_default(), response);
        }
        Event::Other => {}
    }
    Ok(())
}

fn handle_block(block: Block, response: &mut ResponseBuilder) -> Result<(), ModelError> {
    match block {
        Block::Text { text } => response.text_delta(&text),
        Block::Other => {
            response.reasoning_delta();
            Ok(())
        }
    }
}

fn handle_stop_reason(reason: &str, response: &mut ResponseBuilder) {
    // Without a reason, the event `message_stop` decides if the completion has ended.
    if let Some(reason) = FinishReason::parse(reason) {
        response.finish_reason(reason);
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
        delta: MapOnly<MessageDelta>,
        #[serde(default)]
        usage: Value,
    },
    #[serde(rename = "message_stop")]
    Stop,
    /// The response of a server that does not stream.
    #[serde(rename = "message")]
    CompleteMessage(Message),
    #[serde(other)]
    Other,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Message {
    content: Vec<Block>,
    stop_reason: Option<String>,
    usage: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MessageDelta {
    stop_reason: Option<String>,
}

/// A content block, its start, or its delta.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Block {
    #[serde(rename = "text", alias = "text_delta")]
    Text { text: String },
    /// Reasoning, signatures, and future block types.
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llm::Usage;
    use crate::llm::http::ParsedResponse;

    fn read(events: &[&str]) -> Result<ParsedResponse, ModelError> {
        let mut response = ResponseBuilder::default();
        for event in events {
            Anthropic.read_event("message", event, &mut response)?;
        }
        response.finish()
    }

    const START: &str =
        r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":7,"output_tokens":1}}}"#;
    const TEXT: &str =
        r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Ada "}}"#;

    #[test]
    fn text_blocks_are_joined_and_reasoning_is_left_out() {
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
        let text = "Ada flies.".to_owned();
        assert_eq!(read, Ok(ParsedResponse { text, finish_reason: FinishReason::Complete, usage }));
    }

    #[test]
    fn stop_reasons_are_mapped_and_a_missing_end_is_truncation() {
        assert_eq!(read(&[START, TEXT]), Err(ModelError::StreamTruncated));
        assert_eq!(
            read(&[TEXT, r#"{"type":"message_stop"}"#]).map(|response| response.finish_reason),
            Ok(FinishReason::Complete)
        );
        for (reason, finish) in [
            ("end_turn", FinishReason::Complete),
            ("stop_sequence", FinishReason::Complete),
            ("END_TURN", FinishReason::Complete),
            ("max_tokens", FinishReason::Length),
            ("MAX_TOKENS", FinishReason::Length),
            ("refusal", FinishReason::Filtered),
            ("Refusal", FinishReason::Filtered),
        ] {
            let end = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
            assert_eq!(read(&[TEXT, &end]).map(|response| response.finish_reason), Ok(finish), "{reason}");
        }
    }

    #[test]
    fn only_a_known_stop_reason_ends_a_stream_without_an_end_mark() {
        for reason in ["", "null", "none", "some_new_reason"] {
            let end = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
            assert_eq!(read(&[TEXT, &end]), Err(ModelError::StreamTruncated), "{reason}");
            let marked = read(&[TEXT, &end, r#"{"type":"message_stop"}"#]);
            assert_eq!(marked.map(|response| response.finish_reason), Ok(FinishReason::Complete), "{reason}");
        }
    }

    #[test]
    fn tool_calls_and_paused_turns_are_unfinished() {
        for reason in ["tool_use", "pause_turn", "TOOL_USE", "tool_calls"] {
            let unfinished = Ok(FinishReason::Unfinished);
            let end = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
            let streamed = read(&[TEXT, &end, r#"{"type":"message_stop"}"#]);
            assert_eq!(streamed.map(|response| response.finish_reason), unfinished, "{reason}");
            let whole = format!(
                r#"{{"type":"message","content":[{{"type":"text","text":"Ada"}}],"stop_reason":"{reason}"}}"#
            );
            assert_eq!(read(&[&whole]).map(|response| response.finish_reason), unfinished, "{reason}");
        }
    }

    #[test]
    fn malformed_events_are_protocol_errors_and_unknown_events_are_ignored() {
        let wrong = Err(ModelError::Protocol("not a message of the messages API"));
        for event in [
            "<html>",
            "",
            "null",
            r#"{"type":"content_block_delta","delta":{"type":"text_delta"}}"#,
            r#"{"type":"message_delta","delta":["end_turn"]}"#,
        ] {
            assert_eq!(read(&[event]), wrong, "{event}");
        }
        let mut response = ResponseBuilder::default();
        assert_eq!(Anthropic.read_event("whatever", "tick", &mut response), Ok(()));
    }
}
