//! The index of search has what is stored, no more and no less.

use crate::conversation::{Conversation, LONG, message, user_id};
use crate::search::{probe, seqs};
use crate::sql::Sql;
use crate::support::backend::{Backend, on_both_stores};
use precis::domain::exchange::Exchange;
use precis::domain::search::analysis::{Analysis, Language};
use precis::engine::reindex::{reindex, state};
use precis::storage::search::Scope;
use precis::storage::{self, Options, Store};
use sqlx::Executor as _;
use std::sync::Arc;

on_both_stores!(
    messages_from_before_the_index_are_indexed_later,
    other_rules_index_all_anew,
    an_erased_session_is_indexed_no_more,
    what_is_erased_makes_room_for_what_is_found,
    what_waits_beside_the_index_is_found_before_it_is_settled_and_after,
);

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

async fn what_waits_beside_the_index_is_found_before_it_is_settled_and_after(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let (all, plum) = (Scope::default(), probe(&[&["plum"]]));
    let found = async || seqs(&demo.draw(&all, &plum, 9).await);
    demo.say(&["plums", "pears"]).await;
    assert_eq!(found().await, [1]);
    // On SQLite nobody but whoever stores puts anything into the index.
    let waits = matches!(backend, Backend::Postgres(_));
    assert_eq!(demo.store.settle_index().await.unwrap(), waits);
    assert_eq!(found().await, [1]);
    assert!(!demo.store.settle_index().await.unwrap());
    demo.say(&["plums"]).await;
    assert_eq!(found().await, [3, 1]);
    // A role that owns nothing can do it as well.
    if let Sql::Postgres(connection) = &mut Sql::on(&backend).await {
        connection.execute("SET ROLE pg_monitor").await.unwrap();
        let pages: i64 = sqlx::query_scalar("SELECT settle_search()").fetch_one(connection).await.unwrap();
        assert!(pages > 0);
    }
    assert!(!demo.store.settle_index().await.unwrap());
}
