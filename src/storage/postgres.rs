//! The driver of Postgres: connections, transactions and migrations.
//!
//! A statement that concerns a tenant runs in a transaction that sets the tenant, so that row-level security restricts it to the
//! rows of that tenant, in addition to its own condition. No statement depends on the state of a connection after its
//! transaction, so a transaction pooler works if it supports prepared statements (`PgBouncer` 1.21 or later).

use super::migrations::{self, SELECT_SCHEMA_VERSION, first_tables};
use super::pool::{Connections, OpenTransaction, timed_out};
use super::{DatabaseFacts, StoreError, StoreOptions};
use crate::domain::id::TenantId;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgConnection, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _, SqlSafeStr as _, SqlStr};
use std::fmt::Write as _;
use std::io;
use std::str::FromStr as _;

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, PgArguments>;

#[derive(Clone, Debug)]
pub(super) struct Postgres {
    pub(super) pool: Connections,
}

/// The beginning of a transaction, and settings of the planner in addition to those of all transactions.
#[derive(Clone, Copy)]
pub(super) struct Beginning {
    begin: &'static str,
    settings: &'static str,
}

impl Beginning {
    const fn with(settings: &'static str) -> Self {
        Self { begin: "BEGIN", settings }
    }

    pub(super) const PLAIN: Self = Self::with("");
    /// A plan from a time with few rows would later read all of them.
    pub(super) const EXCHANGE: Self = Self::with(", set_config('enable_seqscan', 'off', true)");
    /// The exchanges of a batch do not wait for the lock of one session.
    pub(super) const BATCH: Self =
        Self::with(", set_config('enable_seqscan', 'off', true), set_config('lock_timeout', '20ms', true)");
    /// All statements read the same state.
    pub(super) const SNAPSHOT: Self =
        Self { begin: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", settings: "" };
    /// Each plan is made for the words of a search, of which some are in most messages.
    pub(super) const SEARCH: Self = Self::with(", set_config('plan_cache_mode', 'force_custom_plan', true)");
    const INDEX_ORDER: Self = Self::with(", set_config('enable_sort', 'off', true)");
}

const SELECT_FACTS: &str =
    "SELECT rolsuper OR rolbypassrls AS bypasses, now() AS now FROM pg_roles WHERE rolname = current_user";

impl Postgres {
    /// Creates the pool without connecting.
    ///
    /// # Errors
    /// The URL is invalid.
    pub(super) fn connect(url: &str, options: &StoreOptions) -> Result<Self, StoreError> {
        let connect = PgConnectOptions::from_str(url)
            .map_err(|_| StoreError::Url("expected postgres://user:password@host:port/database".to_owned()))?
            .application_name("precis")
            // Some poolers reject startup parameters that they don't know.
            .extra_float_digits(None)
            .log_statements(tracing::log::LevelFilter::Off);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout);
        Ok(Self { pool: Connections::new(pool, connect, options.statement_timeout, options.key_share) })
    }

    /// Applies the pending migrations, and returns the last one.
    ///
    /// # Errors
    /// The database is unavailable, a migration failed, or the schema is newer.
    pub(super) async fn migrate(&self, mut migrator: Migrator) -> Result<i64, StoreError> {
        /// Lets one replica migrate at a time. The number is arbitrary, but must not be used by other programs.
        const LOCK_MIGRATIONS: &str = "SELECT pg_advisory_xact_lock(8102097361971999)";
        self.probe_connection().await.map_err(StoreError::Unavailable)?;
        // The migrator's own lock is bound to a connection, which a transaction pooler may hand to another client.
        migrator.set_locking(false);
        let mut transaction = self.pool.begin_with("BEGIN").await?;
        sqlx::query(LOCK_MIGRATIONS).execute(transaction.connection()).await?;
        let (found, _) = read_schema(transaction.connection()).await?;
        migrations::check_not_newer(found, &migrator)?;
        migrator.run_direct(None, transaction.connection(), false).await.map_err(StoreError::Migration)?;
        let row = sqlx::query(SELECT_FACTS).fetch_one(transaction.connection()).await?;
        if row.try_get("bypasses")? {
            tracing::warn!(
                "the database role is a superuser or has BYPASSRLS, so row-level security does not apply to it; use a \
                 separate role for precis"
            );
        }
        transaction.end("COMMIT").await?;
        Ok(migrations::latest_version(&migrator))
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
                        OR tablename <> '_sqlx_migrations' AND NOT (
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
        let objects: Vec<String> = sqlx::query_scalar(SELECT_OBJECTS).fetch_all(&*self.pool).await?;
        let row = sqlx::query(SELECT_FACTS).fetch_one(&*self.pool).await?;
        let unprotected_table = sqlx::query_scalar(SELECT_UNPROTECTED_TABLE).fetch_one(&*self.pool).await?;
        let tables = sqlx::query(SELECT_TABLES).fetch_one(&*self.pool).await?;
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

    pub(super) async fn check_ready(&self) -> Result<(), StoreError> {
        let schema = self.pool.with_connection(async |connection| read_schema(&mut *connection).await);
        // A readiness probe needs an answer within the acquire timeout, even if a connection hangs.
        let limit = self.pool.options().get_acquire_timeout();
        let (found, is_read_only) =
            tokio::time::timeout(limit, schema).await.map_err(|_| timed_out(limit))??;
        if is_read_only {
            let error = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the server is read-only");
            return Err(StoreError::Unavailable(error.into()));
        }
        migrations::check_version(found, &migrations::postgres())
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    /// Begins a transaction of a tenant, or of none.
    pub(super) async fn begin(
        &self,
        tenant: Option<&TenantId>,
        beginning: Beginning,
    ) -> Result<OpenTransaction, sqlx::Error> {
        self.pool.begin_with(begin(tenant, beginning)).await
    }

    /// Reads all rows, in a transaction of the tenant if there is one. The transaction is rolled back without waiting.
    pub(super) async fn read_all(
        &self,
        tenant: Option<&TenantId>,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.read_all_with(tenant, Beginning::PLAIN, query).await
    }

    /// Reads all rows, as [`Self::read_all`]. The plan does not sort all rows; sorting rows with the same first key is possible.
    pub(super) async fn read_all_in_index_order(
        &self,
        tenant: &TenantId,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.read_all_with(Some(tenant), Beginning::INDEX_ORDER, query).await
    }

    async fn read_all_with(
        &self,
        tenant: Option<&TenantId>,
        beginning: Beginning,
        query: Query<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.pool
            .with_connection(async |connection| {
                if tenant.is_none() {
                    return query.fetch_all(&mut **connection).await;
                }
                let mut transaction = connection.begin_with(begin(tenant, beginning)).await?;
                query.fetch_all(&mut *transaction).await
            })
            .await
    }

    /// Runs a statement that writes, commits, and returns the row of the statement.
    pub(super) async fn write_returning(
        &self,
        tenant: Option<&TenantId>,
        query: Query<'_>,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        self.write(tenant, async |transaction| query.fetch_optional(transaction).await).await
    }

    /// Runs a statement that writes, commits, and returns the number of changed rows.
    pub(super) async fn execute(
        &self,
        tenant: Option<&TenantId>,
        query: Query<'_>,
    ) -> Result<u64, sqlx::Error> {
        self.write(tenant, async |transaction| Ok(query.execute(transaction).await?.rows_affected())).await
    }

    async fn write<T>(
        &self,
        tenant: Option<&TenantId>,
        write: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        self.pool
            .with_connection(async |connection| {
                let mut transaction = connection.begin_with(begin(tenant, Beginning::PLAIN)).await?;
                let written = write(&mut transaction).await?;
                transaction.commit().await?;
                Ok(written)
            })
            .await
    }
}

/// Reads the last migration, 0 if there is none, and `true` if the server is read-only.
async fn read_schema(connection: &mut PgConnection) -> Result<(i64, bool), sqlx::Error> {
    const SELECT_SERVER_STATE: &str = "SELECT to_regclass('_sqlx_migrations') IS NOT NULL AS is_migrated,
        current_setting('transaction_read_only')::boolean AS is_read_only";
    let state = sqlx::query(SELECT_SERVER_STATE).fetch_one(&mut *connection).await?;
    let found = if state.try_get("is_migrated")? {
        sqlx::query(SELECT_SCHEMA_VERSION).fetch_one(connection).await?.try_get("version")?
    } else {
        0
    };
    Ok((found, state.try_get("is_read_only")?))
}

/// Returns the statement that begins a transaction of a tenant, or of none. It is one round trip, so the tenant is part of the
/// text: as hexadecimal digits, which can't end the literal.
///
/// The planner multiplies how common a tenant and how common the id of a session is. If many tenants have a session of that
/// name, it expects up to a million rows for one key. Then it would compile the statement, which takes up to 300 ms, or start
/// parallel workers, which takes 20 ms.
fn begin(tenant: Option<&TenantId>, Beginning { begin, settings }: Beginning) -> SqlStr {
    let mut begin = format!("{begin}; SELECT set_config('precis.tenant', convert_from('\\x");
    for byte in tenant.map_or("", TenantId::as_str).bytes() {
        let _ = write!(begin, "{byte:02x}");
    }
    begin.push_str(
        "', 'UTF8'), true), set_config('jit', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)",
    );
    begin.push_str(settings);
    AssertSqlSafe(begin).into_sql_str()
}
