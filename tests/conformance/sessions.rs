//! Sessions: list, metadata and erasure.

use crate::conversation::{Conversation, exchange, exchange_of, key, recorded, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::id::UserId;
use precis::domain::session::Session;
use precis::storage::SessionPosition;
use std::collections::BTreeSet;
use test_case::test_case;
use time::macros::datetime;
use time::{Duration, OffsetDateTime};

async fn list(
    demo: &Conversation,
    user: Option<&UserId>,
    after: Option<&SessionPosition>,
    limit: i64,
) -> Vec<Session> {
    demo.store.sessions(&demo.tenant, user, after, limit).await.unwrap()
}

fn ids(sessions: &[Session]) -> Vec<&str> {
    sessions.iter().map(|session| session.session_id.as_str()).collect()
}

fn after(session: &Session) -> SessionPosition {
    SessionPosition { updated_at: session.updated_at, session_id: session.session_id.clone() }
}

/// Sets the time of the last activity of a session.
async fn set_activity(sql: &mut Sql, id: &str, at: OffsetDateTime) {
    let (time, hour) = (sql.time(at), at.unix_timestamp().div_euclid(3600));
    let statement =
        format!("UPDATE sessions SET updated_at = {time}, activity_hour = {hour} WHERE session_id = '{id}'");
    sql.run(&statement).await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn similar_ids_are_different_sessions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let long = "x".repeat(255);
    let (long_y, long_z) = (format!("{long}y"), format!("{long}z"));
    let all = [
        "a",
        "A",
        "a ",
        "a  ",
        " a",
        "á",
        "a\u{301}",
        "a/b",
        "a%2Fb",
        "a\\b",
        "a_b",
        "a%b",
        "a'b",
        "a\"b",
        "a;--",
        ".",
        "..",
        "1",
        "01",
        "1.0",
        "NULL",
        "%",
        "_",
        "matrix:!room:host",
        "matrix:!Room:host",
        "ß",
        "ss",
        "İ",
        "i",
        "🍵",
        "\u{feff}a",
        "\u{200b}a",
        &long,
        &long_y,
        &long_z,
    ];
    for (at, id) in all.iter().enumerate() {
        let texts = vec!["x"; at + 1];
        assert_eq!(demo.session(id).say(&texts).await.first_seq, 1, "{id:?}");
    }
    for (at, id) in all.iter().enumerate() {
        let conversation = demo.session(id);
        let state = conversation.state().await;
        assert_eq!((state.session_id.as_str(), state.last_seq), (*id, at as i64 + 1));
        assert_eq!(conversation.history().await.len(), at + 1);
    }
    let listed = list(&demo, None, None, 100).await;
    assert_eq!(ids(&listed).into_iter().collect::<BTreeSet<_>>(), all.into_iter().collect());
    assert!(demo.session("a").erase().await);
    assert_eq!(list(&demo, None, None, 100).await.len(), all.len() - 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_is_sorted_by_last_activity(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    assert_eq!(list(&demo, None, None, 10).await, []);
    for id in ["one", "two", "three"] {
        demo.session(id).say(&["a", "b"]).await;
    }
    demo.session("one").say(&["c"]).await;
    let listed = list(&demo, None, None, 10).await;
    assert!(listed.is_sorted_by(|a, b| (a.updated_at, &a.session_id) > (b.updated_at, &b.session_id)));
    assert_eq!(ids(&listed)[0], "one");
    for session in &listed {
        assert_eq!(*session, demo.session(session.session_id.as_str()).state().await);
    }
    // Reading, metadata changes and consolidation do not count as activity.
    let three = demo.session("two");
    three.history().await;
    three.store.set_metadata(&three.tenant, &three.session, "{}").await.unwrap().unwrap();
    three.consolidate(1, "s").await;
    assert_eq!(ids(&list(&demo, None, None, 10).await), ids(&listed));
    assert_eq!(ids(&list(&demo, None, None, 2).await), ids(&listed)[..2]);
    assert_eq!(list(&demo, None, None, 0).await, []);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_of_a_user_contains_only_their_sessions(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for (id, user) in [("1", "ada"), ("2", "bo"), ("3", "ada"), ("4", "Ada"), ("5", "ada ")] {
        demo.session(id).record(&exchange_of(user, &["a"])).await;
    }
    demo.session("6").say(&["of nobody in particular"]).await;
    let (ada, nobody) = (user_id("ada"), user_id("nobody"));
    let first = list(&demo, Some(&ada), None, 1).await;
    assert_eq!(ids(&first), ["3"]);
    assert_eq!(ids(&list(&demo, Some(&ada), Some(&after(&first[0])), 9).await), ["1"]);
    assert_eq!(ids(&list(&demo, Some(&UserId::default()), None, 9).await), ["6"]);
    assert_eq!(list(&demo, Some(&nobody), None, 9).await, []);
    assert_eq!(list(&demo, None, None, 9).await.len(), 6);
}

/// Reads all pages and compares them with the documented order.
async fn read_in_pages(
    demo: &Conversation,
    user: Option<&UserId>,
    limit: i64,
    expected: &[(OffsetDateTime, String)],
) {
    let (mut read, mut mark, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = list(demo, user, mark.as_ref(), limit).await;
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
        set_activity(&mut sql, &id, time).await;
        expected.push((time, id));
    }
    expected.sort_by(|a, b| b.cmp(a));
    let of_ada: Vec<_> =
        expected.iter().filter(|(_, id)| id[1..].parse::<i64>().unwrap() % 3 == 0).cloned().collect();
    for limit in [1, 4, 5, 6, 7, 11] {
        read_in_pages(&demo, None, limit, &expected).await;
    }
    for limit in [1, 2, 3] {
        read_in_pages(&demo, Some(&user_id("ada")), limit, &of_ada).await;
    }
    // The session of a position may have been erased meanwhile.
    let mark =
        SessionPosition { updated_at: start + Duration::microseconds(3), session_id: session_id("S999") };
    let (rest, listed) = (
        expected.iter().filter(|(time, id)| (*time, id.as_str()) < (mark.updated_at, "S999")),
        list(&demo, None, Some(&mark), 99).await,
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
            demo.session(&id).say(&["x"]).await;
            set_activity(&mut sql, &id, time).await;
            expected.push((time, id));
        }
    }
    expected.sort_by(|a, b| b.cmp(a));
    for limit in 1..=7 {
        read_in_pages(&demo, None, limit, &expected).await;
        read_in_pages(&demo, Some(&UserId::default()), limit, &expected).await;
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set_metadata_changes_nothing_else(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let set =
        async |metadata: &str| demo.store.set_metadata(&demo.tenant, &demo.session, metadata).await.unwrap();
    assert_eq!(set("{}").await, None);
    assert_eq!(demo.find().await, None);
    demo.say(&["a", "b"]).await;
    demo.session("other").say(&["a"]).await;
    let before = demo.state().await;
    for metadata in [r#"{"b":1.0,"a":"\u0000","n":123456789012345678901234567890}"#, "{}"] {
        let expected = Session { metadata: metadata.to_owned(), ..before.clone() };
        assert_eq!(set(metadata).await, Some(expected.clone()));
        assert_eq!(demo.state().await, expected);
    }
    assert_eq!(demo.session("other").state().await.metadata, "{}");
}

/// Creates rows of every kind that a session can have.
async fn fill(conversation: &Conversation, marker: &str) {
    let exchange = exchange(&[marker, "b", "c", "d"]);
    let key = key(&format!("key of {marker}"), &exchange);
    recorded(conversation.append(&exchange, Some(&key)).await);
    let metadata = format!(r#"{{"about":"{marker}"}}"#);
    conversation.store.set_metadata(&conversation.tenant, &conversation.session, &metadata).await.unwrap();
    conversation.consolidate(2, marker).await;
    conversation.restore(0).await.unwrap();
    conversation.consolidate(3, marker).await;
    conversation.index_session().await;
    conversation.say(&["e"]).await;
    conversation.lease().await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_leaves_no_rows(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let others = [demo.session("other"), demo.tenant("acme").session("plover"), demo.session("Plover")];
    for other in &others {
        fill(other, "kept").await;
    }
    demo.remember(&UserId::default(), "kept").await;
    let kept = sql.rows().await;
    let plover = demo.session("plover");
    fill(&plover, "plugh").await;
    sql.delay_indexing("tenant_id = 'default' AND session_id = 'plover'").await;

    // The test is valid only if every table with data of sessions contains a row of this one.
    let rows = sql.rows().await;
    let marked: BTreeSet<_> = rows
        .iter()
        .filter(|row| row.contains("plugh") || !kept.contains(row))
        .map(|row| row.table.clone())
        .collect();
    let of_users = BTreeSet::from(["memories".to_owned(), "memory_revisions".to_owned()]);
    let all = sql.erasable().await;
    assert_eq!(marked, all.difference(&of_users).cloned().collect(), "a new table? Fill it in `fill`.");

    assert!(plover.erase().await);
    assert_eq!(sql.rows().await, kept);
    assert_eq!(plover.find().await, None);
    assert!(!plover.erase().await);
    assert_eq!(sql.rows().await, kept);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_can_be_created_again_after_erasure(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let first = exchange_of("ada", &["a", "b"]);
    let key = key("k", &first);
    demo.append(&first, Some(&key)).await;
    demo.consolidate(1, "old").await;
    assert!(demo.erase().await);
    // Neither the old user nor the old idempotency key is known.
    let anew = exchange(&["new"]);
    let recorded = recorded(demo.append(&anew, Some(&crate::conversation::key("k", &anew))).await);
    assert_eq!((recorded.first_seq, recorded.last_seq, recorded.replayed), (1, 1, false));
    let state = demo.state().await;
    assert_eq!((state.last_seq, state.tokens, state.cursor, state.revision), (1, anew.tokens(), 0, 0));
    assert_eq!((state.user_id, state.metadata.as_str()), (UserId::default(), "{}"));
    assert_eq!(demo.revisions().await, Some(Vec::new()));
    assert_eq!(demo.history().await.len(), 1);
}

/// The result must be consistent in either order.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_erasure_and_append_leave_consistent_state(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let demo = demo.clone();
            tokio::spawn(async move {
                for _ in 0..25 {
                    demo.say(&["a", "b", "c"]).await;
                }
            })
        })
        .collect();
    let mut erased = 0;
    while !writers.iter().all(tokio::task::JoinHandle::is_finished) {
        erased += usize::from(demo.erase().await);
        if let Some(history) = demo.page(crate::conversation::ALL).await {
            assert!(history.iter().map(|stored| stored.seq).eq(1..=history.len() as i64));
            assert_eq!(history.len() % 3, 0);
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(erased > 0);
    demo.say(&["x"]).await;
    let (state, history) = (demo.state().await, demo.history().await);
    assert!(history.iter().map(|stored| stored.seq).eq(1..=state.last_seq));
    assert_eq!(state.tokens, history.iter().map(|stored| stored.json.len() as i64).sum::<i64>());
}
