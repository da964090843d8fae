//! The corpus of message shapes in `tests/shapes`: messages as applications build them with the packages of providers and
//! frameworks. `scripts/shapes/generate` writes the files.
#![cfg(test)]

use serde::Deserialize;
use serde_json::value::RawValue;
use std::fs;
use std::path::Path;

/// A file of the corpus.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    /// The name of the file.
    #[serde(skip)]
    pub(crate) name: String,
    /// The package that built the messages.
    pub(crate) package: String,
    pub(crate) version: String,
    /// The expression or the request from which the messages come.
    pub(crate) produced: String,
    /// The field `format` of the exchange.
    pub(crate) format: String,
    /// Texts that search, summaries and contexts contain.
    #[serde(default)]
    pub(crate) finds: Vec<String>,
    /// Texts such as reasoning, which summaries and contexts with standard fields do not contain.
    #[serde(default)]
    pub(crate) hides: Vec<String>,
    /// The error, if precis rejects the exchange.
    pub(crate) rejects: Option<Rejection>,
    /// The messages of one exchange, with the bytes that the application sends.
    pub(crate) messages: Vec<Box<RawValue>>,
}

/// The error of a rejected exchange.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rejection {
    /// The invalid field.
    pub(crate) field: String,
    /// Words of the detail: the name of the unknown part, or the advice.
    pub(crate) words: Vec<String>,
}

impl Shape {
    /// Returns the body of the exchange.
    pub(crate) fn exchange(&self) -> String {
        let messages: Vec<&str> = self.messages.iter().map(|message| message.get()).collect();
        let format = if self.format == "openai" { "" } else { r#""format":"anthropic","# };
        format!(r#"{{{format}"messages":[{}]}}"#, messages.join(","))
    }
}

/// Returns all shapes, sorted by their names.
pub(crate) fn load() -> Vec<Shape> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shapes");
    let files = fs::read_dir(folder).expect("the corpus").map(|entry| entry.expect("a file").path());
    let mut shapes: Vec<Shape> = files
        .map(|path| {
            let text = fs::read_to_string(&path).expect("a text");
            let mut shape: Shape =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            shape.name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            shape
        })
        .collect();
    shapes.sort_by(|a, b| a.name.cmp(&b.name));
    shapes
}
