//! Values that must not be printed or logged: API keys, values of headers, passwords of databases.
//!
//! `Debug`, `Display` and `Serialize` redact them, so that neither a log line nor `precis config` can reveal them by
//! accident. The methods that return the secret say so in their names.

use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};

pub(super) const REDACTED: &str = "[redacted]";

/// An API key or the value of a header: the value in the settings, and the source that it was resolved to.
#[derive(Clone, Deserialize)]
#[serde(from = "RawSecret")]
pub struct Secret {
    raw: RawSecret,
    source: Result<SecretSource, String>,
}

#[derive(Clone, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected one of: a string, { env = \"NAME\" }, { file = \"path\" }"
)]
enum RawSecret {
    Text(#[serde(deserialize_with = "secret_string")] SecretString),
    Env { env: String },
    File { file: PathBuf },
}

fn secret_string<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SecretString, D::Error> {
    String::deserialize(deserializer).map(SecretString::from)
}

/// The place where a secret is read.
#[derive(Clone, Debug)]
pub enum SecretSource {
    /// The settings or the environment; the secret does not change while the service runs.
    Text(SecretString),
    /// A file. It contained a valid secret at start and may be replaced later.
    File(PathBuf),
}

impl SecretSource {
    /// Reads the current secret. The error does not contain the content of the file.
    pub fn read(&self) -> Result<SecretString, String> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => read_file(path),
        }
    }
}

impl From<RawSecret> for Secret {
    fn from(raw: RawSecret) -> Self {
        Self { raw, source: Err("the secret was not resolved".to_owned()) }
    }
}

impl From<SecretSource> for Secret {
    /// A secret that is resolved already.
    fn from(source: SecretSource) -> Self {
        Self { raw: RawSecret::Text(SecretString::default()), source: Ok(source) }
    }
}

impl fmt::Debug for Secret {
    /// Redacts names and paths, too: users put keys there by mistake.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}

impl Secret {
    /// Returns the source of the secret. The error gives the reason why there is none, without the secret. Loaded
    /// settings have such an error only in providers that no pool in use needs.
    pub fn source(&self) -> Result<&SecretSource, &str> {
        self.source.as_ref().map_err(String::as_str)
    }

    /// Returns the key inside the secret's table: `env` or `file`; `None` for a plain string.
    pub(super) fn table_key(&self) -> Option<&'static str> {
        match self.raw {
            RawSecret::Text(_) => None,
            RawSecret::Env { .. } => Some("env"),
            RawSecret::File { .. } => Some("file"),
        }
    }

    /// Finds and checks the secret; [`source`](Self::source) returns the result.
    pub(super) fn resolve(&mut self, environment: &[(String, String)]) {
        self.source = match &self.raw {
            RawSecret::Text(text) => check(text.expose_secret()).map(SecretSource::Text),
            RawSecret::Env { env } => read_variable(env, environment).map(SecretSource::Text),
            RawSecret::File { file } => read_file(file).map(|_| SecretSource::File(file.clone())),
        };
    }
}

// The errors of these functions contain neither the secret nor the path or an invalid name: either may be the secret in
// the wrong place.

fn read_variable(name: &str, environment: &[(String, String)]) -> Result<SecretString, String> {
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Err("write the name of an environment variable, not the secret itself".to_owned());
    }
    let variable = environment.iter().find(|(key, _)| key == name);
    let (_, text) = variable.ok_or(format!("the environment variable {name} is not set: set it"))?;
    check(text)
}

fn read_file(path: &Path) -> Result<SecretString, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read the file ({error}): write the path of a file"))?;
    check(&text)
}

fn check(text: &str) -> Result<SecretString, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the secret is empty: set it, or leave it out if the server needs none".to_owned());
    }
    if text.chars().any(char::is_control) {
        return Err("the secret must be one line without control characters".to_owned());
    }
    Ok(text.into())
}

/// The URL of the database, which may contain a password.
#[derive(Clone, Deserialize)]
#[serde(from = "String")]
pub struct DatabaseUrl(SecretString);

impl<T: Into<String>> From<T> for DatabaseUrl {
    fn from(url: T) -> Self {
        Self(url.into().into())
    }
}

impl DatabaseUrl {
    /// Returns the URL with its password.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    #[must_use]
    pub fn is_sqlite(&self) -> bool {
        self.expose().starts_with("sqlite:")
    }

    #[must_use]
    pub fn is_postgres(&self) -> bool {
        ["postgres://", "postgresql://"].iter().any(|scheme| self.expose().starts_with(scheme))
    }

    pub(super) fn is_valid(&self) -> bool {
        self.is_sqlite() || self.parse_postgres().is_some()
    }

    /// Parses a Postgres URL. Also returns `None` if the path or query contains `@` or if there is a fragment: then
    /// the password contains an unescaped special character, and `Display` would print a part of it.
    fn parse_postgres(&self) -> Option<Url> {
        let url = Url::parse(self.expose()).ok().filter(|_| self.is_postgres())?;
        let after_host = [url.path(), url.query().unwrap_or_default()];
        let is_split = url.fragment().is_some() || after_host.iter().any(|part| part.contains('@'));
        (!is_split).then_some(url)
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_sqlite() {
            return f.write_str(self.expose());
        }
        let Some(url) = self.parse_postgres() else {
            return f.write_str(REDACTED);
        };
        let mut shown = url.to_string();
        if let Some(password) = url.password() {
            shown = shown.replacen(&format!(":{password}@"), &format!(":{REDACTED}@"), 1);
        }
        let (address, query) = shown.split_once('?').map_or((&*shown, None), |(a, query)| (a, Some(query)));
        f.write_str(address)?;
        for (index, parameter) in query.into_iter().flat_map(|query| query.split('&')).enumerate() {
            f.write_str(if index == 0 { "?" } else { "&" })?;
            // An escaped name may spell "password", too.
            let is_secret = |name: &str| name.to_ascii_lowercase().contains("pass") || name.contains('%');
            match parameter.split_once('=') {
                Some((name, _)) if is_secret(name) => write!(f, "{name}={REDACTED}")?,
                _ => f.write_str(parameter)?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl Serialize for DatabaseUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
