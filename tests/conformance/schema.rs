//! Connections, migrations and closing of a store.

use crate::conversation::{Conversation, exchange_of, user_id};
use crate::postgres_plans::{DIALECT, connect_once};
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::postgres::TestDatabase;
use crate::support::store_calls::{self, CALLS, Filled};
use precis::domain::exchange::{Exchange, IdempotencyKey};
use precis::domain::message::Role;
use precis::domain::search::analyzer::Analyzer;
use precis::domain::search::index_terms::{TermPattern, TermQuery};
use precis::storage::search::SearchFilter;
use precis::storage::{self, SchemaVersions, Store, StoreError, StoreOptions};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqlSafeStr as _, SqliteConnection};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;

/// Replaces the database by one without a schema.
async fn remove_schema(backend: Backend) -> Backend {
    match backend {
        Backend::Sqlite(folder) => {
            for file in std::fs::read_dir(folder.path()).unwrap() {
                std::fs::remove_file(file.unwrap().path()).unwrap();
            }
            Backend::Sqlite(folder)
        }
        Backend::Postgres(_) => {
            Backend::Postgres(Box::new(TestDatabase::create("empty", async |_| {}).await))
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_is_ready_after_migration(backend: Backend) {
    let backend = remove_schema(backend).await;
    let store = backend.store().await;
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found: 0, expected: 1.. }), "{error:?}");
    store.migrate().await.unwrap();
    store.check_ready().await.unwrap();
    backend.store().await.check_ready().await.unwrap();
    assert_eq!(Conversation::on(&backend).await.say(&["a", "b"]).await.last_seq, 2);
}

/// Compares a new database with the list that `precis doctor` uses.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_the_schema_are_listed(backend: Backend) {
    let (file, select) = match &backend {
        Backend::Sqlite(_) => (
            "migrations/sqlite/objects.txt",
            "SELECT type || ' ' || name FROM sqlite_schema WHERE substr(name, 1, 7) <> 'sqlite_' ORDER BY 1",
        ),
        Backend::Postgres(_) => (
            "migrations/postgres/objects.txt",
            "SELECT object FROM (SELECT 'table ' || tablename AS object FROM pg_tables WHERE schemaname = 'public'
             UNION SELECT 'index ' || indexname FROM pg_indexes WHERE schemaname = 'public' AND indexdef NOT LIKE '%UNIQUE%'
             UNION SELECT 'key ' || constraint_name || ' of ' || table_name FROM information_schema.table_constraints
             WHERE table_schema = 'public' AND constraint_type IN ('PRIMARY KEY', 'UNIQUE')
             UNION SELECT 'policy ' || policyname || ' of ' || tablename FROM pg_policies WHERE schemaname = 'public'
             UNION SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass FROM pg_trigger WHERE NOT tgisinternal
             UNION SELECT 'function ' || proname || ' with ' || pronargs || ' arguments' FROM pg_proc
             WHERE pronamespace = 'public'::regnamespace
            ) AS objects ORDER BY object COLLATE \"C\"",
        ),
    };
    let objects = Sql::on(&backend).await.texts(select).await.join("\n") + "\n";
    let listed = std::fs::read_to_string(file).unwrap();
    assert_eq!(listed, objects, "{file} must be:\n{objects}");
    assert_eq!(backend.store().await.examine().await.unwrap().missing_object, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_migration_changes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let applied = "SELECT count(*) FROM _sqlx_migrations";
    let count = sql.number(applied).await;
    assert!(count > 0);
    demo.store.migrate().await.unwrap();
    backend.store().await.migrate().await.unwrap();
    assert_eq!((sql.number(applied).await, sql.rows().await), (count, rows));
    demo.store.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_migrations_succeed(backend: Backend) {
    let backend = remove_schema(backend).await;
    // SQLite supports a single process and therefore a single store.
    let one = backend.store().await;
    let two = if matches!(backend, Backend::Sqlite(_)) { one.clone() } else { backend.store().await };
    let (first, second, third) = tokio::join!(one.migrate(), two.migrate(), one.migrate());
    first.and(second).and(third).unwrap();
    two.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_or_newer_schema_is_reported(backend: Backend) {
    let store = backend.store().await;
    let mut sql = Sql::on(&backend).await;
    let newest = sql.number("SELECT max(version) FROM _sqlx_migrations").await;
    sql.run(&format!("UPDATE _sqlx_migrations SET version = 999 WHERE version = {newest}")).await;
    let error = store.check_ready().await.unwrap_err();
    assert!(
        matches!(error, StoreError::SchemaVersion { found: 999, expected } if expected == newest),
        "{error:?}"
    );
    // An older version does not change a newer schema.
    let error = store.migrate().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found: 999, .. }), "{error:?}");
    sql.run(&format!("UPDATE _sqlx_migrations SET version = {newest}, success = false WHERE version = 999"))
        .await;
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found, .. } if found < newest), "{error:?}");
}

/// Applies migrations after those of this release. The text of each follows `ALTER TABLE sessions`.
async fn apply_next(store: &Store, changes: &[(i64, String)]) {
    let next = changes.iter().map(|(version, change)| {
        let sql = AssertSqlSafe(format!("ALTER TABLE sessions {change}")).into_sql_str();
        Migration::new(*version, "next".into(), MigrationType::Simple, sql, false)
    });
    match store {
        Store::Postgres(store) => {
            let mut migrator = Migrator::new(Path::new("migrations/postgres")).await.unwrap();
            migrator.migrations.to_mut().extend(next);
            store.migrate(migrator).await.unwrap();
        }
        Store::Sqlite(store) => {
            let mut migrator = Migrator::new(Path::new("migrations/sqlite")).await.unwrap();
            migrator.migrations.to_mut().extend(next);
            store.migrate(migrator).await.unwrap();
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newer_schema_is_accepted_while_all_its_migrations_permit_this_release(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (store, own) = (&demo.store, demo.store.check_ready().await.unwrap());
    assert!(own.found == own.expected && !own.is_newer(), "{own:?}");
    demo.say(&["a", "b"]).await;
    let versions = [1, 2, 3].map(|after| own.expected + after);
    // The second migration needs the release of the first one. A third one that permits more does not change that.
    let oldest = [own.expected, versions[0], own.expected];
    let changes = versions.into_iter().zip(oldest).map(|(version, oldest)| {
        let declaration = format!("INSERT INTO schema_compatibility VALUES ({version}, {oldest})");
        (version, format!("ADD COLUMN next_{version} text; {declaration}"))
    });
    let changes: Vec<(i64, String)> = changes.collect();
    apply_next(store, &changes[..1]).await;
    let newer = SchemaVersions { found: versions[0], ..own };
    assert!(newer.is_newer());
    assert_eq!(store.check_ready().await.unwrap(), newer);
    assert_eq!(store.migrate().await.unwrap(), newer, "there is nothing to do");
    assert_eq!(demo.say(&["c"]).await.last_seq, 3);

    let refused = async |found: i64| {
        for error in [store.check_ready().await.unwrap_err(), store.migrate().await.unwrap_err()] {
            let StoreError::SchemaVersion { found: told, expected } = error else { panic!("{error:?}") };
            assert_eq!((told, expected), (found, own.expected));
        }
    };
    for applied in [2, 3] {
        apply_next(store, &changes[..applied]).await;
        refused(versions[applied - 1]).await;
    }

    // A migration that declares nothing permits no older release.
    let mut sql = Sql::on(&backend).await;
    let (own, earlier) = (own.expected, own.expected - 1);
    sql.run(&format!("UPDATE schema_compatibility SET oldest_version = {earlier} WHERE version > {own}"))
        .await;
    assert_eq!(store.check_ready().await.unwrap().found, versions[2]);
    sql.run(&format!("DELETE FROM schema_compatibility WHERE version = {}", versions[1])).await;
    refused(versions[2]).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_migration_declares_the_oldest_release_that_works_with_it(backend: Backend) {
    const UNDECLARED: &str = "SELECT count(*) FROM _sqlx_migrations
        WHERE version > (SELECT min(version) FROM schema_compatibility)
            AND version NOT IN (SELECT version FROM schema_compatibility)";
    assert_eq!(Sql::on(&backend).await.number(UNDECLARED).await, 0, "see docs/extending.md, Add a migration");
}

/// A connection keeps its prepared statements when a newer release adds columns.
#[tokio::test]
async fn statements_stay_valid_when_a_newer_release_adds_columns_on_postgres() {
    const SIZE: i64 = 256;
    const ADD_COLUMNS: &str = "DO $$
        DECLARE name text;
        BEGIN
            FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT LIKE '\\_sqlx%' LOOP
                EXECUTE format('ALTER TABLE %I ADD COLUMN next_text text, ADD COLUMN next_number bigint NOT NULL DEFAULT 7',
                    name);
            END LOOP;
        END $$";
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    sql.run(&store_calls::fill(DIALECT, SIZE)).await;
    let (store, database) = (connect_once(&backend.url()).await, Filled::new(SIZE));
    for (what, results) in CALLS {
        assert_eq!(store_calls::call(&store, &database, what).await, *results, "{what}");
    }
    sql.run(ADD_COLUMNS).await;
    for (what, results) in CALLS {
        assert_eq!(store_calls::call(&store, &database, what).await, *results, "{what} with new columns");
    }
}

/// A migration that waits for the lock of a table must not hold up the requests that come after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migration_that_waits_for_a_transaction_blocks_nobody_on_postgres() {
    const WAITING: &str =
        "SELECT count(*) FROM pg_locks WHERE relation = 'sessions'::regclass AND NOT granted";
    let backend = Backend::postgres().await;
    let store = backend.store().await;
    let next = [(900, "ADD COLUMN next_1 text; INSERT INTO schema_compatibility VALUES (900, 1)".to_owned())];
    let (mut import, mut sql) = (Sql::on(&backend).await, Sql::on(&backend).await);
    import.run("BEGIN; LOCK TABLE sessions IN ROW EXCLUSIVE MODE").await;
    let migration = tokio::spawn(async move {
        apply_next(&store, &next).await;
        store
    });
    let mut waits = 0;
    while waits < 3 {
        if sql.number(WAITING).await > 0 {
            // Fails if it waits for the migration, which waits for the import.
            sql.run("SET statement_timeout = '10s'; SELECT count(*) FROM sessions").await;
            waits += 1;
        }
    }
    assert!(!migration.is_finished());
    import.run("COMMIT").await;
    let store = migration.await.unwrap();
    assert_eq!(store.check_ready().await.unwrap().found, 900);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migration_gives_up_after_waiting_for_a_transaction_on_postgres() {
    let backend = remove_schema(Backend::postgres().await).await;
    let store = backend.store().await;
    let mut version_8 = Migrator::new(Path::new("migrations/postgres")).await.unwrap();
    version_8.migrations.to_mut().retain(|migration| migration.version <= 8);
    let Store::Postgres(database) = &*store else { unreachable!("it is on Postgres") };
    database.migrate(version_8).await.unwrap();
    let mut import = Sql::on(&backend).await;
    import.run("BEGIN; LOCK TABLE sessions IN ROW EXCLUSIVE MODE").await;
    let error = store.migrate().await.unwrap_err();
    let told = storage::explain(&backend.url(), &error).unwrap();
    assert!(told.starts_with("other transactions use the tables that a migration changes"), "{told}");
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::SchemaVersion { found: 8, .. }), "{error:?}");
    import.run("COMMIT").await;
    store.migrate().await.unwrap();
    store.check_ready().await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_store_is_unavailable(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    demo.store.close().await;
    let read = demo.store.session(&demo.tenant, &demo.session).await.map(|_| ());
    let written = demo.store.erase_session(&demo.tenant, &demo.session).await.map(|_| ());
    for result in [read, written, demo.store.check_ready().await.map(|_| ())] {
        assert!(matches!(result, Err(StoreError::Unavailable(_))), "{result:?}");
    }
    assert_eq!(Conversation::on(&backend).await.history().await.len(), 2);
}

fn options() -> StoreOptions {
    StoreOptions {
        max_connections: 2,
        acquire_timeout: Duration::from_secs(5),
        statement_timeout: Duration::from_secs(30),
        search: Some(Analyzer::default()),
        key_share: 0.5,
    }
}

#[tokio::test]
async fn invalid_url_is_rejected_without_revealing_the_password() {
    for url in [
        "mysql://ada:hunter2@host/x",
        "hunter2",
        "",
        "postgres://ada:hunter2@host:port/x",
        "sqlite::memory:",
        "sqlite://x?mode=memory",
        "sqlite://x?mode=hunter2",
    ] {
        let error = storage::connect(url, &options()).await.unwrap_err();
        assert!(matches!(error, StoreError::Url(_)), "{url}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn unreachable_postgres_is_unavailable() {
    // Port 1 of the loopback is closed. The pool retries until the acquire timeout.
    let hasty = StoreOptions { acquire_timeout: Duration::from_millis(50), ..options() };
    let store = storage::connect("postgres://ada:hunter2@127.0.0.1:1/x", &hasty).await.unwrap();
    let error = store.check_ready().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(!format!("{error} {error:?} {store:?}").contains("hunter2"));
}

/// Replaces the database by one with the schema of an earlier version.
async fn with_schema(backend: Backend, version: i64) -> (Backend, Arc<Store>) {
    let backend = remove_schema(backend).await;
    let store = backend.store().await;
    let is_sqlite = matches!(backend, Backend::Sqlite(_));
    let folder = if is_sqlite { "migrations/sqlite" } else { "migrations/postgres" };
    let mut migrations = Migrator::new(Path::new(folder)).await.unwrap();
    migrations.migrations.to_mut().retain(|migration| migration.version <= version);
    if is_sqlite {
        // The store creates the file.
        store.check_ready().await.unwrap_err();
        let mut connection = SqliteConnection::connect(&backend.url()).await.unwrap();
        migrations.run_direct(None, &mut connection, false).await.unwrap();
    } else {
        let mut connection = PgConnection::connect(&backend.url()).await.unwrap();
        migrations.run_direct(None, &mut connection, false).await.unwrap();
    }
    (backend, store)
}

/// The migration to version 13 replaces the lists of pending messages by a state of each session, and that to version 23 replaces the
/// index, so that all messages are missing.
#[test_case(Backend::sqlite().await, "english-2"; "sqlite")]
#[test_case(Backend::postgres().await, "english-2"; "postgres")]
#[test_case(Backend::sqlite().await, "off"; "sqlite without search")]
#[test_case(Backend::postgres().await, "off"; "postgres without search")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_pending_in_version_12_are_found_after_the_migration(backend: Backend, analyzer: &str) {
    let (backend, store) = with_schema(backend, 12).await;
    let is_sqlite = matches!(backend, Backend::Sqlite(_));
    let mut sql = Sql::on(&backend).await;
    // The six digits separate the terms of the tenant from those of others.
    let (now, incarnation, lexemes) = if is_sqlite {
        ("1760000000000000", "randomblob(16)", "'37a8eeplum'")
    } else {
        ("now()", "gen_random_uuid()", "array_to_tsvector(ARRAY['37a8eeplum'])")
    };
    for (session, indexed, reindexed, pending) in
        [("complete", 4, 4, 5), ("pending", 2, 4, 3), ("reindexed", 1, 1, 5), ("both", 3, 0, 4)]
    {
        let rows = format!(
            "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
                activity_hour, incarnation)
            VALUES ('default', '{session}', '', '{{}}', 4, 4, {now}, {now}, 0, {incarnation});
            INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
            WITH RECURSIVE n (seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n WHERE seq < 4)
            SELECT 'default', '{session}', seq, 'user', 1, '{{\"role\":\"user\",\"content\":\"plums\"}}', {now} FROM n;
            INSERT INTO search (tenant_id, session_id, seq, created_at, lexemes)
            SELECT tenant_id, session_id, seq, created_at, {lexemes} FROM messages
            WHERE session_id = '{session}' AND seq <= {indexed};
            INSERT INTO search_reindex (tenant_id, session_id, done_seq, through_seq)
            SELECT 'default', '{session}', {reindexed}, 4 WHERE {reindexed} < 4;
            INSERT INTO search_pending (tenant_id, session_id, first_seq, last_seq, bytes, created_at)
            SELECT 'default', '{session}', {pending}, 4, 99, {now} WHERE {pending} <= 4"
        );
        sql.run(&rows).await;
    }
    sql.run(&format!("INSERT INTO search_analyzer (id, version) VALUES (1, '{analyzer}')")).await;
    store.migrate().await.unwrap();
    assert_eq!(store.index_state().await.unwrap().messages, 16);
    let demo = Conversation::on(&backend).await;
    let plum = TermQuery(vec![vec![TermPattern::exact("plum")]]);
    let found = demo.lookup_terms(&SearchFilter::default(), &plum, 99).await;
    let found: BTreeSet<(String, i64)> =
        found.into_iter().map(|found| (found.session.to_string(), found.seq)).collect();
    assert_eq!(found.len(), 16, "{found:?}");
    let indexed: BTreeSet<(String, i64)> =
        demo.indexed().await.into_iter().map(|entry| (entry.session.to_string(), entry.seq)).collect();
    assert_eq!(indexed, found);
    assert_eq!(demo.indexed().await.len(), 16, "each message has one entry");
    assert_eq!(sql.unindexed().await, [""; 0]);
}

/// The migration to version 25 changes the rows of recent messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recent_messages_of_version_24_are_found_after_the_migration(backend: Backend) {
    let (backend, store) = with_schema(backend, 24).await;
    let mut sql = Sql::on(&backend).await;
    let insert = match backend {
        Backend::Sqlite(_) => "\
            INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, entries) VALUES ('default', 'english-2', 2, 30,
                '[[\"a\",\"ada\",7,1760000000000000,\":ruser plum\"],[\"b\",\"\",1,1760003600000000,\":rtool plum fig\"]]')",
        Backend::Postgres(_) => "\
            INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, seqs, times, terms)
            VALUES ('default', 'english-2', 2, 30, ARRAY['a', 'b'], ARRAY['ada', ''], ARRAY[7, 1],
                ARRAY[to_timestamp(1760000000), to_timestamp(1760003600)], ARRAY[':ruser plum', ':rtool plum fig'])",
    };
    sql.run(insert).await;
    sql.run("INSERT INTO search_analyzer (id, version) VALUES (1, 'english-2')").await;
    store.migrate().await.unwrap();
    let demo = Conversation::on(&backend).await;
    let hour = |seconds| Some(OffsetDateTime::from_unix_timestamp(seconds).unwrap());
    let all = SearchFilter::default();
    let of_user = SearchFilter { user: Some(user_id("ada")), ..all.clone() };
    let of_tool = SearchFilter { role: Some(Role::Tool), ..all.clone() };
    let later = SearchFilter { since: hour(1_760_003_600), ..all.clone() };
    for (filter, term, expected) in [
        (&all, "plum", vec![("b", 1), ("a", 7)]),
        (&all, "fig", vec![("b", 1)]),
        (&of_user, "plum", vec![("a", 7)]),
        (&of_tool, "plum", vec![("b", 1)]),
        (&later, "plum", vec![("b", 1)]),
    ] {
        let found = demo.lookup_terms(filter, &TermQuery(vec![vec![TermPattern::exact(term)]]), 99).await;
        let found: Vec<_> = found.iter().map(|found| (found.session.as_str(), found.seq)).collect();
        assert_eq!(found, expected, "{term} {filter:?}");
    }
}

/// The migration to version 16 copies the messages to another table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_version_15_on_sqlite_are_the_same_after_the_migration() {
    const SELECT_MESSAGES: &str = "\
        SELECT concat_ws('|', tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message, created_at,
            redaction)
        FROM messages ORDER BY tenant_id, session_id, seq";
    let (backend, store) = with_schema(Backend::sqlite().await, 15).await;
    let mut sql = Sql::on(&backend).await;
    for (tenant, session) in [("default", "demo"), ("default", "other"), ("acme", "demo")] {
        sql.run(&format!(
            "INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, stored_bytes, settled_bytes,
                created_at, updated_at, activity_hour, incarnation, indexed_seq)
            VALUES ('{tenant}', '{session}', '', '{{}}', 300, 300, 3000, 3000, 7, 7, 0, randomblob(16), 0);
            INSERT INTO messages (tenant_id, session_id, seq, role, tool_call_ids, tool_result_of, tokens, message,
                created_at, redaction)
            WITH RECURSIVE n (seq) AS (SELECT 1 UNION ALL SELECT seq + 1 FROM n WHERE seq < 300)
            SELECT '{tenant}', '{session}', seq, iif(seq % 7 = 0, 'tool', 'user'), iif(seq % 5 = 0, '[\"a\"]', NULL),
                iif(seq % 7 = 0, '\"a\"', NULL), seq, json_object('role', 'user', 'content', 'plums ' || seq
                    || iif(seq = 100, hex(zeroblob(3000000)), '')),
                1760000000000000 + seq, iif(seq % 50 = 0, '{{\"redacted_at\":1}}', NULL)
            FROM n"
        ))
        .await;
    }
    let messages = sql.texts(SELECT_MESSAGES).await;
    assert_eq!(messages.len(), 900);
    store.migrate().await.unwrap();
    assert!(sql.texts(SELECT_MESSAGES).await == messages, "the migration has changed messages");
    let demo = Conversation::on(&backend).await;
    assert_eq!(demo.say(&["a", "b"]).await.first_seq, 301);
    for statement in [
        "DELETE FROM messages",
        "UPDATE messages SET tokens = 9",
        "REPLACE INTO messages SELECT * FROM messages",
    ] {
        let error = sql.error(statement).await;
        assert!(error.contains("is append-only"), "{statement}: {error}");
    }
    let mark = "UPDATE messages SET message = '{}', redaction = '{}' WHERE tenant_id = 'acme' AND seq = 1";
    let size = "SELECT stored_bytes FROM sessions WHERE tenant_id = 'acme'";
    let before = sql.number(size).await;
    sql.run(mark).await;
    assert!(sql.number(size).await < before, "the size of a redacted message is counted");
    assert!(demo.erase().await);
    let left = "SELECT count(*) FROM messages WHERE session_id = 'demo'";
    assert_eq!(sql.number(left).await, 300, "those of the other tenant");
}

/// SQLite compares a key with a whole row, including all of its overflow pages, in an index and in a table without row ids. So
/// these must not contain large values, or each search for a key beside one of them reads the value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searching_for_a_key_on_sqlite_reads_no_large_values() {
    const WITH_OVERFLOW: &str = "SELECT DISTINCT name FROM dbstat WHERE pagetype = 'overflow' ORDER BY name";
    /// Indexes, also those of tables without row ids.
    const KEYED: &str = "\
        SELECT name FROM sqlite_schema WHERE type = 'index'
        UNION SELECT name FROM pragma_table_list WHERE wr";
    let backend = Backend::sqlite().await;
    let (demo, long) = (Conversation::on(&backend).await, "i".repeat(256));
    let large = (0..100_000).map(|word| format!("word{word}")).collect::<Vec<_>>().join(" ");
    let demo = demo.session(&long);
    for number in 0..3 {
        let metadata = Some(format!(r#"{{"a":"{large}"}}"#));
        let exchange = Exchange { metadata, ..exchange_of(&long, &[&large, "b"]) };
        let key = IdempotencyKey { key: format!("{number:0>255}"), fingerprint: exchange.fingerprint() };
        demo.append(&exchange, Some(&key)).await;
    }
    demo.consolidate(2, &large).await;
    demo.remember(&user_id(&long), &large).await;
    demo.remember(&user_id(&long), &large).await;
    // Enough segments that they are merged into one with a word of very many messages.
    for _ in 0..4 {
        demo.say(&vec!["plums"; 5000]).await;
        demo.index_all().await;
    }
    demo.say(&[&large, "b"]).await;
    demo.index_session().await;
    let mut sql = Sql::on(&backend).await;
    let (with_overflow, keyed) = (sql.texts(WITH_OVERFLOW).await, sql.texts(KEYED).await);
    let large_tables = [
        "memories",
        "memory_revisions",
        "messages",
        "revisions",
        "search_pages",
        "search_recent",
        "sessions",
    ];
    assert_eq!(with_overflow.iter().map(String::as_str).collect::<Vec<_>>(), large_tables);
    assert!(keyed.contains(&"idempotency_keys".to_owned()), "{keyed:?}");
    let slow: Vec<_> = with_overflow.iter().filter(|name| keyed.contains(name)).collect();
    assert!(slow.is_empty(), "{slow:?} contain large values beside keys");
}
