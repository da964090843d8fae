//! `precis health`: the health check of a container, whose image contains no HTTP client.

use crate::config::Settings;
use crate::llm::http::build_http_client;
use std::error::Error;
use std::net::Ipv4Addr;
use std::time::Duration;

/// Returns an error if the service at `server.bind` is not ready.
pub(super) async fn check(settings: &Settings) -> Result<(), Box<dyn Error>> {
    let mut address = settings.server.bind;
    if address.ip().is_unspecified() {
        address.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    let client = build_http_client(Duration::from_secs(1))?;
    let url = format!("http://{address}/readyz");
    let request = client.get(&url).timeout(Duration::from_secs(3));
    let response = request.send().await.map_err(|cause| {
        let message = format!("no service answers at {url} (server.bind): start it, or correct the address");
        super::output::error_with_cause(message, cause.without_url())
    })?;
    if response.status().is_success() {
        return Ok(());
    }
    Err(super::output::error(format!("not ready: {}", response.text().await?)))
}
