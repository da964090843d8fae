//! Sessions: list, metadata and erasure.

use crate::conversation::{Conversation, exchange_of, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::domain::session::Session;
use precis::storage::{SessionFilter, SessionPosition};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use test_case::test_case;
use time::macros::datetime;
use time::{Duration, OffsetDateTime};

async fn list(
    demo: &Conversation,
    filter: SessionFilter<'_>,
    after: Option<&SessionPosition>,
    limit: i64,
) -> Vec<Session> {
    demo.store.sessions(&demo.tenant, filter, after, limit, i64::MAX).await.unwrap().items
}

const ALL: SessionFilter<'_> = SessionFilter { user: None, forked_from: None };

fn of(user: &UserId) -> SessionFilter<'_> {
    SessionFilter { user: Some(user), ..ALL }
}

fn ids(sessions: &[Session]) -> Vec<&str> {
    sessions.iter().map(|session| session.session_id.as_str()).collect()
}

fn after(session: &Session) -> SessionPosition {
    SessionPosition { updated_at: session.updated_at, session_id: session.session_id.clone() }
}

/// Reads all pages and compares them with the documented order.
async fn read_in_pages(
    demo: &Conversation,
    filter: SessionFilter<'_>,
    limit: i64,
    expected: &[(OffsetDateTime, String)],
) {
    let (mut read, mut mark, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = list(demo, filter, mark.as_ref(), limit).await;
        let Some(last) = page.last() else { break };
        assert!(page.len() <= usize::try_from(limit).unwrap());
        (mark, pages) = (Some(after(last)), pages + 1);
        read.extend(page.into_iter().map(|session| (session.updated_at, session.session_id.to_string())));
        assert!(pages <= expected.len(), "it goes on for ever");
    }
    assert!(pages > 3, "{pages} pages");
    assert_eq!(read, expected);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successive_pages_have_no_gaps_or_duplicates(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let start = datetime!(2026-02-03 10:15:00.000001 UTC);
    let mut expected = Vec::new();
    for at in 0..36 {
        let id = format!("{}{at}", if at % 2 == 0 { "s" } else { "S" });
        demo.session(&id).record(&exchange_of(if at % 3 == 0 { "ada" } else { "bo" }, &["x"])).await;
        // Six sessions share each microsecond, and groups are one microsecond apart.
        let time = start + Duration::microseconds(at / 6);
        sql.set_activity(&id, time).await;
        expected.push((time, id));
    }
    expected.sort_by(|a, b| b.cmp(a));
    let of_ada: Vec<_> =
        expected.iter().filter(|(_, id)| id[1..].parse::<i64>().unwrap() % 3 == 0).cloned().collect();
    for limit in [1, 4, 5, 6, 7, 11] {
        read_in_pages(&demo, ALL, limit, &expected).await;
    }
    let (ada, bo, origin) = (user_id("ada"), user_id("bo"), session_id("origin"));
    for limit in [1, 2, 3] {
        read_in_pages(&demo, of(&ada), limit, &of_ada).await;
    }
    // The sessions of ada are forks, and every other one of them is of another session.
    sql.run(
        "UPDATE sessions SET forked_from = CASE WHEN substr(session_id, 1, 1) = 's' THEN 'origin' ELSE 'ORIGIN' END,
            forked_through = 1, fork_kind = 'fork'
        WHERE user_id = 'ada'",
    )
    .await;
    let forks: Vec<_> = of_ada.into_iter().filter(|(_, id)| id.starts_with('s')).collect();
    for filter in [ALL, of(&ada)] {
        let of_origin = SessionFilter { forked_from: Some(&origin), ..filter };
        read_in_pages(&demo, of_origin, 1, &forks).await;
    }
    let of_bo = SessionFilter { forked_from: Some(&origin), ..of(&bo) };
    assert_eq!(list(&demo, of_bo, None, 99).await, []);
    // The session of a position may have been erased meanwhile.
    let mark =
        SessionPosition { updated_at: start + Duration::microseconds(3), session_id: session_id("S999") };
    let (rest, listed) = (
        expected.iter().filter(|(time, id)| (*time, id.as_str()) < (mark.updated_at, "S999")),
        list(&demo, ALL, Some(&mark), 99).await,
    );
    assert!(rest.map(|(_, id)| id.as_str()).eq(ids(&listed)));
}

/// The index contains hours only.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successive_pages_are_complete_across_hours(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (micro, hour) = (Duration::MICROSECOND, datetime!(2026-01-01 00:00:00 UTC));
    let mut times = Vec::new();
    for hours in 0..3 {
        let border = hour + Duration::hours(hours);
        times.extend([border - micro, border, border + micro, border + Duration::minutes(30)]);
    }
    let mut expected = Vec::new();
    for (at, time) in times.into_iter().enumerate() {
        for id in [format!("{at}a"), format!("{at}b")] {
            demo.session(&id).record(&exchange_of("ada", &["x"])).await;
            sql.set_activity(&id, time).await;
            expected.push((time, id));
        }
    }
    expected.sort_by(|a, b| b.cmp(a));
    for limit in 1..=7 {
        read_in_pages(&demo, ALL, limit, &expected).await;
        read_in_pages(&demo, of(&user_id("ada")), limit, &expected).await;
    }
}

/// The result must be consistent in either order.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_erasure_and_append_leave_consistent_state(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let erased = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let (demo, erased) = (demo.clone(), Arc::clone(&erased));
            tokio::spawn(async move {
                let mut written = 0;
                while written < 25 || erased.load(Ordering::Relaxed) == 0 {
                    demo.say(&["a", "b", "c"]).await;
                    written += 1;
                }
            })
        })
        .collect();
    while !writers.iter().all(tokio::task::JoinHandle::is_finished) {
        erased.fetch_add(usize::from(demo.erase().await), Ordering::Relaxed);
        if let Some(history) = demo.page(crate::conversation::ALL).await {
            assert!(history.iter().map(|stored| stored.seq).eq(1..=history.len() as i64));
            assert_eq!(history.len() % 3, 0);
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    demo.say(&["x"]).await;
    let (state, history) = (demo.state().await, demo.history().await);
    assert!(history.iter().map(|stored| stored.seq).eq(1..=state.last_seq));
    assert_eq!(state.tokens, history.iter().map(|stored| stored.json.len() as i64).sum::<i64>());
}
