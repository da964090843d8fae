//! Types shared by all formats.

use super::tool_pairing::MissingHalves;
use crate::domain::tail::{StoredJson, Tail};
use crate::domain::tokens::{PER_MESSAGE, Tokenizer, count_text};
use bytes::Bytes;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::ops::Range;

/// The two roles between which the formats distinguish in a list; results of tool calls belong to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
}

/// A message of the OpenAI format, or a content block of the Anthropic format.
#[derive(Clone, Debug)]
pub(super) struct RenderedItem<'t> {
    pub(super) speaker: Speaker,
    pub(super) json: ItemJson<'t>,
}

/// The JSON of an item.
#[derive(Clone, Debug)]
pub(super) enum ItemJson<'t> {
    /// The message is sent as it is stored.
    Stored(StoredJson<'t>),
    Text(Cow<'t, str>),
}

impl From<String> for ItemJson<'_> {
    fn from(json: String) -> Self {
        Self::Text(json.into())
    }
}

impl<'t> From<&'t str> for ItemJson<'t> {
    fn from(json: &'t str) -> Self {
        Self::Text(json.into())
    }
}

impl ItemJson<'_> {
    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Stored(json) => json.as_str(),
            Self::Text(json) => json,
        }
    }
}

/// A message of the history in a provider's format, together with inserted halves of tool calls. It is small, because each context
/// makes one for each message.
#[derive(Clone, Debug, Default)]
pub struct RenderedMessage<'t> {
    /// Usually one, which needs no allocation.
    pub(super) items: SmallVec<[RenderedItem<'t>; 1]>,
    /// Tokens of all items.
    pub tokens: i64,
    /// `None` for most messages.
    insertions: Option<Box<Insertions>>,
    /// `seq` and field `extra` of the message, if both were requested and it has one.
    pub(super) extra: Option<(i64, &'t str)>,
}

/// The items of a rendered message that are not part of the history: see [`super::tool_pairing`].
#[derive(Clone, Copy, Debug, Default)]
struct Insertions {
    count: usize,
    /// The first item is a call that is not part of the history.
    begin_with_call: bool,
    /// Number of trailing items that stand for missing results of the newest message. The results may still arrive and
    /// replace these items.
    provisional: usize,
    provisional_tokens: i64,
}

impl<'t> RenderedMessage<'t> {
    /// Returns the message with one item, without insertions.
    pub(super) fn of(item: RenderedItem<'t>, tokens: i64) -> Self {
        Self { items: SmallVec::from_buf([item]), tokens, ..Self::default() }
    }

    /// Appends an item that is not part of the history.
    pub(super) fn insert(&mut self, item: RenderedItem<'t>, tokens: i64) {
        let insertions = self.insertions.get_or_insert_default();
        insertions.begin_with_call |= self.items.is_empty();
        insertions.count += 1;
        self.items.push(item);
        self.tokens += tokens;
    }

    /// Appends the missing results of tool calls; `render` returns the item and its tokens for the id of a call.
    pub(super) fn insert_results(
        &mut self,
        missing: &MissingHalves<'_>,
        render: impl Fn(&str) -> (RenderedItem<'static>, i64),
    ) {
        for id in &missing.results {
            let (item, tokens) = render(id);
            self.insert(item, tokens);
            if missing.is_last_message {
                let insertions = self.insertions.get_or_insert_default();
                insertions.provisional += 1;
                insertions.provisional_tokens += tokens;
            }
        }
    }

    fn insertions(&self) -> Insertions {
        self.insertions.as_deref().copied().unwrap_or_default()
    }

    /// Returns `true` if a list needs an opening before this message: its first message must be one of the user.
    pub fn needs_opening(&self) -> bool {
        self.items.first().is_some_and(|item| item.speaker == Speaker::Assistant)
    }

    /// Returns the number of items that are not part of the history.
    pub(super) fn inserted(&self) -> usize {
        self.insertions().count
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
    /// Text of the system message as the inside of a JSON string; empty if there is none.
    pub system_json: String,
    pub system_tokens: i64,
    pub history: Vec<RenderedMessage<'t>>,
    /// The first message of a list that would otherwise begin with the assistant.
    pub opening: Opening,
    /// The tail that the history was rendered from.
    pub tail: Option<&'t Tail>,
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
            let own = item + usize::from(message.insertions().begin_with_call);
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
        let (mut items, mut tokens) = (0, 0);
        for message in &self.history {
            let Insertions { provisional, provisional_tokens, .. } = message.insertions();
            items += message.items.len() - provisional;
            tokens += scale(message.tokens - provisional_tokens);
        }
        let opening = if self.has_opening() { scale(self.opening.tokens) } else { 0 };
        (items, scale(self.system_tokens) + opening + tokens)
    }

    /// Returns `true` if the list needs its opening.
    pub(super) fn has_opening(&self) -> bool {
        self.history.first().or(self.user_message.as_ref()).is_some_and(RenderedMessage::needs_opening)
    }
}

/// A message list that is ready to be sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedContext {
    /// JSON of the system text, if the format has a field for it outside of the list.
    pub system: Option<String>,
    pub messages: MessageList,
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

/// The messages of a context as a JSON list, in pieces. Stored messages are not copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageList {
    pieces: Vec<Bytes>,
}

impl MessageList {
    /// Joins the items. Those that are stored in `tail` one after the other are one piece.
    pub(super) fn new<'t>(
        tail: Option<&Tail>,
        items: impl Iterator<Item = &'t ItemJson<'t>> + Clone,
    ) -> Self {
        let mut text_bytes = 0;
        items.clone().for_each(|item| {
            if let ItemJson::Text(text) = item {
                text_bytes += text.len() + 1;
            }
        });
        let mut list = ListBuilder {
            tail,
            pieces: Vec::new(),
            text: String::with_capacity(text_bytes + 2),
            stored: 0..0,
        };
        list.text.push('[');
        // `for_each`, because `flat_map` and `chain` implement it without a check for each item.
        let mut is_first = true;
        items.for_each(|item| {
            list.push(item, is_first);
            is_first = false;
        });
        list.end_stored();
        list.text.push(']');
        list.end_text();
        Self { pieces: list.pieces }
    }

    /// Returns the list as consecutive pieces, each of which is UTF-8.
    pub fn into_pieces(self) -> Vec<Bytes> {
        self.pieces
    }

    /// Returns the size of the JSON.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Returns the list in one piece.
    pub fn to_json(&self) -> Vec<u8> {
        self.pieces.concat()
    }
}

/// A list that is being made.
struct ListBuilder<'t> {
    tail: Option<&'t Tail>,
    pieces: Vec<Bytes>,
    /// The text after the pieces.
    text: String,
    /// Positions of the consecutive messages of the tail that follow the text; empty if there are none.
    stored: Range<usize>,
}

impl ListBuilder<'_> {
    fn push(&mut self, item: &ItemJson<'_>, is_first: bool) {
        let position = match item {
            ItemJson::Stored(json) => self.tail.and_then(|tail| json.position_in(tail)),
            ItemJson::Text(_) => None,
        };
        if let Some(position) = position
            && self.stored.end == position
            && !self.stored.is_empty()
        {
            self.stored.end += 1;
            return;
        }
        self.end_stored();
        if !is_first {
            self.text.push(',');
        }
        match position {
            Some(position) => self.stored = position..position + 1,
            None => self.text.push_str(item.as_str()),
        }
    }

    /// Makes pieces of the messages of the tail, and of the text before them.
    fn end_stored(&mut self) {
        if !self.stored.is_empty() {
            self.end_text();
            let stored = std::mem::take(&mut self.stored);
            self.pieces.extend(self.tail.map(|tail| tail.list_part(stored)).into_iter().flatten());
        }
    }

    fn end_text(&mut self) {
        if !self.text.is_empty() {
            self.pieces.push(std::mem::take(&mut self.text).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::message::Message;
    use crate::domain::message_metadata::{ContextMessage, MessageMetadata};
    use crate::domain::tail::TailMessage;
    use proptest::prelude::*;

    fn tail(messages: i64) -> Tail {
        let message = |seq| {
            let text = "x".repeat(2000);
            let message = Message::from_stored(format!(r#"{{"role":"user","content":"{seq}{text}"}}"#));
            let message = message.expect("a message");
            let json = message.json().to_owned();
            ContextMessage { seq, metadata: MessageMetadata::new(&message, 1), json }
        };
        Tail::new(1, (1..=messages).map(message).collect())
    }

    fn stored(message: TailMessage<'_>) -> ItemJson<'_> {
        ItemJson::Stored(message.stored())
    }

    proptest! {
        /// Joins messages of the tail in any order, those of another tail, and texts.
        #[test]
        fn list_in_pieces_equals_joined_items(chosen in prop::collection::vec((0usize..3, 0usize..9), 0..12)) {
            let (own, other) = (tail(9), tail(9));
            let items: Vec<ItemJson<'_>> = chosen
                .into_iter()
                .map(|(kind, position)| match kind {
                    0 => own.messages(position).next().map(stored),
                    1 => other.messages(position).next().map(stored),
                    _ => Some(position.to_string().into()),
                })
                .map(|item| item.expect("a message"))
                .collect();
            let joined: Vec<&str> = items.iter().map(ItemJson::as_str).collect();
            let list = MessageList::new(Some(&own), items.iter());
            prop_assert_eq!(String::from_utf8(list.to_json()).unwrap(), format!("[{}]", joined.join(",")));
        }
    }

    #[test]
    fn most_of_a_chunk_is_a_piece_without_a_copy() {
        // A chunk of 32 KiB holds 16 of these messages.
        let tail = tail(33);
        let chunks = |position| {
            let items: Vec<ItemJson<'_>> = tail.messages(position).map(stored).collect();
            let pieces = MessageList::new(Some(&tail), items.iter()).into_pieces();
            <[Bytes; 5]>::try_from(pieces)
                .map(|[_, first, second, third, _]| [first, second, third])
                .expect("three chunks")
        };
        let is_shared = |position| {
            let (list, again) = (chunks(position), chunks(position));
            [0, 1, 2].map(|chunk| list[chunk].as_ptr() == again[chunk].as_ptr())
        };
        assert_eq!(is_shared(1), [true, true, true]);
        assert_eq!(is_shared(10), [false, true, true], "six messages would keep ten others in memory");
    }
}
