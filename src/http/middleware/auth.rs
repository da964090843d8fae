//! Authentication and authorisation: a layer around every route, so that a new route cannot omit it.
//!
//! `http.rs` states the access that each route requires; [`AccessTable`] is made from it.

use crate::domain::api_key::{ApiKey, PREFIX};
use crate::http::access::{Access, AccessTable};
use crate::http::error::Problem;
use crate::http::middleware::origin_guard::OriginGuard;
use crate::service::keys::authenticator::{AuthError, Authenticator, Principal, Staleness};
use axum::body::HttpBody as _;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::sync::Arc;

/// The parts that the layer needs.
#[derive(Clone)]
pub(crate) struct AuthState {
    pub(crate) authenticator: Authenticator,
    pub(crate) origin_guard: Arc<OriginGuard>,
    pub(crate) access: Arc<AccessTable>,
}

/// Rejects requests without sufficient credentials before their body is read, and adds the [`Principal`] to the
/// extensions of the others.
pub(crate) async fn authenticate(
    State(auth): State<AuthState>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let access = auth.access.required(path, request.method());
    let Some(required) = access.scope() else {
        return next.run(request).await;
    };
    let principal = match principal(&auth.authenticator, request.headers(), access).await {
        Ok(principal) => principal,
        Err(problem) => return reject(&request, problem),
    };
    if principal.key.is_some() {
        tracing::Span::current().record("tenant", principal.tenant.as_str());
    } else if let Err(problem) = auth.origin_guard.check(&request) {
        return reject(&request, problem);
    }
    if !principal.scope.covers(required) {
        return reject(&request, Problem::forbidden(principal.scope, required));
    }
    request.extensions_mut().insert(principal);
    next.run(request).await
}

async fn principal(
    authenticator: &Authenticator,
    headers: &HeaderMap,
    access: Access,
) -> Result<Principal, Problem> {
    let staleness = match access {
        Access::KeyOrStale(_) => Staleness::AllowStale,
        Access::Open | Access::Key(_) => Staleness::Fresh,
    };
    let token = token(headers);
    let result = match token {
        // A mistyped key is rejected even if the service is open without keys: its sender means a tenant.
        Token::Bearer(text) if text.starts_with(PREFIX) => match ApiKey::parse(text) {
            Ok(key) => {
                // Rejected keys are logged, too: the log shows who still uses a revoked key.
                tracing::Span::current().record("key", key.id().as_str());
                authenticator.with_key(&key, staleness).await
            }
            Err(_) => Err(AuthError::Unauthorized),
        },
        // Clients of model servers send a placeholder as the key if none is required.
        _ => authenticator.without_key(staleness).await,
    };
    result.map_err(|error| match (error, token) {
        (AuthError::Store(error), _) => Problem::from_store(&error),
        (AuthError::Unauthorized, Token::Malformed) => Problem::malformed_authorization(),
        (AuthError::Unauthorized, _) => Problem::unauthorized(),
    })
}

#[derive(Clone, Copy)]
enum Token<'a> {
    None,
    Bearer(&'a str),
    Malformed,
}

/// Reads the header `authorization`. A typed header does not do: it takes the first of several headers, and tokens with
/// spaces.
fn token(headers: &HeaderMap) -> Token<'_> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = match (values.next(), values.next()) {
        (None, _) => return Token::None,
        (Some(_), Some(_)) => return Token::Malformed,
        (Some(value), None) => value,
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

/// Returns the error response. The body is not read, so the connection cannot serve another request after it.
fn reject(request: &Request, problem: Problem) -> Response {
    let problem = if request.body().is_end_stream() { problem } else { problem.closing() };
    problem.into_response()
}
