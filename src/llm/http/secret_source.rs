//! Secrets that are sent to a server: its key, and what stands in extra headers.
//!
//! Each is asked for anew for each call, so that a key can be replaced while the service runs.

use secrecy::SecretString;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Where a secret comes from.
#[derive(Clone)]
pub struct SecretSource(Arc<dyn Fn() -> Result<SecretString, String> + Send + Sync>);

impl SecretSource {
    /// Asks `read` for each call; it may read a file. Its error says why there is no secret, without quoting any.
    pub fn new(read: impl Fn() -> Result<SecretString, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Always this one.
    pub fn fixed(secret: impl Into<SecretString>) -> Self {
        let secret = secret.into();
        Self::new(move || Ok(secret.clone()))
    }
}

impl fmt::Debug for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretSource")
    }
}

/// A secret, as it is now.
#[derive(Debug)]
pub(super) struct CachedSecret {
    source: SecretSource,
    last: Mutex<Option<SecretString>>,
}

impl CachedSecret {
    pub(super) fn new(source: SecretSource) -> Self {
        Self { source, last: Mutex::new(None) }
    }

    /// The secret. A file that can't be read, or has nothing in it, may be about to be replaced: what it held
    /// before stays in force. The error says why there was nothing before either.
    pub(super) async fn current(&self) -> Result<SecretString, String> {
        let SecretSource(read) = self.source.clone();
        let read = tokio::task::spawn_blocking(move || read()).await;
        let read = read.unwrap_or_else(|_| Err("it can't be read".to_owned()));
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(secret) => {
                *last = Some(secret.clone());
                Ok(secret)
            }
            Err(why) => last.clone().ok_or(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    #[tokio::test]
    async fn a_secret_is_asked_for_anew_and_outlives_its_place() {
        let place: Arc<Mutex<Option<&str>>> = Arc::default();
        let read = Arc::clone(&place);
        let key = CachedSecret::new(SecretSource::new(move || {
            read.lock().expect("whole").map(SecretString::from).ok_or_else(|| "gone".to_owned())
        }));
        for (there, expected) in
            [(None, Err("gone")), (Some("one"), Ok("one")), (Some("two"), Ok("two")), (None, Ok("two"))]
        {
            *place.lock().expect("whole") = there;
            let current = key.current().await;
            let current = current.as_ref().map(ExposeSecret::expose_secret);
            assert_eq!(current.map_err(String::as_str), expected);
        }
        assert!(!format!("{key:?}").contains("two"));
    }
}
