//! Runs long computations on blocking threads, so that they do not delay other requests.

/// Parsing, tokenizing or analysing more bytes than this takes milliseconds.
const LARGE: usize = 64 * 1024;

/// Runs a computation on a blocking thread. A panic continues in the caller.
pub async fn spawn_cpu<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Runs a computation whose duration grows with `bytes`: on a blocking thread if the input [is large](is_large).
pub async fn spawn_cpu_if_large<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    if is_large(bytes) { spawn_cpu(work).await } else { work() }
}

#[must_use]
pub fn is_large(bytes: usize) -> bool {
    bytes > LARGE
}
