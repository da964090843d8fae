//! Reading the heads of sessions on SQLite.
//!
//! Each context of a cached session reads a head. The driver of the pools has a thread for each connection; waking it, and the request
//! again, takes several times as long as the statement. So other connections, of a driver without threads, read heads on the thread of
//! the request. A statement that reads never waits for a writer, and the session was used shortly before, so that its pages are
//! usually in memory.

use super::{READER_CACHE, Sqlite, now};
use crate::domain::id::{SessionId, TenantId};
use crate::domain::session::ConsolidationState;
use crate::storage::values::DbTime;
use crate::storage::{MemoryVersion, SessionHead, StoreError, rows};
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, Row};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const SELECT_SESSION_HEAD: &str = "\
    SELECT s.incarnation, s.last_seq, s.tokens, s.cursor_seq, s.cursor_tokens, s.revision, s.lease_until, s.failures, s.retry_at,
        s.last_failure, s.updated_at, d.incarnation AS memory_incarnation, d.version AS memory_version
    FROM sessions AS s LEFT JOIN memories AS d ON d.tenant_id = s.tenant_id AND d.user_id = s.user_id
    WHERE s.tenant_id = $1 AND s.session_id = $2";

/// The connections that read heads.
#[derive(Debug)]
pub(super) struct HeadReader {
    file: PathBuf,
    /// The connections that are not in use, the last used one at the end; `None` after [`Self::close`]. There are as many as threads have
    /// read a head at the same time.
    idle: Mutex<Option<Vec<Connection>>>,
}

impl HeadReader {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, idle: Mutex::new(Some(Vec::new())) }
    }

    /// Returns the head of a session, or `None` if it does not exist.
    ///
    /// # Errors
    /// The statement failed, or would have to wait for a lock.
    pub(super) fn read(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> rusqlite::Result<Option<SessionHead>> {
        let connection = self.take()?;
        let head = read_head(&connection, tenant, session)?;
        self.give_back(connection);
        Ok(head)
    }

    pub(super) fn take(&self) -> rusqlite::Result<Connection> {
        if let Some(connection) = self.lock().as_mut().and_then(Vec::pop) {
            return Ok(connection);
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.file, flags)?;
        connection.busy_timeout(Duration::ZERO)?;
        connection.pragma_update(None, "cache_size", READER_CACHE)?;
        Ok(connection)
    }

    pub(super) fn give_back(&self, connection: Connection) {
        if let Some(idle) = self.lock().as_mut() {
            idle.push(connection);
        }
    }

    /// Closes the connections, now or after their statement. Later reads use the pool.
    pub(super) fn close(&self) {
        self.lock().take();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Vec<Connection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sqlite {
    /// Returns the head of a session, or `None` if it does not exist.
    pub(in crate::storage) async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        if let Ok(head) = self.heads.read(tenant, session) {
            return Ok(head);
        }
        // A connection of the pool waits for locks, and has the error otherwise.
        let now = now();
        let query = sqlx::query(SELECT_SESSION_HEAD).bind(tenant.as_str()).bind(session.as_str());
        self.read(query).await?.map(|row| rows::session_head(&row, now)).transpose()
    }
}

fn read_head(
    connection: &Connection,
    tenant: &TenantId,
    session: &SessionId,
) -> rusqlite::Result<Option<SessionHead>> {
    let now = now();
    let head = |row: &Row<'_>| {
        // By position: looking up the names takes as long as the statement.
        let (
            incarnation,
            last_seq,
            tokens,
            cursor,
            cursor_tokens,
            revision,
            lease,
            failures,
            retry,
            last_failure,
            updated,
            document,
            version,
        ) = row.try_into()?;
        let time = |time: DbTime| time.0;
        Ok(SessionHead {
            now,
            incarnation,
            last_seq,
            tokens,
            cursor,
            cursor_tokens,
            revision,
            consolidation: ConsolidationState {
                lease_until: Option::map(lease, time),
                failures,
                retry_at: Option::map(retry, time),
                last_failure,
            },
            updated_at: time(updated),
            memory: Option::zip(document, version)
                .map(|(incarnation, version)| MemoryVersion { incarnation, version }),
        })
    };
    let mut statement = connection.prepare_cached(SELECT_SESSION_HEAD)?;
    statement.query_row((tenant.as_str(), session.as_str()), head).optional()
}
