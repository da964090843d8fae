//! A check for the fuzz targets: errors must not quote texts of the input.

use serde_json::Value;

/// Shorter texts occur in an error by chance.
const QUOTE_BYTES: usize = 12;

/// Returns the text values of the JSON text that its error quotes, except names of fields.
///
/// A text can also be a part of the error's own words. Such texts are recognised by a second input, which has other letters in
/// their place.
pub fn quoted(json: &str, error_of: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (Some(error), Ok(value)) = (error_of(json), serde_json::from_str::<Value>(json)) else {
        return Vec::new();
    };
    let (mut texts, mut names) = (Vec::new(), Vec::new());
    collect(&value, &mut texts, &mut names);
    texts.retain(|text| {
        let names = names.iter().any(|name: &String| name.contains(text));
        !names && text.len() >= QUOTE_BYTES && error.contains(text)
    });
    texts.retain(|text| {
        let other: String = text.chars().map(other).collect();
        let changed = replace(value.clone(), text, &other).to_string();
        error_of(&changed).is_some_and(|error| error.contains(&other))
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

/// Returns the next letter for a letter of ASCII, and other characters unchanged.
fn other(c: char) -> char {
    match c {
        'a'..='y' | 'A'..='Y' => char::from_u32(u32::from(c) + 1).unwrap_or(c),
        'z' | 'Z' => 'q',
        c => c,
    }
}
