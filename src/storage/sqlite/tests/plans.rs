//! Query plans on SQLite with large tables: the work of a call must not grow with the tables. The tests compare the number of
//! steps of the virtual machine, not the text of the plans. For Postgres see `tests/conformance/postgres_plans.rs`.

use crate::domain::search::analyzer::Analyzer;
use crate::storage::{Store, StoreOptions};
use sqlx::{AssertSqlSafe, SqlitePool};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use store_calls::{CALLS, Dialect, Filled};
use tempfile::TempDir;

#[path = "../../../../tests/support/store_calls.rs"]
mod store_calls;

/// Sizes of the databases to compare.
const FEW: i64 = 512;
const MANY: i64 = 4 * FEW;

const DIALECT: Dialect = Dialect {
    numbers: "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 9 * SIZE) SELECT n FROM n",
    time: ("(", ")"),
    terms: (
        "INSERT INTO search_terms (rowid, terms) SELECT m.id, ",
        " FROM scopes AS s JOIN messages AS m USING (tenant_id, session_id)",
    ),
    uuid: "randomblob(16)",
    hash: "zeroblob(32)",
};

/// A store, and a counter of the steps of its connections.
struct Measured {
    store: Store,
    writer: SqlitePool,
    database: Filled,
    steps: Arc<AtomicU64>,
    _folder: TempDir,
}

impl Measured {
    async fn filled(size: i64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            max_connections: 1,
            acquire_timeout: Duration::from_secs(20),
            statement_timeout: Duration::from_secs(30),
            search: Some(Analyzer::default()),
            key_share: 0.5,
        };
        let url = format!("sqlite://{}", folder.path().join("precis.db").display());
        let store = Store::connect(&url, &options).await.unwrap();
        store.migrate().await.unwrap();
        let pools =
            store.sqlite().map(|database| [database.readers.clone(), database.writer.clone()]).unwrap();
        let writer = pools[1].clone();
        let fill = AssertSqlSafe(store_calls::fill(DIALECT, size));
        sqlx::raw_sql(fill).execute(&writer).await.unwrap();
        let steps = Arc::new(AtomicU64::new(0));
        let mut connections = Vec::new();
        for pool in &pools {
            for _ in 0..pool.options().get_max_connections() {
                connections.push(pool.acquire().await.unwrap());
            }
        }
        for connection in &mut connections {
            let counted = Arc::clone(&steps);
            connection.lock_handle().await.unwrap().set_progress_handler(1, move || {
                counted.fetch_add(1, Ordering::Relaxed);
                true
            });
        }
        drop(connections);
        Self { store, writer, database: Filled::new(size), steps, _folder: folder }
    }

    /// Runs a call. Returns the number of results and of steps.
    async fn run(&self, what: &str) -> (usize, u64) {
        let before = self.steps.load(Ordering::Relaxed);
        let found = store_calls::call(&self.store, &self.database, what).await;
        (found, self.steps.load(Ordering::Relaxed) - before)
    }
}

/// Returns a text if a call takes more steps on the larger database.
async fn growth(few: &Measured, many: &Measured, what: &str, expected: usize) -> Option<String> {
    let ((found_few, few), (found_many, many)) = (few.run(what).await, many.run(what).await);
    assert_eq!((found_few, found_many), (expected, expected), "{what}");
    assert!(few > 5, "{what}: {few} steps are too few for the call");
    // A page of the list of sessions reads the hours that it touches to their end: up to 1.3 times as many steps, depending
    // on the minute of the test. A scan takes four times as many.
    (many * 5 > few * 8).then(|| format!("{what}: {many} steps, but {few} with a quarter of the rows"))
}

#[tokio::test]
async fn steps_on_sqlite_do_not_grow_with_the_tables() {
    let (few, many) = (Measured::filled(FEW).await, Measured::filled(MANY).await);
    let mut failures = Vec::new();
    for &(what, expected) in CALLS {
        failures.extend(growth(&few, &many, what, expected).await);
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The measurement notices if an index is missing.
#[tokio::test]
async fn steps_on_sqlite_grow_without_an_index() {
    /// Without the index of running imports, which is read when a process starts.
    const INDEXES: &str = "SELECT name FROM sqlite_schema
        WHERE type = 'index' AND sql IS NOT NULL AND name <> 'sessions_by_import'
        ORDER BY name";
    let calls = [
        ("api_keys_by_tenant", "api_keys of a tenant"),
        ("consolidation_records_by_revision", "take_lease, record_failure"),
        ("idempotency_keys_by_time", "append_exchange, new key"),
        ("sessions_by_activity", "sessions"),
        ("sessions_by_branch_age", "retention_candidates that are branches"),
        ("sessions_by_language", "languages"),
        ("sessions_by_lineage", "redact_message"),
        ("sessions_by_origin", "erase_session"),
        ("sessions_by_own_expiry", "retention_candidates with a period"),
        ("sessions_by_user", "sessions of a user"),
    ];
    let (few, many) = (Measured::filled(FEW).await, Measured::filled(MANY).await);
    let indexes: Vec<String> = sqlx::query_scalar(INDEXES).fetch_all(&few.writer).await.unwrap();
    assert_eq!(indexes, calls.map(|(index, _)| index));
    for (index, what) in calls {
        for measured in [&few, &many] {
            let drop = AssertSqlSafe(format!("DROP INDEX {index}"));
            sqlx::raw_sql(drop).execute(&measured.writer).await.unwrap();
        }
        let expected = CALLS.iter().find(|(name, _)| *name == what).unwrap().1;
        assert!(growth(&few, &many, what, expected).await.is_some(), "{what} without {index}");
    }
}
