//! Types shared by all formats.

use super::Profile;
use crate::domain::context::SystemMessage;
use crate::domain::tokens::{PER_ATTACHMENT, PER_MESSAGE, Tokenizer, count_text};
use std::borrow::Cow;
use std::collections::HashMap;

/// The roles between which the formats distinguish in a list; results of tool calls belong to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
    /// A system message between others.
    System,
}

/// A message of the OpenAI format, or a content block of the Anthropic format.
#[derive(Clone, Debug)]
pub(super) struct RenderedItem<'t> {
    pub(super) speaker: Speaker,
    pub(super) json: Cow<'t, str>,
}

/// A message of the history in a provider's format, or the inserted result of a call.
#[derive(Clone, Debug, Default)]
pub struct RenderedMessage<'t> {
    pub(super) items: Vec<RenderedItem<'t>>,
    /// Tokens of all items.
    pub tokens: i64,
    /// Position of the message among those that are rendered. An inserted result has the position of its call.
    pub position: usize,
    /// Number of items that are not part of the history: see [`super::pairing`].
    pub(super) inserted: usize,
    /// Number of inserted items before the message.
    pub(super) before: usize,
    /// No later message of the history changes the message or its place.
    pub(super) is_stable: bool,
    /// `seq` and field `extra` of the message, if both were requested and it has one.
    pub(super) extra: Option<(i64, String)>,
}

impl<'t> RenderedMessage<'t> {
    pub(super) fn push(&mut self, speaker: Speaker, json: impl Into<Cow<'t, str>>, tokens: i64) {
        self.items.push(RenderedItem { speaker, json: json.into() });
        self.tokens += tokens;
    }

    /// Returns `true` if a list that begins with this message needs an opening: its first message must be one of the user. `following` is
    /// the answer for the list that begins after it.
    pub fn needs_opening(&self, following: bool) -> bool {
        match self.items.first().map(|item| item.speaker) {
            Some(Speaker::Assistant) => true,
            Some(Speaker::User) => false,
            Some(Speaker::System) | None => following,
        }
    }
}

/// Returns `true` if a list of these messages needs an opening. `following` is the answer for the list that begins after them.
pub fn needs_opening(messages: &[RenderedMessage<'_>], following: bool) -> bool {
    messages.iter().rev().fold(following, |following, message| message.needs_opening(following))
}

/// The texts of a message whose tokens count, in any order, and the tokens of its markers and attachments. The tokens of another form of the
/// same message follow from the stored count: only texts that differ are counted again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Count<'a> {
    fixed: i64,
    texts: Vec<Cow<'a, str>>,
}

impl<'a> Count<'a> {
    /// Adds the markers of a message, a block or a call.
    pub(super) fn entry(mut self) -> Self {
        self.fixed += PER_MESSAGE;
        self
    }

    pub(super) fn text(mut self, text: impl Into<Cow<'a, str>>) -> Self {
        self.texts.push(text.into());
        self
    }

    pub(super) fn attachment(mut self) -> Self {
        self.fixed += PER_ATTACHMENT;
        self
    }

    pub(super) fn add(&mut self, other: Self) {
        self.fixed += other.fixed;
        self.texts.extend(other.texts);
    }

    /// Returns the number of tokens.
    pub(super) fn total(&self) -> i64 {
        self.fixed + self.texts.iter().map(|text| count_text(text)).sum::<i64>()
    }

    /// Returns the number of tokens, if `other` has `tokens`.
    pub(super) fn relative_to(&self, other: &Self, tokens: i64) -> i64 {
        let mut difference: HashMap<&str, i64> = HashMap::new();
        self.texts.iter().for_each(|text| *difference.entry(text).or_default() += 1);
        other.texts.iter().for_each(|text| *difference.entry(text).or_default() -= 1);
        let changed = difference.into_iter().filter(|(_, times)| *times != 0);
        tokens + self.fixed - other.fixed + changed.map(|(text, times)| times * count_text(text)).sum::<i64>()
    }
}

/// A text of the user at the beginning of a list that would otherwise begin with the assistant, which some providers reject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    pub text: String,
    /// Tokens of the message.
    pub tokens: i64,
}

impl Default for Opening {
    fn default() -> Self {
        Self::new("(The conversation began earlier.)".to_owned())
    }
}

impl Opening {
    pub fn new(text: String) -> Self {
        Self { tokens: PER_MESSAGE + count_text(&text), text }
    }

    /// Returns the opening of a list in the middle of a turn: `text` is the beginning of the turn.
    pub fn of_turn(seq: i64, text: &str) -> Self {
        Self::new(format!(
            "(The summary has the beginning of this turn, which is not over yet. It began with message {seq}:)\n\n{text}"
        ))
    }
}

/// The parts of a context, with tokens that are not scaled.
#[derive(Clone, Debug, Default)]
pub struct RenderInput<'t> {
    pub system: SystemMessage,
    pub history: Vec<RenderedMessage<'t>>,
    /// The first message of a list that would otherwise begin with the assistant.
    pub opening: Opening,
    /// The new message of the user.
    pub user_message: Option<RenderedMessage<'t>>,
    /// The next context begins with the same message. `false` if messages had to be omitted.
    pub is_prefix_stable: bool,
    /// Marks the stable prefix for the provider's cache, if the format supports it.
    pub cache_control: bool,
    pub profile: Profile,
    pub tokenizer: Tokenizer,
}

impl RenderInput<'_> {
    /// Returns the requested fields `extra`; `position_of` returns the position in the list for that of an item.
    pub(super) fn extra(&self, position_of: impl Fn(usize) -> usize) -> Vec<MessageExtra> {
        let mut item = 0;
        let extra_of = |message: &RenderedMessage<'_>| {
            let own = item + message.before;
            item += message.items.len();
            let (seq, json) = message.extra.clone()?;
            Some(MessageExtra { seq, position: position_of(own), json })
        };
        self.history.iter().filter_map(extra_of).collect()
    }

    /// Returns the number of stable items of the history, and the tokens of the stable prefix. Each message is scaled
    /// separately.
    pub(super) fn stable_items(&self) -> (usize, i64) {
        let scale = |tokens| self.tokenizer.scale(tokens);
        let (mut items, mut tokens) = (0, scale(self.system.tokens));
        if self.is_prefix_stable {
            tokens += if self.has_opening() { scale(self.opening.tokens) } else { 0 };
            for message in self.history.iter().take_while(|message| message.is_stable) {
                items += message.items.len();
                tokens += scale(message.tokens);
            }
        }
        (items, tokens)
    }

    /// Returns `true` if the list needs its opening.
    pub(super) fn has_opening(&self) -> bool {
        let new = self.user_message.as_ref().is_some_and(|message| message.needs_opening(false));
        needs_opening(&self.history, new)
    }
}

/// A message list that is ready to be sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedContext {
    /// JSON of the system text, if the format has a field for it outside of the list.
    pub system: Option<String>,
    /// A JSON list.
    pub messages: String,
    pub stable: StablePrefix,
    /// Number of calls and results in the list that are not part of the history.
    pub inserted: usize,
    /// Empty unless requested.
    pub extra: Vec<MessageExtra>,
}

/// The field `extra` of a message of the history. It is data of an adapter and is not part of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageExtra {
    pub seq: i64,
    /// Position in the list of the message that contains the message of the history.
    pub position: usize,
    /// A JSON object.
    pub json: String,
}

/// The beginning of a list that will also be the beginning of the next list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StablePrefix {
    pub messages: usize,
    /// Number of stable content blocks of the last message, in formats with content blocks.
    pub blocks: Option<usize>,
    /// Scaled tokens.
    pub tokens: i64,
}

/// Joins items to a JSON list.
pub(super) fn join<'j>(items: impl Iterator<Item = &'j str>) -> String {
    let mut list = "[".to_owned();
    for item in items {
        if list.len() > 1 {
            list.push(',');
        }
        list.push_str(item);
    }
    list.push(']');
    list
}
