//! What must not be printed or logged: API keys and the password in a database URL.
//!
//! Both show themselves redacted in `Debug` and `Serialize`, so that no log line and no `precis config` can give
//! them away by accident; the text is to be had by a method that says so.

use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;

const REDACTED: &str = "[redacted]";

/// An API key, or where to find it.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "Written")]
pub enum Secret {
    /// The key itself.
    Text(SecretString),
    /// The name of an environment variable.
    Env(String),
    /// A file that holds nothing else.
    File(PathBuf),
}

#[derive(Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected one of: a string, { env = \"NAME\" }, { file = \"path\" }"
)]
enum Written {
    Text(String),
    Env { env: String },
    File { file: PathBuf },
}

impl From<Written> for Secret {
    fn from(written: Written) -> Self {
        match written {
            Written::Text(text) => Self::Text(text.into()),
            Written::Env { env } => Self::Env(env),
            Written::File { file } => Self::File(file),
        }
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(REDACTED)
    }
}

impl Secret {
    /// The key; `None` where it was not looked up, because no pool in use needs it.
    #[must_use]
    pub fn value(&self) -> Option<&SecretString> {
        match self {
            Self::Text(text) => Some(text),
            Self::Env(_) | Self::File(_) => None,
        }
    }

    /// Looks the key up. The error says what to do, and holds neither the key nor what was written in place of a
    /// name or a path: that may be the key, in the wrong place.
    pub(super) fn resolve(&self, environment: &[(String, String)]) -> Result<Self, String> {
        let text = match self {
            Self::Text(text) => text.expose_secret().to_owned(),
            Self::Env(name) => {
                if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
                    return Err("write the name of an environment variable, not the key itself".to_owned());
                }
                let found = environment.iter().find(|(key, _)| key == name);
                let (_, value) =
                    found.ok_or(format!("the environment variable {name} is not set: set it"))?;
                value.clone()
            }
            Self::File(path) => std::fs::read_to_string(path)
                .map_err(|error| format!("cannot read the file ({error}): write the path of a file"))?,
        };
        let text = text.trim();
        if text.is_empty() {
            return Err(
                "the key is empty: set it, or leave api_key out if the server asks for none".to_owned()
            );
        }
        if text.chars().any(char::is_control) {
            return Err("the key must be one line without control characters".to_owned());
        }
        Ok(Self::Text(text.into()))
    }
}

/// The URL of the database. `Display` and `Debug` leave the password out.
#[derive(Clone, Deserialize)]
#[serde(from = "String")]
pub struct DatabaseUrl(SecretString);

impl From<String> for DatabaseUrl {
    fn from(url: String) -> Self {
        Self(url.into())
    }
}

impl From<&str> for DatabaseUrl {
    fn from(url: &str) -> Self {
        Self(url.into())
    }
}

impl DatabaseUrl {
    /// The URL with its password.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    /// Whether the SQLite store takes it.
    #[must_use]
    pub fn is_sqlite(&self) -> bool {
        self.expose().starts_with("sqlite:")
    }

    /// Whether the Postgres store takes it.
    #[must_use]
    pub fn is_postgres(&self) -> bool {
        ["postgres://", "postgresql://"].iter().any(|scheme| self.expose().starts_with(scheme))
    }

    /// Whether one of the stores takes it.
    pub(super) fn is_valid(&self) -> bool {
        self.is_sqlite() || self.postgres().is_some()
    }

    /// The parts of a Postgres URL. `None` also where an unescaped `@`, `/`, `?` or `#` in the password makes the
    /// parser take its end for something else: that would be shown.
    fn postgres(&self) -> Option<Url> {
        let url = Url::parse(self.expose()).ok().filter(|_| self.is_postgres())?;
        let torn = |part: Option<&str>| part.is_some_and(|part| part.contains('@'));
        let whole = url.fragment().is_none() && !torn(Some(url.path())) && !torn(url.query());
        whole.then_some(url)
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_sqlite() {
            return f.write_str(self.expose());
        }
        let Some(url) = self.postgres() else {
            return f.write_str(REDACTED);
        };
        write!(f, "{}://{}", url.scheme(), url.username())?;
        if url.password().is_some() {
            write!(f, ":{REDACTED}")?;
        }
        if !url.username().is_empty() || url.password().is_some() {
            f.write_str("@")?;
        }
        f.write_str(url.host_str().unwrap_or_default())?;
        if let Some(port) = url.port() {
            write!(f, ":{port}")?;
        }
        f.write_str(url.path())?;
        for (index, parameter) in url.query().into_iter().flat_map(|query| query.split('&')).enumerate() {
            f.write_str(if index == 0 { "?" } else { "&" })?;
            // A name with an escape in it may be "password" as well.
            let secret = |name: &str| name.to_ascii_lowercase().contains("pass") || name.contains('%');
            match parameter.split_once('=') {
                Some((name, _)) if secret(name) => {
                    write!(f, "{name}={REDACTED}")?;
                }
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

#[cfg(test)]
mod tests {
    use super::super::Loaded;
    use super::super::tests::{assert_one, file, with_key};
    use super::DatabaseUrl;
    use secrecy::ExposeSecret as _;

    fn key_of(loaded: &Loaded) -> &str {
        let provider = &loaded.settings.llm.providers["openai"];
        assert_eq!(provider.base_url.as_deref(), Some("https://api.openai.com/v1"));
        provider.api_key.as_ref().unwrap().value().unwrap().expose_secret()
    }

    #[test]
    fn keys_are_found_where_the_settings_say() {
        assert_eq!(key_of(&with_key("api_key = 'sk-1'").load()), "sk-1");
        let digits = [("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY", "00123"), ("UNUSED", "x")];
        let loaded = with_key("api_key = { env = 'UNUSED' }").environment(&digits).load();
        assert_eq!(key_of(&loaded), "00123", "text as it is, over the table of the file");
        let loaded =
            with_key("api_key = { env = 'OPENAI_API_KEY' }").environment(&[("OPENAI_API_KEY", "007")]).load();
        assert_eq!(key_of(&loaded), "007");
        assert!(loaded.to_string().contains("llm.providers.openai.api_key = \"[redacted]\"  # /"));

        let world = with_key("api_key = { env = 'ABSENT' }");
        let path = world.directory.path().join("key");
        std::fs::write(&path, " sk-2 \n").unwrap();
        let path = path.display().to_string();
        let world = world.environment(&[("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY__FILE", &path)]);
        assert_eq!(key_of(&world.load()), "sk-2");
        std::fs::write(&path, " \n").unwrap();
        assert_one(&world.problems(), "llm.providers.openai.api_key.file (environment PRECIS__");
    }

    #[test]
    fn a_key_that_cannot_be_had_is_an_error_where_it_is_needed() {
        for (api_key, beginning) in [
            (
                "api_key = { env = 'ABSENT' }",
                "llm.providers.openai.api_key.env (precis.toml): the environment variable ABSENT",
            ),
            (
                "api_key = { env = 'sk-secret' }",
                "llm.providers.openai.api_key.env (precis.toml): write the name",
            ),
            (
                "api_key = { file = '/sk-secret' }",
                "llm.providers.openai.api_key.file (precis.toml): cannot read the file",
            ),
            ("api_key = ''", "llm.providers.openai.api_key (precis.toml): the key is empty"),
            (
                "api_key = \"sk-secret\\nX\"",
                "llm.providers.openai.api_key (precis.toml): the key must be one line",
            ),
            (
                "api_key = ['sk-secret']",
                "llm.providers.openai.api_key (precis.toml): expected one of: a string",
            ),
            ("api_key = {}", "llm.providers.openai.api_key (precis.toml): expected one of: a string"),
            (
                "api_key = { env = 'A', file = 'sk-secret' }",
                "llm.providers.openai.api_key: expected one of: a string",
            ),
            ("api_key = { sk = 'sk-secret' }", "llm.providers.openai.api_key.sk (precis.toml): unknown key"),
            ("apikey = 'sk-secret'", "llm.providers.openai.apikey (precis.toml): unknown key: did you mean"),
            ("api_key = sk-secret", "precis.toml: TOML parse error at line 2, column 11"),
            ("api_key = 'sk-secret", "precis.toml: TOML parse error at line 2"),
            ("api_key = 'a' sk-secret", "precis.toml: TOML parse error at line 2"),
            ("api_key = 'a'\napi_key = 'sk-secret'", "precis.toml: TOML parse error at line 3"),
            ("api_key = \"sk-secret\\q\"", "precis.toml: TOML parse error at line 2"),
            ("sk-secret", "precis.toml: TOML parse error at line 2"),
            (
                "base_url = 'http://u:sk-secret@h'",
                "llm.providers.openai.base_url (precis.toml): must not hold",
            ),
        ] {
            let problems = with_key(api_key).problems();
            assert_one(&problems, beginning);
            assert_eq!(problems.len(), 1, "{problems:#?}");
            assert!(!problems[0].contains("sk-secret"), "{problems:#?}");
        }
        let unused = "[llm.providers.openai]\napi_key = { env = 'ABSENT' }";
        assert!(
            file(unused).load().settings.llm.providers["openai"].api_key.as_ref().unwrap().value().is_none()
        );
    }

    #[test]
    fn secrets_show_nowhere() {
        for url in [
            "postgres://user:hunter2@host:5432/db?sslmode=require",
            "postgres://user@host/db?password=hunter2&application_name=a",
            "postgresql:///db?host=/run&sslpassword=hunter2",
            "postgresql:///db?p%61ssword=hunter2",
        ] {
            let world = with_key("api_key = 'hunter2'").flag("database.url", url, "--database-url");
            let loaded = world.load();
            assert_eq!(loaded.settings.database.url.expose(), url);
            let shown = format!("{loaded:?}{loaded}{}", loaded.settings.database.url);
            assert!(!shown.contains("hunter2"), "{shown}");
            assert!(shown.contains("[redacted]"));
        }
        let url = DatabaseUrl::from("postgres://user:hunter2@host:5432/db?sslmode=require");
        assert_eq!(url.to_string(), "postgres://user:[redacted]@host:5432/db?sslmode=require");
        for torn in [
            "postgres://u:1/hunter2@h/d",
            "postgres://u:1?hunter2@h/d",
            "postgres://u:1#hunter2@h/d",
            "hunter2",
        ] {
            let problems = file("").flag("database.url", torn, "--database-url").problems();
            assert_one(&problems, "database.url (flag --database-url): must be a URL");
            assert!(!problems[0].contains("hunter2"));
            assert_eq!(DatabaseUrl::from(torn).to_string(), "[redacted]");
        }
    }
}
