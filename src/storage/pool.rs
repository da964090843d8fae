//! A Postgres connection pool that tolerates servers that restart, fail over or stop answering.
//!
//! A pool notices a broken connection only when it uses it. A ping before each use would cost 14 % of the throughput.
//! Instead, a connection is pinged if it was idle for so long that the server may have restarted, or if another connection
//! failed recently. Every statement has a timeout: a host that disappears sends no error, and would block its connections
//! until TCP gives up after about 15 minutes.

use super::StoreError;
use crate::capacity::{Held, Level, Resource};
use backon::{BackoffBuilder as _, ExponentialBuilder};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{Connection as _, Error, Postgres, SqlSafeStr};
use std::future::{Future, ready};
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// No server restarts within this time. With ten connections it causes at most a hundred pings per second.
const MAX_IDLE_WITHOUT_PING: Duration = Duration::from_millis(100);
/// After a failure, also of a ping, every connection is pinged for this long: connections that were in use during the
/// failure return to the pool later, look recently used, and may be broken too.
const PING_AFTER_FAILURE: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Attempts of an operation on a lost connection. The connection of a retry can fail after its ping, too.
const MAX_ATTEMPTS: usize = 3;
/// A transaction is repeated after so many deadlocks. The first delay is up to twice as long, the others double. The server takes a second
/// to notice a deadlock.
const MAX_DEADLOCKS: usize = 5;
const DEADLOCK_DELAY: Duration = Duration::from_millis(20);

/// A connection pool.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    pool: PgPool,
    /// Permits for connections, divided between keys. Batches belong to no key, so they need none.
    shares: Arc<Resource>,
    statement_timeout: Duration,
    last_failure: LastEvent,
}

/// The time of the last event of a kind.
#[derive(Clone, Debug, Default)]
struct LastEvent(Arc<Mutex<Option<Instant>>>);

impl LastEvent {
    fn record(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn is_within(&self, time: Duration) -> bool {
        let event = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        event.is_some_and(|event| event.elapsed() <= time)
    }
}

impl Deref for Connections {
    type Target = PgPool;

    fn deref(&self) -> &PgPool {
        &self.pool
    }
}

impl Connections {
    /// Creates the pool without connecting.
    pub(super) fn new(
        options: PgPoolOptions,
        connect: PgConnectOptions,
        statement_timeout: Duration,
        key_share: f64,
    ) -> Self {
        let shares = Arc::new(shares(options.get_max_connections(), key_share));
        let last_failure = LastEvent::default();
        let failure = last_failure.clone();
        let options = options.test_before_acquire(false).before_acquire(move |connection, meta| {
            let needs_ping = meta.idle_for >= MAX_IDLE_WITHOUT_PING || failure.is_within(PING_AFTER_FAILURE);
            let failure = failure.clone();
            Box::pin(async move {
                let is_usable =
                    !needs_ping || matches!(timeout(PING_TIMEOUT, connection.ping()).await, Ok(Ok(())));
                if !is_usable {
                    failure.record();
                }
                Ok(is_usable)
            })
        });
        // The buffers of a connection keep the size of its largest statement.
        let options = options.after_release(|connection, _| {
            connection.shrink_buffers();
            Box::pin(ready(Ok(true)))
        });
        let pool = options.connect_lazy_with(connect);
        Self { pool, shares, statement_timeout, last_failure }
    }

    /// Runs the future of a transaction within the statement timeout.
    pub(super) async fn within_statement_timeout<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let limit = self.statement_timeout;
        timeout(limit, transaction).await.unwrap_or_else(|_| Err(timed_out(limit).into()))
    }

    /// Runs `operation` on a connection, within the statement timeout. A connection that fails, or whose operation is
    /// cancelled, is closed.
    pub(super) async fn with_connection<T>(
        &self,
        operation: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let limit = self.statement_timeout;
        let mut used = self.acquire().await?;
        let result =
            timeout(limit, operation(&mut used.connection)).await.unwrap_or_else(|_| Err(timed_out(limit)));
        used.must_close = result.as_ref().is_err_and(is_connection_broken);
        if used.must_close {
            self.last_failure.record();
        }
        result
    }

    /// Begins a transaction by a text of statements.
    pub(super) async fn begin_with(&self, sql: impl SqlSafeStr) -> Result<OpenTransaction, Error> {
        let last_failure = self.last_failure.clone();
        let mut transaction = OpenTransaction { used: self.acquire().await?, last_failure };
        sqlx::raw_sql(sql).execute(transaction.connection()).await?;
        Ok(transaction)
    }

    /// Waits for the permit for a connection, and for the connection.
    async fn acquire(&self) -> Result<UsedConnection, Error> {
        let wait = self.pool.options().get_acquire_timeout();
        let held = self.shares.acquire(1, Some(wait)).await.map_err(|_| Error::PoolTimedOut)?;
        let connection = self.pool.acquire().await?;
        Ok(UsedConnection { connection, must_close: true, _held: held })
    }
}

/// A connection in use, with its permit. If it is dropped before the end of its use, because of an error or because the caller was
/// cancelled, it is closed, which rolls its transaction back: the driver does not know if a statement still runs on it.
#[derive(Debug)]
struct UsedConnection {
    connection: PoolConnection<Postgres>,
    must_close: bool,
    _held: Held,
}

impl Drop for UsedConnection {
    fn drop(&mut self) {
        if self.must_close {
            self.connection.close_on_drop();
        }
    }
}

/// A transaction. If it is dropped before its end, its connection is closed, and may have failed.
#[derive(Debug)]
pub(super) struct OpenTransaction {
    used: UsedConnection,
    last_failure: LastEvent,
}

impl OpenTransaction {
    pub(super) fn connection(&mut self) -> &mut PgConnection {
        &mut self.used.connection
    }

    /// Ends the transaction by `COMMIT` or `ROLLBACK`.
    pub(super) async fn end(mut self, sql: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(sql).execute(self.connection()).await?;
        self.used.must_close = false;
        Ok(())
    }
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        if self.used.must_close {
            self.last_failure.record();
        }
    }
}

/// Returns the permits for the connections of a pool: some are for the work of precis itself, and one for batches of each kind.
fn shares(connections: u32, key_share: f64) -> Resource {
    const BATCHERS: u32 = 2;
    let internal = (connections / 5).max(1);
    let requests = connections.saturating_sub(internal + BATCHERS).max(1);
    let count = |permits: u32| usize::try_from(permits).unwrap_or(usize::MAX);
    Resource::new(Level::Connection, count(requests), key_share).with_internal(count(internal), key_share)
}

/// Returns the error of a statement that takes too long.
pub(super) fn timed_out(limit: Duration) -> Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into()
}

/// Returns `true` if the connection can't be used any more: it is broken, its server is shutting down, or the server is
/// read-only (25006), for example because it was demoted to a standby.
fn is_connection_broken(error: &Error) -> bool {
    match error {
        Error::Io(_) | Error::Tls(_) | Error::Protocol(_) | Error::BeginFailed => true,
        Error::Database(error) => error
            .code()
            .is_some_and(|code| code == "25006" || code.starts_with("57P") || code.starts_with("08")),
        _ => false,
    }
}

/// Returns `true` if the connection failed and the operation may succeed on another one. Timeouts are not retried: the time
/// of the request is used up.
fn is_retryable(error: &StoreError) -> bool {
    let is_timeout =
        |error: &Error| matches!(error, Error::Io(error) if error.kind() == io::ErrorKind::TimedOut);
    matches!(error, StoreError::Unavailable(error) if is_connection_broken(error) && !is_timeout(error))
}

/// Repeats an operation that lost its connection. The operation must be idempotent.
pub(super) async fn retry_on_disconnect<T, F>(operation: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    for _ in 1..MAX_ATTEMPTS {
        match operation().await {
            Err(error) if is_retryable(&error) => {
                tracing::info!(%error, "lost a database connection; retrying on another one");
            }
            result => return result,
        }
    }
    operation().await
}

/// Runs a transaction, and runs it again if Postgres has ended it to resolve a deadlock. Random delays keep transactions that lock the same
/// rows in different orders, as the triggers of erasures do, from ending each other again.
pub(super) async fn retry_on_deadlock<T, F>(transaction: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let delays = ExponentialBuilder::new().with_jitter().with_min_delay(DEADLOCK_DELAY);
    for delay in delays.with_max_times(MAX_DEADLOCKS).build() {
        match transaction().await {
            Err(error) if error.is_deadlock() => {
                tracing::info!(%error, "a transaction was ended by a deadlock; repeating it");
                sleep(delay).await;
            }
            result => return result,
        }
    }
    transaction().await
}
