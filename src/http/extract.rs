//! Extractors: requests as values, with problem documents instead of axum's plain-text rejections.

use super::error::Problem;
use super::headers::{X_PRECIS_SESSION, X_PRECIS_USER, is_json};
use super::json;
use super::middleware::admission::COPIES_OF_BODY;
use super::path::percent_decode;
use crate::blocking;
use crate::capacity;
use crate::config::Limits;
use crate::domain::api_key::KeyId;
use crate::domain::id::{InvalidId, SessionId, TenantId, UserId};
use crate::domain::json::field_error_from_serde;
use crate::domain::json_validation::MAX_JSON_VALUES;
use crate::domain::tool::Tool;
use crate::domain::validation::FieldError;
use crate::service::MemoryService;
use crate::service::keys::authenticator::Principal;
use axum::body::{Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Uri};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde::de::value::{Error as ValueError, MapDeserializer};
use std::sync::Arc;
use utoipa::openapi::schema::{KnownFormat, SchemaFormat};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

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

/// The tenant as in [`TenantFromKey`], and the API key, if there is one.
pub(super) struct TenantAndKey(pub(super) TenantId, pub(super) Option<KeyId>);

impl<S: Send + Sync> FromRequestParts<S> for TenantAndKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let principal = parts.extensions.get::<Principal>().ok_or_else(Problem::internal)?;
        Ok(Self(principal.tenant.clone(), principal.key.clone()))
    }
}

/// The sender of a request that acts for a user.
pub(super) struct Caller {
    /// As in [`TenantFromKey`].
    pub(super) tenant: TenantId,
    /// The user if the request names none.
    pub(super) default_user: Option<UserId>,
}

impl FromRequestParts<MemoryService> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, service: &MemoryService) -> Result<Self, Problem> {
        let principal = parts.extensions.get::<Principal>().ok_or_else(Problem::internal)?;
        Ok(Self { tenant: principal.tenant.clone(), default_user: service.default_user(principal).cloned() })
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct SessionPath {
    /// The session, by the id that the client chose for it, percent-encoded
    pub(super) session_id: SessionId,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct RevisionPath {
    /// The session, by the id that the client chose for it, percent-encoded
    pub(super) session_id: SessionId,
    /// 1, 2, 3 …; 0 is the session before its first revision
    #[param(inline)]
    pub(super) revision: Bounded<0, { i64::MAX }>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct MessagePath {
    /// The session, by the id that the client chose for it, percent-encoded
    pub(super) session_id: SessionId,
    /// The message
    #[param(inline)]
    pub(super) seq: Bounded<1, { i64::MAX }>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct ToolPath {
    /// The session, by the id that the client chose for it, percent-encoded
    pub(super) session_id: SessionId,
    /// The tool; the same as in the call
    #[param(inline, value_type = Tool, example = "search_history")]
    pub(super) name: String,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct UserPath {
    /// The user, percent-encoded
    pub(super) user_id: UserId,
}

/// Returns the user id of a body, or adds an error.
pub(super) fn user_id(id: Option<String>, errors: &mut Vec<FieldError>) -> Option<UserId> {
    let id = id.map(UserId::new).transpose();
    id.map_err(|error| errors.push(FieldError::new("user_id", error.to_string()))).unwrap_or_default()
}

/// Reads session and user from the headers of precis, for clients that send requests of other protocols.
pub(super) fn ids_from_headers(headers: &HeaderMap) -> Result<(Option<SessionId>, Option<UserId>), Problem> {
    fn id<T: TryFrom<String, Error = InvalidId>>(
        headers: &HeaderMap,
        name: &HeaderName,
    ) -> Result<Option<T>, FieldError> {
        let error = |detail: String| FieldError { field: name.to_string(), detail };
        let mut values = headers.get_all(name).iter();
        let Some(value) = values.next() else {
            return Ok(None);
        };
        if values.next().is_some() {
            return Err(error("given twice: send it once".to_owned()));
        }
        let text = std::str::from_utf8(value.as_bytes()).ok().and_then(percent_decode);
        let text = text.ok_or_else(|| error("must be percent-encoded UTF-8, as in a path".to_owned()))?;
        T::try_from(text).map(Some).map_err(|invalid| error(invalid.to_string()))
    }
    Ok((id(headers, &X_PRECIS_SESSION)?, id(headers, &X_PRECIS_USER)?))
}

/// The parameters in the path.
pub(super) struct PathParams<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let params = RawPathParams::from_request_parts(parts, state).await.ok();
        let is_encoded = percent_decode(parts.uri.path()).is_some();
        let params = params.filter(|_| is_encoded).ok_or_else(|| {
            Problem::bad_request(
                "The path must be percent-encoded UTF-8: %2F for a slash, %25 for a percent sign.",
            )
        })?;
        let params = MapDeserializer::<_, ValueError>::new(params.iter());
        serde_path_to_error::deserialize(params).map(Self).map_err(|error| {
            field_error_from_serde(&error.path().to_string(), &error.inner().to_string()).into()
        })
    }
}

/// The number of a path or query, from `MIN` to `MAX`.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Bounded<const MIN: i64, const MAX: i64>(pub(super) i64);

impl<const MIN: i64, const MAX: i64> TryFrom<String> for Bounded<MIN, MAX> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // Other spellings, such as `+1` and `01`, would be aliases of a path.
        let number = text.parse().ok().filter(|number: &i64| number.to_string() == text);
        let number = number.filter(|number| (MIN..=MAX).contains(number));
        number.map(Self).ok_or_else(|| format!("must be a number from {MIN} to {MAX}"))
    }
}

impl<const MIN: i64, const MAX: i64> PartialSchema for Bounded<MIN, MAX> {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(MIN)).maximum(Some(MAX));
        number.format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64))).into()
    }
}

impl<const MIN: i64, const MAX: i64> ToSchema for Bounded<MIN, MAX> {}

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
        // Each parameter is checked alone first, because serde reports only the first error. The empty query shows if a
        // parameter is required.
        let check = |pair: &str| match format!("/?{pair}").parse::<Uri>() {
            Ok(uri) => Query::<T>::try_from_uri(&uri).err().map(|error| query_error(&error)),
            Err(_) => None,
        };
        let missing = check("").filter(|error| !query.split(['&', '=']).any(|name| name == error.field));
        let is_invalid = |error: &FieldError| error.detail != "missing";
        let invalid = query.split('&').filter_map(check).filter(is_invalid);
        let errors: Vec<FieldError> = missing.into_iter().chain(invalid).collect();
        if !errors.is_empty() {
            return Err(Problem::invalid(errors));
        }
        let params = Query::<T>::from_request_parts(parts, state).await;
        params.map(|Query(params)| Self(params)).map_err(|error| Problem::invalid(vec![query_error(&error)]))
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

/// An empty query of a request that reads.
pub(super) struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        reject_query(&parts.uri, "unknown: this request takes no parameters").map(|()| Self)
    }
}

pub(super) fn reject_query(uri: &Uri, detail: &str) -> Result<(), Problem> {
    let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    let names = pairs.map(|pair| pair.split('=').next().unwrap_or_default());
    let errors: Vec<_> = names.map(|name| FieldError::new(format!("?{name}"), detail)).collect();
    if errors.is_empty() { Ok(()) } else { Err(Problem::invalid(errors)) }
}

/// An empty query and an empty body of a request that changes something. Ignored parameters would be dangerous: a
/// request with `?dry_run=true` would erase. The body `{}` is accepted, because some clients always send JSON.
pub(super) struct EmptyBody;

impl<S: Send + Sync> FromRequest<S> for EmptyBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        reject_query(request.uri(), "unknown: this request takes no parameters")?;
        match &*json_bytes(request, true).await? {
            b"" | b"{}" => Ok(Self),
            _ => Err(Problem::invalid_field("body", "must be empty: this request takes no body")),
        }
    }
}

const IN_BODY: &str = "unknown: this request takes its fields in the body";

/// A JSON object as the body. All unknown and invalid fields are reported with their paths.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        reject_query(request.uri(), IN_BODY)?;
        let max_depth = max_json_depth(&request)?;
        let body = json_bytes(request, false).await?;
        parse_json(body, max_depth).await.map(Self)
    }
}

/// A JSON object as the body, or the default if the body is empty.
pub(super) struct OptionalJsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Default + Send + 'static, S: Send + Sync> FromRequest<S> for OptionalJsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        reject_query(request.uri(), IN_BODY)?;
        let max_depth = max_json_depth(&request)?;
        let body = json_bytes(request, true).await?;
        if body.is_empty() {
            return Ok(Self(T::default()));
        }
        parse_json(body, max_depth).await.map(Self)
    }
}

/// Memory of a value of a large body while it is parsed, in bytes.
const MEMORY_OF_VALUE: usize = 256;

/// Parses a body. A large one gets the memory of its values first, if they need more than the request has for its size.
async fn parse_json<T: DeserializeOwned + Send + 'static>(
    body: Bytes,
    max_depth: usize,
) -> Result<T, Problem> {
    let bytes = body.len();
    if blocking::is_large(bytes) {
        let checked = body.clone();
        let count = move || json::check_body(&checked, max_depth, MAX_JSON_VALUES).map(|(_, values)| values);
        let values = blocking::spawn_cpu_if_large(bytes, count).await?;
        let more = (values * MEMORY_OF_VALUE).saturating_sub(bytes * COPIES_OF_BODY);
        if more > 0 {
            capacity::claim(more).await.map_err(Problem::overloaded)?;
        }
    }
    blocking::spawn_cpu_if_large(bytes, move || json::parse(&body, max_depth)).await
}

/// Largest number of JSON values in the call of a tool. The arguments of each tool are a few texts and numbers.
pub(super) const MAX_VALUES_OF_CALL: usize = 10_000;

/// The text of a small JSON object as the body, or `{}` if the body is empty. Query parameters are allowed.
pub(super) struct JsonTextBody(pub(super) String);

impl<S: Send + Sync> FromRequest<S> for JsonTextBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let max_depth = max_json_depth(&request)?;
        let body = json_bytes(request, true).await?;
        if body.is_empty() {
            return Ok(Self("{}".to_owned()));
        }
        let bytes = body.len();
        let check = move || {
            json::check_body(&body, max_depth, MAX_VALUES_OF_CALL).map(|(text, _)| Self(text.to_owned()))
        };
        blocking::spawn_cpu_if_large(bytes, check).await
    }
}

/// Returns the largest depth of JSON. The router adds the limits to each request.
fn max_json_depth(request: &Request) -> Result<usize, Problem> {
    let limits = request.extensions().get::<Arc<Limits>>().ok_or_else(Problem::internal)?;
    Ok(limits.max_json_depth)
}

/// Returns a body of JSON. An empty body needs no media type if it `may_be_empty`.
async fn json_bytes(request: Request, may_be_empty: bool) -> Result<Bytes, Problem> {
    let is_json = is_json(request.headers());
    let body = body_bytes(request).await?;
    if is_json || (may_be_empty && body.is_empty()) {
        Ok(blocking::spawn_cpu_if_large(body.len(), move || json::without_lone_surrogates(body)).await)
    } else {
        Err(Problem::unsupported_media_type())
    }
}

/// Returns the body, which the layer `body_limits` has buffered.
pub(super) async fn body_bytes(request: Request) -> Result<Bytes, Problem> {
    to_bytes(request.into_body(), usize::MAX).await.map_err(|_| Problem::incomplete_body())
}
