//! Idempotency keys.

use crate::conversation::{Conversation, exchange, key, recorded};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::storage::AppendOutcome;
use std::sync::Arc;
use test_case::test_case;
use time::{Duration, OffsetDateTime};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

const AT_ONCE: usize = 20;

/// Covers a session that does not exist yet and an existing one.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_with_one_key_store_one_exchange(backend: Backend) {
    let replicas = [Conversation::on(&backend).await, Conversation::on(&backend).await];
    for round in 0..5 {
        let (barrier, exchange) = (Arc::new(Barrier::new(AT_ONCE)), exchange(&["a", "b", "c"]));
        let before = round * 3;
        let mut requests = JoinSet::new();
        for at in 0..AT_ONCE {
            let (demo, barrier, exchange) = (replicas[at % 2].clone(), barrier.clone(), exchange.clone());
            let key = key(&format!("k{round}"), &exchange);
            requests.spawn(async move {
                barrier.wait().await;
                recorded(demo.append(&exchange, Some(&key)).await)
            });
        }
        let answers = requests.join_all().await;
        assert_eq!(answers.iter().filter(|answer| !answer.replayed).count(), 1);
        for answer in &answers {
            assert_eq!((answer.first_seq, answer.last_seq), (before + 1, before + 3));
            assert_eq!(answer.created_at, answers[0].created_at);
        }
        let state = replicas[0].state().await;
        assert_eq!((state.last_seq, state.tokens), (before + 3, exchange.tokens() * (round + 1)));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_different_exchanges_with_one_key_store_one(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let barrier = Arc::new(Barrier::new(AT_ONCE));
    let mut requests = JoinSet::new();
    for at in 0..AT_ONCE {
        let (demo, barrier) = (demo.clone(), barrier.clone());
        requests.spawn(async move {
            let exchange = exchange(&[&format!("body {at}")]);
            barrier.wait().await;
            demo.append(&exchange, Some(&key("k", &exchange))).await
        });
    }
    let answers = requests.join_all().await;
    assert_eq!(answers.iter().filter(|answer| **answer == AppendOutcome::KeyReused).count(), AT_ONCE - 1);
    assert_eq!(demo.state().await.last_seq, 1);
}

async fn age(sql: &mut Sql, key: &str, by: Duration) {
    let time = sql.time(OffsetDateTime::now_utc() - by);
    sql.run(&format!("UPDATE idempotency_keys SET created_at = {time} WHERE key = '{key}'")).await;
}

/// This holds for any number of later writes.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_kept_for_24_hours(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let first = exchange(&["a", "b"]);
    demo.append(&first, Some(&key("first", &first))).await;
    age(&mut sql, "first", Duration::hours(24) - Duration::minutes(5)).await;
    for at in 0..140 {
        demo.append(&first, Some(&key(&format!("k{at}"), &first))).await;
    }
    assert_eq!(sql.number("SELECT count(*) FROM idempotency_keys").await, 141);
    assert!(recorded(demo.append(&first, Some(&key("first", &first))).await).replayed);
}

/// Keys are deleted only in the session that is written to, after a bounded number of exchanges.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_keys_are_deleted_by_later_exchanges(backend: Backend) {
    let (demo, mut sql) = (Conversation::on(&backend).await, Sql::on(&backend).await);
    let (other, first) = (demo.session("other"), exchange(&["a", "b"]));
    for conversation in [&demo, &other, &demo.tenant("acme")] {
        conversation.append(&first, Some(&key("old", &first))).await;
    }
    age(&mut sql, "old", Duration::hours(24) + Duration::minutes(5)).await;
    for at in 0..32 {
        demo.append(&first, Some(&key(&format!("k{at}"), &first))).await;
    }
    let old = "SELECT count(*) FROM idempotency_keys WHERE key = 'old'";
    assert_eq!(sql.number(old).await, 2);
    assert_eq!(sql.number("SELECT count(*) FROM idempotency_keys").await, 34);
    assert_eq!(
        sql.texts("SELECT session_id FROM idempotency_keys WHERE key = 'old' ORDER BY 1").await,
        ["demo", "other"]
    );
    let anew = recorded(demo.append(&first, Some(&key("old", &first))).await);
    assert_eq!((anew.replayed, anew.first_seq), (false, 67));
}
