//! Parsing of JSON request bodies with all errors at once, and stored JSON in responses.

use super::error::Problem;
use crate::domain::validation::FieldError;
use crate::domain::{json, json_validation};
use crate::service::{Error, StoreError};
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde_ignored::Path;
use serde_json::error::Category;
use serde_json::value::RawValue;
use std::collections::HashSet;

/// Returns stored JSON to be sent without another encoding.
pub(super) fn stored(json: String) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(json)
        .map_err(|error| StoreError::Corrupt { what: "a message", why: error.to_string() }.into())
}

/// Parses a JSON object with at most `max_depth` levels of nesting. All unknown fields and all fields of a wrong type are
/// reported with their paths. (`deny_unknown_fields` stops at the first unknown field.)
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8], max_depth: usize) -> Result<T, Problem> {
    let text = check_body(bytes, max_depth)?;
    let mut errors: Vec<FieldError> = Vec::new();
    let mut reported = HashSet::new();
    let mut remainder = None;
    loop {
        let text = remainder.as_deref().unwrap_or(text);
        let (value, found) = parse_once::<T>(text);
        let failed_field = found.last().filter(|_| value.is_none()).map(|error| error.field.clone());
        errors.extend(found.into_iter().filter(|error| reported.insert(error.field.clone())));
        match (value, failed_field) {
            (Some(value), _) if errors.is_empty() => return Ok(value),
            // serde stops at the first invalid field. The body without that field shows the next error.
            (None, Some(field)) => match json::remove_field(text, json::top_level_key(&field)) {
                Some(shorter) => remainder = Some(shorter),
                None => return Err(Problem::invalid(errors)),
            },
            _ => return Err(Problem::invalid(errors)),
        }
    }
}

/// Returns the value and the errors of unknown fields. If there is no value, the last error is the reason.
fn parse_once<T: DeserializeOwned>(text: &str) -> (Option<T>, Vec<FieldError>) {
    let mut errors = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
    let value = serde_ignored::deserialize(tracked, |path| {
        let detail = match (&path, field_names::<T>()) {
            (Path::Map { parent: Path::Root, .. }, names) if !names.is_empty() => {
                format!("unknown: this request takes {}", names.join(", "))
            }
            _ => "unknown: GET /openapi.json lists the fields of this request".to_owned(),
        };
        errors.push(FieldError::new(path_string(&path), detail));
    });
    match value {
        Ok(value) => (Some(value), errors),
        Err(error) => {
            let error = json::field_error_from_serde(&track.path().to_string(), &error.to_string());
            errors.push(if error.field.is_empty() { error.in_value("body") } else { error });
            (None, errors)
        }
    }
}

/// Returns the names of the fields of a struct.
fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // It always fails, because there is no value.
    let _ = T::deserialize(FieldNames(&mut names));
    names
}

/// A deserializer without a value, which records the fields that a struct asks for.
struct FieldNames<'n>(&'n mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(serde::de::Error::custom("there is no value"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Formats a path as in all other errors: `messages[2].role`.
fn path_string(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", path_string(parent)),
        Path::Map { parent, key } => match path_string(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            path_string(parent)
        }
    }
}

/// Returns the text of a body if it is a JSON object that every client can parse. Raw JSON values are checked only here:
/// `RawValue` accepts lone surrogates and any depth. Parsers of clients have limits from 127 levels on, and responses
/// nest stored messages one or two levels deeper, so one deeper message would make its whole session unreadable.
pub(super) fn check_body(bytes: &[u8], max_depth: usize) -> Result<&str, Problem> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Problem::malformed(format!("The body is not UTF-8 from byte {} on.", error.valid_up_to()))
    })?;
    json_validation::check_depth_and_encoding(text, max_depth).map_err(|error| match error.classify() {
        Category::Data => {
            let detail = format!("is nested deeper than {max_depth} levels (limits.max_json_depth)");
            Problem::invalid_field("body", detail)
        }
        Category::Eof if text.trim_ascii().is_empty() => {
            Problem::malformed("The body is empty. Send a JSON object.")
        }
        Category::Eof => Problem::malformed(format!("The JSON of the body is incomplete: {error}.")),
        _ if error.to_string().contains("hex escape") => {
            Problem::malformed(format!("The body has an incomplete \\u escape or a lone surrogate: {error}."))
        }
        _ => Problem::malformed(format!("The body is not JSON: {error}.")),
    })?;
    // serde also accepts an array for a struct.
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
    struct NoFields {}

    #[test]
    fn parse_lists_100_unknown_fields_and_counts_the_others() {
        let fields: Vec<String> = (0..100_000).map(|name| format!("\"u{name}\":0")).collect();
        let body = format!("{{{}}}", fields.join(","));
        let problem = parse::<NoFields>(body.as_bytes(), 100).expect_err("no field is known");
        let problem = serde_json::to_value(&problem).expect("JSON");
        assert_eq!(problem["errors"].as_array().map(Vec::len), Some(100));
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.ends_with("u99, and 99900 more.")));
    }
}
