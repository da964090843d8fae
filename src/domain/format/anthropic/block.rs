//! Content blocks.

use crate::domain::format::tool_pairing::NO_ARGUMENTS;
use crate::domain::json_validation;
use serde::Serialize;
use serde_json::value::RawValue;

/// A content block.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block {
    Text {
        text: String,
    },
    Image {
        source: Source,
    },
    Document {
        source: Source,
        #[serde(skip_serializing_if = "Option::is_none")]
        title: Option<String>,
    },
    ToolUse {
        id: String,
        name: String,
        input: Box<RawValue>,
    },
    ToolResult {
        tool_use_id: String,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        content: Vec<Block>,
    },
}

/// Where an image or a document comes from.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Source {
    Base64 { media_type: String, data: String },
    Url { url: String },
}

impl Block {
    pub(super) fn text(text: &str) -> Self {
        Self::Text { text: text.to_owned() }
    }
}

/// The arguments of a call without any.
pub(super) fn no_input() -> Box<RawValue> {
    raw(NO_ARGUMENTS.to_owned())
}

/// The arguments of a call: an object as it is, to the letter; any other text as the only field of one.
pub(super) fn input(arguments: &str) -> Box<RawValue> {
    #[derive(Serialize)]
    struct Other<'a> {
        arguments: &'a str,
    }
    let text = arguments.trim_ascii();
    if text.is_empty() {
        return no_input();
    }
    // Deeper in the list than in the message: within a level less, every client can read it.
    if text.starts_with('{')
        && json_validation::check_depth_and_encoding(text, json_validation::MAX_JSON_DEPTH - 8).is_ok()
    {
        return raw(text.to_owned());
    }
    raw(super::json(&Other { arguments }))
}

fn raw(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap_or_else(|_| unreachable!("only what was found to be JSON comes here"))
}
