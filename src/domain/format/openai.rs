//! The OpenAI format (chat completions): stored messages byte for byte, except for one field that the OpenAI API rejects.

use super::tool_pairing::{
    EARLIER_CALL, MissingHalves, NO_ARGUMENTS, NO_RESULT, tokens_of_call, tokens_of_result,
};
use super::types::{
    RenderInput, RenderedContext, RenderedItem, RenderedMessage, Speaker, StablePrefix, json_list,
};
use crate::domain::message::Role;
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::tokens;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use std::borrow::Cow;

pub(super) fn render_message<'t>(
    metadata: &MessageMetadata,
    json: &'t str,
    missing: &MissingHalves,
) -> RenderedMessage<'t> {
    let mut rendered = RenderedMessage::default();
    if missing.call {
        let (call, tokens) = inserted_call(metadata.result_of.as_deref().unwrap_or_default());
        rendered.insert(call, tokens);
    }
    let speaker = if metadata.role == Role::Assistant { Speaker::Assistant } else { Speaker::User };
    let json = without_empty_tool_calls(json).map_or(Cow::Borrowed(json), Cow::Owned);
    rendered.items.push(RenderedItem { speaker, json });
    rendered.tokens += metadata.tokens;
    rendered.insert_results(missing, inserted_result);
    rendered
}

/// Returns the message without `tool_calls` if that is an empty list. Some compatible servers add an empty list to every
/// answer, but the OpenAI API rejects it. The rest of the message is unchanged.
fn without_empty_tool_calls(json: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct ToolCalls<'a> {
        #[serde(borrow)]
        tool_calls: Option<&'a RawValue>,
    }
    const KEY: &str = r#""tool_calls":"#;
    const EMPTY_LIST: &str = "[]";
    // Most messages do not contain this text at all and need not be parsed.
    if !json.contains(r#""tool_calls":[]"#) {
        return None;
    }
    let calls = serde_json::from_str::<ToolCalls<'_>>(json).ok()?.tool_calls;
    let calls = calls.filter(|calls| calls.get() == EMPTY_LIST)?;
    let offset = calls.get().as_ptr().addr() - json.as_ptr().addr();
    let (before, after) = json.split_at_checked(offset)?;
    let (before, after) = (before.strip_suffix(KEY)?, after.strip_prefix(EMPTY_LIST)?);
    Some(match before.strip_suffix(',') {
        Some(before) => format!("{before}{after}"),
        None => format!("{before}{}", after.strip_prefix(',').unwrap_or(after)),
    })
}

fn inserted_call(id: &str) -> (RenderedItem<'static>, i64) {
    let call = json!({
        "role": "assistant",
        "content": null,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": EARLIER_CALL, "arguments": NO_ARGUMENTS}},
        ],
    });
    let tokens = tokens::PER_MESSAGE + tokens_of_call(id);
    (RenderedItem { speaker: Speaker::Assistant, json: call.to_string().into() }, tokens)
}

fn inserted_result(id: &str) -> (RenderedItem<'static>, i64) {
    let result = json!({"role": "tool", "tool_call_id": id, "content": NO_RESULT});
    (RenderedItem { speaker: Speaker::User, json: result.to_string().into() }, tokens_of_result(id))
}

pub(super) fn render_context(input: &RenderInput<'_>) -> RenderedContext {
    #[derive(Serialize)]
    struct SystemMessage<'a> {
        role: &'static str,
        content: &'a str,
    }
    let (stable_items, tokens) = input.stable_items();
    let system = SystemMessage { role: "system", content: &input.system };
    let system = (!input.system.is_empty()).then(|| encode(&system));
    let stable =
        StablePrefix { messages: usize::from(system.is_some()) + stable_items, blocks: None, tokens };
    let rendered = input.history.iter().chain(&input.user_message);
    let items = rendered.flat_map(|message| &message.items).map(|item| &*item.json);
    let messages = json_list(system.as_deref().into_iter().chain(items));
    RenderedContext { messages, stable, ..RenderedContext::default() }
}

fn encode<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("strings are always JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_tool_calls_are_removed() {
        for (stored, rendered) in [
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
            assert_eq!(without_empty_tool_calls(stored).as_deref(), rendered, "{stored}");
        }
    }
}
