//! A tool and its call in the words of a model API: definitions as a request takes them, a call as an answer has it, and
//! its result as the next request takes it.

use super::Tool;
use crate::domain::format::Format;
use crate::domain::validation::FieldError;
use serde_json::{Map, Value, json};

impl Tool {
    /// Its definition, as an entry of `tools` in a request.
    #[must_use]
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

/// A call as it came.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenCall {
    /// The name of the tool, and where it stands; bare arguments have none.
    pub name: Option<(&'static str, String)>,
    /// The arguments, as the model wrote them.
    pub arguments: String,
    /// How its result is written.
    pub form: Form,
}

/// How a call came, and so how its result goes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A tool call of chat completions, with this id.
    OpenAi(String),
    /// A `tool_use` block of messages, with this id.
    Anthropic(String),
    /// The arguments alone.
    Bare,
}

impl Form {
    /// What goes back to the model, as it is; bare arguments have nothing around the text.
    #[must_use]
    pub fn result(&self, content: &str, is_error: bool) -> Option<Value> {
        match self {
            Self::OpenAi(id) => Some(json!({"role": "tool", "tool_call_id": id, "content": content})),
            Self::Anthropic(id) => Some(
                json!({"type": "tool_result", "tool_use_id": id, "content": content, "is_error": is_error}),
            ),
            Self::Bare => None,
        }
    }
}

/// Reads a call as it came: a tool call of chat completions, a `tool_use` block, or the arguments alone. Other fields of
/// the first two are their API's business. No tool has an argument `type` or `function`, so these tell them apart; a null
/// for one of them is none.
///
/// # Errors
/// It is a call of neither API, for its developer to mend.
pub fn read(body: &str) -> Result<GivenCall, Vec<FieldError>> {
    let mut wrong = Vec::new();
    let invalid =
        |field: &str, detail: &str| FieldError { field: field.to_owned(), detail: detail.to_owned() };
    let mut call: Map<String, Value> =
        serde_json::from_str(body).map_err(|_| vec![invalid("", "must be a JSON object")])?;
    let mut text = |value: Option<Value>, field: &str| match value {
        Some(Value::String(text)) if !text.is_empty() => text,
        _ => {
            wrong.push(invalid(field, "must be a string, as it is in the model's answer"));
            String::new()
        }
    };
    let fields = call.len();
    call.retain(|name, value| !(value.is_null() && ["type", "function"].contains(&name.as_str())));
    let given = match call.get("type").map(Value::as_str) {
        Some(Some("tool_use")) => {
            let id = text(call.remove("id"), "id");
            let name = text(call.remove("name"), "name");
            let arguments = written(call.remove("input"));
            GivenCall { name: Some(("name", name)), arguments, form: Form::Anthropic(id) }
        }
        Some(Some("function")) | None if call.contains_key("function") => {
            let id = text(call.remove("id"), "id");
            let Some(Value::Object(mut function)) = call.remove("function") else {
                return Err(vec![invalid("function", "must be an object with name and arguments")]);
            };
            let name = text(function.remove("name"), "function.name");
            let arguments = written(function.remove("arguments"));
            GivenCall { name: Some(("function.name", name)), arguments, form: Form::OpenAi(id) }
        }
        None => {
            let as_given = call.len() == fields;
            let arguments = if as_given { body.to_owned() } else { Value::Object(call).to_string() };
            GivenCall { name: None, arguments, form: Form::Bare }
        }
        Some(Some("function")) => return Err(vec![invalid("function", "missing")]),
        Some(_) => {
            let detail = "must be function (a tool call of chat completions) or tool_use (a block of messages); \
                          arguments alone have no type";
            return Err(vec![invalid("type", detail)]);
        }
    };
    if wrong.is_empty() { Ok(given) } else { Err(wrong) }
}

/// Chat completions have arguments as text, messages as an object; some servers mix that up.
fn written(arguments: Option<Value>) -> String {
    match arguments {
        Some(Value::String(text)) => text,
        Some(Value::Null) | None => String::new(),
        Some(value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(body: &str) -> (Option<String>, String, Form) {
        let given = read(body).expect("a call");
        (given.name.map(|(_, name)| name), given.arguments, given.form)
    }

    #[test]
    fn a_call_as_it_came() {
        let name = || Some("f".to_owned());
        for (body, expected) in [
            (
                r#"{"id":"a","type":"function","index":0,"function":{"name":"f","arguments":"{\"x\": 1}"}}"#,
                (name(), r#"{"x": 1}"#.to_owned(), Form::OpenAi("a".to_owned())),
            ),
            (
                r#"{"id":"a","function":{"name":"f","arguments":{"x":1}}}"#,
                (name(), r#"{"x":1}"#.to_owned(), Form::OpenAi("a".to_owned())),
            ),
            (
                r#"{"type":"tool_use","id":"a","name":"f","input":{"x":1},"caller":{"type":"direct"}}"#,
                (name(), r#"{"x":1}"#.to_owned(), Form::Anthropic("a".to_owned())),
            ),
            (
                r#"{"type":"tool_use","id":"a","name":"f"}"#,
                (name(), String::new(), Form::Anthropic("a".to_owned())),
            ),
            (r#"{"type":null,"x":1,"function":null}"#, (None, r#"{"x":1}"#.to_owned(), Form::Bare)),
            (r#"{"x": 1}"#, (None, r#"{"x": 1}"#.to_owned(), Form::Bare)),
            ("{}", (None, "{}".to_owned(), Form::Bare)),
        ] {
            assert_eq!(given(body), expected, "{body}");
        }
    }

    #[test]
    fn what_is_no_call_names_its_fields() {
        for (body, fields) in [
            (r#"{"type":"function"}"#, &["function"][..]),
            (r#"{"type":"function","function":"f"}"#, &["function"]),
            (r#"{"type":"function","function":{"arguments":"{}"}}"#, &["id", "function.name"]),
            (r#"{"type":"tool_use","id":7,"input":{}}"#, &["id", "name"]),
            (r#"{"type":"function_call","name":"f"}"#, &["type"]),
            (r#"{"type":7}"#, &["type"]),
            ("[]", &[""]),
        ] {
            let wrong = read(body).expect_err(body);
            let named: Vec<&str> = wrong.iter().map(|invalid| invalid.field.as_str()).collect();
            assert_eq!(named, fields, "{body}");
        }
    }
}
