//! Reading the heads of many sessions at a time, as far as it is common to both stores.

use super::SessionHead;
use super::batch::Batcher;
use crate::domain::id::{SessionId, TenantId};

/// Largest number of heads that one statement reads.
pub(super) const MAX_BATCH: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct HeadRequest {
    pub(super) tenant: TenantId,
    pub(super) session: SessionId,
}

pub(super) type HeadBatcher = Batcher<HeadRequest, Option<SessionHead>>;
