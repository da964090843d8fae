//! Who a request is from, and whether that is enough for what it asks: a layer around every route, so that a new one
//! can't forget it.
//!
//! What a route needs is decided in [`Access::of`], by its method; what differs from that stands in the table beside
//! the routes. The OpenAPI document is made from the same function.

use crate::domain::api_key::{ApiKey, PREFIX, Scope};
use crate::http::ACCESS;
use crate::http::error::Problem;
use crate::http::middleware::origin_guard::Pages;
use crate::service::keys::authenticator::{Authenticator, Caller, Refused, Trust};
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
    KeyWhileAway(Scope),
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
            Self::Key(scope) | Self::KeyWhileAway(scope) => Some(scope),
        }
    }

    fn trust(self) -> Trust {
        if matches!(self, Self::KeyWhileAway(_)) { Trust::WhileAway } else { Trust::Brief }
    }
}

fn by_method(method: &Method) -> Scope {
    match *method {
        _ if method.is_safe() => Scope::Read,
        Method::DELETE => Scope::Admin,
        _ => Scope::Write,
    }
}

/// Lets in whom the route is for, and leaves the [`Caller`] to the extractors. Nothing of the body is read before.
pub(crate) async fn layer(
    State((authenticator, pages)): State<(Authenticator, Arc<Pages>)>,
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
    let caller = match caller(&authenticator, request.headers(), access.trust()).await {
        Ok(caller) => caller,
        Err(problem) => return refuse(&request, problem),
    };
    if caller.key.is_some() {
        tracing::Span::current().record("tenant", caller.tenant.as_str());
    } else if let Err(problem) = pages.check(&request) {
        return refuse(&request, problem);
    }
    if !caller.scope.covers(needed) {
        return refuse(&request, Problem::forbidden(caller.scope, needed));
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

async fn caller(authenticator: &Authenticator, headers: &HeaderMap, trust: Trust) -> Result<Caller, Problem> {
    let token = token(headers);
    let known = match token {
        // Who sends a mistyped key means a tenant too.
        Token::Bearer(text) if text.starts_with(PREFIX) => match ApiKey::parse(text) {
            Ok(key) => {
                // Refused or not: the log shows who still uses a key that was revoked.
                tracing::Span::current().record("key", key.id().as_str());
                authenticator.with_key(&key, trust).await
            }
            Err(_) => Err(Refused::Unauthorized),
        },
        // Clients of model servers send a key that means nothing where none is asked for.
        _ => authenticator.without_key(trust).await,
    };
    known.map_err(|refused| match (refused, token) {
        (Refused::Store(error), _) => Problem::from_store(&error),
        (Refused::Unauthorized, Token::Malformed) => Problem::no_bearer(),
        (Refused::Unauthorized, _) => Problem::unauthorized(),
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
fn refuse(request: &Request, problem: Problem) -> Response {
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
