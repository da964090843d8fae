//! Calls and results in tool_pairing. Both interfaces refuse a list in which a call has no result right behind it, or a result
//! no call right before it; a history has such calls and results: given up, late, said twice, or cut off from the
//! other half by a summary. What is missing is put in. Nothing that was stored is moved, changed or left out.

use crate::domain::message::Role;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::tokens;
use std::sync::LazyLock;

/// What a result says that was put in.
pub(super) const NO_RESULT: &str = "No result of this call has been recorded.";
/// The tool that a call names that was put in.
pub(super) const EARLIER_CALL: &str = "earlier_call";
/// The arguments of such a call.
pub(super) const NO_ARGUMENTS: &str = "{}";

/// Tokens of a result that is put in, of the call with this id.
pub(super) fn tokens_of_result(id: &str) -> i64 {
    // There may be very many.
    static SAID: LazyLock<i64> = LazyLock::new(|| tokens::count_text(NO_RESULT));
    tokens::PER_MESSAGE + tokens::count_text(id) + *SAID
}

/// Tokens of a call that is put in, with this id.
pub(super) fn tokens_of_call(id: &str) -> i64 {
    static SAID: LazyLock<i64> =
        LazyLock::new(|| tokens::count_text(EARLIER_CALL) + tokens::count_text(NO_ARGUMENTS));
    tokens::PER_MESSAGE + tokens::count_text(id) + *SAID
}

/// What is put in around a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MissingHalves {
    /// Before it, the call that it result_of.
    pub(super) call: bool,
    /// Behind it, results of the calls with these ids.
    pub(super) results: Vec<String>,
    /// Whether nothing follows it: then those results may still come.
    pub(super) last: bool,
}

/// What is put in around each message. It depends on what stands before the message, and on the one that follows.
pub(super) fn missing_halves<'a>(messages: impl Iterator<Item = &'a MessageMetadata>) -> Vec<MissingHalves> {
    let mut all: Vec<MissingHalves> = Vec::new();
    // Calls of the assistant message before, as long as only results of them have followed.
    let mut open: Vec<String> = Vec::new();
    let close = |all: &mut Vec<MissingHalves>, open: &mut Vec<String>| {
        if let Some(before) = all.last_mut() {
            before.results.append(open);
        }
    };
    for message in messages {
        let mut missing_halves = MissingHalves::default();
        let answered = message.result_of.as_ref().and_then(|id| open.iter().position(|call| call == id));
        if let Some(at) = answered {
            open.remove(at);
        } else {
            close(&mut all, &mut open);
            missing_halves.call = message.role == Role::Tool;
            open.clone_from(&message.calls);
        }
        all.push(missing_halves);
    }
    close(&mut all, &mut open);
    if let Some(last) = all.last_mut() {
        last.last = true;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `u`, `a` plain messages; `Axy` calls, `tx` a result. Back comes the list with what was put in, in brackets.
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
        for ((word, message), missing_halves) in
            script.split(' ').zip(&messages).zip(missing_halves(messages.iter()))
        {
            if missing_halves.call {
                out.push(format!("(A{})", message.result_of.as_deref().unwrap_or_default()));
            }
            out.push(word.to_owned());
            out.extend(missing_halves.results.iter().map(|id| format!("(t{id})")));
        }
        out.join(" ")
    }

    #[test]
    fn what_is_in_pairs_stays_as_it_is() {
        for script in ["u a u a", "u Axy ty tx a", "Ax tx Ax tx u", "a"] {
            assert_eq!(completed(script), script);
        }
    }

    #[test]
    fn a_call_without_a_result_gets_one_before_the_next_message() {
        assert_eq!(completed("u Ax u a"), "u Ax (tx) u a");
        assert_eq!(completed("u Axy ty u a"), "u Axy ty (tx) u a");
        assert_eq!(completed("u Ax Ay ty"), "u Ax (tx) Ay ty");
        assert_eq!(completed("u Axy tx"), "u Axy tx (ty)");
    }

    #[test]
    fn a_result_without_a_call_gets_one() {
        assert_eq!(completed("tx u a"), "(Ax) tx u a");
        assert_eq!(completed("Ax u a tx u"), "Ax (tx) u a (Ax) tx u");
        assert_eq!(completed("Ax tx tx u"), "Ax tx (Ax) tx u");
        assert_eq!(completed("Axy tx tx ty"), "Axy tx (ty) (Ax) tx (Ay) ty");
        assert_eq!(completed("Ax tz tx"), "Ax (tx) (Az) tz (Ax) tx");
    }
}
