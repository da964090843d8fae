//! The terms of a message in the search index.
//!
//! In addition to the terms of its text, a message has terms for its session, user, role and hour, so that the index finds the messages
//! of a filter as it finds those of a word. They begin with a colon, which no word contains.

use super::analyzer::Analyzer;
use super::segment::KeyRange;
use super::text::{self, OwnResults};
use crate::domain::id::SessionId;
use crate::domain::message::{Message, Role};

const ROLE_PREFIX: &str = ":r";
const HOUR_MICROS: i64 = 3_600_000_000;

#[must_use]
pub fn session_term(session: &SessionId) -> String {
    format!(":s{session}")
}

#[must_use]
pub fn user_term(user: &str) -> String {
    format!(":u{user}")
}

#[must_use]
pub fn role_term(role: Role) -> String {
    format!("{ROLE_PREFIX}{role}")
}

/// Returns the number of the hour that contains a time in microseconds since 1970.
#[must_use]
pub fn hour(micros: i64) -> i64 {
    micros.div_euclid(HOUR_MICROS)
}

/// Returns the term of the hour that contains a time in microseconds since 1970. Terms are in the order of their hours.
#[must_use]
pub fn hour_term(micros: i64) -> String {
    // The bias makes earlier times positive.
    format!(":h{:08x}", hour(micros) + (1 << 31))
}

/// Returns the range of the terms of all hours that can contain times from `since` (inclusive) to `until` (exclusive).
#[must_use]
pub fn hours(since: Option<i64>, until: Option<i64>) -> KeyRange {
    let first = since.map_or_else(|| ":h".to_owned(), hour_term);
    let last = until.map_or_else(|| ":h~".to_owned(), |until| hour_term(until.saturating_sub(1)));
    KeyRange { first: first.into_bytes(), last: last.into_bytes() }
}

/// Maximum total size of the terms of a message. Natural language stays below it; characters with many combining marks may not.
const MAX_TERM_BYTES: usize = 1_000_000;

/// Returns the terms of the next message of a session, separated by spaces: its role, and the terms of its text. Some of them may be
/// repeated. A result of precis' own tools has only its role.
#[must_use]
pub fn message_terms(analyzer: Analyzer, message: &Message, own_results: &mut OwnResults) -> String {
    let is_own = own_results.is_next(message);
    let text = if is_own { "".into() } else { text::searchable_text(message) };
    let mut out = String::with_capacity(text.len().min(MAX_TERM_BYTES));
    out.push_str(ROLE_PREFIX);
    out.push_str(message.role().as_str());
    let mut is_full = false;
    analyzer.for_each_new_term(&text, |term| {
        is_full |= out.len() + term.len() >= MAX_TERM_BYTES;
        if !is_full {
            out.push(' ');
            out.push_str(term);
        }
    });
    out
}

/// A query of the index. A message matches if it has at least one term of each group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermQuery(pub Vec<Vec<TermPattern>>);

/// A term, or a prefix of terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TermPattern {
    pub term: String,
    pub is_prefix: bool,
}

impl TermPattern {
    #[must_use]
    pub fn exact(term: impl Into<String>) -> Self {
        Self { term: term.into(), is_prefix: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_contain_no_spaces_and_words_no_colon() {
        let message = Message::text(Role::User, "it's 'quoted' \\ \"text\" & | ! ( ) : * <-> \0 数据");
        let terms = message_terms(Analyzer::default(), &message, &mut OwnResults::default());
        let mut terms = terms.split(' ');
        assert_eq!(terms.next(), Some(":ruser"));
        assert!(terms.all(|term| !term.is_empty() && term.chars().all(char::is_alphanumeric)));
    }

    #[test]
    fn hours_contain_the_terms_of_their_times() {
        let contains = |since, until, micros| hours(since, until).contains(hour_term(micros).as_bytes());
        let (one, two) = (HOUR_MICROS, 2 * HOUR_MICROS);
        assert!(
            contains(None, None, -one)
                && contains(None, None, i64::MAX)
                && contains(None, None, i64::MIN / 8)
        );
        assert!(contains(Some(one), None, one) && !contains(Some(one), None, one - 1));
        assert!(contains(None, Some(one), one - 1) && !contains(None, Some(one), one));
        assert!(contains(Some(one + 5), Some(two + 1), one) && contains(Some(one), Some(two + 1), two));
        assert!(contains(Some(-two), Some(-one), -one - 1) && !contains(Some(-two), Some(-one), one));
    }
}
