//! Exporting and importing whole sessions: parts that are bounded, and imports that are whole or not at all.

use crate::conversation::{Conversation, counted, exchange, message, summary, user_id};
use crate::exchanges::polled;
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::revision::{Revision, RevisionKind};
use precis::domain::session::{ConsolidationState, Session};
use precis::storage::StoreError;
use precis::storage::StoredMessage;
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
    // One message is read whatever it has.
    assert_eq!(part(&demo, MessageRange { after_seq: 3, max_bytes: 1, ..all }).await, [4]);
    let read = demo.store.message_range(&demo.tenant, &demo.session, all).await.unwrap();
    assert_eq!(read, demo.history().await);
}

/// Rows of three messages and two revisions, and what names them.
fn imported() -> (ImportedSession, Vec<RowBatch>) {
    let texts = [
        r#"{"role":"user","content":"\u0000 ' \" $1 é","x":1.0}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"a\u0000","function":{"name":"f","arguments":"{}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"a\u0000","content":"done"}"#,
    ];
    let messages = (1..).zip(texts).map(|(seq, text)| {
        let (message, tokens) = counted(message(text));
        let created_at = if seq == 3 { LAST_TIME } else { BEGAN + time::Duration::seconds(seq) };
        ImportedMessage { seq, created_at: Some(created_at), message, tokens }
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

/// All batches, ready to be taken.
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
    demo.store.import_session(&demo.tenant, &demo.session, &user_id("ada"), imported, ready(batches)).await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn imported_session_equals_an_appended_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (imported, batches) = imported();
    assert_eq!(import(&demo, &imported, batches.clone()).await.unwrap(), ImportOutcome::Imported);
    let (mut messages, mut revisions) = (Vec::new(), Vec::new());
    for batch in batches {
        messages.extend(batch.messages);
        revisions.extend(batch.revisions);
    }
    let expected = Session {
        session_id: demo.session.clone(),
        user_id: user_id("ada"),
        metadata: r#"{"z":1.0}"#.to_owned(),
        last_seq: 3,
        tokens: imported.tokens,
        cursor: 2,
        cursor_tokens: messages[..2].iter().map(|message| message.tokens).sum(),
        summary: summary("one, two"),
        revision: 2,
        consolidation: ConsolidationState::default(),
        created_at: BEGAN,
        updated_at: BEGAN + time::Duration::HOUR,
    };
    assert_eq!(demo.state().await, expected);
    let stored: Vec<_> = messages
        .iter()
        .map(|row| StoredMessage {
            seq: row.seq,
            created_at: row.created_at.unwrap(),
            json: row.message.json().to_owned(),
        })
        .collect();
    assert_eq!(demo.history().await, stored);
    revisions.reverse();
    assert_eq!(demo.revisions().await, Some(revisions));
    // The marks that a cut needs, and the place in the list of sessions.
    let metadata = demo.store.message_metadata(&demo.tenant, &demo.session, 1, 9).await.unwrap();
    assert_eq!((&metadata[0].calls[0], metadata[1].result_of.as_deref()), (&"a\0".to_owned(), Some("a\0")));
    let hour = Sql::on(&backend).await.figure("SELECT activity_hour FROM sessions").await;
    assert_eq!(hour, BEGAN.unix_timestamp() / 3600 + 1);
    // And it goes on.
    assert_eq!(demo.say(&["next"]).await.first_seq, 4);
    assert_eq!(demo.consolidate(3, "three").await.revision, 3);
    assert_eq!(demo.restore(1).await.unwrap().cursor, 1);
    assert!(demo.erase().await);
    assert_eq!(Sql::on(&backend).await.rows().await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn imported_rows_without_time_get_the_store_time(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let first = counted(message(r#"{"role":"user","content":"a"}"#));
    let row = ImportedMessage { seq: 1, created_at: None, message: first.0, tokens: first.1 };
    let imported = ImportedSession {
        user_id: None,
        metadata: None,
        times: None,
        last_seq: 1,
        tokens: first.1,
        revision: 0,
        cursor: 0,
        summary: summary(""),
        messages_only: true,
        ..imported().0
    };
    assert_eq!(
        import(&demo, &imported, vec![RowBatch { messages: vec![row], revisions: Vec::new() }])
            .await
            .unwrap(),
        ImportOutcome::Imported
    );
    let (state, history) = (demo.state().await, demo.history().await);
    assert_eq!((state.created_at, state.metadata.as_str()), (state.updated_at, "{}"));
    assert_eq!(history[0].created_at, state.created_at);
    let age = OffsetDateTime::now_utc() - state.created_at;
    assert!(age.abs() < time::Duration::minutes(1), "{age}");
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
    // Of many at once one makes it.
    let other = demo.session("other");
    let all = (0..8).map(|_| import(&other, &imported, batches.clone()));
    let outcomes = futures_util::future::join_all(all).await;
    let made = outcomes.iter().filter(|outcome| matches!(outcome, Ok(ImportOutcome::Imported))).count();
    let found = outcomes.iter().filter(|outcome| matches!(outcome, Ok(ImportOutcome::Exists))).count();
    assert_eq!((made, found), (1, 7), "{outcomes:?}");
    assert_eq!(other.history().await.len(), 3);
}

/// The database refuses the last message; the rows are fewer, or more, than was said; two have one `seq`.
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
    let refuse = match backend {
        Backend::Sqlite(_) => {
            "CREATE TRIGGER refuse BEFORE INSERT ON revisions WHEN NEW.revision = 2
             BEGIN SELECT RAISE(ABORT, 'unlucky'); END"
        }
        Backend::Postgres(_) => "ALTER TABLE revisions ADD CONSTRAINT refuse CHECK (revision <> 2)",
    };
    sql.run(refuse).await;
    let error = import(&demo, &imported, batches.clone()).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
    assert_eq!((sql.rows().await, demo.find().await), (Vec::new(), None));
    let allow = match backend {
        Backend::Sqlite(_) => "DROP TRIGGER refuse",
        Backend::Postgres(_) => "ALTER TABLE revisions DROP CONSTRAINT refuse",
    };
    sql.run(allow).await;
    assert_eq!(import(&demo, &imported, batches).await.unwrap(), ImportOutcome::Imported);
}

/// As it happens when a task is aborted: at every point at which the call waits.
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
    // The store is none the worse for it: what was given up is gone, or whole.
    demo.record(&exchange(&["after", "it"])).await;
    for polls in 0..40 {
        let one = demo.session(&format!("{polls}"));
        if let Some(state) = one.find().await {
            assert_eq!((state.last_seq, state.revision, one.history().await.len()), (3, 2, 3));
            assert_eq!(one.revisions().await.unwrap().len(), 2);
        }
    }
}
