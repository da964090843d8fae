//! Requests as values: axum's extractors, with problem documents where axum answers in plain text.

use super::error::Problem;
use super::json;
use super::limits::Limits;
use crate::blocking;
use crate::domain::api_key::redact_keys;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::json::field_error_from_serde;
use crate::domain::validation::FieldError;
use crate::service::keys::authenticator::Principal;
use axum::body::{Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri, header};
use serde::de::DeserializeOwned;
use std::borrow::Cow;

/// The tenant that the request acts for: that of its key. Without API keys there is one.
pub(super) struct TenantFromKey(pub(super) TenantId);

impl<S: Send + Sync> FromRequestParts<S> for TenantFromKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        // A route that the layer was forgotten around serves nobody, rather than one tenant the data of another.
        let caller = parts.extensions.get::<Principal>().ok_or_else(Problem::internal)?;
        Ok(Self(caller.tenant.clone()))
    }
}

/// The session that the path names.
pub(super) struct SessionPath(pub(super) SessionId);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Params {
            session_id: String,
        }
        let params: Params = path(parts, state).await?;
        SessionId::new(params.session_id)
            .map(Self)
            .map_err(|error| Problem::invalid_field("session_id", error.to_string()))
    }
}

/// The user that the path names.
pub(super) struct UserPath(pub(super) UserId);

impl<S: Send + Sync> FromRequestParts<S> for UserPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Params {
            user_id: String,
        }
        let params: Params = path(parts, state).await?;
        Ok(Self(user_id(params.user_id, "user_id")?))
    }
}

/// What the path names as a tool, whether there is one of the name or not.
pub(super) struct ToolPath(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for ToolPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Params {
            name: String,
        }
        let params: Params = path(parts, state).await?;
        Ok(Self(params.name))
    }
}

/// The revision that the path names; 0 = before the first.
pub(super) struct RevisionPath(pub(super) i64);

impl<S: Send + Sync> FromRequestParts<S> for RevisionPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Params {
            revision: String,
        }
        let params: Params = path(parts, state).await?;
        let number = params.revision.parse().ok().filter(|revision| *revision >= 0);
        number.map(Self).ok_or_else(|| Problem::invalid_field("revision", "must be a number: 0, 1, 2 …"))
    }
}

async fn path<T: DeserializeOwned + Send, S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> Result<T, Problem> {
    let wrong = || {
        Problem::bad_request(
            "The path must be percent-encoded UTF-8: %2F for a slash, %25 for a percent sign.",
        )
    };
    if percent_decode(parts.uri.path()).is_none() {
        return Err(wrong());
    }
    Path::<T>::from_request_parts(parts, state).await.map(|Path(params)| params).map_err(|_| wrong())
}

/// The text without its escapes, if each `%` begins one, and the result is UTF-8. Decoders let anything pass, and so `%zz`
/// and `%25zz`, or any two bytes that are not UTF-8, would be one id.
pub(super) fn percent_decode(text: &str) -> Option<String> {
    let mut percent_decode = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    let hex = |byte: Option<u8>| u8::try_from(char::from(byte?).to_digit(16)?).ok();
    while let Some(byte) = rest.next() {
        percent_decode.push(match byte {
            b'%' => match (hex(rest.next()), hex(rest.next())) {
                (Some(high), Some(low)) => high * 16 + low,
                _ => return None,
            },
            _ => byte,
        });
    }
    String::from_utf8(percent_decode).ok()
}

/// A path to be shown, in the log or in an answer: as it came, or without its escapes where there is a key in it. People
/// paste keys where an id should be. What is behind escapes that can't be read, nobody can tell: it is not shown.
pub(super) fn redact_path(path: &str) -> Cow<'_, str> {
    match percent_decode(path).as_deref().map(redact_keys) {
        None => Cow::Borrowed("(not percent-encoded UTF-8)"),
        Some(Cow::Borrowed(_)) => Cow::Borrowed(path),
        Some(Cow::Owned(shown)) => Cow::Owned(shown),
    }
}

/// A user id out of a request.
pub(super) fn user_id(text: String, field: &str) -> Result<UserId, FieldError> {
    UserId::new(text).map_err(|error| FieldError { field: field.to_owned(), detail: error.to_string() })
}

/// The parameters behind the `?`; an unknown one is an error.
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
        // One by one, so that all that is wrong is named, not just the first.
        let alone = |pair: &str| match format!("/?{pair}").parse::<Uri>() {
            Ok(uri) => Query::<T>::try_from_uri(&uri).err().map(|wrong| query_error(&wrong)),
            Err(_) => None,
        };
        let wrong: Vec<FieldError> = query.split('&').filter_map(alone).collect();
        if !wrong.is_empty() {
            return Err(Problem::invalid(wrong));
        }
        let whole = Query::<T>::from_request_parts(parts, state).await;
        whole.map(|Query(params)| Self(params)).map_err(|wrong| Problem::invalid(vec![query_error(&wrong)]))
    }
}

/// There is nothing behind the `?` of a request that reads.
pub(super) struct NoQuery;

impl<S: Send + Sync> FromRequestParts<S> for NoQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        no_params(&parts.uri, "unknown: this request takes no parameters").map(|()| Self)
    }
}

/// There is nothing behind the `?` of a request that changes something, and in its body neither: what is put there would
/// be passed over in silence, and a `?dry_run=true` would erase. `{}` may be sent, as clients do that always send JSON.
pub(super) struct EmptyBody;

impl<S: Send + Sync> FromRequest<S> for EmptyBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        no_params(request.uri(), "unknown: this request takes no parameters")?;
        match &*collect_body(request).await? {
            b"" | b"{}" => Ok(Self),
            _ => Err(Problem::invalid_field("body", "must be left out: this request takes none")),
        }
    }
}

/// A rejection's source reads `limit: invalid digit found in string`.
fn query_error(rejection: &QueryRejection) -> FieldError {
    let text = std::error::Error::source(rejection).map_or_else(String::new, ToString::to_string);
    let (field, text) = text.split_once(": ").unwrap_or(("", &text));
    let is_number = ["invalid digit", "cannot parse integer", "number too"];
    if is_number.iter().any(|begin| text.starts_with(begin)) {
        return FieldError { field: field.to_owned(), detail: "must be a whole number".to_owned() };
    }
    let invalid = field_error_from_serde(field, text);
    if invalid.field.is_empty() { invalid.in_value("query") } else { invalid }
}

/// A JSON object as the body. All unknown fields are named; a wrong one is named with its path.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = limits(&request)?;
        let typed = is_json(request.headers());
        let bytes = body(request).await?;
        if !typed {
            return Err(Problem::unsupported_media_type());
        }
        read(bytes, limits).await.map(Self)
    }
}

/// As [`JsonBody`], but the body may be left out.
pub(super) struct OptionalJsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + Default + Send + 'static, S: Send + Sync> FromRequest<S> for OptionalJsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = limits(&request)?;
        let typed = is_json(request.headers());
        let bytes = body(request).await?;
        match bytes.is_empty() {
            true => Ok(Self(T::default())),
            false if !typed => Err(Problem::unsupported_media_type()),
            false => read(bytes, limits).await.map(Self),
        }
    }
}

/// The text of a JSON object as the body, or `{}` where it is left out. There may be parameters behind the `?` as well.
pub(super) struct JsonTextBody(pub(super) String);

impl<S: Send + Sync> FromRequest<S> for JsonTextBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = limits(&request)?;
        let typed = is_json(request.headers());
        let bytes = collect_body(request).await?;
        match bytes.is_empty() {
            true => Ok(Self("{}".to_owned())),
            false if !typed => Err(Problem::unsupported_media_type()),
            false => {
                let (size, levels) = (bytes.len(), limits.max_json_depth);
                let read = move || json::check_body(&bytes, levels).map(|text| Self(text.to_owned()));
                blocking::sized(size, read).await
            }
        }
    }
}

/// The router puts them into each request.
fn limits(request: &Request) -> Result<Limits, Problem> {
    request.extensions().get().copied().ok_or_else(Problem::internal)
}

async fn read<T: DeserializeOwned + Send + 'static>(bytes: Bytes, limits: Limits) -> Result<T, Problem> {
    blocking::sized(bytes.len(), move || json::read(&bytes, limits.max_json_depth)).await
}

/// The body of a request that has nothing behind the `?`.
async fn body(request: Request) -> Result<Bytes, Problem> {
    no_params(request.uri(), "unknown: this request takes its fields in the body")?;
    collect_body(request).await
}

fn no_params(uri: &Uri, detail: &str) -> Result<(), Problem> {
    let query = uri.query().unwrap_or_default();
    let given = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| FieldError {
        field: format!("?{}", pair.split('=').next().unwrap_or_default()),
        detail: detail.to_owned(),
    });
    let given: Vec<FieldError> = given.collect();
    if given.is_empty() { Ok(()) } else { Err(Problem::invalid(given)) }
}

/// What `body_limits::buffer_body` has read already.
async fn collect_body(request: Request) -> Result<Bytes, Problem> {
    to_bytes(request.into_body(), usize::MAX).await.map_err(|_| Problem::incomplete_body())
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let media_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}
