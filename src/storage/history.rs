//! Pages and ranges of the history.

use super::messages::{SELECT_MESSAGE_RANGE, message_facts, stored_message};
use super::rows;
use super::statement::{DbRow as _, Sql};
use super::{MessagePage, MessageQuery, MessageRange, Store, StoreError, StoredMessage};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message_metadata::MessageMetadata;

impl Store {
    /// Returns a page of the history, or `None` if the session does not exist.
    pub async fn messages(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        query: MessageQuery,
    ) -> Result<Option<MessagePage>, StoreError> {
        /// A page without messages is one row without a `seq`, so that it differs from a missing session. Messages beyond the
        /// size of the page have no text, and the database does not read it: `octet_length` needs only the length that is
        /// stored with a text.
        macro_rules! select_messages {
            ($order:literal, $columns:expr, $messages:literal) => {
                concat!(
                    "SELECT m.seq, CASE WHEN bytes_before < $6 THEN message END AS message, ", message_facts!(), "
                    FROM (SELECT 1 FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0) AS session
                    LEFT JOIN (
                        SELECT *, sum(bytes) OVER (ORDER BY ", $order, ") - bytes AS bytes_before FROM (
                            SELECT octet_length(message) AS bytes, ", $columns, " FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4
                            ORDER BY ", $order, " LIMIT $5
                        ) AS numbered
                    ) AS ", $messages
                )
            };
        }
        /// On SQLite, adds the sizes up without the texts, which it would copy.
        macro_rules! select_messages_by {
            ($order:literal) => {
                Sql {
                    postgres: select_messages!(
                        $order,
                        concat!("seq, message, ", message_facts!()),
                        "m ON true"
                    ),
                    sqlite: select_messages!(
                        $order,
                        "seq",
                        "sized ON true
                        LEFT JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = $2 AND m.seq = sized.seq"
                    ),
                }
            };
        }
        const SELECT_MESSAGES: Sql = select_messages_by!("seq");
        const SELECT_MESSAGES_DESCENDING: Sql = select_messages_by!("seq DESC");
        let sql = if query.descending { SELECT_MESSAGES_DESCENDING } else { SELECT_MESSAGES };
        let statement = self
            .statement(tenant, sql)
            .bind(session.as_str())
            .bind(query.after_seq)
            .bind(query.before_seq)
            // One more message shows if there is another page.
            .bind(query.limit.saturating_add(1))
            .bind(query.max_bytes);
        let rows = statement.read_all().await?;
        let (mut messages, session_exists, mut has_more) =
            (Vec::with_capacity(rows.len()), !rows.is_empty(), false);
        for row in rows {
            if row.field::<Option<&str>>("message")?.is_some() {
                messages.push(stored_message(&row)?);
            } else {
                has_more |= row.field::<Option<i64>>("seq")?.is_some();
            }
        }
        messages.sort_unstable_by_key(|message| if query.descending { -message.seq } else { message.seq });
        let limit = usize::try_from(query.limit).unwrap_or(usize::MAX);
        has_more |= messages.len() > limit;
        messages.truncate(limit);
        Ok(session_exists.then_some(MessagePage { messages, has_more }))
    }

    /// Returns the metadata of at most `limit` messages after `after_seq`, in order.
    pub async fn message_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
        limit: i64,
    ) -> Result<Vec<MessageMetadata>, StoreError> {
        const SELECT_MESSAGE_METADATA: &str = "\
            SELECT role, tool_call_ids, tool_result_of, tokens AS message_tokens, redaction IS NOT NULL AS is_redacted
            FROM messages
            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 ORDER BY seq LIMIT $4";
        let statement = self.statement(tenant, SELECT_MESSAGE_METADATA);
        let statement = statement.bind(session.as_str()).bind(after_seq).bind(limit);
        statement.read_all().await?.iter().map(rows::message_metadata).collect()
    }

    /// Returns a range of the history, oldest first. The result is empty if the range or the session is.
    pub async fn message_range(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        range: MessageRange,
    ) -> Result<Vec<StoredMessage>, StoreError> {
        let statement = self.statement(tenant, SELECT_MESSAGE_RANGE).bind(session.as_str());
        let statement = statement.bind(range.after_seq).bind(range.last_seq).bind(range.limit);
        statement.bind(range.max_bytes).read_all().await?.iter().map(stored_message).collect()
    }
}
