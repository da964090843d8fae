//! Protection of a service without API keys against web pages in the browser of its user.
//!
//! Without keys, the service trusts everybody who can reach it, and a web page can reach it through its user's browser:
//! with a cross-site request to the address of the service, or by DNS rebinding (a name of the page's own that
//! resolves to that address). [`OriginGuard`] rejects both. `tower_http::csrf` does not replace it: it accepts
//! cross-site GET requests and does not check the host.

use crate::http::error::Problem;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderName, header};
use std::net::IpAddr;

/// The header in which a browser tells how the requesting page relates to the service.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// A check of the headers `Host`, `Origin` and `Sec-Fetch-Site`.
#[derive(Debug)]
pub(crate) struct OriginGuard {
    /// Allowed host names in lower case, in addition to IP addresses and `localhost`. `*` allows every name.
    hosts: Vec<String>,
    /// Origins whose pages may call.
    origins: Vec<String>,
}

impl OriginGuard {
    pub(crate) fn new(hosts: &[String], origins: &[String]) -> Self {
        Self { hosts: hosts.iter().map(|host| host.to_lowercase()).collect(), origins: origins.to_vec() }
    }

    /// Returns an error if the host is unknown or the request may come from a page of another origin. Programs other
    /// than browsers send only `Host`.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Problem> {
        let headers = request.headers();
        let values =
            |name: HeaderName| headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("?"));
        let target = request.uri().authority().map(Authority::as_str);
        let mut hosts = target.into_iter().chain(values(header::HOST));
        if let Some(host) = hosts.find(|host| !self.is_allowed_host(host)) {
            return Err(Problem::host_not_allowed(&truncate(&host_name(host))));
        }
        let host = values(header::HOST).next().unwrap_or_default();
        let is_allowed_origin = |origin: &str| {
            let is_same = origin.split_once("://").is_some_and(|(_, authority)| authority == host);
            is_same || self.origins.iter().any(|allowed| allowed == origin)
        };
        let mut origins = values(header::ORIGIN).peekable();
        let is_other_site = |site: &str| !matches!(site, "same-origin" | "none");
        // Pages that may call send `Origin`. A cross-site request without it is an image, a link or the like.
        let is_cross_site = origins.peek().is_none() && values(SEC_FETCH_SITE).any(is_other_site);
        match origins.find(|origin| !is_allowed_origin(origin)) {
            Some(origin) => Err(Problem::origin_not_allowed(&format!("pages of {:?}", truncate(origin)))),
            None if is_cross_site => Err(Problem::origin_not_allowed("pages of other sites")),
            None => Ok(()),
        }
    }

    /// Returns `true` for IP addresses, `localhost` and the allowed names. DNS rebinding needs a name that its attacker
    /// controls, so addresses and `localhost` are safe.
    fn is_allowed_host(&self, host: &str) -> bool {
        let name = host_name(host);
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || address.parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|allowed| allowed == "*" || *allowed == name)
    }
}

/// Shortens a value of the client for an error text.
fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Returns the name in lower case and without the port.
fn host_name(host: &str) -> String {
    let port = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    port.map_or(host, |(name, _)| name).to_lowercase()
}

/// `tests/api/origin_guard.rs` has more cases.
#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use test_case::test_case;

    /// Returns the problem type of a request with these headers.
    fn check(guard: &OriginGuard, headers: &[(&str, &str)]) -> Option<&'static str> {
        let request = Request::builder().uri("/sessions");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let problem = guard.check(&request.body(Body::empty()).expect("a request")).err()?;
        let text = serde_json::to_string(&problem).expect("JSON");
        ["host-not-allowed", "origin-not-allowed"].into_iter().find(|kind| text.contains(kind))
    }

    #[test_case(&[] => None; "program without a host")]
    #[test_case(&["127.9.9.9:8080"] => None; "address")]
    #[test_case(&["[::1]"] => None; "address without a port")]
    #[test_case(&["memory.example"] => None; "allowed name in lower case")]
    #[test_case(&[""] => Some("host-not-allowed"); "empty")]
    #[test_case(&["127.0.0.1.evil.example"] => Some("host-not-allowed"); "name that begins as an address")]
    #[test_case(&["precis.evil.example"] => Some("host-not-allowed"); "name that begins as an allowed one")]
    #[test_case(&["localhost:8080@evil.example"] => Some("host-not-allowed"); "user and host")]
    #[test_case(&["evil.example#localhost"] => Some("host-not-allowed"); "fragment")]
    #[test_case(&["\u{e9}"] => Some("host-not-allowed"); "not ASCII")]
    #[test_case(&["localhost", "evil.example"] => Some("host-not-allowed"); "several")]
    fn host_must_be_an_address_or_an_allowed_name(hosts: &[&str]) -> Option<&'static str> {
        let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
        assert_eq!(check(&OriginGuard::new(&["*".to_owned()], &[]), &headers), None);
        check(&OriginGuard::new(&["precis".to_owned(), "Memory.Example".to_owned()], &[]), &headers)
    }

    #[test_case(&[("origin", "http://localhost:8080"), ("sec-fetch-site", "same-origin")] => None; "same")]
    #[test_case(&[("origin", "https://app.example.com"), ("sec-fetch-site", "cross-site")] => None; "allowed")]
    #[test_case(&[("sec-fetch-site", "none")] => None; "typed address")]
    #[test_case(&[("origin", "")] => Some("origin-not-allowed"); "empty")]
    #[test_case(&[("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site")] => Some("origin-not-allowed"); "other port")]
    #[test_case(&[("origin", "http://127.0.0.1:8080")] => Some("origin-not-allowed"); "other name of the host")]
    #[test_case(&[("origin", "http://localhost:8080"), ("origin", "https://evil.example")] => Some("origin-not-allowed"); "several")]
    fn origin_must_be_the_same_or_allowed(headers: &[(&str, &str)]) -> Option<&'static str> {
        let guard = OriginGuard::new(&[], &["https://app.example.com".to_owned()]);
        check(&guard, &[&[("host", "localhost:8080")], headers].concat())
    }
}
