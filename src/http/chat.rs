//! OpenAPI schemas of the chat format. Requests contain raw JSON, which is stored verbatim and validated by
//! `domain::message`. The schemas repeat those rules as far as a schema can express them.

use super::openapi::schemas::schema_from_json;
use serde_json::json;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The content of a message.
pub(super) struct ContentBody;
/// A part of a content that is not just text.
pub(super) struct ContentPart;
/// A message of a history.
pub(super) struct ChatMessage;
/// A tool call as an assistant message makes it.
pub(super) struct ToolCall;

impl PartialSchema for ContentBody {
    fn schema() -> RefOr<Schema> {
        schema_from_json(json!({
            "description": "The content of a message: text, or content parts of the OpenAI chat format",
            "oneOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/ContentPart"}}
            ]
        }))
    }
}

impl PartialSchema for ContentPart {
    fn schema() -> RefOr<Schema> {
        let maybe = json!({"type": ["string", "null"]});
        schema_from_json(json!({
            "description": "A content part; it has other fields by its type, and all are kept",
            "oneOf": [
                {
                    "title": "Text",
                    "type": "object",
                    "required": ["type", "text"],
                    "properties": {
                        "type": {"type": "string", "enum": ["text"]},
                        "text": {"type": "string"},
                        "refusal": maybe
                    },
                    "additionalProperties": true
                },
                {
                    "title": "Refusal",
                    "type": "object",
                    "required": ["type", "refusal"],
                    "properties": {
                        "type": {"type": "string", "enum": ["refusal"]},
                        "refusal": {"type": "string"},
                        "text": maybe
                    },
                    "additionalProperties": true
                },
                {
                    "title": "Other",
                    "type": "object",
                    "required": ["type"],
                    "properties": {
                        "type": {
                            "type": "string",
                            "description": "`image_url`, `input_audio`, `file` or another type of the chat format",
                            "minLength": 1,
                            "pattern": "^(?!(text|refusal|tool_use|tool_result|image|document|thinking|redacted_thinking)$)",
                            "example": "image_url"
                        },
                        "text": maybe,
                        "refusal": maybe
                    },
                    "additionalProperties": true
                }
            ]
        }))
    }
}

impl PartialSchema for ChatMessage {
    fn schema() -> RefOr<Schema> {
        let message = |title: &str, required: &[&str], fields: serde_json::Value| {
            json!({
                "title": title,
                "type": "object",
                "required": required,
                "properties": fields,
                "additionalProperties": true
            })
        };
        let role = |role: &str| json!({"type": "string", "enum": [role]});
        let name = json!({"type": ["string", "null"]});
        let content = json!({"$ref": "#/components/schemas/ContentBody"});
        let call = json!({"$ref": "#/components/schemas/ToolCall"});
        let nothing = json!({"type": "null"});
        let no_calls = json!({"oneOf": [{"type": "array", "items": false}, nothing]});
        let calls = json!({"oneOf": [{"type": "array", "items": call}, nothing]});
        schema_from_json(json!({
            "description": "A message in the OpenAI chat format; every field is kept",
            "oneOf": [
                message("User", &["role", "content"], json!({
                    "role": role("user"),
                    "name": name,
                    "content": content,
                    "tool_calls": no_calls,
                    "tool_call_id": nothing
                })),
                message("Assistant", &["role", "content"], json!({
                    "role": role("assistant"),
                    "name": name,
                    "content": content,
                    "tool_calls": calls,
                    "tool_call_id": nothing
                })),
                message("Assistant that only calls tools", &["role", "tool_calls"], json!({
                    "role": role("assistant"),
                    "name": name,
                    "content": nothing,
                    "tool_calls": {"type": "array", "minItems": 1, "items": call},
                    "tool_call_id": nothing
                })),
                message("Assistant that refuses", &["role", "refusal"], json!({
                    "role": role("assistant"),
                    "name": name,
                    "content": nothing,
                    "refusal": {"type": "string"},
                    "tool_calls": no_calls,
                    "tool_call_id": nothing
                })),
                message("Tool", &["role", "content", "tool_call_id"], json!({
                    "role": role("tool"),
                    "name": name,
                    "content": content,
                    "tool_calls": no_calls,
                    "tool_call_id": {"type": "string", "description": "The call that it answers", "minLength": 1}
                }))
            ]
        }))
    }
}

impl PartialSchema for ToolCall {
    fn schema() -> RefOr<Schema> {
        schema_from_json(json!({
            "type": "object",
            "required": ["id", "function"],
            "properties": {
                "id": {"type": "string", "description": "Once in a message; the result names it", "minLength": 1},
                "type": {"type": ["string", "null"], "enum": ["function", null]},
                "function": {
                    "type": "object",
                    "required": ["name", "arguments"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "arguments": {"type": "string", "description": "JSON text, as the model wrote it"}
                    },
                    "additionalProperties": true
                }
            },
            "additionalProperties": true
        }))
    }
}

impl ToSchema for ContentBody {}
impl ToSchema for ContentPart {}
impl ToSchema for ChatMessage {}
impl ToSchema for ToolCall {}
