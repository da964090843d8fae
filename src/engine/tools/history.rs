//! What a model gets to read of a search: a few lines for each hit, since all of it goes into its context.
//!
//! Each message is one line, so that no text of one can pass for another.

use super::Outcome;
use crate::blocking;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::snippet::Snippet;
use crate::domain::tool::Mistake;
use crate::domain::transcript::Entry;
use crate::engine::search::{Hit, Query};
use crate::engine::{Error, MemoryService, StoredMessage, stored_message};
use serde_json::{Value, json};
use std::fmt::Write as _;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use time::{Duration, OffsetDateTime};

/// Messages shown before and after a hit.
const NEIGHBOURS: usize = 1;
/// Characters of such a message.
const NEIGHBOUR_CHARS: usize = 200;

impl MemoryService {
    /// Searches all sessions of the user.
    pub(super) async fn search_history(
        &self,
        tenant: &TenantId,
        user: UserId,
        session: Option<&SessionId>,
        (text, days, max_results): (String, Option<i64>, i64),
    ) -> Result<Outcome, Error> {
        let query = Query {
            text,
            session_id: None,
            user_id: Some(user),
            role: None,
            since: days.map(|days| OffsetDateTime::now_utc() - Duration::days(days)),
            until: None,
            limit: usize::try_from(max_results).unwrap_or(usize::MAX),
            neighbours: NEIGHBOURS,
        };
        match self.search(tenant, query).await {
            Ok(hits) => {
                let beside = hits.iter().flat_map(|hit| hit.before.iter().chain(&hit.after));
                let (bytes, session) = (beside.map(|message| message.json.len()).sum(), session.cloned());
                blocking::sized(bytes, move || found(&hits, session.as_ref())).await
            }
            Err(Error::InvalidQuery(why)) => {
                Ok(Mistake(format!("Nothing was searched: `query` {why}.")).into())
            }
            Err(Error::NoSearch) => {
                let told = "Nothing was searched: search is switched off here. Go on without it.";
                Ok(Mistake(told.to_owned()).into())
            }
            Err(error) => Err(error),
        }
    }
}

fn found(hits: &[Hit], session: Option<&SessionId>) -> Result<Outcome, Error> {
    let mut content = match hits {
        [] => "Nothing was found. Try fewer words, or others that may have been said.".to_owned(),
        hits => format!("{} found, best first. What matched stands between ** and **.", hits.len()),
    };
    let mut list = Vec::with_capacity(hits.len());
    for (index, hit) in hits.iter().enumerate() {
        let here = if session == Some(&hit.session_id) { " (this one)" } else { "" };
        let (session_id, seq, role, snippet) =
            (hit.session_id.as_str(), hit.seq, hit.role, marked(&hit.snippet));
        let minute = format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
        let time = hit.created_at.format(minute).unwrap_or_default();
        // Writing to a String can't fail.
        let _ = write!(
            content,
            "\n\n{}. {time}, session {session_id}{here}, message {seq}, {role}: {snippet}",
            index + 1
        );
        let (before, after) = (neighbours(&hit.before)?, neighbours(&hit.after)?);
        for (place, neighbours) in [("before", &before), ("after", &after)] {
            for Neighbour { seq, role, text } in neighbours {
                let _ = write!(content, "\n   {place}, message {seq}, {role}: {text}");
            }
        }
        list.push(json!({
            "session_id": session_id,
            "seq": seq,
            "created_at": hit.created_at.format(&Rfc3339).ok(),
            "role": role.as_str(),
            "snippet": snippet,
            "before": before.iter().map(Neighbour::data).collect::<Vec<_>>(),
            "after": after.iter().map(Neighbour::data).collect::<Vec<_>>(),
        }));
    }
    Ok(Outcome { is_error: false, content, data: json!({ "hits": list }) })
}

/// A message beside a hit.
struct Neighbour {
    seq: i64,
    role: Role,
    text: String,
}

impl Neighbour {
    fn data(&self) -> Value {
        json!({"seq": self.seq, "role": self.role.as_str(), "text": self.text})
    }
}

fn neighbours(messages: &[StoredMessage]) -> Result<Vec<Neighbour>, Error> {
    let neighbour = |message: &StoredMessage| {
        let Entry { role, text, calls, .. } = entry(&message.json)?;
        let mut text = one_line(&text);
        for call in calls {
            text.push_str(if text.is_empty() { "calls " } else { "; calls " });
            text.push_str(&one_line(&call));
        }
        if let Some((cut, _)) = text.char_indices().nth(NEIGHBOUR_CHARS) {
            text.truncate(cut);
            text.push('…');
        }
        Ok(Neighbour { seq: message.seq, role, text })
    };
    messages.iter().map(neighbour).collect()
}

fn entry(json: &str) -> Result<Entry, Error> {
    Ok(Entry::of(&stored_message(json.to_owned())?))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What was found stands between ** and **.
fn marked(snippet: &Snippet) -> String {
    let piece = |(text, is_mark)| if is_mark { format!("**{text}**") } else { String::from(text) };
    one_line(&snippet.pieces().map(piece).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::search::analysis::Analysis;
    use crate::domain::search::query::Query as Parsed;
    use crate::domain::search::snippet::snippet;

    #[test]
    fn a_snippet_is_one_line_of_text() {
        let query = Parsed::parse(Analysis::default(), "tea").expect("a query");
        let text = "a <b> &amp; tea\n\n2. 2026-01-01 \u{2028}x \"y\"";
        let shown = marked(&snippet(Analysis::default(), &query, text));
        assert_eq!(shown, "a <b> &amp; **tea** 2. 2026-01-01 x \"y\"");
    }
}
