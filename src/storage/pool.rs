//! Connections to a Postgres server that may restart, fail over or fall silent at any time.
//!
//! A pool learns that a connection is dead only by using it. A ping before each use would cost 14 % of the throughput;
//! here a connection is tested when it has been idle for long enough that the server may have restarted meanwhile, or
//! when another one has failed just now. And no statement is waited for without end: a host that is gone doesn't say so,
//! and would hold connections until TCP gives up, a quarter of an hour later.

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{
    PgConnectOptions, PgPool, PgPoolOptions, PgQueryResult, PgRow, PgStatement, PgTypeInfo,
};
use sqlx::{Connection as _, Either, Error, Execute, Executor, Postgres, SqlStr};
use std::future::Future;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// No server is down and up again within this time. At ten connections it costs a hundred pings a second at most.
const FRESH: Duration = Duration::from_millis(100);
/// For how long after a failure every connection is tested: one that was in use then comes back later, seems fresh, and
/// may be as dead.
const SUSPICION: Duration = Duration::from_secs(1);
/// What a test of a connection may take.
const TEST: Duration = Duration::from_secs(2);

/// A pool of connections. As an executor it is used as `&PgPool` is; what it doesn't do itself is the pool's.
#[derive(Clone, Debug)]
pub(super) struct Connections {
    pool: PgPool,
    statement_timeout: Duration,
    failed: Failed,
}

/// When a connection last failed.
#[derive(Clone, Debug, Default)]
struct Failed(Arc<Mutex<Option<Instant>>>);

impl Failed {
    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn within(&self, time: Duration) -> bool {
        let failed = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_some_and(|failed| failed.elapsed() <= time)
    }
}

impl Deref for Connections {
    type Target = PgPool;

    fn deref(&self) -> &PgPool {
        &self.pool
    }
}

impl Connections {
    /// The first connection is made when it's needed.
    pub(super) fn new(
        options: PgPoolOptions,
        connect: PgConnectOptions,
        statement_timeout: Duration,
    ) -> Self {
        let failed = Failed::default();
        let seen = failed.clone();
        let options = options.test_before_acquire(false).before_acquire(move |connection, meta| {
            let is_fresh = meta.idle_for < FRESH && !seen.within(SUSPICION);
            Box::pin(async move {
                Ok(is_fresh || timeout(TEST, connection.ping()).await.is_ok_and(|pinged| pinged.is_ok()))
            })
        });
        Self { pool: options.connect_lazy_with(connect), statement_timeout, failed }
    }

    /// What `ask` gets from a connection, within the time for a statement. A connection that fails is not used again.
    pub(super) async fn ask<T>(
        &self,
        ask: impl AsyncFnOnce(&mut PoolConnection<Postgres>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let limit = self.statement_timeout;
        let mut connection = self.pool.acquire().await?;
        let asked = timeout(limit, ask(&mut connection)).await;
        let asked = asked.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into())
        });
        if asked.as_ref().is_err_and(is_useless) {
            self.failed.now();
            connection.close_on_drop();
        }
        asked
    }
}

/// Whether the connection is no good any more: it is broken, its server is about to end, or it leads to a server that
/// only reads (25006), such as a primary that has become a standby.
fn is_useless(error: &Error) -> bool {
    match error {
        Error::Io(_) | Error::Tls(_) | Error::Protocol(_) | Error::BeginFailed => true,
        Error::Database(error) => error
            .code()
            .is_some_and(|code| code == "25006" || code.starts_with("57P") || code.starts_with("08")),
        _ => false,
    }
}

/// Whether a statement failed because of its connection, so that it may go better on another one.
fn is_lost(error: &super::StoreError) -> bool {
    matches!(error, super::StoreError::Unavailable(error) if is_useless(error) && !timed_out(error))
}

fn timed_out(error: &Error) -> bool {
    matches!(error, Error::Io(error) if error.kind() == io::ErrorKind::TimedOut)
}

/// How often what may be done twice is tried: a connection may die after its test, too.
const TRIES: usize = 3;

/// Does it again where the connection was lost: for what may be done more than once.
pub(super) async fn again<T, F>(attempt: impl Fn() -> F) -> Result<T, super::StoreError>
where
    F: Future<Output = Result<T, super::StoreError>>,
{
    for _ in 1..TRIES {
        match attempt().await {
            Err(error) if is_lost(&error) => {
                tracing::info!(%error, "a connection was lost; once more, on another one");
            }
            done => return done,
        }
    }
    attempt().await
}

impl<'p> Executor<'p> for &'_ Connections {
    type Database = Postgres;

    /// All rows, then the stream: the time for a statement is not its reader's.
    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>, Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let connections = self.clone();
        let rows = async move {
            connections
                .ask(async |connection| (&mut **connection).fetch_many(query).try_collect::<Vec<_>>().await)
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
            connections.ask(async |connection| (&mut **connection).fetch_optional(query).await).await
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
            connections.ask(async |connection| (&mut **connection).prepare_with(sql, parameters).await).await
        })
    }
}
