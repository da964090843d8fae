//! The standard form of a message: only what all providers of the chat format accept. `docs/formats.md` lists the rules.
//!
//! Clients store answers as they receive them: with nulls, with fields and content parts of one provider, with calls in an
//! older form. Other providers reject such a message. Most stored messages have the standard form already, and are
//! recognised without being parsed or copied.

use super::blocks::{Equivalent, equivalents, has_anthropic_blocks, result_equivalents};
use super::members::{Members, ObjectWriter, as_string, elements, escape_key, list, object, quote};
use super::parts::{custom_arguments, function_call_id};
use std::borrow::Cow;

/// Number of characters of a file name, or of a part type, that are shown to a model.
const MAX_NAME_CHARS: usize = 200;

/// Longest name of a speaker that OpenAI accepts.
const MAX_SPEAKER_CHARS: usize = 64;

/// The messages whose images, audio and files are kept. In all others, a text names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attachments {
    OfAllMessages,
    /// Chat completions accept attachments of users only.
    OfUsers,
}

/// A message in its standard form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Converted {
    pub(super) json: String,
    /// A text has replaced an attachment.
    pub(super) lacks_attachments: bool,
}

/// A message with all fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompleteForm<'a> {
    pub json: Cow<'a, str>,
    /// Everything that the standard form does not contain, as text to be counted.
    pub additional: String,
    /// The content is that of the standard form, because the format has no place for the recorded one.
    pub has_standard_content: bool,
}

/// Returns the standard form of a message, or `None` if the message has that form. `makes_calls` tells if calls were
/// recognised when the message was stored: earlier versions ignored `function_call`.
pub(super) fn convert(json: &str, makes_calls: bool, attachments: Attachments) -> Option<Converted> {
    if plain_text(json).is_some() {
        return None;
    }
    let mut converter = Converter { attachments, lacks_attachments: false };
    let standard = converter.message(&Members::parse(json), makes_calls);
    (standard != json).then_some(Converted { json: standard, lacks_attachments: converter.lacks_attachments })
}

/// Returns the text in JSON, without quotes, if the message consists of a role and a text, like most messages.
pub fn plain_text(json: &str) -> Option<&str> {
    const ROLE_FIRST: [(&str, &str); 2] =
        [(r#"{"role":"user","content":""#, "\"}"), (r#"{"role":"assistant","content":""#, "\"}")];
    const TEXT_FIRST: [(&str, &str); 2] =
        [(r#"{"content":""#, r#"","role":"user"}"#), (r#"{"content":""#, r#"","role":"assistant"}"#)];
    let inside = |(start, end): &(&str, &str)| json.strip_prefix(start)?.strip_suffix(end);
    // The text ends at the first quote without an escape, so this quote must be the last one.
    ROLE_FIRST.iter().chain(&TEXT_FIRST).find_map(inside).filter(|text| {
        text.match_indices('"').all(|(at, _)| {
            let before = text.as_bytes().get(..at).unwrap_or_default();
            before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
        })
    })
}

/// Returns the JSON of a name in the form that all providers accept; `None` without a name.
fn standard_name(json: &str) -> Option<Cow<'_, str>> {
    // A backslash also begins every escape.
    let is_standard = json.len() <= MAX_SPEAKER_CHARS && !json.contains(is_invalid_in_name);
    if is_standard {
        return (json.starts_with('"') && json != r#""""#).then_some(json.into());
    }
    let name = speaker_name(&as_string(json)?);
    (!name.is_empty()).then(|| quote(&name).into())
}

/// Returns the name of a speaker as OpenAI accepts it.
pub fn speaker_name(name: &str) -> String {
    let valid = |char| if is_invalid_in_name(char) { '_' } else { char };
    name.trim().chars().map(valid).take(MAX_SPEAKER_CHARS).collect()
}

fn is_invalid_in_name(char: char) -> bool {
    char.is_whitespace() || "<|\\/>".contains(char)
}

/// Returns the text that replaces an attachment that cannot be sent.
pub fn describe_attachment(kind: &str, file_name: &str) -> String {
    let shorten = |text: &str| text.chars().take(MAX_NAME_CHARS).collect::<String>();
    let description = match kind {
        "image_url" | "input_image" | "image" => "an image".to_owned(),
        "input_audio" => "audio".to_owned(),
        "file" | "input_file" | "document" if !file_name.trim().is_empty() => {
            format!("the file {:?}", shorten(file_name))
        }
        "file" | "input_file" | "document" | "container_upload" => "a file".to_owned(),
        kind => format!("a part of the type {:?}", shorten(kind)),
    };
    format!("({description} that can't be shown here)")
}

/// A content part in the standard form.
#[derive(Debug)]
struct StandardPart<'a> {
    json: Cow<'a, str>,
    /// The JSON string of a text part.
    text: Option<Cow<'a, str>>,
}

impl<'a> StandardPart<'a> {
    fn text(text: impl Into<Cow<'a, str>>) -> Self {
        let text = text.into();
        Self { json: object(&[("type", r#""text""#), ("text", &text)]).into(), text: Some(text) }
    }
}

struct Converter {
    attachments: Attachments,
    lacks_attachments: bool,
}

impl Converter {
    fn message(&mut self, message: &Members<'_>, makes_calls: bool) -> String {
        let role = message.string("role").unwrap_or_default();
        if role == "user"
            && let Some(result) = result_block(message)
        {
            return self.tool_result(&result);
        }
        let is_tool = matches!(role.as_str(), "tool" | "function");
        let calls = if role == "assistant" { calls(message, makes_calls) } else { Vec::new() };
        let mut content = self.content(message, &role, !calls.is_empty());
        let mut calls = (!calls.is_empty()).then(|| list(&calls));
        let bytes = message.0.iter().map(|(key, value)| key.len() + value.len() + 4).sum();
        let mut standard = ObjectWriter::with_capacity(bytes);
        let mut function = None;
        for (key, value) in &message.0 {
            match &**key {
                "role" if role == "function" => standard.add(key, r#""tool""#),
                "role" => standard.add(key, value),
                "content" => add_once(&mut standard, key, &mut content),
                "tool_calls" | "function_call" => add_once(&mut standard, "tool_calls", &mut calls),
                "name" if role == "function" => {
                    function = as_string(value).map(|name| quote(&function_call_id(&name)));
                }
                "name" if !is_tool => {
                    if let Some(name) = standard_name(value) {
                        standard.add(key, &name);
                    }
                }
                "tool_call_id" if role == "tool" => standard.add(key, value),
                _ => {}
            }
        }
        add_once(&mut standard, "tool_call_id", &mut function);
        add_once(&mut standard, "content", &mut content);
        add_once(&mut standard, "tool_calls", &mut calls);
        standard.finish()
    }

    /// Returns the content, or `None` if the message needs none.
    fn content(&mut self, message: &Members<'_>, role: &str, has_calls: bool) -> Option<String> {
        let refusal = message.get("refusal").filter(|_| role == "assistant").and_then(as_string);
        let refusal = refusal.filter(|refusal| !refusal.is_empty());
        let Some(given) = message.get("content") else {
            let transcript = || Members::parse(message.get("audio")?).string("transcript");
            let text = refusal.or_else(|| transcript().filter(|_| role == "assistant"));
            return match text {
                Some(text) => Some(quote(&text)),
                None if has_calls => {
                    let is_null = message.0.iter().any(|(key, _)| key == "content");
                    is_null.then(|| "null".to_owned())
                }
                None => Some(quote("")),
            };
        };
        if given.starts_with('"') {
            return Some(match refusal {
                None => given.to_owned(),
                Some(refusal) => {
                    let text = as_string(given).unwrap_or_default();
                    quote(&if text.is_empty() { refusal } else { format!("{text}\n{refusal}") })
                }
            });
        }
        let mut parts = Vec::new();
        for part in elements(given) {
            self.add_part(part, role, &mut parts);
        }
        parts.extend(refusal.map(|refusal| StandardPart::text(quote(&refusal))));
        Some(join_parts(&parts, role, Some(given), has_calls))
    }

    /// Converts a `tool_result` block to a message.
    fn tool_result(&mut self, block: &Members<'_>) -> String {
        let mut parts = Vec::new();
        for equivalent in result_equivalents(block) {
            self.add_equivalent(equivalent, "image", "tool", &mut parts);
        }
        let content = join_parts(&parts, "tool", None, false);
        let id = block.get("tool_use_id").unwrap_or(r#""""#);
        object(&[("role", r#""tool""#), ("tool_call_id", id), ("content", &content)])
    }

    fn add_equivalent(
        &mut self,
        equivalent: Equivalent,
        kind: &str,
        role: &str,
        parts: &mut Vec<StandardPart<'_>>,
    ) {
        match equivalent {
            Equivalent::Text(text) => parts.push(StandardPart::text(quote(&text))),
            Equivalent::Attachment(json) => self.add_attachment(Some(json.into()), kind, "", role, parts),
            Equivalent::Named(name) => self.add_attachment(None, kind, &name, role, parts),
        }
    }

    /// Adds an attachment, or the text that replaces it.
    fn add_attachment<'a>(
        &mut self,
        attachment: Option<Cow<'a, str>>,
        kind: &str,
        name: &str,
        role: &str,
        parts: &mut Vec<StandardPart<'a>>,
    ) {
        match attachment {
            Some(json) if role == "user" || self.attachments == Attachments::OfAllMessages => {
                parts.push(StandardPart { json, text: None });
            }
            attachment => {
                self.lacks_attachments |= attachment.is_some();
                parts.push(StandardPart::text(quote(&describe_attachment(kind, name))));
            }
        }
    }

    fn add_part<'a>(&mut self, json: &'a str, role: &str, parts: &mut Vec<StandardPart<'a>>) {
        let part = Members::parse(json);
        let kind = part.string("type").unwrap_or_default();
        let attachment = match kind.as_str() {
            "text" | "input_text" | "output_text" | "refusal" => {
                let text = part.get(if kind == "refusal" { "refusal" } else { "text" }).unwrap_or(r#""""#);
                parts.push(if kind == "text" && part.0.len() == 2 {
                    StandardPart { json: json.into(), text: Some(text.into()) }
                } else {
                    StandardPart::text(text)
                });
                return;
            }
            // Calls are in `tool_calls`.
            "reasoning" | "thinking" | "redacted_thinking" | "tool_use" => return,
            "image_url" | "input_image" => image(&part, json),
            "input_audio" => attachment(&part, json, "input_audio", AUDIO_FIELDS, &["data"]),
            "file" => attachment(&part, json, "file", FILE_FIELDS, FILE_SOURCES),
            "input_file" if has_text(&part, FILE_SOURCES) => {
                Some(object(&[("type", r#""file""#), ("file", &select(&part, FILE_FIELDS))]).into())
            }
            kind => match equivalents(kind, &part) {
                Some(equivalents) => {
                    for equivalent in equivalents {
                        self.add_equivalent(equivalent, kind, role, parts);
                    }
                    return;
                }
                None => None,
            },
        };
        let name = || Members::parse(part.get("file")?).string("filename");
        let name = || name().or_else(|| part.string("filename")).unwrap_or_default();
        self.add_attachment(attachment, &kind, &name(), role, parts);
    }
}

/// Returns the block of a message that is the result of a tool.
fn result_block<'a>(message: &Members<'a>) -> Option<Members<'a>> {
    let content = message.get("content").filter(|content| content.contains("tool_result"))?;
    let block = Members::parse(elements(content).first()?);
    (block.string("type").as_deref() == Some("tool_result")).then_some(block)
}

/// Returns the content of a message with these parts. `given` is the content as it was recorded in the chat format.
fn join_parts(parts: &[StandardPart<'_>], role: &str, given: Option<&str>, has_calls: bool) -> String {
    if parts.is_empty() {
        return if has_calls { "null".to_owned() } else { quote("") };
    }
    let joined = list(&parts.iter().map(|part| &*part.json).collect::<Vec<_>>());
    if given == Some(&*joined) || role == "user" {
        return joined;
    }
    // Many providers accept only a string from assistants and tools.
    let texts: Option<Vec<&str>> = parts.iter().map(|part| part.text.as_deref()).collect();
    match texts.as_deref() {
        Some([text]) => (*text).to_owned(),
        Some(texts) if role != "assistant" => {
            let texts = texts.iter().filter_map(|text| as_string(text)).filter(|text| !text.is_empty());
            quote(&texts.collect::<Vec<_>>().join("\n"))
        }
        _ => joined,
    }
}

const FILE_FIELDS: &[&str] = &["file_data", "file_id", "filename"];
/// The fields of a file of which one is needed.
const FILE_SOURCES: &[&str] = &["file_data", "file_id"];
const AUDIO_FIELDS: &[&str] = &["data", "format"];
const IMAGE_FIELDS: &[&str] = &["url", "detail"];

/// Returns `true` if one of the members is a text that is not empty.
fn has_text(members: &Members<'_>, keys: &[&str]) -> bool {
    let is_text = |json: &str| json.starts_with('"') && json != r#""""#;
    keys.iter().any(|key| members.get(key).is_some_and(is_text))
}

fn add_once(object: &mut ObjectWriter, key: &str, value: &mut Option<String>) {
    if let Some(value) = value.take() {
        object.add(key, &value);
    }
}

/// Returns an object of those members that are listed and not null.
fn select(members: &Members<'_>, keys: &[&str]) -> String {
    let mut selected = ObjectWriter::with_capacity(64);
    for (key, value) in members.0.iter().filter(|(key, value)| keys.contains(&&**key) && *value != "null") {
        selected.add(key, value);
    }
    selected.finish()
}

/// Returns a part whose content is the object `kind` with these fields, or `None` if it has none of the `sources`, which are
/// texts: providers reject the whole list then.
fn attachment<'a>(
    part: &Members<'a>,
    json: &'a str,
    kind: &str,
    fields: &[&str],
    sources: &[&str],
) -> Option<Cow<'a, str>> {
    let content = Members::parse(part.get(kind)?);
    if !has_text(&content, sources) {
        return None;
    }
    if part.are_among(&["type", kind]) && content.are_among(fields) {
        return Some(json.into());
    }
    Some(object(&[("type", &quote(kind)), (kind, &select(&content, fields))]).into())
}

/// Returns the part `image_url` for an image of chat completions, of Mistral (the URL is a string), or of the Responses API.
fn image<'a>(part: &Members<'a>, json: &'a str) -> Option<Cow<'a, str>> {
    let url = part.get("image_url")?;
    if !url.starts_with('"') {
        return attachment(part, json, "image_url", IMAGE_FIELDS, &["url"]);
    }
    if url == r#""""# {
        return None;
    }
    let mut image = ObjectWriter::with_capacity(url.len() + 32);
    image.add("url", url);
    if let Some(detail) = part.get("detail") {
        image.add("detail", detail);
    }
    Some(object(&[("type", r#""image_url""#), ("image_url", &image.finish())]).into())
}

/// Returns the tool calls of an assistant message as functions.
fn calls<'a>(message: &Members<'a>, makes_calls: bool) -> Vec<Cow<'a, str>> {
    let given = message.list("tool_calls");
    if let Some(call) = message.get("function_call").filter(|_| makes_calls && given.is_empty()) {
        let call = Members::parse(call);
        let id = quote(&function_call_id(&call.string("name").unwrap_or_default()));
        return vec![function(&id, &call).into()];
    }
    let blocks = message.list("content").into_iter().filter(|block| block.contains("tool_use"));
    given.into_iter().map(call).chain(blocks.filter_map(call_of_block)).collect()
}

/// Returns the call of a `tool_use` block.
fn call_of_block<'a>(json: &str) -> Option<Cow<'a, str>> {
    let block = Members::parse(json);
    if block.string("type").as_deref() != Some("tool_use") {
        return None;
    }
    let (id, name) = (block.get("id")?, block.get("name")?);
    let arguments = quote(block.get("input").unwrap_or("{}"));
    Some(function(id, &Members(vec![("name".into(), name), ("arguments".into(), &arguments)])).into())
}

fn call(json: &str) -> Cow<'_, str> {
    let call = Members::parse(json);
    let id = call.get("id").unwrap_or(r#""""#);
    if let Some(custom) = call.get("custom").filter(|_| call.get("type") == Some(r#""custom""#)) {
        let custom = Members::parse(custom);
        let arguments = quote(&custom_arguments(&custom.string("input").unwrap_or_default()));
        let name = custom.get("name").unwrap_or(r#""""#);
        return function(id, &Members(vec![("name".into(), name), ("arguments".into(), &arguments)])).into();
    }
    let given = Members::parse(call.get("function").unwrap_or("{}"));
    let is_standard = call.0.len() == 3
        && call.are_among(&["id", "type", "function"])
        && given.are_among(&["name", "arguments"]);
    if is_standard { json.into() } else { function(id, &given).into() }
}

/// Returns a call; `id` is JSON.
fn function(id: &str, function: &Members<'_>) -> String {
    let function = select(function, &["name", "arguments"]);
    object(&[("id", id), ("type", r#""function""#), ("function", &function)])
}

/// Returns a message with all fields except nulls and `extra`. Calls of the older form `function_call`, and their results,
/// have the standard form, because inserted halves of calls have it, too.
pub(super) fn complete(json: &str, makes_calls: bool) -> CompleteForm<'_> {
    if plain_text(json).is_some() {
        return CompleteForm { json: json.into(), additional: String::new(), has_standard_content: true };
    }
    let message = Members::parse(json);
    let mut converter = Converter { attachments: Attachments::OfUsers, lacks_attachments: false };
    let standard = converter.message(&message, makes_calls);
    let standard = Members::parse(&standard);
    // Chat completions accept no blocks of the Anthropic format.
    let is_native = has_anthropic_blocks(json);
    let mut additional = String::new();
    let mut complete = ObjectWriter::with_capacity(json.len());
    for (key, value) in &message.0 {
        let value = match &**key {
            "role" => standard.get("role").map(Cow::Borrowed),
            "content" if is_native => {
                standard.0.iter().find(|(key, _)| key == "content").map(|(_, value)| (*value).into())
            }
            "content" => given_content(&message, &standard),
            "tool_calls" if is_native => None,
            "tool_calls" => (*value != "[]" && *value != "null").then(|| without_nulls(value)),
            "function_call" => {
                let calls = || standard.get("tool_calls").filter(|_| message.list("tool_calls").is_empty());
                if let Some(calls) = calls() {
                    complete.add("tool_calls", calls);
                    continue;
                }
                (*value != "null").then(|| without_nulls(value))
            }
            "extra" => None,
            _ => (*value != "null").then(|| without_nulls(value)),
        };
        let Some(value) = value else { continue };
        // The name counts in its standard form.
        let is_counted = key == "name" && standard.get("name") == Some(&*value);
        if !is_counted && !["role", "content", "tool_calls", "tool_call_id"].contains(&&**key) {
            add_text(&mut additional, key, &value);
        }
        complete.add(&escape_key(key), &value);
    }
    for key in ["tool_call_id", "content", "tool_calls"] {
        let is_missing = message.0.iter().all(|(given, _)| given != key);
        let is_added = if key == "tool_calls" { is_native } else { is_missing };
        if is_added
            && let Some(value) = standard.get(key)
            && (key != "content" || given_content(&message, &standard).is_some())
        {
            complete.add(key, value);
        }
    }
    for part in message.list("content").into_iter().filter(|_| !is_native) {
        add_part_fields(&mut additional, part);
    }
    for call in message.list("tool_calls") {
        add_call_fields(&mut additional, call);
    }
    let complete = complete.finish();
    let json = if complete == json { Cow::Borrowed(json) } else { Cow::Owned(complete) };
    CompleteForm { json, additional, has_standard_content: is_native }
}

/// Returns the content as given, without nulls. Without content, a refusal or audio stands alone.
fn given_content<'a>(message: &Members<'a>, standard: &Members<'a>) -> Option<Cow<'a, str>> {
    match message.get("content") {
        Some("[]") | None if ["refusal", "audio"].iter().any(|key| message.get(key).is_some()) => None,
        Some("[]") | None => {
            standard.0.iter().find(|(key, _)| key == "content").map(|(_, value)| Cow::Borrowed(*value))
        }
        Some(content) => Some(without_nulls(content)),
    }
}

/// Adds the text of a part that its standard form does not contain.
fn add_part_fields(additional: &mut String, json: &str) {
    let part = Members::parse(json);
    let mut parts = Vec::new();
    Converter { attachments: Attachments::OfAllMessages, lacks_attachments: false }
        .add_part(json, "user", &mut parts);
    let is_described = parts.iter().any(|part| part.text.is_some());
    let standard: &[&str] = match part.string("type").as_deref() {
        _ if parts.is_empty() => &[],
        Some("text" | "input_text" | "output_text") => &["type", "text"],
        Some("refusal") => &["type", "refusal"],
        // A text replaces the attachment in the standard form.
        _ if is_described => &["type"],
        Some("image_url" | "input_image") => &["type", "image_url", "detail"],
        Some("input_audio") => &["type", "input_audio"],
        Some("file") => &["type", "file"],
        Some("input_file") => &["type", "file_data", "file_id", "filename"],
        _ => &[],
    };
    for (key, value) in part.0.iter().filter(|(_, value)| *value != "null") {
        let inner: &[&str] = match &**key {
            "image_url" => IMAGE_FIELDS,
            "input_audio" => AUDIO_FIELDS,
            "file" => FILE_FIELDS,
            _ => &[],
        };
        if !standard.contains(&&**key) {
            add_text(additional, key, value);
        } else if !inner.is_empty() {
            add_members_except(additional, value, inner);
        }
    }
}

/// Adds the text of a tool call that its standard form does not contain.
fn add_call_fields(additional: &mut String, json: &str) {
    add_members_except(additional, json, &["id", "type", "function"]);
    if let Some(function) = Members::parse(json).get("function") {
        add_members_except(additional, function, &["name", "arguments"]);
    }
}

fn add_members_except(additional: &mut String, json: &str, keys: &[&str]) {
    for (key, value) in &Members::parse(json).0 {
        if *value != "null" && !keys.contains(&&**key) {
            add_text(additional, key, value);
        }
    }
}

fn add_text(additional: &mut String, key: &str, value: &str) {
    additional.extend(["\"", key, "\":", value, ","]);
}

/// Removes the members of objects that are null.
fn without_nulls(json: &str) -> Cow<'_, str> {
    if !json.contains("null") {
        return json.into();
    }
    if json.starts_with('{') {
        let mut object = ObjectWriter::with_capacity(json.len());
        for (key, value) in Members::parse(json).0.iter().filter(|(_, value)| *value != "null") {
            object.add(&escape_key(key), &without_nulls(value));
        }
        return object.finish().into();
    }
    if json.starts_with('[') {
        return list(&elements(json).into_iter().map(without_nulls).collect::<Vec<_>>()).into();
    }
    json.into()
}
