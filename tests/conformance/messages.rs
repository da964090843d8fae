//! Reading the history, and its protection against changes.

use crate::conversation::{Conversation, counted, message};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::message::Role;
use precis::domain::message_metadata::MessageMetadata;
use precis::domain::tail::TailLimit;
use precis::storage::{ContextSnapshot, LoadedContext};
use test_case::test_case;

/// Reads a context as one of small messages, which SQLite returns in another form, and as one of large messages.
async fn both_reads(demo: &Conversation) -> (ContextSnapshot, ContextSnapshot) {
    let limit = TailLimit { messages: 100, bytes: usize::MAX };
    let small = demo.store.load_context(&demo.tenant, &demo.session, None, limit).await.unwrap();
    let LoadedContext::Complete(small) = small else { panic!("small messages are expected") };
    (small, demo.store.load_large_context(&demo.tenant, &demo.session, None, limit).await.unwrap())
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_metadata_matches_the_messages(backend: Backend) {
    let call =
        |id: &str| format!(r#"{{"id":{id},"type":"function","function":{{"name":"f","arguments":"{{}}"}}}}"#);
    let calls = format!(
        r#"{{"role":"assistant","content":null,"tool_calls":[{},{}]}}"#,
        call(r#""a\"b,[]""#),
        call(r#""é\u0000""#)
    );
    let texts = [
        r#"{"role":"user","content":"Do it"}"#,
        &calls,
        r#"{"role":"tool","tool_call_id":"é\u0000","content":"done"}"#,
        r#"{"role":"tool","tool_call_id":"a\"b,[]","content":""}"#,
        r#"{"role":"assistant","content":"Done"}"#,
    ];
    let messages: Vec<_> = texts.iter().map(|text| counted(message(text))).collect();
    let expected: Vec<_> =
        messages.iter().map(|(message, tokens)| MessageMetadata::new(message, *tokens)).collect();
    assert_eq!(expected[1].calls(), ["a\"b,[]", "é\0"]);
    assert_eq!(expected[2].result_of(), Some("é\0"));
    let demo = Conversation::on(&backend).await;
    let stored = messages.clone();
    demo.record(&Exchange { messages, ..Exchange::default() }).await;
    for (after, limit) in [(0, 100), (0, 5), (0, 2), (1, 3), (4, 9), (5, 9), (9, 9), (0, 0)] {
        let metadata = demo.store.message_metadata(&demo.tenant, &demo.session, after, limit).await.unwrap();
        let (skip, take) = (usize::try_from(after).unwrap(), usize::try_from(limit).unwrap());
        assert!(metadata.iter().eq(expected.iter().skip(skip).take(take)), "{after} {limit} {metadata:?}");
    }
    let (small, large) = both_reads(&demo).await;
    assert_eq!(small.tail.metadata(), expected);
    assert!(
        small.tail.messages(0).map(|message| message.json).eq(stored.iter().map(|(text, _)| text.json()))
    );
    assert_eq!((small.tail, small.session), (large.tail, large.session));
    demo.store.redact_message(&demo.tenant, &demo.session, 2, None).await.unwrap();
    let (small, large) = both_reads(&demo).await;
    assert!(
        small
            .tail
            .metadata()
            .iter()
            .map(|message| message.is_redacted)
            .eq([false, true, false, false, false])
    );
    assert_eq!((small.tail, small.session), (large.tail, large.session));
    let other = demo.session("other");
    assert_eq!(other.store.message_metadata(&other.tenant, &other.session, 0, 9).await.unwrap(), []);
    assert_eq!(expected[0].role, Role::User);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_rejects_changes_of_messages_and_revisions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 4]).await;
    demo.consolidate(2, "one").await;
    demo.consolidate(3, "two").await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    for (table, number, changed) in [("messages", "seq", "message"), ("revisions", "revision", "summary")] {
        let mut statements = vec![
            format!("UPDATE {table} SET {changed} = '{{}}'"),
            format!("UPDATE {table} SET {number} = {number} + 10"),
            format!("DELETE FROM {table}"),
            format!("DELETE FROM {table} WHERE {number} = 2"),
        ];
        match backend {
            Backend::Sqlite(_) => statements.extend([
                format!("INSERT OR REPLACE INTO {table} SELECT * FROM {table} WHERE {number} = 2"),
                format!("REPLACE INTO {table} SELECT * FROM {table} WHERE {number} = 2"),
                format!("UPDATE OR REPLACE {table} SET {number} = 2 WHERE {number} = 1"),
            ]),
            Backend::Postgres(_) => statements.extend([
                format!("TRUNCATE {table} CASCADE"),
                "TRUNCATE sessions CASCADE".to_owned(),
                format!(
                    "INSERT INTO {table} SELECT * FROM {table} WHERE {number} = 2
                     ON CONFLICT (tenant_id, session_id, {number}) DO UPDATE SET {changed} = excluded.{changed}"
                ),
            ]),
        }
        for statement in statements {
            let error = sql.error(&statement).await;
            assert!(error.contains("is append-only"), "{statement}: {error}");
        }
    }
    assert_eq!(sql.rows().await, rows);
}
