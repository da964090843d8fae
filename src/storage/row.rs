//! Values as rows hold them: what both stores read and write alike.

use super::StoreError;
use crate::domain::message::{Message, Role};
use crate::domain::message_metadata::MessageMetadata;
use crate::domain::revision::{MetaConsolidation, Provenance};
use serde::{Deserialize, Serialize};
use serde_json::{Deserializer, Serializer};

/// The columns `tool_call_ids` and `tool_result_of` of a message: JSON, because an id is any text, and Postgres can't store NUL.
pub(super) fn tool_columns(message: &Message) -> (Option<String>, Option<String>) {
    let ids: Vec<&str> = message.tool_calls().iter().map(|call| call.id.as_str()).collect();
    let tool_call_ids = (!ids.is_empty()).then(|| json(|out| ids.serialize(out)));
    (tool_call_ids, message.tool_call_id().map(|id| json(|out| id.serialize(out))))
}

/// Decodes the metadata columns of a message.
pub(super) fn message_metadata(
    role: &str,
    tool_call_ids: Option<&str>,
    tool_result_of: Option<&str>,
    tokens: i64,
) -> Result<MessageMetadata, StoreError> {
    let role = Role::parse(role).ok_or_else(|| StoreError::corrupt("a role")(role))?;
    let tool_call_ids = tool_call_ids
        .map(serde_json::from_str)
        .transpose()
        .map_err(StoreError::corrupt("a list of tool calls"))?;
    let tool_result_of = tool_result_of
        .map(serde_json::from_str)
        .transpose()
        .map_err(StoreError::corrupt("the id of a tool call"))?;
    Ok(MessageMetadata { role, tokens, calls: tool_call_ids.unwrap_or_default(), result_of: tool_result_of })
}

/// The column `source` of a revision. A revision is never changed, so what is added here later must be left out where
/// it isn't known.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Provenance")]
struct SourceColumn {
    model: String,
    pool: String,
    prompt_version: String,
    input_tokens: Option<i64>,
    output_tokens: Option<i64>,
    duration_ms: i64,
    calls: Option<i64>,
    failures: Option<i64>,
    queued_ms: Option<i64>,
}

/// The column `meta` of a revision.
#[derive(Serialize, Deserialize)]
#[serde(remote = "MetaConsolidation")]
struct MetaColumn {
    text_before: String,
    #[serde(with = "SourceColumn")]
    source: Provenance,
}

pub(super) fn source_column(source: Option<&Provenance>) -> Option<String> {
    source.map(|source| json(|out| SourceColumn::serialize(source, out)))
}

pub(super) fn read_source(column: Option<&str>) -> Result<Option<Provenance>, StoreError> {
    let read = |column| SourceColumn::deserialize(&mut Deserializer::from_str(column));
    column.map(read).transpose().map_err(StoreError::corrupt("a revision's source"))
}

pub(super) fn meta_column(meta: Option<&MetaConsolidation>) -> Option<String> {
    meta.map(|meta| json(|out| MetaColumn::serialize(meta, out)))
}

pub(super) fn read_meta(column: Option<&str>) -> Result<Option<MetaConsolidation>, StoreError> {
    let read = |column| MetaColumn::deserialize(&mut Deserializer::from_str(column));
    column.map(read).transpose().map_err(StoreError::corrupt("a revision's meta"))
}

/// A page size as a count of rows.
pub(super) fn limit(most: usize) -> i64 {
    i64::try_from(most).unwrap_or(i64::MAX)
}

fn json(write: impl FnOnce(&mut Serializer<&mut Vec<u8>>) -> serde_json::Result<()>) -> String {
    let mut text = Vec::new();
    let written = write(&mut Serializer::new(&mut text)).map(|()| String::from_utf8(text));
    written.ok().and_then(Result::ok).unwrap_or_else(|| unreachable!("strings and numbers are always JSON"))
}

/// Reads the columns of [`session_columns`] out of a row of either store; `$time` and `$maybe_time` read its times.
macro_rules! read_session {
    ($row:expr, $time:path, $maybe_time:path) => {{
        use $crate::domain::id::{SessionId, UserId};
        use $crate::domain::session::{ConsolidationState, Session, Summary};
        use $crate::storage::StoreError;
        let row = $row;
        let session_id: String = row.try_get("session_id")?;
        let user_id: String = row.try_get("user_id")?;
        Session {
            session_id: SessionId::new(session_id).map_err(StoreError::corrupt("a session id"))?,
            user_id: UserId::new(user_id).map_err(StoreError::corrupt("a user id"))?,
            metadata: row.try_get("metadata")?,
            last_seq: row.try_get("last_seq")?,
            tokens: row.try_get("tokens")?,
            cursor: row.try_get("cursor_seq")?,
            cursor_tokens: row.try_get("cursor_tokens")?,
            summary: Summary {
                text: row.try_get("summary")?,
                words: row.try_get("summary_words")?,
                tokens: row.try_get("summary_tokens")?,
            },
            revision: row.try_get("revision")?,
            consolidation: ConsolidationState {
                lease_until: $maybe_time(row, "lease_until")?,
                failures: row.try_get("failures")?,
                retry_at: $maybe_time(row, "retry_at")?,
                last_failure: row.try_get("last_failure")?,
            },
            created_at: $time(row, "created_at")?,
            updated_at: $time(row, "updated_at")?,
        }
    }};
}

/// Reads the columns of [`revision_columns`] out of a row of either store.
macro_rules! read_revision {
    ($row:expr, $time:path) => {{
        use $crate::domain::revision::{Revision, RevisionKind};
        use $crate::domain::session::Summary;
        use $crate::storage::{
            StoreError,
            row::{read_meta, read_source},
        };
        let row = $row;
        let kind: String = row.try_get("kind")?;
        let (from_seq, to_seq): (Option<i64>, Option<i64>) =
            (row.try_get("from_seq")?, row.try_get("to_seq")?);
        let meta: Option<String> = row.try_get("meta")?;
        let source: Option<String> = row.try_get("source")?;
        Revision {
            revision: row.try_get("revision")?,
            kind: RevisionKind::parse(&kind).ok_or(kind).map_err(StoreError::corrupt("a revision's kind"))?,
            range: from_seq.zip(to_seq),
            cursor: row.try_get("cursor_seq")?,
            summary: Summary {
                text: row.try_get("summary")?,
                words: row.try_get("summary_words")?,
                tokens: row.try_get("summary_tokens")?,
            },
            added: row.try_get("added")?,
            meta: read_meta(meta.as_deref())?,
            source: read_source(source.as_deref())?,
            created_at: $time(row, "created_at")?,
        }
    }};
}

/// Reads a memory document out of a row of either store; the names of its columns begin with `$prefix`.
macro_rules! read_memory {
    ($row:expr, $prefix:literal, $time:path) => {{
        let row = $row;
        $crate::domain::memory::MemoryDocument {
            version: row.try_get(concat!($prefix, "version"))?,
            content: row.try_get(concat!($prefix, "content"))?,
            words: row.try_get(concat!($prefix, "words"))?,
            tokens: row.try_get(concat!($prefix, "tokens"))?,
            created_at: $time(row, concat!($prefix, "created_at"))?,
        }
    }};
}

/// Reads the columns of [`key_columns`] out of a row of either store.
macro_rules! read_key {
    ($row:expr, $time:path, $maybe_time:path) => {{
        use $crate::domain::api_key::{KeyId, KeyRecord, Scope};
        use $crate::domain::id::{KeyName, TenantId};
        use $crate::storage::StoreError;
        let row = $row;
        let (id, tenant, scope): (String, String, String) =
            (row.try_get("key_id")?, row.try_get("tenant_id")?, row.try_get("scope")?);
        let name: Option<String> = row.try_get("name")?;
        KeyRecord {
            id: KeyId::parse(&id).map_err(StoreError::corrupt("the id of a key"))?,
            tenant: TenantId::new(tenant).map_err(StoreError::corrupt("a tenant"))?,
            name: name.map(KeyName::new).transpose().map_err(StoreError::corrupt("the name of a key"))?,
            scope: Scope::parse(&scope).ok_or(scope).map_err(StoreError::corrupt("a scope"))?,
            created_at: $time(row, "created_at")?,
            revoked_at: $maybe_time(row, "revoked_at")?,
        }
    }};
}

/// Reads a message out of a row of either store.
macro_rules! read_message {
    ($row:expr, $time:path) => {{
        let row = $row;
        $crate::storage::StoredMessage {
            seq: row.try_get("seq")?,
            created_at: $time(row, "created_at")?,
            json: row.try_get("message")?,
        }
    }};
}

/// Reads where a message is out of a row of either store.
macro_rules! read_message_ref {
    ($row:expr, $time:path) => {{
        let row = $row;
        let session: String = row.try_get("session_id")?;
        $crate::storage::search::MessageRef {
            created_at: $time(row, "created_at")?,
            seq: row.try_get("seq")?,
            session: $crate::domain::id::SessionId::new(session)
                .map_err($crate::storage::StoreError::corrupt("a session id"))?,
        }
    }};
}

/// Reads what is still to be indexed out of a row of either store.
macro_rules! read_reindex_range {
    ($row:expr) => {{
        use $crate::domain::id::{SessionId, TenantId};
        use $crate::storage::StoreError;
        let row = $row;
        let (tenant, session): (String, String) = (row.try_get("tenant_id")?, row.try_get("session_id")?);
        $crate::storage::search_index::ReindexRange {
            tenant: TenantId::new(tenant).map_err(StoreError::corrupt("a tenant"))?,
            session: SessionId::new(session).map_err(StoreError::corrupt("a session id"))?,
            done_seq: row.try_get("done_seq")?,
            through_seq: row.try_get("through_seq")?,
        }
    }};
}

/// Reads a run of messages that wait to be indexed out of a row of either store.
macro_rules! read_pending_range {
    ($row:expr, $time:path) => {{
        let row = $row;
        $crate::storage::search_index::PendingRange {
            tenant: row.try_get("tenant_id")?,
            session: row.try_get("session_id")?,
            first_seq: row.try_get("first_seq")?,
            last_seq: row.try_get("last_seq")?,
            bytes: row.try_get("bytes")?,
            created_at: $time(row, "created_at")?,
        }
    }};
}

/// Reads a message that waits out of a row of either store: `place` is that of its run in the piece.
macro_rules! read_pending_message {
    ($row:expr, $time:path, $piece:expr) => {{
        let row = $row;
        let place = usize::try_from(row.try_get::<i64, _>("place")?).unwrap_or(usize::MAX);
        let run = $piece.get(place).ok_or(sqlx::Error::RowNotFound)?;
        $crate::storage::search_index::PendingMessage {
            tenant: run.tenant.clone(),
            session: run.session.clone(),
            user: row.try_get("user_id")?,
            seq: row.try_get("seq")?,
            created_at: $time(row, "created_at")?,
            json: row.try_get("message")?,
        }
    }};
}

/// The columns that [`read_key`] reads.
macro_rules! key_columns {
    () => {
        "key_id, tenant_id, name, scope, created_at, revoked_at"
    };
}

/// The columns that [`read_session`] reads.
macro_rules! session_columns {
    () => {
        "session_id, user_id, metadata, last_seq, tokens, cursor_seq, cursor_tokens, summary, summary_words, \
         summary_tokens, revision, lease_until, failures, retry_at, last_failure, created_at, updated_at"
    };
}

/// The columns that [`read_revision`] reads.
macro_rules! revision_columns {
    () => {
        "revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words, summary_tokens, added, meta, source, \
         created_at"
    };
}

pub(super) use {
    key_columns, read_key, read_memory, read_message, read_message_ref, read_pending_message,
    read_pending_range, read_reindex_range, read_revision, read_session, revision_columns, session_columns,
};
