//! A direct database connection for operations that the store does not offer, such as ageing rows or reading all tables.

use crate::support::backend::Backend;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, SqliteConnection};
use std::collections::BTreeSet;
use time::OffsetDateTime;

/// Excludes the tables of the migrations, and those that FTS5 stores the index in: [`files`] shows what is left in them.
const TABLES_OF_SQLITE: &str = "\
    SELECT name FROM sqlite_schema WHERE type = 'table' AND name <> '_sqlx_migrations' AND name NOT LIKE 'sqlite%'
        AND name NOT LIKE 'search_terms\\_%' ESCAPE '\\'
    ORDER BY name";

/// Excludes the tables of the migrations.
const TABLES_OF_POSTGRES: &str = "\
    SELECT tablename::text FROM pg_tables
    WHERE schemaname = 'public' AND tablename <> '_sqlx_migrations' ORDER BY tablename";

/// Tables without data of sessions or users, which erasure does not change.
pub(crate) const TABLES_OF_TENANTS: [&str; 5] =
    ["api_keys", "search_analyzer", "tenants", "token_usage", "worker_leases"];

pub(crate) enum Sql {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
}

/// A row of any table, as text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub(crate) table: String,
    text: String,
}

impl Row {
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns `true` if any column contains the text, including binary columns.
    pub(crate) fn contains(&self, needle: &str) -> bool {
        let hex = needle.bytes().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
        self.text.contains(needle) || self.text.to_lowercase().contains(&hex)
    }
}

impl Sql {
    pub(crate) async fn on(backend: &Backend) -> Self {
        match backend {
            Backend::Sqlite(_) => Self::Sqlite(SqliteConnection::connect(&backend.url()).await.unwrap()),
            Backend::Postgres(database) => {
                // A superuser bypasses the policies, too.
                Self::Postgres(PgConnection::connect(&database.admin_url()).await.unwrap())
            }
        }
    }

    pub(crate) async fn try_run(&mut self, statement: &str) -> Result<(), sqlx::Error> {
        let statement = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
        match self {
            Self::Sqlite(connection) => connection.execute(statement).await.map(|_| ()),
            Self::Postgres(connection) => connection.execute(statement).await.map(|_| ()),
        }
    }

    pub(crate) async fn run(&mut self, statement: &str) {
        self.try_run(statement).await.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }

    /// Returns the error with which the database rejects the statement.
    pub(crate) async fn error(&mut self, statement: &str) -> String {
        let error = self.try_run(statement).await.expect_err(statement);
        error.as_database_error().expect("an error of the database").message().to_owned()
    }

    /// Makes the database reject new rows in which the text of the column matches the pattern.
    pub(crate) async fn reject_rows(&mut self, table: &str, column: &str, pattern: &str) {
        let statement = match self {
            Self::Sqlite(_) => format!(
                "CREATE TRIGGER reject BEFORE INSERT ON {table} WHEN NEW.{column} LIKE '{pattern}'
                 BEGIN SELECT RAISE(ABORT, 'rejected'); END"
            ),
            Self::Postgres(_) => format!(
                "ALTER TABLE {table} ADD CONSTRAINT reject CHECK (CAST({column} AS text) NOT LIKE '{pattern}')"
            ),
        };
        self.run(&statement).await;
    }

    /// Ends the effect of [`Sql::reject_rows`].
    pub(crate) async fn accept_rows(&mut self, table: &str) {
        match self {
            Self::Sqlite(_) => self.run("DROP TRIGGER reject").await,
            Self::Postgres(_) => self.run(&format!("ALTER TABLE {table} DROP CONSTRAINT reject")).await,
        }
    }

    pub(crate) async fn number(&mut self, query: &str) -> i64 {
        let query = AssertSqlSafe(query.to_owned());
        match self {
            Self::Sqlite(connection) => sqlx::query_scalar(query).fetch_one(connection).await.unwrap(),
            Self::Postgres(connection) => sqlx::query_scalar(query).fetch_one(connection).await.unwrap(),
        }
    }

    pub(crate) async fn texts(&mut self, query: &str) -> Vec<String> {
        let query = AssertSqlSafe(query.to_owned());
        match self {
            Self::Sqlite(connection) => sqlx::query_scalar(query).fetch_all(connection).await.unwrap(),
            Self::Postgres(connection) => sqlx::query_scalar(query).fetch_all(connection).await.unwrap(),
        }
    }

    /// Sets the time of the last activity of the sessions with an id. Returns the hour.
    pub(crate) async fn set_activity(&mut self, session: &str, at: OffsetDateTime) -> i64 {
        let (time, hour) = (self.time(at), at.unix_timestamp().div_euclid(3600));
        self.run(&format!(
            "UPDATE sessions SET updated_at = {time}, activity_hour = {hour} WHERE session_id = '{session}'"
        ))
        .await;
        hour
    }

    /// Returns a time as an SQL expression.
    pub(crate) fn time(&self, time: OffsetDateTime) -> String {
        let micros = time.unix_timestamp_nanos() / 1000;
        match self {
            Self::Sqlite(_) => micros.to_string(),
            Self::Postgres(_) => format!("('epoch'::timestamptz + {micros} * interval '1 microsecond')"),
        }
    }

    /// Returns all tables of the schema.
    pub(crate) async fn tables(&mut self) -> Vec<String> {
        let query = if matches!(self, Self::Sqlite(_)) { TABLES_OF_SQLITE } else { TABLES_OF_POSTGRES };
        self.texts(query).await
    }

    /// Returns all tables that erasure must clear.
    pub(crate) async fn erasable(&mut self) -> BTreeSet<String> {
        self.tables().await.into_iter().filter(|table| !TABLES_OF_TENANTS.contains(&table.as_str())).collect()
    }

    /// Returns all rows of all tables, except those of the tenants themselves, from which nothing is removed.
    pub(crate) async fn rows(&mut self) -> Vec<Row> {
        let mut rows = Vec::new();
        let tables = self.tables().await;
        // These tables keep rows after an erasure: names of tenants, and the analyzer of the index.
        let excluded = ["tenants", "search_analyzer"];
        for table in tables.into_iter().filter(|table| !excluded.contains(&table.as_str())) {
            let query = if matches!(self, Self::Sqlite(_)) {
                let columns = format!("SELECT 'quote(' || name || ')' FROM pragma_table_info('{table}')");
                let columns = self.texts(&columns).await.join(" || ',' || ");
                format!("SELECT {columns} FROM {table}")
            } else {
                format!("SELECT row_of::text FROM {table} AS row_of")
            };
            let texts = self.texts(&query).await;
            rows.extend(texts.into_iter().map(|text| Row { table: table.clone(), text }));
        }
        rows.sort();
        rows
    }
}

/// Returns the files of an SQLite database that contain the word.
pub(crate) fn files(backend: &Backend, word: &str) -> Vec<String> {
    let Backend::Sqlite(folder) = backend else { return Vec::new() };
    let paths = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let has_word = |path: &std::path::PathBuf| {
        let bytes = std::fs::read(path).unwrap();
        memchr::memmem::find(&bytes, word.as_bytes()).is_some()
    };
    paths.filter(has_word).map(|path| path.display().to_string()).collect()
}
