//! Stored bytes of sessions and tenants, after each operation that changes them, before and after sessions are settled.

use crate::conversation::{Conversation, exchange_of, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::consolidation::Policy;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::message::{Message, Role};
use precis::domain::retention::hour;
use precis::domain::session::Window;
use precis::domain::session::{Session, Summary};
use precis::storage::{ImportOutcome, RowBatch};
use test_case::test_case;
use time::macros::datetime;
use tokio::sync::mpsc;

/// Settles all sessions whose activity is two hours old or older, in small steps.
async fn settle(demo: &Conversation) {
    let before = hour(demo.store.time().await.unwrap()) - 1;
    let mut from = None;
    loop {
        from = demo.store.settle_sessions(&demo.tenant, from, before, 2).await.unwrap();
        if from.is_none() {
            return;
        }
    }
}

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
    for settled in [false, true] {
        if settled {
            settle(demo).await;
        }
        assert_eq!(sql.number(WRONG_SESSIONS).await, 0, "{what}");
        let stored = demo.store.stored_bytes(&demo.tenant).await.unwrap();
        assert_eq!(stored, sql.number(&sum).await, "{what}, settled: {settled}");
    }
}

/// Makes all sessions of the tenant inactive since `hours` hours, as if that time had passed.
async fn age(demo: &Conversation, sql: &mut Sql, hours: i64) {
    let tenant = demo.tenant.as_str();
    for (table, column) in [("sessions", "activity_hour"), ("tenants", "settled_hour")] {
        sql.run(&format!("UPDATE {table} SET {column} = {column} - {hours} WHERE tenant_id = '{tenant}'"))
            .await;
    }
}

async fn import(demo: &Conversation) {
    let old = datetime!(2020-01-01 00:00 UTC);
    let message = |seq| ImportedMessage {
        seq,
        created_at: Some(old),
        redacted_at: None,
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

/// A redaction replaces the text of a message, in sessions that are active, settled, or were never active on this store.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_bytes_shrink_with_a_message(backend: Backend) {
    let mut sql = Sql::on(&backend).await;
    sql.run(match sql {
        Sql::Postgres(_) => "ALTER TABLE messages DISABLE TRIGGER append_only",
        Sql::Sqlite(_) => "DROP TRIGGER messages_reject_update",
    })
    .await;
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b", "c"]).await;
    import(&demo).await;
    for seq in 1..=2 {
        for session in ["demo", "imported"] {
            sql.run(&format!(
                "UPDATE messages SET message = '{{}}' WHERE session_id = '{session}' AND seq = {seq}"
            ))
            .await;
            check(&demo, &mut sql, "a shorter message").await;
        }
        age(&demo, &mut sql, 3).await;
        check(&demo, &mut sql, "age").await;
    }
    let demo_bytes = demo.state().await.stored_bytes;
    assert_eq!(demo_bytes, 2 + 2 + demo.history().await[2].json.len() as i64);
    assert_eq!(demo.session("imported").state().await.stored_bytes, 4);
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
    // Twice: with sessions that were active just now, and with ones that have been settled before.
    for round in 0..2 {
        for n in 0..5 {
            let conversation = acme.session(&format!("s{n}"));
            conversation.record(&exchange_of("ada", &["hello", "grüß dich"])).await;
            conversation.say(&["a", "b", "c"]).await;
        }
        check(&acme, &mut sql, "exchanges").await;
        let (session, fork, branch) =
            (session_id("s1"), session_id(&format!("fork{round}")), session_id(&format!("branch{round}")));
        store.fork_session(tenant, &session, &fork, 3).await.unwrap();
        check(&acme, &mut sql, "fork").await;
        store.rewind_session(tenant, &session, &branch, 2, 99).await.unwrap();
        check(&acme, &mut sql, "rewind").await;
        acme.session("s1").say(&["after the rewind"]).await;
        check(&acme, &mut sql, "exchange after the rewind").await;
        if round == 0 {
            age(&acme, &mut sql, 3).await;
            check(&acme, &mut sql, "age").await;
        }
        import(&acme).await;
        check(&acme, &mut sql, "import").await;
        assert!(acme.session("imported").erase().await);
        assert!(acme.session(fork.as_str()).erase().await);
        check(&acme, &mut sql, "erasure").await;
        other.say(&["of another tenant"]).await;
    }
    assert!(store.erase_user(tenant, &user_id("ada")).await.unwrap());
    check(&acme, &mut sql, "erasure of the user").await;
    assert_eq!(store.stored_bytes(tenant).await.unwrap(), 0);
    check(&other, &mut sql, "another tenant").await;
    assert!(store.stored_bytes(&other.tenant).await.unwrap() > 0);
}

/// Exchanges, settling and erasures at the same time neither lose nor duplicate a byte.
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
                    // The current hour, which the service does not settle, so that settling competes with exchanges.
                    let now = hour(demo.store.time().await.unwrap());
                    demo.store.settle_sessions(&demo.tenant, Some(now - 1), now + 1, 3).await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    sql.run("UPDATE tenants SET settled_hour = 0").await;
    check(&demo, &mut sql, "concurrent changes").await;
}

/// During an update, replicas of the previous version append with the function that knows no bytes.
#[tokio::test]
async fn exchange_of_the_previous_version_on_postgres_is_counted() {
    const APPEND: &str = "\
        SELECT * FROM store_exchanges(ARRAY['default'], ARRAY[2], ARRAY[3], ARRAY[0], ARRAY['a', 'b'],
            ARRAY[NULL, NULL]::text[], ARRAY[NULL, NULL]::text[], ARRAY[2, 1], ARRAY[2, 1], ARRAY[NULL, NULL]::text[], ARRAY[15, 2],
            ARRAY[1, 1, 2], ARRAY[1, 2, 1], ARRAY['user', 'user', 'user'], ARRAY[NULL, NULL, NULL]::text[],
            ARRAY[NULL, NULL, NULL]::text[], ARRAY[1, 1, 1], ARRAY['{\"a\":1}', '{\"ä\":2}', '{}'], ARRAY[]::timestamptz[],
            ARRAY['old', 'old', 'old'], ARRAY[]::bigint[], ARRAY[]::text[], ARRAY[]::text[], ARRAY[]::bytea[], ARRAY[]::bigint[],
            ARRAY[]::bigint[], 'english-2', '50ms')";
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    sql.run(APPEND).await;
    sql.run(APPEND).await;
    assert_eq!(demo.session("a").state().await.stored_bytes, 2 * (7 + 8));
    assert_eq!(demo.session("b").state().await.stored_bytes, 2 * 2);
    // The terms of the previous version are not those of the index, so the messages are missing.
    assert_eq!(sql.unindexed().await, ["default a 0 4", "default b 0 2"]);
    check(&demo, &mut sql, "the previous version").await;
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
    // The hour may have changed since the first session.
    age(&demo, &mut sql, 3).await;
    assert_eq!(
        store.due_sessions(tenant, hour - 1, &Policy { threshold: 0, ..Policy::default() }).await.unwrap(),
        0
    );
    assert_eq!(
        store.due_sessions(tenant, hour - 3, &Policy { threshold: 0, ..Policy::default() }).await.unwrap(),
        8
    );
}

/// Compares the number of sessions that are due with those by the rule.
async fn assert_due(demo: &Conversation, hour: i64, sessions: &[Session], policy: &Policy) {
    let expected =
        sessions.iter().filter(|session| policy.due_by((*session).into(), session.window).is_some()).count();
    let due = demo.store.due_sessions(&demo.tenant, hour, policy).await.unwrap();
    assert_eq!(due, i64::try_from(expected).unwrap(), "{policy:?}");
}
