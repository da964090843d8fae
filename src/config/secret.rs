//! What must not be printed or logged: API keys.
//!
//! They show themselves redacted in `Debug` and `Serialize`, so that no log line and no `precis config` can give
//! them away by accident; the text is to be had by a method that says so.

use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::path::PathBuf;

pub(super) const REDACTED: &str = "[redacted]";

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

#[cfg(test)]
mod tests {
    use super::super::Loaded;
    use super::super::tests::{assert_one, file, with_key};
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
    }
}
