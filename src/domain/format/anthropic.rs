//! Anthropic's messages: `system` beside the messages, content blocks in place of text, parts and calls; two voices that
//! take turns, of which the user's is the first.

use super::tool_pairing::{EARLIER_CALL, MissingHalves, NO_RESULT, tokens_of_call, tokens_of_result};
use super::{Part, RenderInput, RenderedContext, RenderedMessage, Speaker, StablePrefix};
use crate::domain::message::{Message, Role};
use crate::domain::message_metadata::ContextMessage;
use crate::domain::tokens;
use crate::domain::validation::FieldError;
use block::Block;
pub(super) use ids::Ids;
use serde::Serialize;
use std::sync::LazyLock;

mod block;
mod content;
mod ids;

/// What a message says that has nothing to say: a message without content is refused.
const EMPTY: &str = "(empty message)";
/// What a list begins with whose first message is the assistant's.
const OPENING: &str = "(The conversation began earlier.)";

static EMPTY_TOKENS: LazyLock<i64> = LazyLock::new(|| tokens::count_text(EMPTY));
static OPENING_TOKENS: LazyLock<i64> = LazyLock::new(|| tokens::count_text(OPENING));

/// What a message becomes.
pub(super) fn piece(
    message: ContextMessage,
    missing_halves: &MissingHalves,
    ids: &mut Ids,
) -> Result<RenderedMessage, Vec<FieldError>> {
    let ContextMessage { seq, metadata, json } = message;
    let mut piece = RenderedMessage::default();
    if let (true, Some(id)) = (missing_halves.call, metadata.result_of.as_deref()) {
        let id = ids.open(id, seq);
        let tokens = tokens_of_call(&id);
        let call = Block::ToolUse { id, name: EARLIER_CALL.to_owned(), input: block::no_input() };
        piece.insert(part(Speaker::Assistant, &call), tokens);
    }
    for id in &metadata.calls {
        ids.open(id, seq);
    }
    let read = Message::from_stored(json)?;
    let converted = content::convert(&read, metadata.tokens, ids);
    let speaker = if read.role() == Role::Assistant { Speaker::Assistant } else { Speaker::User };
    piece.parts.extend(converted.blocks.iter().map(|block| part(speaker, block)));
    piece.tokens += converted.tokens;
    piece.insert_results(missing_halves, |id| {
        let (tool_use_id, content) = (ids.of(id), vec![Block::text(NO_RESULT)]);
        let tokens = tokens_of_result(&tool_use_id);
        (part(Speaker::User, &Block::ToolResult { tool_use_id, content }), tokens)
    });
    if piece.parts.first().is_some_and(|part| part.speaker == Speaker::Assistant) {
        piece.tokens_as_first = tokens::PER_MESSAGE + *OPENING_TOKENS;
    }
    Ok(piece)
}

fn part(speaker: Speaker, block: &Block) -> Part {
    Part { speaker, json: json(block) }
}

/// The list: blocks of one speaker in a row are one message. A mark for the cache stands at the end of the system text and
/// of the last stable block: two of the four that there may be.
pub(super) fn list(draft: RenderInput) -> RenderedContext {
    let (stable, tokens) = draft.stable();
    let mark = draft.cache_control;
    let system = (!draft.system.is_empty()).then(|| {
        if mark { format!("[{}]", marked(&json(&Block::text(&draft.system)))) } else { json(&draft.system) }
    });
    let mut parts: Vec<Part> = Vec::new();
    let pieces = draft.history.into_iter().chain(draft.user_message);
    parts.extend(pieces.flat_map(|piece| piece.parts));
    let mut stable = stable;
    if parts.first().is_some_and(|part| part.speaker == Speaker::Assistant) {
        parts.insert(0, part(Speaker::User, &Block::text(OPENING)));
        stable += usize::from(stable > 0);
    }
    let mut messages: Vec<(Speaker, Vec<String>)> = Vec::new();
    let mut same = StablePrefix { tokens, blocks: Some(0), messages: 0 };
    for (at, Part { speaker, mut json }) in parts.into_iter().enumerate() {
        if mark && at + 1 == stable {
            json = marked(&json);
        }
        match messages.last_mut().filter(|(before, _)| *before == speaker) {
            Some((_, blocks)) => blocks.push(json),
            None => messages.push((speaker, vec![json])),
        }
        if at < stable {
            same.messages = messages.len();
            same.blocks = messages.last().map(|(_, blocks)| blocks.len());
        }
    }
    let messages = messages.into_iter().map(|(speaker, blocks)| {
        let role = if speaker == Speaker::User { "user" } else { "assistant" };
        format!(r#"{{"role":"{role}","content":[{}]}}"#, blocks.join(","))
    });
    RenderedContext { system, messages: messages.collect(), stable: same, ..RenderedContext::default() }
}

/// A block with the mark up to which the provider caches.
fn marked(block: &str) -> String {
    let open = block.strip_suffix('}').unwrap_or(block);
    format!(r#"{open},"cache_control":{{"type":"ephemeral"}}}}"#)
}

fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("strings and raw JSON are always JSON"))
}
