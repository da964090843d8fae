//! Types shared by all formats.

use super::super::tokens::Tokenizer;
use super::tool_pairing::MissingHalves;
use smallvec::SmallVec;
use std::borrow::Cow;

/// The two roles between which the formats distinguish in a list; results of tool calls belong to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
}

/// A message of the OpenAI format, or a content block of the Anthropic format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RenderedItem<'t> {
    pub(super) speaker: Speaker,
    /// Borrowed from the tail if the stored message is sent as it is.
    pub(super) json: Cow<'t, str>,
}

/// A message of the history in a provider's format, together with inserted halves of tool calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedMessage<'t> {
    /// Usually one, which needs no allocation.
    pub(super) items: SmallVec<[RenderedItem<'t>; 1]>,
    /// Tokens of all items.
    pub tokens: i64,
    /// Additional tokens if the list begins with this message.
    pub tokens_if_first: i64,
    /// Number of items that are not part of the history: see [`super::tool_pairing`].
    pub(super) inserted: usize,
    /// The first item is a call that is not part of the history.
    pub(super) begins_with_inserted_call: bool,
    /// Number of trailing items that stand for missing results of the newest message. The results may still arrive and
    /// replace these items.
    pub(super) provisional: usize,
    pub(super) provisional_tokens: i64,
    /// `seq` and field `extra` of the message, if both were requested and it has one.
    pub(super) extra: Option<(i64, &'t str)>,
}

impl<'t> RenderedMessage<'t> {
    /// Appends an item that is not part of the history.
    pub(super) fn insert(&mut self, item: RenderedItem<'t>, tokens: i64) {
        self.begins_with_inserted_call |= self.items.is_empty();
        self.items.push(item);
        self.inserted += 1;
        self.tokens += tokens;
    }

    /// Appends the missing results of tool calls; `render` returns the item and its tokens for the id of a call.
    pub(super) fn insert_results(
        &mut self,
        missing: &MissingHalves,
        render: impl Fn(&str) -> (RenderedItem<'static>, i64),
    ) {
        for id in &missing.results {
            let (item, tokens) = render(id);
            self.insert(item, tokens);
            if missing.is_last_message {
                self.provisional += 1;
                self.provisional_tokens += tokens;
            }
        }
    }
}

/// The parts of a context, with tokens that are not scaled.
#[derive(Clone, Debug, Default)]
pub struct RenderInput<'t> {
    /// Text of the system message; empty if there is none.
    pub system: String,
    pub system_tokens: i64,
    pub history: Vec<RenderedMessage<'t>>,
    /// The new message of the user.
    pub user_message: Option<RenderedMessage<'t>>,
    /// The next context begins with the same message. `false` if messages had to be omitted.
    pub is_prefix_stable: bool,
    /// Marks the stable prefix for the provider's cache, if the format supports it.
    pub cache_control: bool,
    pub tokenizer: Tokenizer,
}

impl RenderInput<'_> {
    /// Returns the requested fields `extra`; `position_of` returns the position in the list for that of an item.
    pub(super) fn extra(&self, position_of: impl Fn(usize) -> usize) -> Vec<MessageExtra> {
        let mut item = 0;
        let extra_of = |message: &RenderedMessage<'_>| {
            let own = item + usize::from(message.begins_with_inserted_call);
            item += message.items.len();
            message.extra.map(|(seq, json)| MessageExtra {
                seq,
                position: position_of(own),
                json: json.to_owned(),
            })
        };
        self.history.iter().filter_map(extra_of).collect()
    }

    /// Returns the number of stable items of the history, and the tokens of the stable prefix. Each message is scaled
    /// separately.
    pub(super) fn stable_items(&self) -> (usize, i64) {
        let scale = |tokens| self.tokenizer.scale(tokens);
        if !self.is_prefix_stable {
            return (0, scale(self.system_tokens));
        }
        let items = self.history.iter().map(|message| message.items.len() - message.provisional).sum();
        let tokens: i64 =
            self.history.iter().map(|message| scale(message.tokens - message.provisional_tokens)).sum();
        let first = self.history.first().map_or(0, |message| scale(message.tokens_if_first));
        (items, scale(self.system_tokens) + first + tokens)
    }
}

/// A message list that is ready to be sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedContext {
    /// JSON of the system text, if the format has a field for it outside of the list.
    pub system: Option<String>,
    /// The messages as a JSON list.
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

/// Joins JSON values to a JSON list.
pub(super) fn json_list<'j>(values: impl Iterator<Item = &'j str> + Clone) -> String {
    let bytes = values.clone().map(|value| value.len() + 1).sum::<usize>();
    let mut list = String::with_capacity(bytes + 2);
    list.push('[');
    for value in values {
        if list.len() > 1 {
            list.push(',');
        }
        list.push_str(value);
    }
    list.push(']');
    list
}
