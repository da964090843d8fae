//! Loads settings from file, environment and flags, with the origin of each value and all errors at once.

use super::environment::{PREFIX, SEPARATOR, ignored_variables};
use super::error::{ConfigError, SettingError, SettingPath, origin_of, to_toml};
use super::schema::{self, Kind, convert, entries, flatten, from_toml, named_section};
use super::secret::Secret;
use super::settings::Settings;
use super::validate::{Violation, validate};
use serde_json::{Map, Value as Json};
use serde_path_to_error::Segment;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Values of the built-in provider and model, which a file may redefine in part.
const BUILT_IN: [(&str, &str); 3] = [
    ("llm.providers.extractive.kind", "extractive"),
    ("llm.models.extractive.provider", "extractive"),
    ("llm.models.extractive.model", "extractive"),
];

/// The sources of settings, the weakest first.
#[derive(Clone, Default)]
pub struct Sources {
    /// The file of `--config`, which must exist.
    pub file: Option<PathBuf>,
    /// Read if `file` is not set and this file exists.
    pub default_file: Option<PathBuf>,
    /// The whole environment: settings, and variables that contain secrets.
    pub environment: Vec<(String, String)>,
    pub flags: Vec<Flag>,
}

/// A flag of the command line that sets a setting.
#[derive(Clone)]
pub struct Flag {
    /// The setting, such as `server.bind`.
    pub path: &'static str,
    pub value: String,
    /// The name of the flag, such as `--bind`.
    pub name: &'static str,
}

/// Valid settings with the origins of their values.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub settings: Settings,
    /// The file, `environment PRECIS__…` or `flag --…` of each setting that does not have its default.
    pub origins: BTreeMap<String, String>,
    /// Probable mistakes, one text each.
    pub warnings: Vec<String>,
}

impl fmt::Display for Loaded {
    /// Writes TOML without secrets: one `section.key = value  # origin` per line, or a comment if a setting has no
    /// value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, value) in entries(&self.settings) {
            if value == Json::Null {
                writeln!(f, "# {path} is not set")?;
                continue;
            }
            let origin = origin_of(&path.to_string(), &self.origins);
            let origin = origin.map_or("default", String::as_str).escape_debug();
            writeln!(f, "{path} = {}  # {origin}", to_toml(&value))?;
        }
        Ok(())
    }
}

/// A value from one of the sources.
struct Value {
    value: Json,
    origin: String,
}

type Values = BTreeMap<SettingPath, Value>;

impl Sources {
    /// Returns the environment of this process, and `precis.toml` in the working directory.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Vec<Flag>) -> Self {
        // No setting needs text that is not UTF-8, so replacement characters do no harm.
        let environment = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into(), value.to_string_lossy().into()))
            .collect();
        Self { file, default_file: Some(PathBuf::from("precis.toml")), environment, flags }
    }

    fn read_file(&self) -> Result<Values, SettingError> {
        let Some(path) = self.file.as_ref().or(self.default_file.as_ref()) else {
            return Ok(Values::new());
        };
        let origin = path.display().to_string();
        let error = |message| SettingError { path: String::new(), origin: Some(origin.clone()), message };
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.file.is_none() => {
                return Ok(Values::new());
            }
            Err(reason) => return Err(error(format!("cannot read this file: {reason}"))),
            Ok(text) => text,
        };
        // The parser's own text quotes the line, which may contain a secret without quotation marks.
        let table = toml::from_str(&text).map_err(|invalid| {
            let before = invalid.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            error(format!("invalid TOML in line {}: {}", before.matches('\n').count() + 1, invalid.message()))
        })?;
        let values = flatten(from_toml(toml::Value::Table(table))).into_iter();
        let values = values.filter(|(path, _)| !path.0.is_empty());
        Ok(values.map(|(path, value)| (path, Value { value, origin: origin.clone() })).collect())
    }

    /// Puts the values of the environment and of the flags over those of the file.
    fn override_values(&self, values: &mut Values) {
        let mut variables: Vec<_> = self.environment.iter().collect();
        // `PRECIS__DATABASE__URL` comes after `DATABASE_URL` and so replaces it.
        variables.sort();
        let variables = variables.into_iter().filter_map(|(name, value)| {
            let path = match name.strip_prefix(PREFIX) {
                Some(path) => SettingPath(path.to_lowercase().split(SEPARATOR).map(str::to_owned).collect()),
                None if name == "DATABASE_URL" && !value.is_empty() => SettingPath::from("database.url"),
                None => return None,
            };
            Some((path, value, format!("environment {name}")))
        });
        let flags = self.flags.iter();
        let flags =
            flags.map(|flag| (SettingPath::from(flag.path), &flag.value, format!("flag {}", flag.name)));
        for (path, value, origin) in variables.chain(flags) {
            let path = with_case_of_names(&path, values);
            // A secret or a field of a body replaces the whole one in the file, whatever forms the two have.
            if let Some(secret) = schema::secret(&path) {
                values.retain(|other, _| !other.is_within(&secret));
            } else if schema::kind(&path) == Some(Kind::Any) {
                values.retain(|other, _| !other.is_within(&path) && !path.is_within(other));
            }
            values.insert(path, Value { value: Json::from(value.as_str()), origin });
        }
    }
}

/// Returns the path with upper and lower case in names as in the file. Environment variables do not distinguish them.
fn with_case_of_names(path: &SettingPath, values: &Values) -> SettingPath {
    path.0.iter().fold(SettingPath::default(), |section, part| {
        let names = values.keys().filter(|other| other.is_within(&section));
        let names = names.filter_map(|other| other.0.get(section.0.len()));
        let same = names.filter(|name| schema::has_user_names(&section) && name.eq_ignore_ascii_case(part));
        section.child(same.min_by_key(|name| *name != part).unwrap_or(part))
    })
}

impl Settings {
    /// Reads, checks and resolves the settings. The error lists all problems.
    pub fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
        let mut errors = Vec::new();
        let file = sources.read_file();
        let file_failed = file.is_err();
        let mut values = file.unwrap_or_else(|error| {
            errors.push(error);
            Values::new()
        });
        sources.override_values(&mut values);

        let mut json = Json::Object(Map::new());
        for (path, text) in BUILT_IN {
            insert(&mut json, &SettingPath::from(path), text.into());
        }
        let mut origins = BTreeMap::new();
        for (path, Value { value, origin }) in values {
            // The section exists even if all its values are invalid: others may refer to it.
            if let Some(section) = named_section(&path) {
                insert(&mut json, &section, Json::Object(Map::new()));
            }
            match convert(&path, value) {
                Ok(None) => {}
                Ok(Some(value)) => {
                    insert(&mut json, &path, value);
                    origins.insert(path.to_string(), origin);
                }
                Err(message) => {
                    errors.push(SettingError { path: path.to_string(), origin: Some(origin), message });
                }
            }
        }

        let (mut settings, invalid) = deserialize(json);
        errors.extend(invalid.into_iter().map(|violation| violation.into_error(&origins)));
        let failed: BTreeSet<String> = errors.iter().map(|error| error.path.clone()).collect();
        // If the file can't be read, other values may seem invalid only because its values are missing.
        if !file_failed {
            let mut violations = validate(&settings);
            violations.extend(settings.resolve(&sources.environment));
            violations.retain(|violation| violation.paths.iter().all(|path| !failed.contains(path)));
            errors.extend(violations.into_iter().map(|violation| violation.into_error(&origins)));
        }
        let warnings = ignored_variables(sources.environment.iter().map(|(name, _)| name.as_str()));
        if errors.is_empty() {
            Ok(Loaded { settings, origins, warnings })
        } else {
            Err(ConfigError { errors })
        }
    }

    /// Sets the defaults of each provider's kind and resolves all secrets. A missing secret is an error only if a pool
    /// in use needs it.
    fn resolve(&mut self, environment: &[(String, String)]) -> Vec<Violation> {
        let pools = [self.consolidation_pool(), self.meta_pool()];
        let used = pools.into_iter().flatten().flat_map(|pool| self.providers_of(pool));
        let used: BTreeSet<String> = used.map(|(name, _)| name.to_owned()).collect();
        let mut violations = Vec::new();
        for (name, provider) in &mut self.llm.providers {
            provider.apply_kind_defaults();
            let headers = SettingPath::llm("providers", name, "headers");
            let mut secrets: Vec<(SettingPath, &mut Secret)> =
                provider.headers.iter_mut().map(|(name, value)| (headers.child(name), value)).collect();
            let api_key = SettingPath::llm("providers", name, "api_key");
            secrets.extend(provider.api_key.as_mut().map(|secret| (api_key, secret)));
            for (path, secret) in secrets {
                violations.extend(resolve(secret, &path, environment).filter(|_| used.contains(name)));
            }
        }
        for (name, upstream) in [("openai", &mut self.proxy.openai), ("anthropic", &mut self.proxy.anthropic)]
        {
            let path = SettingPath::from("proxy").child(name).child("api_key");
            let api_key = upstream.api_key.as_mut();
            violations.extend(api_key.and_then(|secret| resolve(secret, &path, environment)));
        }
        violations
    }
}

/// Resolves the secret of a setting. Returns the reason for which there is none.
fn resolve(secret: &mut Secret, path: &SettingPath, environment: &[(String, String)]) -> Option<Violation> {
    secret.resolve(environment);
    let message = secret.source().err()?.to_owned();
    let path = secret.table_key().map_or(path.clone(), |key| path.child(key));
    Some(Violation { paths: vec![path.to_string()], message })
}

/// Deserializes the settings. Removes each invalid value and tries again, so that all errors are found.
fn deserialize(mut json: Json) -> (Settings, Vec<Violation>) {
    let mut violations = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize::<_, Settings>(&json) {
            Ok(settings) => return (settings, violations),
            Err(error) => error,
        };
        let names = error.path().iter().map_while(|segment| match segment {
            Segment::Map { key } => Some(key.clone()),
            _ => None,
        });
        let path = SettingPath(names.collect());
        let message = error.inner().to_string().replace("unknown variant", "unknown value");
        violations.push(Violation { paths: vec![path.to_string()], message });
        if !remove(&mut json, &path) {
            return (Settings::default(), violations);
        }
    }
}

fn insert(json: &mut Json, path: &SettingPath, value: Json) {
    let target = path.0.iter().fold(json, |target, part| {
        if !target.is_object() {
            *target = Json::Object(Map::new());
        }
        &mut target[part]
    });
    // An empty section does not replace one with values.
    if !(target.is_object() && value.is_object()) {
        *target = value;
    }
}

/// Returns `false` if there is no such value.
fn remove(json: &mut Json, path: &SettingPath) -> bool {
    let Some((last, section)) = path.0.split_last() else { return false };
    let section = section.iter().try_fold(json, |json, part| json.get_mut(part));
    section.and_then(Json::as_object_mut).is_some_and(|fields| fields.remove(last).is_some())
}
