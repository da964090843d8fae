//! How terms are kept in the index of a store: as lexemes, each of which begins with a tag of its tenant.
//!
//! So an index never mixes tenants, and how often a term occurs is a tenant's own figure. Lexemes are letters, digits and
//! colons, and need no quoting in any query language. Beside the terms, a message has a lexeme for its session, its user
//! and its role: an index that holds all of them finds what a session says of a word without reading what others do.

use super::analyzer::Analyzer;
use super::text;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use sha2::{Digest, Sha256};

/// What every lexeme of a tenant begins with. Two tenants may share one: every statement names the tenant as well.
#[must_use]
pub fn tenant_prefix(tenant: &TenantId) -> String {
    hash(tenant.as_str(), 3)
}

/// The lexeme of a session.
#[must_use]
pub fn session_lexeme(tag: &str, session: &SessionId) -> String {
    format!("{tag}:s{}", hash(session.as_str(), 8))
}

/// The lexeme of a user.
#[must_use]
pub fn user_lexeme(tag: &str, user: &UserId) -> String {
    format!("{tag}:u{}", hash(user.as_str(), 8))
}

/// The lexeme of a role.
#[must_use]
pub fn role_lexeme(tag: &str, role: Role) -> String {
    format!("{tag}:r{role}")
}

/// Bytes of the lexemes of a message, at most: a row of Postgres' index takes 1 MiB. No language has so many in what is
/// searched of a message; characters with many marks may.
const MAX_LEXEME_BYTES: usize = 1_000_000;

/// The lexemes of a message but that of its user, with a space between any two: those of its session, its role and, each
/// once, its terms.
#[must_use]
pub fn message_lexemes(analyzer: Analyzer, tenant: &TenantId, of: &SessionId, message: &Message) -> String {
    let tag = tenant_prefix(tenant);
    let mut out = session_lexeme(&tag, of);
    out.push(' ');
    out.push_str(&role_lexeme(&tag, message.role()));
    for term in analyzer.terms(&text::searchable_text(message)) {
        if out.len() + tag.len() + term.len() >= MAX_LEXEME_BYTES {
            break;
        }
        out.push(' ');
        out.push_str(&tag);
        out.push_str(&term);
    }
    out
}

fn hash(text: &str, bytes: usize) -> String {
    let mut out = String::with_capacity(2 * bytes);
    for byte in Sha256::digest(text).iter().take(bytes) {
        out.extend([byte >> 4, byte & 15].iter().filter_map(|digit| char::from_digit(u32::from(*digit), 16)));
    }
    out
}

/// What a message must have: of each group one lexeme at least.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermQuery(pub Vec<Vec<TermPattern>>);

/// A term as the index is asked for it, without the tag of the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TermPattern {
    /// The term.
    pub term: String,
    /// Whether all terms that begin with it are meant.
    pub is_prefix: bool,
}

impl TermPattern {
    /// That term and no other.
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
