//! What is wrong with JSON, in words for whoever sent it.
//!
//! serde's own words name Rust's types, repeat the whole value, and count columns in a text that the client never saw.

use super::validation::FieldError;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Number;
use std::fmt;
use std::marker::PhantomData;

/// Reads a value; an error names the field by its path.
///
/// # Errors
/// The text is not such a value.
pub(crate) fn read<'de, T: Deserialize<'de>>(json: &'de str) -> Result<T, FieldError> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| field_error_from_serde(&error.path().to_string(), &error.inner().to_string()))
}

/// A struct that is read from an object only. What serde derives takes a list of the values as well; kept to the letter,
/// that would be a text which no other reader of its format takes.
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

/// The whole number that this is, however it is written: JSON has numbers only, and not a few models write 7.0 for 7.
pub(crate) fn as_integer(number: &Number) -> Option<i64> {
    number.as_i64().or_else(|| {
        let number = number.as_f64().filter(|number| number.fract() == 0.0)?;
        format!("{number:.0}").parse().ok()
    })
}

/// serde's complaint about the field at `path`.
pub(crate) fn field_error_from_serde(path: &str, error: &str) -> FieldError {
    let path = if path == "." { "" } else { path };
    let text = error.rsplit_once(" at line ").map_or(error, |(text, _)| text);
    let inside = |detail: &str| {
        let name = text.split('`').nth(1).unwrap_or_default();
        let field = match path.rsplit_once('.').map_or(path, |(_, last)| last) {
            last if last == name => path.to_owned(),
            "" => name.to_owned(),
            _ => format!("{path}.{name}"),
        };
        FieldError { field, detail: detail.to_owned() }
    };
    if text.starts_with("missing field ") {
        return inside("missing");
    }
    if text.starts_with("duplicate field ") {
        return inside("given twice: send it once");
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
    FieldError { field: path.to_owned(), detail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its errors are looked at")]
    struct Thing {
        name: String,
        parts: Option<Vec<Thing>>,
    }

    #[test]
    fn a_whole_number_is_one_however_it_is_written() {
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

    fn complaint(json: &str) -> (String, String) {
        let FieldError { field, detail } = read::<Thing>(json).expect_err("wrong");
        (field, detail)
    }

    #[test]
    fn an_error_names_the_field_and_says_what_it_must_be() {
        for (json, field, detail) in [
            (r#"{"name":5}"#, "name", "must be a string"),
            (r#"{"name":"a, expected b at line 3","parts":"x"}"#, "parts", "must be a list"),
            (r#"{"name":"a","parts":[5]}"#, "parts[0]", "must be an object"),
            (r#"{"name":"a","parts":[{"name":null}]}"#, "parts[0].name", "must be a string"),
            ("{}", "name", "missing"),
            (r#"{"name":"a","parts":[{}]}"#, "parts[0].name", "missing"),
            (r#"{"name":"a","name":"b"}"#, "name", "given twice: send it once"),
            (r#"{"nam":"a"}"#, "nam", "unknown, must be `name` or `parts`"),
        ] {
            assert_eq!(complaint(json), (field.to_owned(), detail.to_owned()), "{json}");
        }
    }
}
