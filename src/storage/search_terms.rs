//! The search index of the database: FTS5 on SQLite, `tsvector` with GIN on Postgres.
//!
//! Two functions alone use the rows of its table: [`search_add`] writes the terms of messages in the transaction of the messages,
//! and [`search_match`] finds messages. Triggers remove the terms of messages that are erased, rewound or redacted. On Postgres, the
//! table has no row-level security, so both functions name the tenant in each statement.

use super::messages::read_range;
use super::statement::{DbRow as _, Sql, Transaction};
use super::values::{DbTime, to_i64};
use super::{MessageRange, SearchFilter, StoreError, StoredMessage};
use crate::blocking;
use crate::domain::format;
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::message::{Message, Role};
use crate::domain::search::MessageRef;
use crate::domain::search::analyzer::Analyzer;
use crate::domain::search::index_terms::{self, Syntax, TermQuery};
use crate::domain::search::language::Language;
use crate::domain::search::text::OwnResults;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use time::OffsetDateTime;

/// Largest number of messages that match a query.
pub const MAX_MATCHES: usize = 1000;

/// A message and the terms of its text.
pub(super) struct IndexedMessage<'m> {
    pub(super) session: &'m SessionId,
    pub(super) seq: i64,
    /// The user of the session.
    pub(super) user: Option<&'m UserId>,
    pub(super) created_at: OffsetDateTime,
    /// The result of [`index_terms::message_terms`].
    pub(super) terms: &'m str,
}

/// A message that matches a query. Those with greater positions are newer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexMatch {
    pub message: MessageRef,
    pub position: i64,
}

/// The terms that new terms replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replaces {
    /// The messages have no terms yet.
    Nothing,
    /// Those of messages that have some. Other messages get none.
    Existing,
    /// Those of all messages, if they have some.
    All,
}

/// Adds the terms of messages, which are stored already. Returns the number of messages that have got terms.
pub(super) async fn search_add(
    transaction: &mut Transaction,
    tenant: &TenantId,
    messages: &[IndexedMessage<'_>],
    replaces: Replaces,
) -> Result<usize, StoreError> {
    const ADD_TERMS: Sql = Sql {
        postgres: "INSERT INTO search_terms (tenant_id, session_id, seq, micros, terms)
            SELECT $1, session_id, seq, micros, array_to_tsvector(string_to_array(terms, ' '))
            FROM json_to_recordset(CAST($2 AS json)) AS w (session_id text, seq bigint, micros bigint, terms text)",
        sqlite: "INSERT OR REPLACE INTO search_terms (rowid, terms)
            SELECT m.id, value ->> 'terms' FROM json_each($2) CROSS JOIN messages AS m
                ON m.tenant_id = $1 AND m.session_id = value ->> 'session_id' AND m.seq = value ->> 'seq'",
    };
    /// Returns the messages with terms. Removes these on Postgres; SQLite replaces them.
    const TAKE_TERMS: Sql = Sql {
        postgres:
            "DELETE FROM search_terms WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND $4
            AND terms @@ session_query($1, $2) RETURNING seq",
        sqlite:
            "SELECT seq FROM messages AS m WHERE tenant_id = $1 AND session_id = $2 AND seq BETWEEN $3 AND $4
            AND EXISTS (SELECT 1 FROM search_terms WHERE rowid = m.id)",
    };
    let encode = |message: &IndexedMessage<'_>| {
        let IndexedMessage { session, seq, user, created_at, terms } = message;
        let scope = index_terms::scope_terms(tenant, session, *user);
        json!({
            "session_id": session.as_str(), "seq": seq, "micros": DbTime(*created_at).micros(),
            "terms": format!("{terms} {scope}"),
        })
    };
    let mut known = HashSet::new();
    if replaces != Replaces::Nothing {
        for of_session in messages.chunk_by(|a, b| a.session == b.session) {
            let (Some(first), Some(last)) = (of_session.first(), of_session.last()) else { continue };
            let statement = transaction.statement(TAKE_TERMS).bind(tenant.as_str());
            let statement = statement.bind(first.session.as_str()).bind(first.seq).bind(last.seq);
            for row in &statement.read_all().await? {
                known.insert((first.session, row.field::<i64>("seq")?));
            }
        }
    }
    let is_added = |message: &&IndexedMessage<'_>| {
        replaces != Replaces::Existing || known.contains(&(message.session, message.seq))
    };
    let encoded: Vec<Value> = messages.iter().filter(is_added).map(encode).collect();
    let added = encoded.len();
    if added > 0 {
        let statement = transaction.statement(ADD_TERMS).bind(tenant.as_str());
        statement.bind(Value::from(encoded).to_string()).execute().await?;
    }
    Ok(added)
}

/// Returns the newest messages that match a query, [`MAX_MATCHES`] at most, newest first.
pub(super) async fn search_match(
    transaction: &mut Transaction,
    tenant: &TenantId,
    filter: &SearchFilter,
    query: &TermQuery,
) -> Result<Vec<IndexMatch>, StoreError> {
    /// The result is one row, because the driver of SQLite takes long for each.
    const MATCH_TERMS: Sql = Sql {
        postgres: "SELECT CAST(json_agg(json_build_array(micros, session_id, seq)) AS text) AS found FROM (
                SELECT micros, session_id, seq FROM search_terms
                WHERE terms @@ CAST($2 AS tsquery) AND tenant_id = $1 AND ($3 IS NULL OR session_id = $3)
                    AND micros >= $4 AND micros < $5 AND NOT (session_id = $6 AND seq >= $7)
                ORDER BY micros DESC, seq DESC LIMIT $8
            ) AS matches",
        sqlite: "SELECT json_group_array(json_array(id, session_id, seq)) AS found FROM (
                SELECT m.id, m.session_id, m.seq FROM search_terms CROSS JOIN messages AS m ON m.id = search_terms.rowid
                WHERE search_terms MATCH $2 AND m.tenant_id = $1 AND ($3 IS NULL OR m.session_id = $3)
                    AND m.created_at >= $4 AND m.created_at < $5 AND NOT (m.session_id = $6 AND m.seq >= $7)
                ORDER BY search_terms.rowid DESC LIMIT $8
            ) AS matches",
    };
    let SearchFilter { session, user, role, since, until, unseen, excluded_terms } = filter;
    let mut required = vec![match (session, user) {
        (Some(session), _) => index_terms::session_term(tenant, session),
        (None, Some(user)) => index_terms::user_term(tenant, user),
        (None, None) => index_terms::tenant_term(tenant),
    }];
    required.extend(session.as_ref().and(user.as_ref()).map(|user| index_terms::user_term(tenant, user)));
    required.extend(role.map(Role::as_str).map(index_terms::role_term));
    let syntax = if transaction.is_sqlite() { Syntax::FTS5 } else { Syntax::TSQUERY };
    let query = syntax.query(&required, query, excluded_terms);
    let micros = |time: OffsetDateTime| DbTime(time).micros();
    let statement = transaction.statement(MATCH_TERMS).bind(tenant.as_str()).bind(query);
    let statement = statement.bind(session.as_ref().map(SessionId::as_str));
    let statement = statement.bind(since.map_or(i64::MIN, micros)).bind(until.map_or(i64::MAX, micros));
    let unseen = unseen.as_ref();
    let statement = statement.bind(unseen.map_or("", |unseen| unseen.session.as_str()));
    let statement = statement.bind(unseen.map_or(i64::MAX, |unseen| unseen.seq)).bind(to_i64(MAX_MATCHES));
    let row = statement.read().await?.ok_or(sqlx::Error::RowNotFound)?;
    let found: Option<&str> = row.field("found")?;
    let found: Vec<(i64, String, i64)> =
        serde_json::from_str(found.unwrap_or("[]")).map_err(StoreError::corrupt("the result of a search"))?;
    let decode = |(position, session, seq)| {
        let session = SessionId::new(session).map_err(StoreError::corrupt("a session id"))?;
        Ok(IndexMatch { message: MessageRef { session, seq }, position })
    };
    found.into_iter().map(decode).collect()
}

/// Number and size of the messages that are analysed together.
const MAX_ANALYZED: i64 = 1000;
const MAX_ANALYZED_BYTES: i64 = 512 * 1024;

/// Adds the stored messages of a session to the index, in a transaction that has locked the session. Returns their number.
pub(super) async fn index_messages(
    transaction: &mut Transaction,
    analyzer: Analyzer,
    tenant: &TenantId,
    (session, user): (&SessionId, Option<&UserId>),
    seqs: RangeInclusive<i64>,
    replaces: Replaces,
) -> Result<usize, StoreError> {
    let (mut after_seq, mut indexed, mut own_results) = (seqs.start() - 1, 0, OwnResults::default());
    loop {
        let (last_seq, limit, max_bytes) = (*seqs.end(), MAX_ANALYZED, MAX_ANALYZED_BYTES);
        let range = MessageRange { after_seq, last_seq, limit, max_bytes };
        let messages = read_range(transaction, tenant, session, range).await?;
        let Some(last) = messages.last() else { return Ok(indexed) };
        after_seq = last.seq;
        let analyze = move || {
            let terms = messages.iter().map(|message| stored_terms(analyzer, message, &mut own_results));
            let terms: Vec<_> = terms.collect();
            (messages, terms, own_results)
        };
        let (messages, terms);
        (messages, terms, own_results) = blocking::spawn_cpu(analyze).await;
        let entries = messages.iter().zip(&terms).filter_map(|(message, terms)| {
            let StoredMessage { seq, created_at, .. } = *message;
            Some(IndexedMessage { session, seq, user, created_at, terms: terms.as_deref()? })
        });
        let entries: Vec<_> = entries.collect();
        indexed += search_add(transaction, tenant, &entries, replaces).await?;
    }
}

/// Records the language of a session.
pub(super) async fn set_language(
    transaction: &mut Transaction,
    tenant: &TenantId,
    session: &SessionId,
    language: Option<Language>,
) -> Result<(), StoreError> {
    const SET_LANGUAGE: &str = "UPDATE sessions SET language = $3 WHERE tenant_id = $1 AND session_id = $2";
    let statement = transaction.statement(SET_LANGUAGE).bind(tenant.as_str()).bind(session.as_str());
    statement.bind(language.map(Language::as_str)).execute().await?;
    Ok(())
}

/// Recognises the language of a session from its first stored messages, records it, and returns the analyzer for the session.
pub(super) async fn recognise_language(
    transaction: &mut Transaction,
    analyzer: Analyzer,
    tenant: &TenantId,
    session: &SessionId,
) -> Result<Analyzer, StoreError> {
    const RANGE: MessageRange =
        MessageRange { after_seq: 0, last_seq: i64::MAX, limit: 20, max_bytes: MAX_ANALYZED_BYTES };
    if !analyzer.detects() {
        return Ok(analyzer);
    }
    let stored = read_range(transaction, tenant, session, RANGE).await?;
    let messages: Vec<Message> = stored.iter().filter_map(|stored| format::read(&stored.json).ok()).collect();
    let language = index_terms::language(messages.iter());
    set_language(transaction, tenant, session, language).await?;
    Ok(analyzer.of_session(language))
}

/// Returns the terms of a stored message. A redacted one has none.
fn stored_terms(analyzer: Analyzer, message: &StoredMessage, own_results: &mut OwnResults) -> Option<String> {
    let StoredMessage { redacted_at: None, json, .. } = message else { return None };
    terms(analyzer, &format::read(json).ok()?, own_results)
}

/// Returns the terms of a message. A message whose analysis panics has none, so that a bug does not keep it from being stored.
pub(super) fn terms(analyzer: Analyzer, message: &Message, own_results: &mut OwnResults) -> Option<String> {
    let terms = catch_unwind(AssertUnwindSafe(|| index_terms::message_terms(analyzer, message, own_results)));
    terms.inspect_err(|_| tracing::error!("failed to analyse a message; search will not find it")).ok()
}
