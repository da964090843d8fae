//! Context snapshots.

use crate::conversation::{Conversation, user_id};
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::storage::ContextSnapshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use test_case::test_case;

async fn load(conversation: &Conversation, user: &UserId, most: usize) -> ContextSnapshot {
    conversation
        .store
        .load_context(&conversation.tenant, &conversation.session, Some(user), most)
        .await
        .unwrap()
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

/// One task writes and consolidates while others read; cursor, tail and counts must always be consistent.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_consistent_under_concurrent_writes(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x", "y"]).await;
    let written = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let (demo, written) = (demo.clone(), written.clone());
            tokio::spawn(async move {
                let mut seen = std::collections::BTreeSet::new();
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
                }
                seen.len()
            })
        })
        .collect();
    for round in 1..=60 {
        demo.say(&["x", "y", "z"]).await;
        if round % 3 == 0 {
            demo.consolidate(round * 2, &(round * 2).to_string()).await;
        }
    }
    written.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.await.unwrap() > 1, "the reader saw nothing of it");
    }
}
