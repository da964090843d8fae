//! The embedded store: one process and one file.
//!
//! One transaction writes at a time, and several connections read. SQLite permits only one writer anyway; queueing for the single
//! connection of a pool is fair and never fails with "database is locked". While exchanges hold it, a thread with a connection of its own
//! writes them. Write transactions start with `BEGIN IMMEDIATE`.

use super::append::AppendBatcher;
use super::heads::HeadBatcher;
use super::index_hints::IndexHints;
use super::migrations::{
    self, SELECT_EARLY_SCHEMA_VERSION, SELECT_SCHEMA_VERSION, SchemaVersions, first_tables,
};
use super::values::DbTime;
use super::{ConnectionCounts, DatabaseFacts, StoreError, StoreOptions};
use crate::capacity::{Held, Level, Resource, Turns};
use crate::domain::search::analyzer::Analyzer;
use checkpoints::Checkpoints;
use disk_reserve::DiskReserve;
use heads::HeadReader;
use sqlx::error::DatabaseError;
use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteError, SqliteJournalMode, SqlitePool, SqlitePoolOptions,
    SqliteRow,
};
use sqlx::{ConnectOptions as _, Connection as _, Row as _, Transaction};
use std::fs::{self, OpenOptions};
use std::num::NonZero;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::str::FromStr as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use time::OffsetDateTime;
use tokio::sync::Semaphore;
use traces::Rebuilds;
use write_thread::WriteThread;

mod checkpoints;
mod disk_reserve;
mod exchanges;
mod heads;
mod statements;
mod traces;
mod transactions;
mod write_thread;

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, SqliteArguments>;

pub(super) use exchanges::append_in_transaction;

/// The page cache of a connection that reads, in KiB (SQLite counts them as negative). The system caches the file, too, and ten
/// caches of the default size of 2 MiB take more memory than the sessions that precis caches.
const READER_CACHE: &str = "-512";

/// The page cache of a connection that searches. The inner pages of a table of a million entries fit into it.
const SEARCH_CACHE: &str = "-4096";

/// The settings of each connection that writes.
const PRAGMAS: [(&str, &str); 5] = [
    ("synchronous", "full"),
    ("foreign_keys", "on"),
    ("wal_autocheckpoint", checkpoints::MAX_LOG_PAGES),
    ("temp_store", "memory"),
    // Overwrites deleted content, so that erased data does not stay in the file.
    ("secure_delete", "on"),
];

/// SQLite's code for a full disk.
const FULL: u32 = 13;

/// Returns the largest number of connections that read. Each has a thread, and statements do not wait for anything except the
/// disk, so a few more than the cores can run at a time are enough.
fn max_readers() -> u32 {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    u32::try_from(2 * cores).unwrap_or(u32::MAX).max(4)
}

/// Creates the file if it does not exist, so that only its owner can read the conversations. SQLite gives its log the same
/// permissions. Any error also occurs when SQLite opens the file, and is reported there.
fn create_private(file: &Path) {
    let _ = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
}

/// Time for which a statement waits for another process, such as a backup, that has locked the file for a moment.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns options for a connection to an existing file.
pub(super) fn connect_options(url: &str) -> Result<SqliteConnectOptions, StoreError> {
    const EXPECTED: &str = "expected sqlite://FILE or sqlite:FILE";
    if url.contains(":memory:") || url.contains("mode=memory") {
        return Err(StoreError::Url(
            "an in-memory database is not supported, because each connection would get its own".to_owned(),
        ));
    }
    let parameters = url.split_once('?').map_or("", |(_, parameters)| parameters);
    for name in ["immutable", "vfs"] {
        if parameters.split('&').any(|parameter| parameter.split('=').next() == Some(name)) {
            return Err(StoreError::Url(format!(
                "the parameter {name:?} is not supported, because all connections must use the same locks: remove it"
            )));
        }
    }
    let options = SqliteConnectOptions::from_str(url).map_err(|_| StoreError::Url(EXPECTED.to_owned()))?;
    // SQLite would give each connection a temporary file of its own.
    if options.get_filename().as_os_str().is_empty() {
        return Err(StoreError::Url(format!("{url:?} names no file; {EXPECTED}")));
    }
    Ok(options.busy_timeout(BUSY_TIMEOUT).log_statements(tracing::log::LevelFilter::Off))
}

#[derive(Debug)]
pub struct Sqlite {
    writer: SqlitePool,
    /// The thread of transactions of exchanges. It writes while its caller holds the connection of `writer`.
    write_thread: Arc<WriteThread>,
    readers: SqlitePool,
    /// The connection of the batches of heads. A pool uses its connections in turn, and the caches of another thread are cold.
    head_reader: SqlitePool,
    /// The connection that reads the heads of recently used sessions on the calling thread.
    recent_heads: Arc<HeadReader>,
    /// The connections of searches, as many as these have threads.
    searches: SqlitePool,
    /// Permits for the connections that read.
    read_shares: Resource,
    /// Permits to use or to await the writer: one for each key, so that a key waits behind one transaction of each other key at most.
    write_shares: Arc<Resource>,
    acquire_timeout: Duration,
    search: Option<Analyzer>,
    disk_reserve: DiskReserve,
    checkpoints: Arc<Checkpoints>,
    rebuilds: Rebuilds,
    /// Transactions that remove many rows run one at a time, so that other writers wait for one of them.
    pub(super) removal_turns: Turns,
    /// The turns of copies of sessions in parts, and of what must not run beside them.
    pub(super) copy_turns: Turns,
    pub(super) hints: Arc<IndexHints>,
    pub(super) appends: AppendBatcher,
    pub(super) heads: HeadBatcher,
}

impl Sqlite {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// The URL is invalid, or the file can't be opened.
    pub async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let connect = connect_options(url)?;
        let is_read_only =
            connect.to_url_lossy().query_pairs().any(|pair| pair == ("mode".into(), "ro".into()));
        let connect = connect.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
        let connect = PRAGMAS.iter().fold(connect, |connect, (name, value)| connect.pragma(*name, *value));
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(options.acquire_timeout)
                .test_before_acquire(false)
                .idle_timeout(None)
                .max_lifetime(None)
                // If a commit fails because the disk is full, SQLite ends the transaction by itself. The driver does not
                // notice, and would never begin another transaction on this connection.
                .before_acquire(|connection, _| {
                    let is_free = !connection.is_in_transaction();
                    Box::pin(async move { Ok(is_free) })
                })
        };
        let file = connect.get_filename().to_owned();
        create_private(&file);
        // The writer connects first: it enables the write-ahead log.
        let writer = pool(1).connect_with(connect.clone()).await?;
        let writing = connect.clone();
        let connect = connect.read_only(true).pragma("cache_size", READER_CACHE);
        let connect_reader = connect.clone();
        // Their statements are short, so the work of precis waits for a moment if requests use all of them.
        let max_readers = options.max_connections.clamp(1, max_readers());
        let readers = pool(max_readers).connect_lazy_with(connect.clone());
        let count = |permits: u32| usize::try_from(permits).unwrap_or(usize::MAX);
        let read_shares = Resource::new(Level::Connection, count(max_readers), options.key_share);
        let read_shares = read_shares.with_internal(count((max_readers / 4).max(1)), options.key_share);
        let searches =
            pool(self::max_readers()).connect_lazy_with(connect.pragma("cache_size", SEARCH_CACHE));
        let checkpoints = Checkpoints::start(writing);
        let hints = Arc::<IndexHints>::default();
        let write_thread =
            if is_read_only { WriteThread::default() } else { WriteThread::start(file.clone()) };
        let write_thread = Arc::new(write_thread);
        let write_shares = Arc::new(Resource::new(Level::Connection, Semaphore::MAX_PERMITS, 0.0));
        let turns = exchanges::Writers {
            pool: writer.clone(),
            thread: Arc::clone(&write_thread),
            shares: Arc::clone(&write_shares),
        };
        let appends = exchanges::batcher(turns, &checkpoints, &hints, options.acquire_timeout);
        let head_reader = pool(1).connect_lazy_with(connect_reader);
        let recent_heads = Arc::new(HeadReader::new(file.clone()));
        let heads = heads::batcher(&recent_heads, &head_reader);
        Ok(Self {
            writer,
            write_thread,
            readers,
            head_reader,
            recent_heads,
            searches,
            checkpoints,
            search: options.search,
            disk_reserve: DiskReserve::of(&file),
            rebuilds: Rebuilds::default(),
            read_shares,
            write_shares,
            acquire_timeout: options.acquire_timeout,
            removal_turns: Turns::new(Level::Removal),
            copy_turns: Turns::new(Level::Copy),
            hints,
            appends,
            heads,
        })
    }

    /// Applies the pending migrations. Leaves the schema of a newer release as it is if this release works with it.
    ///
    /// # Errors
    /// The file can't be used, a migration failed, or the schema is newer and this release does not work with it.
    pub async fn migrate(&self, mut migrator: Migrator) -> Result<SchemaVersions, StoreError> {
        let expected = migrations::latest_version(&migrator);
        let (versions, oldest) = self.schema(expected).await?;
        if versions.is_newer() {
            versions.check(oldest)?;
            migrator.set_ignore_missing(true);
        }
        migrator.run(&self.writer).await.map_err(StoreError::Migration)?;
        Ok(SchemaVersions { found: versions.found.max(expected), expected })
    }

    pub(super) async fn check_ready(&self) -> Result<SchemaVersions, StoreError> {
        let (versions, oldest) = self.schema(migrations::latest_version(&migrations::sqlite())).await?;
        versions.check(oldest)
    }

    /// Reads the versions of the schema, and the last migration of the oldest release that works with it. `expected` is the
    /// last migration of this release.
    async fn schema(&self, expected: i64) -> Result<(SchemaVersions, i64), StoreError> {
        const SELECT_SCHEMA_TABLES: &str = "\
            SELECT count(*) FILTER (WHERE name = '_sqlx_migrations') AS migrations,
                count(*) FILTER (WHERE name = 'schema_compatibility') AS compatibility
            FROM sqlite_schema WHERE type = 'table'";
        let tables = sqlx::query(SELECT_SCHEMA_TABLES).fetch_one(&self.readers).await?;
        let (mut found, mut oldest) = (0, 0);
        if tables.try_get::<i64, _>("migrations")? > 0 {
            let query = if tables.try_get::<i64, _>("compatibility")? > 0 {
                sqlx::query(SELECT_SCHEMA_VERSION).bind(expected)
            } else {
                sqlx::query(SELECT_EARLY_SCHEMA_VERSION)
            };
            let row = query.fetch_one(&self.readers).await?;
            (found, oldest) = (row.try_get("version")?, row.try_get("oldest_version")?);
        }
        Ok((SchemaVersions { found, expected }, oldest))
    }

    pub(super) async fn examine(&self) -> Result<DatabaseFacts, StoreError> {
        const GROUP_AND_OTHERS_READ: u32 = 0o044;
        /// Fails if the file is no database.
        const SELECT_FOREIGN_TABLE: &str = concat!(
            "SELECT min(name) AS foreign_table FROM sqlite_schema WHERE type = 'table' AND name IN ",
            first_tables!(),
            " AND NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = '_sqlx_migrations')"
        );
        const SELECT_OBJECTS: &str =
            "SELECT type || ' ' || name FROM sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";
        let tables = sqlx::query(SELECT_FOREIGN_TABLE).fetch_one(&self.readers).await?;
        let objects: Vec<String> = sqlx::query_scalar(SELECT_OBJECTS).fetch_all(&self.readers).await?;
        let file = self.writer.connect_options().get_filename().to_owned();
        let mode = fs::metadata(&file).map_or(0, |file| file.permissions().mode());
        let is_public_file = mode & GROUP_AND_OTHERS_READ != 0;
        Ok(DatabaseFacts {
            time: now(),
            bypasses_row_security: false,
            unprotected_table: None,
            is_public_file,
            can_migrate: true,
            foreign_table: tables.try_get("foreign_table")?,
            inaccessible_table: None,
            missing_object: migrations::missing_object(migrations::SQLITE_OBJECTS, &objects),
        })
    }

    pub(super) fn connection_counts(&self) -> ConnectionCounts {
        let pools =
            [&self.writer, &self.readers, &self.head_reader, &self.searches].map(ConnectionCounts::of);
        ConnectionCounts {
            open: pools.iter().map(|pool| pool.open).sum(),
            idle: pools.iter().map(|pool| pool.idle).sum(),
            max: pools.iter().map(|pool| pool.max).sum(),
        }
    }

    pub(super) async fn close(&self) {
        self.checkpoints.close().await;
        self.searches.close().await;
        self.recent_heads.close();
        self.head_reader.close().await;
        self.readers.close().await;
        self.writer.close().await;
        self.write_thread.close().await;
    }

    pub(super) async fn read(&self, query: Query<'_>) -> Result<Option<SqliteRow>, sqlx::Error> {
        let _held = self.permit(&self.read_shares).await?;
        query.fetch_optional(&self.readers).await
    }

    pub(super) async fn read_all(&self, query: Query<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let _held = self.permit(&self.read_shares).await?;
        query.fetch_all(&self.readers).await
    }

    pub(super) async fn read_all_of_search(&self, query: Query<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        query.fetch_all(&self.searches).await
    }

    /// Runs a statement that writes at most one row, and returns that row. All rows are fetched, because the statement
    /// commits after its last row: an error at that point, such as a full disk, would be lost otherwise.
    pub(super) async fn write_returning(&self, query: Query<'_>) -> Result<Option<SqliteRow>, sqlx::Error> {
        let _held = self.permit(&self.write_shares).await?;
        Ok(query.fetch_all(&self.writer).await?.pop())
    }

    /// Runs a statement that writes, and returns the number of changed rows.
    pub(super) async fn execute(&self, query: Query<'_>) -> Result<u64, sqlx::Error> {
        let _held = self.permit(&self.write_shares).await?;
        Ok(query.execute(&self.writer).await?.rows_affected())
    }

    async fn begin_write(&self) -> Result<(Transaction<'static, sqlx::Sqlite>, Held), sqlx::Error> {
        let held = self.permit(&self.write_shares).await?;
        Ok((self.writer.begin_with("BEGIN IMMEDIATE").await?, held))
    }

    /// Waits for the permit for a connection.
    async fn permit(&self, resource: &Resource) -> Result<Held, sqlx::Error> {
        resource.acquire(1, Some(self.acquire_timeout)).await.map_err(|_| sqlx::Error::PoolTimedOut)
    }
}

/// Returns `true` if a retry may succeed: `BUSY`, `LOCKED`, `READONLY`, `IOERR`, `FULL` and `CANTOPEN`, with all their
/// extended codes.
pub(super) fn is_unavailable(error: &dyn DatabaseError) -> bool {
    primary_code(error).is_some_and(|code| matches!(code, 5 | 6 | 8 | 10 | FULL | 14))
}

/// Returns `true` if the disk is full.
pub(super) fn is_disk_full(error: &dyn DatabaseError) -> bool {
    primary_code(error) == Some(FULL)
}

/// Returns `true` if a trigger has rejected a change of a session that is being imported.
pub(super) fn is_session_importing(error: &dyn DatabaseError) -> bool {
    let message = error.try_downcast_ref::<SqliteError>().map(DatabaseError::message);
    message.is_some_and(|message| message == "session-importing")
}

/// Returns the error code of SQLite without its extension.
pub(super) fn primary_code(error: &dyn DatabaseError) -> Option<u32> {
    let code: u32 = error.try_downcast_ref::<SqliteError>()?.code()?.parse().ok()?;
    Some(code & 0xff)
}

/// Returns `true` if a table or a column does not exist. SQLite has no error code for that.
pub(super) fn is_schema_incomplete(error: &dyn DatabaseError) -> bool {
    let message = error.try_downcast_ref::<SqliteError>().map(DatabaseError::message);
    message.is_some_and(|message| {
        ["no such table", "no such column"].iter().any(|prefix| message.starts_with(prefix))
    })
}

/// Returns the time of the store's clock. There is one process, so it is the clock of the process.
pub(super) fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// Returns the time as it is stored.
fn micros(time: OffsetDateTime) -> i64 {
    DbTime(time).micros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::exchange::{Exchange, IdempotencyKey};
    use crate::domain::id::{SessionId, TenantId, UserId};
    use crate::domain::message::{Message, Role};
    use crate::storage::heads::HeadRequest;
    use crate::storage::index_hints::ExchangeTerms;
    use crate::storage::{AppendOutcome, AppendRequest, SessionHead};
    use heads::HeadError;
    use serde_json::json;
    use sqlx::AssertSqlSafe;
    use std::time::Instant;
    use write_thread::WriteError;

    mod plans;

    async fn open(folder: &Path) -> Sqlite {
        let url = format!("sqlite://{}", folder.join("precis.db").display());
        let options = StoreOptions {
            max_connections: 1,
            acquire_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(5),
            search: None,
            key_share: 0.5,
        };
        Sqlite::connect(&url, &options).await.expect("connected")
    }

    /// The options of `.cargo/config.toml`. SQLite does not list the option for `fdatasync`.
    #[tokio::test]
    async fn library_has_no_locks_that_are_common_to_all_connections() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        let options = sqlx::query_scalar("SELECT compile_options FROM pragma_compile_options");
        let options: Vec<String> = options.fetch_all(&store.writer).await.expect("options");
        assert!(options.iter().any(|option| option == "DEFAULT_MEMSTATUS=0"), "{options:?}");
        assert!(options.iter().all(|option| option != "ENABLE_MEMORY_MANAGEMENT"), "{options:?}");
        store.close().await;
    }

    #[tokio::test]
    async fn head_is_the_same_with_and_without_a_thread() {
        const INSERT_SESSION: &str = "\
            INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, cursor_seq, cursor_tokens,
                revision, lease_until, failures, retry_at, last_failure, created_at, updated_at, activity_hour, incarnation)
            VALUES ('default', 'demo', 'ada', '{}', 9, 90, 4, 40, 2, 1000, 3, 2000, 'no answer', 5000, 6000, 0, randomblob(16));
            INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at, incarnation)
            VALUES ('default', 'ada', 7, 'tea', 1, 1, 5000, randomblob(16))";
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        store.migrate(migrations::sqlite()).await.expect("migrated");
        sqlx::raw_sql(INSERT_SESSION).execute(&store.writer).await.expect("inserted");
        let (tenant, session) = (TenantId::default(), SessionId::new("demo".to_owned()).expect("an id"));
        let request = |is_recent| HeadRequest { tenant: tenant.clone(), session: session.clone(), is_recent };
        let head = store.heads.run(request(false)).await.expect("read").expect("a session");
        let is_same = |read: Option<SessionHead>| {
            read.is_some_and(|read| SessionHead { now: head.now, ..read } == head)
        };
        let none =
            HeadRequest { session: SessionId::new("none".to_owned()).expect("an id"), ..request(true) };
        let read = store.recent_heads.read(&[request(true), none]).expect("read");
        assert_eq!(read.into_iter().map(is_same).collect::<Vec<_>>(), [true, false]);
        let log = folder.path().join("precis.db-wal");
        assert!(log.exists());
        store.recent_heads.close();
        assert!(matches!(store.recent_heads.read(&[request(true)]), Err(HeadError::Closed)));
        assert!(is_same(store.heads.run(request(true)).await.expect("read")));
        // Batches of recent sessions use no connection of a pool.
        let other = open(folder.path()).await;
        other.head_reader.close().await;
        assert!(is_same(other.heads.run(request(true)).await.expect("read")));
        assert!(other.heads.run(request(false)).await.is_err());
        other.close().await;
        // A folder can't be opened as a file.
        let folder = HeadReader::new(folder.path().to_owned());
        assert!(matches!(folder.read(&[request(true)]), Err(HeadError::Sqlite(_))));
        store.close().await;
        assert!(!log.exists(), "a connection is open");
    }

    #[tokio::test]
    async fn exchanges_are_the_same_with_and_without_the_thread() {
        const SELECT_STORED: &str = "\
            SELECT total_changes() AS changes, (SELECT json_group_array(json_array(session_id, seq, role, tool_call_ids, tokens, message, created_at - (SELECT min(created_at) FROM messages) < 60000000)) FROM messages)
                || (SELECT json_group_array(json_array(session_id, last_seq, tokens, stored_bytes, user_id, metadata, indexed_seq, activity_hour = updated_at / 3600000000)) FROM sessions)
                || (SELECT json_group_array(json_array(session_id, key, hex(fingerprint), first_seq, last_seq, has_user)) FROM idempotency_keys)
                || (SELECT json_group_array(json_array(messages, bytes, json_extract(entries, '$[0][0]', '$[0][4]'))) FROM search_recent)
                AS stored";
        let mut stored = Vec::new();
        for with_thread in [true, false] {
            let folder = tempfile::tempdir().expect("a folder");
            let store = open(folder.path()).await;
            store.migrate(migrations::sqlite()).await.expect("migrated");
            sqlx::query("INSERT INTO search_analyzer (id, version) VALUES (1, $1)")
                .bind(Analyzer::default().version())
                .execute(&store.writer)
                .await
                .expect("an analyzer");
            if !with_thread {
                store.write_thread.close().await;
            }
            let writers = exchanges::Writers {
                pool: store.writer.clone(),
                thread: Arc::clone(&store.write_thread),
                shares: Arc::clone(&store.write_shares),
            };
            let read = async || {
                let row = sqlx::query(SELECT_STORED).fetch_one(&store.writer).await.expect("read");
                (row.get::<i64, _>("changes"), row.get::<String, _>("stored"))
            };
            let append = async |requests: &[(&str, Option<&str>, Option<&str>)]| {
                let requests: Vec<_> =
                    requests.iter().map(|(session, user, key)| exchange(session, *user, *key)).collect();
                let outcomes = exchanges::append_all(&writers, &store.hints, &Arc::new(requests)).await;
                let outcome = |outcome| match outcome {
                    Some(AppendOutcome::Appended(stored)) => {
                        Some((stored.first_seq, stored.last_seq, stored.replayed))
                    }
                    Some(AppendOutcome::UserMismatch) => None,
                    other => panic!("{other:?}"),
                };
                outcomes.expect("appended").into_iter().map(outcome).collect::<Vec<_>>()
            };
            let (before, _) = read().await;
            let new = [("a", Some("ada"), None), ("b", None, Some("one")), ("c", None, None)];
            assert_eq!(append(&new).await, [Some((1, 2, false)); 3]);
            let more =
                [("a", Some("bob"), None), ("b", None, Some("two")), ("c", None, None), ("c", None, None)];
            assert_eq!(
                append(&more).await,
                [None, Some((3, 4, false)), Some((3, 4, false)), Some((5, 6, false))]
            );
            let follow = async |last_seq| {
                let mut request = exchange("c", None, None);
                let expected = Exchange { expected_last_seq: Some(last_seq), ..(*request.exchange).clone() };
                request.exchange = Arc::new(expected);
                exchanges::append_all(&writers, &store.hints, &Arc::new(vec![request]))
                    .await
                    .expect("an outcome")
                    .pop()
                    .flatten()
            };
            assert!(
                matches!(follow(6).await, Some(AppendOutcome::Appended(stored)) if stored.first_seq == 7)
            );
            let mismatch = follow(6).await;
            assert!(matches!(mismatch, Some(AppendOutcome::LastSeqMismatch { last_seq: 8 })), "{mismatch:?}");
            let known = [("b", None, Some("one")), ("b", Some("eve"), Some("three")), ("d", None, None)];
            assert_eq!(append(&known).await, [Some((1, 2, true)), Some((5, 6, false)), Some((1, 2, false))]);
            // Two users of a new session, and a key that occurs twice, take two rounds.
            let rounds = [
                ("e", Some("ada"), None),
                ("e", Some("bob"), None),
                ("f", None, Some("k")),
                ("f", None, Some("k")),
            ];
            assert_eq!(
                append(&rounds).await,
                [Some((1, 2, false)), None, Some((1, 2, false)), Some((1, 2, true))]
            );
            let (after, of_exchanges) = read().await;
            assert_eq!(before == after, with_thread, "the connection of the pool has written");
            stored.push(of_exchanges);
            store.close().await;
        }
        assert_eq!(stored.first(), stored.last());
        assert!(stored.iter().all(|stored| stored.contains("ruser hello")), "{stored:?}");
    }

    /// Returns a request with two messages and their terms.
    fn exchange(session: &str, user: Option<&str>, key: Option<&str>) -> AppendRequest {
        let exchange = Exchange {
            messages: vec![(Message::text(Role::User, "hello; $1\0"), 3); 2],
            user_id: user.map(|user| UserId::new(user.to_owned()).expect("an id")),
            metadata: Some(json!({"session": session}).to_string()),
            ..Exchange::default()
        };
        let key = key.map(|key| IdempotencyKey { key: key.to_owned(), fingerprint: vec![7] });
        let session = SessionId::new(session.to_owned()).expect("an id");
        let terms = ExchangeTerms {
            analyzer: Analyzer::default(),
            of_messages: vec!["ruser hello".to_owned(), "ruser 1".to_owned()],
        };
        let request = AppendRequest::new(&TenantId::default(), &session, exchange, key);
        AppendRequest { terms: Some(terms), ..request }
    }

    #[tokio::test]
    async fn thread_writes_whole_transactions_or_nothing_and_does_not_wait() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        store.migrate(migrations::sqlite()).await.expect("migrated");
        let insert_and = |is_valid: fn() -> rusqlite::Result<bool>| {
            store.write_thread.write(move |transaction| {
                transaction.execute("INSERT INTO worker_leases (worker) VALUES ('test')", ())?;
                Ok(((), is_valid()?))
            })
        };
        let count = async || {
            let leases =
                sqlx::query_scalar::<_, i64>("SELECT count(*) FROM worker_leases WHERE worker = 'test'");
            leases.fetch_one(&store.writer).await.expect("read")
        };
        assert!(matches!(insert_and(|| Ok(false)).await, Ok(())));
        assert_eq!(count().await, 0);
        let failed = insert_and(|| Err(rusqlite::Error::InvalidQuery)).await;
        assert!(matches!(failed, Err(WriteError::Sqlite(rusqlite::Error::InvalidQuery))));
        assert_eq!(count().await, 0);
        assert!(matches!(
            insert_and(|| panic!("a failed test of a panic")).await,
            Err(WriteError::NoConnection)
        ));
        assert_eq!(count().await, 0);
        let other = store.begin_write().await.expect("begun");
        let begun = Instant::now();
        assert!(matches!(insert_and(|| Ok(true)).await, Err(WriteError::Sqlite(_))));
        assert!(begun.elapsed() < BUSY_TIMEOUT);
        other.0.rollback().await.expect("rolled back");
        assert_eq!(count().await, 0);
        assert!(matches!(insert_and(|| Ok(true)).await, Ok(())));
        assert_eq!(count().await, 1);
        store.close().await;
        assert!(matches!(insert_and(|| Ok(true)).await, Err(WriteError::NoConnection)));
        assert!(!folder.path().join("precis.db-wal").exists(), "a connection is open");
    }

    #[tokio::test]
    async fn connections_that_write_have_the_same_settings() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        // Numbers of the settings as SQLite documents them.
        for ((name, value), expected) in PRAGMAS.iter().zip([2, 1, 8000, 2, 1]) {
            let of_thread = store.write_thread.write(|transaction| {
                Ok((transaction.pragma_query_value(None, name, |row| row.get::<_, i64>(0))?, true))
            });
            assert_eq!(of_thread.await.expect("read"), expected, "{name} = {value}");
            let of_pool = sqlx::query_scalar(AssertSqlSafe(format!("PRAGMA {name}")));
            let of_pool: i64 = of_pool.fetch_one(&store.writer).await.expect("read");
            assert_eq!(of_pool, expected, "{name} = {value}");
        }
        store.close().await;
    }

    #[tokio::test]
    async fn only_the_owner_can_read_the_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(folder.path()).await;
        store.migrate(migrations::sqlite()).await.expect("migrated");
        let mut files = 0;
        for entry in folder.path().read_dir().expect("readable") {
            let entry = entry.expect("an entry");
            let mode = entry.metadata().expect("metadata").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{:?}", entry.path());
            files += 1;
        }
        assert!(
            files >= 3,
            "the database, its log, the index of the log; if the disk has space, the reserve for erasures"
        );
        store.close().await;
    }
}
