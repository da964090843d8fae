//! Forks a session, and rewinds it to an earlier message.

use super::{Error, MemoryService, complete_internally, to_i64};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::session::Session;
use crate::storage::{AppendRequest, ForkAppendOutcome, ForkOutcome, RewindOutcome};
use uuid::Uuid;

/// The names of a message in the requests, for errors.
const FORK_FIELD: &str = "through_seq";
const REWIND_FIELD: &str = "after";

/// The result of a rewind.
#[derive(Clone, Debug)]
pub struct Rewound {
    /// The shorter session.
    pub session: Session,
    /// The session that has all messages as of before; `None` if there was nothing to remove.
    pub branch: Option<SessionId>,
}

impl MemoryService {
    /// Creates a session with the messages of another one up to `through_seq`, and the summary that belongs to that point. With
    /// 0, the new session gets only user and metadata: it exists from its first exchange on. Without `new_id`, the id is random.
    pub async fn fork_session(
        &self,
        tenant: &TenantId,
        source: &SessionId,
        new_id: Option<SessionId>,
        through_seq: i64,
    ) -> Result<Session, Error> {
        let max_messages = self.config.max_fork_messages;
        if through_seq > to_i64(max_messages) {
            let last_seq = self.session(tenant, source).await?.last_seq;
            return Err(if through_seq > last_seq {
                Error::AfterEnd { field: FORK_FIELD, seq: through_seq, last_seq }
            } else {
                Error::CopyTooLarge { messages: through_seq, max_messages }
            });
        }
        let target = new_id.unwrap_or_else(|| Uuid::new_v4().into());
        let (this, tenant, source) = (self.clone(), tenant.clone(), source.clone());
        let fork = async move {
            let copy = Box::pin(this.store.fork_session(&tenant, &source, &target, through_seq));
            match copy.await? {
                ForkOutcome::Forked(session) => Ok(*session),
                ForkOutcome::NotFound => Err(Error::SessionNotFound),
                ForkOutcome::AfterEnd { last_seq } => {
                    Err(Error::AfterEnd { field: FORK_FIELD, seq: through_seq, last_seq })
                }
                ForkOutcome::Exists => Err(Error::SessionExists),
            }
        };
        complete_internally(fork).await
    }

    /// Forks a session through `through_seq`, and appends an exchange to the fork, which is the session of the request.
    pub(super) async fn fork_and_append(
        &self,
        source: &SessionId,
        through_seq: i64,
        append: AppendRequest,
    ) -> Result<ForkAppendOutcome, Error> {
        let max_messages = self.config.max_fork_messages;
        if through_seq > to_i64(max_messages) {
            return Err(Error::CopyTooLarge { messages: through_seq, max_messages });
        }
        let (this, source) = (self.clone(), source.clone());
        let fork = async move {
            let copy = Box::pin(this.store.fork_and_append(&source, through_seq, &append));
            Ok(copy.await?)
        };
        complete_internally(fork).await
    }

    /// Removes the messages after `after_seq` from a session. The whole session as of before is kept as a branch: a session
    /// with a random id.
    pub async fn rewind_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        after_seq: i64,
    ) -> Result<Rewound, Error> {
        if !self.config.allow_rewind {
            return Err(Error::RewindForbidden);
        }
        let branch = SessionId::from(Uuid::new_v4());
        let (this, tenant, id) = (self.clone(), tenant.clone(), session.clone());
        let rewind = async move {
            let max_messages = this.config.max_fork_messages;
            let copy =
                Box::pin(this.store.rewind_session(&tenant, &id, &branch, after_seq, to_i64(max_messages)));
            match copy.await? {
                RewindOutcome::Rewound(session) => {
                    this.context_cache.forget_session(&tenant, &id);
                    Ok(Rewound { session: *session, branch: Some(branch) })
                }
                RewindOutcome::Unchanged(session) => Ok(Rewound { session: *session, branch: None }),
                RewindOutcome::NotFound => Err(Error::SessionNotFound),
                RewindOutcome::AfterEnd { last_seq } => {
                    Err(Error::AfterEnd { field: REWIND_FIELD, seq: after_seq, last_seq })
                }
                RewindOutcome::TooLarge { last_seq } => {
                    Err(Error::CopyTooLarge { messages: last_seq, max_messages })
                }
            }
        };
        complete_internally(rewind).await
    }
}
