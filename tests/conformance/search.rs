//! Search methods of a store.

use crate::conversation::{Conversation, exchange, exchange_of, session_id, user_id};
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::message::Role;
use precis::domain::search::MessageRef;
use precis::domain::search::index_terms::{TermPattern, TermQuery};
use precis::storage::MAX_MATCHES;
use precis::storage::SearchFilter;
use std::slice::from_ref;
use test_case::test_case;
use time::{Duration, OffsetDateTime};

pub(crate) fn probe(groups: &[&[&str]]) -> TermQuery {
    let lexeme = |term: &&str| match term.strip_suffix('*') {
        Some(prefix) => TermPattern { term: prefix.to_owned(), is_prefix: true },
        None => TermPattern::exact(*term),
    };
    TermQuery(groups.iter().map(|group| group.iter().map(lexeme).collect()).collect())
}

pub(crate) fn seqs(places: &[MessageRef]) -> Vec<i64> {
    places.iter().map(|place| place.seq).collect()
}

impl Conversation {
    /// Returns the messages that match the query, newest first.
    pub(crate) async fn lookup(&self, filter: &SearchFilter, query: &TermQuery) -> Vec<MessageRef> {
        let mut found =
            self.store.find_matches(&self.tenant, filter, from_ref(query)).await.unwrap().remove(0);
        assert!(found.len() <= MAX_MATCHES && found.is_sorted_by(|a, b| a.position >= b.position));
        // The messages of an exchange have the same time.
        found.sort_by_key(|found| (-found.position, -found.message.seq));
        found.into_iter().map(|found| found.message).collect()
    }

    /// Returns all messages of the tenant that are in the index, sorted.
    pub(crate) async fn indexed(&self) -> Vec<MessageRef> {
        let mut indexed = self.lookup(&SearchFilter::default(), &TermQuery::default()).await;
        indexed.sort();
        indexed
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_returns_messages_with_the_terms(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["apples", "pears and plums", "apples and pears", "applesauce"]).await;
    let all = SearchFilter::default();
    for (groups, expected) in [
        (&[&["appl"][..]][..], vec![3, 1]),
        (&[&["appl"], &["pear"]], vec![3]),
        (&[&["appl", "plum"]], vec![3, 2, 1]),
        (&[&["appl*"]], vec![4, 3, 1]),
        (&[&["appl*"], &["pear", "applesauc"]], vec![4, 3]),
        (&[&["app"]], vec![]),
        // Words are indexed beside their stems.
        (&[&["pears"]], vec![3, 2]),
    ] {
        let probe = probe(groups);
        assert_eq!(seqs(&demo.lookup(&all, &probe).await), expected, "{groups:?}");
    }
    let found = demo
        .store
        .fetch_messages(&demo.tenant, None, &demo.lookup(&all, &probe(&[&["plum"]])).await, &[0..=0], 999)
        .await
        .unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].1.seq, found[0].0.as_str()), (2, "demo"));
    assert_eq!(found[0].1.json, demo.history().await[1].json);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_applies_the_filter(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&exchange_of("ada", &["a plum", "one plum"])).await;
    let other = demo.session("other");
    other.record(&exchange_of("bob", &["a plum", "one plum"])).await;
    // The user is not repeated in later exchanges.
    other.say(&["plum"]).await;
    demo.tenant("acme").say(&["plum"]).await;
    let (first, last) = (demo.history().await[0].created_at, other.history().await[2].created_at);
    let plum = probe(&[&["plum"]]);
    let scope = SearchFilter::default();
    for (scope, expected) in [
        (scope.clone(), 5),
        (SearchFilter { session: Some(session_id("demo")), ..scope.clone() }, 2),
        (SearchFilter { session: Some(session_id("none")), ..scope.clone() }, 0),
        (SearchFilter { user: Some(user_id("bob")), ..scope.clone() }, 3),
        (SearchFilter { user: Some(user_id("default")), ..scope.clone() }, 0),
        (SearchFilter { role: Some(Role::Assistant), ..scope.clone() }, 2),
        (SearchFilter { role: Some(Role::User), user: Some(user_id("bob")), ..scope.clone() }, 2),
        (SearchFilter { since: Some(last + Duration::HOUR), ..scope.clone() }, 0),
        (SearchFilter { since: Some(first), ..scope.clone() }, 5),
        (SearchFilter { until: Some(last + Duration::MICROSECOND), ..scope.clone() }, 5),
        (SearchFilter { until: Some(first - Duration::HOUR), ..scope.clone() }, 0),
        (SearchFilter { excluded_terms: vec!["one".to_owned()], ..scope.clone() }, 3),
        (SearchFilter { excluded_terms: vec!["on".to_owned(), "pear".to_owned()], ..scope.clone() }, 5),
        (SearchFilter { excluded_terms: vec!["a".to_owned(), "one".to_owned()], ..scope.clone() }, 1),
        (
            SearchFilter {
                excluded_terms: vec!["a".to_owned()],
                user: Some(user_id("bob")),
                ..scope.clone()
            },
            2,
        ),
    ] {
        let drawn = demo.lookup(&scope, &plum).await;
        assert_eq!(drawn.len(), expected, "{scope:?}");
        let of_bob = demo
            .store
            .fetch_messages(&demo.tenant, Some(&user_id("bob")), &drawn, &[0..=0], i64::MAX)
            .await
            .unwrap();
        assert_eq!(of_bob.len(), drawn.iter().filter(|place| place.session.as_str() == "other").count());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_returns_the_newest_matches(backend: Backend) {
    const PART: usize = MAX_MATCHES / 4;
    let (demo, all) = (Conversation::on(&backend).await, SearchFilter::default());
    for part in 0..6 {
        let mut texts = vec!["pear"; PART];
        texts[0] = if part == 0 { "plum pear" } else { "plumber pear" };
        demo.say(&texts).await;
        demo.tenant("acme").say(&["pear plum"; PART]).await;
    }
    let firsts: Vec<i64> = (0..6).map(|part| part * PART as i64 + 1).rev().collect();
    let newest: Vec<i64> = (2 * PART as i64 + 1..=6 * PART as i64).rev().collect();
    for filter in [all.clone(), SearchFilter { session: Some(demo.session.clone()), ..all }] {
        for (query, expected) in [
            ("pear", &*newest),
            ("plum", &[1]),
            ("plumber", &firsts[..5]),
            ("plum*", &firsts),
            ("cherry", &[]),
        ] {
            assert_eq!(
                seqs(&demo.lookup(&filter, &probe(&[&[query]])).await),
                expected,
                "{query} {filter:?}"
            );
        }
    }
}

/// Times are those of the messages, not of the exchange.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_finds_the_messages_of_a_time_range(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let day = |day: i64| OffsetDateTime::UNIX_EPOCH + Duration::days(20_000 + day);
    let message_times = (1..=700).map(|seq| Some(day(seq % 100))).collect();
    demo.record(&Exchange { message_times, ..exchange(&["plum"; 700]) }).await;
    for (since, until, expected) in
        [(0, 100, 700), (0, 1, 7), (97, 100, 21), (40, 41, 7), (-9, 0, 0), (100, 109, 0)]
    {
        let filter =
            SearchFilter { since: Some(day(since)), until: Some(day(until)), ..SearchFilter::default() };
        let found = demo.lookup(&filter, &probe(&[&["plum"]])).await;
        assert_eq!(found.len(), expected, "{since} {until}");
        assert!(found.iter().all(|found| (since..until).contains(&(found.seq % 100))));
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_methods_respect_their_limits(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for _ in 0..3 {
        demo.say(&["plum", "pear", "plum"]).await;
    }
    let (all, plum) = (SearchFilter::default(), probe(&[&["plum"]]));
    let drawn = demo.lookup(&all, &plum).await;
    assert_eq!(seqs(&drawn), [9, 7, 6, 4, 3, 1]);
    let bytes = demo.history().await[0].json.len() as i64;
    let at = async |most| {
        demo.store.fetch_messages(&demo.tenant, None, &drawn, &[0..=0], most).await.unwrap().len()
    };
    assert_eq!((at(bytes * 2).await, at(bytes * 2 + 1).await, at(1).await, at(0).await), (2, 3, 1, 0));
    let beside = async |places, most| {
        let beside =
            demo.store.fetch_messages(&demo.tenant, None, places, &[-2..=-1, 1..=2], most).await.unwrap();
        let mut beside: Vec<i64> = beside.iter().map(|(_, found)| found.seq).collect();
        beside.sort_unstable();
        beside
    };
    assert_eq!(beside(&drawn[..1], i64::MAX).await, [7, 8]);
    // Neighbours of the first reference come first.
    assert_eq!(beside(&drawn[..2], i64::MAX).await, [5, 6, 7, 8, 9]);
    assert_eq!(beside(&drawn[..2], 1).await, [8]);
    let of_eight = demo.history().await[7].json.len() as i64;
    assert_eq!(beside(&drawn[..2], of_eight).await, [8]);
    assert_eq!(beside(&drawn[..2], of_eight + 1).await, [7, 8]);
    // A neighbour of two references counts twice.
    assert_eq!(beside(&drawn[..2], of_eight + bytes + 1).await, [7, 8]);
    assert_eq!(beside(&drawn[..2], of_eight * 2 + bytes + 1).await, [6, 7, 8]);
    // A large message does not displace smaller ones after it.
    demo.say(&[&format!("plum {}", "x".repeat(128 * 1024)), "plum"]).await;
    let drawn = demo.lookup(&all, &plum).await;
    assert_eq!(seqs(&drawn[..3]), [11, 10, 9]);
    let at = async |most| {
        let found = demo.store.fetch_messages(&demo.tenant, None, &drawn[..3], &[0..=0], most).await.unwrap();
        found.iter().map(|(_, found)| found.seq).collect::<Vec<_>>()
    };
    let history = demo.history().await;
    let small: i64 = [9, 11].iter().map(|seq| history[seq - 1].json.len() as i64).sum();
    assert_eq!((at(small).await, at(small + 1).await), (vec![11, 9], vec![11, 10, 9]));
    // A message with the largest number of terms: bigrams of distinct characters.
    let long: String =
        (0..3_000_000).filter_map(|n| char::from_u32(0x4e00 + n % 20_011 * 7919 % 20_000)).collect();
    demo.say(&[&long]).await;
}

/// The driver returns ids within JSON texts, which escape some characters.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_sessions_with_any_id_are_indexed_and_found(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let ids = ["a\"b", "a\\b", "a\u{2028}b", "/", "日本語", "\\u0041"];
    for id in ids {
        demo.session(id).say(&["apples"]).await;
    }
    let mut found = demo.lookup(&SearchFilter::default(), &probe(&[&["appl"]])).await;
    let fetched = demo.store.fetch_messages(&demo.tenant, None, &found, &[0..=0], 9999).await.unwrap();
    let mut sessions: Vec<_> = fetched.into_iter().map(|(session, _)| session).collect();
    sessions.sort();
    found.sort();
    let mut expected: Vec<_> = ids.map(session_id).into();
    expected.sort();
    assert_eq!(sessions, expected);
    assert_eq!(found.into_iter().map(|found| found.session).collect::<Vec<_>>(), expected);
}
