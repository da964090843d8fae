//! Errors in settings, and the paths that name settings in them.

use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fmt;

/// The full path of a setting, such as `llm.models.small.timeout`. `Display` quotes parts as TOML requires.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SettingPath(pub(super) Vec<String>);

impl SettingPath {
    pub(super) fn child(&self, name: &str) -> Self {
        Self(self.0.iter().cloned().chain([name.to_owned()]).collect())
    }

    /// Returns the path of a provider, model or pool, or of one of its settings.
    pub(super) fn llm(section: &str, name: &str, setting: &str) -> Self {
        Self(["llm", section, name, setting].map(str::to_owned).into())
    }

    pub(super) fn parts(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }

    /// Returns `true` if the paths are equal or `section` contains this path.
    pub(super) fn is_within(&self, section: &Self) -> bool {
        self.0.starts_with(&section.0)
    }
}

impl From<&str> for SettingPath {
    /// Splits a path whose parts contain no dots.
    fn from(dotted: &str) -> Self {
        Self(dotted.split('.').map(str::to_owned).collect())
    }
}

impl fmt::Display for SettingPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(".")?;
            }
            let is_bare = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
            if !part.is_empty() && part.bytes().all(is_bare) {
                f.write_str(part)?;
            } else {
                f.write_str(&to_toml(&Json::from(part.as_str())))?;
            }
        }
        Ok(())
    }
}

/// Formats a value as TOML on one line. The JSON of strings, numbers and booleans is valid TOML, except for the
/// control character U+007F.
pub(super) fn to_toml(value: &Json) -> String {
    match value {
        Json::Array(items) => format!("[{}]", items.iter().map(to_toml).collect::<Vec<_>>().join(", ")),
        Json::Object(fields) => {
            let fields = fields.iter();
            let fields = fields
                .map(|(name, value)| format!("{} = {}", SettingPath(vec![name.clone()]), to_toml(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        value => value.to_string().replace('\u{7f}', "\\u007f"),
    }
}

/// Returns the origin of a setting, or of the first value inside a section or secret.
pub(super) fn origin_of<'a>(path: &str, origins: &'a BTreeMap<String, String>) -> Option<&'a String> {
    let prefix = format!("{path}.");
    let inner = || origins.iter().find(|(set, _)| set.starts_with(&prefix)).map(|(_, origin)| origin);
    origins.get(path).or_else(inner)
}

/// An error in one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    /// The full path of the setting; empty if the error is about a whole file.
    pub path: String,
    /// The source of the value; `None` if the value is the default.
    pub origin: Option<String>,
    /// The problem and its fix, without secrets.
    pub message: String,
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path.as_str(), &self.origin) {
            ("", origin) => write!(f, "{}: {}", origin.as_deref().unwrap_or_default(), self.message),
            (path, Some(origin)) => write!(f, "{path} ({origin}): {}", self.message),
            (path, None) => write!(f, "{path}: {}", self.message),
        }
    }
}

/// All errors in the settings; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub errors: Vec<SettingError>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings are not valid")?;
        self.errors.iter().try_for_each(|error| write!(f, "\n  {error}"))
    }
}

impl std::error::Error for ConfigError {}
