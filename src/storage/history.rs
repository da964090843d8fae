//! Pages and ranges of the history.

use super::messages::SELECT_MESSAGE_RANGE;
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
        /// The first row, with `seq` 0, exists if the session exists: it distinguishes an empty page from a missing
        /// session. Messages beyond the size of the page have no text, and the database does not read it: `octet_length`
        /// needs only the length that is stored with a text.
        macro_rules! select_messages {
            ($page:expr) => {
                concat!(
                    "SELECT CAST(0 AS bigint) AS seq, CAST(NULL AS timestamptz) AS created_at,
                        CAST(NULL AS text) AS redaction, CAST(NULL AS text) AS message
                    FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0
                    UNION ALL SELECT * FROM (",
                    $page,
                    ") AS page"
                )
            };
        }
        macro_rules! page_on_postgres {
            ($order:literal) => {
                concat!(
                    "SELECT seq, created_at, redaction, CASE WHEN bytes_before < $6 THEN message END AS message FROM (
                        SELECT seq, created_at, redaction, message,
                            sum(octet_length(message)) OVER (ORDER BY ",
                    $order,
                    ") - octet_length(message)
                                AS bytes_before
                        FROM (
                            SELECT seq, created_at, redaction, message FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4
                            ORDER BY ",
                    $order,
                    " LIMIT $5
                        ) AS numbered
                    ) AS sized ORDER BY ",
                    $order
                )
            };
        }
        /// Adds the sizes up without the texts, which SQLite would copy.
        macro_rules! page_on_sqlite {
            ($order:literal) => {
                concat!(
                    "SELECT m.seq, m.created_at, m.redaction,
                        CASE WHEN bytes_before < $6 THEN m.message END AS message
                    FROM (
                        SELECT seq, sum(bytes) OVER (ORDER BY ", $order, ") - bytes AS bytes_before FROM (
                            SELECT seq, octet_length(message) AS bytes FROM messages
                            WHERE tenant_id = $1 AND session_id = $2 AND seq > $3 AND seq < $4
                            ORDER BY ", $order, " LIMIT $5
                        )
                    ) AS sized
                        CROSS JOIN messages AS m ON m.tenant_id = $1 AND m.session_id = $2 AND m.seq = sized.seq"
                )
            };
        }
        const SELECT_MESSAGES: Sql = Sql {
            postgres: select_messages!(page_on_postgres!("seq")),
            sqlite: select_messages!(page_on_sqlite!("seq")),
        };
        const SELECT_MESSAGES_DESCENDING: Sql = Sql {
            postgres: select_messages!(page_on_postgres!("seq DESC")),
            sqlite: select_messages!(page_on_sqlite!("seq DESC")),
        };
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
        let (mut messages, mut session_exists, mut has_more) = (Vec::with_capacity(rows.len()), false, false);
        for row in rows {
            if row.field::<i64>("seq")? == 0 {
                session_exists = true;
            } else if row.field::<Option<&str>>("message")?.is_some() {
                messages.push(rows::stored_message(&row)?);
            } else {
                has_more = true;
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
        statement.bind(range.max_bytes).read_all().await?.iter().map(rows::stored_message).collect()
    }
}
