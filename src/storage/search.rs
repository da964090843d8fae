//! Types of the search methods of a [`Store`](super::Store). The index returns candidates; `domain::search` ranks them.

use super::statement::{DbRow as _, Sql};
use super::values::to_i64;
use super::{Store, StoreError, rows};
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

/// Largest number of sessions whose missing messages are read and counted.
const MAX_MISSING_SESSIONS: i64 = 1000;

impl Store {
    /// Returns the messages that are missing from the index, of the sessions with the most recent activity: at most
    /// `max_messages`, until their JSON exceeds `max_bytes`. Considers only session and user of the filter.
    pub async fn missing_messages(
        &self,
        tenant: &TenantId,
        filter: &SearchFilter,
        max_messages: i64,
        max_bytes: i64,
    ) -> Result<MissingMessages, StoreError> {
        /// The bounds of a range are columns of their own, because row-level security prevents index conditions on computed
        /// values.
        macro_rules! select_missing {
            ($lateral:literal, $fence:literal) => {
                concat!("WITH due AS MATERIALIZED (
                SELECT s.*, row_number() OVER recent AS place,
                    sum(last_seq - indexed_seq) OVER recent - (last_seq - indexed_seq) AS before
                FROM (
                    SELECT session_id, indexed_seq, last_seq, activity_hour, updated_at FROM sessions
                    WHERE tenant_id = $1 AND indexed_seq IS NOT NULL AND ($2 IS NULL OR session_id = $2)
                        AND ($3 IS NULL OR user_id = $3)
                    ORDER BY activity_hour DESC LIMIT $6
                ) AS s
                WINDOW recent AS (ORDER BY activity_hour DESC, updated_at DESC, session_id ROWS UNBOUNDED PRECEDING)
            ), ranges AS MATERIALIZED (
                SELECT session_id, place, last_seq, CAST(CASE
                    WHEN last_seq - indexed_seq > $4 - before THEN last_seq - ($4 - before) ELSE indexed_seq END
                    AS bigint) AS after_seq
                FROM due WHERE before < $4
            )
            SELECT (SELECT version FROM search_analyzer) AS analyzer,
                (SELECT CAST(coalesce(sum(last_seq - indexed_seq), 0) AS bigint) FROM due) AS missing,
                found.session_id, found.seq, found.created_at, found.redaction, found.message
            FROM (SELECT 1) AS always LEFT JOIN (
                SELECT session_id, seq, created_at, redaction, message FROM (
                    SELECT m.session_id, m.seq, m.created_at, m.redaction, m.message,
                        sum(octet_length(m.message)) OVER (ORDER BY place, m.seq DESC ROWS UNBOUNDED PRECEDING)
                            - octet_length(m.message) AS before
                    FROM ranges AS r CROSS JOIN ", $lateral, " messages AS m
                    WHERE m.tenant_id = $1 AND m.session_id = r.session_id AND m.seq > r.after_seq
                        AND m.seq <= r.last_seq ", $fence, "
                ) AS sized WHERE before < $5
            ) AS found ON true")
            };
        }
        const SELECT_MISSING: Sql = Sql {
            postgres: select_missing!(
                "LATERAL (SELECT session_id, seq, created_at, redaction, message FROM",
                "OFFSET 0) AS m"
            ),
            sqlite: select_missing!("", ""),
        };
        let statement = self.statement(tenant, SELECT_MISSING);
        let statement = statement.bind(filter.session.as_ref().map(SessionId::as_str));
        let statement = statement.bind(filter.user.as_ref().map(UserId::as_str)).bind(max_messages);
        let mut missing = MissingMessages::default();
        for row in &statement.bind(max_bytes).bind(MAX_MISSING_SESSIONS).read_all().await? {
            missing.analyzer = row.field::<Option<_>>("analyzer")?.unwrap_or_default();
            missing.others = row.field("missing")?;
            if let Some(json) = row.field("message")? {
                let (message_ref, redacted_at) = (rows::message_ref(row)?, rows::redacted_at(row)?);
                missing.newest.push(StoredHit { message_ref, redacted_at, json });
            }
        }
        missing.others -= to_i64(missing.newest.len());
        Ok(missing)
    }
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
