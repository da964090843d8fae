//! A message of the chat format as content blocks.

use super::EMPTY;
use super::block::{Block, Source, input};
use super::ids::{Ids, tool_name};
use crate::domain::message::{Message, Role};
use crate::domain::tokens;
use serde::Deserialize;
use serde_json::Value;

/// The kinds of images that Anthropic takes.
const IMAGES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];
/// Characters of a file's name that are said of a file that is left out, or stand above one that is not.
const NAME_CHARS: usize = 200;

/// What a message says in blocks.
pub(super) struct Converted {
    pub(super) blocks: Vec<Block>,
    pub(super) tokens: i64,
}

/// Converts a message. `stored` are the tokens that were counted when it was stored: they are counted anew only where
/// what it says in blocks is something else.
pub(super) fn convert(message: &Message, stored: i64, ids: &Ids) -> Converted {
    let (mut content, mut same) = content(message);
    let has_text = content.iter().any(|block| matches!(block, Block::Text { .. }));
    // It is counted with every message, and said of users alone: an assistant that sees it begins to write it, too.
    let name = message.name().filter(|name| !name.trim().is_empty());
    let mut blocks = Vec::new();
    let mut called = 0;
    match message.role() {
        Role::Tool => {
            let tool_use_id = ids.of(message.tool_call_id().unwrap_or_default());
            same &= message.tool_call_id() == Some(tool_use_id.as_str());
            blocks.push(Block::ToolResult { tool_use_id, content });
        }
        Role::User => {
            if let Some(name) = name {
                let said = Block::Text { text: format!("{name}:") };
                called = said.tokens();
                blocks.push(said);
            }
            blocks.append(&mut content);
        }
        Role::Assistant => {
            blocks.append(&mut content);
            for call in message.tool_calls() {
                let id = ids.of(&call.id);
                let name = tool_name(&call.name);
                let input = input(&call.arguments);
                same &= id == call.id && name == call.name && input.get() == call.arguments;
                blocks.push(Block::ToolUse { id, name, input });
            }
        }
    }
    if blocks.is_empty() {
        blocks.push(Block::text(EMPTY));
        same = false;
    }
    let tokens = if same {
        let without_text = if has_text || message.role() == Role::Tool { 0 } else { tokens::PER_MESSAGE };
        stored - message.name().map_or(0, tokens::of_text) - without_text + called
    } else {
        blocks.iter().map(Block::tokens).sum()
    };
    Converted { blocks, tokens }
}

/// The content as blocks, and whether they say what was counted.
fn content(message: &Message) -> (Vec<Block>, bool) {
    #[derive(Deserialize)]
    struct Parts {
        content: Value,
    }
    let text = |text: &str| {
        // At the end of the list, white space behind the assistant's last word is refused.
        let kept = if message.role() == Role::Assistant { text.trim_end() } else { text };
        let block = (!kept.trim().is_empty()).then(|| Block::text(kept));
        (block.is_some() && kept.len() == text.len() || text.is_empty(), block)
    };
    let list = serde_json::from_str::<Parts>(message.json()).ok().map(|parts| parts.content);
    let Some(Value::Array(parts)) = list.filter(|_| message.has_parts()) else {
        let (same, block) = text(message.content());
        return (block.into_iter().collect(), same);
    };
    // Several texts were counted as one.
    let texts = parts.iter().filter(|part| matches!(kind(part), "text" | "refusal")).count();
    let mut all_same = texts + usize::from(message.refusal().is_some()) <= 1;
    let mut blocks = Vec::with_capacity(parts.len());
    for part in parts {
        let (same, block) = match kind(&part) {
            "text" => text(field(&part, "text")),
            "refusal" => text(field(&part, "refusal")),
            _ if message.role() == Role::Assistant => (false, Some(left_out(&part))),
            _ => {
                attachment(&part).map_or_else(|| (false, Some(left_out(&part))), |block| (true, Some(block)))
            }
        };
        all_same &= same;
        blocks.extend(block);
    }
    if let Some(refusal) = message.refusal() {
        let (same, block) = text(refusal);
        all_same &= same;
        blocks.extend(block);
    }
    (blocks, all_same)
}

/// A string inside the part; empty where there is none.
fn field<'a>(part: &'a Value, pointer: &str) -> &'a str {
    part.pointer(&format!("/{pointer}")).and_then(Value::as_str).unwrap_or_default()
}

fn kind(part: &Value) -> &str {
    field(part, "type")
}

/// An image or a file, if it is one that can be said.
fn attachment(part: &Value) -> Option<Block> {
    match kind(part) {
        "image_url" => {
            let url = field(part, "image_url/url");
            let source = match base64(url) {
                Some((kind, data)) => {
                    let kind = if kind == "image/jpg" { "image/jpeg" } else { kind };
                    let media_type = IMAGES.contains(&kind).then(|| kind.to_owned())?;
                    Source::Base64 { media_type, data: data.to_owned() }
                }
                None => Source::Url { url: url.strip_prefix("https://").map(|_| url.to_owned())? },
            };
            Some(Block::Image { source })
        }
        "file" => {
            let (media_type, data) = base64(field(part, "file/file_data"))?;
            let (media_type, data) = (media_type.to_owned(), data.to_owned());
            let title = Some(name_of(part)).filter(|name| !name.trim().is_empty());
            let source = Source::Base64 { media_type, data };
            (field(part, "file/file_data").starts_with("data:application/pdf;"))
                .then_some(Block::Document { source, title })
        }
        _ => None,
    }
}

/// Kind and data of a data URL in base64 that is one.
fn base64(url: &str) -> Option<(&str, &str)> {
    let (head, data) = url.strip_prefix("data:")?.split_once(',')?;
    let kind = head.strip_suffix(";base64")?.split(';').next()?;
    let digits = data.trim_end_matches('=');
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/');
    let whole = !digits.is_empty() && data.len().is_multiple_of(4) && data.len() - digits.len() <= 2;
    (whole && digits.bytes().all(sound)).then_some((kind, data))
}

fn name_of(part: &Value) -> String {
    field(part, "file/filename").chars().take(NAME_CHARS).collect()
}

/// What stands for a part that can't be said.
fn left_out(part: &Value) -> Block {
    let name = name_of(part);
    let what = match kind(part) {
        "image_url" => "an image".to_owned(),
        "input_audio" => "audio".to_owned(),
        "file" if !name.trim().is_empty() => format!("the file {name:?}"),
        "file" => "a file".to_owned(),
        kind => format!("a part of the type {:?}", kind.chars().take(NAME_CHARS).collect::<String>()),
    };
    Block::Text { text: format!("({what} that can't be shown here)") }
}
