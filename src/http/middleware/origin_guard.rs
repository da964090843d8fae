//! What browsers are told about every answer, and which pages may call.
//!
//! A service without keys trusts whoever reaches it, and a page that its user looks at reaches it through the browser:
//! with a request to its address that needs no leave (cross-site), or with one to a name of the page's own that leads to
//! that address (DNS rebinding). [`OriginGuard`] tells both from the user.

use crate::http::error::Problem;
use crate::http::routes::mcp;
use axum::Router;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use std::net::IpAddr;
use std::time::Duration;
use tower_http::cors::{AllowOrigin, CorsLayer};

/// An answer is data: a browser that is led to it shows it, and neither guesses a type, nor runs anything, nor keeps it.
/// A page says what else it may do in a policy of its own.
const SECURITY_HEADERS: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
];

/// Who is let in without a key.
#[derive(Debug)]
pub(crate) struct OriginGuard {
    /// Names, in lower case, beside those that lead to this machine on any.
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl OriginGuard {
    pub(crate) fn new(hosts: &[String], origins: &[String]) -> Self {
        Self { hosts: hosts.iter().map(|host| host.to_lowercase()).collect(), origins: origins.to_vec() }
    }

    /// Whether the request is the user's own, as far as its head can tell. Programs that are no browsers send no more
    /// of it than `Host`.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Problem> {
        let headers = request.headers();
        let texts =
            |name: HeaderName| headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("?"));
        let target = request.uri().authority().map(Authority::as_str);
        let mut hosts = target.into_iter().chain(texts(header::HOST));
        if let Some(foreign) = hosts.find(|host| !self.is_allowed_host(host)) {
            return Err(Problem::host_not_allowed(&truncate(&host_name(foreign))));
        }
        let host = texts(header::HOST).next().unwrap_or_default();
        let ours = |origin: &str| {
            let of_page = origin.split_once("://").is_some_and(|(_, authority)| authority == host);
            of_page || self.origins.iter().any(|known| known == origin)
        };
        let mut origins = texts(header::ORIGIN).peekable();
        let other_site = |site: &str| !matches!(site, "same-origin" | "none");
        // A page that may call says its name; only a browser that loads an image or follows a link says none.
        let nameless = origins.peek().is_none() && texts(SEC_FETCH_SITE).any(other_site);
        match origins.find(|origin| !ours(origin)) {
            Some(origin) => Err(Problem::origin_not_allowed(&format!("pages of {:?}", truncate(origin)))),
            None if nameless => Err(Problem::origin_not_allowed("pages of other sites")),
            None => Ok(()),
        }
    }

    /// A name can be made to lead anywhere; an address can't, nor can `localhost`.
    fn is_allowed_host(&self, host: &str) -> bool {
        let name = host_name(host);
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || address.parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|known| known == "*" || *known == name)
    }
}

/// Enough of it to be recognised.
fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

/// What a browser says of the page that asks, whatever page that is.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Without the port, in lower case.
fn host_name(host: &str) -> String {
    let port = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    port.map_or(host, |(name, _)| name).to_lowercase()
}

/// Puts the headers on an answer that does not have them.
pub(crate) async fn set_security_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

/// Lets pages of these origins call (CORS), with a key, but without cookies. Without origins there is no such layer.
pub(crate) fn with_cors(router: Router, origins: &[String]) -> Router {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    if origins.is_empty() {
        return router;
    }
    let [key, replayed, id] =
        ["idempotency-key", "idempotent-replayed", "x-request-id"].map(HeaderName::from_static);
    let mut headers = vec![header::AUTHORIZATION, header::CONTENT_TYPE, header::IF_MATCH, key, id.clone()];
    headers.extend(mcp::HEADERS);
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        .allow_headers(headers)
        .expose_headers([header::ETAG, header::RETRY_AFTER, replayed, id])
        .max_age(Duration::from_hours(1));
    router.layer(cors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    /// Which problem a request with these headers has.
    fn problem(pages: &OriginGuard, headers: &[(&str, &str)]) -> Option<&'static str> {
        let mut request = Request::builder().uri("/sessions");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let problem = pages.check(&request.body(Body::empty()).expect("a request")).err()?;
        let text = serde_json::to_string(&problem).expect("JSON");
        ["host-not-allowed", "origin-not-allowed"].into_iter().find(|kind| text.contains(kind))
    }

    #[test]
    fn a_host_is_an_address_or_a_name_that_is_known() {
        let pages = OriginGuard::new(&["precis".to_owned(), "Memory.Example".to_owned()], &[]);
        for good in [
            "localhost",
            "localhost:8080",
            "LOCALHOST:1",
            "127.0.0.1",
            "127.9.9.9:8080",
            "[::1]",
            "[::1]:8080",
            "192.168.1.7:8080",
            "precis:8080",
            "memory.example",
        ] {
            assert_eq!(problem(&pages, &[("host", good)]), None, "{good}");
        }
        for wrong in [
            "",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "precis.evil.example",
            "localhost:8080@evil.example",
            "evil.example#localhost",
            "\u{e9}",
        ] {
            assert_eq!(problem(&pages, &[("host", wrong)]), Some("host-not-allowed"), "{wrong}");
            assert_eq!(
                problem(&OriginGuard::new(&["*".to_owned()], &[]), &[("host", wrong)]),
                None,
                "{wrong}"
            );
        }
        let several = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(problem(&pages, &several), Some("host-not-allowed"));
        assert_eq!(problem(&pages, &[]), None, "no browser");
    }

    #[test]
    fn a_page_is_ours_or_one_that_may_call() {
        let pages = OriginGuard::new(&[], &["https://app.example.com".to_owned()]);
        let with = |headers: &[(&str, &str)]| {
            let mut all = vec![("host", "localhost:8080")];
            all.extend(headers);
            problem(&pages, &all)
        };
        for good in [
            &[("origin", "http://localhost:8080"), ("sec-fetch-site", "same-origin")][..],
            &[("origin", "https://app.example.com"), ("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-site", "same-origin")],
        ] {
            assert_eq!(with(good), None, "{good:?}");
        }
        for wrong in [
            &[("origin", "https://evil.example")][..],
            &[("origin", "null")],
            &[("origin", "")],
            &[("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site")],
            &[("origin", "http://127.0.0.1:8080")],
            &[("origin", "http://localhost:8080"), ("origin", "https://evil.example")],
            &[("origin", "https://app.example.com.evil.example")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "same-site")],
        ] {
            assert_eq!(with(wrong), Some("origin-not-allowed"), "{wrong:?}");
        }
    }
}
