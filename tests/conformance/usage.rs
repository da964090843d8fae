//! Stored bytes of sessions and tenants, after each operation that changes them, and sessions that are due.

use crate::conversation::{Conversation, exchange_of, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::consolidation::Policy;
use precis::domain::exchange::MessageFacts;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::message::{Message, Role};
use precis::domain::retention::hour;
use precis::domain::session::Window;
use precis::domain::session::{Session, Summary};
use precis::storage::{ImportOutcome, RowBatch};
use test_case::test_case;
use time::macros::datetime;
use tokio::sync::mpsc;

/// Asserts that sessions and tenant have the bytes of their messages.
async fn check(demo: &Conversation, sql: &mut Sql, what: &str) {
    const WRONG_SESSIONS: &str = "\
        SELECT count(*) FROM sessions AS s WHERE stored_bytes <> (
            SELECT coalesce(sum(octet_length(message)), 0) FROM messages AS m
            WHERE m.tenant_id = s.tenant_id AND m.session_id = s.session_id
        )";
    let tenant = demo.tenant.as_str();
    let sum = format!(
        "SELECT CAST(coalesce(sum(octet_length(message)), 0) AS bigint) FROM messages WHERE tenant_id = '{tenant}'"
    );
    assert_eq!(sql.number(WRONG_SESSIONS).await, 0, "{what}");
    let stored = demo.store.stored_bytes(&demo.tenant).await.unwrap();
    assert_eq!(stored, sql.number(&sum).await, "{what}");
}

async fn import(demo: &Conversation) {
    let old = datetime!(2020-01-01 00:00 UTC);
    let message = |seq| ImportedMessage {
        seq,
        facts: MessageFacts { created_at: Some(old), ..MessageFacts::default() },
        message: Message::text(Role::User, "imported äöü"),
        tokens: 1,
    };
    let imported = ImportedSession {
        user_id: None,
        metadata: None,
        times: Some((old, old)),
        last_seq: 2,
        tokens: 2,
        revision: 0,
        cursor: 0,
        summary: Summary::default(),
        fingerprint: String::new(),
        messages_only: false,
    };
    let (sender, batches) = mpsc::channel(1);
    sender.send(RowBatch { messages: vec![message(1), message(2)], revisions: vec![] }).await.unwrap();
    drop(sender);
    let (tenant, session) = (&demo.tenant, session_id("imported"));
    let outcome = demo.store.import_session(tenant, &session, (None, None), &imported, batches).await;
    assert_eq!(outcome.unwrap(), ImportOutcome::Imported);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_bytes_follow_each_change(backend: Backend) {
    let acme = Conversation::on(&backend).await.tenant("acme");
    let other = acme.tenant("other");
    let mut sql = Sql::on(&backend).await;
    let (store, tenant) = (&acme.store, &acme.tenant);
    assert_eq!(store.stored_bytes(tenant).await.unwrap(), 0);
    store.bind_session(tenant, &session_id("bound"), &user_id("ada")).await.unwrap();
    check(&acme, &mut sql, "binding").await;
    for n in 0..5 {
        let conversation = acme.session(&format!("s{n}"));
        conversation.record(&exchange_of("ada", &["hello", "grüß dich"])).await;
        conversation.say(&["a", "b", "c"]).await;
    }
    check(&acme, &mut sql, "exchanges").await;
    let (session, fork, branch) = (session_id("s1"), session_id("fork"), session_id("branch"));
    store.fork_session(tenant, &session, &fork, 3).await.unwrap();
    check(&acme, &mut sql, "fork").await;
    store.rewind_session(tenant, &session, &branch, 2, 99).await.unwrap();
    check(&acme, &mut sql, "rewind").await;
    acme.session("s1").say(&["after the rewind"]).await;
    check(&acme, &mut sql, "exchange after the rewind").await;
    store.redact_message(tenant, &session, 1, None).await.unwrap();
    check(&acme, &mut sql, "redaction").await;
    import(&acme).await;
    check(&acme, &mut sql, "import").await;
    store.redact_message(tenant, &session_id("imported"), 2, None).await.unwrap();
    check(&acme, &mut sql, "redaction of an imported message").await;
    assert!(acme.session("imported").erase().await);
    assert!(acme.session(fork.as_str()).erase().await);
    check(&acme, &mut sql, "erasure").await;
    other.say(&["of another tenant"]).await;
    assert!(store.erase_user(tenant, &user_id("ada")).await.unwrap());
    check(&acme, &mut sql, "erasure of the user").await;
    assert_eq!(store.stored_bytes(tenant).await.unwrap(), 0);
    check(&other, &mut sql, "another tenant").await;
    assert!(store.stored_bytes(&other.tenant).await.unwrap() > 0);
}

/// Exchanges, redactions and erasures at the same time neither lose nor duplicate a byte.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stored_bytes_are_exact_after_concurrent_changes(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let mut tasks = Vec::new();
    for writer in 0..4 {
        let demo = demo.clone();
        tasks.push(tokio::spawn(async move {
            for turn in 0..40 {
                let conversation = demo.session(&format!("s{}", (writer + turn) % 6));
                conversation.say(&["question", "answer"]).await;
                if turn % 8 == 7 {
                    conversation.erase().await;
                }
                if turn % 5 == 4 {
                    demo.store.redact_message(&demo.tenant, &conversation.session, 1, None).await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    check(&demo, &mut sql, "concurrent changes").await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn due_sessions_are_counted_by_the_rule(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.tenant("other").say(&["a"; 30]).await;
    let mut sessions = Vec::new();
    for messages in 1..=8 {
        let session = demo.session(&format!("s{messages}"));
        session.say(&vec!["hello"; messages]).await;
        if messages > 6 {
            session.consolidate(3, "They greet each other.").await;
        }
        sessions.push(session.state().await);
    }
    let tokens = sessions[3].tail_tokens();
    let hour = hour(sessions[0].updated_at);
    let (store, tenant) = (&demo.store, &demo.tenant);
    for threshold in [0, 3, 4, 5, 6, 9] {
        for max_tail_tokens in [None, Some(0), Some(tokens - 1), Some(tokens), Some(tokens + 1)] {
            let policy = Policy { threshold, max_tail_tokens, ..Policy::default() };
            assert_due(&demo, hour, &sessions, &policy).await;
        }
    }
    // Three of the sessions have a window.
    for (number, window) in [(4, 40), (5, 60), (7, 60)] {
        let window = Window { tokens: window, fixed: 5 };
        let id = session_id(&format!("s{number}"));
        store.set_window(tenant, &id, Some(window)).await.unwrap();
        sessions[number - 1] = demo.session(&format!("s{number}")).state().await;
        assert_eq!(sessions[number - 1].window, Some(window));
    }
    for is_threshold_set in [false, true] {
        for (threshold, trigger_share) in [(3, 0.1), (3, 0.5), (3, 0.8), (9, 0.3), (9, 1.0)] {
            let policy = Policy { threshold, is_threshold_set, trigger_share, ..Policy::default() };
            assert_due(&demo, hour, &sessions, &policy).await;
        }
    }
    for (number, age) in (0..8).zip([0, 0, 0, 1, 1, 2, 2, 2]) {
        let at = sessions[number].updated_at - time::Duration::hours(age);
        sql.set_activity(&format!("s{}", number + 1), at).await;
    }
    let all = Policy { threshold: 0, ..Policy::default() };
    for (age, expected) in [(0, 3), (1, 5), (2, 8)] {
        assert_eq!(store.due_sessions(tenant, hour - age, &all).await.unwrap(), expected, "{age}");
    }
}

/// Compares the number of sessions that are due with those by the rule.
async fn assert_due(demo: &Conversation, hour: i64, sessions: &[Session], policy: &Policy) {
    let expected =
        sessions.iter().filter(|session| policy.due_by((*session).into(), session.window).is_some()).count();
    let due = demo.store.due_sessions(&demo.tenant, hour, policy).await.unwrap();
    assert_eq!(due, i64::try_from(expected).unwrap(), "{policy:?}");
}
