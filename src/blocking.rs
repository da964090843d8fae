//! Runs long computations on threads of their own, so that they do not delay other requests. The number of computations at a time is limited
//! in total and for each key ([`capacity`]).

use crate::capacity::{self, Held};
use futures_util::FutureExt as _;
use futures_util::future::Either;
use std::future::{Future, ready};
use std::io;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::task::spawn_blocking;

/// Parsing or rendering more bytes than this takes about a millisecond.
const LARGE: usize = 64 * 1024;

/// Counting the tokens of a text, or analysing its words, takes at least as long as parsing so many times its bytes.
pub const COST_OF_COUNTING: usize = 4;

/// Lifetime of an idle thread for blocking work.
///
/// If a thread frees memory that another thread has allocated, the allocator can use it again when that other thread allocates or
/// ends. Tokio's ten seconds keep about twenty threads alive under load, each with such memory, which doubles the peak of the process.
const IDLE_THREAD_LIFETIME: Duration = Duration::from_millis(50);

/// Number of steps of tasks after which a busy thread looks for new data on connections. A step can write a large response, which takes a
/// millisecond: with tokio's 61, a small request waited for 360 ms beside a thousand connections that read such responses.
const EVENT_INTERVAL: u32 = 8;

/// Returns the runtime of the process.
///
/// # Errors
/// If the system can't start its threads.
pub fn main_runtime() -> io::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.thread_keep_alive(IDLE_THREAD_LIFETIME).event_interval(EVENT_INTERVAL).enable_all().build()
}

/// Runs a computation on one of the threads. A panic continues in the caller.
pub async fn spawn_cpu<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let current = capacity::current();
    let mut thread = current.thread().await;
    let permits = thread.as_mut().map(Held::detach);
    let work = move || {
        // Thread and memory are in use until the computation ends, even if the client disconnects.
        let _held = (permits, current);
        work()
    };
    spawn_blocking(work).await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Runs a computation whose duration grows with `bytes`: on one of the threads if the input [is large](is_large), otherwise at once,
/// before the future is polled. So the future holds the result or a pointer, and not the computation.
pub fn spawn_cpu_if_large<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send {
    if is_large(bytes) { Either::Left(spawn_cpu(work).boxed()) } else { Either::Right(ready(work())) }
}

/// Runs a computation that counts the tokens of texts of `bytes`, or analyses their words: see [`spawn_cpu_if_large`].
pub fn spawn_cpu_to_count<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = T> + Send {
    spawn_cpu_if_large(bytes.saturating_mul(COST_OF_COUNTING), work)
}

#[must_use]
pub fn is_large(bytes: usize) -> bool {
    bytes > LARGE
}
