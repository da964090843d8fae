//! One memory limit for all running model calls of the process.
//!
//! Half of the memory is for the shares with which calls begin: their transcript and a small response. A call waits for its
//! share before it is sent. The other half is for larger responses: a call takes more of it while it receives, without waiting,
//! and fails if none is left. So a call that holds memory never waits for memory, which means that calls cannot block each
//! other, and endless responses keep no other call from starting.

use super::{ModelError, Task};
use crate::capacity::{self, Capacity, Claim, FairQueue, Held, Turn};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::timeout;

/// Copies of a transcript during its call: the texts and the lines of the run, both for the whole range and for this call, and
/// the request.
const COPIES_OF_TRANSCRIPT: usize = 5;
/// Copies of what was received: a buffer and the larger one that replaces it.
const COPIES_OF_RESPONSE: usize = 3;
/// The part of a response that the first share contains, far above the size of a usual one.
const SMALL_RESPONSE_BYTES: usize = 32 * 1024;
/// A share grows by multiples of this.
const STEP_BYTES: usize = 64 * 1024;

/// The memory for all calls.
#[derive(Debug)]
pub(super) struct CallMemoryLimit {
    starts: Arc<FairQueue>,
    responses: Arc<FairQueue>,
}

/// The share of one call. It is released when its last clone is dropped. The default is unlimited.
#[derive(Clone, Debug, Default)]
pub struct CallMemory(Option<Arc<Share>>);

#[derive(Debug)]
struct Share {
    _start: Held,
    response: Mutex<ResponseShare>,
}

#[derive(Debug)]
struct ResponseShare {
    /// The largest size of each part so far.
    sizes: [usize; 2],
    /// The memory in addition to the first share.
    more: Held,
}

/// A part of a response that is held in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum ResponsePart {
    /// Bytes of an event or of an object whose end has not arrived.
    Incomplete,
    /// The text of the completion.
    Text,
}

impl CallMemoryLimit {
    /// Creates the limit for `bytes` in total.
    pub(super) fn new(bytes: usize) -> Self {
        let memory = bytes / 2;
        let half =
            || FairQueue::new(Capacity { memory, memory_of_client: memory / 4 * 3, ..Capacity::default() });
        Self { starts: half(), responses: half() }
    }

    /// Waits at most this long for the share of a call. A transcript that exceeds the limit gets the largest possible share, so
    /// that each call can start.
    pub(super) async fn acquire(&self, task: &Task<'_>, wait: Duration) -> Result<CallMemory, ModelError> {
        let memory =
            COPIES_OF_TRANSCRIPT * transcript_bytes(task) + COPIES_OF_RESPONSE * SMALL_RESPONSE_BYTES;
        let client = capacity::current_client();
        let claim =
            |memory: usize| Claim { client, cost: memory as u64, slot: false, memory, turn: Turn::New };
        let timed_out = || ModelError::MemoryTimeout(wait);
        let start = match self.starts.try_acquire(claim(memory)) {
            Some(start) => start,
            None => timeout(wait, self.starts.acquire(claim(memory))).await.map_err(|_| timed_out())?,
        };
        // A claim of nothing is always granted.
        let more = self.responses.try_acquire(claim(0)).ok_or_else(timed_out)?;
        let response = Mutex::new(ResponseShare { sizes: [0; 2], more });
        Ok(CallMemory(Some(Arc::new(Share { _start: start, response }))))
    }
}

impl CallMemory {
    /// Makes room for a part of the response that is `bytes` long now. Fails if all calls together have no memory left.
    pub(super) fn hold(&self, part: ResponsePart, bytes: usize) -> Result<(), ModelError> {
        let Some(share) = &self.0 else { return Ok(()) };
        let mut guard = share.response.lock().unwrap_or_else(PoisonError::into_inner);
        let ResponseShare { sizes, more } = &mut *guard;
        let size = match part {
            ResponsePart::Incomplete => &mut sizes[0],
            ResponsePart::Text => &mut sizes[1],
        };
        *size = bytes.max(*size);
        let total: usize = sizes.iter().sum();
        let needed = total.saturating_sub(SMALL_RESPONSE_BYTES).saturating_mul(COPIES_OF_RESPONSE);
        let missing = needed.next_multiple_of(STEP_BYTES).saturating_sub(more.memory());
        if more.try_add_memory(missing) { Ok(()) } else { Err(ModelError::MemoryLimit) }
    }
}

fn transcript_bytes(task: &Task<'_>) -> usize {
    match task {
        Task::Consolidate { lines, .. } => lines.iter().map(|line| line.json.len()).sum(),
        Task::MetaConsolidate { summary, .. } => summary.len(),
        Task::Rerank { query, texts, .. } => query.len() + texts.iter().map(String::len).sum::<usize>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ResponsePart::{Incomplete, Text};

    const MIB: usize = 1 << 20;
    const TASK: Task<'static> = Task::MetaConsolidate { summary: "short", sentences: 1, max_words: 99 };

    #[tokio::test]
    async fn responses_of_all_calls_have_a_common_limit() {
        let limit = CallMemoryLimit::new(8 * MIB);
        let mut calls = Vec::new();
        for _ in 0..3 {
            calls.push(limit.acquire(&TASK, Duration::from_secs(1)).await.expect("free"));
        }
        for call in &calls {
            call.hold(Text, SMALL_RESPONSE_BYTES).expect("part of the first share");
        }
        assert_eq!(limit.responses.in_use().1, 0);
        calls[0].hold(Incomplete, MIB / 2).expect("free");
        calls[0].hold(Incomplete, MIB / 4).expect("held already");
        calls[1].hold(Incomplete, MIB / 2).expect("free");
        assert_eq!(limit.responses.in_use().1, 3 * MIB);
        assert_eq!(calls[2].hold(Incomplete, 1), Err(ModelError::MemoryLimit), "three quarters for one key");
        calls[1].hold(Incomplete, MIB / 2).expect("held already");
        drop(calls.remove(0));
        calls[1].hold(Incomplete, MIB / 2).expect("released by the first call");
        drop(calls);
        assert_eq!((limit.starts.in_use().1, limit.responses.in_use().1), (0, 0));
        CallMemory::default().hold(Incomplete, usize::MAX).expect("unlimited");
    }

    #[tokio::test(start_paused = true)]
    async fn call_waits_for_its_first_share_only() {
        let limit = CallMemoryLimit::new(8 * MIB);
        let summary = "x".repeat(MIB);
        let large = Task::MetaConsolidate { summary: &summary, sentences: 1, max_words: 99 };
        let first = limit.acquire(&large, Duration::from_secs(1)).await.expect("the largest share");
        let wait = Duration::from_secs(5);
        let second = limit.acquire(&TASK, wait).await;
        assert_eq!(second.err(), Some(ModelError::MemoryTimeout(wait)), "one key has three quarters");
        // The call that holds the share can receive its response, and the next one follows.
        let (waiting, ()) = tokio::join!(limit.acquire(&TASK, wait), async {
            first.hold(Incomplete, MIB / 2).expect("free");
            drop(first);
        });
        drop(waiting.expect("released by the first call"));
        assert_eq!((limit.starts.in_use().1, limit.responses.in_use().1), (0, 0));
    }
}
