//! One memory limit for all running model calls of the process.
//!
//! Half of the memory is for the shares with which calls begin: their transcript and a small response. A call waits for its
//! share before it is sent. The other half is for larger responses: a call takes more of it while it receives, without waiting,
//! and fails if none is left. So a call that holds memory never waits for memory, which means that calls cannot block each
//! other, and endless responses keep no other call from starting.

use super::{ModelError, Task};
use crate::capacity::{self, Held, Level, Resource, Work, kib};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Copies of a transcript during its call: the texts and the lines of the run, both for the whole range and for this call, and
/// the request.
const COPIES_OF_TRANSCRIPT: usize = 5;
/// Copies of what was received: a buffer and the larger one that replaces it.
const COPIES_OF_RESPONSE: usize = 3;
/// The part of a response that the first share contains, far above the size of a usual one.
const SMALL_RESPONSE_BYTES: usize = 32 * 1024;
/// A share grows by multiples of this.
const STEP_BYTES: usize = 64 * 1024;

/// The memory for all calls, in KiB.
#[derive(Debug)]
pub struct CallMemoryLimit {
    starts: Resource,
    responses: Arc<Resource>,
}

/// The share of one call. It is released when its last clone is dropped. The default is unlimited.
#[derive(Clone, Debug, Default)]
pub struct CallMemory(Option<Arc<Share>>);

#[derive(Debug)]
struct Share {
    _start: Held,
    responses: Arc<Resource>,
    work: Work,
    response: Mutex<ResponseShare>,
}

#[derive(Debug, Default)]
struct ResponseShare {
    /// The largest size of each part so far.
    sizes: [usize; 2],
    /// The memory in addition to the first share.
    more: Option<Held>,
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
    /// Creates the limit for `bytes` in total, of which a key can hold `key_share`, a number from 0 to 1.
    #[must_use]
    pub fn new(bytes: usize, key_share: f64) -> Self {
        let half = || Resource::new(Level::ModelCall, kib(bytes / 2), key_share);
        Self { starts: half(), responses: Arc::new(half()) }
    }

    /// Waits at most this long for the share of a call. A transcript that exceeds the limit gets the largest possible share, so
    /// that each call can start.
    pub(super) async fn acquire(&self, task: &Task<'_>, wait: Duration) -> Result<CallMemory, ModelError> {
        let memory =
            COPIES_OF_TRANSCRIPT * transcript_bytes(task) + COPIES_OF_RESPONSE * SMALL_RESPONSE_BYTES;
        let start = self.starts.acquire(kib(memory), Some(wait)).await;
        let start = start.map_err(|_| ModelError::MemoryTimeout(wait))?;
        let (responses, work) = (Arc::clone(&self.responses), capacity::current());
        Ok(CallMemory(Some(Arc::new(Share { _start: start, responses, work, response: Mutex::default() }))))
    }
}

impl CallMemory {
    /// Makes room for a part of the response that is `bytes` long now. Fails if the calls of the key, or all calls together, have no
    /// memory left.
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
        let needed = kib(needed.next_multiple_of(STEP_BYTES));
        share.work.grow(&share.responses, more, needed).map_err(|_| ModelError::MemoryLimit)
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
    use crate::capacity::{Capacity, CapacityLimits, ClientId, Kind};
    use crate::domain::consolidation::SummaryLimit;
    use ResponsePart::{Incomplete, Text};

    const MIB: usize = 1 << 20;
    const TASK: Task<'static> =
        Task::MetaConsolidate { summary: "short", sentences: 1, limit: SummaryLimit::Words(99) };

    /// Begins a call for a key.
    async fn begin(
        limit: &CallMemoryLimit,
        client: u64,
        task: &Task<'_>,
        wait: Duration,
    ) -> Result<CallMemory, ModelError> {
        let capacity = Capacity::new(&CapacityLimits::small());
        let work = Work::new(&capacity, ClientId(client), Kind::Internal);
        capacity::scope(work, limit.acquire(task, wait)).await
    }

    #[tokio::test]
    async fn responses_of_all_calls_have_a_common_limit() {
        let limit = CallMemoryLimit::new(8 * MIB, 0.75);
        let mut calls = Vec::new();
        for _ in 0..3 {
            calls.push(begin(&limit, 1, &TASK, Duration::from_secs(1)).await.expect("free"));
        }
        for call in &calls {
            call.hold(Text, SMALL_RESPONSE_BYTES).expect("part of the first share");
        }
        assert_eq!(limit.responses.in_use(), 0);
        calls[0].hold(Incomplete, MIB / 2).expect("free");
        calls[0].hold(Incomplete, MIB / 4).expect("held already");
        calls[1].hold(Incomplete, MIB / 2).expect("free");
        assert_eq!(limit.responses.in_use(), 3 * 1024);
        assert_eq!(calls[2].hold(Incomplete, 1), Err(ModelError::MemoryLimit), "three quarters for one key");
        let of_other = begin(&limit, 2, &TASK, Duration::from_secs(1)).await.expect("free");
        of_other.hold(Incomplete, MIB / 4).expect("the last quarter");
        calls[1].hold(Incomplete, MIB / 2).expect("held already");
        drop(calls.remove(0));
        calls[1].hold(Incomplete, MIB / 2).expect("released by the first call");
        drop((calls, of_other));
        assert_eq!((limit.starts.in_use(), limit.responses.in_use()), (0, 0));
        CallMemory::default().hold(Incomplete, usize::MAX).expect("unlimited");
    }

    #[tokio::test(start_paused = true)]
    async fn call_waits_for_its_first_share_only() {
        let limit = CallMemoryLimit::new(8 * MIB, 0.75);
        let summary = "x".repeat(MIB);
        let large = Task::MetaConsolidate { summary: &summary, sentences: 1, limit: SummaryLimit::Words(99) };
        let first = begin(&limit, 1, &large, Duration::from_secs(1)).await.expect("the largest share");
        let wait = Duration::from_secs(5);
        let second = begin(&limit, 1, &TASK, wait).await;
        assert_eq!(second.err(), Some(ModelError::MemoryTimeout(wait)), "one key has three quarters");
        // The call that holds the share can receive its response, and the next one follows.
        let (waiting, ()) = tokio::join!(begin(&limit, 1, &TASK, wait), async {
            first.hold(Incomplete, MIB / 2).expect("free");
            drop(first);
        });
        drop(waiting.expect("released by the first call"));
        assert_eq!((limit.starts.in_use(), limit.responses.in_use()), (0, 0));
    }
}
