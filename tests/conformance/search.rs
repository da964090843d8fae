//! Search methods of a store.

use crate::conversation::{Conversation, exchange_of, session_id, user_id};
use crate::support::backend::Backend;
use precis::domain::message::Role;
use precis::domain::search::lexemes::{TermPattern, TermQuery};
use precis::storage::search::{MessageRef, SearchFilter, TermStatistics};
use std::slice::from_ref;
use test_case::test_case;

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
    pub(crate) async fn lookup_terms(
        &self,
        scope: &SearchFilter,
        probe: &TermQuery,
        most: i64,
    ) -> Vec<MessageRef> {
        self.index_tenant().await;
        self.store.lookup_terms(&self.tenant, scope, from_ref(probe), most).await.unwrap().remove(0)
    }

    async fn scan_recent(
        &self,
        scope: &SearchFilter,
        probe: &TermQuery,
        rows: i64,
        most: i64,
    ) -> Vec<MessageRef> {
        self.index_tenant().await;
        self.store.scan_recent(&self.tenant, scope, probe, rows, most).await.unwrap()
    }
}

/// Adds enough messages that SQLite moves all earlier ones into its full-text index, which it does for every 256th message.
async fn fill_fts_index(demo: &Conversation) {
    let filler = demo.tenant("filler");
    filler.say(&["x"; 256]).await;
    filler.index_tenant().await;
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_and_scan_return_messages_with_the_terms(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["apples", "pears and plums", "apples and pears", "applesauce"]).await;
    check_lookups(&demo).await;
    fill_fts_index(&demo).await;
    check_lookups(&demo).await;
}

async fn check_lookups(demo: &Conversation) {
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
        assert_eq!(seqs(&demo.scan_recent(&all, &probe, 9, 9).await), expected, "{groups:?}");
    }
    let found = demo
        .store
        .fetch_hits(&demo.tenant, None, &demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, 999)
        .await
        .unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].message_ref.seq, found[0].message_ref.session.as_str()), (2, "demo"));
    assert_eq!(found[0].json, demo.history().await[1].json);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookup_and_scan_apply_the_filter(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&exchange_of("ada", &["a plum", "one plum"])).await;
    let other = demo.session("other");
    other.record(&exchange_of("bob", &["a plum", "one plum"])).await;
    // The user is not repeated in later exchanges.
    other.say(&["plum"]).await;
    demo.tenant("acme").say(&["plum"]).await;
    check_filters(&demo).await;
    fill_fts_index(&demo).await;
    check_filters(&demo).await;
}

async fn check_filters(demo: &Conversation) {
    let other = demo.session("other");
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
        (SearchFilter { since: Some(last), ..scope.clone() }, 1),
        (SearchFilter { until: Some(last), ..scope.clone() }, 4),
        (SearchFilter { until: Some(first), ..scope.clone() }, 0),
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
        assert_eq!(demo.scan_recent(&scope, &plum, 9, 9).await.len(), expected, "{scope:?}");
        let of_bob =
            demo.store.fetch_hits(&demo.tenant, Some(&user_id("bob")), &drawn, i64::MAX).await.unwrap();
        assert_eq!(of_bob.len(), drawn.iter().filter(|place| place.session.as_str() == "other").count());
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn term_statistics_count_matches_in_the_newest_messages(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for _ in 0..10 {
        demo.say(&["plum", "pear", "plum"]).await;
        demo.session("other").say(&["plum"]).await;
    }
    let probes = [probe(&[&["plum"]]), probe(&[&["pear"]]), probe(&[&["pea*"], &["plum"]])];
    let sample = async |scope: &SearchFilter, most| {
        demo.index_tenant().await;
        let TermStatistics { sampled, total, matching, matching_filter } =
            demo.store.term_statistics(&demo.tenant, scope, &probes, most).await.unwrap();
        (sampled, total, matching, matching_filter)
    };
    let all = SearchFilter::default();
    assert_eq!(sample(&all, 100).await, (40, 40, vec![30, 10, 0], vec![30, 10, 0]));
    assert_eq!(sample(&all, 8).await, (8, 40, vec![6, 2, 0], vec![6, 2, 0]));
    let session = SearchFilter { session: Some(session_id("demo")), ..all.clone() };
    assert_eq!(sample(&session, 100).await, (30, 30, vec![20, 10, 0], vec![20, 10, 0]));
    assert_eq!(sample(&session, 3).await, (3, 30, vec![2, 1, 0], vec![2, 1, 0]));
    // The frequencies count all users.
    let ada = SearchFilter { user: Some(user_id("ada")), ..all.clone() };
    assert_eq!(sample(&ada, 100).await, (40, 40, vec![30, 10, 0], vec![0, 0, 0]));
    let exchange = exchange_of("ada", &["plum"]);
    demo.session("adas").record(&exchange).await;
    assert_eq!(sample(&ada, 2).await.3, [1, 0, 0]);
    let answers =
        SearchFilter { role: Some(Role::Assistant), excluded_terms: vec!["pear".to_owned()], ..all };
    assert_eq!(sample(&answers, 100).await.3, [0, 0, 0]);
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
    assert_eq!(seqs(&demo.scan_recent(&all, &plum, 9, 3).await), [9, 7, 6]);
    assert_eq!(seqs(&demo.scan_recent(&all, &plum, 3, 9).await), [9, 7]);
    let drawn = demo.lookup_terms(&all, &plum, 9).await;
    let bytes = demo.history().await[0].json.len() as i64;
    let at = async |most| demo.store.fetch_hits(&demo.tenant, None, &drawn, most).await.unwrap().len();
    assert_eq!((at(bytes * 2).await, at(bytes * 2 + 1).await, at(1).await, at(0).await), (2, 3, 1, 0));
    let beside = async |places, most| {
        let beside = demo.store.fetch_neighbours(&demo.tenant, places, 2, most).await.unwrap();
        let mut beside: Vec<i64> = beside.iter().map(|found| found.message_ref.seq).collect();
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
    assert_eq!(beside(&drawn[..2], of_eight + bytes + 1).await, [6, 7, 8]);
    // A large message does not displace smaller ones after it.
    demo.say(&[&format!("plum {}", "x".repeat(128 * 1024)), "plum"]).await;
    let drawn = demo.lookup_terms(&all, &plum, 3).await;
    assert_eq!(seqs(&drawn), [11, 10, 9]);
    let at = async |most| {
        let found = demo.store.fetch_hits(&demo.tenant, None, &drawn, most).await.unwrap();
        found.iter().map(|found| found.message_ref.seq).collect::<Vec<_>>()
    };
    let history = demo.history().await;
    let small: i64 = [9, 11].iter().map(|seq| history[seq - 1].json.len() as i64).sum();
    assert_eq!((at(small).await, at(small + 1).await), (vec![11, 9], vec![11, 10, 9]));
    // A message with the largest number of terms: bigrams of distinct characters.
    let long: String =
        (0..3_000_000).filter_map(|n| char::from_u32(0x4e00 + n % 20_011 * 7919 % 20_000)).collect();
    demo.say(&[&long]).await;
}
