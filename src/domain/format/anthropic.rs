//! Anthropic's messages: `system` beside the messages, content blocks in place of text, parts and calls; two voices that
//! take turns, of which the user's is the first.

use super::pairs::{EARLIER_CALL, Inserts, NO_RESULT, tokens_of_call, tokens_of_result};
use super::{Draft, List, Part, Piece, Stable, Voice};
use crate::domain::message::{Invalid, Message, Role};
use crate::domain::message_metadata::ContextMessage;
use crate::domain::tokens;
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

static EMPTY_TOKENS: LazyLock<i64> = LazyLock::new(|| tokens::of_text(EMPTY));
static OPENING_TOKENS: LazyLock<i64> = LazyLock::new(|| tokens::of_text(OPENING));

/// What a message becomes.
pub(super) fn piece(
    message: ContextMessage,
    inserts: &Inserts,
    ids: &mut Ids,
) -> Result<Piece, Vec<Invalid>> {
    let ContextMessage { seq, metadata, json } = message;
    let mut piece = Piece::default();
    if let (true, Some(id)) = (inserts.call, metadata.result_of.as_deref()) {
        let id = ids.open(id, seq);
        let tokens = tokens_of_call(&id);
        let call = Block::ToolUse { id, name: EARLIER_CALL.to_owned(), input: block::no_input() };
        piece.insert(part(Voice::Assistant, &call), tokens);
    }
    for id in &metadata.calls {
        ids.open(id, seq);
    }
    let read = Message::from_stored(json)?;
    let converted = content::convert(&read, metadata.tokens, ids);
    let voice = if read.role() == Role::Assistant { Voice::Assistant } else { Voice::User };
    piece.parts.extend(converted.blocks.iter().map(|block| part(voice, block)));
    piece.tokens += converted.tokens;
    piece.insert_results(inserts, |id| {
        let (tool_use_id, content) = (ids.of(id), vec![Block::text(NO_RESULT)]);
        let tokens = tokens_of_result(&tool_use_id);
        (part(Voice::User, &Block::ToolResult { tool_use_id, content }), tokens)
    });
    if piece.parts.first().is_some_and(|part| part.voice == Voice::Assistant) {
        piece.tokens_as_first = tokens::PER_MESSAGE + *OPENING_TOKENS;
    }
    Ok(piece)
}

fn part(voice: Voice, block: &Block) -> Part {
    Part { voice, json: json(block) }
}

/// The list: blocks of one voice in a row are one message. A mark for the cache stands at the end of the system text and
/// of the last stable block: two of the four that there may be.
pub(super) fn list(draft: Draft) -> List {
    let (stable, tokens) = draft.stable();
    let mark = draft.cache_control;
    let system = (!draft.system.is_empty()).then(|| {
        if mark { format!("[{}]", marked(&json(&Block::text(&draft.system)))) } else { json(&draft.system) }
    });
    let mut parts: Vec<Part> = Vec::new();
    let pieces = draft.history.into_iter().chain(draft.user_message);
    parts.extend(pieces.flat_map(|piece| piece.parts));
    let mut stable = stable;
    if parts.first().is_some_and(|part| part.voice == Voice::Assistant) {
        parts.insert(0, part(Voice::User, &Block::text(OPENING)));
        stable += usize::from(stable > 0);
    }
    let mut messages: Vec<(Voice, Vec<String>)> = Vec::new();
    let mut same = Stable { tokens, blocks: Some(0), messages: 0 };
    for (at, Part { voice, mut json }) in parts.into_iter().enumerate() {
        if mark && at + 1 == stable {
            json = marked(&json);
        }
        match messages.last_mut().filter(|(before, _)| *before == voice) {
            Some((_, blocks)) => blocks.push(json),
            None => messages.push((voice, vec![json])),
        }
        if at < stable {
            same.messages = messages.len();
            same.blocks = messages.last().map(|(_, blocks)| blocks.len());
        }
    }
    let messages = messages.into_iter().map(|(voice, blocks)| {
        let role = if voice == Voice::User { "user" } else { "assistant" };
        format!(r#"{{"role":"{role}","content":[{}]}}"#, blocks.join(","))
    });
    List { system, messages: messages.collect(), stable: same, ..List::default() }
}

/// A block with the mark up to which the provider caches.
fn marked(block: &str) -> String {
    let open = block.strip_suffix('}').unwrap_or(block);
    format!(r#"{open},"cache_control":{{"type":"ephemeral"}}}}"#)
}

fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("strings and raw JSON are always JSON"))
}
