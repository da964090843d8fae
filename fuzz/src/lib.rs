//! What the targets share: whether a complaint quotes what it complains about.

use serde_json::Value;

/// Shorter texts stand in a complaint by chance.
const QUOTE_BYTES: usize = 12;

/// The text values in the JSON text that are found in the complaint about it; the names of fields may be named.
///
/// What stands there by chance, because it is a part of the complaint's own words, is told by asking again with other
/// text in its place.
pub fn quoted(json: &str, complain: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (Some(complaint), Ok(value)) = (complain(json), serde_json::from_str::<Value>(json)) else {
        return Vec::new();
    };
    let (mut texts, mut names) = (Vec::new(), Vec::new());
    collect(&value, &mut texts, &mut names);
    texts.retain(|text| {
        let names = names.iter().any(|name: &String| name.contains(text));
        !names && text.len() >= QUOTE_BYTES && complaint.contains(text)
    });
    texts.retain(|text| {
        let other: String = text.chars().map(other).collect();
        let changed = replace(value.clone(), text, &other).to_string();
        complain(&changed).is_some_and(|complaint| complaint.contains(&other))
    });
    texts
}

fn collect(value: &Value, texts: &mut Vec<String>, names: &mut Vec<String>) {
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(values) => values.iter().for_each(|value| collect(value, texts, names)),
        Value::Object(fields) => {
            names.extend(fields.keys().cloned());
            for (key, value) in fields {
                match value {
                    // Errors name an unknown type, as they name an unknown field.
                    Value::String(kind) if key == "type" => names.push(kind.clone()),
                    value => collect(value, texts, names),
                }
            }
        }
        _ => {}
    }
}

fn replace(value: Value, text: &str, other: &str) -> Value {
    match value {
        Value::String(found) if found == text => other.into(),
        Value::Array(values) => values.into_iter().map(|value| replace(value, text, other)).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name, replace(value, text, other))).collect()
        }
        value => value,
    }
}

/// Another letter for each letter.
fn other(c: char) -> char {
    match c {
        'a'..='y' | 'A'..='Y' => char::from_u32(u32::from(c) + 1).unwrap_or(c),
        'z' | 'Z' => 'q',
        c => c,
    }
}
