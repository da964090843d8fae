//! What is sent to a model, in the format that its interface takes. `docs/formats.md` has the rules.
//!
//! A stored message becomes a [`RenderedMessage`]: itself, and what has to stand before or behind it so that the interfaces take
//! the list. Pieces don't depend on what follows them, with one exception that is said ([`RenderedMessage::open`]): so a list
//! that grows has the one before it as its beginning. A format is a file beside `openai`, with an arm in each
//! function here.

use super::message_metadata::ContextMessage;
use super::tokens::Tokenizer;
use super::validation::FieldError;
use serde::Deserialize;
use tool_pairing::MissingHalves;
use utoipa::ToSchema;

mod anthropic;
mod openai;
mod tool_pairing;

/// The chat format of a provider, for contexts and tool definitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(try_from = "String")]
pub enum Format {
    /// OpenAI chat completions: messages exactly as they were stored.
    #[default]
    #[schema(rename = "openai")]
    OpenAi,
    /// Anthropic messages: `system` next to `messages`, and content blocks.
    #[schema(rename = "anthropic")]
    Anthropic,
}

/// Parses from a string only; a derived implementation would also accept an object such as `{"openai": null}`.
impl TryFrom<String> for Format {
    type Error = String;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        match name.as_str() {
            "openai" => Ok(Self::OpenAi),
            "anthropic" => Ok(Self::Anthropic),
            _ => Err(format!("unknown value `{name}`, expected `openai` or `anthropic`")),
        }
    }
}

/// Who speaks, as far as formats tell them apart in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaker {
    User,
    Assistant,
}

/// A message of [`Format::OpenAi`], a content block of [`Format::Anthropic`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    speaker: Speaker,
    json: String,
}

/// What a message becomes in a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedMessage {
    parts: Vec<Part>,
    /// Tokens of all its parts.
    pub tokens: i64,
    /// Tokens of what stands before it where the list begins with it.
    pub tokens_as_first: i64,
    /// Parts that are no part of the history: see [`tool_pairing`].
    inserted: usize,
    /// How many of its last parts say that a call has no result, while nothing has followed yet: the result may still
    /// come in their place.
    open: usize,
    open_tokens: i64,
}

/// A list, ready to be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedContext {
    /// JSON of what stands beside the messages; the format may have no such place.
    pub system: Option<String>,
    /// JSON of each message.
    pub messages: Vec<String>,
    /// What of it will be the same in the next list.
    pub stable: StablePrefix,
    /// Calls and results in it that are no part of the history.
    pub inserted: usize,
}

/// The beginning of a list that will be the beginning of the next one, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StablePrefix {
    /// So many messages.
    pub messages: usize,
    /// Of the last of them, so many content blocks, where the format has them: others may follow.
    pub blocks: Option<usize>,
    /// Tokens of it, scaled.
    pub tokens: i64,
}

/// What a list is made of. Its tokens are not scaled.
#[derive(Clone, Debug, Default)]
pub struct RenderInput {
    /// The text of the system message; empty: there is none.
    pub system: String,
    /// Its tokens.
    pub system_tokens: i64,
    /// The messages that are sent of the history.
    pub history: Vec<RenderedMessage>,
    /// The new message.
    pub user_message: Option<RenderedMessage>,
    /// Whether the next list begins with the same message. It does unless messages have to be left out.
    pub is_prefix_stable: bool,
    /// Whether the stable part is marked for the provider's cache, where the format has such marks.
    pub cache_control: bool,
    /// What its tokens are scaled by.
    pub tokenizer: Tokenizer,
}

impl Format {
    /// How many bytes [`Self::pieces`] reads and writes for these messages, at most about: the measure of how long it takes.
    #[must_use]
    pub fn work(self, window: &[ContextMessage]) -> usize {
        match self {
            // Stored messages go out as they are; results that have to be put in are written.
            Self::OpenAi => {
                let calls = window.iter().flat_map(|message| &message.metadata.calls);
                calls.map(|id| id.len() + tool_pairing::NO_RESULT.len()).sum()
            }
            Self::Anthropic => window.iter().map(|message| message.json.len()).sum(),
        }
    }

    /// What these messages become, one piece for each.
    ///
    /// # Errors
    /// A stored text is no message.
    pub fn pieces(self, window: Vec<ContextMessage>) -> Result<Vec<RenderedMessage>, Vec<FieldError>> {
        let missing_halves = tool_pairing::missing_halves(window.iter().map(|message| &message.metadata));
        let messages = window.into_iter().zip(missing_halves);
        match self {
            Self::OpenAi => Ok(messages
                .map(|(message, missing_halves)| openai::piece(message, &missing_halves))
                .collect()),
            Self::Anthropic => {
                let mut ids = anthropic::Ids::default();
                messages
                    .map(|(message, missing_halves)| anthropic::piece(message, &missing_halves, &mut ids))
                    .collect()
            }
        }
    }

    /// The list of what is to be sent.
    #[must_use]
    pub fn list(self, draft: RenderInput) -> RenderedContext {
        let inserted = draft.history.iter().map(|piece| piece.inserted).sum();
        let list = match self {
            Self::OpenAi => openai::list(draft),
            Self::Anthropic => anthropic::list(draft),
        };
        RenderedContext { inserted, ..list }
    }
}

impl RenderedMessage {
    /// Adds a part that is no part of the history.
    fn insert(&mut self, part: Part, tokens: i64) {
        self.parts.push(part);
        self.inserted += 1;
        self.tokens += tokens;
    }

    /// Adds results that are no part of the history; `last`: nothing follows them yet.
    fn insert_results(&mut self, missing_halves: &MissingHalves, result: impl Fn(&str) -> (Part, i64)) {
        for id in &missing_halves.results {
            let (part, tokens) = result(id);
            self.insert(part, tokens);
            if missing_halves.last {
                self.open += 1;
                self.open_tokens += tokens;
            }
        }
    }
}

impl RenderInput {
    /// How many parts of the history are stable, and the tokens of all that is, each message scaled by itself.
    fn stable(&self) -> (usize, i64) {
        let scale = |tokens| self.tokenizer.scale(tokens);
        if !self.is_prefix_stable {
            return (0, scale(self.system_tokens));
        }
        let parts: usize = self.history.iter().map(|piece| piece.parts.len() - piece.open).sum();
        let tokens: i64 = self.history.iter().map(|piece| scale(piece.tokens - piece.open_tokens)).sum();
        let first = self.history.first().map_or(0, |piece| scale(piece.tokens_as_first));
        (parts, scale(self.system_tokens) + first + tokens)
    }
}
