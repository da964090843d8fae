//! Validates JSON that is stored verbatim.
//!
//! `RawValue` accepts lone surrogates and unlimited nesting, which some clients cannot parse. So the text is walked once
//! with serde before any part of it is stored.

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

/// Largest value of the setting `limits.max_json_depth`. The parsers of some clients stop at 127 levels, and responses
/// nest stored JSON up to three levels deeper. One deeper message would make its whole session unreadable.
pub(crate) const MAX_JSON_DEPTH: usize = 120;

/// Largest number of values in a body, or in a line of an import: enough for a list of 80,000 messages of plain text. A value takes several hundred bytes
/// while it is parsed, and only three bytes of a body.
pub(crate) const MAX_JSON_VALUES: usize = 250_000;

/// A reason why JSON is rejected.
#[derive(Debug)]
pub(crate) enum InvalidJson {
    TooDeep,
    TooManyValues,
    Malformed(serde_json::Error),
}

/// Checks that `text` is one JSON value without lone surrogates, that it has at most `max_depth` nested lists and objects, and at most
/// `max_values` values. Returns the number of its values; the keys of objects do not count.
pub(crate) fn check_json(text: &str, max_depth: usize, max_values: usize) -> Result<usize, InvalidJson> {
    let (values, is_too_deep) = (Cell::new(0), Cell::new(false));
    let check = JsonCheck { remaining: max_depth, max_values, values: &values, is_too_deep: &is_too_deep };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    match check.deserialize(&mut deserializer).and_then(|()| deserializer.end()) {
        Ok(()) => Ok(values.get()),
        Err(_) if is_too_deep.get() => Err(InvalidJson::TooDeep),
        Err(_) if values.get() > max_values => Err(InvalidJson::TooManyValues),
        Err(error) => Err(InvalidJson::Malformed(error)),
    }
}

/// Replaces each half of a surrogate pair in JSON text by U+FFFD: clients cut texts inside of an emoji, and their encoders write the
/// half as an escape.
pub(crate) fn replace_lone_surrogates(text: &str) -> Cow<'_, str> {
    const REPLACEMENT: &str = "\\ufffd";
    let unit = |text: &str| {
        let digits = text.strip_prefix("\\u")?.get(..4)?;
        u16::from_str_radix(digits, 16).ok().filter(|unit| (0xD800..0xE000).contains(unit))
    };
    if !text.contains("\\ud") && !text.contains("\\uD") {
        return text.into();
    }
    let (mut replaced, mut copied, mut at) = (String::new(), 0, 0);
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        let Some(escape) = rest.find('\\') else { break };
        at += escape;
        let here = text.get(at..).unwrap_or_default();
        let next = text.get(at + 6..).unwrap_or_default();
        at += match (unit(here), unit(next)) {
            (None, _) => 2,
            (Some(..0xDC00), Some(0xDC00..)) => 12,
            (Some(_), _) => {
                replaced.push_str(text.get(copied..at).unwrap_or_default());
                replaced.push_str(REPLACEMENT);
                copied = at + 6;
                6
            }
        };
    }
    if copied == 0 {
        return text.into();
    }
    replaced.push_str(text.get(copied..).unwrap_or_default());
    replaced.into()
}

/// A visitor that reads any JSON value and discards it.
#[derive(Clone, Copy)]
struct JsonCheck<'c> {
    /// Permitted levels of nesting.
    remaining: usize,
    max_values: usize,
    /// Number of values until now.
    values: &'c Cell<usize>,
    is_too_deep: &'c Cell<bool>,
}

impl JsonCheck<'_> {
    fn one_level_deeper<E: Error>(self) -> Result<Self, E> {
        let Some(remaining) = self.remaining.checked_sub(1) else {
            self.is_too_deep.set(true);
            return Err(E::custom("nested too deeply"));
        };
        Ok(Self { remaining, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for JsonCheck<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.values.set(self.values.get() + 1);
        if self.values.get() > self.max_values {
            return Err(D::Error::custom("too many values"));
        }
        deserializer.deserialize_any(self)
    }
}

/// A visitor that checks the encoding of a key.
struct KeyCheck;

impl<'de> DeserializeSeed<'de> for KeyCheck {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyCheck {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

impl<'de> Visitor<'de> for JsonCheck<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let inside = self.one_level_deeper()?;
        while list.next_element_seed(inside)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let inside = self.one_level_deeper()?;
        while object.next_key_seed(KeyCheck)?.is_some() {
            object.next_value_seed(inside)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_surrogate_pairs_are_replaced() {
        for (json, expected) in [
            (r#""cut \ud83d""#, r#""cut \ufffd""#),
            (r#""\uDe00\ud83d\ud83d\ude00\\ud83d""#, r#""\ufffd\ufffd\ud83d\ude00\\ud83d""#),
            (r#"{"\uDFFF":"\u00e9\n\"é"}"#, r#"{"\ufffd":"\u00e9\n\"é"}"#),
            (r#""\ud83"#, r#""\ud83"#),
            (r#""\"#, r#""\"#),
        ] {
            assert_eq!(replace_lone_surrogates(json), expected);
        }
    }

    #[test]
    fn values_are_counted_without_keys() {
        let count =
            |text: &str, max_values| check_json(text, 3, max_values).map_err(|error| format!("{error:?}"));
        assert_eq!(count(r#"{"a":[1,"b",null,true,{}],"c":2.5}"#, 8), Ok(8));
        assert_eq!(count(r#"{"a":[1,"b",null,true,{}],"c":2.5}"#, 7), Err("TooManyValues".to_owned()));
        assert_eq!(count("[[[]]]", 9), Ok(3));
        assert_eq!(count("[[[[]]]]", 9), Err("TooDeep".to_owned()));
        for text in [r#"{"\ud800":1}"#, r#"["\ud800"]"#, "[1", "[] []", ""] {
            assert!(matches!(check_json(text, 3, 9), Err(InvalidJson::Malformed(_))), "{text}");
        }
    }
}
