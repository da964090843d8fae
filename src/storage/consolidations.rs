//! Consolidating a session: the lease that makes it one at a time, and the commit.

use super::StoreError;
use crate::domain::id::{SessionId, TenantId};
use crate::domain::revision::{MetaConsolidation, Provenance, Revision};
use crate::domain::session::{Session, Summary};
use async_trait::async_trait;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// When a lease may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseCondition {
    /// Only if the session is still at this revision and need not wait after a failure.
    IfDue {
        /// The revision that the decision was made on.
        revision: i64,
    },
    /// Somebody asked for it: whatever the revision, and without waiting.
    Force,
}

impl LeaseCondition {
    /// The revision that the session must still be at, if any.
    pub(super) fn revision(self) -> Option<i64> {
        match self {
            Self::IfDue { revision } => Some(revision),
            Self::Force => None,
        }
    }
}

/// One step of a consolidation: a range of messages and the summary that covers it.
#[derive(Clone, Debug)]
pub struct NewRevision {
    /// The revision that it builds on.
    pub base_revision: i64,
    /// The cursor that it builds on.
    pub base_cursor: i64,
    /// The cursor after it.
    pub cursor: i64,
    /// Tokens of the messages that it covers.
    pub range_tokens: i64,
    /// The whole summary after it.
    pub summary: Summary,
    /// What was written for the range.
    pub added: String,
    /// Who wrote it; `None` where the range held no text.
    pub source: Option<Provenance>,
    /// The compression that followed.
    pub meta: Option<MetaConsolidation>,
}

/// Consolidating a session.
#[async_trait]
pub trait Consolidations {
    /// Takes the lease: nobody else can until it is released or `ttl` is over. One that has more than twice `ttl` left
    /// is over as well: a clock that has been put back since it was taken must not make it last. Returns the session as
    /// it is then;
    /// `None`: no such session, or the condition does not hold, or another has it.
    async fn take_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        condition: LeaseCondition,
        ttl: Duration,
    ) -> Result<Option<Session>, StoreError>;

    /// Makes the lease last `ttl` from now. `false`: it is another's, or nobody's.
    async fn renew_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        ttl: Duration,
    ) -> Result<bool, StoreError>;

    /// Gives the lease back, if it is still one's own.
    async fn release_lease(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
    ) -> Result<(), StoreError>;

    /// Commits summary, cursor and revision together, and clears what failures left behind. The lease stays.
    /// `None`: summary or cursor have changed, or the lease is another's, or the session was erased; nothing is
    /// written then.
    async fn commit(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        step: &NewRevision,
    ) -> Result<Option<Revision>, StoreError>;

    /// Notes a failure, gives the lease back, and returns the time before which the next attempt must not be made.
    /// `None`: the lease is another's.
    async fn fail(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        token: Uuid,
        retry_in: Duration,
        why: &str,
    ) -> Result<Option<OffsetDateTime>, StoreError>;
}
