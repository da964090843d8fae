//! What must not be printed or logged: API keys and the values of headers.
//!
//! They show themselves redacted in `Debug` and `Serialize`, so that no log line and no `precis config` can give
//! them away by accident; the text is to be had by a method that says so. A key in a file may be changed while the
//! service runs, so what is found at start is where it is, and that it is there.

use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};

pub(super) const REDACTED: &str = "[redacted]";

/// An API key or the value of a header: how it was written, and what became of that.
#[derive(Clone, Deserialize)]
#[serde(from = "Written")]
pub struct Secret {
    written: Written,
    /// Until [`Secret::look_up`] the reason is that nobody has looked.
    source: Result<SecretSource, String>,
}

#[derive(Clone, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "expected one of: a string, { env = \"NAME\" }, { file = \"path\" }"
)]
enum Written {
    Text(#[serde(deserialize_with = "unseen")] SecretString),
    Env { env: String },
    File { file: PathBuf },
}

fn unseen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SecretString, D::Error> {
    String::deserialize(deserializer).map(SecretString::from)
}

/// Where a secret is.
#[derive(Clone, Debug)]
pub enum SecretSource {
    /// Here: it stood in the settings or in the environment, and stays what it is.
    Text(SecretString),
    /// In a file, which held a valid one at start and may hold another one since.
    File(PathBuf),
}

impl SecretSource {
    /// The secret as it is now. The error says why a file has none, without the file's content.
    pub fn read(&self) -> Result<SecretString, String> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::File(path) => read(path),
        }
    }
}

impl Default for Secret {
    fn default() -> Self {
        Written::Text(SecretString::default()).into()
    }
}

impl From<Written> for Secret {
    fn from(written: Written) -> Self {
        Self { written, source: Err("it was not looked up".to_owned()) }
    }
}

impl fmt::Debug for Secret {
    /// Not even a path: what was written in its place may be the key.
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
    /// Where the secret is. The error says why it can't be had, without the secret; that happens only where no pool
    /// in use needs it.
    pub fn source(&self) -> Result<&SecretSource, &str> {
        self.source.as_ref().map_err(String::as_str)
    }

    /// The key of the settings below the secret's that it was written with: `env`, `file` or none.
    pub(super) fn form(&self) -> Option<&'static str> {
        match self.written {
            Written::Text(_) => None,
            Written::Env { .. } => Some("env"),
            Written::File { .. } => Some("file"),
        }
    }

    /// Finds out where the secret is.
    pub(super) fn look_up(&mut self, environment: &[(String, String)]) {
        self.source = match &self.written {
            Written::Text(text) => parse(text.expose_secret()).map(SecretSource::Text),
            Written::Env { env } => variable(env, environment).map(SecretSource::Text),
            Written::File { file } => read(file).map(|_| SecretSource::File(file.clone())),
        };
    }
}

// The errors hold neither the secret nor what was written in place of a name or a path: that may be the secret, in
// the wrong place.

fn variable(name: &str, environment: &[(String, String)]) -> Result<SecretString, String> {
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Err("write the name of an environment variable, not the secret itself".to_owned());
    }
    let found = environment.iter().find(|(key, _)| key == name);
    let (_, text) = found.ok_or(format!("the environment variable {name} is not set: set it"))?;
    parse(text)
}

fn read(path: &Path) -> Result<SecretString, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read the file ({error}): write the path of a file"))?;
    parse(&text)
}

fn parse(text: &str) -> Result<SecretString, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("the secret is empty: set it, or leave it out if the server asks for none".to_owned());
    }
    if text.chars().any(char::is_control) {
        return Err("the secret must be one line without control characters".to_owned());
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use super::super::Loaded;
    use super::super::tests::{assert_one, file, with_key};
    use super::SecretSource;
    use secrecy::ExposeSecret as _;

    fn key_of(loaded: &Loaded) -> String {
        let provider = &loaded.settings.llm.providers["openai"];
        assert_eq!(provider.base_url.as_deref(), Some("https://api.openai.com/v1"));
        provider.api_key.as_ref().unwrap().source().unwrap().read().unwrap().expose_secret().to_owned()
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
            ("api_key = ''", "llm.providers.openai.api_key (precis.toml): the secret is empty"),
            (
                "api_key = \"sk-secret\\nX\"",
                "llm.providers.openai.api_key (precis.toml): the secret must be one line",
            ),
            (
                "api_key = ['sk-secret']",
                "llm.providers.openai.api_key (precis.toml): expected one of: a string",
            ),
            ("api_key = {}", "llm.providers.openai.api_key (precis.toml): expected one of: a string"),
            (
                "api_key = { env = 'A', file = 'sk-secret' }",
                "llm.providers.openai.api_key (precis.toml): expected one of: a string",
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
    }

    #[test]
    fn a_key_that_nobody_needs_may_be_missing() {
        for (api_key, reason) in [
            ("{ env = 'ABSENT' }", "the environment variable ABSENT is not set"),
            ("{ env = 'sk-secret' }", "write the name of an environment variable"),
            ("{ file = '/sk-secret' }", "cannot read the file"),
            ("\"sk-secret\\n2\"", "the secret must be one line"),
        ] {
            let loaded =
                file(&format!("[llm.providers.a]\napi_key = {api_key}\nheaders.x = {api_key}")).load();
            let provider = &loaded.settings.llm.providers["a"];
            for secret in [provider.api_key.as_ref().unwrap(), &provider.headers["x"]] {
                assert!(secret.source().unwrap_err().starts_with(reason), "{secret:?}");
            }
            let shown = format!("{loaded}{loaded:?}{:?}", provider.api_key.as_ref().unwrap().source());
            assert!(!shown.contains("sk-secret"), "{shown}");
        }
        let there = file("[llm.providers.openai]\napi_key = { env = 'A' }").environment(&[("A", "sk-3")]);
        assert_eq!(key_of(&there.load()), "sk-3");
    }

    #[test]
    fn a_key_in_a_file_is_read_anew() {
        let world = with_key("");
        let path = world.directory.path().join("key");
        let named = path.display().to_string();
        std::fs::write(&path, "sk-1\n").unwrap();
        let world = world.environment(&[("PRECIS__LLM__PROVIDERS__OPENAI__API_KEY__FILE", &named)]);
        let loaded = world.load();
        assert_eq!(key_of(&loaded), "sk-1");
        let source = loaded.settings.llm.providers["openai"].api_key.as_ref().unwrap().source().unwrap();
        assert!(matches!(source, SecretSource::File(file) if *file == path), "{source:?}");
        std::fs::write(&path, "sk-2\n").unwrap();
        assert_eq!(key_of(&loaded), "sk-2");
        std::fs::write(&path, "sk-2\nsk-3").unwrap();
        assert!(source.read().unwrap_err().starts_with("the secret must be one line"));
        std::fs::remove_file(&path).unwrap();
        assert!(source.read().unwrap_err().starts_with("cannot read the file"));
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
