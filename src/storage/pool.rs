//! A Postgres connection pool that tolerates servers that restart, fail over or stop answering.
//!
//! A pool notices a broken connection only when it uses it. A ping before each use would cost 14 % of the throughput.
//! Instead, a connection is pinged if it was idle for so long that the server may have restarted, or if another connection
//! failed recently. Every statement has a timeout: a host that disappears sends no error, and would block its connections
//! until TCP gives up after about 15 minutes.

use super::StoreError;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{
    PgConnectOptions, PgPool, PgPoolOptions, PgQueryResult, PgRow, PgStatement, PgTypeInfo,
};
use sqlx::{Connection as _, Either, Error, Execute, Executor, Postgres, SqlSafeStr, SqlStr, Transaction};
use std::future::{Future, ready};
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// No server restarts within this time. With ten connections it causes at most a hundred pings per second.
const MAX_IDLE_WITHOUT_PING: Duration = Duration::from_millis(100);
/// After a failure, also of a ping, every connection is pinged for this long: connections that were in use during the
/// failure return to the pool later, look recently used, and may be broken too.
const PING_AFTER_FAILURE: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// The buffers of a connection keep the size of its largest statement. After a large statement, every connection that returns
/// to the pool within this time shrinks them: shrinking them always would cost a part of each statement.
const SHRINK_AFTER_LARGE_STATEMENT: Duration = Duration::from_secs(10);
/// Attempts of an operation that may be repeated. The connection of a retry can fail after its ping, too.
const MAX_ATTEMPTS: usize = 3;

/// A connection pool. It can be used like a `&PgPool`.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    pool: PgPool,
    statement_timeout: Duration,
    last_failure: LastEvent,
    last_large_statement: LastEvent,
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
    ) -> Self {
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
        let last_large_statement = LastEvent::default();
        let observed = last_large_statement.clone();
        let options = options.after_release(move |connection, _| {
            if observed.is_within(SHRINK_AFTER_LARGE_STATEMENT) {
                connection.shrink_buffers();
            }
            Box::pin(ready(Ok(true)))
        });
        let pool = options.connect_lazy_with(connect);
        Self { pool, statement_timeout, last_failure, last_large_statement }
    }

    /// Records that the buffers of a connection have grown.
    pub(super) fn record_large_statement(&self) {
        self.last_large_statement.record();
    }

    pub(super) fn statement_timeout(&self) -> Duration {
        self.statement_timeout
    }

    /// Runs `operation` on a connection, within the statement timeout. A connection that fails, or whose operation is
    /// cancelled, is closed: see [`Self::begin_with`].
    pub(super) async fn with_connection<T>(
        &self,
        operation: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let limit = self.statement_timeout;
        let mut guard = CloseIfCancelled { connection: self.pool.acquire().await?, is_cancelled: true };
        let result = timeout(limit, operation(&mut guard.connection)).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into())
        });
        guard.is_cancelled = false;
        if result.as_ref().is_err_and(is_connection_broken) {
            self.last_failure.record();
            guard.connection.close_on_drop();
        }
        result
    }

    /// Begins a transaction. If the caller is cancelled, for example because its client has disconnected, the driver does
    /// not notice that the transaction has begun, and the next statement on the connection would run in it and never be
    /// committed. Therefore the beginning runs in a task of its own, and the transaction is rolled back after it.
    pub(super) async fn begin_with(
        &self,
        sql: impl SqlSafeStr,
    ) -> Result<Transaction<'static, Postgres>, Error> {
        let (pool, sql) = (self.pool.clone(), sql.into_sql_str());
        let begun = tokio::spawn(async move { pool.begin_with(sql).await });
        begun.await.map_err(|_| Error::WorkerCrashed)?
    }
}

/// A connection that is closed if its operation does not finish.
struct CloseIfCancelled {
    connection: PoolConnection<Postgres>,
    is_cancelled: bool,
}

impl Drop for CloseIfCancelled {
    fn drop(&mut self) {
        if self.is_cancelled {
            self.connection.close_on_drop();
        }
    }
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

impl<'p> Executor<'p> for &'_ Connections {
    type Database = Postgres;

    /// Fetches all rows before the first one is returned, so that the statement timeout does not include the time of the
    /// reader.
    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>, Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let connections = self.clone();
        let rows = async move {
            connections
                .with_connection(async |connection| {
                    (&mut **connection).fetch_many(query).try_collect::<Vec<_>>().await
                })
                .await
        };
        stream::once(rows).map_ok(|rows| stream::iter(rows.into_iter().map(Ok))).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<PgRow>, Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let connections = self.clone();
        Box::pin(async move {
            connections
                .with_connection(async |connection| (&mut **connection).fetch_optional(query).await)
                .await
        })
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, Result<PgStatement, Error>>
    where
        'p: 'e,
    {
        let connections = self.clone();
        Box::pin(async move {
            connections
                .with_connection(async |connection| (&mut **connection).prepare_with(sql, parameters).await)
                .await
        })
    }
}
