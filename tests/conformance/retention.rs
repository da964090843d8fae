//! Retention: the period of a session, the search for expired sessions, their erasure, and the lease of the worker.
//!
//! Searches and erasures get the time as an argument, so that tests need not wait.

use crate::conversation::{Conversation, LONG, exchange_of, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::MessageFacts;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::message::{Message, Role};
use precis::domain::retention::{RetentionPeriod, RetentionPeriods, hour};
use precis::domain::session::Summary;
use precis::storage::{
    CandidateScope, DefaultRetention, ForkOutcome, ImportOutcome, RewindOutcome, RowBatch,
};
use std::collections::BTreeSet;
use std::time::Duration;
use test_case::test_case;
use time::OffsetDateTime;
use time::macros::datetime;
use tokio::sync::mpsc;
use uuid::Uuid;

const DAY: i64 = 86_400;

#[expect(clippy::unnecessary_wraps, reason = "most periods are optional")]
fn days(days: i64) -> Option<RetentionPeriod> {
    Some(RetentionPeriod::Seconds(days * DAY))
}

fn setting(period: Option<RetentionPeriod>) -> DefaultRetention {
    DefaultRetention { after_last_exchange: period, branches_after: None }
}

fn later(time: OffsetDateTime, seconds: i64) -> OffsetDateTime {
    time + time::Duration::seconds(seconds)
}

/// Returns the sessions of the tenant that have expired, searched in pages of two as the worker searches.
async fn expired(demo: &Conversation, default: DefaultRetention, now: OffsetDateTime) -> BTreeSet<String> {
    let (store, tenant) = (&demo.store, &demo.tenant);
    let periods = store.retention_periods(tenant, None).await.unwrap();
    let mut scopes = vec![CandidateScope::OwnPeriod { last_hour: hour(now) }];
    if let Some(last_hour) = periods.effective(default.after_last_exchange).0.last_expired_hour(now) {
        scopes.push(CandidateScope::Tenant { last_hour });
    }
    let users = store.users_with_retention(tenant, None, 99).await.unwrap();
    for (user, period) in &users {
        if let Some(last_hour) = period.last_expired_hour(now) {
            scopes.push(CandidateScope::User { user, last_hour });
        }
    }
    if let Some(RetentionPeriod::Seconds(seconds)) = default.branches_after {
        scopes.push(CandidateScope::Branches { until: later(now, -seconds) });
    }
    let mut found = BTreeSet::new();
    for scope in scopes {
        let mut after = None;
        loop {
            let page =
                store.retention_candidates(tenant, scope, after.as_ref(), default, now, 2).await.unwrap();
            let Some(last) = page.last() else { break };
            after = Some(last.position.clone());
            let ids = page.iter().filter(|candidate| candidate.is_expired);
            found.extend(ids.map(|candidate| candidate.position.session.to_string()));
        }
    }
    found
}

async fn erase_at(demo: &Conversation, default: DefaultRetention, now: OffsetDateTime) -> bool {
    demo.store.erase_expired_session(&demo.tenant, &demo.session, default, now).await.unwrap()
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn most_specific_period_decides(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    let never = Some(RetentionPeriod::Never);
    for (session, user, tenant, of_settings, effective) in [
        (None, None, None, None, None),
        (None, None, None, days(4), days(4)),
        (None, None, days(3), days(4), days(3)),
        (None, days(2), days(3), days(1), days(2)),
        (days(5), days(2), days(3), days(4), days(5)),
        (None, None, days(5), days(4), days(5)),
        (never, days(2), days(3), days(4), None),
        (None, never, days(3), days(4), None),
        (None, None, never, days(4), None),
        (days(1), never, never, never, days(1)),
    ] {
        let (store, of_tenant) = (&demo.store, &demo.tenant);
        demo.record(&exchange_of("ada", &["a", "b"])).await;
        store.set_retention(of_tenant, Some(&ada), user).await.unwrap();
        store.set_retention(of_tenant, None, tenant).await.unwrap();
        assert!(store.set_session_retention(of_tenant, &demo.session, session).await.unwrap());
        let periods = RetentionPeriods { session, user, tenant };
        assert_eq!(
            store.retention_periods(of_tenant, Some(&ada)).await.unwrap(),
            RetentionPeriods { session: None, ..periods }
        );
        let stored = store.session_retention(of_tenant, &demo.session).await.unwrap().expect("stored");
        assert_eq!((stored.periods, stored.start), (periods, demo.state().await.updated_at));

        let default = setting(of_settings);
        let end = effective.map_or(100 * DAY, RetentionPeriod::seconds);
        let (before, at_end) = (later(stored.start, end - 1), later(stored.start, end));
        assert_eq!(expired(&demo, default, before).await, BTreeSet::new(), "{periods:?}");
        assert!(!erase_at(&demo, default, before).await, "{periods:?}");
        let found = expired(&demo, default, at_end).await;
        assert_eq!(found.contains("demo"), effective.is_some(), "{periods:?} {of_settings:?}");
        assert_eq!(erase_at(&demo, default, at_end).await, effective.is_some(), "{periods:?}");
        assert_eq!(demo.find().await.is_none(), effective.is_some());
    }
}

/// Sessions that are kept do not hide expired ones that are newer.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_continues_after_exceptions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let now = demo.store.time().await.unwrap();
    for n in 0..12 {
        let conversation = demo.session(&format!("s{n:02}"));
        conversation.say(&["a", "b"]).await;
        if n % 4 != 0 {
            let (tenant, session) = (&conversation.tenant, &conversation.session);
            demo.store.set_session_retention(tenant, session, Some(RetentionPeriod::Never)).await.unwrap();
        }
        // Three sessions per hour, and the second sort key is opposite to the first one.
        let time = later(now, -(10 + n / 3) * 3600);
        sql.set_activity(&format!("s{n:02}"), time).await;
    }
    let found = expired(&demo, setting(Some(RetentionPeriod::Seconds(3600))), now).await;
    assert_eq!(found, ["s00", "s04", "s08"].map(str::to_owned).into());
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exchange_after_the_search_keeps_the_session(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let mut sql = Sql::on(&backend).await;
    let old = sql.time(datetime!(2020-01-01 00:00 UTC));
    sql.run(&format!("UPDATE sessions SET updated_at = {old}, activity_hour = 0")).await;
    let (now, default) = (demo.store.time().await.unwrap(), setting(days(1)));
    assert_eq!(expired(&demo, default, now).await, ["demo".to_owned()].into());
    demo.say(&["c", "d"]).await;
    assert!(!erase_at(&demo, default, now).await);
    assert_eq!(demo.history().await.len(), 4);
    assert_eq!(expired(&demo, default, now).await, BTreeSet::new());
}

/// The erasure waits for a transaction that appends to the session, and then checks the session again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_on_postgres_checks_the_session_that_it_has_waited_for() {
    const WAITING: &str = "\
        SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    demo.say(&["a", "b"]).await;
    let (mut sql, mut watch) = (Sql::on(&backend).await, Sql::on(&backend).await);
    let old = sql.time(datetime!(2020-01-01 00:00 UTC));
    sql.run(&format!("UPDATE sessions SET updated_at = {old}, activity_hour = 0")).await;
    let (now, default) = (demo.store.time().await.unwrap(), setting(days(1)));
    sql.run("BEGIN").await;
    sql.run("UPDATE sessions SET updated_at = now()").await;
    let erasing = demo.clone();
    let erasure = tokio::spawn(async move { erase_at(&erasing, default, now).await });
    while watch.number(WAITING).await == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    sql.run("COMMIT").await;
    assert!(!erasure.await.unwrap());
    assert_eq!(demo.history().await.len(), 2);
}

async fn import(demo: &Conversation, times: (OffsetDateTime, OffsetDateTime)) {
    let message = ImportedMessage {
        seq: 1,
        facts: MessageFacts { created_at: Some(times.0), ..MessageFacts::default() },
        message: Message::text(Role::User, "a"),
        tokens: 1,
    };
    let imported = ImportedSession {
        user_id: None,
        metadata: None,
        times: Some(times),
        last_seq: 1,
        tokens: 1,
        revision: 0,
        cursor: 0,
        summary: Summary::default(),
        fingerprint: String::new(),
        messages_only: false,
    };
    let (sender, batches) = mpsc::channel(1);
    sender.send(RowBatch { messages: vec![message], revisions: vec![] }).await.unwrap();
    drop(sender);
    let outcome = demo.store.import_session(&demo.tenant, &demo.session, (None, None), &imported, batches);
    assert_eq!(outcome.await.unwrap(), ImportOutcome::Imported);
}

/// An old session is not erased right after its import, and times in the future do not keep it or its place in the list.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn period_of_an_import_begins_with_the_import(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for (id, time) in [("old", datetime!(2020-01-01 00:00 UTC)), ("future", datetime!(9999-01-01 00:00 UTC))]
    {
        let conversation = demo.session(id);
        let before = demo.store.time().await.unwrap();
        import(&conversation, (time, time)).await;
        let after = demo.store.time().await.unwrap();
        let state = conversation.state().await;
        assert_eq!(state.updated_at.min(before), time.min(before), "{id}");
        assert!(state.updated_at <= after && state.created_at <= state.updated_at);
        let default = setting(days(1));
        assert!(!expired(&demo, default, later(before, DAY - 1)).await.contains(id));
        assert!(!erase_at(&conversation, default, later(before, DAY - 1)).await);
        assert!(expired(&demo, default, later(after, DAY)).await.contains(id));
        // Later exchanges count as in any session.
        let said = conversation.say(&["b"]).await;
        assert!(said.created_at >= after);
        let retention = demo.store.session_retention(&demo.tenant, &conversation.session).await.unwrap();
        assert_eq!(retention.unwrap().start, said.created_at);
        assert!(erase_at(&conversation, default, later(said.created_at, DAY)).await);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_inherit_the_period_and_branches_expire_after_their_rewind(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (store, tenant, session) = (&demo.store, &demo.tenant, &demo.session);
    demo.say(&["a", "b", "c"]).await;
    let mut sql = Sql::on(&backend).await;
    let old = sql.time(datetime!(2020-01-01 00:00 UTC));
    sql.run(&format!("UPDATE sessions SET updated_at = {old}, activity_hour = 0")).await;
    store.set_session_retention(tenant, session, days(5)).await.unwrap();
    let (fork, branch) = (session_id("fork"), session_id("branch"));
    let forked = store.fork_session(tenant, session, &fork, 2).await.unwrap();
    assert!(matches!(forked, ForkOutcome::Forked(_)), "{forked:?}");
    let before = store.time().await.unwrap();
    let rewound = store.rewind_session(tenant, session, &branch, 1, 9).await.unwrap();
    assert!(matches!(rewound, RewindOutcome::Rewound(_)), "{rewound:?}");
    for id in [&fork, &branch] {
        let retention = store.session_retention(tenant, id).await.unwrap().expect("stored");
        assert_eq!(retention.periods.session, days(5));
        assert_eq!(retention.branch_start.is_some(), *id == branch);
        assert!(retention.start >= before - LONG, "the period of {id} begins with the copy");
    }
    let branches = DefaultRetention { after_last_exchange: None, branches_after: days(2) };
    assert_eq!(expired(&demo, branches, later(before, 2 * DAY - 1)).await, BTreeSet::new());
    let after = later(store.time().await.unwrap(), 2 * DAY);
    assert_eq!(expired(&demo, branches, after).await, ["branch".to_owned()].into());
    assert!(!erase_at(&demo, branches, after).await);
    let branch = demo.session("branch");
    assert!(erase_at(&branch, branches, after).await);
    assert_eq!((branch.find().await, demo.history().await.len()), (None, 1));
    // The period of the session itself is not over.
    assert!(erase_at(&demo, branches, later(after, 4 * DAY)).await);
    assert_eq!(demo.find().await, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erasure_removes_the_periods(backend: Backend) {
    let (demo, ada) = (Conversation::on(&backend).await, user_id("ada"));
    let (store, tenant) = (&demo.store, &demo.tenant);
    assert!(!store.set_session_retention(tenant, &demo.session, days(1)).await.unwrap(), "no such session");
    demo.record(&exchange_of("ada", &["a"])).await;
    assert!(store.set_session_retention(tenant, &demo.session, days(1)).await.unwrap());
    assert!(demo.erase().await);
    demo.record(&exchange_of("ada", &["a"])).await;
    let retention = store.session_retention(tenant, &demo.session).await.unwrap().expect("stored");
    assert_eq!(retention.periods, RetentionPeriods::default());
    store.set_retention(tenant, Some(&ada), days(1)).await.unwrap();
    store.set_retention(tenant, None, days(2)).await.unwrap();
    assert!(demo.erase().await);
    assert!(store.erase_user(tenant, &ada).await.unwrap(), "the period is data of the user");
    assert!(!store.erase_user(tenant, &ada).await.unwrap());
    let left = RetentionPeriods { tenant: days(2), ..RetentionPeriods::default() };
    assert_eq!(store.retention_periods(tenant, Some(&ada)).await.unwrap(), left);
}

/// A row that only binds a session to its user is personal data, too.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_that_is_only_bound_to_a_user_expires(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.store.bind_session(&demo.tenant, &demo.session, &user_id("ada")).await.unwrap();
    let now = later(demo.store.time().await.unwrap(), DAY);
    assert_eq!(demo.store.tenants().await.unwrap(), std::slice::from_ref(&demo.tenant));
    assert_eq!(expired(&demo, setting(days(1)), now).await, ["demo".to_owned()].into());
    assert!(erase_at(&demo, setting(days(1)), now).await);
    assert_eq!(demo.store.session_owner(&demo.tenant, &demo.session).await.unwrap().user, None);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_replica_has_the_lease_of_the_worker(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let store = &demo.store;
    let [first, second] = [Uuid::new_v4(), Uuid::new_v4()];
    let take =
        async |token, ttl, pause| store.take_worker_lease("retention", token, ttl, pause).await.unwrap();
    assert!(take(first, LONG, Duration::ZERO).await);
    assert!(!take(second, LONG, Duration::ZERO).await);
    assert!(store.take_worker_lease("other", second, LONG, Duration::ZERO).await.unwrap());
    assert!(store.renew_worker_lease("retention", first, LONG).await.unwrap());
    assert!(!store.renew_worker_lease("retention", second, LONG).await.unwrap());
    // An end without its holder has no effect, and one that is not finished permits the next run.
    store.release_worker_lease("retention", second, true).await.unwrap();
    assert!(!take(second, LONG, Duration::ZERO).await);
    store.release_worker_lease("retention", first, false).await.unwrap();
    assert!(take(second, LONG, LONG).await);
    store.release_worker_lease("retention", second, true).await.unwrap();
    assert!(!take(first, LONG, LONG).await, "it has just finished");
    assert!(take(first, LONG, Duration::ZERO).await);
    // The lease of a holder that was killed expires, and so does one of a clock that was set back.
    assert!(store.renew_worker_lease("retention", first, Duration::ZERO).await.unwrap());
    assert!(take(second, LONG, Duration::ZERO).await);
    assert!(!store.renew_worker_lease("retention", first, LONG).await.unwrap());
    assert!(take(first, Duration::from_secs(1), Duration::ZERO).await);
}
