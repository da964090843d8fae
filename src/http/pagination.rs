//! Lists, page by page.

use super::error::Problem;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Items of a page where the request names no number.
const DEFAULT_LIMIT: i64 = 50;
/// Items of a page, at most.
const MAX_LIMIT: i64 = 1000;

/// A page of a list.
#[derive(Serialize, ToSchema)]
pub(super) struct Page<T: ToSchema> {
    /// The items.
    items: Vec<T>,
    /// Goes back as the parameter `cursor` for the next page; null on the last.
    next: Option<String>,
}

/// The parameter `limit`: items of a page.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Limit(i64);

impl TryFrom<String> for Limit {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
        limit.map(Self).ok_or_else(|| format!("must be a number from 1 to {MAX_LIMIT}"))
    }
}

/// Items of the page that a request asks for.
pub(super) fn page_size(asked: Option<Limit>) -> i64 {
    asked.map_or(DEFAULT_LIMIT, |Limit(limit)| limit)
}

/// The parameter `cursor`: a place in a list, as an earlier page gave it.
pub(super) fn decode_cursor<T: DeserializeOwned>(cursor: Option<&str>) -> Result<Option<T>, Problem> {
    let Some(cursor) = cursor else { return Ok(None) };
    let bytes = URL_SAFE_NO_PAD.decode(cursor).ok();
    let place = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    place
        .map(Some)
        .ok_or_else(|| Problem::invalid_field("cursor", "must be the value of next of an earlier page"))
}

impl<T: ToSchema> Page<T> {
    /// All there is.
    pub(super) fn single(items: Vec<T>) -> Self {
        Self { items, next: None }
    }

    /// A page of at most `limit` of the items; one more than that tells that there is a next page, which begins
    /// behind `place` of the last item shown.
    pub(super) fn new<I, P: Serialize>(
        mut items: Vec<I>,
        limit: i64,
        place: impl Fn(&I) -> P,
        show: impl Fn(I) -> T,
    ) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let more = items.len() > limit;
        items.truncate(limit);
        let last = if more { items.last() } else { None };
        let next = last.and_then(|last| serde_json::to_vec(&place(last)).ok());
        let next = next.map(|place| URL_SAFE_NO_PAD.encode(place));
        Self { items: items.into_iter().map(show).collect(), next }
    }
}
