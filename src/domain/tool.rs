//! The agent's tools: what the model is told of them, and what it may ask of them.
//!
//! This is the one place where a tool is defined; each door (the two model APIs, MCP) writes the same definition in its
//! own form. A model's mistake is a text for the model, since it is the model that can mend it. A new tool is a variant
//! here and an arm in `service::tools`.

use super::json::as_integer;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

pub mod call;

/// Matches of a search, where the model doesn't say how many.
pub const DEFAULT_RESULTS: i64 = 10;
/// Matches of a search, at most.
pub const MOST_RESULTS: i64 = 50;
/// Words of a memory document above which its writer is told that it is long: "about 300" is what models are asked for.
pub const LONG_MEMORY_WORDS: i64 = 330;
/// A hundred years: a search that goes back further is one without a limit.
const MOST_DAYS: i64 = 36_500;

/// A tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Reads the memory document.
    MemoryRead,
    /// Replaces the memory document.
    MemoryWrite,
    /// Finds earlier messages.
    SearchHistory,
}

impl Tool {
    /// All of them, in the order in which models get to see them.
    pub const ALL: [Self; 3] = [Self::MemoryRead, Self::MemoryWrite, Self::SearchHistory];

    /// The name by which a model calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MemoryRead => "memory_read",
            Self::MemoryWrite => "memory_write",
            Self::SearchHistory => "search_history",
        }
    }

    /// The tool of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    /// Whether it changes anything.
    #[must_use]
    pub fn writes(self) -> bool {
        self == Self::MemoryWrite
    }

    /// What teaches the model when and how to call it.
    #[must_use]
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

    /// JSON Schema of its arguments: an object.
    #[must_use]
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
                        "maximum": MOST_DAYS,
                        "description": "Only messages of the last so many days; all, if left out.",
                    },
                    "max_results": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MOST_RESULTS,
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

/// What a model asks of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolCall {
    /// The memory document.
    MemoryRead,
    /// This as the memory document.
    MemoryWrite {
        /// Markdown, all of it.
        content: String,
    },
    /// Messages that match.
    SearchHistory {
        /// What to look for.
        query: String,
        /// Only the last so many days.
        days: Option<i64>,
        /// How many at most: 1 to [`MOST_RESULTS`].
        max_results: i64,
    },
}

/// What a model did wrong, in words that tell it how to mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolError(pub String);

impl ToolCall {
    /// Reads arguments as a model writes them: the text of a JSON object. No text at all is no arguments, and so is null:
    /// models write it where there are none.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn parse(tool: Tool, arguments: &str) -> Result<Self, ToolError> {
        if arguments.trim_ascii().is_empty() {
            return Self::read(tool, Map::new());
        }
        match serde_json::from_str(arguments) {
            Ok(Value::Object(arguments)) => Self::read(tool, arguments),
            Ok(Value::Null) => Self::read(tool, Map::new()),
            Ok(_) => Err(ToolError::new(tool, &["the arguments must be one JSON object".to_owned()])),
            Err(error) => Err(ToolError::new(tool, &[format!("the arguments are not JSON: {error}")])),
        }
    }

    /// Reads arguments. An optional one may be null.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn read(tool: Tool, arguments: Map<String, Value>) -> Result<Self, ToolError> {
        let mut arguments = Arguments { given: arguments, wrong: Vec::new() };
        let call = match tool {
            Tool::MemoryRead => Some(Self::MemoryRead),
            Tool::MemoryWrite => arguments.text("content").map(|content| Self::MemoryWrite { content }),
            Tool::SearchHistory => {
                let query = arguments.text("query");
                if query.as_deref().is_some_and(|query| query.trim().is_empty()) {
                    arguments.wrong.push("`query` is empty: it must have a word to look for".to_owned());
                }
                let days = arguments.number("days", MOST_DAYS);
                let max_results = arguments.number("max_results", MOST_RESULTS).unwrap_or(DEFAULT_RESULTS);
                query.map(|query| Self::SearchHistory { query, days, max_results })
            }
        };
        // What a model thinks that an argument does must not just fail to happen: "mode": "append", for one.
        let unknown = arguments.given.keys().map(|name| format!("`{name}` is no argument of it"));
        arguments.wrong.extend(unknown);
        match call {
            Some(call) if arguments.wrong.is_empty() => Ok(call),
            _ => Err(ToolError::new(tool, &arguments.wrong)),
        }
    }
}

impl ToolError {
    fn new(tool: Tool, wrong: &[String]) -> Self {
        let mut text = format!("Nothing was done: {}. ", wrong.join("; "));
        let schema = tool.parameters();
        let properties = schema.get("properties").and_then(Value::as_object);
        let names: Vec<&str> = properties.into_iter().flat_map(Map::keys).map(String::as_str).collect();
        let takes = if names.is_empty() { "no arguments".to_owned() } else { names.join(", ") };
        // Writing to a String can't fail.
        let _ = write!(text, "{} takes {takes}. Correct the call and make it again.", tool.name());
        Self(text)
    }

    /// The model called for what there is not.
    #[must_use]
    pub fn no_such_tool(tools: impl Iterator<Item = Tool>) -> Self {
        let names: Vec<&str> = tools.map(Tool::name).collect();
        Self(format!("There is no tool of this name. The tools are {}.", names.join(", ")))
    }
}

/// Arguments that are still to be read, and what was wrong with those that were.
struct Arguments {
    given: Map<String, Value>,
    wrong: Vec<String>,
}

impl Arguments {
    fn text(&mut self, name: &str) -> Option<String> {
        match self.given.remove(name) {
            Some(Value::String(text)) if text.contains('\0') => {
                self.wrong.push(format!("`{name}` must not contain the NUL character"));
                None
            }
            Some(Value::String(text)) => Some(text),
            Some(Value::Null) | None => {
                self.wrong.push(format!("`{name}` is missing: it must be a string"));
                None
            }
            Some(_) => {
                self.wrong.push(format!("`{name}` must be a string"));
                None
            }
        }
    }

    fn number(&mut self, name: &str, most: i64) -> Option<i64> {
        let given = self.given.remove(name).filter(|given| !given.is_null())?;
        let number = given.as_number().and_then(as_integer);
        let sound = number.filter(|number| (1..=most).contains(number));
        if sound.is_none() {
            self.wrong.push(format!("`{name}` must be a whole number from 1 to {most}"));
        }
        sound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(query: &str, days: Option<i64>, max_results: i64) -> ToolCall {
        ToolCall::SearchHistory { query: query.to_owned(), days, max_results }
    }

    #[test]
    fn arguments_as_models_write_them() {
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
    fn a_mistake_names_all_that_is_wrong() {
        for (tool, arguments, named) in [
            (Tool::MemoryRead, r#"{"user":"ada"}"#, &["`user`", "no arguments"][..]),
            (Tool::MemoryWrite, "{}", &["`content` is missing"]),
            (Tool::MemoryWrite, r#"{"content":["a"],"mode":"append"}"#, &["`content`", "`mode`"]),
            (Tool::MemoryWrite, r#"{"content":"a\u0000"}"#, &["NUL"]),
            (Tool::MemoryWrite, r#"{"content":"a"#, &["not JSON"]),
            (Tool::MemoryWrite, r#""a""#, &["one JSON object"]),
            (Tool::SearchHistory, r#"{"query":" "}"#, &["`query` is empty"]),
            (
                Tool::SearchHistory,
                r#"{"query":7,"days":0,"max_results":51}"#,
                &["`query`", "`days`", "to 50"],
            ),
            (Tool::SearchHistory, r#"{"query":"a","days":1.5}"#, &["`days`"]),
            (Tool::SearchHistory, r#"{"query":"a","days":"7"}"#, &["`days`"]),
            (Tool::SearchHistory, r#"{"query":"a","max_results":1e300}"#, &["`max_results`"]),
        ] {
            let ToolError(text) = ToolCall::parse(tool, arguments).expect_err(arguments);
            assert!(named.iter().all(|named| text.contains(named)), "{arguments}: {text}");
            assert!(text.contains("Nothing was done") && text.contains(tool.name()), "{text}");
        }
    }

    #[test]
    fn the_schema_says_what_is_read() {
        for tool in Tool::ALL {
            assert_eq!(Tool::parse(tool.name()), Some(tool));
            let schema = tool.parameters();
            let mut arguments = Map::new();
            for (name, property) in schema["properties"].as_object().expect("properties") {
                assert!(property["description"].is_string(), "{name}");
                let most = property["maximum"].clone();
                arguments.insert(name.clone(), if property["type"] == "string" { "a".into() } else { most });
            }
            assert!(ToolCall::read(tool, arguments.clone()).is_ok(), "{arguments:?}");
            for name in schema["required"].as_array().expect("names") {
                let mut without = arguments.clone();
                without.remove(name.as_str().expect("a name"));
                assert!(ToolCall::read(tool, without).is_err(), "{name}");
            }
        }
        assert_eq!(Tool::parse("memory_delete"), None);
    }

    /// What the contract wants a model to be taught.
    #[test]
    fn the_descriptions_teach() {
        let write = Tool::MemoryWrite.description();
        for lesson in
            ["global", "all sessions", "replaces ALL", "read the document first", "merge", "300 words"]
        {
            assert!(write.contains(lesson), "{lesson}");
        }
        assert!(write.contains(crate::domain::context::MEMORY_HEADING));
        assert!(Tool::SearchHistory.description().contains("in all sessions"));
    }
}
