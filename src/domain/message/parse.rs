//! Parses and validates a message in the OpenAI chat format.
//!
//! The text of a message, including its content parts, is parsed in one pass. A model has been paid for the messages of a
//! turn, so an error is only what cannot be understood: other fields are kept.

use super::super::json::{self, MapOnly};
use super::super::validation::FieldError;
use super::blocks::{Equivalent, block_errors, equivalents, result_equivalents};
use super::members::Members;
use super::minify_json;
use super::parts::{Content, MessageParts, Role, ToolCall, custom_arguments, function_call_id, shorten_type};
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{DeserializeOwned, Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// The role of a result in the older form of tool calls, which chat completions still accept.
const FUNCTION_ROLE: &str = "function";
/// Largest field `extra` of a message, in bytes of its JSON.
const MAX_EXTRA_BYTES: usize = 16 * 1024;
/// Number of errors after which the other parts and calls of a message are not checked: a message can have millions of them.
const MAX_ERRORS: usize = 1000;
/// The types of content parts, for error texts.
const KNOWN_PARTS: &str = "text, input_text, output_text, refusal, image_url, input_image, input_audio, file, input_file, \
    reasoning or thinking";

/// The source of a message, which decides about unknown content parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A request: unknown content parts are errors, because their text would be lost.
    Client,
    /// A request in the Anthropic format, with its content blocks.
    AnthropicClient,
    /// The database or an export. Earlier versions accepted all types of content parts.
    Stored,
}

/// The fields that the rules read. All other fields are kept in the JSON text only.
#[derive(Deserialize)]
struct RawMessage<'a> {
    role: Option<String>,
    /// Read for errors only: the type of an item of the Responses API.
    r#type: Option<&'a RawValue>,
    name: Option<String>,
    #[serde(borrow)]
    content: Option<RawContent<'a>>,
    /// Only a string is a refusal; any other value is kept and ignored.
    refusal: Option<&'a RawValue>,
    tool_calls: Option<Vec<MapOnly<RawToolCall<'a>>>>,
    /// The older form of a tool call; any value of another type is kept and ignored.
    function_call: Option<&'a RawValue>,
    /// A spoken answer; only its transcript is read.
    audio: Option<&'a RawValue>,
    /// Data of an adapter, which no model receives.
    extra: Option<&'a RawValue>,
    tool_call_id: Option<String>,
}

enum RawContent<'a> {
    Text(String),
    Parts(Vec<MapOnly<RawContentPart<'a>>>),
}

#[derive(Deserialize)]
struct RawContentPart<'a> {
    #[serde(borrow)]
    r#type: Option<Cow<'a, str>>,
    text: Option<String>,
    refusal: Option<String>,
    /// The fields of content blocks in the Anthropic format.
    id: Option<&'a RawValue>,
    name: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    tool_use_id: Option<&'a RawValue>,
    content: Option<&'a RawValue>,
    is_error: Option<&'a RawValue>,
    source: Option<&'a RawValue>,
    title: Option<&'a RawValue>,
}

/// Calls and results in the content of a message in the Anthropic format.
#[derive(Default)]
struct CallBlocks {
    calls: Vec<ToolCall>,
    /// The ids of the calls.
    ids: HashSet<String>,
    /// The id of the call that the first result answers.
    result_of: Option<String>,
}

#[derive(Deserialize)]
struct RawToolCall<'a> {
    id: Option<String>,
    r#type: Option<String>,
    function: Option<MapOnly<RawFunction>>,
    /// The content of a call of the type `custom`.
    #[serde(borrow)]
    custom: Option<&'a RawValue>,
}

/// A call of a custom tool, whose input is text.
#[derive(Default, Deserialize)]
struct RawCustom {
    name: Option<String>,
    input: Option<String>,
}

/// A spoken answer.
#[derive(Deserialize)]
struct RawAudio {
    transcript: Option<String>,
}

#[derive(Default, Deserialize)]
struct RawFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl<'de: 'a, 'a> Deserialize<'de> for RawContent<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawContentVisitor)
    }
}

struct RawContentVisitor;

impl<'de> Visitor<'de> for RawContentVisitor {
    type Value = RawContent<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of content parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<RawContent<'de>, E> {
        Ok(RawContent::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<RawContent<'de>, E> {
        Ok(RawContent::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<RawContent<'de>, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(RawContent::Parts)
    }
}

/// Parses a message. Returns all invalid fields, not only the first one.
pub(super) fn parse(json: &str, source: Source) -> Result<MessageParts, Vec<FieldError>> {
    if !json.trim_ascii_start().starts_with('{') {
        return Err(vec![FieldError::new("", "must be an object with role and content")]);
    }
    match json::read::<RawMessage<'_>>(json) {
        Ok(message) => message.validate(source),
        // Serde stops at the first field of a wrong type. The errors of the other fields show without that field, but a
        // missing field may then be a consequence of the removal.
        Err(error) => {
            let other_fields = json::remove_field(json, json::top_level_key(&error.field));
            let mut errors = vec![error];
            if let Some(Err(others)) = other_fields.map(|json| parse(&json, source)) {
                let is_missing = |error: &FieldError| {
                    !error.field.contains(['.', '[']) && error.detail.starts_with("missing")
                };
                errors.extend(others.into_iter().filter(|error| !is_missing(error)));
            }
            Err(errors)
        }
    }
}

impl RawMessage<'_> {
    fn validate(self, source: Source) -> Result<MessageParts, Vec<FieldError>> {
        let mut errors = Vec::new();
        if let Some(extra) = self.extra.filter(|_| source != Source::Stored) {
            errors.extend(check_extra(extra).err());
        }
        let is_function = self.role.as_deref() == Some(FUNCTION_ROLE);
        let mut role = parse_role(self.role.as_deref(), self.r#type, &mut errors);
        let by_assistant = role == Some(Role::Assistant);
        let mut blocks = CallBlocks::default();
        let content = self.content.map(|content| content.validate(source, role, &mut blocks, &mut errors));
        let refusal: Option<String> = self.refusal.filter(|_| by_assistant).and_then(parse_raw);
        let has_content = content.is_some();
        let mut content = content.unwrap_or_default();
        content.append(refusal.as_deref().unwrap_or_default());
        if by_assistant && !has_content && refusal.as_ref().is_none_or(String::is_empty) {
            let audio: Option<RawAudio> = self.audio.and_then(parse_raw);
            content.append(&audio.and_then(|audio| audio.transcript).unwrap_or_default());
        }
        let mut tool_calls = validate_tool_calls(self.tool_calls.unwrap_or_default(), &mut errors);
        if role.is_some() && !by_assistant && !tool_calls.is_empty() {
            errors.push(FieldError::new("tool_calls", "only an assistant message makes tool calls"));
        }
        if by_assistant && tool_calls.is_empty() {
            tool_calls.extend(self.function_call.and_then(parse_raw).and_then(RawFunction::into_call));
        }
        let ids = tool_calls.iter().map(|call| &call.id).collect::<HashSet<_>>();
        if let Some(repeated) = blocks.calls.iter().find(|call| ids.contains(&call.id)) {
            let detail = format!("the id {:?} is used twice in this message", repeated.id);
            errors.push(FieldError::new("content", detail));
        }
        tool_calls.append(&mut blocks.calls);
        // Answers of assistants and results of tools can be empty.
        if role == Some(Role::User) && !has_content {
            errors.push(FieldError::new("content", "missing: a string or a list of content parts"));
        }
        let name = self.name.as_deref().filter(|name| !name.is_empty());
        let given_id = self.tool_call_id.filter(|id| !id.is_empty());
        let tool_call_id = if is_function { name.map(function_call_id) } else { given_id };
        let has_result = blocks.result_of.is_some();
        let tool_call_id = if has_result {
            role = Some(Role::Tool);
            blocks.result_of
        } else {
            tool_call_id
        };
        if is_function && tool_call_id.is_none() {
            let detail = "missing: a function message names the function whose result it is";
            errors.push(FieldError::new("name", detail));
        } else if role == Some(Role::Tool) && !has_result && tool_call_id.is_none() {
            let detail = "missing: a tool message names the tool call whose result it is";
            errors.push(FieldError::new("tool_call_id", detail));
        }
        if role.is_some_and(|role| role != Role::Tool) && tool_call_id.is_some() {
            errors.push(FieldError::new("tool_call_id", "only a tool message is the result of a tool call"));
        }
        match role {
            Some(role) if errors.is_empty() => {
                let name = self.name;
                Ok(MessageParts { role, name, content, refusal, tool_calls, tool_call_id })
            }
            _ => Err(errors),
        }
    }
}

/// Checks the field `extra`: a JSON object of limited size.
fn check_extra(extra: &RawValue) -> Result<(), FieldError> {
    if !extra.get().starts_with('{') {
        return Err(FieldError::new("extra", "must be a JSON object"));
    }
    let bytes = minify_json(extra.get()).len();
    if bytes <= MAX_EXTRA_BYTES {
        return Ok(());
    }
    let detail = format!(
        "has {bytes} bytes, at most {MAX_EXTRA_BYTES} are allowed: store large data elsewhere and refer to it"
    );
    Err(FieldError::new("extra", detail))
}

/// Parses a value that is ignored if it has another type.
fn parse_raw<T: DeserializeOwned>(raw: &RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

impl RawFunction {
    /// Returns the call of a field `function_call`.
    fn into_call(self) -> Option<ToolCall> {
        let (name, arguments) = (self.name.filter(|name| !name.is_empty())?, self.arguments?);
        Some(ToolCall { id: function_call_id(&name), name, arguments })
    }
}

fn parse_role(
    name: Option<&str>,
    item_type: Option<&RawValue>,
    errors: &mut Vec<FieldError>,
) -> Option<Role> {
    let role = name.and_then(|name| if name == FUNCTION_ROLE { Some(Role::Tool) } else { Role::parse(name) });
    if role.is_none() {
        let detail = match name {
            None => item_type
                .and_then(parse_raw::<String>)
                .as_deref()
                .and_then(explain_item)
                .unwrap_or_else(|| "missing: one of user, assistant, tool".to_owned()),
            Some("system" | "developer") => {
                "the system prompt is not part of a history: send it as system_prompt of the context request"
                    .to_owned()
            }
            Some(_) => "one of user, assistant, tool".to_owned(),
        };
        errors.push(FieldError::new("role", detail));
    }
    role
}

/// Returns how to send an item of the Responses API that is not a message.
fn explain_item(item_type: &str) -> Option<String> {
    let advice = match item_type {
        "function_call" | "custom_tool_call" => "send it in tool_calls of a message with the role assistant",
        "reasoning" => "leave it out, or send it as a content part of a message with the role assistant",
        kind if kind.ends_with("_call_output") => "send it as a message with the role tool",
        kind if kind.ends_with("_call") => "leave it out",
        _ => return None,
    };
    let shown = shorten_type(item_type);
    Some(format!("missing: {shown} is an item of the Responses API, not a message: {advice}"))
}

fn validate_tool_calls(calls: Vec<MapOnly<RawToolCall<'_>>>, errors: &mut Vec<FieldError>) -> Vec<ToolCall> {
    let mut valid = Vec::with_capacity(calls.len());
    let mut ids = HashSet::with_capacity(calls.len());
    for (index, MapOnly(call)) in calls.into_iter().enumerate() {
        if errors.len() >= MAX_ERRORS {
            break;
        }
        let mut push = |field: &str, detail| {
            errors.push(FieldError::new(format!("tool_calls[{index}].{field}"), detail));
        };
        let is_custom = call.r#type.as_deref() == Some("custom");
        if call.r#type.is_some_and(|kind| kind != "function" && kind != "custom") {
            push("type", "must be \"function\" or \"custom\"");
        }
        let id = call.id.unwrap_or_default();
        if id.is_empty() {
            push("id", "missing: the result of the call repeats it");
        }
        let (name, arguments) = if is_custom {
            let custom: RawCustom = call.custom.and_then(parse_raw).unwrap_or_default();
            if custom.input.is_none() {
                push("custom.input", "missing: the text that the model wrote for the tool");
            }
            (custom.name, custom.input.as_deref().map(custom_arguments))
        } else {
            let function = call.function.map(|MapOnly(function)| function).unwrap_or_default();
            if function.arguments.is_none() {
                push("function.arguments", "missing: a string of JSON text");
            }
            (function.name, function.arguments)
        };
        let name = name.unwrap_or_default();
        if name.is_empty() {
            let field = if is_custom { "custom.name" } else { "function.name" };
            push(field, "missing: the name of the tool");
        }
        if !ids.insert(id.clone()) {
            push("id", "used twice in this message");
        }
        valid.push(ToolCall { id, name, arguments: arguments.unwrap_or_default() });
    }
    valid
}

impl RawContent<'_> {
    fn validate(
        self,
        source: Source,
        role: Option<Role>,
        blocks: &mut CallBlocks,
        errors: &mut Vec<FieldError>,
    ) -> Content {
        let parts = match self {
            Self::Text(text) => return Content { text, ..Content::default() },
            Self::Parts(parts) => parts,
        };
        let mut content = Content { is_list: true, ..Content::default() };
        for (index, MapOnly(part)) in parts.into_iter().enumerate() {
            if errors.len() >= MAX_ERRORS {
                break;
            }
            let mut push = |field: &str, detail: String| {
                errors.push(FieldError::new(format!("content[{index}].{field}"), detail));
            };
            if source != Source::Client && part.read_block(role, &mut content, blocks, &mut push) {
                if source == Source::AnthropicClient {
                    let kind = part.r#type.as_deref().unwrap_or_default();
                    for (field, detail) in block_errors(kind, &part.block()) {
                        push(&field, detail);
                    }
                }
                continue;
            }
            match (part.r#type.as_deref().unwrap_or_default(), part.text, part.refusal) {
                ("text" | "input_text" | "output_text", Some(text), _) | ("refusal", _, Some(text)) => {
                    content.append(&text);
                }
                ("refusal", ..) => push("refusal", "missing: a string".to_owned()),
                ("text" | "input_text" | "output_text", ..) => push("text", "missing: a string".to_owned()),
                // Thoughts are neither text of the conversation nor an attachment.
                ("reasoning" | "thinking" | "redacted_thinking", ..) => {}
                (kind @ ("image_url" | "input_image" | "input_audio" | "file" | "input_file"), ..) => {
                    content.attachment_types.push(kind.to_owned());
                }
                ("", ..) => {
                    push("type", "missing: text, image_url or another type of the chat format".to_owned());
                }
                (kind, ..) if source == Source::Stored => content.attachment_types.push(kind.to_owned()),
                (kind, ..) => push("type", advice_for_unknown_part(kind, source)),
            }
        }
        content
    }
}

impl RawContentPart<'_> {
    fn block(&self) -> Members<'_> {
        let fields = [
            ("id", self.id),
            ("name", self.name),
            ("input", self.input),
            ("tool_use_id", self.tool_use_id),
            ("content", self.content),
            ("is_error", self.is_error),
            ("source", self.source),
            ("title", self.title),
        ];
        let fields = fields.into_iter().filter_map(|(key, value)| Some((key.into(), value?.get())));
        Members(fields.collect())
    }

    /// Reads a block that only the Anthropic format has. Returns `false` for all other parts.
    fn read_block(
        &self,
        role: Option<Role>,
        content: &mut Content,
        blocks: &mut CallBlocks,
        push: &mut impl FnMut(&str, String),
    ) -> bool {
        let (kind, block) = (self.r#type.as_deref().unwrap_or_default(), self.block());
        let mut text = |key: &str, detail: &str| {
            let text = block.string(key).unwrap_or_default();
            if text.is_empty() {
                push(key, format!("missing: {detail}"));
            }
            text
        };
        let found = match kind {
            "tool_use" => {
                let id = text("id", "the result of the call repeats it");
                let name = text("name", "the name of the tool");
                let arguments = block.get("input").unwrap_or("{}").to_owned();
                if !arguments.starts_with('{') {
                    push("input", "must be an object".to_owned());
                }
                if role.is_some_and(|role| role != Role::Assistant) {
                    push("type", "only an assistant message calls tools".to_owned());
                }
                if !blocks.ids.insert(id.clone()) {
                    push("id", "used twice in this message".to_owned());
                }
                blocks.calls.push(ToolCall { id, name, arguments });
                return true;
            }
            "tool_result" => {
                let id = text("tool_use_id", "the result names the call");
                if role.is_some_and(|role| role != Role::User) {
                    push("type", "only a user message has results of tools".to_owned());
                }
                blocks.result_of.get_or_insert(id);
                result_equivalents(&block)
            }
            kind => match equivalents(kind, &block) {
                Some(found) => found,
                None => return false,
            },
        };
        for equivalent in found {
            match equivalent {
                Equivalent::Text(text) => content.append(&text),
                Equivalent::Attachment(_) | Equivalent::Named(_) => {
                    let kind = if kind == "tool_result" { "image" } else { kind };
                    content.attachment_types.push(kind.to_owned());
                }
            }
        }
        true
    }
}

/// Returns how to send what an unknown content part expresses. Such a part is rejected, because its text would be lost.
fn advice_for_unknown_part(kind: &str, source: Source) -> String {
    let equivalent = match kind {
        "tool_use" | "tool_result" | "image" | "document" | "server_tool_use" | "web_search_tool_result"
            if source == Source::Client =>
        {
            "send the exchange with \"format\": \"anthropic\""
        }
        "function_call" | "tool_call" | "tool-call" => "send the call in tool_calls",
        "function_call_output" | "tool-result" => "send the result as a message with the role tool",
        _ => {
            return format!(
                "{:?} is no known type of content part: send {KNOWN_PARTS}, and data of an adapter in the field \
                 extra of the message",
                shorten_type(kind)
            );
        }
    };
    format!("{kind} is no content part of the chat format: {equivalent}")
}
