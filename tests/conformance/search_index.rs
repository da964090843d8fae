//! The search index: it contains exactly the messages of the sessions, whatever happens in which order.

use crate::conversation::{Conversation, LONG, exchange_of, session_id, user_id};
use crate::search::{probe, seqs};
use crate::sql::Sql;
use crate::support::backend::Backend;
use precis::domain::export_format::{ImportedMessage, ImportedSession};
use precis::domain::id::{SessionId, TenantId};
use precis::domain::message::{Message, Role};
use precis::domain::search::analyzer::{Analyzer, Language};
use precis::domain::search::lexemes;
use precis::storage::search::SearchFilter;
use precis::storage::search_index::IndexedBatch;
use precis::storage::{self, ForkOutcome, RowBatch, Store, StoreOptions};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sqlx::{Connection as _, Executor as _, PgConnection};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use test_case::test_case;
use tokio::runtime::Handle;

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

/// Indexes all messages again if the index has another analyzer. Returns the number of messages that were indexed.
async fn reindex(demo: &Conversation, analyzer: Analyzer) -> usize {
    demo.store.record_analyzer(analyzer, true).await.unwrap();
    demo.index_all().await
}

#[derive(Clone, Debug)]
enum Operation {
    /// Stores messages, by one of the replicas.
    Exchange {
        by: usize,
        session: usize,
        messages: usize,
        user: bool,
    },
    Import {
        session: usize,
        messages: usize,
    },
    Fork {
        session: usize,
        through: usize,
    },
    Rewind {
        session: usize,
        after: usize,
    },
    Redact {
        session: usize,
        seq: usize,
    },
    Bind {
        session: usize,
    },
    Erase {
        session: usize,
    },
    /// Indexes a batch, by one of the replicas.
    Index {
        by: usize,
    },
    /// Looks for missing messages in all tenants.
    Check {
        by: usize,
    },
    /// Changes the analyzer to that of the replica.
    Reindex {
        by: usize,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        6 => (0..3_usize, 0..4_usize, 1..4_usize, any::<bool>())
            .prop_map(|(by, session, messages, user)| Operation::Exchange { by, session, messages, user }),
        1 => (0..4_usize, 1..5_usize).prop_map(|(session, messages)| Operation::Import { session, messages }),
        2 => (0..4_usize, 1..6_usize).prop_map(|(session, through)| Operation::Fork { session, through }),
        2 => (0..4_usize, 0..6_usize).prop_map(|(session, after)| Operation::Rewind { session, after }),
        2 => (0..4_usize, 1..6_usize).prop_map(|(session, seq)| Operation::Redact { session, seq }),
        1 => (0..4_usize).prop_map(|session| Operation::Bind { session }),
        1 => (0..4_usize).prop_map(|session| Operation::Erase { session }),
        5 => (0..3_usize).prop_map(|by| Operation::Index { by }),
        1 => (0..3_usize).prop_map(|by| Operation::Check { by }),
        1 => (0..2_usize).prop_map(|by| Operation::Reindex { by }),
    ];
    vec(operation, 1..40)
}

/// Three replicas with different settings, and the sessions of a case.
struct Scene {
    replicas: [Arc<Store>; 3],
    analyzers: [Option<Analyzer>; 3],
    tenants: [TenantId; 2],
    /// Sessions that have ever existed, except branches.
    sessions: BTreeSet<(usize, SessionId)>,
    /// Number of names that were used.
    used: usize,
}

/// A visible message: its position, content and user.
type Visible = (TenantId, SessionId, i64, Message, Option<precis::domain::id::UserId>);

impl Scene {
    /// Returns a word that no other message contains. Both analyzers return it unchanged.
    fn word(&mut self) -> String {
        self.used += 1;
        format!("plums Hauses w{}x", self.used)
    }

    fn session(&mut self, number: usize) -> Conversation {
        let (tenant, id) = (number % 2, session_id(&format!("s{number}")));
        self.sessions.insert((tenant, id.clone()));
        Conversation {
            store: Arc::clone(&self.replicas[0]),
            tenant: self.tenants[tenant].clone(),
            session: id,
        }
    }

    async fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Exchange { by, session, messages, user } => {
                let texts: Vec<String> = (0..messages).map(|_| self.word()).collect();
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                let demo = Conversation { store: Arc::clone(&self.replicas[by]), ..self.session(session) };
                let owner = demo.store.session_owner(&demo.tenant, &demo.session).await.unwrap();
                if user || owner.user.is_some() {
                    demo.record(&exchange_of("ada", &texts)).await;
                } else {
                    demo.say(&texts).await;
                }
            }
            Operation::Import { session, messages } => {
                let demo = self.session(session);
                let messages: Vec<ImportedMessage> = (1..)
                    .zip((0..messages).map(|_| self.word()).collect::<Vec<_>>())
                    .map(|(seq, text)| ImportedMessage {
                        seq,
                        created_at: None,
                        redacted_at: None,
                        message: Message::text(Role::User, &text),
                        tokens: 1,
                    })
                    .collect();
                let last_seq = i64::try_from(messages.len()).unwrap();
                let imported = ImportedSession { last_seq, tokens: last_seq, ..ImportedSession::default() };
                let (sender, batches) = tokio::sync::mpsc::channel(1);
                sender.send(RowBatch { messages, revisions: Vec::new() }).await.unwrap();
                drop(sender);
                let users = (None, None);
                demo.store
                    .import_session(&demo.tenant, &demo.session, users, &imported, batches)
                    .await
                    .unwrap();
            }
            Operation::Fork { session, through } => {
                let demo = self.session(session);
                self.used += 1;
                let target = session_id(&format!("f{}", self.used));
                let through = i64::try_from(through).unwrap();
                let forked = demo.store.fork_session(&demo.tenant, &demo.session, &target, through);
                if let ForkOutcome::Forked(_) = forked.await.unwrap() {
                    self.sessions.insert((session % 2, target));
                }
            }
            Operation::Rewind { session, after } => {
                let demo = self.session(session);
                self.used += 1;
                let branch = session_id(&format!("b{}", self.used));
                let after = i64::try_from(after).unwrap();
                demo.store.rewind_session(&demo.tenant, &demo.session, &branch, after, 1000).await.unwrap();
            }
            Operation::Redact { session, seq } => {
                let demo = self.session(session);
                let seq = i64::try_from(seq).unwrap();
                demo.store.redact_message(&demo.tenant, &demo.session, seq, None).await.unwrap();
            }
            Operation::Bind { session } => {
                let demo = self.session(session);
                demo.store.bind_session(&demo.tenant, &demo.session, &user_id("ada")).await.unwrap();
            }
            Operation::Erase { session } => _ = self.session(session).erase().await,
            Operation::Index { by } => _ = self.replicas[by].index_batch().await.unwrap(),
            Operation::Check { by } => _ = self.replicas[by].index_state().await.unwrap(),
            Operation::Reindex { by } => {
                let analyzer = self.analyzers[by].unwrap();
                self.replicas[by].record_analyzer(analyzer, true).await.unwrap();
            }
        }
    }

    async fn visible(&self) -> Vec<Visible> {
        let mut visible = Vec::new();
        for (tenant, session) in &self.sessions {
            let store = Arc::clone(&self.replicas[0]);
            let demo =
                Conversation { store, tenant: self.tenants[*tenant].clone(), session: session.clone() };
            let Some(state) = demo.find().await else { continue };
            for message in demo.history().await.into_iter().filter(|message| message.redacted_at.is_none()) {
                let parsed = Message::from_stored(message.json).unwrap();
                visible.push((
                    demo.tenant.clone(),
                    session.clone(),
                    message.seq,
                    parsed,
                    state.user_id.clone(),
                ));
            }
        }
        visible
    }

    /// Checks that each visible message is found by the index, or by reading the missing messages.
    async fn check_found(&self) {
        let (store, all) = (&self.replicas[0], SearchFilter::default());
        let visible = self.visible().await;
        for tenant in &self.tenants {
            let missing = store.missing_messages(tenant, &all, 1000, i64::MAX).await.unwrap();
            assert_eq!(missing.others, 0);
            let missing = missing.newest.into_iter().filter(|(_, message)| message.redacted_at.is_none());
            let missing: Vec<_> =
                missing.map(|(session, message)| (session, message.seq, message.json)).collect();
            for (_, session, seq, message, user) in visible.iter().filter(|(of, ..)| of == tenant) {
                if missing.iter().any(|(of, at, json)| (of, at, &**json) == (session, seq, message.json())) {
                    continue;
                }
                let word = message.content().split(' ').next_back().unwrap();
                let query = [probe(&[&[word]])];
                for filter in [all.clone(), SearchFilter { user: user.clone(), ..all.clone() }] {
                    let found = store.lookup_terms(tenant, &filter, &query, 99).await.unwrap();
                    let found = store.locate_entries(tenant, &filter, &found[0]).await.unwrap();
                    let is_found =
                        found.iter().any(|(_, found)| (&found.session, found.seq) == (session, *seq));
                    assert!(is_found, "{session} {seq} {word}");
                }
            }
        }
    }

    /// Checks that the index contains one entry for each visible message, by the recorded analyzer.
    async fn check_complete(&self, sql: &mut Sql) {
        let version = sql.texts("SELECT version FROM search_analyzer").await.remove(0);
        let analyzer = Analyzer::parse_version(&version).unwrap();
        let entry = |(tenant, session, seq, message, user): Visible| {
            let mut terms = lexemes::message_lexemes(analyzer, &tenant, &session, &message);
            if let Some(user) = user {
                terms = format!("{terms} {}", lexemes::user_lexeme(&lexemes::tenant_prefix(&tenant), &user));
            }
            let terms: BTreeSet<&str> = terms.split(' ').collect();
            format!("{tenant} {session} {seq} {}", terms.into_iter().collect::<Vec<_>>().join(" "))
        };
        let expected: BTreeSet<String> = self.visible().await.into_iter().map(entry).collect();
        let stored = index(sql).await.into_iter().filter_map(|row| {
            let mut parts: Vec<String> =
                row.split(' ').map(|part| part.trim_matches('\'').to_owned()).collect();
            let is_of_case = self.tenants.iter().any(|tenant| tenant.as_str() == parts[0]);
            parts[3..].sort();
            (is_of_case && !parts[1].starts_with('b')).then(|| parts.join(" "))
        });
        let stored: Vec<String> = stored.collect();
        assert_eq!(stored.len(), expected.len());
        assert_eq!(stored.into_iter().collect::<BTreeSet<_>>(), expected);
        assert_eq!(sql.unindexed().await, [""; 0]);
    }
}

/// Replicas with other settings, without search, or next to each other, lead to the same index in any order.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_is_complete_after_any_operations_and_search_never_misses(backend: Backend) {
    let analyzers = [Some(Analyzer::default()), Some(Analyzer::new(Language::German)), None];
    let mut replicas = Vec::new();
    for analyzer in analyzers {
        replicas.push(store_with(&backend, analyzer).await);
    }
    let replicas: [Arc<Store>; 3] = replicas.try_into().unwrap();
    let cases = std::env::var("PRECIS_MODEL_CASES").map_or(20, |cases| cases.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_time: 60_000, ..Config::default() };
    let (handle, number) = (Handle::current(), Cell::new(0));
    let result = tokio::task::block_in_place(|| {
        TestRunner::new(config).run(&operations(), |operations| {
            number.set(number.get() + 1);
            handle.block_on(async {
                let tenants =
                    ["one", "two"].map(|name| TenantId::new(format!("{name}{}", number.get())).unwrap());
                let replicas = replicas.clone();
                let mut scene = Scene { replicas, analyzers, tenants, sessions: BTreeSet::new(), used: 0 };
                for operation in operations {
                    scene.apply(operation).await;
                    scene.check_found().await;
                }
                let mut sql = Sql::on(&backend).await;
                for replica in &scene.replicas[..2] {
                    replica.index_state().await.unwrap();
                    while replica.index_batch().await.unwrap().is_some() {}
                }
                scene.check_complete(&mut sql).await;
                scene.check_found().await;
            });
            Ok(())
        })
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reindex_with_another_analyzer_replaces_all_entries(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.say(&["plums"]).await;
    demo.tenant("acme").say(&["plums"]).await;
    let (english, none) = (Analyzer::default(), Analyzer::new(Language::None));
    // An index without entries has the analyzer of the settings, whichever process was first.
    let store = store_with(&backend, Some(none)).await;
    assert_eq!(demo.store.record_analyzer(english, false).await.unwrap(), "english-2");
    assert_eq!(store.record_analyzer(none, false).await.unwrap(), "none-1");
    assert_eq!(demo.store.record_analyzer(english, false).await.unwrap(), "english-2");
    assert_eq!(demo.index_all().await, 2);
    assert_eq!(store.record_analyzer(none, false).await.unwrap(), "english-2");
    assert_eq!(reindex(&Conversation { store, ..demo.clone() }, none).await, 2);
    let state = demo.store.index_state().await.unwrap();
    assert_eq!((&*state.analyzer, state.is_rebuilding, state.messages), ("none-1", false, 0));
    let all = SearchFilter::default();
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 1);
    // All replicas use the analyzer recorded in the index.
    demo.say(&["plums"]).await;
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await, []);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plums"]]), 9).await.len(), 2);
    // Only the messages stored without an index are missing.
    let store = store_with(&backend, None).await;
    Conversation { store, ..demo.session("other") }.say(&["plums", "pears"]).await;
    assert_eq!(demo.store.index_state().await.unwrap().messages, 2);
    assert_eq!(demo.index_all().await, 2);
    assert_eq!(reindex(&demo, english).await, 5);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await.len(), 3);
    // An unknown analyzer is left to another release.
    let mut sql = Sql::on(&backend).await;
    sql.run("UPDATE search_analyzer SET version = 'english-99'").await;
    demo.say(&["plums"]).await;
    assert_eq!(demo.store.index_batch().await.unwrap(), None);
    assert_eq!(demo.lookup_terms(&all, &probe(&[&["plum"]]), 9).await.len(), 3);
    assert_eq!(sql.unindexed().await, ["default demo 2 3"]);
}

/// An interrupted rebuild is continued by any replica, in parts.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_continues_where_it_was_interrupted(backend: Backend) {
    const SESSIONS: usize = 600;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for number in 0..SESSIONS {
        demo.session(&format!("s{number}")).say(&["plums"]).await;
    }
    demo.tenant("acme").say(&["plums"]).await;
    demo.index_all().await;
    demo.store.record_analyzer(Analyzer::new(Language::None), true).await.unwrap();
    assert!(sql.unindexed().await.is_empty(), "the change itself marks nothing");
    let of_index = "SELECT count(*) FROM search WHERE CAST(lexemes AS text) LIKE '%plums%'";
    for _ in 0..2 {
        assert!(demo.store.index_batch().await.unwrap().is_some());
    }
    let other = store_with(&backend, Some(Analyzer::default())).await;
    assert!(other.index_state().await.unwrap().is_rebuilding);
    let done = sql.number(of_index).await;
    assert!(done < 601, "{done}");
    while let Some(batch) = other.index_batch().await.unwrap() {
        // A search finds neither entries of the earlier analyzer nor sessions that are not marked.
        assert!(batch.messages == 0 || !other.index_state().await.unwrap().is_rebuilding);
    }
    assert_eq!(sql.number(of_index).await, 601);
    assert!(!other.index_state().await.unwrap().is_rebuilding);
}

/// A search looks up the entries with the highest ids as the newest ones.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_are_indexed_from_the_oldest_session_on(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let without_search = store_with(&backend, None).await;
    // The names are in another order than the times, and all sessions need several batches.
    for session in ["b", "c", "a"] {
        let session = Conversation { store: Arc::clone(&without_search), ..demo.session(session) };
        session.say(&["plums"; 700]).await;
    }
    demo.index_all().await;
    let first_id = async |sql: &mut Sql, session: &str| {
        sql.number(&format!("SELECT min(id) FROM search WHERE session_id = '{session}'")).await
    };
    let last_of_b = sql.number("SELECT max(id) FROM search WHERE session_id = 'b'").await;
    assert!(last_of_b < first_id(&mut sql, "c").await);
    assert!(first_id(&mut sql, "c").await < first_id(&mut sql, "a").await);
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

/// A batch has about a thousand messages and half a megabyte, even within one session.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_are_indexed_in_batches(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    demo.say(&vec!["plums"; 1500]).await;
    for number in 0..3 {
        demo.session(&format!("s{number}")).say(&["plums"; 300]).await;
    }
    sql.delay_indexing("1 = 1").await;
    demo.store.index_state().await.unwrap();
    let mut batches = Vec::new();
    while let Some(batch) = demo.store.index_batch().await.unwrap() {
        batches.push(batch.messages);
    }
    batches.retain(|batch| *batch > 0);
    assert_eq!(batches, [1000, 1000, 400]);
    let large = "plums ".repeat(60_000);
    demo.session("large").say(&[&large, &large, &large, "plums"]).await;
    demo.store.index_state().await.unwrap();
    // On Postgres, other tenants may have more.
    let knows_last = matches!(backend, Backend::Sqlite(_));
    for (is_last, unindexed) in [(false, &["default large 2 4"][..]), (knows_last, &[])] {
        let batch = demo.store.index_batch().await.unwrap();
        assert_eq!(batch, Some(IndexedBatch { messages: 2, is_last }));
        assert_eq!(sql.unindexed().await, unindexed);
    }
}

/// The newest messages are searched without the index, up to a number and a size; the others are counted.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newest_missing_messages_are_returned_and_the_others_counted(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let other = demo.session("other");
    demo.say(&["a", "b", "c"]).await;
    other.record(&exchange_of("ada", &["d", "e", "f"])).await;
    demo.tenant("acme").say(&["g"]).await;
    demo.index_all().await;
    sql.delay_indexing("1 = 1").await;
    let (store, tenant) = (&demo.store, &demo.tenant);
    let read = async |filter: SearchFilter, most, bytes| {
        let missing = store.missing_messages(tenant, &filter, most, bytes).await.unwrap();
        let found = missing.newest.iter().map(|(session, message)| format!("{session} {}", message.seq));
        let mut found: Vec<String> = found.collect();
        found.sort();
        (found.join(", "), missing.others)
    };
    let all = SearchFilter::default;
    let six = "demo 1, demo 2, demo 3, other 1, other 2, other 3";
    assert_eq!(read(all(), 99, 9999).await, (six.to_owned(), 0));
    assert_eq!(read(all(), 4, 9999).await, ("demo 3, other 1, other 2, other 3".to_owned(), 2));
    assert_eq!(read(all(), 2, 9999).await, ("other 2, other 3".to_owned(), 4));
    assert_eq!(read(all(), 99, 40).await, ("other 2, other 3".to_owned(), 4));
    let of_session = SearchFilter { session: Some(demo.session.clone()), ..all() };
    assert_eq!(read(of_session, 2, 9999).await, ("demo 2, demo 3".to_owned(), 1));
    let of_user = SearchFilter { user: Some(user_id("ada")), ..all() };
    assert_eq!(read(of_user, 99, 9999).await, ("other 1, other 2, other 3".to_owned(), 0));
    demo.index_all().await;
    assert_eq!(read(all(), 99, 9999).await, (String::new(), 0));
}

/// A row of the Postgres index holds at most a megabyte. A rejected row would block all missing messages.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_with_too_many_terms_is_indexed_partially(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    demo.index_all().await;
    let characters = ('\u{4e00}'..).take(3000).map(|base| format!("{base}{}", "\u{f77}".repeat(13)));
    let text = format!("plums {}", characters.collect::<String>());
    demo.say(&[&text, "plums"]).await;
    demo.session("other").say(&[&text[..text.floor_char_boundary(40_000)], "plums"]).await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 4);
}

/// Every replica finds its messages, whichever replica indexes them.
#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_indexing_creates_each_entry_once(backend: Backend) {
    const EXCHANGES: usize = 40;
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    let plum = [probe(&[&["plum"]])];
    let storing = (0..4).map(|who| {
        let (demo, plum) = (demo.session(&format!("s{who}")), plum.clone());
        tokio::spawn(async move {
            let scope = SearchFilter { session: Some(demo.session.clone()), ..SearchFilter::default() };
            for stored in 1..=EXCHANGES {
                demo.say(&["plums"]).await;
                // A message is indexed before it stops to be missing.
                let missing = demo.store.missing_messages(&demo.tenant, &scope, 999, 9999).await.unwrap();
                let found = demo.store.lookup_terms(&demo.tenant, &scope, &plum, 9999).await.unwrap();
                let found = demo.located(&scope, &found[0]).await;
                let missing = missing.newest.into_iter().map(|(_, message)| message.seq);
                let found = found.iter().map(|message| message.seq);
                let found: BTreeSet<i64> = missing.chain(found).collect();
                assert_eq!(found.len(), stored);
            }
        })
    });
    let indexing = (0..2).map(|_| {
        let demo = demo.clone();
        tokio::spawn(async move {
            loop {
                demo.index_all().await;
                tokio::task::yield_now().await;
            }
        })
    });
    let (storing, indexing): (Vec<_>, Vec<_>) = (storing.collect(), indexing.collect());
    for task in storing {
        task.await.unwrap();
    }
    for task in indexing {
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    demo.index_all().await;
    assert_eq!(sql.unindexed().await, [""; 0]);
    assert_eq!(index(&mut sql).await.len(), 4 * EXCHANGES);
}

#[test_case(Backend::sqlite().await; "sqlite")]
#[test_case(Backend::postgres().await; "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_messages_of_erased_session_are_not_indexed(backend: Backend) {
    let demo = Conversation::on(&backend).await;
    let mut sql = Sql::on(&backend).await;
    for _ in 0..20 {
        for text in ["plums", "pears", "apples"] {
            demo.say(&[text, text]).await;
        }
        sql.delay_indexing("1 = 1").await;
        demo.store.index_state().await.unwrap();
        let (indexed, erased) = tokio::join!(demo.store.index_batch(), demo.erase());
        indexed.unwrap();
        assert!(erased);
        assert_eq!(index(&mut sql).await, [""; 0]);
        // Nor those of a session with the same id.
        demo.say(&["pears"]).await;
        demo.index_all().await;
        assert_eq!(index(&mut sql).await.len(), 1);
        assert!(demo.erase().await);
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
        UPDATE sessions SET last_seq = 2 WHERE session_id = 'demo'",
    )
    .await;
    sql.delay_indexing("1 = 1").await;
    assert_eq!(demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await.len(), 2);
    assert_eq!(sql.unindexed().await, [""; 0]);
}

/// A role that does not own the index may flush it, too.
#[tokio::test]
async fn pending_list_of_the_gin_index_is_flushed() {
    let backend = Backend::postgres().await;
    let demo = Conversation::on(&backend).await;
    let found = async || seqs(&demo.lookup_terms(&SearchFilter::default(), &probe(&[&["plum"]]), 9).await);
    let mut owner = PgConnection::connect(&backend.url()).await.unwrap();
    let Sql::Postgres(mut nobody) = Sql::on(&backend).await else { unreachable!() };
    nobody.execute("SET ROLE pg_monitor").await.unwrap();
    let pages = async |connection: &mut PgConnection| -> i64 {
        sqlx::query_scalar("SELECT flush_search_index()").fetch_one(connection).await.unwrap()
    };
    demo.index_all().await;
    // These are indexed with the exchange.
    demo.say(&["plums", "pears"]).await;
    assert!(pages(&mut nobody).await > 0);
    assert_eq!(found().await, [1]);
    demo.say(&["plums"]).await;
    assert!(demo.store.flush_pending_list().await.unwrap() > 0);
    assert_eq!(demo.store.flush_pending_list().await.unwrap(), 0);
    assert_eq!(pages(&mut owner).await, 0);
    assert_eq!(found().await, [3, 1]);
}
