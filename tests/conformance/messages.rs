//! Reading the history, and its protection against changes.

use crate::conversation::{ALL, Conversation, counted, exchange, message};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::message::Role;
use precis::domain::message_metadata::MessageMetadata;
use precis::storage::MessageQuery;
use test_case::test_case;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_page_differs_from_missing_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!(demo.page(ALL).await, None);
    demo.say(&["a", "b"]).await;
    assert_eq!(demo.page(MessageQuery { after_seq: 2, ..ALL }).await, Some(Vec::new()));
    assert_eq!(demo.page(MessageQuery { before_seq: 1, descending: true, ..ALL }).await, Some(Vec::new()));
    assert_eq!(demo.page(MessageQuery { limit: 0, ..ALL }).await, Some(Vec::new()));
    assert_eq!(demo.session("other").page(ALL).await, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_contains_exactly_the_requested_messages(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 12]).await;
    for (after_seq, before_seq, limit) in [
        (0, i64::MAX, 100),
        (0, i64::MAX, 5),
        (3, 9, 100),
        (3, 9, 2),
        (3, 4, 9),
        (3, 5, 9),
        (11, 99, 9),
        (9, 3, 9),
    ] {
        let within = (after_seq + 1)..before_seq.min(13);
        let count = usize::try_from(limit).unwrap();
        for descending in [false, true] {
            let page = MessageQuery { after_seq, before_seq, descending, limit };
            let seqs: Vec<_> = demo.page(page).await.unwrap().iter().map(|stored| stored.seq).collect();
            let expected: Vec<_> = if descending {
                within.clone().rev().take(count).collect()
            } else {
                within.clone().take(count).collect()
            };
            assert_eq!(seqs, expected, "{page:?}");
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successive_pages_have_no_gaps_or_duplicates(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 23]).await;
    let mut all = demo.history().await;
    for descending in [false, true] {
        let mut read = Vec::new();
        let mut page = MessageQuery { limit: 5, descending, ..ALL };
        loop {
            let part = demo.page(page).await.unwrap();
            let Some(last) = part.last() else { break };
            if descending {
                page.before_seq = last.seq;
            } else {
                page.after_seq = last.seq;
            }
            read.extend(part);
        }
        assert_eq!(read, all);
        all.reverse();
    }
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
    assert_eq!(expected[1].calls, ["a\"b,[]", "é\0"]);
    assert_eq!(expected[2].result_of.as_deref(), Some("é\0"));
    let demo = Conversation::on(&backend).await;
    demo.record(&Exchange { messages, user_id: None, metadata: None }).await;
    for (after, limit) in [(0, 100), (0, 5), (0, 2), (1, 3), (4, 9), (5, 9), (9, 9), (0, 0)] {
        let metadata = demo.store.message_metadata(&demo.tenant, &demo.session, after, limit).await.unwrap();
        let (skip, take) = (usize::try_from(after).unwrap(), usize::try_from(limit).unwrap());
        assert!(metadata.iter().eq(expected.iter().skip(skip).take(take)), "{after} {limit} {metadata:?}");
    }
    let other = demo.session("other");
    assert_eq!(other.store.message_metadata(&other.tenant, &other.session, 0, 9).await.unwrap(), []);
    assert_eq!(expected[0].role, Role::User);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_rejects_changes_of_messages(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&exchange(&["a", "b"])).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let columns = "tenant_id, session_id, seq, role, tokens, message, created_at";
    let mut statements = vec![
        "UPDATE messages SET message = '{}'".to_owned(),
        "UPDATE messages SET seq = seq + 10".to_owned(),
        "DELETE FROM messages".to_owned(),
        "DELETE FROM messages WHERE seq = 2".to_owned(),
    ];
    let copy = "SELECT tenant_id, session_id, seq, role, 0, '{}', created_at FROM messages WHERE seq = 2";
    match backend {
        Backend::Sqlite(_) => {
            statements.push(format!("INSERT OR REPLACE INTO messages ({columns}) {copy}"));
            statements.push(format!("REPLACE INTO messages ({columns}) {copy}"));
            statements.push("UPDATE OR REPLACE messages SET seq = 2 WHERE seq = 1".to_owned());
        }
        Backend::Postgres(_) => {
            statements.push("TRUNCATE messages".to_owned());
            statements.push("TRUNCATE sessions CASCADE".to_owned());
            statements.push(format!(
                "INSERT INTO messages ({columns}) {copy}
                 ON CONFLICT (tenant_id, session_id, seq) DO UPDATE SET message = excluded.message"
            ));
        }
    }
    for statement in statements {
        let refusal = sql.refusal(&statement).await;
        assert!(refusal.contains("is append-only"), "{statement}: {refusal}");
    }
    assert_eq!(sql.rows().await, rows);
}
