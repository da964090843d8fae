//! The connections of batches.

use crate::conversation::{Conversation, exchange};
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use precis::storage::AppendRequest;
use std::path::Path;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// The pool uses its connections in turn, and a batcher keeps its connection until it is idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_on_postgres_stay_on_a_connection_and_return_it() {
    const APPENDING: &str = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE '%FROM insert_exchanges(%' AND pid <> pg_backend_pid()";
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    join_all((0..8).map(|_| demo.store.index_state())).await;
    let open = demo.store.connection_counts().open;
    assert!(open >= 6, "{open} connections are open");
    for _ in 0..60 {
        demo.say(&["a", "b"]).await;
    }
    // A stall of the machine lets the batcher return its connection.
    let used = sql.number(APPENDING).await;
    assert!((1..=3).contains(&used), "{used} connections have appended exchanges");
    let returned = async {
        loop {
            let counts = demo.store.connection_counts();
            if counts.idle == counts.open {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), returned).await.expect("all connections return to the pool");
}

/// Batches that fail leave no transaction open on the connection that all writers share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_batch_on_sqlite_is_rolled_back() {
    let backend = Backend::sqlite().await;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    sql.reject_rows("messages", "message", "%poison%").await;
    let append = async |text| {
        let request = AppendRequest::new(&demo.tenant, &demo.session, exchange(&["fine", text]), None);
        demo.store.append_exchange(request).await.is_ok()
    };
    let appended = join_all(["a", "poison", "b", "poison", "c"].map(append)).await;
    assert_eq!(appended, [true, false, true, false, true]);
    assert_eq!(sql.number("SELECT count(*) FROM messages").await, 6);
    sql.run("UPDATE sessions SET tokens = tokens").await;
    demo.say(&["another transaction begins"]).await;
}

/// Results are read before the commit, so that an error means that the exchange is not stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_on_sqlite_with_an_invalid_result_is_not_stored() {
    let backend = Backend::sqlite().await;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["a", "b"]).await;
    sql.run("UPDATE sessions SET incarnation = NULL").await;
    let append = async |id: usize| {
        let session = demo.session(&if id == 0 { "demo".to_owned() } else { format!("other-{id}") });
        let request = AppendRequest::new(&session.tenant, &session.session, exchange(&["c", "d"]), None);
        demo.store.append_exchange(request).await.is_ok()
    };
    let appended = join_all((0..6).map(append)).await;
    assert_eq!(appended, [false, true, true, true, true, true]);
    assert_eq!(sql.number("SELECT count(*) FROM messages WHERE session_id = 'demo'").await, 2);
    assert_eq!(sql.number("SELECT count(*) FROM messages").await, 12);
}

/// A commit would do a checkpoint only after 8,000 pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoints_on_sqlite_run_beside_exchanges() {
    const EXCHANGES: usize = 1000;
    let backend = Backend::sqlite().await;
    let Backend::Sqlite(folder) = &backend else { unreachable!("an SQLite database") };
    let size = |file: &Path| std::fs::metadata(file).map_or(0, |metadata| metadata.len());
    let file = folder.path().join("precis.db");
    let demo = Conversation::on(&backend).await;
    let empty = size(&file);
    join_all((0..EXCHANGES).map(|number| {
        let demo = demo.session(&format!("session-{}", number % 10));
        async move { demo.say(&["one", "two"]).await }
    }))
    .await;
    assert!(size(&folder.path().join("precis.db-wal")) < 8000 * 4096, "no commit did a checkpoint");
    let copied = async {
        while size(&file) == empty {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), copied).await.expect("a checkpoint copies pages into the database");
}
