//! Definitions of the agent's tools, and the arguments of their calls.
//!
//! A tool is defined only here. [`provider_call`] and `http::routes::mcp` render the same definition for OpenAI, Anthropic
//! and MCP. Invalid arguments produce a text for the model, because only the model can correct them. To add a tool, add a
//! variant here and its implementation in `service::tools`.

use super::invisible::without_nul;
use super::json::as_integer;
use super::shorten::shorten_middle;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use utoipa::ToSchema;

pub mod provider_call;

const DEFAULT_RESULTS: i64 = 10;
const MAX_RESULTS: i64 = 50;
/// `memory_write` warns about documents with more words. Models are asked for about 300.
pub const LONG_MEMORY_WORDS: i64 = 330;
/// A hundred years. Keeps the computed point in time within the range of the stores.
const MAX_DAYS: i64 = 36_500;

/// Limits of the names of unknown arguments in an error.
const MAX_UNKNOWN_ARGUMENTS: usize = 10;
const MAX_NAME_CHARS: usize = 100;

/// A function that the agent's model can call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ToSchema)]
#[schema(rename_all = "snake_case")]
pub enum Tool {
    MemoryRead,
    MemoryWrite,
    MemoryAppend,
    MemoryReplace,
    SearchHistory,
}

// In the order in which models see them.
named_variants!(Tool {
    MemoryRead = "memory_read",
    MemoryWrite = "memory_write",
    MemoryAppend = "memory_append",
    MemoryReplace = "memory_replace",
    SearchHistory = "search_history"
});

impl Tool {
    /// Returns `true` if the tool changes stored data.
    pub fn writes(self) -> bool {
        matches!(self, Self::MemoryWrite | Self::MemoryAppend | Self::MemoryReplace)
    }

    /// Returns `true` if this is the name of a tool of precis, also with the prefix of an MCP client (`mcp__precis__memory_read`).
    pub fn is_name(name: &str) -> bool {
        Self::parse(name.rsplit_once("__").map_or(name, |(_, name)| name)).is_some()
    }

    /// Returns the description that teaches the model when and how to call the tool.
    pub fn description(self) -> &'static str {
        match self {
            Self::MemoryRead => {
                "Read your memory document: the one Markdown document that you keep about this user, the same in all \
                 sessions. Read it before you write it, since another session may have changed it, and at the start of a \
                 conversation if you see no `## Your Memory` section."
            }
            Self::MemoryWrite => {
                "Replace your memory document with `content`. The document is global: you will see it under \
                 `## Your Memory` in every later context of this user, in all sessions, not only in this one. The call \
                 replaces ALL of it: read the document first, merge what is new into it, and send the whole document; \
                 what you leave out is forgotten. Keep it to about 300 words of Markdown: lasting preferences, projects, \
                 key facts, and what the user asks you to remember. Nothing that soon passes, nothing that is in it \
                 already, no passwords or keys."
            }
            Self::MemoryAppend => {
                "Add `text` at the end of your memory document, on a line of its own, and leave the rest as it is: for a \
                 new lasting fact, preference or request to remember. If the document has something about the same matter \
                 already, change that with `memory_replace`. The document is global, as with `memory_write`."
            }
            Self::MemoryReplace => {
                "Replace one passage of your memory document: `old_text`, exactly as it stands there, by `new_text`, and \
                 leave the rest as it is: for what has changed, or with an empty `new_text` for what is no longer true. \
                 `old_text` must occur exactly once: include enough of the words around it. The document is global, as \
                 with `memory_write`."
            }
            Self::SearchHistory => {
                "Search what was said earlier: every message of this user, in all sessions, word for word, also those \
                 that you only know from a summary or don't see at all. Use it when the user refers to something that is \
                 neither in this conversation nor in its summary nor in your memory, and when you need exact words, \
                 names, numbers or dates. You get the best matches, each with its date, session (its id in quotes), number \
                 and speaker, the passage with what matched in it, and what was said just before and after: one line for \
                 each message."
            }
        }
    }

    /// Returns the name for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::MemoryRead => "Read the memory document",
            Self::MemoryWrite => "Replace the memory document",
            Self::MemoryAppend => "Add to the memory document",
            Self::MemoryReplace => "Change a passage of the memory document",
            Self::SearchHistory => "Search earlier messages",
        }
    }

    /// Returns the JSON Schema of the data of a successful call, an object.
    pub fn output(self) -> Map<String, Value> {
        let count = || json!({"type": "integer", "minimum": 0});
        let message = json!({
            "type": "object",
            "properties": {"seq": count(), "role": {"type": "string"}, "text": {"type": "string"}},
            "required": ["seq", "role", "text"],
        });
        let hit = json!({
            "type": "object",
            "properties": {
                "session_id": {"type": "string"}, "seq": count(), "role": {"type": "string"},
                "created_at": {"type": "string", "format": "date-time"}, "snippet": {"type": "string"},
                "before": {"type": "array", "items": message}, "after": {"type": "array", "items": message},
            },
            "required": ["session_id", "seq", "role", "created_at", "snippet", "before", "after"],
        });
        let nullable =
            |of: &str, description: &str| json!({"type": [of, "null"], "description": description});
        let mut properties = match self {
            Self::MemoryRead => json!({
                "version": count(), "words": count(), "content": {"type": "string"},
                "updated_at": {"type": ["string", "null"], "format": "date-time"},
            }),
            Self::MemoryWrite | Self::MemoryAppend | Self::MemoryReplace => json!({
                "version": count(), "words": count(),
                "hint": nullable("string", "Advice if the document is too long."),
            }),
            Self::SearchHistory => json!({
                "hits": {"type": "array", "items": hit},
                "marks": {
                    "type": ["array", "null"], "items": {"type": "string"},
                    "description": "The marks before and after a match in a snippet.",
                },
                "ranking": {"type": "object"},
            }),
        };
        if let Value::Object(properties) = &mut properties {
            let session_exists = "false before the first exchange of the session; null without a session.";
            properties.insert("user_id".to_owned(), nullable("string", "The user of the call."));
            properties.insert("session_exists".to_owned(), nullable("boolean", session_exists));
        }
        let required: Vec<&String> = properties.as_object().into_iter().flat_map(Map::keys).collect();
        let required = json!(required);
        let schema = [("type", "object".into()), ("properties", properties), ("required", required)];
        schema.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    /// Returns the JSON Schema of the arguments, an object.
    pub fn parameters(self) -> Map<String, Value> {
        let (properties, required) = match self {
            Self::MemoryRead => (json!({}), json!([])),
            Self::MemoryWrite => (
                json!({
                    "content": {
                        "type": "string",
                        "description": "The whole new document, in Markdown, about 300 words. It replaces the old one.",
                    },
                }),
                json!(["content"]),
            ),
            Self::MemoryAppend => (
                json!({"text": {"type": "string", "description": "What to add, in Markdown: a line or a few."}}),
                json!(["text"]),
            ),
            Self::MemoryReplace => (
                json!({
                    "old_text": {
                        "type": "string",
                        "description": "The passage as it stands in the document. It must occur exactly once.",
                    },
                    "new_text": {"type": "string", "description": "What takes its place; may be empty."},
                }),
                json!(["old_text", "new_text"]),
            ),
            Self::SearchHistory => (
                json!({
                    "query": {
                        "type": "string",
                        "description": "The words to look for, as they may have been said. \"Quotes\" hold a phrase \
                                        together, -word leaves out what has the word, beg* finds what begins so.",
                    },
                    "days": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MAX_DAYS,
                        "description": "Only messages of the last so many days; all, if left out.",
                    },
                    "max_results": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MAX_RESULTS,
                        "default": DEFAULT_RESULTS,
                        "description": "How many matches you get at most.",
                    },
                }),
                json!(["query"]),
            ),
        };
        let schema = [
            ("type", "object".into()),
            ("properties", properties),
            ("required", required),
            ("additionalProperties", false.into()),
        ];
        schema.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }
}

/// A call of a tool with valid arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCall {
    MemoryRead,
    MemoryWrite { content: String },
    MemoryAppend { text: String },
    MemoryReplace { old_text: String, new_text: String },
    SearchHistory { query: String, days: Option<i64>, max_results: i64 },
}

/// An error text for the model. It tells the model how to correct the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolError(pub String);

impl ToolCall {
    /// Parses arguments as a model writes them: the text of a JSON object. Models write an empty text or null for a call
    /// without arguments.
    pub fn parse(tool: Tool, arguments: &str) -> Result<Self, ToolError> {
        if arguments.trim_ascii().is_empty() {
            return Self::from_arguments(tool, Map::new());
        }
        match serde_json::from_str(arguments) {
            Ok(Value::Object(arguments)) => Self::from_arguments(tool, arguments),
            Ok(Value::Null) => Self::from_arguments(tool, Map::new()),
            Ok(_) => Err(ToolError::new(tool, &["the arguments must be one JSON object".to_owned()])),
            Err(error) => Err(ToolError::new(tool, &[format!("the arguments are not JSON: {error}")])),
        }
    }

    /// Validates arguments. Optional arguments may be null.
    pub fn from_arguments(tool: Tool, arguments: Map<String, Value>) -> Result<Self, ToolError> {
        let mut arguments = Arguments { remaining: arguments, errors: Vec::new() };
        let call = match tool {
            Tool::MemoryRead => Some(Self::MemoryRead),
            Tool::MemoryWrite => arguments.text("content").map(|content| Self::MemoryWrite { content }),
            Tool::MemoryAppend => {
                let text = arguments.filled_text("text", "it must have what to add");
                text.map(|text| Self::MemoryAppend { text })
            }
            Tool::MemoryReplace => {
                let old_text = arguments.filled_text("old_text", "it must have the passage to replace");
                let texts = old_text.zip(arguments.text("new_text"));
                texts.map(|(old_text, new_text)| Self::MemoryReplace { old_text, new_text })
            }
            Tool::SearchHistory => {
                let query = arguments.filled_text("query", "it must have a word to look for");
                let days = arguments.integer("days", MAX_DAYS);
                let max_results = arguments.integer("max_results", MAX_RESULTS).unwrap_or(DEFAULT_RESULTS);
                query.map(|query| Self::SearchHistory { query, days, max_results })
            }
        };
        // Unknown arguments are errors: a model that sends "mode": "append" expects an effect.
        let unknown = arguments.remaining.keys().take(MAX_UNKNOWN_ARGUMENTS);
        let unknown = unknown.map(|name| shorten_middle(name, MAX_NAME_CHARS, |_| "…".to_owned()));
        arguments.errors.extend(unknown.map(|name| format!("`{name}` is no argument of it")));
        match call {
            Some(call) if arguments.errors.is_empty() => Ok(call),
            _ => Err(ToolError::new(tool, &arguments.errors)),
        }
    }
}

impl ToolError {
    fn new(tool: Tool, errors: &[String]) -> Self {
        let mut text = format!("Nothing was done: {}. ", errors.join("; "));
        let schema = tool.parameters();
        let properties = schema.get("properties").and_then(Value::as_object);
        let names: Vec<&str> = properties.into_iter().flat_map(Map::keys).map(String::as_str).collect();
        let takes = if names.is_empty() { "no arguments".to_owned() } else { names.join(", ") };
        // Writing to a String cannot fail.
        let _ = write!(text, "{} takes {takes}. Correct the call and make it again.", tool.as_str());
        Self(text)
    }

    /// Returns the error for a call of an unknown tool.
    pub fn unknown_tool(tools: impl Iterator<Item = Tool>) -> Self {
        let names: Vec<&str> = tools.map(Tool::as_str).collect();
        Self(format!("There is no tool of this name. The tools are {}.", names.join(", ")))
    }
}

/// A reader of the arguments of a call.
struct Arguments {
    /// Arguments that were not read yet. After reading, they are the unknown ones.
    remaining: Map<String, Value>,
    errors: Vec<String>,
}

impl Arguments {
    fn text(&mut self, name: &str) -> Option<String> {
        match self.remaining.remove(name) {
            Some(Value::String(text)) => Some(without_nul(&text)),
            Some(Value::Null) | None => {
                self.errors.push(format!("`{name}` is missing: it must be a string"));
                None
            }
            Some(_) => {
                self.errors.push(format!("`{name}` must be a string"));
                None
            }
        }
    }

    /// Reads a text that must not be blank. `rule` completes the text of the error.
    fn filled_text(&mut self, name: &str, rule: &str) -> Option<String> {
        let text = self.text(name)?;
        if text.trim().is_empty() {
            self.errors.push(format!("`{name}` is empty: {rule}"));
        }
        Some(text)
    }

    fn integer(&mut self, name: &str, max: i64) -> Option<i64> {
        let value = self.remaining.remove(name).filter(|value| !value.is_null())?;
        let integer = value.as_number().and_then(as_integer).filter(|integer| (1..=max).contains(integer));
        if integer.is_none() {
            self.errors.push(format!("`{name}` must be a whole number from 1 to {max}"));
        }
        integer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_case::test_case;

    fn search(query: &str, days: Option<i64>, max_results: i64) -> ToolCall {
        ToolCall::SearchHistory { query: query.to_owned(), days, max_results }
    }

    #[test]
    fn arguments_of_models_are_parsed() {
        for (tool, arguments, call) in [
            (Tool::MemoryRead, "", ToolCall::MemoryRead),
            (Tool::MemoryRead, " {} ", ToolCall::MemoryRead),
            (Tool::MemoryRead, "null", ToolCall::MemoryRead),
            (Tool::MemoryWrite, r#"{"content":""}"#, ToolCall::MemoryWrite { content: String::new() }),
            (Tool::SearchHistory, r#"{"query":"tea"}"#, search("tea", None, 10)),
            (Tool::SearchHistory, r#"{"query":"tea","days":null,"max_results":50}"#, search("tea", None, 50)),
            (Tool::SearchHistory, r#"{"query":"t","days":7.0,"max_results":1e1}"#, search("t", Some(7), 10)),
        ] {
            assert_eq!(ToolCall::parse(tool, arguments), Ok(call), "{arguments}");
        }
    }

    #[test]
    fn long_names_of_unknown_arguments_are_shortened() {
        let names = (0..1000).map(|number| (format!("{number}{}", "x".repeat(10_000)), Value::Null));
        let error =
            ToolCall::from_arguments(Tool::MemoryRead, names.collect()).expect_err("unknown arguments");
        assert!(error.0.contains("xx…xx") && error.0.len() < 2000, "{error:?}");
    }

    /// `tests/api/tools.rs` has more cases.
    #[test_case(Tool::MemoryWrite, r#"{"content":["a"],"mode":"append"}"#, &["`content`", "`mode`"]; "several")]
    #[test_case(Tool::MemoryWrite, r#""a""#, &["one JSON object"]; "text")]
    #[test_case(Tool::SearchHistory, r#"{"query":" "}"#, &["`query` is empty"]; "empty")]
    #[test_case(Tool::SearchHistory, r#"{"query":7,"days":0,"max_results":51}"#, &["`query`", "`days`", "to 50"]; "range")]
    #[test_case(Tool::SearchHistory, r#"{"query":"a","days":1.5}"#, &["`days`"]; "fraction")]
    #[test_case(Tool::SearchHistory, r#"{"query":"a","days":"7"}"#, &["`days`"]; "text instead of a number")]
    #[test_case(Tool::SearchHistory, r#"{"query":"a","max_results":1e300}"#, &["`max_results`"]; "large")]
    fn error_names_all_invalid_arguments(tool: Tool, arguments: &str, named: &[&str]) {
        let ToolError(text) = ToolCall::parse(tool, arguments).expect_err(arguments);
        assert!(named.iter().all(|named| text.contains(named)), "{arguments}: {text}");
        assert!(text.contains("Nothing was done") && text.contains(tool.as_str()), "{text}");
    }

    #[test]
    fn schema_and_parser_agree() {
        for tool in Tool::ALL {
            assert_eq!(Tool::parse(tool.as_str()), Some(tool));
            let schema = tool.parameters();
            let mut arguments = Map::new();
            for (name, property) in schema["properties"].as_object().expect("properties") {
                assert!(property["description"].is_string(), "{name}");
                let most = property["maximum"].clone();
                arguments.insert(name.clone(), if property["type"] == "string" { "a".into() } else { most });
            }
            assert!(ToolCall::from_arguments(tool, arguments.clone()).is_ok(), "{arguments:?}");
            for name in schema["required"].as_array().expect("names") {
                let mut without = arguments.clone();
                without.remove(name.as_str().expect("a name"));
                assert!(ToolCall::from_arguments(tool, without).is_err(), "{name}");
            }
        }
        assert_eq!(Tool::parse("memory_delete"), None);
    }

    #[test]
    fn descriptions_contain_what_the_contract_requires() {
        let write = Tool::MemoryWrite.description();
        for lesson in
            ["global", "all sessions", "replaces ALL", "read the document first", "merge", "300 words"]
        {
            assert!(write.contains(lesson), "{lesson}");
        }
        assert!(write.contains(crate::domain::headings::MEMORY_HEADING));
        assert!(Tool::SearchHistory.description().contains("in all sessions"));
    }
}
