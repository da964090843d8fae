//! Content blocks of the Anthropic format, and their equivalents in the chat format.
//!
//! A stored message keeps the blocks as they were sent. The role of a message with a result is `tool`, because rules about
//! pairs of calls and results apply to messages. So a user message with several results is stored as several messages.

use super::members::{Members, ObjectWriter, as_string, elements, escape_key, list, object, quote};
use super::parts::shorten_type;

/// The equivalent of a block in the chat format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Equivalent {
    Text(String),
    /// A content part as JSON.
    Attachment(String),
    /// An attachment that chat completions cannot express, with its name or an empty text.
    Named(String),
}

/// Returns the equivalents of a block other than text, calls and results. Returns `None` if the Anthropic format has no
/// such block. A block of a tool that runs at the provider has no equivalent: the text after it has the outcome.
pub(super) fn equivalents(kind: &str, block: &Members<'_>) -> Option<Vec<Equivalent>> {
    let source = Members::parse(block.get("source").unwrap_or("{}"));
    let source_type = source.string("type").unwrap_or_default();
    let data_url = || {
        let (media_type, data) = (source.string("media_type")?, source.string("data")?);
        Some(quote(&format!("data:{media_type};base64,{data}")))
    };
    Some(match kind {
        "image" => {
            let url = match source_type.as_str() {
                "base64" => data_url(),
                "url" => source.get("url").map(str::to_owned),
                _ => None,
            };
            vec![url.map_or(Equivalent::Named(String::new()), |url| {
                let image = object(&[("url", &url)]);
                Equivalent::Attachment(object(&[("type", r#""image_url""#), ("image_url", &image)]))
            })]
        }
        "document" => {
            let title = block.string("title").unwrap_or_default();
            match source_type.as_str() {
                "text" => vec![Equivalent::Text(source.string("data").unwrap_or_default())],
                "content" => content_equivalents(source.get("content").unwrap_or("[]")),
                "base64" => vec![data_url().map_or(Equivalent::Named(title.clone()), |url| {
                    let name = if title.trim().is_empty() { "document.pdf" } else { &title };
                    let file = object(&[("file_data", &url), ("filename", &quote(name))]);
                    Equivalent::Attachment(object(&[("type", r#""file""#), ("file", &file)]))
                })],
                _ => vec![Equivalent::Named(title)],
            }
        }
        "search_result" => {
            let texts = ["title", "source"].into_iter().filter_map(|key| block.string(key));
            let texts = texts.map(Equivalent::Text);
            texts.chain(content_equivalents(block.get("content").unwrap_or("[]"))).collect()
        }
        "container_upload" => vec![Equivalent::Named(String::new())],
        kind if is_of_provider_tool(kind) => Vec::new(),
        _ => return None,
    })
}

/// Returns `true` for calls and results of tools that run at the provider. New tools have new types of results.
fn is_of_provider_tool(kind: &str) -> bool {
    !provider_tool_fields(kind).is_empty()
}

/// Returns the equivalents of the content of a result, a document or a search result: a text, or a list of blocks.
fn content_equivalents(content: &str) -> Vec<Equivalent> {
    if let Some(text) = as_string(content) {
        return vec![Equivalent::Text(text)];
    }
    let block = |json| {
        let block = Members::parse(json);
        let kind = block.string("type").unwrap_or_default();
        if kind == "text" {
            return vec![Equivalent::Text(block.string("text").unwrap_or_default())];
        }
        equivalents(&kind, &block).unwrap_or_default()
    };
    elements(content).into_iter().flat_map(block).collect()
}

/// Returns the equivalents of the content of a `tool_result`. A text names errors, because the chat format has no mark.
pub(super) fn result_equivalents(block: &Members<'_>) -> Vec<Equivalent> {
    let error = (block.get("is_error") == Some("true")).then(|| Equivalent::Text("Error:".to_owned()));
    error.into_iter().chain(block.get("content").map(content_equivalents).unwrap_or_default()).collect()
}

/// Returns the equivalents of a block that only the Anthropic format has, other than calls; `None` for any other content part.
pub fn block_equivalents(kind: &str, json: &str) -> Option<Vec<Equivalent>> {
    let block = Members::parse(json);
    if kind == "tool_result" { Some(result_equivalents(&block)) } else { equivalents(kind, &block) }
}

/// Returns the errors of a block that only the Anthropic format has, with their paths. A block inside it of an unknown type
/// is an error, too, because its text would be lost.
pub(super) fn block_errors(kind: &str, block: &Members<'_>) -> Vec<(String, String)> {
    let mut errors = Vec::new();
    match kind {
        "tool_result" => {
            add_content_errors("content", block.get("content"), &mut errors);
            if block.get("is_error").is_some_and(|mark| !["true", "false"].contains(&mark)) {
                errors.push(("is_error".to_owned(), "must be true or false".to_owned()));
            }
        }
        "search_result" => add_content_errors("content", block.get("content"), &mut errors),
        "image" | "document" => match block.get("source").filter(|source| source.starts_with('{')) {
            None => errors.push(("source".to_owned(), "missing: an object with the data".to_owned())),
            Some(source) => {
                let source = Members::parse(source);
                if source.string("type").as_deref() == Some("content") {
                    add_content_errors("source.content", source.get("content"), &mut errors);
                }
            }
        },
        kind => {
            let missing = |key: &&str| block.get(key).is_none();
            for key in provider_tool_fields(kind).iter().copied().filter(missing) {
                errors.push((
                    key.to_owned(),
                    format!("missing: the API rejects a {} without it", shorten_type(kind)),
                ));
            }
        }
    }
    errors
}

/// Returns the fields that a call or a result of a tool of the provider must have; empty for all other types.
fn provider_tool_fields(kind: &str) -> &'static [&'static str] {
    if kind.ends_with("_tool_use") {
        &["id", "name", "input"]
    } else if kind.ends_with("_tool_result") {
        &["tool_use_id", "content"]
    } else {
        &[]
    }
}

/// Adds the errors of the content of a result, a document or a search result.
fn add_content_errors(path: &str, content: Option<&str>, errors: &mut Vec<(String, String)>) {
    let Some(content) = content.filter(|content| !content.starts_with('"')) else { return };
    if !content.starts_with('[') {
        errors.push((path.to_owned(), "must be a string or a list of content blocks".to_owned()));
        return;
    }
    for (index, json) in elements(content).into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        if !json.starts_with('{') {
            errors.push((path, "must be an object".to_owned()));
            continue;
        }
        let block = Members::parse(json);
        match block.string("type").as_deref().unwrap_or_default() {
            "text" if block.string("text").is_none() => {
                errors.push((format!("{path}.text"), "missing: a string".to_owned()));
            }
            "text" => {}
            kind if BLOCKS_OF_RESULTS.contains(&kind) => {
                let inner = block_errors(kind, &block);
                errors.extend(inner.into_iter().map(|(field, detail)| (format!("{path}.{field}"), detail)));
            }
            kind => {
                let detail = format!(
                    "{:?} is an unknown type of block in a result or a document: send text, {}",
                    shorten_type(kind),
                    BLOCKS_OF_RESULTS.join(", ")
                );
                errors.push((format!("{path}.type"), detail));
            }
        }
    }
}

/// The types of blocks that a result can have, other than text. A reference names a tool and has no text.
const BLOCKS_OF_RESULTS: [&str; 4] = ["image", "document", "search_result", "tool_reference"];

/// Splits a user message with results into one message for each result and one for each part between them. Returns `None`
/// if it has no results, or consists of one. The first message keeps the other fields.
pub(super) fn split_results(json: &str) -> Option<Vec<String>> {
    if !json.contains("tool_result") {
        return None;
    }
    let message = Members::parse(json);
    let blocks = message.list("content");
    let is_result = |json: &str| Members::parse(json).string("type").as_deref() == Some("tool_result");
    if blocks.len() < 2
        || message.get("role") != Some(r#""user""#)
        || !blocks.iter().any(|block| is_result(block))
    {
        return None;
    }
    let mut groups: Vec<(bool, Vec<&str>)> = Vec::new();
    for block in blocks {
        let is_result = is_result(block);
        match groups.last_mut() {
            Some((false, group)) if !is_result => group.push(block),
            _ => groups.push((is_result, vec![block])),
        }
    }
    let mut contents = groups.into_iter().map(|(_, group)| list(&group));
    let mut first = ObjectWriter::with_capacity(json.len());
    for (key, value) in &message.0 {
        let value = if key == "content" { contents.next()? } else { (*value).to_owned() };
        first.add(&escape_key(key), &value);
    }
    let first = std::iter::once(first.finish());
    Some(
        first
            .chain(contents.map(|content| object(&[("role", r#""user""#), ("content", &content)])))
            .collect(),
    )
}

/// A content block of a stored message, as the Anthropic format receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnthropicBlock {
    /// A block of the format: without nulls and without marks for the cache, of which a request may have four.
    Block { kind: String, json: String },
    /// A part of the chat format.
    ChatPart(String),
}

/// The parts of a block that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockSize {
    pub texts: Vec<String>,
    /// Number of images and documents.
    pub attachments: usize,
}

/// Returns the content blocks of a stored message for the Anthropic format, or `None` if the message has no block that only
/// this format has. Thinking without a signature is left out, and so are blank texts, which the API rejects; and what an
/// assistant message may not end with: thinking and white space.
pub fn anthropic_blocks(json: &str, by_assistant: bool) -> Option<Vec<AnthropicBlock>> {
    if !has_anthropic_blocks(json) {
        return None;
    }
    let mut blocks: Vec<AnthropicBlock> =
        Members::parse(json).list("content").into_iter().filter_map(AnthropicBlock::of).collect();
    while by_assistant && let Some(AnthropicBlock::Block { kind, json }) = blocks.last_mut() {
        let text = Members::parse(json).string("text").unwrap_or_default();
        match kind.as_str() {
            "thinking" | "redacted_thinking" => drop(blocks.pop()),
            "text" if text.ends_with(char::is_whitespace) => {
                *json = with_member(json, "text", &quote(text.trim_end()));
            }
            _ => break,
        }
    }
    Some(blocks)
}

/// Returns `true` if the stored message has a content block that only the Anthropic format has.
pub(super) fn has_anthropic_blocks(json: &str) -> bool {
    json.contains(r#""content":["#)
        && Members::parse(json).list("content").into_iter().any(is_only_in_anthropic)
}

fn is_only_in_anthropic(json: &str) -> bool {
    let block = Members::parse(json);
    match block.string("type").as_deref().unwrap_or_default() {
        "tool_use" | "tool_result" | "redacted_thinking" => true,
        "text" => block.get("citations").is_some(),
        "thinking" => is_signed(&block),
        kind => equivalents(kind, &block).is_some(),
    }
}

/// Returns `true` for thinking that the API accepts. Other providers send an empty signature.
fn is_signed(thinking: &Members<'_>) -> bool {
    thinking.string("signature").is_some_and(|signature| !signature.is_empty())
}

impl AnthropicBlock {
    fn of(json: &str) -> Option<Self> {
        let block = Members::parse(json);
        let kind = block.string("type").unwrap_or_default();
        let is_sent = match kind.as_str() {
            "text" => !block.string("text").unwrap_or_default().trim().is_empty(),
            "thinking" => is_signed(&block),
            "reasoning" => false,
            "redacted_thinking" | "tool_use" | "tool_result" => true,
            kind if equivalents(kind, &block).is_some() => true,
            _ => return Some(Self::ChatPart(json.to_owned())),
        };
        is_sent.then(|| Self::Block { json: clean(&block, &kind), kind })
    }

    /// Returns the id of the call that the block makes or answers, with the name of the member.
    pub fn call_id(&self) -> Option<(&'static str, String)> {
        let Self::Block { kind, json } = self else { return None };
        let key = match kind.as_str() {
            "tool_use" => "id",
            "tool_result" => "tool_use_id",
            _ => return None,
        };
        Some((key, Members::parse(json).string(key)?))
    }

    /// Returns the name of the tool that the block calls.
    pub fn tool_name(&self) -> Option<String> {
        match self {
            Self::Block { kind, json } if kind == "tool_use" => Members::parse(json).string("name"),
            _ => None,
        }
    }

    /// Replaces a member, which is a string.
    pub fn set(&mut self, key: &str, value: &str) {
        if let Self::Block { json, .. } = self {
            *json = with_member(json, key, &quote(value));
        }
    }

    /// Returns the parts that count. Members that the rules do not name count as their JSON text.
    pub fn size(&self) -> BlockSize {
        let mut size = BlockSize::default();
        if let Self::Block { kind, json } = self {
            add_size(kind, json, &mut size);
        }
        size
    }
}

fn is_text_document(block: &Members<'_>) -> bool {
    let source = Members::parse(block.get("source").unwrap_or("{}"));
    matches!(source.string("type").as_deref(), Some("text" | "content"))
}

/// The fields of the source of an image or a document, whose tokens are those of the attachment.
const SOURCE_FIELDS: [&str; 5] = ["type", "media_type", "data", "url", "file_id"];

fn add_size(kind: &str, json: &str, size: &mut BlockSize) {
    let block = Members::parse(json);
    let known: &[&str] = match kind {
        "text" => &["type", "text"],
        "tool_use" => &["type", "id", "name", "input"],
        "tool_result" => &["type", "tool_use_id", "content", "is_error"],
        // The tokens of an attachment include its title. The text of a document counts in full.
        "document" if is_text_document(&block) => &["type"],
        "image" | "document" => {
            size.attachments += 1;
            &["type", "title"]
        }
        _ => &["type"],
    };
    let is_attachment = known.contains(&"title");
    for (key, value) in block.0.iter().filter(|(key, _)| *key != "type") {
        match &**key {
            "title" if is_attachment => {}
            "source" if is_attachment => {
                for (key, value) in &Members::parse(value).0 {
                    if !SOURCE_FIELDS.contains(&&**key) {
                        size.texts.push(object(&[(key, value)]));
                    }
                }
            }
            "content" if kind == "tool_result" && !value.starts_with('"') => {
                for inside in elements(value) {
                    let inner_kind = Members::parse(inside).string("type").unwrap_or_default();
                    add_size(&inner_kind, inside, size);
                }
            }
            "is_error" => {}
            key if known.contains(&key) => {
                size.texts.push(as_string(value).unwrap_or_else(|| (*value).to_owned()));
            }
            key => size.texts.push(object(&[(key, value)])),
        }
    }
}

/// Returns a block without nulls and marks for the cache. The content of a result is a list of blocks, too. A call gets the
/// input that the API requires.
fn clean(block: &Members<'_>, kind: &str) -> String {
    let mut cleaned = ObjectWriter::with_capacity(64);
    for (key, value) in block.0.iter().filter(|(key, value)| *value != "null" && key != "cache_control") {
        if kind == "tool_result" && key == "content" && value.starts_with('[') {
            let inside = elements(value).into_iter().filter_map(|inside| {
                let block = Members::parse(inside);
                let kind = block.string("type").unwrap_or_default();
                let is_blank = kind == "text" && block.string("text").unwrap_or_default().trim().is_empty();
                (!is_blank).then(|| clean(&block, &kind))
            });
            let inside: Vec<String> = inside.collect();
            if !inside.is_empty() {
                cleaned.add("content", &list(&inside));
            }
        } else {
            cleaned.add(&escape_key(key), value);
        }
    }
    if kind == "tool_use" && block.get("input").is_none() {
        cleaned.add("input", "{}");
    }
    cleaned.finish()
}

fn with_member(json: &str, key: &str, value: &str) -> String {
    let mut changed = ObjectWriter::with_capacity(json.len() + value.len());
    for (name, old) in &Members::parse(json).0 {
        changed.add(&escape_key(name), if name == key { value } else { old });
    }
    changed.finish()
}
