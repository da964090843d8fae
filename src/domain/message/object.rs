//! JSON objects whose members are kept as text, so that numbers, the order of keys and unknown members stay as they were sent.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The members of a JSON object in their order. Values are JSON text without white space around it.
#[derive(Clone, Debug, Default)]
pub struct Object<'a>(pub Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Object<'a> {
    /// Parses an object; any other value has no members.
    pub fn parse(json: &'a str) -> Self {
        if json.starts_with('{') { serde_json::from_str(json).unwrap_or_default() } else { Self::default() }
    }

    /// Returns the value of a member, unless it is null. The last one of equal keys counts.
    pub fn get(&self, key: &str) -> Option<&str> {
        let member = self.0.iter().rfind(|(name, _)| name == key);
        member.map(|(_, value)| &**value).filter(|value| *value != "null")
    }

    /// Returns a member that is an object; without one, an empty object.
    pub fn object(&self, key: &str) -> Object<'_> {
        self.get(key).map(Object::parse).unwrap_or_default()
    }

    /// Returns the value of a member that is a string.
    pub fn string(&self, key: &str) -> Option<String> {
        self.get(key).and_then(as_string)
    }

    /// Returns a member as text: numbers and other values as their JSON. Empty if there is none.
    pub fn text(&self, key: &str) -> String {
        self.get(key).map(as_text).unwrap_or_default()
    }

    /// Returns the elements of a member that is a list.
    pub fn list(&self, key: &str) -> Vec<&str> {
        self.get(key).map(elements).unwrap_or_default()
    }

    /// Replaces or appends a member.
    pub fn set(&mut self, key: &'a str, value: String) {
        match self.0.iter_mut().rfind(|(name, _)| name == key) {
            Some((_, old)) => *old = value.into(),
            None => self.0.push((key.into(), value.into())),
        }
    }

    /// Returns the object as JSON.
    pub fn to_json(&self) -> String {
        let members: Vec<String> =
            self.0.iter().map(|(key, value)| format!("{}:{value}", quote(key))).collect();
        format!("{{{}}}", members.join(","))
    }
}

/// Parses a JSON string.
pub fn as_string(json: &str) -> Option<String> {
    if json.starts_with('"') { serde_json::from_str(json).ok() } else { None }
}

/// Returns a string as its text, and any other value as its JSON.
pub fn as_text(json: &str) -> String {
    as_string(json).unwrap_or_else(|| json.to_owned())
}

/// Returns the elements of a JSON list; any other value has none.
pub fn elements(json: &str) -> Vec<&str> {
    let elements: Vec<&RawValue> = serde_json::from_str(json).unwrap_or_default();
    elements.into_iter().map(RawValue::get).collect()
}

/// Encodes a text as a JSON string.
pub fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// Removes nulls from objects, at any depth.
pub fn without_nulls(json: &str) -> String {
    if json.starts_with('{') {
        let mut object = Object::parse(json);
        object.0.retain(|(_, value)| value != "null");
        for (_, value) in &mut object.0 {
            *value = without_nulls(value).into();
        }
        return object.to_json();
    }
    if json.starts_with('[') {
        let elements: Vec<String> = elements(json).into_iter().map(without_nulls).collect();
        return format!("[{}]", elements.join(","));
    }
    json.to_owned()
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
        #[derive(serde::Deserialize)]
        #[serde(transparent)]
        struct Key<'a>(#[serde(borrow)] Cow<'a, str>);
        let mut members = Vec::with_capacity(4);
        while let Some(Key(key)) = map.next_key()? {
            members.push((key, map.next_value::<&RawValue>()?.get().into()));
        }
        Ok(Object(members))
    }
}
