//! Memory documents.

use crate::conversation::{Conversation, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::domain::memory::{MemoryAuthor, MemoryDocument, MemoryRevision};
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
    let new = NewMemoryDocument { content, words, tokens: words * 2, author: MemoryAuthor::Http };
    demo.store.write_memory_document(&demo.tenant, user, new, expected).await.unwrap()
}

async fn read(demo: &Conversation, user: &UserId) -> Option<MemoryDocument> {
    demo.store.memory_document(&demo.tenant, user).await.unwrap()
}

/// Returns all versions, newest first.
async fn versions(demo: &Conversation, user: &UserId) -> Vec<MemoryDocument> {
    revisions(demo, user).await.into_iter().map(|revision| revision.document).collect()
}

async fn revisions(demo: &Conversation, user: &UserId) -> Vec<MemoryRevision> {
    demo.store.memory_revisions(&demo.tenant, user, i64::MAX, i64::MAX, i64::MAX).await.unwrap().items
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_has_its_author_unless_an_earlier_release_wrote_it(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    let authors = [MemoryAuthor::Http, MemoryAuthor::Tool, MemoryAuthor::Mcp];
    for (version, author) in (0..).zip(authors) {
        let new = NewMemoryDocument { content: "x", words: 1, tokens: 1, author };
        let written = demo.store.write_memory_document(&demo.tenant, &ada, new, Some(version)).await.unwrap();
        assert_eq!(written.map(|document| document.version), Some(version + 1));
    }
    let listed = async || {
        let listed = revisions(&demo, &ada).await.into_iter().rev();
        listed.map(|revision| revision.author).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, authors.map(Some));
    Sql::on(&backend).await.run("UPDATE memory_revisions SET author = NULL WHERE version = 2").await;
    assert_eq!(listed().await, [Some(MemoryAuthor::Http), None, Some(MemoryAuthor::Mcp)]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_document_is_returned_as_written(backend: Backend) {
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
