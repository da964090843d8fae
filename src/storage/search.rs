//! Finding messages: the index draws candidates, `domain::search` reads and ranks them.
//!
//! What a method reads is bounded: by the limit that it is given, by how rare a term is, or by both.

use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::Role;
use crate::domain::search::lexemes::{self, TermPattern, TermQuery};
use time::OffsetDateTime;
use time::macros::datetime;

/// Which messages are searched. All of them where nothing is said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchFilter {
    /// Those of one session.
    pub session: Option<SessionId>,
    /// Those of the sessions of one user.
    pub user: Option<UserId>,
    /// Those of one role.
    pub role: Option<Role>,
    /// Those stored at this time or later.
    pub since: Option<OffsetDateTime>,
    /// Those stored before this time.
    pub until: Option<OffsetDateTime>,
    /// Those that have none of these terms.
    pub without: Vec<String>,
}

/// What the newest messages tell of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TermStatistics {
    /// How many were looked at: all of them, where fewer than were asked for.
    pub rows: i64,
    /// How many messages there are, about; exact where all were looked at, or for a session.
    pub messages: i64,
    /// Of those looked at, how many have what a probe asks for; by the probes' order.
    pub with: Vec<i64>,
    /// How many of these are in scope, whenever they were stored.
    pub in_scope: Vec<i64>,
}

/// Where a message is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageRef {
    /// When it was stored.
    pub created_at: OffsetDateTime,
    /// Its place in its session.
    pub seq: i64,
    /// Its session.
    pub session: SessionId,
}

/// Bytes of JSON: of a larger message, most is none of what is searched.
pub const LARGE: i64 = 128 * 1024;

/// A message that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredHit {
    /// Where it is.
    pub place: MessageRef,
    /// JSON, as the client gave it.
    pub json: String,
}

/// What a sample's size tells of how many messages there are. Ids are 0 where there is no message.
pub(super) struct SampleRange {
    /// How many were looked at.
    pub(super) rows: i64,
    /// The lowest id among them.
    pub(super) first: i64,
    /// The highest.
    pub(super) last: i64,
    /// The id of the tenant's oldest message.
    pub(super) oldest: i64,
    /// The last `seq` of the session. `None`: they are of the whole tenant.
    pub(super) last_seq: Option<i64>,
}

impl SampleRange {
    /// How many messages there are, about, where `most` were to be looked at.
    pub(super) fn messages(&self, most: i64) -> i64 {
        let Self { rows, first, last, oldest, last_seq } = *self;
        if rows < most {
            return rows;
        }
        // Ids count up over all tenants: as many of them as in the sample are this tenant's.
        let ids = |from: i64, to: i64| i128::from(from.abs_diff(to)) + 1;
        let all = || i64::try_from(i128::from(rows) * ids(oldest, last) / ids(first, last));
        last_seq.unwrap_or_else(|| all().unwrap_or(i64::MAX)).max(rows)
    }
}

impl SearchFilter {
    pub(super) fn from(&self) -> OffsetDateTime {
        self.since.unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }

    pub(super) fn to(&self) -> OffsetDateTime {
        self.until.unwrap_or(datetime!(9999-12-31 0:00 UTC))
    }

    /// Whether it leaves out any of the newest messages of its session, or else of its tenant, whenever they were stored.
    pub(super) fn narrows(&self) -> bool {
        self.user.is_some() || self.role.is_some() || !self.without.is_empty()
    }

    /// The lexemes of which a message in scope has all.
    pub(super) fn all(&self, tag: &str) -> Vec<String> {
        let session = self.session.as_ref().map(|session| lexemes::session_lexeme(tag, session));
        let user = self.user.as_ref().map(|user| lexemes::user_lexeme(tag, user));
        let role = self.role.map(|role| lexemes::role_lexeme(tag, role));
        [session, user, role].into_iter().flatten().collect()
    }

    /// The lexemes of which it has none.
    pub(super) fn none(&self, tag: &str) -> Vec<String> {
        self.without.iter().map(|term| format!("{tag}{term}")).collect()
    }
}

/// How a query language of a full-text index says things.
pub(super) struct FtsSyntax {
    pub(super) and: &'static str,
    pub(super) or: &'static str,
    pub(super) and_not: &'static str,
    pub(super) quote: &'static str,
    pub(super) prefix: &'static str,
}

impl FtsSyntax {
    /// The probe within the scope. Lexemes are letters, digits and colons: quotes around them are enough.
    pub(super) fn query(&self, tenant: &TenantId, scope: &SearchFilter, probe: &TermQuery) -> String {
        let tag = lexemes::tenant_prefix(tenant);
        let Self { and, or, and_not, quote, prefix } = self;
        let quoted = |lexeme: String| format!("{quote}{lexeme}{quote}");
        let lexeme = |TermPattern { term, is_prefix }: &TermPattern| {
            quoted(format!("{tag}{term}")) + if *is_prefix { prefix } else { "" }
        };
        let any =
            |group: &Vec<TermPattern>| format!("({})", group.iter().map(lexeme).collect::<Vec<_>>().join(or));
        let within = scope.all(&tag).into_iter().map(quoted);
        let all = probe.0.iter().map(any).chain(within).collect::<Vec<_>>().join(and);
        let none: Vec<String> = scope.none(&tag).into_iter().map(quoted).collect();
        if none.is_empty() { all } else { format!("({all}){and_not}({})", none.join(or)) }
    }
}
