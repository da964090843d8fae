//! Races on Postgres: a statement that was blocked by another transaction must not act on data that it read before.
//!
//! The test holds the other transaction open until the statement of the store is blocked by it, so that each race happens in
//! the harmful order. SQLite has a single writer, so its statements are not interrupted.

use crate::conversation::{Conversation, LONG, exchange, key, recorded, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use futures_util::future::join_all;
use precis::domain::memory::MemoryAuthor;
use precis::storage::{ForkOutcome, LeaseCondition, NewMemoryDocument, RedactionOutcome, RewindOutcome};
use std::time::Duration;
use uuid::Uuid;

const WAITING: &str = "\
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";

struct Scene {
    backend: Backend,
    demo: Conversation,
    other: Sql,
}

/// Creates a session with ten messages, of which two are summarised, and a memory document.
async fn scene() -> Scene {
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 10]).await;
    demo.consolidate(2, "two").await;
    demo.remember(&user_id("ada"), "first").await;
    let other = Sql::on(&backend).await;
    Scene { backend, demo, other }
}

impl Scene {
    /// Runs a call of the store until it is blocked by the other transaction, then commits that transaction.
    async fn meet<T>(&mut self, other: &str, call: impl Future<Output = T>) -> T {
        Box::pin(self.meet_and_end(other, "COMMIT", Box::pin(call))).await
    }

    /// Does the same with another end of the other transaction.
    async fn meet_and_end<T>(&mut self, other: &str, end: &str, call: impl Future<Output = T>) -> T {
        let mut observer = Sql::on(&self.backend).await;
        self.other.run("BEGIN").await;
        self.other.run(other).await;
        let end = async {
            while observer.number(WAITING).await == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            self.other.run(end).await;
        };
        let meeting = async { tokio::join!(call, end).0 };
        tokio::time::timeout(Duration::from_secs(20), meeting)
            .await
            .expect("the call waits, and then goes on")
    }
}

const ERASE: &str = "DELETE FROM sessions";

const ERASE_AND_CREATE: &str = "\
    DELETE FROM sessions;
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour)
    VALUES ('default', 'demo', 'default', '{}', 0, 0, now(), now(), 0)";

#[tokio::test]
async fn exchange_blocked_by_erasure_creates_a_session() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let exchange = exchange(&["a", "b"]);
    let key = key("k", &exchange);
    let recorded = recorded(scene.meet(ERASE, demo.append(&exchange, Some(&key))).await);
    assert_eq!((recorded.first_seq, recorded.last_seq), (1, 2));
    let state = demo.state().await;
    assert_eq!((state.last_seq, state.tokens, state.cursor, state.revision), (2, exchange.tokens(), 0, 0));
}

#[tokio::test]
async fn exchange_blocked_by_same_idempotency_key_is_a_replay() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let exchange = exchange(&["a"]);
    let key = key("k", &exchange);
    let fingerprint = key.fingerprint.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    let first = format!(
        "UPDATE sessions SET last_seq = 11;
         INSERT INTO messages SELECT tenant_id, session_id, 11, role, tool_call_ids, tool_result_of, tokens, message, created_at
            FROM messages WHERE seq = 1;
         INSERT INTO idempotency_keys VALUES ('default', 'demo', 'k', '\\x{fingerprint}', 11, 11, now(), false)"
    );
    let replay = recorded(scene.meet(&first, demo.append(&exchange, Some(&key))).await);
    assert_eq!((replay.first_seq, replay.last_seq, replay.replayed), (11, 11, true));
    assert_eq!(demo.history().await.len(), 11);
}

#[tokio::test]
async fn erasure_blocked_by_exchange_removes_its_messages() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let write = "UPDATE sessions SET last_seq = 11;
        INSERT INTO messages SELECT tenant_id, session_id, 11, role, tool_call_ids, tool_result_of, tokens, message, created_at
            FROM messages WHERE seq = 1";
    assert!(scene.meet(write, demo.erase()).await);
    assert_eq!(scene.other.number("SELECT count(*) FROM messages").await, 0);
}

/// A fork of the session with its first message, whose id precedes that of the session.
const FORK: &str = "\
    UPDATE sessions SET lineage = '00000000-0000-0000-0000-000000000001';
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
        activity_hour, lineage)
    SELECT tenant_id, 'a fork', user_id, '{}', 1, 1, now(), now(), 0, lineage FROM sessions;
    INSERT INTO messages SELECT tenant_id, 'a fork', seq, role, tool_call_ids, tool_result_of, tokens, message, created_at
        FROM messages WHERE seq = 1";

#[tokio::test]
async fn erasure_of_a_user_blocked_by_a_fork_erases_the_fork() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    scene.other.run("UPDATE sessions SET user_id = 'ada'").await;
    let erase = async || demo.store.erase_user(&demo.tenant, &user_id("ada")).await.unwrap();
    assert!(scene.meet(FORK, erase()).await);
    assert_eq!(scene.other.number("SELECT count(*) FROM sessions").await, 0);
    assert!(!erase().await);
}

#[tokio::test]
async fn redaction_blocked_by_a_fork_redacts_its_message() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let redacted = scene.meet(FORK, demo.store.redact_message(&demo.tenant, &demo.session, 1, None)).await;
    let RedactionOutcome::Redacted(sessions) = redacted.unwrap() else { panic!("the message is redacted") };
    assert_eq!(sessions, [session_id("a fork"), session_id("demo")]);
    assert_eq!(scene.other.number("SELECT count(*) FROM messages WHERE redaction IS NOT NULL").await, 2);
}

/// Each call locks `demo`, waits for `other`, and is ended by Postgres when the transaction wants `demo`, too.
#[tokio::test]
async fn erasure_or_redaction_is_repeated_after_a_deadlock() {
    // A transaction looks for a deadlock once, this long after it began to wait. The call must do so after the other transaction waits,
    // too, and the other one must not do so first.
    const LIMITS: &str = "\
        DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 3000', current_database()); END $$;
        SET deadlock_timeout = '1h'";
    for redacts in [false, true] {
        let mut scene = scene().await;
        scene.other.run(LIMITS).await;
        let demo = Conversation { store: scene.backend.store().await, ..scene.demo.clone() };
        demo.session("other").say(&["x"]).await;
        let related = "UPDATE sessions SET lineage = '00000000-0000-0000-0000-000000000001', user_id = 'ada'";
        scene.other.run(related).await;
        let call = async {
            if redacts {
                demo.store.redact_message(&demo.tenant, &demo.session, 1, None).await.map(|_| ())
            } else {
                demo.store.erase_user(&demo.tenant, &user_id("ada")).await.map(|_| ())
            }
        };
        let lock = "SELECT FROM sessions WHERE session_id = 'other' FOR UPDATE";
        let end = "UPDATE sessions SET metadata = '{}' WHERE session_id = 'demo'; COMMIT";
        Box::pin(scene.meet_and_end(lock, end, call)).await.expect("the call is repeated");
        let (query, expected) = if redacts {
            ("SELECT count(*) FROM messages WHERE session_id = 'demo' AND redaction IS NULL", 9)
        } else {
            ("SELECT count(*) FROM sessions", 0)
        };
        assert_eq!(scene.other.number(query).await, expected);
    }
}

#[tokio::test]
async fn commit_blocked_by_erasure_or_restore_is_discarded() {
    for other in [ERASE, ERASE_AND_CREATE, "UPDATE sessions SET revision = revision + 1"] {
        let mut scene = scene().await;
        let demo = scene.demo.clone();
        let token = demo.lease().await;
        let step = demo.step(5, "five").await;
        assert_eq!(scene.meet(other, demo.commit(token, &step)).await, None, "{other}");
        assert_eq!(scene.other.number("SELECT count(*) FROM revisions WHERE revision > 1").await, 0);
    }
}

#[tokio::test]
async fn restore_blocked_by_erasure_restores_nothing() {
    for other in [ERASE, ERASE_AND_CREATE] {
        let mut scene = scene().await;
        let demo = scene.demo.clone();
        assert_eq!(scene.meet(other, demo.restore(1)).await, None, "{other}");
        assert_eq!(scene.other.number("SELECT count(*) FROM revisions").await, 0);
    }
}

#[tokio::test]
async fn restore_blocked_by_commit_follows_it() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let commit = "UPDATE sessions SET revision = 2, cursor_seq = 5, summary = 'five',
            cursor_tokens = (SELECT sum(tokens) FROM messages WHERE seq <= 5);
        INSERT INTO revisions SELECT tenant_id, session_id, 2, kind, 3, 5, 5, 'five', summary_words, summary_tokens,
            added, meta, source, created_at FROM revisions WHERE revision = 1";
    let restored = scene.meet(commit, demo.restore(1)).await.unwrap();
    assert_eq!((restored.revision, restored.cursor, restored.summary.text.as_str()), (3, 2, "two"));
    let sizes = demo.history().await.iter().take(2).map(|stored| stored.json.len() as i64).sum::<i64>();
    assert_eq!(demo.state().await.cursor_tokens, sizes);
}

/// Rewinds the session to its first message, without a branch.
const REWIND: &str = "\
    SELECT FROM sessions FOR UPDATE;
    UPDATE sessions SET last_seq = 1, cursor_seq = 0, cursor_tokens = 0, summary = '', revision = 0, lease_token = NULL,
        lease_until = NULL, incarnation = gen_random_uuid();
    DELETE FROM messages WHERE seq > 1; DELETE FROM revisions";

#[tokio::test]
async fn restore_blocked_by_rewind_restores_nothing() {
    for revision in [0, 1] {
        let mut scene = scene().await;
        let demo = scene.demo.clone();
        assert_eq!(scene.meet(REWIND, demo.restore(revision)).await, None, "{revision}");
        assert_eq!(scene.other.number("SELECT count(*) FROM revisions").await, 0);
        assert_eq!(demo.state().await.cursor, 0);
    }
}

#[tokio::test]
async fn commit_blocked_by_rewind_is_discarded() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let token = demo.lease().await;
    let step = demo.step(5, "five").await;
    assert_eq!(scene.meet(REWIND, demo.commit(token, &step)).await, None);
    assert_eq!(scene.other.number("SELECT count(*) FROM revisions").await, 0);
}

#[tokio::test]
async fn exchange_blocked_by_rewind_follows_it() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let recorded = recorded(scene.meet(REWIND, demo.append(&exchange(&["a", "b"]), None)).await);
    assert_eq!((recorded.first_seq, recorded.last_seq), (2, 3));
    assert_eq!(recorded.incarnation, Some(demo.state().await.incarnation));
    assert_eq!(demo.history().await.len(), 3);
}

/// Appends a message and commits a revision, as of before the rewind that waits for it.
const APPEND_AND_CONSOLIDATE: &str = "\
    UPDATE sessions SET last_seq = 11, revision = 2, cursor_seq = 5, summary = 'five';
    INSERT INTO messages SELECT tenant_id, session_id, 11, role, tool_call_ids, tool_result_of, tokens, message, created_at
        FROM messages WHERE seq = 1;
    INSERT INTO revisions SELECT tenant_id, session_id, 2, kind, 3, 5, 5, 'five', summary_words, summary_tokens,
        added, meta, source, created_at FROM revisions WHERE revision = 1";

#[tokio::test]
async fn rewind_blocked_by_exchange_keeps_it_in_the_branch() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let branch = session_id("branch");
    let rewind = demo.store.rewind_session(&demo.tenant, &demo.session, &branch, 4, 100);
    let rewound = scene.meet(APPEND_AND_CONSOLIDATE, rewind).await.unwrap();
    let RewindOutcome::Rewound(state) = rewound else { panic!("{rewound:?}") };
    assert_eq!((state.last_seq, state.cursor, state.revision, state.summary.text.as_str()), (4, 2, 1, "two"));
    let branch = demo.session("branch");
    let state = branch.state().await;
    assert_eq!(
        (state.last_seq, state.cursor, state.revision, state.summary.text.as_str()),
        (11, 5, 2, "five")
    );
    assert_eq!((branch.history().await.len(), demo.history().await.len()), (11, 4));
}

#[tokio::test]
async fn fork_blocked_by_rewind_sees_the_shorter_session() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let fork = session_id("fork");
    let forked = scene.meet(REWIND, demo.store.fork_session(&demo.tenant, &demo.session, &fork, 4)).await;
    assert_eq!(forked.unwrap(), ForkOutcome::AfterEnd { last_seq: 1 });
}

#[tokio::test]
async fn erasure_blocked_by_rewind_removes_the_branch() {
    let rewind = format!(
        "{REWIND};
        INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at,
            activity_hour, forked_from, forked_through, fork_kind)
        VALUES ('default', 'branch', 'default', '{{}}', 0, 0, now(), now(), 0, 'demo', 1, 'rewind')"
    );
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    assert!(scene.meet(&rewind, demo.erase()).await);
    assert_eq!(scene.other.number("SELECT count(*) FROM sessions").await, 0);
}

#[tokio::test]
async fn lease_taken_by_another_is_not_granted_after_waiting() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let other =
        "UPDATE sessions SET lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute'";
    assert_eq!(scene.meet(other, demo.take(Uuid::new_v4(), LeaseCondition::Force, LONG)).await, None);
}

#[tokio::test]
async fn lease_with_outdated_revision_is_not_granted_after_waiting() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    let due = LeaseCondition::IfUnchanged { revision: 1 };
    let other = "UPDATE sessions SET revision = revision + 1";
    assert_eq!(scene.meet(other, demo.take(Uuid::new_v4(), due, LONG)).await, None);
}

#[tokio::test]
async fn memory_write_blocked_by_erasure_is_a_version_mismatch() {
    for (expected, version) in [(Some(1), None), (Some(0), Some(1)), (None, Some(1))] {
        let mut scene = scene().await;
        let demo = scene.demo.clone();
        let new = NewMemoryDocument { content: "second", words: 1, tokens: 1, author: MemoryAuthor::Http };
        let ada = user_id("ada");
        let write = demo.store.write_memory_document(&demo.tenant, &ada, new, expected);
        let written = scene.meet("DELETE FROM memories", write).await.unwrap();
        assert_eq!(written.map(|document| document.version), version, "{expected:?}");
        let versions = demo.store.memory_revisions(&demo.tenant, &ada, i64::MAX, 9, 999).await.unwrap();
        assert_eq!(versions.items.len(), usize::from(version.is_some()));
    }
}

#[tokio::test]
async fn memory_write_blocked_by_another_write_is_a_version_mismatch() {
    let write = "UPDATE memories SET version = 2, content = 'other';
        INSERT INTO memory_revisions SELECT tenant_id, user_id, version, content, words, tokens, created_at FROM memories";
    for (expected, version) in [(Some(1), None), (None, Some(3))] {
        let mut scene = scene().await;
        let demo = scene.demo.clone();
        let new = NewMemoryDocument { content: "mine", words: 1, tokens: 1, author: MemoryAuthor::Http };
        let ada = user_id("ada");
        let written = scene
            .meet(write, demo.store.write_memory_document(&demo.tenant, &ada, new, expected))
            .await
            .unwrap();
        assert_eq!(written.map(|document| document.version), version, "{expected:?}");
    }
}

/// Exchanges of a session whose row is locked for long, for example by its erasure, wait; those of other sessions, with which they share
/// batches, do not.
#[tokio::test]
async fn locked_session_delays_no_other_session() {
    let mut scene = scene().await;
    let demo = scene.demo.clone();
    scene.other.run("BEGIN").await;
    scene.other.run("SELECT FROM sessions WHERE session_id = 'demo' FOR UPDATE").await;
    let mut blocked = tokio::task::JoinSet::new();
    for round in 0..10 {
        // More than the connections of a pool would keep waiting for a lock.
        let waiting = demo.clone();
        blocked.spawn(async move { waiting.say(&["blocked"]).await });
        let free = [demo.session("free"), demo.session(&format!("new {round}")), demo.tenant("acme")];
        let appends = free.iter().map(|free| free.say(&["a"]));
        let appended = tokio::time::timeout(Duration::from_secs(2), join_all(appends)).await;
        assert!(appended.is_ok(), "exchanges of other sessions wait for the locked one in round {round}");
    }
    scene.other.run("COMMIT").await;
    let mut firsts: Vec<i64> =
        blocked.join_all().await.into_iter().map(|recorded| recorded.first_seq).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, (11..=20).collect::<Vec<_>>());
}
