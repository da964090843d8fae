//! Types of the search methods of a [`Store`](super::Store). The index returns candidates; `domain::search` ranks them.

use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::lexemes::{self, TermPattern, TermQuery};
use time::OffsetDateTime;
use time::macros::datetime;

/// The messages to search. The default is all messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchFilter {
    pub session: Option<SessionId>,
    pub user: Option<UserId>,
    pub role: Option<Role>,
    /// Inclusive.
    pub since: Option<OffsetDateTime>,
    /// Exclusive.
    pub until: Option<OffsetDateTime>,
    /// Messages with any of these terms are excluded.
    pub excluded_terms: Vec<String>,
}

/// The newest messages that match a query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TermMatches {
    /// Newest first.
    pub refs: Vec<MessageRef>,
    /// The ids of the index entries of the first and the last of `refs`, or 0. A higher id was stored later, and the entries of
    /// all tenants have ids from 1.
    pub newest_id: i64,
    pub oldest_id: i64,
}

/// The position of a message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageRef {
    pub created_at: OffsetDateTime,
    pub seq: i64,
    pub session: SessionId,
}

/// Only a small part of a message with more JSON than this is searchable.
pub const LARGE_MESSAGE_BYTES: i64 = 128 * 1024;

/// A message that was fetched for a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredHit {
    pub message_ref: MessageRef,
    /// Time at which the content of the message was removed.
    pub redacted_at: Option<OffsetDateTime>,
    /// JSON, as the client sent it.
    pub json: String,
}

/// Messages that are missing from the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingMessages {
    /// The analyzer version of the index. Empty if it has none.
    pub analyzer: String,
    pub newest: Vec<StoredHit>,
    /// Number of further missing messages.
    pub others: i64,
}

impl SearchFilter {
    pub(super) fn since_or_min(&self) -> OffsetDateTime {
        self.since.unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }

    pub(super) fn until_or_max(&self) -> OffsetDateTime {
        self.until.unwrap_or(datetime!(9999-12-31 0:00 UTC))
    }

    /// Returns the lexemes that every message passing the filter contains.
    pub(super) fn required_lexemes(&self, prefix: &str) -> Vec<String> {
        let session = self.session.as_ref().map(|session| lexemes::session_lexeme(prefix, session));
        let user = self.user.as_ref().map(|user| lexemes::user_lexeme(prefix, user));
        let role = self.role.map(|role| lexemes::role_lexeme(prefix, role));
        [session, user, role].into_iter().flatten().collect()
    }

    /// Returns the lexemes that no message passing the filter contains.
    pub(super) fn excluded_lexemes(&self, prefix: &str) -> Vec<String> {
        self.excluded_terms.iter().map(|term| format!("{prefix}{term}")).collect()
    }
}

/// The query syntax of a full-text index.
pub(super) struct FtsSyntax {
    pub(super) and: &'static str,
    pub(super) or: &'static str,
    pub(super) and_not: &'static str,
    pub(super) quote: &'static str,
    pub(super) prefix: &'static str,
}

impl FtsSyntax {
    /// Renders a query within a filter. Lexemes consist of letters, digits and colons, so quotes need no escaping.
    pub(super) fn render(&self, tenant: &TenantId, filter: &SearchFilter, query: &TermQuery) -> String {
        let tenant_prefix = lexemes::tenant_prefix(tenant);
        let Self { and, or, and_not, quote, prefix } = self;
        let quoted = |lexeme: String| format!("{quote}{lexeme}{quote}");
        let pattern = |TermPattern { term, is_prefix }: &TermPattern| {
            quoted(format!("{tenant_prefix}{term}")) + if *is_prefix { prefix } else { "" }
        };
        let any_of = |group: &Vec<TermPattern>| {
            format!("({})", group.iter().map(pattern).collect::<Vec<_>>().join(or))
        };
        let required = filter.required_lexemes(&tenant_prefix).into_iter().map(quoted);
        let all = query.0.iter().map(any_of).chain(required).collect::<Vec<_>>().join(and);
        let excluded: Vec<String> = filter.excluded_lexemes(&tenant_prefix).into_iter().map(quoted).collect();
        if excluded.is_empty() { all } else { format!("({all}){and_not}({})", excluded.join(or)) }
    }
}
