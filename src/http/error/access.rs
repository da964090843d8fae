//! Refusals of who is not let in: without a key that is valid, beyond its scope, or from another's page.

use super::Problem;
use crate::domain::api_key::Scope;
use axum::http::StatusCode;

impl Problem {
    /// 401. The same text whatever is wrong with the key: it must not help to find one.
    pub(crate) fn unauthorized() -> Self {
        let detail = "This needs an API key that is valid: send it as `Authorization: Bearer precis_…`. \
            `precis keys create` makes one.";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "No valid API key", detail)
    }

    /// 401 for a header that holds no bearer token.
    pub(crate) fn malformed_authorization() -> Self {
        let detail = "The header authorization must be there once, and read `Bearer precis_…`.";
        Self { detail: detail.to_owned(), ..Self::unauthorized() }
    }

    /// 403.
    pub(crate) fn forbidden(has: Scope, needed: Scope) -> Self {
        let detail = format!("This needs a key of the scope {needed}; the one sent has {has}.");
        Self::new(StatusCode::FORBIDDEN, "forbidden", "Not within the key's scope", detail)
    }

    /// 403: without a key, under a name that anyone could have made up.
    pub(crate) fn host_not_allowed(name: &str) -> Self {
        let detail = format!(
            "There is no API key, and so precis answers only at addresses, at localhost, and at the names in \
             server.allowed_hosts; {name:?} is none of them, and a web page could be behind it. Add it there, or make a key."
        );
        Self::new(StatusCode::FORBIDDEN, "host-not-allowed", "Host not allowed", detail)
    }

    /// 403: without a key, from a page that any site may have led the user to.
    pub(crate) fn origin_not_allowed(pages: &str) -> Self {
        let detail = format!(
            "There is no API key, and so {pages} may call only if server.cors_origins lists their origin. Add it there."
        );
        Self::new(StatusCode::FORBIDDEN, "origin-not-allowed", "Origin not allowed", detail)
    }
}
