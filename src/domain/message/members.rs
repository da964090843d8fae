//! JSON objects as lists of members, for values that are copied without parsing them completely.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The members of a JSON object in their order. Values are JSON text without white space around it.
#[derive(Debug)]
pub(super) struct Members<'a>(pub(super) Vec<(Cow<'a, str>, &'a str)>);

impl<'a> Members<'a> {
    /// Parses an object; any other value has no members.
    pub(super) fn parse(json: &'a str) -> Self {
        serde_json::from_str(json).unwrap_or(Self(Vec::new()))
    }

    /// Returns the value of a member, unless it is null.
    pub(super) fn get(&self, key: &str) -> Option<&'a str> {
        let member = self.0.iter().find(|(name, _)| name == key);
        member.map(|(_, value)| *value).filter(|value| *value != "null")
    }

    /// Returns the value of a member that is a string.
    pub(super) fn string(&self, key: &str) -> Option<String> {
        self.get(key).and_then(as_string)
    }

    /// Returns the elements of a member that is a list.
    pub(super) fn list(&self, key: &str) -> Vec<&'a str> {
        self.get(key).map(elements).unwrap_or_default()
    }

    /// Returns `true` if there are no other members than these, and none of them is null.
    pub(super) fn are_among(&self, keys: &[&str]) -> bool {
        self.0.iter().all(|(name, value)| keys.contains(&&**name) && *value != "null")
    }
}

/// Parses a JSON string.
pub(super) fn as_string(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}

/// Returns the elements of a JSON list; any other value has none.
pub(super) fn elements(json: &str) -> Vec<&str> {
    let elements: Vec<&RawValue> = serde_json::from_str(json).unwrap_or_default();
    elements.into_iter().map(RawValue::get).collect()
}

/// Encodes a text as a JSON string.
pub(super) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Returns a key as it is written between quotes.
pub(super) fn escape_key(key: &str) -> String {
    let quoted = quote(key);
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}

/// Writes an object member by member.
#[derive(Debug)]
pub(super) struct ObjectWriter(String);

impl ObjectWriter {
    pub(super) fn with_capacity(bytes: usize) -> Self {
        let mut json = String::with_capacity(bytes);
        json.push('{');
        Self(json)
    }

    /// Adds a member; `key` needs no escapes.
    pub(super) fn add(&mut self, key: &str, value: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        self.0.push('"');
        self.0.push_str(key);
        self.0.push_str("\":");
        self.0.push_str(value);
    }

    pub(super) fn finish(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// Returns an object with these members; keys need no escapes.
pub(super) fn object(members: &[(&str, &str)]) -> String {
    let mut object = ObjectWriter::with_capacity(64);
    for (key, value) in members {
        object.add(key, value);
    }
    object.finish()
}

/// Joins values to a JSON list.
pub(super) fn list<S: AsRef<str>>(values: &[S]) -> String {
    let values: Vec<&str> = values.iter().map(AsRef::as_ref).collect();
    format!("[{}]", values.join(","))
}

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
        #[derive(serde::Deserialize)]
        #[serde(transparent)]
        struct Key<'a>(#[serde(borrow)] Cow<'a, str>);
        let mut members = Vec::with_capacity(4);
        while let Some(Key(key)) = map.next_key()? {
            members.push((key, map.next_value::<&RawValue>()?.get()));
        }
        Ok(Members(members))
    }
}
