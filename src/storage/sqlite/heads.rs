//! Reading the heads of sessions on SQLite.
//!
//! Each context of a cached session reads a head. sqlx has a thread for each connection; waking it, and the task of the batch again, takes
//! several times as long as the statement. So rusqlite, which runs a statement on the calling thread, reads the heads of recently used
//! sessions, whose pages are usually in memory. A statement that reads never waits for a writer.

use super::{READER_CACHE, now};
use crate::domain::session::ConsolidationState;
use crate::storage::heads::{self, HeadBatcher, HeadRequest, Heads};
use crate::storage::statement::DbRow as _;
use crate::storage::values::DbTime;
use crate::storage::{MemoryVersion, SessionHead, rows};
use rusqlite::{CachedStatement, Connection, OpenFlags, OptionalExtension as _, Row};
use serde_json::{Value, json};
use sqlx::SqlitePool;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use uuid::Uuid;

/// Selects heads: their columns in the order in which [`read_head`] decodes them, then further columns.
macro_rules! select_heads {
    ($columns:literal, $sessions:literal) => {
        concat!(
            "SELECT s.incarnation, s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens, s.revision, s.lease_until, s.failures,
                s.retry_at, s.last_failure, s.updated_at, d.incarnation AS memory_incarnation, d.version AS memory_version",
            $columns,
            " FROM ",
            $sessions,
            " LEFT JOIN memories AS d ON d.tenant_id = s.tenant_id AND d.user_id = s.user_id"
        )
    };
}

/// Reads the heads of a JSON list of sessions.
const READ_SESSION_HEADS: &str = select_heads!(
    ", w.key AS place",
    "json_each($1) AS w
        CROSS JOIN sessions AS s ON s.tenant_id = w.value ->> 0 AND s.session_id = w.value ->> 1"
);

/// Reads the head of one session.
const READ_SESSION_HEAD: &str =
    concat!(select_heads!("", "sessions AS s"), " WHERE s.tenant_id = $1 AND s.session_id = $2");

/// Returns the batcher. `reader` reads the heads of recently used sessions, and `pool` those of others, and all of a batch if `reader` fails.
pub(super) fn batcher(reader: &Arc<HeadReader>, pool: &SqlitePool) -> HeadBatcher {
    let (reader, pool) = (Arc::clone(reader), pool.clone());
    heads::batcher(move |requests| Box::pin(read_heads(Arc::clone(&reader), pool.clone(), requests)))
}

/// Returns the head of each session, or `None` if it does not exist.
async fn read_heads(reader: Arc<HeadReader>, pool: SqlitePool, requests: &[HeadRequest]) -> Heads {
    if requests.iter().all(|request| request.is_recent) {
        match reader.read(requests) {
            Ok(heads) => return Ok(heads),
            Err(error) => {
                tracing::debug!(%error, "failed to read session heads; a connection of the pool reads them");
            }
        }
    }
    let sessions = requests.iter().map(|request| json!([request.tenant.as_str(), request.session.as_str()]));
    let sessions = sessions.collect::<Value>().to_string();
    let now = now();
    let rows = sqlx::query(READ_SESSION_HEADS).bind(sessions).fetch_all(&pool).await?;
    let mut heads = vec![None; requests.len()];
    for row in &rows {
        let place = usize::try_from(row.field::<i64>("place")?).unwrap_or(usize::MAX);
        if let Some(head) = heads.get_mut(place) {
            *head = Some(rows::session_head(row, now)?);
        }
    }
    Ok(heads)
}

/// A connection that reads heads on the calling thread.
#[derive(Debug)]
pub(super) struct HeadReader {
    file: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// The file may not exist yet.
    Unused,
    Open(Connection),
    Closed,
}

/// The reason for which a connection of the pool must read heads.
#[derive(Debug, thiserror::Error)]
pub(super) enum HeadError {
    #[error("the connection is closed")]
    Closed,
    /// Also if the statement would have to wait for a lock.
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
}

impl HeadReader {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, state: Mutex::new(State::Unused) }
    }

    /// Returns the head of each session, or `None` if it does not exist.
    pub(super) fn read(&self, requests: &[HeadRequest]) -> Result<Vec<Option<SessionHead>>, HeadError> {
        self.with(|connection| {
            let mut statement = connection.prepare_cached(READ_SESSION_HEAD)?;
            requests.iter().map(|request| read_head(&mut statement, request)).collect()
        })
    }

    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, HeadError> {
        let mut state = self.lock();
        if matches!(*state, State::Unused) {
            *state = State::Open(self.open()?);
        }
        let State::Open(connection) = &*state else { return Err(HeadError::Closed) };
        Ok(work(connection)?)
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let flags =
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        let connection = Connection::open_with_flags(&self.file, flags)?;
        connection.busy_timeout(Duration::ZERO)?;
        connection.pragma_update(None, "cache_size", READER_CACHE)?;
        Ok(connection)
    }

    /// Closes the connection. The pool reads from then on.
    pub(super) fn close(&self) {
        *self.lock() = State::Closed;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_head(
    statement: &mut CachedStatement<'_>,
    request: &HeadRequest,
) -> rusqlite::Result<Option<SessionHead>> {
    let now = now();
    // By position: looking up the names of the columns takes as long as the statement.
    let head = |row: &Row<'_>| {
        let time =
            |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<DbTime>>(column)?.map(|time| time.0));
        let memory = row.get::<_, Option<Uuid>>(11)?.zip(row.get(12)?);
        Ok(SessionHead {
            now,
            incarnation: row.get(0)?,
            last_seq: row.get(1)?,
            tokens: row.get(2)?,
            cursor: row.get(3)?,
            cursor_tokens: row.get(4)?,
            revision: row.get(5)?,
            consolidation: ConsolidationState {
                lease_until: time(6)?,
                failures: row.get(7)?,
                retry_at: time(8)?,
                last_failure: row.get(9)?,
            },
            updated_at: row.get::<_, DbTime>(10)?.0,
            memory: memory.map(|(incarnation, version)| MemoryVersion { incarnation, version }),
        })
    };
    statement.query_row((request.tenant.as_str(), request.session.as_str()), head).optional()
}
