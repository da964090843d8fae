//! The list of all settings with the kinds of their values, read from `precis.example.toml`, which contains each one.

use super::error::SettingPath;
use super::settings::Settings;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::sync::LazyLock;

const EXAMPLE: &str = include_str!("../../precis.example.toml");

/// Stands in a pattern for a name that the user chooses.
const ANY_NAME: &str = "*";

/// The kind of value that a setting takes. The environment has only text, which is converted to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    Bool,
    List,
    /// A number with decimals.
    Decimal,
    /// Also durations, addresses and enums.
    Text,
    /// Text, or a table with `env` or `file`.
    Secret,
    /// A field of a provider's request body, with a value of any kind.
    Any,
}

/// All settings by their patterns: paths with [`ANY_NAME`] in the place of names that the user chooses.
static SETTINGS: LazyLock<BTreeMap<SettingPath, Kind>> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "the text is part of the program, and tests read it")]
    let table = toml::from_str(&example_with_optional_settings()).expect("the example is valid TOML");
    let mut settings = BTreeMap::new();
    for (path, value) in flatten(from_toml(toml::Value::Table(table))) {
        let mut pattern = pattern(&path);
        let kind = match (pattern.parts().as_slice(), value) {
            (["llm", "providers", _, "api_key" | "headers", ..] | ["proxy", _, "api_key", ..], _) => {
                Kind::Secret
            }
            (["llm", "providers", _, "body", ..], _) => Kind::Any,
            (
                ["llm", "models", _, "input_price" | "output_price"]
                | ["consolidation", "trigger_share" | "keep_share" | "summary_share"]
                | ["limits", "max_key_share"],
                _,
            ) => Kind::Decimal,
            (_, Json::Number(_)) => Kind::Number,
            (_, Json::Bool(_)) => Kind::Bool,
            (_, Json::Array(_)) => Kind::List,
            _ => Kind::Text,
        };
        if matches!(pattern.parts().as_slice(), [.., "api_key", "env" | "file"]) {
            pattern.0.pop();
        }
        if kind == Kind::Secret {
            settings.extend(["env", "file"].map(|key| (pattern.child(key), Kind::Text)));
        }
        settings.insert(pattern, kind);
    }
    settings
});

/// Returns the example with the optional settings, which are commented out with a `#` that no space follows.
pub(super) fn example_with_optional_settings() -> String {
    let lines = EXAMPLE.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if !setting.starts_with(' ') => setting,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

pub(super) fn patterns() -> impl Iterator<Item = &'static SettingPath> {
    SETTINGS.keys()
}

/// Returns the kind of a setting; `None` if the path is not a setting.
pub(super) fn kind(path: &SettingPath) -> Option<Kind> {
    SETTINGS.get(&pattern(path)).copied()
}

/// Returns `true` if the user chooses the names in this section. They have upper and lower case, unlike other keys.
pub(super) fn has_user_names(section: &SettingPath) -> bool {
    matches!(
        section.parts().as_slice(),
        ["llm", "providers" | "models" | "pools"]
            | ["proxy", "models"]
            | ["llm", "providers", _, "headers"]
            | ["llm", "providers", _, "body", ..]
    )
}

/// Returns the section with a name of the user's choice that contains the setting: `llm.models.small`.
pub(super) fn named_section(path: &SettingPath) -> Option<SettingPath> {
    let is_named = matches!(
        path.parts().as_slice(),
        ["llm", "providers" | "models" | "pools", _, ..] | ["proxy", "models", _, ..]
    );
    is_named.then(|| SettingPath(path.0.iter().take(3).cloned().collect()))
}

/// Returns the path of the secret that the path belongs to: `….api_key` for `….api_key` and `….api_key.env`.
pub(super) fn secret(path: &SettingPath) -> Option<SettingPath> {
    let parent = SettingPath(path.0.iter().take(path.0.len().saturating_sub(1)).cloned().collect());
    [path.clone(), parent].into_iter().find(|path| kind(path) == Some(Kind::Secret))
}

/// Replaces the names that the user chooses with [`ANY_NAME`]. A field of a body is one setting, however deep it is.
fn pattern(path: &SettingPath) -> SettingPath {
    let mut pattern = SettingPath::default();
    for part in &path.0 {
        pattern = pattern.child(if has_user_names(&pattern) { ANY_NAME } else { part });
        if matches!(pattern.parts().as_slice(), [.., "body", ANY_NAME]) {
            break;
        }
    }
    pattern
}

/// Converts a value to the kind of its setting. Returns `None` for an empty section. The error says what to write.
pub(super) fn convert(path: &SettingPath, value: Json) -> Result<Option<Json>, String> {
    if let Some(kind) = kind(path) {
        return convert_to(kind, value).map(Some);
    }
    let section = pattern(path);
    let settings = patterns().filter(|setting| setting.is_within(&section));
    match settings.map(|setting| with_names(setting, path)).min_by_key(String::len) {
        Some(_) if value.is_object() => Ok(None),
        Some(shortest) => Err(format!("is a section: set its keys, such as {shortest}")),
        None => Err(unknown_key(path)),
    }
}

fn convert_to(kind: Kind, value: Json) -> Result<Json, String> {
    let is_price = |price: &f64| price.is_finite() && *price >= 0.0;
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|number| i64::try_from(*number).is_ok());
    match (kind, value) {
        (Kind::Number, Json::Number(number)) if number.is_u64() => Ok(Json::Number(number)),
        (Kind::Number, Json::String(text)) if number(&text).is_some() => Ok(Json::from(number(&text))),
        (Kind::Number, _) => Err("must be a whole number, not negative".to_owned()),
        (Kind::Decimal, value) => {
            let price = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok());
            price.filter(is_price).map(Json::from).ok_or_else(|| "must be a number, not negative".to_owned())
        }
        (Kind::Bool, Json::Bool(flag)) => Ok(Json::Bool(flag)),
        (Kind::Bool, Json::String(text)) if text == "true" => Ok(Json::Bool(true)),
        (Kind::Bool, Json::String(text)) if text == "false" => Ok(Json::Bool(false)),
        (Kind::Bool, _) => Err("must be true or false".to_owned()),
        (Kind::List, Json::String(text)) => {
            Ok(text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect())
        }
        (Kind::List, Json::Array(items)) => Ok(Json::Array(items)),
        (Kind::List, _) => Err("must be a list, such as [\"a\", \"b\"]".to_owned()),
        // A duration without a unit gets the same error as any other invalid text.
        (Kind::Text, Json::Number(number)) => Ok(Json::String(number.to_string())),
        (Kind::Text, Json::String(text)) => Ok(Json::String(text)),
        (Kind::Text, _) => Err("must be text in quotes".to_owned()),
        (Kind::Secret | Kind::Any, value) => Ok(value),
    }
}

fn unknown_key(path: &SettingPath) -> String {
    let written = path.to_string();
    let names = || patterns().map(|pattern| with_names(pattern, path));
    let misplaced = patterns()
        .filter(|pattern| pattern.0.last().is_some_and(|part| part != ANY_NAME))
        .map(|pattern| with_names(pattern, path))
        .find(|name| name.ends_with(&format!(".{written}")));
    if let Some(known) = misplaced.or_else(|| closest(&written, names())) {
        return format!("unknown key: did you mean {known}?");
    }
    // Lists the keys of the innermost section that exists.
    let wanted = pattern(path);
    let depth = |known: &SettingPath| known.0.iter().zip(&wanted.0).take_while(|(a, b)| a == b).count();
    let deepest = patterns().map(depth).max().unwrap_or_default();
    let mut keys: Vec<&str> = patterns()
        .filter(|known| depth(known) == deepest)
        .filter_map(|known| known.0.get(deepest).map(String::as_str))
        .collect();
    keys.dedup();
    let section = SettingPath(path.0.iter().take(deepest).cloned().collect());
    match (deepest, keys.as_slice()) {
        (0, sections) => format!("unknown key: the sections are {}", sections.join(", ")),
        (_, []) => format!("unknown key: {section} is a value, not a section"),
        (_, keys) => format!("unknown key: {section} has {}", keys.join(", ")),
    }
}

/// Formats a pattern with the names that the user wrote.
fn with_names(pattern: &SettingPath, written: &SettingPath) -> String {
    let mut parts: Vec<String> = Vec::new();
    for (index, part) in pattern.0.iter().enumerate() {
        let name = written.0.get(index).map_or("name", String::as_str);
        parts.push(if part == ANY_NAME { name } else { part }.to_owned());
    }
    if matches!(pattern.parts().as_slice(), [.., "body", ANY_NAME]) {
        parts.extend(written.0.iter().skip(parts.len()).cloned());
    }
    SettingPath(parts).to_string()
}

/// Returns the candidate that the user probably meant.
pub(super) fn closest(written: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let last = written.rsplit('.').next().unwrap_or(written);
    let limit = (last.chars().count() / 3).max(2);
    let ranked = candidates.map(|candidate| (strsim::levenshtein(written, &candidate), candidate));
    ranked
        .filter(|(distance, candidate)| *distance <= limit && *distance < candidate.chars().count())
        .min()
        .map(|(_, candidate)| candidate)
}

/// Returns every setting with its value: secrets redacted, `null` for an option that is not set.
pub(super) fn entries(settings: &Settings) -> Vec<(SettingPath, Json)> {
    #[expect(clippy::expect_used, reason = "structs with text as keys always serialise")]
    flatten(serde_json::to_value(settings).expect("settings serialise"))
}

/// Returns the values inside all tables, sorted by path. An empty table counts as a value.
pub(super) fn flatten(table: Json) -> Vec<(SettingPath, Json)> {
    fn add(path: SettingPath, value: Json, values: &mut Vec<(SettingPath, Json)>) {
        match value {
            Json::Object(fields) if !fields.is_empty() => {
                for (name, value) in fields {
                    add(path.child(&name), value, values);
                }
            }
            value => values.push((path, value)),
        }
    }
    let mut values = Vec::new();
    add(SettingPath::default(), table, &mut values);
    values
}

/// Converts TOML to JSON. Dates become text; `nan` and `inf` become `null`, which TOML does not have.
pub(super) fn from_toml(value: toml::Value) -> Json {
    match value {
        toml::Value::String(text) => Json::String(text),
        toml::Value::Integer(number) => Json::from(number),
        toml::Value::Float(number) => Json::from(number),
        toml::Value::Boolean(flag) => Json::Bool(flag),
        toml::Value::Datetime(time) => Json::String(time.to_string()),
        toml::Value::Array(items) => items.into_iter().map(from_toml).collect(),
        toml::Value::Table(table) => {
            Json::Object(table.into_iter().map(|(key, value)| (key, from_toml(value))).collect::<Map<_, _>>())
        }
    }
}
