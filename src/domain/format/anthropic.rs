//! The Anthropic format: `system` outside of the messages, content blocks instead of text, content parts and tool calls,
//! and messages of user and assistant in alternation, the user first.

use super::tool_pairing::{
    EARLIER_CALL, MissingHalves, NO_ARGUMENTS, NO_RESULT, tokens_of_call, tokens_of_result,
};
use super::types::{
    ItemJson, MessageList, RenderInput, RenderedContext, RenderedItem, RenderedMessage, Speaker, StablePrefix,
};
use crate::domain::json_validation::{MAX_JSON_DEPTH, check_json};
use crate::domain::message::{
    AnthropicBlock, BlockSize, Message, Role, anthropic_blocks, describe_attachment, plain_text,
};
use crate::domain::tail::TailMessage;
use crate::domain::tokens::{JoinedCount, PER_ATTACHMENT, PER_MESSAGE, count_text};
use crate::domain::validation::FieldError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

/// Text of a message that has no content, because the API rejects empty content.
const EMPTY_MESSAGE: &str = "(empty message)";
/// Image types that the API accepts.
const IMAGE_TYPES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];
/// Number of characters of a file name that are shown to the model.
const MAX_NAME_CHARS: usize = 200;
/// Longest id or name that the API accepts.
const MAX_ID_CHARS: usize = 128;

static EMPTY_MESSAGE_TOKENS: LazyLock<i64> = LazyLock::new(|| count_text(EMPTY_MESSAGE));

/// A content block.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    Text {
        text: String,
    },
    Image {
        source: BlockSource,
    },
    Document {
        source: BlockSource,
        #[serde(skip_serializing_if = "Option::is_none")]
        title: Option<String>,
    },
    ToolUse {
        id: String,
        name: String,
        input: Box<RawValue>,
    },
    ToolResult {
        tool_use_id: String,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        content: Vec<ContentBlock>,
    },
}

/// The data of an image or a document.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BlockSource {
    Base64 { media_type: String, data: String },
    Url { url: String },
}

impl ContentBlock {
    fn text(text: &str) -> Self {
        Self::Text { text: text.to_owned() }
    }

    fn into_item(self, speaker: Speaker) -> RenderedItem<'static> {
        RenderedItem { speaker, json: encode(&self).into() }
    }
}

pub(super) fn render_message<'t>(
    message: TailMessage<'t>,
    missing: &MissingHalves<'_>,
    ids: &mut CallIds,
) -> Result<RenderedMessage<'t>, Vec<FieldError>> {
    let (seq, metadata) = (message.seq(), message.metadata);
    let mut rendered = RenderedMessage::default();
    if let (true, Some(id)) = (missing.call, metadata.result_of()) {
        let id = ids.assign(id, seq);
        let tokens = tokens_of_call(&id);
        let name = EARLIER_CALL.to_owned();
        let call = ContentBlock::ToolUse { id, name, input: raw_json(NO_ARGUMENTS.to_owned()) };
        rendered.insert(call.into_item(Speaker::Assistant), tokens);
    }
    for id in metadata.calls() {
        ids.assign(id, seq);
    }
    let speaker = if metadata.role == Role::Assistant { Speaker::Assistant } else { Speaker::User };
    if let Some(item) = render_plain_message(message.json(), speaker) {
        rendered.items.push(item);
        rendered.tokens += metadata.tokens;
    } else {
        let (items, tokens) = match render_recorded_blocks(&message, ids) {
            Some(rendered) => rendered,
            None => render_chat_message(&message, speaker, ids)?,
        };
        rendered.items.extend(items);
        rendered.tokens += tokens;
    }
    rendered.insert_results(missing, |id| {
        let (tool_use_id, content) = (ids.get(id), vec![ContentBlock::text(NO_RESULT)]);
        let tokens = tokens_of_result(&tool_use_id);
        (ContentBlock::ToolResult { tool_use_id, content }.into_item(Speaker::User), tokens)
    });
    Ok(rendered)
}

/// Renders a message that consists of a role and a text, without parsing it. Returns `None` for other messages, and for a text with
/// white space or an escape at its beginning or end, which can be blank, or end with white space that is removed.
fn render_plain_message(json: &str, speaker: Speaker) -> Option<RenderedItem<'static>> {
    const LONGEST_ESCAPE: usize = r"\u0020".len();
    let text = plain_text(json)?;
    let end = text.as_bytes().iter().rev().take(LONGEST_ESCAPE);
    let is_trimmed = !text.starts_with(char::is_whitespace) && !text.ends_with(char::is_whitespace);
    let may_be_blank = text.is_empty() || text.starts_with('\\') || end.copied().any(|byte| byte == b'\\');
    (is_trimmed && !may_be_blank).then(|| RenderedItem { speaker, json: text_block(text).into() })
}

/// Returns a text block. `text_json` is the text as the inside of a JSON string.
fn text_block(text_json: &str) -> String {
    format!(r#"{{"type":"text","text":"{text_json}"}}"#)
}

/// Renders a message that was recorded in the Anthropic format: its blocks as they were sent, with ids that are unique in
/// the list. Returns `None` for other messages.
fn render_recorded_blocks(
    message: &TailMessage<'_>,
    ids: &CallIds,
) -> Option<(Vec<RenderedItem<'static>>, i64)> {
    let by_assistant = message.metadata.role == Role::Assistant;
    // Such a message is never sent as it is stored in the chat format.
    let counted = message.anthropic_tokens()?;
    let mut blocks = anthropic_blocks(message.json(), by_assistant)?;
    let mut is_unchanged = true;
    for block in &mut blocks {
        let id = block.call_id().map(|(key, stored)| (key, ids.get(&stored), stored));
        if let Some((key, id, _)) = id.filter(|(_, id, stored)| id != stored) {
            block.set(key, &id);
            is_unchanged = false;
        }
        if let Some(name) = block.tool_name().filter(|name| *name != tool_name(name)) {
            block.set("name", &tool_name(&name));
            is_unchanged = false;
        }
    }
    let speaker = if by_assistant { Speaker::Assistant } else { Speaker::User };
    let mut items = Vec::with_capacity(blocks.len());
    let mut chat_tokens = 0;
    for block in &blocks {
        match block {
            AnthropicBlock::Block { json, .. } => {
                items.push(RenderedItem { speaker, json: json.clone().into() });
            }
            AnthropicBlock::ChatPart(json) => {
                if let Some(block) = render_part(json, by_assistant) {
                    chat_tokens += match &block {
                        ContentBlock::Text { text } => PER_MESSAGE + count_text(text),
                        _ => PER_ATTACHMENT,
                    };
                    items.push(block.into_item(speaker));
                }
            }
        }
    }
    // A message can have calls of the chat format next to its blocks.
    let own: HashSet<String> = blocks.iter().filter_map(|block| Some(block.call_id()?.1)).collect();
    if by_assistant && message.metadata.calls().iter().any(|id| !own.contains(&ids.get(id))) {
        let stored = Message::from_stored(message.json().to_owned()).ok()?;
        for call in stored.tool_calls().iter().filter(|call| !own.contains(&ids.get(&call.id))) {
            let (id, name, input) = (ids.get(&call.id), tool_name(&call.name), tool_input(&call.arguments));
            chat_tokens += PER_MESSAGE + count_text(&id) + count_text(&name) + count_text(input.get());
            items.push(ContentBlock::ToolUse { id, name, input }.into_item(speaker));
        }
    }
    if items.is_empty() {
        items.push(ContentBlock::text(EMPTY_MESSAGE).into_item(speaker));
        return Some((items, PER_MESSAGE + *EMPTY_MESSAGE_TOKENS));
    }
    let count = || blocks.iter().map(tokens_of_block).sum();
    let tokens = if is_unchanged { *counted.get_or_init(count) } else { count() };
    Some((items, tokens + chat_tokens))
}

fn tokens_of_block(block: &AnthropicBlock) -> i64 {
    let BlockSize { texts, attachments } = block.size();
    let attachments = i64::try_from(attachments).unwrap_or(i64::MAX).saturating_mul(PER_ATTACHMENT);
    // Parts of the chat format are counted by the caller.
    let per_block = match block {
        AnthropicBlock::Block { kind, .. } if attachments == 0 || kind == "tool_result" => PER_MESSAGE,
        _ => 0,
    };
    per_block + attachments + texts.iter().map(|text| count_text(text)).sum::<i64>()
}

/// Renders a part of the chat format by itself.
fn render_part(json: &str, by_assistant: bool) -> Option<ContentBlock> {
    let message = format!(r#"{{"role":"user","content":[{json}]}}"#);
    let message = Message::from_stored(message).ok()?;
    let message = message.standard().unwrap_or(message);
    render_content(&message, by_assistant).0.into_iter().next()
}

fn render_chat_message(
    message: &TailMessage<'_>,
    speaker: Speaker,
    ids: &CallIds,
) -> Result<(Vec<RenderedItem<'static>>, i64), Vec<FieldError>> {
    // Here, results of tools may contain images, so they must come from the stored message.
    let json = if message.lacks_attachments() { message.json() } else { message.sent_json() };
    let parsed = Message::from_stored(json.to_owned())?;
    let parsed = parsed.standard().unwrap_or(parsed);
    // The standard form replaces characters of a name that only the chat format does not permit.
    let stored = match parsed.name() {
        Some(_) if message.sent_form().is_some() => Some(Message::from_stored(message.json().to_owned())?),
        _ => None,
    };
    let name = stored.as_ref().unwrap_or(&parsed).name().unwrap_or_default();
    let (blocks, tokens) = render_blocks(&parsed, name, message.metadata.tokens, ids);
    Ok((blocks.into_iter().map(|block| block.into_item(speaker)).collect(), tokens))
}

/// Renders the list. Consecutive blocks of one speaker become one message. With `cache_control`, the system text and the
/// last stable block are marked for the cache: two of the four marks that the API permits.
pub(super) fn render_context(input: RenderInput<'_>) -> RenderedContext {
    let (mut stable_items, tokens) = input.stable_items();
    let cache_control = input.cache_control;
    let system = &input.system_json;
    let system = (!system.is_empty()).then(|| {
        if cache_control {
            format!("[{}]", with_cache_control(&text_block(system)))
        } else {
            format!("\"{system}\"")
        }
    });
    let positions = positions(&input.history);
    let extra = input.extra(|item| positions.get(item).copied().unwrap_or_default());
    let opening = input.has_opening().then(|| input.opening.clone());
    let rendered = input.history.into_iter().chain(input.user_message);
    let mut items: Vec<RenderedItem<'_>> = rendered.flat_map(|message| message.items).collect();
    if let Some(opening) = opening {
        items.insert(0, ContentBlock::text(&opening.text).into_item(Speaker::User));
        stable_items += usize::from(stable_items > 0);
    }
    let mut messages: Vec<(Speaker, Vec<ItemJson<'_>>)> = Vec::new();
    let mut stable = StablePrefix { tokens, blocks: Some(0), messages: 0 };
    for (index, RenderedItem { speaker, mut json }) in items.into_iter().enumerate() {
        if cache_control && index + 1 == stable_items {
            json = with_cache_control(json.as_str()).into();
        }
        match messages.last_mut().filter(|(previous, _)| *previous == speaker) {
            Some((_, blocks)) => blocks.push(json),
            None => messages.push((speaker, vec![json])),
        }
        if index < stable_items {
            stable.messages = messages.len();
            stable.blocks = messages.last().map(|(_, blocks)| blocks.len());
        }
    }
    let messages = messages.into_iter().map(|(speaker, blocks)| {
        let role = if speaker == Speaker::User { "user" } else { "assistant" };
        let blocks: Vec<&str> = blocks.iter().map(ItemJson::as_str).collect();
        format!(r#"{{"role":"{role}","content":[{}]}}"#, blocks.join(",")).into()
    });
    let messages: Vec<ItemJson<'_>> = messages.collect();
    let messages = MessageList::new(None, messages.iter());
    RenderedContext { system, messages, stable, extra, ..RenderedContext::default() }
}

/// Returns the position in the list of the message that contains each block, if any field `extra` was requested.
fn positions(history: &[RenderedMessage<'_>]) -> Vec<usize> {
    if history.iter().all(|message| message.extra.is_none()) {
        return Vec::new();
    }
    // The list begins with the user, even if the history does not.
    let (mut position, mut previous) = (0, Speaker::User);
    let items = history.iter().flat_map(|message| &message.items);
    let next = |item: &RenderedItem<'_>| {
        position += usize::from(item.speaker != previous);
        previous = item.speaker;
        position
    };
    items.map(next).collect()
}

/// Marks a block as the end of a prefix that the provider caches.
fn with_cache_control(block: &str) -> String {
    let open = block.strip_suffix('}').unwrap_or(block);
    format!(r#"{open},"cache_control":{{"type":"ephemeral"}}}}"#)
}

/// Converts a message in its standard form to blocks and returns them with their tokens. `name` is the recorded one;
/// `stored_tokens` was counted when the message was stored.
///
/// The figures are those of the chat format: [`PER_MESSAGE`] for each block except images and documents, which count
/// [`PER_ATTACHMENT`] each, plus the tokens of texts, ids, names and arguments. The text of a result counts without
/// [`PER_MESSAGE`]. Only differences from the stored message are counted: changed ids and names, replacements of omitted
/// parts, tokens at the boundaries of split texts, and arguments that are not an object.
fn render_blocks(
    message: &Message,
    name: &str,
    stored_tokens: i64,
    ids: &CallIds,
) -> (Vec<ContentBlock>, i64) {
    let (mut blocks, additional_tokens) = render_content(message, message.role() == Role::Assistant);
    let mut tokens = stored_tokens - PER_MESSAGE + additional_tokens;
    // The stored count includes the name. Only names of users are rendered: a model that sees a name before its own
    // messages begins to write it itself.
    tokens -= message.name().map_or(0, count_text);
    match message.role() {
        Role::Tool => {
            let stored_id = message.tool_call_id().unwrap_or_default();
            let tool_use_id = ids.get(stored_id);
            tokens += PER_MESSAGE + token_difference(stored_id, &tool_use_id);
            blocks = vec![ContentBlock::ToolResult { tool_use_id, content: blocks }];
        }
        Role::User if !name.trim().is_empty() => {
            let text = format!("{name}:");
            tokens += count_text(&text);
            blocks.insert(0, ContentBlock::Text { text });
        }
        Role::User => {}
        Role::Assistant => {
            for call in message.tool_calls() {
                let id = ids.get(&call.id);
                let name = tool_name(&call.name);
                let input = tool_input(&call.arguments);
                tokens += token_difference(&call.id, &id) + token_difference(&call.name, &name);
                tokens += token_difference(&call.arguments, input.get());
                blocks.push(ContentBlock::ToolUse { id, name, input });
            }
        }
    }
    if blocks.is_empty() {
        tokens += *EMPTY_MESSAGE_TOKENS;
        blocks.push(ContentBlock::text(EMPTY_MESSAGE));
    }
    let texts = blocks.iter().filter(|block| matches!(block, ContentBlock::Text { .. }));
    tokens += texts.map(|_| PER_MESSAGE).sum::<i64>();
    (blocks, tokens)
}

fn token_difference(stored: &str, rendered: &str) -> i64 {
    if rendered == stored { 0 } else { count_text(rendered) - count_text(stored) }
}

/// Converts the content to blocks and returns them with the number of tokens that they have more than the stored content.
fn render_content(message: &Message, by_assistant: bool) -> (Vec<ContentBlock>, i64) {
    #[derive(Deserialize)]
    struct ContentParts {
        content: Vec<Value>,
    }
    let mut texts = TextBlocks { by_assistant, ..TextBlocks::default() };
    if !message.has_parts() {
        let block = texts.render(message.content());
        return (block.into_iter().collect(), texts.additional_tokens());
    }
    let parts = serde_json::from_str::<ContentParts>(message.json()).map(|parts| parts.content);
    let (mut blocks, mut tokens) = (Vec::new(), 0);
    for part in parts.unwrap_or_default() {
        let block = match part_type(&part) {
            kind @ ("text" | "refusal") => texts.render(string_at(&part, kind)),
            _ => attachment(&part).filter(|_| !by_assistant).or_else(|| {
                let text = describe_attachment(part_type(&part), &file_name(&part));
                tokens += count_text(&text) - PER_ATTACHMENT;
                Some(ContentBlock::Text { text })
            }),
        };
        blocks.extend(block);
    }
    blocks.extend(message.refusal().and_then(|refusal| texts.render(refusal)));
    (blocks, tokens + texts.additional_tokens())
}

/// Renders the texts of a message. They were counted as one text, joined by line feeds.
#[derive(Default)]
struct TextBlocks {
    by_assistant: bool,
    texts: usize,
    /// The stored text, with each part counted as 0.
    stored: JoinedCount,
    /// Tokens of removed white space, negative.
    removed: i64,
}

impl TextBlocks {
    fn render(&mut self, text: &str) -> Option<ContentBlock> {
        if text.is_empty() {
            return None;
        }
        if self.texts > 0 {
            self.stored.push("\n");
        }
        self.texts += 1;
        self.stored.push_counted(text, 0);
        // The API rejects white space at the end of the list if the assistant speaks last.
        let rendered = if self.by_assistant { text.trim_end() } else { text };
        let rendered = if rendered.trim().is_empty() { "" } else { rendered };
        if rendered.len() < text.len() {
            let mut whole = JoinedCount::default();
            whole.push_counted(rendered, 0);
            whole.push(text.get(rendered.len()..).unwrap_or_default());
            self.removed -= whole.total();
        }
        (!rendered.is_empty()).then(|| ContentBlock::text(rendered))
    }

    /// Returns the tokens that the blocks have more than the stored text.
    fn additional_tokens(&self) -> i64 {
        self.removed - if self.texts > 1 { self.stored.total() } else { 0 }
    }
}

/// Returns the arguments of a call: an object verbatim, and any other text as the only field of an object.
fn tool_input(arguments: &str) -> Box<RawValue> {
    #[derive(Serialize)]
    struct InvalidArguments<'a> {
        arguments: &'a str,
    }
    let text = arguments.trim_ascii();
    if text.is_empty() {
        return raw_json(NO_ARGUMENTS.to_owned());
    }
    // Arguments are nested deeper in the list than in the stored message, where they are a string.
    if text.starts_with('{') && check_json(text, MAX_JSON_DEPTH - 8, usize::MAX).is_ok() {
        return raw_json(text.to_owned());
    }
    raw_json(encode(&InvalidArguments { arguments }))
}

fn raw_json(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap_or_else(|_| unreachable!("callers pass valid JSON"))
}

fn encode<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("strings and raw JSON are always JSON"))
}

/// Returns the string at a JSON pointer inside the part, or an empty string.
fn string_at<'a>(part: &'a Value, pointer: &str) -> &'a str {
    part.pointer(&format!("/{pointer}")).and_then(Value::as_str).unwrap_or_default()
}

fn part_type(part: &Value) -> &str {
    string_at(part, "type")
}

/// Converts an image or a PDF file, if the API supports it.
fn attachment(part: &Value) -> Option<ContentBlock> {
    match part_type(part) {
        "image_url" => {
            let url = string_at(part, "image_url/url");
            let source = match parse_data_url(url) {
                Some((media_type, data)) => {
                    let media_type = if media_type == "image/jpg" { "image/jpeg" } else { media_type };
                    let media_type = IMAGE_TYPES.contains(&media_type).then(|| media_type.to_owned())?;
                    BlockSource::Base64 { media_type, data: data.to_owned() }
                }
                None => BlockSource::Url { url: url.strip_prefix("https://").map(|_| url.to_owned())? },
            };
            Some(ContentBlock::Image { source })
        }
        "file" => {
            let data_url = string_at(part, "file/file_data");
            let (media_type, data) = parse_data_url(data_url)?;
            let source = BlockSource::Base64 { media_type: media_type.to_owned(), data: data.to_owned() };
            let title = Some(file_name(part)).filter(|name| !name.trim().is_empty());
            data_url.starts_with("data:application/pdf;").then_some(ContentBlock::Document { source, title })
        }
        _ => None,
    }
}

/// Returns media type and data of a data URL with valid base64.
fn parse_data_url(url: &str) -> Option<(&str, &str)> {
    let (head, data) = url.strip_prefix("data:")?.split_once(',')?;
    let media_type = head.strip_suffix(";base64")?.split(';').next()?;
    let digits = data.trim_end_matches('=');
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    let is_complete = !digits.is_empty() && data.len().is_multiple_of(4) && data.len() - digits.len() <= 2;
    (is_complete && digits.bytes().all(is_digit)).then_some((media_type, data))
}

fn file_name(part: &Value) -> String {
    string_at(part, "file/filename").chars().take(MAX_NAME_CHARS).collect()
}

/// Ids of tool calls in one list. The API accepts ASCII letters, digits, `_` and `-`, and each id once per list.
#[derive(Debug, Default)]
pub(super) struct CallIds {
    used: HashSet<String>,
    /// Rendered id of the latest call, by stored id.
    latest: HashMap<String, String>,
}

impl CallIds {
    /// Assigns an id to a new call of the message `seq`: the stored id if possible. A repeated id gets the number of the
    /// message as a suffix. An id that is too long or taken nevertheless is hashed.
    fn assign(&mut self, stored_id: &str, seq: i64) -> String {
        let mut id = valid_id(stored_id);
        if self.used.contains(&id) {
            id = format!("{id}_{seq}");
        }
        while id.len() > MAX_ID_CHARS || self.used.contains(&id) {
            id = hash_id(&id);
        }
        self.used.insert(id.clone());
        self.latest.insert(stored_id.to_owned(), id.clone());
        id
    }

    /// Returns the rendered id of the latest call with this stored id.
    fn get(&self, stored_id: &str) -> String {
        self.latest.get(stored_id).cloned().unwrap_or_else(|| hash_id(stored_id))
    }
}

/// Returns a valid tool name: invalid characters become `_`.
pub(super) fn tool_name(name: &str) -> String {
    let valid = |c: char| if is_id_char(c) { c } else { '_' };
    name.chars().map(valid).take(MAX_ID_CHARS).collect()
}

fn is_id_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

fn is_valid_id(id: &str) -> bool {
    (1..=MAX_ID_CHARS).contains(&id.len()) && id.chars().all(is_id_char)
}

/// Returns a valid id of a call: the stored one if possible.
pub(super) fn valid_id(id: &str) -> String {
    if is_valid_id(id) { id.to_owned() } else { hash_id(id) }
}

fn hash_id(id: &str) -> String {
    let hash = Sha256::digest(id);
    format!("call_{}", hex::encode(hash.get(..12).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rendered_tokens(json: &str, stored_tokens: i64) -> i64 {
        let message = Message::from_stored(json.to_owned()).expect("a message");
        let name = message.name().unwrap_or_default();
        render_blocks(&message, name, stored_tokens, &CallIds::default()).1
    }

    /// `tests/api/contexts/lists.rs` checks that the differences are right.
    #[test]
    fn tokens_are_counted_as_difference_from_the_stored_count() {
        for json in [
            r#"{"role":"user","name":"Ada","content":"Hello."}"#,
            r#"{"role":"user","content":" \n"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"One, two."},{"type":"text","text":"Three!"},{"type":"x"}]}"#,
            r#"{"role":"assistant","content":"Well. \n","refusal":"No. "}"#,
            r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a:1","function":{"name":"f.g","arguments":""}}]}"#,
            r#"{"role":"assistant","content":"","tool_calls":[{"id":"a","function":{"name":"f","arguments":"[1"}}]}"#,
            r#"{"role":"tool","tool_call_id":"a:1","content":[{"type":"text","text":"A"},{"type":"text","text":" "}]}"#,
        ] {
            assert_eq!(
                rendered_tokens(json, 2_000_000) - rendered_tokens(json, 1_000_000),
                1_000_000,
                "{json}"
            );
        }
    }

    #[test]
    fn plain_message_is_rendered_like_any_other() {
        for (text, is_plain) in [
            ("Hello.", true),
            (r#"a \"b\" \u00e9 \n\n \ud83d\ude00 c and more"#, true),
            ("", false),
            (" ", false),
            (r"\n", false),
            (r"\u0020\u0020", false),
            ("a ", false),
            (r"a\n", false),
            (r"a\u2028", false),
            ("\u{a0}a", false),
        ] {
            let user = format!(r#"{{"role":"user","content":"{text}"}}"#);
            let assistant = format!(r#"{{"content":"{text}","role":"assistant"}}"#);
            for (json, speaker) in [(user, Speaker::User), (assistant, Speaker::Assistant)] {
                let message = Message::from_stored(json.clone()).expect("a message");
                let (blocks, tokens) = render_blocks(&message, "", 1000, &CallIds::default());
                let plain = render_plain_message(&json, speaker);
                assert_eq!(plain.is_some(), is_plain, "{json}");
                let Some(plain) = plain else { continue };
                let plain: Value = serde_json::from_str(plain.json.as_str()).expect("a block");
                assert_eq!((json!([plain]), 1000), (json!(blocks), tokens), "{json}");
            }
        }
        assert!(
            render_plain_message(r#"{"role":"user","name":"Ada","content":"Hi"}"#, Speaker::User).is_none()
        );
    }

    #[test]
    fn every_call_gets_a_unique_valid_id() {
        let (longest, longer) = ("x".repeat(MAX_ID_CHARS), "x".repeat(MAX_ID_CHARS + 1));
        let mut ids = CallIds::default();
        let stored =
            [("a", 1), ("a_3", 2), ("a", 3), ("a", 4), (&longest, 5), (&longest, 6), (&longer, 7), ("", 8)];
        let assigned = stored.map(|(id, seq)| ids.assign(id, seq));
        assert!(assigned.iter().all(|id| is_valid_id(id)), "{assigned:?}");
        assert_eq!(assigned.iter().collect::<HashSet<_>>().len(), stored.len(), "{assigned:?}");
        assert_eq!([&assigned[0], &assigned[1], &assigned[3], &assigned[4]], ["a", "a_3", "a_4", &longest]);
        assert_eq!([ids.get("a"), ids.get(&longest)], [assigned[3].as_str(), &assigned[5]]);
    }
}
