//! Who a request is from, and whether that is enough for what it asks: a layer around every route, so that a new one
//! can't forget it.
//!
//! What a route needs is decided in [`Access::of`], by its method; what differs from that stands in the table beside
//! the routes. The OpenAPI document is made from the same function.

use crate::domain::api_key::{ApiKey, PREFIX, Scope};
use crate::http::ACCESS;
use crate::http::error::Problem;
use crate::http::middleware::origin_guard::OriginGuard;
use crate::service::keys::authenticator::{AuthError, Authenticator, Principal, Staleness};
use axum::body::HttpBody as _;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::sync::Arc;

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing.
    Open,
    /// A key of this scope.
    Key(Scope),
    /// The same; and a key that was good when the database went away stays good until it is back.
    KeyOrStale(Scope),
}

impl Access {
    /// What the route of this path needs.
    pub(crate) fn of(method: &Method, path: &str) -> Self {
        let special = ACCESS.iter().find(|(special, _)| *special == path);
        special.map_or(Self::Key(by_method(method)), |(_, access)| *access)
    }

    /// The scope that its key must have.
    pub(crate) fn scope(self) -> Option<Scope> {
        match self {
            Self::Open => None,
            Self::Key(scope) | Self::KeyOrStale(scope) => Some(scope),
        }
    }

    fn staleness(self) -> Staleness {
        if matches!(self, Self::KeyOrStale(_)) { Staleness::AllowStale } else { Staleness::Fresh }
    }
}

fn by_method(method: &Method) -> Scope {
    match *method {
        _ if method.is_safe() => Scope::Read,
        Method::DELETE => Scope::Admin,
        _ => Scope::Write,
    }
}

/// Lets in whom the route is for, and leaves the [`Principal`] to the extractors. Nothing of the body is read before.
pub(crate) async fn authenticate(
    State((authenticator, origin_guard)): State<(Authenticator, Arc<OriginGuard>)>,
    mut request: Request,
    next: Next,
) -> Response {
    let access = match request.extensions().get::<MatchedPath>() {
        Some(path) => Access::of(request.method(), path.as_str()),
        // No route: any key gets to know that there is none.
        None => Access::Key(Scope::Read),
    };
    let Some(needed) = access.scope() else {
        return next.run(request).await;
    };
    let principal = match principal(&authenticator, request.headers(), access.staleness()).await {
        Ok(principal) => principal,
        Err(problem) => return reject(&request, problem),
    };
    if principal.key.is_some() {
        tracing::Span::current().record("tenant", principal.tenant.as_str());
    } else if let Err(problem) = origin_guard.check(&request) {
        return reject(&request, problem);
    }
    if !principal.scope.covers(needed) {
        return reject(&request, Problem::forbidden(principal.scope, needed));
    }
    request.extensions_mut().insert(principal);
    next.run(request).await
}

async fn principal(
    authenticator: &Authenticator,
    headers: &HeaderMap,
    staleness: Staleness,
) -> Result<Principal, Problem> {
    let token = token(headers);
    let known = match token {
        // Who sends a mistyped key means a tenant too.
        Token::Bearer(text) if text.starts_with(PREFIX) => match ApiKey::parse(text) {
            Ok(key) => {
                // AuthError or not: the log shows who still uses a key that was revoked.
                tracing::Span::current().record("key", key.id().as_str());
                authenticator.with_key(&key, staleness).await
            }
            Err(_) => Err(AuthError::Unauthorized),
        },
        // Clients of model servers send a key that means nothing where none is asked for.
        _ => authenticator.without_key(staleness).await,
    };
    known.map_err(|refused| match (refused, token) {
        (AuthError::Store(error), _) => Problem::from_store(&error),
        (AuthError::Unauthorized, Token::Malformed) => Problem::malformed_authorization(),
        (AuthError::Unauthorized, _) => Problem::unauthorized(),
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    None,
    Bearer(&'a str),
    Malformed,
}

fn token(headers: &HeaderMap) -> Token<'_> {
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (given.next(), given.next()) else {
        let several = headers.contains_key(header::AUTHORIZATION);
        return if several { Token::Malformed } else { Token::None };
    };
    let parts = value.to_str().ok().and_then(|text| text.trim().split_once(' '));
    match parts.map(|(scheme, token)| (scheme, token.trim())) {
        Some((scheme, token))
            if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && !token.contains(' ') =>
        {
            Token::Bearer(token)
        }
        _ => Token::Malformed,
    }
}

/// The body of a refused request is not read, so nothing can follow it on its connection.
fn reject(request: &Request, problem: Problem) -> Response {
    let problem = if request.body().is_end_stream() { problem } else { problem.closing() };
    problem.into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn a_bearer_token_is_found() {
        for (values, found) in [
            (&[][..], Token::None),
            (&["Bearer x"], Token::Bearer("x")),
            (&["bearer  x "], Token::Bearer("x")),
            (&["BEARER a.b/c=="], Token::Bearer("a.b/c==")),
            (&["Bearer"], Token::Malformed),
            (&["Bearer "], Token::Malformed),
            (&["Bearer a b"], Token::Malformed),
            (&["Bearer, x"], Token::Malformed),
            (&["x"], Token::Malformed),
            (&[""], Token::Malformed),
            (&["Basic dTpw"], Token::Malformed),
            (&["Bearer é"], Token::Malformed),
            (&["Bearer x", "Bearer x"], Token::Malformed),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                let value = HeaderValue::from_bytes(value.as_bytes()).expect("a value");
                headers.append(header::AUTHORIZATION, value);
            }
            assert_eq!(token(&headers), found, "{values:?}");
        }
    }

    #[test]
    fn what_is_special_is_a_route() {
        let document = crate::http::openapi::document();
        // MCP describes itself.
        for (path, _) in ACCESS.iter().filter(|(path, _)| *path != "/mcp") {
            assert!(document.paths.paths.contains_key(*path), "{path}");
        }
    }
}
