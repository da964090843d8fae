//! The store for production. Any number of replicas can share a database.
//!
//! Most methods run one statement in a transaction of its own. If the statement concerns a tenant, the transaction sets it,
//! so that row-level security restricts the statement to the rows of that tenant, in addition to its own condition. Batches
//! of several tenants are calls of SQL functions, which set the tenant before each of their statements. No
//! method depends on the state of a connection after its transaction, so a transaction pooler works if it supports prepared
//! statements (`PgBouncer` 1.21 or later).

use super::append::AppendBatcher;
use super::heads::HeadBatcher;
use super::index_hints::IndexHints;
use super::migrations::{
    self, SELECT_EARLY_SCHEMA_VERSION, SELECT_SCHEMA_VERSION, SchemaVersions, first_tables,
};
use super::pool::Connections;
use super::{DatabaseFacts, StoreError, StoreOptions};
use crate::domain::id::TenantId;
use crate::domain::search::analyzer::Analyzer;
use sqlx::error::DatabaseError;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgDatabaseError, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _, SqlSafeStr as _, SqlStr};
use std::fmt::Write as _;
use std::io;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

mod exchanges;
mod heads;
mod transactions;

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, PgArguments>;

pub(super) use exchanges::append_in_transaction;

#[derive(Debug)]
pub struct Postgres {
    pub(super) pool: Connections,
    search: Option<Analyzer>,
    pub(super) hints: Arc<IndexHints>,
    pub(super) locked: exchanges::LockedSessions,
    pub(super) appends: AppendBatcher,
    pub(super) heads: HeadBatcher,
}

const SELECT_FACTS: &str =
    "SELECT rolsuper OR rolbypassrls AS bypasses, now() AS now FROM pg_roles WHERE rolname = current_user";

/// The error code `lock_not_available`.
pub(super) const LOCK_NOT_AVAILABLE: &str = "55P03";

/// A schema, as a connection sees it.
struct Schema {
    versions: SchemaVersions,
    /// The last migration of the oldest release that works with it.
    oldest: i64,
    is_read_only: bool,
}

impl Postgres {
    /// Creates the pool without connecting.
    ///
    /// # Errors
    /// The URL is invalid.
    pub fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let connect = PgConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("expected postgres://user:password@host:port/database".to_owned()))?
            .application_name("precis")
            // Some poolers reject startup parameters that they don't know.
            .extra_float_digits(None)
            .log_statements(tracing::log::LevelFilter::Off);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout);
        let pool = Connections::new(pool, connect, options.statement_timeout, options.key_share);
        let hints = Arc::<IndexHints>::default();
        let locked = exchanges::LockedSessions::default();
        let appends = exchanges::batcher(&pool, &hints, &locked);
        let heads = heads::batcher(&pool);
        Ok(Self { pool, search: options.search, hints, locked, appends, heads })
    }

    /// Applies the pending migrations. Leaves the schema of a newer release as it is if this release works with it.
    ///
    /// A migration that waits for the lock of a table delays all requests that use the table later, and they could wait for each
    /// other. So it waits for a short time only, and is tried again as a whole.
    ///
    /// # Errors
    /// The database is unavailable, a migration failed, or the schema is newer and this release does not work with it.
    pub async fn migrate(&self, mut migrator: Migrator) -> Result<SchemaVersions, StoreError> {
        const ATTEMPTS: usize = 10;
        const PAUSE: Duration = Duration::from_millis(500);
        self.probe_connection().await.map_err(StoreError::Unavailable)?;
        // The migrator's own lock is bound to a connection, which a transaction pooler may hand to another client.
        migrator.set_locking(false);
        for _ in 1..ATTEMPTS {
            match self.migrate_once(&mut migrator).await {
                Err(StoreError::Migration(error)) if is_lock_timeout(&error) => {
                    tracing::info!("a migration waits for a transaction that uses the same tables");
                    tokio::time::sleep(PAUSE).await;
                }
                migrated => return migrated,
            }
        }
        self.migrate_once(&mut migrator).await
    }

    async fn migrate_once(&self, migrator: &mut Migrator) -> Result<SchemaVersions, StoreError> {
        /// Lets one replica migrate at a time. The number is arbitrary, but must not be used by other programs.
        const LOCK_MIGRATIONS: &str = "SELECT pg_advisory_xact_lock(8102097361971999)";
        /// Shorter than `deadlock_timeout` (1 s by default), so that a deadlock ends the migration and not a request.
        const LIMIT_LOCK_WAITS: &str = "SET LOCAL lock_timeout = '400ms'";
        let (mut transaction, _held) = self.pool.begin_with("BEGIN").await?;
        sqlx::query(LOCK_MIGRATIONS).execute(&mut *transaction).await?;
        sqlx::query(LIMIT_LOCK_WAITS).execute(&mut *transaction).await?;
        let expected = migrations::latest_version(migrator);
        let schema = read_schema(&mut transaction, expected).await?;
        if schema.versions.is_newer() {
            schema.versions.check(schema.oldest)?;
            migrator.set_ignore_missing(true);
        }
        migrator.run_direct(None, &mut *transaction, false).await.map_err(StoreError::Migration)?;
        let row = sqlx::query(SELECT_FACTS).fetch_one(&mut *transaction).await?;
        if row.try_get("bypasses")? {
            tracing::warn!(
                "the database role is a superuser or has BYPASSRLS, so row-level security does not apply to it; use a \
                 separate role for precis"
            );
        }
        transaction.commit().await?;
        Ok(SchemaVersions { found: schema.versions.found.max(expected), expected })
    }

    pub(super) async fn examine(&self) -> Result<DatabaseFacts, StoreError> {
        /// `has_schema_privilege` is null if the role can use no schema.
        const SELECT_TABLES: &str = concat!(
            "SELECT CASE WHEN is_migrated THEN owns_migrations
                    ELSE coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) END AS can_migrate,
                CASE WHEN is_migrated THEN NULL ELSE first_table END AS foreign_table,
                CASE WHEN is_migrated THEN inaccessible_table END AS inaccessible_table
            FROM (
                SELECT count(*) FILTER (WHERE tablename = '_sqlx_migrations') > 0 AS is_migrated,
                    count(*) FILTER (WHERE tablename = '_sqlx_migrations' AND pg_has_role(tableowner, 'USAGE')) > 0
                        AS owns_migrations,
                    min(tablename::text) FILTER (WHERE tablename IN ",
            first_tables!(),
            ") AS first_table,
                    min(tablename::text) FILTER (
                        WHERE NOT has_table_privilege(format('%I.%I', schemaname, tablename), 'SELECT')
                        OR tablename NOT IN ('_sqlx_migrations', 'schema_compatibility') AND NOT (
                            has_table_privilege(format('%I.%I', schemaname, tablename), 'INSERT')
                            AND has_table_privilege(format('%I.%I', schemaname, tablename), 'UPDATE')
                            AND has_table_privilege(format('%I.%I', schemaname, tablename), 'DELETE')
                        )
                    ) AS inaccessible_table
                FROM pg_tables WHERE schemaname = current_schema()
            ) AS tables"
        );
        /// The owner of a table bypasses its policies unless they are forced.
        const SELECT_UNPROTECTED_TABLE: &str = "\
            SELECT min(relname::text) FROM pg_class AS c
            WHERE relnamespace = to_regnamespace(quote_ident(current_schema()))
                AND EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid)
                AND NOT (relrowsecurity AND (relforcerowsecurity OR NOT pg_has_role(relowner, 'USAGE')))";
        /// An index of a constraint is listed as the constraint. The number of arguments tells functions of one name apart.
        const SELECT_OBJECTS: &str = "\
            WITH relations AS (
                SELECT oid, relname, relkind FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(current_schema()))
            )
            SELECT 'table ' || relname FROM relations WHERE relkind IN ('r', 'p')
            UNION ALL SELECT 'index ' || relname FROM relations
            WHERE relkind IN ('i', 'I') AND NOT EXISTS (
                SELECT FROM pg_constraint WHERE conindid = relations.oid AND contype IN ('p', 'u')
            )
            UNION ALL SELECT 'key ' || conname || ' of ' || relname FROM pg_constraint JOIN relations ON relations.oid = conrelid
            WHERE contype IN ('p', 'u')
            UNION ALL SELECT 'policy ' || polname || ' of ' || relname FROM pg_policy JOIN relations ON relations.oid = polrelid
            UNION ALL SELECT 'trigger ' || tgname || ' of ' || relname FROM pg_trigger JOIN relations ON relations.oid = tgrelid
            WHERE NOT tgisinternal
            UNION ALL SELECT 'function ' || proname || ' with ' || pronargs || ' arguments' FROM pg_proc
            WHERE pronamespace = to_regnamespace(quote_ident(current_schema()))";
        self.probe_connection().await.map_err(StoreError::Unavailable)?;
        let objects: Vec<String> = sqlx::query_scalar(SELECT_OBJECTS).fetch_all(&self.pool).await?;
        let row = sqlx::query(SELECT_FACTS).fetch_one(&self.pool).await?;
        let unprotected_table = sqlx::query_scalar(SELECT_UNPROTECTED_TABLE).fetch_one(&self.pool).await?;
        let tables = sqlx::query(SELECT_TABLES).fetch_one(&self.pool).await?;
        Ok(DatabaseFacts {
            time: row.try_get("now")?,
            bypasses_row_security: row.try_get("bypasses")?,
            unprotected_table,
            is_public_file: false,
            can_migrate: tables.try_get("can_migrate")?,
            foreign_table: tables.try_get("foreign_table")?,
            inaccessible_table: tables.try_get("inaccessible_table")?,
            missing_object: migrations::missing_object(migrations::POSTGRES_OBJECTS, &objects),
        })
    }

    /// Connects once to get the real error. The pool would retry until the timeout and then report only the timeout.
    async fn probe_connection(&self) -> Result<(), sqlx::Error> {
        let (options, limit) = (self.pool.connect_options(), self.pool.options().get_acquire_timeout());
        match tokio::time::timeout(limit, PgConnection::connect_with(&options)).await {
            Ok(connection) => connection?.close().await,
            Err(_) => Err(timed_out(limit)),
        }
    }

    pub(super) async fn check_ready(&self) -> Result<SchemaVersions, StoreError> {
        let expected = migrations::latest_version(&migrations::postgres());
        let schema =
            self.pool.with_connection(async |connection| read_schema(&mut *connection, expected).await);
        // A readiness probe needs an answer within the acquire timeout, even if a connection hangs.
        let limit = self.pool.options().get_acquire_timeout();
        let schema = tokio::time::timeout(limit, schema).await.map_err(|_| timed_out(limit))??;
        if schema.is_read_only {
            let error = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the server is read-only");
            return Err(StoreError::Unavailable(error.into()));
        }
        schema.versions.check(schema.oldest)
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    /// Reads all rows, in a transaction of the tenant if there is one. The transaction is rolled back without waiting.
    pub(super) async fn read_all(
        &self,
        tenant: impl Into<Option<&TenantId>>,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let Some(tenant) = tenant.into() else { return query.fetch_all(&self.pool).await };
        let begin = begin(tenant);
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin).await?;
                query.fetch_all(&mut *transaction).await
            })
            .await
    }

    /// Reads all rows, as [`Self::read_all`]. The plan does not sort all rows; sorting rows with the same first key is possible.
    pub(super) async fn read_all_in_index_order(
        &self,
        tenant: &TenantId,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        const DISABLE_SORT: &str = "SELECT set_config('enable_sort', 'off', true)";
        self.read_all_with_settings(tenant, DISABLE_SORT, query).await
    }

    /// Reads all rows under planner settings of the transaction.
    async fn read_all_with_settings(
        &self,
        tenant: &TenantId,
        settings: &'static str,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let begin = begin(tenant);
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin).await?;
                sqlx::query(settings).execute(&mut *transaction).await?;
                query.fetch_all(&mut *transaction).await
            })
            .await
    }

    /// Reads at most one row, as [`Self::read_all`].
    pub(super) async fn read(
        &self,
        tenant: impl Into<Option<&TenantId>>,
        query: Query<'_>,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let Some(tenant) = tenant.into() else { return query.fetch_optional(&self.pool).await };
        let begin = begin(tenant);
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin).await?;
                query.fetch_optional(&mut *transaction).await
            })
            .await
    }

    /// Runs a statement that writes, commits, and returns the row of the statement.
    pub(super) async fn write_returning(
        &self,
        tenant: impl Into<Option<&TenantId>>,
        query: Query<'_>,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let Some(tenant) = tenant.into() else { return query.fetch_optional(&self.pool).await };
        let begin = begin(tenant);
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin).await?;
                let row = query.fetch_optional(&mut *transaction).await?;
                transaction.commit().await?;
                Ok(row)
            })
            .await
    }

    /// Runs a statement that writes, commits, and returns the number of changed rows.
    pub(super) async fn execute(
        &self,
        tenant: impl Into<Option<&TenantId>>,
        query: Query<'_>,
    ) -> Result<u64, sqlx::Error> {
        let Some(tenant) = tenant.into() else {
            return Ok(query.execute(&self.pool).await?.rows_affected());
        };
        let begin = begin(tenant);
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin).await?;
                let result = query.execute(&mut *transaction).await?;
                transaction.commit().await?;
                Ok(result.rows_affected())
            })
            .await
    }
}

/// Reads the schema. `expected` is the last migration of this release.
async fn read_schema(connection: &mut PgConnection, expected: i64) -> Result<Schema, sqlx::Error> {
    const SELECT_SERVER_STATE: &str = "SELECT to_regclass('_sqlx_migrations') IS NOT NULL AS is_migrated,
        to_regclass('schema_compatibility') IS NOT NULL AS has_compatibility,
        current_setting('transaction_read_only')::boolean AS is_read_only";
    let state = sqlx::query(SELECT_SERVER_STATE).fetch_one(&mut *connection).await?;
    let (mut found, mut oldest) = (0, 0);
    if state.try_get("is_migrated")? {
        let query = if state.try_get("has_compatibility")? {
            sqlx::query(SELECT_SCHEMA_VERSION).bind(expected)
        } else {
            sqlx::query(SELECT_EARLY_SCHEMA_VERSION)
        };
        let row = query.fetch_one(connection).await?;
        (found, oldest) = (row.try_get("version")?, row.try_get("oldest_version")?);
    }
    let is_read_only = state.try_get("is_read_only")?;
    Ok(Schema { versions: SchemaVersions { found, expected }, oldest, is_read_only })
}

/// Returns `true` if a migration has waited too long for the lock of a table.
fn is_lock_timeout(error: &MigrateError) -> bool {
    let (MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) = error else {
        return false;
    };
    error.as_database_error().and_then(DatabaseError::code).as_deref() == Some(LOCK_NOT_AVAILABLE)
}

/// Returns the statement that begins a transaction of one tenant. It is one round trip, so the tenant is part of the text:
/// as hexadecimal digits, which can't end the literal.
///
/// The planner multiplies how common a tenant and how common the id of a session is. If many tenants have a session of that
/// name, it expects up to a million rows for one key. Then it would compile the statement, which takes up to 300 ms, or start
/// parallel workers, which takes 20 ms.
fn begin(tenant: &TenantId) -> SqlStr {
    begin_with("BEGIN", tenant, "")
}

/// Returns the statement that begins a transaction of one tenant on the search index. A plan from a time with few pages would later read
/// all of them.
fn begin_index(tenant: &TenantId, is_snapshot: bool) -> SqlStr {
    const SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    begin_with(
        if is_snapshot { SNAPSHOT } else { "BEGIN" },
        tenant,
        ", set_config('enable_seqscan', 'off', true)",
    )
}

fn begin_with(begin: &str, tenant: &TenantId, settings: &str) -> SqlStr {
    let mut begin = format!("{begin}; SELECT set_config('precis.tenant', convert_from('\\x");
    for byte in tenant.as_str().bytes() {
        let _ = write!(begin, "{byte:02x}");
    }
    begin.push_str(
        "', 'UTF8'), true), set_config('jit', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)",
    );
    begin.push_str(settings);
    AssertSqlSafe(begin).into_sql_str()
}

fn timed_out(limit: std::time::Duration) -> sqlx::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}")).into()
}

/// The code of the error that ends a transaction to resolve a deadlock.
pub(super) const DEADLOCK_DETECTED: &str = "40P01";

/// Returns `true` if a retry may succeed: the error is of class 57 (shutting down, cancelled), 53 (out of resources such as
/// disk space), 08 (connection) or 40 (transaction rollback), or is 25006 (read-only server) or 25P03 (idle in transaction
/// for too long).
pub(super) fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let code = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    code.is_some_and(|code| {
        ["57", "53", "08", "40", "25006", "25P03"].iter().any(|class| code.starts_with(class))
    })
}

/// Returns `true` if a table, a column or a function does not exist.
pub(super) fn is_schema_incomplete(error: &dyn DatabaseError) -> bool {
    let code = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::code);
    code.is_some_and(|code| matches!(code, "42P01" | "42703" | "42883"))
}
