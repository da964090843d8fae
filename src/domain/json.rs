//! Deserialization of JSON with errors for the client.
//!
//! The messages of serde name Rust types, repeat whole values, and count columns in a text that the client never saw.

use super::validation::FieldError;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// Deserializes `json`. The error names the field by its path.
pub(crate) fn read<'de, T: Deserialize<'de>>(json: &'de str) -> Result<T, FieldError> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| field_error_from_serde(&error.path().to_string(), &error.inner().to_string()))
}

/// A struct that is deserialized from an object only. Serde also accepts an array for a struct. The JSON is stored
/// verbatim, and other readers of the format would reject the array.
#[derive(Clone, Debug)]
pub(crate) struct MapOnly<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for MapOnly<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MapOnlyVisitor(PhantomData))
    }
}

struct MapOnlyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for MapOnlyVisitor<T> {
    type Value = MapOnly<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<MapOnly<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(MapOnly)
    }
}

/// Returns the integer value of a JSON number in any spelling. JSON does not distinguish integers, and many models write
/// 7.0 for 7.
pub(crate) fn as_integer(number: &Number) -> Option<i64> {
    number.as_i64().or_else(|| {
        let number = number.as_f64().filter(|number| number.fract() == 0.0)?;
        format!("{number:.0}").parse().ok()
    })
}

/// Returns the first key of a path: `messages` of `messages[2].role`.
pub(crate) fn top_level_key(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or_default()
}

/// Returns the JSON object without one of its fields, or `None` if it has no such field.
pub(crate) fn remove_field(json: &str, key: &str) -> Option<String> {
    let mut fields: BTreeMap<String, Box<RawValue>> = serde_json::from_str(json).ok()?;
    fields.remove(key)?;
    serde_json::to_string(&fields).ok()
}

/// Translates an error message of serde about the field at `path`.
pub(crate) fn field_error_from_serde(path: &str, message: &str) -> FieldError {
    let path = if path == "." { "" } else { path };
    let text = message.rsplit_once(" at line ").map_or(message, |(text, _)| text);
    let error_of_named_field = |detail: &str| {
        let name = text.split('`').nth(1).unwrap_or_default();
        let last = path.rsplit_once('.').map_or(path, |(_, last)| last);
        FieldError::new(if last == name { "" } else { name }, detail).in_value(path)
    };
    if text.starts_with("missing field ") {
        return error_of_named_field("missing");
    }
    if text.starts_with("duplicate field ") {
        return error_of_named_field("duplicate: send it once");
    }
    let detail = match text.rsplit_once(", expected ") {
        Some((given, expected)) if given.starts_with("unknown field ") => {
            format!("unknown, must be {expected}")
        }
        Some((_, "a sequence")) => "must be a list".to_owned(),
        Some((_, "a borrowed string")) => "must be a string".to_owned(),
        Some((_, "a map")) => "must be an object".to_owned(),
        Some((_, expected)) if expected.starts_with("struct ") => "must be an object".to_owned(),
        Some((_, expected)) => format!("must be {expected}"),
        None => text.to_owned(),
    };
    FieldError::new(path, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its errors are tested")]
    struct Thing {
        name: String,
        parts: Option<Vec<Thing>>,
    }

    #[test]
    fn integer_is_read_from_any_spelling_of_the_number() {
        for (text, number) in [
            ("7", Some(7)),
            ("-7.0", Some(-7)),
            ("1e3", Some(1000)),
            ("9223372036854775807", Some(i64::MAX)),
            ("9223372036854775808", None),
            ("1e300", None),
            ("7.5", None),
        ] {
            assert_eq!(as_integer(&serde_json::from_str(text).expect("a number")), number, "{text}");
        }
    }

    fn field_error(json: &str) -> (String, String) {
        let FieldError { field, detail } = read::<Thing>(json).expect_err("invalid");
        (field, detail)
    }

    #[test]
    fn serde_error_is_translated_to_path_and_expected_type() {
        for (json, field, detail) in [
            (r#"{"name":5}"#, "name", "must be a string"),
            (r#"{"name":"a, expected b at line 3","parts":"x"}"#, "parts", "must be a list"),
            (r#"{"name":"a","parts":[5]}"#, "parts[0]", "must be an object"),
            (r#"{"name":"a","parts":[{"name":null}]}"#, "parts[0].name", "must be a string"),
            ("{}", "name", "missing"),
            (r#"{"name":"a","parts":[{}]}"#, "parts[0].name", "missing"),
            (r#"{"name":"a","name":"b"}"#, "name", "duplicate: send it once"),
            (r#"{"nam":"a"}"#, "nam", "unknown, must be `name` or `parts`"),
        ] {
            assert_eq!(field_error(json), (field.to_owned(), detail.to_owned()), "{json}");
        }
    }
}
