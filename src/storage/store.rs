//! The store, with its methods for sessions. The conformance suite tests every method on both databases.
//!
//! A method is one intention and one transaction, except that [`Store::revisions`], [`Store::consolidation_records`] and
//! [`Store::reindex`] may run several statements, which are transactions of their own, as do imports and erasures on SQLite. Absence
//! is `Ok(None)`. Times come from the clock of the store (the database server's, if there is one), so the clocks of replicas need
//! not agree.

use super::append::{self, Appends, ExchangeTerms};
use super::heads::{self, HeadBatcher};
use super::postgres::Postgres;
use super::rows::{self, session_columns};
use super::search_index::index_messages;
use super::search_terms::Replaces;
use super::sqlite::Sqlite;
use super::statement::{AnyRow, Database, DbRow as _, Purpose, Sql, Statement, StoreStatement, Transaction};
use super::values::{DbTime, to_i64, user_from_column};
use super::{ConnectionCounts, DatabaseFacts, StoreError, StoreOptions, migrations};
use crate::domain::exchange::{Exchange, IdempotencyKey, PersistedExchange};
use crate::domain::id::{SessionId, TenantId, UserId};
use crate::domain::search::analyzer::Analyzer;
use crate::domain::session::{ConsolidationState, Session};
use futures_util::FutureExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, RwLock};
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// The database behind the service.
#[derive(Debug)]
pub struct Store {
    pub(super) database: Arc<Database>,
    appends: Appends,
    heads: HeadBatcher,
    /// The analyzer of the search index; `None` if search is disabled.
    pub(super) analyzer: RwLock<Option<Analyzer>>,
    /// Messages may have left the search index of SQLite since its last merge.
    pub(super) has_erased_terms: AtomicBool,
}

impl Store {
    /// Connects to a database: see [`super::connect`].
    pub(super) async fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let database = Arc::new(match url.split_once(':') {
            Some(("postgres" | "postgresql", _)) => Database::Postgres(Postgres::connect(url, options)?),
            Some(("sqlite", _)) => Database::Sqlite(Box::new(Sqlite::connect(url, options).await?)),
            _ => return Err(StoreError::Url("must begin with postgres:, postgresql: or sqlite:".to_owned())),
        });
        Ok(Self {
            appends: Appends::new(&database),
            heads: heads::batcher(&database),
            database,
            analyzer: RwLock::new(options.search),
            has_erased_terms: AtomicBool::new(true),
        })
    }

    /// Returns a statement on the rows of one tenant. The tenant is its first parameter.
    pub(super) fn statement<'d>(&'d self, tenant: &'d TenantId, sql: impl Into<Sql>) -> StoreStatement<'d> {
        self.database.statement(tenant, sql)
    }

    /// Returns a statement on tables that are not bound to a tenant.
    pub(super) fn global_statement(&self, sql: impl Into<Sql>) -> StoreStatement<'_> {
        self.database.global_statement(sql)
    }

    /// Begins a transaction that writes.
    pub(super) async fn begin(&self, tenant: &TenantId) -> Result<Transaction, StoreError> {
        self.database.begin(Some(tenant), Purpose::Write).await
    }

    /// Runs the future of a transaction: see [`Database::within_limit`].
    pub(super) async fn within_limit<T>(
        &self,
        transaction: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.database.within_limit(transaction).await
    }

    /// Returns SQLite, if that is the database.
    pub(super) fn sqlite(&self) -> Option<&Sqlite> {
        match &*self.database {
            Database::Sqlite(database) => Some(database),
            Database::Postgres(_) => None,
        }
    }
}

/// Calls the method of the database. The futures are boxed because they are large.
macro_rules! dispatch {
    ($self:ident, $method:ident) => {
        match &*$self.database {
            Database::Postgres(database) => Box::pin(database.$method()).await,
            Database::Sqlite(database) => Box::pin(database.$method()).await,
        }
    };
}

/// Restricts a page, which is the query `$select` with a limit, in bytes: the page ends with the row that exceeds the
/// parameter `$max`, so that it has at least one row. The column `found` is the number of rows without that restriction.
macro_rules! bounded_page_on_postgres {
    ($select:expr, $bytes:literal, $order:literal, $max:literal) => {
        concat!(
            "SELECT * FROM (
                SELECT *, sum(",
            $bytes,
            ") OVER (ORDER BY ",
            $order,
            ") - (",
            $bytes,
            ") AS bytes_before,
                    count(*) OVER () AS found
                FROM (",
            $select,
            ") AS page
            ) AS sized WHERE bytes_before < ",
            $max,
            " ORDER BY ",
            $order
        )
    };
}

/// Restricts a page in the same way. Adds the sizes up without the texts, which SQLite would copy: `$select` selects the keys of
/// the rows and their size as `bytes`, and `$rows` is the table with the condition that finds the row of a key.
macro_rules! bounded_page_on_sqlite {
    ($select:expr, $columns:expr, $rows:literal, $order:literal, $max:literal) => {
        concat!(
            "SELECT ",
            $columns,
            ", found FROM (
                SELECT *, sum(bytes) OVER (ORDER BY ",
            $order,
            ") - bytes AS bytes_before, count(*) OVER () AS found
                FROM (",
            $select,
            ")
            ) AS sized CROSS JOIN ",
            $rows,
            " WHERE bytes_before < ",
            $max,
            " ORDER BY ",
            $order
        )
    };
}

pub(super) use {bounded_page_on_postgres, bounded_page_on_sqlite};

/// Decodes the row, if there is one.
pub(super) fn decode<T>(
    row: Option<AnyRow>,
    decode: impl FnOnce(&AnyRow) -> Result<T, StoreError>,
) -> Result<Option<T>, StoreError> {
    row.map(|row| decode(&row)).transpose()
}

/// Decodes a [bounded page](bounded_page_on_postgres) of at most `limit` items.
pub(super) fn decode_page<T>(
    rows: &[AnyRow],
    limit: i64,
    decode: impl Fn(&AnyRow) -> Result<T, StoreError>,
) -> Result<Page<T>, StoreError> {
    let found = rows.first().map_or(Ok(0), |row| row.field::<i64>("found"))?;
    let limit = usize::try_from(limit).unwrap_or(0);
    let items = rows.iter().take(limit).map(decode).collect::<Result<Vec<_>, _>>()?;
    Ok(Page { has_more: to_i64(items.len()) < found, items })
}

/// Converts a duration to the unit that statements expect.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl Store {
    /// Applies all pending migrations, and returns the last one. Returns an error if the schema is that of a newer release.
    pub async fn migrate(&self) -> Result<i64, StoreError> {
        match &*self.database {
            Database::Postgres(database) => Box::pin(database.migrate(migrations::postgres())).await,
            Database::Sqlite(database) => Box::pin(database.migrate(migrations::sqlite())).await,
        }
    }

    /// Returns an error if the database is unavailable, or if its schema is not the one of this release.
    pub async fn check_ready(&self) -> Result<(), StoreError> {
        dispatch!(self, check_ready)
    }

    /// Connects to the database and returns facts about it, without writing.
    pub async fn examine(&self) -> Result<DatabaseFacts, StoreError> {
        dispatch!(self, examine)
    }

    /// Returns the number of connections. On SQLite, one of them writes.
    #[must_use]
    pub fn connection_counts(&self) -> ConnectionCounts {
        match &*self.database {
            Database::Postgres(database) => ConnectionCounts::of(&database.pool),
            Database::Sqlite(database) => database.connection_counts(),
        }
    }

    /// Closes all connections. Later calls fail.
    pub async fn close(&self) {
        dispatch!(self, close);
    }

    /// Appends the messages of an exchange, and creates the session if it does not exist. `seq` is allocated in the
    /// same transaction, without gaps or duplicates under concurrent writes. Idempotency keys are kept for at least 24
    /// hours.
    ///
    /// Exchanges that are stored at the same time share a transaction. The exchange is stored even if the caller stops
    /// waiting.
    pub async fn append_exchange(&self, request: AppendRequest) -> Result<AppendOutcome, StoreError> {
        /// Other requests can erase the session again and again.
        const MAX_ATTEMPTS: usize = 100;
        let request = append::analyzed(self.analyzer(), request).await;
        for _ in 1..MAX_ATTEMPTS {
            match self.appends.append(request.clone()).await {
                // The process that imported the session has died, or the session is being erased.
                Err(StoreError::SessionImporting)
                    if self.remove_stale_import(&request.tenant, &request.session).boxed().await? => {}
                outcome => return outcome,
            }
        }
        self.appends.append(request).await
    }

    /// Returns the exchange that was appended with an idempotency key, and the fingerprint of its request.
    pub async fn keyed_exchange(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        key: &str,
    ) -> Result<Option<(PersistedExchange, Vec<u8>)>, StoreError> {
        const SELECT_KEYED_EXCHANGE: &str = "\
            SELECT k.fingerprint, k.first_seq, k.last_seq, k.created_at,
                CASE WHEN k.has_user THEN s.user_id ELSE '' END AS user_id
            FROM idempotency_keys AS k
                JOIN sessions AS s ON s.tenant_id = k.tenant_id AND s.session_id = k.session_id
            WHERE k.tenant_id = $1 AND k.session_id = $2 AND k.key = $3 AND s.last_seq > 0";
        let statement = self.statement(tenant, SELECT_KEYED_EXCHANGE).bind(session.as_str()).bind(key);
        decode(statement.read().await?, |row| {
            let user_id = user_from_column(row.field("user_id")?)?;
            Ok((PersistedExchange { user_id, ..rows::keyed_exchange(row)? }, row.field("fingerprint")?))
        })
    }

    /// Returns the state of a session, or `None` before its first exchange.
    pub async fn session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<Session>, StoreError> {
        const SELECT_SESSION: &str = concat!(
            "SELECT ",
            session_columns!(),
            " FROM sessions WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0"
        );
        let statement = self.statement(tenant, SELECT_SESSION).bind(session.as_str());
        decode(statement.read().await?, rows::session)
    }

    /// Returns the owner of a session, also before its first exchange.
    pub async fn session_owner(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<SessionOwner, StoreError> {
        const SELECT_SESSION_OWNER: &str =
            "SELECT user_id, last_seq FROM sessions WHERE tenant_id = $1 AND session_id = $2";
        let statement = self.statement(tenant, SELECT_SESSION_OWNER).bind(session.as_str());
        let Some(row) = statement.read().await? else {
            return Ok(SessionOwner::default());
        };
        let user = user_from_column(row.field("user_id")?)?;
        Ok(SessionOwner { user, exists: row.field::<i64>("last_seq")? > 0 })
    }

    /// Binds a session to a user, unless it is bound already, and returns its user. A session without exchanges does not exist
    /// afterwards either: it only has a user. Of concurrent calls, one binds the session.
    pub async fn bind_session(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
    ) -> Result<UserId, StoreError> {
        match self.within_limit(self.bind(tenant, session, user)).await {
            // The process that imported the session has died.
            Err(StoreError::SessionImporting) if self.remove_stale_import(tenant, session).await? => {
                self.within_limit(self.bind(tenant, session, user)).await
            }
            owner => owner,
        }
    }

    /// Binds a session, unless its import was interrupted.
    pub(super) async fn bind(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        user: &UserId,
    ) -> Result<UserId, StoreError> {
        /// A session that gets its user also gets another incarnation, so that copies without the user become invalid.
        macro_rules! bind_session {
            ($columns:literal, $now:literal, $hour:literal, $value:literal, $random:literal) => {
                concat!(
                    "INSERT INTO sessions AS s (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at,
                        updated_at, activity_hour", $columns, ")
                    VALUES ($1, $2, $3, '{}', 0, 0, ", $now, ", ", $now, ", ", $hour, $value, ")
                    ON CONFLICT (tenant_id, session_id) DO UPDATE SET user_id = excluded.user_id, incarnation = ", $random,
                    " WHERE s.user_id = ''
                    RETURNING last_seq"
                )
            };
        }
        const BIND_SESSION: Sql = Sql {
            postgres: bind_session!(
                "",
                "now()",
                "floor(extract(epoch FROM now()) / 3600)",
                "",
                "gen_random_uuid()"
            ),
            sqlite: bind_session!(
                ", incarnation",
                "$4",
                "$4 / 3600000000",
                ", randomblob(16)",
                "randomblob(16)"
            ),
        };
        let mut transaction = self.begin(tenant).await?;
        let statement = transaction.statement(BIND_SESSION).bind(tenant.as_str()).bind(session.as_str());
        let Some(row) = statement.bind(user.as_str()).bind_now().read().await? else {
            transaction.rollback().await?;
            return Ok(self.session_owner(tenant, session).await?.user.unwrap_or_else(|| user.clone()));
        };
        // The messages are found by the user from now on.
        let last_seq: i64 = row.field("last_seq")?;
        if let Some(analyzer) = self.analyzer().filter(|_| last_seq > 0) {
            let owner = (session, Some(user));
            index_messages(&mut transaction, analyzer, tenant, owner, 1..=last_seq, Replaces::Existing)
                .await?;
        }
        transaction.commit().await?;
        Ok(user.clone())
    }

    /// Returns at most `limit` sessions that match the filter, most recent activity first; fewer if their texts exceed
    /// `max_bytes`.
    pub async fn sessions(
        &self,
        tenant: &TenantId,
        filter: SessionFilter<'_>,
        after: Option<&SessionPosition>,
        limit: i64,
        max_bytes: i64,
    ) -> Result<Page<Session>, StoreError> {
        /// The hour comes first because the index contains the hour, not the time; see the migration. It is compared
        /// even on the first page, so that every plan of the statement starts in the index. It is a parameter because
        /// row-level security keeps Postgres from using the index for anything that is still to be computed.
        macro_rules! from_sessions {
            ($condition:literal) => {
                concat!(
                    " FROM sessions WHERE tenant_id = $1 AND activity_hour <= $2
                        AND ($3 IS NULL OR (updated_at, session_id) < ($3, $4)) AND last_seq > 0 ",
                    $condition,
                    " ORDER BY activity_hour DESC, updated_at DESC, session_id DESC LIMIT $5"
                )
            };
        }
        macro_rules! select_sessions {
            ($condition:literal) => {
                Sql {
                    postgres: bounded_page_on_postgres!(
                        concat!("SELECT activity_hour, ", session_columns!(), from_sessions!($condition)),
                        "octet_length(summary) + octet_length(metadata)",
                        "activity_hour DESC, updated_at DESC, session_id DESC",
                        "$6"
                    ),
                    sqlite: bounded_page_on_sqlite!(
                        concat!(
                            "SELECT activity_hour AS hour, updated_at AS time, session_id AS id,
                                octet_length(summary) + octet_length(metadata) AS bytes",
                            from_sessions!($condition)
                        ),
                        session_columns!(),
                        "sessions ON tenant_id = $1 AND session_id = id",
                        "hour DESC, time DESC, id DESC",
                        "$6"
                    ),
                }
            };
        }
        const SELECT_SESSIONS: Sql = select_sessions!("");
        const SELECT_SESSIONS_OF_USER: Sql = select_sessions!("AND user_id = $7");
        const SELECT_FORKS: Sql = select_sessions!("AND forked_from = $7");
        const SELECT_FORKS_OF_USER: Sql = select_sessions!("AND forked_from = $7 AND user_id = $8");
        let SessionFilter { user, forked_from } = filter;
        let sql = match (forked_from, user) {
            (None, None) => SELECT_SESSIONS,
            (None, Some(_)) => SELECT_SESSIONS_OF_USER,
            (Some(_), None) => SELECT_FORKS,
            (Some(_), Some(_)) => SELECT_FORKS_OF_USER,
        };
        let hour = after.map_or(i64::MAX, |after| after.updated_at.unix_timestamp().div_euclid(3600));
        let statement = self
            .statement(tenant, sql)
            .bind(hour)
            .bind(after.map(|after| DbTime(after.updated_at)))
            .bind(after.map(|after| after.session_id.as_str()))
            // One more session shows if there is another page.
            .bind(limit.saturating_add(1))
            .bind(max_bytes);
        let conditions = [forked_from.map(SessionId::as_str), user.map(UserId::as_str)];
        let statement = conditions.into_iter().flatten().fold(statement, Statement::bind);
        decode_page(&statement.read_all_in_index_order().await?, limit, rows::session)
    }

    /// Replaces the metadata of a session, a JSON object.
    pub async fn set_metadata(
        &self,
        tenant: &TenantId,
        session: &SessionId,
        metadata: &str,
    ) -> Result<Option<Session>, StoreError> {
        const UPDATE_METADATA: &str = concat!(
            "UPDATE sessions SET metadata = $3 WHERE tenant_id = $1 AND session_id = $2 AND last_seq > 0 RETURNING ",
            session_columns!()
        );
        let statement = self.statement(tenant, UPDATE_METADATA).bind(session.as_str()).bind(metadata);
        decode(statement.write_returning().await?, rows::session)
    }

    /// Returns the state of a session that decides if a copy of its context is current, or `None` if the session does
    /// not exist. Sessions that are read at the same time share a statement.
    pub async fn session_head(
        &self,
        tenant: &TenantId,
        session: &SessionId,
    ) -> Result<Option<SessionHead>, StoreError> {
        self.heads.run((tenant.clone(), session.clone())).await
    }
}

/// An exchange to append to a session.
#[derive(Clone, Debug)]
pub struct AppendRequest {
    pub tenant: TenantId,
    pub session: SessionId,
    pub exchange: Arc<Exchange>,
    pub key: Option<IdempotencyKey>,
    /// The incarnation that the session must have, in addition to [`Exchange::expected_last_seq`]. An exchange that names the
    /// user of a session without a user changes the incarnation: bind the session first.
    pub expected_incarnation: Option<Uuid>,
    /// The user of the session if it has none and the exchange names none.
    pub default_user: Option<UserId>,
    /// The store sets it if search is enabled.
    pub terms: Option<ExchangeTerms>,
}

impl AppendRequest {
    #[must_use]
    pub fn new(
        tenant: &TenantId,
        session: &SessionId,
        exchange: Exchange,
        key: Option<IdempotencyKey>,
    ) -> Self {
        let (tenant, session, exchange) = (tenant.clone(), session.clone(), Arc::new(exchange));
        Self { tenant, session, exchange, key, expected_incarnation: None, default_user: None, terms: None }
    }
}

/// The owner of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOwner {
    /// `None` until a request names a user.
    pub user: Option<UserId>,
    /// `true` from the first exchange on.
    pub exists: bool,
}

/// The result of [`Store::append_exchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendOutcome {
    /// The exchange is durable. It may have been stored earlier by a request with the same key.
    Appended(PersistedExchange),
    /// The session belongs to another user. Nothing was written.
    UserMismatch,
    /// The idempotency key was used for another exchange. Nothing was written.
    KeyReused,
    /// The last message of the session is not the expected one. Nothing was written.
    LastSeqMismatch {
        /// The `seq` of the last message; 0 if there is none.
        last_seq: i64,
    },
}

/// The selection and order of a page of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageQuery {
    /// Exclusive lower bound; 0 = none.
    pub after_seq: i64,
    /// Exclusive upper bound; `i64::MAX` = none.
    pub before_seq: i64,
    /// Newest first.
    pub descending: bool,
    /// Largest number of messages.
    pub limit: i64,
    /// The page ends with the message that exceeds this sum of sizes, so that it has at least one message.
    pub max_bytes: i64,
}

/// A page of messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessagePage {
    pub messages: Vec<StoredMessage>,
    /// `true` if further messages follow in the order of the page.
    pub has_more: bool,
}

/// A page of a list. It may end early because its items are large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// `true` if further items follow in the order of the page.
    pub has_more: bool,
}

/// A range of the history, bounded in number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageRange {
    /// Exclusive lower bound.
    pub after_seq: i64,
    /// Inclusive upper bound.
    pub last_seq: i64,
    /// Largest number of messages.
    pub limit: i64,
    /// Largest sum of message sizes. The first message is returned even if it is larger.
    pub max_bytes: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredMessage {
    pub seq: i64,
    pub created_at: OffsetDateTime,
    /// Time at which the content of the message was removed.
    pub redacted_at: Option<OffsetDateTime>,
    /// The JSON of the client without the white space between its tokens, or the redacted message.
    pub json: String,
}

/// The sessions of a list.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionFilter<'a> {
    pub user: Option<&'a UserId>,
    /// The session that the listed ones were forked from, or whose branches they are.
    pub forked_from: Option<&'a SessionId>,
}

/// A position in the list of sessions: the sort key of the last session of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionPosition {
    pub updated_at: OffsetDateTime,
    pub session_id: SessionId,
}

/// The version of a memory document. Documents with the same version have the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryVersion {
    /// Changes if the document is erased and written again.
    pub incarnation: Uuid,
    pub version: i64,
}

/// The part of a session that changes. Texts and messages do not change as long as incarnation, revision and memory
/// version are the same, except that messages are appended: a redaction, too, appends a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionHead {
    /// The moment of the read, by the clock of the store.
    pub now: OffsetDateTime,
    /// Changes if the session is erased and created again, rewound or redacted.
    pub incarnation: Uuid,
    pub last_seq: i64,
    pub tokens: i64,
    pub cursor: i64,
    pub cursor_tokens: i64,
    pub revision: i64,
    pub consolidation: ConsolidationState,
    pub updated_at: OffsetDateTime,
    /// The memory document of the owner; `None` if there is none.
    pub memory: Option<MemoryVersion>,
}
