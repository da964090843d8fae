//! Requests as values: axum's extractors, with problem documents where axum answers in plain text.

use super::error::{FieldError, MaxBody, Problem};
use crate::domain::id::{SessionId, TenantId, UserId};
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;
use std::convert::Infallible;

/// The tenant that the request acts for. Without API keys there is one.
pub(super) struct Tenant(pub(super) TenantId);

impl<S: Send + Sync> FromRequestParts<S> for Tenant {
    type Rejection = Infallible;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(TenantId::default()))
    }
}

/// The session that the path names.
pub(super) struct Session(pub(super) SessionId);

impl<S: Send + Sync> FromRequestParts<S> for Session {
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
pub(super) struct User(pub(super) UserId);

impl<S: Send + Sync> FromRequestParts<S> for User {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        #[derive(serde::Deserialize)]
        struct Params {
            user_id: String,
        }
        let params: Params = path(parts, state).await?;
        user_id(params.user_id, "user_id").map(Self)
    }
}

/// The revision that the path names; 0 = before the first.
pub(super) struct RevisionNumber(pub(super) i64);

impl<S: Send + Sync> FromRequestParts<S> for RevisionNumber {
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
    let path = Path::<T>::from_request_parts(parts, state).await;
    path.map(|Path(params)| params).map_err(|_| {
        Problem::bad_request("The path must be percent-encoded UTF-8: %2F for a slash inside an id.")
    })
}

/// A user id out of a request.
pub(super) fn user_id(text: String, field: &str) -> Result<UserId, Problem> {
    UserId::new(text).map_err(|error| Problem::invalid_field(field, error.to_string()))
}

/// The parameters behind the `?`; an unknown one is an error.
pub(super) struct Params<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => {
                let text =
                    std::error::Error::source(&rejection).map_or_else(String::new, ToString::to_string);
                let (field, detail) = match text.split_once(": ") {
                    Some((field, detail)) => (field.to_owned(), detail.to_owned()),
                    None => ("query".to_owned(), text),
                };
                Err(Problem::invalid(vec![FieldError { field, detail }]))
            }
        }
    }
}

/// A JSON object as the body. All unknown fields are named; a wrong one is named with its path.
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let typed = is_json(request.headers());
        let bytes = body(request, state).await?;
        if !typed {
            return Err(Problem::media_type());
        }
        read(&bytes).map(Self)
    }
}

/// As [`Json`], but the body may be left out.
pub(super) struct OptionalJson<T>(pub(super) T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let typed = is_json(request.headers());
        let bytes = body(request, state).await?;
        match bytes.trim_ascii().is_empty() {
            true => Ok(Self(T::default())),
            false if !typed => Err(Problem::media_type()),
            false => read(&bytes).map(Self),
        }
    }
}

async fn body<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, Problem> {
    let most = request.extensions().get::<MaxBody>().map_or(0, |most| most.0);
    Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::too_large(most),
        _ => Problem::bad_request("The body broke off. Send the request again."),
    })
}

fn is_json(headers: &HeaderMap) -> bool {
    let media_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // A derived struct would also take an array, field by field.
    if !bytes.trim_ascii_start().starts_with(b"{")
        && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
    {
        return Err(Problem::invalid_field("body", "must be a JSON object"));
    }
    let mut unknown = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
    let value = serde_ignored::deserialize(tracked, |path| unknown.push(path.to_string()));
    let value = value.and_then(|value| json.end().map(|()| value)).map_err(|error| {
        if error.is_data() {
            let path = track.path().to_string();
            let field = if path == "." { "body" } else { path.as_str() };
            Problem::invalid_field(field, error.to_string())
        } else {
            Problem::malformed(format!("The body is not JSON: {error}."))
        }
    })?;
    if unknown.is_empty() {
        return Ok(value);
    }
    let unknown = unknown.into_iter();
    let detail = "unknown: GET /openapi.json lists the fields of this request";
    Err(Problem::invalid(unknown.map(|field| FieldError { field, detail: detail.to_owned() }).collect()))
}
