//! Leases, commits and failures of consolidations.

use crate::conversation::{Conversation, LONG, record, summary};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::consolidation_record::RecordOutcome;
use precis::domain::session::{ConsolidationState, Session};
use precis::storage::StoreError;
use precis::storage::{LeaseCondition, NewRevision};
use std::sync::Arc;
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use uuid::Uuid;

async fn demo(backend: &Backend) -> Conversation {
    let demo = Conversation::on(backend).await;
    demo.say(&["x"; 10]).await;
    demo
}

async fn renew(demo: &Conversation, token: Uuid, ttl: Duration) -> bool {
    demo.store.renew_lease(&demo.tenant, &demo.session, token, ttl).await.unwrap()
}

/// Returns `true` if the times differ by less than a minute, which tolerates busy test machines.
fn about(time: OffsetDateTime, expected: OffsetDateTime) -> bool {
    (time - expected).abs() < time::Duration::minutes(1)
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_taken_concurrently_has_one_holder(backend: Backend) {
    const TAKERS: usize = 30;
    let demo = demo(&backend).await;
    let replicas = [demo.clone(), Conversation::on(&backend).await];
    for condition in [LeaseCondition::Force, LeaseCondition::IfUnchanged { revision: 0 }] {
        let barrier = Arc::new(Barrier::new(TAKERS));
        let mut takers = JoinSet::new();
        for at in 0..TAKERS {
            let (demo, barrier, token) = (replicas[at % 2].clone(), barrier.clone(), Uuid::new_v4());
            takers.spawn(async move {
                barrier.wait().await;
                demo.take(token, condition, LONG).await.map(|session| (token, session))
            });
        }
        let holders: Vec<_> = takers.join_all().await.into_iter().flatten().collect();
        let [(token, session)] = &holders[..] else { panic!("{} holders", holders.len()) };
        assert_eq!(*session, demo.state().await);
        assert!(about(session.consolidation.lease_until.unwrap(), OffsetDateTime::now_utc() + LONG));
        // The holder cannot take it twice either.
        assert_eq!(demo.take(*token, LeaseCondition::Force, LONG).await, None);
        demo.release(*token).await;
        assert_eq!(demo.state().await.consolidation, ConsolidationState::default());
    }
    let other = demo.session("other");
    assert_eq!(other.take(Uuid::new_v4(), LeaseCondition::Force, LONG).await, None);
    assert_eq!(other.find().await, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_expires_after_its_ttl(backend: Backend) {
    let demo = demo(&backend).await;
    let (first, second) = (Uuid::new_v4(), Uuid::new_v4());
    assert!(demo.take(first, LeaseCondition::Force, Duration::ZERO).await.is_some());
    assert!(demo.take(second, LeaseCondition::IfUnchanged { revision: 0 }, LONG).await.is_some());
    let step = demo.step(5, "late").await;
    assert!(!renew(&demo, first, LONG).await);
    assert_eq!(demo.fail(first, LONG, "late").await, None);
    assert_eq!(demo.commit(first, &step).await, None);
    demo.release(first).await;
    assert_eq!(demo.take(Uuid::new_v4(), LeaseCondition::Force, LONG).await, None);

    let mut sql = Sql::on(&backend).await;
    let past = sql.time(OffsetDateTime::now_utc() - time::Duration::seconds(1));
    sql.run(&format!("UPDATE sessions SET lease_until = {past}")).await;
    assert!(demo.take(first, LeaseCondition::Force, LONG).await.is_some());
    assert_eq!(demo.commit(second, &step).await, None);
    assert!(demo.commit(first, &step).await.is_some());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_renewed_and_released_only_by_its_holder(backend: Backend) {
    let demo = demo(&backend).await;
    let (holder, other) = (Uuid::new_v4(), Uuid::new_v4());
    assert!(!renew(&demo, holder, LONG).await);
    demo.release(holder).await;
    assert_eq!(demo.state().await.consolidation, ConsolidationState::default());
    demo.take(holder, LeaseCondition::Force, LONG).await.unwrap();
    let before = demo.state().await;
    assert!(!renew(&demo, other, LONG * 2).await);
    assert_eq!(demo.fail(other, LONG, "not mine").await, None);
    demo.release(other).await;
    assert_eq!(demo.state().await, before);
    assert!(renew(&demo, holder, LONG * 2).await);
    let until = demo.state().await.consolidation.lease_until.unwrap();
    assert!(about(until, OffsetDateTime::now_utc() + LONG * 2));
    assert!(renew(&demo, holder, Duration::ZERO).await);
    assert!(demo.take(other, LeaseCondition::Force, LONG).await.is_some());
    let elsewhere = demo.session("other");
    assert!(!renew(&elsewhere, other, LONG).await);
    elsewhere.release(other).await;
    assert!(renew(&demo, other, LONG).await);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_if_due_requires_revision_and_end_of_backoff(backend: Backend) {
    let demo = demo(&backend).await;
    demo.consolidate(2, "two").await;
    for revision in [0, 2, -1] {
        assert_eq!(demo.take(Uuid::new_v4(), LeaseCondition::IfUnchanged { revision }, LONG).await, None);
    }
    let token = Uuid::new_v4();
    assert!(demo.take(token, LeaseCondition::IfUnchanged { revision: 1 }, LONG).await.is_some());
    demo.fail(token, LONG, "down").await.unwrap();
    assert_eq!(demo.take(token, LeaseCondition::IfUnchanged { revision: 1 }, LONG).await, None);
    assert!(demo.take(token, LeaseCondition::Force, LONG).await.is_some());
    demo.release(token).await;
    let mut sql = Sql::on(&backend).await;
    let past = sql.time(OffsetDateTime::now_utc() - time::Duration::seconds(1));
    sql.run(&format!("UPDATE sessions SET retry_at = {past}")).await;
    assert_eq!(demo.take(token, LeaseCondition::IfUnchanged { revision: 0 }, LONG).await, None);
    assert!(demo.take(token, LeaseCondition::IfUnchanged { revision: 1 }, LONG).await.is_some());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_updates_summary_cursor_and_revision_together(backend: Backend) {
    let demo = demo(&backend).await;
    demo.session("other").say(&["x"; 10]).await;
    let other = demo.session("other").state().await;
    let token = demo.lease().await;
    let (before, step) = (demo.state().await, demo.step(4, "four").await);
    demo.say(&["written", "meanwhile"]).await;
    let revision = demo.commit(token, &step).await.unwrap();
    assert_eq!((revision.revision, revision.range(), revision.cursor), (1, Some((1, 4)), 4));
    let state = demo.state().await;
    let expected = Session {
        cursor: 4,
        cursor_tokens: step.range_tokens,
        summary: summary("four"),
        revision: 1,
        last_seq: 12,
        tokens: state.tokens,
        stored_bytes: state.stored_bytes,
        updated_at: state.updated_at,
        ..before
    };
    assert_eq!(state, expected);
    let tail: i64 = demo.history().await[4..].iter().map(|stored| stored.json.len() as i64).sum();
    assert_eq!((state.tail_len(), state.tail_tokens()), (8, tail));
    assert_eq!(demo.session("other").state().await, other);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_with_other_lease_revision_or_cursor_is_discarded(backend: Backend) {
    let demo = demo(&backend).await;
    demo.consolidate(2, "two").await;
    let step = demo.step(5, "five").await;
    let mut sql = Sql::on(&backend).await;
    assert_eq!(demo.commit(Uuid::new_v4(), &step).await, None);
    let token = demo.lease().await;
    let rows = sql.rows().await;
    assert_eq!(demo.commit(Uuid::new_v4(), &step).await, None);
    for (base_revision, base_cursor) in [(0, 2), (2, 2), (1, 0), (1, 3)] {
        let stale = NewRevision { base_revision, base_cursor, ..step.clone() };
        assert_eq!(demo.commit(token, &stale).await, None);
    }
    assert_eq!(demo.session("other").commit(token, &step).await, None);
    assert_eq!(sql.rows().await, rows);
    assert!(demo.commit(token, &step).await.is_some());
    // A step can be committed only once.
    assert_eq!(demo.commit(token, &step).await, None);
    assert_eq!(demo.state().await.revision, 2);
    demo.release(token).await;
    let step = demo.step(6, "six").await;
    assert_eq!(demo.commit(token, &step).await, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_with_cursor_after_last_message_is_rejected(backend: Backend) {
    let demo = demo(&backend).await;
    let token = demo.lease().await;
    let step = NewRevision { cursor: 11, ..demo.step(10, "ten").await };
    let mut sql = Sql::on(&backend).await;
    let rows = sql.rows().await;
    let given = record(RecordOutcome::Consolidated, None);
    let error =
        demo.store.commit_revision(&demo.tenant, &demo.session, token, &step, &given).await.unwrap_err();
    assert!(matches!(error, StoreError::Statement(_)), "{error:?}");
    assert_eq!(sql.rows().await, rows);
    assert!(demo.commit(token, &NewRevision { cursor: 10, ..step }).await.is_some());
}

/// This includes a restore to the cursor that the commit is based on.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_after_restore_is_discarded(backend: Backend) {
    let demo = demo(&backend).await;
    for target in [0, 1] {
        let token = demo.lease().await;
        let step = demo.step(5, "five").await;
        let restored = demo.restore(target).await.unwrap();
        let state = demo.state().await;
        assert_eq!(demo.commit(token, &step).await, None);
        assert_eq!(demo.state().await, state);
        assert_eq!((state.cursor, state.revision), (restored.cursor, restored.revision));
        demo.release(token).await;
    }
    assert_eq!(demo.state().await.revision, 2);
    assert_eq!(demo.consolidate(5, "five").await.range(), Some((1, 5)));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_counted_until_the_next_commit(backend: Backend) {
    let demo = demo(&backend).await;
    let before = demo.state().await;
    for (failures, why) in [(1, "the pool is down"), (2, "é \" ' still"), (3, "")] {
        let token = demo.lease().await;
        let retry_at = demo.fail(token, LONG * u32::try_from(failures).unwrap(), why).await.unwrap();
        assert!(about(retry_at, OffsetDateTime::now_utc() + LONG * u32::try_from(failures).unwrap()));
        let state = ConsolidationState {
            lease_until: None,
            failures,
            retry_at: Some(retry_at),
            last_failure: Some(why.to_owned()),
        };
        assert_eq!(demo.state().await, Session { consolidation: state, ..before.clone() });
        // The failure also ended the lease.
        assert_eq!(demo.fail(token, LONG, "again").await, None);
        assert!(!renew(&demo, token, LONG).await);
    }
    assert_eq!(demo.say(&["goes", "on"]).await.last_seq, 12);
    assert_eq!(demo.state().await.consolidation.failures, 3);
    demo.consolidate(5, "at last").await;
    assert_eq!(demo.state().await.consolidation, ConsolidationState::default());
    let token = demo.lease().await;
    demo.fail(token, LONG, "down").await.unwrap();
    demo.restore(0).await.unwrap();
    assert_eq!(demo.state().await.consolidation, ConsolidationState::default());
}

/// Summary, cursor and revision of the session must always equal those of its newest revision.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_commits_and_restores_leave_consistent_state(backend: Backend) {
    let demo = demo(&backend).await;
    let mut committed = 0;
    for cursor in (1..=10).cycle().take(40) {
        let token = demo.lease().await;
        let step = demo.step(cursor, "s").await;
        let (commit, restored) = tokio::join!(demo.commit(token, &step), demo.restore(0));
        committed += i64::from(commit.is_some());
        assert!(restored.is_some());
        demo.release(token).await;
    }
    let (state, revisions) = (demo.state().await, demo.revisions().await.unwrap());
    assert_eq!((state.revision, revisions.len() as i64), (committed + 40, committed + 40));
    assert!(revisions.iter().rev().map(|revision| revision.revision).eq(1..=state.revision));
    assert_eq!((state.cursor, &state.summary), (revisions[0].cursor, &revisions[0].summary));
    let mut cursor = 0;
    for revision in revisions.iter().rev() {
        assert!(revision.range().is_none_or(|range| range == (cursor + 1, revision.cursor)), "{revision:?}");
        cursor = revision.cursor;
    }
}
