//! Memory documents.

use crate::conversation::{Conversation, user_id};
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::domain::memory::MemoryDocument;
use precis::storage::NewMemoryDocument;
use std::sync::Arc;
use test_case::test_case;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

async fn write(
    demo: &Conversation,
    user: &UserId,
    content: &str,
    expected: Option<i64>,
) -> Option<MemoryDocument> {
    let words = i64::try_from(content.len()).unwrap();
    let new = NewMemoryDocument { content, words, tokens: words * 2 };
    demo.store.write_memory_document(&demo.tenant, user, new, expected).await.unwrap()
}

async fn read(demo: &Conversation, user: &UserId) -> Option<MemoryDocument> {
    demo.store.memory_document(&demo.tenant, user).await.unwrap()
}

/// Returns all versions, newest first.
async fn versions(demo: &Conversation, user: &UserId) -> Vec<MemoryDocument> {
    demo.store.memory_revisions(&demo.tenant, user, i64::MAX, i64::MAX).await.unwrap()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn document_is_returned_as_written(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    assert_eq!((read(&demo, &ada).await, versions(&demo, &ada).await), (None, Vec::new()));
    let long = "é".repeat(1 << 20);
    for content in ["# Ada\n\n- tea 🍵\r\n\t\"q\" '' \\ $1 ", "", "   ", &long] {
        let written = write(&demo, &ada, content, None).await.unwrap();
        assert_eq!(written.content, content);
        assert_eq!((written.words, written.tokens), (content.len() as i64, content.len() as i64 * 2));
        assert_eq!(read(&demo, &ada).await, Some(written));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_write_creates_a_version(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    let mut written = Vec::new();
    for version in 1..=5 {
        // Writing the same text again also creates a version.
        let document = write(&demo, &ada, "the same", None).await.unwrap();
        assert_eq!(document.version, version);
        written.insert(0, document);
    }
    assert!(written.is_sorted_by(|newer, older| newer.created_at >= older.created_at));
    assert_eq!(versions(&demo, &ada).await, written);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_with_other_expected_version_is_rejected(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    for wrong in [1, 2, -1, i64::MAX] {
        assert_eq!(write(&demo, &ada, "no", Some(wrong)).await, None);
    }
    assert_eq!(read(&demo, &ada).await, None);
    assert_eq!(write(&demo, &ada, "first", Some(0)).await.unwrap().version, 1);
    for wrong in [0, 2, -1] {
        assert_eq!(write(&demo, &ada, "no", Some(wrong)).await, None);
    }
    assert_eq!(write(&demo, &ada, "second", Some(1)).await.unwrap().version, 2);
    assert_eq!(write(&demo, &ada, "no", Some(1)).await, None);
    assert_eq!(write(&demo, &ada, "third", None).await.unwrap().version, 3);
    let contents: Vec<_> = versions(&demo, &ada).await.into_iter().map(|version| version.content).collect();
    assert_eq!(contents, ["third", "second", "first"]);
    assert_eq!(read(&demo, &ada).await.unwrap().content, "third");
}

/// Returns the results of concurrent writes.
async fn at_once(backend: &Backend, count: usize, expected: Option<i64>) -> Vec<MemoryDocument> {
    let replicas = [Conversation::on(backend).await, Conversation::on(backend).await];
    let barrier = Arc::new(Barrier::new(count));
    let mut writers = JoinSet::new();
    for at in 0..count {
        let (demo, barrier) = (replicas[at % 2].clone(), barrier.clone());
        writers.spawn(async move {
            barrier.wait().await;
            let written = write(&demo, &user_id("ada"), &format!("by {at}"), expected).await;
            written.inspect(|document| assert_eq!(document.content, format!("by {at}")))
        });
    }
    writers.join_all().await.into_iter().flatten().collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writes_get_distinct_versions(backend: Backend) {
    let mut written = at_once(&backend, 20, None).await;
    written.sort_by_key(|document| std::cmp::Reverse(document.version));
    assert!(written.iter().rev().map(|document| document.version).eq(1..=20));
    let demo = Conversation::on(&backend).await;
    assert_eq!(versions(&demo, &user_id("ada")).await, written);
    assert_eq!(read(&demo, &user_id("ada")).await.as_ref(), written.first());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writes_expecting_one_version_store_one(backend: Backend) {
    for version in 0..3 {
        let written = at_once(&backend, 20, Some(version)).await;
        assert_eq!(written.len(), 1);
        assert_eq!(written[0].version, version + 1);
        let demo = Conversation::on(&backend).await;
        assert_eq!(versions(&demo, &user_id("ada")).await.first(), written.first());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn earlier_versions_are_listed_in_pages(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    for version in 1..=14 {
        write(&demo, &ada, &format!("v{version}"), Some(version - 1)).await.unwrap();
    }
    let page =
        async |before, limit| demo.store.memory_revisions(&demo.tenant, &ada, before, limit).await.unwrap();
    let (mut all, mut before) = (Vec::new(), i64::MAX);
    while let part = page(before, 4).await
        && let Some(last) = part.last()
    {
        before = last.version;
        assert!(part.len() <= 4);
        all.extend(part);
    }
    assert!(
        all.iter()
            .map(|document| (document.version, document.content.clone()))
            .eq((1..=14).rev().map(|version| (version, format!("v{version}"))))
    );
    assert_eq!(page(1, 9).await, []);
    assert_eq!(page(15, 0).await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_of_users_are_independent(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let users = ["ada", "Ada", "ada ", "a/da", "%", "default"].map(user_id);
    for user in &users {
        assert_eq!(write(&demo, user, user.as_str(), Some(0)).await.unwrap().version, 1);
    }
    write(&demo, &users[0], "changed", Some(1)).await.unwrap();
    for user in &users[1..] {
        assert_eq!(read(&demo, user).await.unwrap().content, user.as_str());
        assert_eq!(versions(&demo, user).await.len(), 1);
    }
}
