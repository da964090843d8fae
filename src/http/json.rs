//! JSON of requests as values, with all that is wrong in it at once; and stored JSON as it goes out.

use super::error::Problem;
use crate::domain::validation::FieldError;
use crate::domain::{json, json_validation};
use crate::service::{Error, StoreError};
use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::error::Category;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashSet};

/// A stored message, to be sent as it is.
pub(super) fn stored(json: String) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(json)
        .map_err(|error| StoreError::Corrupt { what: "a message", why: error.to_string() }.into())
}

/// A JSON object with at most `levels` levels of lists and objects. All unknown fields and all fields of a wrong type are
/// named with their paths.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8], levels: usize) -> Result<T, Problem> {
    let text = check_body(bytes, levels)?;
    let mut wrong: Vec<FieldError> = Vec::new();
    let mut known = HashSet::new();
    let mut rest = None;
    loop {
        let (value, found) = typed::<T>(rest.as_deref().unwrap_or(text));
        let failed = found.last().filter(|_| value.is_none()).map(|error| error.field.clone());
        for error in found {
            if known.insert(error.field.clone()) {
                wrong.push(error);
            }
        }
        match (value, failed) {
            (Some(value), _) if wrong.is_empty() => return Ok(value),
            // serde stops at the first field that it can't read; the body without it shows the next one.
            (None, Some(field)) => match without(rest.as_deref().unwrap_or(text), &field) {
                Some(less) => rest = Some(less),
                None => return Err(Problem::invalid(wrong)),
            },
            _ => return Err(Problem::invalid(wrong)),
        }
    }
}

/// The value, and the unknown fields; without a value, the last error is why.
fn typed<T: DeserializeOwned>(text: &str) -> (Option<T>, Vec<FieldError>) {
    let mut wrong = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
    let value = serde_ignored::deserialize(tracked, |path| {
        let detail = "unknown: GET /openapi.json lists the fields of this request".to_owned();
        wrong.push(FieldError { field: place(&path), detail });
    });
    match value {
        Ok(value) => (Some(value), wrong),
        Err(error) => {
            let invalid = json::field_error_from_serde(&track.path().to_string(), &error.to_string());
            wrong.push(if invalid.field.is_empty() { invalid.in_value("body") } else { invalid });
            (None, wrong)
        }
    }
}

/// A path in the form of all others: `messages[2].role`.
fn place(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", place(parent)),
        Path::Map { parent, key } => match place(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            place(parent)
        }
    }
}

/// The object without one of its fields; `None` where it has no such field.
fn without(text: &str, path: &str) -> Option<String> {
    let mut fields: BTreeMap<String, Box<RawValue>> = serde_json::from_str(text).ok()?;
    fields.remove(path.split(['.', '[']).next()?)?;
    serde_json::to_string(&fields).ok()
}

/// The text of a body, if it is a JSON object that every client can read again. What is kept as raw JSON is checked
/// here and nowhere else: a reader of raw values lets half a surrogate pair and any depth pass. Clients' own parsers have
/// limits too, from 127 levels on, and what is stored here comes back to them a level or two deeper: one message beyond
/// that would make its whole session unreadable.
pub(super) fn check_body(bytes: &[u8], levels: usize) -> Result<&str, Problem> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Problem::malformed(format!("The body is not UTF-8 from byte {} on.", error.valid_up_to()))
    })?;
    json_validation::check_depth_and_encoding(text, levels).map_err(|error| match error.classify() {
        Category::Data => {
            let detail = format!("is nested deeper than {levels} levels (limits.max_json_depth)");
            Problem::invalid_field("body", detail)
        }
        Category::Eof if text.trim_ascii().is_empty() => {
            Problem::malformed("The body is empty. Send a JSON object.")
        }
        Category::Eof => Problem::malformed(format!("The JSON of the body is cut off: {error}.")),
        _ if error.to_string().contains("hex escape") => Problem::malformed(format!(
            "The body has a \\u escape that is incomplete, or half a surrogate pair: {error}."
        )),
        _ => Problem::malformed(format!("The body is not JSON: {error}.")),
    })?;
    // A derived struct would also take an array, field by field.
    if text.trim_ascii_start().starts_with('{') {
        Ok(text)
    } else {
        Err(Problem::invalid_field("body", "must be a JSON object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Nothing {}

    #[test]
    fn of_very_many_unknown_fields_a_hundred_are_named_and_all_are_counted() {
        let fields: Vec<String> = (0..100_000).map(|name| format!("\"u{name}\":0")).collect();
        let body = format!("{{{}}}", fields.join(","));
        let problem = read::<Nothing>(body.as_bytes(), 100).expect_err("no field is known");
        let problem = serde_json::to_value(&problem).expect("JSON");
        assert_eq!(problem["errors"].as_array().map(Vec::len), Some(100));
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.ends_with("u99, and 99900 more.")));
    }
}
