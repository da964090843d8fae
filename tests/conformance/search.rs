//! Search methods of a store.

use crate::conversation::{Conversation, exchange_of, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::message::Role;
use precis::domain::search::MessageRef;
use precis::domain::search::index_terms::{TermPattern, TermQuery};
use precis::storage::search::SearchFilter;
use std::collections::BTreeSet;
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
    /// Indexes all missing messages, and returns the newest `most` messages that match.
    pub(crate) async fn lookup_terms(
        &self,
        scope: &SearchFilter,
        probe: &TermQuery,
        most: usize,
    ) -> Vec<MessageRef> {
        self.index_all().await;
        let mut found = self.lookup(scope, from_ref(probe), most).await.remove(0);
        found.truncate(most);
        found
    }

    /// Returns the newest `enough` messages of the index that match each query.
    pub(crate) async fn lookup(
        &self,
        scope: &SearchFilter,
        queries: &[TermQuery],
        enough: usize,
    ) -> Vec<Vec<MessageRef>> {
        let mut index = self.store.index_snapshot(&self.tenant).await.unwrap();
        let mut located = Vec::new();
        for found in index.lookup(scope, queries, enough).await.unwrap() {
            located.push(index.locate(&found.entries).await.unwrap());
        }
        located
    }

    /// Returns all messages of the tenant that are in the index, sorted.
    pub(crate) async fn indexed(&self) -> Vec<MessageRef> {
        let mut indexed =
            self.lookup(&SearchFilter::default(), &[TermQuery::default()], usize::MAX).await.remove(0);
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
        (&[&["pears"]], vec![]),
    ] {
        let probe = probe(groups);
        assert_eq!(seqs(&demo.lookup_terms(&all, &probe, 9).await), expected, "{groups:?}");
    }
    let found = demo
        .store
        .fetch_messages(
            &demo.tenant,
            None,
            &demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await,
            &[0..=0],
            999,
        )
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
        let drawn = demo.lookup_terms(&scope, &plum, 9).await;
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
async fn lookup_reads_backwards_until_it_has_found_enough(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let other = demo.tenant("acme");
    demo.index_all().await;
    // More segments than are read at once.
    for part in 0..8 {
        let mut texts = vec!["pear"; 800];
        texts[0] = "plum pear apple";
        texts[799] = if part < 4 { "plum" } else { "plumber" };
        demo.say(&texts).await;
        other.say(&["pear plum"; 800]).await;
        for _ in 0..35 {
            demo.say(&["grape"]).await;
        }
        demo.index_all().await;
        other.index_all().await;
    }
    let part = 835;
    let plums: Vec<i64> = (0..8).flat_map(|at| [at * part + 1, at * part + 800]).rev().collect();
    let exact: Vec<i64> = plums.iter().copied().filter(|seq| seq % part == 1 || *seq <= 4 * part).collect();
    let queries = [probe(&[&["pear"]]), probe(&[&["plum"]]), probe(&[&["plum*"]]), probe(&[&["cherry"]])];
    let all = SearchFilter::default();
    for limit in [3, 5, 12, 16, 100_usize] {
        // The query for cherries reads all segments.
        let found = demo.lookup(&all, &queries, limit).await;
        let first = |seqs: &[i64]| seqs.iter().copied().take(limit).collect::<Vec<_>>();
        assert!(found[0].len() == limit && seqs(&found[0]).is_sorted_by(|a, b| a > b));
        assert_eq!(seqs(&found[1]), first(&exact), "{limit}");
        assert_eq!(seqs(&found[2]), first(&plums), "{limit}");
        assert_eq!(found[3], []);
    }
    let in_session = SearchFilter { session: Some(demo.session.clone()), ..all };
    let found = demo.lookup(&in_session, &queries, 100).await;
    assert_eq!(found[0].len(), 100);
    assert_eq!(seqs(&found[2]), plums);
}

/// Messages of an import can be older than those that were stored before it.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_finds_the_messages_of_a_time_range(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let day = |day: i64| OffsetDateTime::UNIX_EPOCH + Duration::days(20_000 + day);
    demo.index_all().await;
    let terms = ":ruser plum";
    let insert = match sql {
        Sql::Sqlite(_) => format!("INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, entries)
            WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 7000)
            SELECT 'default', 'english-2', count(*), count(*), json_group_array(json_array(
                'demo', '', n, (20000 + n % 100) * 86400000000, '0  {terms}')) FROM n GROUP BY n / 100"),
        Sql::Postgres(_) => format!("INSERT INTO search_recent (tenant_id, analyzer, messages, bytes, sessions, users, last_seqs, times, terms)
            SELECT 'default', 'english-2', count(*), count(*), array_agg('demo'::text), array_agg(''::text), array_agg(n),
                array_agg(to_timestamp((20000 + n % 100) * 86400.0)), array_agg('0  {terms}'::text)
            FROM generate_series(1, 7000) AS n GROUP BY n / 100"),
    };
    sql.run(&insert).await;
    let plum = probe(&[&["plum"]]);
    for (since, until, expected) in
        [(0, 100, 7000), (0, 1, 70), (97, 100, 210), (40, 41, 70), (-9, 0, 0), (100, 109, 0)]
    {
        let filter =
            SearchFilter { since: Some(day(since)), until: Some(day(until)), ..SearchFilter::default() };
        let found = demo.lookup_terms(&filter, &plum, 9999).await;
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
    assert_eq!(seqs(&demo.lookup_terms(&all, &plum, 3).await), [9, 7, 6]);
    let drawn = demo.lookup_terms(&all, &plum, 9).await;
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
    let drawn = demo.lookup_terms(&all, &plum, 3).await;
    assert_eq!(seqs(&drawn), [11, 10, 9]);
    let at = async |most| {
        let found = demo.store.fetch_messages(&demo.tenant, None, &drawn, &[0..=0], most).await.unwrap();
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
    let missing =
        demo.store.missing_messages(&demo.tenant, &SearchFilter::default(), 99, 9999).await.unwrap();
    let mut found = demo.lookup_terms(&SearchFilter::default(), &probe(&[&["appl"]]), 99).await;
    let fetched = demo.store.fetch_messages(&demo.tenant, None, &found, &[0..=0], 9999).await.unwrap();
    let mut sessions: Vec<_> = fetched.into_iter().map(|(session, _)| session).collect();
    assert_eq!(missing.newest.len(), ids.len(), "the analyzer of the index is not known yet");
    sessions.sort();
    found.sort();
    let mut expected: Vec<_> = ids.map(session_id).into();
    expected.sort();
    assert_eq!(sessions, expected);
    assert_eq!(found.into_iter().map(|found| found.session).collect::<Vec<_>>(), expected);
}

/// Entries are removed after the transaction that removes the session.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_are_to_be_removed_do_not_take_the_places_of_others(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["apples"]).await;
    demo.index_all().await;
    demo.session("new").say(&["apples"; 10]).await;
    demo.index_all().await;
    let lookup = async || {
        let found = demo.lookup(&SearchFilter::default(), &[probe(&[&["appl"]])], 3).await.remove(0);
        found.into_iter().map(|found| found.session).collect::<BTreeSet<_>>()
    };
    assert_eq!(lookup().await, BTreeSet::from([session_id("new")]));
    Sql::on(&backend).await.remove_from_index("session_id = 'new'").await;
    assert_eq!(lookup().await, BTreeSet::from([session_id("demo")]));
    // The session with the same id is another one.
    demo.session("new").say(&["apples"]).await;
    assert_eq!(lookup().await, BTreeSet::from(["new", "demo"].map(session_id)));
    demo.index_all().await;
    assert_eq!(demo.indexed().await.len(), 2);
}

/// A removal concerns only its messages, also if it begins with the first one, and whatever the number of other removals is.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_messages_of_removals_are_left_out(backend: Backend) {
    const REMOVE: &str = "INSERT INTO search_removals (tenant_id, session_id, first_seq, last_seq, position)";
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.index_all().await;
    for _ in 0..40 {
        demo.say(&["apples"]).await;
    }
    demo.index_all().await;
    assert_eq!(sql.number("SELECT max(messages) FROM search_segments").await, 40);
    let lookup = async |enough| {
        let found = demo.lookup(&SearchFilter::default(), &[probe(&[&["appl"]])], enough).await.remove(0);
        seqs(&found)
    };
    sql.run(&format!("{REMOVE} SELECT tenant_id, 'demo', 1, 1, position FROM search_segments")).await;
    assert_eq!(lookup(99).await, (2..=40).rev().collect::<Vec<_>>());
    sql.run(&format!("{REMOVE} SELECT tenant_id, 'demo', 39, 40, position FROM search_segments")).await;
    assert_eq!(lookup(1).await, [38]);
    let others: Vec<String> = (0..200).map(|number| format!("('other {number}')")).collect();
    let others = others.join(", ");
    sql.run(&format!(
        "WITH others (other) AS (VALUES {others})
        {REMOVE} SELECT tenant_id, other, 1, 99, position FROM search_segments CROSS JOIN others"
    ))
    .await;
    assert_eq!(lookup(1).await, [38]);
    demo.index_all().await;
    assert_eq!(seqs(&demo.indexed().await), (2..=38).collect::<Vec<_>>());
}
