//! Short forms of the operations that most tests need, on one session of one tenant.

use crate::support::backend::Backend;
use precis::domain::consolidation_record::{RecordDetails, RecordOutcome, RunCause};
use precis::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use precis::domain::id::{SessionId, TenantId, UserId};
use precis::domain::memory::MemoryAuthor;
use precis::domain::message::{Message, Role};
use precis::domain::revision::{ModelUsage, Revision};
use precis::domain::session::{Session, Summary};
use precis::domain::tail::TailLimit;
use precis::storage::NewMemoryDocument;
use precis::storage::Store;
use precis::storage::{AppendOutcome, AppendRequest};
use precis::storage::{ContextSnapshot, LoadedContext};
use precis::storage::{LeaseCondition, NewRevision};
use precis::storage::{MessageQuery, StoredMessage};
use serde_json::value::RawValue;
use std::sync::Arc;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// Longer than any test runs.
pub(crate) const LONG: Duration = Duration::from_hours(1);

/// The whole history, oldest first.
pub(crate) const ALL: MessageQuery = MessageQuery {
    after_seq: 0,
    before_seq: i64::MAX,
    descending: false,
    limit: i64::MAX,
    max_bytes: i64::MAX,
};

/// Returns a record of one call of the model `small`.
pub(crate) fn record(outcome: RecordOutcome, reason: Option<&str>) -> RecordDetails {
    RecordDetails {
        cause: RunCause::Threshold,
        outcome,
        reason: reason.map(str::to_owned),
        models: vec!["small".to_owned()],
        usage: ModelUsage { calls: Some(1), ..ModelUsage::default() },
        cost: Some(0.25),
        duration_ms: 7,
    }
}

#[derive(Clone)]
pub(crate) struct Conversation {
    pub(crate) store: Arc<Store>,
    pub(crate) tenant: TenantId,
    pub(crate) session: SessionId,
}

impl Conversation {
    /// Returns the session `demo` of the tenant `default`, which does not exist yet.
    pub(crate) async fn on(backend: &Backend) -> Self {
        Self { store: backend.store().await, tenant: TenantId::default(), session: session_id("demo") }
    }

    /// Returns another session of the same tenant.
    pub(crate) fn session(&self, id: &str) -> Self {
        Self { session: session_id(id), ..self.clone() }
    }

    /// Returns the session with the same id of another tenant.
    pub(crate) fn tenant(&self, id: &str) -> Self {
        Self { tenant: TenantId::new(id).unwrap(), ..self.clone() }
    }

    pub(crate) async fn append(&self, exchange: &Exchange, key: Option<&IdempotencyKey>) -> AppendOutcome {
        let request = AppendRequest::new(&self.tenant, &self.session, exchange.clone(), key.cloned());
        self.store.append_exchange(request).await.unwrap()
    }

    pub(crate) async fn record(&self, exchange: &Exchange) -> PersistedExchange {
        recorded(self.append(exchange, None).await)
    }

    pub(crate) async fn say(&self, texts: &[&str]) -> PersistedExchange {
        self.record(&exchange(texts)).await
    }

    pub(crate) async fn find(&self) -> Option<Session> {
        self.store.session(&self.tenant, &self.session).await.unwrap()
    }

    pub(crate) async fn state(&self) -> Session {
        self.find().await.expect("the session exists")
    }

    pub(crate) async fn page(&self, page: MessageQuery) -> Option<Vec<StoredMessage>> {
        Some(self.store.messages(&self.tenant, &self.session, page).await.unwrap()?.messages)
    }

    pub(crate) async fn history(&self) -> Vec<StoredMessage> {
        self.page(ALL).await.expect("the session exists")
    }

    pub(crate) async fn take(
        &self,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Option<Session> {
        self.store.take_lease(&self.tenant, &self.session, token, condition, ttl).await.unwrap()
    }

    /// Takes the lease and returns its token.
    pub(crate) async fn lease(&self) -> Uuid {
        let token = Uuid::new_v4();
        self.take(token, LeaseCondition::Force, LONG).await.expect("the lease is free");
        token
    }

    /// Returns a revision that moves the cursor from its current position to `cursor`.
    pub(crate) async fn step(&self, cursor: i64, text: &str) -> NewRevision {
        let state = self.state().await;
        let count = (cursor - state.cursor).max(0);
        let all = self.store.message_metadata(&self.tenant, &self.session, state.cursor, count);
        NewRevision {
            base_revision: state.revision,
            base_cursor: state.cursor,
            cursor,
            range_tokens: all.await.unwrap().iter().map(|metadata| metadata.tokens).sum(),
            summary: summary(text),
            added: format!("+{text}"),
            provenance: None,
            meta: None,
        }
    }

    pub(crate) async fn commit(&self, token: Uuid, step: &NewRevision) -> Option<Revision> {
        self.commit_with(token, step, &record(RecordOutcome::Consolidated, None)).await
    }

    pub(crate) async fn commit_with(
        &self,
        token: Uuid,
        step: &NewRevision,
        record: &RecordDetails,
    ) -> Option<Revision> {
        self.store.commit_revision(&self.tenant, &self.session, token, step, record).await.unwrap()
    }

    /// Records a failure, which ends the lease. Returns the end of the backoff.
    pub(crate) async fn fail(&self, token: Uuid, wait: Duration, why: &str) -> Option<OffsetDateTime> {
        let record = record(RecordOutcome::Failed, Some(why));
        self.store.record_failure(&self.tenant, &self.session, token, wait, &record).await.unwrap()
    }

    /// Runs a complete consolidation up to `cursor`.
    pub(crate) async fn consolidate(&self, cursor: i64, text: &str) -> Revision {
        let token = self.lease().await;
        let step = self.step(cursor, text).await;
        let revision = self.commit(token, &step).await.expect("committed");
        self.release(token).await;
        revision
    }

    pub(crate) async fn release(&self, token: Uuid) {
        self.store.release_lease(&self.tenant, &self.session, token).await.unwrap();
    }

    pub(crate) async fn restore(&self, revision: i64) -> Option<Revision> {
        self.store.restore_revision(&self.tenant, &self.session, revision).await.unwrap()
    }

    pub(crate) async fn edit(&self, base_revision: i64, text: &str) -> Option<Revision> {
        let Self { store, tenant, session } = self;
        store.edit_summary(tenant, session, base_revision, &summary(text)).await.unwrap()
    }

    /// Reads a context, as the service does.
    pub(crate) async fn context(&self, user: Option<&UserId>, limit: TailLimit) -> ContextSnapshot {
        let Self { store, tenant, session } = self;
        match store.load_context(tenant, session, user, limit).await.unwrap() {
            LoadedContext::Complete(snapshot) => snapshot,
            LoadedContext::Large { bytes } => {
                let snapshot = store.load_large_context(tenant, session, user, limit).await.unwrap();
                assert!(snapshot.tail.bytes() <= bytes && bytes <= limit.bytes, "{bytes} {limit:?}");
                snapshot
            }
        }
    }

    /// Returns all revisions, newest first.
    pub(crate) async fn revisions(&self) -> Option<Vec<Revision>> {
        let page = self.store.revisions(&self.tenant, &self.session, i64::MAX, i64::MAX, i64::MAX);
        page.await.unwrap().map(|page| page.items)
    }

    pub(crate) async fn erase(&self) -> bool {
        self.store.erase_session(&self.tenant, &self.session).await.unwrap()
    }

    pub(crate) async fn remember(&self, user: &UserId, content: &str) {
        let new = NewMemoryDocument { content, words: 2, tokens: 3, author: MemoryAuthor::Http };
        self.store.write_memory_document(&self.tenant, user, new, None).await.unwrap().expect("written");
    }
}

pub(crate) fn session_id(id: &str) -> SessionId {
    SessionId::new(id).unwrap()
}

pub(crate) fn user_id(id: &str) -> UserId {
    UserId::new(id).unwrap()
}

pub(crate) fn summary(text: &str) -> Summary {
    let words = i64::try_from(text.split_whitespace().count()).unwrap();
    Summary { text: text.to_owned(), words, tokens: words * 2 }
}

/// Parses a message as a client sends it.
pub(crate) fn message(json: &str) -> Message {
    let json = RawValue::from_string(json.to_owned()).unwrap();
    precis::domain::format::read_given(&json).unwrap().remove(0)
}

/// Returns a message with a token count. Tests use the length of the JSON, which needs no tokenizer.
pub(crate) fn counted(message: Message) -> (Message, i64) {
    let tokens = i64::try_from(message.json().len()).unwrap();
    (message, tokens)
}

/// Returns an exchange with alternating user and assistant messages.
pub(crate) fn exchange(texts: &[&str]) -> Exchange {
    let roles = [Role::User, Role::Assistant].into_iter().cycle();
    let messages = roles.zip(texts).map(|(role, text)| counted(Message::text(role, text))).collect();
    Exchange { messages, ..Exchange::default() }
}

pub(crate) fn exchange_of(user: &str, texts: &[&str]) -> Exchange {
    Exchange { user_id: Some(user_id(user)), ..exchange(texts) }
}

pub(crate) fn recorded(append: AppendOutcome) -> PersistedExchange {
    match append {
        AppendOutcome::Appended(recorded) => recorded,
        other => panic!("not recorded: {other:?}"),
    }
}

/// Returns an idempotency key for the exchange, as the service makes it.
pub(crate) fn key(key: &str, exchange: &Exchange) -> IdempotencyKey {
    IdempotencyKey { key: key.to_owned(), fingerprint: exchange.fingerprint() }
}
