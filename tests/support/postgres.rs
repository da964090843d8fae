//! A separate Postgres database for each test, cloned from a template with the migrated schema.
//!
//! The owner is a role without privileges, as in production: row-level security does not apply to superusers, so tests would
//! not notice a missing policy.
//!
//! Migrating takes much longer than cloning, so the first test on a server creates the template. Any number of test
//! binaries and processes can share the server.

#![cfg(test)]

use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor};
use std::path::Path;
use uuid::Uuid;

/// Key of the advisory lock that is held while a template is created. The number is arbitrary.
const TEMPLATE_LOCK: i64 = 0x7072_6563_6973;

/// Name and password of the role that owns the databases.
const ROLE: &str = "precis_test";

const ROLE_EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)";
const DATABASE_EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
const TAKE_LOCK: &str = "SELECT pg_advisory_lock($1)";
const TERMINATE_CONNECTIONS: &str =
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";

/// A database that is dropped together with this value.
#[derive(Debug)]
pub(crate) struct TestDatabase {
    server: PgConnectOptions,
    name: String,
}

impl TestDatabase {
    /// Creates a database on the server at `PRECIS_TEST_POSTGRES`. `migrate` gets the URL of an empty database and creates
    /// the schema. Tests with the same `schema` name share the result while `migrations/postgres` is unchanged.
    pub(crate) async fn create(schema: &str, migrate: impl AsyncFnOnce(String)) -> Self {
        let url = std::env::var("PRECIS_TEST_POSTGRES").expect(
            "PRECIS_TEST_POSTGRES is not set: run `scripts/test`, or `scripts/postgres cargo test …`, which start a \
             Postgres server for the tests",
        );
        let server: PgConnectOptions = url.parse().expect("PRECIS_TEST_POSTGRES is a Postgres URL");
        let mut connection = server.connect().await.expect("the server of PRECIS_TEST_POSTGRES answers");
        let template = template(&server, &mut connection, schema, migrate).await;
        // No lock is needed: a database can be copied concurrently if there is no connection to it.
        let name = format!("precis_test_{}", Uuid::new_v4().simple());
        execute(&mut connection, format!("CREATE DATABASE {name} TEMPLATE {template} OWNER {ROLE}")).await;
        connection.close().await.expect("the connection closes");
        Self { server, name }
    }

    /// Returns the URL of the database for its owner.
    pub(crate) fn url(&self) -> String {
        url(&owner(&self.server), &self.name)
    }

    /// Returns the URL of the database for the superuser, who bypasses row-level security.
    pub(crate) fn admin_url(&self) -> String {
        url(&self.server, &self.name)
    }
}

/// Drops the database. Errors are only printed: the server is temporary, and a failed test must show its own message.
impl Drop for TestDatabase {
    fn drop(&mut self) {
        let server = self.server.clone();
        let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // The runtime of the test cannot be used in `drop`, and may be gone already.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut connection = server.connect().await?;
                connection.execute(AssertSqlSafe(drop)).await?;
                connection.close().await
            })
        });
        match thread.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("{} was not dropped: {error}", self.name),
            Err(_) => eprintln!("{} was not dropped", self.name),
        }
    }
}

/// Returns the name of the template. Creates the template if the server has none for these migrations.
async fn template(
    server: &PgConnectOptions,
    connection: &mut PgConnection,
    schema: &str,
    migrate: impl AsyncFnOnce(String),
) -> String {
    let name = format!("precis_template_{}", fingerprint(schema));
    if exists(connection, &name).await {
        return name;
    }
    // The lock ends with its connection, even if `migrate` panics.
    let mut lock = server.connect().await.expect("the server answers");
    sqlx::query(TAKE_LOCK).bind(TEMPLATE_LOCK).execute(&mut lock).await.expect("the lock can be taken");
    if !exists(connection, &name).await {
        let role_exists: bool = sqlx::query_scalar(ROLE_EXISTS)
            .bind(ROLE)
            .fetch_one(&mut *connection)
            .await
            .expect("roles can be listed");
        if !role_exists {
            execute(connection, format!("CREATE ROLE {ROLE} LOGIN PASSWORD '{ROLE}'")).await;
        }
        // The template is renamed when it is complete, so an existing template can be used without the lock.
        let draft = format!("{name}_draft");
        execute(connection, format!("DROP DATABASE IF EXISTS {draft} WITH (FORCE)")).await;
        execute(connection, format!("CREATE DATABASE {draft} OWNER {ROLE}")).await;
        migrate(url(&owner(server), &draft)).await;
        // A database with connections cannot be copied, so new ones are forbidden and those left by a pool are terminated.
        execute(connection, format!("ALTER DATABASE {draft} ALLOW_CONNECTIONS false")).await;
        sqlx::query(TERMINATE_CONNECTIONS)
            .bind(&draft)
            .execute(&mut *connection)
            .await
            .expect("connections can be ended");
        execute(connection, format!("ALTER DATABASE {draft} RENAME TO {name}")).await;
    }
    lock.close().await.expect("the connection closes");
    name
}

/// Returns a hash of the schema name and the migrations. Changed migrations get a new template on a long-lived server.
fn fingerprint(schema: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/postgres");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .map(|entries| entries.map(|entry| entry.expect("the folder can be read").path()).collect())
        .unwrap_or_default();
    files.sort();
    let mut hash = Sha256::new();
    hash.update(schema);
    for file in files {
        let text = std::fs::read(&file).expect("a migration can be read");
        // The length separates the text of a file from the next name.
        hash.update(format!("\0{}\0{}\0", file.display(), text.len()));
        hash.update(text);
    }
    hash.finalize().iter().take(8).fold(String::new(), |name, byte| format!("{name}{byte:02x}"))
}

fn owner(server: &PgConnectOptions) -> PgConnectOptions {
    server.clone().username(ROLE).password(ROLE)
}

fn url(server: &PgConnectOptions, database: &str) -> String {
    server.clone().database(database).to_url_lossy().into()
}

async fn exists(connection: &mut PgConnection, database: &str) -> bool {
    sqlx::query_scalar(DATABASE_EXISTS)
        .bind(database)
        .fetch_one(connection)
        .await
        .expect("databases can be listed")
}

/// Executes a statement on databases or roles. Such statements take no parameters; all names in them are generated here.
async fn execute(connection: &mut PgConnection, statement: String) {
    let result = connection.execute(AssertSqlSafe(statement.clone())).await;
    result.unwrap_or_else(|error| panic!("{statement}: {error}"));
}
