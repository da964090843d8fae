//! Encodes terms as lexemes for the index of a store. Every lexeme begins with a prefix of its tenant.
//!
//! The prefix separates the tenants within the index, and term frequencies are counted per tenant. Lexemes consist of
//! letters, digits and colons and need no quoting in any query language. In addition to its terms, a message has lexemes
//! for its session, user and role, so that the index finds a term of one session without reading the other sessions.

use super::analyzer::Analyzer;
use super::text;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use sha2::{Digest, Sha256};

/// Returns the prefix of all lexemes of a tenant. Prefixes may collide, so a search also filters the messages that it reads by tenant.
#[must_use]
pub fn tenant_prefix(tenant: &TenantId) -> String {
    hash(tenant.as_str(), 3)
}

#[must_use]
pub fn session_lexeme(prefix: &str, session: &SessionId) -> String {
    format!("{prefix}:s{}", hash(session.as_str(), 8))
}

#[must_use]
pub fn user_lexeme(prefix: &str, user: &UserId) -> String {
    format!("{prefix}:u{}", hash(user.as_str(), 8))
}

#[must_use]
pub fn role_lexeme(prefix: &str, role: Role) -> String {
    format!("{prefix}:r{role}")
}

/// Maximum total size of the lexemes of a message: a row of the Postgres index holds 1 MiB. Natural language stays below
/// it; characters with many combining marks may not.
const MAX_LEXEME_BYTES: usize = 1_000_000;

/// Returns the space-separated lexemes of a message: session, role, and each distinct term. The user lexeme is added by the
/// caller.
#[must_use]
pub fn message_lexemes(
    analyzer: Analyzer,
    tenant: &TenantId,
    session: &SessionId,
    message: &Message,
) -> String {
    let prefix = tenant_prefix(tenant);
    let terms = analyzer.distinct_terms(&text::searchable_text(message));
    let (mut out, role) = (session_lexeme(&prefix, session), role_lexeme(&prefix, message.role()));
    let bytes = terms.iter().map(|term| 1 + prefix.len() + term.len()).sum::<usize>();
    out.reserve(1 + role.len() + bytes.min(MAX_LEXEME_BYTES));
    out.push(' ');
    out.push_str(&role);
    for term in terms {
        if out.len() + prefix.len() + term.len() >= MAX_LEXEME_BYTES {
            break;
        }
        out.push(' ');
        out.push_str(&prefix);
        out.push_str(&term);
    }
    out
}

fn hash(text: &str, bytes: usize) -> String {
    hex::encode(Sha256::digest(text).get(..bytes).unwrap_or_default())
}

/// A query of the index. A message matches if it has at least one term of each group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermQuery(pub Vec<Vec<TermPattern>>);

impl TermQuery {
    /// Returns the query that every message matches.
    #[must_use]
    pub fn any_message() -> Self {
        let roles = Role::ALL.iter().map(|role| TermPattern::exact(role_lexeme("", *role)));
        Self(vec![roles.collect()])
    }
}

/// A term, or a prefix of terms, without the prefix of the tenant.
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
    fn lexemes_need_no_quoting() {
        let id = |text: &str| SessionId::new(text).expect("valid");
        let tenant = TenantId::new("a'b \"c\" & |").expect("valid");
        let message = Message::text(Role::User, "it's 'quoted' \\ \"text\" & | ! ( ) : * <-> \0 数据");
        let lexemes = message_lexemes(Analyzer::default(), &tenant, &id("'; --"), &message);
        assert!(lexemes.chars().all(|c| c.is_alphanumeric() || matches!(c, ' ' | ':')), "{lexemes}");
        assert!(
            lexemes.split(' ').all(|lexeme| lexeme.starts_with(&tenant_prefix(&tenant)) && lexeme.len() > 6)
        );
    }
}
