//! Encoding and decoding of rows, the same for both databases.

use super::statement::DbRow;
use super::values::user_from_column;
use super::{MemoryVersion, SessionHead, StoreError};
use crate::domain::api_key::{KeyId, KeyRecord, Scope};
use crate::domain::consolidation_record::ConsolidationRecord;
use crate::domain::exchange::PersistedExchange;
use crate::domain::id::{KeyName, SessionId, TenantId, UserId};
use crate::domain::memory::{MemoryAuthor, MemoryDocument, MemoryOwner, MemoryRevision};
use crate::domain::message::{Message, Role};
use crate::domain::message_metadata::{ContextMessage, MessageMetadata, ToolIds};
use crate::domain::redaction::RedactionMark;
use crate::domain::revision::{MetaConsolidation, Provenance, Revision, RevisionKind};
use crate::domain::search::language::Language;
use crate::domain::session::{ConsolidationState, ForkKind, ForkOrigin, Session, Summary, Window};
use serde::Serialize;
use serde::de::DeserializeOwned;
use time::OffsetDateTime;
use uuid::Uuid;

/// The columns that [`api_key`] decodes.
macro_rules! api_key_columns {
    () => {
        "key_id, tenant_id, name, scope, created_at, revoked_at"
    };
}

/// The columns that [`session`] decodes.
macro_rules! session_columns {
    () => {
        "session_id, user_id, metadata, last_seq, tokens, cursor_seq, cursor_tokens, summary, summary_words, \
         summary_tokens, revision, lease_until, failures, retry_at, last_failure, forked_from, forked_through, \
         fork_kind, incarnation, created_at, updated_at, stored_bytes, window_tokens, window_fixed, language"
    };
}

/// The columns that [`revision`] decodes.
macro_rules! revision_columns {
    () => {
        "revision, kind, from_seq, to_seq, cursor_seq, summary, summary_words, summary_tokens, added, meta, source, \
         redacted_seq, created_at"
    };
}

pub(super) use {api_key_columns, revision_columns, session_columns};

pub(super) fn api_key(row: &impl DbRow) -> Result<KeyRecord, StoreError> {
    let (id, scope): (&str, &str) = (row.field("key_id")?, row.field("scope")?);
    let name: Option<String> = row.field("name")?;
    Ok(KeyRecord {
        id: KeyId::parse(id).map_err(StoreError::corrupt("the id of an API key"))?,
        tenant: tenant_id(row)?,
        name: name.map(KeyName::new).transpose().map_err(StoreError::corrupt("the name of an API key"))?,
        scope: Scope::parse(scope).ok_or(scope).map_err(StoreError::corrupt("the scope of an API key"))?,
        created_at: row.time("created_at")?,
        revoked_at: row.optional_time("revoked_at")?,
    })
}

pub(super) fn session(row: &impl DbRow) -> Result<Session, StoreError> {
    Ok(Session {
        session_id: session_id(row)?,
        user_id: user_from_column(row.field("user_id")?)?,
        metadata: row.field("metadata")?,
        last_seq: row.field("last_seq")?,
        tokens: row.field("tokens")?,
        stored_bytes: row.field("stored_bytes")?,
        cursor: row.field("cursor_seq")?,
        cursor_tokens: row.field("cursor_tokens")?,
        summary: summary(row)?,
        revision: row.field("revision")?,
        consolidation: consolidation_state(row)?,
        window: window(row)?,
        language: language(row)?,
        forked_from: fork_origin(row)?,
        incarnation: row.field("incarnation")?,
        created_at: row.time("created_at")?,
        updated_at: row.time("updated_at")?,
    })
}

/// Decodes the column `language` of a session.
pub(super) fn language(row: &impl DbRow) -> Result<Option<Language>, StoreError> {
    let Some(name) = row.field::<Option<&str>>("language")? else { return Ok(None) };
    Language::parse(name).map(Some).ok_or(name).map_err(StoreError::corrupt("the language of a session"))
}

fn window(row: &impl DbRow) -> Result<Option<Window>, StoreError> {
    let (tokens, fixed) =
        (row.field::<Option<i64>>("window_tokens")?, row.field::<Option<i64>>("window_fixed")?);
    Ok(tokens.zip(fixed).map(|(tokens, fixed)| Window { tokens, fixed }))
}

fn fork_origin(row: &impl DbRow) -> Result<Option<ForkOrigin>, StoreError> {
    let Some(session) = row.field::<Option<String>>("forked_from")? else { return Ok(None) };
    let kind: &str = row.field("fork_kind")?;
    Ok(Some(ForkOrigin {
        session_id: SessionId::new(session).map_err(StoreError::corrupt("a session id"))?,
        through_seq: row.field("forked_through")?,
        kind: ForkKind::parse(kind).ok_or(kind).map_err(StoreError::corrupt("the kind of a fork"))?,
    }))
}

fn consolidation_state(row: &impl DbRow) -> Result<ConsolidationState, StoreError> {
    Ok(ConsolidationState {
        lease_until: row.optional_time("lease_until")?,
        failures: row.field("failures")?,
        retry_at: row.optional_time("retry_at")?,
        last_failure: row.field("last_failure")?,
    })
}

/// Decodes the head of a session that was read at `now`.
pub(super) fn session_head(row: &impl DbRow, now: OffsetDateTime) -> Result<SessionHead, StoreError> {
    Ok(SessionHead {
        now,
        incarnation: row.field("incarnation")?,
        last_seq: row.field("last_seq")?,
        tokens: row.field("tokens")?,
        cursor: row.field("cursor_seq")?,
        cursor_tokens: row.field("cursor_tokens")?,
        revision: row.field("revision")?,
        consolidation: consolidation_state(row)?,
        updated_at: row.time("updated_at")?,
        memory: memory_version(row)?,
    })
}

pub(super) fn memory_version(row: &impl DbRow) -> Result<Option<MemoryVersion>, StoreError> {
    let incarnation: Option<Uuid> = row.field("memory_incarnation")?;
    let version: Option<i64> = row.field("memory_version")?;
    Ok(incarnation.zip(version).map(|(incarnation, version)| MemoryVersion { incarnation, version }))
}

pub(super) fn revision(row: &impl DbRow) -> Result<Revision, StoreError> {
    let kind: &str = row.field("kind")?;
    let source: Option<&str> = row.field("source")?;
    Ok(Revision {
        revision: row.field("revision")?,
        kind: RevisionKind::parse(kind).ok_or(kind).map_err(StoreError::corrupt("the kind of a revision"))?,
        from_seq: row.field("from_seq")?,
        to_seq: row.field("to_seq")?,
        cursor: row.field("cursor_seq")?,
        summary: summary(row)?,
        added: row.field("added")?,
        meta: meta(row)?,
        provenance: from_json(source).map_err(StoreError::corrupt("the provenance of a revision"))?,
        redacted_seq: row.field("redacted_seq")?,
        created_at: row.time("created_at")?,
    })
}

/// Decodes the column `meta` of a revision.
pub(super) fn meta(row: &impl DbRow) -> Result<Option<MetaConsolidation>, StoreError> {
    from_json(row.field("meta")?).map_err(StoreError::corrupt("the meta-consolidation of a revision"))
}

/// Returns the model that wrote the newest part of a summary, from the columns of its revision.
pub(super) fn summary_model(row: &impl DbRow) -> Result<Option<String>, StoreError> {
    let meta: Option<MetaConsolidation> = from_json(row.field("summary_meta")?)
        .map_err(StoreError::corrupt("the meta-consolidation of a revision"))?;
    let source: Option<Provenance> = from_json(row.field("summary_source")?)
        .map_err(StoreError::corrupt("the provenance of a revision"))?;
    Ok(meta.map(|meta| meta.provenance).or(source).map(|provenance| provenance.model))
}

pub(super) fn consolidation_record(row: &impl DbRow) -> Result<ConsolidationRecord, StoreError> {
    let details: &str = row.field("details")?;
    Ok(ConsolidationRecord {
        number: row.field("number")?,
        revision: row.field("revision")?,
        details: serde_json::from_str(details)
            .map_err(StoreError::corrupt("the details of a record of consolidation"))?,
        created_at: row.time("created_at")?,
    })
}

fn summary(row: &impl DbRow) -> Result<Summary, StoreError> {
    Ok(Summary {
        text: row.field("summary")?,
        words: row.field("summary_words")?,
        tokens: row.field("summary_tokens")?,
    })
}

/// Decodes a memory document from columns whose names begin with `prefix`.
pub(super) fn memory_document(row: &impl DbRow, prefix: &str) -> Result<MemoryDocument, StoreError> {
    let name = |column| format!("{prefix}{column}");
    Ok(MemoryDocument {
        version: row.field(&name("version"))?,
        content: row.field(&name("content"))?,
        words: row.field(&name("words"))?,
        tokens: row.field(&name("tokens"))?,
        created_at: row.time(&name("created_at"))?,
    })
}

pub(super) fn memory_owner(row: &impl DbRow) -> Result<MemoryOwner, StoreError> {
    Ok(MemoryOwner {
        user: UserId::new(row.field::<String>("user_id")?).map_err(StoreError::corrupt("a user id"))?,
        version: row.field("version")?,
        words: row.field("words")?,
        tokens: row.field("tokens")?,
        updated_at: row.time("created_at")?,
    })
}

pub(super) fn memory_revision(row: &impl DbRow) -> Result<MemoryRevision, StoreError> {
    let author: Option<&str> = row.field("author")?;
    let author = author.map(|author| MemoryAuthor::parse(author).ok_or(author)).transpose();
    Ok(MemoryRevision {
        document: memory_document(row, "")?,
        author: author.map_err(StoreError::corrupt("the author of a memory document"))?,
    })
}

/// Decodes the column `redaction` of a message.
pub(super) fn redaction_mark(column: &str) -> Result<RedactionMark, StoreError> {
    serde_json::from_str(column).map_err(StoreError::corrupt("the redaction of a message"))
}

pub(super) fn context_message(row: &impl DbRow) -> Result<ContextMessage, StoreError> {
    Ok(ContextMessage {
        seq: row.field("seq")?,
        metadata: message_metadata(row)?,
        json: row.field("message")?,
    })
}

pub(super) fn message_metadata(row: &impl DbRow) -> Result<MessageMetadata, StoreError> {
    let calls: Option<&str> = row.field("tool_call_ids")?;
    let result_of: Option<&str> = row.field("tool_result_of")?;
    let calls = from_json(calls).map_err(StoreError::corrupt("the tool calls of a message"))?;
    let result_of =
        from_json(result_of).map_err(StoreError::corrupt("the tool call that a message answers"))?;
    let tool_ids = ToolIds { calls: calls.unwrap_or_default(), result_of };
    let role = role(row.field("role")?)?;
    Ok(MessageMetadata::from_parts(role, row.field("message_tokens")?, tool_ids, row.field("is_redacted")?))
}

pub(super) fn role(name: &str) -> Result<Role, StoreError> {
    Role::parse(name).ok_or(name).map_err(StoreError::corrupt("the role of a message"))
}

/// Decodes the exchange of an idempotency key, without its user.
pub(super) fn keyed_exchange(row: &impl DbRow) -> Result<PersistedExchange, StoreError> {
    Ok(PersistedExchange {
        first_seq: row.field("first_seq")?,
        last_seq: row.field("last_seq")?,
        created_at: row.time("created_at")?,
        user_id: None,
        incarnation: None,
        replayed: true,
    })
}

pub(super) fn tenant_id(row: &impl DbRow) -> Result<TenantId, StoreError> {
    TenantId::new(row.field::<String>("tenant_id")?).map_err(StoreError::corrupt("a tenant id"))
}

pub(super) fn session_id(row: &impl DbRow) -> Result<SessionId, StoreError> {
    SessionId::new(row.field::<String>("session_id")?).map_err(StoreError::corrupt("a session id"))
}

/// Returns the columns `tool_call_ids` and `tool_result_of` of a message. They are JSON because an id can be any text, and
/// Postgres can't store NUL.
pub(super) fn tool_columns(message: &Message) -> (Option<String>, Option<String>) {
    let ids: Vec<&str> = message.tool_calls().iter().map(|call| call.id.as_str()).collect();
    let call_ids = (!ids.is_empty()).then(|| json(&ids));
    (call_ids, message.tool_call_id().map(json))
}

/// Returns the column `meta` or `source` of a revision, `redaction` of a message, or `details` of a record: a field that is added to these types
/// later must be optional.
pub(super) fn json_column(value: Option<&impl Serialize>) -> Option<String> {
    value.map(json)
}

fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| unreachable!("strings and numbers can be JSON"))
}

fn from_json<T: DeserializeOwned>(column: Option<&str>) -> Result<Option<T>, serde_json::Error> {
    column.map(serde_json::from_str).transpose()
}
