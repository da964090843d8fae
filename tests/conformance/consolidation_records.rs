//! Records of consolidation.

use crate::conversation::{Conversation, LONG, record, session_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::consolidation_record::{
    ConsolidationRecord, MAX_RECORDS_WITHOUT_REVISION, RecordDetails, RecordOutcome, RunCause,
};
use precis::domain::revision::ModelUsage;
use precis::storage::{ForkOutcome, NewRevision, Page, RewindOutcome};
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;
use uuid::Uuid;

async fn page(demo: &Conversation, before: i64, limit: i64) -> Option<Page<ConsolidationRecord>> {
    let Conversation { store, tenant, session } = demo;
    store.consolidation_records(tenant, session, before, limit, i64::MAX).await.unwrap()
}

/// Returns all records, oldest first.
async fn records(demo: &Conversation) -> Vec<ConsolidationRecord> {
    let mut records = page(demo, i64::MAX, 1_000_000).await.expect("the session exists").items;
    records.reverse();
    records
}

/// Returns the revisions and outcomes of all records, oldest first.
async fn outcomes(demo: &Conversation) -> Vec<(Option<i64>, RecordOutcome)> {
    records(demo).await.iter().map(|record| (record.revision, record.details.outcome)).collect()
}

async fn abandon(demo: &Conversation, token: Uuid, why: &str) {
    let details = record(RecordOutcome::Abandoned, Some(why));
    demo.store.record_abandoned_run(&demo.tenant, &demo.session, token, &details).await.unwrap();
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_is_stored_with_the_end_of_a_run_and_returned_with_all_fields(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert!(page(&demo, i64::MAX, 10).await.is_none(), "an unknown session");
    demo.say(&["x"; 9]).await;
    assert_eq!(records(&demo).await, []);
    let usage = ModelUsage {
        input_tokens: Some(i64::MAX),
        output_tokens: None,
        calls: Some(3),
        failures: Some(2),
        queued_ms: Some(0),
    };
    let committed = RecordDetails {
        cause: RunCause::Request,
        outcome: RecordOutcome::Consolidated,
        reason: None,
        models: vec!["small \" é".to_owned(), "large".to_owned()],
        usage,
        cost: Some(0.1 + 0.2),
        duration_ms: i64::MAX,
    };
    let priceless = RecordDetails { cost: None, models: Vec::new(), ..committed.clone() };
    let token = demo.lease().await;
    let first = demo.commit_with(token, &demo.step(3, "three").await, &committed).await.expect("committed");
    let second = demo.commit_with(token, &demo.step(5, "five").await, &priceless).await.expect("committed");
    demo.fail(token, Duration::ZERO, "the model's \u{2028} answer").await.expect("recorded");
    abandon(&demo, demo.lease().await, "restored").await;
    assert_eq!(demo.state().await.consolidation.lease_until, None);
    assert_eq!(demo.state().await.consolidation.failures, 1, "an abandoned run is no failure");
    let stored = records(&demo).await;
    let all: Vec<_> = stored.iter().map(|record| (record.number, record.revision, &record.details)).collect();
    let failed = record(RecordOutcome::Failed, Some("the model's \u{2028} answer"));
    let abandoned = record(RecordOutcome::Abandoned, Some("restored"));
    assert_eq!(
        all,
        [(1, Some(1), &committed), (2, Some(2), &priceless), (3, None, &failed), (4, None, &abandoned)]
    );
    assert_eq!([stored[0].created_at, stored[1].created_at], [first.created_at, second.created_at]);
    assert!(stored.is_sorted_by_key(|record| record.created_at));
    assert!((stored[3].created_at - OffsetDateTime::now_utc()).abs() < time::Duration::minutes(1));
    // A release of later adds fields.
    let mut sql = Sql::on(&backend).await;
    sql.run(
        r#"UPDATE consolidation_records SET details = replace(details, '{"cause"', '{"later":1,"cause"')"#,
    )
    .await;
    assert_eq!(records(&demo).await, stored);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_changes_nothing_leaves_no_record(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 9]).await;
    let (token, other) = (demo.lease().await, Uuid::new_v4());
    let step = demo.step(3, "three").await;
    assert_eq!(demo.commit(other, &step).await, None);
    assert_eq!(demo.commit(token, &NewRevision { base_revision: 1, ..step.clone() }).await, None);
    assert_eq!(demo.fail(other, LONG, "why").await, None);
    abandon(&demo, other, "why").await;
    assert!(demo.state().await.consolidation.lease_until.is_some());
    demo.release(token).await;
    assert_eq!(demo.commit(token, &step).await, None);
    assert_eq!(demo.fail(token, LONG, "why").await, None);
    abandon(&demo, token, "why").await;
    abandon(&demo.session("unknown"), token, "why").await;
    assert_eq!(records(&demo).await, []);
    // Neither have restores and edits.
    demo.consolidate(3, "three").await;
    demo.edit(1, "3").await.expect("edited");
    demo.restore(1).await.expect("restored");
    assert_eq!(outcomes(&demo).await, [(Some(1), RecordOutcome::Consolidated)]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newest_records_without_a_revision_are_kept(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 9]).await;
    let neighbour = demo.session("neighbour");
    neighbour.say(&["x"]).await;
    neighbour.fail(neighbour.lease().await, LONG, "why").await.expect("recorded");
    let most = usize::try_from(MAX_RECORDS_WITHOUT_REVISION).unwrap();
    for number in 0..most + 5 {
        if number % 50 == 0 {
            demo.consolidate(i64::try_from(number / 50).unwrap() + 1, "x").await;
        }
        let token = demo.lease().await;
        if number % 2 == 0 {
            demo.fail(token, Duration::ZERO, &number.to_string()).await.expect("recorded");
        } else {
            abandon(&demo, token, &number.to_string()).await;
        }
    }
    let kept = records(&demo).await;
    let revisions: Vec<i64> = kept.iter().filter_map(|record| record.revision).collect();
    assert_eq!(revisions, [1, 2, 3, 4, 5]);
    let reasons: Vec<&str> = kept.iter().filter_map(|record| record.details.reason.as_deref()).collect();
    assert_eq!(reasons, (5..most + 5).map(|number| number.to_string()).collect::<Vec<_>>());
    assert!(kept.is_sorted_by_key(|record| record.number));
    assert_eq!(records(&neighbour).await.len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_records_are_limited_in_number_and_bytes(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"]).await;
    for why in ["a", "b", "c", "d", "e"] {
        demo.fail(demo.lease().await, LONG, &why.repeat(1000)).await.expect("recorded");
    }
    let numbers = |page: Option<Page<ConsolidationRecord>>| {
        let page = page.expect("the session exists");
        (page.items.iter().map(|record| record.number).collect::<Vec<_>>(), page.has_more)
    };
    assert_eq!(numbers(page(&demo, i64::MAX, 5).await), (vec![5, 4, 3, 2, 1], false));
    assert_eq!(numbers(page(&demo, i64::MAX, 2).await), (vec![5, 4], true));
    assert_eq!(numbers(page(&demo, 4, 2).await), (vec![3, 2], true));
    assert_eq!(numbers(page(&demo, 2, 2).await), (vec![1], false));
    assert_eq!(numbers(page(&demo, 1, 2).await), (vec![], false));
    let bounded = demo.store.consolidation_records(&demo.tenant, &demo.session, i64::MAX, 5, 2000).await;
    assert_eq!(numbers(bounded.unwrap()), (vec![5, 4], true));
}

/// The database removes the records of removed revisions, so that a rewind by an earlier release does, too.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_removes_records_of_removed_revisions_and_copies_have_none(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"; 9]).await;
    for cursor in [2, 4, 6] {
        demo.fail(demo.lease().await, Duration::ZERO, "why").await.expect("recorded");
        demo.consolidate(cursor, "x").await;
    }
    let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
    let fork = session_id("fork");
    let forked = store.fork_session(tenant, session, &fork, 9).await.unwrap();
    assert!(matches!(forked, ForkOutcome::Forked(_)), "{forked:?}");
    assert_eq!(records(&demo.session("fork")).await, []);
    let rewound = store.rewind_session(tenant, session, &session_id("branch"), 5, 1000).await.unwrap();
    assert!(matches!(rewound, RewindOutcome::Rewound(_)), "{rewound:?}");
    assert_eq!(records(&demo.session("branch")).await, []);
    let (failed, committed) = (RecordOutcome::Failed, RecordOutcome::Consolidated);
    let kept = [(None, failed), (Some(1), committed), (None, failed), (Some(2), committed), (None, failed)];
    assert_eq!(outcomes(&demo).await, kept);
    demo.consolidate(5, "anew").await;
    assert_eq!(outcomes(&demo).await, [&kept[..], &[(Some(3), committed)]].concat());
    // A redaction removes the texts of revisions. Records have none.
    store.redact_message(tenant, session, 1, None).await.unwrap();
    assert_eq!(records(&demo).await.len(), 6);
}

/// Runs of several replicas end at the same time: each record has a number of its own.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_several_replicas_follow_each_other(backend: Backend) {
    const RUNS: usize = 20;
    let demo = Conversation::on(&backend).await;
    demo.say(&["x"]).await;
    let replicas = [demo.clone(), Conversation::on(&backend).await, Conversation::on(&backend).await];
    let mut runs = tokio::task::JoinSet::new();
    for replica in replicas {
        runs.spawn(async move {
            let mut ended = 0;
            while ended < RUNS {
                let token = Uuid::new_v4();
                if replica.take(token, precis::storage::LeaseCondition::Force, LONG).await.is_some() {
                    replica.fail(token, Duration::ZERO, "why").await.expect("recorded");
                    ended += 1;
                }
            }
        });
    }
    runs.join_all().await;
    let numbers: Vec<i64> = records(&demo).await.iter().map(|record| record.number).collect();
    assert_eq!(numbers, (1..=3 * i64::try_from(RUNS).unwrap()).collect::<Vec<_>>());
}
