//! The parts that a protocol of a provider has.

use crate::domain::format::Format;
use crate::domain::message::object::Object;
use crate::service::contexts::Context;

/// A protocol whose requests get a memory.
pub(super) trait Protocol: Sync {
    fn format(&self) -> Format;

    /// Returns the reason for which a request cannot have a memory.
    fn unsupported(&self, request: &Object<'_>) -> Option<&'static str>;

    /// Returns the number of messages at the beginning of the list that are the system prompt.
    fn leading(&self, messages: &[&str]) -> usize;

    /// Returns the session and the user that the request names in fields of its own.
    fn names(&self, request: &Object<'_>) -> (Option<String>, Option<String>);

    /// Returns the largest number of tokens of the answer, if the request limits it.
    fn answer_limit(&self, request: &Object<'_>) -> Option<i64>;

    /// Puts the context in the place of the messages after the system prompt, which gets `context.system` at its end.
    fn insert(&self, request: &mut Object<'_>, leading: usize, context: &Context);

    /// Returns a reader of the answer.
    fn answer(&self) -> Box<dyn AnswerReader>;
}

/// The state of an answer after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Running,
    /// The last event.
    End,
    /// An error of the upstream: nothing of the answer is stored.
    Failed,
}

/// Collects an answer from the events of a stream, or reads it from a body.
pub(super) trait AnswerReader: Send + Sync {
    fn read_event(&mut self, name: &str, data: &str) -> Progress;

    /// Returns `true` if the message is complete, even if the end of the stream is missing.
    fn has_finished(&self) -> bool;

    /// Returns the message so far, without calls that are incomplete; `None` if it has no content.
    fn message(&self) -> Option<String>;

    /// Returns the message in the body of a response that is not a stream.
    fn message_of(&self, body: &str) -> Option<String>;
}
