//! Authentication and authorisation of every request, so that a new route cannot omit it.

use crate::domain::api_key::{ApiKey, PREFIX, Scope};
use crate::http::access::Access;
use crate::http::error::Problem;
use crate::http::middleware::origin_guard::OriginGuard;
use crate::service::keys::authenticator::{AuthError, Authenticator, Principal, Staleness};
use crate::trace_context::step;
use axum::body::HttpBody as _;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use tracing::Instrument as _;

/// The check of keys, hosts and origins.
pub(crate) struct Auth {
    pub(crate) authenticator: Authenticator,
    pub(crate) origin_guard: OriginGuard,
}

impl Auth {
    /// Adds the [`Principal`] to the extensions of a request, or returns an error if its credentials are not sufficient. A
    /// rejected request closes its connection if it has a body, because the body is not read.
    pub(crate) async fn authenticate(&self, request: &mut Request, access: Access) -> Result<(), Problem> {
        let Some(required) = access.scope() else { return Ok(()) };
        let principal = principal(&self.authenticator, request.headers(), access).await;
        let principal = principal.and_then(|principal| self.authorize(request, principal, required));
        let has_body = !request.body().is_end_stream();
        let principal = principal.map_err(|problem| if has_body { problem.closing() } else { problem })?;
        request.extensions_mut().insert(principal);
        Ok(())
    }

    /// Returns the principal if it may send this request.
    fn authorize(
        &self,
        request: &Request,
        principal: Principal,
        required: Scope,
    ) -> Result<Principal, Problem> {
        if principal.key.is_some() {
            tracing::Span::current().record("tenant", principal.tenant.as_str());
        } else {
            self.origin_guard.check(request)?;
        }
        if !principal.scope.covers(required) {
            return Err(Problem::forbidden(principal.scope, required));
        }
        Ok(principal)
    }
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
                authenticator.with_key(&key, staleness).instrument(step!("authenticate")).await
            }
            Err(_) => Err(AuthError::Unauthorized),
        },
        // Clients of model servers send a placeholder as the key if none is required.
        _ => authenticator.without_key(staleness).instrument(step!("authenticate")).await,
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
