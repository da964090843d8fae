//! `GET /search`

use crate::blocking;
use crate::domain::id::SessionId;
use crate::domain::message::Role;
use crate::domain::search::snippet::Snippet;
use crate::domain::validation::FieldError;
use crate::http::error::Problem;
use crate::http::extract::{QueryParams, TenantFromKey, user_id};
use crate::http::json::stored;
use crate::http::openapi::parameters::Id;
use crate::http::openapi::responses::SearchDisabled;
use crate::http::pagination::Page;
use crate::http::routes::messages::MessageBody;
use crate::service::MemoryService;
use crate::service::search::{DEFAULT_LIMIT, Hit, MOST, Query};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};
use utoipa::{IntoParams, ToSchema};

/// Messages before and after a hit where the request names no number.
const NEIGHBOURS: usize = 1;
/// Messages before and after a hit, at most.
const MOST_NEIGHBOURS: usize = 10;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchParams {
    /// Words; `"phrases"`, which a hit has all of; `-exclusions`, of which it has none; `prefix*`. At least one letter or
    /// digit to search for.
    #[param(required, value_type = String, max_length = 1000, example = "ferry")]
    q: Option<String>,
    /// Only messages of this session.
    #[param(value_type = Option<Id>)]
    session_id: Option<String>,
    /// Only messages of this user's sessions.
    #[param(value_type = Option<Id>)]
    user_id: Option<String>,
    /// Only messages of this role: `user`, `assistant` or `tool`.
    #[param(inline)]
    role: Option<RoleParam>,
    /// Only messages stored at this time or later.
    #[param(value_type = Option<String>, format = DateTime, example = "2026-01-31T00:00:00Z")]
    since: Option<Time>,
    /// Only messages stored before this time.
    #[param(value_type = Option<String>, format = DateTime, example = "2026-01-31T00:00:00Z")]
    until: Option<Time>,
    /// Hits, 1 to 50; 10 where it is left out.
    #[param(value_type = Option<i64>, minimum = 1, maximum = 50)]
    limit: Option<Bounded<1, MOST>>,
    /// Messages to show before and after each hit, 0 to 10; 1 where it is left out.
    #[param(value_type = Option<i64>, minimum = 0, maximum = 10)]
    neighbours: Option<Bounded<0, MOST_NEIGHBOURS>>,
}

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum RoleParam {
    User,
    Assistant,
    Tool,
}

/// A whole number from `LEAST` to `MOST`.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct Bounded<const LEAST: usize, const MOST: usize>(usize);

impl<const LEAST: usize, const MOST: usize> TryFrom<String> for Bounded<LEAST, MOST> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
        number.map(Self).ok_or_else(|| format!("must be a number from {LEAST} to {MOST}"))
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct Time(OffsetDateTime);

impl TryFrom<String> for Time {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let time = OffsetDateTime::parse(&text, &Rfc3339)
            .map_err(|_| "must be a time such as 2026-01-31T00:00:00Z, with a plus sign sent as %2B")?;
        // The stores take it in UTC, and sqlx panics where that has no such year.
        time.checked_to_offset(UtcOffset::UTC).map(Self).ok_or("must not be after the year 9999 of UTC")
    }
}

/// A message that was found.
#[derive(Serialize, ToSchema)]
pub(crate) struct HitBody {
    /// Its session.
    session_id: String,
    /// Its place there.
    seq: i64,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    /// How good it is, to be compared with the other hits of this answer only.
    score: f64,
    /// As it was given.
    #[schema(value_type = Object)]
    message: Box<RawValue>,
    /// The best part of what is searched of it, as HTML: what was found stands in `<mark>`, all else is escaped.
    snippet: String,
    /// The messages before it, in order.
    before: Vec<MessageBody>,
    /// The messages after it, in order.
    after: Vec<MessageBody>,
}

/// The messages that have what `q` asks for: best first, the newest first among equals.
#[utoipa::path(
    get, path = "/search", operation_id = "search", tag = "memory",
    params(SearchParams),
    responses(
        (status = 200, description = "Hits; `next` is always null", body = Page<HitBody>),
        SearchDisabled,
    )
)]
pub(crate) async fn search(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    QueryParams(params): QueryParams<SearchParams>,
) -> Result<Json<Page<HitBody>>, Problem> {
    let limit = params.limit.map_or(DEFAULT_LIMIT, |Bounded(limit)| limit);
    let hits = service.search(&tenant, query(params, limit)?).await?;
    let bytes = hits.iter().map(bytes).sum();
    let body = move || hits.into_iter().map(body).collect::<Result<Vec<HitBody>, Problem>>();
    let hits = blocking::sized(bytes, body).await?;
    Ok(Json(Page::single(hits)))
}

fn query(params: SearchParams, limit: usize) -> Result<Query, Problem> {
    let mut wrong = Vec::new();
    let mut note = |field: &str, detail: String| wrong.push(FieldError { field: field.to_owned(), detail });
    if params.q.is_none() {
        note("q", "missing: what to search for".to_owned());
    }
    let session_id = params.session_id.and_then(|id| match SessionId::new(id) {
        Ok(id) => Some(id),
        Err(error) => {
            note("session_id", error.to_string());
            None
        }
    });
    let user_id = params.user_id.and_then(|id| match user_id(id, "user_id") {
        Ok(id) => Some(id),
        Err(error) => {
            note("user_id", error.detail);
            None
        }
    });
    if !wrong.is_empty() {
        return Err(Problem::invalid(wrong));
    }
    Ok(Query {
        text: params.q.unwrap_or_default(),
        session_id,
        user_id,
        role: params.role.map(|role| match role {
            RoleParam::User => Role::User,
            RoleParam::Assistant => Role::Assistant,
            RoleParam::Tool => Role::Tool,
        }),
        since: params.since.map(|Time(time)| time),
        until: params.until.map(|Time(time)| time),
        limit,
        neighbours: params.neighbours.map_or(NEIGHBOURS, |Bounded(number)| number),
    })
}

/// How much stored JSON it has.
fn bytes(hit: &Hit) -> usize {
    let neighbours = hit.before.iter().chain(&hit.after).map(|message| message.json.len());
    hit.message.len() + neighbours.sum::<usize>()
}

fn body(hit: Hit) -> Result<HitBody, Problem> {
    let messages = |messages: Vec<crate::service::StoredMessage>| {
        messages.into_iter().map(MessageBody::new).collect::<Result<Vec<_>, _>>()
    };
    Ok(HitBody {
        session_id: hit.session_id.to_string(),
        seq: hit.seq,
        created_at: hit.created_at,
        score: hit.score,
        message: stored(hit.message)?,
        snippet: html(&hit.snippet),
        before: messages(hit.before)?,
        after: messages(hit.after)?,
    })
}

/// What was found in `<mark>`; all else is escaped, so that no text can forge a mark.
fn html(snippet: &Snippet) -> String {
    let mut html = String::new();
    for (text, is_mark) in snippet.pieces() {
        html.push_str(if is_mark { "<mark>" } else { "" });
        for c in text.chars() {
            match c {
                '&' => html.push_str("&amp;"),
                '<' => html.push_str("&lt;"),
                '>' => html.push_str("&gt;"),
                '"' => html.push_str("&quot;"),
                '\'' => html.push_str("&#39;"),
                c => html.push(c),
            }
        }
        html.push_str(if is_mark { "</mark>" } else { "" });
    }
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::search::analyzer::Analyzer;
    use crate::domain::search::query::Query;
    use crate::domain::search::snippet::snippet;

    #[test]
    fn nothing_but_what_was_found_can_pass_for_a_mark() {
        let query = Query::parse(Analyzer::default(), "ferry ada").expect("a query");
        let text = "<mark>Ferries</mark> & \"boats\"\nof Ada's ferry";
        let shown = "&lt;mark&gt;<mark>Ferries</mark>&lt;/mark&gt; &amp; &quot;boats&quot; of <mark>Ada&#39;s</mark> \
                     <mark>ferry</mark>";
        assert_eq!(html(&snippet(Analyzer::default(), &query, text)), shown);
    }
}
