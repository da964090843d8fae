//! The Anthropic format: reading its content blocks, and rendering lists with `system` outside of the messages, content blocks instead
//! of text, content parts and tool calls, and messages of user and assistant in alternation, the user first.

use super::media;
use super::openai::{self, MAX_SHOWN_CHARS, describe, read_part};
use super::pairing::{self, EARLIER_CALL, NO_RESULT, Pairing};
use super::profile::{EMPTY_MESSAGE, SYSTEM_MARK};
use super::types::{
    Count, RenderInput, RenderedContext, RenderedItem, RenderedMessage, Speaker, StablePrefix, join,
};
use crate::domain::message::object::{Object, as_string, as_text, elements, quote};
use crate::domain::message::{Block, Element, Message, MessageFields, Part, Role, Source, ToolCall};
use std::borrow::Cow;
use std::collections::HashSet;

/// The type of the files that the API accepts.
const PDF: &str = "application/pdf";
/// Longest id of a call.
pub(super) const MAX_ID_CHARS: usize = 128;
/// The blocks that a result can have. A reference names a tool and has no text.
const BLOCKS_OF_RESULTS: [&str; 5] = ["text", "image", "document", "search_result", "tool_reference"];

/// Reads a block that only this format has. Returns `false` for all other parts.
pub(super) fn read_block(kind: &str, block: &Object<'_>, json: &str, fields: &mut MessageFields) -> bool {
    let by_assistant = fields.role == Role::Assistant;
    let own = || Some(Block { kind: kind.to_owned(), json: json.to_owned() });
    let parts = match kind {
        "text" if block.get("citations").is_some() => vec![Part::Text(block.text("text"))],
        "thinking" if block.string("signature").is_some_and(|signature| !signature.is_empty()) => Vec::new(),
        "redacted_thinking" => Vec::new(),
        "tool_use" if by_assistant => {
            let input = block.get("input").map(as_text).unwrap_or_default();
            let call = ToolCall {
                id: block.text("id"),
                name: block.text("name"),
                arguments: input,
                signature: None,
            };
            fields.push_call(call, own());
            return true;
        }
        "tool_result" if fields.role == Role::User && fields.elements.is_empty() => {
            fields.role = Role::Tool;
            fields.result_of = Some(block.text("tool_use_id"));
            let error = (block.get("is_error") == Some("true")).then(|| Part::Text("Error:".to_owned()));
            error.into_iter().chain(content_parts(block.get("content"))).collect()
        }
        "tool_use" | "tool_result" => return false,
        kind => match block_parts(kind, block, json) {
            Some(parts) => parts,
            None => return false,
        },
    };
    fields.elements.push(Element { block: own(), parts });
    true
}

/// Returns the parts of a block of the user, or of a tool that runs at the provider: it has none, the text after it has the outcome.
fn block_parts(kind: &str, block: &Object<'_>, json: &str) -> Option<Vec<Part>> {
    let source = block.object("source");
    let source_type = source.string("type").unwrap_or_default();
    let title = block.string("title").unwrap_or_default();
    let data = || source.string("data").unwrap_or_default();
    let media_type = source.string("media_type");
    // Attachments that cannot be sent are compared by their data.
    let other = |name: String| {
        let data_url = || format!("data:{};base64,{}", media_type.as_deref().unwrap_or_default(), data());
        let json = match source_type.as_str() {
            "base64" => quote(&data_url()),
            "url" if kind == "image" => quote(&source.text("url")),
            _ => json.to_owned(),
        };
        Part::Other { kind: kind.to_owned(), name, json }
    };
    let id = || source.string("file_id").map(Source::Id);
    Some(match kind {
        "image" => {
            let source = match source_type.as_str() {
                "base64" => media::image_data(&data()),
                "url" => source.string("url").and_then(|url| media::web_url(&url)),
                _ => id(),
            };
            vec![source.map_or_else(|| other(String::new()), |source| Part::Image { source, detail: None })]
        }
        "document" => match source_type.as_str() {
            "text" => vec![Part::Text(data())],
            "content" => content_parts(source.get("content")),
            "base64" => {
                let name = if title.trim().is_empty() { "document.pdf".to_owned() } else { title.clone() };
                let source = media::file_data(media_type.as_deref(), &data());
                vec![source.map_or_else(|| other(title), |source| Part::File { source, name })]
            }
            _ => vec![other(title)],
        },
        "search_result" => {
            let texts = ["title", "source"].into_iter().filter_map(|key| block.string(key)).map(Part::Text);
            texts.chain(content_parts(block.get("content"))).collect()
        }
        "container_upload" => vec![other(String::new())],
        kind if provider_tool_id(kind).is_some() => Vec::new(),
        _ => return None,
    })
}

/// Returns the parts of the content of a result, a document or a search result: a text, or a list of blocks.
fn content_parts(content: Option<&str>) -> Vec<Part> {
    let Some(content) = content else { return Vec::new() };
    if !content.starts_with('[') {
        return vec![Part::Text(as_text(content))];
    }
    let parts = |json: &str| {
        let block = Object::parse(json);
        let kind = block.string("type").unwrap_or_default();
        match block_parts(&kind, &block, json).or_else(|| read_part(&kind, &block)) {
            Some(parts) => parts,
            None if kind == "tool_reference" => Vec::new(),
            None => match as_string(json) {
                Some(text) => vec![Part::Text(text)],
                None => vec![Part::Other { kind, name: String::new(), json: json.to_owned() }],
            },
        }
    };
    elements(content).into_iter().flat_map(parts).collect()
}

/// Returns the field with the id of a call (`id`) or a result (`tool_use_id`) of a tool that runs at the provider.
fn provider_tool_id(kind: &str) -> Option<&'static str> {
    let of_result = || kind.ends_with("_tool_result").then_some("tool_use_id");
    kind.ends_with("_tool_use").then_some("id").or_else(of_result)
}

/// The calls and results of the provider's tools in a list. The API rejects a call without its result in the same turn of the model, and
/// the other way round.
#[derive(Debug, Default)]
pub(super) struct ProviderCalls {
    calls: HashSet<(usize, String)>,
    results: HashSet<(usize, String)>,
    turn: usize,
    was_assistant: bool,
}

impl ProviderCalls {
    /// Reads the next message of the list, and returns the number of its turn.
    pub(super) fn read(&mut self, message: Option<&Message>, by_assistant: bool) -> usize {
        if by_assistant != self.was_assistant {
            (self.turn, self.was_assistant) = (self.turn + 1, by_assistant);
        }
        for block in
            message.into_iter().flat_map(Message::elements).filter_map(|element| element.block.as_ref())
        {
            if let Some(key) = provider_tool_id(&block.kind) {
                let ids = if key == "id" { &mut self.calls } else { &mut self.results };
                ids.insert((self.turn, Object::parse(&block.json).text(key)));
            }
        }
        self.turn
    }

    /// Returns `true` if a block of this turn can be sent. A call without a result can be sent if the list ends with its turn: the
    /// provider goes on with it.
    fn accept(&self, block: &Block, turn: usize) -> bool {
        let Some(key) = provider_tool_id(&block.kind) else { return true };
        let of_turn = (turn, Object::parse(&block.json).text(key));
        let is_last = key == "id" && self.was_assistant && turn == self.turn;
        is_last || self.calls.contains(&of_turn) && self.results.contains(&of_turn)
    }

    /// Returns `true` if the last turn has a call without a result.
    pub(super) fn is_last_open(&self) -> bool {
        self.was_assistant
            && self.calls.iter().any(|call| call.0 == self.turn && !self.results.contains(call))
    }
}

/// The blocks of a message as JSON.
#[derive(Default)]
struct Blocks(Vec<String>);

impl Blocks {
    fn push_text(&mut self, text: &str) {
        self.0.extend((!text.trim().is_empty()).then(|| text_block(&quote(text))));
    }

    /// Adds a part of no block. An assistant has no attachments.
    fn push_part(&mut self, part: &Part, by_assistant: bool) {
        match attachment(part).filter(|_| !by_assistant) {
            Some(json) => self.0.push(json),
            None => match part.text() {
                Some(text) => self.push_text(text),
                None => self.push_text(&describe(part)),
            },
        }
    }

    /// Adds a recorded block as it can be sent: without nulls and cache marks, with data of its own type. A text names an attachment that
    /// cannot be sent.
    fn push_recorded(&mut self, kind: &str, json: &str, parts: &[Part], by_assistant: bool) {
        let mut object = clean(json);
        let source = object.object("source");
        let source_type = source.text("type");
        let is_attachment = matches!(kind, "image" | "document");
        let is_of_user = is_attachment || matches!(kind, "search_result" | "container_upload");
        let is_of_assistant = parts.is_empty() && !is_of_user && !BLOCKS_OF_RESULTS.contains(&kind);
        match parts {
            _ if is_of_assistant && !by_assistant => return,
            [Part::Text(text)] if kind == "text" && text.trim().is_empty() => return,
            parts if is_of_user && by_assistant => {
                return parts.iter().for_each(|part| self.push_part(part, true));
            }
            [
                Part::Image { source: Source::Data { media_type, base64 }, .. }
                | Part::File { source: Source::Data { media_type, base64 }, .. },
            ] if source_type == "base64" && (kind == "image" || media_type == PDF) => {
                let mut source = source.clone();
                source.set("media_type", quote(media_type));
                source.set("data", quote(base64));
                let source = source.to_json();
                object.set("source", source);
            }
            [part] if is_attachment && !matches!(&*source_type, "text" | "content" | "file") => {
                let is_address = source_type == "url" && (kind == "document" || attachment(part).is_some());
                if !is_address {
                    return self.push_text(&describe(part));
                }
            }
            _ => {}
        }
        self.0.push(object.to_json());
    }

    /// Removes what the last message of an assistant may not end with: thinking and white space.
    fn trim_end(&mut self) {
        while let Some(json) = self.0.last() {
            let mut block = Object::parse(json);
            let (kind, text) = (block.text("type"), block.text("text"));
            let trimmed = text.trim_end();
            if kind != "text" && !kind.ends_with("thinking") || kind == "text" && trimmed == text {
                return;
            }
            block.set("text", quote(trimmed));
            let json = (kind == "text" && !trimmed.is_empty()).then(|| block.to_json());
            self.0.pop();
            self.0.extend(json);
        }
    }
}

/// Renders the blocks of a message; `stored` tokens were counted in the format `openai`.
pub(super) fn render_message(
    rendered: &mut RenderedMessage<'_>,
    message: &Message,
    pairing: &Pairing,
    (provider_calls, turn): (&ProviderCalls, usize),
    stored: i64,
) {
    let (role, position) = (message.role(), rendered.position);
    let by_assistant = role == Role::Assistant;
    let mut blocks = Blocks::default();
    match role {
        // A model that sees a name before its own messages begins to write it itself.
        Role::User => blocks.push_text(&message.name().map(|name| format!("{name}:")).unwrap_or_default()),
        role if role.is_instruction() => blocks.push_text(SYSTEM_MARK),
        _ => {}
    }
    if role == Role::Tool {
        blocks.0.push(result(message, pairing.result_id(position)));
    } else {
        for Element { block, parts } in message.elements() {
            match (block, parts.as_slice()) {
                (block, [Part::Call(index)]) => {
                    let call = message.tool_calls().get(*index);
                    let id = pairing.call_id(position, *index);
                    blocks.0.extend(call.map(|call| tool_use(call, id, block.as_ref())));
                }
                (Some(block), parts) if provider_calls.accept(block, turn) => {
                    blocks.push_recorded(&block.kind, &block.json, parts, by_assistant);
                }
                (Some(_), _) => {}
                (None, parts) => parts.iter().for_each(|part| blocks.push_part(part, by_assistant)),
            }
        }
    }
    if by_assistant {
        blocks.trim_end();
    }
    if blocks.0.is_empty() {
        blocks.push_text(EMPTY_MESSAGE);
    }
    let mut sent = Count::default();
    blocks.0.iter().for_each(|json| sent.add(size(json)));
    let speaker = if by_assistant { Speaker::Assistant } else { Speaker::User };
    blocks.0.into_iter().for_each(|json| rendered.push(speaker, json, 0));
    rendered.tokens += sent.relative_to(&openai::count(message), stored);
}

/// Returns the block of a call.
fn tool_use(call: &ToolCall, id: &str, block: Option<&Block>) -> String {
    let (name, input) = (pairing::tool_name(&call.name), pairing::valid_arguments(&call.arguments));
    let mut object = block.map(|block| clean(&block.json)).unwrap_or_default();
    for (key, value) in [("type", quote("tool_use")), ("id", quote(id)), ("name", quote(&name))] {
        object.set(key, value);
    }
    object.set("input", input.into_owned());
    object.to_json()
}

/// Returns the block of a result.
fn result(message: &Message, id: &str) -> String {
    let block = message.elements().iter().find_map(|element| element.block.as_ref());
    let block = block.filter(|block| block.kind == "tool_result");
    let mut object = block.map(|block| clean(&block.json)).unwrap_or_default();
    object.set("type", quote("tool_result"));
    object.set("tool_use_id", quote(id));
    let mut inside = Blocks::default();
    let mut text = None;
    match object.get("content").map(str::to_owned) {
        Some(content) if content.starts_with('[') => {
            for json in elements(&content) {
                let kind = Object::parse(json).text("type");
                let parts = content_parts(Some(&format!("[{json}]")));
                if BLOCKS_OF_RESULTS.contains(&kind.as_str()) {
                    inside.push_recorded(&kind, json, &parts, false);
                } else {
                    for part in &parts {
                        inside.push_part(part, false);
                    }
                }
            }
        }
        Some(content) => text = Some(quote(&as_text(&content))),
        None if block.is_none() => message.parts().for_each(|part| inside.push_part(part, false)),
        None => {}
    }
    object.0.retain(|(key, value)| match &**key {
        "content" => false,
        "is_error" => ["true", "false"].contains(&&**value),
        _ => true,
    });
    if let Some(text) = text {
        object.set("content", text);
    } else if !inside.0.is_empty() {
        object.set("content", format!("[{}]", inside.0.join(",")));
    }
    object.to_json()
}

/// Returns a block without nulls and marks for the cache, of which a request may have four.
fn clean(json: &str) -> Object<'_> {
    let mut object = Object::parse(json);
    object.0.retain(|(key, value)| value != "null" && key != "cache_control");
    object
}

/// Returns the block of an image or a PDF file, if the API supports it.
fn attachment(part: &Part) -> Option<String> {
    let base64 = |media_type: &str, data: &str| {
        format!(r#"{{"type":"base64","media_type":{},"data":{}}}"#, quote(media_type), quote(data))
    };
    match part {
        Part::Image { source: Source::Data { media_type, base64: data }, .. } => {
            Some(format!(r#"{{"type":"image","source":{}}}"#, base64(media_type, data)))
        }
        Part::Image { source: Source::Url(url), .. }
            if url.get(..8).is_some_and(|start| start.eq_ignore_ascii_case("https://")) =>
        {
            Some(format!(r#"{{"type":"image","source":{{"type":"url","url":{}}}}}"#, quote(url)))
        }
        Part::File { source: Source::Data { media_type, base64: data }, name } if media_type == PDF => {
            let name: String = name.chars().take(MAX_SHOWN_CHARS).collect();
            let title =
                if name.trim().is_empty() { String::new() } else { format!(r#","title":{}"#, quote(&name)) };
            Some(format!(r#"{{"type":"document","source":{}{title}}}"#, base64(media_type, data)))
        }
        _ => None,
    }
}

/// The fields of the source of an image or a document, whose tokens are those of the attachment.
const SOURCE_FIELDS: [&str; 5] = ["type", "media_type", "data", "url", "file_id"];

/// Returns the pieces of a block that count. An image or a document is no entry.
fn size(json: &str) -> Count<'static> {
    let mut count = Count::default();
    if add_size(json, &mut count) { count } else { count.entry() }
}

/// Adds the pieces of a block that count: texts, ids, names and input; fields that the rules do not name as their JSON. Returns `true` for
/// an image or a document.
fn add_size(json: &str, count: &mut Count<'static>) -> bool {
    let block = Object::parse(json);
    let kind = block.text("type");
    let source = block.object("source");
    let is_text = matches!(source.string("type").as_deref(), Some("text" | "content"));
    let is_attachment = kind == "image" || kind == "document" && !is_text;
    if is_attachment {
        *count = std::mem::take(count).attachment();
    }
    let mut add = |text: String| *count = std::mem::take(count).text(text);
    let mut inside = Vec::new();
    for (key, value) in block.0.iter().filter(|(key, _)| key != "type") {
        match (&*kind, &**key) {
            ("text", "text") | ("tool_use", "id" | "name" | "input") | ("tool_result", "tool_use_id") => {
                add(as_text(value));
            }
            (_, "is_error") => {}
            ("tool_result", "content") if value.starts_with('[') => inside = elements(value),
            ("tool_result", "content") => add(as_text(value)),
            (_, "title") if is_attachment => {}
            (_, "source") if is_attachment => {
                for (key, value) in source.0.iter().filter(|(key, _)| !SOURCE_FIELDS.contains(&&**key)) {
                    add(format!("{{{}:{value}}}", quote(key)));
                }
            }
            (_, key) => add(format!("{{{}:{value}}}", quote(key))),
        }
    }
    for json in inside {
        add_size(json, count);
    }
    is_attachment
}

/// Returns a text block; `text` is JSON.
fn text_block(text: &str) -> String {
    format!(r#"{{"type":"text","text":{text}}}"#)
}

/// Adds a call that is not recorded.
pub(super) fn insert_call(rendered: &mut RenderedMessage<'_>, id: &str) {
    let call = ToolCall { name: EARLIER_CALL.to_owned(), ..ToolCall::default() };
    let json = tool_use(&call, id, None);
    let tokens = size(&json).total();
    rendered.push(Speaker::Assistant, json, tokens);
}

/// Adds a result that is not recorded.
pub(super) fn insert_result(rendered: &mut RenderedMessage<'_>, id: &str) {
    let json = result(&Message::tool_result(id, NO_RESULT), id);
    let tokens = size(&json).total();
    rendered.push(Speaker::User, json, tokens);
}

/// Renders the list. Consecutive blocks of one speaker become one message. With `cache_control`, the system text and the
/// last stable block are marked for the cache: two of the four marks that the API permits.
pub(super) fn render_context(input: RenderInput<'_>) -> RenderedContext {
    let (mut stable_items, tokens) = input.stable_items();
    let cache_control = input.cache_control;
    let system = &input.system.text;
    let system = (!system.is_empty()).then(|| {
        let text = quote(system);
        if cache_control { format!("[{}]", with_cache_control(&text_block(&text))) } else { text }
    });
    let positions = positions(&input.history);
    let extra = input.extra(|item| positions.get(item).copied().unwrap_or_default());
    let opening = input.has_opening().then(|| text_block(&quote(&input.opening.text)));
    let rendered = input.history.into_iter().chain(input.user_message);
    let mut items: Vec<RenderedItem<'_>> = rendered.flat_map(|message| message.items).collect();
    if let Some(opening) = opening {
        items.insert(0, RenderedItem { speaker: Speaker::User, json: opening.into() });
        stable_items += usize::from(stable_items > 0);
    }
    let mut messages: Vec<(Speaker, Vec<Cow<'_, str>>)> = Vec::new();
    let mut stable = StablePrefix { tokens, blocks: Some(0), messages: 0 };
    for (index, RenderedItem { speaker, mut json }) in items.into_iter().enumerate() {
        if cache_control && index + 1 == stable_items {
            json = with_cache_control(&json).into();
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
    let message = |(speaker, blocks): (Speaker, Vec<Cow<'_, str>>)| {
        let role = if speaker == Speaker::Assistant { "assistant" } else { "user" };
        format!(r#"{{"role":"{role}","content":{}}}"#, join(blocks.iter().map(|block| &**block)))
    };
    let messages: Vec<String> = messages.into_iter().map(message).collect();
    let messages = join(messages.iter().map(String::as_str));
    RenderedContext { system, messages, stable, extra, ..RenderedContext::default() }
}

/// Returns the position in the list of the message that contains each block.
fn positions(history: &[RenderedMessage<'_>]) -> Vec<usize> {
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

/// Returns the results of tools in the content of a user message, and the other blocks, if there is more than one message in it: results
/// come first, as the API requires.
pub(super) fn split_results<'a>(blocks: &[&'a str]) -> Option<(Vec<&'a str>, Vec<&'a str>)> {
    let is_result = |json: &&str| Object::parse(json).string("type").as_deref() == Some("tool_result");
    let (results, others): (Vec<&str>, Vec<&str>) = blocks.iter().copied().partition(|json| is_result(json));
    (blocks.len() > 1 && !results.is_empty()).then_some((results, others))
}
