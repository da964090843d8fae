//! Context snapshots.

use crate::conversation::{Conversation, user_id};
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::domain::tail::TailLimit;
use precis::storage::{ContextSnapshot, SessionFilter};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use test_case::test_case;
use tokio::sync::Semaphore;
use tokio::time::timeout;

async fn load(conversation: &Conversation, user: &UserId, most: usize) -> ContextSnapshot {
    conversation.context(Some(user), TailLimit { messages: most, bytes: usize::MAX }).await
}

fn seqs(snapshot: &ContextSnapshot) -> Vec<i64> {
    snapshot.tail.messages(0).map(|message| message.seq).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_contains_newest_messages_of_the_tail(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 30]).await;
    demo.session("other").say(&["y"; 40]).await;
    let history = demo.history().await;
    for (cursor, summary) in [(0, ""), (7, "seven"), (29, "all but one"), (30, "all")] {
        if cursor > 0 {
            demo.consolidate(cursor, summary).await;
        }
        for most in [0, 1, 5, 22, 23, 24, 30, 31, 1000, usize::MAX] {
            let snapshot = load(&demo, &user_id("ada"), most).await;
            let first = (cursor + 1).max(31_i64.saturating_sub_unsigned(most as u64));
            assert_eq!(seqs(&snapshot), (first..=30).collect::<Vec<_>>(), "{cursor} {most}");
            let session = snapshot.session.unwrap();
            assert_eq!(session, demo.state().await);
            assert_eq!((session.cursor, session.summary.text.as_str()), (cursor, summary));
            for message in snapshot.tail.messages(0) {
                assert_eq!(message.json, history[usize::try_from(message.seq).unwrap() - 1].json);
                assert_eq!(message.metadata.tokens, message.json.len() as i64);
            }
        }
    }
}

/// The texts of messages beyond the limit are not read, and the texts within it are the newest ones.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_contains_newest_messages_within_the_size(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let large = "é".repeat(40_000);
    let texts: Vec<&str> = (0..30).map(|number| if number % 3 == 0 { large.as_str() } else { "x" }).collect();
    demo.say(&texts).await;
    demo.session("other").say(&[large.as_str(); 40]).await;
    let history = demo.history().await;
    let size = |seq: i64| history[usize::try_from(seq).unwrap() - 1].json.len();
    for cursor in [0, 7, 29, 30] {
        if cursor > 0 {
            demo.consolidate(cursor, "summary").await;
        }
        for messages in [0, 1, 22, 30, usize::MAX] {
            let all = (cursor + 1).max(31_i64.saturating_sub_unsigned(messages as u64))..=30;
            let total: usize = all.clone().map(size).sum();
            for bytes in [0, 25, 80_000, 80_100, 250_000, total.saturating_sub(1), total, usize::MAX] {
                let mut expected: Vec<i64> = all.clone().collect();
                while expected.iter().map(|seq| size(*seq)).sum::<usize>() > bytes {
                    expected.remove(0);
                }
                let limit = TailLimit { messages, bytes };
                let snapshot = demo.context(None, limit).await;
                assert_eq!(seqs(&snapshot), expected, "{cursor} {limit:?}");
                assert_eq!(snapshot.session.unwrap(), demo.state().await);
                assert_eq!(
                    snapshot.tail.first_seq(),
                    expected.first().copied().unwrap_or(31),
                    "{cursor} {limit:?}"
                );
                for message in snapshot.tail.messages(0) {
                    assert_eq!(message.json, history[usize::try_from(message.seq).unwrap() - 1].json);
                }
            }
        }
    }
}

/// A page ends with the item that exceeds the size, and names the next one.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_lists_end_at_their_size(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    let text = "x".repeat(1000);
    demo.say(&["a"; 9]).await;
    for cursor in 1..=8 {
        demo.consolidate(cursor, &text).await;
    }
    for _ in 0..8 {
        demo.remember(&ada, &text).await;
    }
    for number in 0..8 {
        let session = demo.session(&format!("s{number}"));
        session.say(&["a", "b"]).await;
        session.consolidate(1, &text).await;
    }
    let (store, tenant) = (&demo.store, &demo.tenant);
    for (limit, max_bytes, expected, has_more) in [
        (8, i64::MAX, 8, false),
        (7, i64::MAX, 7, true),
        (8, 1, 1, true),
        (8, 2500, 3, true),
        (2, 2500, 2, true),
    ] {
        let memory = store.memory_revisions(tenant, &ada, i64::MAX, limit, max_bytes).await.unwrap();
        assert_eq!((memory.items.len(), memory.has_more), (expected, has_more), "{limit} {max_bytes}");
        let sessions =
            store.sessions(tenant, SessionFilter::default(), None, limit, max_bytes).await.unwrap();
        // The ninth session is the one with the revisions.
        assert_eq!((sessions.items.len(), sessions.has_more), (expected, true), "{limit} {max_bytes}");
        let revisions =
            store.revisions(tenant, &demo.session, i64::MAX, limit, max_bytes).await.unwrap().unwrap();
        let numbers: Vec<i64> = revisions.items.iter().map(|revision| revision.revision).collect();
        assert_eq!(revisions.has_more, has_more, "{limit} {max_bytes}");
        let smallest = if max_bytes == 2500 { 8 - 1 } else { 9 - expected as i64 };
        assert_eq!(numbers, (smallest..=8).rev().collect::<Vec<_>>(), "{limit} {max_bytes}");
    }
}

const READERS: u32 = 3;
const ROUNDS: usize = 60;

/// One task writes and consolidates while others read; cursor, tail and counts must always be consistent.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_consistent_under_concurrent_writes(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x", "y"]).await;
    let written = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(Semaphore::new(0));
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let (demo, written, reads) = (demo.clone(), written.clone(), reads.clone());
            tokio::spawn(async move {
                let mut seen = BTreeSet::new();
                while !written.load(Ordering::Relaxed) {
                    let snapshot = load(&demo, &user_id("ada"), 1000).await;
                    let session = snapshot.session.as_ref().unwrap();
                    let expected: Vec<_> = (session.cursor + 1..=session.last_seq).collect();
                    assert_eq!(seqs(&snapshot), expected);
                    let tokens: i64 = snapshot.tail.metadata().iter().map(|metadata| metadata.tokens).sum();
                    assert_eq!(session.tail_tokens(), tokens);
                    assert_eq!(
                        session.summary.text,
                        if session.cursor == 0 { String::new() } else { session.cursor.to_string() }
                    );
                    seen.insert((session.cursor, session.last_seq));
                    reads.add_permits(1);
                }
                seen
            })
        })
        .collect();
    for round in (1..).take(ROUNDS) {
        // At most `READERS` reads began before the end of the previous round, so one of these began after it.
        reads.forget_permits(usize::MAX);
        let read = timeout(Duration::from_secs(30), reads.acquire_many(READERS + 1)).await;
        read.expect("the readers have not failed").unwrap().forget();
        demo.say(&["x", "y", "z"]).await;
        if round % 3 == 0 {
            demo.consolidate(round * 2, &(round * 2).to_string()).await;
        }
    }
    written.store(true, Ordering::Relaxed);
    let mut seen = BTreeSet::new();
    for reader in readers {
        seen.extend(reader.await.unwrap());
    }
    assert!(seen.len() >= ROUNDS, "{seen:?}");
}
