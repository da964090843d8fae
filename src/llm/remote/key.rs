//! Secrets that are sent to a server: its key, and what stands in extra headers.
//!
//! One that stands in a file is read anew for each call, so that a key can be replaced while the service runs.

use secrecy::{ExposeSecret as _, SecretString};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Where a secret is.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// Here.
    Text(SecretString),
    /// In a file that holds nothing else.
    File(PathBuf),
}

/// A secret, as it is now.
#[derive(Debug)]
pub(super) struct Key {
    source: KeySource,
    last: Mutex<Option<SecretString>>,
}

impl Key {
    /// `None` for an empty text: no key.
    pub(super) fn new(source: KeySource) -> Option<Self> {
        if let KeySource::Text(text) = &source
            && text.expose_secret().is_empty()
        {
            return None;
        }
        Some(Self { source, last: Mutex::new(None) })
    }

    /// The secret. A file that can't be read, or has nothing in it, may be about to be replaced: what it held
    /// before stays in force. The error says why there was nothing before either.
    pub(super) async fn current(&self) -> Result<SecretString, String> {
        let path = match &self.source {
            KeySource::Text(text) => return Ok(text.clone()),
            KeySource::File(path) => path.clone(),
        };
        let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let why = match read {
            Ok(Ok(text)) => match text.trim() {
                "" => "its file is empty".to_owned(),
                text => {
                    let secret = SecretString::from(text);
                    *last = Some(secret.clone());
                    return Ok(secret);
                }
            },
            Ok(Err(error)) => format!("its file can't be read: {error}"),
            Err(_) => "its file can't be read".to_owned(),
        };
        last.clone().ok_or(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(key: &Key) -> Result<String, String> {
        key.current().await.map(|secret| secret.expose_secret().to_owned())
    }

    #[tokio::test]
    async fn a_file_is_read_anew_and_outlived() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("key");
        let key = Key::new(KeySource::File(path.clone())).expect("a key");
        assert!(read(&key).await.expect_err("no file").starts_with("its file can't be read: "));
        std::fs::write(&path, "\n").expect("written");
        assert_eq!(read(&key).await, Err("its file is empty".to_owned()));
        std::fs::write(&path, "one\n").expect("written");
        assert_eq!(read(&key).await.as_deref(), Ok("one"));
        std::fs::write(&path, "two").expect("written");
        assert_eq!(read(&key).await.as_deref(), Ok("two"));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(read(&key).await.as_deref(), Ok("two"));
        assert!(!format!("{key:?}").contains("two"));
    }

    #[test]
    fn an_empty_key_is_none() {
        assert!(Key::new(KeySource::Text(SecretString::from(""))).is_none());
    }
}
