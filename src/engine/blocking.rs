//! Work that takes the processor for long, off the threads that serve requests.

/// Reading and counting more bytes than this takes milliseconds.
const LARGE: usize = 64 * 1024;

/// Does work whose duration grows with `bytes`: at once if they are few, on a thread of its own kind otherwise.
pub async fn sized<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes <= LARGE {
        return work();
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
