//! Parsing of JSON request bodies with all errors at once, and stored JSON in responses.

use super::error::{MAX_ERRORS, Problem};
use crate::domain::json;
use crate::domain::json_validation::{self, InvalidJson, MAX_JSON_VALUES};
use crate::domain::validation::FieldError;
use crate::service::{Error, StoreError};
use axum::body::Bytes;
use serde::de::value::Error as ValueError;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer as _, MapAccess, SeqAccess,
    Visitor,
};
use serde_ignored::Path;
use serde_json::error::Category;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Returns stored JSON to be sent without another encoding.
pub(super) fn stored(json: String) -> Result<Box<RawValue>, Error> {
    RawValue::from_string(json)
        .map_err(|error| StoreError::Corrupt { what: "a message", why: error.to_string() }.into())
}

/// Parses a JSON object with at most `max_depth` levels of nesting. All unknown fields and all fields of a wrong type are
/// reported with their paths. (`deny_unknown_fields` stops at the first unknown field.)
pub(super) fn parse<T: DeserializeOwned>(bytes: &[u8], max_depth: usize) -> Result<T, Problem> {
    let (text, _) = check_body(bytes, max_depth, MAX_JSON_VALUES)?;
    let mut errors: Vec<FieldError> = Vec::new();
    let mut removed: Vec<String> = Vec::new();
    let mut remainder = None;
    loop {
        let text = remainder.as_deref().unwrap_or(text);
        let Parsed { result, unknown, unknown_count } = parse_once::<T>(text);
        let (value, failure) = result.map_or_else(|error| (None, Some(error)), |value| (Some(value), None));
        let failed_field = failure.as_ref().map(|error| json::top_level_key(&error.field).to_owned());
        // A required field is missing when it was removed.
        let is_new = failed_field.as_ref().is_some_and(|field| !removed.contains(field));
        for error in unknown.into_iter().chain(failure.filter(|_| is_new)) {
            if errors.len() < MAX_ERRORS && errors.iter().all(|known| known.field != error.field) {
                errors.push(error);
            }
        }
        let total = removed.len() + unknown_count + usize::from(is_new);
        match (value, failed_field) {
            (Some(value), _) if total == 0 => return Ok(value),
            // serde stops at the first invalid field. The body without that field shows the next error.
            (None, Some(field)) => match json::remove_field(text, &field) {
                Some(shorter) => {
                    remainder = Some(shorter);
                    removed.push(field);
                }
                None => return Err(Problem::invalid_of(errors, total)),
            },
            _ => return Err(Problem::invalid_of(errors, total)),
        }
    }
}

/// The result of parsing a body once.
struct Parsed<T> {
    result: Result<T, FieldError>,
    /// The errors of the first unknown fields, at most [`MAX_ERRORS`]: a body can have millions of them.
    unknown: Vec<FieldError>,
    unknown_count: usize,
}

fn parse_once<T: DeserializeOwned>(text: &str) -> Parsed<T> {
    let (mut unknown, mut unknown_count) = (Vec::new(), 0);
    let mut track = serde_path_to_error::Track::new();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let tracked = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
    let result = serde_ignored::deserialize(tracked, |path| {
        unknown_count += 1;
        if unknown_count > MAX_ERRORS {
            return;
        }
        let object = steps_to_parent(&path);
        let taker = if object.is_empty() { "this request" } else { "this object" };
        let detail = match field_names::<T>(&object) {
            [] => "unknown: GET /openapi.json lists the fields of this request".to_owned(),
            names => format!("unknown: {taker} takes {}", names.join(", ")),
        };
        unknown.push(FieldError::new(path_string(&path), detail));
    });
    let result = result.map_err(|error| {
        let error = json::field_error_from_serde(&track.path().to_string(), &error.to_string());
        if error.field.is_empty() { error.in_value("body") } else { error }
    });
    Parsed { result, unknown, unknown_count }
}

/// A step from a value into a value that it contains.
#[derive(Clone, Copy)]
enum Step<'p> {
    Field(&'p str),
    Item,
}

/// Returns the steps from the root to the object that contains the last field of a path.
fn steps_to_parent<'p>(path: &'p Path<'p>) -> Vec<Step<'p>> {
    let (mut steps, mut rest) = (Vec::new(), path);
    loop {
        rest = match rest {
            Path::Root => break,
            Path::Seq { parent, .. } => {
                steps.push(Step::Item);
                parent
            }
            Path::Map { parent, key } => {
                steps.push(Step::Field(key));
                parent
            }
            Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
                parent
            }
        };
    }
    steps.reverse();
    steps.pop();
    steps
}

/// Returns the names of the fields of the struct to which the steps lead from a `T`. The type alone determines them.
fn field_names<T: DeserializeOwned>(steps: &[Step<'_>]) -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // It always fails, because there is no value.
    let _ = T::deserialize(FieldNames { steps, names: &mut names });
    names
}

/// A deserializer that has one value at each step and none at the end, where it records the fields that a struct asks for.
struct FieldNames<'n, 's> {
    steps: &'s [Step<'s>],
    names: &'n mut &'static [&'static str],
}

impl<'de> Deserializer<'de> for FieldNames<'_, '_> {
    type Error = ValueError;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        if self.steps.is_empty() {
            *self.names = fields;
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match self.steps.first() {
            Some(Step::Field(_)) => visitor.visit_map(self),
            Some(Step::Item) => visitor.visit_seq(self),
            None => Err(ValueError::custom("there is no value")),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The object or the list at a step: its only value always fails, so it is asked for one value.
impl FieldNames<'_, '_> {
    fn next(&mut self) -> FieldNames<'_, '_> {
        FieldNames { steps: self.steps.get(1..).unwrap_or_default(), names: &mut *self.names }
    }
}

impl<'de> MapAccess<'de> for FieldNames<'_, '_> {
    type Error = ValueError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ValueError> {
        match self.steps.first() {
            Some(Step::Field(name)) => seed.deserialize((*name).into_deserializer()).map(Some),
            _ => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ValueError> {
        seed.deserialize(self.next())
    }
}

impl<'de> SeqAccess<'de> for FieldNames<'_, '_> {
    type Error = ValueError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, ValueError> {
        seed.deserialize(self.next()).map(Some)
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

/// Replaces halves of surrogate pairs in the strings of a body of JSON, which no other parser would accept.
pub(super) fn without_lone_surrogates(body: Bytes) -> Bytes {
    match std::str::from_utf8(&body).map(json_validation::replace_lone_surrogates) {
        Ok(Cow::Owned(text)) => text.into(),
        _ => body,
    }
}

/// Returns the text of a body if it is a JSON object that every client can parse. Raw JSON values are checked only here:
/// `RawValue` accepts any depth. Parsers of clients have limits from 127 levels on, and responses
/// nest stored messages one or two levels deeper, so one deeper message would make its whole session unreadable.
/// Returns the number of its values, too.
pub(super) fn check_body(
    bytes: &[u8],
    max_depth: usize,
    max_values: usize,
) -> Result<(&str, usize), Problem> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Problem::malformed(format!("The body is not UTF-8 from byte {} on.", error.valid_up_to()))
    })?;
    let values = json_validation::check_json(text, max_depth, max_values).map_err(|error| {
        let error = match error {
            InvalidJson::TooDeep => {
                let detail = format!("is nested deeper than {max_depth} levels (limits.max_json_depth)");
                return Problem::invalid_field("body", detail);
            }
            InvalidJson::TooManyValues => {
                let detail = format!(
                    "has more than {max_values} JSON values, which is the limit of this request: send fewer messages, and large \
                     data as text"
                );
                return Problem::invalid_field("body", detail);
            }
            InvalidJson::Malformed(error) => error,
        };
        match error.classify() {
            Category::Eof if text.trim_ascii().is_empty() => {
                Problem::malformed("The body is empty. Send a JSON object.")
            }
            Category::Eof => Problem::malformed(format!("The JSON of the body is incomplete: {error}.")),
            _ if error.to_string().contains("hex escape") => {
                Problem::malformed(format!("The body has an incomplete \\u escape: {error}."))
            }
            _ => Problem::malformed(format!("The body is not JSON: {error}.")),
        }
    })?;
    // serde also accepts an array for a struct.
    if text.trim_ascii_start().starts_with('{') {
        Ok((text, values))
    } else {
        Err(Problem::invalid_field("body", "must be a JSON object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[derive(Debug, serde::Deserialize)]
    struct NoFields {}

    #[derive(Debug, Default, serde::Deserialize)]
    #[expect(dead_code, reason = "only its errors are tested")]
    struct Nested {
        named: Option<BTreeMap<String, Wrapped>>,
        lists: Option<Vec<Vec<Wrapped>>>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only its errors are tested")]
    struct Wrapped(Option<Box<Inner>>);

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(default)]
    struct Inner {
        size: i64,
        deeper: Nested,
    }

    #[test]
    fn errors_of_unknown_fields_list_the_fields_of_their_object() {
        let body = r#"{"x":1,"named":{"lists":{"x":1,"deeper":{"named":{"a":null,"b":{"x":1}}}}},"lists":[[],[null,{"size":1,"x":1}]]}"#;
        let problem = parse::<Nested>(body.as_bytes(), 100).expect_err("unknown fields");
        let problem = serde_json::to_value(&problem).expect("JSON");
        let errors = problem["errors"].as_array().expect("errors").iter();
        let mut errors: Vec<[&str; 2]> =
            errors.map(|error| ["field", "detail"].map(|key| error[key].as_str().expect("a text"))).collect();
        errors.sort_unstable();
        let of_inner = "unknown: this object takes size, deeper";
        assert_eq!(
            errors,
            [
                ["lists[1][1].x", of_inner],
                ["named.lists.deeper.named.b.x", of_inner],
                ["named.lists.x", of_inner],
                ["x", "unknown: this request takes named, lists"],
            ]
        );
    }

    #[test]
    fn required_field_of_a_wrong_type_is_one_error() {
        #[derive(Debug, serde::Deserialize)]
        struct Body {
            #[expect(dead_code, reason = "only parsed")]
            names: Vec<String>,
        }
        for (body, detail) in [
            (r#"{"names":[1]}"#, "Correct these fields and send the request again: names[0]."),
            (r#"{"names":1,"x":2}"#, "Correct these fields and send the request again: names, x."),
        ] {
            let problem = parse::<Body>(body.as_bytes(), 9).expect_err("invalid");
            let problem = serde_json::to_value(&problem).expect("JSON");
            assert_eq!(problem["detail"], detail);
        }
    }

    #[test]
    fn parse_lists_100_unknown_fields_and_counts_the_others() {
        let fields: Vec<String> = (0..100_000).map(|name| format!("\"u{name}\":0")).collect();
        let body = format!("{{{}}}", fields.join(","));
        let parsed = parse_once::<NoFields>(&body);
        assert_eq!((parsed.unknown.len(), parsed.unknown_count), (100, 100_000), "errors need memory");
        let problem = parse::<NoFields>(body.as_bytes(), 100).expect_err("no field is known");
        let problem = serde_json::to_value(&problem).expect("JSON");
        assert_eq!(problem["errors"].as_array().map(Vec::len), Some(100));
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.ends_with("u99, and 99900 more.")));
    }

    #[test]
    fn body_with_too_many_values_is_rejected() {
        let body = |values: usize| format!(r#"{{"a":[{}]}}"#, vec!["0"; values - 2].join(","));
        assert!(check_body(body(MAX_JSON_VALUES).as_bytes(), 9, MAX_JSON_VALUES).is_ok());
        let problem =
            check_body(body(MAX_JSON_VALUES + 1).as_bytes(), 9, MAX_JSON_VALUES).expect_err("too many");
        let text = serde_json::to_string(&problem).expect("JSON");
        assert!(text.contains("has more than 250000 JSON values"), "{text}");
    }
}
