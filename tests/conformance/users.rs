//! Erasure of users.

use crate::conversation::{Conversation, exchange_of, key, recorded, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use std::collections::BTreeSet;
use test_case::test_case;

async fn erase(demo: &Conversation, user: &UserId) -> bool {
    demo.store.erase_user(&demo.tenant, user).await.unwrap()
}

/// Creates a memory document with two versions, and two sessions with rows of every kind.
async fn fill(demo: &Conversation, user: &UserId) {
    demo.remember(user, "first").await;
    demo.remember(user, "second").await;
    for id in ["one", "two"] {
        let conversation = demo.session(&format!("{id} of {user}"));
        let exchange = exchange_of(user.as_str(), &["a", "b", "c"]);
        recorded(conversation.append(&exchange, Some(&key("k", &exchange))).await);
        conversation.consolidate(2, "s").await;
        conversation.index_session().await;
        conversation.say(&["d"]).await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_user_loses_all_data_and_others_none(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let ada = user_id("ada");
    for other in ["Ada", "ada ", "bo", "default"] {
        fill(&demo, &user_id(other)).await;
    }
    fill(&demo.tenant("acme"), &ada).await;
    let kept = sql.rows().await;
    fill(&demo, &ada).await;
    sql.delay_indexing("tenant_id = 'default' AND user_id = 'ada'").await;
    let theirs: BTreeSet<_> =
        sql.rows().await.into_iter().filter(|row| !kept.contains(row)).map(|row| row.table).collect();
    assert_eq!(theirs, sql.erasable().await, "a new table? Fill it in `fill`.");
    assert!(erase(&demo, &ada).await);
    assert_eq!(sql.rows().await, kept);
    assert!(!erase(&demo, &ada).await);
    assert!(!erase(&demo, &user_id("nobody")).await);
    assert_eq!(sql.rows().await, kept);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_only_sessions_or_only_memory_is_erased(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let ada = user_id("ada");
    demo.remember(&ada, "only a memory").await;
    assert!(erase(&demo, &ada).await);
    demo.record(&exchange_of("ada", &["only", "a session"])).await;
    assert!(erase(&demo, &ada).await);
    assert_eq!(sql.rows().await, []);
    assert!(!erase(&demo, &ada).await);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_can_write_again_after_erasure(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let ada = user_id("ada");
    fill(&demo, &ada).await;
    assert!(erase(&demo, &ada).await);
    assert_eq!(demo.store.memory_document(&demo.tenant, &ada).await.unwrap(), None);
    demo.remember(&ada, "anew").await;
    let versions = demo.store.memory_revisions(&demo.tenant, &ada, i64::MAX, 9).await.unwrap();
    assert_eq!(versions.iter().map(|version| version.version).collect::<Vec<_>>(), [1]);
    assert_eq!(demo.session("one of ada").record(&exchange_of("bo", &["a"])).await.first_seq, 1);
}
