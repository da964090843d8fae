//! Whether JSON text that is kept as it was given can be read again by every client. A reader of raw values lets half a
//! surrogate pair and any depth pass, so each of them is checked here before it is kept.

use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// The most levels of lists and objects that any setting allows. Clients' own parsers have limits too, from 127 on, and what is stored here
/// comes back to them a level or two deeper: one message beyond that would make its whole session unreadable.
pub(crate) const MAX_JSON_DEPTH: usize = 120;

/// Reads the text as one JSON value of at most `levels` levels.
///
/// # Errors
/// It is no JSON value; of the category `Data`: it is nested deeper.
pub(crate) fn check_depth_and_encoding(text: &str, levels: usize) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    DepthCheck { levels }.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// Any JSON value, read to its end and dropped.
#[derive(Clone, Copy)]
struct DepthCheck {
    levels: usize,
}

impl DepthCheck {
    fn inside<E: serde::de::Error>(self) -> Result<Self, E> {
        let levels = self.levels.checked_sub(1);
        levels.map(|levels| Self { levels }).ok_or_else(|| E::custom("nested too deep"))
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
        let inside = self.inside()?;
        while list.next_element_seed(inside)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let inside = self.inside()?;
        while object.next_key_seed(inside)?.is_some() {
            object.next_value_seed(inside)?;
        }
        Ok(())
    }
}
