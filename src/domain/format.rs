//! Renders contexts in the formats of model providers. `docs/formats.md` describes the rules.
//!
//! A stored message becomes a [`RenderedMessage`]: the message itself, and the halves of tool calls that must be inserted
//! before or after it. A rendered message depends on earlier messages only, with one exception
//! (`RenderedMessage::provisional`). So a growing list keeps its beginning, which providers can cache. To add a format,
//! add a file next to `openai` and an arm in each function here.

use super::message;
use super::message_metadata::MessageMetadata;
use super::tail::Tail;
use super::validation::FieldError;
use serde::{Deserialize, Serialize};
use tool_pairing::MissingHalves;
use utoipa::ToSchema;

mod anthropic;
mod openai;
mod tool_pairing;
mod types;

pub use types::{
    MessageExtra, MessageList, Opening, RenderInput, RenderedContext, RenderedMessage, StablePrefix,
};

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
    /// Returns the fields `extra` next to the list.
    pub include_extra: bool,
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

/// Returns the id of a call as the Anthropic format has it, except for repeated ids.
pub(super) fn anthropic_call_id(id: &str) -> String {
    anthropic::valid_id(id)
}

/// Returns the name of a tool as the Anthropic format has it.
pub(super) fn anthropic_tool_name(name: &str) -> String {
    anthropic::tool_name(name)
}

impl Format {
    /// Estimates how many bytes [`Self::render_messages`] reads and writes for these messages.
    pub fn estimate_bytes(self, options: ListOptions, tail: &Tail) -> usize {
        match (self, options.fields) {
            // Standard messages are sent as they are stored; only inserted results are made.
            (Self::OpenAi, Fields::Standard) => {
                let calls = tail.metadata().iter().flat_map(MessageMetadata::calls);
                calls.map(|id| id.len() + tool_pairing::NO_RESULT.len()).sum()
            }
            (Self::OpenAi, Fields::All) | (Self::Anthropic, _) => tail.bytes(),
        }
    }

    /// Renders each message of the tail from `position` on.
    pub fn render_messages(
        self,
        options: ListOptions,
        tail: &Tail,
        position: usize,
    ) -> Result<Vec<RenderedMessage<'_>>, Vec<FieldError>> {
        let metadata = tail.metadata().get(position..).unwrap_or_default();
        let (missing, none) = (tool_pairing::missing_halves(metadata), MissingHalves::default());
        let missing = |index: usize| missing.get(&index).unwrap_or(&none);
        let messages = tail.messages(position).enumerate();
        let mut rendered: Vec<RenderedMessage<'_>> = match self {
            Self::OpenAi => messages
                .map(|(index, message)| openai::render_message(message, options.fields, missing(index)))
                .collect(),
            Self::Anthropic => {
                let mut ids = anthropic::CallIds::default();
                messages
                    .map(|(index, message)| anthropic::render_message(message, missing(index), &mut ids))
                    .collect::<Result<_, _>>()?
            }
        };
        if options.include_extra {
            for (rendered, message) in rendered.iter_mut().zip(tail.messages(position)) {
                rendered.extra = message::extra(message.json()).map(|extra| (message.seq(), extra));
            }
        }
        Ok(rendered)
    }

    /// Joins the parts of a context to a list.
    pub fn render_context(self, input: RenderInput<'_>) -> RenderedContext {
        let inserted = input.history.iter().map(RenderedMessage::inserted).sum();
        let context = match self {
            Self::OpenAi => openai::render_context(&input),
            Self::Anthropic => anthropic::render_context(input),
        };
        RenderedContext { inserted, ..context }
    }
}
