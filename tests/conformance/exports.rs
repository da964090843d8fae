//! Bounded reads of messages for exports, and imports, which are stored completely or not at all.

use crate::conversation::{Conversation, counted, exchange, message, summary, user_id};
use crate::exchanges::polled;
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::MessageFacts;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::revision::{Revision, RevisionKind};
use precis::storage::StoreError;
use precis::storage::{ImportOutcome, MessageRange, RowBatch, RowBatches};
use test_case::test_case;
use time::OffsetDateTime;
use time::macros::datetime;
use tokio::sync::mpsc;

const BEGAN: OffsetDateTime = datetime!(2026-02-03 10:15:00.000001 UTC);
/// The last time that can be exported.
const LAST_TIME: OffsetDateTime = datetime!(9999-12-31 23:59:59.999999 UTC);

async fn part(demo: &Conversation, part: MessageRange) -> Vec<i64> {
    let read = demo.store.message_range(&demo.tenant, &demo.session, part).await.unwrap();
    read.iter().map(|message| message.seq).collect()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_range_is_bounded_in_rows_and_bytes(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let all = MessageRange { after_seq: 0, last_seq: 9, limit: 9, max_bytes: 1 << 20 };
    assert_eq!(part(&demo, all).await, [0; 0]);
    let long = "é".repeat(1000);
    demo.say(&["a", "b", "c", &long, "d", &long]).await;
    let bytes: Vec<_> = demo.history().await.iter().map(|message| message.json.len() as i64).collect();
    assert_eq!(part(&demo, all).await, [1, 2, 3, 4, 5, 6]);
    assert_eq!(part(&demo, MessageRange { limit: 2, ..all }).await, [1, 2]);
    assert_eq!(part(&demo, MessageRange { after_seq: 2, last_seq: 4, ..all }).await, [3, 4]);
    assert_eq!(part(&demo, MessageRange { after_seq: 6, ..all }).await, [0; 0]);
    for (sum, expected) in [(bytes[0] + bytes[1], vec![1, 2]), (bytes[0] + bytes[1] - 1, vec![1])] {
        assert_eq!(part(&demo, MessageRange { max_bytes: sum, ..all }).await, expected);
    }
    // At least one message is read, however large it is.
    assert_eq!(part(&demo, MessageRange { after_seq: 3, max_bytes: 1, ..all }).await, [4]);
    let read = demo.store.message_range(&demo.tenant, &demo.session, all).await.unwrap();
    assert_eq!(read, demo.history().await);
}

/// Returns a session of three messages and two revisions, with its rows in batches.
fn imported() -> (ImportedSession, Vec<RowBatch>) {
    let texts = [
        r#"{"role":"user","content":"\u0000 ' \" $1 é","x":1.0}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"a\u0000","function":{"name":"f","arguments":"{}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"a\u0000","content":"done"}"#,
    ];
    let messages = (1..).zip(texts).map(|(seq, text)| {
        let (message, tokens) = counted(message(text));
        let created_at = if seq == 3 { LAST_TIME } else { BEGAN + time::Duration::seconds(seq) };
        let facts = MessageFacts { created_at: Some(created_at), ..MessageFacts::default() };
        ImportedMessage { seq, facts, message, tokens }
    });
    let messages: Vec<_> = messages.collect();
    let revision = |revision, kind, seq, cursor, text: &str| Revision {
        revision,
        kind,
        from_seq: Some(seq),
        to_seq: Some(seq),
        cursor,
        summary: summary(text),
        added: "added".to_owned(),
        meta: None,
        provenance: None,
        redacted_seq: None,
        created_at: BEGAN,
    };
    let revisions = vec![
        revision(1, RevisionKind::Consolidation, 1, 1, "one"),
        revision(2, RevisionKind::Consolidation, 2, 2, "one, two"),
    ];
    let imported = ImportedSession {
        user_id: Some(user_id("ada")),
        metadata: Some(r#"{"z":1.0}"#.to_owned()),
        times: Some((BEGAN, BEGAN + time::Duration::HOUR)),
        last_seq: 3,
        tokens: messages.iter().map(|message| message.tokens).sum(),
        revision: 2,
        cursor: 2,
        summary: summary("one, two"),
        fingerprint: String::new(),
        messages_only: false,
    };
    let (first, second) = messages.split_at(1);
    let batches = vec![
        RowBatch { messages: first.to_vec(), revisions: Vec::new() },
        RowBatch { messages: second.to_vec(), revisions },
    ];
    (imported, batches)
}

/// Returns a channel that contains all batches.
fn ready(batches: Vec<RowBatch>) -> RowBatches {
    let (sender, receiver) = mpsc::channel(batches.len().max(1));
    for batch in batches {
        sender.try_send(batch).expect("there is room");
    }
    receiver
}

async fn import(
    demo: &Conversation,
    imported: &ImportedSession,
    batches: Vec<RowBatch>,
) -> Result<ImportOutcome, StoreError> {
    let users = (Some(&user_id("ada")), None);
    demo.store.import_session(&demo.tenant, &demo.session, users, imported, ready(batches)).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn imported_session_is_listed_by_its_last_activity_and_erased_completely(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (imported, batches) = imported();
    assert_eq!(import(&demo, &imported, batches).await.unwrap(), ImportOutcome::Imported);
    let metadata = demo.store.message_metadata(&demo.tenant, &demo.session, 1, 9).await.unwrap();
    assert_eq!((metadata[0].calls()[0].as_str(), metadata[1].result_of()), ("a\0", Some("a\0")));
    let hour = sql.number("SELECT activity_hour FROM sessions").await;
    assert_eq!(hour, BEGAN.unix_timestamp() / 3600 + 1);
    assert!(demo.erase().await);
    assert_eq!(sql.rows().await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn imported_messages_are_searchable(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (imported, batches) = imported();
    assert_eq!(import(&demo, &imported, batches).await.unwrap(), ImportOutcome::Imported);
    assert_eq!(demo.indexed().await.len(), 3);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn import_into_an_existing_session_writes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["mine"]).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let (imported, batches) = imported();
    assert_eq!(import(&demo, &imported, batches.clone()).await.unwrap(), ImportOutcome::Exists);
    assert_eq!(sql.rows().await, rows);
    // One of several concurrent imports succeeds.
    let other = demo.session("other");
    let all = (0..8).map(|_| import(&other, &imported, batches.clone()));
    let outcomes = futures_util::future::join_all(all).await;
    let made = outcomes.iter().filter(|outcome| matches!(outcome, Ok(ImportOutcome::Imported))).count();
    let found = outcomes
        .iter()
        .filter(|outcome| matches!(outcome, Ok(ImportOutcome::Exists | ImportOutcome::Importing)))
        .count();
    assert_eq!((made, found), (1, 7), "{outcomes:?}");
    assert_eq!(other.history().await.len(), 3);
}

/// There are fewer rows than announced, two rows have one `seq`, or the database rejects the last row.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_import_writes_nothing(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (imported, batches) = imported();
    for short in 0..batches.len() {
        let outcome = import(&demo, &imported, batches[..short].to_vec()).await.unwrap();
        assert_eq!(outcome, ImportOutcome::Incomplete);
        assert_eq!((sql.rows().await, demo.find().await), (Vec::new(), None));
    }
    let mut double = batches.clone();
    double.insert(1, batches[0].clone());
    let error = import(&demo, &imported, double).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
    sql.reject_rows("revisions", "revision", "2").await;
    let error = import(&demo, &imported, batches.clone()).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
    assert_eq!((sql.rows().await, demo.find().await), (Vec::new(), None));
    sql.accept_rows("revisions").await;
    assert_eq!(import(&demo, &imported, batches).await.unwrap(), ImportOutcome::Imported);
}

/// The call is cancelled at every await point, as happens if a task is aborted.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_import_is_complete_or_absent(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (imported, batches) = imported();
    let mut given_up = 0;
    for polls in 0..40 {
        let one = demo.session(&format!("{polls}"));
        given_up += usize::from(polled(polls, import(&one, &imported, batches.clone())).await.is_none());
    }
    assert!(given_up > 3);
    // The store still works.
    demo.record(&exchange(&["after", "it"])).await;
    for polls in 0..40 {
        let one = demo.session(&format!("{polls}"));
        if let Some(state) = one.find().await {
            assert_eq!((state.last_seq, state.revision, one.history().await.len()), (3, 2, 3));
            assert_eq!(one.revisions().await.unwrap().len(), 2);
        }
    }
}
