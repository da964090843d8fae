//! Maintenance of the search index: it contains exactly the stored messages.

use crate::conversation::{Conversation, LONG, exchange_of, message, session_id, user_id};
use crate::search::{probe, seqs};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::exchange::Exchange;
use precis::domain::search::analyzer::{Analyzer, Language};
use precis::service::reindex::{reindex, state};
use precis::storage::search::SearchFilter;
use precis::storage::search_index::ReindexRange;
use precis::storage::{self, Store, StoreOptions};
use sqlx::{Connection as _, Executor as _, PgConnection};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use test_case::test_case;
use tokio::runtime::Handle;
use tokio::task;
use tokio::time::timeout;

/// Opens a store with an analyzer.
async fn store_with(backend: &Backend, search: Option<Analyzer>) -> Arc<Store> {
    let options = StoreOptions { max_connections: 2, acquire_timeout: LONG, statement_timeout: LONG, search };
    storage::connect(&backend.url(), &options).await.unwrap()
}

/// Returns all rows of the index.
async fn index(sql: &mut Sql) -> Vec<String> {
    sql.texts(
        "SELECT tenant_id || ' ' || session_id || ' ' || seq || ' ' || CAST(lexemes AS text) FROM search
        ORDER BY tenant_id, session_id, seq",
    )
    .await
}

/// Returns all pending ranges.
async fn pending(sql: &mut Sql) -> Vec<String> {
    sql.texts(
        "SELECT tenant_id || ' ' || session_id || ' ' || first_seq || ' ' || last_seq FROM search_pending
        ORDER BY tenant_id, session_id, first_seq",
    )
    .await
}

async fn index_all(demo: &Conversation) {
    while demo.store.index_batch().await.unwrap() {}
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_adds_messages_stored_without_an_index(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let call =
        r#"{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"find","arguments":"{}"}}]}"#;
    let messages = [r#"{"role":"user","content":"plums"}"#, call].map(|json| (message(json), 1));
    let exchange =
        Exchange { messages: messages.to_vec(), user_id: Some(user_id("ada")), ..Exchange::default() };
    for _ in 0..600 {
        demo.record(&exchange).await;
    }
    demo.tenant("acme").say(&["a", "b"]).await;
    let analyzer = Analyzer::default();
    assert_eq!(state(&demo.store, analyzer).await.unwrap().sessions_to_reindex, 0);
    index_all(&demo).await;
    let indexed = index(&mut sql).await;
    assert_eq!(indexed.len(), 1202);
    sql.run("DELETE FROM search").await;
    sql.delay_indexing("1 = 1").await;
    // Messages stored in the meantime are indexed once.
    demo.say(&["new"]).await;
    assert_eq!(state(&demo.store, analyzer).await.unwrap().sessions_to_reindex, 2);
    // Two concurrent runs index each message once.
    let (one, two) =
        tokio::join!(reindex(&demo.store, analyzer, |_| {}), reindex(&demo.store, analyzer, |_| {}));
    assert!(one.unwrap() + two.unwrap() >= 1202);
    assert_eq!(state(&demo.store, analyzer).await.unwrap().sessions_to_reindex, 0);
    let again: Vec<String> =
        index(&mut sql).await.into_iter().filter(|row| !row.starts_with("default demo 1201")).collect();
    assert_eq!(again, indexed);
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9999).await.len(), 600);
    assert_eq!(reindex(&demo.store, analyzer, |_| {}).await.unwrap(), 0);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_with_another_analyzer_replaces_all_entries(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.tenant("acme").say(&["plums"]).await;
    let english = Analyzer::default();
    assert_eq!(state(&demo.store, english).await.unwrap().analyzer_version, "english-2");
    assert_eq!(reindex(&demo.store, english, |_| {}).await.unwrap(), 0);
    let none = Analyzer::new(Language::None);
    // An index without entries has the analyzer of the settings, whichever process was first.
    assert_eq!(state(&demo.store, none).await.unwrap().analyzer_version, "none-1");
    assert_eq!(state(&demo.store, english).await.unwrap().analyzer_version, "english-2");
    index_all(&demo).await;
    assert_eq!(state(&demo.store, none).await.unwrap().analyzer_version, "english-2");
    let store = store_with(&backend, Some(none)).await;
    assert_eq!(reindex(&store, none, |_| {}).await.unwrap(), 2);
    assert_eq!(state(&store, none).await.unwrap().analyzer_version, "none-1");
    let all = SearchFilter::default();
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 1);
    // All replicas use the analyzer recorded in the index.
    demo.say(&["plums"]).await;
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 2);
    // Messages stored without an index are missing, whichever analyzer was used before.
    let store = store_with(&backend, None).await;
    store.disable_index().await.unwrap();
    Conversation { store, ..demo.session("other") }.say(&["plums", "pears"]).await;
    assert_ne!(state(&demo.store, english).await.unwrap().analyzer_version, "english-2");
    assert_eq!(reindex(&demo.store, english, |_| {}).await.unwrap(), 5);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await.len(), 3);
    // An unknown analyzer version is left to another release.
    index_all(&demo).await;
    let mut sql = Sql::on(&backend).await;
    sql.run("UPDATE search_analyzer SET version = 'english-99'").await;
    demo.say(&["plums"]).await;
    assert!(!demo.store.index_batch().await.unwrap());
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await.len(), 3);
    assert_eq!(pending(&mut sql).await.len(), 1);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_session_is_not_reindexed(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.session("other").say(&["plums"]).await;
    sql.delay_indexing("session_id = 'demo'").await;
    let piece = demo.store.next_reindex_range(None).await.unwrap().unwrap();
    let places = demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await;
    let messages = [(places[1].clone(), message(r#"{"role":"user","content":"plums"}"#))];
    assert!(demo.erase().await);
    demo.store.reindex_messages(&piece, &messages, 1).await.unwrap();
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await, places[..1]);
    assert_eq!(demo.store.next_reindex_range(None).await.unwrap(), None);
    // The same if the session was created again.
    demo.say(&["pears"]).await;
    demo.store.reindex_messages(&piece, &messages, 1).await.unwrap();
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await, places[..1]);
}

/// A reindex reads the sessions in order, and then again from the beginning.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_includes_sessions_added_behind_its_position(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for session in ["a", "b", "c"] {
        demo.session(session).say(&["plums"]).await;
    }
    sql.delay_indexing("session_id <> 'a'").await;
    let first = demo.store.next_reindex_range(None).await.unwrap().unwrap();
    let last = ReindexRange { session: session_id("c"), ..first.clone() };
    assert_eq!(first.session, session_id("b"));
    assert_eq!(demo.store.next_reindex_range(Some(&first)).await.unwrap(), Some(first));
    assert_eq!(demo.store.next_reindex_range(Some(&last)).await.unwrap(), Some(last));
    let (sql, runtime) = (Mutex::new(sql), Handle::current());
    let add_first_session = |indexed| {
        if indexed == 1 {
            let mut sql = sql.lock().unwrap();
            task::block_in_place(|| runtime.block_on(sql.delay_indexing("session_id = 'a'")));
        }
    };
    assert_eq!(reindex(&demo.store, Analyzer::default(), add_first_session).await.unwrap(), 3);
}

/// SQLite reuses row ids after the highest one is deleted. New rows with such ids must not count as indexed.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_stored_after_an_erasure_are_found(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (all, plum) = (SearchFilter::default(), probe(&[&["plum"]]));
    let other = demo.session("other");
    for (kept, erased) in [(200, 300), (1, 500), (3, 2), (0, 52), (300, 1)] {
        let before = demo.lookup_terms(&all, &plum, 9999).await.len();
        other.say(&vec!["plum"; erased]).await;
        assert_eq!(demo.lookup_terms(&all, &plum, 9999).await.len(), before + erased);
        assert!(other.erase().await);
        if kept > 0 {
            demo.say(&vec!["plum"; kept]).await;
        }
        let found = demo.lookup_terms(&all, &plum, 9999).await;
        let expected: Vec<i64> = (1..=(before + kept) as i64).rev().collect();
        assert_eq!(seqs(&found), expected);
        if let Sql::Sqlite(_) = sql {
            // Checks that the full-text index is consistent with its table.
            sql.run("INSERT INTO search_lexemes (search_lexemes, rank) VALUES ('integrity-check', 1)").await;
        }
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_messages_are_pending_until_indexed(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let (other, acme) = (demo.session("other"), demo.tenant("acme"));
    demo.say(&["plums", "pears"]).await;
    other.record(&exchange_of("ada", &["plums"])).await;
    acme.say(&["plums"]).await;
    demo.say(&["apples"]).await;
    assert_eq!(index(&mut sql).await, [""; 0]);
    assert_eq!(
        pending(&mut sql).await,
        ["acme demo 1 1", "default demo 1 2", "default demo 3 3", "default other 1 1"]
    );
    demo.index_session().await;
    assert_eq!(pending(&mut sql).await, ["acme demo 1 1", "default other 1 1"]);
    demo.index_tenant().await;
    assert_eq!(pending(&mut sql).await, ["acme demo 1 1"]);
    assert!(!demo.store.index_batch().await.unwrap());
    assert_eq!(pending(&mut sql).await, [""; 0]);
    let indexed = index(&mut sql).await;
    assert_eq!(indexed.len(), 5);
    // The entries are equal to those of a reindex, for every tenant.
    sql.delay_indexing("1 = 1").await;
    assert_eq!(reindex(&demo.store, Analyzer::default(), |_| {}).await.unwrap(), 5);
    assert_eq!(index(&mut sql).await, indexed);
    // Without search, messages are not added to the pending ones.
    let store = store_with(&backend, None).await;
    Conversation { store, ..other }.say(&["plums"]).await;
    assert_eq!(pending(&mut sql).await, [""; 0]);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_messages_are_indexed_in_batches_oldest_first(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let mut stored = Vec::new();
    for at in 0..260 {
        let session = demo.tenant(&format!("t{}", at % 7)).session(&format!("s{}", at % 3));
        let seq = session.say(&["plums"]).await.last_seq;
        stored.push(format!("{} {} {seq}", session.tenant, session.session));
    }
    assert!(demo.store.index_batch().await.unwrap());
    let by_id = "SELECT tenant_id || ' ' || session_id || ' ' || seq FROM search ORDER BY id";
    assert_eq!(sql.texts(by_id).await, stored[..250]);
    assert!(!demo.store.index_batch().await.unwrap());
    assert_eq!(sql.texts(by_id).await, stored);
    // A batch has about a megabyte, even within one exchange.
    let large = "plums ".repeat(120_000);
    for texts in [&[large.as_str(), &large, &large][..], &["plums"], &["plums"]] {
        demo.say(texts).await;
    }
    assert_eq!(
        pending(&mut sql).await,
        ["default demo 1 2", "default demo 3 3", "default demo 4 4", "default demo 5 5"]
    );
    assert!(demo.store.index_batch().await.unwrap());
    assert_eq!(pending(&mut sql).await, ["default demo 3 3", "default demo 4 4", "default demo 5 5"]);
    assert!(!demo.store.index_batch().await.unwrap());
    assert_eq!(pending(&mut sql).await, [""; 0]);
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 5);
}

/// A row of the Postgres index holds at most a megabyte. A rejected row would block all pending messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_with_too_many_terms_is_indexed_partially(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let characters = ('\u{4e00}'..).take(3000).map(|base| format!("{base}{}", "\u{f77}".repeat(13)));
    demo.say(&[&format!("plums {}", characters.collect::<String>()), "plums"]).await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 2);
}

/// Every replica finds its messages, whichever replica indexed them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_indexing_creates_each_entry_once(backend: Backend) {
    const EXCHANGES: usize = 40;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let plum = probe(&[&["plum"]]);
    let searching = (0..4).map(|who| {
        let (demo, plum) = (demo.session(&format!("s{who}")), plum.clone());
        tokio::spawn(async move {
            let scope = SearchFilter { session: Some(demo.session.clone()), ..SearchFilter::default() };
            for stored in 1..=EXCHANGES {
                demo.say(&["plums"]).await;
                assert_eq!(demo.lookup_terms(&scope, &plum, 9999).await.len(), stored);
            }
        })
    });
    let settling = (0..2).map(|_| {
        let demo = demo.clone();
        tokio::spawn(async move {
            loop {
                demo.store.index_batch().await.unwrap();
                tokio::task::yield_now().await;
            }
        })
    });
    let (searching, settling): (Vec<_>, Vec<_>) = (searching.collect(), settling.collect());
    for task in searching {
        task.await.unwrap();
    }
    for task in settling {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    assert_eq!(pending(&mut sql).await, [""; 0]);
    assert_eq!(index(&mut sql).await.len(), 4 * EXCHANGES);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_messages_of_erased_session_are_not_indexed(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["plums"]).await;
    assert!(demo.erase().await);
    assert_eq!(pending(&mut sql).await, [""; 0]);
    demo.say(&["pears"]).await;
    index_all(&demo).await;
    assert_eq!(index(&mut sql).await.len(), 1);
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await, []);
    assert!(demo.erase().await);
    // In either order.
    for _ in 0..20 {
        for text in ["plums", "pears", "apples"] {
            demo.say(&[text, text]).await;
        }
        let (indexed, erased) = tokio::join!(demo.store.index_batch(), demo.erase());
        indexed.unwrap();
        assert!(erased);
        assert_eq!(index(&mut sql).await, [""; 0]);
        assert_eq!(pending(&mut sql).await, [""; 0]);
    }
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_message_does_not_block_indexing_of_others(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&["plums"]).await;
    let other = demo.session("other");
    other.say(&["plums"]).await;
    sql.run(
        "INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
            SELECT tenant_id, session_id, 2, role, tokens, 'no message', created_at FROM messages WHERE session_id = 'demo';
        UPDATE search_pending SET last_seq = 2 WHERE session_id = 'demo'",
    )
    .await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 2);
    assert_eq!(pending(&mut sql).await, [""; 0]);
}

/// A search must find all messages stored before it, while background indexing must not wait.
#[tokio::test]
async fn search_on_postgres_waits_for_a_concurrent_indexer() {
    const AWHILE: Duration = Duration::from_millis(50);
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let mut other = PgConnection::connect(&backend.url()).await.unwrap();
    demo.say(&["plums"]).await;
    // If the other transaction rolls back, this store indexes the messages; otherwise they are indexed already.
    for end in ["ROLLBACK", "DELETE FROM search_pending; COMMIT"] {
        other.execute("BEGIN; SELECT FROM search_pending FOR UPDATE").await.unwrap();
        assert!(!demo.store.index_batch().await.unwrap());
        assert_eq!(pending(&mut sql).await.len(), 1);
        let indexing = demo.index_tenant();
        tokio::pin!(indexing);
        assert!(timeout(AWHILE, &mut indexing).await.is_err());
        // The search does not wait for messages that are stored later.
        demo.session("later").say(&["pears"]).await;
        other.execute(end).await.unwrap();
        indexing.await;
        assert!(pending(&mut sql).await.iter().all(|run| run.contains("later")));
        let of_demo = index(&mut sql).await.into_iter().filter(|row| row.contains("demo"));
        assert_eq!(of_demo.count(), 1);
        demo.index_tenant().await;
        demo.say(&["plums"]).await;
    }
}

/// A role that does not own the index may flush it, too.
#[tokio::test]
async fn index_batch_on_postgres_flushes_the_gin_pending_list() {
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    let found = async || seqs(&demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await);
    let mut owner = PgConnection::connect(&backend.url()).await.unwrap();
    let Sql::Postgres(mut nobody) = Sql::on(&backend).await else { unreachable!() };
    nobody.execute("SET ROLE pg_monitor").await.unwrap();
    let pages = async |connection: &mut PgConnection| -> i64 {
        sqlx::query_scalar("SELECT flush_search_index()").fetch_one(connection).await.unwrap()
    };
    demo.say(&["plums", "pears"]).await;
    assert_eq!(found().await, [1]);
    assert!(pages(&mut nobody).await > 0);
    assert_eq!(found().await, [1]);
    demo.say(&["plums"]).await;
    assert!(!demo.store.index_batch().await.unwrap());
    assert_eq!(pages(&mut owner).await, 0);
    assert_eq!(found().await, [3, 1]);
}
