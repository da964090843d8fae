//! Pagination of lists. The API calls the opaque position at which a page begins `next` in a response, and `cursor` in a
//! request.

use super::error::Problem;
use super::extract::Bounded;
use crate::service;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// A page of a list.
#[derive(Serialize, ToSchema)]
pub(super) struct Page<T: ToSchema> {
    /// The items.
    items: Vec<T>,
    /// The value of the parameter `cursor` for the next page; null on the last page.
    #[schema(required)]
    next: Option<String>,
}

impl<T: ToSchema> Page<T> {
    /// Returns a page of the service. The next page begins after the `position` of the last item of this page.
    pub(super) fn new<I, P: Serialize>(
        page: service::Page<I>,
        position: impl Fn(&I) -> P,
        body: impl Fn(I) -> T,
    ) -> Self {
        Self::with_end(page.items, page.has_more, position, body)
    }

    /// Returns a page of these items. If it `has_next`, the next page begins after the `position` of the last item.
    pub(super) fn with_end<I, P: Serialize>(
        items: Vec<I>,
        has_next: bool,
        position: impl Fn(&I) -> P,
        body: impl Fn(I) -> T,
    ) -> Self {
        let last = if has_next { items.last() } else { None };
        let next = last.and_then(|last| serde_json::to_vec(&position(last)).ok());
        let next = next.map(|position| URL_SAFE_NO_PAD.encode(position));
        Self { items: items.into_iter().map(body).collect(), next }
    }
}

/// The parameter `limit`, the size of a page.
pub(super) type Limit = Bounded<1, 1000>;

/// Returns the size of the page that a request asks for.
pub(super) fn page_size(limit: Option<Limit>) -> i64 {
    limit.map_or(50, |Bounded(limit)| limit)
}

/// Returns the position in the parameter `cursor`, which an earlier page returned as `next`.
pub(super) fn decode_position<T: DeserializeOwned>(cursor: Option<&str>) -> Result<Option<T>, Problem> {
    let Some(cursor) = cursor else { return Ok(None) };
    let bytes = URL_SAFE_NO_PAD.decode(cursor).ok();
    let position = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    position.map(Some).ok_or_else(invalid_position)
}

pub(super) fn invalid_position() -> Problem {
    Problem::invalid_field("cursor", "must be the value of next of an earlier page")
}

/// The parameters of a list of numbered or named items.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct PageParams {
    /// Items of the page, 1 to 1000; 50 if it is omitted.
    #[param(inline)]
    limit: Option<Limit>,
    /// `next` of the previous page.
    cursor: Option<String>,
}

impl PageParams {
    /// Returns the number of items, and the number before which the page of a descending list begins.
    pub(super) fn read_descending(&self) -> Result<(i64, i64), Problem> {
        self.read(i64::MAX)
    }

    /// Returns the number of items, and the number after which the page of an ascending list begins.
    pub(super) fn read_ascending(&self) -> Result<(i64, i64), Problem> {
        self.read(0)
    }

    /// Returns the number of items, and the name after which the page begins; empty on the first page.
    pub(super) fn read_named(&self) -> Result<(i64, String), Problem> {
        self.read(String::new())
    }

    fn read<T: DeserializeOwned>(&self, first_page: T) -> Result<(i64, T), Problem> {
        let position = decode_position(self.cursor.as_deref())?;
        Ok((page_size(self.limit), position.unwrap_or(first_page)))
    }
}
