//! Batches that fail.

use crate::conversation::{Conversation, exchange};
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use precis::storage::AppendRequest;

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
