//! Reads messages of the formats of model providers, and renders contexts in them. `docs/formats.md` describes the rules.
//!
//! A message is read once, whatever its format is: [`read`]. Everything is accepted that can be stored safely; what a provider would
//! reject is repaired when a list is rendered. A rendered message depends on earlier messages only, except at the end of the list
//! (`RenderedMessage::is_stable`). So a growing list keeps its beginning, which providers can cache. To add a format, add a file next to
//! `openai` and an arm in each function here.

use super::message::object::{Object, as_string, as_text, elements};
use super::message::{self, Element, Message, MessageFields, Part, Role, minify_json};
use super::recall_block::without_block;
use super::tail::{Tail, TailMessage};
use super::validation::FieldError;
use anthropic::ProviderCalls;
use pairing::{IdRule, Pairing, Step};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use utoipa::ToSchema;

mod anthropic;
mod media;
mod openai;
mod pairing;
mod profile;
mod types;

pub use profile::Profile;
pub use types::{
    MessageExtra, Opening, RenderInput, RenderedContext, RenderedMessage, StablePrefix, needs_opening,
};

/// Largest field `extra` of a message, in bytes of its JSON.
const MAX_EXTRA_BYTES: usize = 16 * 1024;

/// The fields of the messages in a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
pub enum Fields {
    /// Only what all providers of the format accept.
    #[default]
    #[serde(rename = "standard")]
    Standard,
    /// Everything that is stored except nulls and `extra`, for providers with fields of their own.
    #[serde(rename = "all")]
    All,
}

named_variants!(Fields { Standard = "standard", All = "all" });

/// The content of the rendered messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    pub fields: Fields,
    /// The rules of the server, in the format `openai`.
    pub profile: Profile,
    /// Returns the fields `extra` next to the list.
    pub include_extra: bool,
    /// A new message of the user follows the history.
    pub has_new_message: bool,
}

/// The chat format of a provider, for contexts and tool definitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String")]
pub enum Format {
    /// OpenAI chat completions.
    #[default]
    #[serde(rename = "openai")]
    OpenAi,
    /// Anthropic messages: `system` next to `messages`, and content blocks.
    #[serde(rename = "anthropic")]
    Anthropic,
}

named_variants!(Format { OpenAi = "openai", Anthropic = "anthropic" });

/// Reads a stored message, in any format.
///
/// # Errors
/// Only if it is no object, or has no role that precis knows.
pub fn read(json: &str) -> Result<Message, FieldError> {
    let message = Object::parse(json);
    if message.0.is_empty() {
        return Err(FieldError::new("", "must be an object with role and content"));
    }
    let roles = Role::ALL.map(Role::as_str).join(", ");
    let role = match message.get("role") {
        Some(name) => {
            let role = as_string(name).and_then(|name| openai::role(&name));
            role.ok_or_else(|| format!("must be one of {roles}"))
        }
        None => Err(match message.string("type") {
            Some(kind) if !kind.is_empty() => {
                let kind: String = kind.chars().take(64).collect();
                format!("missing, one of {roles}: an item of the type {kind:?} is no message")
            }
            _ => format!("missing: one of {roles}"),
        }),
    };
    let mut fields = MessageFields::new(role.map_err(|detail| FieldError::new("role", detail))?);
    // UI messages of the AI SDK have `parts`, messages of LlamaIndex have `blocks`.
    match ["content", "parts", "blocks"].into_iter().find_map(|key| message.get(key)) {
        None => {}
        Some(list) if list.starts_with('[') => {
            fields.is_list = true;
            for json in elements(list) {
                read_element(json, &mut fields);
            }
        }
        Some(part) if Object::parse(part).get("type").is_some() => read_element(part, &mut fields),
        Some(text) => fields.push(Part::Text(as_text(text))),
    }
    openai::read_fields(&message, &mut fields);
    Ok(Message::new(json.to_owned(), fields))
}

/// Reads an element of the content: a part of any format, or a text. Other values are texts, too.
fn read_element(json: &str, fields: &mut MessageFields) {
    let part = Object::parse(json);
    let kind = part.string("type").unwrap_or_default();
    if anthropic::read_block(&kind, &part, json, fields) {
        return;
    }
    let parts = openai::read_part(&kind, &part).unwrap_or_else(|| {
        vec![match part.string("text") {
            Some(text) if kind.is_empty() => Part::Text(text),
            _ if part.0.is_empty() => Part::Text(as_text(json)),
            _ => {
                let kind =
                    if kind.is_empty() { part.0.first().map(|(key, _)| key.to_string()) } else { Some(kind) };
                let (kind, file) = (kind.unwrap_or_default(), part.object("file"));
                let name = file.string("filename").or_else(|| part.string("filename")).unwrap_or_default();
                Part::Other { kind, name, json: json.to_owned() }
            }
        }]
    });
    fields.elements.push(Element { block: None, parts });
}

/// Reads a message of a client, without recalled messages. Each result of a tool in the content of a user becomes a message of its own,
/// and what else the content has follows them.
///
/// # Errors
/// As [`read`], and if `extra` is too large.
pub fn read_given(json: &RawValue) -> Result<Vec<Message>, FieldError> {
    let json = minify_json(&without_block(json.get()));
    let given = Object::parse(&json);
    if let Some(bytes) = given.get("extra").map(str::len).filter(|bytes| *bytes > MAX_EXTRA_BYTES) {
        let detail = format!(
            "has {bytes} bytes, at most {MAX_EXTRA_BYTES} are allowed: store large data elsewhere and refer to it"
        );
        return Err(FieldError::new("extra", detail));
    }
    let blocks = given.list("content");
    let is_user = given.get("role") == Some(r#""user""#);
    let Some((results, others)) = anthropic::split_results(&blocks).filter(|_| is_user) else {
        return Ok(vec![read(&json)?]);
    };
    let others = (!others.is_empty()).then(|| others.join(","));
    let contents = results.into_iter().map(str::to_owned).chain(others).map(|blocks| format!("[{blocks}]"));
    let message = |(index, content): (usize, String)| {
        if index > 0 {
            return read(&format!(r#"{{"role":"user","content":{content}}}"#));
        }
        let mut first = given.clone();
        first.set("content", content);
        read(&first.to_json())
    };
    contents.enumerate().map(message).collect()
}

/// Reads messages from content alone: see [`read_given`].
pub fn read_content(role: Role, content: &RawValue) -> Result<Vec<Message>, FieldError> {
    let content = without_block(content.get());
    if !content.starts_with(['"', '[']) {
        return Err(FieldError::new("", "must be a string or a list of content parts"));
    }
    let json = format!(r#"{{"role":"{role}","content":{content}}}"#);
    read_given(&RawValue::from_string(json).map_err(|error| FieldError::new("", error.to_string()))?)
}

/// Counts the tokens of a message in its standard form in the format `openai`: [`PER_MESSAGE`](super::tokens::PER_MESSAGE), texts and name, an entry and id,
/// name and arguments of each call, and [`PER_ATTACHMENT`](super::tokens::PER_ATTACHMENT) for each attachment.
pub fn count_tokens(message: &Message) -> i64 {
    openai::count(message).total()
}

/// Returns the id of a call as all formats can express it.
pub(super) fn call_id(id: &str) -> String {
    pairing::valid_id(id, pairing::MAX_ID_CHARS)
}

pub(super) use openai::speaker_name;
pub(super) use pairing::{tool_name, valid_arguments};

impl Format {
    /// Renders each message of the tail from `position` on, in the order of the list.
    pub fn render_messages<'t>(
        self,
        options: ListOptions,
        tail: &'t Tail,
        position: usize,
    ) -> Result<Vec<RenderedMessage<'t>>, FieldError> {
        let metadata = tail.metadata().get(position..).unwrap_or_default();
        let rule = match (self, options.fields, options.profile) {
            (Self::OpenAi, Fields::All, _) => IdRule::AsRecorded,
            (Self::OpenAi, _, Profile::Strict) => IdRule::Nine,
            (Self::OpenAi, ..) => IdRule::UpTo(pairing::MAX_ID_CHARS),
            (Self::Anthropic, ..) => IdRule::UpTo(anthropic::MAX_ID_CHARS),
        };
        let first_seq = tail.first_seq().saturating_add(i64::try_from(position).unwrap_or(i64::MAX));
        // A message of a role and a text is copied if the format permits it.
        let is_copied = |json: &str| {
            self == Self::OpenAi && options.profile == Profile::OpenAi && message::plain_text(json).is_some()
        };
        let parsed = |stored: TailMessage<'t>| {
            let message = (!is_copied(stored.json)).then(|| read(stored.json)).transpose()?;
            Ok((stored, message))
        };
        let messages = tail.messages(position).map(parsed).collect::<Result<Vec<_>, FieldError>>()?;
        let pairing = Pairing::of(metadata, first_seq, rule);
        Ok(List { format: self, options, pairing: &pairing, messages: &messages }.render())
    }

    /// Joins the parts of a context to a list.
    pub fn render_context(self, input: RenderInput<'_>) -> RenderedContext {
        let inserted = input.history.iter().map(|message| message.inserted).sum();
        let context = match self {
            Self::OpenAi => openai::render_context(&input),
            Self::Anthropic => anthropic::render_context(input),
        };
        RenderedContext { inserted, ..context }
    }
}

/// A list that is rendered.
struct List<'l, 't> {
    format: Format,
    options: ListOptions,
    pairing: &'l Pairing,
    /// Each stored message, and its parts unless the stored JSON is copied.
    messages: &'l [(TailMessage<'t>, Option<Message>)],
}

impl<'t> List<'_, 't> {
    fn message(&self, position: usize) -> Option<&Message> {
        self.messages.get(position)?.1.as_ref()
    }

    /// Returns the role of a step, and its message unless it is copied.
    fn of_step(&self, step: &Step) -> (Option<Role>, Option<&Message>) {
        match *step {
            Step::Message(position) => {
                let role = self.messages.get(position).map(|(stored, _)| stored.metadata.role);
                (role, self.message(position))
            }
            Step::MissingResult { .. } => (Some(Role::Tool), None),
        }
    }

    fn render(&self) -> Vec<RenderedMessage<'t>> {
        let steps = &self.pairing.steps;
        let mut provider_calls = ProviderCalls::default();
        let turn = |step: &Step| {
            let (role, message) = self.of_step(step);
            provider_calls.read(message, role == Some(Role::Assistant))
        };
        let turns: Vec<usize> = steps.iter().map(turn).collect();
        if self.options.has_new_message {
            provider_calls.read(None, false);
        }
        let is_open = self.format == Format::Anthropic && provider_calls.is_last_open();
        let open_turn = turns.last().filter(|_| is_open);
        let mut rendered = Vec::with_capacity(steps.len());
        for ((index, step), turn) in steps.iter().enumerate().zip(&turns) {
            let is_stable = index < self.pairing.stable_steps && Some(turn) != open_turn;
            let mut message = RenderedMessage { is_stable, ..RenderedMessage::default() };
            match *step {
                Step::MissingResult { position, call } => self.insert_result(&mut message, position, call),
                Step::Message(position) => {
                    message.position = position;
                    if self.pairing.is_orphan(position) {
                        self.insert_call(&mut message);
                    }
                    self.render_message(&mut message, (&provider_calls, *turn));
                }
            }
            let next = steps.get(index + 1).map(|step| self.of_step(step).0);
            self.insert_answer(&mut message, self.of_step(step).0, next.flatten());
            rendered.push(message);
        }
        rendered
    }

    /// Returns the name of the tool that a call names, which Gemini needs in results.
    fn tool(&self, position: usize, call: usize) -> Option<Cow<'_, str>> {
        let message = self.message(position).filter(|_| self.options.profile == Profile::Gemini)?;
        message.tool_calls().get(call).map(|call| tool_name(&call.name))
    }

    fn insert_call(&self, message: &mut RenderedMessage<'_>) {
        let id = self.pairing.result_id(message.position);
        match self.format {
            Format::OpenAi => openai::insert_call(message, id, self.options.profile),
            Format::Anthropic => anthropic::insert_call(message, id),
        }
        (message.inserted, message.before) = (1, 1);
    }

    fn insert_result(&self, message: &mut RenderedMessage<'_>, position: usize, call: usize) {
        (message.position, message.inserted) = (position, 1);
        let id = self.pairing.call_id(position, call);
        match self.format {
            Format::OpenAi => openai::insert_result(message, id, self.tool(position, call).as_deref()),
            Format::Anthropic => anthropic::insert_result(message, id),
        }
    }

    /// Inserts an answer after results, if the user speaks next and the profile does not permit that.
    fn insert_answer(&self, message: &mut RenderedMessage<'_>, role: Option<Role>, next: Option<Role>) {
        let next_speaks = match next {
            Some(next) => !matches!(next, Role::Assistant | Role::Tool),
            None => self.options.has_new_message,
        };
        let is_strict = self.format == Format::OpenAi && self.options.profile == Profile::Strict;
        if is_strict && role == Some(Role::Tool) && next_speaks {
            openai::insert_answer(message);
            message.inserted += 1;
        }
    }

    fn render_message(&self, rendered: &mut RenderedMessage<'t>, turn: (&ProviderCalls, usize)) {
        let Some((stored, message)) = self.messages.get(rendered.position) else { return };
        let (tokens, profile, position) = (stored.metadata.tokens, self.options.profile, rendered.position);
        if self.options.include_extra {
            rendered.extra = message::extra(stored.json).map(|extra| (stored.seq, extra));
        }
        let speaker = openai::speaker(stored.metadata.role, profile);
        let Some(message) = message else { return rendered.push(speaker, stored.json, tokens) };
        if self.format == Format::Anthropic {
            return anthropic::render_message(rendered, message, self.pairing, turn, tokens);
        }
        let of_call = self.pairing.call_of(position).and_then(|(of, call)| self.tool(of, call));
        let is_result = message.role() == Role::Tool && profile == Profile::Gemini;
        let tool = of_call.or_else(|| is_result.then_some(pairing::EARLIER_CALL.into()));
        let place = openai::Place { pairing: self.pairing, position, profile, tool };
        let (json, tokens) = match self.options.fields {
            Fields::Standard => openai::render_message(message, &place, tokens),
            Fields::All => openai::render_complete(message, &place, tokens),
        };
        rendered.push(speaker, json, tokens);
    }
}
