//! From file, environment and flags to [`Settings`], with where each value came from and every error at once.
//!
//! The `config` crate puts the layers over each other. Then each value is tried alone over the defaults: every
//! field has one, so whatever fails is the fault of that value, and the next can be tried as well.

use super::keys::{Key, KnownKeys, entries, toml};
use super::sources::{Leaf, Sources, layered, leaves};
use super::validate::{Finding, validate};
use super::{Secret, Settings};
use ::config::ConfigError;
use serde::Deserialize as _;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What a provider and a model of the built-in kind have where they are redefined in part.
const BUILT_IN: [(&str, &str); 3] = [
    ("llm.providers.extractive.kind", "extractive"),
    ("llm.models.extractive.provider", "extractive"),
    ("llm.models.extractive.model", "extractive"),
];

/// Settings in force, and where they came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Valid, with the secrets in use resolved.
    pub settings: Settings,
    /// For each key that is not a default: the file, `environment PRECIS__…` or `flag --…`.
    pub origins: BTreeMap<String, String>,
}

impl fmt::Display for Loaded {
    /// TOML, one `section.key = value  # origin` a line; what is not set is a comment. Without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in entries(&self.settings) {
            if value == Json::Null {
                writeln!(f, "# {key} is not set")?;
                continue;
            }
            // A secret is one key here, and may be a table where it was written.
            let forms = [key.clone(), key.child("env"), key.child("file")];
            let origin = forms.iter().find_map(|key| self.origins.get(&key.to_string()));
            let origin = origin.map_or("default", String::as_str).escape_debug();
            writeln!(f, "{key} = {}  # {origin}", toml(&value))?;
        }
        Ok(())
    }
}

/// Something wrong with one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Its full path; empty where a whole file is meant.
    pub key: String,
    /// Where its value came from; `None` where nobody set it.
    pub origin: Option<String>,
    /// What is wrong and what to do; without secrets.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.key.as_str(), &self.origin) {
            ("", origin) => write!(f, "{}: {}", origin.as_deref().unwrap_or_default(), self.message),
            (key, Some(origin)) => write!(f, "{key} ({origin}): {}", self.message),
            (key, None) => write!(f, "{key}: {}", self.message),
        }
    }
}

/// Everything that is wrong with the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    /// At least one.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings are not valid")?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for ConfigErrors {}

impl Settings {
    /// Reads, checks and resolves the settings; the error lists all that is wrong.
    pub fn load(sources: &Sources) -> Result<Loaded, ConfigErrors> {
        let mut problems = Vec::new();
        let (file_name, file) = match sources.read() {
            Ok(file) => file.unzip(),
            Err(problem) => {
                problems.push(problem);
                (None, None)
            }
        };
        let file_failed = !problems.is_empty();

        let known = KnownKeys::new();
        let file = file.unwrap_or_default();
        let given = sources.given(&known, &file);
        let merged = layered(file.into_iter().chain(given)).and_then(|merged| leaves(&merged));
        let merged = merged.map_err(|error| ConfigErrors {
            problems: vec![Finding::from(&error).into_problem(&BTreeMap::new())],
        })?;
        let mut origins = BTreeMap::new();
        let mut sound: Vec<Leaf> =
            BUILT_IN.map(|(path, text)| Leaf::new(Key::dotted(path), text, None)).into();
        for leaf in merged {
            let key = leaf.key.to_string();
            // The file's values are the ones without a mark: they were parsed from text without a name.
            let origin = leaf.value.origin().map(str::to_owned).or_else(|| file_name.clone());
            // A section is there even if all that stands in it is wrong, or nothing: others may refer to it.
            sound.extend(known.named_section(&leaf.key).map(Leaf::section));
            match try_alone(leaf, &known) {
                Ok(None) => {}
                Ok(Some(leaf)) => {
                    origins.extend(origin.map(|origin| (key, origin)));
                    sound.push(leaf);
                }
                Err(message) => problems.push(Problem { key, origin, message }),
            }
        }
        let failed: BTreeSet<String> = problems.iter().map(|problem| problem.key.clone()).collect();

        let mut settings = match together(sound) {
            Ok(settings) => settings,
            Err(error) => {
                problems.push(Finding::from(&error).into_problem(&origins));
                return Err(ConfigErrors { problems });
            }
        };
        // What the file would have set is unknown: whatever else seems wrong may be right.
        if !file_failed {
            let mut findings = validate(&settings);
            findings.extend(settings.complete(&sources.environment));
            findings.retain(|finding| finding.keys.iter().all(|key| !failed.contains(key)));
            problems.extend(findings.into_iter().map(|finding| finding.into_problem(&origins)));
        }
        if problems.is_empty() { Ok(Loaded { settings, origins }) } else { Err(ConfigErrors { problems }) }
    }
}

/// The value in its kind, if the settings take it; `None` for an empty section.
fn try_alone(leaf: Leaf, known: &KnownKeys) -> Result<Option<Leaf>, String> {
    let Some(value) = known.check(&leaf.key, leaf.value)? else {
        return Ok(None);
    };
    let leaf = Leaf { value, ..leaf };
    Settings::deserialize(leaf.nested()).map_err(|error| explain(&error))?;
    Ok(Some(leaf))
}

/// All values over the defaults. Fails only where two of them exclude each other.
fn together(leaves: Vec<Leaf>) -> Result<Settings, ConfigError> {
    Settings::deserialize(layered(leaves)?)
}

/// What the `config` crate found, without the value: that may be a secret.
fn explain(error: &ConfigError) -> String {
    match error {
        ConfigError::At { error, .. } => explain(error),
        ConfigError::Type { expected, .. } => format!("must be {expected}"),
        other => other.to_string(),
    }
}

impl From<&ConfigError> for Finding {
    fn from(error: &ConfigError) -> Self {
        let key = match error {
            ConfigError::At { key, .. } | ConfigError::Type { key, .. } => key.clone(),
            _ => None,
        };
        Self { keys: vec![key.unwrap_or_default()], message: explain(error) }
    }
}

impl Settings {
    /// Puts in what validation has made certain: what each kind of provider has, and where the secrets are. One that
    /// is not there is wrong only where a pool in use leads to its provider.
    fn complete(&mut self, environment: &[(String, String)]) -> Vec<Finding> {
        let pools = [self.consolidation_pool(), self.meta_pool()];
        let used = pools.into_iter().flatten().flat_map(|pool| self.providers_of(pool));
        let used: BTreeSet<String> = used.map(|(name, _)| name.to_owned()).collect();
        let mut findings = Vec::new();
        for (name, provider) in &mut self.llm.providers {
            provider.put_in_defaults();
            let section = Key::dotted("llm.providers").child(name);
            let headers = section.child("headers");
            let mut secrets: Vec<(Key, &mut Secret)> =
                provider.headers.iter_mut().map(|(name, value)| (headers.child(name), value)).collect();
            secrets.extend(provider.api_key.as_mut().map(|secret| (section.child("api_key"), secret)));
            for (key, secret) in secrets {
                secret.look_up(environment);
                if let Err(reason) = secret.source()
                    && used.contains(name)
                {
                    let key = secret.form().map_or(key.clone(), |form| key.child(form));
                    findings.push(Finding { keys: vec![key.to_string()], message: reason.to_owned() });
                }
            }
        }
        findings
    }
}
