//! Finding messages: the index has what is stored, no more and no less, and gives the same on both stores.

use crate::conversation::{Conversation, LONG, exchange_of, message, session_id, user_id};
use crate::sql::Sql;
use crate::support::backend::{Backend, on_both_stores};
use precis::domain::exchange::Exchange;
use precis::domain::message::Role;
use precis::domain::search::analysis::{Analysis, Language};
use precis::domain::search::index::{Lexeme, Probe};
use precis::engine::reindex::{reindex, state};
use precis::storage::search::{LARGE, Place, Sample, Scope};
use precis::storage::{self, Options, Store};
use std::slice::from_ref;
use std::sync::Arc;

on_both_stores!(
    messages_are_drawn_by_what_they_have,
    the_scope_narrows_what_is_drawn,
    the_newest_messages_tell_how_common_a_word_is,
    what_is_read_is_bounded,
    messages_from_before_the_index_are_indexed_later,
    other_rules_index_all_anew,
    an_erased_session_is_indexed_no_more,
    what_is_erased_makes_room_for_what_is_found,
);

fn probe(groups: &[&[&str]]) -> Probe {
    let lexeme = |term: &&str| match term.strip_suffix('*') {
        Some(prefix) => Lexeme { term: prefix.to_owned(), is_prefix: true },
        None => Lexeme::exact(*term),
    };
    Probe(groups.iter().map(|group| group.iter().map(lexeme).collect()).collect())
}

fn seqs(places: &[Place]) -> Vec<i64> {
    places.iter().map(|place| place.seq).collect()
}

impl Conversation {
    async fn draw(&self, scope: &Scope, probe: &Probe, most: i64) -> Vec<Place> {
        self.store.draw(&self.tenant, scope, from_ref(probe), most).await.unwrap().remove(0)
    }

    async fn walk(&self, scope: &Scope, probe: &Probe, rows: i64, most: i64) -> Vec<Place> {
        self.store.walk(&self.tenant, scope, probe, rows, most).await.unwrap()
    }
}

/// On SQLite the newest 255 messages at most are not in the full-text index yet: those that are stored so far get into it.
async fn push(demo: &Conversation) {
    demo.tenant("filler").say(&["x"; 256]).await;
}

async fn messages_are_drawn_by_what_they_have(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["apples", "pears and plums", "apples and pears", "applesauce"]).await;
    check_draws(&demo).await;
    push(&demo).await;
    check_draws(&demo).await;
}

async fn check_draws(demo: &Conversation) {
    let all = Scope::default();
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
        assert_eq!(seqs(&demo.draw(&all, &probe, 9).await), expected, "{groups:?}");
        assert_eq!(seqs(&demo.walk(&all, &probe, 9, 9).await), expected, "{groups:?}");
    }
    let found = demo
        .store
        .at(&demo.tenant, None, &demo.draw(&all, &probe(&[&["plum"]]), 9).await, 999)
        .await
        .unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].place.seq, found[0].place.session.as_str()), (2, "demo"));
    assert_eq!(found[0].json, demo.history().await[1].json);
}

async fn the_scope_narrows_what_is_drawn(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.record(&exchange_of("ada", &["a plum", "one plum"])).await;
    let other = demo.session("other");
    other.record(&exchange_of("bob", &["a plum", "one plum"])).await;
    // Whose it is, is not said again.
    other.say(&["plum"]).await;
    demo.tenant("acme").say(&["plum"]).await;
    check_scopes(&demo).await;
    push(&demo).await;
    check_scopes(&demo).await;
}

async fn check_scopes(demo: &Conversation) {
    let other = demo.session("other");
    let (first, last) = (demo.history().await[0].created_at, other.history().await[2].created_at);
    let plum = probe(&[&["plum"]]);
    let scope = Scope::default();
    for (scope, expected) in [
        (scope.clone(), 5),
        (Scope { session: Some(session_id("demo")), ..scope.clone() }, 2),
        (Scope { session: Some(session_id("none")), ..scope.clone() }, 0),
        (Scope { user: Some(user_id("bob")), ..scope.clone() }, 3),
        (Scope { user: Some(user_id("default")), ..scope.clone() }, 0),
        (Scope { role: Some(Role::Assistant), ..scope.clone() }, 2),
        (Scope { role: Some(Role::User), user: Some(user_id("bob")), ..scope.clone() }, 2),
        (Scope { since: Some(last), ..scope.clone() }, 1),
        (Scope { until: Some(last), ..scope.clone() }, 4),
        (Scope { until: Some(first), ..scope.clone() }, 0),
        (Scope { without: vec!["one".to_owned()], ..scope.clone() }, 3),
        (Scope { without: vec!["on".to_owned(), "pear".to_owned()], ..scope.clone() }, 5),
        (Scope { without: vec!["a".to_owned(), "one".to_owned()], ..scope.clone() }, 1),
        (Scope { without: vec!["a".to_owned()], user: Some(user_id("bob")), ..scope.clone() }, 2),
    ] {
        let drawn = demo.draw(&scope, &plum, 9).await;
        assert_eq!(drawn.len(), expected, "{scope:?}");
        assert_eq!(demo.walk(&scope, &plum, 9, 9).await.len(), expected, "{scope:?}");
        let of_bob = demo.store.at(&demo.tenant, Some(&user_id("bob")), &drawn, i64::MAX).await.unwrap();
        assert_eq!(of_bob.len(), drawn.iter().filter(|place| place.session.as_str() == "other").count());
    }
}

async fn the_newest_messages_tell_how_common_a_word_is(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for _ in 0..10 {
        demo.say(&["plum", "pear", "plum"]).await;
        demo.session("other").say(&["plum"]).await;
    }
    let probes = [probe(&[&["plum"]]), probe(&[&["pear"]]), probe(&[&["pea*"], &["plum"]])];
    let sample = async |scope: &Scope, most| {
        let Sample { rows, messages, with, in_scope } =
            demo.store.sample(&demo.tenant, scope, &probes, most).await.unwrap();
        (rows, messages, with, in_scope)
    };
    let all = Scope::default();
    assert_eq!(sample(&all, 100).await, (40, 40, vec![30, 10, 0], vec![30, 10, 0]));
    assert_eq!(sample(&all, 8).await, (8, 40, vec![6, 2, 0], vec![6, 2, 0]));
    let session = Scope { session: Some(session_id("demo")), ..all.clone() };
    assert_eq!(sample(&session, 100).await, (30, 30, vec![20, 10, 0], vec![20, 10, 0]));
    assert_eq!(sample(&session, 3).await, (3, 30, vec![2, 1, 0], vec![2, 1, 0]));
    // All of them tell how common a word is, whoever is asked about.
    let ada = Scope { user: Some(user_id("ada")), ..all.clone() };
    assert_eq!(sample(&ada, 100).await, (40, 40, vec![30, 10, 0], vec![0, 0, 0]));
    let exchange = exchange_of("ada", &["plum"]);
    demo.session("adas").record(&exchange).await;
    assert_eq!(sample(&ada, 2).await.3, [1, 0, 0]);
    let answers = Scope { role: Some(Role::Assistant), without: vec!["pear".to_owned()], ..all };
    assert_eq!(sample(&answers, 100).await.3, [0, 0, 0]);
}

async fn what_is_read_is_bounded(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    for _ in 0..3 {
        demo.say(&["plum", "pear", "plum"]).await;
    }
    let (all, plum) = (Scope::default(), probe(&[&["plum"]]));
    assert_eq!(seqs(&demo.draw(&all, &plum, 3).await), [9, 7, 6]);
    assert_eq!(seqs(&demo.walk(&all, &plum, 9, 3).await), [9, 7, 6]);
    assert_eq!(seqs(&demo.walk(&all, &plum, 3, 9).await), [9, 7]);
    let drawn = demo.draw(&all, &plum, 9).await;
    let bytes = demo.history().await[0].json.len() as i64;
    let at = async |most| demo.store.at(&demo.tenant, None, &drawn, most).await.unwrap().len();
    assert_eq!((at(bytes * 2).await, at(bytes * 2 + 1).await, at(1).await, at(0).await), (2, 3, 1, 0));
    let beside = async |places, most| {
        let beside = demo.store.beside(&demo.tenant, places, 2, most).await.unwrap();
        let mut beside: Vec<i64> = beside.iter().map(|found| found.place.seq).collect();
        beside.sort_unstable();
        beside
    };
    assert_eq!(beside(&drawn[..1], i64::MAX).await, [7, 8]);
    // Of 9 and 7, first what is near the first.
    assert_eq!(beside(&drawn[..2], i64::MAX).await, [5, 6, 7, 8, 9]);
    assert_eq!(beside(&drawn[..2], 1).await, [8]);
    let of_eight = demo.history().await[7].json.len() as i64;
    assert_eq!(beside(&drawn[..2], of_eight).await, [8]);
    assert_eq!(beside(&drawn[..2], of_eight + 1).await, [7, 8]);
    assert_eq!(beside(&drawn[..2], of_eight + bytes + 1).await, [6, 7, 8]);
    // A large one is no reason to leave out small ones behind it.
    demo.say(&[&format!("plum {}", "x".repeat(LARGE as usize)), "plum"]).await;
    let drawn = demo.draw(&all, &plum, 3).await;
    assert_eq!(seqs(&drawn), [11, 10, 9]);
    let at = async |most| {
        let found = demo.store.at(&demo.tenant, None, &drawn, most).await.unwrap();
        found.iter().map(|found| found.place.seq).collect::<Vec<_>>()
    };
    let history = demo.history().await;
    let small: i64 = [9, 11].iter().map(|seq| history[seq - 1].json.len() as i64).sum();
    assert_eq!((at(small).await, at(small + 1).await), (vec![11, 9], vec![11, 10, 9]));
    // The largest message there can be of a script that has a term for each pair of characters.
    let long: String =
        (0..3_000_000).filter_map(|n| char::from_u32(0x4e00 + n % 20_011 * 7919 % 20_000)).collect();
    demo.say(&[&long]).await;
}

/// A store over it that indexes by these rules.
async fn store_with(backend: &Backend, search: Option<Analysis>) -> Arc<dyn Store> {
    let options = Options { max_connections: 2, acquire_timeout: LONG, statement_timeout: LONG, search };
    storage::connect(&backend.url(), &options).await.unwrap()
}

/// What the index has of every message.
async fn index(sql: &mut Sql) -> Vec<String> {
    sql.texts(
        "SELECT tenant_id || ' ' || session_id || ' ' || seq || ' ' || CAST(lexemes AS text) FROM search
        ORDER BY tenant_id, session_id, seq",
    )
    .await
}

async fn messages_from_before_the_index_are_indexed_later(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let call =
        r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"find","arguments":"{}"}}]}"#;
    let messages = [r#"{"role":"user","content":"plums"}"#, call].map(|json| (message(json), 1));
    let exchange = Exchange { messages: messages.to_vec(), user_id: Some(user_id("ada")), metadata: None };
    for _ in 0..600 {
        demo.record(&exchange).await;
    }
    demo.tenant("acme").say(&["a", "b"]).await;
    let analysis = Analysis::default();
    assert_eq!(state(&demo.store, analysis).await.unwrap().backlog, 0);
    let indexed = index(&mut sql).await;
    assert_eq!(indexed.len(), 1202);
    sql.run("DELETE FROM search").await;
    sql.delay_indexing("1 = 1").await;
    // What is stored meanwhile is indexed at once, and once.
    demo.say(&["new"]).await;
    assert_eq!(state(&demo.store, analysis).await.unwrap().backlog, 2);
    // Two at it do it once.
    let (one, two) =
        tokio::join!(reindex(&demo.store, analysis, |_| {}), reindex(&demo.store, analysis, |_| {}));
    assert!(one.unwrap() + two.unwrap() >= 1202);
    assert_eq!(state(&demo.store, analysis).await.unwrap().backlog, 0);
    let again: Vec<String> =
        index(&mut sql).await.into_iter().filter(|row| !row.starts_with("default demo 1201")).collect();
    assert_eq!(again, indexed);
    assert_eq!(demo.draw(&Scope::default(), &probe(&[&["plum"]]), 9999).await.len(), 600);
    assert_eq!(reindex(&demo.store, analysis, |_| {}).await.unwrap(), 0);
}

async fn other_rules_index_all_anew(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.tenant("acme").say(&["plums"]).await;
    let english = Analysis::default();
    assert_eq!(state(&demo.store, english).await.unwrap().label, "english-1");
    assert_eq!(reindex(&demo.store, english, |_| {}).await.unwrap(), 0);
    let none = Analysis::new(Language::None);
    assert_eq!(state(&demo.store, none).await.unwrap().label, "english-1");
    let store = store_with(&backend, Some(none)).await;
    assert_eq!(reindex(&store, none, |_| {}).await.unwrap(), 2);
    assert_eq!(state(&store, none).await.unwrap().label, "none-1");
    let all = Scope::default();
    assert_eq!(demo.draw(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.draw(&all, &probe(&[&["plums"]]), 9).await.len(), 1);
    // What was stored without an index is in none, whatever the rules before were.
    let store = store_with(&backend, None).await;
    store.suspend_index().await.unwrap();
    Conversation { store, ..demo.session("other") }.say(&["plums", "pears"]).await;
    assert_ne!(state(&demo.store, english).await.unwrap().label, "english-1");
    assert_eq!(reindex(&demo.store, english, |_| {}).await.unwrap(), 4);
    assert_eq!(demo.draw(&all, &probe(&[&["plum"]]), 9).await.len(), 2);
}

async fn an_erased_session_is_indexed_no_more(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.session("other").say(&["plums"]).await;
    sql.delay_indexing("session_id = 'demo'").await;
    let piece = demo.store.backlog().await.unwrap().unwrap();
    let places = demo.draw(&Scope::default(), &probe(&[&["plum"]]), 9).await;
    let messages = [(places[1].clone(), message(r#"{"role":"user","content":"plums"}"#))];
    assert!(demo.erase().await);
    demo.store.index(&piece, &messages, 1).await.unwrap();
    assert_eq!(demo.draw(&Scope::default(), &probe(&[&["plum"]]), 9).await, places[..1]);
    assert_eq!(demo.store.backlog().await.unwrap(), None);
    // Nor where a session of the same id has begun.
    demo.say(&["pears"]).await;
    demo.store.index(&piece, &messages, 1).await.unwrap();
    assert_eq!(demo.draw(&Scope::default(), &probe(&[&["plum"]]), 9).await, places[..1]);
}

/// Ids of SQLite's rows begin anew after the highest that is left: what is stored then is not taken for indexed.
async fn what_is_erased_makes_room_for_what_is_found(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (all, plum) = (Scope::default(), probe(&[&["plum"]]));
    let other = demo.session("other");
    for (kept, erased) in [(200, 300), (1, 500), (3, 2), (0, 52), (300, 1)] {
        let before = demo.draw(&all, &plum, 9999).await.len();
        other.say(&vec!["plum"; erased]).await;
        assert_eq!(demo.draw(&all, &plum, 9999).await.len(), before + erased);
        assert!(other.erase().await);
        if kept > 0 {
            demo.say(&vec!["plum"; kept]).await;
        }
        let found = demo.draw(&all, &plum, 9999).await;
        let expected: Vec<i64> = (1..=(before + kept) as i64).rev().collect();
        assert_eq!(seqs(&found), expected);
        if let Sql::Sqlite(_) = sql {
            // Whether the full-text index has what it should, and nothing else.
            sql.run("INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('integrity-check', 1)").await;
        }
    }
}
