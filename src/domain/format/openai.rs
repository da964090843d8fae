//! Chat completions: messages as they were stored, byte for byte, but for a field that OpenAI's own interface refuses.

use super::tool_pairing::{
    EARLIER_CALL, MissingHalves, NO_ARGUMENTS, NO_RESULT, tokens_of_call, tokens_of_result,
};
use super::{Part, RenderInput, RenderedContext, RenderedMessage, Speaker, StablePrefix};
use crate::domain::message::Role;
use crate::domain::message_metadata::ContextMessage;
use crate::domain::tokens;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

#[derive(Serialize)]
struct Plain<'a> {
    role: &'static str,
    content: &'a str,
}

#[derive(Serialize)]
struct Caller<'a> {
    role: &'static str,
    content: Option<&'static str>,
    tool_calls: [Call<'a>; 1],
}

#[derive(Serialize)]
struct Call<'a> {
    id: &'a str,
    r#type: &'static str,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    name: &'static str,
    arguments: &'static str,
}

#[derive(Serialize)]
struct ToolResult<'a> {
    role: &'static str,
    tool_call_id: &'a str,
    content: &'static str,
}

pub(super) fn piece(message: ContextMessage, missing_halves: &MissingHalves) -> RenderedMessage {
    let mut piece = RenderedMessage::default();
    if missing_halves.call {
        let (call, tokens) = call(message.metadata.result_of.as_deref().unwrap_or_default());
        piece.insert(call, tokens);
    }
    let speaker = if message.metadata.role == Role::Assistant { Speaker::Assistant } else { Speaker::User };
    let json = without_empty_calls(&message.json).unwrap_or(message.json);
    piece.parts.push(Part { speaker, json });
    piece.tokens += message.metadata.tokens;
    piece.insert_results(missing_halves, result);
    piece
}

/// The message without its `tool_calls`, if it has an empty list of them. Servers that are not OpenAI's answer so whenever
/// they call nothing, and OpenAI's refuses to be sent it. All else stays to the letter.
fn without_empty_calls(json: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Calls<'a> {
        #[serde(borrow)]
        tool_calls: Option<&'a RawValue>,
    }
    const KEY: &str = r#""tool_calls":"#;
    const NONE: &str = "[]";
    // Most messages have no such text anywhere, and need not be read for that.
    if !json.contains(r#""tool_calls":[]"#) {
        return None;
    }
    let calls = serde_json::from_str::<Calls<'_>>(json).ok()?.tool_calls.filter(|raw| raw.get() == NONE)?;
    let at = calls.get().as_ptr().addr() - json.as_ptr().addr();
    let (before, after) = json.split_at_checked(at)?;
    let (before, after) = (before.strip_suffix(KEY)?, after.strip_prefix(NONE)?);
    Some(match before.strip_suffix(',') {
        Some(before) => format!("{before}{after}"),
        None => format!("{before}{}", after.strip_prefix(',').unwrap_or(after)),
    })
}

/// A call whose result follows.
fn call(id: &str) -> (Part, i64) {
    let function = Function { name: EARLIER_CALL, arguments: NO_ARGUMENTS };
    let json = json(&Caller {
        role: "assistant",
        content: None,
        tool_calls: [Call { id, r#type: "function", function }],
    });
    (Part { speaker: Speaker::Assistant, json }, tokens::PER_MESSAGE + tokens_of_call(id))
}

/// The result of a call that has none.
fn result(id: &str) -> (Part, i64) {
    let json = json(&ToolResult { role: "tool", tool_call_id: id, content: NO_RESULT });
    (Part { speaker: Speaker::User, json }, tokens_of_result(id))
}

pub(super) fn list(draft: RenderInput) -> RenderedContext {
    let (stable, tokens) = draft.stable();
    let mut messages = Vec::with_capacity(draft.history.len() + 2);
    if !draft.system.is_empty() {
        messages.push(json(&Plain { role: "system", content: &draft.system }));
    }
    let stable = StablePrefix { messages: messages.len() + stable, blocks: None, tokens };
    let pieces = draft.history.into_iter().chain(draft.user_message);
    messages.extend(pieces.flat_map(|piece| piece.parts).map(|part| part.json));
    RenderedContext { messages, stable, ..RenderedContext::default() }
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("structs of strings are always JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_of_calls_is_left_out() {
        for (stored, sent) in [
            (r#"{"role":"a","tool_calls":[],"x":1.0}"#, Some(r#"{"role":"a","x":1.0}"#)),
            (r#"{"tool_calls":[],"role":"a"}"#, Some(r#"{"role":"a"}"#)),
            (r#"{"role":"a","tool_calls":[]}"#, Some(r#"{"role":"a"}"#)),
            (
                r#"{"x":{"tool_calls":[]},"tool_calls":[],"z":"\"tool_calls\":[]"}"#,
                Some(r#"{"x":{"tool_calls":[]},"z":"\"tool_calls\":[]"}"#),
            ),
            (r#"{"x":{"tool_calls":[]},"tool_calls":[{"id":"a"}]}"#, None),
            (r#"{"x":{"tool_calls":[]},"tool_calls":null}"#, None),
            (r#"{"role":"a","content":"\"tool_calls\":[]"}"#, None),
        ] {
            assert_eq!(without_empty_calls(stored).as_deref(), sent, "{stored}");
        }
    }
}
