//! What search finds messages by, kept up with them.
//!
//! An index row is written in the transaction that stores its message, and goes with its session. What is stored while there
//! is no index, or while it is made by other rules, is indexed later, piece by piece.

use super::StoreError;
use super::search::Place;
use crate::blocking;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::message::Message;
use crate::domain::search::analysis::Analysis;
use crate::domain::search::index;
use async_trait::async_trait;

/// How far the index is behind the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexState {
    /// The rules that it is made by: [`Analysis::label`].
    pub label: String,
    /// Sessions with messages that are still to be indexed.
    pub backlog: i64,
}

/// A piece of what is still to be indexed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// Whose it is.
    pub tenant: TenantId,
    /// In which session.
    pub session: SessionId,
    /// Messages up to here are done.
    pub done_seq: i64,
    /// The last that is to be done.
    pub through_seq: i64,
}

/// Keeping the index.
#[async_trait]
pub trait SearchIndex {
    /// How far the index is behind. An index without any rules gets those of this label.
    async fn index_state(&self, label: &str) -> Result<IndexState, StoreError>;

    /// Puts into the index what waits beside it, so that whoever stores a message need not. What waits is found as well,
    /// but every search reads all of it. Returns whether there was anything. Where another replica is at it, that one does it.
    async fn settle_index(&self) -> Result<bool, StoreError>;

    /// Says that messages are stored and not indexed from now on: the next rules begin a new index.
    async fn suspend_index(&self) -> Result<(), StoreError>;

    /// Begins an index by the rules of this label: where it is by others, all messages there are are to be indexed anew.
    async fn begin_index(&self, label: &str) -> Result<(), StoreError>;

    /// A piece of what is still to be indexed, of any tenant. `None`: nothing is.
    async fn backlog(&self) -> Result<Option<Backlog>, StoreError>;

    /// Indexes messages, in place of what the index had of them; then the piece is done up to `done_seq`. Where the
    /// session has gone or another process is at it as well, nothing is done twice or left behind.
    async fn index(
        &self,
        piece: &Backlog,
        messages: &[(Place, Message)],
        done_seq: i64,
    ) -> Result<(), StoreError>;
}

/// The lexemes of each message, but that of its user; none at all without rules to make them by.
pub(super) async fn lexemes(
    analysis: Option<Analysis>,
    tenant: &TenantId,
    session: &SessionId,
    messages: impl ExactSizeIterator<Item = &Message> + Clone + Send,
) -> Vec<String> {
    let Some(analysis) = analysis else { return Vec::new() };
    // Few are not worth a copy.
    if !blocking::is_large(messages.clone().map(|message| message.json().len()).sum()) {
        return messages.map(|message| index::lexemes(analysis, tenant, session, message)).collect();
    }
    let (tenant, session) = (tenant.clone(), session.clone());
    let messages: Vec<Message> = messages.cloned().collect();
    let work =
        move || messages.iter().map(|message| index::lexemes(analysis, &tenant, &session, message)).collect();
    blocking::run(work).await
}
