//! The OpenAI format (chat completions): reading its messages, and rendering messages with the fields that all providers accept, or with
//! all fields.

use super::media;
use super::pairing::{self, EARLIER_CALL, MAX_ID_CHARS, NO_ARGUMENTS, NO_RESULT, Pairing};
use super::profile::{self, EMPTY_MESSAGE, NO_ANSWER, NO_SIGNATURE, Profile, SYSTEM_MARK};
use super::types::{Count, RenderInput, RenderedContext, RenderedMessage, Speaker, StablePrefix, join};
use crate::domain::message::object::{Object, as_text, quote, without_nulls};
use crate::domain::message::{Message, MessageFields, Part, Role, Source, ToolCall};
use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;

/// The role of a result in the older form of tool calls, which chat completions still accept.
const FUNCTION_ROLE: &str = "function";
/// Longest name of a speaker that OpenAI accepts.
const MAX_SPEAKER_CHARS: usize = 64;
/// Number of characters of a file name, or of a part type, that are shown to a model.
pub(super) const MAX_SHOWN_CHARS: usize = 200;

/// Reads a role of chat completions.
pub(super) fn role(name: &str) -> Option<Role> {
    if name == FUNCTION_ROLE { Some(Role::Tool) } else { Role::parse(name) }
}

/// Reads everything except the content, which was read before.
pub(super) fn read_fields(message: &Object<'_>, fields: &mut MessageFields) {
    fields.name = message.string("name").filter(|name| !name.is_empty());
    if fields.role == Role::Tool && fields.result_of.is_none() {
        let name = fields.name.as_deref().unwrap_or_default();
        let is_function = message.string("role").as_deref() == Some(FUNCTION_ROLE);
        let id = if is_function { function_call_id(name) } else { message.text("tool_call_id") };
        fields.result_of = Some(id);
    }
    if fields.role != Role::Assistant {
        return;
    }
    let refusal = message.string("refusal").filter(|refusal| !refusal.is_empty());
    if let Some(refusal) = refusal {
        fields.push(Part::Refusal(refusal));
    }
    let audio = message.object("audio");
    if !audio.0.is_empty() {
        let has_text =
            fields.elements.iter().flat_map(|element| &element.parts).any(|part| part.text().is_some());
        let transcript = audio.string("transcript").filter(|_| !has_text).unwrap_or_default();
        fields.push(Part::Voice { id: audio.text("id"), transcript });
    }
    let calls = message.list("tool_calls");
    for call in calls.iter().filter(|call| call.starts_with('{')) {
        fields.push_call(read_call(&Object::parse(call)), None);
    }
    let function = message.object("function_call");
    if calls.is_empty()
        && let Some(name) = function.string("name").filter(|name| !name.is_empty())
    {
        let (id, arguments) = (function_call_id(&name), function.text("arguments"));
        fields.push_call(ToolCall { id, name, arguments, signature: None }, None);
    }
}

/// Reads a call. Other tools than functions have their name and input in other fields.
fn read_call(call: &Object<'_>) -> ToolCall {
    let (function, custom) = (call.object("function"), call.object("custom"));
    let inside = if function.0.is_empty() { call } else { &function };
    let (name, arguments) = if custom.0.is_empty() {
        let arguments = ["arguments", "args", "input"].iter().find_map(|key| inside.get(key));
        (inside.text("name"), arguments.map(as_text).unwrap_or_default())
    } else {
        (custom.text("name"), json!({"input": custom.text("input")}).to_string())
    };
    let extra = call.object("extra_content");
    let google = extra.object("google");
    ToolCall { id: call.text("id"), name, arguments, signature: google.string("thought_signature") }
}

/// Reads a content part; `None` for parts that the format does not have.
pub(super) fn read_part(kind: &str, part: &Object<'_>) -> Option<Vec<Part>> {
    // Attachments that cannot be sent are compared by their data.
    let other = |name: Option<String>, data: &str| Part::Other {
        kind: kind.to_owned(),
        name: name.unwrap_or_default(),
        json: quote(data),
    };
    let part = match kind {
        "text" | "input_text" | "output_text" => Part::Text(part.text("text")),
        "refusal" => Part::Refusal(part.text("refusal")),
        // Thoughts are neither text of the conversation nor an attachment.
        "reasoning" | "thinking" | "redacted_thinking" => return Some(Vec::new()),
        "image_url" | "input_image" => {
            let inside = part.object("image_url");
            let detail = inside.string("detail").or_else(|| part.string("detail"));
            let detail =
                detail.filter(|detail| ["auto", "low", "high", "original"].contains(&detail.as_str()));
            let url = inside.string("url").or_else(|| part.string("image_url"))?;
            match media::image_url(&url) {
                Some(source) => Part::Image { source, detail },
                None => other(None, &url),
            }
        }
        "input_audio" => {
            let audio = part.object("input_audio");
            let base64 = media::normal_base64(&audio.string("data")?)?;
            Part::Audio { base64, format: audio.string("format")?.to_ascii_lowercase() }
        }
        "file" | "input_file" => {
            let inside = part.object("file");
            let file = if inside.0.is_empty() { part } else { &inside };
            let text = |key| file.string(key).filter(|text| !text.is_empty());
            let source = |data: &String| media::file_data(None, data);
            let (data, name) = (text("file_data"), text("filename"));
            match data.as_ref().and_then(source).or_else(|| text("file_id").map(Source::Id)) {
                Some(source) => Part::File { source, name: name.unwrap_or_default() },
                None => other(name, &data?),
            }
        }
        _ => return None,
    };
    Some(vec![part])
}

/// Returns the id of a call in the form `function_call`, which has none. Its result names the function, too.
fn function_call_id(name: &str) -> String {
    let id = format!("function_{name}");
    if id.len() <= MAX_ID_CHARS {
        return id;
    }
    format!("function_{}", hex::encode(Sha256::digest(name).get(..12).unwrap_or_default()))
}

/// Returns the name of a speaker as OpenAI accepts it.
pub(in super::super) fn speaker_name(name: &str) -> String {
    let valid = |c: char| if c.is_whitespace() || "<|\\/>".contains(c) { '_' } else { c };
    name.trim().chars().map(valid).take(MAX_SPEAKER_CHARS).collect()
}

/// Returns the text that replaces a part that cannot be sent.
pub(super) fn describe(part: &Part) -> String {
    let shorten = |text: &str| text.chars().take(MAX_SHOWN_CHARS).collect::<String>();
    let (kind, name) = match part {
        Part::Other { kind, name, .. } => (kind.as_str(), name.as_str()),
        Part::File { name, .. } => ("file", name.as_str()),
        part => (part.attachment_type().unwrap_or_default(), ""),
    };
    let description = match kind {
        "image_url" | "input_image" | "image" => "an image".to_owned(),
        "input_audio" => "audio".to_owned(),
        "file" | "input_file" | "document" if !name.trim().is_empty() => {
            format!("the file {:?}", shorten(name))
        }
        "file" | "input_file" | "document" | "container_upload" => "a file".to_owned(),
        kind => format!("a part of the type {:?}", shorten(kind)),
    };
    format!("({description} that can't be shown here)")
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<Cow<'a, str>>,
    content: Content<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatCall<'a>>,
}

/// A call. A map of JSON values takes ten times its memory, and a message can have 249,000 calls.
#[derive(Serialize)]
struct ChatCall<'a> {
    id: Cow<'a, str>,
    r#type: &'static str,
    function: ChatFunction<'a>,
    /// The signature of the thought before the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_content: Option<Value>,
}

#[derive(Serialize)]
struct ChatFunction<'a> {
    name: Cow<'a, str>,
    arguments: Cow<'a, str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    /// Only next to calls.
    None(()),
    Text(Cow<'a, str>),
    Parts(Vec<ChatPart<'a>>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ChatPart<'a> {
    Text { text: Cow<'a, str> },
    ImageUrl { image_url: Map<String, Value> },
    InputAudio { input_audio: Value },
    File { file: Map<String, Value> },
}

impl<'a> ChatPart<'a> {
    /// Converts a part. Chat completions accept attachments of users only.
    fn of(part: &'a Part, is_user: bool) -> Option<Self> {
        let object = |members: Vec<(&str, Option<String>)>| {
            let members =
                members.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.into())));
            members.collect()
        };
        let url = |source: &Source| match source {
            Source::Url(url) => Some(url.clone()),
            Source::Data { media_type, base64 } => Some(format!("data:{media_type};base64,{base64}")),
            Source::Id(_) => None,
        };
        Some(match part {
            Part::Call(_) => return None,
            Part::Image { source, detail } if is_user && let Some(url) = url(source) => {
                Self::ImageUrl { image_url: object(vec![("url", Some(url)), ("detail", detail.clone())]) }
            }
            Part::Audio { base64, format } if is_user => {
                Self::InputAudio { input_audio: json!({"data": base64, "format": format}) }
            }
            Part::File { source, name } if is_user => {
                let id = if let Source::Id(id) = source { Some(id.clone()) } else { None };
                let name = Some(name.clone()).filter(|name| !name.trim().is_empty());
                Self::File {
                    file: object(vec![("file_data", url(source)), ("file_id", id), ("filename", name)]),
                }
            }
            part => {
                let text = part.text().map_or_else(|| describe(part).into(), Cow::Borrowed);
                return (!text.is_empty()).then_some(Self::Text { text });
            }
        })
    }
}

/// The place of a message in a list.
pub(super) struct Place<'p> {
    pub(super) pairing: &'p Pairing,
    pub(super) position: usize,
    pub(super) profile: Profile,
    /// The name of the tool whose result the message is.
    pub(super) tool: Option<Cow<'p, str>>,
}

impl Place<'_> {
    /// Returns `true` if the message is sent in its standard form: nothing in the list changes an id.
    fn is_standard(&self, message: &Message) -> bool {
        let is_same = |recorded: &str, id: &str| pairing::valid_id(recorded, MAX_ID_CHARS) == id;
        let mut calls = message.tool_calls().iter().enumerate();
        self.profile == Profile::OpenAi
            && message.tool_call_id().is_none_or(|id| is_same(id, self.pairing.result_id(self.position)))
            && calls.all(|(index, call)| is_same(&call.id, self.pairing.call_id(self.position, index)))
    }
}

/// Converts a message, and returns the pieces that count. Without a list, ids are only made valid.
fn convert<'a>(message: &'a Message, place: Option<&'a Place<'_>>) -> (ChatMessage<'a>, Count<'a>) {
    let (given, profile) = (message.role(), place.map_or(Profile::OpenAi, |place| place.profile));
    let role = profile.role(given);
    let mut count = Count::default().entry();
    let mut parts: Vec<ChatPart<'a>> =
        message.parts().filter_map(|part| ChatPart::of(part, given == Role::User)).collect();
    if given.is_instruction() && role == Role::User {
        parts.insert(0, ChatPart::Text { text: SYSTEM_MARK.into() });
    }
    if parts.is_empty() && profile != Profile::OpenAi && role != Role::Tool && message.tool_calls().is_empty()
    {
        parts.push(ChatPart::Text { text: EMPTY_MESSAGE.into() });
    }
    let texts: Option<Vec<&str>> = parts
        .iter()
        .map(|part| if let ChatPart::Text { text } = part { Some(&**text) } else { None })
        .collect();
    let keeps_list = given == Role::User && message.is_list() && profile != Profile::Strict;
    // Many providers accept only a string from tools, and strict templates from everyone.
    let content = match texts {
        Some(texts)
            if texts.len() > 1
                && (profile == Profile::Strict || !matches!(given, Role::User | Role::Assistant)) =>
        {
            Content::Text(texts.join("\n").into())
        }
        _ if parts.is_empty() && !message.tool_calls().is_empty() => Content::None(()),
        _ if parts.is_empty() => Content::Text("".into()),
        _ => match parts.pop() {
            Some(ChatPart::Text { text }) if parts.is_empty() && !keeps_list => Content::Text(text),
            last => Content::Parts(parts.into_iter().chain(last).collect()),
        },
    };
    match &content {
        Content::None(()) => {}
        Content::Text(text) => count = count.text(text.clone()),
        Content::Parts(parts) => {
            for part in parts {
                count = match part {
                    ChatPart::Text { text } => count.text(text.clone()),
                    _ => count.attachment(),
                };
            }
        }
    }
    let tool = place.and_then(|place| place.tool.as_deref()).map(str::to_owned);
    let name =
        message.name().filter(|_| role != Role::Tool).map(speaker_name).filter(|name| !name.is_empty());
    let name = name.or(tool);
    count = name.iter().fold(count, |count, name| count.text(name.clone()));
    let tool_call_id = message.tool_call_id().map(|id| match place {
        Some(place) => Cow::Borrowed(place.pairing.result_id(place.position)),
        None => pairing::valid_id(id, MAX_ID_CHARS).into(),
    });
    count = tool_call_id.iter().fold(count, |count, id| count.text(id.clone()));
    let mut tool_calls = Vec::new();
    for (index, call) in message.tool_calls().iter().enumerate() {
        let id = place.map_or_else(
            || pairing::valid_id(&call.id, MAX_ID_CHARS).into(),
            |place| Cow::Borrowed(place.pairing.call_id(place.position, index)),
        );
        let (name, arguments) = (pairing::tool_name(&call.name), pairing::valid_arguments(&call.arguments));
        let none = (index == 0).then_some(NO_SIGNATURE);
        let signature = call.signature.as_deref().or(none).filter(|_| profile == Profile::Gemini);
        let (call, sent) = chat_call(id, name, arguments, signature);
        count.add(sent);
        tool_calls.push(call);
    }
    (ChatMessage { role: role.as_str(), name, tool_call_id, content, tool_calls }, count)
}

/// Returns a call, and the pieces of it that count.
fn chat_call<'a>(
    id: Cow<'a, str>,
    name: Cow<'a, str>,
    arguments: Cow<'a, str>,
    signature: Option<&'a str>,
) -> (ChatCall<'a>, Count<'a>) {
    let mut count = Count::default().entry().text(id.clone()).text(name.clone()).text(arguments.clone());
    if let Some(signature) = signature {
        count = count.text(signature);
    }
    let extra_content = signature.map(|signature| json!({"google": {"thought_signature": signature}}));
    let function = ChatFunction { name, arguments };
    (ChatCall { id, r#type: "function", function, extra_content }, count)
}

/// Returns the pieces of a message in its standard form, which count when it is stored.
pub(super) fn count(message: &Message) -> Count<'_> {
    convert(message, None).1
}

pub(super) fn speaker(role: Role, profile: Profile) -> Speaker {
    match profile.role(role) {
        Role::Assistant => Speaker::Assistant,
        Role::System => Speaker::System,
        _ => Speaker::User,
    }
}

/// Returns the message with the fields that all providers accept, and its tokens, if `stored` were counted when it was stored.
pub(super) fn render_message(message: &Message, place: &Place<'_>, stored: i64) -> (String, i64) {
    let (chat, sent) = convert(message, Some(place));
    let tokens = if place.is_standard(message) { stored } else { sent.relative_to(&count(message), stored) };
    (encode(&chat), tokens)
}

/// Returns the message with all fields except nulls and `extra`. A message of the Anthropic format, or of the older form of calls, has
/// the standard fields, because chat completions have no place for the others.
pub(super) fn render_complete(message: &Message, place: &Place<'_>, stored: i64) -> (String, i64) {
    let given = Object::parse(message.json());
    let is_older =
        given.get("function_call").is_some() || given.string("role").as_deref() == Some(FUNCTION_ROLE);
    if is_older || message.elements().iter().any(|element| element.block.is_some()) {
        return render_message(message, place, stored);
    }
    let mut complete = given.clone();
    let has_calls = !given.list("tool_calls").is_empty();
    let is_whole = ["refusal", "audio"].iter().any(|key| given.get(key).is_some());
    let is_empty = |value: &str| matches!(value, "null" | "[]");
    complete.0.retain(|(key, value)| match &**key {
        "extra" => false,
        "content" => !is_empty(value) || !is_whole,
        "tool_calls" => has_calls,
        _ => value != "null",
    });
    for (key, value) in &mut complete.0 {
        *value = without_nulls(value).into();
        if key == "content" && is_empty(value) {
            *value = if has_calls { "null" } else { "\"\"" }.into();
        }
    }
    if complete.get("content").is_none() && !has_calls && !is_whole {
        complete.set("content", quote(""));
    }
    let is_counted = |(key, value): &(Cow<'_, str>, Cow<'_, str>)| match &**key {
        "content" => value.starts_with('"'),
        key => matches!(key, "role" | "tool_call_id"),
    };
    // The data of attachments of users are no text.
    let is_standard = message.role() == Role::User || complete.0.iter().all(is_counted);
    let complete = complete.to_json();
    let tokens = if is_standard {
        stored
    } else {
        Count::default().entry().text(complete.as_str()).total().max(stored)
    };
    (complete, tokens)
}

fn encode(message: &impl Serialize) -> String {
    serde_json::to_string(message).unwrap_or_else(|_| unreachable!("texts and values are always JSON"))
}

/// Adds a call that is not recorded.
pub(super) fn insert_call(rendered: &mut RenderedMessage<'_>, id: &str, profile: Profile) {
    let signature = (profile == Profile::Gemini).then_some(NO_SIGNATURE);
    let (call, count) = chat_call(id.into(), EARLIER_CALL.into(), NO_ARGUMENTS.into(), signature);
    let json = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    rendered.push(Speaker::Assistant, json.to_string(), count.entry().total());
}

/// Adds a result that is not recorded.
pub(super) fn insert_result(rendered: &mut RenderedMessage<'_>, id: &str, tool: Option<&str>) {
    let mut json = json!({"role": "tool", "tool_call_id": id, "content": NO_RESULT});
    let mut count = Count::default().entry().text(id).text(NO_RESULT);
    if let Some((tool, members)) = tool.zip(json.as_object_mut()) {
        members.insert("name".to_owned(), tool.into());
        count = count.text(tool);
    }
    rendered.push(Speaker::User, json.to_string(), count.total());
}

/// Adds an answer that is not recorded.
pub(super) fn insert_answer(rendered: &mut RenderedMessage<'_>) {
    let json = json!({"role": "assistant", "content": NO_ANSWER});
    rendered.push(Speaker::Assistant, json.to_string(), Count::default().entry().text(NO_ANSWER).total());
}

/// Returns the list with its system message and its opening, by the rules of the profile.
pub(super) fn render_context(input: &RenderInput<'_>) -> RenderedContext {
    let (stable_items, tokens) = input.stable_items();
    let system = &input.system.text;
    let system = (!system.is_empty()).then(|| format!(r#"{{"role":"system","content":{}}}"#, quote(system)));
    let opening =
        input.has_opening().then(|| json!({"role": "user", "content": &input.opening.text}).to_string());
    let rendered = input.history.iter().chain(&input.user_message);
    let items = || rendered.clone().flat_map(|message| &message.items);
    // System messages keep their place at the beginning when an answer follows.
    let leading = items().take_while(|item| item.speaker == Speaker::System).count();
    let (notes, rest) = (items().take(leading), items().skip(leading));
    let position = |item: usize| {
        usize::from(system.is_some())
            + item
            + if item >= leading { usize::from(opening.is_some()) } else { 0 }
    };
    let mut stable = StablePrefix { messages: position(stable_items), blocks: None, tokens };
    if stable_items == leading {
        stable.messages -= usize::from(opening.is_some());
    }
    let (notes, rest) = (notes.map(|item| &*item.json), rest.map(|item| &*item.json));
    let items = system.as_deref().into_iter().chain(notes).chain(opening.as_deref()).chain(rest);
    if input.profile == Profile::OpenAi {
        let messages = join(items);
        let extra = input.extra(position);
        return RenderedContext { messages, stable, extra, ..RenderedContext::default() };
    }
    let (messages, positions) = profile::apply(input.profile, items);
    let merged = |item: usize| positions.get(item).copied().unwrap_or(messages.len());
    // The last message can receive the next one of its role.
    stable.messages = merged(stable.messages).min(messages.len().saturating_sub(1));
    let extra = input.extra(|item| merged(position(item)));
    RenderedContext { messages: encode(&messages), stable, extra, ..RenderedContext::default() }
}
