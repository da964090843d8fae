//! Tools in the formats of the model APIs: definitions for a request, calls as in a response, and results for the next request.

use super::Tool;
use crate::domain::format::Format;
use crate::domain::json_validation::replace_lone_surrogates;
use crate::domain::validation::FieldError;
use serde_json::{Map, Value, json};

impl Tool {
    /// Returns the definition of the tool: an entry of `tools` in a request to a model.
    pub fn definition(self, format: Format) -> Value {
        let (name, description, parameters) = (self.as_str(), self.description(), self.parameters());
        match format {
            Format::OpenAi => json!({
                "type": "function",
                "function": {"name": name, "description": description, "parameters": parameters},
            }),
            Format::Anthropic => {
                json!({"name": name, "description": description, "input_schema": parameters})
            }
        }
    }
}

/// A tool call as a client copies it from the response of a model. Without the call around them, arguments have neither
/// name nor id.
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderToolCall {
    /// Path of the field with the name of the tool, and the name.
    pub name: Option<(&'static str, String)>,
    /// JSON text as the model wrote it.
    pub arguments: String,
    pub id: Option<(Format, String)>,
}

impl ProviderToolCall {
    /// Parses a tool call of chat completions, a `tool_use` block, or arguments alone. The fields `type` and `function` tell
    /// them apart, because no tool has arguments of these names. A null counts as absent. Other fields of a call are ignored.
    /// The errors are for the developer of the client.
    pub fn parse(body: &str) -> Result<Self, Vec<FieldError>> {
        let mut errors = Vec::new();
        let invalid =
            |field: &str, detail: &str| FieldError { field: field.to_owned(), detail: detail.to_owned() };
        let mut call: Map<String, Value> =
            serde_json::from_str(body).map_err(|_| vec![invalid("", "must be a JSON object")])?;
        let mut text = |value: Option<Value>, field: &str| match value {
            Some(Value::String(text)) if !text.is_empty() => text,
            _ => {
                errors.push(invalid(field, "must be a string, as it is in the model's answer"));
                String::new()
            }
        };
        let field_count = call.len();
        call.retain(|name, value| !(value.is_null() && ["type", "function"].contains(&name.as_str())));
        let parsed = match call.get("type").map(Value::as_str) {
            Some(Some("tool_use")) => {
                let id = text(call.remove("id"), "id");
                let name = text(call.remove("name"), "name");
                let arguments = arguments_text(call.remove("input"));
                Self { name: Some(("name", name)), arguments, id: Some((Format::Anthropic, id)) }
            }
            Some(Some("function")) | None if call.contains_key("function") => {
                let id = text(call.remove("id"), "id");
                let Some(Value::Object(mut function)) = call.remove("function") else {
                    return Err(vec![invalid("function", "must be an object with name and arguments")]);
                };
                let name = text(function.remove("name"), "function.name");
                let arguments = arguments_text(function.remove("arguments"));
                Self { name: Some(("function.name", name)), arguments, id: Some((Format::OpenAi, id)) }
            }
            None => {
                let is_unchanged = call.len() == field_count;
                let arguments = if is_unchanged { body.to_owned() } else { Value::Object(call).to_string() };
                Self { name: None, arguments, id: None }
            }
            Some(Some("function")) => return Err(vec![invalid("function", "missing")]),
            Some(_) => {
                let detail = "must be function (a tool call of chat completions) or tool_use (a block of messages); \
                              arguments alone have no type";
                return Err(vec![invalid("type", detail)]);
            }
        };
        if errors.is_empty() { Ok(parsed) } else { Err(errors) }
    }

    /// Returns the result in the format of the call, or `None` for arguments alone.
    pub fn result(&self, content: &str, is_error: bool) -> Option<Value> {
        self.id.as_ref().map(|(format, id)| match format {
            Format::OpenAi => json!({"role": "tool", "tool_call_id": id, "content": content}),
            Format::Anthropic => {
                json!({"type": "tool_result", "tool_use_id": id, "content": content, "is_error": is_error})
            }
        })
    }
}

/// Returns the arguments as text. Chat completions send text and messages an object, but some servers confuse the two.
fn arguments_text(arguments: Option<Value>) -> String {
    match arguments {
        // The text is JSON like the body around it.
        Some(Value::String(text)) => replace_lone_surrogates(&text).into_owned(),
        Some(Value::Null) | None => String::new(),
        Some(value) => value.to_string(),
    }
}

/// `tests/api/tools.rs` has more cases.
#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    #[test_case(r#"{"id":"a","index":0,"function":{"name":"f","arguments":"{\"x\": 1}"}}"# => r#"{"x": 1}"#; "text")]
    #[test_case(r#"{"id":"a","function":{"name":"f","arguments":{"x":1}}}"# => r#"{"x":1}"#; "object instead of text")]
    #[test_case(r#"{"type":"tool_use","id":"a","name":"f","input":{"x":1},"caller":{"type":"direct"}}"# => r#"{"x":1}"#; "block")]
    #[test_case(r#"{"type":null,"x":1,"function":null}"# => r#"{"x":1}"#; "nulls and arguments")]
    #[test_case(r#"{"x": 1}"# => r#"{"x": 1}"#; "arguments alone keep their spelling")]
    fn arguments_of_every_form_are_read(body: &str) -> String {
        ProviderToolCall::parse(body).expect("valid").arguments
    }

    #[test_case(r#"{"type":"function"}"# => vec!["function"]; "call without function")]
    #[test_case(r#"{"type":"function","function":"f"}"# => vec!["function"]; "function of another type")]
    #[test_case(r#"{"type":"function","function":{"arguments":"{}"}}"# => vec!["id", "function.name"]; "several")]
    #[test_case(r#"{"type":7}"# => vec!["type"]; "type of another type")]
    fn invalid_fields_are_reported(body: &str) -> Vec<String> {
        ProviderToolCall::parse(body).expect_err("invalid").into_iter().map(|error| error.field).collect()
    }
}
