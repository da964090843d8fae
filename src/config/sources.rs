//! The layers that settings come from: file, environment, flags; the `config` crate puts them over each other.

use super::keys::{Key, KnownKeys};
use super::load::Problem;
use ::config::builder::DefaultState;
use ::config::{Config, ConfigBuilder, ConfigError, File, FileFormat, Map, Source, Value, ValueKind};
use std::fmt;
use std::io;
use std::path::PathBuf;

const PREFIX: &str = "PRECIS__";
const SEPARATOR: &str = "__";

/// Each value over those before it.
pub(super) fn layered(values: impl IntoIterator<Item = Leaf>) -> Result<Config, ConfigError> {
    values.into_iter().fold(Config::builder(), ConfigBuilder::<DefaultState>::add_source).build()
}

/// The single values in it, sorted by path; an empty table counts as one.
pub(super) fn leaves(config: &Config) -> Result<Vec<Leaf>, ConfigError> {
    let mut leaves = Vec::new();
    for (name, value) in config.collect()? {
        Leaf { key: Key(vec![name]), value }.flatten(&mut leaves);
    }
    leaves.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(leaves)
}

/// Where settings come from, the weakest first.
#[derive(Clone, Default)]
pub struct Sources {
    /// `--config`: must exist.
    pub file: Option<PathBuf>,
    /// Read where `file` is not given and this exists.
    pub default_file: Option<PathBuf>,
    /// The whole environment: settings, and what secrets name.
    pub environment: Vec<(String, String)>,
    /// The flags that were given.
    pub flags: Vec<Flag>,
}

/// A flag that sets a setting.
#[derive(Clone)]
pub struct Flag {
    /// The setting: `server.bind`.
    pub path: &'static str,
    /// As it was given.
    pub value: String,
    /// As it is typed: `--bind`.
    pub name: &'static str,
}

impl Sources {
    /// The environment of this process, and `precis.toml` in the working directory.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Vec<Flag>) -> Self {
        // What is not UTF-8 is no name of ours and no valid value: marks of replacement serve as well.
        let environment = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into(), value.to_string_lossy().into()))
            .collect();
        Self { file, default_file: Some(PathBuf::from("precis.toml")), environment, flags }
    }

    /// The file's name and values.
    pub(super) fn read(&self) -> Result<Option<(String, Vec<Leaf>)>, Problem> {
        let Some(path) = self.file.as_ref().or(self.default_file.as_ref()) else {
            return Ok(None);
        };
        let name = path.display().to_string();
        let problem = |message| Problem { key: String::new(), origin: Some(name.clone()), message };
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.file.is_none() => return Ok(None),
            Err(error) => return Err(problem(format!("cannot read this file: {error}"))),
            Ok(text) => text,
        };
        let parsed = Config::builder().add_source(File::from_str(&text, FileFormat::Toml)).build();
        let values = parsed.and_then(|content| leaves(&content));
        let values = values.map_err(|error| problem(without_excerpt(&error.to_string())))?;
        Ok(Some((name, values)))
    }

    /// Environment and flags, the weakest first, with the names in their keys as the file spells them.
    pub(super) fn given(&self, known: &KnownKeys, file: &[Leaf]) -> Vec<Leaf> {
        let mut variables: Vec<_> = self.environment.iter().collect();
        variables.sort();
        let database = variables.iter().filter(|(name, url)| name == "DATABASE_URL" && !url.is_empty());
        let database =
            database.map(|(name, url)| (Key::dotted("database.url"), url, format!("environment {name}")));
        let prefixed = variables.iter().filter_map(|(name, value)| {
            let path = name.strip_prefix(PREFIX)?.to_lowercase();
            let key = Key(path.split(SEPARATOR).map(str::to_owned).collect());
            Some((key, value, format!("environment {name}")))
        });
        let flags = self.flags.iter();
        let flags = flags.map(|flag| (Key::dotted(flag.path), &flag.value, format!("flag {}", flag.name)));
        let mut given = Vec::new();
        for (key, value, origin) in database.chain(prefixed).chain(flags) {
            let key = spelled(&key, known, file);
            // The other form of a secret in the file is replaced, not joined.
            given.extend(known.secret_of(&key).map(|secret| Leaf::new(secret, "", None)));
            given.push(Leaf::new(key, value, Some(&origin)));
        }
        given
    }
}

/// The key with the names that the file has in it: there they have a case, in the environment they have none.
fn spelled(key: &Key, known: &KnownKeys, file: &[Leaf]) -> Key {
    key.0.iter().fold(Key(Vec::new()), |section, part| {
        let names = file.iter().filter(|leaf| leaf.key.0.starts_with(&section.0));
        let names = names.filter_map(|leaf| leaf.key.0.get(section.0.len()));
        let same = names.filter(|name| known.holds_names(&section) && name.eq_ignore_ascii_case(part));
        let name = same.min_by_key(|name| *name != part).unwrap_or(part);
        section.child(name)
    })
}

/// The parser's message without the line it quotes: an unquoted secret would stand in it.
fn without_excerpt(message: &str) -> String {
    let lines = message.lines().filter(|line| !line.contains(" |") && !line.starts_with('|'));
    lines.map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ")
}

/// One value with its full path: a layer of its own.
#[derive(Clone)]
pub(super) struct Leaf {
    pub(super) key: Key,
    pub(super) value: Value,
}

impl Leaf {
    pub(super) fn new(key: Key, text: &str, origin: Option<&String>) -> Self {
        let value = Value::new(origin, text);
        Self { key, value }
    }

    /// A table with nothing in it.
    pub(super) fn section(key: Key) -> Self {
        let value = Value::new(None, ValueKind::Table(Map::new()));
        Self { key, value }
    }

    fn flatten(self, leaves: &mut Vec<Self>) {
        match self.value.kind {
            ValueKind::Table(table) if !table.is_empty() => {
                for (name, value) in table {
                    Self { key: self.key.child(&name), value }.flatten(leaves);
                }
            }
            _ => leaves.push(self),
        }
    }

    /// The tables around the value, as the file would have them.
    pub(super) fn nested(&self) -> Value {
        let parts = self.key.0.iter().rev().cloned();
        parts.fold(self.value.clone(), |inner, part| {
            Value::new(None, ValueKind::Table(Map::from_iter([(part, inner)])))
        })
    }
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leaf({})", self.key)
    }
}

impl Source for Leaf {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        self.nested().into_table()
    }
}
