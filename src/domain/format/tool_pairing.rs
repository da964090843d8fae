//! Pairs tool calls with their results. Both APIs reject a list in which a result does not follow its call directly. A
//! history can contain such lists: a call was abandoned, a result came late or twice, or the other half is only in the
//! summary. The missing halves are inserted. No stored message is moved, changed or omitted.

use crate::domain::message::Role;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::tokens;
use std::collections::BTreeMap;
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
pub(super) struct MissingHalves<'m> {
    /// Before the message, the call whose result the message is.
    pub(super) call: bool,
    /// After the message, results of the calls with these ids.
    pub(super) results: Vec<&'m str>,
    /// The message is the newest one, so the results may still arrive.
    pub(super) is_last_message: bool,
}

/// Returns the missing halves by the position of their message; most messages have none. They depend on the messages before it and on
/// the next one.
pub(super) fn missing_halves(messages: &[MessageMetadata]) -> BTreeMap<usize, MissingHalves<'_>> {
    let mut missing: BTreeMap<usize, MissingHalves<'_>> = BTreeMap::new();
    // Unanswered calls of the last assistant message, as long as only results of them have followed.
    let mut open: Vec<&str> = Vec::new();
    for (position, message) in messages.iter().enumerate() {
        let answered = message.result_of().and_then(|id| open.iter().position(|call| *call == id));
        if let Some(index) = answered {
            open.remove(index);
            continue;
        }
        if !open.is_empty() {
            missing.entry(position - 1).or_default().results = std::mem::take(&mut open);
        }
        if message.role == Role::Tool {
            missing.entry(position).or_default().call = true;
        }
        open.extend(message.calls().iter().map(String::as_str));
    }
    if !open.is_empty() {
        let last = missing.entry(messages.len() - 1).or_default();
        (last.results, last.is_last_message) = (open, true);
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message_metadata::conversation;
    use test_case::test_case;

    #[test_case("u a u a" => "u a u a"; "no calls")]
    #[test_case("u Axy ty tx a" => "u Axy ty tx a"; "answered in another order")]
    #[test_case("Ax tx Ax tx u" => "Ax tx Ax tx u"; "reused id")]
    #[test_case("u Ax u a" => "u Ax (tx) u a"; "call without result")]
    #[test_case("u Axy ty u a" => "u Axy ty (tx) u a"; "one of two results")]
    #[test_case("u Ax Ay ty" => "u Ax (tx) Ay ty"; "call after a call without result")]
    #[test_case("u Axy tx" => "u Axy tx (ty)"; "at the end")]
    #[test_case("tx u a" => "(Ax) tx u a"; "result without call")]
    #[test_case("Ax u a tx u" => "Ax (tx) u a (Ax) tx u"; "late result")]
    #[test_case("Ax tx tx u" => "Ax tx (Ax) tx u"; "repeated result")]
    #[test_case("Axy tx tx ty" => "Axy tx (ty) (Ax) tx (Ay) ty"; "repeated result of one of two calls")]
    #[test_case("Ax tz tx" => "Ax (tx) (Az) tz (Ax) tx"; "result of another call")]
    fn missing_halves_are_inserted(script: &str) -> String {
        let messages = conversation(script);
        let halves = missing_halves(&messages);
        let mut out = Vec::new();
        for (position, (word, message)) in script.split(' ').zip(&messages).enumerate() {
            let missing = halves.get(&position).cloned().unwrap_or_default();
            out.extend(message.result_of().iter().filter(|_| missing.call).map(|id| format!("(A{id})")));
            out.push(word.to_owned());
            out.extend(missing.results.iter().map(|id| format!("(t{id})")));
        }
        out.join(" ")
    }
}
