//! Work that takes the processor for long, off the threads that serve requests.

/// Reading, counting and analysing more bytes than this takes milliseconds.
const LARGE: usize = 64 * 1024;

/// Does work on a thread of its own kind. A panic in it goes on in whoever waits for it.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Does work whose duration grows with `bytes`: at once if they [are few](is_large), as [`run`] does otherwise.
pub async fn sized<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if is_large(bytes) { run(work).await } else { work() }
}

/// Whether work on so many bytes has to be off the threads that serve requests.
#[must_use]
pub fn is_large(bytes: usize) -> bool {
    bytes > LARGE
}
