//! Tools in the formats of the model APIs: definitions for a request, calls as in a response, and results for the next request.

use super::Tool;
use crate::domain::format::Format;
use crate::domain::validation::FieldError;
use serde_json::{Map, Value, json};

impl Tool {
    /// Returns the definition of the tool: an entry of `tools` in a request to a model.
    pub fn definition(self, format: Format) -> Value {
        let (name, description, parameters) = (self.name(), self.description(), self.parameters());
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
        Some(Value::String(text)) => text,
        Some(Value::Null) | None => String::new(),
        Some(value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_both_formats_and_bare_arguments_are_parsed() {
        let id = |format| Some((format, "a".to_owned()));
        for (body, name, arguments, id) in [
            (
                r#"{"id":"a","type":"function","index":0,"function":{"name":"f","arguments":"{\"x\": 1}"}}"#,
                Some(("function.name", "f".to_owned())),
                r#"{"x": 1}"#,
                id(Format::OpenAi),
            ),
            (
                r#"{"id":"a","function":{"name":"f","arguments":{"x":1}}}"#,
                Some(("function.name", "f".to_owned())),
                r#"{"x":1}"#,
                id(Format::OpenAi),
            ),
            (
                r#"{"type":"tool_use","id":"a","name":"f","input":{"x":1},"caller":{"type":"direct"}}"#,
                Some(("name", "f".to_owned())),
                r#"{"x":1}"#,
                id(Format::Anthropic),
            ),
            (
                r#"{"type":"tool_use","id":"a","name":"f"}"#,
                Some(("name", "f".to_owned())),
                "",
                id(Format::Anthropic),
            ),
            (r#"{"type":null,"x":1,"function":null}"#, None, r#"{"x":1}"#, None),
            (r#"{"x": 1}"#, None, r#"{"x": 1}"#, None),
            ("{}", None, "{}", None),
        ] {
            let expected = ProviderToolCall { name, arguments: arguments.to_owned(), id };
            assert_eq!(ProviderToolCall::parse(body), Ok(expected), "{body}");
        }
    }

    #[test]
    fn invalid_call_is_rejected_with_its_fields() {
        for (body, fields) in [
            (r#"{"type":"function"}"#, &["function"][..]),
            (r#"{"type":"function","function":"f"}"#, &["function"]),
            (r#"{"type":"function","function":{"arguments":"{}"}}"#, &["id", "function.name"]),
            (r#"{"type":"tool_use","id":7,"input":{}}"#, &["id", "name"]),
            (r#"{"type":"function_call","name":"f"}"#, &["type"]),
            (r#"{"type":7}"#, &["type"]),
            ("[]", &[""]),
        ] {
            let errors = ProviderToolCall::parse(body).expect_err(body);
            let named: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
            assert_eq!(named, fields, "{body}");
        }
    }
}
