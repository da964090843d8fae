//! Pairs tool calls with their results. Both APIs reject a list in which a result does not follow its call directly. A
//! history can contain such lists: a call was abandoned, a result came late or twice, or the other half is only in the
//! summary. The missing halves are inserted. No stored message is moved, changed or omitted.

use crate::domain::message::Role;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::tokens;
use std::sync::LazyLock;

/// Content of an inserted result.
pub(super) const NO_RESULT: &str = "No result of this call has been recorded.";
/// Tool name of an inserted call.
pub(super) const EARLIER_CALL: &str = "earlier_call";
/// Arguments of an inserted call.
pub(super) const NO_ARGUMENTS: &str = "{}";

/// Returns the tokens of an inserted result of the call `id`.
pub(super) fn tokens_of_result(id: &str) -> i64 {
    // Counted once, because a list may contain thousands of inserted results.
    static CONTENT_TOKENS: LazyLock<i64> = LazyLock::new(|| tokens::count_text(NO_RESULT));
    tokens::PER_MESSAGE + tokens::count_text(id) + *CONTENT_TOKENS
}

/// Returns the tokens of an inserted call with the id `id`.
pub(super) fn tokens_of_call(id: &str) -> i64 {
    static CONTENT_TOKENS: LazyLock<i64> =
        LazyLock::new(|| tokens::count_text(EARLIER_CALL) + tokens::count_text(NO_ARGUMENTS));
    tokens::PER_MESSAGE + tokens::count_text(id) + *CONTENT_TOKENS
}

/// The halves of tool calls that must be inserted around a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MissingHalves {
    /// Before the message, the call whose result the message is.
    pub(super) call: bool,
    /// After the message, results of the calls with these ids.
    pub(super) results: Vec<String>,
    /// The message is the newest one, so the results may still arrive.
    pub(super) is_last_message: bool,
}

/// Returns the missing halves around each message. They depend on the messages before it and on the next one.
pub(super) fn missing_halves<'a>(messages: impl Iterator<Item = &'a MessageMetadata>) -> Vec<MissingHalves> {
    let mut all: Vec<MissingHalves> = Vec::new();
    // Unanswered calls of the last assistant message, as long as only results of them have followed.
    let mut open: Vec<String> = Vec::new();
    let close = |all: &mut Vec<MissingHalves>, open: &mut Vec<String>| {
        if let Some(previous) = all.last_mut() {
            previous.results.append(open);
        }
    };
    for message in messages {
        let mut missing = MissingHalves::default();
        let answered = message.result_of.as_ref().and_then(|id| open.iter().position(|call| call == id));
        if let Some(index) = answered {
            open.remove(index);
        } else {
            close(&mut all, &mut open);
            missing.call = message.role == Role::Tool;
            open.clone_from(&message.calls);
        }
        all.push(missing);
    }
    close(&mut all, &mut open);
    if let Some(last) = all.last_mut() {
        last.is_last_message = true;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the list with the inserted halves in brackets. In the notation, `u` and `a` are plain messages, `Axy` makes
    /// the calls x and y, and `tx` is the result of x.
    fn completed(script: &str) -> String {
        let messages: Vec<MessageMetadata> = script
            .split(' ')
            .map(|word| {
                let ids = || word.chars().skip(1).map(String::from);
                match &word[..1] {
                    "u" => {
                        MessageMetadata { role: Role::User, calls: Vec::new(), result_of: None, tokens: 0 }
                    }
                    "t" => MessageMetadata {
                        role: Role::Tool,
                        calls: Vec::new(),
                        result_of: ids().next(),
                        tokens: 0,
                    },
                    _ => MessageMetadata {
                        role: Role::Assistant,
                        calls: ids().collect(),
                        result_of: None,
                        tokens: 0,
                    },
                }
            })
            .collect();
        let mut out = Vec::new();
        for ((word, message), missing) in
            script.split(' ').zip(&messages).zip(missing_halves(messages.iter()))
        {
            if missing.call {
                out.push(format!("(A{})", message.result_of.as_deref().unwrap_or_default()));
            }
            out.push(word.to_owned());
            out.extend(missing.results.iter().map(|id| format!("(t{id})")));
        }
        out.join(" ")
    }

    #[test]
    fn paired_calls_and_results_are_unchanged() {
        for script in ["u a u a", "u Axy ty tx a", "Ax tx Ax tx u", "a"] {
            assert_eq!(completed(script), script);
        }
    }

    #[test]
    fn result_is_inserted_after_call_without_result() {
        assert_eq!(completed("u Ax u a"), "u Ax (tx) u a");
        assert_eq!(completed("u Axy ty u a"), "u Axy ty (tx) u a");
        assert_eq!(completed("u Ax Ay ty"), "u Ax (tx) Ay ty");
        assert_eq!(completed("u Axy tx"), "u Axy tx (ty)");
    }

    #[test]
    fn call_is_inserted_before_result_without_call() {
        assert_eq!(completed("tx u a"), "(Ax) tx u a");
        assert_eq!(completed("Ax u a tx u"), "Ax (tx) u a (Ax) tx u");
        assert_eq!(completed("Ax tx tx u"), "Ax tx (Ax) tx u");
        assert_eq!(completed("Axy tx tx ty"), "Axy tx (ty) (Ax) tx (Ay) ty");
        assert_eq!(completed("Ax tz tx"), "Ax (tx) (Az) tz (Ax) tx");
    }
}
