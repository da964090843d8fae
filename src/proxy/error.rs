//! The errors of the proxy.

use crate::domain::id::InvalidId;
use crate::service::Error;
use std::time::Duration;

/// Longest time until an upstream begins to answer: that of the official clients.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_mins(10);

/// An error of the proxy itself. Errors of an upstream are relayed.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("no upstream is configured (proxy.{0}.base_url)")]
    Off(&'static str),
    #[error("the key of precis would be sent to the upstream")]
    KeyOfPrecis(&'static str),
    #[error("the API key of the upstream is unavailable: {0}")]
    SecretUnavailable(String),
    #[error("the path leads out of the base URL of the upstream")]
    Path,
    #[error("the {0} {1}")]
    InvalidId(&'static str, InvalidId),
    #[error("the upstream is unreachable: {0}")]
    Unreachable(&'static str),
    #[error("the upstream redirects")]
    Redirect,
    #[error("the upstream did not answer in {HEAD_TIMEOUT:?}")]
    Timeout,
    #[error("the work of precis took longer than {0:?}")]
    Slow(Duration),
    #[error(transparent)]
    Service(#[from] Error),
}
