//! Checkpoints of the write-ahead log beside the writer.
//!
//! A checkpoint copies the changed pages of the log into the database. SQLite lets the commit do it that makes the log long enough, and
//! all other writers wait. Here, a connection of its own copies most pages while exchanges are stored, and leaves the rest to a
//! commit: only a commit can begin the log again, and only if no other commit was added in the meantime.

use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::{Mutex, Notify};
use tokio::time::sleep;

/// Length of the log, in pages of 4 KiB, from which a commit does a checkpoint. A longer log needs fewer of them, and takes more space.
pub(super) const MAX_LOG_PAGES: &str = "8000";

/// Exchanges between two checkpoints of the task. A batch of 30 exchanges changes about 100 pages.
const EXCHANGES: usize = 1000;

/// A task that does checkpoints, and the number of exchanges since the last one.
#[derive(Debug)]
pub(super) struct Checkpoints {
    exchanges: AtomicUsize,
    due: Notify,
    /// Held during a checkpoint, because a second one at the same time fails.
    pub(super) turn: Mutex<()>,
    pool: SqlitePool,
}

impl Checkpoints {
    /// Starts the task, which ends when the pool is closed.
    pub(super) fn start(options: SqliteConnectOptions) -> Arc<Self> {
        let pool = SqlitePoolOptions::new().max_connections(1).idle_timeout(None).max_lifetime(None);
        let pool = pool.connect_lazy_with(options);
        let checkpoints =
            Arc::new(Self { exchanges: AtomicUsize::new(0), due: Notify::new(), turn: Mutex::new(()), pool });
        let of_task = Arc::clone(&checkpoints);
        tokio::spawn(async move { of_task.run().await });
        checkpoints
    }

    /// Counts exchanges that were stored.
    pub(super) fn count(&self, exchanges: usize) {
        if self.exchanges.fetch_add(exchanges, Ordering::Relaxed) + exchanges >= EXCHANGES {
            self.exchanges.store(0, Ordering::Relaxed);
            self.due.notify_one();
        }
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
        self.due.notify_one();
    }

    async fn run(&self) {
        // Waits neither for readers nor for the writer, and skips the pages that readers still need.
        const CHECKPOINT: &str = "PRAGMA wal_checkpoint(PASSIVE)";
        while !self.pool.is_closed() {
            self.due.notified().await;
            let pool = self.pool.clone();
            let turn = self.turn.lock().await;
            let begun = Instant::now();
            if let Err(error) = sqlx::query(CHECKPOINT).execute(&pool).await {
                tracing::debug!(%error, "a checkpoint failed; a commit will do it");
            }
            drop(turn);
            // On a slow disk, commits need a time without a checkpoint of the task, to do theirs and to begin the log again.
            sleep(begun.elapsed()).await;
        }
    }
}
