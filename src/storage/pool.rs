//! A Postgres connection pool that tolerates servers that restart, fail over or stop answering.
//!
//! A pool notices a broken connection only when it uses it. A ping before each use would cost 14 % of the throughput.
//! Instead, a connection is pinged if it was idle for so long that the server may have restarted, or if another connection
//! failed recently. Every statement has a timeout: a host that disappears sends no error, and would block its connections
//! until TCP gives up after about 15 minutes.

use super::StoreError;
use crate::capacity::{Held, Level, Resource};
use backon::{BackoffBuilder as _, ExponentialBuilder};
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
use tokio::time::{sleep, timeout};

/// No server restarts within this time. With ten connections it causes at most a hundred pings per second.
const MAX_IDLE_WITHOUT_PING: Duration = Duration::from_millis(100);
/// After a failure, also of a ping, every connection is pinged for this long: connections that were in use during the
/// failure return to the pool later, look recently used, and may be broken too.
const PING_AFTER_FAILURE: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// The buffers of a connection keep the size of its largest statement. After a large statement, every connection that returns
/// to the pool within this time shrinks them: shrinking them always would cost a part of each statement.
const SHRINK_AFTER_LARGE_STATEMENT: Duration = Duration::from_secs(10);
/// Attempts of an operation on a lost connection. The connection of a retry can fail after its ping, too.
const MAX_ATTEMPTS: usize = 3;
/// A transaction is repeated after so many deadlocks. The first delay is up to twice as long, the others double. The server takes a second
/// to notice a deadlock.
const MAX_DEADLOCKS: usize = 5;
const DEADLOCK_DELAY: Duration = Duration::from_millis(20);

/// A batcher returns its connection to the pool when it was idle for this long.
const MAX_KEPT_IDLE: Duration = Duration::from_millis(20);
/// A batcher that is never idle takes another connection after this time, so that the pool can replace old ones and shrink the buffers
/// of large ones.
const MAX_KEPT: Duration = Duration::from_secs(5);
/// In a smaller pool, batchers keep no connections: they and a few large statements could take all of them.
const MIN_CONNECTIONS_TO_KEEP: u32 = 6;

/// A connection pool. It can be used like a `&PgPool`.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    pool: PgPool,
    /// Permits for connections, divided between keys. Batches need none, because each batcher uses one connection.
    shares: Arc<Resource>,
    /// The connection of a batcher between its batches.
    kept: Option<Arc<Mutex<Kept>>>,
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

/// A connection that is kept between statements.
///
/// The pool uses its connections in turn, so that each statement finds another process of the server, whose part of the processor's
/// caches is cold. Heads of 8 sessions take 24 instead of 40 µs of the server's CPU time per session on one connection.
#[derive(Debug)]
struct Kept {
    connection: Option<Acquired>,
    used_at: Instant,
    /// `true` while a task waits to return the connection.
    has_release: bool,
}

/// A connection of the pool.
#[derive(Debug)]
struct Acquired {
    connection: PoolConnection<Postgres>,
    since: Instant,
    held: Held,
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
        let last_large_statement = LastEvent::default();
        let observed = last_large_statement.clone();
        let options = options.after_release(move |connection, _| {
            if observed.is_within(SHRINK_AFTER_LARGE_STATEMENT) {
                connection.shrink_buffers();
            }
            Box::pin(ready(Ok(true)))
        });
        let pool = options.connect_lazy_with(connect);
        Self { pool, shares, kept: None, statement_timeout, last_failure, last_large_statement }
    }

    /// Records that the buffers of a connection have grown.
    pub(super) fn record_large_statement(&self) {
        self.last_large_statement.record();
    }

    pub(super) fn statement_timeout(&self) -> Duration {
        self.statement_timeout
    }

    /// Returns the same pool for a batcher, which keeps its connection between batches.
    pub(super) fn keeping(&self) -> Self {
        let has_enough = self.pool.options().get_max_connections() >= MIN_CONNECTIONS_TO_KEEP;
        let kept = has_enough.then(|| {
            Arc::new(Mutex::new(Kept { connection: None, used_at: Instant::now(), has_release: false }))
        });
        Self { kept, ..self.clone() }
    }

    /// Runs `operation` on a connection, within the statement timeout. A connection that fails, or whose operation is
    /// cancelled, is closed: see [`Self::begin_with`].
    pub(super) async fn with_connection<T>(
        &self,
        operation: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let limit = self.statement_timeout;
        let Acquired { connection, since, held } = match self.take_kept() {
            Some(kept) => kept,
            None => self.acquire().await?,
        };
        let mut guard = CloseIfCancelled { connection: None };
        let connection = guard.connection.insert(connection);
        let result = timeout(limit, operation(connection)).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into())
        });
        if let Some(mut connection) = guard.connection.take() {
            match &result {
                Ok(_) => self.keep(Acquired { connection, since, held }),
                Err(error) if is_connection_broken(error) => {
                    self.last_failure.record();
                    connection.close_on_drop();
                }
                Err(_) => {}
            }
        }
        result
    }

    /// Waits for the permit for a connection.
    async fn permit(&self) -> Result<Held, Error> {
        let wait = self.pool.options().get_acquire_timeout();
        self.shares.acquire(1, Some(wait)).await.map_err(|_| Error::PoolTimedOut)
    }

    /// Takes a connection from the pool, or opens one.
    async fn acquire(&self) -> Result<Acquired, Error> {
        let held = self.permit().await?;
        Ok(Acquired { connection: self.pool.acquire().await?, since: Instant::now(), held })
    }

    /// Takes the kept connection, except if it would have to be pinged.
    fn take_kept(&self) -> Option<Acquired> {
        let mut kept = self.kept.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let acquired = kept.connection.take()?;
        let is_usable = kept.used_at.elapsed() < MAX_IDLE_WITHOUT_PING
            && acquired.since.elapsed() < MAX_KEPT
            && !self.last_failure.is_within(PING_AFTER_FAILURE)
            && !self.pool.is_closed();
        is_usable.then_some(acquired)
    }

    /// Keeps a connection of a batcher, and returns any other one to the pool.
    fn keep(&self, acquired: Acquired) {
        // A request that runs without the batch returns the connection with its permit.
        let is_kept = acquired.held.permits() == 0 && !self.pool.is_closed();
        let Some(kept) = self.kept.as_ref().filter(|_| is_kept) else { return };
        let mut slot = kept.lock().unwrap_or_else(PoisonError::into_inner);
        slot.used_at = Instant::now();
        slot.connection = Some(acquired);
        if !slot.has_release {
            slot.has_release = true;
            tokio::spawn(release_when_idle(Arc::clone(kept)));
        }
    }

    /// Begins a transaction. If the caller is cancelled, for example because its client has disconnected, the driver does
    /// not notice that the transaction has begun, and the next statement on the connection would run in it and never be
    /// committed. Therefore the beginning runs in a task of its own, and the transaction is rolled back after it.
    pub(super) async fn begin_with(
        &self,
        sql: impl SqlSafeStr,
    ) -> Result<(Transaction<'static, Postgres>, Held), Error> {
        let mut held = self.permit().await?;
        let permits = held.detach();
        let (pool, sql) = (self.pool.clone(), sql.into_sql_str());
        let begun = tokio::spawn(async move { (pool.begin_with(sql).await, permits) });
        let (transaction, permits) = begun.await.map_err(|_| Error::WorkerCrashed)?;
        held.attach(permits);
        Ok((transaction?, held))
    }
}

/// Returns the permits for the connections of a pool: some are for the work of precis itself, and two for batchers if they keep connections.
fn shares(connections: u32, key_share: f64) -> Resource {
    let internal = (connections / 5).max(1);
    let kept = if connections >= MIN_CONNECTIONS_TO_KEEP { 2 } else { 0 };
    let [requests, internal] = [connections.saturating_sub(internal + kept), internal];
    let count = |permits: u32| usize::try_from(permits).unwrap_or(usize::MAX);
    Resource::new(Level::Connection, count(requests), key_share).with_internal(count(internal), key_share)
}

/// Returns a kept connection to the pool when its batcher has not used it for a while.
async fn release_when_idle(kept: Arc<Mutex<Kept>>) {
    loop {
        sleep(MAX_KEPT_IDLE).await;
        let mut slot = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.used_at.elapsed() >= MAX_KEPT_IDLE {
            slot.has_release = false;
            slot.connection = None;
            return;
        }
    }
}

/// A connection that is closed if its operation does not finish.
struct CloseIfCancelled {
    /// `None` after the operation has finished.
    connection: Option<PoolConnection<Postgres>>,
}

impl Drop for CloseIfCancelled {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.close_on_drop();
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
