//! The OpenAI format (chat completions): messages in their standard form, or with all fields.

use super::Fields;
use super::tool_pairing::{
    EARLIER_CALL, MissingHalves, NO_ARGUMENTS, NO_RESULT, tokens_of_call, tokens_of_result,
};
use super::types::{
    ItemJson, MessageList, RenderInput, RenderedContext, RenderedItem, RenderedMessage, Speaker, StablePrefix,
};
use crate::domain::message::{CompleteForm, Role};
use crate::domain::tail::TailMessage;
use crate::domain::tokens;
use serde_json::json;

pub(super) fn render_message<'t>(
    message: TailMessage<'t>,
    fields: Fields,
    missing: &MissingHalves<'_>,
) -> RenderedMessage<'t> {
    let metadata = message.metadata;
    let speaker = if metadata.role == Role::Assistant { Speaker::Assistant } else { Speaker::User };
    let (json, tokens) = match fields {
        Fields::Standard => {
            let json = message.sent_form().map_or(ItemJson::Stored(message.stored()), ItemJson::from);
            (json, message.sent_tokens())
        }
        Fields::All => {
            let CompleteForm { json, additional, has_standard_content } =
                CompleteForm::of(message.json(), !metadata.calls().is_empty());
            let tokens = if has_standard_content { message.sent_tokens() } else { metadata.tokens };
            (ItemJson::Text(json), tokens + tokens::count_text(&additional))
        }
    };
    let item = RenderedItem { speaker, json };
    let mut rendered = if missing.call {
        let (call, tokens_of_call) = inserted_call(metadata.result_of().unwrap_or_default());
        let mut rendered = RenderedMessage::default();
        rendered.insert(call, tokens_of_call);
        rendered.items.push(item);
        rendered.tokens += tokens;
        rendered
    } else {
        RenderedMessage::of(item, tokens)
    };
    rendered.insert_results(missing, inserted_result);
    rendered
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
    let (stable_items, tokens) = input.stable_items();
    let system = &input.system_json;
    let system = (!system.is_empty()).then(|| format!(r#"{{"role":"system","content":"{system}"}}"#));
    let opening =
        input.has_opening().then(|| json!({"role": "user", "content": &input.opening.text}).to_string());
    let first: Vec<ItemJson<'_>> =
        system.as_deref().into_iter().chain(opening.as_deref()).map(ItemJson::from).collect();
    let is_stable = usize::from(stable_items > 0);
    let before = usize::from(system.is_some()) + usize::from(opening.is_some()) * is_stable;
    let stable = StablePrefix { messages: before + stable_items, blocks: None, tokens };
    let rendered = input.history.iter().chain(&input.user_message);
    let items = rendered.flat_map(|message| &message.items).map(|item| &item.json);
    let messages = MessageList::new(input.tail, first.iter().chain(items));
    let extra = input.extra(|item| first.len() + item);
    RenderedContext { messages, stable, extra, ..RenderedContext::default() }
}
