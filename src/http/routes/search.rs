//! `GET /search`

use crate::blocking;
use crate::domain::id::{SessionId, UserId};
use crate::domain::message::Role;
use crate::domain::search::snippet::Snippet;
use crate::http::chat::ChatMessage;
use crate::http::error::Problem;
use crate::http::extract::{Bounded, QueryParams, TenantFromKey};
use crate::http::json::stored;
use crate::http::openapi::responses::SearchDisabled;
use crate::http::response_body::Json;
use crate::http::routes::messages::MessageBody;
use crate::service::MemoryService;
use crate::service::search::{
    DEFAULT_LIMIT, SearchFilter, SearchHit, SearchRanking, SearchRequest, SearchResults,
};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};
use utoipa::{IntoParams, ToSchema};

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchParams {
    /// Words; `"phrases"`, all of which a hit contains; `-exclusions`, none of which a hit contains; `prefix*`. Contains at
    /// least one letter or digit to search for.
    #[param(max_length = 1000, example = "ferry")]
    q: String,
    /// Only messages of this session.
    session_id: Option<SessionId>,
    /// Only messages in sessions of this user.
    user_id: Option<UserId>,
    /// Only messages with this role: `user`, `assistant` or `tool`.
    #[param(inline)]
    role: Option<Role>,
    /// Only messages stored at this time or later.
    #[param(value_type = Option<String>, format = DateTime, example = "2026-01-31T00:00:00Z")]
    since: Option<Time>,
    /// Only messages stored before this time.
    #[param(value_type = Option<String>, format = DateTime, example = "2026-01-31T00:00:00Z")]
    until: Option<Time>,
    /// Maximum number of hits, 1 to 50. Default: 10.
    #[param(inline)]
    limit: Option<Bounded<1, 50>>,
    /// Number of messages to return before and after each hit, 0 to 10. Default: 1.
    #[param(inline)]
    neighbours: Option<Bounded<0, 10>>,
}

impl From<SearchParams> for SearchRequest {
    fn from(params: SearchParams) -> Self {
        let SearchParams { q: text, session_id, user_id, role, since, until, limit, neighbours } = params;
        let time = |time: Option<Time>| time.map(|Time(time)| time);
        let filter = SearchFilter {
            session: session_id,
            user: user_id,
            role,
            since: time(since),
            until: time(until),
            unseen: None,
            excluded_terms: Vec::new(),
        };
        let limit = limit.map_or(DEFAULT_LIMIT, |Bounded(limit)| usize::try_from(limit).unwrap_or_default());
        let neighbours = neighbours.map_or(1, |Bounded(number)| usize::try_from(number).unwrap_or_default());
        Self { reranks: true, text, filter, limit, neighbours, with_messages: true }
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
        // The stores bind UTC times, and sqlx panics if the year in UTC is out of range.
        time.checked_to_offset(UtcOffset::UTC).map(Self).ok_or("must not be after the year 9999 of UTC")
    }
}

/// A search hit.
#[derive(Serialize, ToSchema)]
#[schema(as = SearchHit)]
pub(crate) struct HitBody {
    session_id: String,
    /// Position in the session.
    seq: i64,
    /// Time at which the message was stored.
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    /// Relevance. Comparable only with other hits of the same response.
    score: f64,
    /// The message as it was sent. Null if the messages of better hits have more than 4 MiB together, in which those of more than
    /// 128 KiB come last: `GET /sessions/{id}/messages?after_seq=…&limit=1` returns it.
    #[schema(value_type = Option<ChatMessage>, required)]
    message: Option<Box<RawValue>>,
    /// The best excerpt as HTML: matches are in `<mark>`, everything else is escaped.
    snippet: String,
    /// Preceding messages, in order.
    before: Vec<MessageBody>,
    /// Following messages, in order.
    after: Vec<MessageBody>,
}

/// The hits of a search. They have a single page.
#[derive(Serialize, ToSchema)]
#[schema(as = SearchHitPage)]
pub(crate) struct SearchBody {
    /// The items.
    items: Vec<HitBody>,
    /// Always null.
    #[schema(required)]
    next: Option<String>,
    ranking: SearchRanking,
}

/// Finds messages that match `q`: best first, newest first among equal scores.
///
/// Searches the text of all messages that are stored, including those that the summary covers. With
/// `search.rerank_pool`, a model orders the best hits.
#[utoipa::path(
    get, path = "/search", operation_id = "search", tag = "search",
    params(SearchParams),
    responses(
        (status = 200, description = "Hits; `next` is always null", body = SearchBody),
        SearchDisabled,
    )
)]
pub(crate) async fn search(
    State(service): State<MemoryService>,
    TenantFromKey(tenant): TenantFromKey,
    QueryParams(params): QueryParams<SearchParams>,
) -> Result<Response, Problem> {
    let SearchResults { hits, ranking, .. } = service.search(&tenant, params.into()).await?;
    let bytes = hits.iter().map(json_bytes).sum();
    let encode = move || {
        let items = hits.into_iter().map(hit_body).collect::<Result<Vec<HitBody>, Problem>>()?;
        Ok(Json(SearchBody { items, next: None, ranking }).into_response())
    };
    blocking::spawn_cpu_if_large(bytes, encode).await
}

fn json_bytes(hit: &SearchHit) -> usize {
    let neighbours = hit.before.iter().chain(&hit.after).map(|message| message.json.len());
    hit.message.iter().map(String::len).chain(neighbours).sum()
}

fn hit_body(hit: SearchHit) -> Result<HitBody, Problem> {
    let messages = |messages: Vec<crate::service::StoredMessage>| {
        messages.into_iter().map(MessageBody::new).collect::<Result<Vec<_>, _>>()
    };
    Ok(HitBody {
        session_id: hit.session_id.to_string(),
        seq: hit.seq,
        created_at: hit.created_at,
        score: hit.score,
        message: hit.message.map(stored).transpose()?,
        snippet: html(&hit.snippet),
        before: messages(hit.before)?,
        after: messages(hit.after)?,
    })
}

/// Renders matches in `<mark>`. Everything else is escaped, so that stored text cannot forge a mark.
fn html(snippet: &Snippet) -> String {
    let mut html = String::new();
    for (text, is_match) in snippet.pieces() {
        html.push_str(if is_match { "<mark>" } else { "" });
        let escapes = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;"), ('\'', "&#39;")];
        html += &escapes.iter().fold(text.to_owned(), |text, (c, escape)| text.replace(*c, escape));
        html.push_str(if is_match { "</mark>" } else { "" });
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
    fn html_in_stored_text_is_escaped() {
        let query = Query::parse(Analyzer::default(), "ferry ada").expect("a query");
        let text = "<mark>Ferries</mark> & \"boats\"\nof Ada's ferry";
        let expected = "&lt;mark&gt;<mark>Ferries</mark>&lt;/mark&gt; &amp; &quot;boats&quot; of <mark>Ada&#39;s</mark> \
                     <mark>ferry</mark>";
        assert_eq!(html(&snippet(Analyzer::default(), &query, text)), expected);
    }
}
