//! Validates JSON that is stored verbatim.
//!
//! `RawValue` accepts lone surrogates and unlimited nesting, which some clients cannot parse. So the text is walked once
//! with serde before any part of it is stored.

use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Largest value of the setting `limits.max_json_depth`. The parsers of some clients stop at 127 levels, and responses
/// nest stored JSON up to three levels deeper. One deeper message would make its whole session unreadable.
pub(crate) const MAX_JSON_DEPTH: usize = 120;

/// Checks that `text` is one JSON value of at most `max_depth` nested lists and objects, without lone surrogates.
/// The category of the error is `Data` if the value is nested too deeply.
pub(crate) fn check_depth_and_encoding(text: &str, max_depth: usize) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    DepthCheck { remaining: max_depth }.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// A visitor that reads any JSON value and discards it.
#[derive(Clone, Copy)]
struct DepthCheck {
    remaining: usize,
}

impl DepthCheck {
    fn one_level_deeper<E: serde::de::Error>(self) -> Result<Self, E> {
        let remaining = self.remaining.checked_sub(1);
        remaining.map(|remaining| Self { remaining }).ok_or_else(|| E::custom("nested too deeply"))
    }
}

impl<'de> DeserializeSeed<'de> for DepthCheck {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DepthCheck {
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
        while object.next_key_seed(inside)?.is_some() {
            object.next_value_seed(inside)?;
        }
        Ok(())
    }
}
