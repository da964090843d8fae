//! Extractors: requests as values, with problem documents instead of axum's plain-text rejections.

use super::error::Problem;
use super::json;
use super::path::percent_decode;
use crate::blocking;
use crate::config::Limits;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::json::field_error_from_serde;
use crate::domain::validation::FieldError;
use crate::service::keys::authenticator::Principal;
use axum::body::{Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri, header};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// The tenant of the API key; without keys, the default tenant.
pub(super) struct TenantFromKey(pub(super) TenantId);

impl<S: Send + Sync> FromRequestParts<S> for TenantFromKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        // Without the authentication layer the request fails, rather than act for a wrong tenant.
        let principal = parts.extensions.get::<Principal>().ok_or_else(Problem::internal)?;
        Ok(Self(principal.tenant.clone()))
    }
}

/// The session in the path.
pub(super) struct SessionPath(pub(super) SessionId);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(Deserialize)]
        struct Params {
            session_id: String,
        }
        let Params { session_id } = path_params(parts, state).await?;
        let id = SessionId::new(session_id);
        id.map(Self).map_err(|error| Problem::invalid_field("session_id", error.to_string()))
    }
}

/// The user in the path.
pub(super) struct UserPath(pub(super) UserId);

impl<S: Send + Sync> FromRequestParts<S> for UserPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(Deserialize)]
        struct Params {
            user_id: String,
        }
        let params: Params = path_params(parts, state).await?;
        Ok(Self(user_id(params.user_id, "user_id")?))
    }
}

/// The name of a tool in the path. The tool may not exist.
pub(super) struct ToolPath(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for ToolPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(Deserialize)]
        struct Params {
            name: String,
        }
        let params: Params = path_params(parts, state).await?;
        Ok(Self(params.name))
    }
}

/// The number of a revision in the path; 0 is the state before the first revision.
pub(super) struct RevisionPath(pub(super) i64);

impl<S: Send + Sync> FromRequestParts<S> for RevisionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(Deserialize)]
        struct Params {
            revision: String,
        }
        let params: Params = path_params(parts, state).await?;
        let number = params.revision.parse().ok().filter(|revision| *revision >= 0);
        number.map(Self).ok_or_else(|| Problem::invalid_field("revision", "must be a number: 0, 1, 2 …"))
    }
}

async fn path_params<T: DeserializeOwned + Send, S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> Result<T, Problem> {
    let detail = "The path must be percent-encoded UTF-8: %2F for a slash, %25 for a percent sign.";
    if percent_decode(parts.uri.path()).is_none() {
        return Err(Problem::bad_request(detail));
    }
    let params = Path::<T>::from_request_parts(parts, state).await;
    params.map(|Path(params)| params).map_err(|_| Problem::bad_request(detail))
}

/// Reads a user id from the request value at `field`.
pub(super) fn user_id(text: String, field: &str) -> Result<UserId, FieldError> {
    UserId::new(text).map_err(|error| FieldError::new(field, error.to_string()))
}

/// The query parameters. Unknown parameters are errors.
pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        if percent_decode(query).is_none() {
            let detail =
                "The query must be percent-encoded UTF-8: %26 for &, %2B for +, %25 for a percent sign.";
            return Err(Problem::bad_request(detail));
        }
        // Each parameter is checked alone first, because serde reports only the first error.
        let check = |pair: &str| match format!("/?{pair}").parse::<Uri>() {
            Ok(uri) => Query::<T>::try_from_uri(&uri).err().map(|error| query_error(&error)),
            Err(_) => None,
        };
        let errors: Vec<FieldError> = query.split('&').filter_map(check).collect();
        if !errors.is_empty() {
            return Err(Problem::invalid(errors));
        }
        let params = Query::<T>::from_request_parts(parts, state).await;
        params.map(|Query(params)| Self(params)).map_err(|error| Problem::invalid(vec![query_error(&error)]))
    }
}

/// An empty query of a request that reads.
pub(super) struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        reject_query(&parts.uri, "unknown: this request takes no parameters").map(|()| Self)
    }
}

/// An empty query and an empty body of a request that changes something. Ignored parameters would be dangerous: a
/// request with `?dry_run=true` would erase. The body `{}` is accepted, because some clients always send JSON.
pub(super) struct EmptyBody;

impl<S: Send + Sync> FromRequest<S> for EmptyBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        reject_query(request.uri(), "unknown: this request takes no parameters")?;
        match &*body_bytes(request).await? {
            b"" | b"{}" => Ok(Self),
            _ => Err(Problem::invalid_field("body", "must be empty: this request takes no body")),
        }
    }
}

/// Translates a rejection, whose source reads `limit: invalid digit found in string`.
fn query_error(rejection: &QueryRejection) -> FieldError {
    let text = std::error::Error::source(rejection).map_or_else(String::new, ToString::to_string);
    let (field, text) = text.split_once(": ").unwrap_or(("", &text));
    let number_errors = ["invalid digit", "cannot parse integer", "number too"];
    if number_errors.iter().any(|prefix| text.starts_with(prefix)) {
        return FieldError::new(field, "must be a whole number");
    }
    let error = field_error_from_serde(field, text);
    if error.field.is_empty() { error.in_value("query") } else { error }
}

/// A JSON object as the body. All unknown and invalid fields are reported with their paths.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let body = RawBody::without_query(request).await?;
        body.require_json()?;
        body.parse().await.map(Self)
    }
}

/// A JSON object as the body, or the default if the body is empty.
pub(super) struct OptionalJsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Default + Send + 'static, S: Send + Sync> FromRequest<S> for OptionalJsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let body = RawBody::without_query(request).await?;
        if body.bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        body.require_json()?;
        body.parse().await.map(Self)
    }
}

/// The text of a JSON object as the body, or `{}` if the body is empty. Query parameters are allowed.
pub(super) struct JsonTextBody(pub(super) String);

impl<S: Send + Sync> FromRequest<S> for JsonTextBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let RawBody { bytes, is_json, max_depth } = RawBody::of(request).await?;
        let len = bytes.len();
        match (bytes.is_empty(), is_json) {
            (true, _) => Ok(Self("{}".to_owned())),
            (false, false) => Err(Problem::unsupported_media_type()),
            (false, true) => {
                let check = move || json::check_body(&bytes, max_depth).map(|text| Self(text.to_owned()));
                blocking::spawn_cpu_if_large(len, check).await
            }
        }
    }
}

/// The buffered body of a request.
struct RawBody {
    bytes: Bytes,
    is_json: bool,
    max_depth: usize,
}

impl RawBody {
    async fn of(request: Request) -> Result<Self, Problem> {
        // The router adds the limits to each request.
        let limits = request.extensions().get::<Arc<Limits>>().ok_or_else(Problem::internal)?;
        let (max_depth, is_json) = (limits.max_json_depth, is_json(request.headers()));
        Ok(Self { bytes: body_bytes(request).await?, is_json, max_depth })
    }

    /// Reads the body of a request whose parameters all belong in the body.
    async fn without_query(request: Request) -> Result<Self, Problem> {
        reject_query(request.uri(), "unknown: this request takes its fields in the body")?;
        Self::of(request).await
    }

    fn require_json(&self) -> Result<(), Problem> {
        if self.is_json { Ok(()) } else { Err(Problem::unsupported_media_type()) }
    }

    async fn parse<T: DeserializeOwned + Send + 'static>(self) -> Result<T, Problem> {
        blocking::spawn_cpu_if_large(self.bytes.len(), move || json::parse(&self.bytes, self.max_depth)).await
    }
}

fn reject_query(uri: &Uri, detail: &str) -> Result<(), Problem> {
    let query = uri.query().unwrap_or_default();
    let name = |pair: &str| pair.split('=').next().unwrap_or_default().to_owned();
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let errors: Vec<FieldError> =
        pairs.map(|pair| FieldError::new(format!("?{}", name(pair)), detail)).collect();
    if errors.is_empty() { Ok(()) } else { Err(Problem::invalid(errors)) }
}

/// Returns the body, which the layer `body_limits` has buffered.
async fn body_bytes(request: Request) -> Result<Bytes, Problem> {
    to_bytes(request.into_body(), usize::MAX).await.map_err(|_| Problem::incomplete_body())
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let media_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}
