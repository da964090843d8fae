//! What has been read of an answer so far, whatever dialect it comes in.
//!
//! A dialect adds what each event says; here is decided when that makes an answer.

use super::super::provider::Finish;
use super::super::{ModelError, Usage};
use serde_json::Value;

/// The longest answer, in bytes of text: far above any summary, far below what would hurt.
const TEXT_BYTES: usize = 1024 * 1024;

/// An answer under way.
#[derive(Debug, Default)]
pub struct ResponseBuilder {
    text: String,
    refused: bool,
    finish: Option<Finish>,
    marked: bool,
    pieces: usize,
    usage: Usage,
}

impl ResponseBuilder {
    /// A piece of the text.
    pub fn push(&mut self, text: &str) -> Result<(), ModelError> {
        self.text.push_str(text);
        self.pieces += usize::from(!text.is_empty());
        if self.text.len() > TEXT_BYTES { Err(super::too_long()) } else { Ok(()) }
    }

    /// A piece of what the model thought before it answered: no part of the answer, but a sign of life.
    pub fn thought(&mut self) {
        self.pieces += 1;
    }

    /// The model declined; counts where it wrote nothing else.
    pub fn refuse(&mut self) {
        self.refused = true;
        self.pieces += 1;
    }

    /// The model's last word on why it ended.
    pub fn end(&mut self, finish: Finish) {
        self.finish = Some(finish);
    }

    /// What the provider says it costs: the fields of these names, where they are numbers. Later words replace
    /// earlier ones. 0 is what servers say that don't count, or not yet.
    pub fn used(&mut self, usage: &Value, input: &str, output: &str) {
        let number = |name: &str| usage.get(name).and_then(Value::as_u64).filter(|number| *number > 0);
        self.usage.input_tokens = number(input).or(self.usage.input_tokens);
        self.usage.output_tokens = number(output).or(self.usage.output_tokens);
    }

    /// The mark after which nothing follows.
    pub fn mark(&mut self) {
        self.marked = true;
    }

    /// Whether [`ResponseBuilder::mark`] was called.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.marked
    }

    /// Whether the end of the answer is known: what goes wrong after it takes nothing from it.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.marked || self.finish.is_some()
    }

    /// How many pieces of text or thought have come.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Text and end; an answer without an end is none.
    pub fn finish(self) -> Result<(String, Finish, Usage), ModelError> {
        let finish = match self.finish {
            Some(finish) => finish,
            None if self.marked => Finish::Complete,
            None => return Err(ModelError::StreamTruncated),
        };
        let finish = if self.refused && self.text.trim().is_empty() { Finish::Filtered } else { finish };
        Ok((self.text, finish, self.usage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_ends() {
        let piece = "x".repeat(300_000);
        let mut builder = ResponseBuilder::default();
        for _ in 0..3 {
            builder.push(&piece).expect("not too much yet");
        }
        assert_eq!(builder.push(&piece), Err(ModelError::Protocol("longer than any summary".to_owned())));
    }

    #[test]
    fn a_count_of_nothing_says_nothing() {
        let mut builder = ResponseBuilder::default();
        for usage in [r#"{"in":0,"out":0}"#, r#"{"in":7,"out":1}"#, r#"{"in":0,"out":3}"#, "null", "7"] {
            builder.used(&serde_json::from_str(usage).expect("JSON"), "in", "out");
        }
        assert_eq!(builder.usage, Usage { input_tokens: Some(7), output_tokens: Some(3) });
        let mut builder = ResponseBuilder::default();
        builder.used(&serde_json::json!({"in": 0, "out": 0}), "in", "out");
        assert_eq!(builder.usage, Usage::default());
    }

    #[test]
    fn an_answer_needs_its_end() {
        let text = |builder: &mut ResponseBuilder| builder.push("Ada").expect("short");
        let mut broken = ResponseBuilder::default();
        text(&mut broken);
        assert!(!broken.has_ended());
        assert_eq!(broken.finish(), Err(ModelError::StreamTruncated));
        let mut marked = ResponseBuilder::default();
        text(&mut marked);
        marked.mark();
        assert_eq!(marked.finish().map(|read| read.1), Ok(Finish::Complete));
        let mut ended = ResponseBuilder::default();
        ended.end(Finish::Length);
        assert!(ended.has_ended());
        assert_eq!(ended.finish().map(|read| read.1), Ok(Finish::Length));
        let mut refused = ResponseBuilder::default();
        refused.refuse();
        refused.end(Finish::Complete);
        assert_eq!(refused.finish().map(|read| read.1), Ok(Finish::Filtered));
    }
}
