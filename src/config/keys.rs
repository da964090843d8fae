//! Which keys there are, read off the structs: serialising a sample that has every option set gives them all, each
//! with the kind of value it takes.

use super::secret::REDACTED;
use super::{Model, OutputLimitField, Pool, Prompts, Provider, Secret, Settings};
use ::config::{Value, ValueKind};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Stands for a name that the user chooses.
const ANY: &str = "*";

/// Stands for all that may follow: one such name or more, each in the one before it.
const REST: &str = "**";

/// The full path of a setting. `Display` writes it as TOML does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(pub(super) Vec<String>);

impl Key {
    pub(super) fn dotted(path: &str) -> Self {
        Self(path.split('.').map(str::to_owned).collect())
    }

    pub(super) fn child(&self, name: &str) -> Self {
        Self(self.0.iter().cloned().chain([name.to_owned()]).collect())
    }

    pub(super) fn parts(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }

    /// Whether the key is one of those that this pattern stands for.
    fn covers(&self, key: &Self) -> bool {
        let rest = self.0.last().is_some_and(|part| part == REST);
        self.agrees(key) && (self.0.len() == key.0.len() || (rest && self.0.len() < key.0.len()))
    }

    /// Whether this pattern and the key are the same as far as both go.
    fn agrees(&self, key: &Self) -> bool {
        self.common(key) == self.0.len().min(key.0.len())
    }

    /// The number of parts that this pattern and the key have in common.
    fn common(&self, key: &Self) -> usize {
        let parts = self.0.iter().zip(&key.0);
        parts.take_while(|(pattern, part)| is_name(pattern) || pattern == part).count()
    }
}

/// Whether the part of a pattern stands for names of the user's choice.
fn is_name(part: &str) -> bool {
    part == ANY || part == REST
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(".")?;
            }
            let bare = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
            if !part.is_empty() && part.bytes().all(bare) {
                f.write_str(part)?;
            } else {
                f.write_str(&toml(&Json::from(part.as_str())))?;
            }
        }
        Ok(())
    }
}

/// A value as TOML: the JSON of texts, numbers and booleans is just that, but for one control character.
pub(super) fn toml(value: &Json) -> String {
    match value {
        Json::Array(items) => format!("[{}]", items.iter().map(toml).collect::<Vec<_>>().join(", ")),
        Json::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| {
                let name = Key(vec![name.clone()]);
                format!("{name} = {}", toml(value))
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        value => value.to_string().replace('\u{7f}', "\\u007f"),
    }
}

/// Every setting with its value; secrets redacted, `null` where an option is not set.
pub(super) fn entries(settings: &Settings) -> Vec<(Key, Json)> {
    #[expect(
        clippy::expect_used,
        reason = "structs with text as keys, and nothing that can fail to serialise"
    )]
    let json = serde_json::to_value(settings).expect("settings serialise");
    let mut entries = Vec::new();
    flatten(Key(Vec::new()), json, &mut entries);
    entries
}

fn flatten(key: Key, value: Json, entries: &mut Vec<(Key, Json)>) {
    match value {
        Json::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                flatten(key.child(&name), value, entries);
            }
        }
        value => entries.push((key, value)),
    }
}

/// What a setting takes, as far as text from the environment must be told what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    Bool,
    List,
    /// And what is read from text, such as durations, enums and addresses, or taken as it is.
    Text,
    /// Text, or a table that says where to find it.
    Secret,
}

/// All keys, with [`ANY`] and [`REST`] in the place of names.
#[derive(Debug)]
pub(super) struct KnownKeys(pub(super) Vec<(Key, Kind)>);

impl KnownKeys {
    pub(super) fn new() -> Self {
        let text = || Some(String::new());
        let mut sample = Settings::default();
        sample.consolidation.max_tail_tokens = Some(1);
        sample.consolidation.prompts = Prompts {
            consolidate_system: text(),
            consolidate_user: text(),
            meta_system: text(),
            meta_user: text(),
        };
        sample.consolidation.daily_token_limit = Some(1);
        let provider = Provider {
            base_url: text(),
            api_key: Some(Secret::default()),
            api_key_header: text(),
            headers: BTreeMap::from([(ANY.to_owned(), Secret::default())]),
            body: BTreeMap::from([(REST.to_owned(), Json::Null)]),
            output_limit_field: Some(OutputLimitField::MaxTokens),
            stream_options: Some(true),
            ..Provider::default()
        };
        let model = Model { first_token_timeout: Some(Duration::ZERO), ..Model::default() };
        sample.llm.providers = BTreeMap::from([(ANY.to_owned(), provider)]);
        sample.llm.models = BTreeMap::from([(ANY.to_owned(), model)]);
        sample.llm.pools = BTreeMap::from([(ANY.to_owned(), Pool::default())]);

        let mut keys = Vec::new();
        for (key, value) in entries(&sample) {
            let kind = match value {
                Json::Number(_) => Kind::Number,
                Json::Bool(_) => Kind::Bool,
                Json::Array(_) => Kind::List,
                Json::String(text) if text == REDACTED => Kind::Secret,
                _ => Kind::Text,
            };
            if kind == Kind::Secret {
                keys.extend(["env", "file"].map(|form| (key.child(form), Kind::Text)));
            }
            keys.push((key, kind));
        }
        Self(keys)
    }

    /// The secret that the key is a form of: `….api_key` for `….api_key.env`.
    pub(super) fn secret_of(&self, key: &Key) -> Option<Key> {
        let (_form, secret) = key.0.split_last()?;
        let secret = Key(secret.to_vec());
        self.0
            .iter()
            .any(|(pattern, kind)| *kind == Kind::Secret && pattern.covers(&secret))
            .then_some(secret)
    }

    /// Whether what stands in this section has a name of the user's choice.
    pub(super) fn holds_names(&self, section: &Key) -> bool {
        let follows = section.0.len();
        self.0.iter().any(|(pattern, _)| {
            let part = pattern.0.get(follows).or(pattern.0.last().filter(|part| *part == REST));
            part.is_some_and(|part| is_name(part)) && pattern.agrees(section)
        })
    }

    /// The section with a name of the user's choice that the key stands in: `llm.models.small`.
    pub(super) fn named_section(&self, key: &Key) -> Option<Key> {
        let depths = self.0.iter().filter_map(|(pattern, _)| {
            let depth = pattern.0.iter().position(|part| part == ANY)?;
            (key.0.len() > depth && pattern.0.get(..depth) == key.0.get(..depth)).then_some(depth)
        });
        let depth = depths.max()?;
        Some(Key(key.0.iter().take(depth + 1).cloned().collect()))
    }

    /// The value as the setting's kind; `None` for a section with nothing in it. The error says what to write.
    pub(super) fn check(&self, key: &Key, value: Value) -> Result<Option<Value>, String> {
        if let Some((_, kind)) = self.0.iter().find(|(pattern, _)| pattern.covers(key)) {
            return coerce(*kind, value).map(Some);
        }
        let below = self.0.iter().filter(|(pattern, _)| pattern.0.len() > key.0.len() && pattern.agrees(key));
        match below.map(|(pattern, _)| shown(pattern, key)).min_by_key(String::len) {
            Some(_) if matches!(value.kind, ValueKind::Table(_)) => Ok(None),
            Some(simplest) => Err(format!("is a section: set its keys, such as {simplest}")),
            None => Err(self.unknown(key)),
        }
    }

    fn unknown(&self, key: &Key) -> String {
        let known = || self.0.iter().map(|(pattern, _)| shown(pattern, key));
        let written = key.to_string();
        let fixed = self.0.iter().filter(|(pattern, _)| pattern.0.last().is_some_and(|part| !is_name(part)));
        let mut fixed = fixed.map(|(pattern, _)| shown(pattern, key));
        let misplaced = fixed.find(|known| known.ends_with(&format!(".{written}")));
        if let Some(known) = misplaced.or_else(|| closest(&written, known())) {
            return format!("unknown key: did you mean {known}?");
        }
        // The nearest section that exists says what may stand in it.
        let deepest = self.0.iter().map(|(pattern, _)| pattern.common(key)).max().unwrap_or_default();
        let mut names: Vec<&str> = self
            .0
            .iter()
            .filter(|(pattern, _)| pattern.common(key) == deepest)
            .filter_map(|(pattern, _)| pattern.0.get(deepest))
            .map(String::as_str)
            .collect();
        names.dedup();
        let section = Key(key.0.iter().take(deepest).cloned().collect());
        match (deepest, names.as_slice()) {
            (0, names) => format!("unknown key: the sections are {}", names.join(", ")),
            (_, []) => format!("unknown key: {section} is a value, not a section"),
            (_, names) => format!("unknown key: {section} has {}", names.join(", ")),
        }
    }
}

/// A known key with the names that the user wrote.
fn shown(pattern: &Key, written: &Key) -> String {
    let parts = pattern.0.iter().enumerate().map(|(index, part)| match written.0.get(index) {
        Some(name) if is_name(part) => name.clone(),
        None if is_name(part) => "name".to_owned(),
        _ => part.clone(),
    });
    let rest = pattern.0.last().is_some_and(|part| part == REST);
    let further = written.0.iter().skip(pattern.0.len()).filter(|_| rest).cloned();
    Key(parts.chain(further).collect()).to_string()
}

/// The environment has nothing but text. The `config` crate would turn it into numbers too, but also "on" into 1 and
/// 1.5 into 2.
fn coerce(kind: Kind, mut value: Value) -> Result<Value, String> {
    value.kind = match (kind, value.kind) {
        (Kind::Number, ValueKind::I64(number)) if number >= 0 => ValueKind::I64(number),
        (Kind::Number, ValueKind::String(text))
            if text.trim().parse().is_ok_and(|number: i64| number >= 0) =>
        {
            ValueKind::I64(text.trim().parse().unwrap_or_default())
        }
        (Kind::Number, _) => return Err("must be a whole number, not negative".to_owned()),
        (Kind::Bool, ValueKind::Boolean(flag)) => ValueKind::Boolean(flag),
        (Kind::Bool, ValueKind::String(text)) if text == "true" => ValueKind::Boolean(true),
        (Kind::Bool, ValueKind::String(text)) if text == "false" => ValueKind::Boolean(false),
        (Kind::Bool, _) => return Err("must be true or false".to_owned()),
        (Kind::List, ValueKind::String(text)) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            ValueKind::from(items.collect::<Vec<_>>())
        }
        (Kind::List, ValueKind::Array(items)) => ValueKind::Array(items),
        (Kind::List, _) => return Err("must be a list, such as [\"a\", \"b\"]".to_owned()),
        (Kind::Text | Kind::Secret, other) => other,
    };
    Ok(value)
}

/// The candidate that was probably meant.
pub(super) fn closest(written: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let last = written.rsplit('.').next().unwrap_or(written);
    let limit = (last.chars().count() / 3).max(2);
    let ranked = candidates.map(|candidate| (distance(written, &candidate), candidate));
    ranked
        .filter(|(distance, candidate)| *distance <= limit && *distance < candidate.chars().count())
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's: how many characters to insert, remove or replace.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, y) in row.iter_mut().skip(1).zip(b.chars()) {
            let best = (diagonal + usize::from(x != y)).min(*cell + 1).min(left + 1);
            diagonal = std::mem::replace(cell, best);
            left = best;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_one, file, printed};
    use super::super::{ProviderKind, Settings};
    use super::{Kind, KnownKeys, entries};

    const EXAMPLE: &str = include_str!("../../precis.example.toml");

    #[test]
    fn an_unknown_key_is_answered_with_what_there_is() {
        let world = file(
            "keep_recent = 1\nport = 1\n[log]\ncolour = true\n[server.bind]\nport = 1\n[llm.models.\"gpt-4.1\"]\nmodle = 'x'",
        );
        let problems = world.problems();
        assert_one(
            &problems,
            "keep_recent (precis.toml): unknown key: did you mean consolidation.keep_recent?",
        );
        assert_one(
            &problems,
            "port (precis.toml): unknown key: the sections are consolidation, database, limits, llm",
        );
        assert_one(&problems, "log.colour (precis.toml): unknown key: log has filter, format");
        assert_one(
            &problems,
            "server.bind.port (precis.toml): unknown key: server.bind is a value, not a section",
        );
        assert_one(
            &problems,
            "llm.models.\"gpt-4.1\".modle (precis.toml): unknown key: did you mean llm.models.\"gpt-4.1\".model?",
        );
    }

    #[test]
    fn the_example_shows_every_setting_with_its_default() {
        let loaded = file(EXAMPLE).load();
        assert_eq!(printed(&loaded.settings), printed(&Settings::default()));
        for (key, value) in entries(&loaded.settings) {
            let key = key.to_string();
            let built_in =
                key.starts_with("llm.providers.extractive") || key.starts_with("llm.models.extractive");
            assert!(loaded.origins.contains_key(&key) || value.is_null() || built_in, "{key} is missing");
        }

        let lines = EXAMPLE.lines().map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.is_empty() && !setting.starts_with(' ') => setting,
            _ => line,
        });
        let loaded = file(&lines.collect::<Vec<_>>().join("\n")).load();
        let known = KnownKeys::new();
        for (key, _) in known.0.clone() {
            // Of the forms of a secret, one is enough.
            let key = known.secret_of(&key).unwrap_or(key);
            let name = key.to_string();
            let parts: Vec<&str> = name.split("\"*\"").flat_map(|part| part.split("\"**\"")).collect();
            let (beginning, end) = (parts[0], parts[1..].iter().max_by_key(|part| part.len()).unwrap_or(&""));
            let shown = |key: &String| key.starts_with(beginning) && key.contains(end);
            assert!(loaded.origins.keys().any(shown), "{name} is missing");
        }
        assert_eq!(loaded.settings.llm.providers["local"].kind, ProviderKind::OpenAi);
    }

    #[test]
    fn known_keys_know_their_kinds() {
        let known = KnownKeys::new().0;
        let kind = |name: &str| known.iter().find(|(key, _)| key.to_string() == name).unwrap().1;
        assert_eq!(kind("consolidation.max_tail_tokens"), Kind::Number);
        assert_eq!(kind("consolidation.retry_max"), Kind::Text);
        assert_eq!(kind("llm.pools.\"*\".models"), Kind::List);
        assert_eq!(kind("server.allow_unauthenticated"), Kind::Bool);
        assert_eq!(kind("llm.providers.\"*\".api_key"), Kind::Secret);
        assert_eq!(kind("llm.providers.\"*\".api_key.env"), Kind::Text);
        assert_eq!(kind("llm.providers.\"*\".headers.\"*\""), Kind::Secret);
        assert_eq!(kind("llm.providers.\"*\".headers.\"*\".file"), Kind::Text);
        assert_eq!(kind("llm.providers.\"*\".body.\"**\""), Kind::Text);
        assert_eq!(kind("llm.providers.\"*\".stream_options"), Kind::Bool);
        assert_eq!(kind("llm.models.\"*\".first_token_timeout"), Kind::Text);
    }
}
