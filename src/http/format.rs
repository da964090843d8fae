//! The parameter `format`: whose words a list or a definition is written in.

use crate::domain::format::Format;
use serde::Deserialize;
use utoipa::ToSchema;

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(rename_all = "snake_case")]
pub(super) enum RequestFormat {
    /// Chat completions.
    Openai,
    /// Messages of Anthropic's: `system` beside `messages`, content blocks.
    Anthropic,
}

/// A derived reader would take an object for a word.
impl TryFrom<String> for RequestFormat {
    type Error = &'static str;

    fn try_from(word: String) -> Result<Self, Self::Error> {
        match word.as_str() {
            "openai" => Ok(Self::Openai),
            "anthropic" => Ok(Self::Anthropic),
            _ => Err("must be openai or anthropic"),
        }
    }
}

impl From<RequestFormat> for Format {
    fn from(format: RequestFormat) -> Self {
        match format {
            RequestFormat::Openai => Self::OpenAi,
            RequestFormat::Anthropic => Self::Anthropic,
        }
    }
}
