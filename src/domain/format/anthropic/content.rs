//! A message of the chat format as content blocks.

use super::block::{Block, Source, input};
use super::ids::{Ids, tool_name};
use super::{EMPTY, EMPTY_TOKENS};
use crate::domain::message::{Message, Role};
use crate::domain::tokens::{IncrementalCount, PER_ATTACHMENT, PER_MESSAGE, count_text};
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

/// Converts a message. `stored` are the tokens that were counted when it was stored.
///
/// **The rule**, the same figures as for a message of the chat format: [`PER_MESSAGE`] for each block but images and
/// documents, which are [`PER_ATTACHMENT`] each; to that its text, or ids, names and arguments. In a result, text has no
/// weight but its own. Only what differs from what was counted is counted: ids and names that are others, the words around
/// a text that is left out or parted, arguments that are no object.
pub(super) fn convert(message: &Message, stored: i64, ids: &Ids) -> Converted {
    let Content { mut blocks, tokens } = Content::of(message);
    let mut tokens = stored - PER_MESSAGE + tokens;
    // It is counted with every message, and said of users alone: an assistant that sees it begins to write it, too.
    let name = message.name().unwrap_or_default();
    tokens -= count_text(name);
    match message.role() {
        Role::Tool => {
            let given = message.tool_call_id().unwrap_or_default();
            let tool_use_id = ids.of(given);
            tokens += PER_MESSAGE + change(given, &tool_use_id);
            blocks = vec![Block::ToolResult { tool_use_id, content: blocks }];
        }
        Role::User if !name.trim().is_empty() => {
            let said = format!("{name}:");
            tokens += count_text(&said);
            blocks.insert(0, Block::Text { text: said });
        }
        Role::User => {}
        Role::Assistant => {
            for call in message.tool_calls() {
                let id = ids.of(&call.id);
                let name = tool_name(&call.name);
                let input = input(&call.arguments);
                tokens += change(&call.id, &id) + change(&call.name, &name);
                tokens += change(&call.arguments, input.get());
                blocks.push(Block::ToolUse { id, name, input });
            }
        }
    }
    if blocks.is_empty() {
        tokens += *EMPTY_TOKENS;
        blocks.push(Block::text(EMPTY));
    }
    let texts = blocks.iter().filter(|block| matches!(block, Block::Text { .. }));
    tokens += texts.map(|_| PER_MESSAGE).sum::<i64>();
    Converted { blocks, tokens }
}

/// How many more tokens the second text has.
fn change(counted: &str, said: &str) -> i64 {
    if said == counted { 0 } else { count_text(said) - count_text(counted) }
}

/// The content as blocks.
struct Content {
    blocks: Vec<Block>,
    /// How many more they have, in texts and attachments, than were counted.
    tokens: i64,
}

impl Content {
    fn of(message: &Message) -> Self {
        #[derive(Deserialize)]
        struct Parts {
            content: Vec<Value>,
        }
        let by_assistant = message.role() == Role::Assistant;
        let mut texts = Texts { by_assistant, ..Texts::default() };
        let mut content = Self { blocks: Vec::new(), tokens: 0 };
        if message.has_parts() {
            let parts = serde_json::from_str::<Parts>(message.json()).map(|parts| parts.content);
            for part in parts.unwrap_or_default() {
                let block = match kind(&part) {
                    kind @ ("text" | "refusal") => texts.block(field(&part, kind)),
                    _ => attachment(&part).filter(|_| !by_assistant).or_else(|| {
                        let text = left_out(&part);
                        content.tokens += count_text(&text) - PER_ATTACHMENT;
                        Some(Block::Text { text })
                    }),
                };
                content.blocks.extend(block);
            }
            content.blocks.extend(message.refusal().and_then(|refusal| texts.block(refusal)));
        } else {
            content.blocks.extend(texts.block(message.content()));
        }
        content.tokens += texts.recount.total();
        content
    }
}

/// Texts as blocks; they were counted as one, joined by line feeds.
#[derive(Default)]
struct Texts {
    by_assistant: bool,
    begun: bool,
    recount: IncrementalCount,
}

impl Texts {
    fn block(&mut self, text: &str) -> Option<Block> {
        if text.is_empty() {
            return None;
        }
        if std::mem::replace(&mut self.begun, true) {
            self.recount.end();
            self.recount.cut("\n");
        }
        // At the end of the list, white space behind the assistant's last word is refused.
        let kept = if self.by_assistant { text.trim_end() } else { text };
        let kept = if kept.trim().is_empty() { "" } else { kept };
        self.recount.keep(kept);
        self.recount.cut(text.get(kept.len()..).unwrap_or_default());
        (!kept.is_empty()).then(|| Block::text(kept))
    }
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
fn left_out(part: &Value) -> String {
    let name = name_of(part);
    let what = match kind(part) {
        "image_url" => "an image".to_owned(),
        "input_audio" => "audio".to_owned(),
        "file" if !name.trim().is_empty() => format!("the file {name:?}"),
        "file" => "a file".to_owned(),
        kind => format!("a part of the type {:?}", kind.chars().take(NAME_CHARS).collect::<String>()),
    };
    format!("({what} that can't be shown here)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(json: &str, stored: i64) -> i64 {
        let message = Message::from_stored(json.to_owned()).expect("a message");
        convert(&message, stored, &Ids::default()).tokens
    }

    /// A count is believed, be it wrong; the lists of `tests/api/contexts/lists.rs` show that the difference is right.
    #[test]
    fn what_was_counted_is_not_counted_again() {
        for json in [
            r#"{"role":"user","name":"Ada","content":"Hello."}"#,
            r#"{"role":"user","content":" \n"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"One, two."},{"type":"text","text":"Three!"},{"type":"x"}]}"#,
            r#"{"role":"assistant","content":"Well. \n","refusal":"No. "}"#,
            r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a:1","function":{"name":"f.g","arguments":""}}]}"#,
            r#"{"role":"assistant","content":"","tool_calls":[{"id":"a","function":{"name":"f","arguments":"[1"}}]}"#,
            r#"{"role":"tool","tool_call_id":"a:1","content":[{"type":"text","text":"A"},{"type":"text","text":" "}]}"#,
        ] {
            assert_eq!(tokens(json, 2_000_000) - tokens(json, 1_000_000), 1_000_000, "{json}");
        }
    }
}
