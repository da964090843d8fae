//! Completeness of erasure. A marker word is written to every field of a session and a user. After the erasure it must not
//! occur in any column of any table, nor, on SQLite, in the bytes of the files.
//!
//! Tables and columns are read from the catalogue, so new ones are covered: a column without the marker fails the test until
//! [`fill`] writes to it or [`OURS`] lists it as a column that cannot hold user data.

use crate::conversation::{
    Conversation, LONG, counted, key, message, recorded, session_id, summary, user_id,
};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::revision::{MetaConsolidation, ModelUsage, Provenance};
use precis::storage::NewRevision;
use std::collections::BTreeSet;
use test_case::test_case;
use uuid::Uuid;

/// The marker word.
const PLUGH: &str = "plugh";

/// Text columns without user data: they hold the name of the tenant or fixed words.
const OURS: [&str; 3] = ["tenant_id", "role", "kind"];

/// Returns the text columns of a table.
async fn columns(sql: &mut Sql, table: &str) -> Vec<String> {
    let query = if matches!(sql, Sql::Sqlite(_)) {
        format!("SELECT name FROM pragma_table_info('{table}') WHERE type NOT IN ('INTEGER', 'BLOB')")
    } else {
        format!(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0
             AND NOT attisdropped AND atttypid NOT IN ('bigint'::regtype, 'integer'::regtype, 'bytea'::regtype,
                'uuid'::regtype, 'timestamptz'::regtype)"
        )
    };
    sql.texts(&query).await
}

/// Returns the text columns that contain the marker, as `table.column`.
async fn marked(sql: &mut Sql) -> BTreeSet<String> {
    let mut marked = BTreeSet::new();
    for table in sql.tables().await {
        for column in columns(sql, &table).await {
            let text = format!("CAST({column} AS text)");
            let query = format!("SELECT count(*) FROM {table} WHERE lower({text}) LIKE '%{PLUGH}%'");
            if sql.figure(&query).await > 0 {
                marked.insert(format!("{table}.{column}"));
            }
        }
    }
    marked
}

/// Returns the text columns that can hold user data.
async fn markable(sql: &mut Sql) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for table in sql.erasable().await {
        let columns = columns(sql, &table).await.into_iter();
        let theirs = columns.filter(|column| !OURS.contains(&column.as_str()));
        all.extend(theirs.map(|column| format!("{table}.{column}")));
    }
    all
}

fn provenance() -> Provenance {
    Provenance {
        model: PLUGH.to_owned(),
        pool: PLUGH.to_owned(),
        prompt_version: PLUGH.to_owned(),
        usage: ModelUsage::default(),
        duration_ms: 1,
    }
}

/// Creates a session and a memory document of the user `plugh` with the marker in every field. Returns the token of the
/// lease, which is held.
async fn fill(demo: &Conversation) -> Uuid {
    let texts = [
        r#"{"role":"user","name":"plugh","content":"plugh plugh"}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"plugh","function":{"name":"plugh","arguments":"plugh"}}]}"#,
        r#"{"role":"tool","tool_call_id":"plugh","content":"plugh"}"#,
    ];
    // Enough data to fill pages of the database.
    let messages = texts.iter().cycle().take(300).map(|text| counted(message(text))).collect();
    let metadata = Some(r#"{"plugh":"plugh"}"#.to_owned());
    let exchange = Exchange { messages, user_id: Some(user_id(PLUGH)), metadata };
    recorded(demo.append(&exchange, Some(&key("key-plugh", &exchange))).await);
    let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
    let token = demo.lease().await;
    let meta = MetaConsolidation { text_before: PLUGH.to_owned(), provenance: provenance() };
    let step = NewRevision { provenance: Some(provenance()), meta: Some(meta), ..demo.step(2, PLUGH).await };
    demo.commit(token, &step).await.expect("committed");
    store.record_failure(tenant, session, token, LONG, PLUGH).await.unwrap().expect("noted");
    demo.remember(&user_id(PLUGH), "plugh one").await;
    demo.remember(&user_id(PLUGH), "plugh two").await;
    demo.index_session().await;
    demo.record(&exchange).await;
    demo.lease().await
}

/// Creates data of another user that must stay.
async fn neighbour(demo: &Conversation) {
    demo.session("other").say(&["xyzzy", "b"]).await;
    demo.remember(&user_id("default"), "xyzzy").await;
}

/// Returns the files of an SQLite database that contain the word.
fn files(backend: &Backend, word: &str) -> Vec<String> {
    let Backend::Sqlite(folder) = backend else { return Vec::new() };
    let mut found = Vec::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        if bytes.windows(word.len()).any(|window| window == word.as_bytes()) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_user_leaves_no_trace_in_tables_and_files(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    neighbour(&demo).await;
    let kept = sql.rows().await;
    for id in ["plugh 1", "plugh 2"] {
        fill(&demo.session(id)).await;
    }
    sql.delay_indexing("user_id = 'plugh'").await;
    assert_eq!(marked(&mut sql).await, markable(&mut sql).await, "a new column? Fill it in `fill`.");
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, PLUGH).is_empty());
    assert!(demo.store.erase_user(&demo.tenant, &user_id(PLUGH)).await.unwrap());
    assert_eq!((sql.rows().await, marked(&mut sql).await), (kept, BTreeSet::new()));
    assert_eq!(files(&backend, PLUGH), [""; 0]);
    assert!(matches!(backend, Backend::Postgres(_)) || !files(&backend, "xyzzy").is_empty());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_leaves_no_trace_in_tables_and_files(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    neighbour(&demo).await;
    let kept = sql.rows().await;
    let plugh = demo.session("plugh");
    fill(&plugh).await;
    assert!(plugh.erase().await);
    // The memory document belongs to the user and stays.
    let left = marked(&mut sql).await;
    assert!(left.iter().all(|column| column.starts_with("memor")), "{left:?}");
    let rows: BTreeSet<_> = sql.rows().await.into_iter().filter(|row| !row.contains(PLUGH)).collect();
    assert_eq!(rows, kept.into_iter().collect());
    assert_eq!(files(&backend, "key-plugh"), [""; 0]);
}

/// A consolidation may still be running after the erasure; all its later writes must have no effect.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_holder_cannot_write_to_erased_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for by_user in [false, true] {
        let plugh = demo.session("plugh");
        let token = fill(&plugh).await;
        let step = plugh.step(3, PLUGH).await;
        let (store, tenant, session) = (&plugh.store, &plugh.tenant, session_id("plugh"));
        if !by_user {
            assert!(plugh.erase().await);
        }
        assert!(store.erase_user(tenant, &user_id(PLUGH)).await.unwrap());
        for anew in [false, true] {
            if anew {
                plugh.say(&["new"]).await;
            }
            let rows = sql.rows().await;
            assert!(!store.renew_lease(tenant, &session, token, LONG).await.unwrap());
            assert_eq!(plugh.commit(token, &step).await, None);
            assert_eq!(
                plugh.commit(token, &NewRevision { summary: summary(""), ..step.clone() }).await,
                None
            );
            assert_eq!(store.record_failure(tenant, &session, token, LONG, PLUGH).await.unwrap(), None);
            plugh.release(token).await;
            assert_eq!(plugh.restore(1).await, None);
            assert_eq!(sql.rows().await, rows);
            assert!(
                rows.iter()
                    .all(|row| ["sessions", "messages", "search_pending"].contains(&row.table.as_str()))
            );
        }
        assert!(plugh.erase().await);
        assert_eq!(sql.rows().await, []);
    }
}
