//! OpenAPI schemas of the messages of a context and of tool definitions, for each provider, so that generated types are
//! assignable to those of the official clients, and the other way round. The service writes this JSON without these types.
//!
//! A type declares the members that the official type needs and those that precis writes. Other members of recorded blocks
//! stay, and are not declared, like optional members of the official types. Where content is a text or a list of a union, there
//! are two types: openapi-generator loses the items of such a list in a union.
#![expect(dead_code, reason = "only the schemas are used")]

use super::chat::{
    AnthropicTextBlock, AssistantRole, FunctionCall, FunctionType, TextType, ToolResultType, ToolRole,
    ToolUseType, UserRole, marks,
};
use serde::Serialize;
use utoipa::ToSchema;

marks! {
    OpenAiMark OpenAi "openai"
    AnthropicMark Anthropic "anthropic"
    StandardMark Standard "standard"
    AllMark All "all"
    SystemRole System "system"
    ImageUrlType ImageUrl "image_url"
    InputAudioType InputAudio "input_audio"
    FileType File "file"
    ImageType Image "image"
    DocumentType Document "document"
    ThinkingType Thinking "thinking"
    Base64Type Base64 "base64"
    UrlType Url "url"
    PdfMediaType Pdf "application/pdf"
    ObjectType Object "object"
}

/// The system message of a context, or one between other messages
#[derive(Serialize, ToSchema)]
pub(super) struct SystemMessage {
    #[schema(inline)]
    role: SystemRole,
    content: String,
    #[schema(nullable = false)]
    name: Option<String>,
}

/// A message as all providers of the chat format accept it
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum OpenAiMessage {
    System(SystemMessage),
    UserText(OpenAiUserText),
    User(OpenAiUserMessage),
    Assistant(OpenAiAssistantMessage),
    Tool(OpenAiToolMessage),
}

/// A message of the user that is a text
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiUserText {
    #[schema(inline)]
    role: UserRole,
    content: String,
    /// Name of the participant
    #[schema(nullable = false)]
    name: Option<String>,
}

/// A message of the user with content parts
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiUserMessage {
    #[schema(inline)]
    role: UserRole,
    content: Vec<OpenAiPart>,
    /// Name of the participant
    #[schema(nullable = false)]
    name: Option<String>,
}

/// A content part
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum OpenAiPart {
    Text(OpenAiTextPart),
    Image(OpenAiImagePart),
    Audio(OpenAiAudioPart),
    File(OpenAiFilePart),
}

/// A text
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiTextPart {
    #[schema(inline)]
    r#type: TextType,
    text: String,
}

/// An image
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiImagePart {
    #[schema(inline)]
    r#type: ImageUrlType,
    image_url: OpenAiImage,
}

/// The URL of an image, or its data as a data URL
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiImage {
    url: String,
    #[schema(inline, nullable = false)]
    detail: Option<OpenAiDetail>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum OpenAiDetail {
    Auto,
    Low,
    High,
    Original,
}

/// A recording
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiAudioPart {
    #[schema(inline)]
    r#type: InputAudioType,
    input_audio: OpenAiAudio,
}

/// The data of a recording
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiAudio {
    data: String,
    #[schema(inline)]
    format: OpenAiAudioFormat,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum OpenAiAudioFormat {
    Wav,
    Mp3,
}

/// A file
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiFilePart {
    #[schema(inline)]
    r#type: FileType,
    file: OpenAiFile,
}

/// The data of a file, or its id at the provider
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiFile {
    #[schema(nullable = false)]
    file_data: Option<String>,
    #[schema(nullable = false)]
    file_id: Option<String>,
    #[schema(nullable = false)]
    filename: Option<String>,
}

/// A message of the model
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiAssistantMessage {
    #[schema(inline)]
    role: AssistantRole,
    /// Null only next to calls
    content: Option<OpenAiTexts>,
    /// Name of the participant
    #[schema(nullable = false)]
    name: Option<String>,
    #[schema(nullable = false)]
    tool_calls: Option<Vec<OpenAiToolCall>>,
}

/// Content without attachments: text, or a list of texts
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum OpenAiTexts {
    Text(String),
    Parts(Vec<OpenAiTextPart>),
}

/// A call of a function
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiToolCall {
    id: String,
    #[schema(inline)]
    r#type: FunctionType,
    function: FunctionCall,
}

/// The result of a tool call
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiToolMessage {
    #[schema(inline)]
    role: ToolRole,
    content: OpenAiTexts,
    tool_call_id: String,
}

/// A message in the Anthropic format
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum AnthropicMessage {
    User(AnthropicUserMessage),
    Assistant(AnthropicAssistantMessage),
}

/// A message of the user: text, attachments, and results of tools
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicUserMessage {
    #[schema(inline)]
    role: UserRole,
    content: Vec<AnthropicBlock>,
}

/// A message of the model
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicAssistantMessage {
    #[schema(inline)]
    role: AssistantRole,
    content: Vec<AnthropicBlock>,
}

/// A content block. Blocks of the provider's tools, search results and other documents than PDFs are returned as they were recorded,
/// although they are not listed here
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum AnthropicBlock {
    Text(AnthropicTextBlock),
    Image(AnthropicImage),
    Document(AnthropicDocument),
    ToolUse(AnthropicToolUse),
    ToolResultText(AnthropicToolResultText),
    ToolResult(AnthropicToolResult),
    Thinking(AnthropicThinking),
}

/// An image
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicImage {
    #[schema(inline)]
    r#type: ImageType,
    source: AnthropicImageSource,
}

/// The data of an image, or its URL
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum AnthropicImageSource {
    Base64(AnthropicImageData),
    Url(AnthropicUrl),
}

/// The data of an image in base64
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicImageData {
    #[schema(inline)]
    r#type: Base64Type,
    #[schema(inline)]
    media_type: ImageMediaType,
    data: String,
}

#[derive(Serialize, ToSchema)]
pub(super) enum ImageMediaType {
    #[serde(rename = "image/jpeg")]
    Jpeg,
    #[serde(rename = "image/png")]
    Png,
    #[serde(rename = "image/gif")]
    Gif,
    #[serde(rename = "image/webp")]
    Webp,
}

/// A URL
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicUrl {
    #[schema(inline)]
    r#type: UrlType,
    url: String,
}

/// A PDF document
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicDocument {
    #[schema(inline)]
    r#type: DocumentType,
    source: AnthropicPdf,
    title: Option<String>,
}

/// The data of a PDF in base64
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicPdf {
    #[schema(inline)]
    r#type: Base64Type,
    #[schema(inline)]
    media_type: PdfMediaType,
    data: String,
}

/// A tool call
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicToolUse {
    #[schema(inline)]
    r#type: ToolUseType,
    id: String,
    name: String,
    /// The arguments
    #[schema(value_type = Value)]
    input: (),
}

/// The result of a tool call that is a text, or has no content
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicToolResultText {
    #[schema(inline)]
    r#type: ToolResultType,
    tool_use_id: String,
    #[schema(nullable = false)]
    content: Option<String>,
    #[schema(nullable = false)]
    is_error: Option<bool>,
}

/// The result of a tool call with content blocks
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicToolResult {
    #[schema(inline)]
    r#type: ToolResultType,
    tool_use_id: String,
    content: Vec<AnthropicResultBlock>,
    #[schema(nullable = false)]
    is_error: Option<bool>,
}

/// A content block of a result
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum AnthropicResultBlock {
    Text(AnthropicTextBlock),
    Image(AnthropicImage),
    Document(AnthropicDocument),
}

/// Thinking, with its signature
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicThinking {
    #[schema(inline)]
    r#type: ThinkingType,
    thinking: String,
    signature: String,
}

/// The definitions of the tools, in the format of the request
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = ToolList)]
pub(super) enum ToolListBody {
    OpenAi(OpenAiToolList),
    Anthropic(AnthropicToolList),
}

/// The definitions of the tools in the OpenAI chat format
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiToolList {
    #[schema(inline)]
    format: OpenAiMark,
    /// The value of `tools` in a request to the model
    tools: Vec<OpenAiTool>,
}

/// The definition of a tool in the OpenAI chat format
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiTool {
    #[schema(inline)]
    r#type: FunctionType,
    function: OpenAiFunction,
}

/// The definition of a function
#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiFunction {
    name: String,
    description: String,
    /// The arguments, as a JSON schema
    #[schema(value_type = Object)]
    parameters: (),
}

/// The definitions of the tools in the Anthropic format
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicToolList {
    #[schema(inline)]
    format: AnthropicMark,
    /// The value of `tools` in a request to the model
    tools: Vec<AnthropicTool>,
}

/// The definition of a tool in the Anthropic format
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicTool {
    name: String,
    description: String,
    input_schema: AnthropicInputSchema,
}

/// The arguments of a tool, as a JSON schema
#[derive(Serialize, ToSchema)]
pub(super) struct AnthropicInputSchema {
    #[schema(inline)]
    r#type: ObjectType,
    #[schema(value_type = Object)]
    properties: (),
    #[schema(nullable = false)]
    required: Option<Vec<String>>,
}
