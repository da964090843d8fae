//! OpenAPI schemas of bodies in a provider's format. The service stores such JSON verbatim, and accepts more than the schemas declare:
//! `domain::format` reads messages, `domain::tool` validates calls.
//!
//! The variants of a union are types of their own, so that generated clients have a name for each. Messages have further
//! fields, and all are kept: so the schemas leave `additionalProperties` open. They do not declare it either, because the
//! types of the official clients are not assignable to a generated type with an index signature.
#![expect(dead_code, reason = "only the schemas are used")]

use crate::domain::format::Format;
use crate::domain::id::{SessionId, UserId};
use serde::Serialize;
use utoipa::ToSchema;

/// Declares types of a single value, for members that tell the types of a union apart.
macro_rules! marks {
    ($($name:ident $variant:ident $value:tt)*) => {
        $(
            #[derive(Serialize, ToSchema)]
            pub(super) enum $name {
                #[serde(rename = $value)]
                $variant,
            }
        )*
    };
}

pub(super) use marks;

marks! {
    UserRole User "user"
    AssistantRole Assistant "assistant"
    ToolRole Tool "tool"
    TextType Text "text"
    FunctionType Function "function"
    CustomType Custom "custom"
    ToolUseType ToolUse "tool_use"
    ToolResultType ToolResult "tool_result"
    CacheControlType Ephemeral "ephemeral"
}

/// An exchange: either `user_message` and `assistant_reply`, or `messages`
#[derive(Serialize, ToSchema)]
#[schema(as = ExchangeRequest)]
#[serde(untagged)]
pub(super) enum Exchange {
    QuestionAndAnswer(QuestionAndAnswer),
    Messages(MessagesExchange),
}

/// An exchange of a question and an answer
#[derive(Serialize, ToSchema)]
pub(super) struct QuestionAndAnswer {
    /// Content of the user message: text, or content parts
    user_message: Content,
    /// Content of the reply: text, or content parts; null if it has no text
    #[schema(required)]
    assistant_reply: Option<Content>,
    /// User of the session; cannot change
    #[schema(value_type = Option<UserId>)]
    user_id: (),
    /// Replaces the session's metadata: a JSON object
    #[schema(value_type = Option<Object>)]
    metadata: (),
    /// Format of the contents. Both formats are read alike
    #[schema(value_type = Option<Format>)]
    format: (),
    /// When the messages were written; default: now, which a time in the future becomes. Times need not increase
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: (),
    /// `seq` that the last message of the session must have; 0 = the session must have no message
    #[schema(minimum = 0)]
    expected_last_seq: Option<i64>,
}

/// An exchange of any messages, for example with tool calls
#[derive(Serialize, ToSchema)]
pub(super) struct MessagesExchange {
    /// The messages of the exchange
    #[schema(min_items = 1)]
    messages: Vec<ChatMessage>,
    /// Format of the messages. Both formats are read alike
    #[schema(value_type = Option<Format>)]
    format: (),
    /// User of the session; cannot change
    #[schema(value_type = Option<UserId>)]
    user_id: (),
    /// Replaces the session's metadata: a JSON object
    #[schema(value_type = Option<Object>)]
    metadata: (),
    /// When the messages were written; default: now, which a time in the future becomes. Times need not increase
    #[schema(value_type = Option<String>, format = DateTime)]
    created_at: (),
    /// `seq` that the last message of the session must have; 0 = the session must have no message
    #[schema(minimum = 0)]
    expected_last_seq: Option<i64>,
}

/// The complete list of the messages that a client has
#[derive(Serialize, ToSchema)]
#[schema(as = SyncRequest)]
pub(super) struct Sync {
    /// All messages of the conversation, oldest first. System and developer messages at the beginning are ignored, unless the history
    /// begins with one. The time of a message is its field `created_at`, if it has one that is a time
    messages: Vec<ChatMessage>,
    /// User of the session; cannot change
    #[schema(value_type = Option<UserId>)]
    user_id: (),
    /// Replaces the session's metadata: a JSON object
    #[schema(value_type = Option<Object>)]
    metadata: (),
    /// Format of the messages. Both formats are read alike
    #[schema(value_type = Option<Format>)]
    format: (),
    /// The reaction to a message that is not the stored one: `error` (default) writes nothing and returns 409; `fork` stores
    /// the list in a fork of the session
    on_divergence: Option<OnDivergence>,
    /// The id of the fork; without it, the request determines the id
    #[schema(value_type = Option<SessionId>)]
    new_id: (),
}

/// The reaction to a list that diverges from the history
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum OnDivergence {
    Error,
    Fork,
}

/// The author of a message. `function` is the older form of `tool`
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageRole {
    User,
    Assistant,
    Tool,
    Function,
    System,
    Developer,
}

/// A message of chat completions or of the Anthropic format; every field is kept. `docs/formats.md` describes how it is sent
#[derive(Serialize, ToSchema)]
pub(super) struct ChatMessage {
    #[schema(inline)]
    role: MessageRole,
    content: Option<Content>,
    refusal: Option<String>,
    tool_calls: Option<Vec<MessageToolCall>>,
    /// The older form of a tool call
    function_call: Option<FunctionCall>,
    /// The call whose result the message is
    #[schema(nullable = false)]
    tool_call_id: Option<String>,
    /// Name of the participant
    name: Option<String>,
    /// Data of an adapter, at most 16 KiB; no model receives it
    #[schema(value_type = Option<Object>)]
    extra: (),
}

/// The content of a message: text, or content parts of the OpenAI chat format
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// A content part of chat completions, or a block of the Anthropic format; it has other fields by its type, and all are kept
// A union of the types would be more exact. But in a list of a union, openapi-generator loses the items.
#[derive(Serialize, ToSchema)]
pub(super) struct ContentPart {
    r#type: String,
    #[schema(nullable = false)]
    text: Option<String>,
    #[schema(nullable = false)]
    refusal: Option<String>,
}

/// A tool call as an assistant message makes it
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum MessageToolCall {
    Function(ToolCall),
    Custom(CustomToolCall),
}

/// A call of a custom tool
#[derive(Serialize, ToSchema)]
pub(super) struct CustomToolCall {
    /// Once in a message; the result names it
    #[schema(min_length = 1)]
    id: String,
    #[schema(inline)]
    r#type: CustomType,
    custom: CustomCall,
}

/// The custom tool that a call names, and its input
#[derive(Serialize, ToSchema)]
pub(super) struct CustomCall {
    #[schema(min_length = 1)]
    name: String,
    /// Text, as the model wrote it
    input: String,
}

/// A call of a function
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCall {
    /// Once in a message; the result names it
    #[schema(min_length = 1)]
    id: String,
    #[schema(inline)]
    r#type: Option<FunctionType>,
    function: FunctionCall,
}

/// The function that a tool call names, and its arguments
#[derive(Serialize, ToSchema)]
pub(super) struct FunctionCall {
    #[schema(min_length = 1)]
    name: String,
    /// JSON text, as the model wrote it
    arguments: String,
}

/// A tool call as the model made it, or the arguments of the tool alone. Other fields of a call are ignored.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ToolRequest {
    OpenAi(ToolCallRequest),
    Anthropic(ToolUseRequest),
    Arguments(ToolArguments),
}

/// A call of the OpenAI chat format
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCallRequest {
    #[schema(min_length = 1)]
    id: String,
    #[schema(inline)]
    r#type: Option<FunctionType>,
    function: CalledFunction,
}

/// The function of a call; without `arguments`, it is called with none
#[derive(Serialize, ToSchema)]
pub(super) struct CalledFunction {
    #[schema(min_length = 1)]
    name: String,
    /// JSON text, as the model wrote it
    arguments: Option<String>,
}

/// A block of the Anthropic messages format
#[derive(Serialize, ToSchema)]
pub(super) struct ToolUseRequest {
    #[schema(inline)]
    r#type: ToolUseType,
    #[schema(min_length = 1)]
    id: String,
    #[schema(min_length = 1)]
    name: String,
    /// The arguments, as the model wrote them
    #[schema(value_type = Value, required = false)]
    input: (),
}

/// The arguments alone, as `GET /tools` describes them; they have neither a `type` nor a `function`
#[derive(Serialize, ToSchema)]
pub(super) struct ToolArguments {}

/// The result of a tool call as a message to the model, in the format of the call
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ToolResultMessage {
    OpenAi(ToolCallResult),
    Anthropic(ToolUseResult),
}

/// A message of the OpenAI chat format
#[derive(Serialize, ToSchema)]
pub(super) struct ToolCallResult {
    #[schema(inline)]
    role: ToolRole,
    tool_call_id: String,
    content: String,
}

/// A block of the Anthropic messages format
#[derive(Serialize, ToSchema)]
pub(super) struct ToolUseResult {
    #[schema(inline)]
    r#type: ToolResultType,
    tool_use_id: String,
    content: String,
    is_error: bool,
}

/// A text in the Anthropic format
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicTextBlock {
    #[schema(inline)]
    r#type: TextType,
    text: String,
    /// Marks the end of the part that the provider caches
    #[schema(nullable = false)]
    cache_control: Option<AnthropicCacheControl>,
}

/// A mark for the cache of the provider
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicCacheControl {
    #[schema(inline)]
    r#type: CacheControlType,
}
