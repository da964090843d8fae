//! The terms of a message in the search index, and queries for them.
//!
//! In addition to the terms of its text, a message has terms for its tenant, session, user and role, so that the index finds the messages
//! of a filter as it finds those of a word. They begin with a colon, which no word contains. Ids can contain any character, so their
//! terms are hashes.

use super::analyzer::Analyzer;
use super::language::{Language, MAX_DETECTED_BYTES};
use super::text::{self, OwnResults};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use sha2::{Digest as _, Sha256};

#[must_use]
pub fn tenant_term(tenant: &TenantId) -> String {
    format!(":t{}", hash(&[tenant.as_str()]))
}

/// Returns the term of a session. The function `session_query` of the schema for Postgres returns the same.
#[must_use]
pub fn session_term(tenant: &TenantId, session: &SessionId) -> String {
    format!(":s{}", hash(&[tenant.as_str(), session.as_str()]))
}

#[must_use]
pub fn user_term(tenant: &TenantId, user: &UserId) -> String {
    format!(":u{}", hash(&[tenant.as_str(), user.as_str()]))
}

#[must_use]
pub fn role_term(role: &str) -> String {
    format!(":r{role}")
}

/// Returns the terms of the tenant, the session and its user, separated by spaces.
#[must_use]
pub fn scope_terms(tenant: &TenantId, session: &SessionId, user: Option<&UserId>) -> String {
    let user = user.map(|user| format!(" {}", user_term(tenant, user))).unwrap_or_default();
    format!("{} {}{user}", tenant_term(tenant), session_term(tenant, session))
}

/// Returns 64 bits of the hash of ids, as hexadecimal digits.
fn hash(ids: &[&str]) -> String {
    let digest = Sha256::digest(ids.join("\n"));
    hex::encode(digest.get(..8).unwrap_or_default())
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
    out.push_str(&role_term(message.role().as_str()));
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

/// Returns the language of the first texts among messages of a session, if it can be told.
#[must_use]
pub fn language<'m>(messages: impl Iterator<Item = &'m Message>) -> Option<Language> {
    let mut sample = String::new();
    for message in messages.filter(|message| matches!(message.role(), Role::User | Role::Assistant)) {
        if sample.len() < MAX_DETECTED_BYTES {
            let text = message.content();
            let room = MAX_DETECTED_BYTES - sample.len();
            sample.extend([text.get(..text.floor_char_boundary(room)).unwrap_or_default(), "\n"]);
        }
    }
    Language::detect(&sample)
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

/// The syntax of the queries of a database.
#[derive(Clone, Copy, Debug)]
pub struct Syntax {
    and: &'static str,
    or: &'static str,
    and_not: &'static str,
    prefix: &'static str,
    quote: char,
}

impl Syntax {
    /// SQLite.
    pub const FTS5: Self = Self { and: " AND ", or: " OR ", and_not: " NOT ", prefix: " *", quote: '"' };
    /// Postgres.
    pub const TSQUERY: Self = Self { and: " & ", or: " | ", and_not: " & !", prefix: ":*", quote: '\'' };

    /// Returns a query for the messages that have all required terms, one of each group of `query`, and no excluded term.
    #[must_use]
    pub fn query(self, required: &[String], query: &TermQuery, excluded: &[String]) -> String {
        let any = |patterns: &[TermPattern]| {
            let patterns: Vec<_> = patterns.iter().map(|pattern| self.pattern(pattern)).collect();
            format!("({})", patterns.join(self.or))
        };
        let required = required.iter().map(|term| any(&[TermPattern::exact(term)]));
        let groups: Vec<String> = required.chain(query.0.iter().map(|group| any(group))).collect();
        let mut query = groups.join(self.and);
        if !excluded.is_empty() {
            let excluded: Vec<_> = excluded.iter().map(TermPattern::exact).collect();
            query = format!("({query}){}{}", self.and_not, any(&excluded));
        }
        query
    }

    /// Words and the terms of filters contain letters, digits, colons and full stops only, so no quotes.
    fn pattern(self, TermPattern { term, is_prefix }: &TermPattern) -> String {
        let Self { quote, prefix, .. } = self;
        format!("{quote}{term}{quote}{}", if *is_prefix { prefix } else { "" })
    }
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

    /// The index has stems, of which some begin differently than their words.
    #[test]
    fn prefix_of_a_word_is_a_prefix_of_one_of_its_terms() {
        for (prefix, word) in [
            ("connecti", "connections"),
            ("run", "running"),
            ("happy", "happy"),
            ("sk", "skies"),
            ("wen", "went"),
            ("bough", "bought"),
            ("maki", "making"),
            ("makin", "makings"),
            ("hopi", "hoping"),
            ("writi", "writing"),
            ("usi", "using"),
            ("goi", "going"),
            ("skie", "skies"),
            ("dyin", "dying"),
            ("lyi", "lying"),
            ("owned", "owned"),
            ("others", "others"),
            ("willing", "willing"),
        ] {
            let message = Message::text(Role::User, word);
            let terms = message_terms(Analyzer::default(), &message, &mut OwnResults::default());
            assert!(terms.split(' ').any(|term| term.starts_with(prefix)), "{prefix} {terms}");
        }
    }

    #[test]
    fn query_has_the_syntax_of_the_database() {
        let prefix = TermPattern { term: "fer".to_owned(), is_prefix: true };
        let query =
            TermQuery(vec![vec![TermPattern::exact("ada")], vec![prefix, TermPattern::exact("boat")]]);
        let (required, excluded) = ([":ruser".to_owned()], ["storm".to_owned(), "rain".to_owned()]);
        assert_eq!(
            Syntax::FTS5.query(&required, &query, &excluded),
            r#"((":ruser") AND ("ada") AND ("fer" * OR "boat")) NOT ("storm" OR "rain")"#
        );
        assert_eq!(
            Syntax::TSQUERY.query(&required, &query, &[]),
            "(':ruser') & ('ada') & ('fer':* | 'boat')"
        );
    }
}
