//! Runs long computations on threads of their own, so that they do not delay other requests.
//!
//! The number of computations at a time is limited, and a computation on behalf of a request waits until it is the turn of
//! its client ([`capacity`]). At its [checkpoints](crate::checkpoint) it gives way to other clients. So a client with many large
//! requests gets only its share of the cores. The threads have a lower priority than the threads of small requests, so a small
//! request does not wait for a computation.

use crate::capacity::{self, Capacity, Thread};
use crate::checkpoint;
use futures_util::FutureExt as _;
use futures_util::future::Either;
use std::future::{Future, ready};
use std::io;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{JoinHandle, spawn_blocking};

/// Parsing or rendering more bytes than this takes about a millisecond.
const LARGE: usize = 64 * 1024;

/// Counting the tokens of a text, or analysing its words, takes at least as long as parsing so many times its bytes.
pub const COST_OF_COUNTING: usize = 4;

/// The "nice" value of the threads. If all cores are busy, such a thread gets a third of the time of a thread that serves
/// small requests: each step of this value is a factor of 1.25 (`man 7 sched`).
const NICE: i32 = 5;

/// Lifetime of an idle thread for blocking work.
///
/// If a thread frees memory that another thread has allocated, the allocator can use it again when that other thread allocates or
/// ends. Tokio's ten seconds keep about twenty threads alive under load, each with such memory: the peaks of `scripts/abuse` were
/// 623 MB on SQLite and 661 MB on Postgres, and are 317 and 281 MB with this value.
const IDLE_THREAD_LIFETIME: Duration = Duration::from_millis(50);

/// The runtime of the threads of low priority. If it can't be started, computations run on the blocking threads of the caller's
/// runtime.
static THREADS: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    let mut threads = builder();
    // On Linux, the value is that of the thread and not of the process. Without it, small requests wait longer.
    let lower_priority = || {
        let _ = rustix::process::nice(NICE);
    };
    threads.worker_threads(1).thread_name("precis-cpu").on_thread_start(lower_priority).enable_time().build()
});

/// Returns the capacity of the threads: one per core, and as many for clients that have none. A search keeps its thread until it
/// has read the index, so without the further threads it would delay the searches of other clients.
#[must_use]
pub fn thread_capacity() -> Capacity {
    let slots = std::thread::available_parallelism().map_or(1, usize::from);
    Capacity { slots, further_slots: slots, ..Capacity::default() }
}

fn builder() -> Builder {
    let mut builder = Builder::new_multi_thread();
    builder.thread_keep_alive(IDLE_THREAD_LIFETIME);
    builder
}

/// Returns the runtime of the process.
///
/// # Errors
/// If the system can't start its threads.
pub fn main_runtime() -> io::Result<Runtime> {
    builder().enable_all().build()
}

/// Runs a computation on one of the threads. A panic continues in the caller.
pub async fn spawn_cpu<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn(LARGE, work).await
}

/// Runs a computation whose duration grows with `bytes`: on one of the threads if the input [is large](is_large), otherwise at once,
/// before the future is polled. So the future holds the result or a pointer, and not the computation.
pub fn spawn_cpu_if_large<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send {
    if is_large(bytes) { Either::Left(spawn(bytes, work).boxed()) } else { Either::Right(ready(work())) }
}

/// Does the same with a computation that counts the tokens of texts or analyses their words.
pub fn spawn_cpu_to_count<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send {
    spawn_cpu_if_large(bytes.saturating_mul(COST_OF_COUNTING), work)
}

/// Runs a future on the threads. Threads that it starts inherit the priority.
pub async fn spawn_low_priority<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    match &*THREADS {
        Ok(threads) => join(threads.spawn(work)).await,
        Err(_) => work.await,
    }
}

async fn spawn<T: Send + 'static>(cost: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    let permit = capacity::current();
    let thread = permit.thread(cost as u64).await;
    let work = move || {
        // The memory is in use until the computation ends, even if the client disconnects.
        let _permit = permit;
        match thread {
            Some(thread) => interruptible(thread, work),
            None => work(),
        }
    };
    join(match &*THREADS {
        Ok(threads) => threads.spawn_blocking(work),
        Err(_) => spawn_blocking(work),
    })
    .await
}

/// Runs a computation that gives way to other clients at its checkpoints, and releases the thread at its end.
fn interruptible<T>(mut thread: Thread, work: impl FnOnce() -> T) -> T {
    let runtime = Handle::current();
    checkpoint::scope(move || runtime.block_on(thread.give_way()), work)
}

async fn join<T>(task: JoinHandle<T>) -> T {
    task.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

#[must_use]
pub fn is_large(bytes: usize) -> bool {
    bytes > LARGE
}
