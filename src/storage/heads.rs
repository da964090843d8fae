//! Reading the heads of many sessions at a time, as far as it is common to both stores.

use super::batch::Batcher;
use super::pool::retry_on_disconnect;
use super::{SessionHead, StoreError};
use crate::domain::id::{SessionId, TenantId};
use futures_util::future::BoxFuture;
use std::slice;
use std::sync::Arc;

/// Largest number of heads that one statement reads.
const MAX_BATCH: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct HeadRequest {
    pub(super) tenant: TenantId,
    pub(super) session: SessionId,
    /// `true` if the session was used recently, and the texts in its rows are small.
    pub(super) is_recent: bool,
}

pub(super) type HeadBatcher = Batcher<HeadRequest, Option<SessionHead>>;

/// The head of each requested session, or `None` if it does not exist.
pub(super) type Heads = Result<Vec<Option<SessionHead>>, StoreError>;

/// Returns the batcher of a database whose statement is `read`.
pub(super) fn batcher(
    read: impl for<'r> Fn(&'r [HeadRequest]) -> BoxFuture<'r, Heads> + Send + Sync + 'static,
) -> HeadBatcher {
    let read = Arc::new(read);
    let read_one = Arc::clone(&read);
    let read_batch = move |requests: Vec<HeadRequest>| {
        let read = Arc::clone(&read);
        async move {
            // After an error, each request reads its head by itself and gets its own error.
            let heads = read(&requests).await.map_or_else(
                |_| requests.iter().map(|_| None).collect(),
                |heads| heads.into_iter().map(|head| Some(Ok(head))).collect::<Vec<_>>(),
            );
            requests.into_iter().zip(heads).collect()
        }
    };
    let read_alone = move |request: HeadRequest| {
        let read = Arc::clone(&read_one);
        async move {
            let heads = retry_on_disconnect(async || read(slice::from_ref(&request)).await);
            Ok(heads.await?.pop().flatten())
        }
    };
    Batcher::new(MAX_BATCH, read_batch, read_alone)
}
