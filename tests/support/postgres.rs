//! A Postgres database of its own for each test, cloned from a template that holds the migrated schema.
//!
//! Its owner is a role without privileges, as in production: a superuser would walk through row-level security, and no
//! test would notice.
//!
//! Migrating takes much longer than cloning, so the first test on a server does it once for all. Any number of test
//! binaries and processes may share the server. To use it: `#[path = "support/postgres.rs"] mod postgres;`.

#![cfg(test)]

use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor};
use std::path::Path;
use uuid::Uuid;

/// Of the lock that is held while a template is made; any figure that nobody else uses.
const TEMPLATE_LOCK: i64 = 0x7072_6563_6973;

/// The role that owns the databases, and its password, for servers that ask for one.
const ROLE: &str = "precis_test";

const ROLE_EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)";
const EXISTS: &str = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
const LOCK: &str = "SELECT pg_advisory_lock($1)";
const DISCONNECT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";

/// A database that is dropped with this value.
#[derive(Debug)]
pub(crate) struct TestDatabase {
    server: PgConnectOptions,
    name: String,
}

impl TestDatabase {
    /// A new database on the server that `PRECIS_TEST_POSTGRES` names. `schema` says what `migrate` makes of the empty
    /// database whose URL it gets: tests that give the same name share its result, as long as `migrations/postgres`
    /// is unchanged.
    pub(crate) async fn create(schema: &str, migrate: impl AsyncFnOnce(String)) -> Self {
        let url = std::env::var("PRECIS_TEST_POSTGRES").expect(
            "PRECIS_TEST_POSTGRES is not set: run `scripts/test`, or `scripts/postgres cargo test …`, which start a \
             Postgres server for the tests",
        );
        let server: PgConnectOptions = url.parse().expect("PRECIS_TEST_POSTGRES is a Postgres URL");
        let mut connection = server.connect().await.expect("the server of PRECIS_TEST_POSTGRES answers");
        let template = template(&server, &mut connection, schema, migrate).await;
        // Needs no lock: any number of sessions may copy a database at once, as long as none is connected to it.
        let name = format!("precis_test_{}", Uuid::new_v4().simple());
        execute(&mut connection, format!("CREATE DATABASE {name} TEMPLATE {template} OWNER {ROLE}")).await;
        connection.close().await.expect("the connection closes");
        Self { server, name }
    }

    /// The database's URL, as its owner.
    pub(crate) fn url(&self) -> String {
        url(&owner(&self.server), &self.name)
    }

    /// The URL for a look past the service: as the server's superuser, to whom no policy applies.
    pub(crate) fn admin_url(&self) -> String {
        url(&self.server, &self.name)
    }
}

/// Best effort: a database that stays costs a throw-away server nothing, and a failed test must show its own message.
impl Drop for TestDatabase {
    fn drop(&mut self) {
        let server = self.server.clone();
        let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // The test's own runtime can't be waited for from here, and may be gone already.
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

/// The name of the template, which is made first if the server has none for these migrations yet.
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
    // Ends with the connection at the latest, so also if `migrate` panics.
    let mut lock = server.connect().await.expect("the server answers");
    sqlx::query(LOCK).bind(TEMPLATE_LOCK).execute(&mut lock).await.expect("the lock is there in the end");
    if !exists(connection, &name).await {
        let known: bool = sqlx::query_scalar(ROLE_EXISTS)
            .bind(ROLE)
            .fetch_one(&mut *connection)
            .await
            .expect("roles can be listed");
        if !known {
            execute(connection, format!("CREATE ROLE {ROLE} LOGIN PASSWORD '{ROLE}'")).await;
        }
        // Gets its name when it is complete: what exists under that name can be used without the lock.
        let draft = format!("{name}_draft");
        execute(connection, format!("DROP DATABASE IF EXISTS {draft} WITH (FORCE)")).await;
        execute(connection, format!("CREATE DATABASE {draft} OWNER {ROLE}")).await;
        migrate(url(&owner(server), &draft)).await;
        // No new connections, and none that a pool left behind: a database in use can't be copied.
        execute(connection, format!("ALTER DATABASE {draft} ALLOW_CONNECTIONS false")).await;
        sqlx::query(DISCONNECT)
            .bind(&draft)
            .execute(&mut *connection)
            .await
            .expect("connections can be ended");
        execute(connection, format!("ALTER DATABASE {draft} RENAME TO {name}")).await;
    }
    lock.close().await.expect("the connection closes");
    name
}

/// Other migrations, other template: so a server that lives longer than a change stays right.
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
        // With lengths, so that no text can pass for the beginning of the next file.
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
    sqlx::query_scalar(EXISTS).bind(database).fetch_one(connection).await.expect("databases can be listed")
}

/// Statements about databases take no parameters; the names in them are made here.
async fn execute(connection: &mut PgConnection, statement: String) {
    let result = connection.execute(AssertSqlSafe(statement.clone())).await;
    result.unwrap_or_else(|error| panic!("{statement}: {error}"));
}
