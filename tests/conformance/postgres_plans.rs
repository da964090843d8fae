//! Query plans on Postgres with large tables: the work of a call must not grow with the tables. The tests compare the
//! counters of Postgres on databases of different size, not the text of the plans. For SQLite see
//! `src/storage/sqlite/tests/plans.rs`.

use crate::conversation::Conversation;
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::store_calls::{self, CALLS, Dialect, Filled};
use precis::domain::search::analyzer::Analyzer;
use precis::storage::{self, Store, StoreOptions};
use sqlx::{Connection as _, Executor as _, PgConnection};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Sizes of the databases to compare.
const FEW: i64 = 512;
const MANY: i64 = 4 * FEW;

/// The rows and the blocks that were read so far, for each table with its indexes and partitions. Blocks are counted, too,
/// because a condition that does not limit an index scan makes it read more of the index, but not more rows.
const READS: &str = "\
    SELECT regexp_replace(t.relname, '_[0-9]+$', '') || ' ' || sum(
        seq_tup_read + heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)
        + coalesce(toast_blks_read + toast_blks_hit + tidx_blks_read + tidx_blks_hit, 0)
        + (SELECT coalesce(sum(idx_tup_read), 0) FROM pg_stat_user_indexes AS i WHERE i.relid = t.relid)
    )
    FROM pg_stat_user_tables AS t JOIN pg_statio_user_tables USING (relid)
    GROUP BY regexp_replace(t.relname, '_[0-9]+$', '')";

const OTHER_CONNECTIONS: &str = "\
    SELECT pid::text FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";

pub(crate) const DIALECT: Dialect = Dialect {
    numbers: "SELECT generate_series(1, 9 * SIZE::bigint) AS n",
    time: ("('epoch'::timestamptz + interval '1 microsecond' * (", "))"),
    terms: (
        "INSERT INTO search_terms (tenant_id, session_id, seq, micros, terms)
        SELECT m.tenant_id, m.session_id, m.seq, NOW, array_to_tsvector(string_to_array(",
        ", ' ')) FROM scopes AS s JOIN messages AS m USING (tenant_id, session_id)",
    ),
    uuid: "gen_random_uuid()",
    hash: "sha256('x')",
};

/// Vacuuming would count as reading, and makes connections forget their plans.
pub(crate) const DISABLE_AUTOVACUUM: &str = "\
    DO $$
    DECLARE
        name text;
    BEGIN
        FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' LOOP
            EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = off)', name);
        END LOOP;
    END
    $$";

/// Makes the planner expect a hundred million messages, and other rows in proportion. It multiplies the number of rows per
/// page that it finds here with the real number of pages. So it plans as it would in production, where reading a whole
/// table is never cheap, although the tables of the test are small.
const SCALE_STATISTICS: &str = "\
    UPDATE pg_class SET reltuples = reltuples * 1e8 / (SELECT count(*) FROM messages)
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i') AND reltuples > 0";

/// Opens a store with one connection.
pub(crate) async fn connect_once(url: &str) -> Arc<Store> {
    let options = StoreOptions {
        max_connections: 1,
        acquire_timeout: Duration::from_secs(20),
        statement_timeout: Duration::from_secs(30),
        search: Some(Analyzer::default()),
        key_share: 0.5,
    };
    storage::connect(url, &options).await.unwrap()
}

/// A database whose reads are counted.
struct Measured {
    backend: Backend,
    sql: Sql,
    database: Filled,
    /// Connections of stores that stay open.
    open: BTreeSet<String>,
}

impl Measured {
    async fn empty(size: i64) -> Self {
        let backend = Backend::postgres().await;
        let mut sql = Sql::on(&backend).await;
        sql.run(DISABLE_AUTOVACUUM).await;
        Self { backend, sql, database: Filled::new(size), open: BTreeSet::new() }
    }

    async fn filled(size: i64) -> Self {
        Self::empty(size).await.fill_and_analyze().await
    }

    /// Returns a database with the partitions that the documentation recommends for large tables.
    async fn partitioned(size: i64) -> Self {
        let mut measured = Self::empty(size).await;
        let mut owner = PgConnection::connect(&measured.backend.url()).await.unwrap();
        owner.execute(sqlx::raw_sql(include_str!("../../examples/partitions.sql"))).await.unwrap();
        owner.close().await.unwrap();
        assert_eq!(measured.backend.store().await.examine().await.unwrap().missing_object, None);
        measured.sql.run(DISABLE_AUTOVACUUM).await;
        measured.fill_and_analyze().await
    }

    async fn fill_and_analyze(mut self) -> Self {
        self.fill().await;
        self.run_aside(&["VACUUM ANALYZE", SCALE_STATISTICS]).await;
        self
    }

    async fn fill(&mut self) {
        self.run_aside(&[&store_calls::fill(DIALECT, self.database.size)]).await;
    }

    /// Runs statements on a connection of their own: a connection adds its reads to the statistics up to a second later, or
    /// when it is closed.
    async fn run_aside(&mut self, statements: &[&str]) {
        let mut sql = Sql::on(&self.backend).await;
        for statement in statements {
            sql.run(statement).await;
        }
        drop(sql);
        self.await_statistics().await;
    }

    async fn plan_cache_mode(&mut self, mode: &str) {
        let database = self.sql.texts("SELECT current_database()::text").await.remove(0);
        self.sql.run(&format!("ALTER DATABASE {database} SET plan_cache_mode = {mode}")).await;
    }

    async fn connect(&self) -> Arc<Store> {
        connect_once(&self.backend.url()).await
    }

    /// Runs a call and closes the store. Returns the number of results and of the rows
    /// and blocks that the call read.
    async fn run(&mut self, store: Arc<Store>, what: &str) -> Run {
        let before = self.reads().await;
        let found = Box::pin(store_calls::call(&store, &self.database, what)).await;
        store.close().await;
        self.await_statistics().await;
        let mut reads = self.reads().await;
        for (table, reads) in &mut reads {
            *reads -= before[table];
        }
        Run { found, reads }
    }

    async fn reads(&mut self) -> BTreeMap<String, i64> {
        let rows = self.sql.texts(READS).await;
        let rows = rows.iter().map(|row| row.split_once(' ').unwrap());
        rows.map(|(table, reads)| (table.to_owned(), reads.parse().unwrap())).collect()
    }

    /// Waits until all connections except the open ones are closed, because their statistics are complete only then.
    async fn await_statistics(&mut self) {
        let closed = async {
            while !self.other_connections().await.is_subset(&self.open) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let closed = tokio::time::timeout(Duration::from_secs(20), closed).await;
        closed.expect("connections end when the store is closed");
    }

    /// Returns the connections of the stores that stay open from now on.
    async fn keep_open(&mut self) -> BTreeSet<String> {
        let opened = &self.other_connections().await - &self.open;
        self.open.extend(opened.clone());
        opened
    }

    async fn other_connections(&mut self) -> BTreeSet<String> {
        self.sql.texts(OTHER_CONNECTIONS).await.into_iter().collect()
    }
}

/// The result of a call.
struct Run {
    found: usize,
    /// For each table.
    reads: BTreeMap<String, i64>,
}

/// A larger table may need one more level of an index.
const MAX_PERCENT: i64 = 150;

/// Returns the tables of which a call reads more than `max_percent` if they are larger.
fn growth(few: &Run, many: &Run, max_percent: i64) -> Vec<String> {
    let pairs = few.reads.iter().map(|(table, few)| (table, few, many.reads[table]));
    let growing = pairs.filter(|(_, few, many)| *many > *few * max_percent / 100 + 10);
    growing
        .map(|(table, few, many)| format!("{table}: {many} reads, but {few} with a quarter of the rows"))
        .collect()
}

#[tokio::test]
async fn reads_on_postgres_do_not_grow_with_the_tables() {
    assert_reads_do_not_grow(Measured::filled(FEW).await, Measured::filled(MANY).await).await;
}

#[tokio::test]
async fn reads_on_postgres_do_not_grow_with_partitioned_tables() {
    assert_reads_do_not_grow(Measured::partitioned(FEW).await, Measured::partitioned(MANY).await).await;
}

async fn assert_reads_do_not_grow(mut few: Measured, mut many: Measured) {
    let mut failures = Vec::new();
    for mode in ["force_custom_plan", "force_generic_plan"] {
        few.plan_cache_mode(mode).await;
        many.plan_cache_mode(mode).await;
        for &(what, expected) in CALLS {
            let (of_few, of_many) = (few.connect().await, many.connect().await);
            let (of_few, of_many) = (few.run(of_few, what).await, many.run(of_many, what).await);
            assert_eq!((of_few.found, of_many.found), (expected, expected), "{what}");
            failures.extend(
                growth(&of_few, &of_many, MAX_PERCENT)
                    .iter()
                    .map(|growth| format!("{what}, {mode}: {growth}")),
            );
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// A connection keeps the plans that it made while the tables were empty.
#[tokio::test]
async fn reads_by_plans_for_empty_tables_on_postgres_do_not_grow() {
    /// One of the tables may have been pruned of deleted rows, and the other one not yet.
    const MAX_PERCENT_AFTER_DELETION: i64 = 200;
    /// Deletes what the calls have stored, without making connections forget their plans.
    const EMPTY: &str = "DELETE FROM sessions; DELETE FROM memories; DELETE FROM token_usage; DELETE FROM api_keys; DELETE FROM retention_rules";
    let mut measured = [Measured::empty(FEW).await, Measured::empty(MANY).await];
    let mut runs = Vec::new();
    for measured in &mut measured {
        measured.plan_cache_mode("force_generic_plan").await;
        let mut stores = Vec::new();
        for (what, _) in CALLS {
            let store = measured.connect().await;
            store_calls::call(&store, &measured.database, what).await;
            let opened = measured.keep_open().await;
            stores.push((store, opened));
        }
        measured.run_aside(&[EMPTY]).await;
        measured.fill().await;
        let mut of_calls = Vec::new();
        for ((what, _), (store, opened)) in CALLS.iter().zip(stores) {
            measured.open.retain(|connection| !opened.contains(connection));
            of_calls.push((*what, measured.run(store, what).await));
        }
        runs.push(of_calls);
    }
    // Searches keep no plan: each is planned anew, by statistics that autovacuum gathers, which this test disables.
    let keeps_plans = |((what, _), _): &(&(&str, Run), &(&str, Run))| !what.starts_with("find_matches");
    let calls = runs[0].iter().zip(&runs[1]).filter(keeps_plans);
    let failures = calls.flat_map(|((what, few), (_, many))| {
        growth(few, many, MAX_PERCENT_AFTER_DELETION)
            .into_iter()
            .map(move |growth| format!("{what}: {growth}"))
    });
    let failures: Vec<_> = failures.collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// The measurement notices if an index is missing.
#[tokio::test]
async fn reads_on_postgres_grow_without_an_index() {
    const INDEXES: &str =
        "SELECT indexname::text FROM pg_indexes WHERE schemaname = 'public' ORDER BY indexname COLLATE \"C\"";
    /// Hides an index from the planner.
    const HIDE: &str = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'INDEX'::regclass";
    const SHOW: &str = "UPDATE pg_index SET indisvalid = true";
    /// Each index and a call that needs it.
    const NEEDED: &[(&str, &str)] = &[
        ("api_keys_by_tenant", "api_keys of a tenant"),
        ("api_keys_pkey", "revoke_api_key"),
        ("consolidation_records_by_revision", "take_lease, record_failure"),
        ("consolidation_records_pkey", "consolidation_records"),
        ("idempotency_keys_by_time", "append_exchange, new key"),
        ("idempotency_keys_pkey", "append_exchange, known key"),
        ("memories_pkey", "memory_document"),
        ("memory_revisions_pkey", "memory_revisions"),
        ("messages_pkey", "load_context"),
        ("retention_rules_pkey", "retention_periods"),
        ("revisions_pkey", "revisions"),
        ("search_terms_by_term", "find_matches"),
        ("search_terms_by_time", "find_matches, common word"),
        ("sessions_by_activity", "sessions"),
        ("sessions_by_branch_age", "retention_candidates that are branches"),
        ("sessions_by_language", "languages"),
        ("sessions_by_lineage", "redact_message"),
        ("sessions_by_origin", "erase_session"),
        ("sessions_by_own_expiry", "retention_candidates with a period"),
        ("sessions_by_user", "sessions of a user"),
        ("sessions_pkey", "session_head"),
        ("token_usage_pkey", "tokens_used_today"),
    ];
    /// Tables with a few rows, the list of migrations, and the tenants, which are only listed as a whole.
    const SMALL: [&str; 4] =
        ["_sqlx_migrations_pkey", "search_analyzer_pkey", "tenants_pkey", "worker_leases_pkey"];
    let (mut few, mut many) = (Measured::filled(FEW).await, Measured::filled(MANY).await);
    let mut indexes = few.sql.texts(INDEXES).await;
    indexes.retain(|index| !SMALL.contains(&index.as_str()));
    assert_eq!(indexes, NEEDED.iter().map(|(index, _)| *index).collect::<Vec<_>>());
    let mut unnoticed = Vec::new();
    for (index, what) in NEEDED {
        for measured in [&mut few, &mut many] {
            measured.run_aside(&[SHOW, &HIDE.replace("INDEX", index)]).await;
        }
        let (of_few, of_many) = (few.connect().await, many.connect().await);
        let (of_few, of_many) = (few.run(of_few, what).await, many.run(of_many, what).await);
        if growth(&of_few, &of_many, MAX_PERCENT).is_empty() {
            unnoticed.push(format!("{what} without {index}"));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}

/// Compiling a plan or starting workers takes longer than any call, and Postgres does it if it expects many rows.
#[tokio::test]
async fn statements_of_a_tenant_on_postgres_are_neither_compiled_nor_parallel() {
    /// Is called by each statement under row-level security.
    const REJECT_SETTINGS: &str = "\
        CREATE OR REPLACE FUNCTION precis_tenant() RETURNS text LANGUAGE plpgsql STABLE AS $$
        BEGIN
            IF current_setting('jit')::boolean OR current_setting('max_parallel_workers_per_gather') <> '0' THEN
                RAISE EXCEPTION 'compiled or parallel';
            END IF;
            RETURN current_setting('precis.tenant', true);
        END
        $$";
    const PARALLEL: &str = " OR current_setting('max_parallel_workers_per_gather') <> '0'";
    let mut measured = Measured::filled(FEW).await;
    measured.run_aside(&[REJECT_SETTINGS]).await;
    assert_eq!(measured.sql.texts("SHOW jit").await, ["on"]);
    assert_ne!(measured.sql.texts("SHOW max_parallel_workers_per_gather").await, ["0"]);
    let store = measured.connect().await;
    for what in ["load_context", "messages", "sessions", "restore_revision", "fetch_messages"] {
        let expected = CALLS.iter().find(|(name, _)| *name == what).unwrap().1;
        assert_eq!(store_calls::call(&store, &measured.database, what).await, expected, "{what}");
    }
    measured.keep_open().await;
    // Statements that write never run in parallel.
    measured.run_aside(&[&REJECT_SETTINGS.replace(PARALLEL, "")]).await;
    assert_eq!(store_calls::call(&store, &measured.database, "append_exchange").await, 2);
}

/// Updates that change no indexed column leave no dead index entries. An index on the time itself would have some.
#[tokio::test]
async fn exchanges_and_consolidations_on_postgres_update_no_index_of_sessions() {
    const EXCHANGES: i64 = 200;
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    let demo = Conversation::on(&backend).await;
    for exchange in 1..=EXCHANGES {
        demo.say(&["user", "assistant"]).await;
        if exchange % 20 == 0 {
            demo.consolidate(exchange, "a summary of some length").await;
        }
    }
    demo.store.close().await;
    while !sql.texts(OTHER_CONNECTIONS).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let statistics = async |sql: &mut Sql, column| {
        sql.number(&format!("SELECT {column} FROM pg_stat_user_tables WHERE relname = 'sessions'")).await
    };
    let (all, hot) = (statistics(&mut sql, "n_tup_upd").await, statistics(&mut sql, "n_tup_hot_upd").await);
    // A consolidation takes the lease, commits and releases it.
    assert_eq!(all, EXCHANGES - 1 + EXCHANGES / 20 * 3);
    // A new hour may begin, and autovacuum may delay the pruning of a page.
    assert!(hot * 20 >= all * 19, "{hot} of {all}");
}
