//! Appending exchanges: `seq`, tokens, times and atomicity. Idempotency keys are tested in `idempotency`.

use crate::conversation::{Conversation, counted, exchange, exchange_of, message, recorded, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::id::UserId;
use precis::domain::message::Message;
use precis::domain::session::{ConsolidationState, Session, Summary};
use precis::storage::AppendOutcome;
use precis::storage::{AppendRequest, StoreError};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use test_case::test_case;
use time::OffsetDateTime;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_exchange_creates_the_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!(demo.find().await, None);
    let first = exchange(&["Hello", "Hi"]);
    let recorded = demo.record(&first).await;
    assert_eq!((recorded.first_seq, recorded.last_seq, recorded.replayed), (1, 2, false));
    let expected = Session {
        session_id: demo.session.clone(),
        user_id: UserId::default(),
        metadata: "{}".to_owned(),
        last_seq: 2,
        tokens: first.tokens(),
        cursor: 0,
        cursor_tokens: 0,
        summary: Summary::default(),
        revision: 0,
        consolidation: ConsolidationState::default(),
        created_at: recorded.created_at,
        updated_at: recorded.created_at,
    };
    assert_eq!(demo.state().await, expected);
    for stored in demo.history().await {
        assert_eq!(stored.created_at, recorded.created_at);
    }
    let age = OffsetDateTime::now_utc() - recorded.created_at;
    assert!(age.abs() < time::Duration::minutes(1), "{age}");
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_exchange_continues_the_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (mut next, mut tokens, mut times) = (1, 0, Vec::new());
    for texts in [&["a", "b"][..], &["c"], &["d", "e", "f"], &["g", "h"]] {
        let exchange = exchange(texts);
        let recorded = demo.record(&exchange).await;
        assert_eq!(
            (recorded.first_seq, recorded.last_seq),
            (next, next + exchange.messages.len() as i64 - 1)
        );
        (next, tokens) = (recorded.last_seq + 1, tokens + exchange.tokens());
        times.push(recorded.created_at);
        let state = demo.state().await;
        assert_eq!((state.last_seq, state.tokens), (recorded.last_seq, tokens));
        assert_eq!((state.created_at, state.updated_at), (times[0], recorded.created_at));
    }
    assert!(times.is_sorted());
    let history = demo.history().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=8));
    assert!(
        history.iter().zip("abcdefgh".chars()).all(|(stored, c)| stored.json.contains(&format!("\"{c}\"")))
    );
}

/// Uses two stores, like two replicas.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writers_get_seq_without_gaps_or_duplicates(backend: Backend) {
    const WRITERS: usize = 40;
    let replicas = [Conversation::on(&backend).await, Conversation::on(&backend).await];
    let barrier = Arc::new(Barrier::new(WRITERS));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (demo, barrier) = (replicas[writer % 2].clone(), barrier.clone());
        writers.spawn(async move {
            barrier.wait().await;
            let mut written = Vec::new();
            for round in 0..3 {
                let texts: Vec<_> =
                    (0..=(writer + round) % 4).map(|at| format!("{writer}/{round}/{at}")).collect();
                let exchange = exchange(&texts.iter().map(String::as_str).collect::<Vec<_>>());
                let recorded = demo.record(&exchange).await;
                assert_eq!(recorded.last_seq - recorded.first_seq + 1, texts.len() as i64);
                written.push((recorded, exchange));
            }
            assert!(written.is_sorted_by_key(|(recorded, _)| (recorded.first_seq, recorded.created_at)));
            written
        });
    }
    let mut written = writers.join_all().await.concat();
    written.sort_by_key(|(recorded, _)| recorded.first_seq);
    let history = replicas[0].history().await;
    let state = replicas[1].state().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=history.len() as i64));
    assert_eq!(state.last_seq, history.len() as i64);
    assert_eq!(state.tokens, written.iter().map(|(_, exchange)| exchange.tokens()).sum::<i64>());
    let expected = written.iter().flat_map(|(recorded, exchange)| {
        exchange.messages.iter().map(|(message, _)| (recorded.created_at, message.json()))
    });
    assert!(history.iter().map(|stored| (stored.created_at, &*stored.json)).eq(expected));
    assert!(history.is_sorted_by_key(|stored| stored.created_at));
    assert_eq!(state.updated_at, history.last().unwrap().created_at);
}

/// A trigger makes the database reject the third message of an exchange.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_with_rejected_message_is_not_stored(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let refuse = match backend {
        Backend::Sqlite(_) => {
            "CREATE TRIGGER refuse BEFORE INSERT ON messages WHEN NEW.message LIKE '%unlucky%'
             BEGIN SELECT RAISE(ABORT, 'unlucky'); END"
        }
        Backend::Postgres(_) => {
            "ALTER TABLE messages ADD CONSTRAINT refuse CHECK (message NOT LIKE '%unlucky%')"
        }
    };
    sql.run(refuse).await;
    let unlucky =
        Exchange { metadata: Some(r#"{"a":1}"#.to_owned()), ..exchange(&["a", "b", "unlucky", "d"]) };
    let key = crate::conversation::key("k", &unlucky);
    for before in [None, Some(exchange(&["before", "it"]))] {
        if let Some(before) = before {
            demo.record(&before).await;
        }
        let rows = sql.rows().await;
        let request = AppendRequest::new(&demo.tenant, &demo.session, unlucky.clone(), Some(key.clone()));
        let error = demo.store.append_exchange(request).await.unwrap_err();
        assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
        assert_eq!(sql.rows().await, rows);
    }
    let allow = match backend {
        Backend::Sqlite(_) => "DROP TRIGGER refuse",
        Backend::Postgres(_) => "ALTER TABLE messages DROP CONSTRAINT refuse",
    };
    sql.run(allow).await;
    let recorded = recorded(demo.append(&unlucky, Some(&key)).await);
    assert_eq!((recorded.first_seq, recorded.last_seq, recorded.replayed), (3, 6, false));
}

/// The call is cancelled at every await point, as happens if a task is aborted.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_append_is_stored_completely_or_not_at_all(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut given_up = 0;
    for attempt in 0..60 {
        let text = format!("{attempt}.");
        let exchange = exchange(&[&text, &text, &text]);
        // The number of await points is not known, so every number up to a limit is tried.
        given_up += usize::from(polled(attempt % 20, demo.append(&exchange, None)).await.is_none());
    }
    assert!(given_up > 3);
    // The store still works.
    let last = demo.say(&["after", "it"]).await;
    let history = demo.history().await;
    assert!(history.iter().map(|stored| stored.seq).eq(1..=last.last_seq));
    for attempt in 0..60 {
        let parts = history.iter().filter(|stored| stored.json.contains(&format!("\"{attempt}.\""))).count();
        assert!(parts == 0 || parts == 3, "{parts} of 3 messages");
    }
    let tokens: i64 = history.iter().map(|stored| stored.json.len() as i64).sum();
    assert_eq!(demo.state().await.tokens, tokens);
}

/// Polls the future at most `most` times and returns its result if it is ready by then.
pub(crate) async fn polled<F: Future>(most: usize, future: F) -> Option<F::Output> {
    let (mut future, mut polls) = (pin!(future), 0);
    std::future::poll_fn(move |context| {
        if polls == most {
            return Poll::Ready(None);
        }
        polls += 1;
        future.as_mut().poll(context).map(Some)
    })
    .await
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_by_other_user_is_rejected(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&exchange_of("ada", &["a", "b"])).await;
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let other = Exchange { metadata: Some(r#"{"mine":true}"#.to_owned()), ..exchange_of("bo", &["c"]) };
    let key = crate::conversation::key("k", &other);
    assert_eq!(demo.append(&other, Some(&key)).await, AppendOutcome::UserMismatch);
    assert_eq!(demo.append(&exchange_of("default", &["c"]), None).await, AppendOutcome::UserMismatch);
    assert_eq!(demo.append(&exchange_of("Ada", &["c"]), None).await, AppendOutcome::UserMismatch);
    assert_eq!(sql.rows().await, rows);
    assert_eq!(demo.record(&exchange_of("ada", &["c"])).await.last_seq, 3);
    assert_eq!(demo.say(&["whose it is already"]).await.last_seq, 4);
    assert_eq!(demo.state().await.user_id, user_id("ada"));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_is_kept_until_an_exchange_replaces_it(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let with =
        |metadata: Option<&str>| Exchange { metadata: metadata.map(str::to_owned), ..exchange(&["a"]) };
    let odd = r#"{"z":1.0,"a":"\u0000é","big":123456789012345678901234567890}"#;
    for (given, expected) in [(None, "{}"), (Some(odd), odd), (None, odd), (Some("{}"), "{}"), (None, "{}")] {
        demo.record(&with(given)).await;
        assert_eq!(demo.state().await.metadata, expected);
    }
    let other = demo.session("other");
    other.record(&with(Some(odd))).await;
    assert_eq!(other.state().await.metadata, odd);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_returned_byte_for_byte(backend: Backend) {
    let texts = [
        r#"{"role":"user","content":"私はお茶が好きです 🍵 e\u0301 \ud83c\udf75"}"#,
        r#"{"content":"key order","role":"user","z":1,"a":2}"#,
        r#"{"role":"user","content":"\u0000\u001f\\\"\/ NUL and all"}"#,
        r#"{"role":"user","content":"numbers","x":[1.0,1e3,-0.0,123456789012345678901234567890,0.1000]}"#,
        r#"{"role":"user","content":"twice","a":1,"a":2,"n":null,"o":{},"l":[]}"#,
        r#"{"role":"user","content":"  spaces inside  ' \" ; DROP TABLE messages; -- $1 ? :a {}"}"#,
        r#"{"role":"user","content":[{"type":"text","text":"part"},{"type":"image_url","image_url":{"url":"x"}}]}"#,
        r#"{"role":"assistant","content":null,"tool_calls":[{"id":"a\u0000b","type":"function","function":{"name":"f","arguments":"{\"x\": 1.0}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"a\u0000b","content":"a NUL in an id"}"#,
        r#"{"role":"assistant","content":""}"#,
    ];
    let demo = Conversation::on(&backend).await;
    let messages = texts.iter().map(|text| counted(message(text))).collect();
    demo.record(&Exchange { messages, user_id: None, metadata: None }).await;
    let history = demo.history().await;
    assert!(history.iter().map(|stored| stored.json.as_str()).eq(texts));
    let snapshot =
        demo.store.load_context(&demo.tenant, &demo.session, &UserId::default(), 100).await.unwrap();
    assert!(snapshot.tail.iter().map(|message| message.json.as_str()).eq(texts));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_exchanges_are_stored(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let long = "é".repeat(1 << 20);
    assert_eq!(demo.say(&["one", &long]).await.last_seq, 2);
    assert_eq!(demo.say(&["x"; 1000]).await.last_seq, 1002);
    let history = demo.history().await;
    assert_eq!(history[1].json, Message::text(precis::domain::message::Role::Assistant, &long).json());
    assert!(history.iter().map(|stored| stored.seq).eq(1..=1002));
}

/// Covers a clock that is set back and replicas with different clocks.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_of_a_session_never_decrease(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["now", "here"]).await;
    let mut sql = Sql::on(&backend).await;
    let later = OffsetDateTime::now_utc().replace_nanosecond(123_456_000).unwrap() + time::Duration::days(1);
    let hour = later.unix_timestamp() / 3600;
    let later_text = sql.time(later);
    sql.run(&format!("UPDATE sessions SET updated_at = {later_text}, activity_hour = {hour}")).await;
    let recorded = demo.say(&["back", "again"]).await;
    assert_eq!(recorded.created_at, later);
    assert_eq!(demo.state().await.updated_at, later);
    assert_eq!(demo.history().await[3].created_at, later);
    assert_eq!(sql.figure("SELECT activity_hour FROM sessions").await, hour);
}
