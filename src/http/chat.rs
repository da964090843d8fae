//! OpenAPI schemas of bodies in a provider's format. The service stores such JSON verbatim; `domain::message` and
//! `domain::tool` validate it. These types repeat the rules as far as a schema can express them.
#![expect(dead_code, reason = "only the schemas are used")]

use crate::domain::id::UserId;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::{Object, Type};

fn null() -> Object {
    Object::with_type(Type::Null)
}

/// An exchange: either `user_message` and `assistant_reply`, or `messages`
#[derive(Serialize, ToSchema)]
#[schema(as = ExchangeRequest)]
#[serde(untagged)]
pub(super) enum Exchange {
    #[schema(title = "Question and answer")]
    QuestionAndAnswer {
        /// Content of the user message: text, or content parts
        user_message: ContentBody,
        /// Content of the reply: text, or content parts
        assistant_reply: ContentBody,
        /// User of the session; cannot change
        #[schema(value_type = Option<UserId>)]
        user_id: (),
        /// Replaces the session's metadata: a JSON object
        #[schema(value_type = Option<Object>)]
        metadata: (),
        /// When the messages were written, from 1970 on and not in the future; default: now. Times need not increase
        #[schema(value_type = Option<String>, format = DateTime)]
        created_at: (),
        /// `seq` that the last message of the session must have; 0 = the session must have no message
        #[schema(minimum = 0)]
        expected_last_seq: Option<i64>,
    },
    #[schema(title = "Messages")]
    Messages {
        /// The messages of the exchange in the OpenAI chat format
        #[schema(min_items = 1)]
        messages: Vec<ChatMessage>,
        /// User of the session; cannot change
        #[schema(value_type = Option<UserId>)]
        user_id: (),
        /// Replaces the session's metadata: a JSON object
        #[schema(value_type = Option<Object>)]
        metadata: (),
        /// When the messages were written, from 1970 on and not in the future; default: now. Times need not increase
        #[schema(value_type = Option<String>, format = DateTime)]
        created_at: (),
        /// `seq` that the last message of the session must have; 0 = the session must have no message
        #[schema(minimum = 0)]
        expected_last_seq: Option<i64>,
    },
}

/// A message in the OpenAI chat format; every field is kept
#[derive(Serialize, ToSchema)]
#[serde(tag = "role")]
pub(super) enum ChatMessage {
    #[schema(title = "User")]
    #[serde(rename = "user")]
    User { name: Option<String>, content: ContentBody },
    #[schema(title = "Assistant")]
    #[serde(rename = "assistant")]
    Assistant { name: Option<String>, content: ContentBody, tool_calls: Option<Vec<ToolCall>> },
    #[schema(title = "Assistant that only calls tools")]
    #[serde(rename = "assistant")]
    ToolCalls {
        name: Option<String>,
        #[schema(schema_with = null, required = false)]
        content: (),
        #[schema(min_items = 1)]
        tool_calls: Vec<ToolCall>,
    },
    #[schema(title = "Assistant that refuses")]
    #[serde(rename = "assistant")]
    Refusal {
        name: Option<String>,
        #[schema(schema_with = null, required = false)]
        content: (),
        refusal: String,
        #[schema(max_items = 0)]
        tool_calls: Option<Vec<ToolCall>>,
    },
    #[schema(title = "Tool")]
    #[serde(rename = "tool")]
    Tool {
        name: Option<String>,
        content: ContentBody,
        /// The call that it answers
        #[schema(min_length = 1)]
        tool_call_id: String,
    },
}

/// The content of a message: text, or content parts of the OpenAI chat format
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ContentBody {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// A content part; it has other fields by its type, and all are kept
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ContentPart {
    Text(TextPart),
    #[schema(title = "Other")]
    Other {
        /// `image_url`, `input_audio`, `file` or another type of the chat format
        #[schema(
            min_length = 1,
            pattern = "^(?!(text|refusal|tool_use|tool_result|image|document|thinking|redacted_thinking)$)",
            example = "image_url"
        )]
        r#type: String,
        text: Option<String>,
        refusal: Option<String>,
    },
}

#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum TextPart {
    Text { text: String, refusal: Option<String> },
    Refusal { refusal: String, text: Option<String> },
}

/// A tool call as an assistant message makes it
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCall {
    /// Once in a message; the result names it
    #[schema(min_length = 1)]
    id: String,
    #[schema(inline)]
    r#type: Option<CallType>,
    function: Function,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum CallType {
    Function,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Function {
    #[schema(min_length = 1)]
    name: String,
    /// JSON text, as the model wrote it
    arguments: String,
}

/// A tool call as the model made it, or the arguments of the tool alone. Other fields of a call are ignored.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ToolRequest {
    #[schema(title = "A call of the OpenAI chat format")]
    OpenAi {
        #[schema(min_length = 1)]
        id: String,
        #[schema(inline)]
        r#type: Option<CallType>,
        function: CalledFunction,
    },
    Anthropic(AnthropicBlock),
    #[schema(title = "The arguments alone")]
    Arguments {
        #[schema(schema_with = null, required = false)]
        r#type: (),
        #[schema(schema_with = null, required = false)]
        function: (),
    },
}

#[derive(Serialize, ToSchema)]
pub(super) struct CalledFunction {
    #[schema(min_length = 1)]
    name: String,
    /// JSON text, as the model wrote it
    arguments: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum AnthropicBlock {
    #[schema(title = "A block of the Anthropic messages format")]
    ToolUse {
        #[schema(min_length = 1)]
        id: String,
        #[schema(min_length = 1)]
        name: String,
        #[schema(value_type = Option<Object>)]
        input: (),
    },
}
