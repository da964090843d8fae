//! A thread that runs whole transactions on SQLite.
//!
//! sqlx reports the end of each statement and each row to the task that runs them, and each report wakes that task. Here, one message starts a
//! transaction, and one returns its result.

use super::PRAGMAS;
use crate::storage::StoreError;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

/// A connection that writes, with its thread. Without a thread, all transactions fail.
#[derive(Default)]
pub(super) struct WriteThread {
    running: Mutex<Option<Running>>,
}

struct Running {
    jobs: mpsc::Sender<Job>,
    thread: JoinHandle<()>,
}

/// The reason for which a transaction was not committed.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    #[error("the thread has ended, does not exist, or can't open the file")]
    NoConnection,
    /// Also if the transaction would have to wait for another one.
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl fmt::Debug for WriteThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteThread").finish_non_exhaustive()
    }
}

impl WriteThread {
    /// Starts the thread. It opens the file for the first transaction, because the file may not exist yet.
    pub(super) fn start(file: PathBuf) -> Self {
        let (jobs, received) = mpsc::channel();
        let builder = thread::Builder::new().name("precis-writer".to_owned());
        let thread = builder.spawn(move || run_jobs(&file, &received)).ok();
        Self { running: Mutex::new(thread.map(|thread| Running { jobs, thread })) }
    }

    /// Runs a function in a transaction, and commits it if the function returns `true`. Returns the other result of the function. After an
    /// error, other connections see nothing of the transaction.
    ///
    /// The caller must hold the connection of the pool that writes: this transaction does not wait for another one.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<(T, bool), WriteError> + Send + 'static,
    ) -> Result<T, WriteError> {
        let (sender, result) = oneshot::channel::<Result<T, WriteError>>();
        let job: Job = Box::new(move |connection| {
            let write = || {
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                let (result, is_valid) = work(&transaction)?;
                // Dropping a transaction rolls it back.
                if is_valid {
                    transaction.commit()?;
                }
                Ok(result)
            };
            // The task may have ended.
            let _ = sender.send(write());
        });
        let sent = self.lock().as_ref().is_some_and(|running| running.jobs.send(job).is_ok());
        if !sent {
            return Err(WriteError::NoConnection);
        }
        result.await.map_err(|_| WriteError::NoConnection)?
    }

    /// Waits for the end of the thread, which closes the connection.
    pub(super) async fn close(&self) {
        let Some(Running { jobs, thread }) = self.lock().take() else { return };
        drop(jobs);
        // Fails only if the thread has panicked.
        let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run_jobs(file: &Path, jobs: &mpsc::Receiver<Job>) {
    let mut connection = None;
    while let Ok(job) = jobs.recv() {
        if connection.is_none() {
            let opened = open(file);
            connection =
                opened.inspect_err(|error| tracing::debug!(%error, "failed to open the database")).ok();
        }
        // Dropping a job reports that there is no connection.
        let Some(open) = &mut connection else { continue };
        // A panic ends the transaction and not the thread.
        let is_done = catch_unwind(AssertUnwindSafe(|| job(open))).is_ok();
        // A connection that could not roll back can't begin another transaction.
        if !is_done || !open.is_autocommit() {
            connection = None;
        }
    }
}

/// Opens the file with the settings of the other connection that writes.
fn open(file: &Path) -> rusqlite::Result<Connection> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.busy_timeout(Duration::ZERO)?;
    for (name, value) in PRAGMAS {
        connection.pragma_update(None, name, value)?;
    }
    Ok(connection)
}
