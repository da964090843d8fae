//! Runs long computations on blocking threads, so that they do not delay other requests.
//!
//! A computation on behalf of a request waits until its client gets one of the threads for them, of which there are as many
//! as cores ([`capacity`]). So a client with many large requests takes a part of the cores from other clients, and no more.

use crate::capacity;

/// Parsing, tokenizing or analysing more bytes than this takes milliseconds.
const LARGE: usize = 64 * 1024;

/// Runs a computation on a blocking thread. A panic continues in the caller.
pub async fn spawn_cpu<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn(LARGE, work).await
}

/// Runs a computation whose duration grows with `bytes`: on a blocking thread if the input [is large](is_large).
pub async fn spawn_cpu_if_large<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    if is_large(bytes) { spawn(bytes, work).await } else { work() }
}

async fn spawn<T: Send + 'static>(cost: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    let permit = capacity::current();
    let thread = permit.thread(cost as u64).await;
    let result = tokio::task::spawn_blocking(move || {
        // The thread and the memory are in use until the computation ends, even if the client disconnects.
        let _held = (thread, permit);
        work()
    });
    result.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

#[must_use]
pub fn is_large(bytes: usize) -> bool {
    bytes > LARGE
}
