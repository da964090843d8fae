//! The URL of the database, which may hold a password.

use super::secret::REDACTED;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

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
    use super::super::tests::{assert_one, file};
    use super::DatabaseUrl;

    #[test]
    fn the_password_is_left_out_whatever_is_wrong_with_the_url() {
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
